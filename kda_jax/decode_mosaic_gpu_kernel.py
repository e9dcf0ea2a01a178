"""The Mosaic kernel of decode_mosaic_gpu.py, whose docstring says how it works."""

import dataclasses
import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_jax import gates
from kda_jax.mosaic import (
    WARPS,
    a_token_in_each_warp,
    divide,
    of_rows,
    to_memory,
)

CHUNKS = 4  # of a row of K, which lanes share
F32 = jnp.float32


@dataclass(frozen=True)
class Block:
    """Where one block works, and how its tile lies in registers.

    `refs` are by name, with K as `[chunks, *chunk_shape]` in q, k, a, dt_bias, pool and
    intermediate. `first` and `last` are the row's tokens.
    """

    refs: dict
    static: Any  # call.Static
    config: Any  # decode_mosaic_gpu.Config
    row: Any
    head: Any
    slot: Any
    first: Any
    last: Any
    tile: Any

    def with_config(self, config):
        return dataclasses.replace(self, config=config)

    @property
    def steps(self):
        """The V rows at which steps begin."""
        begin, rows = self.tile * self.config.tile_rows, self.config.tile_rows
        return [begin + start for start in range(0, rows, self.config.step_rows)]

    @property
    def chunks(self):
        return self.static.sizes.K // math.prod(self.config.chunk_shape)

    @property
    def piece_shape(self):
        return (self.config.step_rows, *self.config.piece_shape)

    @property
    def value_layout(self):
        return of_rows(self.config.layout, len(self.piece_shape))

    @property
    def value_column(self):
        """Where the head's values begin in a row."""
        return self.static.columns[2] + self.head * self.static.sizes.V

    def rows(self, start):
        return pl.ds(start, self.config.step_rows)


