"""The short convolution of a KDA layer: depthwise, causal, then SiLU.

A pool of slots keeps the last inputs of each request; in training there is none.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from kda_contracts import CONV_DECODE, CONV_PREFILL
from kda_jax import call, pools
from kda_jax.call import Array, Pool
from kda_jax.gates import differentiable_sigmoid
from kda_jax.sequences import bounded, owners, positions
from kda_jax.transforms import in_xla_under_vmap, with_derivative_of

ROWS = 128  # that move on at once: what is made for them is small beside the tokens' own


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
        return tuple(map(jnp.zeros_like, parts)), pools.unchanged(pool)
    run = _choose(
        functools.partial(_all_in_xla, every=every),
        functools.partial(_all_in_kernels, every=every),
        kernels and _kernels_take(weights),
        floats=4,
        others=4,
    )
    y, state = run(*tensors, state, slots, *indices)
    return y, pools.closed(pool, state)


@functools.partial(jax.jit, static_argnames="kernels")
def drafted(x, weights, pool, slots, sources, biases=None, *, kernels=False):
    """`[N, T, C_i]` of drafted tokens `[N, T, C]`, convolved behind their slots' inputs.

    Cut as the weights are. Nothing is written.
    """
    if 0 in (*x.shape[:2], pool.shape[0]):
        return _cut(jnp.zeros_like(x), weights)
    others = jax.tree.leaves((x, weights, biases, sources))
    state, slots = pools.opened(pool, slots, *others, written=False)
    kernels = kernels and _kernels_take(weights)
    run = _choose(_drafted_in_xla, _drafted_in_kernels, kernels, floats=4, others=2)
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
    kernels = kernels and _kernels().unsupported([C], width + 1) is None
    run = _choose(_move_on_in_xla, _move_on_in_kernels, kernels, floats=2, others=1)
    return pools.closed(pool, run((x.reshape(N * T, C),), state, rows))


def _kernels():
    """Their file, which takes a second to load."""
    from kda_jax import conv_mosaic_gpu

    return conv_mosaic_gpu


def _kernels_take(weights):
    return _kernels().unsupported([x.shape[0] for x in weights], weights[0].shape[1]) is None


def _choose(in_xla, in_kernels, kernels, *, floats, others):
    """`in_xla`, or `in_kernels` with the derivative and the vmap of `in_xla`."""
    if not kernels:
        return in_xla
    return with_derivative_of(in_xla, in_xla_under_vmap(in_xla, in_kernels), floats, others)


def _tokens_of(slots, sources, cu_seqlens, T, S):
    """`(held, position, source)` `[T]`: whether a live sequence holds each token, its number there,
    and the slot from which that goes on, S for none.
    """
    owner = owners(cu_seqlens, T)
    held = jnp.append(pools.inside(slots, S), False)[owner]
    source = jnp.append(pools.sources_of(slots, sources, S), S)[owner]
    return held, positions(cu_seqlens, owner), source


def _moves(slots, sources, cu_seqlens, checkpoints, S, every):
    """The rows of `_move_on_in_xla`, once for all checkpoints, then for the slots."""
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


def _all_in_xla(parts, weights, biases, state, slots, cu_seqlens, sources, checkpoints, *, every):
    x, (S, _, width) = jnp.concatenate(parts, axis=-1), state.shape
    held, position, source = _tokens_of(slots, sources, cu_seqlens, x.shape[0], S)
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
        for rows in _moves(slots, sources, cu_seqlens, checkpoints, S, every):
            state = _move_on_in_xla((x,), state, rows)
    return _cut(y, weights), state


def _all_in_kernels(
    parts, weights, biases, state, slots, cu_seqlens, sources, checkpoints, *, every
):
    T, S = parts[0].shape[0], state.shape[0]
    held, position, source = _tokens_of(slots, sources, cu_seqlens, T, S)
    begins = _begins(source, S, held, position)
    y = _kernels().convolved(parts, weights, biases, state, begins)
    y, state = jax.lax.optimization_barrier((y, state))  # it has read the pool
    for rows in _moves(slots, sources, cu_seqlens, checkpoints, S, every):
        state = _move_on_in_kernels(parts, state, rows)
    return y, state


def _begins(source, S, held, position):
    """`[T]`: what the kernels are told of each token."""
    module = _kernels()
    begins = jnp.where(source < S, source, module.NOTHING)
    return jnp.where(held, jnp.where(position == 0, begins, module.GOES_ON), module.NOBODY)


def _drafted_in_xla(x, weights, biases, state, slots, sources):
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
    return _cut(jnp.where(live, _activated(y, biases), 0).astype(x.dtype), weights)


def _drafted_in_kernels(x, weights, biases, state, slots, sources):
    (N, T, C), S = x.shape, state.shape[0]
    source = pools.sources_of(slots, sources, S)
    live, position = pools.inside(slots, S)[:, None], jnp.arange(T, dtype=jnp.int32)[None]
    begins = _begins(source[:, None], S, live, position).reshape(-1)
    y = _kernels().convolved((x.reshape(N * T, C),), weights, biases, state, begins)
    return tuple(part.reshape(N, T, -1) for part in y)


def _move_on_in_xla(parts, state, rows):
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


def _move_on_in_kernels(parts, state, rows):
    slots, sources, begins, counts = rows
    S = state.shape[0]
    slots = jnp.where(pools.inside(slots, S), slots, -1)
    sources = jnp.where(pools.inside(sources, S), sources, -1)
    return _kernels().moved_on(parts, state, slots, sources, begins, counts)


def joined(tensors) -> Any:
    """Weights or biases of parts as those of all channels, float32; None stays None."""
    return None if tensors is None else jnp.concatenate([x.astype(jnp.float32) for x in tensors])


def _activated(y, biases):
    if biases is not None:
        y = y + joined(biases).reshape((1,) * (y.ndim - 1) + (-1,))
    return _silu(y)


def _cut(x, weights):
    """x `[..., C]`, cut as the weights are."""
    ends = itertools.accumulate(weight.shape[0] for weight in weights[:-1])
    return tuple(jnp.split(x, list(ends), axis=-1))


@jax.jit
def without_pool(x, weights, position, biases=None):
    """`[B, T, C]`, convolved within each sequence, and SiLU: for training. Cut as the weights are.

    position: `[B, T]`, the number of each token in its sequence; None, where each row is one.
    """
    y = _activated(_taps(x, joined(weights), position), biases)
    return _cut(y.astype(x.dtype), weights)


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
