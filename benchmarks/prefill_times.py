"""How long chunk_kda takes: B = 1, HV = H, K = V = 128, bfloat16 operands, float32 pool.

    python benchmarks/prefill_times.py [--lengths 2048,8192,32768] [--toy] [--output FILE]

Medians by the clock over dispatched calls, with the gates' activation (`gates`) and without it
(`recurrence`); `peak_bytes` is the compiled program's memory, `longest_kernels_us` what the GPU
kernels take that take longest in one call with the gates. Both programs are compared with float64
before they are timed. XLA's form runs up to 8192 tokens, beside the kernels.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_jax import gates
from kda_jax.tools import oracle, records
from kda_jax.tools.bench import K, V, need_a_gpu
from kda_jax.tools.timing import gpu_events

LONGEST = {"mosaic_gpu": 2**20, "xla": 8192}
CHECKED_TOKENS = 1000  # not a whole number of chunks
LIMIT = 8e-3  # relative: bfloat16 products


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


def recurrence(pool, x, log_decay, beta, implementation):
    return kda_jax.chunk_kda(
        x["q"],
        x["k"],
        x["v"],
        log_decay,
        beta,
        pool,
        jnp.zeros(1, jnp.int32),
        use_qk_l2norm_in_kernel=True,
        implementation=implementation,
    )


def with_gates(pool, x, implementation):
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
    return recurrence(pool, x, log_decay, beta, implementation)


def given(x):
    """A log decay and a beta that cost nothing to make beside the recurrence."""
    return -jnp.exp(x["a"].astype(jnp.float32)), jax.nn.sigmoid(x["b"])


def check(recurrence, with_gates, T, H):
    """Ends the run unless both programs meet the oracle: outputs, and the pool behind them."""
    x, pool = operands(T, H), jax.random.normal(jax.random.key(9), (2, H, V, K))
    exact = {name: np.asarray(y, np.float64) for name, y in x.items()}
    activated = oracle.gates(exact["a"], exact["b"], exact["A_log"], exact["dt_bias"])
    for what, step, gated in (
        ("chunk_kda", lambda: recurrence(pool, x, *given(x)), given(x)),
        ("chunk_kda with its gates", lambda: with_gates(pool, x), activated),
    ):
        decay, beta = (np.asarray(y, np.float64) for y in gated)
        wanted, after, _ = oracle.update(
            exact["q"], exact["k"], exact["v"], decay, beta, pool, [0], l2norm=True
        )
        out, state = jax.jit(step)()
        oracle.must_be_near(f"{what}, out", out, wanted, LIMIT)
        oracle.must_be_near(f"{what}, state", state[0], after[0], LIMIT)


def milliseconds(function, pool, *arguments):
    """(median milliseconds, compiled program, pool) of a jitted step that donates its pool."""
    compiled = jax.jit(function, donate_argnums=0).lower(pool, *arguments).compile()
    _, pool = jax.block_until_ready(compiled(pool, *arguments))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(3):
            _, pool = compiled(pool, *arguments)
        jax.block_until_ready(pool)
        times.append((time.perf_counter() - start) / 3 * 1e3)
    return statistics.median(times), compiled, pool


def longest(compiled, pool, x):
    """{kernel: microseconds} of the 12 that take longest in one call. The pool is consumed."""
    if jax.default_backend() != "gpu":
        return {}
    totals: dict[str, float] = {}
    for name, us in gpu_events(lambda: jax.block_until_ready(compiled(pool, x))):
        totals[name] = totals.get(name, 0.0) + us
    return dict(sorted(totals.items(), key=lambda item: -item[1])[:12])


def measure(recurrence, with_gates, T, H):
    x, pool = operands(T, H), jnp.zeros((2, H, V, K))
    recurrence_ms, _, pool = milliseconds(recurrence, pool, x, *given(x))
    gates_ms, compiled, pool = milliseconds(with_gates, pool, x)
    row = {"T": T, "recurrence_ms": recurrence_ms, "gates_ms": gates_ms}
    memory = compiled.memory_analysis()
    row["peak_bytes"] = memory.peak_memory_in_bytes  # pyrefly: ignore[missing-attribute]
    return row | {"longest_kernels_us": longest(compiled, pool, x)}


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--toy", action="store_true", help="one head, few tokens, on any backend")
    options = records.parse(parser, arguments)
    need_a_gpu(options.toy)
    H, lengths = options.heads, [*map(int, options.lengths.split(","))]
    names, checked = LONGEST, CHECKED_TOKENS
    if options.toy:
        H, lengths, names, checked = 1, [100], ["xla"], 100
    record = records.start(options, toy=options.toy, **dict(B=1, H=H, K=K, V=V, dtype="bfloat16"))
    steps = {
        name: tuple(functools.partial(f, implementation=name) for f in (recurrence, with_gates))
        for name in names
    }
    for bare, gated in steps.values():
        check(bare, gated, checked, H)
    for name, (bare, gated) in steps.items():
        for T in lengths:
            if LONGEST[name] >= T:
                record.add("rows", {"implementation": name} | measure(bare, gated, T, H))
    return record.finish()


if __name__ == "__main__":
    main()
