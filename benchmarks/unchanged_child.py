"""One part of unchanged.py in one checkout: python unchanged_child.py PART FILE [SUBSTRING].

The checkout is the one on the path. FILE takes a pickle: for each call its results, the texts that
must be equal in both checkouts (`exact`) and those that may differ (`loose`), or an error.
"""

import contextlib
import functools
import importlib.machinery
import math
import pickle
import platform
import re
import sys
import traceback
import types
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import jaxlib
import numpy as np
import unchanged_calls
import unchanged_names
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

import kda_jax

TRITON_KERNELS = ("kda_jax.decode_triton_kernel", "kda_jax.triton_kernel")
TRITON_LAUNCHES = ("kda_jax.decode_triton", "kda_jax.triton_gpu")
# capability, K, V, T, pool, lower_bound
TRITON_CASES = (
    (90, 128, 128, 1, "fp32", None),
    (90, 60, 24, 4, "bf16", -5.0),
    (80, 128, 128, 2, "fp32", -5.0),
    (80, 7, 100, 9, "fp16", None),
)


def about():
    """Versions and the device, the head of the results."""
    triton = unchanged_names.module_or_none("triton")
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "triton": triton and triton.__version__,
        "jax_triton": unchanged_names.module_or_none("jax_triton") is not None,
    }


def xla(calls):
    """The compiled program's text, and all results."""
    for call in calls:
        if call.xla:
            yield call.name, functools.partial(_values, call, "xla")


def interpret(calls):
    """The results of the Mosaic kernel in Pallas's interpreter."""
    for call in calls:
        if call.interpret:
            yield call.name, functools.partial(_interpreted, call)


def lowered(calls):
    """The Mosaic kernels' modules, and the program around them, lowered for CUDA."""
    for call in calls:
        if call.lowered and "mosaic_gpu" in call.kernels:
            yield call.name, functools.partial(_lowered, call)


def triton(calls):
    """The Triton kernel's machine code, and what it is launched with."""
    if unchanged_names.module_or_none("triton") is None:
        print("triton is not installed: its kernel is not compared", flush=True)
        return
    for case in TRITON_CASES:
        for which in ("kda_update", "kda_update_aliased"):
            name = f"compiled {which} {case}"
            yield name, functools.partial(_compiled_triton, which, *case)
    for refs in (True, False):
        # The launch asks jax-triton for its calling convention when it is imported.
        for name in TRITON_LAUNCHES:
            sys.modules.pop(name, None)
            # `from kda_jax import ...` finds a module by the package's attribute first.
            vars(kda_jax).pop(name.rpartition(".")[2], None)
        jax.clear_caches()
        launches: list = []
        sys.modules["jax_triton"] = _recording(launches, refs)
        for call in calls:
            if "triton" in call.kernels and not call.refs:
                name = f"{call.name} ({'Refs' if refs else 'aliased'})"
                yield name, functools.partial(_launched, call, launches)


def gpu(calls):
    """The results of every implementation on this GPU."""
    with_triton = unchanged_names.module_or_none("jax_triton") is not None
    for call in calls:
        for name in (*(("xla",) if call.xla else ()), *call.kernels):
            if name != "triton" or with_triton:
                yield f"{call.name} ({name})", functools.partial(_values, call, name, text=False)


def _arrays(call):
    """The operands on the device, some of them as Refs; NumPy arrays for an eager call."""
    if call.eager:
        return list(call.arrays)
    arrays = [jax.tree.map(jnp.asarray, x) for x in call.arrays]
    return [jax.new_ref(x) if place in call.refs else x for place, x in enumerate(arrays)]


def _values(call, implementation, text=True):
    run = functools.partial(call.run, implementation)
    loose = {}
    with jax.enable_x64(True) if call.x64 else contextlib.nullcontext():
        arrays = _arrays(call)
        if not call.eager:
            run = jax.jit(run, donate_argnums=call.donate).lower(*arrays).compile()
            if text:
                loose["program"] = plain_hlo(run.as_text())
        results = [run(*arrays), *(arrays[place][...] for place in call.refs)]
        return {"results": _leaves(results), "loose": loose}


def _interpreted(call):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return _values(call, "mosaic_gpu", text=False)


def _leaves(results):
    leaves = jax.tree_util.tree_flatten_with_path(results)[0]
    return {jax.tree_util.keystr(path)[3:] or "pool": np.asarray(x) for path, x in leaves}


def plain_hlo(text):
    """A compiled program's text without metadata, and with names in order of appearance."""
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text)
    text = re.sub(r"^HloModule [^,]+", "HloModule", text)
    text = re.sub(r', metadata=\{(?:[^{}"]|"[^"]*")*\}', "", text)
    # A computation's head names its parameters once more, without %.
    heads = [re.sub(r"[\w.\-]+: ", "", x) if x.endswith("{") else x for x in text.splitlines()]
    seen: dict[str, str] = {}
    return re.sub(
        r"%[\w.\-]+", lambda found: seen.setdefault(found[0], f"%{len(seen)}"), "\n".join(heads)
    )


