"""GPU times of an op as a decode loop runs it: several layers in one jitted loop, L2 cold.

Elsewhere only toy sizes run, to see that a benchmark works: their times mean nothing.
"""

import functools
import glob
import statistics
import tempfile
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# Live bytes that pass between two uses of the same memory: over three times the H200's L2.
COLD_BYTES = 200e6
MAX_LAYERS = 96
WALL_RUNS = 5
WALL_REPEATS = 4


@dataclass(frozen=True)
class Times:
    """Microseconds of one call.

    `kernel_us` is that of its kernels, by the profiler (median, with its quartiles); `layer_us`
    that of a layer, by the clock and without the profiler.
    """

    kernel_us: float
    kernel_us_low: float
    kernel_us_high: float
    layer_us: float
    kernels_per_call: float


def layers_for(live_bytes):
    """How many layers of this size rotate, so that each finds its memory out of cache.

    MAX_LAYERS at the most, and two for a toy run on another backend.
    """
    if jax.default_backend() != "gpu":
        return 2
    return min(MAX_LAYERS, max(2, -int(-COLD_BYTES // live_bytes)))


def steps_for(layers):
    """How often a loop over so many layers goes round."""
    return 2 if jax.default_backend() != "gpu" else max(16, min(40, 1500 // layers))


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
    """`(Times, pools)` of op(pool, inputs) -> (out, pool) over layers, each with its own of both.

    Both times come from one jitted loop of `steps` steps, whose carry takes the outputs, so that
    nothing removes or copies them: the kernels' from its profile, a layer's from the clock, the
    loop dispatched again and again. The pools are donated; their successors come back.
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
    seconds = []
    for _ in range(WALL_RUNS):
        start = time.perf_counter()
        for _ in range(WALL_REPEATS):  # not waited for: the host keeps ahead of the GPU
            state[0] = loop(state[0], inputs)
        jax.block_until_ready(state[0])
        seconds.append((time.perf_counter() - start) / WALL_REPEATS)
    layer_us = statistics.median(seconds) / calls * 1e6
    if jax.default_backend() != "gpu":
        kernels = (layer_us, layer_us, layer_us, 0.0)
    else:
        kernels = kernel_times(gpu_events(once), calls)
    return Times(*kernels[:3], layer_us, kernels[3]), [pool for _, pool in state[0]]


def kernel_times(events, calls):
    """(median, lower quartile, upper quartile, kernels a call) of the kernels of one call.

    events: [(kernel, microseconds)] of so many calls.
    """
    by_name: dict[str, list[float]] = {}
    for name, microseconds in events:
        by_name.setdefault(name, []).append(microseconds)
    # A kernel that runs less than once a call is the loop's: its counter, its copies of results.
    own = {name: times for name, times in by_name.items() if len(times) >= calls}
    main = max(own, key=lambda name: sum(own[name]))
    low, middle, high = statistics.quantiles(own[main], n=4)
    others = sum(
        statistics.median(times) * len(times) / calls for name, times in own.items() if name != main
    )
    a_call = sum(map(len, own.values())) / calls
    return middle + others, low + others, high + others, a_call
