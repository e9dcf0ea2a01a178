"""How long forward and backward of chunk_kda take, and how far its gradients are from float64.

    python benchmarks/train.py [--only kda,jla,fla,errors,layer,xla] [--lengths 2048,16x512] [--toy]
                               [--output FILE]

B = 1, HV = H, K = V = 128, bfloat16 q, k and v, l2norm of q and k, float32 log decay and beta; the
gradients of all five from a cotangent of `out`. `16x512` are 16 sequences of 512 tokens in one row.
Beside it, where they are installed: `jla`, the package jax-linear-attention, in JAX (packed
sequences as segment ids); and `fla`, the package fla-core, in PyTorch. `xla` is chunk_kda in XLA.

`step_ms` is a median by the clock over dispatched steps, `compile_s` lowering and compiling, of
PyTorch the first three steps with their tuning; `temporary_bytes` what a program needs beside its
operands and results, of PyTorch the peak beside the operands; `forward` has the same without a
derivative. `layer` is a whole layer of Kimi-Linear's size, `kda_apply`, with the gradients of every
weight and of x. Each meets the oracle before it is timed; a peer that does not, or is not
installed, is named under `absent`. `errors` has the relative errors of all gradients in the cases
of the tests; None where one is not finite. (Over 350 lines, since it speaks to two frameworks.)
"""

import argparse
import functools
import importlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import prefill_times

import kda_jax
from kda_jax.tools import oracle, records
from kda_jax.tools.bench import K, V, need_a_gpu

PARTS = ("kda", "jla", "fla", "errors", "layer", "xla")
LENGTHS = "2048,8192,32768,16x512"
LAYER_LENGTHS = "8192"
XLA_LENGTHS = "512,1024,2048,4096,8192,16384,32768"
LIMIT = 2e-2  # relative: bfloat16 operands and results
TENSORS = ("q", "k", "v", "log_decay", "beta")


def in_jax(function):
    """A jitted step `(out, gradients)` of `function(tensors, start, cu_seqlens, l2norm)`.

    With `forward` out alone.

    Where start is not None, final states have a cotangent, and it has a gradient.
    """

    def step(tensors, start, d_out, d_final, cu_seqlens, *, l2norm, forward=False):
        def results(tensors, start):
            out, final = function(tensors, start, cu_seqlens, l2norm)
            return (out, None) if d_final is None else (out, final)

        if forward:
            return results(tensors, start)[0]
        (out, _), backward = jax.vjp(results, tensors, start)
        by_tensors, by_start = backward((d_out, d_final))
        return out, by_tensors if start is None else by_tensors | dict(start=by_start)

    return jax.jit(step, static_argnames=("l2norm", "forward"))


def chunk_kda(tensors, start, cu_seqlens, l2norm, *, implementation):
    N = len(tensors["q"]) if cu_seqlens is None else len(cu_seqlens) - 1
    if start is None:
        start = jnp.zeros((N, tensors["v"].shape[2], V, K))
    return kda_jax.chunk_kda(
        **tensors,
        pool=start,
        slots=jnp.arange(N),
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=l2norm,
        implementation=implementation,
    )


def jla_op():
    linear_attention: Any = importlib.import_module("jla.ops").linear_attention

    def op(tensors, start, cu_seqlens, l2norm):
        q, k, v, g, beta = (tensors[name] for name in TENSORS)
        packed, ids = cu_seqlens is not None, None
        if packed:
            ids = jnp.searchsorted(cu_seqlens, jnp.arange(q.shape[1]), side="right")[None]
        given = None if start is None or packed else jnp.swapaxes(start, 2, 3)
        out, final = linear_attention(
            *("kda", q, k, v),
            impl="mosaic_gpu",
            g=g,
            beta=beta,
            initial_state=given,
            output_final_state=given is not None,
            segment_ids=ids,
            use_qk_l2norm=l2norm,
        )
        return out, final if final is None else jnp.swapaxes(final, 2, 3)

    return op


def fla_step():
    """The same step in PyTorch, of PyTorch's tensors."""
    torch: Any = importlib.import_module("torch")
    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")

    def step(tensors, start, d_out, d_final, cu_seqlens, *, l2norm):
        given = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        q, k, v, g, beta = (given[name] for name in TENSORS)
        if start is not None:
            given["start"] = start = start.detach().requires_grad_()
        out, final = chunk_kda(
            *(q, k, v, g, beta),
            initial_state=start,
            output_final_state=start is not None,
            use_qk_l2norm_in_kernel=l2norm,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
        )
        results, cotangents = (
            ((out,), (d_out,)) if d_final is None else ((out, final), (d_out, d_final))
        )
        gradients = torch.autograd.grad(results, [*given.values()], cotangents)
        return out, dict(zip(given, gradients, strict=True))

    return step


