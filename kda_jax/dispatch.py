"""Which implementation runs, for every operator and the layer, and `explain`, which says why."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import kda_contracts
from kda_contracts import AXES, Sizes, check
from kda_jax import call, weights
from kda_jax.transforms import varying_axes

# In the order in which "auto" prefers them.
IMPLEMENTATIONS: tuple[call.Implementation, ...] = ("mosaic_gpu", "triton", "xla")
# Which operators have kernels. All others are XLA's alone.
DECODE = (
    "packed_decode",
    "fused_sigmoid_gating_kda_update",
    "recurrent_kda",
    "recurrent_verify",
    "commit",
    "kda_decode",
    "kda_verify",
    "kda_commit",
)
PREFILL = ("chunk_kda", "kda_prefill", "kda_apply")
CONTRACTS = {
    name.removeprefix("kda_jax."): contract
    for name, contract in sorted(
        (contract.name, contract)
        for contract in vars(kda_contracts).values()
        if isinstance(contract, kda_contracts.Contract) and contract.operands
    )
}


@dataclass(frozen=True)
class Choice:
    """What runs a call, and how a caller that pads its operands pads them best.

    `rows`: the fewest rows of a layer's step. XLA turns a one-row product into a sum: 143 us for
    the products of a layer on an H200, against 40 us for 8 rows.
    `tokens`: the number of tokens is best a multiple of this.
    """

    name: call.Implementation
    rows: int = 1
    tokens: int = 1


@dataclass(frozen=True)
class Explanation:
    """What a call would run. `reasons` says of each implementation why not; None for the chosen."""

    implementation: str
    reasons: dict[str, str | None]
    sizes: Sizes
    device: str

    def __str__(self):
        lines = [f"{self.sizes} on {self.device}"]
        for name, reason in self.reasons.items():
            lines.append(f"  {'->' if reason is None else '  '} {name:<11} {reason or 'runs'}")
        return "\n".join(lines)


def choose(contract, implementation, sizes, arrays) -> Choice:
    """What runs this call: a named implementation or, with "auto", the first that can.

    A named one runs or raises; only "auto" looks at the host's device. A kernel that could run but
    for where an operand lies raises in both cases: XLA would be several times slower in silence.

    Args:
      contract: the operator's, or the layer's.
      sizes: of the call. arrays: its operands by name; None among them is passed over.
    """
    if implementation == "auto":
        for name in IMPLEMENTATIONS:
            if name == "xla":
                return Choice("xla")
            if _backend_obstacle() or _host_obstacle(contract, name):
                continue
            if obstacle(contract, name, sizes, arrays):
                continue
            if reason := _placement_obstacle(arrays):
                raise NotImplementedError(f"{contract.name}: no kernel can run this call: {reason}")
            return _choice(contract, name)
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, IMPLEMENTATIONS[:-1])) + f" or {IMPLEMENTATIONS[-1]!r}"
        raise ValueError(f"`implementation` must be 'auto', {names} (got {implementation!r})")
    if implementation == "xla":
        return Choice("xla")
    reason = obstacle(contract, implementation, sizes, arrays)
    reason = (
        f"{reason}; use implementation='xla' or 'auto'" if reason else _placement_obstacle(arrays)
    )
    if reason:
        raise NotImplementedError(
            f"{contract.name}: implementation={implementation!r} cannot run this call: {reason}"
        )
    return _choice(contract, implementation)


def _choice(contract, name):
    module = _module(contract, name)
    return Choice(name, rows=8, tokens=getattr(module, "ALIGNED", 1))


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What a call of `op` would run on this host, and why not the others. Nothing is computed.

    Args:
      op: a public operator of kda_jax, or a step of the layer.
      *args, **kwargs: its arguments; each array may be a `jax.ShapeDtypeStruct`.

    Returns:
      `Explanation`: `.implementation`, `.reasons` (name -> every reason why not, the host's first;
      None for the chosen one), `.sizes`, `.device`; it prints as a table.

    Raises:
      ContractError, NotImplementedError: as the call would.
      TypeError: `op` is not an operator with a contract.

    >>> import jax, jax.numpy as jnp
    >>> import kda_jax
    >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    >>> slots = jax.ShapeDtypeStruct((3,), jnp.int32)
    >>> x = shape(3, 384), shape(3, 256), shape(3, 4), shape(4), shape(256)
    >>> pool = shape(6, 4, 32, 64)
    >>> explain(kda_jax.packed_decode, *x, pool, slots, implementation="xla").implementation
    'xla'
    """
    contract = CONTRACTS.get(getattr(op, "__name__", ""))
    if contract is None:
        raise TypeError(
            f"kda_jax.explain: `op` must be one of {', '.join(CONTRACTS)} (got {op!r:.60})"
        )
    bound = inspect.signature(op).bind(*args, **kwargs)
    bound.apply_defaults()
    given, letters = _opened(contract, bound.arguments)
    implementation = given.get("implementation", "auto")
    known = {name: x for name, x in given.items() if name in contract.by_name}
    known = {name: x for name, x in known.items() if not _only_asks_for_a_result(name, x)}
    sizes = check(contract, letters, **call.without_layout(known))
    arrays = {operand.name: known.get(operand.name) for operand in contract.operands}
    chosen = choose(contract, implementation, sizes, arrays).name
    reasons: dict[str, str | None] = {}
    for name in IMPLEMENTATIONS:
        obstacles = (
            ()
            if name == "xla"
            else (
                _backend_obstacle() or _host_obstacle(contract, name),
                obstacle(contract, name, sizes, arrays),
                _placement_obstacle(arrays),
            )
        )
        first = f"{chosen} comes first" if implementation == "auto" else f"{chosen} is asked for"
        reasons[name] = None if name == chosen else "; ".join(filter(None, obstacles)) or first
    return Explanation(chosen, reasons, sizes, _device_name())


