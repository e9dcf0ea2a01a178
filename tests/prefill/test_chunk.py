"""Prefill in chunks against the float64 oracle and the recurrence.

Edges of chunks, strong decays, varlen calls, derivatives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import DECAY_PATTERNS, HV, K, S, V, operands, set_decays, wanted
from support import ON_GPU, assert_near, assert_same_bits

import kda_jax
from kda_contracts import ContractError
from kda_jax import prefill, prefill_xla

LIMIT = 1e-5  # float32 operands, relative


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    """However few the tokens are, also on a CPU."""
    monkeypatch.setattr(prefill, "SHORT", 0)


def check(x, limit=LIMIT, cu_seqlens=None, **options):
    bounds = {} if cu_seqlens is None else {"cu_seqlens": jnp.asarray(cu_seqlens, jnp.int32)}
    arrays = {name: jnp.asarray(y) for name, y in x.items()}
    out, state = jax.jit(lambda x: kda_jax.chunk_kda(**x, **bounds, **options))(arrays)
    expected_out, expected = wanted(x, cu_seqlens)
    assert_near(out, expected_out, limit)
    assert_near(state, expected, limit)
    return out, state


@pytest.mark.optimized
@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("decay", [1e-3, 0.3, 5.0])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 200])
def test_dense_rows_at_the_edges_of_chunks(T, decay):
    check(operands(3, T, decay=decay))


@pytest.mark.skipif(ON_GPU, reason="asks what a CPU does")
def test_few_tokens_go_one_by_one_on_a_cpu(monkeypatch):
    monkeypatch.undo()

    def program(T):
        return jax.jit(lambda x: kda_jax.chunk_kda(**x)).lower(operands(2, T)).as_text()

    assert prefill.SHORT > 0
    assert "kda_tokens_xla" in program(prefill.SHORT)
    assert "kda_chunk_xla" in program(prefill.SHORT + 1)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("cu_seqlens", [(0, 5, 5, 11, 19), None])
def test_tokens_one_by_one_are_what_chunks_are(monkeypatch, cu_seqlens):
    """Padded slots, sources, l2norm, dtypes, a Ref, a pool that is rounded once."""
    N = 4
    x = operands(N if cu_seqlens is None else 1, 20, N=N, dtype="bfloat16", decay=0.3)
    x = {name: jnp.asarray(y) for name, y in x.items()}
    x["pool"] = x["pool"].astype(jnp.bfloat16)
    x["slots"] = x["slots"].at[2].set(S)
    padded = (2, slice(None)) if cu_seqlens is None else (0, slice(5, 11))
    x["v"] = x["v"].at[padded].set(jnp.nan)
    bounds = None if cu_seqlens is None else jnp.asarray(cu_seqlens, jnp.int32)
    options = dict(sources=jnp.array([1, -1, 0, x["slots"][3]]), cu_seqlens=bounds)
    options |= dict(use_qk_l2norm_in_kernel=True, scale=0.3, out_dtype=jnp.float32)
    wanted_out, wanted_state = kda_jax.chunk_kda(**x, **options)
    monkeypatch.undo()
    out, state = kda_jax.chunk_kda(**x, **options)
    assert_near(out, wanted_out, LIMIT)
    assert_same_bits(np.asarray(out)[padded], np.zeros_like(np.asarray(out)[padded]))
    assert state.dtype == jnp.bfloat16
    assert np.mean(np.asarray(state) != np.asarray(wanted_state)) < 0.01
    ref = jax.new_ref(x["pool"].copy())
    ref_out, none = kda_jax.chunk_kda(**x | dict(pool=ref), **options)
    assert none is None
    assert_same_bits(ref_out, out)
    assert_same_bits(ref[...], state)

    def gradients():
        def loss(tensors):
            out, state = kda_jax.chunk_kda(**x | tensors, **options)
            return (out**2).sum() + (state.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)({name: x[name] for name in ("q", "k", "v", "log_decay", "beta")})

    got = gradients()
    monkeypatch.setattr(prefill, "SHORT", 0)
    for name, expected in gradients().items():
        assert_near(got[name].astype(jnp.float32), expected.astype(jnp.float32), 1e-2)


def test_sequences_end_to_end_with_empty_ones():
    lengths = (0, 65, 1, 0, 64, 200)
    bounds = np.cumsum((0, *lengths))
    x = operands(1, bounds[-1], N=6, decay=0.3)
    x["slots"][2] = -1
    for name in ("q", "v", "beta", "log_decay"):
        x[name][:, bounds[2] : bounds[3]] = np.nan  # a padded sequence may hold anything
    out, state = check(x, cu_seqlens=bounds)
    assert_same_bits(np.asarray(out)[0, bounds[2] : bounds[3]], np.zeros((1, HV, V), np.float32))
    for n in (0, 3):
        assert_same_bits(np.asarray(state)[x["slots"][n]], x["pool"][x["slots"][n]])


def test_padded_rows_and_other_slots_stay():
    x = operands(3, 70)
    x["slots"][1] = S
    x["v"][1] = np.nan
    free = np.setdiff1d(np.arange(S), x["slots"])
    x["pool"][free] = 7.0
    out, state = check(x)
    assert not np.asarray(out)[1].any()
    assert_same_bits(np.asarray(state)[free], x["pool"][free])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pattern", DECAY_PATTERNS)
def test_strong_decays_neither_overflow_nor_lose_the_answer(pattern):
    x = operands(2, 130, decay=1e-3)
    set_decays(x["log_decay"], pattern)
    check(x)


def test_equal_keys_do_not_blow_the_triangle_up():
    """Products of the system's powers would: its inverse is small, they are not."""
    x = operands(1, 128, decay=0.0)
    x["k"][:] = x["k"][:, :1]
    x["beta"][:] = 1.0
    check(x)


