"""The convolution's kernels against XLA: on a CPU in Pallas's interpreter, on a GPU itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU, assert_near, assert_same_bits, lowered_text, running

from kda_jax import conv, conv_mosaic_gpu

WIDTHS, S = (128, 256, 128), 9
LIMIT = dict(float32=1e-6, bfloat16=8e-3)


def make(T, *, W=4, dtype="float32", pool_dtype="float32", biased=False, seed=0):
    """`(parts, weights, pool, biases)`."""
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

    parts = tuple(normal(T, C) for C in WIDTHS)
    weights = tuple(normal(C, W) for C in WIDTHS)
    biases = tuple(normal(C, dtype="float32") for C in WIDTHS) if biased else None
    return parts, weights, normal(S, sum(WIDTHS), W - 1, dtype=pool_dtype), biases


def both(function, *arrays, **options):
    """What XLA gives and what the kernels give."""
    results = []
    for kernels in (False, True):
        run = jax.jit(functools.partial(function, kernels=kernels, **options))
        with running("mosaic_gpu" if kernels else "xla"):
            results.append(jax.block_until_ready(run(*arrays)))
    return results


@pytest.mark.parametrize(
    "options",
    [
        dict(biased=True),
        dict(dtype="bfloat16", pool_dtype="bfloat16"),
        dict(dtype="bfloat16", W=2),
        dict(pool_dtype="float16", W=7),
    ],
    ids=str,
)
def test_sequences_end_to_end(options):
    """Across blocks of tokens, shorter than the window, empty, padded, and tokens of none."""
    lengths = (3, 0, 1, 11, 2, 6)
    bounds = np.cumsum((0, *lengths)).astype(np.int32)
    T = int(bounds[-1]) + 3
    parts, weights, pool, biases = make(T, **options)
    slots = jnp.array([5, 0, 3, 8, -1, 2], jnp.int32)
    sources = jnp.array([5, 0, -1, 7, 1, 6], jnp.int32)
    parts = tuple(x.at[bounds[4] : bounds[5]].set(jnp.nan).at[-3:].set(jnp.nan) for x in parts)
    pool = pool.at[4].set(jnp.nan)  # nobody's
    call = (parts, weights, pool, slots, jnp.asarray(bounds), sources, None, biases)
    (wanted, after), (y, got) = both(conv.all_tokens, *call)
    for one, other in zip(y, wanted, strict=True):
        assert_near(one.astype("float32"), other.astype("float32"), LIMIT[str(one.dtype)])
        dead = np.r_[bounds[4] : bounds[5], bounds[-1] : T]
        assert_same_bits(np.asarray(one)[dead], np.zeros_like(np.asarray(one)[dead]))
    assert_same_bits(got, after)


def test_checkpoints_take_the_inputs_before_them():
    parts, weights, pool, _ = make(140)
    table = jnp.array([[4, -1], [1, 6]], jnp.int32)
    slots, bounds = jnp.array([0, 3]), jnp.array([0, 66, 137])
    call = (parts, weights, pool, slots, bounds, None, table)
    (wanted, after), (y, got) = both(conv.all_tokens, *call, every=64)
    for one, other in zip(y, wanted, strict=True):
        assert_near(one, other, LIMIT["float32"])
    assert_same_bits(got, after)
    assert not (np.asarray(got[4]) == np.asarray(pool[4])).any()


@pytest.mark.parametrize("T", [1, 2, 5])
def test_drafts(T):
    N = 4
    (x, _, _), weights, pool, biases = make(N * T, biased=True)
    x = jnp.concatenate([x, x[:, ::-1], 2 * x, 3 * x], axis=1).reshape(N, T, -1)
    slots, sources = jnp.array([5, 8, -1, 2]), jnp.array([5, -1, 0, 6])
    wanted, y = both(conv.drafted, x, weights, pool, slots, sources, biases)
    for one, other in zip(y, wanted, strict=True):
        assert_near(one, other, LIMIT["float32"])
    for accepted in ([0, 1, 1, T], [T, T + 1, 1, T - 1]):
        wanted, got = both(conv.advanced, x, pool, slots, sources, jnp.array(accepted))
        assert_same_bits(got, wanted)


def test_a_derivative_and_a_vmap_are_those_of_xla():
    parts, weights, pool, biases = make(10, biased=True)
    slots, bounds = jnp.array([3, 1]), jnp.array([0, 4, 9])

    def total(parts, weights, pool, biases, kernels):
        y, after = conv.all_tokens(
            parts, weights, pool, slots, bounds, None, None, biases, kernels=kernels
        )
        return sum((x**2).sum() for x in y) + (after**3).sum()

    gradients = [
        jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)), static_argnums=4)(
            parts, weights, pool, biases, kernels
        )
        for kernels in (False, True)
    ]
    jax.tree.map(assert_same_bits, *gradients)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), parts)
    mapped = [
        jax.jit(jax.vmap(functools.partial(total, kernels=kernels), (0, None, None, None)))(
            stacked, weights, pool, biases
        )
        for kernels in (False, True)
    ]
    assert_same_bits(*mapped)


@pytest.mark.parametrize("T", [13, 5000])
def test_the_convolutions_kernels_lower_for_cuda(T):
    parts, weights, pool, biases = make(T, dtype="bfloat16", pool_dtype="bfloat16", biased=True)
    slots, bounds = jnp.array([3, 1]), jnp.array([0, 4, 9])
    call = (parts, weights, pool, slots, bounds, None, None, biases)
    text = lowered_text(functools.partial(conv.all_tokens, kernels=True), *call)
    assert "kda_conv" in text and "kda_conv_pool" in text


def test_what_they_do_not_take_is_xlas():
    assert "(128, 192)" in conv_mosaic_gpu.unsupported((128, 192), 4)
    for taps in (1, 9):
        assert f"{taps} taps" in conv_mosaic_gpu.unsupported((128,), taps)
    parts, weights, pool, _ = make(5, W=1)
    call = (parts, weights, pool, jnp.array([1]), jnp.array([0, 5]), None, None)
    assert "kda_conv" not in str(
        jax.make_jaxpr(functools.partial(conv.all_tokens, kernels=True))(*call)
    )


@pytest.mark.gpu
def test_they_run_where_the_layer_runs_kernels():
    assert ON_GPU
    parts, weights, pool, _ = make(300, dtype="bfloat16", pool_dtype="bfloat16")
    call = (parts, weights, pool, jnp.array([1, 0]), jnp.array([0, 150, 300]), None, None)
    step = jax.jit(functools.partial(conv.all_tokens, kernels=True), donate_argnums=2)
    compiled = step.lower(*call).compile()
    assert "kda_conv_pool" in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.nbytes