def to_torch(x):
    if x is None:
        return None
    torch: Any = importlib.import_module("torch")
    x = np.asarray(x)
    narrow = x.dtype == jnp.bfloat16
    y = torch.from_numpy(np.array(x, np.float32) if narrow else np.array(x)).cuda()
    if x.dtype.kind == "i":
        return y.long()
    return y.to(torch.bfloat16) if narrow else y


def on_host(x):
    return np.asarray(x.float().cpu() if hasattr(x, "cpu") else x, np.float64)


def cases() -> Any:
    """The tests' module that makes them."""
    folder = str(Path(__file__).parents[1] / "tests" / "helpers")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("chunks")


def case(name, T, H):
    """`(tensors, start, d_out, d_final, cu_seqlens, l2norm)` of a case of the tests.

    Without the padded sequence. Packed ones start from zeros, and their last states count for
    nothing: so every peer can run them.
    """
    sizes = dict(H=H, HV=H, K=K, V=V, dtype="bfloat16")
    x, options, d_out, d_state = cases().gradient_case(name, T=T, **sizes)
    pool, slots, sources = x.pop("pool"), x.pop("slots"), options["sources"]
    d_out, bounds = d_out.astype(jnp.bfloat16), options["cu_seqlens"]
    if bounds is not None:
        end = bounds[-2]  # the last sequence is a padded one
        tensors = {name: y[:, :end] for name, y in x.items()}
        return tensors, None, d_out[:, :end], None, np.unique(bounds[:-1]), options["l2norm"]
    live = (slots >= 0) & (slots < len(pool))
    start = np.where((sources >= 0)[:, None, None, None], pool[sources], 0)
    tensors = {name: y[live] for name, y in x.items()}
    return tensors, start[live], d_out[live], d_state[slots[live]], None, options["l2norm"]


def wanted(tensors, start, d_out, d_final, cu_seqlens, l2norm):
    """`(out, gradients)` in float64."""
    N = len(d_out) if cu_seqlens is None else len(cu_seqlens) - 1
    pool = np.zeros((N, d_out.shape[2], V, K))
    given = pool if start is None else start
    exact = *(tensors[name] for name in TENSORS), given, np.arange(N)
    options = dict(cu_seqlens=cu_seqlens, l2norm=l2norm)
    out = oracle.update(*exact, **options)[0]
    d_state = pool if d_final is None else d_final
    gradients = oracle.update_gradients(*exact, d_out=d_out, d_state=d_state, **options)
    by_start = gradients.pop("pool")
    return out, gradients if start is None else gradients | dict(start=by_start)


def run(name, step, given):
    """`(out, gradients)` on the host, of one case."""
    *arrays, l2norm = given
    if name == "fla":
        arrays = jax.tree.map(to_torch, arrays)
        out, gradients = step(*arrays, l2norm=l2norm)
    else:
        arrays = jax.tree.map(jnp.asarray, arrays)
        out, gradients = step(*arrays, l2norm=l2norm)
    return on_host(out), {name: on_host(x) for name, x in gradients.items()}


def check(name, step, T, H):
    """Ends the run unless out and every gradient meet the oracle."""
    for kind in ("random keys", "packed borders"):
        given = case(kind, T, H)
        out, gradients = run(name, step, given)
        expected_out, expected = wanted(*given)
        oracle.must_be_near(f"{name}, {kind}, out", out, expected_out, LIMIT)
        for x, gradient in expected.items():
            oracle.must_be_near(f"{name}, {kind}, gradient of {x}", gradients[x], gradient, LIMIT)


def errors(names, steps, T, H):
    """A row for each case: `{operator: {operand: relative error}}`; text where it does not run."""
    for kind in names:
        given = case(kind, T, H)
        expected_out, expected = wanted(*given)
        row: dict = {"case": kind, "T": given[2].shape[1], "H": H}
        for name, step in steps.items():
            try:
                out, gradients = run(name, step, given)
            except Exception as error:
                row[name] = repr(error)[:200]
                continue
            pairs = dict(out=(out, expected_out)) | {
                x: (gradients[x], gradient) for x, gradient in expected.items()
            }
            row[name] = {x: relative(*pair) for x, pair in pairs.items()}
        yield row


def relative(got, expected):
    error = float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-300))
    return error if np.isfinite(error) else None


def timed_operands(length, H):
    """`(tensors, cu_seqlens)`; of `NxT`, N sequences in one row."""
    N, T = map(int, length.split("x")) if "x" in length else (None, int(length))
    x = prefill_times.operands(T * (N or 1), H)
    log_decay, beta = prefill_times.given(x)
    tensors = {name: x[name] for name in "qkv"} | dict(log_decay=log_decay)
    bounds = None if N is None else np.arange(N + 1, dtype=np.int32) * T
    return tensors | dict(beta=beta.astype(jnp.float32)), bounds


