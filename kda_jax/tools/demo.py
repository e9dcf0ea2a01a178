"""The demo: a real model's geometry, decoded, judged by the float64 oracle, and timed."""

import dataclasses
import functools
import importlib.util
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_contracts import (
    ContractError,
    Sizes,
    normalize_A_log,
    normalize_dt_bias,
    split_heads,
    survey,
)
from kda_jax.tools import oracle
from kda_jax.tools.synthetic import (
    HEAD_DIMENSION,
    MODELS,
    model_sizes,
    random_operands,
    write_layer,
)

CHECKED_ROWS = 8  # rows are independent, and the oracle takes 50 us for each row, head and token
LIMIT = 4e-6  # relative, of float32 outputs and pools
REPEATS = 5


@dataclass(frozen=True)
class LayerWeights:
    """What the op needs of one KDA layer, all heads: A_log, dt_bias, the gate; and its source."""

    H: int
    HV: int
    K: int
    V: int
    A_log: np.ndarray
    dt_bias: np.ndarray
    lower_bound: float | None
    allow_neg_eigval: bool
    source: str


def read_layer(path) -> LayerWeights:
    """The first KDA layer of a checkpoint that meets the contract, through the normalizers.

    Raises:
      ContractError, BadFileError: the checkpoint breaks the contract, or cannot be judged.
      ImportError: without `safetensors` (the extra `checkpoint`).
    """
    found = survey(path)
    report, sizes = found.report, found.report.sizes
    if not report.ok:
        raise ContractError(str(report))
    layer = report.layers[0]
    from safetensors import safe_open  # an extra

    def read(name):
        source = found.sources[0][name]
        with safe_open(source.header.path, framework="flax") as file:
            return file.get_tensor(source.name)

    return LayerWeights(
        H=sizes["H"],
        HV=sizes["HV"],
        K=sizes["K"],
        V=sizes["V"],
        A_log=np.asarray(normalize_A_log(read("A_log"), sizes["HV"])),
        dt_bias=np.asarray(normalize_dt_bias(read("dt_bias"), sizes["HV"], sizes["K"])),
        lower_bound=report.lower_bound,
        allow_neg_eigval=report.allow_neg_eigval,
        source=f"{layer.prefix} of {Path(path).name}",
    )


def made_up_layer(model) -> LayerWeights:
    """A layer of the model's real shapes.

    With safetensors it is written to a temporary checkpoint and read back.
    """
    if importlib.util.find_spec("safetensors"):
        with tempfile.TemporaryDirectory() as folder:
            write_layer(folder, model)
            return dataclasses.replace(
                read_layer(folder), source=f"random, through a checkpoint of {model}'s shapes"
            )
    heads = MODELS[model].heads
    x = random_operands(model_sizes(model, tp=1, batch=1, slots=1))
    where = "random; the extra `checkpoint` would take them through a file"
    return LayerWeights(
        heads,
        heads,
        HEAD_DIMENSION,
        HEAD_DIMENSION,
        x["A_log"],
        x["dt_bias"],
        MODELS[model].lower_bound,
        False,
        where,
    )


