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
    slots, bounds, sources, checkpoints = indices
    indices = (slots, bounded(bounds, x.shape[0]), sources, checkpoints)
    tensors = map(arrays.get, ("x", "weight", "pool"))
    return all_tokens(*tensors, *indices, arrays["bias"], every=checkpoint_every or 0)


@functools.partial(jax.jit, static_argnames="every")
def all_tokens(x, weight, pool, slots, cu_seqlens, sources, checkpoints, bias=None, *, every=0):
    """What `conv_prefill` does, after its contract; all indices are int32, boundaries ascend."""
    others = (x, weight, cu_seqlens, sources, checkpoints, bias)
    state, slots = pools.opened(pool, slots, *others)
    T, S, N, W = x.shape[0], state.shape[0], slots.shape[0], weight.shape[1]
    if 0 in (T, S, N):
        return jnp.zeros_like(x), pools.unchanged(pool)
    begins, lengths = cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]
    live, owner = pools.inside(slots, S), owners(cu_seqlens, T)
    held, position = jnp.append(live, False)[owner][:, None], positions(cu_seqlens, owner)
    x = jnp.where(held, x, jnp.zeros((), x.dtype))
    weights = weight.astype(jnp.float32)
    source_of = pools.sources_of(slots, sources, S)  # S for none
    source = jnp.append(source_of, S)[owner]
    y = jnp.zeros(x.shape, jnp.float32)
    for back in range(W):
        tap = _shifted(x, back).astype(jnp.float32)
        if back:
            # Of the slot, read where it is needed: a copy for each sequence may be the larger part
            # of all memory.
            at = jnp.clip(W - 1 + position - back, 0, W - 2)
            carried = state.at[source, :, at].get(mode="fill", fill_value=0)
            tap = jnp.where((position >= back)[:, None], tap, carried.astype(jnp.float32))
        y = y + tap * weights[None, :, W - 1 - back]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    y = jnp.where(held, _silu(y), 0).astype(x.dtype)
    if W == 1:
        return y, pools.closed(pool, state)
    # Else XLA may write the slots first, and copy the whole pool for what is read of it here.
    y, state = jax.lax.optimization_barrier((y, state))
    if checkpoints is not None:
        M = checkpoints.shape[1]
        sequence, column = (
            z.reshape(-1) for z in jnp.meshgrid(jnp.arange(N), jnp.arange(M), indexing="ij")
        )
        ends = (column.astype(jnp.int32) + 1) * every
        reached = live[sequence] & (ends <= lengths[sequence])
        places = jnp.where(reached, checkpoints.reshape(-1), -1)
        rows = (places, source_of[sequence], begins[sequence], ends)
        state = _move_on(state, x, rows)
    rows = (jnp.where(lengths > 0, slots, -1), source_of, begins, lengths)
    return y, pools.closed(pool, _move_on(state, x, rows))


@jax.jit
def drafted(x, weight, pool, slots, sources, bias=None):
    """`[N, T, C]` of drafted tokens, convolved behind their slots' inputs. Nothing is written."""
    (N, T, _), S, W = x.shape, pool.shape[0], weight.shape[1]
    if 0 in (N, T, S):
        return jnp.zeros_like(x)
    state, _ = pools.opened(pool, slots, x, weight, sources, bias, written=False)
    past, live = pools.read(state, slots, sources), pools.inside(slots, S)[:, None, None]
    x = jnp.where(live, x, jnp.zeros((), x.dtype))
    weights, y = weight.astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
    token = jnp.arange(T, dtype=jnp.int32)[None, :, None]
    for back in range(W):
        tap = _shifted(x, back).astype(jnp.float32)
        if back:
            carried = jnp.moveaxis(past[:, :, W - 1 - back :], 2, 1)[:, :T]
            carried = jnp.pad(carried, ((0, 0), (0, max(0, T - back)), (0, 0)))
            tap = jnp.where(token >= back, tap, carried.astype(jnp.float32))
        y = y + tap * weights[None, None, :, W - 1 - back]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, None]
    return jnp.where(live, _silu(y), 0).astype(x.dtype)


@jax.jit
def advanced(x, pool, slots, sources, accepted):
    """The pool behind the first `accepted` of the drafted tokens x `[N, T, C]` of each sequence."""
    state, slots = pools.opened(pool, slots, x, sources, accepted)
    (N, T, C), S = x.shape, state.shape[0]
    if 0 in (N, T, S) or state.shape[2] == 0:
        return pools.unchanged(pool)
    moved = (accepted > 0) & (accepted <= T)
    begins = jnp.arange(N, dtype=jnp.int32) * T
    rows = (jnp.where(moved, slots, -1), pools.sources_of(slots, sources, S), begins, accepted)
    return pools.closed(pool, _move_on(state, x.reshape(N * T, C), rows))


def _move_on(state, x, rows):
    """The pool, with the last W-1 inputs after some tokens of some sequences.

    rows: `(slots, sources, begins, counts)`, each `[R]`: a slot takes what lies behind `counts`
    tokens of x `[T, C]` from `begins` on, or before them in the slot `sources`; -1 for none.
    """
    R, width = rows[0].shape[0], state.shape[2]
    groups = -(-R // ROWS) if isinstance(R, int) else 1
    if groups == 1:
        return _moved_on(state, x, *rows)
    fills = (-1, -1, 0, width)
    rows = [
        jnp.pad(z, (0, groups * ROWS - R), constant_values=fill).reshape(groups, ROWS)
        for z, fill in zip(rows, fills, strict=True)
    ]
    return jax.lax.scan(lambda state, rows: (_moved_on(state, x, *rows), None), state, rows)[0]


def _moved_on(state, x, slots, sources, begins, counts):
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
