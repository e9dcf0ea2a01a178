"""Layers under other writers' names, in other shapes, with scales: the same bits, or named."""

import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import assert_near, assert_same_bits

import kda_jax
from kda_contracts import CHECKPOINT, BadFileError, ContractError, check_checkpoint
from kda_jax.tools.synthetic import write_safetensors

LOW_RANK, FULL_RANK, FLA, FULL_GATES, FULL_FORGET = CHECKPOINT
SIZES = {"H": 4, "HV": 4, "K": 8, "V": 8, "D": 24, "W": 3}
PREFIX = "model.layers.0.self_attn"
FORMAT = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float16": "F16"}
FORMAT |= {"float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "uint32": "U32", "int8": "I8"}
FORMAT |= {"uint8": "U8", "int32": "I32"}
LINEAR = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 3}
CONFIG = {"model_type": "kimi_linear", "hidden_size": 24, "rms_norm_eps": 1e-5}
CONFIG |= {"linear_attn_config": LINEAR | {"kda_layers": [1], "full_attn_layers": []}}


def layer_of(layout=LOW_RANK, sizes=SIZES, biased=False, seed=0):
    """{released name: values} of one layer; no two tensors are alike."""
    rng = np.random.default_rng(seed)
    return {
        tensor.name: 0.3 * rng.standard_normal(tensor.shape(sizes), np.float32)
        for tensor in layout.tensors
        if tensor.required or biased
    }


