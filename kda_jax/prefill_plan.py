"""Where the chunks of the prefill kernels lie: which tokens each holds, and the way there and back.

And how decays and betas come there, which the kernels of both passes read alike.

A chunk begins at a multiple of ALIGNED tokens, where a copy to shared memory may begin. So the
chunks of two sequences that lie end to end may share some tokens; a row of a chunk that is no token
of its sequence is masked.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kda_jax.sequences import offsets, owners
from kda_jax.wgmma import CHUNK

ALIGNED = 8  # tokens: where a copy to shared memory in wgmma's layout may begin
# A log2 of the decay below this gives 0 in float32 all the same; -inf times 0 would be NaN.
LEAST_DECAY = -185.0
LOG2_E = 1.4426950408889634
LEAST_BETA = 2.0**-100  # as good as 0


class Plan(NamedTuple):
    """Which tokens the chunks hold, all int32.

    Dense: each sequence has its own lane, and all begin at token 0. With boundaries: one lane.
    """

    chunks: jax.Array  # [sequences + 1], the first chunk of each sequence
    begin: jax.Array  # [n, lanes], the token at which a chunk begins
    low: jax.Array  # [n, lanes]; rows low to high - 1 are tokens of the chunk's sequence,
    high: jax.Array
    shown: jax.Array  # and low to shown - 1 where that is live

    @property
    def dense(self):
        return self.chunks.shape[0] == 2  # with boundaries there are two sequences and more


def plan_chunks(cu_seqlens, live, B, T, every=None):
    """`(Plan, kept)` of B rows of T tokens.

    With boundaries, the tokens before the first sequence and behind the last are sequences too,
    which are not live. With `(begins, ends)` of two sequences or more, in order, they are no one's.

    With `every`, not with boundaries, a chunk ends after each so many tokens of a sequence, and
    `kept` `[n, lanes]` is the number of the state behind it among all on the way, -1 of one that is
    not; else None.
    """
    i32 = jnp.int32
    if cu_seqlens is None:
        n = -(-T // CHUNK)
        begin = jnp.arange(n, dtype=i32)[:, None] * CHUNK + jnp.zeros((1, B), i32)
        high = jnp.minimum(T - begin, CHUNK)
        shown = jnp.where(live[None], high, 0)
        plan = Plan(jnp.array([0, n], i32), begin, jnp.zeros_like(begin), high, shown)
        return plan, None if every is None else _kept_of_rows(begin, T, every)
    if isinstance(cu_seqlens, tuple):
        starts, ends = cu_seqlens
    else:
        bounds = jnp.concatenate([jnp.zeros(1, i32), cu_seqlens, jnp.full(1, T, i32)])
        starts, ends, live = bounds[:-1], bounds[1:], jnp.pad(live, 1)
    # Chunks are counted: whatever the boundaries hold, there is room for them.
    sequences = live.shape[0]
    pieces = sequences if every is None else sequences + T // every
    n = (T + (CHUNK + ALIGNED - 2) * pieces) // CHUNK
    aligned = starts // ALIGNED * ALIGNED

    def chunks_of(tokens):  # where a piece of a sequence has so many
        return jnp.where(tokens > 0, (starts - aligned + tokens + CHUNK - 1) // CHUNK, 0)

    lengths = ends - starts
    whole = jnp.zeros_like(lengths) if every is None else lengths // every  # pieces of `every`
    each = chunks_of(jnp.zeros_like(lengths) if every is None else jnp.full_like(lengths, every))
    rest = lengths if every is None else lengths % every
    counts = whole * each + chunks_of(rest)
    chunks = offsets(counts)
    owner = jnp.minimum(owners(chunks, n), sequences - 1)
    number = jnp.arange(n, dtype=i32) - chunks[owner]
    piece = jnp.minimum(number // jnp.maximum(each, 1)[owner], whole[owner])
    number = number - piece * each[owner]
    before = piece * (every or 0)  # tokens of the sequence in front of its piece
    begin = aligned[owner] + before + number * CHUNK
    starts, ends = starts[owner] + before, ends[owner]
    if every is not None:
        ends = jnp.minimum(ends, starts + every)
    low = jnp.clip(starts - begin, 0, CHUNK)
    high = jnp.clip(ends - begin, 0, CHUNK)
    kept = None
    if every is not None:
        last = (piece < whole[owner]) & (number == each[owner] - 1)
        kept = jnp.where(last, offsets(whole)[owner] + piece, -1)[:, None]
    # Of a chunk behind the last: it is computed, and not used.
    begin = jnp.minimum(begin, T // ALIGNED * ALIGNED)
    shown = jnp.where(live[owner], high, 0)
    return Plan(chunks, *(x[:, None] for x in (begin, low, high, shown))), kept


def _kept_of_rows(begin, T, every):
    done, rows = begin + CHUNK, jnp.arange(begin.shape[1], dtype=jnp.int32)[None]
    is_kept = (done % every == 0) & (done <= T)
    return jnp.where(is_kept, rows * (T // every) + done // every - 1, -1)


def in_chunks(x, plan):
    """`[B, T, heads, width]` as `[lanes, n, CHUNK, heads, width]`, zeros where no token is shown.

    Dense, and of whole chunks, it is a reshape but for the zeros.
    """
    n, lanes = plan.begin.shape
    rows = jnp.arange(CHUNK, dtype=jnp.int32)[None, None]
    begin, low, shown = (y.T[..., None] for y in (plan.begin, plan.low, plan.shown))
    inside = (rows >= low) & (rows < shown)
    if plan.dense:
        x = jnp.pad(x, [(0, 0), (0, n * CHUNK - x.shape[1]), (0, 0), (0, 0)])
        x = x.reshape(lanes, n, CHUNK, *x.shape[2:])
    else:
        x = x.at[0, begin + rows].get(mode="clip")
    return jnp.where(inside[..., None, None], x, jnp.zeros((), x.dtype))


def out_of_chunks(x, plan, T):
    """`[lanes, n, CHUNK, heads, width]` as `[B, T, heads, width]`: each token from its chunk."""
    lanes, n, _, *rest = x.shape
    x = x.reshape(lanes, n * CHUNK, *rest)
    if plan.dense:
        return x[:, :T]
    number = jnp.arange(n, dtype=jnp.int32)
    first = jnp.where(number < plan.chunks[-1], (plan.begin + plan.low)[:, 0], T)
    chunk = owners(jnp.append(first, T), T)
    at = chunk * CHUNK + jnp.arange(T, dtype=jnp.int32) - plan.begin[chunk, 0]
    return x.at[:, at].get(mode="clip")


def in_log2(log_decay):
    """Base 2, as the kernels read it: float16, and finite."""
    return jnp.maximum(log_decay.astype(jnp.float32) * LOG2_E, LEAST_DECAY).astype(jnp.float16)


def betas(beta, plan, keep):
    """`[n, lanes, HV, CHUNK]` float32: 0 where no token is, but never 0 with `keep`.

    The derivative divides by it.
    """
    beta = in_chunks(beta.astype(jnp.float32)[..., None], plan)[..., 0].transpose(1, 0, 3, 2)
    return jnp.maximum(beta, LEAST_BETA) if keep else beta