def median_ms(step, wait):
    """The median of 7 runs, each of 3 steps that are dispatched one after the other."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(3):
            last = step()
        wait(last)
        times.append((time.perf_counter() - start) / 3 * 1e3)
    return statistics.median(times)


def measure_in_jax(step, length, H):
    tensors, bounds = timed_operands(length, H)
    given = (tensors, None, tensors["v"], None, None if bounds is None else jnp.asarray(bounds))
    lower = functools.partial(step.lower, *given, l2norm=True)
    return timed(lower, given) | {"forward": timed(functools.partial(lower, forward=True), given)}


def measure_layer(length, toy):
    """A layer's step, whose operands and gradients are bfloat16."""
    if toy:
        config = kda_jax.KDAConfig(D=48, H=2, HV=4, K=16, V=8)
    else:
        config = kda_jax.KDAConfig(D=2304, H=32, HV=32, K=K, V=V, gate_rank=V)
    params = kda_jax.init_params(config, jax.random.key(0), dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (1, int(length), config.D), jnp.bfloat16)

    @jax.jit
    def step(params, x):
        y, backward = jax.vjp(lambda *given: kda_jax.kda_apply(*given, config=config), params, x)
        return y, backward(y)

    return {"D": config.D, "H": config.H} | timed(
        functools.partial(step.lower, params, x), (params, x)
    )


def timed(lower, given):
    begun = time.perf_counter()
    compiled = lower().compile()
    row: dict[str, Any] = {"compile_s": time.perf_counter() - begun}
    memory: Any = compiled.memory_analysis()
    row["temporary_bytes"] = memory.temp_size_in_bytes
    jax.block_until_ready(compiled(*given))
    return row | {"step_ms": median_ms(lambda: compiled(*given), jax.block_until_ready)}


def measure_in_torch(step, length, H):
    torch: Any = importlib.import_module("torch")
    tensors, bounds = timed_operands(length, H)
    tensors = {name: to_torch(x) for name, x in tensors.items()}
    given = (tensors, None, tensors["v"], None, to_torch(bounds))
    begun = time.perf_counter()
    for _ in range(3):
        step(*given, l2norm=True)
    torch.cuda.synchronize()
    row = {"compile_s": time.perf_counter() - begun}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(*given, l2norm=True)
    torch.cuda.synchronize()
    row["temporary_bytes"] = torch.cuda.max_memory_allocated() - before
    wait = lambda _: torch.cuda.synchronize()  # noqa: E731
    return row | {"step_ms": median_ms(lambda: step(*given, l2norm=True), wait)}


def steps_of(parts, absent):
    """{name: step} of those that are asked for; a peer that is not here goes under `absent`."""
    make = {
        "kda": lambda: in_jax(functools.partial(chunk_kda, implementation="auto")),
        "xla": lambda: in_jax(functools.partial(chunk_kda, implementation="xla")),
        "jla": lambda: in_jax(jla_op()),
        "fla": fla_step,
    }
    steps = {}
    for name in make:
        if name in parts or "errors" in parts:
            try:
                steps[name] = make[name]()
            except (ImportError, RuntimeError) as error:
                leave_out(name, error, absent)
    return steps


def leave_out(name, error, absent):
    absent[name] = repr(error)[:300]
    print(f"{name} is left out: {error!r}", flush=True)


def is_right(name, step, T, H, absent):
    """Whether it meets the oracle; chunk_kda itself ends the run where it does not."""
    try:
        check(name, step, T, H)
    except (Exception, SystemExit) as error:
        if name in ("kda", "xla"):
            raise
        leave_out(name, error, absent)
        return False
    return True


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="kda,jla,fla,errors", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--lengths", help=f"default {LENGTHS}; of xla {XLA_LENGTHS}")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of the cases that are compared")
    parser.add_argument("--toy", action="store_true", help="one head, few tokens, on any backend")
    options = records.parse(parser, arguments)
    parts = options.only.split(",")
    if unknown := set(parts) - {*PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    need_a_gpu(options.toy)
    # PyTorch needs memory beside JAX.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    H, checked, lengths = options.heads, options.tokens, options.lengths
    if options.toy:
        H, checked, lengths = 1, 140, lengths or "70,2x35"
    record = records.start(
        options,
        packages=("jax-linear-attention", "torch", "triton", "fla-core"),
        toy=options.toy,
        absent={},
        **dict(B=1, H=H, K=K, V=V, dtype="bfloat16"),
    )
    absent, few = record.results["absent"], min(H, 2)
    steps = steps_of(parts, absent)
    if "errors" in parts:
        for row in errors(cases().GRADIENT_CASES, steps, checked, few):
            record.add("errors", row)
    if "layer" in parts:
        for length in (lengths or LAYER_LENGTHS).split(","):
            record.add("layer", {"length": length} | measure_layer(length, options.toy))
    for name in parts:
        if name not in steps or not is_right(name, steps[name], checked, few, absent):
            continue
        measure = measure_in_torch if name == "fla" else measure_in_jax
        for length in (lengths or (XLA_LENGTHS if name == "xla" else LENGTHS)).split(","):
            record.add("rows", {"op": name, "length": length} | measure(steps[name], length, H))
    return record.finish()


if __name__ == "__main__":
    main()
