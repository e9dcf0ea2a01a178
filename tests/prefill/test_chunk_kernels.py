"""The kernels of chunked prefill: on a GPU against the oracle; elsewhere, that they lower."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import DECAY_PATTERNS, S, kernels_here, operands, set_decays, wanted
from jax.sharding import PartitionSpec as P
from support import assert_near, assert_same_bits, lowered_text

import kda_jax
from kda_jax import (
    decode_mosaic_gpu,
    decode_xla,
    prefill_mosaic_gpu,
    prefill_plan,
    prefill_xla,
)
from kda_jax.prefill_pool import put_among
from kda_jax.transforms import with_transforms_of

LIMIT = 8e-3  # relative: bfloat16 products
SIZES = [dict(H=2, HV=4, K=128, V=128), dict(H=3, HV=3, K=64, V=64), dict(H=1, HV=2, K=128, V=192)]


def narrow(*args, **options):
    return operands(*args, **{"dtype": "bfloat16"} | options)


def run(x, cu_seqlens=None, **options):
    bounds = {} if cu_seqlens is None else {"cu_seqlens": jnp.asarray(cu_seqlens, jnp.int32)}
    options = {"out_dtype": "float32", "implementation": "mosaic_gpu"} | options
    step = jax.jit(lambda x, bounds: kda_jax.chunk_kda(**x, **bounds, **options))
    return step({name: jnp.asarray(y) for name, y in x.items()}, bounds)


def check(x, cu_seqlens=None, limit=LIMIT, **options):
    out, state = run(x, cu_seqlens, **options)
    expected_out, expected = wanted(x, cu_seqlens)
    assert_near(out, expected_out, limit)
    assert_near(state, expected, limit)
    return out, state


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("decay", [1e-3, 0.3, 5.0])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_the_kernels_at_the_edges_of_chunks(T, decay, sizes):
    check(narrow(3, T, decay=decay, **sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels_over_sequences_end_to_end(sizes):
    lengths = (0, 65, 1, 0, 64, 203)
    bounds = np.cumsum((0, *lengths))
    x = narrow(1, bounds[-1], N=6, decay=0.3, **sizes)
    x["slots"][2] = -1
    for name in ("q", "v", "beta", "log_decay"):
        x[name][:, bounds[2] : bounds[3]] = np.nan  # a padded sequence may hold anything
    out, state = check(x, cu_seqlens=bounds)
    assert not np.asarray(out)[0, bounds[2] : bounds[3]].any()
    for n in (0, 3):
        assert_same_bits(np.asarray(state)[x["slots"][n]], x["pool"][x["slots"][n]])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [130, 137])
def test_tokens_of_no_sequence_are_zeros(T):
    x = narrow(1, T, N=2, decay=0.3, **SIZES[0])
    for name in ("q", "k", "v"):
        x[name][:, :13] = x[name][:, 90:] = np.nan
    out, state = run(x, (13, 40, 90))
    inner = {name: y[:, 13:90] if y.ndim > 2 and len(y) == 1 else y for name, y in x.items()}
    expected_out, expected = wanted(inner, (0, 27, 77))
    assert_near(out[:, 13:90], expected_out, LIMIT)
    assert_near(state, expected, LIMIT)
    assert not np.asarray(out)[:, :13].any()
    assert not np.asarray(out)[:, 90:].any()


@pytest.mark.gpu
def test_the_kernels_leave_padded_rows_and_other_slots():
    x = narrow(3, 70, **SIZES[0])
    x["slots"][1] = S
    x["v"][1] = np.nan
    free = np.setdiff1d(np.arange(S), x["slots"])
    x["pool"][free] = 7.0
    out, state = check(x)
    assert not np.asarray(out)[1].any()
    assert_same_bits(np.asarray(state)[free], x["pool"][free])


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", DECAY_PATTERNS)
def test_the_kernels_under_strong_decays(pattern):
    x = narrow(2, 130, decay=1e-3, **SIZES[0])
    set_decays(x["log_decay"], pattern)
    check(x)


@pytest.mark.gpu
def test_the_kernels_with_equal_keys():
    x = narrow(1, 128, decay=0.0, **SIZES[0])
    x["k"][:] = x["k"][:, :1]
    x["beta"][:] = 1.0
    check(x)


@pytest.mark.gpu
def test_sources_l2norm_scale_and_dtypes():
    x = narrow(3, 100, decay=0.3, **SIZES[0])
    x["k"] *= 3
    sources = np.array([x["slots"][0], -1, np.setdiff1d(np.arange(S), x["slots"])[0]], np.int32)
    options = dict(use_qk_l2norm_in_kernel=True, scale=0.3)
    out, state = run(x, sources=jnp.asarray(sources), out_dtype=None, **options)
    assert out.dtype == jnp.bfloat16
    expected_out, expected = wanted(x, sources=sources, l2norm=True, scale=0.3)
    assert_near(out, expected_out, LIMIT)
    assert_near(state, expected, LIMIT)


@pytest.mark.gpu
def test_derivatives_and_vmap_are_near_those_of_xla():
    x = {name: jnp.asarray(y) for name, y in narrow(2, 70, decay=0.3, **SIZES[0]).items()}
    weights = jax.random.normal(jax.random.key(0), x["v"].shape)
    slots = x.pop("slots")

    def loss(x, implementation):
        out, state = kda_jax.chunk_kda(
            **x, slots=slots, out_dtype="float32", implementation=implementation
        )
        return (out * weights).sum() + (state**2).sum()

    got, expected = (
        jax.jit(jax.grad(lambda x, name=name: loss(x, name)))(x) for name in ("auto", "xla")
    )
    for name in x:
        assert_near(got[name], expected[name], 1e-2)
    several = {name: jnp.stack([y, 0.5 * y]) for name, y in x.items()}
    outs = jax.jit(jax.vmap(lambda x: kda_jax.chunk_kda(**x, slots=slots, out_dtype="float32")[0]))(
        several
    )
    for n in range(2):
        alone, _ = run({name: y[n] for name, y in several.items()} | dict(slots=slots))
        assert_near(outs[n], alone, LIMIT)


@pytest.mark.gpu
def test_the_kernels_update_a_ref():
    x = {name: jnp.asarray(y) for name, y in narrow(2, 70, **SIZES[0]).items()}
    out, state = kda_jax.chunk_kda(**x)
    ref = jax.new_ref(x["pool"].copy())
    ref_out, none = jax.jit(lambda r, x: kda_jax.chunk_kda(**x | dict(pool=r)))(ref, x)
    assert none is None
    assert_same_bits(ref_out, out)
    assert_same_bits(ref[...], state)


@pytest.mark.gpu
def test_auto_takes_the_kernels_where_they_run():
    x = {name: jnp.asarray(y) for name, y in narrow(2, 70, **SIZES[0]).items()}

    def compiled(**changes):
        return jax.jit(lambda x: kda_jax.chunk_kda(**x)).lower(x | changes).compile().as_text()

    assert "kda_prefill_states" in compiled()
    assert "kda_prefill" not in compiled(q=x["q"].astype(jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [64, 77])
def test_a_layers_prefill_runs_them(T):
    config = kda_jax.KDAConfig(D=64, H=2, HV=4, K=128, V=128, gate_rank=128)
    params, cache = kda_jax.init_params(config, jax.random.key(0)), kda_jax.init_cache(config, 4)
    x = jax.random.normal(jax.random.key(1), (T, config.D), jnp.bfloat16)
    slots, bounds = jnp.array([2, -1, 0]), jnp.array([0, 30, 33, T - 2])

    def prefill(implementation):
        return jax.jit(
            lambda x, cache: kda_jax.kda_prefill(
                params, x, cache, slots, bounds, config=config, implementation=implementation
            )
        )

    (y, after), (wanted, wanted_after) = (prefill(name)(x, cache) for name in ("auto", "xla"))
    assert "kda_prefill_states" in prefill("auto").lower(x, cache).compile().as_text()
    assert_near(y, wanted, 2e-2)
    assert_near(after.state, wanted_after.state, 1e-2)
    assert_same_bits(after.conv, wanted_after.conv)
    assert not np.asarray(y, np.float32)[30:33].any()
    assert not np.asarray(y, np.float32)[T - 2 :].any()


@pytest.mark.slow
def test_boundaries_behind_the_tokens_end_where_they_end(monkeypatch):
    """The layer pads its tokens for the kernels, for which XLA stands in here."""

    def in_xla(operands, out=None, *, static):
        def chunks(*x, every):
            return *prefill_xla.chunks_and_states(*x, static=static), None

        return put_among(operands, out, static, chunks)

    monkeypatch.setattr(prefill_mosaic_gpu, "over_pool", in_xla)
    monkeypatch.setattr(decode_mosaic_gpu, "kda_update_mosaic_gpu", decode_xla.kda_update_xla)
    config = kda_jax.KDAConfig(D=16, H=1, HV=2, K=64, V=64)
    params, cache = kda_jax.init_params(config, jax.random.key(0)), kda_jax.init_cache(config, 3)
    x = jax.random.normal(jax.random.key(1), (13, config.D), jnp.bfloat16)
    prefill = jax.jit(
        functools.partial(kda_jax.kda_prefill, config=config), static_argnames="implementation"
    )
    for end in (13, 1000):
        call = (params, x, cache, jnp.array([2, 0]), jnp.array([0, 5, end]))
        y, after = prefill(*call, implementation="mosaic_gpu")
        wanted, wanted_after = prefill(*call, implementation="xla")
        assert_near(y, wanted, 1e-2)
        assert_near(after.state, wanted_after.state, 1e-5)
        assert_same_bits(after.conv, wanted_after.conv)


def test_a_kernel_has_a_derivative_and_the_vmap_of_its_plain_form():
    """Told apart here: the kernel's values are ten times the plain ones, its derivative 100."""
    function = with_transforms_of(
        lambda x, n: x**3 * n,
        lambda x, n: 10 * x**3 * n,
        lambda x, n: (10 * x**3 * n, (x, n)),
        lambda kept, d: (100 * kept[0] ** 2 * kept[1] * d, None),
    )
    x, n = jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])
    assert_same_bits(function(x, n), np.array([10, 160], np.float32))
    assert_same_bits(jax.vmap(function)(x, n), np.array([1, 16], np.float32))
    assert_same_bits(jax.grad(lambda x: function(x, n).sum())(x), np.array([100, 800], np.float32))
    assert_same_bits(jax.vmap(jax.grad(function))(x, n), np.array([100, 800], np.float32))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: function(x, n), (x,), (jnp.ones(2),))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_an_operand_that_varies_over_a_mesh_is_seen():
    x = {name: jnp.asarray(y) for name, y in narrow(1, 5, **SIZES[0]).items()}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("tp",))
    heads = {
        name: P(None, None, "tp") if y.ndim > 2 and name != "pool" else P() for name, y in x.items()
    }

    def call(x):
        x["pool"] = jnp.zeros((S, 2, 128, 128))
        return kda_jax.chunk_kda(**x, implementation="mosaic_gpu")[0]

    with pytest.raises(NotImplementedError, match="`q` varies over a mesh axis"):
        jax.shard_map(call, mesh=mesh, in_specs=(heads,), out_specs=P(None, None, "tp"))(x)


