"""The op as a Pallas Mosaic GPU kernel for NVIDIA GPUs of compute capability 9.0 and newer.

One warpgroup (four warps) owns one tile of V rows of one (row, value head): it loads the tile from global memory
straight into registers, decays it, takes both dot products over K, and stores it back over itself.

    [tile_rows, K] tile:   warp w, then lane group, walks the V rows
                           `lanes` lanes x `vector` elements span K, 16 bytes each where K allows

Both dot products are taken before the rank-1 update, so that they can overlap: out = S' q + u (k . q).
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
from kda_jax.transforms import inference_only, pool_as_mapped, ref_must_be_mapped
from kda_jax.slots import is_ref

WARPS = 4
WARP_LANES = 32
MAX_K = 256
ROW_STEP = 16  # the tallest group of V rows that one pass of the four warps covers, see Config
MAX_GRID_YZ = 65_535


@dataclass(frozen=True)
class Config:
    """How a state tile is spread over a warpgroup.

    `lanes` and `vector` set the order of a row's sums, so they follow from K and the pool's dtype alone; `tile_rows`
    may follow the batch: a row's bits do not depend on it.
    """

    tile_rows: int
    lanes: int
    vector: int

    def __post_init__(self):
        if self.lanes not in (8, 16, 32):
            raise ValueError(f"{self.lanes=} must be 8, 16 or 32")
        if self.vector not in (4, 8):
            raise ValueError(f"{self.vector=} must be 4 or 8")
        if self.tile_rows < self.rows_per_pass or self.tile_rows % self.rows_per_pass:
            raise ValueError(f"{self.tile_rows=} must be a multiple of {self.rows_per_pass=}")

    @property
    def rows_per_pass(self):
        return WARPS * (WARP_LANES // self.lanes)

    @property
    def layout(self):
        """The tile's layout; canonical, so without the lane level where one row takes the whole warp."""
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
    if sizes.V % ROW_STEP:
        return f"V={sizes.V} is not a multiple of {ROW_STEP}"
    if max(sizes.HV, sizes.V // ROW_STEP) > MAX_GRID_YZ:
        return f"HV={sizes.HV}, V={sizes.V} exceed the {MAX_GRID_YZ} blocks of a grid axis"
    return None


def choose_config(sizes: Sizes, pool_dtype) -> Config:
    """The tile for these sizes: 16-byte vectors along K where K allows; more V rows a warpgroup once the GPU is full."""
    power_of_two = math.gcd(sizes.K, MAX_K)  # the widest power of two that divides K
    vector = min(16 // jnp.dtype(pool_dtype).itemsize, power_of_two // 8)
    lanes = min(WARP_LANES, power_of_two // vector)
    # H200, K = V = 128, float32: at B*HV = 256 16 rows reach 0.93 of the ceiling and 32 reach 0.87; at 8192 0.91 and 0.94.
    wanted = 16 if sizes.B * sizes.HV < 1024 else 32
    return Config(tile_rows=wanted if sizes.V % wanted == 0 else ROW_STEP, lanes=lanes, vector=vector)


def _body(
    mixed_qkv_gmem,  # [B, 2*H*K + HV*V]
    a_gmem,  # [B, HV*K]
    b_gmem,  # [B, HV]
    A_log_gmem,  # [HV]
    dt_bias_gmem,  # [HV*K]
    slots_gmem,  # [B] int32
    pool_gmem,  # [S, HV, V, K], read and written
    out_gmem,  # [B, 1, HV, V]
    *,
    sizes,
    config,
    scale,
    use_qk_l2norm,
    lower_bound,
):
    H, HV, K, V = sizes.H, sizes.HV, sizes.K, sizes.V
    tile_layout = config.layout
    key_layout, value_layout = tile_layout.reduce(0), tile_layout.reduce(1)
    row, head = lax.axis_index("row"), lax.axis_index("head")
    tile = pl.ds(lax.axis_index("tile") * config.tile_rows, config.tile_rows)
    slot = slots_gmem[row]
    live = (slot >= 0) & (slot < sizes.S)

    def load(ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    @pl.when(jnp.logical_not(live))
    def _():
        zeros = jnp.zeros((config.tile_rows,), out_gmem.dtype)
        _store(out_gmem.at[row, 0, head, tile], plgpu.layout_cast(zeros, value_layout))

    @pl.when(live)
    def _():
        f32 = jnp.float32
        state = load(pool_gmem.at[slot, head, tile, :], tile_layout)  # first: everything below hides its latency
        group = head // (HV // H)
        q = load(mixed_qkv_gmem.at[row, pl.ds(group * K, K)], key_layout).astype(f32)
        k = load(mixed_qkv_gmem.at[row, pl.ds(H * K + group * K, K)], key_layout).astype(f32)
        v_start = 2 * H * K + head * V + lax.axis_index("tile") * config.tile_rows
        v = load(mixed_qkv_gmem.at[row, pl.ds(v_start, config.tile_rows)], value_layout).astype(f32)
        if use_qk_l2norm:
            q = q * gates.inverse_norm((q * q).sum())
            k = k * gates.inverse_norm((k * k).sum())
        q = q * scale
        x = load(a_gmem.at[row, pl.ds(head * K, K)], key_layout).astype(f32)
        x = x + load(dt_bias_gmem.at[pl.ds(head * K, K)], key_layout).astype(f32)
        decay = jnp.exp(gates.log_decay(x, A_log_gmem[head].astype(f32), lower_bound))
        beta = gates.sigmoid(b_gmem[row, head].astype(f32))

        def along_keys(vector):
            return lax.broadcast_in_dim(vector, state.shape, (1,))

        decayed = state.astype(f32) * along_keys(decay)
        state_k = (decayed * along_keys(k)).sum(1)
        state_q = (decayed * along_keys(q)).sum(1)
        u = (v - state_k) * beta
        updated = decayed + lax.broadcast_in_dim(u, state.shape, (0,)) * along_keys(k)
        _store(out_gmem.at[row, 0, head, tile], (state_q + u * (k * q).sum()).astype(out_gmem.dtype))
        _store(pool_gmem.at[slot, head, tile, :], updated.astype(pool_gmem.dtype))


def _store(ref, value):
    """Registers to global memory: JAX 0.12 has plgpu.store and refuses plain stores of these layouts; 0.11 has no other."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


@functools.partial(
    jax.jit, static_argnames=("sizes", "scale", "use_qk_l2norm", "lower_bound", "out_dtype", "config")
)
def kda_packed_decode_mosaic_gpu(
    mixed_qkv,  # [B, 2*H*K + HV*V]
    a,  # [B, HV*K]
    b,  # [B, HV]
    A_log,  # [HV]
    dt_bias,  # [HV*K]
    pool,  # [S, HV, V, K], an array or a Ref
    slots,  # [B] int32
    *,
    sizes: Sizes,
    scale,
    use_qk_l2norm,
    lower_bound,
    out_dtype,
    config: Config | None = None,
):
    """`kda_jax.packed_decode` after its contract: `(out, pool)`, with None for a Ref, which is updated in place."""
    B, H, HV, K, V, S = sizes.B, sizes.H, sizes.HV, sizes.K, sizes.V, sizes.S
    chex.assert_shape([mixed_qkv, a, b], [(B, 2 * H * K + HV * V), (B, HV * K), (B, HV)])
    chex.assert_shape([A_log, dt_bias, slots], [(HV,), (HV * K,), (B,)])
    chex.assert_shape(pool, (S, HV, V, K))
    chex.assert_type(slots, jnp.int32)
    config = config or choose_config(sizes, pool.dtype)
    chex.assert_is_divisible(V, config.tile_rows)
    chex.assert_is_divisible(K, config.lanes * config.vector)

    operands = inference_only((mixed_qkv, a, b, A_log, dt_bias))
    if is_ref(pool):
        ref, slots = pool, ref_must_be_mapped(pool, slots, *operands)
    else:
        ref = jax.new_ref(pool_as_mapped(inference_only(pool), slots, *operands))
    body = functools.partial(
        _body, sizes=sizes, config=config, scale=scale, use_qk_l2norm=use_qk_l2norm, lower_bound=lower_bound
    )
    body.__name__ = "kda_packed_decode"  # what profilers show
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, 1, HV, V), out_dtype),
        grid=(V // config.tile_rows, HV, B),  # the last axis is CUDA's x, the only one beyond 65,535
        grid_names=("tile", "head", "row"),
        # No automatic barriers: each lane stores exactly the elements of the pool that it loaded, and reads nothing else
        # that is written.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*operands, slots, ref)
    return out, None if is_ref(pool) else jax.freeze(ref)
