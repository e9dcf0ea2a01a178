"""How long the shipped decode kernels take under other Configs than the ones they choose.

    python benchmarks/tuning.py [--shapes 1x32:1,...] [--pool-dtype bfloat16] [--output FILE]

For each shape B x HV and number of tokens (behind the colon): the in-place multiply of the live
states, and the kernel's median under each Config (`chosen` marks the one that the kernel takes by
itself). Every Config meets float64 before it is timed; K = V = 128, random slots, cold L2. `--toy`
only lists the Configs.
"""

import argparse
import contextlib
import dataclasses
import importlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import update_times

from kda_contracts import Sizes
from kda_jax.tools import bench, records
from kda_jax.tools.bench import K, V
from kda_jax.tools.timing import layers_for, steps_for, time_layers

MODULES = {"mosaic_gpu": "kda_jax.decode_mosaic_gpu", "triton": "kda_jax.decode_triton"}
SHAPES = "1x32:1,8x12:1,256x32:1,1x32:4,32x32:4"
MOST_LAYERS = 48  # many Configs are compiled, and each layer is a kernel of the program


def sizes_of(B, HV, T):
    return Sizes(B=B, H=HV, HV=HV, K=K, V=V, S=B + max(B // 4, 3), T=T, N=B)


def chosen(name, sizes, pool_dtype):
    """The Config that the kernel takes by itself."""
    module = importlib.import_module(MODULES[name])
    if name == "triton":
        return module.choose_config(sizes)
    return module.choose_config(sizes, jnp.dtype(pool_dtype), sizes.T > 1)


def variants(name, sizes, pool_dtype):
    """The Configs to time: the chosen one, and its neighbours in each of its numbers."""
    own = chosen(name, sizes, pool_dtype)
    changes = [{}]
    changes += [{"tile_rows": rows} for rows in (4, 8, 16, 32, 64)]
    if name == "triton":
        changes += [{"num_warps": warps} for warps in (2, 4)]
    elif sizes.T == 1:
        changes += [{"ahead": ahead} for ahead in (1, 2, 3)]
        # Steps of half and twice the size.
        changes += [{"step_rows": own.step_rows * factor // 2} for factor in (1, 4)]
    configs = []
    for change in changes:
        with contextlib.suppress(ValueError):  # one that the Config itself refuses
            config = dataclasses.replace(own, **change)
            if sizes.V % config.tile_rows == 0 and config not in configs:
                configs.append(config)
    return configs


@contextlib.contextmanager
def under(name, config):
    """Inside, the kernel takes this Config; what was traced before is forgotten."""
    module = importlib.import_module(MODULES[name])
    jax.clear_caches()
    with mock.patch.object(module, "choose_config", return_value=config) as choice:
        yield
    jax.clear_caches()
    if not choice.called:
        raise SystemExit(f"{name} did not ask for its Config: nothing of this run counts")


def check(name, pool_dtype, B, HV, T):
    """Ends the run unless the kernel, as it is configured now, meets the oracle."""
    if T == 1:
        bench.check(bench.packed_decode(name), HV, pool_dtype)
    else:
        update_times.check(update_times.update(name, False), T, min(B, 4), HV)


def kernel_us(name, pool_dtype, B, HV, T, layers):
    if T > 1:
        return update_times.measure(update_times.update(name, False), T, B, HV, layers)
    pools, inputs = bench.layers_of(B, HV, pool_dtype, layers)
    op = bench.packed_decode(name)
    return time_layers(op, pools, inputs, steps_for(layers))[0].kernel_us


def measure(name, pool_dtype, B, HV, T, layers, ceiling_us):
    """One row for each Config of one kernel at one shape."""
    sizes = sizes_of(B, HV, T)
    for config in variants(name, sizes, pool_dtype):
        with under(name, config):
            check(name, pool_dtype, B, HV, T)
            us = kernel_us(name, pool_dtype, B, HV, T, layers)
        row = {"implementation": name, "B": B, "HV": HV, "T": T, "layers": layers}
        row |= {"config": dataclasses.asdict(config), "kernel_us": us, "ceiling_us": ceiling_us}
        yield row | {"chosen": config == chosen(name, sizes, pool_dtype)}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help=f"BxHV:T,... (default: {SHAPES})")
    parser.add_argument("--pool-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--implementations", default="mosaic_gpu,triton")
    parser.add_argument("--toy", action="store_true", help="list the Configs, on any backend")
    options = records.parse(parser, arguments)
    bench.need_a_gpu(options.toy)
    dtype = options.pool_dtype
    cases = [[*map(int, re.split("[x:]", shape))] for shape in options.shapes.split(",")]
    if dtype != "float32" and any(T > 1 for _, _, T in cases):
        parser.error(f"several tokens are timed on float32 pools only (got {dtype})")
    if options.toy:
        for B, HV, T in cases:
            for config in variants("mosaic_gpu", sizes_of(B, HV, T), dtype):
                print(f"{B}x{HV}:{T}  {config}")
        return None
    names = bench.runnable(options.implementations)
    packages = ("triton", "jax-triton") if "triton" in names else ()
    record = records.start(options, packages=packages, pool_dtype=dtype, **dict(K=K, V=V))
    for B, HV, T in cases:
        itemsize = jnp.dtype(dtype).itemsize
        layers = min(MOST_LAYERS, layers_for(B * HV * V * K * itemsize))
        ceiling_us = bench.time_multiply((B, HV, V, K * itemsize // 4), layers).kernel_us
        for name in names:
            for row in measure(name, dtype, B, HV, T, layers, ceiling_us):
                record.add("rows", row)
    return record.finish()


if __name__ == "__main__":
    main()
