"""How fast packed_decode is: against an in-place multiply over the same bytes, in the same run.

    kda-jax bench [--shapes 8x32,256x32] [--pool-dtype float32] [--ordered] [--output FILE]

A shape is BxHV, with K = V = 128 and H = HV. Each implementation is checked against float64 first.
Then, for each shape, the kernel's own time (profiler) and the time of a layer in a jitted loop of
layers (wall clock); both are medians. Slots and operands are random; layers rotate, so that L2 is
cold. The multiply is of float32 numbers for every pool: XLA's multiply of bfloat16 is slower than
the op itself. `--toy` runs tiny shapes on any backend, and its times mean nothing.
"""

import argparse
import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_contracts import PACKED_DECODE, Sizes
from kda_jax import dispatch
from kda_jax.tools import oracle, records
from kda_jax.tools.synthetic import random_operands
from kda_jax.tools.timing import COLD_BYTES, layers_for, steps_for, time_layers

K = V = 128
# Relative, with the pool's own rounding.
STATE_LIMIT = {"float32": 2e-6, "bfloat16": 2e-3, "float16": 3e-4}
OUT_LIMIT = 4e-3  # with the rounding to bfloat16
GRID = (
    "1x3,1x12,1x32,1x96,4x32,8x4,8x12,8x32,8x96,16x32,32x3,32x12,32x32,64x12,64x32,64x64,128x12,"
    "128x32,128x96,256x12,256x32,256x64,512x32,512x96"
)
TOY = "2x3,5x2"
OPTIONS = dict(use_qk_l2norm_in_kernel=True, lower_bound=None)


def packed_decode(implementation):
    """The op as the timing loop calls it."""

    def op(pool, inputs):
        return kda_jax.packed_decode(
            **inputs, initial_state=pool, implementation=implementation, **OPTIONS
        )

    return op


def multiply(pool, inputs):
    """The ceiling: every live state read once and written once, in address order."""
    return (), pool * jnp.float32(0.999)


def check(op, HV, pool_dtype):
    """Ends the run unless the op meets the oracle on three rows of this width."""
    x = random_operands(Sizes(B=3, H=HV, HV=HV, K=K, V=V, S=5), pool_dtype=pool_dtype)
    expected_out, expected = oracle.packed_decode(**x, **OPTIONS)
    out, state = jax.jit(op)(x.pop("initial_state"), x)
    oracle.must_be_near("packed_decode, out", out, expected_out, OUT_LIMIT)
    oracle.must_be_near("packed_decode, pool", state, expected, STATE_LIMIT[pool_dtype])