def _opened(contract, arguments):
    """`(arguments, letters)`: a layer's weights, cache and config as operands and sizes."""
    given = dict(arguments)
    for name in ("drafts", "intermediate"):
        if dataclasses.is_dataclass(given.get(name)):
            given |= _fields(given.pop(name))
    if "params" not in given:
        if dataclasses.is_dataclass(given.get("cache")):
            given |= _fields(given.pop("cache"))
        return given, {}
    holders = {name: given.pop(name) for name in ("params", "cache", "config") if name in given}
    weights.require_containers(contract.name, **holders)
    for holder in holders.values():
        given |= _fields(holder)
    return given, weights.letters(holders["config"], holders["params"])


def _fields(holder):
    """The arrays of a dataclass by name, those of one inside it too."""
    values = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}
    inner = [values.pop(name) for name, x in list(values.items()) if dataclasses.is_dataclass(x)]
    given = {name: x for name, x in values.items() if x is not None and name not in AXES}
    return functools.reduce(operator.or_, map(_fields, inner), given)


def _only_asks_for_a_result(name, x):
    return name == "intermediate_states" and isinstance(x, bool)


def run(name, operands, static):
    """`(out, pool, intermediate)` of one implementation of decode, by its inner jit."""
    if name == "mosaic_gpu":
        from kda_jax import decode_mosaic_gpu as module
    elif name == "triton":
        from kda_jax import decode_triton as module
    else:
        from kda_jax import decode_xla as module
    return getattr(module, f"{static.op}_{name}")(operands, static=static)


def _module(contract, name) -> Any:
    """The kernel's file, loaded where it is needed: each takes a second, and Triton is an extra."""
    if name == "triton":
        from kda_jax import decode_triton as module
    elif _op(contract) in PREFILL:
        from kda_jax import prefill_mosaic_gpu as module
    else:
        from kda_jax import decode_mosaic_gpu as module
    return module


def _op(contract):
    return contract.name.removeprefix("kda_jax.")


def obstacle(contract, name, sizes, arrays):
    """Why a kernel cannot run this call on any host: what it is, and what it is of; or None."""
    op = _op(contract)
    if op == "commit" and arrays.get("intermediate") is not None:
        return "states are written by XLA; Drafts are run again by a kernel"
    if op not in DECODE and (op not in PREFILL or name == "triton"):
        return f"{contract.name} has no such kernel"
    try:
        module = _module(contract, name)
    except ModuleNotFoundError:
        return "jax-triton is not installed: install kda-jax with the extra `triton`"
    except ImportError as error:
        return (
            f"jax-triton cannot be imported here ({error}); it was tested with 0.3.1 on Triton 3.6"
        )
    for letter, size in vars(sizes).items():
        if not isinstance(size, int | None):
            return f"{letter} is symbolic, and a kernel's grid needs a number"
    if op in DECODE:
        return module.unsupported(sizes)
    return module.unsupported(sizes, [arrays[x].dtype for x in ("q", "k", "v", "x") if x in arrays])


def _placement_obstacle(arrays):
    """Why a kernel cannot take an operand from where it lies, as far as JAX shows it, or None.

    The partitioner cannot cut a kernel.
    """
    reasons = (_placement(name, x) for name, x in arrays.items() if x is not None)
    return next(filter(None, reasons), None)


def _placement(name, x):
    aval = jax.typeof(x) if not isinstance(x, (np.ndarray, jax.ShapeDtypeStruct)) else None
    if aval is not None and varying_axes(x):
        return (
            f"`{name}` varies over a mesh axis under shard_map with check_vma=True, which Refs do "
            "not support; pass check_vma=False to jax.shard_map, or use implementation='xla'"
        )
    if call.explicit_cut(x) is not None:
        return call.explicit_obstacle(name)
    sharding = getattr(x, "sharding", None) if not isinstance(x, jax.core.Tracer) else None
    on_devices = (
        sharding is not None and len(sharding.device_set) > 1 and not sharding.is_fully_replicated
    )
    if on_devices:
        return (
            f"`{name}` is sharded over several devices outside shard_map, so every device would "
            "gather all of it; wrap the call in jax.shard_map(..., check_vma=False), or use "
            "implementation='xla'"
        )
    return None


def _backend_obstacle():
    """Why no kernel runs on this host, or None."""
    backend = jax.default_backend()
    return None if backend == "gpu" else f"the default backend is {backend}, not gpu"


def _host_obstacle(contract, name):
    """Why a kernel does not run on this host's GPU, or None."""
    try:
        least, most = _module(contract, name).CAPABILITIES
    except ImportError:
        return None  # its own obstacle
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    known = capability.replace(".", "", 1).isdigit()
    if known and least <= float(capability) <= most:
        return None
    wanted = least if most == least else f"{least} or newer"
    return f"the device's compute capability is {capability}, and this kernel needs {wanted}"


def _device_name():
    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else device.platform
