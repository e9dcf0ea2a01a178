"""What the kernels of whole chunks share: tiles as wgmma reads them, its products, the launch."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_jax.mosaic import divide

CHUNK = 64  # the rows of one wgmma
LEVELS = 6  # halves of 1, 2, 4, .. 32 tokens
LAYOUT = plgpu.Layout.WGMMA
NARROW = jnp.bfloat16


def launch(body, operands, results, scratch, *, blocks, name, warpgroups=1):
    """Runs `body(**refs)` in each of `blocks` blocks; the results in the order of `results`."""
    names = (*operands, *results, *scratch)
    return plgpu.kernel(
        lambda *refs: body(**dict(zip(names, refs, strict=True))),
        out_type=list(results.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        kernel_name=name,  # what profilers show
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )(*operands.values())


def shared(*shape, dtype=NARROW):
    """Shared memory of rows of 128 bytes and more, as wgmma reads it.

    Layout inference would take minutes to find it.
    """
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )


def products(*operands):
    """onto + a @ b in float32 for each `(a, b, onto)`.

    a is in registers or in shared memory, b in shared memory.
    """

    def multiply(refs):
        for ref, (a, b, _) in zip(refs, operands, strict=True):
            plgpu.wgmma(ref, a, b)

    accumulators: Any = tuple(plgpu.ACC.init(onto) for _, _, onto in operands)
    return pl.run_state(multiply)(accumulators)


def zeros(width, rows=CHUNK):
    return plgpu.layout_cast(jnp.zeros((rows, width), jnp.float32), LAYOUT)


def iota(axis, width):
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, width), axis, layout=LAYOUT)


def load(ref, layout=LAYOUT):
    return plgpu.load(ref, layout=layout, optimized=False)


def chunk_lane_and_head(block, lanes, HV):
    """What a block takes; heads fastest: they lie side by side in memory."""
    chunk_and_lane, head = divide(block, HV)
    return *divide(chunk_and_lane, lanes), head


def along(x, width, axis):
    """A number for each row (axis 0) or column (axis 1) of `[CHUNK, width]`, repeated."""
    return lax.broadcast_in_dim(x, (CHUNK, width), (axis,))


def decays_between(index, half):
    """`(first, last)`: the tokens whose log decays part token `index` from its block's middle.

    A pair of tokens of a chunk belongs to the one level `half` at which they lie in the two halves
    of an aligned block of 2 `half` tokens. Of a token in the first half the range is what follows
    it up to the middle, of one in the second what follows the middle, itself included.
    """
    middle = (index & -(2 * half)) + half
    return jnp.minimum(middle, index + 1), jnp.maximum(middle - 1, index)


def pairs_of_level(row, col, half):
    """Which entries of a `[CHUNK, CHUNK]` are of this level's pairs, on either side."""
    return ((row ^ col) >= half) & ((row ^ col) < 2 * half)


def rest_of(x):
    """What bfloat16 leaves of float32 x, in bfloat16: together they have 16 bits."""
    return (x - x.astype(NARROW).astype(jnp.float32)).astype(NARROW)