def _operations(operation):
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _lowered(call):
    run = jax.jit(functools.partial(call.run, "mosaic_gpu"), donate_argnums=call.donate)
    program: Any = run.trace(*_arrays(call)).lower(lowering_platforms=("cuda",)).compiler_ir()
    exact = {}
    for operation in _operations(program.operation):
        if operation.name != "stablehlo.custom_call":
            continue
        if "mosaic_gpu" not in str(operation.attributes["call_target_name"]):
            continue
        own = operation.attributes["mhlo.backend_config"]
        with mlir.make_ir_context() as context:
            context.allow_unregistered_dialects = True
            mosaic.dialect.register_dialect(context)
            kernel = ir.Module.parse(own["module"].value_bytes)
            exact[f"kernel {len(exact)}"] = plain_kernel(
                kernel.operation.get_asm(enable_debug_info=False)
            )
        operation.attributes["mhlo.backend_config"] = ir.StringAttr.get("", program.context)
    if not exact:
        raise AssertionError("the program holds no Mosaic kernel")
    around = program.operation.get_asm(enable_debug_info=False)
    seen: dict[str, str] = {}
    around = re.sub(r"@[\w.\-]+", lambda x: seen.setdefault(x[0], f"@{len(seen)}"), around)
    return {"exact": exact, "loose": {"program around it": around}}


def plain_kernel(text):
    """A kernel's module without the kernel's name, which the module, a symbol and a dump have."""
    (name,) = re.findall(r'sym_name = "(\w+)_mosaic_gpu"', text)
    text = re.sub(r"^module @\w+ ", "module ", text)
    text = re.sub(r', mosaic_gpu\.dump_basename(?: = "[^"]*")?', "", text)
    return re.sub(rf"\b{name}_mosaic_gpu\b", "kernel", text)


def _compiled_triton(which, capability, K, V, T, pool, lower_bound):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(unchanged_names.module(*TRITON_KERNELS), which)
    arguments = kernel.arg_names
    constants = dict(
        S=9, N=5, T=T, H=1, HV=3, K=K, V=V, BK=triton.next_power_of_2(K), BV=4, q_stride=K,
        v_stride=3 * V, k_start=0, v_start=0, scale=0.5, lower_bound=lower_bound,
        softplus_beta=1.0 if T == 1 else 0.5, softplus_threshold=20.0 if T == 1 else 10.0,
        allow_neg_eigval=T > 1, activated=T == 2, use_qk_l2norm=True, has_sources=True,
        varlen=T == 9, has_writes=T > 1, update_state=True, intermediate=T > 2, largest=3.4e38,
        epsilon=1e-6,
    )  # fmt: skip
    pointers = ["*bf16"] * 5 + ["*fp32"] * 2 + ["*i32"] * 4 + ["*" + pool, "*bf16", "*" + pool]
    pointers += ["*" + pool] * (len(arguments) - len(constants) - len(pointers))
    signature = dict(zip(arguments, pointers, strict=False)) | dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 1},
    )
    ptx = compiled.asm["ptx"].replace(which, "kernel")
    ptx = re.sub(r"\s*//.*", "", ptx)
    # Line numbers, and the debugger's tables behind the code.
    ptx = re.sub(r"(?m)^\s*\.(loc|file)\s.*\n", "", ptx).split(".section")[0]
    return {"exact": {"machine code": ptx}}


def _recording(launches, refs):
    """A module in place of jax_triton, whose triton_call writes down what it is given."""

    def described(x):
        # The kernel gets a pointer: how the elements are shaped is not its business.
        return (math.prod(x.shape), str(x.dtype))

    def record(operands, options):
        options = {name: x for name, x in options.items() if name != "kernel"}
        types = options.pop("out_type" if refs else "out_shape")
        lines = [f"operand {described(x)}" for x in operands]
        lines += [f"result {described(x)}" for x in types]
        lines += [f"{name} = {options[name]!r}" for name in sorted(options)]
        launches.append("\n".join(lines))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in types)

    def with_refs(*operands, kernel, out_type, **options):
        return record(operands, options | dict(out_type=out_type))

    def without_refs(*operands, kernel, out_shape, **options):
        return record(operands, options | dict(out_shape=out_shape))

    stub: Any = types.ModuleType("jax_triton")
    stub.__spec__ = importlib.machinery.ModuleSpec("jax_triton", None)
    stub.triton_call = with_refs if refs else without_refs
    return stub


def _launched(call, launches):
    launches.clear()
    run = functools.partial(call.run, "triton")
    with jax.enable_x64(True) if call.x64 else contextlib.nullcontext():
        # A cache would keep a second call of the same shapes from launching anything.
        jax.clear_caches()
        jax.eval_shape(run, *call.arrays)
    if not launches:
        raise AssertionError("the call launched nothing")
    return {"exact": {f"launch {n}": text for n, text in enumerate(launches)}}


def main():
    part, file, *wanted = sys.argv[1:]
    results: dict = {}
    if part == "about":
        results = about()
    elif part == "times":
        import unchanged_times

        results = unchanged_times.measure(*wanted)
    else:
        calls = unchanged_calls.make_calls(unchanged_names.names())
        for name, evaluate in globals()[part](calls):
            if wanted and wanted[0] not in name:
                continue
            try:
                results[name] = evaluate()
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    with open(file, "wb") as opened:
        pickle.dump(results, opened)


if __name__ == "__main__":
    main()
