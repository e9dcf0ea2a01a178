"""Which implementation runs: what each cannot do, which one "auto" takes, and explain(), which tells."""

from dataclasses import dataclass

import jax
import numpy as np

from kda_contracts import CHUNK_KDA, PACKED_DECODE, Sizes, check
from kda_jax import call

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")  # in the order in which "auto" prefers them
KERNELS = ("mosaic_gpu", "triton")
LEAST_CAPABILITY = {"mosaic_gpu": 9.0, "triton": 8.0}


@dataclass(frozen=True)
class Explanation:
    """What a call would run. `reasons` says of each implementation why it would not; None is the chosen one."""

    implementation: str
    reasons: dict[str, str | None]
    sizes: Sizes
    device: str

    def __str__(self):
        lines = [f"{self.sizes} on {self.device}"]
        for name, reason in self.reasons.items():
            lines.append(f"  {'->' if reason is None else '  '} {name:<11} {reason or 'runs'}")
        return "\n".join(lines)


def choose(implementation, sizes, pool, op=PACKED_DECODE.name) -> str:
    """The implementation that runs this call. A named one runs or raises; only "auto" looks at the host's device."""
    if implementation != "auto":
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"`implementation` must be 'auto', {_quoted(IMPLEMENTATIONS)} (got {implementation!r})"
            )
        if reason := obstacle(implementation, sizes, pool):
            raise NotImplementedError(
                f"{op}: implementation={implementation!r} cannot run this call: {reason}"
            )
        return implementation
    for name in IMPLEMENTATIONS:
        if _host_obstacle(name) is None:
            if name in KERNELS and (reason := _sharding_obstacle(pool)):
                raise NotImplementedError(f"{op}: no kernel can run this call: {reason}")
            if obstacle(name, sizes, pool) is None:
                return name
    raise AssertionError("xla runs every call that meets the contract")


def choose_prefill(implementation, sizes, dtypes, operands) -> str:
    """The same for `chunk_kda`, whose kernels need the wgmma of compute capability 9.0.

    dtypes: of q, k and v. operands: by name, those whose sharding counts, the pool among them.
    """
    if implementation not in ("auto", "mosaic_gpu", "xla"):
        raise ValueError(
            f"`implementation` must be 'auto', 'mosaic_gpu' or 'xla' (got {implementation!r})"
        )
    if implementation == "xla" or (
        implementation == "auto" and _host_obstacle("mosaic_gpu", exactly=True)
    ):
        return "xla"
    from kda_jax import prefill_mosaic_gpu as kernel

    reasons = [
        kernel.unsupported(sizes, dtypes),
        *(_sharding_obstacle(x, name) for name, x in operands.items()),
    ]
    reason = next(filter(None, reasons), None)
    if reason and implementation != "auto":
        raise NotImplementedError(
            f"{CHUNK_KDA.name}: implementation={implementation!r} cannot run this call: {reason}; "
            "use implementation='xla' or 'auto'"
        )
    return "xla" if reason else "mosaic_gpu"


def explain(
    mixed_qkv,
    a,
    b,
    A_log,
    dt_bias,
    initial_state,
    ssm_state_indices,
    *,
    source_indices=None,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    lower_bound=None,
    out_dtype=None,
    implementation="auto",
) -> Explanation:
    """What `packed_decode` would run for these arguments on this host, and why not the others. Nothing is computed.

    Args: as `packed_decode`; each array may be a `jax.ShapeDtypeStruct`.

    Returns:
      `Explanation`: `.implementation`, `.reasons` (name -> why not, None for the chosen one), `.sizes`, `.device`;
      it prints as a table.

    Raises:
      ContractError, NotImplementedError: as `packed_decode` would.

    >>> import jax, jax.numpy as jnp
    >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    >>> slots = jax.ShapeDtypeStruct((3,), jnp.int32)
    >>> x = shape(3, 384), shape(3, 256), shape(3, 4), shape(4), shape(256), shape(6, 4, 32, 64), slots
    >>> explain(*x, implementation="xla").implementation
    'xla'
    """
    arrays = dict(
        mixed_qkv=mixed_qkv,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        ssm_state_indices=ssm_state_indices,
        source_indices=source_indices,
    )
    options = dict(scale=scale, lower_bound=lower_bound, out_dtype=out_dtype)
    options |= dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    sizes = check(PACKED_DECODE, **call.without_layout(arrays), **options)
    chosen = choose(implementation, sizes, initial_state)
    reasons: dict[str, str | None] = {}
    for name in IMPLEMENTATIONS:
        if name == chosen:
            reasons[name] = None
        else:
            reasons[name] = (
                obstacle(name, sizes, initial_state)
                or _host_obstacle(name)
                or f"{chosen} comes first"
            )
    return Explanation(chosen, reasons, sizes, _device_name())


