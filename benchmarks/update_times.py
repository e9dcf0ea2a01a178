"""How several tokens a sequence compare with one: fused_sigmoid_gating_kda_update, T = 1 to 8.

    python benchmarks/update_times.py [--implementations mosaic_gpu,triton] [--toy] [--output FILE]

Kernel times (profiler medians) over rotating layers, K = V = 128, beside an in-place multiply of
the live states. With `intermediate` the states after every token are returned too:
`extra_us_at_ceiling` is what their bytes cost at the multiply's speed. Each form is compared with
float64 before it is timed.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_jax.tools import oracle, records
from kda_jax.tools.bench import (
    OUT_LIMIT,
    STATE_LIMIT,
    K,
    V,
    need_a_gpu,
    runnable,
    time_multiply,
)
from kda_jax.tools.timing import layers_for, steps_for, time_layers

TOKENS = (1, 2, 4, 8)
CHECKED = 3  # sequences; they are independent


def layer(T, seed, N, HV):
    """(pool, operands) of one layer."""
    keys = jax.random.split(jax.random.key(seed), 8)
    S = N + max(N // 4, 3)

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


def update(implementation, intermediate):
    """The op as the timing loop calls it: the states after every token are its third result."""

    def op(pool, x):
        out, pool, *states = kda_jax.fused_sigmoid_gating_kda_update(
            **x,
            initial_state_source=pool,
            intermediate_states=intermediate,
            implementation=implementation,
        )
        return (out, states), pool

    return op


def check(op, T, N, HV):
    """Ends the run unless the op meets the oracle on the first sequences."""
    pool, x = layer(T, 0, N, HV)
    (out, states), after = jax.jit(op)(pool, x)
    few = {name: x[name][:CHECKED] for name in ("q", "k", "v", "a", "b", "initial_state_indices")}
    n, slots = min(N, CHECKED), np.asarray(few["initial_state_indices"])
    decay, beta = oracle.gates(
        np.reshape(few["a"], (n, T, HV, K)), few["b"], x["A_log"], x["dt_bias"]
    )
    wanted, exact, each = oracle.update(
        few["q"], few["k"], few["v"], decay, beta, pool, slots, l2norm=True
    )
    limit = STATE_LIMIT["float32"]
    oracle.must_be_near(f"T = {T}, out", out[:n], wanted, OUT_LIMIT)
    oracle.must_be_near(f"T = {T}, pool", np.asarray(after)[slots], exact[slots], limit)
    for got in states:
        oracle.must_be_near(f"T = {T}, intermediate", got[:n], each, limit)


def measure(op, T, N, HV, layers):
    pools, inputs = zip(*(layer(T, seed, N, HV) for seed in range(layers)), strict=True)
    return time_layers(op, list(pools), list(inputs), steps_for(layers))[0].kernel_us


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementations", default="mosaic_gpu,triton")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on any backend")
    options = records.parse(parser, arguments)
    need_a_gpu(options.toy)
    N, HV, tokens = (4, 2, (1, 2)) if options.toy else (32, 32, TOKENS)
    names = runnable(options.implementations)
    record = records.start(
        options,
        packages=("triton", "jax-triton") if "triton" in names else (),
        toy=options.toy,
        **dict(N=N, HV=HV, K=K, V=V, pool_dtype="float32"),
    )
    forms = [
        (name, intermediate, T) for name in names for intermediate in (False, True) for T in tokens
    ]
    for name, intermediate, T in forms:
        check(update(name, intermediate), T, N, HV)
    layers = layers_for(N * HV * V * K * 4)
    ceiling_us = time_multiply((N, HV, V, K), layers).kernel_us
    record.results |= {"layers": layers, "ceiling_us": ceiling_us}
    for name, intermediate, T in forms:
        row = {"implementation": name, "T": T, "intermediate": intermediate}
        row["kernel_us"] = measure(update(name, intermediate), T, N, HV, layers)
        row["extra_us_at_ceiling"] = T / 2 * ceiling_us if intermediate else 0.0
        record.add("rows", row)
    return record.finish()


if __name__ == "__main__":
    main()
