"""Prefill: Kimi Delta Attention over long sequences in chunks of 64 tokens, in plain XLA.

On some GPUs the kernels of `chunk_mosaic_gpu.py` stand in for `_chunks_and_states`.

Within a chunk the rank-1 updates become one triangular system (the WY form): with G the sum of the log decays from
the chunk's start,

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   for j < i          w = (I + A)^-1 (beta k exp(G))
    out  = (q exp(G)) S^T + tril(q k^T exp(G_i - G_j)) (u - w S^T)      u = (I + A)^-1 (beta v)
    S   <- S exp(G_last) + u^T k' - S (w^T k')                          k' = k exp(G_last - G)

Only the last line is a loop over the chunks, of one product each; the rest is done for all of them at once.
Every exponent that is taken is <= 0, so no decay overflows: across blocks of 16 tokens a product of two such factors,
with the later block's start between them; within a block the difference itself, channel by channel.
"""

import functools

import jax
import jax.numpy as jnp

from kda_contracts import CHUNK_KDA, Sizes, check
from kda_jax import dispatch, gates
from kda_jax.invariants import assert_operands
from kda_jax.sequences import owners
from kda_jax.slots import as_int32, is_ref
from kda_jax.transforms import ref_must_be_mapped, with_transforms_of

CHUNK = 64
BLOCK = 16
UNROLL = 4  # chunks a turn of the loop
MOST_DECAY = (
    -1e4
)  # a log decay below this is 0 all the same, and whole numbers of 64 of them are exact in float32


def chunk_kda(
    q,
    k,
    v,
    log_decay,
    beta,
    initial_state,
    slots,
    *,
    source_indices=None,
    cu_seqlens=None,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    out_dtype=None,
    implementation="auto",
):
    """The recurrence of `recurrent_kda` over long sequences: in chunks, in parallel where it can be. Differentiable.

    Dense: B = N sequences of T tokens. With `cu_seqlens`: B = 1, and N sequences of unequal length lie end to end
    along T; none is padded to the longest. An empty sequence reads and writes nothing.

    Args:
      q: `[B, T, H, K]` bfloat16, float16 or float32; queries.
      k: `[B, T, H, K]` bfloat16, float16 or float32; keys.
      v: `[B, T, HV, V]` bfloat16, float16 or float32; values.
      log_decay: `[B, T, HV, K]` float32, bfloat16 or float16; natural log of the decay per key channel, <= 0, -inf
        included.
      beta: `[B, T, HV]` float32, bfloat16 or float16; update strength, after the sigmoid.
      initial_state: `[S, HV, V, K]` float32, bfloat16 or float16, an array or a `jax.Ref`; the whole pool.
      slots: `[N]` int8 to int64; the slot of each sequence, which takes its last state. Outside `[0, S)`: a padded one,
        whose `out` is zero.
      source_indices: `[N]` int8 to int64; None starts each sequence from its own slot. Otherwise from this one, and
        from a zero state where it lies outside `[0, S)`.
      cu_seqlens: None, or `[N+1]` int32 or int64 (`validate_cu_seqlens` checks the values on the host).
      scale: factor on q, a static finite number > 0; None is `K**-0.5`.
      use_qk_l2norm_in_kernel: whether q and k are divided by `sqrt(sum(x*x) + 1e-6)` over K first.
      out_dtype: dtype of `out`; None is that of `v`.
      implementation: "auto", "mosaic_gpu" or "xla". "auto" takes the kernels on a GPU of compute capability 9.0 where
        q, k and v are bfloat16, K is 64 or 128, and V a multiple of 64 up to 256; else XLA. Derivatives, and what
        `vmap` maps, are XLA's in any case. Name "xla" where no kernel can be: in a program for several platforms or
        for a CPU beside that GPU, and in one that the partitioner cuts (inside `jax.shard_map` the kernels run).

    Returns:
      out: `[B, T, HV, V]`.
      state: `[S, HV, V, K]`, the updated pool, rounded once, after the last token; None if a Ref came in.

    Effects:
      As `packed_decode`: the pool is updated in place where it is donated inside `jit`, or a Ref. Memory is linear in
      T. A value that is not finite poisons its chunk of 64 tokens, those before it too. float32 operands are multiplied
      in full float32; narrower ones with a GPU's default for float32 (TF32). The kernels multiply bfloat16, sum in
      float32, hold the state in float32, and round log decays to float16 (weaker than 2e-8 a token: to 0).

    Raises:
      ContractError, TypeError, NotImplementedError: as `packed_decode`.

    Source: the chunked form of the Kimi Linear paper; FLA's `chunk_kda`, with V before K in the state.

    >>> import jax.numpy as jnp
    >>> q, k = jnp.array([[[[3.0, 4.0]]]]), jnp.array([[[[0.0, 2.0]]]])
    >>> v, log_decay = jnp.array([[[[1.0, -1.0]]]]), jnp.full((1, 1, 1, 2), -jnp.log(2.0))
    >>> pool = jnp.array([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> out, state = chunk_kda(q, k, v, log_decay, jnp.full((1, 1, 1), 0.5), pool, jnp.array([0]), scale=1.0)
    >>> out.ravel().round(4).tolist(), state[0, 0].round(4).tolist()
    ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]])
    """
    arrays = dict(
        q=q, k=k, v=v, log_decay=log_decay, beta=beta, initial_state=initial_state, slots=slots
    )
    arrays = dispatch.without_layout(
        arrays | dict(source_indices=source_indices, cu_seqlens=cu_seqlens)
    )
    options = dict(
        scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, out_dtype=out_dtype
    )
    sizes = check(CHUNK_KDA, **arrays, **options)
    dispatch.refuse_what_holds_no_values(CHUNK_KDA, arrays)
    *tensors, pool, slots, sources, cu_seqlens = arrays.values()
    given = {name: x for name, x in arrays.items() if x is not None}
    implementation = dispatch.choose_prefill(
        implementation, sizes, [x.dtype for x in tensors[:3]], given
    )
    out_dtype = jnp.dtype(arrays["v"].dtype if out_dtype is None else out_dtype)
    if 0 in (sizes.B, sizes.T, sizes.N, sizes.S, sizes.V):
        out = jnp.zeros((sizes.B, sizes.T, sizes.HV, sizes.V), out_dtype)
        return out, None if is_ref(initial_state) else jnp.asarray(arrays["initial_state"])
    return kda_chunk(
        *tensors,
        pool,
        as_int32(slots),
        None if sources is None else as_int32(sources),
        None if cu_seqlens is None else as_int32(cu_seqlens),
        sizes=sizes,
        scale=float(sizes.K**-0.5 if scale is None else scale),
        use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
        out_dtype=out_dtype,
        implementation=implementation,
    )