def test_sources_start_sequences_elsewhere():
    x = operands(3, 40)
    sources = np.array([x["slots"][0], -1, np.setdiff1d(np.arange(S), x["slots"])[0]], np.int32)
    arrays = {name: jnp.asarray(y) for name, y in x.items()}
    out, state = kda_jax.chunk_kda(**arrays, sources=jnp.asarray(sources))
    expected_out, expected = wanted(x, sources=sources)
    assert_near(out, expected_out, LIMIT)
    assert_near(state, expected, LIMIT)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_operands(dtype):
    x = operands(2, 100, dtype=dtype, decay=0.3)
    out, state = kda_jax.chunk_kda(
        **{name: jnp.asarray(y) for name, y in x.items()}, out_dtype="float32"
    )
    expected_out, expected = wanted(x)
    assert_near(out, expected_out, 5e-3)
    assert_near(state, expected, 5e-3)
    assert kda_jax.chunk_kda(**x)[0].dtype == jnp.dtype(dtype)


def test_l2norm_and_scale():
    x = operands(2, 70)
    x["k"] *= 3
    options = dict(use_qk_l2norm_in_kernel=True, scale=0.3)
    out, state = kda_jax.chunk_kda(**{name: jnp.asarray(y) for name, y in x.items()}, **options)
    expected_out, expected = wanted(x, l2norm=True, scale=0.3)
    assert_near(out, expected_out, LIMIT)
    assert_near(state, expected, LIMIT)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("cu_seqlens", [None, (0, 5, 5, 90)])
def test_derivatives_are_those_of_the_recurrence(cu_seqlens):
    x = operands(3 if cu_seqlens is None else 1, 45 if cu_seqlens is None else 90, N=3, decay=0.3)
    x["log_decay"][:, 10] = -60.0
    x = {name: jnp.asarray(y) for name, y in x.items()}
    slots, bounds = (
        x.pop("slots"),
        None if cu_seqlens is None else jnp.asarray(cu_seqlens, jnp.int32),
    )
    weights = jax.random.normal(jax.random.key(0), x["v"].shape)

    def loss(x, op, **options):
        out, state = op(**x, slots=slots, cu_seqlens=bounds, **options)
        return (out * weights).sum() + (state**2).sum()

    got = jax.jit(jax.grad(lambda x: loss(x, kda_jax.chunk_kda)))(x)
    expected = jax.jit(jax.grad(lambda x: loss(x, kda_jax.recurrent_kda, implementation="xla")))(x)
    for name in x:
        assert_near(got[name], expected[name], 1e-4)


@pytest.mark.slow
def test_derivatives_where_nothing_decays():
    """At a log decay of exactly 0: of all channels, of half of them, of a tenth, and equal keys."""
    x = {name: jnp.asarray(y) for name, y in operands(1, 70, decay=0.1, K=8, V=5).items()}
    weights = jax.random.normal(jax.random.key(0), x["v"].shape)

    def gradient(op):
        def loss(tensors, log_decay):
            out, state = op(**x | tensors | dict(log_decay=log_decay), implementation="xla")
            return (out * weights).sum() + state.sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    got, expected = gradient(kda_jax.chunk_kda), gradient(kda_jax.recurrent_kda)
    drawn = np.random.default_rng(3).uniform(size=x["log_decay"].shape)
    tensors = {name: x[name] for name in ("q", "k", "v", "beta")}
    alike = tensors | dict(k=jnp.full_like(x["k"], 8**-0.5), beta=jnp.full_like(x["beta"], 2.0))
    for share in (1.0, 0.5, 0.1):
        log_decay = jnp.where(drawn < share, 0.0, x["log_decay"])
        # Equal keys under a beta of 2 lose nothing of an error.
        for given, limit in ((tensors, 1e-6), (alike, 2e-5)):
            one, other = got(given, log_decay), expected(given, log_decay)
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
                assert_near(a, b, limit)


