"""Prefill in XLA: Kimi Delta Attention over long sequences in chunks of 64 tokens.

On some GPUs the kernels of `prefill_mosaic_gpu.py` stand in for `chunks_and_states`.

Within a chunk the rank-1 updates become one triangular system (the WY form): with G the sum of the
log decays from the chunk's start,

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   for j < i       w = (I + A)^-1 (beta k exp(G))
    out  = (q exp(G)) S^T + tril(q k^T exp(G_i - G_j)) (u - w S^T)   u = (I + A)^-1 (beta v)
    S   <- S exp(G_last) + u^T k' - S (w^T k')                       k' = k exp(G_last - G)

Only the last line goes from chunk to chunk, by one product each; the rest is done for all chunks of
a group at once. A loop goes over the groups. For the derivative it keeps the operands and the
states before each group, and makes the rest again. All products have one batch axis, (lanes, heads,
chunks) in this order: where the partitioner cuts the rows, or the heads of one row, it cuts that.

Every exponent that is taken is <= 0, so no decay overflows: across blocks of 16 tokens a product of
two such factors, with the later block's start between them; within a block the difference itself,
channel by channel. (Over 350 lines: the derivatives' own rules belong beside what they are of.)
"""

import functools

import jax
import jax.numpy as jnp

from kda_jax import gates
from kda_jax.sequences import holders, offsets, owners
from kda_jax.transforms import varying_as

CHUNK = 64
BLOCK = 16
# Chunks a turn of the loop. Of one size, so that a program for more tokens has the same products,
# and XLA has no more to choose for it. 8 chunks of 32 heads are 256 products at once, for 132
# multiprocessors of an H200; what a turn makes for its derivative grows with it.
GROUP = 8
# A log decay below this is 0 all the same, and a sum of 64 whole numbers of this size is exact in
# float32.
MOST_DECAY = -1e4


def chunks_and_states(
    q, k, v, log_decay, beta, start, live, cu_seqlens=None, *, static, every=None
):
    """`(out [B, T, HV, V], after [N, HV, V, K])` in XLA; with `every` also the states on the way.

    Args:
      start: `[N, HV, V, K]` float32, the state before each sequence. live: `[N]` bool; the others'
        outs are zeros.
      cu_seqlens: `[N+1]`, or `(begins [N], ends [N])` of sequences in order; None for rows.
      every: None, or after how many tokens a state is kept, a multiple of CHUNK: third,
        `[P, HV, V, K]`, those of the first sequence, then those of the second, and so on.
    """
    tensors = (q, k, v, log_decay, beta)
    precision = "highest" if q.dtype == k.dtype == v.dtype == jnp.float32 else "default"
    group = functools.partial(_group, static=static, precision=precision)
    if cu_seqlens is None:
        start = varying_as(start, *tensors, live)
        out, after, kept = _rows(tensors, start, live, group, every)
    else:
        if not isinstance(cu_seqlens, tuple):
            cu_seqlens = cu_seqlens[:-1], cu_seqlens[1:]
        start = varying_as(start, *tensors, live, *cu_seqlens)
        out, after, kept = _end_to_end(tensors, start, live, cu_seqlens, group, every)
    return (out, after) if every is None else (out, after, kept)