@functools.partial(
    jax.jit, static_argnames=("sizes", "scale", "use_qk_l2norm", "out_dtype", "implementation")
)
def kda_chunk(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    log_decay,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    pool,  # [S, HV, V, K], an array or a Ref
    slots,  # [N] int32
    sources=None,  # [N] int32
    cu_seqlens=None,  # [N+1] int32
    *,
    sizes: Sizes,
    scale,
    use_qk_l2norm,
    out_dtype,
    implementation,
):
    """`kda_jax.chunk_kda` after its contract: `(out, pool)`, with None for a Ref, which is updated in place."""
    assert_operands(CHUNK_KDA, sizes, q, k, v, log_decay, beta, pool, slots, sources, cu_seqlens)
    S = sizes.S
    state = pool[...] if is_ref(pool) else pool
    if is_ref(pool):
        others = (x for x in (sources, cu_seqlens) if x is not None)
        slots = ref_must_be_mapped(pool, slots, q, k, v, log_decay, beta, *others)
    live = (slots >= 0) & (slots < S)
    sources = jnp.where(live, slots if sources is None else sources, S)
    sources = jnp.where(
        (sources >= 0) & (sources < S), sources, S
    )  # on the high side: a negative index would wrap
    start = state.at[sources].get(mode="fill", fill_value=0).astype(jnp.float32)

    options = dict(sizes=sizes, scale=scale, use_qk_l2norm=use_qk_l2norm, out_dtype=out_dtype)
    chunks_and_states = functools.partial(_chunks_and_states, **options)
    if implementation == "mosaic_gpu":
        from kda_jax import chunk_mosaic_gpu  # a second to load

        kernels = functools.partial(chunk_mosaic_gpu.chunks_and_states, **options)
        chunks_and_states = with_transforms_of(chunks_and_states, kernels)
    out, after = chunks_and_states(q, k, v, log_decay, beta, start, live, cu_seqlens)
    written = live
    if cu_seqlens is not None:
        bounds = jnp.clip(cu_seqlens, 0, sizes.T)
        written = live & (bounds[1:] > bounds[:-1])
    state = state.at[jnp.where(written, slots, S)].set(after.astype(state.dtype), mode="drop")
    if is_ref(pool):
        pool[...] = state
        return out, None
    return out, state


