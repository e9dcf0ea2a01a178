"""Decode as a Triton kernel through jax-triton: any K up to 256, any V, older GPUs.

The kernel is in decode_triton_kernel.py. Here are its tile and its launch, by either of
jax-triton's two calling conventions.
"""

import dataclasses
import functools
import inspect
import math
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kda_contracts import Sizes
from kda_jax.call import Operands, Static, implementation
from kda_jax.decode_triton_kernel import kda_update, kda_update_aliased
from kda_jax.gates import FLOAT32_MAX, NORM_EPS
from kda_jax.pools import closed, is_ref
from kda_jax.sequences import owners, positions
from kda_jax.transforms import inference_only, loop_over_mapped, refuse_vmap_of_ref, unfused

_cache_dir = os.environ.get("TRITON_CACHE_DIR")
try:
    import jax_triton
finally:
    # jax-triton 0.3.1 clears TRITON_CACHE_DIR, which breaks other users of Triton, such as PyTorch.
    if _cache_dir is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = _cache_dir

MAX_K = 256
MAX_GRID = 2**31 - 1
CAPABILITIES = (8.0, math.inf)  # compute capabilities of the GPUs that run it, from and to
# jax-triton 0.4 takes Refs and mutates them in place.
REFS = "out_type" in inspect.signature(jax_triton.triton_call).parameters


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
    if sizes.V == 0:
        return "V=0"
    if sizes.K > MAX_K:
        return f"K={sizes.K} is above {MAX_K}"
    rows = sizes.B if sizes.N is None else sizes.N
    if rows * sizes.HV * sizes.V > MAX_GRID:
        return f"B={rows}, HV={sizes.HV}, V={sizes.V} exceed the {MAX_GRID} blocks of a grid"
    return None


def choose_config(sizes: Sizes) -> Config:
    """One warp a tile, so that the order of a row's sums follows from K alone.

    Tiles are small until they fill the GPU. H200, K = V = 128, float32, kernel us with tiles of 4,
    8, 16 rows: 3.36, 3.65, 4.19 at B*HV = 32; 5.70, 5.18, 5.73 at 96; 9.06, 8.22, 8.13 at 192. At
    8192 the share of the in-place multiply is 0.94 (8), 0.95 (16), 0.92 (32).
    """
    states = (sizes.B if sizes.N is None else sizes.N) * sizes.HV
    wanted = 4 if states < 64 else 8 if states < 160 else 16
    return Config(tile_rows=min(wanted, _power_of_two(sizes.V)), num_warps=1)


def _power_of_two(n):
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _call(operands, pool, out_types, *, written, grid, num_warps, **constants):
    """(out, states, pool) for an array pool: the one place where jax-triton's versions differ."""
    options = dict(grid=grid, num_warps=num_warps, num_stages=1, **constants)
    if not written:
        results = {"out_type" if REFS else "out_shape": out_types}
        return *jax_triton.triton_call(
            *operands, pool, kernel=kda_update, **results, **options
        ), pool
    if REFS:
        ref = jax.new_ref(pool)
        out, states = jax_triton.triton_call(
            *operands, ref, kernel=kda_update, out_type=out_types, **options
        )
        return out, states, jax.freeze(ref)
    return jax_triton.triton_call(
        *operands,
        pool,
        kernel=kda_update_aliased,
        out_shape=(*out_types, jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        input_output_aliases={len(operands): len(out_types)},
        **options,
    )


def _launch(operands: Operands, *, static: Static, config: Config | None = None):
    """`(out [B, T, HV, V], pool, intermediate [B, T, HV, V, K] or None)`; None for a Ref."""
    operands = _without_the_rest(operands)
    sizes, pool, slots = static.sizes, operands.pool, operands.slots
    HV, K, V = sizes.HV, sizes.K, sizes.V
    floats = tuple(getattr(operands, x) for x in ("q", "k", "v", "a", "b", "A_log", "dt_bias"))
    indices = (slots, operands.sources, operands.cu_seqlens, operands.writes)
    _, k_start, v_start = static.columns
    written = static.update_state or operands.writes is not None
    config = config or choose_config(sizes)
    out_shape = (sizes.B, sizes.T, HV, V)
    out_type = jax.ShapeDtypeStruct(out_shape, static.out_dtype)
    states_shape = (*out_shape, K) if static.intermediate else (1,)
    call = functools.partial(
        _call,
        out_types=(out_type, jax.ShapeDtypeStruct(states_shape, pool.dtype)),
        written=written,
        grid=(slots.shape[0] * HV * -(-V // config.tile_rows),),
        num_warps=config.num_warps,
        S=sizes.S,
        N=sizes.N,
        T=sizes.T,
        H=sizes.H,
        HV=HV,
        K=K,
        V=V,
        BK=_power_of_two(K),
        BV=config.tile_rows,
        q_stride=math.prod(operands.q.shape[2:]),
        v_stride=math.prod(operands.v.shape[2:]),
        k_start=k_start,
        v_start=v_start,
        **vars(static.maths),
        has_sources=operands.sources is not None,
        varlen=operands.cu_seqlens is not None,
        has_writes=operands.writes is not None,
        update_state=static.update_state,
        intermediate=static.intermediate,
        largest=FLOAT32_MAX,
        epsilon=NORM_EPS,
    )
    # An index array that is None is not looked at.
    arrays = unfused((*inference_only(floats), *(slots if x is None else x for x in indices)))
    if is_ref(pool):
        if written:
            refuse_vmap_of_ref(pool, *arrays)
        # The Ref's own buffer: nothing is copied inside jit.
        out, states, state = unfused(call(arrays, unfused(pool[...])))
    else:
        one = loop_over_mapped(lambda pool, *rest: call(rest, pool))
        out, states, state = unfused(one(unfused(inference_only(pool)), *arrays))
    state = closed(pool, state, written=written)
    return out, state, states if static.intermediate else None


def _without_the_rest(operands):
    """Tokens behind `lengths` as tokens that change no state; a sequence of none is padded."""
    lengths = operands.lengths
    if lengths is None:
        return operands
    T = operands.b.shape[1]
    if operands.cu_seqlens is None:
        counted = jnp.arange(T, dtype=jnp.int32)[None] < lengths[:, None]
    else:
        owner = owners(operands.cu_seqlens, T)
        counted = (positions(operands.cu_seqlens, owner) < jnp.append(lengths, 0)[owner])[None]
    changed: dict[str, Any] = {
        name: jnp.where(counted.reshape(*counted.shape, *(1,) * (x.ndim - 2)), x, 0)
        for name, x in vars(operands).items()
        if name in ("q", "k", "v", "a", "b")
    }
    changed["slots"] = jnp.where(lengths > 0, operands.slots, -1)
    return dataclasses.replace(operands, lengths=None, **changed)


kda_packed_decode_triton = implementation(_launch, "kda_packed_decode_triton")
kda_update_triton = implementation(_launch, "kda_update_triton")
