"""The op as a Pallas Mosaic GPU kernel for NVIDIA GPUs of compute capability 9.0 and newer.

One warpgroup (four warps) owns one tile of V rows of one (row, value head). It walks the tile in steps: a step's state
goes from global memory straight into registers, is decayed, gives both dot products over K, and is stored back over
itself, while the next steps' loads are under way.

    [step_rows, K]:   `lanes` lanes x `vector` elements span K, 16 bytes each where K allows;
                      the lane groups of the four warps take one V row each

Both dot products are taken before the rank-1 update, so that they overlap: out = S' q + u (k . q). Over several tokens
the whole tile stays in registers, rounded to the pool's dtype after each, as so many calls of one token would.

Memory sets the time, and likes to be walked in address order and in small pieces (H200, B = 256, HV = 32, K = V = 128,
float32, share of an in-place multiply over the same bytes, with a kernel that only scales the state): 4 KB pieces of
consecutive tiles reach 0.96, 16 KB pieces 0.92, 16 KB pieces with the batch as the fastest grid axis 0.89.
"""

import functools
import math
from dataclasses import dataclass, replace

import chex
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_contracts import KDA_UPDATE, PACKED_DECODE, Sizes
from kda_jax import gates
from kda_jax.invariants import assert_operands
from kda_jax.reference import STATIC
from kda_jax.slots import is_ref
from kda_jax.transforms import inference_only, pool_as_mapped, ref_must_be_mapped, unfused

WARPS = 4
WARP_LANES = 32
MAX_K = 256
V_MULTIPLE = 16  # V rows that one pass of the four warps covers at most, see Config
STEP_BYTES = 4096  # of state that a warpgroup loads at once
MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class Config:
    """How a state tile is spread over a warpgroup.

    A warpgroup owns `tile_rows` V rows and walks them `step_rows` at a time, `ahead` steps under way at once. `lanes`
    and `vector` set the order of a row's sums, so they follow from K and the pool's dtype alone; the rest may follow
    the batch: bits do not depend on it.
    """

    tile_rows: int
    step_rows: int
    lanes: int
    vector: int
    ahead: int = 2

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
        return WARPS * (WARP_LANES // self.lanes)

    @property
    def layout(self):
        """A step's layout; canonical, so without the lane level where one row takes the whole warp."""
        rows, width = WARP_LANES // self.lanes, self.lanes * self.vector
        if rows == 1:
            tiling = plgpu.Tiling(((WARPS, width), (self.vector,)))
            return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)
        tiling = plgpu.Tiling(((WARPS * rows, width), (rows, width), (self.vector,)))
        return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)


def unsupported(sizes: Sizes) -> str | None:
    """Why this kernel cannot run these sizes, or None."""
    for letter, size in vars(sizes).items():
        if not isinstance(size, int | None):
            return f"{letter} is symbolic, and a kernel's grid needs a number"
    if sizes.K % 32 or sizes.K > MAX_K:
        return f"K={sizes.K} is not a multiple of 32 up to {MAX_K}"
    if sizes.V == 0 or sizes.V % V_MULTIPLE:
        return f"V={sizes.V} is not a multiple of {V_MULTIPLE}"
    rows = sizes.B if sizes.N is None else sizes.N
    if rows * sizes.HV * sizes.V // V_MULTIPLE > MAX_GRID:
        return f"B={rows}, HV={sizes.HV}, V={sizes.V} exceed the {MAX_GRID} blocks of a grid"
    return None