def _chunks_and_states(
    q, k, v, log_decay, beta, start, live, cu_seqlens, *, sizes, scale, use_qk_l2norm, out_dtype
):
    """`(out [B, T, HV, V], after [N, HV, V, K])` in XLA.

    start: `[N, HV, V, K]` float32, the state before each sequence. live: `[N]` bool; the others' outs are zeros.
    """
    B, T, HV = beta.shape
    precision = "highest" if q.dtype == k.dtype == v.dtype == jnp.float32 else "default"
    tensors = (q, k, v, log_decay, beta)
    if cu_seqlens is None:
        n = -(-T // CHUNK)
        q, k, v, log_decay, beta = (_rows_in_chunks(x, n, live) for x in tensors)
        resets = None

        def at_their_tokens(out):
            return jnp.moveaxis(out, 0, 1).reshape(B, n * CHUNK, HV, sizes.V)[:, :T]

    else:
        bounds = jnp.clip(cu_seqlens, 0, T)  # no boundary reaches past the tokens, whatever it is
        take, inside, chunks, owner = _sequences_in_chunks(bounds, T, live)
        q, k, v, log_decay, beta = (_gathered_in_chunks(x, take, inside) for x in tensors)
        resets = chunks, owner

        def at_their_tokens(out):
            token_owner = owners(bounds, T)
            begin = chunks * CHUNK - jnp.append(bounds[:-1], 0)
            at = begin[token_owner] + jnp.arange(T, dtype=jnp.int32)
            out = out.reshape(-1, HV, sizes.V).at[at].get(mode="clip")
            shown = jnp.append(live, False)[token_owner]
            return jnp.where(shown[:, None, None], out, jnp.zeros((), out_dtype)).reshape(
                B, T, HV, sizes.V
            )

    if use_qk_l2norm:
        q, k = (x * gates.inverse_norm((x * x).sum(-1, keepdims=True)) for x in (q, k))
    q, k = (jnp.repeat(x, HV // x.shape[2], axis=2) for x in (q * jnp.float32(scale), k))
    out, after = _chunks(q, k, v, log_decay, beta, start, resets, precision)
    return at_their_tokens(
        jnp.moveaxis(out.astype(out_dtype), 2, 3)
    ), after  # from [n, lanes, CHUNK, HV, V]


def _rows_in_chunks(x, n, live):
    """`[B, T, heads, ...]` as float32 `[n, B, heads, CHUNK, ...]`, zeros behind the last token and in padded rows."""
    B, T = x.shape[:2]
    x = jnp.where(live.reshape(B, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
    x = jnp.pad(x, [(0, 0), (0, n * CHUNK - T), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(B, n, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2)).astype(jnp.float32)


def _sequences_in_chunks(cu_seqlens, T, live):
    """Where the tokens of sequences that lie end to end stand: one lane of at most T // CHUNK + N chunks.

    Returns:
      take: `[n, 1, CHUNK]`, which token it is; inside: whether it is one, of a live sequence.
      chunks: `[N+1]`, the first chunk of each sequence; owner: `[n]`, whose it is: N behind the last.
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
    """All chunks: what of each needs no state, then the states one after the other, then the read-outs.

    Args:
      q, k, log_decay: `[n, lanes, HV, CHUNK, K]`. v: `[n, lanes, HV, CHUNK, V]`. beta: `[n, lanes, HV, CHUNK]`.
      start: `[N, HV, V, K]`. resets: None, where each lane is one sequence; else `(chunks [N+1], owner [n])`.

    Returns:
      `(out, after)`: `[n, lanes, HV, CHUNK, V]`, and the states `[N, HV, V, K]` after each sequence.
    """
    product = functools.partial(jnp.einsum, precision=precision)
    w, u, scores, q, k, last = _within(q, k, v, log_decay, beta, precision)
    changes = last, product("nlhik,nlhij->nlhkj", w, k), product("nlhiv,nlhik->nlhvk", u, k)

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

        empty = jnp.zeros((1, *start.shape[1:]), start.dtype)
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
    """(I + A)^-1 of strictly lower triangular `[..., CHUNK, CHUNK]` in float32: blocks of 4, then by two halves each.

    A power series over all 64 would cancel; over 4 it has three terms. The halves' products are sums of up to 32 terms.
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
    """The blocks of this size on A's diagonal, `[..., CHUNK/size, size, size]`, or every other one of those below."""
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
    """For each x `sum_c x_ic k_jc exp(G_ic - G_jc)` for j <= i, `[..., CHUNK, CHUNK]`; above stands nothing of use."""
    lead, early = k.shape[:-2], CHUNK - BLOCK
    # Of a later block's start: what its rows have lost since, and what the tokens before had still to lose until then.
    border = tuple(y[..., BLOCK - 1 : early : BLOCK, None, :] for y in G)
    since = _exp(_minus(tuple(y[..., 1:, :, :] for y in map(_in_blocks, G)), border))
    until = sum(_minus(border, tuple(y[..., None, :early, :] for y in G)))
    until = k[..., None, :early, :] * jnp.exp(
        jnp.minimum(until, 0)
    )  # above 0 only where the result is of no use
    block = jnp.arange(CHUNK) // BLOCK
    same_block = (block[:, None] == block[None]).reshape((1,) * len(lead) + (CHUNK, CHUNK))
    pairs = []
    for x in xs:
        # Behind a barrier of its own: else XLA writes out what both sums read, or takes a minute over them, in Triton.
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
    """The running sums of the log decays, as (whole part, rest): differences of large sums keep their last digits."""
    log_decay = jnp.maximum(log_decay, MOST_DECAY)
    whole = jax.lax.stop_gradient(jnp.round(log_decay))
    return jnp.cumsum(whole, axis=-2), jnp.cumsum(log_decay - whole, axis=-2)


def _minus(x, y):
    return x[0] - y[0], x[1] - y[1]


def _exp(sums):
    return jnp.exp(sums[0] + sums[1])
