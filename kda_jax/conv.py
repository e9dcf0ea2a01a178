"""The short convolution of a KDA layer: depthwise, causal, then SiLU.

A pool of slots keeps the last inputs of each request; in training there is none.
"""

import functools

import jax
import jax.numpy as jnp

from kda_contracts import CONV_DECODE, CONV_PREFILL
from kda_jax import call, pools
from kda_jax.call import Array, Pool
from kda_jax.gates import differentiable_sigmoid
from kda_jax.sequences import bounded, owners, positions


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
    return one_token(*map(arrays.get, ("x", "weight", "pool")), *indices, arrays["bias"])


@jax.jit
def one_token(x, weight, pool, slots, sources=None, bias=None):
    """What `conv_decode` does, after its contract; the indices are int32."""
    state, slots = pools.opened(pool, slots, x, weight, sources, bias)
    S = state.shape[0]
    if S == 0:
        return jnp.zeros_like(x), pools.unchanged(pool)
    live = pools.inside(slots, S)
    past = pools.read(state, slots, sources)
    slots = pools.apart(slots, S)
    x = jnp.where(live[:, None], x, jnp.zeros((), x.dtype))
    # Tap by tap, each an array over the channels: a GPU makes all of them, and y, in one loop.
    taps = [*(past[:, :, tap] for tap in range(weight.shape[1] - 1)), x]
    y = sum(
        tap.astype(jnp.float32) * column[None]
        for tap, column in zip(taps, weight.astype(jnp.float32).T, strict=True)
    )
    if bias is not None:
        y = jnp.where(live[:, None], y + bias.astype(jnp.float32)[None], 0)
    y = _silu(y).astype(x.dtype)
    y, *newest = jax.lax.optimization_barrier((y, *(tap.astype(state.dtype) for tap in taps[1:])))
    if newest:
        state = state.at[slots].set(jnp.stack(newest, axis=2), mode="drop", unique_indices=True)
    return y, pools.closed(pool, state)


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
    tensors = map(arrays.get, ("x", "weight", "pool"))
    return all_tokens(*tensors, *indices, arrays["bias"], every=checkpoint_every or 0)


@functools.partial(jax.jit, static_argnames="every")
def all_tokens(x, weight, pool, slots, cu_seqlens, sources, checkpoints, bias=None, *, every=0):
    """What `conv_prefill` does, after its contract; all indices are int32."""
    others = (x, weight, cu_seqlens, sources, checkpoints, bias)
    state, slots = pools.opened(pool, slots, *others)
    T, S = x.shape[0], state.shape[0]
    if 0 in (T, S, slots.shape[0]):
        return jnp.zeros_like(x), pools.unchanged(pool)
    bounds = bounded(cu_seqlens, T)
    begins, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    past = pools.read(state, slots, sources)  # [N, C, W-1]
    x, y = _continued(x, weight, past, pools.inside(slots, S), bounds, bias)
    window = _windows(x, past, begins, lengths[:, None])[:, 0]
    state = pools.write(state, slots, window, where=lengths > 0)
    if checkpoints is not None:
        ends = jnp.arange(1, checkpoints.shape[1] + 1, dtype=jnp.int32) * every
        kept = _windows(x, past, begins, jnp.broadcast_to(ends[None], checkpoints.shape))
        reached = pools.inside(slots, S)[:, None] & (ends[None] <= lengths[:, None])
        kept = kept.reshape(-1, *kept.shape[2:])
        state = pools.write(state, checkpoints.reshape(-1), kept, where=reached.reshape(-1))
    return y, pools.closed(pool, state)


@jax.jit
def drafted(x, weight, pool, slots, sources, bias=None):
    """`[N, T, C]` of drafted tokens, convolved behind their slots' inputs. Nothing is written."""
    (N, T, C), S = x.shape, pool.shape[0]
    if 0 in (N, T, S):
        return jnp.zeros_like(x)
    state, _ = pools.opened(pool, slots, x, weight, sources, bias, written=False)
    past, live = pools.read(state, slots, sources), pools.inside(slots, S)
    bounds = jnp.arange(N + 1, dtype=jnp.int32) * T
    return _continued(x.reshape(N * T, C), weight, past, live, bounds, bias)[1].reshape(x.shape)