def put(folder, tensors, config=CONFIG, prefix=PREFIX, file="model.safetensors"):
    """Writes a checkpoint of one layer."""
    names = {name: f"{prefix}.{name}" if prefix else name for name in tensors}
    arrays = {names[name]: np.ascontiguousarray(x).reshape(x.shape) for name, x in tensors.items()}
    entries = {name: (FORMAT[x.dtype.name], x.shape) for name, x in arrays.items()}
    write_safetensors(folder / file, entries, arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def renamed(tensors, *pairs):
    result = {}
    for name, x in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        result[name] = x
    return result


def joined(tensors):
    """transformers' own modules: one convolution, and a forget gate of its own."""
    convolutions = [tensors.pop(f"{x}_conv1d.weight") for x in "qkv"]
    biases = [tensors.pop(f"{x}_conv1d.bias", None) for x in "qkv"]
    result = {"conv1d.weight": np.concatenate(convolutions)}
    if biases[0] is not None:
        result["conv1d.bias"] = np.concatenate(biases)
    for name, x in tensors.items():
        inside = name in ("A_log", "dt_bias") or name.startswith("f_")
        result[f"forget_gate.{name}" if inside else name] = x
    return result


def reshaped(tensors, *shape):
    """The convolutions in another shape: 0 stands for the channels, -1 for the taps."""
    sizes = {0: 32, -1: 3}
    return {
        name: x.reshape([sizes.get(n, n) for n in shape]) if "conv1d.weight" in name else x
        for name, x in tensors.items()
    }


def rates(tensors, *shape):
    return tensors | {"A_log": tensors["A_log"].reshape(shape)}


def padded(tensors):
    return tensors | {"A_log": np.append(tensors["A_log"], np.zeros(3, np.float32))}


# what a writer does to the released tensors, and under which prefix
WRITERS = {
    "transformers' modules": (joined, PREFIX),
    "no model": (dict, "layers.0.self_attn"),
    "inside a model": (dict, "model.language_model.layers.0.self_attn"),
    "torch.compile of the layer": (dict, "model.layers.0._orig_mod.self_attn"),
    "torch.compile of the model": (dict, "_orig_mod.model.layers.0.self_attn"),
    "DDP and FSDP": (dict, "module.model.layers.0._fsdp_wrapped_module.self_attn"),
    "activation checkpointing": (dict, "model.layers.0._checkpoint_wrapped_module.self_attn"),
    "a float32 holder": (
        lambda x: renamed(
            x, ("A_log", "_fp32_params.A_log"), ("q_conv1d.", "q_conv1d._fp32_params.")
        ),
        PREFIX,
    ),
    "Ling's block": (dict, "model.layers.0.attention"),
    "dense": (lambda x: renamed(x, ("o_proj", "dense")), "model.layers.0.attention"),
    "taps without an axis of 1": (lambda x: reshaped(x, 0, -1), PREFIX),
    "taps before an axis of 1": (lambda x: reshaped(x, 0, -1, 1), PREFIX),
    "axes of 1 in front": (lambda x: reshaped(x, 1, 0, 1, -1), PREFIX),
    "rates of four axes": (lambda x: rates(x, 1, 1, 4, 1), PREFIX),
    "rates of two axes": (lambda x: rates(x, 2, 2), PREFIX),
    "padded rates": (padded, PREFIX),
}
LAYOUTS = [(LOW_RANK, False), (FULL_RANK, True), (FLA, False), (FULL_GATES, True)]
LAYOUTS += [(FULL_FORGET, False)]


def assert_same_layer(one, other):
    for field, wanted in vars(other).items():
        got = getattr(one, field)
        assert (got is None) == (wanted is None), field
        if wanted is not None:
            assert_same_bits(got, wanted)


@pytest.mark.parametrize("writer", WRITERS)
def test_another_writers_layer_has_the_same_bits(tmp_path, writer):
    write, prefix = WRITERS[writer]
    (tmp_path / "released").mkdir()
    (tmp_path / "written").mkdir()
    for layout, biased in LAYOUTS:
        tensors = layer_of(layout, biased=biased)
        released = put(tmp_path / "released", tensors)
        written = put(tmp_path / "written", write(dict(tensors)), prefix=prefix)
        report = check_checkpoint(written)
        assert report.ok, str(report)
        for rank, ranks in ((0, 1), (3, 4)):
            config, wanted = kda_jax.load_layer(released, 0, rank=rank, ranks=ranks)
            same, got = kda_jax.load_layer(written, 0, rank=rank, ranks=ranks)
            assert_same_layer(got, wanted)
            assert same == config
        assert config.conv_bias == biased
        assert config.forget_rank == (None if layout in (FULL_GATES, FULL_FORGET) else 8)
        assert config.gate_rank == (None if layout in (FULL_RANK, FULL_GATES) else 8)


@pytest.mark.parametrize("layout", [FULL_GATES, FULL_FORGET], ids=lambda x: x.name)
def test_a_full_forget_gate_and_a_bias_are_the_layers(tmp_path, layout):
    """The fields hold what the names say, and the ranks' outputs sum to the whole's."""
    tensors = layer_of(layout, biased=True)
    folder = put(tmp_path, tensors)
    config, params = kda_jax.load_layer(folder, 0)
    assert params.f_down is None
    assert_same_bits(params.f_up, tensors["f_proj.weight"].T)
    for x in "qkv":
        assert_same_bits(getattr(params, f"{x}_conv_bias"), tensors[f"{x}_conv1d.bias"])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 24), np.float32))
    slots = jnp.arange(3)

    def step(params, ranks=1):
        cache = kda_jax.init_cache(config, 3, ranks=ranks, params=params)
        return kda_jax.kda_decode(params, x, cache, slots, config=config)[0]

    parts = [kda_jax.load_layer(folder, 0, rank=rank, ranks=2)[1] for rank in range(2)]
    assert_near(sum(step(part, 2) for part in parts), step(params), 1e-6)


def quantized(tensors):
    packed = {"q_proj.weight": np.zeros((32, 3), np.uint32)}
    ones = np.ones((32, 1), np.float32)
    return tensors | packed | {"q_proj.scales": ones, "q_proj.biases": ones}


def of_bits(tensors):
    eight = {"q_proj.weight": np.zeros((32, 24), np.int8), "q_proj.SCB": np.ones(32, np.float32)}
    return tensors | eight


def packed(tensors):
    weight = {"q_proj.qweight": np.zeros((3, 32), np.int32)}
    return {name: x for name, x in tensors.items() if name != "q_proj.weight"} | weight


