"""The short convolution of a KDA layer: depthwise, causal, then SiLU, with the last inputs kept in a pool of slots."""

import jax
import jax.numpy as jnp

from kda_jax import call, pools
from kda_jax.gates import differentiable_sigmoid
from kda_jax.sequences import owners


def conv_decode(x, weight, pool, slots):
    """One token of each row: convolved with the last W-1 inputs of its slot, which then move on by one.

    Args:
      x: `[B, C]` bfloat16, float16 or float32; the projected channels, one token a row.
      weight: `[C, W]` of any float dtype; the last column meets the newest input.
      pool: `[S, C, W-1]` of any float dtype, oldest input first; an array or a `jax.Ref`.
      slots: `[B]` int8 to int64; outside `[0, S)`: a padded row, whose output is zero and for which nothing moves.

    Returns:
      `(y, pool)`: `[B, C]` in x's dtype after SiLU, and the updated pool (None for a Ref).

    Effects:
      As `packed_decode`: in place where the pool is donated inside `jit`, or a Ref.

    Source: the short convolution of the Kimi Linear paper; the sums are float32.

    >>> y, pool = conv_decode(jnp.array([[4.0]]), jnp.array([[1.0, 10.0]]), jnp.array([[[2.0]]]), jnp.array([0]))
    >>> float(y[0, 0]), pool.tolist()
    (42.0, [[[4.0]]])
    """
    arrays = dict(x=x, weight=weight, pool=pool, slots=slots)
    if call.is_cut(arrays):
        specs = (call.explicit_cut(x), call.explicit_cut(pool))
        return call.in_auto_axes(conv_decode, "kda_jax.conv_decode", arrays, specs)
    return _decode(x, weight, pool, pools.as_int32(slots))


@jax.jit
def _decode(x, weight, pool, slots):
    state, slots = pools.opened(pool, slots, x, weight)
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
    y = _silu(y).astype(x.dtype)
    y, *newest = jax.lax.optimization_barrier((y, *(tap.astype(state.dtype) for tap in taps[1:])))
    if newest:
        state = state.at[slots].set(jnp.stack(newest, axis=2), mode="drop", unique_indices=True)
    return y, pools.closed(pool, state)


def conv_prefill(x, weight, pool, slots, cu_seqlens, sources=None):
    """All tokens of sequences that lie end to end; each continues its slot's last W-1 inputs.

    Args:
      x: `[T, C]` bfloat16, float16 or float32; the projected channels.
      weight: `[C, W]` of any float dtype; the last column meets the newest input.
      pool: `[S, C, W-1]` of any float dtype, oldest input first; an array or a `jax.Ref`.
      slots: `[N]` int8 to int64; the slot of each sequence. Outside `[0, S)`: a padded sequence, whose output is zero.
      cu_seqlens: `[N+1]` int32 or int64; sequence n is tokens `cu_seqlens[n]` to `cu_seqlens[n+1] - 1`.
      sources: None, or `[N]`: the slots whose inputs are continued; outside `[0, S)`: zeros, a fresh sequence.

    Returns:
      `(y, pool)`: `[T, C]` in x's dtype after SiLU, and the updated pool (None for a Ref). An empty sequence moves
      nothing.

    Effects:
      As `packed_decode`: in place where the pool is donated inside `jit`, or a Ref.

    >>> x, weight, pool = jnp.array([[4.0], [5.0]]), jnp.array([[1.0, 10.0]]), jnp.array([[[2.0]]])
    >>> y, pool = conv_prefill(x, weight, pool, jnp.array([0]), jnp.array([0, 2]))
    >>> y.ravel().tolist(), pool.tolist()
    ([42.0, 54.0], [[[5.0]]])
    """
    arrays = dict(x=x, weight=weight, pool=pool, slots=slots, cu_seqlens=cu_seqlens)
    arrays |= dict(sources=sources)
    if call.is_cut(arrays):
        specs = (call.explicit_cut(x), call.explicit_cut(pool))
        return call.in_auto_axes(conv_prefill, "kda_jax.conv_prefill", arrays, specs)
    indices = (pools.as_int32(x) for x in (slots, cu_seqlens, sources))
    return _prefill(x, weight, pool, *indices)


@jax.jit
def _prefill(x, weight, pool, slots, cu_seqlens, sources):
    state, slots = pools.opened(pool, slots, x, weight, cu_seqlens, sources)
    (T, C), W, S = x.shape, weight.shape[1], state.shape[0]
    if 0 in (T, S, slots.shape[0]):
        return jnp.zeros_like(x), pools.unchanged(pool)
    cu_seqlens = jnp.clip(cu_seqlens, 0, T)
    live = pools.inside(slots, S)
    start, length = cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]
    owner = owners(cu_seqlens, T)
    position = jnp.arange(T, dtype=jnp.int32) - jnp.append(start, 0)[owner]
    held = jnp.append(live, False)[owner][:, None]
    x = jnp.where(held, x, jnp.zeros((), x.dtype))

    f32, weights = jnp.float32, weight.astype(jnp.float32)
    past = pools.read(state, slots, sources)  # [N, C, W-1]
    y = jnp.zeros((T, C), f32)
    for back in range(W):
        shifted = jnp.pad(x, ((back, 0), (0, 0)))[:T].astype(f32)
        y = y + jnp.where((position >= back)[:, None], shifted, 0) * weights[None, :, W - 1 - back]
    for first in range(
        W - 1
    ):  # what the slot's inputs give to token number `first` of each sequence
        carried = (past[:, :, first:].astype(f32) * weights[None, :, : W - 1 - first]).sum(-1)
        token = jnp.where(length > first, start + first, T)
        y = y.at[token].add(carried, mode="drop")
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


def _silu(x):
    return x * differentiable_sigmoid(x)
