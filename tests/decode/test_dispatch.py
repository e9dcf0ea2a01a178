"""Which implementation runs, and what is said of the others."""

import functools
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SHAPES, make_call
from support import ON_GPU, WITH_TRITON, lowered_text

import kda_jax


def structs(shape):
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in make_call(SHAPES[shape]).operands.items()
    }


def test_auto_takes_the_first_that_can_run():
    explained = kda_jax.explain(kda_jax.packed_decode, **structs("k64_v32"))
    assert explained.implementation == ("mosaic_gpu" if ON_GPU else "xla")
    assert explained.sizes == SHAPES["k64_v32"]
    assert kda_jax.explain(kda_jax.packed_decode, **structs("k60_v24")).implementation == (
        "triton" if WITH_TRITON else "xla"
    )


def test_explain_says_why_not():
    explained = kda_jax.explain(kda_jax.packed_decode, **structs("k60_v24"))
    assert list(explained.reasons) == ["mosaic_gpu", "triton", "xla"]
    assert "K=60 is not a multiple of 32 up to 256" in explained.reasons["mosaic_gpu"]
    assert explained.reasons[explained.implementation] is None
    chosen = [line for line in str(explained).splitlines() if line.startswith("  -> ")]
    assert chosen == [f"  -> {explained.implementation:<11} runs"]


@pytest.mark.skipif(ON_GPU, reason="asks what a CPU says")
def test_explain_on_a_cpu():
    assert (
        kda_jax.explain(kda_jax.packed_decode, **structs("k64_v32")).reasons["mosaic_gpu"]
        == "the default backend is cpu, not gpu"
    )


def test_explain_takes_arrays_and_refuses_as_packed_decode_does():
    call = make_call(SHAPES["k64_v32"])
    assert (
        kda_jax.explain(
            kda_jax.packed_decode, **call.operands, lower_bound=-5.0, implementation="xla"
        ).reasons["xla"]
        is None
    )
    with pytest.raises(kda_jax.ContractError):
        kda_jax.explain(
            kda_jax.packed_decode, **call.operands | {"dt_bias": np.zeros(4, np.float32)}
        )


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("k60_v24", "K=60 is not a multiple of 32 up to 256; use implementation='xla' or 'auto'"),
        ("k100_v7", "K=100 is not a multiple of 32"),
    ],
)
def test_a_named_implementation_runs_or_raises(shape, reason):
    with pytest.raises(NotImplementedError, match=reason):
        kda_jax.packed_decode(**make_call(SHAPES[shape]).operands, implementation="mosaic_gpu")


def test_an_unknown_name():
    with pytest.raises(
        ValueError, match="must be 'auto', 'mosaic_gpu', 'triton' or 'xla' \\(got 'cuda'\\)"
    ):
        kda_jax.packed_decode(**make_call(SHAPES["k64_v32"]).operands, implementation="cuda")


def test_a_symbolic_batch_is_for_xla():
    B = jax.export.symbolic_shape("B")[0]
    operands = structs("k64_v32")
    for name in ("mixed_qkv", "a", "b", "ssm_state_indices"):
        operands[name] = jax.ShapeDtypeStruct((B, *operands[name].shape[1:]), operands[name].dtype)
    exported = jax.export.export(
        jax.jit(lambda x: kda_jax.packed_decode(**x, implementation="xla"))
    )(operands)
    call = make_call(SHAPES["k64_v32"])
    expected = kda_jax.packed_decode(**call.operands, implementation="xla")
    got = exported.call({name: jnp.asarray(x) for name, x in call.operands.items()})
    assert np.asarray(got[0]).tobytes() == np.asarray(expected[0]).tobytes()
    with pytest.raises(
        NotImplementedError, match="B is symbolic, and a kernel's grid needs a number"
    ):
        jax.export.export(
            jax.jit(lambda x: kda_jax.packed_decode(**x, implementation="mosaic_gpu"))
        )(operands)


