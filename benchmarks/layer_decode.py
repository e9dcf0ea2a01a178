"""How long one decode step of a whole layer takes: kda_decode, bfloat16 weights, float32 states.

    python benchmarks/layer_decode.py [--batches 1,8,32,128] [--toy] [--output FILE]

Several layers one behind the other, each with its own weights, cache and slots, so that the L2 is
cold; caches are donated. Every batch is compared with a float64 layer before it is timed.

`layer_us` is a layer's time by the clock, in a jitted loop of such steps; `kernels_us` that of its
kernels, by the profiler, in steps dispatched one by one, and `longest_kernels_us` has the 16 that
take longest. Three ceilings stand beside them, from the same run: `matmuls_us`, the loop with the
layer's matrix products alone, by the clock; `weights_us`, half an in-place multiply over as many
bytes as the layer has weights, since reading alone moves each byte once and the multiply twice; and
`multiply_us`, an in-place multiply over the live states (both multiplies: the kernel's median).
`ratio` is layer_us / (weights_us + multiply_us); `ratio_matmuls` has matmuls_us for weights_us.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_jax.tools import oracle, records
from kda_jax.tools.bench import need_a_gpu, time_multiply
from kda_jax.tools.timing import gpu_events, layers_for, time_layers

CONFIGS = {
    "kimi-linear": kda_jax.KDAConfig(D=2304, H=32, HV=32, K=128, V=128, gate_rank=128),
    "toy": kda_jax.KDAConfig(D=48, H=2, HV=4, K=16, V=8, gate_rank=8),
}
STEPS = 20
CHECKED_ROWS = 2  # of a batch; rows are independent
LIMIT = 3e-2  # relative: activations are rounded to bfloat16 after every product


def layer(config, B, seed):
    """(cache, (params, slots)) of one layer; the slots lie anywhere in a larger pool, in use."""
    S = B + max(B // 4, 3)
    slots = np.random.default_rng(seed).permutation(S)[:B].astype(np.int32)
    params = kda_jax.init_params(config, jax.random.key(seed))
    empty = kda_jax.init_cache(config, S, params=params)
    keys = jax.random.split(jax.random.key(seed + 100))
    conv, state = map(jax.random.normal, keys, (empty.conv.shape, empty.state.shape))
    cache = kda_jax.KDACache(conv.astype(empty.conv.dtype), state)
    return cache, (params, jnp.asarray(slots))


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
    return time_multiply(shape, layers_for(4 * int(np.prod(shape)))).kernel_us


def weight_bytes(config):
    params = jax.eval_shape(lambda: kda_jax.init_params(config, jax.random.key(0)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def time_kernels(op, pool, inputs):
    """{kernel: its times in microseconds} over STEPS steps, each dispatched by itself.

    The pool is consumed. Nothing on another backend.
    """
    if jax.default_backend() != "gpu":
        return {}
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


def check(step, config, B):
    """Ends the run unless a step of B rows meets a float64 layer on the first rows.

    step: `(params, x, cache, slots) -> (y, cache)`.
    """
    cache, (params, slots) = layer(config, B, seed=0)
    x = jax.random.normal(jax.random.key(1), (B, config.D), jnp.bfloat16)
    y, after = jax.jit(step)(params, x, cache, slots)
    exact = jax.tree.map(lambda weight: np.asarray(weight, np.float64), params)
    for row in range(min(B, CHECKED_ROWS)):
        slot = int(slots[row])
        wanted, conv, state = oracle.layer(
            exact, x[row : row + 1], cache.conv[slot], cache.state[slot], config
        )
        oracle.must_be_near("kda_decode, y", y[row], wanted[0], LIMIT)
        oracle.must_be_near("kda_decode, conv", after.conv[slot], conv, LIMIT)
        oracle.must_be_near("kda_decode, state", after.state[slot], state, LIMIT)


def measure(config, B, weights_us):
    # Each is compiled; those of a toy are not cold.
    layers = min(4, layers_for(weight_bytes(config)))
    caches, inputs = map(
        list, zip(*(layer(config, B, seed) for seed in range(layers)), strict=True)
    )
    x = jax.random.normal(jax.random.key(layers), (B, config.D), jnp.bfloat16)
    matmuls, _ = time_layers(multiply_matrices, [jnp.copy(x)], [inputs], STEPS)
    times, (pool,) = time_layers(decode_layers(config), [(x, caches)], [inputs], STEPS)
    row = {
        "B": B,
        "layers": layers,
        "layer_us": times.layer_us / layers,
        "matmuls_us": matmuls.layer_us / layers,
        "weights_us": weights_us,
        "multiply_us": multiply_us(B, config.HV, config.V, config.K),
    }
    row["ratio"] = row["layer_us"] / (row["weights_us"] + row["multiply_us"])
    row["ratio_matmuls"] = row["layer_us"] / (row["matmuls_us"] + row["multiply_us"])
    # Summed here: one matrix kernel serves weights of several sizes, so a median by name says
    # nothing.
    by_name, calls = time_kernels(decode_layers(config), pool, inputs), STEPS * layers
    row["kernels_us"] = sum(map(sum, by_name.values())) / calls
    row["kernels_per_call"] = sum(map(len, by_name.values())) / calls
    return row | {"longest_kernels_us": longest(by_name, calls)}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", help="default: 1,8,32,128")
    parser.add_argument("--toy", action="store_true", help="a tiny layer, on any backend")
    options = records.parse(parser, arguments)
    need_a_gpu(options.toy)
    config = CONFIGS["toy" if options.toy else "kimi-linear"]
    record = records.start(
        options,
        toy=options.toy,
        config=dataclasses.asdict(config),
        dtype="bfloat16",
        pool_dtype="float32",
        weight_bytes=weight_bytes(config),
    )
    batches = options.batches or ("1,9" if options.toy else "1,8,32,128")
    batches = [*map(int, batches.split(","))]
    for B in batches:
        check(lambda *operands: kda_jax.kda_decode(*operands, config=config), config, B)
    weights_us = multiply_us(weight_bytes(config) // 4) / 2
    for B in batches:
        record.add("rows", measure(config, B, weights_us))
    return record.finish()


if __name__ == "__main__":
    main()
