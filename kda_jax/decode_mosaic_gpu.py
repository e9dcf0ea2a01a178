"""The op as a Pallas Mosaic GPU kernel for NVIDIA GPUs of compute capability 9.0 and newer.

One warpgroup (four warps) owns one tile of V rows of one (row, value head). It walks the tile in steps: a step's state
goes from global memory straight into registers, is decayed, gives both dot products over K, and is stored back over
itself, while the next steps' loads are under way.

    K = [repeats, 4 chunks, lanes / 4, vector]:   `lanes` lanes x `vector` elements, 16 bytes each where K allows
    a row's sum runs over vector, repeats, chunks, lanes / 4, in this order, whichever lane holds the terms

Both dot products are taken before the rank-1 update, so that they overlap: out = S' q + u (k . q). Memory sets the time
of one token, and likes to be walked in address order and in small pieces (H200, B = 256, HV = 32, K = V = 128, float32,
share of an in-place multiply over the same bytes, with a kernel that only scales the state): 4 KB pieces of consecutive
tiles reach 0.96, 16 KB pieces 0.92, 16 KB pieces with the batch as the fastest grid axis 0.89.

Over several tokens the whole tile stays in registers, rounded to the pool's dtype after each, as so many calls of one
token would. Arithmetic counts there, so the gates of four tokens are computed at once, a warp each, and wait in shared
memory with the values; and a lane takes all four chunks of a `fold`ed row, which leaves a quarter of the shuffles.
"""

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_contracts import Sizes
from kda_jax import gates
from kda_jax.call import Operands, Static, implementation
from kda_jax.mosaic import divide, to_memory
from kda_jax.pools import closed, is_ref
from kda_jax.transforms import inference_only, pool_as_mapped, ref_must_be_mapped, unfused

WARPS = 4
WARP_LANES = 32
MAX_K = 256
CHUNKS = 4
V_MULTIPLE = 16  # V rows that one pass of the four warps covers at most, unless it folds
STEP_BYTES = 4096  # of state that a warpgroup loads at once
MAX_GRID = 2**31 - 1
CAPABILITIES = (9.0, math.inf)  # compute capabilities of the GPUs that run it, from and to