def shapes(T, N=None, **sizes):
    x = narrow(2 if N is None else 1, T, N=N, **sizes)
    bounds = {} if N is None else {"cu_seqlens": np.zeros(N + 1, np.int32)}
    return {name: jax.ShapeDtypeStruct(y.shape, y.dtype) for name, y in (x | bounds).items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("N", [None, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_they_lower_for_cuda(sizes, N):
    with jax.enable_x64(sizes["K"] == 64):
        text = lowered_text(
            lambda x: kda_jax.chunk_kda(**x, implementation="mosaic_gpu"), shapes(100, N, **sizes)
        )
    assert text.count("kda_prefill_chunks") >= 1
    assert text.count("kda_prefill_states") >= 1
    assert "xf64" not in text


@pytest.mark.slow
def test_short_and_long_sequences_in_one_call_meet_the_oracle():
    """By the decode kernel and those of chunks, on a CPU in Pallas's interpreter.

    With an empty and a padded sequence, sources, and tokens of none behind the last.
    """
    lengths = (3, 40, 0, 17, 1, 66, 16)
    T, bounds = sum(lengths) + 5, np.cumsum((0, *lengths)).astype(np.int32)
    x = narrow(1, T, N=len(lengths), H=1, HV=2, K=64, V=64)
    x["pool"] = np.random.default_rng(1).standard_normal((9, 2, 64, 64), dtype=np.float32)
    x["slots"] = np.array([2, 4, 0, -1, 1, 3, 7], np.int32)
    sources = np.array([2, -1, 0, 1, 5, 3, 8], np.int32)
    for name in ("q", "k", "v", "log_decay", "beta"):  # of none, and of the padded one
        x[name][:, bounds[-1] :] = x[name][:, bounds[3] : bounds[4]] = np.nan
    x["pool"][6] = np.nan  # nobody's
    with kernels_here():
        step = jax.jit(
            lambda x: kda_jax.chunk_kda(
                **x,
                cu_seqlens=bounds,
                sources=sources,
                out_dtype="float32",
                implementation="mosaic_gpu",
            )
        )
        out, state = map(np.asarray, jax.block_until_ready(step(x)))
        text = str(jax.make_jaxpr(step)(x))
    assert "kda_update_mosaic_gpu" in text and "kda_chunk_mosaic_gpu" in text
    wide = {name: np.asarray(y, np.float32) for name, y in x.items() if name != "slots"}
    expected, after = wanted(wide | dict(slots=x["slots"]), bounds, sources=sources)
    live = np.repeat(x["slots"] >= 0, lengths)
    assert_near(out[0, : bounds[-1]][live], expected[0, : bounds[-1]][live], LIMIT)
    rest = np.append(np.flatnonzero(~live), np.arange(bounds[-1], T))
    assert_same_bits(out[0, rest], np.zeros_like(out[0, rest]))
    touched = x["slots"][[0, 1, 4, 5, 6]]
    assert_near(state[touched], after[touched], LIMIT)
    others = np.setdiff1d(np.arange(9), touched)
    assert_same_bits(state[others], x["pool"][others])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("end_to_end", [False, True])
def test_states_come_from_slots_and_go_to_slots(end_to_end, dtype):
    """A padded sequence, one from nothing, one from another slot; the other slots keep their bits.

    On a CPU in Pallas's interpreter.
    """
    T, N, sources = 70, 4, np.array([5, 7, -1, 3], np.int32)
    x = narrow(*((1, N * T) if end_to_end else (N, T)), N=N, H=1, HV=2, K=64, V=64)
    pool = np.random.default_rng(1).standard_normal((9, 2, 64, 64), dtype=np.float32)
    x["pool"] = pool.astype(jnp.dtype(dtype))
    x["slots"] = np.array([2, 9, 0, 3], np.int32)
    x["pool"][[1, 4, 6, 7, 8]] = np.nan  # nobody's
    bounds = np.arange(N + 1, dtype=np.int32) * T if end_to_end else None
    options = dict(sources=sources, cu_seqlens=bounds)
    with kernels_here():
        out, state = jax.jit(
            lambda x: kda_jax.chunk_kda(
                **x, **options, out_dtype="float32", implementation="mosaic_gpu"
            )
        )(x)
        out, state = jax.block_until_ready((out, state))
    wide = {name: np.asarray(y, np.float32) for name, y in x.items() if name != "slots"}
    expected, after = wanted(wide | dict(slots=x["slots"]), bounds, sources=sources)
    out, expected = (np.asarray(y).reshape(N, T, 2, 64) for y in (out, expected))
    assert_near(out[[0, 2, 3]], expected[[0, 2, 3]], LIMIT)
    assert_same_bits(out[1], np.zeros_like(out[1]))
    assert_near(np.asarray(state, np.float32)[[2, 0, 3]], after[[2, 0, 3]], LIMIT)
    others = [1, 4, 5, 6, 7, 8]
    assert_same_bits(np.asarray(state)[others], np.asarray(x["pool"])[others])


@pytest.mark.parametrize("N", [None, 3])
def test_they_lower_for_cuda_with_checkpoints(N):
    x = shapes(200, N, **SIZES[0]) | dict(checkpoints=jax.ShapeDtypeStruct((N or 2, 2), jnp.int32))
    text = lowered_text(
        lambda x: kda_jax.chunk_kda(**x, checkpoint_every=64, implementation="mosaic_gpu"), x
    )
    assert text.count("kda_prefill_states") >= 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(K=96), "K=96 is not 64 or 128"),
        (dict(V=32), "V=32 is not a multiple of 64 up to 256"),
        (dict(dtype="float32"), "q, k and v are float32, float32, float32"),
    ],
)
def test_what_they_do_not_take(changes, why):
    x = narrow(2, 5, **SIZES[0] | changes)
    with pytest.raises(NotImplementedError, match=why):
        kda_jax.chunk_kda(**x, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="chunk_kda has no such kernel"):
        kda_jax.chunk_kda(**x, implementation="triton")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_every_token_has_one_place_in_the_chunks(seed):
    rng = np.random.default_rng(seed)
    T, N = int(rng.integers(1, 400)), int(rng.integers(1, 9))
    bounds = np.sort(rng.integers(0, T + 1, N + 1)).astype(np.int32)
    live = rng.random(N) < 0.7
    plan, _ = prefill_plan.plan_chunks(jnp.asarray(bounds), jnp.asarray(live), 1, T)
    chunks, begin, low, high, shown = map(np.asarray, plan)
    owner = np.full(T, -1)
    for n in range(N + 2):
        for at_chunk in range(chunks[n], chunks[n + 1]):
            at = begin[at_chunk, 0] + np.arange(low[at_chunk, 0], high[at_chunk, 0])
            assert begin[at_chunk, 0] % prefill_plan.ALIGNED == 0
            assert (owner[at] == -1).all()
            owner[at] = n
            assert shown[at_chunk, 0] == (high[at_chunk, 0] if 0 < n <= N and live[n - 1] else 0)
    assert (owner == np.searchsorted(bounds, np.arange(T), side="right")).all()
    x = jnp.asarray(rng.standard_normal((1, T, 2, 3)))
    back = prefill_plan.out_of_chunks(prefill_plan.in_chunks(x, plan), plan, T)
    shown = (owner > 0) & (owner <= N) & np.append(live, [False] * 2)[owner - 1]
    assert_same_bits(back, np.where(shown[None, :, None, None], np.asarray(x), 0))
