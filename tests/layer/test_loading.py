"""Layers loaded from released layouts: whole and by ranks, bit for bit; faults are named.

A rank reads its own part alone.
"""

import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from support import assert_near, assert_same_bits

import kda_jax
from kda_contracts import CHECKPOINT, BadFileError, ContractError
from kda_jax import checkpoint, stored
from kda_jax.tools import cli
from kda_jax.tools.synthetic import write_safetensors

LOW_RANK, FULL_RANK, FLA, FULL_GATES, FULL_FORGET = CHECKPOINT
KIMI = {"H": 32, "HV": 32, "K": 128, "V": 128, "D": 2304, "W": 4}
K3 = KIMI | {"H": 96, "HV": 96, "D": 7168}
SMALL = {"H": 4, "HV": 4, "K": 8, "V": 8, "D": 24, "W": 4}
SMALL_FLA = {"H": 2, "HV": 4, "K": 16, "V": 8, "D": 24, "W": 4}
FORMAT = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
RATES = ("A_log", "dt_bias")

# A second entry beside the loader's own: which tensor a field comes from, and the field's axis that
# is cut.
SOURCES = {f"{x}_proj": f"{x}_proj.weight" for x in "qkvbo"} | {
    f"{x}_conv": f"{x}_conv1d.weight" for x in "qkv"
}
SOURCES |= {"A_log": "A_log", "dt_bias": "dt_bias", "norm": "o_norm.weight"}
RELEASED = {"f_down": "f_a_proj.weight", "f_up": "f_b_proj.weight"}
GATES = {
    LOW_RANK.name: RELEASED | {"g_down": "g_a_proj.weight", "g_up": "g_b_proj.weight"},
    FULL_RANK.name: RELEASED | {"g_up": "g_proj.weight"},
    FLA.name: {
        "f_down": "f_proj.0.weight",
        "f_up": "f_proj.1.weight",
        "g_down": "g_proj.0.weight",
        "g_up": "g_proj.1.weight",
        "g_bias": "g_proj.1.bias",
    },
}
CUT = dict.fromkeys(("q_proj", "k_proj", "v_proj", "f_up", "b_proj", "g_up"), 1)
CUT |= dict.fromkeys(("q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "g_bias", "o_proj"), 0)


def values(name, shape, dtype):
    """Finite random values that the tensor's name alone decides, a block repeated if it is long."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    size = math.prod(shape)
    block = min(size, 2**20 + 7)  # a prime: no two rows are alike
    if dtype == "bfloat16":
        bits = rng.integers(0, 2**16, block, np.uint16) & 0xBFFF  # below 2
        return np.resize(bits, size).view(jnp.bfloat16).reshape(shape)
    return np.resize(rng.standard_normal(block, np.float32), size).astype(dtype).reshape(shape)


def dtype_of(tensor, dtype):
    return "float32" if tensor.name in RATES else dtype


def write(
    folder,
    layout,
    sizes,
    *,
    prefixes=("model.layers.0.self_attn",),
    dtype="bfloat16",
    A_log_shape=None,
    files=1,
    **new,
):
    """A checkpoint whose tensors hold their `values`.

    `new` replaces the first layer's, or removes them (None).
    """
    arrays = {
        f"{prefix}.{tensor.name}": values(
            f"{prefix}.{tensor.name}", tensor.shape(sizes), dtype_of(tensor, dtype)
        )
        for prefix in prefixes
        for tensor in layout.tensors
        if tensor.required
    }
    if A_log_shape:
        for prefix in prefixes:
            padded = np.zeros(math.prod(A_log_shape), np.float32)
            padded[: sizes["HV"]] = arrays[f"{prefix}.A_log"]
            arrays[f"{prefix}.A_log"] = padded.reshape(A_log_shape)
    for name, array in new.items():
        arrays[f"{prefixes[0]}.{name.replace('__', '.')}"] = array
    arrays = {name: array for name, array in arrays.items() if array is not None}
    shards = (
        [f"model-{i}.safetensors" for i in range(files)] if files > 1 else ["model.safetensors"]
    )
    weight_map = {name: shards[i % files] for i, name in enumerate(sorted(arrays))}
    for shard in shards:
        held = {name: array for name, array in arrays.items() if weight_map[name] == shard}
        entries = {name: (FORMAT[array.dtype.name], array.shape) for name, array in held.items()}
        write_safetensors(folder / shard, entries, held)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(
        json.dumps(fla_config(sizes) if layout is FLA else released_config(sizes))
    )
    return folder


def released_config(sizes):
    linear = {"num_heads": sizes["H"], "head_dim": sizes["K"], "short_conv_kernel_size": sizes["W"]}
    return {"hidden_size": sizes["D"], "rms_norm_eps": 1e-6, "linear_attn_config": linear}


def fla_config(sizes):
    config = {
        "model_type": "kda",
        "hidden_size": sizes["D"],
        "num_heads": sizes["H"],
        "num_v_heads": sizes["HV"],
    }
    return config | {
        "head_dim": sizes["K"],
        "expand_v": sizes["V"] / sizes["K"],
        "conv_size": sizes["W"],
    }


def expected(field, layout, sizes, prefix="model.layers.0.self_attn", dtype="bfloat16"):
    """What the whole layer's field must be, from the values that were written."""
    name = (SOURCES | GATES[layout.name])[field]
    (tensor,) = (x for x in layout.tensors if x.name == name)
    x = values(f"{prefix}.{name}", tensor.shape(sizes), dtype_of(tensor, dtype))
    if x.ndim == 3:
        return x[:, 0]
    return x.T if x.ndim == 2 else x


def same(got, wanted):
    """Whether two arrays have the same shape, dtype and bits; without a copy of a large one."""
    got, bits = np.asarray(got), f"u{wanted.itemsize}"
    return (
        got.dtype == wanted.dtype
        and got.shape == wanted.shape
        and (got.view(bits) == wanted.view(bits)).all()
    )


def assert_is_layer(params, rank, ranks, layout, sizes, **source):
    """The params are the rank's share of what was written, and nothing else."""
    fields = SOURCES | GATES[layout.name]
    assert {name for name, x in vars(params).items() if x is not None} == fields.keys()
    for field in fields:
        wanted = expected(field, layout, sizes, **source)
        if field in CUT:
            width = wanted.shape[CUT[field]] // ranks
            wanted = np.moveaxis(wanted, CUT[field], 0)[rank * width : (rank + 1) * width]
            wanted = np.moveaxis(wanted, 0, CUT[field])
        assert same(getattr(params, field), wanted), field


class Spy:
    """safe_open, counting the bytes that it hands out."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        original = safetensors.safe_open

        @contextlib.contextmanager
        def safe_open(*arguments, **options):
            with original(*arguments, **options) as file:
                yield SpiedFile(file, self)

        monkeypatch.setattr(safetensors, "safe_open", safe_open)

    def take(self, array):
        self.bytes += array.nbytes
        return array


class SpiedFile:
    def __init__(self, file, spy):
        self.file, self.spy = file, spy

    def get_slice(self, name):
        return SpiedSlice(self.file.get_slice(name), self.spy)


class SpiedSlice:
    def __init__(self, x, spy):
        self.x, self.spy = x, spy

    def __getitem__(self, index):
        return self.spy.take(self.x[index])

    def get_shape(self):
        return self.x.get_shape()


PREFIXES = ("model.layers.0.self_attn", "model.layers.4.self_attn")


PREFIXES = ("model.layers.0.self_attn", "model.layers.4.self_attn")


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """Two layers of Kimi-Linear in their real size, over two files."""
    folder = tmp_path_factory.mktemp("kimi")
    yield write(folder, LOW_RANK, KIMI, prefixes=PREFIXES, A_log_shape=(1, 1, 32, 1), files=2)
    shutil.rmtree(folder)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_kimi_linear_whole_and_by_ranks(kimi, ranks):
    for rank in range(ranks):
        config, layers = kda_jax.load_layers(kimi, rank=rank, ranks=ranks)
        assert config == kda_jax.KDAConfig(
            D=2304, H=32, HV=32, K=128, V=128, W=4, norm_eps=1e-6, gate_rank=128
        )
        assert list(layers) == [0, 4]
        for params, prefix in zip(layers.values(), PREFIXES, strict=True):
            assert_is_layer(params, rank, ranks, LOW_RANK, KIMI, prefix=prefix)


@pytest.mark.long
@pytest.mark.slow
def test_kimi_k3_whole_and_by_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k3")
    prefix = "language_model.model.layers.0.self_attn"
    write(folder, FULL_RANK, K3, prefixes=(prefix,), A_log_shape=(128,))
    config, whole = kda_jax.load_layer(folder, 0)
    assert (config.HV, config.gate_rank) == (96, None)
    assert_is_layer(whole, 0, 1, FULL_RANK, K3, prefix=prefix)
    for rank in range(8):
        _, params = kda_jax.load_layer(folder, 0, rank=rank, ranks=8)
        for field, axis in CUT.items():
            if (x := getattr(whole, field)) is not None:
                assert same(getattr(params, field), np.split(np.asarray(x), 8, axis)[rank]), field
        assert params.g_down is None and same(params.norm, np.asarray(whole.norm))
    shutil.rmtree(folder)


def test_a_rank_reads_its_own_part(kimi, monkeypatch):
    spy = Spy(monkeypatch)
    _, params = kda_jax.load_layer(kimi, 4, rank=3, ranks=8)
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    rates = sum(getattr(params, name).nbytes for name in RATES)
    assert spy.bytes == held + 7 * rates  # those are read whole, 16 KiB


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", jnp.float16, np.dtype("float32")])
def test_dtypes(tmp_path, source, dtype):
    folder = write(tmp_path, LOW_RANK, SMALL, dtype=source)
    _, params = kda_jax.load_layer(folder / "model.safetensors", 0, rank=1, ranks=2, dtype=dtype)
    if dtype is None:
        assert_is_layer(params, 1, 2, LOW_RANK, SMALL, dtype=source)
    for field, x in vars(params).items():
        wanted = "float32" if field in RATES else jnp.dtype(dtype or source).name
        assert x is None or x.dtype.name == wanted, field
    half = expected("o_proj", LOW_RANK, SMALL, dtype=source)[16:]
    assert_same_bits(params.o_proj, half.astype(dtype or source))


def test_rates_in_another_dtype_and_shape_become_float32(tmp_path):
    A_log, dt_bias = values("x", (4,), "bfloat16"), values("y", (4, 8), "float16")
    folder = write(tmp_path, LOW_RANK, SMALL, A_log=A_log, dt_bias=dt_bias)
    _, params = kda_jax.load_layer(folder, 0, rank=1, ranks=2, dtype="bfloat16")
    assert_same_bits(params.A_log, A_log[2:].astype(np.float32))
    assert_same_bits(params.dt_bias, dt_bias[2:].astype(np.float32).reshape(-1))


def test_flas_layer_and_the_sum_over_its_ranks(tmp_path):
    # More value heads than key heads, V != K, and a bias: a cut on a wrong axis or a wrong head
    # would show.
    folder = write(tmp_path, FLA, SMALL_FLA, prefixes=("model.layers.7.attn",), dtype="float32")
    config, whole = kda_jax.load_layer(folder, 7)
    assert_is_layer(whole, 0, 1, FLA, SMALL_FLA, prefix="model.layers.7.attn", dtype="float32")
    assert (config.H, config.HV, config.K, config.V, config.gate_rank) == (2, 4, 16, 8, 8)
    x, slots = values("x", (3, 24), "float32"), np.array([1, -1, 0])

    def decode(params, ranks):
        cache = jax.tree.map(
            lambda y: jnp.ones((y.shape[0], y.shape[1] // ranks, *y.shape[2:])),
            kda_jax.init_cache(config, 2, conv_dtype=jnp.float32),
        )
        return kda_jax.kda_decode(
            params, jnp.asarray(x), cache, slots, config=config, implementation="xla"
        )[0]

    parts = [kda_jax.load_layer(folder, 7, rank=rank, ranks=2)[1] for rank in range(2)]
    for rank, params in enumerate(parts):
        assert_is_layer(
            params, rank, 2, FLA, SMALL_FLA, prefix="model.layers.7.attn", dtype="float32"
        )
    assert_near(sum(decode(params, 2) for params in parts), decode(whole, 1), 2e-6)


def test_every_tensor_of_every_layout_has_a_field():
    assert checkpoint.FIELDS.keys() == {
        tensor.name for layout in CHECKPOINT for tensor in layout.tensors
    }
    for layout in CHECKPOINT:
        fields = [checkpoint.FIELDS[tensor.name][0] for tensor in layout.tensors]
        assert len(set(fields)) == len(fields)


PREFIX = "model.layers.0.self_attn"
# what is replaced -> what the error says
FAULTY = {
    "missing": (
        dict(b_proj__weight=None),
        rf"`{PREFIX}.b_proj.weight` is missing\.\n +expected \[HV, D\] = \(4, 24\)",
    ),
    "wrong shape": (
        dict(q_proj__weight=np.zeros((24, 32), jnp.bfloat16)),
        rf"`{PREFIX}.q_proj.weight` must be \(32, 24\)\.\n.*transposed: take .T",
    ),
    "float64": (
        dict(k_proj__weight=np.zeros((32, 24))),
        r"must be float32, bfloat16 or float16 \(got float64\)\.\n +round it to float32 first",
    ),
    "a tail that is not zero": (
        dict(A_log=np.arange(8, dtype=np.float32)),
        rf"^{PREFIX}.A_log: `A_log` has 8 elements for HV=4, and its tail is not zero: "
        r"A_log\[4\] is 4.0",
    ),
    "unknown layout": (dict(g_a_proj__weight=None), "unknown layout"),
}


@pytest.mark.parametrize("case", FAULTY)
def test_a_faulty_layer_is_one_clear_error(tmp_path, case):
    new, message = FAULTY[case]
    folder = write(tmp_path, LOW_RANK, SMALL, prefixes=PREFIXES, **new)
    with pytest.raises(ContractError, match=message):
        kda_jax.load_layer(folder, 0)
    with pytest.raises(ContractError, match=message):
        kda_jax.load_layers(folder)
    kda_jax.load_layer(folder, 4)  # whose own tensors are right


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (7, {}, "layer 7 is not a KDA layer; the KDA layers are 0, 4$"),
        (0, dict(ranks=3), r"4 heads cannot be split over 3 ranks\.\n +it can be 1, 2, 4$"),
        (0, dict(ranks=0), "cannot be split over 0 ranks"),
        (0, dict(rank=2, ranks=2), r"^`rank` must be 0 to 1 \(got 2\)$"),
        (0, dict(rank=-1), r"^`rank` must be 0 to 0 \(got -1\)$"),
        (
            0,
            dict(dtype="float64"),
            r"^`dtype` must be float32, bfloat16 or float16 \(got float64\)$",
        ),
    ],
)
def test_wrong_arguments(tmp_path, layer, options, message):
    folder = write(tmp_path, LOW_RANK, SMALL, prefixes=PREFIXES)
    with pytest.raises(ContractError, match=message):
        kda_jax.load_layer(folder, layer, **options)


def test_two_layers_of_one_number(tmp_path):
    folder = write(tmp_path, LOW_RANK, SMALL, prefixes=(PREFIX, "\nmtp.layers.0.self_attn"))
    with pytest.raises(ContractError, match=r"two layers have the number 0: model.* and \\nmtp"):
        kda_jax.load_layer(folder, 0)


def test_no_layer_and_no_file(tmp_path):
    with pytest.raises(BadFileError, match="no such file or folder"):
        kda_jax.load_layer(tmp_path / "nothing", 0)
    folder = write(tmp_path, LOW_RANK, SMALL, A_log=None, dt_bias=None)
    with pytest.raises(ContractError, match="no KDA layer was found"):
        kda_jax.load_layers(folder)


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    folder = write(tmp_path, LOW_RANK, SMALL)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for read in (kda_jax.load_layers, kda_jax.check_values):
        with pytest.raises(ImportError, match=r"extra `checkpoint`"):
            read(folder)


def test_what_safetensors_refuses_cannot_be_read(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, LOW_RANK, SMALL)

    def refuse(*_, **__):
        raise safetensors.SafetensorError("no luck")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    with pytest.raises(BadFileError, match="safetensors cannot read it: no luck"):
        kda_jax.load_layers(folder)
    assert cli.main(["check", str(folder), "--values"]) == 2
    assert capsys.readouterr().err.endswith("no luck\n")
    assert cli.main(["check", str(folder), "--values", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"].endswith("no luck")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_only_a_terminal_shows_progress(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, LOW_RANK, SMALL, prefixes=PREFIXES)
    kda_jax.load_layers(folder)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", Terminal())
    kda_jax.load_layers(folder, progress=False)
    assert not sys.stderr.getvalue()
    assert list(kda_jax.load_layers(folder)[1]) == [0, 4]
    assert "loading KDA layers" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(kda_jax.load_layers(folder)[1]) == [0, 4]
    assert not sys.stderr.getvalue()


def poisoned(name, shape, dtype, *places):
    """The values of a tensor, with (index, value) in place of some."""
    x = values(name, shape, dtype).copy()
    for index, value in places:
        x[index] = value
    return x


# what is replaced -> (whether every value has to be read for it, the line of the report)
BAD_VALUES = {
    "a NaN rate": (
        dict(A_log=poisoned("x", (4,), "float32", (1, np.nan))),
        False,
        f"`{PREFIX}.A_log` must be finite or -inf (got nan at [1], 1 value of 4).",
    ),
    "an infinite rate": (
        dict(A_log=poisoned("x", (1, 1, 4, 1), "bfloat16", ((0, 0, 2, 0), np.inf))),
        False,
        f"`{PREFIX}.A_log` must be finite or -inf (got inf at [2], 1 value of 4).",
    ),
    "a tail": (
        dict(A_log=poisoned("x", (8,), "float32", (slice(4, None), 0), (6, np.nan))),
        False,
        f"`{PREFIX}.A_log` has 8 elements for HV=4, and its tail is not zero: A_log[6] is nan.",
    ),
    "an infinite bias": (
        dict(dt_bias=poisoned("x", (4, 8), "float32", ((1, 2), -np.inf), ((3, 0), np.nan))),
        False,
        f"`{PREFIX}.dt_bias` must be finite (got -inf at [10], 2 values of 32).",
    ),
    "a NaN weight": (
        dict(
            o_proj__weight=poisoned(
                "x", (24, 32), "bfloat16", ((17, 3), np.nan), ((20, 0), -np.inf)
            )
        ),
        True,
        f"`{PREFIX}.o_proj.weight` must be finite (got nan at [17, 3], 2 values of 768).",
    ),
    "an infinite kernel": (
        dict(q_conv1d__weight=poisoned("x", (32, 1, 4), "float16", ((31, 0, 3), np.inf))),
        True,
        f"`{PREFIX}.q_conv1d.weight` must be finite (got inf at [31, 0, 3], 1 value of 128).",
    ),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values_are_faults(tmp_path, monkeypatch, capsys, case):
    new, every, line = BAD_VALUES[case]
    monkeypatch.setattr(stored, "BLOCK", 100)  # several blocks of each
    folder = write(tmp_path, LOW_RANK, SMALL, prefixes=PREFIXES, **new)
    found = [x.message for x in kda_jax.check_values(folder).layers[0].faults]
    assert found == [] if every else [line.removesuffix(".")]
    assert cli.main(["check", str(folder)]) == 0
    assert f"  {line}\n" not in capsys.readouterr().out
    assert cli.main(["check", str(folder), "--values"]) == 1
    out = capsys.readouterr().out
    assert f"  {line}\n" in out
    assert "layer 0    1 wrong" in out and "layer 4    ok" in out
    assert cli.main(["check", str(folder), "--values", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["layers"][0]["faults"][0]["message"] + "." == line
    assert not report["layers"][1]["faults"] and not report["ok"]


def test_values_that_are_right(tmp_path, capsys):
    A_log = poisoned("x", (8,), "float32", (slice(4, None), 0), (2, -np.inf), (5, -0.0))
    folder = write(tmp_path, LOW_RANK, SMALL, A_log=A_log)
    report = kda_jax.check_values(folder, every=True)
    assert report.ok
    assert report.layers[0].notes == (
        "A_log is (8,): normalize_A_log gives (4,), its tail of 4 is zero",
    )
    assert cli.main(["check", str(folder), "--values", "--tp", "4"]) == 0
    assert "each of 4 ranks holds" in capsys.readouterr().out
    assert cli.main(["check", str(folder), "--tp", "3"]) == 1


def test_no_note_says_that_a_faulty_tail_is_zero(tmp_path):
    A_log = np.array([1, 2, 3, 4, 0, 9], np.float32)
    (layer,) = kda_jax.check_values(write(tmp_path, LOW_RANK, SMALL, A_log=A_log)).layers
    assert [fault.tensor for fault in layer.faults] == ["A_log"]
    assert "its tail is not zero: A_log[5] is 9.0" in layer.faults[0].message
    assert layer.notes == (
        "A_log is (6,): normalize_A_log gives (4,), its tail of 2 is judged when it is loaded",
    )


def test_a_fault_of_the_header_is_told_once_and_its_tensor_not_read(tmp_path):
    new = dict(dt_bias=np.full(4, np.nan, np.float32), A_log=np.full(4, np.nan, np.float32))
    report = kda_jax.check_values(write(tmp_path, LOW_RANK, SMALL, **new))
    assert [fault.tensor for fault in report.layers[0].faults] == ["dt_bias", "A_log"]
    folder = write(tmp_path, LOW_RANK, SMALL, g_a_proj__weight=None)
    assert [
        fault.tensor for fault in kda_jax.check_values(folder, every=True).layers[0].faults
    ] == [""]


def test_check_without_safetensors_is_by_headers(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, LOW_RANK, SMALL, A_log=np.full(4, np.nan, np.float32))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert cli.main(["check", str(folder)]) == 0
    capsys.readouterr()
    assert cli.main(["check", str(folder), "--values"]) == 2
    assert "install kda-jax with the extra `checkpoint`" in capsys.readouterr().err
    assert cli.main(["check", str(folder), "--values", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_contracts_own_command_reads_headers_alone(tmp_path):
    folder = write(tmp_path, LOW_RANK, SMALL, A_log=np.full(4, np.nan, np.float32))
    code = (
        "import sys; from kda_contracts.cli import main; "
        f"code = main(['check', {str(folder)!r}]); sys.exit(code or 'safetensors' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
