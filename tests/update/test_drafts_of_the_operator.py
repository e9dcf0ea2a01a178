"""Drafts of the operator: read-outs without a trace, then the accepted tokens and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import IMPLEMENTATIONS, ON_GPU, assert_near, assert_same_bits, running

import kda_jax
from kda_contracts import ContractError

N, T, H, HV, K, V, S = 5, 4, 2, 4, 32, 16, 9
SLOTS = np.array([4, -1, 0, 7, 2], np.int32)
SOURCES = np.array([4, 1, 5, -1, 2], np.int32)
ACCEPTED = np.array([3, 2, 0, 4, 1], np.int32)
BOUNDS = np.array([0, 4, 5, 9, 13, 14], np.int32)  # of unequal drafts, end to end
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_form = pytest.mark.parametrize("form", ["dense", "varlen"])


def tokens(form, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    rows = (N, T) if form == "dense" else (1, BOUNDS[-1] + 2)  # two tokens of no sequence

    def normal(*shape):
        return jnp.asarray(rng.standard_normal((*rows, *shape), np.float32), dtype)

    x = [normal(H, K), normal(H, K), normal(HV, V), -jnp.abs(normal(HV, K)), normal(HV)]
    return [*x[:4], jax.nn.sigmoid(x[4])], jnp.asarray(
        rng.standard_normal((S, HV, V, K), np.float32)
    )


def of_form(form):
    return dict(cu_seqlens=jnp.asarray(BOUNDS)) if form == "varlen" else {}


def first_tokens(x, form, n, count):
    """The first tokens of sequence n alone, as a call of one row."""
    row, first = (n, 0) if form == "dense" else (0, BOUNDS[n])
    return [y[row : row + 1, first : first + count] for y in x]


@pytest.mark.slow
@pytest.mark.sampled(5)
@each_form
@each_implementation
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_a_commit_is_a_call_over_the_accepted_tokens(implementation, form, pool_dtype):
    x, pool = tokens(form)
    pool, options = pool.astype(pool_dtype), dict(use_qk_l2norm_in_kernel=True)
    with running(implementation):
        out, drafts = jax.jit(
            lambda x, pool: kda_jax.recurrent_verify(
                *x,
                pool,
                SLOTS,
                sources=SOURCES,
                implementation=implementation,
                **options,
                **of_form(form),
            )
        )(x, pool)
        whole, _ = kda_jax.recurrent_kda(
            *x,
            pool,
            SLOTS,
            sources=SOURCES,
            implementation=implementation,
            **options,
            **of_form(form),
        )
        assert_near(out, whole, 1e-6)
        after = jax.jit(
            lambda pool, drafts: kda_jax.commit(
                pool,
                drafts,
                SLOTS,
                jnp.minimum(ACCEPTED, np.diff(BOUNDS)) if form == "varlen" else ACCEPTED,
                sources=SOURCES,
                implementation=implementation,
                **of_form(form),
            )
        )(pool, drafts)
        expected = np.array(pool.astype(jnp.float32))
        for n in np.flatnonzero((SLOTS >= 0) & (ACCEPTED > 0)):
            count = min(ACCEPTED[n], np.diff(BOUNDS)[n]) if form == "varlen" else ACCEPTED[n]
            _, one = kda_jax.recurrent_kda(
                *first_tokens(x, form, n, count),
                pool,
                SLOTS[n : n + 1],
                sources=SOURCES[n : n + 1],
                implementation=implementation,
                **options,
            )
            expected[SLOTS[n]] = one[SLOTS[n]].astype(jnp.float32)
    got = np.asarray(after.astype(jnp.float32))
    if ON_GPU and implementation == "mosaic_gpu":
        assert_same_bits(got, expected)
    # Another program's sums may differ in a last bit, of the pool's dtype at most.
    assert_near(got, expected, 1e-6 if pool_dtype == "float32" else 1e-3)
    rest = np.setdiff1d(np.arange(S), SLOTS[(SLOTS >= 0) & (ACCEPTED > 0)])
    assert_same_bits(got[rest], np.asarray(pool.astype(jnp.float32))[rest])


@each_form
@each_implementation
def test_nothing_but_the_accepted_tokens_is_read(implementation, form):
    """What stands behind them, in padded rows and in free slots, may hold anything."""
    x, pool = tokens(form)
    bounds = BOUNDS if form == "varlen" else np.arange(N + 1) * T
    accepted = np.minimum(ACCEPTED, np.diff(bounds))
    _, drafts = kda_jax.recurrent_verify(*x, pool, SLOTS, implementation="xla", **of_form(form))
    kept = np.zeros(bounds[-1] + (2 if form == "varlen" else 0), bool)
    for n in range(N):
        kept[bounds[n] : bounds[n] + (accepted[n] if SLOTS[n] >= 0 else 0)] = True
    kept = kept.reshape(x[0].shape[:2])
    poisoned = jax.tree.map(
        lambda y: jnp.where(kept.reshape(*kept.shape, *(1,) * (y.ndim - 2)), y, jnp.nan), drafts
    )
    free = np.setdiff1d(np.arange(S), SLOTS)
    results = []
    for given, held in ((drafts, pool), (poisoned, pool.at[free].set(jnp.nan))):
        with running(implementation):
            results.append(
                kda_jax.commit(
                    held,
                    given,
                    SLOTS,
                    accepted,
                    implementation=implementation,
                    **of_form(form),
                )
            )
    used = np.setdiff1d(np.arange(S), free)
    assert_same_bits(np.asarray(results[1])[used], np.asarray(results[0])[used])
    assert np.isnan(np.asarray(results[1])[free]).all()


def test_more_accepted_tokens_than_there_are_leave_the_slot():
    x, pool = tokens("dense")
    _, drafts = kda_jax.recurrent_verify(*x, pool, SLOTS)
    for count in (T + 1, -1, 2**31 - 1):
        after = kda_jax.commit(pool, drafts, SLOTS, np.full(N, count, np.int32))
        assert_same_bits(after, pool)


@each_implementation
def test_verify_writes_nothing_and_commit_is_in_place(implementation):
    x, pool = tokens("dense")
    ref, before = jax.new_ref(pool), np.array(pool)
    with running(implementation):
        _, drafts = jax.jit(
            lambda ref, x: kda_jax.recurrent_verify(*x, ref, SLOTS, implementation=implementation)
        )(ref, x)
        assert_same_bits(ref[...], before)

        def step(pool, drafts):
            return kda_jax.commit(pool, drafts, SLOTS, ACCEPTED, implementation=implementation)

        donating = jax.jit(step, donate_argnums=0)
        memory = donating.lower(pool, drafts).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool.nbytes
        expected = donating(jnp.array(pool), drafts)
        assert jax.jit(step)(ref, drafts) is None
    assert_same_bits(ref[...], expected)


def test_a_batch_under_vmap_is_a_loop():
    several = [tokens("dense", seed) for seed in range(3)]
    x, pools = jax.tree.map(lambda *y: jnp.stack(y), *several)

    def step(x, pool, accepted):
        out, drafts = kda_jax.recurrent_verify(*x, pool, SLOTS)
        return out, kda_jax.commit(pool, drafts, SLOTS, accepted)

    accepted = jnp.stack([jnp.roll(jnp.asarray(ACCEPTED), n) for n in range(3)])
    got = jax.vmap(step)(x, pools, accepted)
    for n, (one, pool) in enumerate(several):
        for y, expected in zip(got, step(one, pool, accepted[n]), strict=True):
            assert_near(y[n], expected, 1e-6)


def test_drafts_say_what_is_wrong_with_them():
    x, pool = tokens("dense")
    _, drafts = kda_jax.recurrent_verify(*x, pool, SLOTS)
    with pytest.raises(ContractError, match="`num_accepted` must have shape"):
        kda_jax.commit(pool, drafts, SLOTS, ACCEPTED[:3])
    with pytest.raises(ContractError, match="`sources` go with Drafts"):
        kda_jax.commit(pool, jnp.zeros((N, T, HV, V, K)), SLOTS, ACCEPTED, sources=SOURCES)
    with pytest.raises(ContractError, match="`pool` must be"):
        kda_jax.commit(pool[0], drafts, SLOTS, ACCEPTED)
    with (
        running("mosaic_gpu"),
        pytest.raises(NotImplementedError, match="the kernels are inference only"),
    ):
        jax.grad(
            lambda pool: kda_jax.commit(
                pool, drafts, SLOTS, ACCEPTED, implementation="mosaic_gpu"
            ).sum()
        )(pool)


def test_a_named_implementation_of_states_runs_or_raises():
    _, pool = tokens("dense")
    call = pool, jnp.zeros((N, T, HV, V, K)), SLOTS, ACCEPTED
    with pytest.raises(NotImplementedError, match="states are written by XLA"):
        kda_jax.commit(*call, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="`implementation` must be"):
        kda_jax.commit(*call, implementation="nonsense")


def test_explain_speaks_of_drafts_and_of_states():
    x, pool = tokens("dense")
    _, drafts = kda_jax.recurrent_verify(*x, pool, SLOTS)
    told = kda_jax.explain(kda_jax.commit, pool, drafts, SLOTS, ACCEPTED)
    assert (told.implementation, told.sizes.T) == ("xla", T)
    states = jnp.zeros((N, T, HV, V, K))
    told = kda_jax.explain(kda_jax.commit, pool, states, SLOTS, ACCEPTED)
    assert "states are written by XLA" in told.reasons["mosaic_gpu"]
    told = kda_jax.explain(kda_jax.recurrent_verify, *x, pool, SLOTS)
    assert told.sizes.N == N
