"""How long chunk_kda takes: B = 1, HV = H, K = V = 128, bfloat16 operands, float32 pool.

    python benchmarks/prefill.py [--lengths 2048,8192,32768] [--heads 32] --output FILE

Medians by the clock over dispatched calls, the gates' activation included (`gates`) and left out (`recurrence`); peak
memory is the compiled program's temporaries and results. `--kernels` prints the GPU kernels that take longest.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

import kda_jax
from kda_jax import gates
from kda_jax.tools.bench import K, V, environment
from kda_jax.tools.timing import gpu_events


def operands(T, H, seed=0):
    keys = jax.random.split(jax.random.key(seed), 7)

    def normal(i, *shape):
        return jax.random.normal(keys[i], shape, jnp.bfloat16)

    return dict(
        q=normal(0, 1, T, H, K),
        k=normal(1, 1, T, H, K),
        v=normal(2, 1, T, H, V),
        a=normal(3, 1, T, H, K) * 0.5,
        b=normal(4, 1, T, H),
        A_log=jnp.log(jax.random.uniform(keys[5], (H,), minval=1.0, maxval=16.0)),
        dt_bias=jax.random.normal(keys[6], (H * K,)) - 2,
    )


def recurrence(pool, x, log_decay, beta):
    return kda_jax.chunk_kda(
        x["q"],
        x["k"],
        x["v"],
        log_decay,
        beta,
        pool,
        jnp.zeros(1, jnp.int32),
        use_qk_l2norm_in_kernel=True,
    )


def with_gates(pool, x):
    maths = gates.Maths(scale=1.0, use_qk_l2norm=True)
    H = x["A_log"].shape[0]
    a, dt_bias = x["a"].astype(jnp.float32), x["dt_bias"].reshape(1, 1, H, K)
    log_decay, beta = gates.decay_and_beta(
        a,
        x["b"].astype(jnp.float32),
        x["A_log"].reshape(1, 1, H, 1),
        dt_bias,
        maths,
        differentiable=True,
    )
    return recurrence(pool, x, log_decay, beta)


def milliseconds(function, pool, *arguments):
    """(median milliseconds, compiled program, pool) of a jitted step that donates its pool."""
    start = time.perf_counter()
    compiled = jax.jit(function, donate_argnums=0).lower(pool, *arguments).compile()
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    _, pool = jax.block_until_ready(compiled(pool, *arguments))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(3):
            _, pool = compiled(pool, *arguments)
        jax.block_until_ready(pool)
        times.append((time.perf_counter() - start) / 3 * 1e3)
    return statistics.median(times), compiled, pool


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--commit", help="the commit, where there is no git")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    H = options.heads
    results: dict = environment(options.commit) | {
        "B": 1,
        "H": H,
        "K": K,
        "V": V,
        "dtype": "bfloat16",
        "rows": [],
    }
    for T in map(int, options.lengths.split(",")):
        x, pool = operands(T, H), jnp.zeros((2, H, V, K))
        decay, beta = -jnp.exp(x["a"].astype(jnp.float32)), jax.nn.sigmoid(x["b"])
        recurrence_ms, _, pool = milliseconds(recurrence, pool, x, decay, beta)
        gates_ms, compiled, pool = milliseconds(with_gates, pool, x)
        row = {"T": T, "recurrence_ms": recurrence_ms, "gates_ms": gates_ms}
        row["peak_bytes"] = compiled.memory_analysis().peak_memory_in_bytes  # pyrefly: ignore[missing-attribute]
        results["rows"].append(row)
        print(row, flush=True)
        if options.kernels:
            totals: dict = {}
            for name, us in gpu_events(lambda: jax.block_until_ready(compiled(pool, x))):  # noqa: B023
                totals.setdefault(name, []).append(us)
            for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:16]:
                print(f"   {sum(times):9.1f} us in {len(times):4d}  {name[:100]}")
            pool = jnp.zeros((2, H, V, K))
    with open(options.output, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
