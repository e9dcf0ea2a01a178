"""Several tokens a sequence, dense and varlen: against the oracle and the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GATES, POOL_DTYPES, rounding
from support import IMPLEMENTATIONS, ON_GPU, STATE_LIMIT, assert_near, assert_same_bits, running
from updates import FORMS, VARLEN, Update, assert_meets_oracle, expected, make_update, run

import kda_jax
from kda_contracts import Sizes
from kda_jax.tools import oracle

BOTH = [
    (name, form)
    for form in FORMS
    for name in IMPLEMENTATIONS
    if name != "mosaic_gpu" or form != "odd"
]


def assert_same(implementation, got, wanted):
    """Bit for bit in a kernel on a GPU. In XLA, or in an interpreted kernel, within 1e-6."""
    if ON_GPU and implementation != "xla":
        assert_same_bits(got, wanted)
    else:
        got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
        assert_near(got, wanted, 1e-6)


@pytest.mark.optimized
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("implementation", "form"), BOTH)
def test_several_tokens_meet_the_oracle(implementation, form, gate):
    call = make_update(FORMS[form])
    out, state = run(call, implementation, lower_bound=GATES[gate])
    assert_meets_oracle(call, out, state, STATE_LIMIT, lower_bound=GATES[gate])


@pytest.mark.parametrize("pool_dtype", POOL_DTYPES[1:])
@pytest.mark.parametrize(("implementation", "form"), BOTH)
def test_a_narrow_pool_stays_near_the_oracle(implementation, form, pool_dtype):
    """The oracle does not round between tokens, so the limit is of several roundings."""
    call = make_update(FORMS[form], pool_dtype=pool_dtype)
    out, state = run(call, implementation)
    wanted_out, wanted, _ = expected(call)
    limit = 4 * rounding(pool_dtype)
    assert_near(
        np.asarray(out)[call.tokens], wanted_out[call.tokens], limit + 2 * rounding("bfloat16")
    )
    assert_near(np.asarray(state)[call.slots[call.live]], wanted[call.slots[call.live]], limit)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("pool_dtype", POOL_DTYPES[1:])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_narrow_pool_is_rounded_after_every_token(implementation, pool_dtype, varlen):
    """Six tokens at once leave the pool that six calls of one token leave: bits are counted."""
    N, T, H, K = 2, 6, 2, 64
    rng = np.random.default_rng(0)
    q, k, v, decay = (rng.standard_normal((N, T, H, K), dtype=np.float32) for _ in range(4))
    beta = rng.uniform(0, 1, (N, T, H)).astype(np.float32)
    tokens = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, -np.abs(decay), beta)]
    pool = jnp.asarray(rng.standard_normal((4, H, K, K), dtype=np.float32), pool_dtype)
    slots, ends = jnp.array([2, 1]), dict(cu_seqlens=jnp.array([0, T, 2 * T])) if varlen else {}

    @jax.jit
    def step(tokens, pool, **ends):
        return kda_jax.recurrent_kda(
            *tokens,
            pool,
            slots,
            use_qk_l2norm_in_kernel=True,
            implementation=implementation,
            **ends,
        )[1]

    flat = [x.reshape(1, N * T, *x.shape[2:]) for x in tokens] if varlen else tokens
    with running(implementation):
        at_once = step(flat, pool, **ends)
        for t in range(T):
            pool = step([x[:, t : t + 1] for x in tokens], pool)
    # An unrounded carry changes a quarter of the numbers. Fusions, XLA's for a GPU and those of an
    # interpreted kernel, may move a sum's last bit: 6 of 32,768 were seen.
    exact = ON_GPU or implementation == "xla"
    assert int((at_once != pool).sum()) <= (0 if exact else pool.size // 1000)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_of_1_to_33(implementation):
    lengths = (
        (33, 1, 32, 2, 31, 16, 17, 3)
        if implementation == "mosaic_gpu" and not ON_GPU
        else tuple(range(1, 34))
    )
    call = make_update(lengths, dtype="float32", padded=False)
    out, state = run(call, implementation)
    assert_meets_oracle(call, out, state, 2 * STATE_LIMIT)


def assert_equals_one_by_one(call, implementation, pool_dtype):
    """One call of several tokens gives what so many calls of one token give."""
    out, state = run(call, implementation)
    x, pool, outs = (
        call.operands,
        call.operands["initial_state_source"],
        np.zeros(np.shape(out), np.float32),
    )
    bounds = x.get("cu_seqlens", np.arange(call.sizes.N + 1) * call.sizes.T)
    flat = {name: x[name].reshape(-1, *x[name].shape[2:]) for name in ("q", "k", "v", "a", "b")}
    for step in range(max(np.diff(bounds))):
        rows = np.flatnonzero(np.diff(bounds) > step)
        tokens = {name: flat[name][bounds[rows] + step][:, None] for name in flat}
        one = Update(
            call.sizes,
            tokens | {name: x[name] for name in ("A_log", "dt_bias")},
            call.live,
            call.tokens,
        )
        one.operands.update(
            initial_state_source=pool, initial_state_indices=x["initial_state_indices"][rows]
        )
        row_out, pool = run(one, implementation)
        outs.reshape(-1, *outs.shape[2:])[bounds[rows] + step] = np.asarray(row_out, np.float32)[
            :, 0
        ]
    live = call.slots[call.live & (np.diff(bounds) > 0)]
    if pool_dtype == "float32" or (ON_GPU and implementation != "xla"):
        assert_same(implementation, np.asarray(out, np.float32), outs)
        assert_same(implementation, np.asarray(state)[live], np.asarray(pool)[live])
    else:
        assert_near(np.asarray(state)[live], np.asarray(pool)[live], rounding(pool_dtype))


@pytest.mark.sampled(2)
@pytest.mark.optimized
@pytest.mark.slow  # CI compiles for the oldest JAX without optimizing, which moves last bits
@pytest.mark.parametrize("pool_dtype", POOL_DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", ["dense", "varlen"])
def test_tokens_in_one_call_are_so_many_calls(implementation, form, pool_dtype):
    call = make_update(FORMS[form], pool_dtype=pool_dtype, padded=False)
    assert_equals_one_by_one(call, implementation, pool_dtype)


@pytest.mark.optimized
@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("K", "V"), [(32, 64), (64, 48), (96, 48), (128, 16), (128, 96), (192, 64), (256, 32)]
)
def test_however_a_kernel_spreads_a_row_its_sums_are_the_same(K, V, pool_dtype):
    """Each pair is another layout of the Mosaic kernel: folded or not, repeats, passes."""
    call = make_update(
        Sizes(B=2, T=6, N=2, H=1, HV=2, K=K, V=V, S=3), dtype="float32", pool_dtype=pool_dtype
    )
    if pool_dtype == "float32":  # the oracle does not round after each token
        assert_meets_oracle(call, *run(call, "mosaic_gpu"), 2 * STATE_LIMIT)
    assert_equals_one_by_one(call, "mosaic_gpu", pool_dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dense_varlen_and_packed_agree_for_one_token(implementation):
    call = make_update(FORMS["one_token"])
    x = call.operands
    dense_out, dense = run(call, implementation)
    flat = {name: x[name].reshape(1, -1, *x[name].shape[2:]) for name in ("q", "k", "v", "a", "b")}
    varlen = Update(
        call.sizes, x | flat | dict(cu_seqlens=np.arange(6, dtype=np.int32)), call.live, call.tokens
    )
    varlen_out, state = run(varlen, implementation)
    packed = kda_jax.pack_qkv(*(jnp.asarray(x[name][:, 0]) for name in ("q", "k", "v")))
    with running(implementation):
        packed_out, packed_state = kda_jax.packed_decode(
            packed,
            jnp.asarray(x["a"][:, 0]),
            jnp.asarray(x["b"][:, 0]),
            x["A_log"],
            x["dt_bias"],
            jnp.asarray(x["initial_state_source"]),
            x["initial_state_indices"],
            use_qk_l2norm_in_kernel=True,
            implementation=implementation,
        )
    live = call.slots[call.live]
    for other_out, other in (
        (np.asarray(varlen_out)[0][:, None], state),
        (packed_out, packed_state),
    ):
        assert_same(implementation, other_out, dense_out)
        assert_same(implementation, np.asarray(other)[live], np.asarray(dense)[live])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_sequence_is_not_ambiguous(implementation):
    """N = 1, T = 1: with cu_seqlens and without, the same."""
    call = make_update((1,))
    dense = Update(
        call.sizes,
        {n: x for n, x in call.operands.items() if n != "cu_seqlens"},
        call.live,
        call.tokens,
    )
    for got, wanted in zip(run(call, implementation), run(dense, implementation), strict=True):
        live = np.isfinite(np.asarray(wanted, np.float32))
        assert_same(implementation, np.asarray(got)[live], np.asarray(wanted)[live])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        dict(A_log=None, lower_bound=-5.0),
        dict(dt_bias=None),
        dict(allow_neg_eigval=True),
        dict(softplus_beta=2.5),
        dict(softplus_beta=0.5, softplus_threshold=0.25),
        dict(scale=2.0, use_qk_l2norm_in_kernel=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_options_of_the_operator(implementation, options):
    call = make_update(FORMS["dense"])
    arrays = {name: x for name, x in options.items() if name in ("A_log", "dt_bias")}
    call = Update(call.sizes, call.operands | arrays, call.live, call.tokens)
    options = {name: x for name, x in options.items() if name not in arrays}
    out, state = run(call, implementation, **options)
    assert_meets_oracle(call, out, state, 3 * STATE_LIMIT, **options)


@pytest.mark.parametrize("form", ["dense", "varlen"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_states_after_every_token(implementation, form):
    call = make_update(FORMS[form])
    before = call.operands["initial_state_source"]
    out, state, states = run(call, implementation, update_state=False, intermediate_states=True)
    wanted_out, _, wanted = expected(call)
    states = np.asarray(states)
    assert_same_bits(state, before)
    assert_near(states[call.tokens], wanted[call.tokens], STATE_LIMIT)
    assert_same_bits(states[~call.tokens], np.zeros_like(states[~call.tokens]))
    assert_near(
        np.asarray(out)[call.tokens],
        wanted_out[call.tokens],
        STATE_LIMIT + 2 * rounding("bfloat16"),
    )
    bounds = call.operands.get("cu_seqlens", np.arange(call.sizes.N + 1) * call.sizes.T)
    _, advanced, again = run(call, implementation, intermediate_states=True)
    assert_same_bits(again, states)
    flat = states.reshape(-1, *states.shape[2:])
    for n in np.flatnonzero(call.live & (np.diff(bounds) > 0)):
        assert_same_bits(np.asarray(advanced)[call.slots[n]], flat[bounds[n + 1] - 1])


def draft_call(seed, slots, pool):
    """Four sequences of three drafted tokens. Slots 0 to 3 are their own, 4 to 15 the draft's."""
    sizes = Sizes(B=4, T=3, N=4, H=1, HV=2, K=64, V=32, S=16)
    call = make_update(sizes, seed=seed, padded=False)
    call.operands.update(initial_state_source=pool, initial_state_indices=slots)
    return call


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_rejected_draft_costs_nothing(implementation):
    """Two drafts verified in the pool's own slots: the second starts from the accepted token."""
    pool = np.random.default_rng(1).standard_normal((16, 2, 32, 64), dtype=np.float32)
    own, draft = np.array([0, 1, 2, -1], np.int32), np.arange(4, 16, dtype=np.int32).reshape(4, 3)
    draft[1, 2] = 99  # outside: the state after that token is not kept
    accepted = np.array([2, 0, 3, 1], np.int32)
    first = draft_call(1, own, pool)
    out, state = run(first, implementation, update_state=False, intermediate_states=draft)
    wanted_out, wanted, _ = expected(first, write=draft, update_state=False)
    assert_near(np.asarray(out)[:3], wanted_out[:3], STATE_LIMIT + 2 * rounding("bfloat16"))
    assert_near(state, wanted, STATE_LIMIT)
    for slot in (
        0,
        1,
        2,
        3,
        draft[3, 0],
        9,
    ):  # the sequences' own, a padded one's, the one that is not kept
        assert_same_bits(np.asarray(state)[slot], pool[slot])

    second = draft_call(2, own, np.asarray(state))
    sources = np.array([draft[0, 1], 1, draft[2, 2], -1])
    out, state = run(
        second,
        implementation,
        update_state=False,
        intermediate_states=draft,
        num_accepted_tokens=accepted,
    )
    wanted_out, wanted, _ = expected(second, write=draft, sources=sources, update_state=False)
    assert_near(np.asarray(out)[:3], wanted_out[:3], STATE_LIMIT + 2 * rounding("bfloat16"))
    assert_near(state, wanted, 2 * STATE_LIMIT)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_negative_draft_slot_is_not_kept_and_does_not_wrap(implementation, varlen):
    sizes = Sizes(B=2, T=2, N=2, H=1, HV=2, K=64, V=32, S=8)
    call = make_update((2, 2) if varlen else sizes, padded=False)
    pool = np.random.default_rng(1).standard_normal((8, 2, 32, 64), dtype=np.float32)
    call.operands.update(
        initial_state_source=pool, initial_state_indices=np.array([5, 0], np.int32)
    )
    drafts = np.array([[2, -1], [3, 4]], np.int32)
    _, state = run(
        call,
        implementation,
        update_state=False,
        intermediate_states=drafts.reshape(1, 4) if varlen else drafts,
    )
    changed = (np.asarray(state) != pool).any((1, 2, 3))
    assert changed.nonzero()[0].tolist() == [2, 3, 4]


