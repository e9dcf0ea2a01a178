"""The short convolution in XLA: any shape, dtype and device; it differentiates."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from kda_jax import pools
from kda_jax.gates import differentiable_sigmoid
from kda_jax.sequences import owners, positions

ROWS = 128  # that move on at once: what is made for them is small beside the tokens' own


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


def tokens_of(slots, sources, cu_seqlens, T, S):
    """`(held, position, source)` `[T]`: whether a live sequence holds each token, its number there,
    and the slot from which that goes on, S for none.
    """
    owner = owners(cu_seqlens, T)
    held = jnp.append(pools.inside(slots, S), False)[owner]
    source = jnp.append(pools.sources_of(slots, sources, S), S)[owner]
    return held, positions(cu_seqlens, owner), source


def moves(slots, sources, cu_seqlens, checkpoints, S, every):
    """The rows of `move_on`, once for all checkpoints, then for the slots."""
    N, source_of = slots.shape[0], pools.sources_of(slots, sources, S)
    begins, lengths = cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]
    moves = []
    if checkpoints is not None:
        column = jnp.broadcast_to(
            jnp.arange(checkpoints.shape[1], dtype=jnp.int32)[None], checkpoints.shape
        ).reshape(-1)
        sequence = jnp.repeat(
            jnp.arange(N, dtype=jnp.int32), checkpoints.shape[1], total_repeat_length=column.size
        )
        ends = (column + 1) * every
        reached = pools.inside(slots, S)[sequence] & (ends <= lengths[sequence])
        places = jnp.where(reached, checkpoints.reshape(-1), -1)
        moves.append((places, source_of[sequence], begins[sequence], ends))
    return [*moves, (jnp.where(lengths > 0, slots, -1), source_of, begins, lengths)]


def all_tokens(parts, weights, biases, state, slots, cu_seqlens, sources, checkpoints, *, every):
    x, (S, _, width) = jnp.concatenate(parts, axis=-1), state.shape
    held, position, source = tokens_of(slots, sources, cu_seqlens, x.shape[0], S)
    x = jnp.where(held[:, None], x, jnp.zeros((), x.dtype))
    y = jnp.zeros(x.shape, jnp.float32)
    for back in range(width + 1):
        tap = _shifted(x, back).astype(jnp.float32)
        if back:
            # Of the slot, read where it is needed: a copy for each sequence may be the larger part
            # of all memory.
            at = jnp.clip(width + position - back, 0, width - 1)
            carried = state.at[source, :, at].get(mode="fill", fill_value=0)
            tap = jnp.where((position >= back)[:, None], tap, carried.astype(jnp.float32))
        y = y + tap * joined(weights)[None, :, width - back]
    y = jnp.where(held[:, None], _activated(y, biases), 0).astype(x.dtype)
    if width:
        # Else XLA may write the slots first, and copy the whole pool for what is read of it here.
        y, state = jax.lax.optimization_barrier((y, state))
        for rows in moves(slots, sources, cu_seqlens, checkpoints, S, every):
            state = move_on((x,), state, rows)
    return cut(y, weights), state


def drafted(x, weights, biases, state, slots, sources):
    T, (S, _, width) = x.shape[1], state.shape
    past, live = pools.read(state, slots, sources), pools.inside(slots, S)[:, None, None]
    x = jnp.where(live, x, jnp.zeros((), x.dtype))
    y, token = jnp.zeros(x.shape, jnp.float32), jnp.arange(T, dtype=jnp.int32)[None, :, None]
    for back in range(width + 1):
        tap = _shifted(x, back).astype(jnp.float32)
        if back:
            carried = jnp.moveaxis(past[:, :, width - back :], 2, 1)[:, :T]
            carried = jnp.pad(carried, ((0, 0), (0, max(0, T - back)), (0, 0)))
            tap = jnp.where(token >= back, tap, carried.astype(jnp.float32))
        y = y + tap * joined(weights)[None, None, :, width - back]
    return cut(jnp.where(live, _activated(y, biases), 0).astype(x.dtype), weights)


def move_on(parts, state, rows):
    """The pool, with the last W-1 inputs after some tokens of some sequences.

    rows: `(slots, sources, begins, counts)`, each `[R]`: a slot takes what lies behind `counts`
    tokens of the parts `[T, C_i]` from `begins` on, or before them in the slot `sources`, S for
    none.
    """
    x, R, width = jnp.concatenate(parts, axis=-1), rows[0].shape[0], state.shape[2]
    groups = -(-R // ROWS) if isinstance(R, int) else 1
    if groups == 1:
        return _some_moved_on(state, x, *rows)
    fills = (-1, -1, 0, width)
    rows = [
        jnp.pad(z, (0, groups * ROWS - R), constant_values=fill).reshape(groups, ROWS)
        for z, fill in zip(rows, fills, strict=True)
    ]
    return jax.lax.scan(lambda state, rows: (_some_moved_on(state, x, *rows), None), state, rows)[0]


def _some_moved_on(state, x, slots, sources, begins, counts):
    S, _, width = state.shape
    past = state.at[jnp.where(pools.inside(sources, S), sources, S)].get(mode="fill", fill_value=0)
    taps = []
    # Tap by tap, each an array over the channels, as in one_token.
    for tap in range(width):
        at = counts - width + tap  # negative: in the slot
        row = jnp.clip(begins + at, 0, x.shape[0] - 1)
        newest = x.at[row].get(mode="fill", fill_value=0).astype(state.dtype)
        for count in range(width - tap):
            newest = jnp.where((counts == count)[:, None], past[:, :, count + tap], newest)
        taps.append(newest)
    taps = jax.lax.optimization_barrier(taps)
    slots = pools.apart(slots, S)
    return state.at[slots].set(jnp.stack(taps, axis=2), mode="drop", unique_indices=True)


def joined(tensors) -> Any:
    """Weights or biases of parts as those of all channels, float32; None stays None."""
    return None if tensors is None else jnp.concatenate([x.astype(jnp.float32) for x in tensors])


def _activated(y, biases):
    if biases is not None:
        y = y + joined(biases).reshape((1,) * (y.ndim - 1) + (-1,))
    return _silu(y)


def cut(x, weights):
    """x `[..., C]`, cut as the weights are."""
    ends = itertools.accumulate(weight.shape[0] for weight in weights[:-1])
    return tuple(jnp.split(x, list(ends), axis=-1))


@jax.jit
def without_pool(x, weights, position, biases=None):
    """`[B, T, C]`, convolved within each sequence, and SiLU: for training. Cut as the weights are.

    position: `[B, T]`, the number of each token in its sequence; None, where each row is one.
    """
    y = _activated(_taps(x, joined(weights), position), biases)
    return cut(y.astype(x.dtype), weights)


def _taps(x, weights, position):
    """`[..., T, C]` float32: what the tokens before each of the same sequence give to it."""
    C, W = x.shape[-1], weights.shape[1]
    y = jnp.zeros(x.shape, jnp.float32)
    for back in range(W):
        tap = _shifted(x, back).astype(jnp.float32)
        if position is not None:
            tap = jnp.where((position >= back)[..., None], tap, 0)
        y = y + tap * weights[:, W - 1 - back].reshape((1,) * (x.ndim - 1) + (C,))
    return y


def _shifted(x, back):
    """`[..., T, C]`: the token so many before each; zeros where there is none."""
    lead = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [*lead, (back, 0), (0, 0)])[..., : x.shape[-2], :]


def _silu(x):
    return x * differentiable_sigmoid(x)
