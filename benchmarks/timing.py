"""GPU times from the profiler: of each kernel by name, and of a whole multi-layer step, L2 kept cold by rotation."""

import functools
import glob
import statistics
import tempfile
from dataclasses import dataclass

import jax

COLD_BYTES = 300e6  # live bytes that pass between two uses of one pool: six times the H200's L2
MAX_LAYERS = 64


@dataclass(frozen=True)
class Times:
    """Microseconds of one layer: of its kernels alone, and of the whole replay (the gaps between kernels included)."""

    kernel: float
    kernel_low: float
    kernel_high: float
    layer: float
    kernels_per_layer: float


def layers_for(live_bytes):
    """How many layers rotate, so that each finds its pool out of cache."""
    return int(min(MAX_LAYERS, max(4, -(-COLD_BYTES // live_bytes))))


def gpu_events(run):
    """Runs run() under the profiler: [(kernel name, start us, end us)] of the GPU's streams, in order of start."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        events = [
            (event.name, event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3)
            for plane in data.planes
            if "GPU" in plane.name
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        ]
    return sorted(events, key=lambda event: event[1])


def time_layers(op, pools, inputs, steps=20):
    """Times op(pool, inputs) -> (out, pool) as a decode loop runs it: one jitted scan, all layers in it, pools donated.

    Returns `Times`; the pools are consumed.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(pools, inputs):
        def step(pools, _):
            done = [op(pool, x) for pool, x in zip(pools, inputs, strict=True)]
            return tuple(pool for _, pool in done), [out.ravel()[:1] for out, _ in done]

        return jax.lax.scan(step, pools, None, length=steps)

    pools = tuple(pools)
    compiled = loop.lower(pools, inputs).compile()
    for _ in range(2):
        pools, _ = jax.block_until_ready(compiled(pools, inputs))
    box = [pools]

    def once():
        box[0], _ = jax.block_until_ready(compiled(box[0], inputs))

    events = gpu_events(once)
    by_name = {}
    for name, start, end in events:
        by_name.setdefault(name, []).append(end - start)
    calls = steps * len(pools)
    # A kernel belongs to the op if it runs once a call or more: the loop's own counters and copies do not.
    own = {name: times for name, times in by_name.items() if len(times) >= calls and "emcpy" not in name}
    main = max(own, key=lambda name: sum(own[name]))
    quartiles = statistics.quantiles(own[main], n=4)
    others = sum(statistics.median(times) * len(times) / calls for name, times in own.items() if name != main)
    return Times(
        kernel=quartiles[1] + others,
        kernel_low=quartiles[0] + others,
        kernel_high=quartiles[2] + others,
        layer=(events[-1][2] - events[0][1]) / calls,
        kernels_per_layer=sum(map(len, own.values())) / calls,
    )
