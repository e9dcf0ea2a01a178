"""GPU times of an op as a decode loop runs it: several layers in one jitted scan, pools donated, L2 cold."""

import functools
import glob
import statistics
import tempfile
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

COLD_BYTES = 200e6  # live bytes that pass between two uses of the same memory: over three times the H200's L2
MAX_LAYERS = 96
WALL_RUNS = 5
WALL_REPEATS = 4


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: of its kernels (profiler; median, quartiles), and of a layer by an unprofiled clock."""

    kernel_us: float
    kernel_us_low: float
    kernel_us_high: float
    layer_us: float
    kernels_per_call: float


def layers_for(live_bytes):
    """How many layers of this size rotate, so that each finds its memory out of cache; MAX_LAYERS at the most."""
    return min(MAX_LAYERS, max(2, -int(-COLD_BYTES // live_bytes)))


def gpu_events(run):
    """Runs run() under the profiler: [(kernel name, microseconds)] of the GPU's streams."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        return [
            (event.name, event.duration_ns / 1e3)
            for plane in jax.profiler.ProfileData.from_file(path).planes
            if "GPU" in plane.name
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        ]


def time_layers(op, pools, inputs, steps):
    """Times op(pool, inputs) -> (out, pool) over layers, each with its own pool and inputs, pools donated.

    Both times come from one jitted loop of `steps` steps, whose carry takes the outputs, so that nothing removes or
    copies them: the kernels' from its profile, a layer's from the clock, the loop dispatched again and again.

    Returns `(Times, pools)`: the pools that were passed are consumed, their successors come back.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(carry, inputs):
        def step(_, carry):
            return [op(pool, own) for (_, pool), own in zip(carry, inputs, strict=True)]

        return jax.lax.fori_loop(0, steps, step, carry)

    outs = jax.eval_shape(
        lambda: [op(pool, own)[0] for pool, own in zip(pools, inputs, strict=True)]
    )
    outs = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), outs)
    state = [list(zip(outs, pools, strict=True))]

    def once():
        state[0] = jax.block_until_ready(loop(state[0], inputs))

    once()
    calls = steps * len(pools)
    by_name: dict[str, list[float]] = {}
    for name, microseconds in gpu_events(once):
        by_name.setdefault(name, []).append(microseconds)
    # A kernel that runs less than once a call belongs to the loop: its counter, its copies of the results.
    own = {name: times for name, times in by_name.items() if len(times) >= calls}
    main = max(own, key=lambda name: sum(own[name]))
    low, middle, high = statistics.quantiles(own[main], n=4)
    others = sum(
        statistics.median(times) * len(times) / calls for name, times in own.items() if name != main
    )
    seconds = []
    for _ in range(WALL_RUNS):
        start = time.perf_counter()
        for _ in range(WALL_REPEATS):  # not waited for: the host keeps ahead of the GPU
            state[0] = loop(state[0], inputs)
        jax.block_until_ready(state[0])
        seconds.append((time.perf_counter() - start) / WALL_REPEATS)
    times = Times(
        kernel_us=middle + others,
        kernel_us_low=low + others,
        kernel_us_high=high + others,
        layer_us=statistics.median(seconds) / calls * 1e6,
        kernels_per_call=sum(map(len, own.values())) / calls,
    )
    return times, [pool for _, pool in state[0]]
