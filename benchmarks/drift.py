"""How far a pool drifts from float64 over thousands of decode steps, for two dtypes of the pool.

    python benchmarks/drift.py [--steps 2048] --output benchmarks/results/drift.json
    python benchmarks/drift.py --draw benchmarks/results/drift.json --plot docs/drift.svg

Every step's relative error of the state (norm over norm) against the float64 oracle, on the same
bfloat16 activations. There are two kinds of heads: those of the tests (A_log = log U(1, 16): memory
of a few tokens), and heads that forget a thousand times more slowly (memory of thousands), where
rounding has time to add up. The errors are what is measured, so nothing here is timed.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_contracts import Sizes
from kda_jax.tools import oracle, records
from kda_jax.tools.synthetic import random_operands

SIZES = Sizes(B=2, H=2, HV=2, K=128, V=32, S=3)
POOLS = ("float32", "bfloat16")
MEMORIES = {"short memory": 0.0, "long memory": -np.log(1000.0)}
OPTIONS = dict(use_qk_l2norm_in_kernel=True)


def drift(steps, memory, implementation: kda_jax.Implementation = "auto", pools=POOLS):
    """{pool dtype: [relative error of the state after each step]}."""
    tokens = [random_operands(SIZES, seed=t) for t in range(steps)]
    first = tokens[0]
    weights = {"A_log": first["A_log"] + np.float32(MEMORIES[memory]), "dt_bias": first["dt_bias"]}
    slots = np.array([2, 0], np.int32)
    per_token = {name: np.stack([x[name] for x in tokens]) for name in ("mixed_qkv", "a", "b")}
    exact, state = [], first["initial_state"].astype(np.float64)
    for t in range(steps):
        x = {name: array[t] for name, array in per_token.items()}
        state = oracle.packed_decode(
            **x, **weights, initial_state=state, ssm_state_indices=slots, **OPTIONS
        )[1]
        exact.append(state[slots])

    def step(pool, token):
        pool = kda_jax.packed_decode(
            **token,
            **weights,
            initial_state=pool,
            ssm_state_indices=slots,
            implementation=implementation,
            **OPTIONS,
        )[1]
        return pool, jnp.asarray(pool)[slots]

    result = {}
    for dtype in pools:
        pool = jnp.asarray(first["initial_state"]).astype(dtype)
        _, states = jax.jit(lambda pool: jax.lax.scan(step, pool, per_token))(pool)
        error = np.asarray(states, np.float64) - np.stack(exact)
        norms = np.linalg.norm(error.reshape(steps, -1), axis=1) / np.linalg.norm(
            np.reshape(exact, (steps, -1)), axis=1
        )
        result[dtype] = norms.tolist()
    return result


def plot(results, path):
    """Error against step, on logarithmic axes; one line for each pool dtype and memory."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kda_jax"  # the same file from the same figures
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for memory, by_pool in results["relative_error"].items():
        for dtype, errors in by_pool.items():
            line = "-" if memory == "long memory" else "--"
            color = "tab:blue" if dtype == "float32" else "tab:orange"
            axes.loglog(
                range(1, len(errors) + 1),
                errors,
                line,
                color=color,
                label=f"{dtype} pool, {memory}",
            )
    axes.set_xlabel("decode step")
    axes.set_ylabel("relative error of the state against float64")
    axes.set_title(f"Drift of the pool ({results['device']}, {results['implementation']})")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--draw", help="draw this JSON file instead of running")
    parser.add_argument("--plot", help="SVG file to draw")
    options = records.parse(parser, arguments)
    if options.draw:
        plot(json.loads(Path(options.draw).read_text()), options.plot)
        return None
    x = random_operands(SIZES)
    chosen = kda_jax.explain(
        kda_jax.packed_decode, **x, implementation=options.implementation
    ).implementation
    record = records.start(options, steps=options.steps, sizes=vars(SIZES), implementation=chosen)
    errors = {memory: drift(options.steps, memory, options.implementation) for memory in MEMORIES}
    for memory, by_pool in errors.items():
        for dtype, each in by_pool.items():
            print(
                f"{memory}, {dtype}: first {each[0]:.1e}, last {each[-1]:.1e}, most {max(each):.1e}"
            )
    record.results["relative_error"] = {
        memory: {
            dtype: [float(f"{error:.3g}") for error in each] for dtype, each in by_pool.items()
        }
        for memory, by_pool in errors.items()
    }
    return record.finish()


if __name__ == "__main__":
    main()