def test_chunk_kda_clips_boundaries_behind_the_tokens():
    x = operands(1, 5, N=2)
    out, state = kda_jax.chunk_kda(**x, cu_seqlens=jnp.array([0, 1000, 1001]))
    assert_same_bits(np.asarray(state)[x["slots"][1]], x["pool"][x["slots"][1]])
    expected_out, expected = wanted(x, (0, 5, 5))
    assert_near(out, expected_out, LIMIT)
    assert_near(state, expected, LIMIT)


def test_byte_order_is_no_matter():
    x = operands(2, 5)
    out, _ = kda_jax.chunk_kda(**x | {"v": x["v"].astype(">f4")})
    assert_same_bits(out, kda_jax.chunk_kda(**x)[0])


def test_chunk_kda_updates_a_ref_and_takes_a_donated_pool():
    x = {name: jnp.asarray(y) for name, y in operands(2, 20).items()}
    out, state = kda_jax.chunk_kda(**x)
    pool = x.pop("pool")
    ref = jax.new_ref(pool.copy())
    ref_out, none = jax.jit(lambda r, x: kda_jax.chunk_kda(**x, pool=r))(ref, x)
    assert none is None
    assert_near(ref_out, out, 1e-6)
    assert_near(ref[...], state, 1e-6)
    jax.jit(lambda pool, x: kda_jax.chunk_kda(**x, pool=pool), donate_argnums=0)(pool, x)
    assert pool.is_deleted()


@pytest.mark.slow
def test_one_compilation_serves_any_boundaries():
    x = {name: jnp.asarray(y) for name, y in operands(1, 130, N=3).items()}
    traced = []

    @jax.jit
    def step(x, bounds):
        traced.append(1)
        return kda_jax.chunk_kda(**x, cu_seqlens=bounds)[0]

    for bounds in ((0, 10, 70, 130), (0, 0, 130, 130), (0, 64, 128, 130)):
        out = step(x, jnp.asarray(bounds, jnp.int32))
        assert_near(out, wanted({n: np.asarray(y) for n, y in x.items()}, bounds)[0], LIMIT)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"log_decay": np.zeros((2, 5, HV), np.float32)},
            "`log_decay` must have shape (2, 5, 4, 32)",
        ),
        (
            {"sources": np.zeros(3, np.int32)},
            "`sources` must have shape (2,) (got (3,)).",
        ),
        (
            {"cu_seqlens": np.zeros(3, np.int32)},
            "`q` of a varlen call must have one row (got B=2 for N=2 sequences).",
        ),
        (
            {"pool": np.zeros((S, HV, K, V), np.float32)},
            "Unexpected pool shape: (6, 4, 32, 24)",
        ),
    ],
)
def test_messages_of_chunk_kda(wrong, message):
    with pytest.raises(ContractError) as error:
        kda_jax.chunk_kda(**operands(2, 5) | wrong)
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["ones", "random", "alternating"])
def test_the_inverse_of_a_chunk_is_exact_where_a_power_series_would_cancel(kind):
    size = prefill_xla.CHUNK
    A = dict(
        ones=np.ones((size, size)),  # the same key at every token
        random=np.random.default_rng(0).uniform(-1, 1, (size, size)) / 4,
        alternating=(-1.0) ** np.add.outer(np.arange(size), np.arange(size)),
    )[kind]
    A = np.tril(A, -1)
    got = prefill_xla._inverse(jnp.asarray(np.stack([A, 0 * A]), jnp.float32))
    assert_near(got[0], np.linalg.inv(np.eye(size) + A), 1e-6)
    assert_near(got[1], np.eye(size), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("varlen", [False, True])
def test_any_number_of_tokens_exports_as_one_program(varlen):
    T = jax.export.symbolic_shape("T")[0]
    x = operands(1, 150)
    shapes = {
        n: jax.ShapeDtypeStruct(
            (1, T, *y.shape[2:]) if y.ndim > 1 and len(y) == 1 else y.shape, y.dtype
        )
        for n, y in x.items()
    }
    bounds = dict(cu_seqlens=np.array([0, 150], np.int32)) if varlen else {}
    program = jax.export.export(jax.jit(lambda x: kda_jax.chunk_kda(**x, **bounds)))(shapes)
    out, state = program.call({name: jnp.asarray(y) for name, y in x.items()})
    expected_out, expected = wanted(x)
    assert_near(out, expected_out, LIMIT)
    assert_near(state, expected, LIMIT)


def test_64_bit_mode_widens_nothing():
    x = {name: jnp.asarray(y) for name, y in operands(1, 70).items()}
    with jax.enable_x64(True):
        lowered = jax.jit(
            lambda x: kda_jax.chunk_kda(**x, cu_seqlens=jnp.array([0, 70], jnp.int32))
        ).lower(x)
    assert "xf64" not in lowered.as_text()
