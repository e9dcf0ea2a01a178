"""A decode step between its projections as one Pallas Mosaic GPU kernel: convolution, gates,
recurrence and gated norm, both pools in place.

A cluster of `parts` blocks owns one row and one head of q and k, with the value heads that share
it; each block takes V / parts rows of their states, as the kernel of decode_mosaic_gpu.py does. The
norm needs all of them: blocks read each other's rows from shared memory.

All blocks read the window of q and k; one moves it on, behind a barrier of the cluster. A window of
v has one reader, which moves it on itself.

So far it has run in Pallas's interpreter alone: `kda_decode` does not take it yet.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_jax import decode_mosaic_gpu, gates
from kda_jax.decode_mosaic_gpu_kernel import (
    CHUNKS,
    F32,
    Block,
    advance,
    load_state,
    store_state,
    vectors,
)
from kda_jax.mosaic import WARP_LANES, WARPS, a_token_in_each_warp, divide, to_memory
from kda_jax.transforms import unfused

THREADS = WARPS * WARP_LANES
MOST_PARTS = 8  # blocks of a cluster that every card takes


def unsupported(sizes, taps) -> str | None:
    """Why this kernel cannot run these sizes, or None."""
    if sizes.K % THREADS:
        return f"K={sizes.K} is not a multiple of {THREADS}"
    if taps < 2:
        return f"W={taps} is not 2 or more"
    return decode_mosaic_gpu.unsupported(sizes)


def choose_parts(sizes, config) -> int:
    """How many blocks share a head: more where the heads of all rows do not fill the GPU."""
    parts = 1
    while (
        parts < MOST_PARTS
        and sizes.B * sizes.H * parts < 128
        and sizes.V % (2 * parts * config.step_rows) == 0
    ):
        parts *= 2
    return parts


def run(x, *, static, eps, parts=None, peers=True):
    """`(out [B, HV, V], conv, state)` of operands by name, the pools arrays.

    Args:
      x: a dict of `x` `[B, 2*H*K+HV*V]`, `weight` `[2*H*K+HV*V, W]`, `bias` or None, `conv`, `a`,
        `b`, `A_log`, `dt_bias`, `state`, `gate` `[B, HV*V]`, `norm` `[V]`, `slots` and `sources` or
        None, `[B]` int32.
      parts: how many blocks share a head. peers: whether they read each other's shared memory;
        else sums go through global memory, which Pallas's interpreter can do.
    """
    sizes = static.sizes
    HV, K, V = sizes.HV, sizes.K, sizes.V
    config = decode_mosaic_gpu.choose_config(sizes, x["state"].dtype)
    parts = parts or choose_parts(sizes, config)
    rows = V // parts
    config = dataclasses.replace(config, tile_rows=rows)
    arrays = {name: y for name, y in x.items() if y is not None and name not in ("conv", "state")}
    chunk = K // _chunks(K, config)
    for name in ("a", "dt_bias"):
        y = arrays[name]
        arrays[name] = y.reshape(*y.shape[:-1], y.shape[-1] // chunk, *config.chunk_shape)
    in_chunks = (K // chunk, *config.chunk_shape)
    state = x["state"].reshape(*x["state"].shape[:-1], *in_chunks)
    pools = {name: jax.new_ref(unfused(y)) for name, y in dict(conv=x["conv"], pool=state).items()}
    results = dict(out=jax.ShapeDtypeStruct((sizes.B, HV, V), static.out_dtype))
    scratch: dict[str, Any] = dict(
        q_s=plgpu.SMEM(in_chunks, F32),
        k_s=plgpu.SMEM(in_chunks, F32),
        values_s=plgpu.SMEM((rows,), F32),
        out_s=plgpu.SMEM((rows,), F32),
    )
    if parts > 1:
        scratch["met"] = plgpu.ClusterBarrier(collective_axes=("part",))
        if not peers:
            results["sums"] = jax.ShapeDtypeStruct((sizes.B, HV, parts), F32)
    names = (*arrays, *pools, *results, *scratch)

    def block(*refs):
        _body(
            dict(zip(names, refs, strict=True)), static=static, config=config, parts=parts, eps=eps
        )

    out, *_ = plgpu.kernel(
        block,
        out_type=list(results.values()),
        grid=(sizes.B * sizes.H,),
        grid_names=("block",),
        cluster=(parts,) if parts > 1 else (),
        cluster_names=("part",) if parts > 1 else (),
        scratch_types=list(scratch.values()),
        kernel_name=static.op,
        # No automatic barriers, as in decode_mosaic_gpu.py; shared memory has its own below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*unfused(tuple(arrays.values())), *pools.values())
    conv, state, out = unfused((*map(jax.freeze, pools.values()), out))
    return out, conv, state.reshape(x["state"].shape)


def _chunks(K, config):
    size = 1
    for length in config.chunk_shape:
        size *= length
    return K // size


def _spread(count):
    """The layout of `[count]`, an element a thread, or in each warp a copy of all."""
    if count % THREADS == 0:
        return plgpu.Layout.WG_STRIDED((count,), vec_size=1)
    return a_token_in_each_warp(count).reduce(0)


def _load(ref, count):
    return plgpu.load(ref, layout=_spread(count), optimized=False)


def _body(refs, *, static, config, parts, eps):
    sizes = static.sizes
    row, group = divide(lax.axis_index("block"), sizes.H)
    part = lax.axis_index("part") if parts > 1 else jnp.int32(0)
    slot = refs["slots"][row]
    live = (slot >= 0) & (slot < sizes.S)
    heads = sizes.HV // sizes.H  # of v, that share those of q and k
    rows = pl.ds(part * config.tile_rows, config.tile_rows)

    def clear():
        for head in range(heads):
            zeros = plgpu.layout_cast(
                jnp.zeros(config.tile_rows, static.out_dtype), _spread(config.tile_rows)
            )
            to_memory(refs["out"].at[row, group * heads + head, rows], zeros)

    def step():
        def block_of(head):
            return Block(refs, static, config, row, group * heads + head, slot, row, row + 1, part)

        source = refs["sources"][row] if "sources" in refs else slot
        window = functools.partial(_convolved, refs, row, slot, source, sizes.S)
        if heads == 1:
            block = block_of(0)
            held = _first_steps(block)  # under way while the window is convolved
            move = _keys(refs, window, sizes, group, config)
            _head(block, held, window, move, part, parts, eps)
        else:
            move = _keys(refs, window, sizes, group, config)

            def each(number, _):
                block = block_of(number)
                first = functools.partial(pl.when(number == 0), move)
                _head(block, _first_steps(block), window, first, part, parts, eps)

            lax.fori_loop(0, heads, each, None)

    pl.when(live)(step)
    pl.when(jnp.logical_not(live))(clear)


def _first_steps(block):
    return [load_state(block, start) for start in block.steps[: block.config.ahead]]


def _convolved(refs, row, slot, source, S, begin, count):
    """`(y, move)` of so many channels: float32, after SiLU; and what moves their window on."""
    at, conv = pl.ds(begin, count), refs["conv"]
    width = conv.shape[2]

    def of_slot():
        return tuple(_load(conv.at[source, at, tap], count) for tap in range(width))

    def nothing():
        zeros = plgpu.layout_cast(jnp.zeros(count, conv.dtype), _spread(count))
        return (zeros,) * width

    past = lax.cond((source >= 0) & (source < S), of_slot, nothing)
    newest = _load(refs["x"].at[row, at], count)
    total = _load(refs["bias"].at[at], count).astype(F32) if "bias" in refs else 0.0
    for tap, value in enumerate((*past, newest)):
        total = total + value.astype(F32) * _load(refs["weight"].at[at, tap], count).astype(F32)

    def move():
        for tap, value in enumerate((*past[1:], newest)):
            to_memory(conv.at[slot, at, tap], value.astype(conv.dtype))

    return total * gates.sigmoid(total), move


def _keys(refs, window, sizes, group, config):
    """Convolves q and k into shared memory; returns what moves their windows on."""
    K, moves = sizes.K, []
    for which, name in enumerate(("q_s", "k_s")):
        y, move = window((which * sizes.H + group) * K, K)
        shape = refs[name].shape
        y = plgpu.layout_cast(y.reshape(shape), plgpu.Layout.WG_STRIDED(shape, vec_size=1))
        to_memory(refs[name], y)
        moves.append(move)

    def move_on() -> None:
        for move in moves:
            move()

    return move_on


def _head(block, held, window, move, part, parts, eps):
    """One value head: recurrence, norm and both windows."""
    refs, config, sizes = block.refs, block.config, block.static.sizes
    V, row, head = sizes.V, block.row, block.head
    rows = config.tile_rows
    column = 2 * sizes.H * sizes.K + head * V + part * rows
    v, move_v = window(column, rows)
    to_memory(refs["values_s"], v)
    plgpu.commit_smem()
    shape = (CHUNKS, *config.chunk_shape)
    keys = {name: refs[f"{name}_s"] for name in "qk"}
    layout = config.token_layout.reduce(0)
    q, k, decay, k_q, beta = vectors(block, row, layout, shape, keys=keys)
    for step, start in enumerate(block.steps):
        if step + config.ahead < len(block.steps):
            held.append(load_state(block, block.steps[step + config.ahead]))
        own = pl.ds(step * config.step_rows, config.step_rows)
        value = plgpu.load(refs["values_s"].at[own], layout=block.value_layout, optimized=False)
        put = functools.partial(to_memory, refs["out_s"].at[own])
        state = advance(block, row, start, held[step], q, k, decay, k_q, beta, value, put=put)
        store_state(block, start, state)
    move_v()
    plgpu.commit_smem()
    read = _load(refs["out_s"], rows)
    total = _sum_of_squares(refs, read, row, head, part, parts)
    pl.when(part == 0)(move)  # behind the cluster's barrier: all have read
    here = pl.ds(part * rows, rows)
    y = read * lax.rsqrt(total / V + eps) * _load(refs["norm"].at[here], rows).astype(F32)
    gate = _load(refs["gate"].at[row, pl.ds(head * V + part * rows, rows)], rows).astype(F32)
    to_memory(refs["out"].at[row, head, here], (y * gates.sigmoid(gate)).astype(refs["out"].dtype))
    if parts > 1:  # nobody leaves, or goes on to another head, while another reads its memory
        _meet(refs)


def _sum_of_squares(refs, read, row, head, part, parts):
    if parts == 1:
        return (read * read).sum()
    if "sums" in refs:
        refs["sums"][row, head, part] = (read * read).sum()
        _meet(refs)
        return sum(refs["sums"][row, head, other] for other in range(parts))
    _meet(refs)
    squares = jnp.zeros_like(read)
    for other in range(parts):
        theirs = _load(plgpu.cluster_ref(refs["out_s"], {"part": other}), read.shape[0])
        squares = squares + theirs * theirs
    return squares.sum()


def _meet(refs):
    plgpu.commit_smem()  # of a warpgroup few threads arrive at a cluster's barrier
    plgpu.barrier_arrive(refs["met"])
    plgpu.barrier_wait(refs["met"])
