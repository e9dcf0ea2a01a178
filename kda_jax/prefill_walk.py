"""A walk over the chunks of a sequence, forwards or back: what both kernels that do so share.

A block takes TILE value columns of one head of one sequence. One warpgroup holds the state in
registers, transposed (`[K, TILE]`), while another copies the chunks ahead into shared memory.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_jax.mosaic import divide, to_memory
from kda_jax.wgmma import launch, load

TILE = 32
STAGES = 3  # chunks in shared memory, the present one included


class Place(NamedTuple):
    """What a block works on."""

    sequence: jax.Array
    lane: jax.Array | int
    head: jax.Array
    columns: pl.Slice


def ends_in_arrays(first, last):
    """`ends` of states in `[sequences, HV, K, V]` float32: the names of operand and result."""

    def tile(refs, name, place):
        return refs[name].at[place.sequence, place.head, :, place.columns]

    def store(refs, place, state):
        to_memory(tile(refs, last, place), state)

    return lambda refs, place: load(tile(refs, first, place)), store


def launch_walk(
    step,
    sources,
    ends,
    operands,
    results,
    fetched,
    scratch,
    *,
    sequences,
    sizes,
    name,
    back=False,
    skip_empty=False,
):
    """Runs `step` over the chunks of every sequence; the results in the order of `results`.

    Args:
      step: `(refs, place, chunk, stage, state) -> state`. It waits for `refs["loaded"].at[stage]`
        before it reads what was fetched, `refs[name + "_s"].at[stage]`, and arrives at
        `refs["used"].at[stage]` behind that.
      sources: `(refs, place, chunk)` to what is fetched of a chunk, by name.
      ends: `(first, last)`: `(refs, place) -> state` where the walk begins, and `(refs, place,
        state)`, which stores it where the walk ends.
      operands: with `chunks`, as in `Plan`.
      fetched: the shape of each part in shared memory, by its operand's name.
      sequences: how many there are.
      back: whether it begins at the last chunk.
      skip_empty: whether a sequence without chunks is passed over; else its state ends as it
        begins.
    """
    HV, tiles = sizes.HV, sizes.V // TILE
    staged = {
        f"{part}_s": plgpu.SMEM((STAGES, *shape), operands[part].dtype)
        for part, shape in fetched.items()
    }
    barriers = dict(
        loaded=plgpu.Barrier(num_arrivals=len(fetched), num_barriers=STAGES),
        used=plgpu.Barrier(num_barriers=STAGES),
    )

    def body(**refs):
        block = lax.axis_index("block")  # tiles fastest: they share all else that is fetched
        sequence_and_head, tile = divide(block, tiles)
        sequence, head = divide(sequence_and_head, HV)
        # Dense: all sequences have the same chunks, each in its own lane.
        one_lane_each = refs["chunks"].shape[0] == 2
        at, lane = (0, sequence) if one_lane_each else (sequence, 0)
        place = Place(sequence, lane, head, pl.ds(tile * TILE, TILE))
        begin = refs["chunks"][at]
        steps = refs["chunks"][at + 1] - begin
        loaded, used = refs["loaded"], refs["used"]

        def at_step(number):
            chunk = begin + steps - 1 - number if back else begin + number
            return chunk, lax.rem(number, jnp.int32(STAGES))

        def fetch(number, _):
            chunk, stage = at_step(number)
            pl.when(number >= STAGES)(lambda: plgpu.barrier_wait(used.at[stage]))
            for part, source in sources(refs, place, chunk).items():
                plgpu.copy_gmem_to_smem(source, refs[part + "_s"].at[stage], loaded.at[stage])

        def walk():
            first, last = ends
            state = lax.fori_loop(
                0,
                steps,
                lambda number, state: step(refs, place, *at_step(number), state),
                first(refs, place),
            )
            last(refs, place, state)
            plgpu.wait_smem_to_gmem(0)

        walking = lax.axis_index("warpgroup") == 0  # the other one fetches
        pl.when(jnp.logical_not(walking))(lambda: lax.fori_loop(0, steps, fetch, None))
        pl.when(walking & (steps > 0) if skip_empty else walking)(walk)

    return launch(
        body,
        operands,
        results,
        staged | scratch | barriers,
        blocks=sequences * HV * tiles,
        name=name,
        warpgroups=2,
    )
