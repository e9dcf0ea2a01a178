"""Every operator on a mesh: in shard_map with its check on and off, and with Explicit mesh axes."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import ON_GPU, assert_near, assert_same_bits, running

import kda_jax
from kda_jax import call
from kda_jax.conv import conv_decode, conv_prefill
from kda_jax.norm import gated_rms_norm

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")

B, T, H, HV, K, V, S, C, LIMIT = 4, 66, 2, 4, 8, 6, 8, 10, 1e-6
CONFIG = kda_jax.KDAConfig(D=12, H=H, HV=HV, K=K, V=V, gate_rank=V)
ROWS, HEADS, WHOLE = P("m"), P(None, None, "m"), P()
BOUNDS = {"dense": None, "varlen": np.array([0, 3, 3, 64, T], np.int32)}
SLOTS = np.array([5, -1, 2, 0], np.int32)


def mesh_of(kind, shape=(2,), names=("m",)):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, devices=devices, axis_types=(kind,) * len(shape))


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@functools.cache
def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def gated(rows, tokens):
    """q, k, v, log_decay and beta."""
    shapes = dict(q=(H, K), k=(H, K), v=(HV, V), log_decay=(HV, K), beta=(HV,))
    x = {n: normal(i, rows, tokens, *s) for i, (n, s) in enumerate(shapes.items())}
    x["k"] = x["k"] / np.linalg.norm(x["k"], axis=-1, keepdims=True)
    return x | dict(log_decay=-abs(x["log_decay"]), beta=1 / (1 + np.exp(-x["beta"])))


def operands(name, form="dense"):
    """The operands of a call; of many tokens dense or with boundaries."""
    pool, conv = normal(20, S, HV, V, K), normal(21, S, C, 3)
    rows, tokens = (1, T) if form == "varlen" else (B, 5)
    bounds = {} if form == "dense" else dict(cu_seqlens=BOUNDS["varlen"])
    gates = dict(A_log=normal(22, HV), dt_bias=normal(23, HV * K))
    if name in ("chunk_kda", "recurrent_kda"):
        return gated(rows, tokens) | dict(pool=pool, slots=SLOTS) | bounds
    if name == "recurrent_verify":
        return gated(rows, tokens) | dict(pool=pool, slots=SLOTS, sources=SLOTS) | bounds
    if name == "commit of drafts":
        x = gated(rows, tokens) | dict(pool=pool, slots=SLOTS, num_accepted=SLOTS % 4) | bounds
        return {n: y for n, y in x.items() if n != "q"}
    if name == "copy_slots":
        return dict(pool=pool, sources=SLOTS, destinations=SLOTS[::-1].copy())
    if name == "fused_sigmoid_gating_kda_update":
        x = gated(rows, tokens)
        a = normal(24, rows, tokens, HV * K)
        x = {n: x[n] for n in ("q", "k", "v")} | gates | dict(a=a, b=x["beta"])
        return x | dict(initial_state_source=pool, initial_state_indices=SLOTS) | bounds
    if name == "packed_decode":
        row = normal(25, B, CONFIG.channels)
        x = dict(mixed_qkv=row, a=normal(24, B, HV * K), b=normal(26, B, HV)) | gates
        return x | dict(initial_state=pool, ssm_state_indices=SLOTS)
    if name == "commit":
        accepted = np.array([2, 1, 0, 1] if form == "varlen" else [2, 1, 0, 3], np.int32)
        x = dict(pool=pool, intermediate=normal(27, rows, tokens, HV, V, K), slots=SLOTS)
        return x | dict(num_accepted=accepted) | bounds
    if name == "conv_decode":
        return dict(x=normal(28, B, C), weight=normal(29, C, 4), pool=conv, slots=SLOTS)
    if name == "conv_prefill":
        x = dict(x=normal(28, T, C), weight=normal(29, C, 4), pool=conv, slots=SLOTS)
        return x | dict(cu_seqlens=BOUNDS["varlen"])
    if name == "clear_slots":
        return dict(pool=pool, slots=SLOTS)
    if name == "gated_rms_norm":
        x = dict(x=normal(30, B, HV, V), gate=normal(31, B, HV, V))
        return x | dict(weight=normal(32, V))
    params = kda_jax.init_params(CONFIG, jax.random.key(1), dtype=jnp.float32)
    weights = {n: np.asarray(x) for n, x in vars(params).items() if x is not None}
    cache = dict(conv=normal(33, S, CONFIG.channels, 3), state=pool)
    if name == "kda_commit":
        x = gated(B, 5) | cache | dict(inputs=normal(36, B, 5, CONFIG.channels), slots=SLOTS)
        return {n: y for n, y in x.items() if n != "q"} | dict(num_accepted=SLOTS % 4)
    if name == "kda_verify":
        return weights | cache | dict(x=normal(37, B, 3, CONFIG.D), slots=SLOTS)
    if name == "kda_apply":
        rows, tokens = (1, T) if form == "varlen" else (B, 5)
        x = weights | dict(x=normal(35, rows, tokens, CONFIG.D))
        ids = np.array([[4, 4, 2, 2, 0], [1] * 5, [0, 3, 3, 3, 4], [7, 7, 7, 7, 8]], np.int32)
        return x | (bounds if form == "varlen" else dict(segment_ids=ids))
    rows = B if name == "kda_decode" else T
    x = weights | cache | dict(x=normal(34, rows, CONFIG.D), slots=SLOTS)
    return x if name == "kda_decode" else x | dict(cu_seqlens=BOUNDS["varlen"])


def run(name, x, **options):
    """The results of a call, in one tuple."""
    if name in ("commit of drafts", "kda_commit"):
        x = dict(x)
        drafts = kda_jax.Drafts(
            **{n: x.pop(n) for n in ("k", "v", "log_decay", "beta")}, use_qk_l2norm_in_kernel=True
        )
        if name == "commit of drafts":
            return (kda_jax.commit(intermediate=drafts, **x, **options),)
        drafts = kda_jax.KDADrafts(x.pop("inputs"), drafts)
        cache = kda_jax.KDACache(x.pop("conv"), x.pop("state"))
        cache = kda_jax.kda_commit(cache, drafts, **x, **options)
        return cache.conv, cache.state
    if name in ("kda_apply", "kda_decode", "kda_prefill", "kda_verify"):
        x, step = dict(x), getattr(kda_jax, name)
        params = kda_jax.KDAParams(
            **{n: x.pop(n) for n in vars(PARAMS) if vars(PARAMS)[n] is not None}
        )
        if name == "kda_apply":
            return (step(params, config=CONFIG, **x, **options),)
        cache = kda_jax.KDACache(x.pop("conv"), x.pop("state"))
        results = step(params, cache=cache, config=CONFIG, **x, **options)
        return tuple(jax.tree.leaves(results))
    others = dict(conv_decode=conv_decode, conv_prefill=conv_prefill, gated_rms_norm=gated_rms_norm)
    results = (others.get(name) or getattr(kda_jax, name))(**x, **options)
    return tuple(jax.tree.leaves(results))


PARAMS = jax.eval_shape(lambda: kda_jax.init_params(CONFIG, jax.random.key(0)))


# Inside shard_map.

POOLS = ("initial_state", "initial_state_source", "pool", "conv", "state")
HEADS_CUT = dict.fromkeys(("q", "k", "v", "log_decay", "beta", "a", "b", "intermediate"), HEADS)
HEADS_CUT |= dict.fromkeys(("initial_state", "initial_state_source", "pool"), P(None, "m"))
HEADS_CUT |= dict.fromkeys(("A_log", "dt_bias"), P("m"))
ROWS_CUT = dict.fromkeys(
    (*POOLS, "q", "k", "v", "log_decay", "beta", "a", "b", "mixed_qkv", "x", "slots", "gate")
    + ("num_accepted", "intermediate", "ssm_state_indices", "initial_state_indices")
    + ("sources", "destinations", "inputs"),
    ROWS,
)
MANY_TOKENS = ("chunk_kda", "recurrent_kda", "fused_sigmoid_gating_kda_update")
ONE_FORM = ("packed_decode", "conv_decode", "kda_decode", "clear_slots", "gated_rms_norm")
# Name, form, cuts, and how the results are cut. Those of `chunk_kda` with boundaries and of
# `kda_prefill` are compared with their gradients.
SHARDED = [
    *((name, form, HEADS_CUT, (HEADS, P(None, "m"))) for name in MANY_TOKENS for form in BOUNDS
      if (name, form) != ("chunk_kda", "varlen")),
    *((name, "dense", ROWS_CUT, (ROWS, ROWS)) for name in MANY_TOKENS),
    *(("commit", form, HEADS_CUT | {"intermediate": P(None, None, "m")}, (P(None, "m"),))
      for form in BOUNDS),
    ("commit", "dense", ROWS_CUT, (ROWS,)),
    *(("recurrent_verify", form, HEADS_CUT, (HEADS,) * 5) for form in BOUNDS),
    ("recurrent_verify", "dense", ROWS_CUT, (ROWS,) * 5),
    *(("commit of drafts", form, HEADS_CUT, (P(None, "m"),)) for form in BOUNDS),
    ("commit of drafts", "dense", ROWS_CUT, (ROWS,)),
    ("kda_verify", "dense", ROWS_CUT, (ROWS,) * 6),
    ("kda_commit", "dense", ROWS_CUT, (ROWS, ROWS)),
    ("copy_slots", "dense", ROWS_CUT, (ROWS,)),
    *((name, "dense", ROWS_CUT, (ROWS, ROWS, ROWS)) for name in ONE_FORM),
    # Each device has all sequences, and tokens of its own.
    *((name, "varlen", ROWS_CUT | {"slots": WHOLE}, (ROWS, ROWS, ROWS))
      for name in ("conv_prefill",)),
]  # fmt: skip


def shards(mesh, x, specs):
    """The operands of each device, alone."""
    size = mesh.shape["m"]

    def part(y, spec, i):
        for axis, name in enumerate(spec):
            y = np.split(y, size, axis)[i] if name else y
        return y

    return [{n: part(np.asarray(y), specs[n], i) for n, y in x.items()} for i in range(size)]


def joined(results, specs):
    """Results of each device as those of all."""
    return [
        np.concatenate(parts, next(axis for axis, name in enumerate(spec) if name))
        for parts, spec in zip(zip(*results, strict=True), specs, strict=True)
    ]


def cuts_of(x, table, state):
    """How each operand is cut; with `state` "one for all", every device has the whole pool."""
    specs = {name: table.get(name, WHOLE) for name in x}
    if state == "one for all":
        specs |= {name: WHOLE for name in x if name in POOLS}
    return specs


def with_pools(made, x):
    return {n: jnp.zeros(s, jnp.float32) for n, s in made.items()} | x


CHECKS = [
    pytest.param(True, id="check on"),
    pytest.param(False, id="check off", marks=pytest.mark.long),
]


def taken_inside(mesh, x, specs, state):
    """`(x, specs, made)`: without the pools that a call makes inside, whose shapes are `made`."""
    if state != "made inside":
        return x, specs, {}
    made = {n: y.shape for n, y in shards(mesh, x, specs)[0].items() if n in POOLS}
    x = {n: y for n, y in x.items() if n not in made}
    return x, {n: specs[n] for n in x}, made


def states_of(name, table):
    """Where the pool comes from; one for all devices only where they have no heads of their own."""
    if name == "gated_rms_norm":
        return ("given",)
    return (
        ("given", "made inside", "one for all") if table is ROWS_CUT else ("given", "made inside")
    )


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("name", "form", "table", "outs", "state"),
    [
        pytest.param(*case, state, marks=pytest.mark.slow if case[0] == "chunk_kda" else ())
        for case in SHARDED
        for state in states_of(case[0], case[2])
    ],
)
def test_shard_map_equals_each_device_alone(name, form, table, outs, state, check):
    mesh, x = mesh_of(AxisType.Auto), operands(name, form)
    x, specs, made = taken_inside(mesh, x, cuts_of(x, table, state), state)

    def local(x):
        return run(name, with_pools(made, x))

    alone = jax.jit(local)
    results = [[np.asarray(y) for y in alone(part)] for part in shards(mesh, x, specs)]
    outs = outs[: len(results[0])]
    over = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=outs, check_vma=check)
    for got, wanted in zip(jax.jit(over)(x), joined(results, outs), strict=True):
        assert np.abs(wanted).max() > 0.1 or state == "made inside"
        assert_near(got, wanted, LIMIT)


# Two of them compile fast enough for CI: boundaries, with a state that was made inside.
GRADIENTS = [
    pytest.param(
        name,
        form,
        state,
        marks=pytest.mark.slow if (form, state) == ("varlen", "made inside") else pytest.mark.long,
    )
    for name, form in (("chunk_kda", "dense"), ("chunk_kda", "varlen"), ("kda_prefill", "varlen"))
    for state in ("given", "made inside")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("name", "form", "state"), GRADIENTS)
def test_gradients_in_shard_map_equal_each_device_alone(name, form, state, check):
    """Of all that is a float, weights that every device has whole among it; the results too."""
    mesh, x = mesh_of(AxisType.Auto), operands(name, form)
    table = HEADS_CUT if name == "chunk_kda" else ROWS_CUT | {"slots": WHOLE}
    outs = (HEADS, P(None, "m")) if name == "chunk_kda" else (ROWS, ROWS, ROWS)
    x, specs, made = taken_inside(mesh, x, cuts_of(x, table, state), state)
    floats = {n: jnp.asarray(y) for n, y in x.items() if y.dtype == np.float32}
    rest = {n: y for n, y in x.items() if n not in floats}

    def local(x):
        return run(name, with_pools(made, x))

    def value(results):
        return sum((jnp.sin(y) * (i + 1)).sum() for i, y in enumerate(results)), results

    # Each device's results and gradients, one device after the other.
    step = jax.jit(jax.value_and_grad(lambda x, rest: value(local(x | rest)), has_aux=True))
    alone = []
    for part in shards(mesh, x, specs):
        cut = {n: part[n] for n in floats}, {n: part[n] for n in rest}
        (_, results), slopes = step(*cut)
        alone.append(([np.asarray(y) for y in results], slopes))
    wanted = joined([results for results, _ in alone], outs)

    over = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=outs, check_vma=check)
    step = jax.jit(jax.value_and_grad(lambda x: value(over(x | rest)), has_aux=True))
    (_, results), slopes = step(floats)
    for got, y in zip(results, wanted, strict=True):
        assert_near(got, y, LIMIT)
    for n, got in slopes.items():
        parts = [np.asarray(y[n]) for _, y in alone]
        expected = joined([[y] for y in parts], [specs[n]])[0] if any(specs[n]) else sum(parts)
        assert np.abs(expected).max() > 1e-3, n
        assert_near(got, expected, 5e-6)


# Explicit axes: every operand in turn, cut along an axis of its own. Of the operators that take
# long to compile, those that are not among QUICK have the marker `long`.

CUTS = [
    *(("packed_decode", "dense", n, axis) for n, axis in (
        ("mixed_qkv", 0), ("mixed_qkv", 1), ("a", 1), ("b", 1), ("A_log", 0), ("dt_bias", 0),
        ("initial_state", 0), ("initial_state", 1), ("initial_state", 3),
        ("ssm_state_indices", 0))),
    *(("fused_sigmoid_gating_kda_update", form, n, axis) for form, n, axis in (
        ("dense", "q", 0), ("dense", "v", 2), ("varlen", "a", 1), ("varlen", "b", 2),
        ("dense", "A_log", 0), ("dense", "initial_state_source", 1),
        ("varlen", "initial_state_source", 0), ("varlen", "initial_state_indices", 0))),
    *(("recurrent_kda", form, n, axis) for form, n, axis in (
        ("dense", "v", 0), ("varlen", "q", 1), ("varlen", "pool", 1), ("dense", "slots", 0))),
    *(("chunk_kda", form, n, axis) for form, n, axis in (
        ("dense", "k", 0), ("dense", "log_decay", 2), ("dense", "pool", 0),
        ("varlen", "v", 1), ("varlen", "q", 2), ("varlen", "pool", 1))),
    *(("commit", form, n, axis) for form, n, axis in (
        ("dense", "pool", 0), ("dense", "intermediate", 2), ("varlen", "intermediate", 1),
        ("varlen", "num_accepted", 0))),
    *(("recurrent_verify", form, n, axis) for form, n, axis in (
        ("dense", "k", 0), ("varlen", "v", 1), ("dense", "pool", 1), ("varlen", "sources", 0))),
    *(("commit of drafts", form, n, axis) for form, n, axis in (
        ("dense", "pool", 0), ("varlen", "v", 1), ("dense", "beta", 2), ("varlen", "slots", 0))),
    *(("copy_slots", "dense", n, axis) for n, axis in (("pool", 0), ("pool", 1), ("sources", 0))),
    *(("kda_verify", "dense", n, axis) for n, axis in (
        ("x", 0), ("v_proj", 1), ("state", 0), ("conv", 1))),
    *(("kda_commit", "dense", n, axis) for n, axis in (
        ("inputs", 2), ("k", 0), ("state", 1), ("conv", 0), ("num_accepted", 0))),
    *(("conv_decode", "dense", n, axis) for n, axis in (
        ("x", 0), ("x", 1), ("weight", 0), ("pool", 0), ("pool", 1), ("slots", 0))),
    *(("conv_prefill", "varlen", n, axis) for n, axis in (
        ("x", 0), ("x", 1), ("weight", 0), ("pool", 0), ("slots", 0))),
    *(("clear_slots", "dense", n, axis) for n, axis in (("pool", 0), ("pool", 1), ("slots", 0))),
    *(("gated_rms_norm", "dense", n, axis) for n, axis in (("x", 0), ("gate", 1), ("weight", 0))),
    *(("kda_decode", "dense", n, axis) for n, axis in (
        ("x", 0), ("x", 1), ("q_proj", 1), ("o_proj", 0), ("state", 0), ("conv", 1), ("slots", 0))),
    *(("kda_prefill", "varlen", n, axis) for n, axis in (
        ("x", 0), ("v_proj", 1), ("norm", 0), ("state", 1), ("conv", 0), ("slots", 0))),
    *(("kda_apply", form, n, axis) for form, n, axis in (
        ("dense", "x", 0), ("dense", "segment_ids", 0), ("dense", "v_proj", 1),
        ("varlen", "x", 1), ("varlen", "o_proj", 0))),
]  # fmt: skip


QUICK = (("k", 0), ("v", 1), ("v_proj", 1), ("segment_ids", 0))


def explicit_cases():
    for name, form, operand, axis in CUTS:
        in_chunks, marks = name in ("chunk_kda", "kda_prefill", "kda_apply"), ()
        if in_chunks:
            marks = pytest.mark.slow if (operand, axis) in QUICK else pytest.mark.long
        yield pytest.param(name, form, operand, axis, marks=marks)


@functools.cache
def on_one_device(name, form):
    return [np.asarray(y) for y in jax.jit(functools.partial(run, name))(operands(name, form))]


def like_of(name):
    """Of each result that has one: the operand of the same axes, as whose it is cut."""
    if name == "packed_decode":
        return None, "initial_state"
    pool = "initial_state_source" if name == "fused_sigmoid_gating_kda_update" else "pool"
    if name in MANY_TOKENS:
        return "v", pool
    if name in ("commit", "clear_slots", "commit of drafts", "copy_slots"):
        return ("pool",)
    if name == "recurrent_verify":
        return "v", None, None, None, None  # what is kept lies as it came, or as the compiler likes
    if name in ("kda_verify", "kda_commit"):
        return ("x", *[None] * 5) if name == "kda_verify" else ("conv", "state")
    return ("x", "conv", "state") if name.startswith("kda_") else ("x", "pool")


def spec_of(x):
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", ["eager", pytest.param("jit in set_mesh", marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "form", "operand", "axis"), list(explicit_cases()))
def test_explicit_axes_equal_one_device(name, form, operand, axis, mode):
    mesh, x = mesh_of(AxisType.Explicit), operands(name, form)
    x[operand] = on(mesh, x[operand], *[None] * axis, "m")
    inside = jax.set_mesh(mesh) if mode != "eager" else contextlib.nullcontext()
    with inside:
        step = functools.partial(run, name)
        results = (step if mode == "eager" else jax.jit(step))(x)
    for got, wanted, like in zip(results, on_one_device(name, form), like_of(name), strict=False):
        assert_near(got, wanted, LIMIT)
        if like is not None:
            known = spec_of(x[like]) if like == operand else (None,) * got.ndim
            assert spec_of(got) == known


def test_results_of_explicit_axes_are_cut_as_the_operands():
    """A result without an operand of its axes takes each cut from the first with such an axis."""
    mesh = mesh_of(AxisType.Explicit, (2, 2), ("r", "h"))
    x = operands("packed_decode")
    cut = dict(mixed_qkv=("r",), b=("r", "h"), A_log=("h",), initial_state=("r", "h"))
    cut |= dict(ssm_state_indices=("r",))
    x |= {n: on(mesh, x[n], *spec) for n, spec in cut.items()}
    out, state = run("packed_decode", x)
    assert spec_of(out) == ("r", None, "h", None)
    assert spec_of(state) == ("r", "h", None, None)
    for got, wanted in zip((out, state), on_one_device("packed_decode", "dense"), strict=True):
        assert_near(got, wanted, LIMIT)
    # One mesh axis for two axes of the result: the first has it.
    x = operands("packed_decode")
    x |= dict(mixed_qkv=on(mesh, x["mixed_qkv"], ("r", "h")), A_log=on(mesh, x["A_log"], "h"))
    out, state = run("packed_decode", x)
    assert spec_of(out) == (("r", "h"), None, None, None)
    assert spec_of(state) == (None,) * 4
    assert_near(out, on_one_device("packed_decode", "dense")[0], LIMIT)


def test_states_after_each_token_and_a_flat_pool_with_explicit_axes():
    mesh, name = mesh_of(AxisType.Explicit), "fused_sigmoid_gating_kda_update"
    x = operands(name)
    wanted = run(name, x, intermediate_states=True)
    x |= dict(initial_state_source=on(mesh, x["initial_state_source"].reshape(-1), "m"))
    x |= dict(v=on(mesh, x["v"], None, None, "m"), a=x["a"].reshape(B, 5, HV, K))
    x |= dict(a=on(mesh, x["a"], None, None, "m"))
    got = run(name, x, intermediate_states=True)
    assert spec_of(got[2]) == (None, None, "m", None, None)
    assert spec_of(got[1]) == ("m",)
    assert_near(got[1].reshape(wanted[1].shape), wanted[1], LIMIT)
    assert_near(got[0], wanted[0], LIMIT)
    assert_near(got[2], wanted[2], LIMIT)
    kept = np.array([[7, -1, -1, -1, 6], *[[-1] * 5] * 3], np.int32)
    options = dict(update_state=False)
    wanted = run(name, operands(name) | dict(intermediate_states=kept), **options)
    got = run(name, x | dict(intermediate_states=kept), **options)
    assert_near(got[1].reshape(wanted[1].shape), wanted[1], LIMIT)


def test_an_operand_without_its_first_axis_cuts_no_result_there():
    mesh, name = mesh_of(AxisType.Explicit), "fused_sigmoid_gating_kda_update"
    x = operands(name, "varlen")
    wanted = run(name, x, intermediate_states=True)
    x["a"] = on(mesh, x["a"].reshape(T, HV, K), "m")
    got = run(name, x, intermediate_states=True)
    assert spec_of(got[2]) == (None,) * 5
    for y, w in zip(got, wanted, strict=True):
        assert_near(y, w, LIMIT)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("dense", marks=pytest.mark.slow),
        pytest.param("varlen", marks=pytest.mark.long),
    ],
)
def test_the_gradient_of_chunk_kda_with_explicit_axes(form):
    mesh, x = mesh_of(AxisType.Explicit), operands("chunk_kda", form)
    floats = {n: jnp.asarray(y) for n, y in x.items() if y.dtype == np.float32}
    rest = {n: y for n, y in x.items() if n not in floats}

    def value(floats):
        out, state = run("chunk_kda", floats | rest)
        return (jnp.sin(out) * 2).sum() + jnp.sin(state).sum()

    def slopes(floats):
        found = jax.grad(value)(floats)
        assert {n: spec_of(y) for n, y in found.items()} == {n: spec_of(floats[n]) for n in found}
        return found

    wanted = jax.jit(slopes)(floats)
    spec = dict(v=(None, None, "m"), pool=(None, "m"), beta=(None, None, "m"))
    cut = floats | {n: on(mesh, floats[n], *s) for n, s in spec.items()}
    with jax.set_mesh(mesh):
        got = jax.jit(slopes)(cut)
    for n, y in got.items():
        assert np.abs(wanted[n]).max() > 1e-3, n
        assert_near(y, wanted[n], 5e-6)


@pytest.mark.parametrize("check", [True, False], ids=["check on", "check off"])
def test_explicit_axes_beside_those_of_shard_map(check):
    mesh = mesh_of(AxisType.Explicit, (2, 2), ("m", "h"))
    x = operands("recurrent_kda")
    specs = cuts_of(x, ROWS_CUT, "given")
    outs = (ROWS, ROWS)
    wanted = joined(
        [[np.asarray(y) for y in run("recurrent_kda", part)] for part in shards(mesh, x, specs)],
        outs,
    )
    x |= {n: on(mesh, x[n], "m", None, "h") for n in ("q", "k", "v", "log_decay", "beta")}
    x |= dict(pool=on(mesh, x["pool"], "m", "h"), slots=on(mesh, SLOTS, "m"))
    with jax.set_mesh(mesh):
        step = functools.partial(run, "recurrent_kda")
        step = jax.shard_map(
            step, axis_names={"m"}, in_specs=(specs,), out_specs=outs, check_vma=check
        )
        got = jax.jit(step)(x)
    for y, w in zip(got, wanted, strict=True):
        assert_near(y, w, LIMIT)


def test_a_donated_pool_cut_by_an_explicit_axis_keeps_its_type():
    mesh, x = mesh_of(AxisType.Explicit), operands("packed_decode")
    wanted = on_one_device("packed_decode", "dense")[1]
    pool = on(mesh, x.pop("initial_state"), None, "m")
    step = jax.jit(
        lambda pool: run("packed_decode", x | dict(initial_state=pool))[1], donate_argnums=0
    )
    got = step(pool)
    assert pool.is_deleted()
    assert jax.typeof(got) == jax.typeof(on(mesh, wanted, None, "m"))
    assert_near(got, wanted, LIMIT)
    looped = jax.lax.fori_loop(0, 2, lambda _, pool: step(pool), on(mesh, wanted, None, "m"))
    assert spec_of(looped) == (None, "m", None, None)


@pytest.mark.parametrize("name", [*MANY_TOKENS, *ONE_FORM[:4], "conv_prefill", "kda_prefill"])
def test_a_ref_beside_an_explicit_cut_is_refused(name):
    mesh, x = mesh_of(AxisType.Explicit), operands(name)
    pool = next(n for n in POOLS if n in x)
    message = rf"kda_jax\.{name}: `\w+` is cut by Explicit mesh axes.*shard_map.*AxisType.Auto"
    for whole in (True, False):  # the Ref itself is cut, or another operand
        y = dict(x)
        y[pool] = jax.new_ref(on(mesh, x[pool], None if whole else "m"))
        if whole:
            n = next(n for n in ("v", "mixed_qkv", "x", "slots") if n in x)
            y[n] = on(mesh, x[n], "m" if x[n].shape[0] > 1 else None, *[None] * (x[n].ndim - 1))
            if x[n].shape[0] == 1:
                y[n] = on(mesh, x[n], None, "m")
        with pytest.raises(NotImplementedError, match=message):
            run(name, y)


def test_a_kernel_beside_an_explicit_cut_is_refused():
    mesh = mesh_of(AxisType.Explicit)
    x = dict(
        mixed_qkv=normal(1, 2, 384), a=normal(2, 2, 256), b=normal(3, 2, 4), A_log=normal(4, 4),
        dt_bias=normal(5, 256), initial_state=normal(6, 4, 4, 32, 64),
        ssm_state_indices=np.array([1, 2], np.int32),
    )  # fmt: skip
    message = r"`b` is cut by Explicit mesh axes.*shard_map.*AxisType.Auto"
    for b in (on(mesh, x["b"], "m"), on(mesh, x["b"], None, "m")):
        with pytest.raises(NotImplementedError, match=message), running("mosaic_gpu"):
            kda_jax.packed_decode(**x | dict(b=b), implementation="mosaic_gpu")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*MANY_TOKENS, *ONE_FORM, "commit", "conv_prefill", "kda_prefill"])
def test_what_is_not_cut_runs_as_ever(name, monkeypatch):
    """On a mesh of Explicit axes too: nothing is brought anywhere, and the bits are the same."""
    mesh, x = mesh_of(AxisType.Explicit), operands(name, "varlen")
    whole = {n: on(mesh, y) for n, y in x.items()}
    monkeypatch.setattr(call, "in_auto_axes", None)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(run, name))(whole)
    for y, wanted in zip(got, on_one_device(name, "varlen"), strict=True):
        assert_same_bits(y, wanted)


@pytest.mark.skipif(ON_GPU, reason="there a kernel would run")
def test_explain_of_an_explicit_cut_on_a_cpu():
    mesh, x = mesh_of(AxisType.Explicit), operands("packed_decode")
    x["b"] = on(mesh, x["b"], None, "m")
    explained = kda_jax.explain(kda_jax.packed_decode, **x)
    assert explained.implementation == "xla"
    assert "`b` is cut by Explicit mesh axes" in explained.reasons["mosaic_gpu"]