@pytest.mark.parametrize("form", ["dense", "varlen"])
def test_no_sequence_starts_from_anothers_slot(form):
    """More accepted tokens than the sequence has: its own slot, never a neighbour's."""
    call = make_update(FORMS[form], padded=False)
    lengths = np.diff(call.operands.get("cu_seqlens", np.arange(call.sizes.N + 1) * call.sizes.T))
    pool = np.random.default_rng(1).standard_normal(
        (40, *call.operands["initial_state_source"].shape[1:]), np.float32
    )
    call.operands.update(initial_state_source=pool)
    writes = np.arange(20, 20 + call.sizes.B * call.sizes.T, dtype=np.int32).reshape(
        call.sizes.B, call.sizes.T
    )
    got = run(
        call, "xla", update_state=False, intermediate_states=writes, num_accepted_tokens=lengths + 1
    )
    wanted = run(call, "xla", update_state=False, intermediate_states=writes)
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("form", ["dense", "varlen"])
def test_commit_advances_by_the_accepted_tokens(form):
    call = make_update(FORMS[form])
    pool = call.operands["initial_state_source"]
    _, _, states = run(call, "xla", update_state=False, intermediate_states=True)
    lengths = np.diff(call.operands.get("cu_seqlens", np.arange(call.sizes.N + 1) * call.sizes.T))
    accepted = np.minimum(np.array([2, 0, 1, 3, 1])[: call.sizes.N], lengths)
    boundaries = {name: call.operands[name] for name in ("cu_seqlens",) if name in call.operands}
    committed = kda_jax.commit(jnp.asarray(pool), states, call.slots, accepted, **boundaries)
    wanted, flat = pool.copy(), np.asarray(states).reshape(-1, *pool.shape[1:])
    first = np.cumsum((0, *lengths[:-1]))
    for n in np.flatnonzero(call.live & (accepted > 0)):
        wanted[call.slots[n]] = flat[first[n] + accepted[n] - 1]
    assert_same_bits(committed, wanted)
    beyond = kda_jax.commit(jnp.asarray(pool), states, call.slots, lengths + 1, **boundaries)
    assert_same_bits(beyond, pool)  # more than there are: never a neighbour's state
    ref = jax.new_ref(jnp.asarray(pool))
    assert (
        jax.jit(lambda r: kda_jax.commit(r, states, call.slots, accepted, **boundaries))(ref)
        is None
    )
    assert_same_bits(ref[...], wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_recurrence_with_gates_from_outside(implementation):
    call = make_update(FORMS["dense"])
    x = call.operands
    shape = (*x["v"].shape[:3], VARLEN["K"])
    decay, beta = oracle.gates(x["a"].reshape(shape), x["b"], x["A_log"], x["dt_bias"])
    decay, beta = (
        np.where(np.isfinite(gate), gate, 0).astype(np.float32) for gate in (decay, beta)
    )
    wanted = oracle.update(
        x["q"], x["k"], x["v"], decay, beta, x["initial_state_source"], call.slots, l2norm=False
    )
    with running(implementation):
        out, state = kda_jax.recurrent_kda(
            *(
                jnp.asarray(y)
                for y in (x["q"], x["k"], x["v"], decay, beta, x["initial_state_source"])
            ),
            jnp.asarray(call.slots),
            implementation=implementation,
        )
    assert_near(
        np.asarray(out)[call.tokens], wanted[0][call.tokens], STATE_LIMIT + 2 * rounding("bfloat16")
    )
    assert_near(
        np.asarray(state)[call.slots[call.live]], wanted[1][call.slots[call.live]], STATE_LIMIT
    )


def test_accepted_layouts_of_the_gates_give_the_same_bits():
    dense, varlen, one = (make_update(FORMS[form]) for form in ("dense", "varlen", "one_token"))
    for call, shapes in (
        (dense, {"a": [(4, 3, 4, 64)], "dt_bias": [(4, 64)], "A_log": [(1, 1, 4, 1)]}),
        (varlen, {"a": [(1, 10, 2, 64), (10, 2, 64), (10, 128)], "b": [(10, 2)]}),
        (
            one,
            {
                "a": [(5, 2, 32), (5, 1, 2, 32), (5, 64)],
                "b": [(5, 2)],
                "initial_state_source": [(7 * 2 * 16 * 32,)],
            },
        ),
    ):
        wanted = run(call, "xla")
        for name, layouts in shapes.items():
            for layout in layouts:
                other = Update(
                    call.sizes,
                    call.operands | {name: call.operands[name].reshape(layout)},
                    call.live,
                    call.tokens,
                )
                out, state = run(other, "xla")
                assert_same_bits(out, wanted[0])
                assert state.shape == other.operands["initial_state_source"].shape
                assert_same_bits(np.asarray(state).reshape(wanted[1].shape), wanted[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_ref_and_a_donated_pool_are_updated_in_place(implementation):
    call = make_update(FORMS["dense"])
    operands = {name: jnp.asarray(x) for name, x in call.operands.items()}
    wanted_out, wanted = run(call, implementation)

    def step(pool, x, **options):
        return kda_jax.fused_sigmoid_gating_kda_update(
            **x, initial_state_source=pool, implementation=implementation, **options
        )

    with running(implementation):
        pool = operands.pop("initial_state_source")
        ref = jax.new_ref(pool.copy())
        out, state = jax.jit(step)(ref, operands)
        assert state is None
        assert_same_bits(out, wanted_out)
        assert_same_bits(ref[...], wanted)
        kept = np.asarray(ref[...])
        jax.jit(lambda r, x: step(r, x, update_state=False)[0])(ref, operands)
        assert_same_bits(ref[...], kept)
        out, state = jax.jit(step, donate_argnums=0)(pool, operands)
        assert pool.is_deleted()
    assert_same_bits(state, wanted)


def test_xla_differentiates_through_several_tokens():
    call = make_update(FORMS["dense"], dtype="float32", padded=False)
    x = {name: jnp.asarray(y) for name, y in call.operands.items()}

    def loss(v, dt_bias):
        out, _ = kda_jax.fused_sigmoid_gating_kda_update(
            **x | dict(v=v, dt_bias=dt_bias), implementation="xla"
        )
        return (out**2).sum()

    slope = jax.grad(loss, argnums=(0, 1))(x["v"], x["dt_bias"])
    step = 1e-2
    direction = jnp.asarray(
        np.random.default_rng(3).standard_normal(x["dt_bias"].shape, np.float32)
    )
    numeric = (
        loss(x["v"], x["dt_bias"] + step * direction)
        - loss(x["v"], x["dt_bias"] - step * direction)
    ) / (2 * step)
    assert abs(float((slope[1] * direction).sum()) - float(numeric)) <= 0.02 * abs(float(numeric))


def test_boundaries_behind_the_tokens_touch_no_state():
    for implementation in IMPLEMENTATIONS:
        call = make_update((2, 3), padded=False)
        x = call.operands | dict(cu_seqlens=np.array([0, 1000, 1001], np.int32))
        _, state = run(Update(call.sizes, x, call.live, call.tokens), implementation)
        assert_same_bits(np.asarray(state)[call.slots[1]], x["initial_state_source"][call.slots[1]])


def test_a_ref_that_is_written_may_not_be_shared_under_vmap():
    call = make_update(FORMS["dense"], padded=False)
    x = {name: jnp.asarray(y) for name, y in call.operands.items()}
    ref, slots = jax.new_ref(x["initial_state_source"]), jnp.stack([x["initial_state_indices"]] * 2)
    shape = x["v"].shape[:3]
    decay, beta = -jnp.ones((*shape, 64)), jnp.ones(shape)
    states = jnp.ones((*shape[:2], *ref.shape[1:]))
    for step in (
        lambda slots: kda_jax.chunk_kda(x["q"], x["k"], x["v"], decay, beta, ref, slots)[0],
        lambda slots: kda_jax.recurrent_kda(
            x["q"], x["k"], x["v"], decay, beta, ref, slots, implementation="xla"
        )[0],
        lambda slots: (kda_jax.commit(ref, states, slots, jnp.ones(4, jnp.int32)), slots)[1],
        lambda slots: (kda_jax.clear_slots(ref, slots), slots)[1],
    ):
        with pytest.raises(NotImplementedError, match="under vmap this Ref is not mapped"):
            jax.vmap(step)(slots)


def test_a_pool_that_is_only_read_may_be_shared_under_vmap():
    call = make_update(FORMS["dense"])
    operands = {name: jnp.asarray(x) for name, x in call.operands.items()}
    ref = jax.new_ref(operands.pop("initial_state_source"))
    v = jnp.stack([operands.pop("v"), jnp.ones(call.operands["v"].shape, jnp.bfloat16)])

    def step(v):
        out, _ = kda_jax.fused_sigmoid_gating_kda_update(
            **operands, v=v, initial_state_source=ref, update_state=False, implementation="xla"
        )
        return out

    # Two XLA programs, whose last bits may differ on a GPU.
    assert_near(jax.jit(jax.vmap(step))(v)[0], run(call, "xla")[0], rounding("bfloat16"))


@pytest.mark.parametrize("sizes", [dict(B=0, N=0), dict(T=0), dict(S=0)], ids=str)
def test_nothing_to_do_is_a_call_like_any_other(sizes):
    sizes = Sizes(**dict(B=2, N=2, T=3, H=1, HV=2, K=8, V=4, S=3) | sizes)
    call = make_update(sizes)
    out, state, states = run(call, "xla", intermediate_states=True)
    assert out.shape == (sizes.B, sizes.T, 2, 4)
    assert states.shape == (sizes.B, sizes.T, 2, 4, 8)
    assert not np.asarray(out, np.float32).any()
    assert_same_bits(state, call.operands["initial_state_source"])


def test_tokens_that_no_sequence_holds_read_zero():
    for implementation in IMPLEMENTATIONS:
        call = make_update((2, 3), padded=False)
        x = call.operands | dict(cu_seqlens=np.array([0, 2, 4], np.int32))
        out, state = run(Update(call.sizes, x, call.live, call.tokens), implementation)
        wanted_out, wanted, _ = expected(Update(call.sizes, x, call.live, call.tokens))
        assert not np.asarray(out, np.float32)[0, 4].any()
        assert_near(
            np.asarray(out)[0, :4], wanted_out[0, :4], STATE_LIMIT + 2 * rounding("bfloat16")
        )
        assert_near(np.asarray(state)[call.slots], wanted[call.slots], STATE_LIMIT)