@pytest.mark.skipif(ON_GPU, reason="asks what a CPU says")
def test_a_kernel_on_a_cpu_fails_with_jaxs_own_message():
    with pytest.raises(Exception, match=r"(?i)cpu"):
        kda_jax.packed_decode(**make_call(SHAPES["k64_v32"]).operands, implementation="mosaic_gpu")


def test_importing_kda_jax_loads_no_kernel_backend():
    program = (
        "import sys, kda_jax; print([m for m in sys.modules if 'pallas' in m or m == 'triton'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def on_a_gpu(monkeypatch, capability):
    """As if this host had a GPU of this compute capability."""
    device = types.SimpleNamespace(
        compute_capability=capability, platform="gpu", device_kind=f"GPU {capability}"
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [device])


def prefill_operands(**others):
    struct = jax.ShapeDtypeStruct
    q, v = struct((1, 70, 2, 64), jnp.bfloat16), struct((1, 70, 4, 128), jnp.bfloat16)
    log_decay, beta = struct((1, 70, 4, 64), jnp.float32), struct((1, 70, 4), jnp.float32)
    pool, slots = struct((8, 4, 128, 64), jnp.float32), struct((1,), jnp.int32)
    return dict(q=q, k=q, v=v, log_decay=log_decay, beta=beta, pool=pool, slots=slots)


def layer_arguments(name, **config):
    config = kda_jax.KDAConfig(**dict(D=32, H=2, HV=4, K=64, V=128, gate_rank=128) | config)
    struct = jax.ShapeDtypeStruct
    arguments = dict(config=config)
    arguments["params"] = jax.eval_shape(lambda: kda_jax.init_params(config, jax.random.key(0)))
    if name == "kda_apply":
        ids = struct((3, 70), jnp.int32)
        return arguments | dict(x=struct((3, 70, 32), jnp.bfloat16), segment_ids=ids)
    arguments["cache"] = jax.eval_shape(lambda: kda_jax.init_cache(config, 8))
    arguments["x"] = struct((5, 32) if name == "kda_decode" else (70, 32), jnp.bfloat16)
    arguments["slots"] = struct((5,) if name == "kda_decode" else (2,), jnp.int32)
    if name == "kda_prefill":
        arguments["cu_seqlens"] = struct((3,), jnp.int32)
    return arguments


def update_operands():
    operands = prefill_operands()
    struct, q, v = jax.ShapeDtypeStruct, operands["q"], operands["v"]
    return dict(
        A_log=struct((4,), jnp.float32),
        dt_bias=struct((256,), jnp.float32),
        q=q,
        k=q,
        v=v,
        a=struct((1, 70, 256), jnp.bfloat16),
        b=struct((1, 70, 4), jnp.bfloat16),
        initial_state_source=operands["pool"],
        initial_state_indices=operands["slots"],
    )


def commit_operands():
    struct = jax.ShapeDtypeStruct
    pool, states = (8, 4, 128, 64), (2, 3, 4, 128, 64)
    slots = struct((2,), jnp.int32)
    return dict(
        pool=struct(pool, jnp.float32),
        intermediate=struct(states, jnp.float32),
        slots=slots,
        num_accepted=slots,
    )


CALLS = {
    "packed_decode": lambda: structs("k64_v32"),
    "fused_sigmoid_gating_kda_update": update_operands,
    "recurrent_kda": prefill_operands,
    "chunk_kda": prefill_operands,
    "commit": commit_operands,
    "kda_apply": lambda: layer_arguments("kda_apply"),
    "kda_decode": lambda: layer_arguments("kda_decode"),
    "kda_prefill": lambda: layer_arguments("kda_prefill"),
}
PREFILL = ("chunk_kda", "kda_prefill", "kda_apply")
# What a program has of each implementation: its inner jit.
MARKS = {
    "mosaic_gpu": r"@kda_(packed_decode|update|chunk)_mosaic_gpu",
    "xla": r"@(kda_(packed_decode|update|chunk)_xla|_commit)",
}


@pytest.mark.parametrize("capability", ["none", "8.0", "9.0", "10.0"])
@pytest.mark.parametrize("name", CALLS)
def test_what_explain_names_is_what_the_program_holds(monkeypatch, name, capability):
    """On a faked GPU the program is lowered for CUDA and not run."""
    if capability != "none":
        on_a_gpu(monkeypatch, capability)
    elif ON_GPU:
        pytest.skip("asks what a CPU says")
    if WITH_TRITON and capability == "8.0":
        pytest.skip("jax-triton lowers for the GPU that is there")
    op, arguments = getattr(kda_jax, name), CALLS[name]()
    explained = kda_jax.explain(op, **arguments)
    has_kernel = name != "commit" and (
        capability == "9.0" or (capability == "10.0" and name not in PREFILL)
    )
    assert explained.implementation == ("mosaic_gpu" if has_kernel else "xla")
    config = arguments.pop("config", None)
    bound = functools.partial(op, **({} if config is None else {"config": config}))
    text = lowered_text(lambda arguments: bound(**arguments), arguments)
    found = {mark for mark, pattern in MARKS.items() if re.search(pattern, text)}
    assert found == {explained.implementation}
    assert set(explained.reasons) == {"mosaic_gpu", "triton", "xla"}
    assert [x for x, reason in explained.reasons.items() if reason is None] == [
        explained.implementation
    ]


@pytest.mark.parametrize("name", PREFILL)
def test_prefills_kernels_are_for_one_compute_capability(monkeypatch, name):
    op = getattr(kda_jax, name)
    for capability, expected in (
        ("9.0", "mosaic_gpu"),
        ("10.0", "xla"),
        ("8.0", "xla"),
        ("unknown", "xla"),
    ):
        on_a_gpu(monkeypatch, capability)
        explained = kda_jax.explain(op, **CALLS[name]())
        assert explained.implementation == expected, capability
        if expected == "xla":
            reason = f"the device's compute capability is {capability}, and this kernel needs 9.0"
            assert explained.reasons["mosaic_gpu"] == reason


def test_reasons_come_in_the_order_in_which_they_matter(monkeypatch):
    reason = "K=60 is not a multiple of 32 up to 256"
    if not ON_GPU:
        explained = kda_jax.explain(kda_jax.packed_decode, **structs("k60_v24"))
        expected = f"the default backend is cpu, not gpu; {reason}"
        assert explained.reasons["mosaic_gpu"] == expected
    on_a_gpu(monkeypatch, "8.0")
    explained = kda_jax.explain(kda_jax.packed_decode, **structs("k60_v24"))
    host = "the device's compute capability is 8.0, and this kernel needs 9.0 or newer"
    assert explained.reasons["mosaic_gpu"] == f"{host}; {reason}"


def cut(x, axis=0, kind=jax.sharding.AxisType.Auto):
    """Zeros as x, cut over two devices along an axis."""
    mesh = jax.make_mesh((2,), ("s",), devices=jax.devices()[:2], axis_types=(kind,))
    spec = jax.sharding.PartitionSpec(*[None] * axis, "s")
    return jax.device_put(jnp.zeros(x.shape, x.dtype), jax.sharding.NamedSharding(mesh, spec))


@pytest.mark.skipif(ON_GPU, reason="needs two host devices")
@pytest.mark.parametrize(
    ("name", "operand", "axis"),
    [
        ("packed_decode", "initial_state", 1),
        ("packed_decode", "b", 1),
        ("fused_sigmoid_gating_kda_update", "initial_state_source", 0),
        ("recurrent_kda", "pool", 0),
        ("recurrent_kda", "v", 2),
        ("chunk_kda", "pool", 0),
        ("chunk_kda", "log_decay", 2),
    ],
)
def test_auto_never_turns_slow_in_silence(monkeypatch, name, operand, axis):
    """Where only an operand's sharding forbids the kernel, every op raises with the remedy."""
    arguments = {x: jnp.zeros(y.shape, y.dtype) for x, y in CALLS[name]().items()}
    arguments[operand] = cut(arguments[operand], axis)
    on_a_gpu(monkeypatch, "9.0")
    op = getattr(kda_jax, name)
    message = (
        f"kda_jax.{name}: no kernel can run this call: `{operand}` is sharded over several devices "
        "outside shard_map, so every device would gather all of it; wrap the call in jax.shard_map"
    )
    for call in (op, functools.partial(kda_jax.explain, op)):
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            call(**arguments)
    assert kda_jax.explain(op, **arguments, implementation="xla").implementation == "xla"
    on_a_gpu(monkeypatch, "7.5")  # no kernel could run anyway
    assert kda_jax.explain(op, **arguments).implementation == "xla"


@pytest.mark.skipif(ON_GPU, reason="needs two host devices")
@pytest.mark.parametrize(("name", "operand"), [("packed_decode", "a"), ("chunk_kda", "v")])
def test_auto_never_turns_slow_with_explicit_axes(monkeypatch, name, operand):
    arguments = {x: jnp.zeros(y.shape, y.dtype) for x, y in CALLS[name]().items()}
    kind = jax.sharding.AxisType.Explicit
    arguments[operand] = cut(arguments[operand], arguments[operand].ndim - 1, kind)
    on_a_gpu(monkeypatch, "9.0")
    message = f"kda_jax.{name}: no kernel can run this call: `{operand}` is cut by Explicit mesh"
    op = getattr(kda_jax, name)
    for call in (op, functools.partial(kda_jax.explain, op)):
        with pytest.raises(NotImplementedError, match=message):
            call(**arguments)
    on_a_gpu(monkeypatch, "7.5")  # no kernel could run anyway
    assert kda_jax.explain(op, **arguments).implementation == "xla"


@pytest.mark.skipif(ON_GPU, reason="needs two host devices")
@pytest.mark.parametrize("name", ["kda_decode", "kda_prefill"])
def test_a_layer_names_its_own_cut_operand(monkeypatch, name):
    arguments = CALLS[name]()
    cache = arguments["cache"]
    arguments["cache"] = kda_jax.KDACache(conv=cache.conv, state=cut(cache.state))
    on_a_gpu(monkeypatch, "9.0")
    with pytest.raises(NotImplementedError, match=f"kda_jax.{name}: no kernel .* `state` is"):
        kda_jax.explain(getattr(kda_jax, name), **arguments)


def test_a_shape_that_no_kernel_covers_goes_to_xla(monkeypatch):
    on_a_gpu(monkeypatch, "9.0")
    operands = prefill_operands() | {"k": jax.ShapeDtypeStruct((1, 70, 2, 64), jnp.float32)}
    explained = kda_jax.explain(kda_jax.chunk_kda, **operands)
    assert explained.implementation == "xla"
    assert "products are of bfloat16" in explained.reasons["mosaic_gpu"]


def test_an_operator_without_such_a_kernel_says_so():
    with pytest.raises(
        NotImplementedError,
        match=r"kda_jax\.chunk_kda: implementation='triton' cannot run this call: "
        r"kda_jax.chunk_kda has no such kernel; use implementation='xla' or 'auto'",
    ):
        kda_jax.explain(kda_jax.chunk_kda, **prefill_operands(), implementation="triton")
    with pytest.raises(TypeError, match=r"`op` must be one of chunk_kda, commit, .*got <function"):
        kda_jax.explain(kda_jax.validate_slots, [1])


PROGRAM = """
import jax, jax.numpy as jnp, kda_jax
struct = jax.ShapeDtypeStruct
x = struct((2, 192), jnp.float32), struct((2, 64), jnp.float32), struct((2, 1), jnp.float32)
x += struct((1,), jnp.float32), struct((64,), jnp.float32), struct((3, 1, 64, 64), jnp.float32)
step = lambda *x: kda_jax.packed_decode(*x, implementation="mosaic_gpu")
traced = jax.jit(step).trace(*x, struct((2,), jnp.int32))
text = traced.lower(lowering_platforms=("cuda",)).as_text()
print(text[text.index("backend_config"):].split("}")[0])
"""


def test_the_kernel_is_the_same_in_every_process():
    """Its name and its text may not follow the hash seed, or no other process finds it compiled."""
    programs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(programs) == 1
