"""Prefill in chunks as two Pallas Mosaic GPU kernels, for compute capability 9.0 (its wgmma).

The first takes a chunk of 64 tokens of one head for each warpgroup and makes what needs no state:
w, u, the scores, q exp(G), k exp(G_last - G) and exp(G_last) of `prefill_xla.py`. The second walks
over the chunks of a sequence (`prefill_walk.py`):

    new = u - w S^T      out = (q exp(G)) S^T + scores new      S^T <- exp(G_last) S^T + k'^T new

All products run on the tensor cores, from bfloat16 to float32. Every pair of tokens i > j of a
chunk is split by the one level `half` = 32, 16, .. 1 at which i lies in the second half of an
aligned block of 2 `half` tokens and j in the first. There exp(G_i - G_j) is the product of two
factors, one of i and one of j, and each is the exponential of a sum of log decays from the middle
of the block: a product of a matrix of zeros and ones. So no exponent is above 0, no sum is
subtracted from another, and no decay overflows. The same levels invert the triangular system, block
by block.

Barriers are written out where one warp overwrites shared memory that another reads; commit_smem is
one.

Over 350 lines, since the two kernels are one algorithm and follow one plan.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_contracts import Sizes
from kda_jax import gates, pools
from kda_jax.mosaic import divide, to_memory
from kda_jax.prefill_plan import ALIGNED, betas, in_log2, plan_chunks
from kda_jax.prefill_walk import TILE, ends_in_arrays, launch_walk
from kda_jax.sequences import places_of_kept
from kda_jax.transforms import unfused
from kda_jax.wgmma import (
    CHUNK,
    LAYOUT,
    LEVELS,
    NARROW,
    along,
    chunk_lane_and_head,
    decays_between,
    iota,
    launch,
    load,
    pairs_of_level,
    products,
    rest_of,
    shared,
    zeros,
)

ACROSS = plgpu.Layout.WGMMA_TRANSPOSED  # of a state as it is loaded: pairs lie along K
ROW_BYTES = 128  # where a copy from shared memory may begin
CAPABILITIES = (9.0, 9.0)  # wgmma is of this compute capability alone


class Kept(NamedTuple):
    """What the derivative takes of a run, by chunk: `[n, lanes, HV, ...]`, bfloat16 but for last.

    All but states and changes hang on no state, and can be made again.
    """

    w: jax.Array  # [.., CHUNK, K]
    scores: jax.Array  # [.., CHUNK, CHUNK]
    q: jax.Array  # [.., CHUNK, K], q exp(G)
    k: jax.Array  # [.., CHUNK, K], k exp(G_last - G)
    last: jax.Array  # [.., K] float32, exp(G_last)
    inverse: jax.Array  # [.., CHUNK, CHUNK], of the system before beta
    states: jax.Array  # [.., K, V], before the chunk
    changes: jax.Array  # [.., CHUNK, V], new = u - w S^T,
    changes_low: jax.Array  # and what bfloat16 leaves of it


def unsupported(sizes: Sizes, dtypes) -> str | None:
    """Why these kernels cannot run these sizes and dtypes of q, k and v, or None."""
    if any(jnp.dtype(dtype) != NARROW for dtype in dtypes):
        given = ", ".join(str(jnp.dtype(x)) for x in dtypes)
        return f"q, k and v are {given}, and its products are of bfloat16"
    if sizes.K not in (64, 128):
        return f"K={sizes.K} is not 64 or 128"
    if sizes.V % 64 or sizes.V > 256:
        return f"V={sizes.V} is not a multiple of 64 up to 256"
    return None


def over_pool(operands, out=None, *, static):
    """`(out [B, T, HV, V], pool [S, HV, V, K])`, from slots of the pool into slots of the pool.

    Args:
      operands: of `chunk_kda`; the pool an array, updated in place where it is donated. cu_seqlens:
        None, or `(begins, ends)` of two sequences or more, in order; the others' tokens may be
        anything, and are read no more than those of padded sequences.
      out: None; with `(begins, ends)` the array in which the outs of their tokens are put.
    """
    x, sizes, every = operands, static.sizes, static.every
    ranges, T = x.cu_seqlens, sizes.T
    live = pools.inside(x.slots, sizes.S)
    count = 0 if every is None else sizes.B * (T // every)  # of states on the way
    plan, kept = plan_chunks(ranges, live, sizes.B, T, every if count else None)
    tensors = (x.q, x.k, x.v, x.a, x.b)
    made = _chunks(tensors, plan, static=static, skip_empty=ranges is not None)
    sources = pools.sources_of(x.slots, x.sources, sizes.S)
    ends: dict[str, Any] = dict(
        reads=jnp.where(sources < sizes.S, sources, -1),
        writes=jnp.where(live, x.slots, -1),
    )
    if count:
        lengths = jnp.full(live.shape, T, jnp.int32) if ranges is None else ranges[1] - ranges[0]
        places = places_of_kept(x.checkpoints, live, lengths // every, count)
        places = jnp.where(pools.inside(places, sizes.S), places, -1)
        number: Any = kept
        ends["kept"] = jnp.where(number >= 0, places[jnp.maximum(number, 0)], -1)
    refs = dict(pool=jax.new_ref(unfused(x.pool)))
    if out is not None:
        refs["out"] = jax.new_ref(unfused(_in_whole_rows(out)))
    walked = _walk_chunks(
        made[:6],
        unfused(plan),
        unfused(ends) | refs,
        sequences=live.shape[0],
        static=static,
    )
    out = walked[0] if out is None else jax.freeze(refs["out"])
    out, state = unfused((out, jax.freeze(refs["pool"])))
    return out[:, :T], state


def with_residuals(q, k, v, log_decay, beta, start, live, cu_seqlens, *, static):
    """`((out [B, T, HV, V], after [N, HV, V, K]), kept)`, with a `Kept` for the derivative.

    Args:
      start: `[N, HV, V, K]` float32, the state before each sequence. live: `[N]` bool; the others'
        outs are zeros. cu_seqlens: `[N+1]`, or None for rows.
    """
    plan, _ = plan_chunks(cu_seqlens, live, static.sizes.B, static.sizes.T)
    made = _chunks((q, k, v, log_decay, beta), plan, static=static, keep=True)
    start = jnp.swapaxes(start, 2, 3)
    if not plan.dense:  # the tokens before the first sequence and behind the last are some too
        start = jnp.pad(start, [(1, 1)] + [(0, 0)] * 3)
    out, after, *walked = _walk_chunks(
        made[:6],
        unfused(plan),
        dict(start=unfused(start)),
        sequences=start.shape[0],
        static=static,
    )
    out, after = unfused((out, after))
    if not plan.dense:
        after = after[1:-1]
    w, _, *made = made
    return (out[:, : static.sizes.T], jnp.swapaxes(after, 2, 3)), Kept(w, *made, *walked)


def _in_whole_rows(x):
    """`[B, T, ..]` with so many tokens that a copy to shared memory may end where they do."""
    T = x.shape[1]
    length = -(-max(T, CHUNK) // ALIGNED) * ALIGNED
    if length == T:
        return x
    return jnp.pad(x, [(0, 0), (0, length - T), *[(0, 0)] * (x.ndim - 2)])


def _chunks(tensors, plan, *, static, keep=False, skip_empty=False):
    """What `_make_chunks` makes of q, k, v, log decay and beta as `chunk_kda` takes them."""
    q, k, v, log_decay, beta = map(_in_whole_rows, tensors)
    beta = betas(beta, plan, keep)
    return _make_chunks(
        *unfused((q, k, v, in_log2(log_decay), beta, plan.begin, plan.low, plan.shown)),
        sizes=static.sizes,
        maths=static.maths,
        keep=keep,
        skip_empty=skip_empty,
    )


def _make_chunks(q, k, v, log2_decay, beta, begin, low, shown, *, sizes, maths, keep, skip_empty):
    """`(w, u, scores, q', k', last)` of every chunk, and with `keep` the inverse.

    With `skip_empty`, of a chunk that holds no token nothing is made.

    They are `[n, lanes, HV, CHUNK, ...]`, last `[n, lanes, HV, K]`.
    """
    n, lanes = begin.shape
    HV, K, V = sizes.HV, sizes.K, sizes.V
    operands = dict(q=q, k=k, v=v, decay=log2_decay, beta=beta, begin=begin, low=low, shown=shown)
    widths = dict(w_out=K, u_out=V, scores_out=CHUNK, q_out=K, k_out=K)
    results = {
        name: jax.ShapeDtypeStruct((n, lanes, HV, CHUNK, width), NARROW)
        for name, width in widths.items()
    }
    results["last_out"] = jax.ShapeDtypeStruct((n, lanes, HV, K), jnp.float32)
    if keep:
        # Not rounded, for beta's derivative: it divides the changes, which are made of u, by beta.
        results["u_out"] = jax.ShapeDtypeStruct((n, lanes, HV, CHUNK, V), jnp.float32)
        results["inverse_out"] = jax.ShapeDtypeStruct((n, lanes, HV, CHUNK, CHUNK), NARROW)
    scratch = dict(
        q_s=shared(CHUNK, K),
        k_s=shared(CHUNK, K),
        v_s=shared(CHUNK, V),
        decay_s=shared(CHUNK, K, dtype=jnp.float16),
        keys_s=shared(CHUNK, K),
        queries_s=shared(CHUNK, K),
        ones_s=shared(CHUNK, CHUNK, dtype=jnp.float16),
        square_s=shared(CHUNK, CHUNK),
        loaded=plgpu.Barrier(num_arrivals=4),
    )

    def body(**refs):
        block = lax.axis_index("block")
        place = chunk_lane_and_head(block, lanes, HV)
        chunk, lane, _ = place

        def make():
            _make_body(refs, *place, sizes=sizes, maths=maths)

        if skip_empty:
            pl.when(refs["shown"][chunk, lane] > refs["low"][chunk, lane])(make)
        else:
            make()

    return launch(
        body, operands, results, scratch, blocks=n * lanes * HV, name="kda_prefill_chunks"
    )


def _make_body(refs, chunk, lane, head, *, sizes, maths):
    """One block of the first kernel: one chunk of one head.

    Over 60 lines, since its parts share the chunk's shared memory and masks.
    """
    K, V, HV = sizes.K, sizes.V, sizes.HV
    f32 = jnp.float32
    q_s, k_s, v_s, decay_s, keys_s, queries_s, square_s, ones_s = (
        refs[name + "_s"] for name in ("q", "k", "v", "decay", "keys", "queries", "square", "ones")
    )
    group, _ = divide(head, HV // sizes.H)
    begin = pl.multiple_of(refs["begin"][chunk, lane], ALIGNED)
    low, shown = refs["low"][chunk, lane], refs["shown"][chunk, lane]
    for name, at in (("q", group), ("k", group), ("v", head), ("decay", head)):
        plgpu.copy_gmem_to_smem(
            refs[name].at[lane, pl.ds(begin, CHUNK), at], refs[name + "_s"], refs["loaded"]
        )
    plgpu.barrier_wait(refs["loaded"])

    @pl.when((low > 0) | (shown < CHUNK))
    def _():  # the rows of no token hold what the memory held
        for ref in (q_s, k_s, v_s, decay_s):
            at = iota(0, ref.shape[1])
            ref[...] = jnp.where((at >= low) & (at < shown), load(ref), jnp.zeros((), ref.dtype))
        plgpu.commit_smem()

    def scaled(ref, factor):
        x = load(ref).astype(f32)
        if maths.use_qk_l2norm:
            x = x * along(gates.inverse_norm((x * x).sum(1)), K, 0)
        x = x * factor
        ref[...] = x.astype(NARROW)
        return x

    rows = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=LAYOUT.reduce(1))
    row, col = iota(0, CHUNK), iota(1, CHUNK)
    ones_s[...] = plgpu.layout_cast(jnp.ones((CHUNK, CHUNK), jnp.float16), LAYOUT)

    def sums(first, last):
        """The product that gives the log decays of tokens first to last, summed: `[CHUNK, K]`."""
        which = (col >= along(first, CHUNK, 0)) & (col <= along(last, CHUNK, 0))
        return jnp.where(which, jnp.float16(1), jnp.float16(0)), decay_s, zeros(K)

    same = (scaled(q_s, maths.scale) * scaled(k_s, 1.0)).sum(1)
    scores = jnp.where(row == col, along(same, CHUNK, 0), 0.0)
    inverse = jnp.where(row == col, 1.0, zeros(CHUNK))
    beta = refs["beta"].at[chunk, lane, head]
    beta_of_rows = -load(beta, LAYOUT.reduce(1))
    corner_s = queries_s.at[:, pl.ds(0, CHUNK)]  # free once its product is done

    # A loop: unrolled, half of the time (1.1 ms of 8192 tokens on an H200) went into fetching code.
    def level(number, carry):
        scores, inverse = carry
        half = lax.shift_left(jnp.int32(1), number.astype(jnp.int32))
        (apart,) = products(sums(*decays_between(rows, half)))
        apart = jnp.exp2(apart)
        plgpu.commit_smem()  # all warps have read corner_s of the level before
        queries_s[...] = (load(q_s).astype(f32) * apart).astype(NARROW)
        keys_s[...] = (load(k_s).astype(f32) * apart).astype(NARROW)
        square_s[...] = inverse.astype(NARROW)
        plgpu.commit_smem()
        transposed = keys_s.transpose((1, 0))
        k_k, q_k = products(
            (keys_s, transposed, zeros(CHUNK)), (queries_s, transposed, zeros(CHUNK))
        )
        pairs = pairs_of_level(row, col, half) & (row > col)
        scores = jnp.where(pairs, q_k, scores)
        below = jnp.where(pairs, k_k * along(beta_of_rows, CHUNK, 0), 0.0)
        (corner,) = products((below.astype(NARROW), square_s, zeros(CHUNK)))
        plgpu.commit_smem()  # all warps have read what the next lines overwrite
        corner_s[...] = corner.astype(NARROW)
        plgpu.commit_smem()
        (inverse,) = products((inverse.astype(NARROW), corner_s, inverse))
        return scores, inverse

    plgpu.commit_smem()
    scores, inverse = lax.fori_loop(0, LEVELS, level, (scores, inverse))
    if "inverse_out" in refs:
        square_s[...] = inverse.astype(NARROW)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(square_s, refs["inverse_out"].at[chunk, lane, head])
    inverse = inverse * along(load(beta, LAYOUT.reduce(0)), CHUNK, 1)
    if "inverse_out" in refs:
        # What bfloat16 leaves of it, so that w and u are made of 16 bits: of 8, beta's derivative
        # (random keys, six seeds) erred by up to 3.4e-3, now by up to 2.6e-3. In shared memory,
        # since the products below fill the registers; the commit_smem above frees corner_s.
        corner_s[...] = rest_of(inverse)
    inverse = inverse.astype(NARROW)

    (since,) = products(sums(jnp.zeros_like(rows), rows))
    since = jnp.exp2(since)
    keys_s[...] = (load(k_s).astype(f32) * since).astype(NARROW)
    q_s[...] = (load(q_s).astype(f32) * since).astype(NARROW)
    until, totals = products(
        sums(rows + 1, jnp.full_like(rows, CHUNK - 1)),
        (decay_s.transpose((1, 0)), ones_s, zeros(CHUNK, rows=K)),
    )
    to_memory(
        refs["last_out"].at[chunk, lane, head], jnp.exp2(totals.max(1))
    )  # its columns are all the same
    k_s[...] = (load(k_s).astype(f32) * jnp.exp2(until)).astype(NARROW)
    plgpu.commit_smem()
    w, u = products((inverse, keys_s, zeros(K)), (inverse, v_s, zeros(V)))
    if "inverse_out" in refs:
        w, u = products((corner_s, keys_s, w), (corner_s, v_s, u))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()
    keys_s[...], v_s[...], square_s[...] = (x.astype(NARROW) for x in (w, u, scores))
    plgpu.commit_smem()
    for name, ref in dict(w=keys_s, u=v_s, scores=square_s, q=q_s, k=k_s).items():
        if refs[name + "_out"].dtype == NARROW:
            plgpu.copy_smem_to_gmem(ref, refs[name + "_out"].at[chunk, lane, head])
    if "inverse_out" in refs:
        to_memory(refs["u_out"].at[chunk, lane, head], u)
    plgpu.wait_smem_to_gmem(0)


def _walk_chunks(made, plan, ends, *, sequences, static):
    """`(out [B, length, HV, V], after [sequences, HV, K, V], ..)`, what is there of these.

    made: the first six results of `_make_chunks`.
    ends: with `start`, `[sequences, HV, K, V]` float32, the states before each chunk,
    `[n, lanes, HV, K, V]`, the changes `new`, `[n, lanes, HV, CHUNK, V]`, and what bfloat16 leaves
    of them come too. Or with the Ref `pool` and the slots `reads` and `writes` `[sequences]`, -1
    for none, and in it `kept` `[n, lanes]`, the slots of the states behind chunks; then no `after`.
    And with the Ref `out`, which takes what is no result then.
    """
    sizes, out_dtype, keep = static.sizes, static.out_dtype, "start" in ends
    HV, K, V = sizes.HV, sizes.K, sizes.V
    each = *plan.begin.shape, HV
    operands = dict(zip(("w", "u", "scores", "q", "k", "last"), made, strict=True))
    operands |= dict(chunks=plan.chunks, begin=plan.begin, low=plan.low, high=plan.high) | ends
    results = {}
    if "out" not in ends:
        length = -(-max(sizes.T, CHUNK) // ALIGNED) * ALIGNED
        results["out"] = jax.ShapeDtypeStruct((sizes.B, length, HV, V), out_dtype)
    if keep:
        results["after"] = jax.ShapeDtypeStruct(ends["start"].shape, jnp.float32)
        results["states"] = jax.ShapeDtypeStruct((*each, K, V), NARROW)
        for name in ("changes", "changes_low"):
            results[name] = jax.ShapeDtypeStruct((*each, CHUNK, V), NARROW)
    scratch = dict(
        state_s=plgpu.SMEM((K, TILE), NARROW),
        new_s=plgpu.SMEM((CHUNK, TILE), NARROW),
        **(dict(low_s=plgpu.SMEM((CHUNK, TILE), NARROW)) if keep else {}),
        out_s=plgpu.SMEM((CHUNK, TILE), out_dtype, transforms=()),
        rows_s=plgpu.SMEM(
            (CHUNK, ROW_BYTES // jnp.dtype(out_dtype).itemsize), out_dtype, transforms=()
        ),
    )
    fetched = dict.fromkeys(("w", "q", "k"), (CHUNK, K))
    fetched |= dict(u=(CHUNK, TILE), scores=(CHUNK, CHUNK), last=(K,))
    return launch_walk(
        _advance,
        _sources,
        ends_in_arrays("start", "after") if keep else (_from_slot, _to_slot),
        operands,
        results,
        fetched,
        scratch,
        sequences=sequences,
        sizes=sizes,
        name="kda_prefill_states",
        skip_empty=not keep,
    )


def _of_slot(refs, place, slot):
    """A tile of a state in the pool, transposed as the walk holds it."""
    return refs["pool"].at[slot, place.head, place.columns].transpose((1, 0))


def _from_slot(refs, place):
    slot = refs["reads"][place.sequence]
    shape = (refs["pool"].shape[3], TILE)

    def load_slot():
        state = load(_of_slot(refs, place, slot), ACROSS)
        return plgpu.layout_cast(state, LAYOUT).astype(jnp.float32)

    # None: a zero state, and nothing is read.
    return lax.cond(slot >= 0, load_slot, lambda: zeros(shape[1], rows=shape[0]))


def _to_slot(refs, place, state, slot=None):
    slot = refs["writes"][place.sequence] if slot is None else slot

    @pl.when(slot >= 0)
    def _():
        values = plgpu.layout_cast(state.astype(refs["pool"].dtype), ACROSS)
        to_memory(_of_slot(refs, place, slot), values)


def _sources(refs, place, chunk):
    names = ("w", "q", "k", "u", "scores", "last")
    sources = {name: refs[name].at[chunk, place.lane, place.head] for name in names}
    return sources | dict(u=sources["u"].at[:, place.columns])


def _advance(refs, place, chunk, stage, state):
    out, state_s, new_s, out_s, rows_s = (
        refs[name] for name in ("out", "state_s", "new_s", "out_s", "rows_s")
    )
    begin, low, high = (refs[name][chunk, place.lane] for name in ("begin", "low", "high"))
    w_s, u_s, scores_s, q_s, k_s, last_s = (
        refs[name + "_s"].at[stage] for name in ("w", "u", "scores", "q", "k", "last")
    )
    keep = "states" in refs
    tile = (chunk, place.lane, place.head, slice(None), place.columns)
    if keep:  # what the step before stores of these
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
    state_s[...] = state.astype(NARROW)
    plgpu.barrier_wait(refs["loaded"].at[stage])
    plgpu.commit_smem()
    if keep:
        plgpu.copy_smem_to_gmem(state_s, refs["states"].at[tile])
    erased, shown = products((w_s, state_s, zeros(TILE)), (q_s, state_s, zeros(TILE)))
    new = load(u_s).astype(jnp.float32) - erased
    new_s[...] = new.astype(NARROW)
    if keep:
        refs["low_s"][...] = rest_of(new)
    plgpu.commit_smem()
    if keep:
        for name, ref in dict(changes=new_s, changes_low=refs["low_s"]).items():
            plgpu.copy_smem_to_gmem(ref, refs[name].at[tile])
    kept = state * lax.broadcast_in_dim(load(last_s, LAYOUT.reduce(1)), state.shape, (0,))
    state, shown = products((k_s.transpose((1, 0)), new_s, kept), (scores_s, new_s, shown))
    plgpu.barrier_arrive(refs["used"].at[stage])
    if "kept" in refs:
        _to_slot(refs, place, state, refs["kept"][chunk, place.lane])
    shown = shown.astype(out.dtype)
    whole = (low == 0) & (high == CHUNK)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def to_tokens(source, first, count):
        rows = pl.ds(first, count)
        plgpu.copy_smem_to_gmem(source, out.at[place.lane, rows, place.head, place.columns])

    @pl.when(whole)
    def _():
        to_memory(out_s, shown)
        plgpu.commit_smem()
        to_tokens(out_s, begin, CHUNK)

    @pl.when(jnp.logical_not(whole))
    def _():  # row by row: the others are tokens of other sequences
        to_memory(rows_s.at[:, pl.ds(0, TILE)], shown)
        plgpu.commit_smem()

        def one(row, _):
            to_tokens(rows_s.at[pl.ds(row, 1), pl.ds(0, TILE)], begin + row, 1)

        lax.fori_loop(low, high, one, None)

    return state
