"""Every operator under two vmaps against a loop, and derivatives of every kind.

Gradients meet float64; the others, and longer ones, those of the recurrence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import GRADIENT_CASES, gradient_case, operands
from support import assert_near

import kda_jax
from kda_jax import prefill_xla
from kda_jax.tools import oracle

SIZES = dict(H=2, HV=4, K=8, V=5)
BOUNDS = (0, 37, 37, 70)
OUTER, INNER = 2, 3  # the vmaps: no size is 1, which XLA would leave out


def tokens(T, cu_seqlens=None, **options):
    """`(tensors, slots, options)`: with three sequences, or as many rows."""
    x = operands(2 if cu_seqlens is None else 1, T, N=None if cu_seqlens is None else 3, **options)
    x = {name: jnp.asarray(y) for name, y in x.items()}
    slots = dict(slots=x.pop("slots"))
    if cu_seqlens is not None:
        slots |= dict(cu_seqlens=jnp.asarray(cu_seqlens, jnp.int32))
    return x, slots


def several(x):
    """`[OUTER, INNER, ...]` of each array, all of them different."""
    factors = 1 + 0.1 * jnp.arange(OUTER * INNER, dtype=jnp.float32).reshape(OUTER, INNER)
    return {
        name: factors.reshape(OUTER, INNER, *(1,) * y.ndim) * y[None, None] for name, y in x.items()
    }


def assert_is_a_loop(function, x, limit=2e-6):
    """`function` under two vmaps is what it is of each element."""
    got = jax.jit(jax.vmap(jax.vmap(function)))(x)
    alone = jax.jit(function)
    for i, j in ((0, 0), (0, INNER - 1), (OUTER - 1, 1)):
        expected = alone({name: y[i, j] for name, y in x.items()})
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert_near(a[i, j], b, limit)


@pytest.mark.slow
@pytest.mark.parametrize("cu_seqlens", [None, BOUNDS])
@pytest.mark.parametrize("op", [kda_jax.chunk_kda, kda_jax.recurrent_kda])
def test_long_sequences_under_two_vmaps_are_a_loop(op, cu_seqlens):
    x, slots = tokens(70, cu_seqlens, decay=0.3, **SIZES)
    assert_is_a_loop(lambda x: op(**x, **slots, implementation="xla"), several(x))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["packed_decode", "update", "conv_decode", "conv_prefill"])
def test_one_step_under_two_vmaps_is_a_loop(op):
    rng = np.random.default_rng(0)
    B, S, H, HV, K, V, C, W = 3, 5, *SIZES.values(), 6, 4

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))

    slots, bounds = jnp.array([3, -1, 0]), jnp.array([0, 2, 2, 7])
    gates = dict(a=normal(B, HV * K), b=normal(B, HV), A_log=normal(HV), dt_bias=normal(HV * K))
    pool, conv = normal(S, HV, V, K), dict(weight=normal(C, W), pool=normal(S, C, W - 1))
    step, x = {
        "packed_decode": (
            lambda x: kda_jax.packed_decode(**x, ssm_state_indices=slots),
            dict(mixed_qkv=normal(B, 2 * H * K + HV * V), initial_state=pool, **gates),
        ),
        "update": (
            lambda x: kda_jax.fused_sigmoid_gating_kda_update(**x, initial_state_indices=slots),
            dict(
                q=normal(B, 2, H, K),
                k=normal(B, 2, H, K),
                v=normal(B, 2, HV, V),
                initial_state_source=pool,
                **gates | dict(a=normal(B, 2, HV * K), b=normal(B, 2, HV)),
            ),
        ),
        "conv_decode": (
            lambda x: kda_jax.conv_decode(**x, slots=slots),
            dict(x=normal(B, C)) | conv,
        ),
        "conv_prefill": (
            lambda x: kda_jax.conv_prefill(**x, slots=slots, cu_seqlens=bounds),
            dict(x=normal(7, C)) | conv,
        ),
    }[op]
    assert_is_a_loop(step, several(x))


def loss_of(op, slots, v):
    """A scalar of chunk_kda's or recurrent_kda's operands, in which all results count."""
    weights = jax.random.normal(jax.random.key(0), v.shape)

    def loss(x):
        out, state = op(**x, **slots, implementation="xla")
        return (jnp.tanh(out) * weights).sum() + (state**2).sum()

    return loss


@functools.partial(jax.jit, static_argnames=("op", "l2norm"))
def gradients(op, tensors, slots, d_out, d_state, l2norm):
    """Of each tensor, from the cotangents of out and of the pool."""

    def results(tensors):
        return op(**tensors, **slots, use_qk_l2norm_in_kernel=l2norm, implementation="xla")

    return jax.vjp(results, tensors)[1]((d_out, d_state))[0]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", GRADIENT_CASES)
@pytest.mark.parametrize("op", [kda_jax.chunk_kda, kda_jax.recurrent_kda])
def test_gradients_meet_float64(op, case):
    x, options, d_out, d_state = gradient_case(case)
    if op is kda_jax.recurrent_kda:  # it starts from its own slots
        options |= dict(sources=None)
    expected = oracle.update_gradients(*x.values(), d_out, d_state, **options)
    slots = dict(slots=x.pop("slots")) | {
        name: options[name] for name in ("cu_seqlens", "sources") if options[name] is not None
    }
    got = gradients(op, x, slots, d_out, d_state, options["l2norm"])
    for name in x:
        assert_near(got[name], expected[name], 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("cu_seqlens", [BOUNDS, None])
def test_gradients_under_vmap_and_of_vmap(cu_seqlens):
    x, slots = tokens(70, cu_seqlens, decay=0.3, **SIZES)
    loss = loss_of(kda_jax.chunk_kda, slots, x["v"])
    stacked = several(x)
    assert_is_a_loop(jax.grad(loss), stacked, 1e-5)
    of_vmap = jax.jit(jax.grad(lambda x: jax.vmap(jax.vmap(loss))(x).sum()))(stacked)
    of_each = jax.jit(jax.vmap(jax.vmap(jax.grad(loss))))(stacked)
    for name in x:
        assert_near(of_vmap[name], of_each[name], 1e-5)


# More chunks than one turn of the loop has; borders in one turn, at its end, and over two.
TURN = prefill_xla.GROUP * prefill_xla.CHUNK
LONG = {
    "packed": (TURN + 200, (0, 130, TURN - 64, TURN + 200)),
    "rows": (TURN + 70, None),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
def test_values_and_gradients_over_several_turns(kind):
    T, cu_seqlens = LONG[kind]
    x, slots = tokens(T, cu_seqlens, decay=0.1, **SIZES)
    x["log_decay"] = x["log_decay"].at[:, 100].set(-jnp.inf)

    def both(op):
        return jax.jit(jax.value_and_grad(loss_of(op, slots, x["v"])))(x)

    (value, got), (wanted, expected) = both(kda_jax.chunk_kda), both(kda_jax.recurrent_kda)
    assert_near(value, wanted, 1e-5)
    for name in x:
        assert_near(got[name], expected[name], 2e-5)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("cu_seqlens", [BOUNDS, None])
def test_forward_derivatives_and_hessians_are_those_of_the_recurrence(cu_seqlens):
    x, slots = tokens(70, cu_seqlens, decay=0.3, **SIZES)
    direction = {
        name: jax.random.normal(jax.random.key(n), y.shape) for n, (name, y) in enumerate(x.items())
    }

    def derivatives(op):
        loss = loss_of(op, slots, x["v"])
        forward = jax.jvp(lambda x: op(**x, **slots, implementation="xla"), (x,), (direction,))[1]
        return forward, jax.jvp(jax.grad(loss), (x,), (direction,))[1]

    got, expected = (
        jax.jit(lambda op=op: derivatives(op))()
        for op in (kda_jax.chunk_kda, kda_jax.recurrent_kda)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_near(a, b, 2e-5)


@pytest.mark.slow
def test_products_do_not_change_with_the_number_of_tokens():
    """XLA tries several programs for each shape on a GPU: that took 80 s at 1024 tokens."""

    def products(T):
        x, slots = tokens(T, **SIZES)
        step = jax.jit(jax.grad(loss_of(kda_jax.chunk_kda, slots, x["v"])))
        lines = step.lower(x).as_text().splitlines()
        shapes = {line.rpartition(" : ")[2] for line in lines if "stablehlo.dot_general" in line}
        assert shapes
        return shapes

    assert products(2 * TURN) == products(7 * TURN + 5)


@pytest.mark.slow
def test_what_a_derivative_keeps_does_not_grow_with_what_a_turn_makes():
    """Of 8 turns instead of 2, temporaries grow by less than the operands and states do, twice."""

    def temporaries(turns):
        x, slots = tokens(turns * TURN, **dict(SIZES, HV=2, K=16, V=16))
        step = jax.jit(jax.grad(loss_of(kda_jax.chunk_kda, slots, x["v"])))
        compiled = step.lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes, sum(y.nbytes for y in x.values())

    (few, small), (many, large) = map(temporaries, (2, 8))
    assert many - few < 3 * (large - small)