def run(name, operands, static):
    """`(out, pool, intermediate)` of one implementation's inner jit."""
    if name == "mosaic_gpu":
        from kda_jax import decode_mosaic_gpu as module
    elif name == "triton":
        from kda_jax import decode_triton as module
    else:
        from kda_jax import decode_xla as module
    return getattr(module, f"{static.op}_{name}")(operands, static=static)


def obstacle(implementation, sizes, pool):
    """Why an implementation cannot run this call on any host, with the remedy, or None."""
    if implementation == "xla":
        return None
    # Kernel backends are imported where they are needed: each takes a second to load, and Triton is an extra.
    if implementation == "triton":
        try:
            from kda_jax import decode_triton as kernel
        except ModuleNotFoundError:
            return "jax-triton is not installed; pip install 'kda-jax[triton]', or use implementation='xla' or 'auto'"
        except ImportError as error:
            return f"jax-triton cannot be imported here ({error}); it was tested with 0.3.1 on Triton 3.6"
    else:
        from kda_jax import decode_mosaic_gpu as kernel
    if reason := kernel.unsupported(sizes):
        return f"{reason}; use implementation='xla' or 'auto'"
    return _sharding_obstacle(pool)


def _sharding_obstacle(x, name="the pool"):
    """Why a kernel, opaque to the partitioner, cannot take this operand, where JAX lets us see it; or None."""
    aval = jax.typeof(x) if not isinstance(x, (np.ndarray, jax.ShapeDtypeStruct)) else None
    if aval is not None and _varies_over_mesh(aval):
        return (
            f"{name} varies over a mesh axis under shard_map with check_vma=True, which Refs do not support; "
            "pass check_vma=False to jax.shard_map, or use implementation='xla'"
        )
    sharding = getattr(x, "sharding", None) if not isinstance(x, jax.core.Tracer) else None
    on_devices = (
        sharding is not None and len(sharding.device_set) > 1 and not sharding.is_fully_replicated
    )
    in_type = any(
        axis is not None for axis in getattr(getattr(aval, "sharding", None), "spec", ())
    )  # Explicit axes
    if on_devices or in_type:
        return (
            f"{name} is sharded over several devices outside shard_map, so every device would gather all of it; "
            "wrap the call in jax.shard_map(..., check_vma=False), or use implementation='xla'"
        )
    return None


def _varies_over_mesh(aval):
    axes = getattr(getattr(aval, "inner_aval", aval), "manual_axis_type", None)
    return bool(getattr(axes, "varying", None))


def _host_obstacle(implementation, exactly=False):
    """Why "auto" passes over an implementation on this host, or None; `exactly`: newer devices will not do."""
    if implementation == "xla":
        return None
    backend = jax.default_backend()
    if backend != "gpu":
        return f"the default backend is {backend}, not gpu"
    capability, least = (
        str(getattr(jax.devices()[0], "compute_capability", "unknown")),
        LEAST_CAPABILITY[implementation],
    )
    known = capability.replace(".", "", 1).isdigit()
    if not known or float(capability) < least or (exactly and float(capability) != least):
        return f"the device's compute capability is {capability}, and this kernel needs {least}"
    return None


def _device_name():
    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else device.platform


def _quoted(names):
    return ", ".join(repr(name) for name in names[:-1]) + f" or {names[-1]!r}"
