"""The short convolution of a KDA layer: depthwise, causal, then SiLU.

A pool of slots keeps the last inputs of each request; in training there is none.
"""

import jax
import jax.numpy as jnp

from kda_contracts import CONV_DECODE, CONV_PREFILL
from kda_jax import call, pools
from kda_jax.call import Array, Pool
from kda_jax.gates import differentiable_sigmoid
from kda_jax.sequences import owners, positions


def conv_decode(
    x: Array, weight: Array, pool: Pool, slots: Array, *, bias: Array | None = None
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
    arrays = dict(x=x, weight=weight, pool=pool, slots=slots, bias=bias)
    arrays, _ = call.taken(CONV_DECODE, arrays)
    if call.is_cut(arrays):
        specs = call.result_cuts(CONV_DECODE, arrays)
        return call.in_auto_axes(conv_decode, CONV_DECODE.name, arrays, specs)
    slots = pools.as_int32(arrays["slots"])
    return one_token(*map(arrays.get, ("x", "weight", "pool")), slots, arrays["bias"])


@jax.jit
def one_token(x, weight, pool, slots, bias=None):
    """What `conv_decode` does, after its contract; the slots are int32."""
    state, slots = pools.opened(pool, slots, x, weight, bias)
    S = state.shape[0]
    if S == 0:
        return jnp.zeros_like(x), pools.unchanged(pool)
    live = pools.inside(slots, S)
    slots = pools.apart(slots, S)
    x = jnp.where(live[:, None], x, jnp.zeros((), x.dtype))
    past = state.at[slots].get(mode="fill", fill_value=0)
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
        bias=bias,
    )
    arrays, _ = call.taken(CONV_PREFILL, arrays)
    if call.is_cut(arrays):
        specs = call.result_cuts(CONV_PREFILL, arrays)
        return call.in_auto_axes(conv_prefill, CONV_PREFILL.name, arrays, specs)
    indices = (pools.as_int32(arrays[name]) for name in ("slots", "cu_seqlens", "sources"))
    return all_tokens(*map(arrays.get, ("x", "weight", "pool")), *indices, arrays["bias"])


@jax.jit
def all_tokens(x, weight, pool, slots, cu_seqlens, sources, bias=None):
    """What `conv_prefill` does, after its contract; all indices are int32."""
    state, slots = pools.opened(pool, slots, x, weight, cu_seqlens, sources, bias)
    T, W, S = x.shape[0], weight.shape[1], state.shape[0]
    if 0 in (T, S, slots.shape[0]):
        return jnp.zeros_like(x), pools.unchanged(pool)
    cu_seqlens = jnp.clip(cu_seqlens, 0, T)
    live = pools.inside(slots, S)
    start, length = cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]
    owner = owners(cu_seqlens, T)
    position = positions(cu_seqlens, owner)
    held = jnp.append(live, False)[owner][:, None]
    x = jnp.where(held, x, jnp.zeros((), x.dtype))

    f32, weights = jnp.float32, weight.astype(jnp.float32)
    past = pools.read(state, slots, sources)  # [N, C, W-1]
    y = _taps(x, weights, position)
    for first in range(
        W - 1
    ):  # what the slot's inputs give to token number `first` of each sequence
        carried = (past[:, :, first:].astype(f32) * weights[None, :, : W - 1 - first]).sum(-1)
        token = jnp.where(length > first, start + first, T)
        y = y.at[token].add(carried, mode="drop")
    if bias is not None:
        y = y + bias.astype(f32)[None]
    y = jnp.where(held, _silu(y), 0).astype(x.dtype)

    # The last W-1 inputs of each sequence, from x where it is long enough, else from the slot.
    at = (
        length[:, None] - (W - 1) + jnp.arange(W - 1, dtype=length.dtype)[None]
    )  # [N, W-1], negative: in the slot
    from_x = x.at[jnp.clip(start[:, None] + at, 0, max(T - 1, 0))].get(mode="fill", fill_value=0)
    from_slot = jnp.take_along_axis(past, jnp.clip(at + W - 1, 0, W - 2)[:, None], axis=2)
    window = jnp.where(
        (at >= 0)[:, None], jnp.swapaxes(from_x, 1, 2).astype(state.dtype), from_slot
    )
    state = pools.write(state, slots, window, where=length > 0)
    return y, pools.closed(pool, state)


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