def layers_of(B, HV, pool_dtype, layers, ordered=False):
    """(pools, inputs) of as many layers, each with operands and random slots of its own."""
    S = B + max(B // 4, 3)
    sizes = Sizes(B=B, H=HV, HV=HV, K=K, V=V, S=1)
    pools, inputs = [], []
    for layer in range(layers):
        x = random_operands(sizes, seed=layer)
        slots = np.random.default_rng(layer).permutation(S)[:B].astype(np.int32)
        x["ssm_state_indices"] = np.sort(slots) if ordered else slots
        del x["initial_state"]
        inputs.append({name: jnp.asarray(array) for name, array in x.items()})
        pools.append(jax.random.normal(jax.random.key(layer), (S, HV, V, K), jnp.dtype(pool_dtype)))
    return pools, inputs


def time_multiply(shape, layers):
    """Times of an in-place multiply of arrays of this shape, as many as there are layers."""
    arrays = [jax.random.normal(jax.random.key(i), shape) for i in range(layers)]
    return time_layers(multiply, arrays, [None] * layers, steps_for(layers))[0]


def measure(B, HV, pool_dtype, implementations, ordered=False) -> dict:
    """One row of the results: the ceiling and each implementation at one shape."""
    itemsize = jnp.dtype(pool_dtype).itemsize
    live_bytes = 2 * B * HV * V * K * itemsize
    layers = layers_for(live_bytes // 2)
    ceiling = time_multiply((B, HV, V, K * itemsize // 4), layers)
    row: dict = {"B": B, "HV": HV, "layers": layers, "bytes": live_bytes}
    row |= {
        "cold": layers * live_bytes / 2 >= COLD_BYTES / 2,
        "ceiling": _entry(ceiling, live_bytes),
    }
    pools, inputs = layers_of(B, HV, pool_dtype, layers, ordered)
    for name in implementations:
        times, pools = time_layers(packed_decode(name), pools, inputs, steps_for(layers))
        row[name] = _entry(times, live_bytes) | {
            "share_of_ceiling": ceiling.kernel_us / times.kernel_us,
            "share_of_ceiling_layer": ceiling.layer_us / times.layer_us,
        }
    return row


def _entry(times, live_bytes):
    return dataclasses.asdict(times) | {"bytes_per_second": live_bytes / times.kernel_us * 1e6}


def compile_seconds(implementation: Any = "auto"):
    """{layers: seconds to lower and compile a step over a list of that many pools}; K3 has 69."""
    seconds = {}
    for layers in (1, 69):
        # Another batch for each: nothing is found in a cache.
        sizes = Sizes(B=1 + layers, H=12, HV=12, K=K, V=V, S=100)
        x = random_operands(sizes)
        pool = jax.ShapeDtypeStruct(x.pop("initial_state").shape, jnp.float32)

        def step(pools, x):
            return [
                kda_jax.packed_decode(
                    **x, initial_state=pool, implementation=implementation, **OPTIONS
                )
                for pool in pools
            ]

        start = time.perf_counter()
        jax.jit(step, donate_argnums=0).lower([pool] * layers, x).compile()
        seconds[layers] = time.perf_counter() - start
    return seconds


def _shapes(text):
    """The option's text, if it is a list of shapes."""
    if not all(re.fullmatch(r"[1-9][0-9]{0,5}x[1-9][0-9]{0,5}", x) for x in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not of the form BxHV,BxHV,...")
    return text


def add_arguments(parser):
    parser.add_argument("--shapes", type=_shapes, help="BxHV,... (default: the whole grid)")
    parser.add_argument("--pool-dtype", default="float32", choices=tuple(STATE_LIMIT))
    parser.add_argument("--ordered", action="store_true", help="rows in the order of their slots")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on any backend")
    parser.add_argument(
        "--implementations",
        default="mosaic_gpu,triton,xla",
        help="those that cannot run are left out",
    )
    records.add_arguments(parser)


def runnable(names):
    """Those of the comma-separated implementations that can run K = V = 128 here."""
    names = names.split(",")
    if unknown := set(names) - set(dispatch.IMPLEMENTATIONS):
        raise ValueError(f"no such implementation: {', '.join(sorted(unknown))}")
    if jax.default_backend() != "gpu":
        return ["xla"]  # a toy run
    sizes = Sizes(B=1, H=1, HV=1, K=K, V=V, S=2)
    return [name for name in names if dispatch.obstacle(PACKED_DECODE, name, sizes, {}) is None]


def need_a_gpu(toy):
    """Raises on another backend, unless it is a toy run."""
    if jax.default_backend() != "gpu" and not toy:
        raise ValueError(
            "these times mean something on a GPU only, and the default backend is not one"
        )


def run(options):
    """Measures every shape, prints a row each, writes the results file; returns the exit code."""
    need_a_gpu(options.toy)
    names = runnable(options.implementations)
    record = records.start(
        options,
        packages=("triton", "jax-triton") if "triton" in names else (),
        pool_dtype=options.pool_dtype,
        ordered=options.ordered,
        toy=options.toy,
        K=K,
        V=V,
    )
    results = record.results
    for name in names:
        check(packed_decode(name), 4, options.pool_dtype)
    print(
        f"{results['device']}, JAX {results['jax']}, pool {options.pool_dtype}; "
        "us per call, (share of the ceiling); then of a layer by the clock"
    )
    print(f"{'B x HV':>9} {'ceiling':>9}  " + "  ".join(f"{name:>27}" for name in names))
    for shape in (options.shapes or (TOY if options.toy else GRID)).split(","):
        B, HV = map(int, shape.split("x"))
        row = measure(B, HV, options.pool_dtype, names, options.ordered)
        record.add("rows", row, quiet=True)
        cells = (
            f"{row[name]['kernel_us']:11.2f} ({row[name]['share_of_ceiling']:.3f})"
            f"{row[name]['layer_us']:8.2f}"
            for name in names
        )
        ceiling = row["ceiling"]["kernel_us"]
        print(
            f"{shape:>9} {ceiling:9.2f}  " + "  ".join(f"{cell:>27}" for cell in cells), flush=True
        )
    if not options.toy:
        # Last: these programs take longest to compile, and the rows above are written by now.
        results["compile_seconds"] = {name: compile_seconds(name) for name in names}
        for name, seconds in results["compile_seconds"].items():
            print(
                f"lower and compile, {name}: 1 layer {seconds[1]:.2f} s, "
                f"69 layers {seconds[69]:.2f} s"
            )
    record.finish()
    return 0