def choose_config(sizes: Sizes, pool_dtype) -> Config:
    """16-byte vectors along K where K allows, steps of 4 KB, and taller tiles once there are enough to fill the GPU.

    H200, K = V = 128, kernel us with tiles of 4, 8 and 16 KB (more in benchmarks/results/nvidia-h200-tuning.json):

        B*HV        32                64                96                128               192
        float32     3.26 3.55 4.45    4.35 4.54 5.25    6.05 5.44 6.05    6.98 6.37 6.94    9.60 9.05 8.74
        bfloat16    2.88 3.31 3.94                      4.35 4.09 4.77    5.54 4.80 5.22

    At B*HV = 8192 two steps ahead are best for float32 (three are 1.1 % slower), three for bfloat16 (two: 1.5 %).
    """
    row_bytes = sizes.K * jnp.dtype(pool_dtype).itemsize
    power_of_two = math.gcd(sizes.K, MAX_K)  # the widest power of two that divides K
    vector = min(16 // jnp.dtype(pool_dtype).itemsize, power_of_two // 8)
    lanes = min(WARP_LANES, power_of_two // vector)
    rows_per_pass = WARPS * WARP_LANES // lanes
    step_rows = rows_per_pass * math.gcd(
        sizes.V // rows_per_pass, _power_below(STEP_BYTES // row_bytes // rows_per_pass)
    )
    rows_in_all = (sizes.B if sizes.N is None else sizes.N) * sizes.HV * sizes.V
    steps = 4 if rows_in_all >= 160 * 128 else 2 if rows_in_all >= 80 * 128 else 1
    return Config(
        tile_rows=step_rows * math.gcd(sizes.V // step_rows, steps),
        step_rows=step_rows,
        lanes=lanes,
        vector=vector,
        ahead=2 if jnp.dtype(pool_dtype).itemsize == 4 else 3,
    )


def _power_below(n):
    """The largest power of two that is not above n, and 1 at the least."""
    return 1 << max(0, n.bit_length() - 1)


def _body(
    refs,  # by name: q, k, v, a, b, A_log, dt_bias, slots, pool, out; sources, cu_seqlens, writes, intermediate or not
    *,
    sizes,
    columns,  # where q, k and v begin in their rows
    config,
    maths,
    update_state,
):
    H, HV, K, V, T, S = sizes.H, sizes.HV, sizes.K, sizes.V, sizes.T, sizes.S
    pool, out, writes, intermediate = refs["pool"], refs["out"], refs.get("writes"), refs.get("intermediate")
    layout = config.layout
    key_layout, value_layout = layout.reduce(0), layout.reduce(1)
    tiles = V // config.tile_rows
    block = lax.axis_index("block")  # tiles fastest, then heads, then rows: consecutive blocks walk a slot in order
    row_and_head, tile = _divide(block, tiles)
    row, head = _divide(row_and_head, HV)
    slot = refs["slots"][row]
    live = (slot >= 0) & (slot < S)
    steps = [tile * config.tile_rows + start for start in range(0, config.tile_rows, config.step_rows)]
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

    def zeros(dtype):
        return plgpu.layout_cast(jnp.zeros((config.step_rows, K), dtype), layout)

    def clear(token):
        for start in steps:
            nothing = plgpu.layout_cast(jnp.zeros((config.step_rows,), out.dtype), value_layout)
            _store(out.at[token, head, rows(start)], nothing)
            if intermediate is not None:
                _store(intermediate.at[token, head, rows(start), :], zeros(pool.dtype))

    def load_state(start):
        if "sources" not in refs:
            return load(pool.at[slot, head, rows(start), :], layout)
        source = refs["sources"][row]
        return lax.cond(
            (source >= 0) & (source < S),
            lambda: load(pool.at[source, head, rows(start), :], layout),
            lambda: zeros(pool.dtype),  # outside the pool: a zero state, and nothing is read
        )

    def one_token(token, state_of, keep):
        """Reads each step's state by state_of, updates it, writes the token's results, and gives keep the state."""
        f32 = jnp.float32
        group, _ = _divide(head, HV // H)
        q_start, k_start, v_start = columns
        q = load(refs["q"].at[token, pl.ds(q_start + group * K, K)], key_layout).astype(f32)
        k = load(refs["k"].at[token, pl.ds(k_start + group * K, K)], key_layout).astype(f32)
        if maths.use_qk_l2norm:
            q = q * gates.inverse_norm((q * q).sum())
            k = k * gates.inverse_norm((k * k).sum())
        q = q * maths.scale
        k_q = (k * q).sum()
        a = load(refs["a"].at[token, pl.ds(head * K, K)], key_layout).astype(f32)
        A_log = dt_bias = None
        if not maths.activated:
            dt_bias = load(refs["dt_bias"].at[pl.ds(head * K, K)], key_layout).astype(f32)
            A_log = refs["A_log"][head].astype(f32)
        log_decay, beta = gates.decay_and_beta(a, refs["b"][token, head].astype(f32), A_log, dt_bias, maths)
        decay = jnp.exp(log_decay)

        def along_keys(vector):
            return lax.broadcast_in_dim(vector, (config.step_rows, K), (1,))

        for step, start in enumerate(steps):
            state = state_of(step)
            v = load(refs["v"].at[token, rows(v_start + head * V + start)], value_layout).astype(f32)
            decayed = state.astype(f32) * along_keys(decay)
            state_k = (decayed * along_keys(k)).sum(1)
            state_q = (decayed * along_keys(q)).sum(1)
            u = (v - state_k) * beta
            updated = decayed + lax.broadcast_in_dim(u, decayed.shape, (0,)) * along_keys(k)
            updated = updated.astype(pool.dtype)
            _store(out.at[token, head, rows(start)], (state_q + u * k_q).astype(out.dtype))
            if intermediate is not None:
                _store(intermediate.at[token, head, rows(start), :], updated)
            if writes is not None:
                written = writes[token]

                @pl.when((written >= 0) & (written < S))
                def _(written=written, start=start, updated=updated):
                    _store(pool.at[written, head, rows(start), :], updated)

            keep(step, updated)

    def store_state(step, state):
        if update_state:
            _store(pool.at[slot, head, rows(steps[step]), :], state)

    one_each = T == 1 and "cu_seqlens" not in refs
    if one_each:
        pl.when(jnp.logical_not(live))(lambda: clear(row))
    else:
        lax.fori_loop(bare_first, bare_last, lambda token, _: clear(token), None)

    @pl.when(live & (first < last))
    def _():
        # Loads come first: the gates hide their latency. For one token no more than `ahead` steps are held at once.
        held = [load_state(start) for start in steps[: config.ahead if one_each else None]]
        if one_each:

            def state_of(step):
                if step + config.ahead < len(steps):
                    held.append(load_state(steps[step + config.ahead]))
                return held[step]

            one_token(row, state_of, store_state)
            return

        def next_token(token, states):
            after = list(states)
            one_token(token, states.__getitem__, after.__setitem__)
            return tuple(after)

        for step, state in enumerate(lax.fori_loop(first, last, next_token, tuple(held))):
            store_state(step, state)


def _divide(x, n):
    """(x // n, x % n) of a natural int32, in int32 under 64-bit mode too."""
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def _store(ref, value):
    """Registers to global memory. JAX 0.12 refuses plain stores of these layouts; 0.11 has no others."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


@functools.partial(jax.jit, static_argnames=("sizes", "maths", "out_dtype", "config"))
def kda_packed_decode_mosaic_gpu(
    mixed_qkv,  # [B, 2*H*K + HV*V]
    a,  # [B, HV*K]
    b,  # [B, HV]
    A_log,  # [HV]
    dt_bias,  # [HV*K]
    pool,  # [S, HV, V, K], an array or a Ref
    slots,  # [B] int32
    sources=None,  # [B] int32
    *,
    sizes: Sizes,
    maths: gates.Maths,
    out_dtype,
    config: Config | None = None,
):
    """`kda_jax.packed_decode` after its contract: `(out, pool)`, with None for a Ref, which is updated in place."""
    assert_operands(PACKED_DECODE, sizes, mixed_qkv, a, b, A_log, dt_bias, pool, slots, sources)
    operands = dict(q=mixed_qkv, k=mixed_qkv, v=mixed_qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, slots=slots)
    out, pool, _ = _launch(
        operands | {"sources": sources},
        pool,
        sizes=replace(sizes, T=1, N=sizes.B),
        columns=(0, sizes.H * sizes.K, 2 * sizes.H * sizes.K),
        maths=maths,
        out_dtype=out_dtype,
        config=config,
        name="kda_packed_decode",
    )
    return out.reshape(sizes.B, 1, sizes.HV, sizes.V), pool


@functools.partial(jax.jit, static_argnames=(*STATIC, "config"))
def kda_update_mosaic_gpu(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    a,  # [B, T, HV*K]
    b,  # [B, T, HV]
    A_log,  # [HV]
    dt_bias,  # [HV*K]
    pool,  # [S, HV, V, K], an array or a Ref
    slots,  # [N] int32
    sources=None,  # [N] int32
    cu_seqlens=None,  # [N+1] int32
    writes=None,  # [B, T] int32
    *,
    sizes: Sizes,
    maths: gates.Maths,
    out_dtype,
    update_state=True,
    intermediate=False,
    config: Config | None = None,
):
    """`kda_jax.fused_sigmoid_gating_kda_update` after its contract: `(out, pool, intermediate)`, the last or None."""
    assert_operands(KDA_UPDATE, sizes, A_log, dt_bias, q, k, v, a, b, pool, slots, cu_seqlens, writes)
    B, T, HV = b.shape
    flat = {name: x.reshape(B * T, math.prod(x.shape[2:])) for name, x in dict(q=q, k=k, v=v, a=a, b=b).items()}
    out, pool, states = _launch(
        flat
        | dict(A_log=A_log, dt_bias=dt_bias, slots=slots, sources=sources, cu_seqlens=cu_seqlens)
        | dict(writes=None if writes is None else writes.reshape(-1)),
        pool,
        sizes=sizes,
        columns=(0, 0, 0),
        maths=maths,
        out_dtype=out_dtype,
        config=config,
        name="kda_update",
        update_state=update_state,
        intermediate=intermediate,
    )
    out = out.reshape(B, T, HV, sizes.V)
    return out, pool, None if states is None else states.reshape(*out.shape, sizes.K)


def _launch(operands, pool, *, sizes, columns, maths, out_dtype, config, name, update_state=True, intermediate=False):
    """`(out [B*T, HV, V], pool, intermediate [B*T, HV, V, K] or None)` of operands by name; None is left out."""
    operands = {
        name: inference_only(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in operands.items()
        if x is not None
    }
    HV, K, V = sizes.HV, sizes.K, sizes.V
    rows, tokens = operands["slots"].shape[0], operands["a"].shape[0]
    config = config or choose_config(sizes, pool.dtype)
    chex.assert_is_divisible(V, config.tile_rows)
    chex.assert_is_divisible(K, config.lanes * config.vector)

    written = update_state or "writes" in operands
    if is_ref(pool):
        if written:
            operands["slots"] = ref_must_be_mapped(pool, *_slots_first(operands))
        state = pool[...]  # the Ref's own buffer: nothing is copied inside jit
    else:
        state = inference_only(pool)
        state = pool_as_mapped(state, *operands.values()) if written else state
    ref = jax.new_ref(unfused(state)) if written else state
    shapes = {"out": jax.ShapeDtypeStruct((tokens, HV, V), out_dtype)}
    if intermediate:
        shapes["intermediate"] = jax.ShapeDtypeStruct((tokens, HV, V, K), pool.dtype)
    names = (*operands, "pool", *shapes)

    def body(*refs):
        body_refs = dict(zip(names, refs, strict=True))
        _body(body_refs, sizes=sizes, columns=columns, config=config, maths=maths, update_state=update_state)

    results = plgpu.kernel(
        body,
        out_type=list(shapes.values()),
        grid=(rows * HV * (V // config.tile_rows),),
        grid_names=("block",),
        kernel_name=name,  # what profilers show
        # No automatic barriers: each lane stores exactly the elements of the pool that it loaded, and reads nothing
        # else that is written.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*operands.values(), ref)
    results = dict(zip(shapes, results, strict=True))
    if written:
        state = unfused(jax.freeze(ref))
        if is_ref(pool):
            pool[...] = state
    return results["out"], None if is_ref(pool) else state, results.get("intermediate")


def _slots_first(operands):
    return operands["slots"], *(x for name, x in operands.items() if name != "slots")