def body(refs, *, static, config):
    """One block of the kernel."""
    sizes = static.sizes
    T, S, several_tokens = sizes.T, sizes.S, "vectors" in refs
    # Tiles fastest, then heads, then rows: consecutive blocks walk a slot in order.
    row_and_head, tile = divide(lax.axis_index("block"), sizes.V // config.tile_rows)
    row, head = divide(row_and_head, sizes.HV)
    slot = refs["slots"][row]
    live = (slot >= 0) & (slot < S)
    if "cu_seqlens" in refs:
        # Clipped, so that no cu_seqlens makes the kernel read or write outside its arrays.
        first = jnp.clip(refs["cu_seqlens"][row], 0, T)
        last = jnp.clip(refs["cu_seqlens"][row + 1], first, T)
        cleared_first = jnp.where(live, last, first)
        cleared_last = jnp.where(row == sizes.N - 1, T, last)
    else:
        first, last = row * T, row * T + T
        cleared_first, cleared_last = jnp.where(live, last, first), last
    if "lengths" in refs:
        # The tokens behind are cleared too.
        last = jnp.minimum(last, first + jnp.maximum(refs["lengths"][row], 0))
        cleared_first = jnp.where(live, last, first)
        live &= first < last
    block = Block(refs, static, config, row, head, slot, first, last, tile)
    if several_tokens and static.clears:
        lax.fori_loop(cleared_first, cleared_last, lambda token, _: _clear(block, token), None)
    elif static.clears:
        pl.when(jnp.logical_not(live))(lambda: _clear(block, row))
    if config.single is not None and {"cu_seqlens", "lengths"} & set(refs):
        # A token alone needs no way through shared memory: 64 of them 84 us, and so 69 (H200).
        alone = block.with_config(config.single)
        pl.when(live & (last - first == 1))(lambda: _one_token(alone))
        pl.when(live & (last - first > 1))(lambda: _many_tokens(block))
    else:
        run = _many_tokens if several_tokens else _one_token
        pl.when(live & (first < last))(lambda: run(block))


def _one_token(block):
    config, refs, steps, token = block.config, block.refs, block.steps, block.first
    # Loads come first: the gates hide their latency. At most `ahead` steps are under way beside
    # the present one.
    held = [load_state(block, start) for start in steps[: config.ahead]]
    shape = (CHUNKS, *config.chunk_shape)
    q, k, decay, k_q, beta = vectors(block, token, config.token_layout.reduce(0), shape)
    for step, start in enumerate(steps):
        if step + config.ahead < len(steps):
            held.append(load_state(block, steps[step + config.ahead]))
        v = _load(refs["v"].at[token, block.rows(block.value_column + start)], block.value_layout)
        v = v.astype(F32)
        updated = advance(block, token, start, held[step], q, k, decay, k_q, beta, v)
        store_state(block, start, updated)


def _many_tokens(block):
    refs, steps = block.refs, block.steps
    held = tuple(load_state(block, start) for start in steps)

    def next_group(group, states):
        begin = block.first + group * WARPS
        base = jnp.minimum(begin, refs["a"].shape[0] - WARPS)
        _prepare(block, base)
        end = jnp.minimum(begin + WARPS, block.last)
        states = lax.fori_loop(
            begin, end, lambda token, states: _next_token(block, token, base, states), states
        )
        plgpu.commit_smem()  # all have read before the next group is written
        return states

    groups, _ = divide(block.last - block.first + (WARPS - 1), WARPS)
    states = lax.fori_loop(0, groups, next_group, held)
    for start, state in zip(steps, states, strict=True):
        store_state(block, start, state)


def _prepare(block, base):
    """The vectors and values of the WARPS tokens from base, into shared memory."""
    refs, config, tokens = block.refs, block.config, pl.ds(base, WARPS)
    layout, shape = config.token_layout, (WARPS, CHUNKS, *config.chunk_shape)

    def along(x):
        return lax.broadcast_in_dim(x, shape, (0,))

    *three, k_q, beta = vectors(block, tokens, layout, shape, along)
    for which, parts in enumerate(three):
        for repeat, part in enumerate(parts or ()):
            to_memory(refs["vectors"].at[:, which, pl.ds(repeat * CHUNKS, CHUNKS)], part)
    for which, x in enumerate((k_q, beta)):
        if x is not None:
            number = plgpu.layout_cast(x, of_rows(layout, len(shape)))
            to_memory(refs["numbers"].at[which], number)
    values = refs["v"].at[tokens, pl.ds(block.value_column + block.steps[0], config.tile_rows)]
    to_memory(refs["values"], _load(values, a_token_in_each_warp(config.tile_rows)).astype(F32))
    plgpu.commit_smem()


def _next_token(block, token, base, states):
    """One token over the whole tile; its vectors and values come from shared memory."""
    refs, config, at = block.refs, block.config, token - base
    key_layout = config.layout.reduce(0)
    reads = block.static.reads
    q, k, decay = (
        [_load(x, key_layout) for x in _pieces(block, refs["vectors"], at, which)]
        if reads or which
        else None
        for which in range(3)
    )
    k_q, beta = refs["numbers"][0, at] if reads else None, refs["numbers"][1, at]
    after = []
    for step, (start, state) in enumerate(zip(block.steps, states, strict=True)):
        v = _load(refs["values"].at[at, block.rows(step * config.step_rows)], block.value_layout)
        after.append(advance(block, token, start, state, q, k, decay, k_q, beta, v))
    return tuple(after)


def advance(block, token, start, state, q, k, decay, k_q, beta, v, put=None):
    """One token over one step's state, in pieces: stores its results, returns the state.

    q is None where no result is asked for. put: takes the float32 read-out instead of `out`.
    """
    shape, head, S = block.piece_shape, block.head, block.static.sizes.S
    pool = block.refs["pool"]
    writes, intermediate = block.refs.get("writes"), block.refs.get("intermediate")

    def along_keys(vector):
        return lax.broadcast_in_dim(vector, shape, tuple(range(1, len(shape))))

    decayed = [s.astype(F32) * along_keys(d) for s, d in zip(state, decay, strict=True)]
    state_k = _total(block, [d * along_keys(x) for d, x in zip(decayed, k, strict=True)])
    state_q = None
    if q is not None:
        state_q = _total(block, [d * along_keys(x) for d, x in zip(decayed, q, strict=True)])
    u = (v - state_k) * beta
    along_values = lax.broadcast_in_dim(u, shape, (0,))
    updated = tuple(
        (d + along_values * along_keys(x)).astype(pool.dtype)
        for d, x in zip(decayed, k, strict=True)
    )
    rows = block.rows(start)
    if state_q is not None:
        read = state_q + u * k_q
        if put is None:
            out = block.refs["out"]
            to_memory(out.at[token, head, rows], read.astype(out.dtype))
        else:
            put(read)
    if intermediate is not None:
        _store(block, updated, intermediate, token, head, rows)
    if writes is not None:
        written = writes[token]
        pl.when((written >= 0) & (written < S))(
            lambda: _store(block, updated, pool, written, head, rows)
        )
    return updated


def vectors(block, tokens, layout, shape, along=lambda x: x, keys=None):
    """`(q, k, decay, k . q, beta)` of one token, or of several; None for q where nobody reads.

    q, k and decay are lists of arrays `[..., CHUNKS, *chunk_shape]` of this shape and layout;
    `along` spreads one number a token over them. keys: Refs of one head's q and k, `[chunks, ..]`,
    in place of the rows of all heads.
    """
    refs, maths, head, chunks = block.refs, block.static.maths, block.head, block.chunks
    sizes, chunk_shape = block.static.sizes, block.config.chunk_shape
    q_start, k_start, _ = (start // math.prod(chunk_shape) for start in block.static.columns)
    group, _ = divide(head, sizes.HV // sizes.H)
    several = len(shape) - 1 - len(chunk_shape)

    def vector(ref, *index, layout=layout):
        *index, begin = index
        pieces = (pl.ds(begin + start, CHUNKS) for start in range(0, chunks, CHUNKS))
        return [_load(ref.at[*index, piece], layout).astype(F32) for piece in pieces]

    def dot(x, y):
        return _total(block, [one * other for one, other in zip(x, y, strict=True)])

    def key(name, start):
        if keys is None:
            x = vector(refs[name], tokens, start + group * chunks)
        else:
            x = vector(keys[name], 0)
        if maths.use_qk_l2norm:
            x = [part * along(gates.inverse_norm(dot(x, x))) for part in x]
        return x

    q, k_q, k = None, None, key("k", k_start)
    if block.static.reads:
        q = [part * maths.scale for part in key("q", q_start)]
        k_q = dot(k, q)
    inputs = vector(refs["a"], tokens, head * chunks)
    A_log, biases = None, [None] * len(inputs)
    if not maths.activated:
        A_log = refs["A_log"][head].astype(F32)
        one_token = layout.reduce(0) if several else layout
        biases = vector(refs["dt_bias"], head * chunks, layout=one_token)
        if several:
            axes = tuple(range(1, len(shape)))
            biases = [lax.broadcast_in_dim(x, shape, axes) for x in biases]
    b = refs["b"].at[tokens, head]
    b = (_load(b, of_rows(layout, len(shape))) if b.shape else b[...]).astype(F32)
    gated = [
        gates.decay_and_beta(a, b, A_log, bias, maths)
        for a, bias in zip(inputs, biases, strict=True)
    ]
    return q, k, [jnp.exp(log_decay) for log_decay, _ in gated], k_q, gated[0][1]


def _total(block, terms):
    """The sum over K of an array for each piece, in the one order that all share."""
    sums = [term.sum(-1) for term in terms]
    apart = CHUNKS if len(terms) == block.chunks else 1
    sums = [functools.reduce(operator.add, sums[which::apart]) for which in range(apart)]
    while len(sums) > 1:
        sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
    lanes = len(block.config.chunk_shape) - 1
    result = sums[0] if apart == CHUNKS else sums[0].sum(-1 - lanes)
    for _ in range(lanes):
        result = result.sum(-1)
    return result


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _pieces(block, ref, *index):
    """`[..., chunks, *chunk_shape]` of a ref at index, in the pieces that the lanes take."""
    if block.config.fold:
        return [ref.at[*index, chunk] for chunk in range(block.chunks)]
    return [ref.at[*index, pl.ds(start, CHUNKS)] for start in range(0, block.chunks, CHUNKS)]


def _store(block, parts, ref, *index):
    for part, piece in zip(parts, _pieces(block, ref, *index), strict=True):
        to_memory(piece, part)


def load_state(block, start):
    pool, head, S = block.refs["pool"], block.head, block.static.sizes.S

    def of(slot):
        pieces = _pieces(block, pool, slot, head, block.rows(start))
        return tuple(_load(piece, block.config.layout) for piece in pieces)

    if "sources" not in block.refs:
        return of(block.slot)
    source = block.refs["sources"][block.row]
    # Outside the pool: a zero state, and nothing is read.
    return lax.cond((source >= 0) & (source < S), lambda: of(source), lambda: _no_state(block))


def store_state(block, start, state):
    if block.static.update_state:
        _store(block, state, block.refs["pool"], block.slot, block.head, block.rows(start))


def _no_state(block):
    dtype, count = block.refs["pool"].dtype, len(_pieces(block, block.refs["pool"], 0, 0, 0))
    return tuple(_zeros(block.piece_shape, dtype, block.config.layout) for _ in range(count))


def _zeros(shape, dtype, layout):
    return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)


def _clear(block, token):
    """Zeros for a token of a padded row."""
    out, intermediate, head = block.refs["out"], block.refs.get("intermediate"), block.head
    for start in block.steps:
        zeros = _zeros((block.config.step_rows,), out.dtype, block.value_layout)
        to_memory(out.at[token, head, block.rows(start)], zeros)
        if intermediate is not None:
            _store(block, _no_state(block), intermediate, token, head, block.rows(start))
