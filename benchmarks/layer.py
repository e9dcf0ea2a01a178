"""How long one decode step of a whole layer takes: kda_decode, bfloat16 weights and activations, float32 states.

    python benchmarks/layer.py [--batches 1,8,32,128] --output FILE

Several layers one behind the other, each with its own weights, cache and slots, so that the L2 is cold; caches donated.
`layer_us` is a layer's time by the clock, in a jitted loop of such steps; `kernels_us` that of its kernels, by the
profiler, in steps dispatched one by one. Beside them, in the same run, three ceilings: `matmuls_us`, the loop with the
layer's matrix products alone, by the clock; `weights_us`, half an in-place multiply over as many bytes as the layer has
weights, since reading alone moves each byte once and the multiply twice; and `multiply_us`, an in-place multiply over
the live states (both multiplies: the kernel's median). `ratio` is layer_us / (weights_us + multiply_us), and
`ratio_matmuls` has matmuls_us in place of weights_us. `--kernels` adds the GPU kernels that take longest.
"""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_jax.tools.bench import environment, multiply
from kda_jax.tools.timing import gpu_events, layers_for, time_layers

CONFIGS = {
    "kimi-linear": kda_jax.KDAConfig(D=2304, H=32, HV=32, K=128, V=128, gate_rank=128),
    "tiny": kda_jax.KDAConfig(D=48, H=2, HV=4, K=16, V=8, gate_rank=8),
}
STEPS = 20


def layer(config, B, seed):
    """(cache, (params, slots)) of one layer; the slots lie in random places of a larger pool."""
    S = B + max(B // 4, 3)
    slots = np.random.default_rng(seed).permutation(S)[:B].astype(np.int32)
    cache = kda_jax.init_cache(config, S)
    return cache, (kda_jax.init_params(config, jax.random.key(seed)), jnp.asarray(slots))


def apart(x, params):
    """The same, but nothing that takes the weights alone can be done once for the whole loop."""
    return jax.lax.optimization_barrier((x, params))


def decode_layers(config):
    """One step of all layers: each takes what the one before it returned."""

    def op(pool, inputs):
        x, caches = pool
        after = []
        for cache, (params, slots) in zip(caches, inputs, strict=True):
            x, params = apart(x, params)
            x, cache = kda_jax.kda_decode(params, x, cache, slots, config=config)
            after.append(cache)
        return (), (x, after)

    return op


def multiply_matrices(x, inputs):
    """The matrix products of such a step alone: all of them come out, so that none is dropped."""
    outs = []
    for params, _ in inputs:
        x, p = apart(x, params)
        qkv = jnp.concatenate([x @ p.q_proj, x @ p.k_proj, x @ p.v_proj], axis=-1)
        outs.append((qkv, (x @ p.f_down) @ p.f_up, x @ p.b_proj, (x @ p.g_down) @ p.g_up))
        x = qkv[:, -p.o_proj.shape[0] :] @ p.o_proj
    return outs, x


def multiply_us(*shape):
    """Microseconds of an in-place multiply of so many float32 numbers, L2 cold."""
    nbytes = 4 * int(np.prod(shape))
    layers = layers_for(nbytes)
    arrays = [jax.random.normal(jax.random.key(i), shape) for i in range(layers)]
    times, _ = time_layers(multiply, arrays, [None] * layers, max(16, min(40, 1500 // layers)))
    return times.kernel_us


def weight_bytes(config):
    params = jax.eval_shape(lambda: kda_jax.init_params(config, jax.random.key(0)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def time_kernels(op, pool, inputs):
    """{kernel: its times in microseconds} over STEPS steps, each dispatched by itself. The pool is consumed."""
    step = jax.jit(op, donate_argnums=0)
    state = [jax.block_until_ready(step(pool, inputs))[1]]

    def run():
        for _ in range(STEPS):
            _, state[0] = step(state[0], inputs)
        jax.block_until_ready(state)

    by_name: dict[str, list[float]] = {}
    for name, us in gpu_events(run):
        by_name.setdefault(name, []).append(us)
    return by_name


def longest(by_name, calls):
    """{kernel: microseconds a layer} of the 16 that take longest."""
    a_layer = {name: sum(times) / calls for name, times in by_name.items()}
    return dict(sorted(a_layer.items(), key=lambda item: -item[1])[:16])


def measure(config, B, weights_us, kernels):
    layers = min(
        4, layers_for(weight_bytes(config))
    )  # each is compiled; those of a tiny config are not cold
    caches, inputs = map(
        list, zip(*(layer(config, B, seed) for seed in range(layers)), strict=True)
    )
    x = jax.random.normal(jax.random.key(layers), (B, config.D), jnp.bfloat16)
    matmuls, _ = time_layers(multiply_matrices, [jnp.copy(x)], [inputs], STEPS)
    times, (pool,) = time_layers(decode_layers(config), [(x, caches)], [inputs], STEPS)
    # Summed here: one matrix kernel serves weights of several sizes, so a median by name says nothing.
    by_name, calls = time_kernels(decode_layers(config), pool, inputs), STEPS * layers
    row = {
        "B": B,
        "layers": layers,
        "layer_us": times.layer_us / layers,
        "kernels_us": sum(map(sum, by_name.values())) / calls,
        "kernels_per_call": sum(map(len, by_name.values())) / calls,
        "matmuls_us": matmuls.layer_us / layers,
        "weights_us": weights_us,
        "multiply_us": multiply_us(B, config.HV, config.V, config.K),
    }
    row["ratio"] = row["layer_us"] / (row["weights_us"] + row["multiply_us"])
    if kernels:
        row["longest_kernels_us"] = longest(by_name, calls)
    row["ratio_matmuls"] = row["layer_us"] / (row["matmuls_us"] + row["multiply_us"])
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--config", default="kimi-linear", choices=tuple(CONFIGS))
    parser.add_argument("--commit", help="the commit, where there is no git")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    config = CONFIGS[options.config]
    results: dict = environment(options.commit) | {
        "config": dataclasses.asdict(config),
        "dtype": "bfloat16",
    }
    results |= {"pool_dtype": "float32", "weight_bytes": weight_bytes(config), "rows": []}
    weights_us = multiply_us(results["weight_bytes"] // 4) / 2
    for B in map(int, options.batches.split(",")):
        row = measure(config, B, weights_us, options.kernels)
        results["rows"].append(row)
        print(row, flush=True)
        with open(options.output, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
