"""The derivative of chunked prefill as three Pallas Mosaic GPU kernels, for capability 9.0.

With the names of `prefill_xla.py`, T = I + A the system of a chunk, r = v - k exp(G) S^T what the
state lacks, e = T^-T dnew:

    dnew = scores^T dout + k' dS1^T               dS0 = exp(G_last) dS1 + dout^T q' - dnew^T w
    dv = beta e      dbeta = e . new / beta       dA = -e new^T      dscores = dout new^T
    dq' = dout S0    d(k exp(G)) = -dv S0         dk' = new dS1

The first kernel walks back over the chunks of a sequence (`prefill_walk.py`). The second makes what
all key channels of a chunk share: dv, dbeta, and the derivatives of both kinds of scores. The third
takes CHANNELS key channels of a chunk: dq, dk and those of the log decays.

The pairs of a level (`prefill_mosaic_gpu.py`) hang on a log decay only through sums between a token
and its block's middle, so their part of its derivative is a product of the same matrix of zeros and
ones, transposed: nothing is subtracted, where a running sum of q dq - k dk would cancel.

What masks rows and what lies in chunks is done in XLA, before and behind (`prefill_plan.py`).

Over 350 lines, since the three kernels are one algorithm.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_jax import gates
from kda_jax.mosaic import divide, to_memory
from kda_jax.prefill_plan import betas, in_chunks, in_log2, out_of_chunks, plan_chunks
from kda_jax.prefill_walk import TILE, ends_in_arrays, launch_walk
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
    products,
    rest_of,
    shared,
    zeros,
)

CHANNELS = 64


def gradients(tensors, live, cu_seqlens, kept, d_out, d_after, *, static):
    """Those of q, k, v, log_decay, beta (`tensors`, as `chunk_kda` takes them) and start.

    kept: of `prefill_mosaic_gpu.with_residuals`. d_out: `[B, T, HV, V]`. d_after: `[N, HV, V, K]`
    float32.
    """
    q, k, v, log_decay, beta = tensors
    sizes, f32 = static.sizes, jnp.float32
    plan, _ = plan_chunks(cu_seqlens, live, sizes.B, sizes.T)

    def scaled(q, k):
        q, k = q.astype(f32), k.astype(f32)
        if static.maths.use_qk_l2norm:
            q, k = (x * gates.inverse_norm((x * x).sum(-1, keepdims=True)) for x in (q, k))
        return q * jnp.float32(static.maths.scale), k

    scaled_q_and_k, back_to_q_and_k = jax.vjp(scaled, *(in_chunks(x, plan) for x in (q, k)))
    queries, keys = (x.astype(NARROW) for x in scaled_q_and_k)
    d_out = in_chunks(d_out.astype(NARROW), plan)
    d_after = jnp.swapaxes(d_after, 2, 3)
    if not plan.dense:
        d_after = jnp.pad(d_after, [(1, 1)] + [(0, 0)] * 3)
    d_out, d_after, chunks = unfused((d_out, d_after, plan.chunks))
    falls, falls_low, d_states, d_start = _walk_back(
        kept.w, kept.scores, kept.q, kept.k, kept.last, d_out, d_after, chunks, sizes=sizes
    )
    factors, queries, keys, decay = unfused(
        (betas(beta, plan, True), queries, keys, in_chunks(in_log2(log_decay), plan))
    )
    changes = kept.changes, kept.changes_low
    d_scores, d_keys, d_v, d_beta = _share(
        d_out, *changes, falls, falls_low, kept.inverse, factors, sizes=sizes
    )
    of_pairs, of_states = (d_scores, d_keys), (kept.states, d_states, kept.last)
    d_q, d_k, d_decay = _spread(
        queries, keys, decay, *of_pairs, d_out, kept.changes, d_v, *of_states, sizes=sizes
    )
    d_q, d_k, d_v, d_decay, d_beta, d_start = unfused((d_q, d_k, d_v, d_decay, d_beta, d_start))

    def of_heads(x):  # a key head serves HV / H value heads
        return x.reshape(*x.shape[:3], sizes.H, sizes.HV // sizes.H, sizes.K).sum(4)

    d_q, d_k = (
        out_of_chunks(x, plan, sizes.T) for x in back_to_q_and_k((of_heads(d_q), of_heads(d_k)))
    )
    d_start = jnp.swapaxes(d_start if plan.dense else d_start[1:-1], 2, 3)
    others = (d_v, d_decay, d_beta.transpose(1, 0, 3, 2))
    d_v, d_decay, d_beta = (out_of_chunks(x, plan, sizes.T) for x in others)
    return (
        d_q,
        d_k,
        d_v.astype(v.dtype),
        d_decay.astype(log_decay.dtype),
        d_beta.astype(beta.dtype),
        d_start,
    )


def _walk_back(w, scores, q, k, last, d_out, d_after, chunks, *, sizes):
    """`(falls, falls_low, d_states, d_start)`.

    Returns:
      falls: `[n, lanes, HV, CHUNK, V]`, -dnew; falls_low: what bfloat16 leaves of it.
      d_states: `[n, lanes, HV, K, V]`, of the state behind a chunk.
      d_start: `[sequences, HV, K, V]` float32.
    """
    K, V = sizes.K, sizes.V
    each = w.shape[:3]
    operands = dict(w=w, q=q, k=k, scores=scores, d_out=d_out, last=last)
    operands |= dict(d_after=d_after, chunks=chunks)
    results = dict(
        falls=jax.ShapeDtypeStruct((*each, CHUNK, V), NARROW),
        falls_low=jax.ShapeDtypeStruct((*each, CHUNK, V), NARROW),
        d_states=jax.ShapeDtypeStruct((*each, K, V), NARROW),
        d_start=jax.ShapeDtypeStruct(d_after.shape, jnp.float32),
    )
    scratch = dict(
        state_s=plgpu.SMEM((K, TILE), NARROW),
        fall_s=plgpu.SMEM((CHUNK, TILE), NARROW),
        low_s=plgpu.SMEM((CHUNK, TILE), NARROW),
    )
    fetched = dict.fromkeys(("w", "q", "k"), (CHUNK, K))
    fetched |= dict(d_out=(CHUNK, TILE), scores=(CHUNK, CHUNK), last=(K,))
    return launch_walk(
        _retreat,
        _sources,
        ends_in_arrays("d_after", "d_start"),
        operands,
        results,
        fetched,
        scratch,
        sequences=d_after.shape[0],
        sizes=sizes,
        name="kda_prefill_grad_states",
        back=True,
    )


def _sources(refs, place, chunk):
    names = ("w", "q", "k", "scores", "last")
    sources = {name: refs[name].at[chunk, place.lane, place.head] for name in names}
    d_out = refs["d_out"].at[place.lane, chunk, :, place.head, place.columns]
    return sources | dict(d_out=d_out)


def _retreat(refs, place, chunk, stage, state):
    state_s, fall_s, low_s = (refs[name] for name in ("state_s", "fall_s", "low_s"))
    w_s, q_s, k_s, d_out_s, scores_s, last_s = (
        refs[name + "_s"].at[stage] for name in ("w", "q", "k", "d_out", "scores", "last")
    )
    tile = (chunk, place.lane, place.head, slice(None), place.columns)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what the step before stores of these
    plgpu.commit_smem()
    state_s[...] = state.astype(NARROW)
    plgpu.barrier_wait(refs["loaded"].at[stage])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(state_s, refs["d_states"].at[tile])
    (rise,) = products((scores_s.transpose((1, 0)), d_out_s, zeros(TILE)))
    (rise,) = products((k_s, state_s, rise))
    fall_s[...], low_s[...] = (-rise).astype(NARROW), rest_of(-rise)
    plgpu.commit_smem()
    for name, ref in dict(falls=fall_s, falls_low=low_s).items():
        plgpu.copy_smem_to_gmem(ref, refs[name].at[tile])
    state = state * lax.broadcast_in_dim(load(last_s, LAYOUT.reduce(1)), state.shape, (0,))
    (state,) = products((q_s.transpose((1, 0)), d_out_s, state))
    (state,) = products((w_s.transpose((1, 0)), fall_s, state))
    plgpu.barrier_arrive(refs["used"].at[stage])
    return state


def _share(d_out, changes, changes_low, falls, falls_low, inverse, beta, *, sizes):
    """`(d_scores, d_keys, d_v, d_beta)` of every chunk.

    Returns:
      d_scores: `[n, lanes, HV, CHUNK, CHUNK]`, those of q k^T, of tokens i >= j at [i, j], and
        mirrored above the diagonal. d_keys: alike of k k^T; the diagonal is not read.
      d_v: `[lanes, n, CHUNK, HV, V]`. d_beta: `[n, lanes, HV, CHUNK]` float32.
    """
    V, each = sizes.V, inverse.shape[:3]
    operands = dict(d_out=d_out, changes=changes, changes_low=changes_low, falls=falls)
    operands |= dict(falls_low=falls_low, inverse=inverse, beta=beta)
    results = dict(
        d_scores=jax.ShapeDtypeStruct((*each, CHUNK, CHUNK), NARROW),
        d_keys=jax.ShapeDtypeStruct((*each, CHUNK, CHUNK), NARROW),
        d_v=jax.ShapeDtypeStruct(d_out.shape, NARROW),
        d_beta=jax.ShapeDtypeStruct((*each, CHUNK), jnp.float32),
    )
    scratch = dict(
        d_out_s=shared(CHUNK, V),
        changes_s=shared(CHUNK, V),
        changes_low_s=shared(CHUNK, V),
        falls_s=shared(CHUNK, V),
        falls_low_s=shared(CHUNK, V),
        inverse_s=shared(CHUNK, CHUNK),
        square_s=shared(CHUNK, CHUNK),
        loaded=plgpu.Barrier(num_arrivals=6),
    )
    lanes, HV = each[1:]

    def body(**refs):
        _share_body(refs, lanes=lanes, HV=HV, V=V)

    blocks = each[0] * lanes * HV
    return launch(body, operands, results, scratch, blocks=blocks, name="kda_prefill_grad_pairs")


def _share_body(refs, *, lanes, HV, V):
    chunk, lane, head = chunk_lane_and_head(lax.axis_index("block"), lanes, HV)
    d_out_s, changes_s, falls_s, inverse_s, square_s = (
        refs[name + "_s"] for name in ("d_out", "changes", "falls", "inverse", "square")
    )
    plgpu.copy_gmem_to_smem(refs["d_out"].at[lane, chunk, :, head], d_out_s, refs["loaded"])
    for name in ("changes", "changes_low", "falls", "falls_low", "inverse"):
        source = refs[name].at[chunk, lane, head]
        plgpu.copy_gmem_to_smem(source, refs[name + "_s"], refs["loaded"])
    beta = load(refs["beta"].at[chunk, lane, head], LAYOUT.reduce(1))
    row, col = iota(0, CHUNK), iota(1, CHUNK)
    plgpu.barrier_wait(refs["loaded"])
    # Its negative. Here the changes and their derivatives have 16 bits: with the 8 of bfloat16
    # beta's derivative, a quotient of theirs, errs most of all.
    backwards = inverse_s.transpose((1, 0))
    (e,) = products((backwards, falls_s, zeros(V)))
    (e,) = products((backwards, refs["falls_low_s"], e))
    d_beta = (e * load(changes_s).astype(jnp.float32)).sum(1)
    d_beta = d_beta + (e * load(refs["changes_low_s"]).astype(jnp.float32)).sum(1)
    d_beta = -d_beta / beta
    to_memory(refs["d_beta"].at[chunk, lane, head], d_beta)
    plgpu.commit_smem()  # all warps have read falls_s and inverse_s
    d_v_s = falls_s
    d_v_s[...] = (e * along(-beta, V, 0)).astype(NARROW)
    plgpu.commit_smem()
    changed = changes_s.transpose((1, 0))
    below, above = products(
        (d_out_s, changed, zeros(CHUNK)), (changes_s, d_out_s.transpose((1, 0)), zeros(CHUNK))
    )
    square_s[...] = jnp.where(row >= col, below, above).astype(NARROW)
    below, above = products(
        (d_v_s, changed, zeros(CHUNK)), (changes_s, d_v_s.transpose((1, 0)), zeros(CHUNK))
    )
    inverse_s[...] = (-jnp.where(row > col, below, above)).astype(NARROW)
    plgpu.commit_smem()
    for name, ref in dict(d_scores=square_s, d_keys=inverse_s).items():
        plgpu.copy_smem_to_gmem(ref, refs[name].at[chunk, lane, head])
    plgpu.copy_smem_to_gmem(d_v_s, refs["d_v"].at[lane, chunk, :, head])
    plgpu.wait_smem_to_gmem(0)


def _spread(q, k, decay, d_scores, d_keys, d_out, changes, d_v, states, d_states, last, *, sizes):
    """`(d_q, d_k, d_log_decay)` of every value head, `[lanes, n, CHUNK, HV, K]` float32."""
    K, each = sizes.K, d_scores.shape[:3]
    operands = dict(q=q, k=k, decay=decay, d_scores=d_scores, d_keys=d_keys, d_out=d_out)
    operands |= dict(changes=changes, d_v=d_v, states=states, d_states=d_states, last=last)
    results = {
        name: jax.ShapeDtypeStruct(decay.shape, jnp.float32) for name in ("d_q", "d_k", "d_decay")
    }
    scratch = dict(
        q_s=shared(CHUNK, CHANNELS),
        k_s=shared(CHUNK, CHANNELS),
        decay_s=shared(CHUNK, CHANNELS, dtype=jnp.float16),
        d_scores_s=shared(CHUNK, CHUNK),
        d_keys_s=shared(CHUNK, CHUNK),
        one_s=shared(CHUNK, CHANNELS),
        two_s=shared(CHUNK, CHANNELS),
        sums_s=shared(CHUNK, CHANNELS),
        last_s=plgpu.SMEM((CHANNELS,), jnp.float32, transforms=()),
        d_out_s=shared(CHUNK, CHUNK),
        changes_s=shared(CHUNK, CHUNK),
        d_v_s=shared(CHUNK, CHUNK),
        states_s=shared(CHANNELS, CHUNK),
        d_states_s=shared(CHANNELS, CHUNK),
        loaded=plgpu.Barrier(num_arrivals=5),
        tiled=plgpu.Barrier(num_arrivals=5),
    )
    lanes, HV = each[1:]

    def body(**refs):
        _spread_body(refs, lanes=lanes, sizes=sizes)

    blocks = each[0] * lanes * HV * (K // CHANNELS)
    return launch(body, operands, results, scratch, blocks=blocks, name="kda_prefill_grad_keys")


def _spread_body(refs, *, lanes, sizes):
    """One block of the third kernel: CHANNELS key channels of one chunk of one head.

    Over 60 lines, since its parts share the chunk's shared memory and masks.
    """
    HV, K, V, f32 = sizes.HV, sizes.K, sizes.V, jnp.float32
    of_head, part = divide(lax.axis_index("block"), K // CHANNELS)
    chunk, lane, head = chunk_lane_and_head(of_head, lanes, HV)
    group, _ = divide(head, HV // sizes.H)
    channels = pl.ds(part * CHANNELS, CHANNELS)
    q_s, k_s, decay_s, one_s, two_s, sums_s, last_s = (
        refs[name + "_s"] for name in ("q", "k", "decay", "one", "two", "sums", "last")
    )
    for name, at in dict(q=group, k=group, decay=head).items():
        source = refs[name].at[lane, chunk, :, at, channels]
        plgpu.copy_gmem_to_smem(source, refs[name + "_s"], refs["loaded"])
    for name in ("d_scores", "d_keys"):
        source = refs[name].at[chunk, lane, head]
        plgpu.copy_gmem_to_smem(source, refs[name + "_s"], refs["loaded"])

    def columns(number, carry):
        d_queries, d_early, d_late, d_last = carry
        tile = pl.ds(number * CHUNK, CHUNK)
        for name in ("d_out", "changes", "d_v", "states", "d_states"):
            if name in ("d_out", "d_v"):
                source = refs[name].at[lane, chunk, :, head, tile]
            else:
                source = refs[name].at[chunk, lane, head]
                source = source.at[channels if "states" in name else slice(None), tile]
            plgpu.copy_gmem_to_smem(source, refs[name + "_s"], refs["tiled"])
        plgpu.barrier_wait(refs["tiled"])
        states, d_states = (refs[name + "_s"] for name in ("states", "d_states"))
        d_queries, d_early, d_late = products(
            (refs["d_out_s"], states.transpose((1, 0)), d_queries),
            (refs["d_v_s"], states.transpose((1, 0)), d_early),
            (refs["changes_s"], d_states.transpose((1, 0)), d_late),
        )
        d_last = d_last + (load(states).astype(f32) * load(d_states).astype(f32)).sum(1)
        plgpu.commit_smem()  # all warps have read what the next tile overwrites
        return d_queries, d_early, d_late, d_last

    none = plgpu.layout_cast(jnp.zeros((CHANNELS,), f32), LAYOUT.reduce(1))
    start = (zeros(CHANNELS), zeros(CHANNELS), zeros(CHANNELS), none)
    d_queries, d_early, d_late, d_last = lax.fori_loop(0, V // CHUNK, columns, start)
    to_memory(last_s, d_last)
    rows, cols = (
        plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=LAYOUT.reduce(axis))
        for axis in (1, 0)
    )
    by_row, by_col = along(rows, CHUNK, 0), along(cols, CHUNK, 1)

    def ones(where, dtype):
        return jnp.where(where, dtype(1), dtype(0))

    plgpu.barrier_wait(refs["loaded"])
    (since,) = products((ones(by_col <= by_row, jnp.float16), decay_s, zeros(CHANNELS)))
    since = jnp.exp2(since)
    d_q, d_early = d_queries * since, d_early * since
    one_s[...] = (load(q_s).astype(f32) * d_q - load(k_s).astype(f32) * d_early).astype(NARROW)
    (until,) = products((ones(by_col > by_row, jnp.float16), decay_s, zeros(CHANNELS)))
    d_late = d_late * jnp.exp2(until)
    two_s[...] = (load(k_s).astype(f32) * d_late).astype(NARROW)
    same = jnp.where(by_row == by_col, load(refs["d_scores_s"]).astype(f32), 0.0).sum(1)
    same = along(same, CHANNELS, 0)
    d_q = d_q + same * load(k_s).astype(f32)
    d_k = d_late - d_early + same * load(q_s).astype(f32)
    plgpu.commit_smem()
    d_last = load(last_s, LAYOUT.reduce(0)) * load(
        refs["last"].at[chunk, lane, head, channels], LAYOUT.reduce(0)
    )
    d_decay = along(d_last, CHANNELS, 1)
    (d_decay,) = products((ones(by_col >= by_row, NARROW), one_s, d_decay))
    (d_decay,) = products((ones(by_col < by_row, NARROW), two_s, d_decay))

    # What registers need not hold is read again: 255 are all there are, and 96 hold the results.
    def level(number, carry):
        d_q, d_k, d_decay = carry
        half = lax.shift_left(jnp.int32(1), number.astype(jnp.int32))
        first, last = (along(x, CHUNK, 0) for x in decays_between(rows, half))
        which = ones((by_col >= first) & (by_col <= last), jnp.float16)
        (apart,) = products((which, decay_s, zeros(CHANNELS)))
        apart = jnp.exp2(apart)
        second = along(rows & half, CHANNELS, 0) != 0  # the later half's tokens: the queries
        keys = load(k_s).astype(f32) * apart
        either = jnp.where(second, load(q_s).astype(f32) * apart, keys)
        plgpu.commit_smem()  # all warps have read one_s and two_s
        one_s[...], two_s[...] = either.astype(NARROW), keys.astype(NARROW)
        plgpu.commit_smem()
        # `pairs_of_level`, in fewer registers: of numbers for rows and for columns alone.
        pairs = along((rows & -half) ^ half, CHUNK, 0) == along(cols & -half, CHUNK, 1)
        nothing = NARROW(0)
        by_scores, by_keys = products(
            (jnp.where(pairs, load(refs["d_scores_s"]), nothing), one_s, zeros(CHANNELS)),
            (jnp.where(pairs, load(refs["d_keys_s"]), nothing), two_s, zeros(CHANNELS)),
        )
        either, keys = load(one_s).astype(f32), load(two_s).astype(f32)
        sums_s[...] = (either * by_scores + keys * by_keys).astype(NARROW)
        plgpu.commit_smem()
        by_scores = by_scores * apart
        d_q = d_q + jnp.where(second, by_scores, 0.0)
        d_k = d_k + by_keys * apart + jnp.where(second, 0.0, by_scores)
        first, last = (along(x, CHUNK, 1) for x in decays_between(cols, half))
        which = ones((by_row >= first) & (by_row <= last), NARROW)
        (d_decay,) = products((which, sums_s, d_decay))
        return d_q, d_k, d_decay

    d_q, d_k, d_decay = lax.fori_loop(0, LEVELS, level, (d_q, d_k, d_decay))
    for name, value in dict(d_q=d_q, d_k=d_k, d_decay=d_decay).items():
        to_memory(refs[name].at[lane, chunk, :, head, channels], value)