def _rows(tensors, start, live, group, every):
    """`(out, after, kept)` where each row is one sequence."""
    B, T = tensors[0].shape[:2]
    turns, size = _turns(-(-T // CHUNK))
    tokens = size * CHUNK
    count = 0 if every is None else T // every

    def in_turns(x):
        x = jnp.pad(x, [(0, 0), (0, turns * tokens - T), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(B, turns, tokens, *x.shape[2:]), 1, 0)

    def turn(carry, given):
        (state, kept), (number, tensors) = carry, given
        tensors = [
            jnp.where(live.reshape(B, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
            for x in tensors
        ]
        out, states, state = group(tensors, state)
        if count:
            done = (number * size + jnp.arange(1, size + 1, dtype=jnp.int32)) * CHUNK
            at = done // every - 1
            kept = _put(kept, at, (done % every == 0) & (at < count), states)
        return (state, kept), out

    state = start.reshape(-1, *start.shape[2:])
    kept = varying_as(jnp.zeros((count, *state.shape), state.dtype), state)
    numbers = jnp.arange(turns, dtype=jnp.int32)
    (state, kept), out = _loop(turn, (state, kept), (numbers, [in_turns(x) for x in tensors]))
    out = jnp.moveaxis(out, 0, 1).reshape(B, turns * tokens, *out.shape[3:])
    kept = jnp.moveaxis(kept.reshape(count, *start.shape), 0, 1)
    return out[:, :T], state.reshape(start.shape), kept.reshape(B * count, *start.shape[1:])


def _end_to_end(tensors, start, live, ranges, group, every):
    """`(out, after, kept)` where N sequences lie end to end: T // CHUNK + N chunks hold their
    tokens.

    Indices that point nowhere lie behind the last, each another one: no two are the same, and the
    derivative's sums need no atomics.
    """
    T, N = tensors[0].shape[1], live.shape[0]
    turns, size = _turns(T // CHUNK + N)
    n = turns * size
    begins, ends = ranges
    numbers, lengths = jnp.arange(n, dtype=jnp.int32), ends - begins
    # The first chunk of each sequence; and whose each chunk is: N behind the last.
    chunks = offsets((lengths + CHUNK - 1) // CHUNK)
    owner = owners(chunks, n)
    token_owner, token = holders(begins, ends, T), jnp.arange(T, dtype=jnp.int32)
    begins, ends = jnp.append(begins, 0), jnp.append(ends, 0)
    shown = jnp.append(live, False)
    places = jnp.arange(n * CHUNK, dtype=jnp.int32).reshape(n, CHUNK)
    at = begins[owner][:, None] + places - (chunks[owner] * CHUNK)[:, None]
    inside = (at < ends[owner][:, None]) & shown[owner][:, None]
    take = jnp.where(inside, at, T + places)
    first = (owner < N) & (numbers == chunks[owner])
    last = (owner < N) & (numbers == jnp.append(chunks[1:], 0)[owner] - 1)
    at_kept, is_kept = numbers, jnp.zeros(n, bool)
    if every is not None:
        done = (numbers - chunks[owner] + 1) * CHUNK
        at_kept = offsets(lengths // every)[owner] + done // every - 1
        is_kept = (owner < N) & (done % every == 0) & (done <= jnp.append(lengths, 0)[owner])

    def gathered(x):
        x = x.reshape(-1, *x.shape[2:]).at[take].get(**_APART, fill_value=0)
        return x.reshape(turns, 1, size * CHUNK, *x.shape[2:])

    def turn(carry, given):
        (state, after, kept), (tensors, owner, first, last, at_kept, is_kept) = carry, given
        nowhere = N + jnp.arange(size, dtype=jnp.int32)
        starts = start.at[jnp.where(first, owner, nowhere)].get(**_APART, fill_value=0)
        out, states, state = group(tensors, state, (first, starts))
        after = _put(after, owner, last, states)
        if every is not None:
            kept = _put(kept, at_kept, is_kept, states)
        return (state, after, kept), out

    zeros = varying_as(jnp.zeros_like(start), start)
    state = varying_as(jnp.zeros(start.shape[1:], start.dtype), start)
    count = 0 if every is None else T // every
    kept = varying_as(jnp.zeros((count, *start.shape[1:]), start.dtype), start)
    of_chunks = [x.reshape(turns, size) for x in (owner, first, last, at_kept, is_kept)]
    given = [gathered(x) for x in tensors], *of_chunks
    (_, after, kept), out = _loop(turn, (state, zeros, kept), given)
    at = (chunks * CHUNK - begins)[token_owner] + token
    at = jnp.where(shown[token_owner], at, n * CHUNK + token)
    return out.reshape(-1, *out.shape[3:]).at[at].get(**_APART, fill_value=0)[None], after, kept


def _put(places, at, where, states):
    """Adds to `places` `[n, ...]` the states `[lanes, chunks, ...]` of some chunks, each once."""
    nowhere = places.shape[0] + jnp.arange(at.shape[0], dtype=jnp.int32)
    states = jnp.moveaxis(states, 1, 0)
    return places.at[jnp.where(where, at, nowhere)].add(
        states.reshape(-1, *places.shape[1:]), mode="drop", unique_indices=True
    )


_APART = dict(mode="fill", unique_indices=True)


def _turns(n):
    """`(turns, chunks a turn)` of n chunks; a number that is symbolic is compared with nothing."""
    size = min(GROUP, n) if isinstance(n, int) else GROUP
    return -(-n // size), size


def _loop(turn, carry, given):
    # Inside a loop nothing merges what is made again with what was made before.
    return jax.lax.scan(jax.checkpoint(turn, prevent_cse=False), carry, given)


def _group(tensors, state, resets=None, *, static, precision):
    """Some chunks, one after the other: what needs no state, then the states, then the read-outs.

    Args:
      tensors: q, k, v, log_decay and beta, `[lanes, chunks * CHUNK, heads, ...]` of any dtype.
      state: `[lanes * HV, V, K]`, before the first chunk.
      resets: None, or `(first [chunks], starts [chunks, HV, V, K])`: where `first`, a chunk starts
        from its own state.

    Returns:
      `(out, states, state)`: `[lanes, chunks * CHUNK, HV, V]`; the state after each chunk,
      `[lanes * HV, chunks, V, K]`; and after the last.
    """
    product = functools.partial(jnp.einsum, precision=precision)
    q, k, v, log_decay, beta = map(_in_chunks, tensors)
    lanes, HV, chunks = beta.shape[:3]
    if static.maths.use_qk_l2norm:
        q, k = (x * gates.inverse_norm((x * x).sum(-1, keepdims=True)) for x in (q, k))
    q, k = (
        jnp.repeat(x, HV // x.shape[1], axis=1) for x in (q * jnp.float32(static.maths.scale), k)
    )
    K, V, heads, batch = k.shape[-1], v.shape[-1], lanes * HV, lanes * HV * chunks
    q, k, v, log_decay, beta = (x.reshape(batch, *x.shape[3:]) for x in (q, k, v, log_decay, beta))
    wu, scores, q, k, last = _within(q, k, v, log_decay, beta, precision)
    # Of each chunk `[K + V, K]`: what it erases of a state, and below that what it adds.
    changes = product("mci,mck->mik", wu, k).reshape(heads, chunks, K + V, K)
    last = last.reshape(heads, chunks, 1, K)
    before, states = [], []
    for c in range(chunks):
        if resets is not None:
            state = jnp.where(resets[0][c], resets[1][c], state)
        before.append(state)
        erased = product("lvk,lkj->lvj", state, changes[:, c, :K])
        state = state * last[:, c] + (changes[:, c, K:] - erased)
        states.append(state)
    before = jnp.stack(before, 1).reshape(batch, V, K)
    w_and_q = jnp.concatenate([wu[..., :K], q], 1)
    seen, out = jnp.split(product("mik,mvk->miv", w_and_q, before), 2, axis=1)
    out = out + product("mij,mjv->miv", scores, wu[..., K:] - seen)
    out = out.astype(static.out_dtype).reshape(lanes, HV, chunks * CHUNK, V)
    return jnp.moveaxis(out, 1, 2), jnp.stack(states, 1), state


def _in_chunks(x):
    """`[lanes, chunks * CHUNK, heads, ...]` as float32 `[lanes, heads, chunks, CHUNK, ...]`."""
    x = jnp.moveaxis(x.astype(jnp.float32), 2, 1)
    return x.reshape(*x.shape[:2], x.shape[2] // CHUNK, CHUNK, *x.shape[3:])


def _within(q, k, v, log_decay, beta, precision):
    """`(w and u, scores, q exp(G), k exp(G_last - G), exp(G_last))` of every chunk.

    Args: `[batch, CHUNK, ...]`.
    """
    G = _sums(log_decay)
    pairs = _pairs(jnp.stack([k, q], 1), k, *G, "k", precision)
    row, column = (jnp.arange(CHUNK).reshape(shape) for shape in ((1, CHUNK, 1), (1, 1, CHUNK)))
    strength = beta[..., None]
    system = jnp.where(column < row, pairs[:, 0] * strength, 0)
    scores = jnp.where(column <= row, pairs[:, 1], 0)
    grown = _exp(G)
    right = jnp.concatenate([k * grown, v], -1) * strength
    last = tuple(x[:, -1:] for x in G)
    wu = _solved(system, right, precision)
    return wu, scores, q * grown, k * _exp(_minus(last, G)), _exp(last)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _solved(A, right, precision):
    """(I + A)^-1 right of strictly lower triangular A `[batch, CHUNK, CHUNK]`."""
    return jnp.matmul(_inverse(A), right, precision=precision)


@_solved.defjvp
def _solved_jvp(precision, primals, tangents):
    """Its own derivative is two products; that of the inverse would be twice as many."""
    (A, right), (dA, dright), product = (
        primals,
        tangents,
        functools.partial(jnp.matmul, precision=precision),
    )
    inverse = _inverse(A)
    solved = product(inverse, right)
    return solved, product(inverse, dright - product(dA, solved))


@jax.custom_jvp
def _inverse(A):
    """(I + A)^-1 of strictly lower triangular `[batch, CHUNK, CHUNK]`, in float32.

    It is made of blocks of 4, then by two halves each.
    A power series over all 64 would cancel; over 4 it has three terms. The halves' products are
    sums of up to 32 terms.
    """
    size, batch = 4, A.shape[0]
    block = _diagonal(A, size, 0)
    eye = jnp.eye(size, dtype=A.dtype)[None]
    inverse = eye - block
    for _ in range(size - 2):
        inverse = eye - _small_product(block, inverse)
    while size < CHUNK:
        halves = inverse.reshape(-1, 2, size, size)
        upper, lower = halves[:, 0], halves[:, 1]
        product = _small_product if size < BLOCK else _whole_product
        corner = -product(product(lower, _diagonal(A, size, 1)), upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        size *= 2
    return inverse.reshape(batch, CHUNK, CHUNK)


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
    inverse = _inverse(*primals)
    return inverse, -_whole_product(inverse, _whole_product(tangents[0], inverse))


def _diagonal(A, size, below):
    """The blocks of this size on A's diagonal, `[batch * CHUNK/size, size, size]`.

    With `below`, every other one of those below the diagonal.
    """
    which = range(1, CHUNK // size, 2) if below else range(CHUNK // size)
    blocks = [
        A[:, i * size : (i + 1) * size, (i - below) * size : (i - below + 1) * size] for i in which
    ]
    return jnp.stack(blocks, axis=1).reshape(-1, size, size)


def _small_product(x, y):
    """x @ y of matrices that are too small for a product of their own on a GPU."""
    return (x[..., :, :, None] * y[..., None, :, :]).sum(-2)


_whole_product = functools.partial(jnp.matmul, precision="highest")


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _pairs(x, k, whole, rest, apart, precision):
    """`[batch, rows, CHUNK, CHUNK]`: `sum_c x_ic k_jc exp(G_ic - G_jc)` for several x a chunk.

    Entries above the diagonal are undefined, and finite.

    Args:
      x: `[batch, rows, CHUNK, K]`. k: `[batch, CHUNK, K]`. whole, rest: G, as `_sums` gives it.
      apart: "x" or "k", which of the two is no tangent.
    """
    far = _pairs_across_blocks(x, k, (whole, rest), precision)
    # The differences of a block are 16 times what they are made of. Behind a barrier of its own
    # each sum makes them for itself; otherwise XLA writes them out for all that read them.
    if apart == "x":
        x, whole, rest = jax.lax.optimization_barrier((x, whole, rest))
    else:
        k, whole, rest = jax.lax.optimization_barrier((k, whole, rest))
    near = _pairs_within_blocks(x, k, (whole, rest))
    block = jnp.arange(CHUNK) // BLOCK
    same_block = (block[:, None] == block[None])[None, None]
    return jnp.where(same_block, jnp.tile(near, CHUNK // BLOCK), far)


@_pairs.defjvp
def _pairs_jvp(apart, precision, primals, tangents):
    """A sum of two: with `x' + x G'` for x, and with `k' - k G'` for k.

    So the derivative takes no difference apart, and where tokens do not decay none is at an edge.
    """
    x, k, whole, rest = primals
    dx, dk, _, dG = tangents
    by_x = _pairs(dx + x * dG[:, None], k, whole, rest, "k", precision)
    by_k = _pairs(x, dk - k * dG, whole, rest, "x", precision)
    return _pairs(x, k, whole, rest, apart, precision), by_x + by_k


def _pairs_across_blocks(x, k, G, precision):
    """`[batch, rows, CHUNK, CHUNK]`: those of different blocks; elsewhere anything finite."""
    batch, rows, _, K = x.shape
    early, later = CHUNK - BLOCK, CHUNK // BLOCK - 1
    # Of a later block's start: what its rows have lost since, and what the tokens before had still
    # to lose until then.
    border = tuple(y[:, BLOCK - 1 : early : BLOCK, None] for y in G)
    since = _exp(_minus(tuple(_in_blocks(y)[:, 1:] for y in G), border))
    until = _decay(_minus(border, tuple(y[:, None, :early] for y in G)))
    x = jnp.moveaxis(_in_blocks(x)[:, :, 1:], 1, 2) * since[:, :, None]
    far = jnp.einsum(
        "bik,bjk->bij",
        x.reshape(batch * later, rows * BLOCK, K),
        (k[:, None, :early] * until).reshape(batch * later, early, K),
        precision=precision,
    )
    far = jnp.moveaxis(far.reshape(batch, later, rows, BLOCK, early), 2, 1)
    far = far.reshape(batch, rows, early, early)
    return jnp.pad(far, [(0, 0), (0, 0), (BLOCK, 0), (0, BLOCK)])


def _pairs_within_blocks(x, k, G):
    """`[batch, rows, CHUNK, BLOCK]`: the same for i and j of one block, channel by channel."""
    x, k, *G = map(_in_blocks, (x, k, *G))
    apart = _minus(*(tuple(jnp.expand_dims(y, axis) for y in G) for axis in (-2, -3)))
    decayed = k[..., None, :, :] * _decay(apart)
    near = (x[..., None, :] * decayed[:, None]).sum(-1)
    return near.reshape(*x.shape[:2], CHUNK, BLOCK)


def _in_blocks(x):
    return x.reshape(*x.shape[:-2], CHUNK // BLOCK, BLOCK, x.shape[-1])


def _sums(log_decay):
    """The running sums of the log decays, as (whole part, rest).

    So differences of large sums keep their last digits.
    """
    log_decay = jnp.maximum(log_decay, MOST_DECAY)
    whole = jax.lax.stop_gradient(jnp.round(log_decay))
    return jnp.cumsum(whole, axis=-2), jnp.cumsum(log_decay - whole, axis=-2)


def _minus(x, y):
    return x[0] - y[0], x[1] - y[1]


def _exp(sums):
    return jnp.exp(sums[0] + sums[1])


def _decay(sums):
    """exp(sums) where they are <= 0; elsewhere, where it is of no use, at most 1.

    No mask: JAX would write it out in full size before the loop.
    """
    return jnp.exp(-jnp.abs(sums[0] + sums[1]))