MISSING = "layer 0 is a KDA layer by config.json, and has an unknown layout"
# what a writer does, the prefix, and what is said of it, once
NAMED = {
    "MLX's names": (
        lambda x: renamed(x, ("conv1d.", "conv.conv.")), PREFIX,
        "layer 0 has MLX's names: it holds k_conv.conv.weight",
    ),
    "joined projections": (
        lambda x: x | {"qkv_proj.weight": x["q_proj.weight"]}, PREFIX,
        "layer 0 has joined tensors of a server or of MLX: it holds qkv_proj.weight",
    ),
    "joined convolutions of a server": (
        lambda x: x | {"qkv_conv1d.weight": x["q_conv1d.weight"]}, PREFIX,
        "layer 0 has joined tensors of a server or of MLX: it holds qkv_conv1d.weight",
    ),
    "an adapter": (
        lambda x: renamed(x, ("_proj.w", "_proj.base_layer.w")), PREFIX,
        "layer 0 has an adapter that is not merged: it holds b_proj.base_layer.weight",
    ),
    "MLX's integers": (quantized, PREFIX, "layer 0 is quantized by MLX, as U32, which is not read"),
    "bitsandbytes": (
        of_bits, PREFIX, "layer 0 is quantized by bitsandbytes (8 bits), as I8, which is not read",
    ),
    "GPTQ": (packed, PREFIX, "layer 0 is quantized by GPTQ or AWQ, as I32, which is not read"),
    "Megatron's block": (dict, "decoder.layers.0.self_attention", MISSING),
    "another block": (dict, "model.layers.0.mixer", MISSING),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_what_is_not_read_is_named_once(tmp_path, case):
    write, prefix, message = NAMED[case]
    report = check_checkpoint(put(tmp_path, write(layer_of()), prefix=prefix))
    (fault,) = report.layers[0].faults
    assert fault.message == message
    assert fault.remedy
    assert "holds nothing" not in fault.remedy
    with pytest.raises(ContractError, match="layer 0"):
        kda_jax.load_layer(tmp_path, 0)


def test_rates_under_no_known_name_are_told(tmp_path):
    config = CONFIG | {"linear_attn_config": LINEAR}
    report = check_checkpoint(put(tmp_path, layer_of(), config, prefix="blocks.0.mixer"))
    assert report.faults[0].message == (
        "no KDA layer was found under a known name, but blocks.0.mixer.A_log, "
        "blocks.0.mixer.dt_bias"
    )


def faults_of(folder):
    return [fault.message for fault in check_checkpoint(folder).layers[0].faults]


def test_no_tensor_is_taken_for_another(tmp_path):
    tensors = layer_of()
    twice = tensors | {"forget_gate.A_log": tensors["A_log"] + 1}
    assert faults_of(put(tmp_path, twice)) == [
        f"`{PREFIX}.{PREFIX}.forget_gate.A_log` is no tensor of such a KDA layer"
    ]
    both = tensors | {"conv1d.weight": np.zeros((96, 1, 3), np.float32)}
    assert faults_of(put(tmp_path, both)) == [
        f"`{PREFIX}.conv1d.weight` is no tensor of such a KDA layer"
    ]
    short = joined(dict(tensors)) | {"conv1d.weight": np.zeros((95, 1, 3), np.float32)}
    assert f"`{PREFIX}.conv1d.weight` is no tensor of such a KDA layer" in faults_of(
        put(tmp_path, short)
    )


def test_taps_whose_axis_nothing_tells_are_refused(tmp_path):
    """With as many taps as channels, only the released shape says which axis is which."""
    sizes = {"H": 1, "HV": 1, "K": 3, "V": 3, "D": 24, "W": 3}
    config = CONFIG | {"linear_attn_config": LINEAR | dict(num_heads=1, head_dim=3)}
    tensors = layer_of(sizes=sizes)
    assert check_checkpoint(put(tmp_path, tensors, config)).ok
    flat = {name: x.reshape(3, 3) if "conv1d" in name else x for name, x in tensors.items()}
    assert len(faults_of(put(tmp_path, flat, config))) == 3


def test_biases_are_all_there_or_none(tmp_path):
    tensors = layer_of(biased=True)
    del tensors["k_conv1d.bias"]
    assert faults_of(put(tmp_path, tensors)) == [f"`{PREFIX}.k_conv1d.bias` is missing"]
    said = CONFIG | dict(conv_bias=True)
    assert len(faults_of(put(tmp_path, layer_of(), said))) == 3
    denied = CONFIG | dict(conv_bias=False)
    (first, *_) = faults_of(put(tmp_path, layer_of(biased=True), denied))
    assert first == f"`{PREFIX}.q_conv1d.bias` is there, and config.json says conv_bias is false"


def test_layers_of_two_layouts_are_loaded_one_by_one(tmp_path):
    tensors = {f"layers.0.self_attn.{name}": x for name, x in layer_of().items()}
    tensors |= {f"layers.1.self_attn.{name}": x for name, x in layer_of(FULL_RANK).items()}
    put(tmp_path, tensors, CONFIG | {"linear_attn_config": LINEAR}, prefix="")
    with pytest.raises(ContractError, match="load them one by one"):
        kda_jax.load_layers(tmp_path)
    both = [layer_of(biased=n == 0) for n in range(2)]
    biased = {f"layers.{n}.self_attn.{name}": x for n in range(2) for name, x in both[n].items()}
    (tmp_path / "biased").mkdir()
    put(tmp_path / "biased", biased, CONFIG | {"linear_attn_config": LINEAR}, prefix="")
    with pytest.raises(ContractError, match="layers 0 and 1 have other layouts or biases"):
        kda_jax.load_layers(tmp_path / "biased")
    assert [kda_jax.load_layer(tmp_path, n)[0].gate_rank for n in (0, 1)] == [8, None]


def test_lings_last_group_may_be_either(tmp_path):
    """A group that is not whole is KDA's to some readers, and MLA's to others."""
    tensors = layer_of(FULL_GATES)
    config = dict(hidden_size=24, num_attention_heads=4, head_dim=8, short_conv_kernel_size=3)
    config |= dict(kda_safe_gate=True, kda_lower_bound=-5.0, layer_group_size=4)
    put(tmp_path, tensors, config | dict(num_hidden_layers=6), prefix="model.layers.4.attention")
    assert check_checkpoint(tmp_path).ok
    put(tmp_path, tensors, config | dict(num_hidden_layers=6), prefix="model.layers.3.attention")
    assert faults_of(tmp_path) == [
        "layer 3 is no KDA layer by config.json, but holds A_log or dt_bias"
    ]


def test_rates_in_another_order_are_refused(tmp_path):
    tensors = layer_of()
    put(tmp_path, tensors | dict(dt_bias=tensors["dt_bias"].reshape(4, 1, 8)))
    assert check_checkpoint(tmp_path).ok
    put(tmp_path, tensors | dict(dt_bias=tensors["dt_bias"].reshape(8, 4)))
    (fault,) = check_checkpoint(tmp_path).layers[0].faults
    assert fault.remedy.endswith("the key channels come first: transpose it to [HV, K]")
    one = {"H": 1, "HV": 1, "K": 8, "V": 8, "D": 24, "W": 3}
    config = CONFIG | {"linear_attn_config": LINEAR | dict(num_heads=1)}
    put(tmp_path, layer_of(sizes=one) | dict(A_log=np.float32(1.0).reshape(())), config)
    assert faults_of(tmp_path) == [f"`{PREFIX}.A_log` must be (1,)"]


# --- which file, which path


@pytest.mark.parametrize("names", ["model-0000{}-of-000002", "model-0000{}-of-00002", "m-{}-of-2"])
def test_numbered_files_are_the_model_where_the_index_is_too_large(tmp_path, names):
    tensors = layer_of()
    (tmp_path / "whole").mkdir()
    wanted = kda_jax.load_layer(put(tmp_path / "whole", tensors), 0)[1]
    for n in (1, 2):
        part = dict(list(tensors.items())[n - 1 :: 2])
        put(tmp_path, part, file=f"{names.format(n)}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map={})).ljust(12_000_001))
    assert_same_layer(kda_jax.load_layer(tmp_path, 0)[1], wanted)
    file = tmp_path / f"{names.format(2)}.safetensors"
    with pytest.raises(BadFileError, match="this is one of 2 files: give the folder"):
        check_checkpoint(file)
    put(tmp_path, tensors, file=f"another-{file.name}")
    put(tmp_path, tensors, file=f"another-{names.format(1)}.safetensors")
    with pytest.raises(BadFileError, match="2 whole sets of files"):
        check_checkpoint(tmp_path)
    file.unlink()
    (tmp_path / f"another-{file.name}").unlink()
    with pytest.raises(BadFileError, match="no whole sets of files"):
        check_checkpoint(tmp_path)


def test_an_index_that_is_a_broken_link_is_one_line(tmp_path):
    put(tmp_path, layer_of(), file="a.safetensors")
    (tmp_path / "model.safetensors.index.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadFileError, match="No such file or directory"):
        check_checkpoint(tmp_path)


def test_the_model_beside_other_files(tmp_path, monkeypatch):
    put(tmp_path, layer_of())
    wanted = kda_jax.load_layer(tmp_path, 0)[1]
    for other in ("adapter_model", "consolidated", "training_args"):
        put(tmp_path, layer_of(seed=1), file=f"{other}.safetensors")
    assert_same_layer(kda_jax.load_layer(tmp_path, 0)[1], wanted)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert_same_layer(kda_jax.load_layer(f"~/{tmp_path.name}", 0)[1], wanted)


def test_a_hubs_name_is_no_folder():
    for path in ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "inclusionAI/Ling-3.0-tiny"):
        with pytest.raises(BadFileError, match="download it first, and give its folder"):
            check_checkpoint(path)
    with pytest.raises(BadFileError) as caught:
        check_checkpoint("/no/such/folder")
    assert str(caught.value) == "/no/such/folder: no such file or folder"


@pytest.mark.parametrize("path", [None, b"folder", 3, ["folder"]], ids=repr)
def test_a_path_is_a_path(path):
    for read in (check_checkpoint, kda_jax.check_values, lambda x: kda_jax.load_layer(x, 0)):
        with pytest.raises(ContractError, match="`path` must be a str or a path"):
            read(path)


WRONG = {
    "layer": [None, "2", 2.0, True, [2]],
    "ranks": [2.0, "2", None, True],
    "rank": [0.5, "0", None, False],
}


@pytest.mark.parametrize(("name", "value"), [(name, x) for name in WRONG for x in WRONG[name]])
def test_numbers_of_a_call_are_whole(tmp_path, name, value):
    put(tmp_path, layer_of())
    with pytest.raises(ContractError, match=f"`{name}` must be a whole number"):
        kda_jax.load_layer(tmp_path, **dict(layer=0, rank=0, ranks=1) | {name: value})


@pytest.mark.parametrize("when", ["before it is opened", "while it is read"])
def test_a_file_that_changes_is_refused(tmp_path, monkeypatch, when):
    from kda_jax import checkpoint

    put(tmp_path, layer_of())
    path = tmp_path / "model.safetensors"

    def exchange():
        put(tmp_path, layer_of(FULL_RANK, seed=1), file="other.safetensors")
        os.replace(tmp_path / "other.safetensors", path)

    name = "survey" if when == "before it is opened" else "_read_layer"
    original = getattr(checkpoint, name)

    def then_exchanged(*arguments):
        result = original(*arguments)
        exchange()
        return result

    monkeypatch.setattr(checkpoint, name, then_exchanged)
    with pytest.raises(BadFileError, match="changed since it was checked") as caught:
        kda_jax.load_layer(tmp_path, 0)
    assert str(caught.value).startswith(str(path))


# --- FP8

PROJECTIONS = ("q_proj.weight", "v_proj.weight", "f_b_proj.weight", "o_proj.weight")
WIDE = {"H": 2, "HV": 2, "K": 96, "V": 96, "D": 200, "W": 3}
FP8_CONFIG = CONFIG | {"hidden_size": 200}
FP8_CONFIG |= {"linear_attn_config": LINEAR | dict(num_heads=2, head_dim=96)}


def scaled(x, scales, form, block, name):
    """{names: FP8 weight and its scales} and NumPy's expansion in float32."""
    rng, (rows, columns) = np.random.default_rng(len(name)), x.shape
    weight = (4 * x).astype(scales["weight"])
    grid = {
        "block": (-(-rows // block[0]), -(-columns // block[1])),
        "block of four axes": (-(-rows // block[0]), -(-columns // block[1])),
        "channel": (rows, 1),
        "channel of one axis": (rows, 1),
        "tensor": (1, 1),
        "scalar": (1, 1),
    }[form]
    # Powers of two where the scale's dtype holds nothing else.
    powers = np.exp2(rng.integers(-4, 3, grid))
    drawn = powers if scales["scale"] == "E8M0" else rng.uniform(0.1, 2, grid)
    dtype = {"E8M0": ml_dtypes.float8_e8m0fnu}.get(scales["scale"], scales["scale"])
    scale = drawn.astype(np.float32).astype(dtype)
    each = (-(-rows // grid[0]), -(-columns // grid[1]))
    if form.startswith("block"):
        each = block
    whole = np.repeat(np.repeat(scale.astype(np.float32), each[0], 0), each[1], 1)
    expanded = weight.astype(np.float32) * whole[:rows, :columns]
    shape = {
        "block of four axes": (grid[0], 1, grid[1], 1),
        "channel of one axis": (rows,),
        "scalar": (),
    }.get(form, grid)
    return {name: weight, f"{name}{scales['suffix']}": scale.reshape(shape)}, expanded


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FP8 = {
    "blocks of 128": ("block", (128, 128), E4M3, np.float32, "_scale_inv"),
    "blocks that a cut splits": ("block", (40, 56), E4M3, np.float32, "_scale_inv"),
    "blocks of four axes": ("block of four axes", (128, 128), E4M3, np.float32, "_scale"),
    "scales in bfloat16": ("block", (128, 128), E4M3, ml_dtypes.bfloat16, "_scale_inv"),
    "scales that are powers of two": ("block", (128, 128), E4M3, "E8M0", "_scale_inv"),
    "channels": ("channel", None, E4M3, np.float32, "_scale"),
    "channels of one axis": ("channel of one axis", None, E5M2, np.float32, "_scale"),
    "a tensor": ("tensor", None, E4M3, np.float32, "_scale"),
    "a scalar": ("scalar", None, E5M2, np.float16, "_scale"),
}


def fp8_folder(tmp_path, case):
    """A layer with some projections in FP8, and what they expand to."""
    form, block, weight, scale, suffix = FP8[case]
    config = FP8_CONFIG
    if block and block != (128, 128):
        config = config | {"quantization_config": {"weight_block_size": list(block)}}
    tensors, expanded = layer_of(sizes=WIDE), {}
    for name in PROJECTIONS:
        scales = dict(weight=weight, scale=scale, suffix=suffix)
        stored, expanded[name] = scaled(tensors[name], scales, form, block or (1, 1), name)
        tensors |= stored
    tensors["q_proj.input_scale"] = np.ones((), np.float32)
    return put(tmp_path, tensors, config), expanded


@pytest.mark.parametrize("case", FP8)
def test_fp8_weights_are_numpys_expansion(tmp_path, case):
    folder, expanded = fp8_folder(tmp_path, case)
    report = check_checkpoint(folder)
    assert report.ok, str(report)
    assert report.layers[0].notes[-1].startswith("4 weights with scales (")
    fields = dict(zip(PROJECTIONS, ("q_proj", "v_proj", "f_up", "o_proj"), strict=True))
    for dtype in (None, "float32", "bfloat16", "float16"):
        for ranks in (1, 2):
            for rank in range(ranks):
                _, params = kda_jax.load_layer(folder, 0, rank=rank, ranks=ranks, dtype=dtype)
                for name, field in fields.items():
                    wanted = expanded[name].astype(jnp.dtype(dtype or "bfloat16"))
                    axis = 1 if name == "o_proj.weight" else 0
                    wanted = np.split(wanted, ranks, axis)[rank]
                    assert_same_bits(getattr(params, field), wanted.T)
                assert params.A_log.dtype == np.float32


def test_fp8_weights_as_four_ranks(tmp_path):
    sizes = WIDE | {"H": 4, "HV": 4, "K": 48, "V": 48}
    config = FP8_CONFIG | {"linear_attn_config": LINEAR | dict(num_heads=4, head_dim=48)}
    tensors, expanded = layer_of(sizes=sizes), {}
    for name in PROJECTIONS:
        scales = dict(weight=E4M3, scale=np.float32, suffix="_scale_inv")
        stored, expanded[name] = scaled(tensors[name], scales, "block", (128, 128), name)
        tensors |= stored
    folder = put(tmp_path, tensors, config)
    for rank in range(4):
        _, params = kda_jax.load_layer(folder, 0, rank=rank, ranks=4, dtype="float32")
        for name, field in (("q_proj.weight", "q_proj"), ("o_proj.weight", "o_proj")):
            axis = 1 if name == "o_proj.weight" else 0
            assert_same_bits(getattr(params, field), np.split(expanded[name], 4, axis)[rank].T)


def test_values_of_fp8_weights_are_judged(tmp_path):
    folder, _ = fp8_folder(tmp_path, "blocks of 128")
    assert kda_jax.check_values(folder, every=True, progress=False).ok
    tensors = layer_of(sizes=WIDE)
    scales = dict(weight=E4M3, scale=np.float32, suffix="_scale_inv")
    stored, _ = scaled(tensors["q_proj.weight"], scales, "block", (128, 128), "q_proj.weight")
    stored["q_proj.weight_scale_inv"][1, 0] = np.inf
    put(tmp_path, tensors | stored, FP8_CONFIG)
    report = kda_jax.check_values(tmp_path, every=True, progress=False)
    (fault,) = report.layers[0].faults
    assert "q_proj.weight` must be finite" in fault.message


@pytest.mark.parametrize("source", ["float32", "FP8"])
def test_what_float16_does_not_hold_is_refused(tmp_path, source):
    tensors = layer_of(sizes=WIDE)
    if source == "FP8":
        tensors["q_proj.weight"] = np.full((192, 200), 448, E4M3)
        tensors["q_proj.weight_scale"] = np.full((), 1000, np.float32)
    else:
        tensors["q_proj.weight"] = np.full((192, 200), 1e5, np.float32)
    put(tmp_path, tensors, FP8_CONFIG)
    with pytest.raises(ContractError, match=r"q_proj.weight: values beyond float16's 65504"):
        kda_jax.load_layer(tmp_path, 0, dtype="float16")
    assert np.isfinite(
        np.asarray(kda_jax.load_layer(tmp_path, 0, dtype="bfloat16")[1].q_proj)
    ).all()


SCALED_WRONG = {
    "two scales": (
        {"q_proj.weight_scale_inv": np.ones((2, 2), np.float32),
         "q_proj.weight_scale": np.ones((2, 2), np.float32)},
        "has a `weight_scale_inv` and a `weight_scale` beside it: which one counts?",
    ),
    "without scales": ({}, "has no `weight_scale_inv` and no `weight_scale` beside it"),
    "scales of no known blocks": (
        {"q_proj.weight_scale_inv": np.ones((3, 7), np.float32)},
        "is (192, 200) F8_E4M3, and its scales are (3, 7) float32: no known blocks",
    ),
    "scales that are integers": (
        {"q_proj.weight_scale_inv": np.ones((2, 2), np.int32)}, "has scales of I32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALED_WRONG)
def test_scales_that_do_not_fit_are_named(tmp_path, case):
    scales, message = SCALED_WRONG[case]
    tensors = layer_of(sizes=WIDE)
    tensors["q_proj.weight"] = tensors["q_proj.weight"].astype(E4M3)
    put(tmp_path, tensors | scales, FP8_CONFIG)
    assert faults_of(tmp_path) == [f"`{PREFIX}.q_proj.weight` {message}"]


@pytest.mark.parametrize("method", ["gptq", "modelopt", "mxfp4"])
def test_another_quantization_is_refused_by_its_name(tmp_path, method):
    config = CONFIG | {"quantization_config": {"quant_method": method}}
    assert faults_of(put(tmp_path, of_bits(layer_of()), config)) == [
        f"layer 0 is quantized by {method}, as I8, which is not read"
    ]
    assert check_checkpoint(put(tmp_path, layer_of(), config)).ok  # another layer's business
    assert jax.tree.leaves(kda_jax.load_layer(tmp_path, 0)[1])
