"""Decode as a Pallas Mosaic GPU kernel, for NVIDIA GPUs of compute capability 9.0 and newer.

One warpgroup (four warps) owns one tile of V rows of one (row, value head). It walks the tile in
steps. A step's state goes from global memory straight into registers, is decayed, gives both dot
products over K, and is stored back over itself, while the next steps' loads are under way.

    K = [repeats, 4 chunks, lanes / 4, vector]: `lanes` lanes x `vector` elements, 16 bytes each
    where K allows. A row's sum runs over vector, repeats, chunks, lanes / 4, in this order,
    whichever lane holds the terms.

Both dot products are taken before the rank-1 update, so that they overlap: out = S' q + u (k . q).
Memory bounds one token. Pieces of 4 KB in address order are fastest: 0.96 of an in-place multiply
over the same bytes; pieces of 16 KB reach 0.92; with the batch as the fastest grid axis 0.89 (H200,
B = 256, HV = 32, K = V = 128, float32, a kernel that only scales the state).

Over several tokens the whole tile stays in registers, rounded to the pool's dtype after each token,
as in that many one-token calls. Arithmetic bounds that, so the gates of four tokens are computed at
once, a warp each, and wait in shared memory with the values. A lane takes all four chunks of a
`fold`ed row, which leaves a quarter of the shuffles.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kda_contracts import Sizes
from kda_jax.call import Operands, Static, implementation
from kda_jax.decode_mosaic_gpu_kernel import CHUNKS, body
from kda_jax.mosaic import WARP_LANES, WARPS, power_below
from kda_jax.pools import closed, is_ref
from kda_jax.transforms import inference_only, pool_as_mapped, ref_must_be_mapped, unfused

MAX_K = 256
V_MULTIPLE = 16  # V rows that one pass of the four warps covers at most, unless it folds
STEP_BYTES = 4096  # of state that a warpgroup loads at once
MAX_GRID = 2**31 - 1
CAPABILITIES = (9.0, math.inf)  # compute capabilities of the GPUs that run it, from and to


@dataclass(frozen=True)
class Config:
    """How a state tile is spread over a warpgroup.

    A warpgroup owns `tile_rows` V rows and walks them `step_rows` at a time, `ahead` steps under
    way at once. `lanes` and `vector` set the order of a row's sums, so they follow from K and the
    pool's dtype alone; the rest may follow the batch, since bits do not depend on it. With `fold` a
    lane holds all chunks of its row, so that `lanes` lanes serve CHUNKS rows. `single`: of the same
    tiles, how a token that is alone in its sequence takes them.
    """

    tile_rows: int
    step_rows: int
    lanes: int
    vector: int
    ahead: int = 2
    fold: bool = False
    single: "Config | None" = None

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
        """`[lanes / CHUNKS, vector]`.

        The lanes are in two axes where layout inference (JAX 0.11, 0.12) fails on 8 x 8.
        """
        lanes = self.lanes // CHUNKS
        return (2, 4, 8) if lanes == self.vector == 8 else (lanes, self.vector)

    @property
    def piece_shape(self):
        """What the lanes of a row hold together: one of its chunks, or CHUNKS of them."""
        return self.chunk_shape if self.fold else (CHUNKS, *self.chunk_shape)

    @property
    def layout(self):
        """That of a step's piece, `[rows, *piece_shape]`.

        It is canonical: of one level where a row takes a whole warp.
        """
        rows, piece = self.rows_per_pass // WARPS, self.piece_shape
        if rows == 1:
            return self.token_layout
        rank = 1 + len(piece)
        tiling = plgpu.Tiling(((WARPS * rows, *piece), (rows, *piece)))
        return plgpu.Layout.TILED(tiling, (-2 * rank,), tuple(range(-rank, -1)), -1)

    @property
    def token_layout(self):
        """That of `[WARPS, CHUNKS, *chunk_shape]`: each warp holds its own token, in copies."""
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
    """16-byte vectors along K where K allows, steps of 4 KB, taller tiles once they fill the GPU.

    Over several tokens a step is one pass of the four warps, and `ahead` means nothing: a tile is
    loaded at once.

    H200, K = V = 128, kernel us with tiles of 4, 8 and 16 KB (benchmarks/tuning.py measures them):

        B*HV      32              64              96              128             192
        float32   3.26 3.55 4.45  4.35 4.54 5.25  6.05 5.44 6.05  6.98 6.37 6.94  9.60 9.05 8.74
        bfloat16  2.88 3.31 3.94                  4.35 4.09 4.77  5.54 4.80 5.22

    At B*HV = 8192 two steps ahead are best for float32 (three are 1.1 % slower), and three for
    bfloat16 (two are 1.5 % slower). Four tokens, tiles of 1, 2, 4 and 8 steps: 1024 states, float32
    56.5 45.0 47.1 52.0, bfloat16 48.7 40.5 36.7; 32 states, float32 5.0 4.9 5.6, bfloat16 4.3 4.8
    6.1.
    """
    row_bytes = sizes.K * jnp.dtype(pool_dtype).itemsize
    power_of_two = math.gcd(sizes.K, MAX_K)  # the widest power of two that divides K
    vector = min(16 // jnp.dtype(pool_dtype).itemsize, power_of_two // 8)
    lanes = min(WARP_LANES, power_of_two // vector)
    rows_per_pass = WARPS * WARP_LANES // lanes
    step_rows = rows_per_pass * math.gcd(
        sizes.V // rows_per_pass, power_below(STEP_BYTES // row_bytes // rows_per_pass)
    )
    states = (sizes.B if sizes.N is None else sizes.N) * sizes.HV * sizes.V // 128
    steps = 4 if states >= 160 else 2 if states >= 80 else 1
    wide = jnp.dtype(pool_dtype).itemsize == 4
    one_token = Config(
        tile_rows=step_rows * math.gcd(sizes.V // step_rows, steps),
        step_rows=step_rows,
        lanes=lanes,
        vector=vector,
        ahead=2 if wide else 3,
    )
    if several_tokens:
        fold = (
            2 * lanes * vector >= sizes.K and sizes.V % (CHUNKS * rows_per_pass) == 0
        )  # else a long program
        step_rows = rows_per_pass * (CHUNKS if fold else 1)
        tile_rows = step_rows * math.gcd(sizes.V // step_rows, 2 if wide else steps)
        return Config(
            tile_rows=tile_rows,
            step_rows=step_rows,
            lanes=lanes,
            vector=vector,
            fold=fold,
            single=dataclasses.replace(
                one_token, tile_rows=tile_rows, step_rows=math.gcd(one_token.step_rows, tile_rows)
            ),
        )
    return one_token


def _launch(operands: Operands, *, static: Static, config: Config | None = None):
    """`(out [B, T, HV, V], pool, intermediate [B, T, HV, V, K])`, or None; None for a Ref.

    Over 60 lines, since operands are prepared and results taken apart around one kernel.
    """
    sizes, pool = static.sizes, operands.pool
    arrays: dict[str, Any] = {
        name: inference_only(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in vars(operands).items()
        if x is not None and name not in ("pool", *_unused(static))
    }
    tensors = [name for name in ("q", "k", "v", "a", "b") if name in arrays]
    for name in tensors:
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
    for name in {"q", "k", "a", "dt_bias"} & set(arrays):
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
    shapes = {}
    if static.reads:
        shapes["out"] = jax.ShapeDtypeStruct((tokens, HV, V), static.out_dtype)
    if static.intermediate:
        shapes["intermediate"] = jax.ShapeDtypeStruct((tokens, HV, V, *in_chunks), pool.dtype)
    scratch = {}
    if several_tokens:
        if tokens < WARPS:  # the gates of WARPS tokens are computed at once
            for name in tensors:
                pad = [(0, WARPS - tokens)] + [(0, 0)] * (arrays[name].ndim - 1)
                arrays[name] = jnp.pad(arrays[name], pad)
        scratch["vectors"] = plgpu.SMEM((WARPS, 3, *in_chunks), jnp.float32)  # q, k and the decay
        scratch["numbers"] = plgpu.SMEM((2, WARPS), jnp.float32)  # k . q and beta
        scratch["values"] = plgpu.SMEM((WARPS, config.tile_rows), jnp.float32)
    names = (*arrays, "pool", *shapes, *scratch)

    def block(*refs):
        body(dict(zip(names, refs, strict=True)), static=static, config=config)

    results = plgpu.kernel(
        block,
        out_type=list(shapes.values()),
        grid=(rows * HV * (V // config.tile_rows),),
        grid_names=("block",),
        scratch_types=list(scratch.values()),
        kernel_name=static.op,  # what profilers show
        # No automatic barriers: each lane stores exactly the elements of the pool that it loaded,
        # and reads nothing else of global memory that is written. Shared memory has its barriers
        # in many_tokens.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(*unfused(tuple(arrays.values())), ref)
    state, results = unfused((jax.freeze(ref) if written else state, results))
    results = dict(zip(shapes, results, strict=True))
    state = state.reshape(*state.shape[:3], K)
    shape = (sizes.B, sizes.T, HV, V)
    out, states = results.get("out"), results.get("intermediate")
    out = None if out is None else out.reshape(shape)
    states = None if states is None else states.reshape(*shape, K)
    return out, closed(pool, state, written=written), states


def _unused(static):
    """The operands that the kernel does not read: XLA would make them at every call."""
    gates = ("A_log", "dt_bias") if static.maths.activated else ()
    return gates if static.reads else ("q", *gates)


def _slots_first(arrays):
    return arrays["slots"], *(x for name, x in arrays.items() if name != "slots")


kda_packed_decode_mosaic_gpu = implementation(_launch, "kda_packed_decode_mosaic_gpu")
kda_update_mosaic_gpu = implementation(_launch, "kda_update_mosaic_gpu")
