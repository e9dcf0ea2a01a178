"""Prefill in XLA: Kimi Delta Attention over long sequences in chunks of 64 tokens.

On some GPUs the kernels of `prefill_mosaic_gpu.py` stand in for `chunks_and_states`.

Within a chunk the rank-1 updates become one triangular system (the WY form): with G the sum of the
log decays from the chunk's start,

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   for j < i       w = (I + A)^-1 (beta k exp(G))
    out  = (q exp(G)) S^T + tril(q k^T exp(G_i - G_j)) (u - w S^T)   u = (I + A)^-1 (beta v)
    S   <- S exp(G_last) + u^T k' - S (w^T k')                       k' = k exp(G_last - G)

Only the last line is a loop over the chunks, of one product each; the rest is done for all of them
at once. Every exponent that is taken is <= 0, so no decay overflows: across blocks of 16 tokens a
product of two such factors, with the later block's start between them; within a block the
difference itself, channel by channel.
"""

import functools

import jax
import jax.numpy as jnp

from kda_jax import gates
from kda_jax.sequences import owners
from kda_jax.transforms import varying_as

CHUNK = 64
BLOCK = 16
UNROLL = 4  # chunks a turn of the loop
# A log decay below this is 0 all the same, and a sum of 64 whole numbers of this size is exact in
# float32.
MOST_DECAY = -1e4


