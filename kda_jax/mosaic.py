"""What the Mosaic kernels share."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def divide(x, n):
    """(x // n, x % n) of a natural int32, in int32 under 64-bit mode too."""
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def to_memory(ref, value):
    """Stores registers. JAX 0.12 refuses plain stores of these layouts; 0.11 has no others."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
