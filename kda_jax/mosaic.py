"""What the Mosaic kernels share."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

WARPS = 4  # of a warpgroup
WARP_LANES = 32


def divide(x, n):
    """(x // n, x % n) of a natural int32, in int32 under 64-bit mode too."""
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def to_memory(ref, value):
    """Stores registers. JAX 0.12 refuses plain stores of these layouts; 0.11 has no others."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def power_below(n):
    """The largest power of two that is not above n, and 1 at the least."""
    return 1 << max(0, n.bit_length() - 1)


def of_rows(layout, rank):
    """The layout of a number for each row of such arrays of `rank` dimensions."""
    for axis in reversed(range(1, rank)):
        layout = layout.reduce(axis)
    return layout


def a_token_in_each_warp(rows):
    """The layout of `[WARPS, rows]`, a token in each warp."""
    lanes = math.gcd(rows, WARP_LANES)
    copies = () if lanes == WARP_LANES else (plgpu.Replicated(WARP_LANES // lanes),)
    return plgpu.Layout.TILED(plgpu.Tiling(((WARPS, lanes), (1,))), (-3,), (*copies, -2), -1)
