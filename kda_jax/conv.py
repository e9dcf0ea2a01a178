"""The short convolution of a KDA layer: depthwise, causal, then SiLU.

A pool of slots keeps the last inputs of each request; in training there is none.
"""

import functools

import jax
import jax.numpy as jnp

from kda_contracts import CONV_DECODE, CONV_PREFILL
from kda_jax import call, conv_xla, pools
from kda_jax.call import Array, Pool
from kda_jax.sequences import bounded
from kda_jax.transforms import in_xla_under_vmap, with_derivative_of


def conv_decode(
    x: Array,
    weight: Array,
    pool: Pool,
    slots: Array,
    *,
    sources: Array | None = None,
    bias: Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of each row, convolved with the last W-1 inputs of its slot, and SiLU.

    The slot's inputs move on by one. Sums are float32.

    Args:
      x: `[B, C]` float; the projected channels, one token a row.
      weight: `[C, W]` float; the taps of each channel. The last column meets the newest input.
      pool: `[S, C, W-1]` float, the last inputs of each slot, oldest first; an array or a
        `jax.Ref`.
      slots: `[B]` integer; the slot of each row. Outside `[0, S)`: a padded row, whose output is
        zero and for which nothing moves. Two live rows may not share a slot.
      sources: None, or `[B]` integer; the slots whose inputs are continued. Outside `[0, S)`:
        zeros, a fresh sequence.
      bias: None, or `[C]` float; added before SiLU.

    Returns:
      `(y, pool)`: `[B, C]` in x's dtype, and the updated pool in its own; None for a Ref.

    Effects:
      As `packed_decode`: in place where the pool is donated inside `jit`, or a Ref.

    Raises:
      ContractError: a ValueError, at trace time, that lists every argument that breaks the
        contract.

    Source: the short convolution of the Kimi Linear paper.

    >>> x, weight, pool = jnp.array([[4.0]]), jnp.array([[1.0, 10.0]]), jnp.array([[[2.0]]])
    >>> y, pool = conv_decode(x, weight, pool, jnp.array([0]))
    >>> float(y[0, 0]), pool.tolist()
    (42.0, [[[4.0]]])
    """
    arrays = dict(x=x, weight=weight, pool=pool, slots=slots, sources=sources, bias=bias)
    arrays, _ = call.taken(CONV_DECODE, arrays)
    if call.is_cut(arrays):
        specs = call.result_cuts(CONV_DECODE, arrays)
        return call.in_auto_axes(conv_decode, CONV_DECODE.name, arrays, specs)
    indices = (pools.as_int32(arrays[name]) for name in ("slots", "sources"))
    return conv_xla.one_token(*map(arrays.get, ("x", "weight", "pool")), *indices, arrays["bias"])


def conv_prefill(
    x: Array,
    weight: Array,
    pool: Pool,
    slots: Array,
    cu_seqlens: Array,
    *,
    sources: Array | None = None,
    checkpoints: Array | None = None,
    checkpoint_every: int | None = None,
    bias: Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """All tokens of sequences that lie end to end, convolved with those before them, and SiLU.

    Each sequence continues the last W-1 inputs of its slot, and leaves its own there. Sums are
    float32. It differentiates.

    Args:
      x: `[T, C]` float; the projected channels of all sequences.
      weight: `[C, W]` float; the taps of each channel. The last column meets the newest input.
      pool: `[S, C, W-1]` float, the last inputs of each slot, oldest first; an array or a
        `jax.Ref`.
      slots: `[N]` integer; the slot of each sequence. Outside `[0, S)`: a padded one, whose output
        is zero and for which nothing moves. Two live sequences may not share a slot.
      cu_seqlens: `[N+1]` int32 or int64; sequence n is tokens `cu_seqlens[n]` to
        `cu_seqlens[n+1] - 1` (`validate_cu_seqlens` checks the values on the host).
      sources: None, or `[N]` integer; the slots whose inputs are continued. Outside `[0, S)`:
        zeros, a fresh sequence.
      checkpoints: None, or `[N, M]` integer; column m takes the last W-1 inputs after
        `(m + 1) * checkpoint_every` tokens of the sequence in this call. Outside `[0, S)`, or
        where the sequence is shorter: not kept.
      checkpoint_every: with `checkpoints`, a static multiple of 64.
      bias: None, or `[C]` float; added before SiLU.

    Returns:
      `(y, pool)`: `[T, C]` in x's dtype, and the updated pool in its own; None for a Ref. A token
      of no sequence gives zero, and an empty sequence moves nothing.

    Effects:
      As `packed_decode`: in place where the pool is donated inside `jit`, or a Ref.

    Raises:
      ContractError: as `conv_decode`.

    Source: the short convolution of the Kimi Linear paper.

    >>> x, weight, pool = jnp.array([[4.0], [5.0]]), jnp.array([[1.0, 10.0]]), jnp.array([[[2.0]]])
    >>> y, pool = conv_prefill(x, weight, pool, jnp.array([0]), jnp.array([0, 2]))
    >>> y.ravel().tolist(), pool.tolist()
    ([42.0, 54.0], [[[5.0]]])
    """
    arrays = dict(
        x=x,
        weight=weight,
        pool=pool,
        slots=slots,
        cu_seqlens=cu_seqlens,
        sources=sources,
        checkpoints=checkpoints,
        bias=bias,
    )
    arrays, _ = call.taken(CONV_PREFILL, arrays, checkpoint_every=checkpoint_every)
    if call.is_cut(arrays):
        specs = call.result_cuts(CONV_PREFILL, arrays)
        again = functools.partial(conv_prefill, checkpoint_every=checkpoint_every)
        return call.in_auto_axes(again, CONV_PREFILL.name, arrays, specs)
    indices = (
        pools.as_int32(arrays[name]) for name in ("slots", "cu_seqlens", "sources", "checkpoints")
    )
    slots, bounds, *others = indices
    indices = (slots, bounded(bounds, x.shape[0]), *others)
    parts, weights = (arrays["x"],), (arrays["weight"],)
    biases = None if arrays["bias"] is None else (arrays["bias"],)
    every = checkpoint_every or 0
    (y,), pool = all_tokens(parts, weights, arrays["pool"], *indices, biases, every=every)
    return y, pool


@functools.partial(jax.jit, static_argnames=("every", "kernels"))
def all_tokens(
    parts,
    weights,
    pool,
    slots,
    cu_seqlens,
    sources,
    checkpoints,
    biases=None,
    *,
    every=0,
    kernels=False,
):
    """What `conv_prefill` does, after its contract; all indices are int32, boundaries ascend.

    parts, weights, biases: tuples of x, weight and bias, cut along C; the results are cut alike.
    kernels: whether they may run it; else XLA.
    """
    tensors, indices = (parts, weights, biases), (cu_seqlens, sources, checkpoints)
    state, slots = pools.opened(pool, slots, *jax.tree.leaves((tensors, indices)))
    if 0 in (parts[0].shape[0], state.shape[0], slots.shape[0]):
        nothing = jnp.zeros_like(jnp.concatenate(parts, axis=-1))
        return conv_xla.cut(nothing, weights), pools.unchanged(pool)
    module = _kernels(weights) if kernels else None
    run = _choose("all_tokens", module, floats=4, others=4, every=every)
    y, state = run(*tensors, state, slots, *indices)
    return y, pools.closed(pool, state)


@functools.partial(jax.jit, static_argnames="kernels")
def drafted(x, weights, pool, slots, sources, biases=None, *, kernels=False):
    """`[N, T, C_i]` of drafted tokens `[N, T, C]`, convolved behind their slots' inputs.

    Cut as the weights are. Nothing is written.
    """
    if 0 in (*x.shape[:2], pool.shape[0]):
        return conv_xla.cut(jnp.zeros_like(x), weights)
    others = jax.tree.leaves((x, weights, biases, sources))
    state, slots = pools.opened(pool, slots, *others, written=False)
    run = _choose("drafted", _kernels(weights) if kernels else None, floats=4, others=2)
    return run(x, weights, biases, state, slots, sources)


@functools.partial(jax.jit, static_argnames="kernels")
def advanced(x, pool, slots, sources, accepted, *, kernels=False):
    """The pool behind the first `accepted` of the drafted tokens x `[N, T, C]` of each sequence."""
    state, slots = pools.opened(pool, slots, x, sources, accepted)
    (N, T, C), (S, _, width) = x.shape, state.shape
    if 0 in (N, T, S, width):
        return pools.unchanged(pool)
    moved = (accepted > 0) & (accepted <= T)
    begins = jnp.arange(N, dtype=jnp.int32) * T
    rows = (jnp.where(moved, slots, -1), pools.sources_of(slots, sources, S), begins, accepted)
    module = _kernels([jax.ShapeDtypeStruct((C, width + 1), x.dtype)]) if kernels else None
    run = _choose("move_on", module, floats=2, others=1)
    return pools.closed(pool, run((x.reshape(N * T, C),), state, rows))


def _kernels(weights):
    """The file of the kernels, which takes a second to load, if they take these; else None."""
    from kda_jax import conv_mosaic_gpu

    widths, taps = [x.shape[0] for x in weights], weights[0].shape[1]
    return None if conv_mosaic_gpu.unsupported(widths, taps) else conv_mosaic_gpu


def _choose(name, kernels, *, floats, others, **options):
    """What XLA's file calls so, or the kernels', with the derivative and the vmap of XLA's.

    Of its operands the first `floats` may have a derivative, the `others` have none.
    """
    in_xla = functools.partial(getattr(conv_xla, name), **options)
    if kernels is None:
        return in_xla
    in_kernels = functools.partial(getattr(kernels, name), **options)
    return with_derivative_of(in_xla, in_xla_under_vmap(in_xla, in_kernels), floats, others)