@jax.jit
def advanced(x, pool, slots, sources, accepted):
    """The pool behind the first `accepted` of the drafted tokens x `[N, T, C]` of each sequence."""
    state, slots = pools.opened(pool, slots, x, sources, accepted)
    N, T, C = x.shape
    if 0 in (N, T, state.shape[0]):
        return pools.unchanged(pool)
    past = pools.read(state, slots, sources)
    begins = jnp.arange(N, dtype=jnp.int32) * T
    window = _windows(x.reshape(N * T, C), past, begins, accepted[:, None])[:, 0]
    moved = (accepted > 0) & (accepted <= T)
    state = pools.write(state, slots, window, where=moved)
    return pools.closed(pool, state)


def _continued(x, weight, past, live, bounds, bias):
    """`(x, y)`: the tokens `[T, C]`, zeros where no live sequence holds them, and convolved."""
    T, W, f32 = x.shape[0], weight.shape[1], jnp.float32
    begins, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    owner = owners(bounds, T)
    held = jnp.append(live, False)[owner][:, None]
    x = jnp.where(held, x, jnp.zeros((), x.dtype))
    weights = weight.astype(f32)
    y = _taps(x, weights, positions(bounds, owner))
    for first in range(W - 1):
        # What the slot's inputs give to token number `first` of each sequence.
        carried = (past[:, :, first:].astype(f32) * weights[None, :, : W - 1 - first]).sum(-1)
        token = jnp.where(lengths > first, begins + first, T)
        y = y.at[token].add(carried, mode="drop")
    if bias is not None:
        y = y + bias.astype(f32)[None]
    return x, jnp.where(held, _silu(y), 0).astype(x.dtype)


def _windows(x, past, begins, counts):
    """`[N, M, C, W-1]`: the last W-1 inputs after each of the `counts` `[N, M]` of a sequence's
    tokens: from x where there are enough, else from the slot's own.
    """
    width = past.shape[2]
    at = (
        counts[..., None] - width + jnp.arange(width, dtype=counts.dtype)[None, None]
    )  # negative: in the slot
    places = jnp.clip(begins[:, None, None] + at, 0, x.shape[0] - 1)
    from_x = jnp.moveaxis(x.at[places].get(mode="fill", fill_value=0), 3, 2)
    within = jnp.clip(at + width, 0, max(width - 1, 0))[:, :, None]
    from_slot = jnp.take_along_axis(past[:, None], within, axis=3)
    return jnp.where((at >= 0)[:, :, None], from_x.astype(past.dtype), from_slot)


@jax.jit
def without_pool(x, weight, position, bias=None):
    """`[B, T, C]`, convolved within each sequence, and SiLU: for training.

    position: `[B, T]`, the number of each token in its sequence; None, where each row is one.
    """
    y = _taps(x, weight.astype(jnp.float32), position)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, None]
    return _silu(y).astype(x.dtype)


def _taps(x, weights, position):
    """`[..., T, C]` float32: what the tokens before each of the same sequence give to it."""
    (*lead, T, C), W = x.shape, weights.shape[1]
    lead = [(0, 0)] * len(lead)
    y = jnp.zeros(x.shape, jnp.float32)
    for back in range(W):
        shifted = jnp.pad(x, [*lead, (back, 0), (0, 0)])[..., :T, :].astype(jnp.float32)
        if position is not None:
            shifted = jnp.where((position >= back)[..., None], shifted, 0)
        y = y + shifted * weights[:, W - 1 - back].reshape((1,) * (x.ndim - 1) + (C,))
    return y


def _silu(x):
    return x * differentiable_sigmoid(x)
