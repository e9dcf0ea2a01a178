"""The pool around a prefill's chunks; and sequences that lie end to end, short and long apart."""

import jax
import jax.numpy as jnp

from kda_jax import call, pools
from kda_jax.sequences import holders, places_of_kept

# The operands of a prefill in the order in which functions of arrays take them.
ARRAYS = ("q", "k", "v", "a", "b", "pool", "slots", "sources", "cu_seqlens", "checkpoints")


def on_arrays(operands, function):
    """`(out, pool)` of `function(*arrays)`, whose pool is an array; None for a Ref."""
    x = operands
    others = (x.q, x.k, x.v, x.a, x.b, x.sources, x.cu_seqlens, x.checkpoints)
    state, slots = pools.opened(x.pool, x.slots, *others)
    arrays = vars(x) | dict(pool=state, slots=slots)
    out, state = function(*(arrays[name] for name in ARRAYS))
    return out, pools.closed(x.pool, state)


def short_and_long(operands, static, *, few, few_tokens, many_tokens, least=1):
    """`(out, pool)` of sequences end to end: each costs what its tokens cost.

    Those of few tokens are taken one by one. The others are brought together, so that the number of
    chunks, and with it all memory, follows from T and not from N.

    Args:
      operands: in the order of ARRAYS, the pool an array.
      few: how many tokens are few.
      few_tokens: `(tensors, pool, slots, sources, begins, lengths)` to `(out, pool)`; a sequence of
        no tokens is passed over.
      many_tokens: `(operands, out)` to `(out, pool)`, with the outs of sequences `(begins, ends)`
        put among those of few tokens.
      least: how many sequences it takes at the least.
    """
    q, k, v, a, b, state, slots, sources, cu_seqlens, checkpoints = operands
    sizes, every = static.sizes, static.every
    N, T = sizes.N, sizes.T
    if every is not None:
        few = min(few, every - 1)
    begins, lengths = cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]
    lengths = jnp.where(pools.inside(slots, sizes.S), lengths, 0)
    is_short = lengths <= few
    own = slots if sources is None else sources
    short_lengths = jnp.where(is_short, lengths, 0)
    out, state = few_tokens((q, k, v, a, b), state, slots, own, begins, short_lengths)
    if isinstance(T, int) and few >= T:
        return out, state
    # The long ones in order, and behind them sequences of no tokens.
    order = jnp.sort(jnp.where(is_short, N, jnp.arange(N, dtype=jnp.int32)))
    if isinstance(T, int) and isinstance(N, int):
        count = max(least, min(N, T // (few + 1)))
        order = jnp.pad(order, (0, max(0, count - N)), constant_values=N)[:count]

    def taken(x, fill):
        if x is None:
            return None
        return jnp.concatenate([x, jnp.full((1, *x.shape[1:]), fill, x.dtype)])[order]

    begins, ends = taken(begins, T), taken(cu_seqlens[1:], T)
    long = call.Operands(
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        pool=state,
        slots=taken(slots, -1),
        sources=taken(sources, -1),
        cu_seqlens=(begins, ends),
        checkpoints=taken(checkpoints, -1),
    )
    return many_tokens(long, out)


def put_among(operands, out, static, chunks_and_states):
    """`over_pool` of sequences `(begins, ends)`, whose tokens' outs are put into `out`."""
    begins, ends = operands.cu_seqlens
    chunked, state = over_pool(operands, static, chunks_and_states)
    is_held = holders(begins, ends, static.sizes.T) < begins.shape[0]
    return jnp.where(is_held[None, :, None, None], chunked, out), state


def over_pool(operands, static, chunks_and_states):
    """`(out, pool)`, with None for a Ref, which is updated in place.

    chunks_and_states: `(q, k, v, log_decay, beta, start, live, cu_seqlens, every=)` to
    `(out, after, kept)`. cu_seqlens: of the operands, or `(begins, ends)`.
    """
    x, S, T, every = operands, static.sizes.S, static.sizes.T, static.every
    tensors, ranges = (x.q, x.k, x.v, x.a, x.b), x.cu_seqlens
    others = (*tensors, x.sources, x.checkpoints, *jax.tree.leaves(ranges))
    state, slots = pools.opened(x.pool, x.slots, *others)
    live = pools.inside(slots, S)
    start = pools.read(state, slots, x.sources).astype(jnp.float32)
    out, after, kept = chunks_and_states(*tensors, start, live, ranges, every=every)
    lengths = jnp.full(slots.shape, T, jnp.int32)
    if ranges is not None:
        if not isinstance(ranges, tuple):
            ranges = ranges[:-1], ranges[1:]
        lengths = ranges[1] - ranges[0]
    state = pools.write(state, slots, after.astype(state.dtype), where=lengths > 0)
    if every is not None:
        places = places_of_kept(x.checkpoints, live, lengths // every, kept.shape[0])
        state = pools.write(state, places, kept.astype(state.dtype))
    return out, pools.closed(x.pool, state)
