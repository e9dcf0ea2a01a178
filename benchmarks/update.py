"""How several tokens a sequence compare with one: fused_sigmoid_gating_kda_update, T = 1 to 8, K = V = 128.

    python benchmarks/update.py [--implementations mosaic_gpu,triton] --output FILE

Kernel times (profiler medians) over rotating layers, beside an in-place multiply of the live states. With
`intermediate` the states after every token are returned too: `extra_us_at_ceiling` is what their bytes cost at the
multiply's speed.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_jax.tools.bench import K, V, environment, multiply
from kda_jax.tools.timing import layers_for, time_layers

N, HV = 32, 32
TOKENS = (1, 2, 4, 8)


def layer(T, seed):
    """(pool, operands) of one layer."""
    keys = jax.random.split(jax.random.key(seed), 8)
    S = N + N // 4

    def normal(i, *shape):
        return jax.random.normal(keys[i], shape, jnp.bfloat16)

    slots = np.random.default_rng(seed).permutation(S)[:N].astype(np.int32)
    return jax.random.normal(keys[0], (S, HV, V, K)), dict(
        q=normal(1, N, T, HV, K),
        k=normal(2, N, T, HV, K),
        v=normal(3, N, T, HV, V),
        a=normal(4, N, T, HV * K) * 0.5,
        b=normal(5, N, T, HV),
        A_log=jnp.log(jax.random.uniform(keys[6], (HV,), minval=1.0, maxval=16.0)),
        dt_bias=jax.random.normal(keys[7], (HV * K,)) - 2,
        initial_state_indices=jnp.asarray(slots),
    )


def measure(T, implementation, intermediate, layers, steps):
    def op(pool, x):
        out, pool, *states = kda_jax.fused_sigmoid_gating_kda_update(
            **x,
            initial_state_source=pool,
            intermediate_states=intermediate,
            implementation=implementation,
        )
        return (out, states), pool

    pools, inputs = zip(*(layer(T, seed) for seed in range(layers)), strict=True)
    times, _ = time_layers(op, list(pools), list(inputs), steps)
    return times.kernel_us


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementations", default="mosaic_gpu,triton")
    parser.add_argument("--commit", help="the commit, where there is no git")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    states = N * HV * V * K * 4
    layers, steps = layers_for(states), 40
    arrays = [jax.random.normal(jax.random.key(i), (N, HV, V, K)) for i in range(layers)]
    ceiling, _ = time_layers(multiply, arrays, [None] * layers, steps)
    results: dict = environment(options.commit) | {
        "N": N,
        "HV": HV,
        "K": K,
        "V": V,
        "pool_dtype": "float32",
        "layers": layers,
    }
    results |= {"ceiling_us": ceiling.kernel_us, "rows": []}
    del arrays
    for name in options.implementations.split(","):
        for intermediate in (False, True):
            for T in TOKENS:
                kernel_us = measure(T, name, intermediate, layers, steps)
                row = {
                    "implementation": name,
                    "T": T,
                    "intermediate": intermediate,
                    "kernel_us": kernel_us,
                }
                row["extra_us_at_ceiling"] = T / 2 * ceiling.kernel_us if intermediate else 0.0
                results["rows"].append(row)
                print(row, flush=True)
    with open(options.output, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