def chunks_and_states(q, k, v, log_decay, beta, start, live, cu_seqlens, *, static):
    """`(out [B, T, HV, V], after [N, HV, V, K])` in XLA.

    start: `[N, HV, V, K]` float32, the state before each sequence. live: `[N]` bool; the others'
    outs are zeros.
    """
    (B, T, HV), V = beta.shape, static.sizes.V
    precision = "highest" if q.dtype == k.dtype == v.dtype == jnp.float32 else "default"
    tensors = (q, k, v, log_decay, beta)
    if cu_seqlens is None:
        n = -(-T // CHUNK)
        q, k, v, log_decay, beta = (_rows_in_chunks(x, n, live) for x in tensors)
        resets = None

        def at_their_tokens(out):
            return jnp.moveaxis(out, 0, 1).reshape(B, n * CHUNK, HV, V)[:, :T]

    else:
        bounds = jnp.clip(cu_seqlens, 0, T)  # no boundary reaches past the tokens, whatever it is
        take, inside, chunks, owner = _sequences_in_chunks(bounds, T, live)
        q, k, v, log_decay, beta = (_gathered_in_chunks(x, take, inside) for x in tensors)
        resets = chunks, owner

        def at_their_tokens(out):
            token_owner = owners(bounds, T)
            begin = chunks * CHUNK - jnp.append(bounds[:-1], 0)
            at = begin[token_owner] + jnp.arange(T, dtype=jnp.int32)
            out = out.reshape(-1, HV, V).at[at].get(mode="clip")
            shown = jnp.append(live, False)[token_owner]
            return jnp.where(shown[:, None, None], out, jnp.zeros((), static.out_dtype)).reshape(
                B, T, HV, V
            )

    if static.maths.use_qk_l2norm:
        q, k = (x * gates.inverse_norm((x * x).sum(-1, keepdims=True)) for x in (q, k))
    q, k = (
        jnp.repeat(x, HV // x.shape[2], axis=2) for x in (q * jnp.float32(static.maths.scale), k)
    )
    out, after = _chunks(q, k, v, log_decay, beta, start, resets, precision)
    return at_their_tokens(
        jnp.moveaxis(out.astype(static.out_dtype), 2, 3)
    ), after  # from [n, lanes, CHUNK, HV, V]


def _rows_in_chunks(x, n, live):
    """`[B, T, heads, ...]` as float32 `[n, B, heads, CHUNK, ...]`.

    Behind the last token and in padded rows there are zeros.
    """
    B, T = x.shape[:2]
    x = jnp.where(live.reshape(B, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
    x = jnp.pad(x, [(0, 0), (0, n * CHUNK - T), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(B, n, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2)).astype(jnp.float32)


def _sequences_in_chunks(cu_seqlens, T, live):
    """Where the tokens of sequences that lie end to end go: one lane of T // CHUNK + N chunks.

    Returns:
      take: `[n, 1, CHUNK]`, which token it is; inside: whether it is one, of a live sequence.
      chunks: `[N+1]`, the first chunk of each sequence; owner: `[n]`, whose it is: N behind the
        last.
    """
    N = live.shape[0]
    n = T // CHUNK + N
    lengths = jnp.maximum(cu_seqlens[1:] - cu_seqlens[:-1], 0)
    chunks = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), jnp.cumsum((lengths + CHUNK - 1) // CHUNK, dtype=jnp.int32)]
    )
    owner = owners(chunks, n)  # N for a chunk behind the last sequence
    number = jnp.arange(n, dtype=jnp.int32) - chunks[owner]
    ends = jnp.append(cu_seqlens[1:], 0)
    at = jnp.append(cu_seqlens[:-1], 0)[owner][:, None] + number[:, None] * CHUNK
    at = at + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    inside = (at < ends[owner][:, None]) & jnp.append(live, False)[owner][:, None] & (at < T)
    return jnp.clip(at, 0, T - 1)[:, None], inside[:, None], chunks, owner


def _gathered_in_chunks(x, take, inside):
    """`[B, T, heads, ...]` as float32 `[n, lanes, heads, CHUNK, ...]`, zeros where no token is."""
    flat = x.reshape(-1, *x.shape[2:])
    x = jnp.where(
        inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), flat[take], jnp.zeros((), x.dtype)
    )
    return jnp.moveaxis(x.astype(jnp.float32), 3, 2)


def _chunks(q, k, v, log_decay, beta, start, resets, precision):
    """All chunks: what needs no state, then the states one after the other, then the read-outs.

    Args:
      q, k, log_decay: `[n, lanes, HV, CHUNK, K]`. v: `[n, lanes, HV, CHUNK, V]`. beta:
        `[n, lanes, HV, CHUNK]`.
      start: `[N, HV, V, K]`. resets: None, where each lane is one sequence; else
        `(chunks [N+1], owner [n])`.

    Returns:
      `(out, after)`: `[n, lanes, HV, CHUNK, V]`, and the states `[N, HV, V, K]` after each
      sequence.
    """
    product = functools.partial(jnp.einsum, precision=precision)
    w, u, scores, q, k, last = _within(q, k, v, log_decay, beta, precision)
    changes = last, product("nlhik,nlhij->nlhkj", w, k), product("nlhiv,nlhik->nlhvk", u, k)
    start = varying_as(start, *changes, *(resets or ()))

    def advance(state, change):
        last, erased, added = change
        return state * last[:, :, None] + (added - product("lhvk,lhkj->lhvj", state, erased))

    unroll = (
        UNROLL if isinstance(q.shape[0], int) else 1
    )  # a symbolic number of chunks is compared with nothing
    if resets is None:
        after, states = jax.lax.scan(
            lambda state, x: (advance(state, x), state), start, changes, unroll=unroll
        )
    else:
        chunks, owner = resets
        first = jnp.arange(owner.shape[0], dtype=jnp.int32) == chunks[owner]

        def step(state, chunk):
            first, owner, *change = chunk
            state = jnp.where(first, start.at[owner].get(mode="fill", fill_value=0)[None], state)
            return advance(state, change), state

        empty = varying_as(jnp.zeros((1, *start.shape[1:]), start.dtype), start)
        _, states = jax.lax.scan(step, empty, (first, owner, *changes), unroll=unroll)
        ends = jnp.maximum(chunks[1:] - 1, 0)
        after = advance(states[ends, 0], [change[ends, 0] for change in changes])
    new = u - product("nlhik,nlhvk->nlhiv", w, states)
    return product("nlhik,nlhvk->nlhiv", q, states) + product(
        "nlhij,nlhjv->nlhiv", scores, new
    ), after


@functools.partial(
    jax.checkpoint, static_argnums=(5,)
)  # the blocks' differences are not kept for the derivative
def _within(q, k, v, log_decay, beta, precision):
    """`(w, u, scores, q exp(G), k exp(G_last - G), exp(G_last))` of every chunk."""
    G = _sums(log_decay)
    key_scores, scores = _pairs((k, q), k, G, precision)
    square = (1,) * (k.ndim - 2) + (CHUNK, CHUNK)
    before = jnp.tril(jnp.ones((CHUNK, CHUNK), bool), -1).reshape(square)
    upto = jnp.tril(jnp.ones((CHUNK, CHUNK), bool)).reshape(square)
    system = jnp.where(before, key_scores * beta[..., None], 0)
    inverse = _inverse(system)
    w, u = (jnp.matmul(inverse, x * beta[..., None], precision=precision) for x in (k * _exp(G), v))
    last = tuple(x[..., -1:, :] for x in G)
    scores = jnp.where(upto, scores, 0)
    return w, u, scores, q * _exp(G), k * _exp(_minus(last, G)), _exp(last)[..., 0, :]


def _inverse(A):
    """(I + A)^-1 of strictly lower triangular `[..., CHUNK, CHUNK]`, in float32.

    It is made of blocks of 4, then by two halves each.
    A power series over all 64 would cancel; over 4 it has three terms. The halves' products are
    sums of up to 32 terms.
    """
    lead, size = A.shape[:-2], 4
    block = _diagonal(A, size, 0)
    eye = jnp.eye(size, dtype=A.dtype).reshape((1,) * (block.ndim - 2) + (size, size))
    inverse = eye - block
    for _ in range(size - 2):
        inverse = eye - _small_product(block, inverse)
    while size < CHUNK:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        product = (
            _small_product if size < BLOCK else functools.partial(jnp.matmul, precision="highest")
        )
        corner = -product(product(lower, _diagonal(A, size, 1)), upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        size *= 2
    return inverse.reshape(*lead, CHUNK, CHUNK)


def _diagonal(A, size, below):
    """The blocks of this size on A's diagonal, `[..., CHUNK/size, size, size]`.

    With `below`, every other one of those below the diagonal.
    """
    count = CHUNK // size
    rows = A.reshape(*A.shape[:-2], count, size, CHUNK)
    which = range(1, count, 2) if below else range(count)
    return jnp.stack(
        [rows[..., i, :, (i - below) * size : (i - below + 1) * size] for i in which], axis=-3
    )


def _small_product(x, y):
    """x @ y of matrices that are too small for a product of their own on a GPU."""
    return (x[..., :, :, None] * y[..., None, :, :]).sum(-2)


def _pairs(xs, k, G, precision):
    """For each x `sum_c x_ic k_jc exp(G_ic - G_jc)`, `[..., CHUNK, CHUNK]`.

    Entries above the diagonal are undefined.
    """
    lead, early = k.shape[:-2], CHUNK - BLOCK
    # Of a later block's start: what its rows have lost since, and what the tokens before had still
    # to lose until then.
    border = tuple(y[..., BLOCK - 1 : early : BLOCK, None, :] for y in G)
    since = _exp(_minus(tuple(y[..., 1:, :, :] for y in map(_in_blocks, G)), border))
    until = sum(_minus(border, tuple(y[..., None, :early, :] for y in G)))
    # Above 0 only where the result is of no use. Not a minimum: its derivative is 1/2 at 0, where
    # tokens that do not decay are.
    until = k[..., None, :early, :] * jnp.exp(jnp.where(until > 0, 0, until))
    block = jnp.arange(CHUNK) // BLOCK
    same_block = (block[:, None] == block[None]).reshape((1,) * len(lead) + (CHUNK, CHUNK))
    pairs = []
    for x in xs:
        # Behind a barrier of its own: otherwise XLA writes out what both sums read, or takes a
        # minute to compile them.
        near = _pairs_within_blocks(*jax.lax.optimization_barrier((x, k, G)))
        far = jnp.einsum(
            "...bik,...bjk->...bij",
            _in_blocks(x)[..., 1:, :, :] * since,
            until,
            precision=precision,
        )
        far = far.reshape(*lead, early, early)
        far = jnp.pad(far, [(0, 0)] * len(lead) + [(BLOCK, 0), (0, BLOCK)])
        pairs.append(jnp.where(same_block, jnp.tile(near, CHUNK // BLOCK), far))
    return pairs


def _pairs_within_blocks(x, k, G):
    """`[..., CHUNK, BLOCK]`: the same for i and j of one block, channel by channel."""
    x, k, *G = map(_in_blocks, (x, k, *G))
    causal = jnp.tril(jnp.ones((BLOCK, BLOCK), bool)).reshape(
        (1,) * (k.ndim - 2) + (BLOCK, BLOCK, 1)
    )
    apart = sum(_minus(*(tuple(jnp.expand_dims(y, axis) for y in G) for axis in (-2, -3))))
    decayed = k[..., None, :, :] * jnp.exp(jnp.where(causal, apart, -jnp.inf))
    near = (x[..., :, None, :] * decayed).sum(-1)
    return near.reshape(*near.shape[:-3], CHUNK, BLOCK)


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