@dataclass(frozen=True)
class Config:
    """How a state tile is spread over a warpgroup.

    A warpgroup owns `tile_rows` V rows and walks them `step_rows` at a time, `ahead` steps under way at once. `lanes`
    and `vector` set the order of a row's sums, so they follow from K and the pool's dtype alone; the rest may follow
    the batch: bits do not depend on it. With `fold` a lane holds all chunks of its row, so `lanes` serve CHUNKS rows.
    """

    tile_rows: int
    step_rows: int
    lanes: int
    vector: int
    ahead: int = 2
    fold: bool = False

    def __post_init__(self):
        if self.lanes not in (8, 16, 32):
            raise ValueError(f"{self.lanes=} must be 8, 16 or 32")
        if self.vector not in (4, 8):
            raise ValueError(f"{self.vector=} must be 4 or 8")
        if self.step_rows < 1 or self.step_rows % self.rows_per_pass:
            raise ValueError(f"{self.step_rows=} must be a multiple of {self.rows_per_pass=}")
        if self.tile_rows < 1 or self.tile_rows % self.step_rows:
            raise ValueError(f"{self.tile_rows=} must be a multiple of {self.step_rows=}")

    @property
    def rows_per_pass(self):
        return WARPS * WARP_LANES // self.lanes * (CHUNKS if self.fold else 1)

    @property
    def chunk_shape(self):
        """`[lanes / CHUNKS, vector]`, the lanes in two axes where layout inference (JAX 0.11, 0.12) fails on 8 x 8."""
        lanes = self.lanes // CHUNKS
        return (2, 4, 8) if lanes == self.vector == 8 else (lanes, self.vector)

    @property
    def piece_shape(self):
        """What the lanes of a row hold together: one of its chunks, or CHUNKS of them."""
        return self.chunk_shape if self.fold else (CHUNKS, *self.chunk_shape)

    @property
    def layout(self):
        """That of a step's piece, `[rows, *piece_shape]`; canonical, so of one level where a row takes a whole warp."""
        rows, piece = self.rows_per_pass // WARPS, self.piece_shape
        if rows == 1:
            return self.token_layout
        rank = 1 + len(piece)
        tiling = plgpu.Tiling(((WARPS * rows, *piece), (rows, *piece)))
        return plgpu.Layout.TILED(tiling, (-2 * rank,), tuple(range(-rank, -1)), -1)

    @property
    def token_layout(self):
        """That of `[WARPS, CHUNKS, *chunk_shape]`: each warp has its own token's, as often as it finds room."""
        shape = (WARPS, CHUNKS, *self.chunk_shape)
        copies = () if self.lanes == WARP_LANES else (plgpu.Replicated(WARP_LANES // self.lanes),)
        lanes = (*copies, *range(1 - len(shape), -1))
        return plgpu.Layout.TILED(plgpu.Tiling((shape,)), (-len(shape),), lanes, -1)


def unsupported(sizes: Sizes) -> str | None:
    """Why this kernel cannot run these sizes, or None."""
    if sizes.K % 32 or sizes.K > MAX_K:
        return f"K={sizes.K} is not a multiple of 32 up to {MAX_K}"
    if sizes.V == 0 or sizes.V % V_MULTIPLE:
        return f"V={sizes.V} is not a multiple of {V_MULTIPLE}"
    rows = sizes.B if sizes.N is None else sizes.N
    if rows * sizes.HV * sizes.V // V_MULTIPLE > MAX_GRID:
        return f"B={rows}, HV={sizes.HV}, V={sizes.V} exceed the {MAX_GRID} blocks of a grid"
    return None


def choose_config(sizes: Sizes, pool_dtype, several_tokens=False) -> Config:
    """16-byte vectors along K where K allows, steps of 4 KB, and taller tiles once there are enough to fill the GPU.

    Over several tokens a step is one pass of the four warps, and `ahead` means nothing: a tile is loaded at once.

    H200, K = V = 128, kernel us with tiles of 4, 8 and 16 KB (more in benchmarks/results/nvidia-h200-tuning.json):

        B*HV        32                64                96                128               192
        float32     3.26 3.55 4.45    4.35 4.54 5.25    6.05 5.44 6.05    6.98 6.37 6.94    9.60 9.05 8.74
        bfloat16    2.88 3.31 3.94                      4.35 4.09 4.77    5.54 4.80 5.22

    At B*HV = 8192 two steps ahead are best for float32 (three are 1.1 % slower), three for bfloat16 (two: 1.5 %).
    Four tokens, tiles of 1, 2, 4 and 8 steps: 1024 states, float32 56.5 45.0 47.1 52.0, bfloat16 48.7 40.5 36.7;
    32 states, float32 5.0 4.9 5.6, bfloat16 4.3 4.8 6.1.
    """
    row_bytes = sizes.K * jnp.dtype(pool_dtype).itemsize
    power_of_two = math.gcd(sizes.K, MAX_K)  # the widest power of two that divides K
    vector = min(16 // jnp.dtype(pool_dtype).itemsize, power_of_two // 8)
    lanes = min(WARP_LANES, power_of_two // vector)
    rows_per_pass = WARPS * WARP_LANES // lanes
    step_rows = rows_per_pass * math.gcd(
        sizes.V // rows_per_pass, _power_below(STEP_BYTES // row_bytes // rows_per_pass)
    )
    states = (sizes.B if sizes.N is None else sizes.N) * sizes.HV * sizes.V // 128
    steps = 4 if states >= 160 else 2 if states >= 80 else 1
    wide = jnp.dtype(pool_dtype).itemsize == 4
    if several_tokens:
        fold = (
            2 * lanes * vector >= sizes.K and sizes.V % (CHUNKS * rows_per_pass) == 0
        )  # else a long program
        step_rows = rows_per_pass * (CHUNKS if fold else 1)
        tile_rows = step_rows * math.gcd(sizes.V // step_rows, 2 if wide else steps)
        return Config(
            tile_rows=tile_rows, step_rows=step_rows, lanes=lanes, vector=vector, fold=fold
        )
    return Config(
        tile_rows=step_rows * math.gcd(sizes.V // step_rows, steps),
        step_rows=step_rows,
        lanes=lanes,
        vector=vector,
        ahead=2 if wide else 3,
    )


def _power_below(n):
    """The largest power of two that is not above n, and 1 at the least."""
    return 1 << max(0, n.bit_length() - 1)


def _body(
    refs,  # by name; K as [chunks, *chunk_shape] in q, k, a, dt_bias, pool and intermediate
    *,
    static,
    config,
):
    sizes, maths = static.sizes, static.maths
    H, HV, K, V, T, S = sizes.H, sizes.HV, sizes.K, sizes.V, sizes.T, sizes.S
    pool, out, writes, intermediate = (
        refs["pool"],
        refs["out"],
        refs.get("writes"),
        refs.get("intermediate"),
    )
    f32 = jnp.float32
    chunk = math.prod(config.chunk_shape)
    chunks = K // chunk
    q_start, k_start, v_start = static.columns
    piece_shape = (config.step_rows, *config.piece_shape)
    layout = config.layout
    key_layout, value_layout = layout.reduce(0), _of_rows(layout, len(piece_shape))
    tiles = V // config.tile_rows
    block = lax.axis_index(
        "block"
    )  # tiles fastest, then heads, then rows: consecutive blocks walk a slot in order
    row_and_head, tile = divide(block, tiles)
    row, head = divide(row_and_head, HV)
    slot = refs["slots"][row]
    live = (slot >= 0) & (slot < S)
    steps = [
        tile * config.tile_rows + start for start in range(0, config.tile_rows, config.step_rows)
    ]
    if "cu_seqlens" in refs:
        # Clipped, so that no cu_seqlens makes the kernel read or write outside its arrays.
        first = jnp.clip(refs["cu_seqlens"][row], 0, T)
        last = jnp.clip(refs["cu_seqlens"][row + 1], first, T)
        bare_first, bare_last = jnp.where(live, last, first), jnp.where(row == sizes.N - 1, T, last)
    else:
        first, last = row * T, row * T + T
        bare_first, bare_last = jnp.where(live, last, first), last

    def load(ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    def rows(start):
        return pl.ds(start, config.step_rows)

    def pieces(ref, *index):
        """What ref holds at index, `[..., chunks, *chunk_shape]`, in the pieces in which the lanes take it."""
        parts = (
            range(chunks)
            if config.fold
            else [pl.ds(start, CHUNKS) for start in range(0, chunks, CHUNKS)]
        )
        return [ref.at[*index, part] for part in parts]

    def store(parts, *index):
        for part, ref in zip(parts, pieces(*index), strict=True):
            to_memory(ref, part)

    def zeros(shape, dtype, layout):
        return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)

    def no_state():
        return tuple(zeros(piece_shape, pool.dtype, layout) for _ in pieces(pool, 0, 0, rows(0)))

    def clear(token):
        for start in steps:
            to_memory(
                out.at[token, head, rows(start)],
                zeros((config.step_rows,), out.dtype, value_layout),
            )
            if intermediate is not None:
                store(no_state(), intermediate, token, head, rows(start))

    def load_state(start):
        def of(slot):
            return tuple(load(piece, layout) for piece in pieces(pool, slot, head, rows(start)))

        if "sources" not in refs:
            return of(slot)
        source = refs["sources"][row]
        # Outside the pool: a zero state, and nothing is read.
        return lax.cond((source >= 0) & (source < S), lambda: of(source), no_state)

    def store_state(start, state):
        if static.update_state:
            store(state, pool, slot, head, rows(start))

    def total(terms):
        """The sum over K of an array for each piece, in the one order that all share."""
        sums = [term.sum(-1) for term in terms]
        apart = CHUNKS if len(terms) == chunks else 1
        sums = [functools.reduce(operator.add, sums[which::apart]) for which in range(apart)]
        while len(sums) > 1:
            sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
        lanes = len(config.chunk_shape) - 1
        result = sums[0] if apart == CHUNKS else sums[0].sum(-1 - lanes)
        for _ in range(lanes):
            result = result.sum(-1)
        return result

    def vectors(tokens, layout, shape, along=lambda x: x):
        """(q, k, decay, k . q, beta) of one token, or of some, over which `along` spreads one number each.

        q, k and decay are lists of arrays `[..., CHUNKS, *chunk_shape]` of this shape and layout.
        """
        group, _ = divide(head, HV // H)

        def vector(ref, *index, layout=layout):
            *index, begin = index
            starts = range(0, chunks, CHUNKS)
            return [
                load(ref.at[*index, pl.ds(begin + start, CHUNKS)], layout).astype(f32)
                for start in starts
            ]

        def dot(x, y):
            return total([one * other for one, other in zip(x, y, strict=True)])

        q = vector(refs["q"], tokens, q_start // chunk + group * chunks)
        k = vector(refs["k"], tokens, k_start // chunk + group * chunks)
        if maths.use_qk_l2norm:
            q, k = ([part * along(gates.inverse_norm(dot(x, x))) for part in x] for x in (q, k))
        q = [part * maths.scale for part in q]
        inputs = vector(refs["a"], tokens, head * chunks)
        A_log, biases = None, [None] * len(inputs)
        if not maths.activated:
            A_log = refs["A_log"][head].astype(f32)
            several = len(shape) - 1 - len(config.chunk_shape)
            biases = vector(
                refs["dt_bias"], head * chunks, layout=layout.reduce(0) if several else layout
            )
            if several:
                biases = [
                    lax.broadcast_in_dim(x, shape, tuple(range(1, len(shape)))) for x in biases
                ]
        b = refs["b"].at[tokens, head]
        b = (load(b, _of_rows(layout, len(shape))) if b.shape else b[...]).astype(f32)
        gated = [
            gates.decay_and_beta(a, b, A_log, bias, maths)
            for a, bias in zip(inputs, biases, strict=True)
        ]
        return q, k, [jnp.exp(log_decay) for log_decay, _ in gated], dot(k, q), gated[0][1]

    def advance(token, start, state, q, k, decay, k_q, beta, v):
        """One token over one step's state, in pieces: writes the token's results, returns the state."""

        def along_keys(vector):
            return lax.broadcast_in_dim(vector, piece_shape, tuple(range(1, len(piece_shape))))

        decayed = [s.astype(f32) * along_keys(d) for s, d in zip(state, decay, strict=True)]
        state_k = total([d * along_keys(x) for d, x in zip(decayed, k, strict=True)])
        state_q = total([d * along_keys(x) for d, x in zip(decayed, q, strict=True)])
        u = (v - state_k) * beta
        along_values = lax.broadcast_in_dim(u, piece_shape, (0,))
        updated = tuple(
            (d + along_values * along_keys(x)).astype(pool.dtype)
            for d, x in zip(decayed, k, strict=True)
        )
        to_memory(out.at[token, head, rows(start)], (state_q + u * k_q).astype(out.dtype))
        if intermediate is not None:
            store(updated, intermediate, token, head, rows(start))
        if writes is not None:
            written = writes[token]
            pl.when((written >= 0) & (written < S))(
                lambda: store(updated, pool, written, head, rows(start))
            )
        return updated

    token_layout, token_shape = config.token_layout, (WARPS, CHUNKS, *config.chunk_shape)
    one_each = "vectors" not in refs
    if one_each:
        pl.when(jnp.logical_not(live))(lambda: clear(row))
    else:
        lax.fori_loop(bare_first, bare_last, lambda token, _: clear(token), None)

    def one_token():
        # Loads come first: the gates hide their latency. At most `ahead` steps are under way beside the present one.
        held = [load_state(start) for start in steps[: config.ahead]]
        q, k, decay, k_q, beta = vectors(row, token_layout.reduce(0), token_shape[1:])
        for step, start in enumerate(steps):
            if step + config.ahead < len(steps):
                held.append(load_state(steps[step + config.ahead]))
            v = load(refs["v"].at[row, rows(v_start + head * V + start)], value_layout).astype(f32)
            updated = advance(row, start, held[step], q, k, decay, k_q, beta, v)
            store_state(start, updated)

    def many_tokens():
        held = tuple(load_state(start) for start in steps)

        def prepare(base):
            """The vectors and values of the WARPS tokens from base, into shared memory."""
            tokens = pl.ds(base, WARPS)
            *three, k_q, beta = vectors(
                tokens,
                token_layout,
                token_shape,
                lambda x: lax.broadcast_in_dim(x, token_shape, (0,)),
            )
            for which, parts in enumerate(three):
                for repeat, part in enumerate(parts):
                    to_memory(refs["vectors"].at[:, which, pl.ds(repeat * CHUNKS, CHUNKS)], part)
            for which, x in enumerate((k_q, beta)):
                to_memory(
                    refs["numbers"].at[which],
                    plgpu.layout_cast(x, _of_rows(token_layout, len(token_shape))),
                )
            values = refs["v"].at[tokens, pl.ds(v_start + head * V + steps[0], config.tile_rows)]
            to_memory(refs["values"], load(values, _values_layout(config.tile_rows)).astype(f32))
            plgpu.commit_smem()

        def next_token(token, base, states):
            at = token - base
            q, k, decay = (
                [load(x, key_layout) for x in pieces(refs["vectors"], at, which)]
                for which in range(3)
            )
            k_q, beta = refs["numbers"][0, at], refs["numbers"][1, at]
            after = []
            for step, (start, state) in enumerate(zip(steps, states, strict=True)):
                v = load(refs["values"].at[at, rows(step * config.step_rows)], value_layout)
                after.append(advance(token, start, state, q, k, decay, k_q, beta, v))
            return tuple(after)

        def next_group(group, states):
            begin = first + group * WARPS
            base = jnp.minimum(begin, refs["a"].shape[0] - WARPS)
            prepare(base)
            end = jnp.minimum(begin + WARPS, last)
            states = lax.fori_loop(
                begin, end, lambda token, states: next_token(token, base, states), states
            )
            plgpu.commit_smem()  # all have read before the next group is written
            return states

        groups, _ = divide(last - first + (WARPS - 1), WARPS)
        states = lax.fori_loop(0, groups, next_group, held)
        for start, state in zip(steps, states, strict=True):
            store_state(start, state)

    pl.when(live & (first < last))(one_token if one_each else many_tokens)


def _of_rows(layout, rank):
    """The layout of a number for each row of such arrays of `rank` dimensions."""
    for axis in reversed(range(1, rank)):
        layout = layout.reduce(axis)
    return layout


def _values_layout(rows):
    """The layout of `[WARPS, rows]`, a token in each warp."""
    lanes = math.gcd(rows, WARP_LANES)
    copies = () if lanes == WARP_LANES else (plgpu.Replicated(WARP_LANES // lanes),)
    return plgpu.Layout.TILED(plgpu.Tiling(((WARPS, lanes), (1,))), (-3,), (*copies, -2), -1)


def _launch(operands: Operands, *, static: Static, config: Config | None = None):
    """`(out [B, T, HV, V], pool, intermediate [B, T, HV, V, K] or None)`; None for a Ref."""
    sizes, pool = static.sizes, operands.pool
    arrays: dict[str, Any] = {
        name: inference_only(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in vars(operands).items()
        if x is not None and name != "pool"
    }
    for name in ("q", "k", "v", "a", "b"):
        x = arrays[name]
        arrays[name] = x.reshape(sizes.B * sizes.T, math.prod(x.shape[2:]))
    if "writes" in arrays:
        arrays["writes"] = arrays["writes"].reshape(-1)
    HV, K, V = sizes.HV, sizes.K, sizes.V
    rows, tokens = arrays["slots"].shape[0], arrays["a"].shape[0]
    several_tokens = sizes.T > 1 or "cu_seqlens" in arrays
    config = config or choose_config(sizes, pool.dtype, several_tokens)
    chex.assert_is_divisible(V, config.tile_rows)
    chex.assert_is_divisible(K, config.lanes * config.vector)
    if config.fold and not several_tokens:
        raise ValueError(f"{config=} folds rows, which one token's kernel does not")
    chunk = math.prod(config.chunk_shape)
    # K: reshaped here, since Pallas's interpreter reshapes no Ref.
    in_chunks = (K // chunk, *config.chunk_shape)
    for name in ("q", "k", "a", "dt_bias"):
        x = arrays[name]
        whole = x.shape[-1] // chunk  # of mixed_qkv the last value heads may not fill a chunk
        arrays[name] = x[..., : whole * chunk].reshape(*x.shape[:-1], whole, *config.chunk_shape)

    written = static.update_state or "writes" in arrays
    if is_ref(pool):
        if written:
            arrays["slots"] = ref_must_be_mapped(pool, *_slots_first(arrays))
        state = pool[...]  # the Ref's own buffer: nothing is copied inside jit
    else:
        state = inference_only(pool)
        state = pool_as_mapped(state, *arrays.values()) if written else state
    state = unfused(state.reshape(*state.shape[:-1], *in_chunks))
    ref = jax.new_ref(state) if written else state
    shapes = {"out": jax.ShapeDtypeStruct((tokens, HV, V), static.out_dtype)}
    if static.intermediate:
        shapes["intermediate"] = jax.ShapeDtypeStruct((tokens, HV, V, *in_chunks), pool.dtype)
    scratch = {}
    if several_tokens:
        if tokens < WARPS:  # the gates are computed for so many at once
            for name in "qkvab":
                pad = [(0, WARPS - tokens)] + [(0, 0)] * (arrays[name].ndim - 1)
                arrays[name] = jnp.pad(arrays[name], pad)
        scratch["vectors"] = plgpu.SMEM((WARPS, 3, *in_chunks), jnp.float32)  # q, k and the decay
        scratch["numbers"] = plgpu.SMEM((2, WARPS), jnp.float32)  # k . q and beta
        scratch["values"] = plgpu.SMEM((WARPS, config.tile_rows), jnp.float32)
    names = (*arrays, "pool", *shapes, *scratch)

    def body(*refs):
        body_refs = dict(zip(names, refs, strict=True))
        _body(body_refs, static=static, config=config)

    results = plgpu.kernel(
        body,
        out_type=list(shapes.values()),
        grid=(rows * HV * (V // config.tile_rows),),
        grid_names=("block",),
        scratch_types=list(scratch.values()),
        kernel_name=static.op,  # what profilers show
        # No automatic barriers: each lane stores exactly the elements of the pool that it loaded, and reads nothing
        # else of global memory that is written; shared memory has its barriers in many_tokens.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*unfused(tuple(arrays.values())), ref)
    state, results = unfused((jax.freeze(ref) if written else state, results))
    results = dict(zip(shapes, results, strict=True))
    state = state.reshape(*state.shape[:3], K)
    out = results["out"].reshape(sizes.B, sizes.T, HV, V)
    states = results.get("intermediate")
    states = None if states is None else states.reshape(*out.shape, K)
    return out, closed(pool, state, written=written), states


def _slots_first(arrays):
    return arrays["slots"], *(x for name, x in arrays.items() if name != "slots")


kda_packed_decode_mosaic_gpu = implementation(_launch, "kda_packed_decode_mosaic_gpu")
kda_update_mosaic_gpu = implementation(_launch, "kda_update_mosaic_gpu")