def run(
    *,
    model="kimi-linear-48b",
    checkpoint=None,
    tp=1,
    batch=8,
    steps=16,
    implementation: kda_jax.Implementation = "auto",
    seed=0,
):
    """Decodes `steps` tokens for `batch` rows and returns one flat dict.

    The last row is padded, if there are two. Over 60 lines, since it is the story of one run.

    Weights and gate come from the first KDA layer of `checkpoint`, if one is given, else from
    `model`'s shapes. The pool has more slots than rows. `err_out` and `err_state` are relative to
    the oracle's norms, over the checked rows and all tokens; `us_per_step` is the best of five runs
    of one compiled loop; `untouched` says whether all other slots kept their bits.
    """
    layer = read_layer(checkpoint) if checkpoint else made_up_layer(model)
    H, HV = split_heads(layer.H, layer.HV, tp)
    lower_bound = layer.lower_bound
    sizes = Sizes(B=batch, H=H, HV=HV, K=layer.K, V=layer.V, S=2 * batch + 1)
    tokens = [random_operands(sizes, seed=seed + t) for t in range(steps)]
    operands = tokens[0] | {"A_log": layer.A_log[:HV], "dt_bias": layer.dt_bias[: HV * layer.K]}
    slots = operands["ssm_state_indices"]
    if batch > 1:
        slots[-1] = -1
    weights = {name: operands[name] for name in ("A_log", "dt_bias")}
    per_token = {name: np.stack([x[name] for x in tokens]) for name in ("mixed_qkv", "a", "b")}
    gate = dict(lower_bound=lower_bound, allow_neg_eigval=layer.allow_neg_eigval)
    options = dict(use_qk_l2norm_in_kernel=True, **gate, out_dtype="float32")
    why = kda_jax.explain(
        kda_jax.packed_decode, **operands, **options, implementation=implementation
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(pool, per_token, weights, slots):
        def step(pool, token):
            out, pool = kda_jax.packed_decode(
                **token,
                **weights,
                initial_state=pool,
                ssm_state_indices=slots,
                **options,
                implementation=implementation,
            )
            return pool, out

        return jax.lax.scan(step, pool, per_token)

    arguments = jax.device_put((per_token, weights, slots))
    pool, outs = decode(jnp.array(operands["initial_state"]), *arguments)
    after, outs = np.asarray(pool), np.asarray(outs)
    us_per_step = _best_seconds(decode, pool, arguments) / steps * 1e6
    live = np.flatnonzero(slots >= 0)
    touched = slots[live]
    rest = np.setdiff1d(np.arange(sizes.S), touched)
    return {
        "model": str(checkpoint or model),
        "weights": layer.source,
        "tp": tp,
        "device": why.device,
        "implementation": why.implementation,
        "reasons": "; ".join(
            f"not {name}: {reason}" for name, reason in why.reasons.items() if reason
        ),
        "gate": "softplus" if lower_bound is None else f"safe, lower_bound {lower_bound}",
        **vars(sizes),
        "live_rows": live.size,
        "steps": steps,
        **_errors(operands, per_token, weights, options, live, outs, after),
        "untouched": bool(
            (after[rest] == operands["initial_state"][rest]).all() and not outs[:, slots < 0].any()
        ),
        "us_per_step": us_per_step,
        "bytes_per_second": 2 * after[touched].nbytes / (us_per_step * 1e-6),
        "jax": jax.__version__,
        "kda_jax": kda_jax.__version__,
    }


def _errors(operands, per_token, weights, options, live, outs, after):
    """err_out, err_state and checked_rows.

    The oracle decodes the first live rows, in a pool of their own slots.
    """
    rows = live[:CHECKED_ROWS]
    slots = operands["ssm_state_indices"][rows]
    state = operands["initial_state"][slots].astype(np.float64)
    options = {name: x for name, x in options.items() if name != "out_dtype"}
    expected = []
    for token in range(len(outs)):
        x = {name: array[token, rows] for name, array in per_token.items()}
        out, state = oracle.packed_decode(
            **x, **weights, initial_state=state, ssm_state_indices=np.arange(rows.size), **options
        )
        expected.append(out)
    return {
        "err_out": _relative(outs[:, rows], np.stack(expected)),
        "err_state": _relative(after[slots], state),
        "checked_rows": int(rows.size),
    }


def _relative(got, expected):
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _best_seconds(decode, pool, arguments):
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        pool, _ = jax.block_until_ready(decode(pool, *arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def passed(result):
    """Whether the run met the oracle and touched nothing else."""
    return result["untouched"] and result["err_out"] <= LIMIT and result["err_state"] <= LIMIT


def report(result):
    """The result as the table that `kda-jax demo` prints."""
    sizes = ", ".join(f"{letter}={result[letter]}" for letter in ("B", "H", "HV", "K", "V", "S"))
    live, checked = result["live_rows"], result["checked_rows"]
    gigabytes = result["bytes_per_second"] / 1e9
    rows = {
        "model": f"{result['model']}, 1 of {result['tp']} ranks"
        if result["tp"] > 1
        else result["model"],
        "weights": result["weights"],
        "device": result["device"],
        "ran": result["implementation"],
        "because": result["reasons"] or "it comes first",
        "gate": result["gate"],
        "sizes": f"{sizes}; {live} rows live, {result['B'] - live} padded",
        "error of out": f"{result['err_out']:.1e} relative to float64, {checked} rows",
        "error of state": f"{result['err_state']:.1e} after {result['steps']} tokens",
        "other slots": "bitwise unchanged, padded rows zero" if result["untouched"] else "CHANGED",
        "time per step": f"{result['us_per_step']:.1f} us",
        "state traffic": f"{gigabytes:.1f} GB/s (each live state in and out once)",
        "verdict": "right" if passed(result) else f"WRONG (limit {LIMIT:.0e})",
    }
    return "\n".join(f"  {name:<15} {text}" for name, text in rows.items())
