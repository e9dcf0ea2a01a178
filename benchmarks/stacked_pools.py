"""Whether XLA still fuses a slice of a stacked pool with a kernel that updates it in place.

    python benchmarks/stacked_pools.py [--toy] [--output FILE]

A stacked pool of three layers is sliced, updated in place by the Mosaic kernel, and written back.
Without the barriers of `kda_jax.transforms.unfused`, XLA (JAX 0.11.2, H200) fuses the three and
returns wrong states. For each form: the largest absolute error of each layer's states against the
layers one by one, and whether the program has such a fusion. As shipped, the states must be right,
or the run fails.
"""

import argparse
import contextlib
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_contracts import Sizes
from kda_jax import decode_mosaic_gpu
from kda_jax.tools import records
from kda_jax.tools.bench import OPTIONS, need_a_gpu
from kda_jax.tools.synthetic import random_operands

LAYERS = 3
FLAG = {"xla_gpu_enable_dynamic_slice_fusion": False}
# How XLA names such a fusion in a program.
MARKS = ("dynamic_slice_fusion", "address_computation")


def one_layer(pool, x):
    return kda_jax.packed_decode(**x, initial_state=pool, implementation="mosaic_gpu", **OPTIONS)[1]


def sliced(pools, i, x):
    """The stacked pools after layer i."""
    x = {name: array[i] for name, array in x.items()}
    return pools.at[i].set(one_layer(pools[i], x))


def looped(pools, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, pools: sliced(pools, i, x), pools)


def unrolled(pools, x):
    for i in range(LAYERS):
        pools = sliced(pools, i, x)
    return pools


def operands(sizes):
    """(stacked pools, stacked operands) of the layers."""
    layers = [random_operands(sizes, seed=layer) for layer in range(LAYERS)]
    x = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
    return x.pop("initial_state"), x


def measure(form, pools, x, wanted, *, barrier, flag):
    """The row of one form of the layers' loop."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        if not barrier:
            identity = mock.patch.object(decode_mosaic_gpu, "unfused", lambda arrays: arrays)
            stack.enter_context(identity)
        lowered = jax.jit(form, donate_argnums=0).lower(pools, x)
    jax.clear_caches()
    compiled = lowered.compile(FLAG if flag else None)
    text = re.sub(r"metadata=\{[^}]*\}", "", compiled.as_text() or "")
    got = np.asarray(compiled(jnp.copy(pools), x), np.float64)
    row: dict = {"layers": form.__name__, "barrier": barrier, "fusion_off_by_flag": flag}
    row["largest_error_by_layer"] = np.abs(got - wanted).max((1, 2, 3, 4)).tolist()
    return row | {"fused": any(mark in text for mark in MARKS)}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="in Pallas's interpreter")
    options = records.parse(parser, arguments)
    need_a_gpu(options.toy)
    HV, width = (1, 32) if options.toy else (4, 128)
    sizes = Sizes(B=3, H=HV, HV=HV, K=width, V=width, S=5)
    record = records.start(options, toy=options.toy, sizes=vars(sizes))
    pools, x = operands(sizes)
    alone = jax.jit(one_layer)
    wanted = np.stack(
        [
            np.asarray(alone(pools[i], {name: array[i] for name, array in x.items()}), np.float64)
            for i in range(LAYERS)
        ]
    )
    run = functools.partial(measure, pools=pools, x=x, wanted=wanted)
    for form in (looped, unrolled):
        for barrier, flag in ((True, False), (False, False), (False, True)):
            row = run(form, barrier=barrier, flag=flag)
            record.add("rows", row)
            if barrier and max(row["largest_error_by_layer"]) > 1e-6:
                raise SystemExit(f"{form.__name__}: wrong states as shipped")
    return record.finish()


if __name__ == "__main__":
    main()
