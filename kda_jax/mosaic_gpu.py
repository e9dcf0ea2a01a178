"""The op as a Pallas Mosaic GPU kernel for NVIDIA GPUs of compute capability 9.0 and newer.

One warpgroup (four warps) owns one tile of V rows of one (row, value head). It walks the tile in steps: a step's state
goes from global memory straight into registers, is decayed, gives both dot products over K, and is stored back over
itself, while the next steps' loads are under way.

    [step_rows, K]:   `lanes` lanes x `vector` elements span K, 16 bytes each where K allows;
                      the lane groups of the four warps take one V row each

Both dot products are taken before the rank-1 update, so that they overlap: out = S' q + u (k . q).

Memory sets the time, and likes to be walked in address order and in small pieces (H200, B = 256, HV = 32, K = V = 128,
float32, share of an in-place multiply over the same bytes, with a kernel that only scales the state): 4 KB pieces of
consecutive tiles reach 0.96, 16 KB pieces 0.92, 16 KB pieces with the batch as the fastest grid axis 0.89.
"""

import functools
import math
from dataclasses import dataclass

import chex
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_contracts import Sizes
from kda_jax import gates
from kda_jax.invariants import assert_operands
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
    for letter in ("B", "H", "HV", "K", "V", "S"):
        if not isinstance(getattr(sizes, letter), int):
            return f"{letter} is symbolic, and a kernel's grid needs a number"
    if sizes.K % 32 or sizes.K > MAX_K:
        return f"K={sizes.K} is not a multiple of 32 up to {MAX_K}"
    if sizes.V == 0 or sizes.V % V_MULTIPLE:
        return f"V={sizes.V} is not a multiple of {V_MULTIPLE}"
    if sizes.B * sizes.HV * sizes.V // V_MULTIPLE > MAX_GRID:
        return f"B={sizes.B}, HV={sizes.HV}, V={sizes.V} exceed the {MAX_GRID} blocks of a grid"
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
    rows_in_all = sizes.B * sizes.HV * sizes.V
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
    mixed_qkv_gmem,  # [B, 2*H*K + HV*V]
    a_gmem,  # [B, HV*K]
    b_gmem,  # [B, HV]
    A_log_gmem,  # [HV]
    dt_bias_gmem,  # [HV*K]
    slots_gmem,  # [B] int32
    *refs,  # sources_gmem [B] int32, if there is one; pool_gmem [S, HV, V, K], read and written; out_gmem [B, 1, HV, V]
    sizes,
    config,
    scale,
    use_qk_l2norm,
    lower_bound,
):
    *sources_gmem, pool_gmem, out_gmem = refs
    H, HV, K, V = sizes.H, sizes.HV, sizes.K, sizes.V
    layout = config.layout
    key_layout, value_layout = layout.reduce(0), layout.reduce(1)
    tiles = V // config.tile_rows
    block = lax.axis_index("block")  # tiles fastest, then heads, then rows: consecutive blocks walk a slot in order
    row_and_head, tile = _divide(block, tiles)
    row, head = _divide(row_and_head, HV)
    slot = slots_gmem[row]
    live = (slot >= 0) & (slot < sizes.S)
    steps = [tile * config.tile_rows + start for start in range(0, config.tile_rows, config.step_rows)]

    def load(ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    def rows(start):
        return pl.ds(start, config.step_rows)

    @pl.when(jnp.logical_not(live))
    def _():
        for start in steps:
            zeros = jnp.zeros((config.step_rows,), out_gmem.dtype)
            _store(out_gmem.at[row, 0, head, rows(start)], plgpu.layout_cast(zeros, value_layout))

    @pl.when(live)
    def _():
        def load_state(start):
            if not sources_gmem:
                return load(pool_gmem.at[slot, head, rows(start), :], layout)
            source = sources_gmem[0][row]
            zeros = jnp.zeros((config.step_rows, K), pool_gmem.dtype)
            return lax.cond(
                (source >= 0) & (source < sizes.S),
                lambda: load(pool_gmem.at[source, head, rows(start), :], layout),
                lambda: plgpu.layout_cast(zeros, layout),  # outside the pool: a zero state, and nothing is read
            )

        states = [load_state(start) for start in steps[: config.ahead]]  # first: the gates below hide their latency
        f32 = jnp.float32
        group, _ = _divide(head, HV // H)
        q = load(mixed_qkv_gmem.at[row, pl.ds(group * K, K)], key_layout).astype(f32)
        k = load(mixed_qkv_gmem.at[row, pl.ds((H + group) * K, K)], key_layout).astype(f32)
        if use_qk_l2norm:
            q = q * gates.inverse_norm((q * q).sum())
            k = k * gates.inverse_norm((k * k).sum())
        q = q * scale
        k_q = (k * q).sum()
        x = load(a_gmem.at[row, pl.ds(head * K, K)], key_layout).astype(f32)
        x = x + load(dt_bias_gmem.at[pl.ds(head * K, K)], key_layout).astype(f32)
        decay = jnp.exp(gates.log_decay(x, A_log_gmem[head].astype(f32), lower_bound))
        beta = gates.sigmoid(b_gmem[row, head].astype(f32))

        def along_keys(vector):
            return lax.broadcast_in_dim(vector, (config.step_rows, K), (1,))

        for step, start in enumerate(steps):
            if step + config.ahead < len(steps):
                states.append(load_state(steps[step + config.ahead]))
            v_start = 2 * H * K + head * V + start
            v = load(mixed_qkv_gmem.at[row, rows(v_start)], value_layout).astype(f32)
            decayed = states[step].astype(f32) * along_keys(decay)
            state_k = (decayed * along_keys(k)).sum(1)
            state_q = (decayed * along_keys(q)).sum(1)
            u = (v - state_k) * beta
            updated = decayed + lax.broadcast_in_dim(u, decayed.shape, (0,)) * along_keys(k)
            _store(out_gmem.at[row, 0, head, rows(start)], (state_q + u * k_q).astype(out_gmem.dtype))
            _store(pool_gmem.at[slot, head, rows(start), :], updated.astype(pool_gmem.dtype))


def _divide(x, n):
    """(x // n, x % n) of a natural int32, in int32 under 64-bit mode too."""
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def _store(ref, value):
    """Registers to global memory. JAX 0.12 refuses plain stores of these layouts; 0.11 has no others."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


@functools.partial(jax.jit, static_argnames=("sizes", "scale", "use_qk_l2norm", "lower_bound", "out_dtype", "config"))
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
    scale,
    use_qk_l2norm,
    lower_bound,
    out_dtype,
    config: Config | None = None,
):
    """`kda_jax.packed_decode` after its contract: `(out, pool)`, with None for a Ref, which is updated in place."""
    B, HV, K, V = sizes.B, sizes.HV, sizes.K, sizes.V
    assert_operands(sizes, mixed_qkv, a, b, A_log, dt_bias, pool, slots, sources)
    config = config or choose_config(sizes, pool.dtype)
    chex.assert_is_divisible(V, config.tile_rows)
    chex.assert_is_divisible(K, config.lanes * config.vector)

    operands = inference_only((mixed_qkv, a, b, A_log, dt_bias))
    indices = (slots,) if sources is None else (slots, sources)
    if is_ref(pool):
        indices = (ref_must_be_mapped(pool, *indices, *operands), *indices[1:])
        state = pool[...]  # the Ref's own buffer: nothing is copied inside jit
    else:
        state = pool_as_mapped(inference_only(pool), *indices, *operands)
    ref = jax.new_ref(unfused(state))
    body = functools.partial(
        _body, sizes=sizes, config=config, scale=scale, use_qk_l2norm=use_qk_l2norm, lower_bound=lower_bound
    )
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, 1, HV, V), out_dtype),
        grid=(B * HV * (V // config.tile_rows),),
        grid_names=("block",),
        kernel_name="kda_packed_decode",  # what profilers show
        # No automatic barriers: each lane stores exactly the elements of the pool that it loaded, and reads nothing
        # else that is written.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*operands, *indices, ref)
    state = unfused(jax.freeze(ref))
    if is_ref(pool):
        pool[...] = state
        return out, None
    return out, state
