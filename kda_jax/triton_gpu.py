"""The op as a Triton kernel through jax-triton, for what Mosaic GPU does not cover: any K up to 256, any V, older GPUs.

The kernel is in triton_kernel.py; here are its tile and its launch, by either of jax-triton's calling conventions.
"""

import functools
import inspect
from dataclasses import dataclass

import jax
import jax_triton

from kda_contracts import Sizes
from kda_jax.gates import FLOAT32_MAX, NORM_EPS
from kda_jax.invariants import assert_operands
from kda_jax.slots import is_ref
from kda_jax.transforms import inference_only, loop_over_mapped, refuse_vmap_of_ref, unfused
from kda_jax.triton_kernel import kda_packed_decode, kda_packed_decode_aliased

MAX_K = 256
MAX_GRID = 2**31 - 1
REFS = "out_type" in inspect.signature(jax_triton.triton_call).parameters  # jax-triton 0.4: Refs, mutated in place


@dataclass(frozen=True)
class Config:
    """`tile_rows` V rows a program, a power of two, on `num_warps` warps."""

    tile_rows: int
    num_warps: int

    def __post_init__(self):
        for name in ("tile_rows", "num_warps"):
            if (size := getattr(self, name)) < 1 or size & (size - 1):
                raise ValueError(f"self.{name}={size} must be a power of two")


def unsupported(sizes: Sizes) -> str | None:
    """Why this kernel cannot run these sizes, or None."""
    for letter in ("B", "H", "HV", "K", "V", "S"):
        if not isinstance(getattr(sizes, letter), int):
            return f"{letter} is symbolic, and a kernel's grid needs a number"
    if sizes.V == 0:
        return "V=0"
    if sizes.K > MAX_K:
        return f"K={sizes.K} is above {MAX_K}"
    if sizes.B * sizes.HV * sizes.V > MAX_GRID:
        return f"B={sizes.B}, HV={sizes.HV}, V={sizes.V} exceed the {MAX_GRID} blocks of a grid"
    return None


def choose_config(sizes: Sizes) -> Config:
    """One warp a tile, so that the order of a row's sums follows from K alone; small tiles until they fill the GPU.

    H200, K = V = 128, float32, kernel us with tiles of 4, 8, 16 rows: 3.36, 3.65, 4.19 at B*HV = 32; 5.70, 5.18, 5.73
    at 96; 9.06, 8.22, 8.13 at 192. At 8192 the share of the in-place multiply is 0.94 (8), 0.95 (16), 0.92 (32).
    """
    states = sizes.B * sizes.HV
    wanted = 4 if states < 64 else 8 if states < 160 else 16
    return Config(tile_rows=min(wanted, _power_of_two(sizes.V)), num_warps=1)


def _power_of_two(n):
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _call(operands, pool, out_type, *, grid, num_warps, **constants):
    """(out, pool) for an array pool: the one place where jax-triton's versions differ."""
    options = dict(grid=grid, num_warps=num_warps, num_stages=1, **constants)
    if REFS:
        ref = jax.new_ref(pool)
        out = jax_triton.triton_call(*operands, ref, kernel=kda_packed_decode, out_type=out_type, **options)
        return out, jax.freeze(ref)
    return jax_triton.triton_call(
        *operands,
        pool,
        kernel=kda_packed_decode_aliased,
        out_shape=(out_type, jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        input_output_aliases={len(operands): 1},
        **options,
    )


@functools.partial(jax.jit, static_argnames=("sizes", "scale", "use_qk_l2norm", "lower_bound", "out_dtype", "config"))
def kda_packed_decode_triton(
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
    B, H, HV, K, V, S = sizes.B, sizes.H, sizes.HV, sizes.K, sizes.V, sizes.S
    assert_operands(sizes, mixed_qkv, a, b, A_log, dt_bias, pool, slots, sources)
    config = config or choose_config(sizes)
    call = functools.partial(
        _call,
        out_type=jax.ShapeDtypeStruct((B, 1, HV, V), out_dtype),
        grid=(B * HV * -(-V // config.tile_rows),),
        num_warps=config.num_warps,
        S=S,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BK=_power_of_two(K),
        BV=config.tile_rows,
        scale=scale,
        lower_bound=lower_bound,
        use_qk_l2norm=use_qk_l2norm,
        has_sources=sources is not None,
        largest=FLOAT32_MAX,
        epsilon=NORM_EPS,
    )
    operands = inference_only((mixed_qkv, a, b, A_log, dt_bias))
    indices = (slots, slots if sources is None else sources)
    if is_ref(pool):
        refuse_vmap_of_ref(pool, *indices, *operands)
        out, state = call(
            (*operands, *indices), unfused(pool[...])
        )  # the Ref's own buffer: nothing is copied inside jit
        pool[...] = unfused(state)
        return out, None
    one = loop_over_mapped(lambda pool, *rest: call(rest, pool))
    out, state = one(unfused(inference_only(pool)), *operands, *indices)
    return out, unfused(state)
