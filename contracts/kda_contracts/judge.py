"""check(): judges what a caller passes against a contract, and reports every violation at once."""

import math
import struct
from dataclasses import dataclass

from kda_contracts import remedy
from kda_contracts.arrays import (
    ArrayFacts,
    compact,
    dtype_name,
    facts,
    is_array,
    last_axis_contiguous,
    shape_text,
)
from kda_contracts.bind import POOL, Bound, bind, differ, packed_fault, packed_sizes
from kda_contracts.spec import Contract, Operand, Option, Rule, axis_value


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call, by the letters of the legend. A symbolic dimension stays symbolic."""

    B: int
    H: int
    HV: int
    K: int
    V: int
    S: int


@dataclass(frozen=True)
class Violation:
    """One broken rule: its number in the contract, the argument, the first line, and the lines below it."""

    rule: int
    argument: str
    headline: str
    details: tuple[str, ...]


class ContractError(ValueError):
    """What a caller passed breaks the contract. `violations` has one entry per argument, in the rules' order."""

    def __init__(self, message: str, violations: tuple[Violation, ...] = ()):
        super().__init__(message)
        self.violations = violations


def check(contract: Contract, **operands_and_options) -> Sizes:
    """Judges a call against a contract.

    Args:
      contract: the table, such as `PACKED_DECODE`.
      **operands_and_options: the arrays by name (NumPy, JAX, torch, tracers, anything with `.shape` and `.dtype`)
        and the static options (`scale`, `lower_bound`, `out_dtype`; a dtype may be an object or its name). Strides
        are judged where the array carries them.

    Returns:
      `Sizes`, read from the shapes.

    Raises:
      ContractError: lists every argument that breaks a rule, with its remedy.
      TypeError: an unknown or missing name, or a number that is traced and so not static.

    >>> import numpy as np
    >>> from kda_contracts import PACKED_DECODE
    >>> x = {"mixed_qkv": np.zeros((3, 384), "float32"), "a": np.zeros((3, 256), "float32")}
    >>> x |= {"b": np.zeros((3, 4), "float32"), "A_log": np.zeros(4, "float32"), "dt_bias": np.zeros(256, "float32")}
    >>> x |= {"initial_state": np.zeros((6, 4, 32, 64), "float32"), "ssm_state_indices": np.array([4, -1, 0])}
    >>> check(PACKED_DECODE, **x)
    Sizes(B=3, H=2, HV=4, K=64, V=32, S=6)
    >>> check(PACKED_DECODE, **x | {"dt_bias": np.zeros(4, "float32")})
    Traceback (most recent call last):
    ...
    kda_contracts.judge.ContractError: kda_jax.packed_decode: 1 argument breaks the contract
      `dt_bias` must have 256 elements (got 4).
          expected [HV*K] = (256,), got (4,) float32
          4 is HV: this looks like one bias per head; repeat each K=64 times, e.g. jnp.repeat(dt_bias, 64)
      with HV=4, V=32, K=64 from `initial_state` (6, 4, 32, 64), H=2 from `mixed_qkv` (3, 384)
    """
    given = {name: x for name, x in operands_and_options.items() if not _absent(contract, name, x)}
    if missing := [o.name for o in contract.operands if o.required and o.name not in given]:
        raise TypeError(f"{contract.name}: missing {', '.join(missing)}")
    arrays = {o.name: facts(given[o.name]) for o in contract.operands if is_array(given.get(o.name))}
    bound = bind(arrays)
    violations: list[Violation] = []
    for number, rule in enumerate(contract.rules, 1):
        for argument in rule.arguments.split():
            if argument not in given or any(violation.argument == argument for violation in violations):
                continue
            if found := _judge(contract, rule, argument, given, arrays, bound):
                violations.append(Violation(number, argument, *found))
    if violations:
        raise ContractError(_report(contract, violations, bound), tuple(violations))
    return Sizes(**{letter: bound.sizes[letter] for letter in Sizes.__dataclass_fields__})


def _absent(contract, name, x):
    entry = contract.by_name.get(name)
    if entry is None:
        raise TypeError(f"{contract.name} has no operand or option {name!r}; it has {', '.join(contract.by_name)}")
    return x is None and not (isinstance(entry, Operand) and entry.required)


def _judge(contract: Contract, rule: Rule, argument: str, given: dict, arrays: dict, bound: Bound):
    """(headline, details) where the argument breaks the rule, else None."""
    entry, sizes = contract.by_name[argument], bound.sizes
    words = {letter: sizes.get(letter, "?") for letter in ("B", "H", "HV", "K", "V", "S")} | {"argument": argument}
    if isinstance(entry, Option):
        found = _judge_option(rule.kind, entry, given[argument])
        if found is None:
            return None
        allowed, got, cure = found
        return rule.message.format(allowed=allowed, got=got, **words), cure
    if argument not in arrays:
        return f"`{argument}` must be an array (got {type(given[argument]).__name__}).", (_expectation(entry, sizes),)
    array = arrays[argument]
    if rule.kind == "rank" and argument == POOL and bound.pool_overruled:
        return _pool_violation(array, sizes)
    broken, extra = _breaks(rule.kind, argument, entry, arrays, sizes)
    if not broken:
        return None
    wanted = entry.shape(sizes)
    complete = None not in wanted
    words |= {"wanted": shape_text(wanted) if complete else entry.expected}
    words |= {"elements": math.prod(wanted) if complete else "?"}
    words |= {"allowed": _one_of(entry.dtypes), "got": array.dtype, "array": array} | extra
    words |= {name: arrays.get(name, ArrayFacts((), "none")) for name in contract.by_name if name in given}
    if rule.kind in ("rank", "shape", "batch") or rule.kind.startswith("packed"):
        lines = (f"{_expectation(entry, sizes)}, got {array}", remedy.for_shape(argument, entry, arrays, sizes))
    elif rule.kind == "dtype":
        lines = (f"got {array}", remedy.for_dtype(argument, array.dtype))
    elif rule.kind == "device":
        lines = (f"on {array.device}, but `mixed_qkv` is on {arrays['mixed_qkv'].device}",)
    else:
        lines = (f"got {array} with strides {shape_text(array.strides)} (in elements)", remedy.LAYOUT)
    head, *rest = [line for line in lines if line]
    return rule.message.format(**words), (f"`{argument}`: {head}" if rule.shared else head, *rest)


def _breaks(kind, argument, entry, arrays, sizes):
    """(whether the array breaks a rule of this kind, further words for its message)."""
    array = arrays[argument]
    if kind == "rank":
        return array.ndim != len(entry.axes.split()), {}
    if kind == "last_axis":
        return not last_axis_contiguous(array), {}
    if kind == "contiguous":
        return not compact(array, array.ndim), {}
    if kind == "compact":
        return not compact(array, 3), {}
    if kind == "device":
        first = arrays.get("mixed_qkv")
        return None not in (first, array.device, first and first.device) and array.device != first.device, {}
    if kind == "batch":
        return differ(array.shape[0], sizes.get("B")), {}
    if kind == "shape":
        wanted = [axis_value(axis, sizes) for axis in entry.axes.split()]
        return array.ndim != len(wanted) or any(map(differ, array.shape, wanted)), {}
    if kind == "dtype":
        return array.dtype not in entry.dtypes, {}
    width, q_size = packed_sizes(array, sizes)
    return q_size is not None and packed_fault(sizes, width, q_size) == kind, {
        "width": width,
        "q_size": q_size,
        "H": q_size // sizes["K"] if kind == "packed_heads" and q_size is not None and sizes["K"] else "?",
    }


def _judge_option(kind, option, value):
    """(what is allowed, what came, remedy lines) where an option breaks a rule of this kind, else None."""
    shown = f"{type(value).__name__} {value!r:.60}"
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    if kind == "dtype":
        name = shown if is_array and not isinstance(value, type) else dtype_name(value)
        return None if name in option.dtypes else (_one_of(option.dtypes), name, ())
    allowed = {
        "flag": "True or False",
        "positive": "a finite number above 0",
        "negative": "a finite number below 0",
    }[option.kind]
    if is_array and value.shape != ():
        return allowed, shown, ()
    is_bool = isinstance(value, bool) or (is_array and dtype_name(value.dtype) == "bool")
    if is_bool != (option.kind == "flag") or isinstance(value, (str, bytes)):
        return allowed, shown, ()
    try:
        number = float(value)
    except TypeError as error:
        if not is_array:
            return allowed, shown, ()
        raise TypeError(
            f"`{option.name}` must be static, known while tracing (got {type(value).__name__}); "
            f"close over it or mark it with static_argnames"
        ) from error
    except (OverflowError, ValueError):
        return allowed, shown, ()
    if option.kind == "flag":
        return None
    held = _as_float32(number)
    if math.isfinite(held) and (held > 0 if option.kind == "positive" else held < 0):
        return None
    if held != number and math.isfinite(number):
        return allowed, number, (f"in float32 it is {held}",)
    return allowed, number, remedy.for_option(option.name, number)


def _as_float32(number):
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def _pool_violation(pool, sizes):
    HV, K = sizes["HV"], sizes["K"]
    headline = (
        f"`{POOL}` must be [S, HV, V, K] with HV={HV}, K={K} as `a`, `b`, `A_log` and `dt_bias` have it "
        f"(got {shape_text(pool.shape)})"
    )
    return headline, remedy.for_pool(pool.shape, HV, K)


def _expectation(operand, sizes):
    """'expected [HV*K] = (256,)', without the numbers where a letter is not known."""
    wanted = operand.shape(sizes)
    return f"expected {operand.expected}" + ("" if None in wanted else f" = {shape_text(wanted)}")


def _one_of(names):
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _report(contract, violations, bound):
    plural = len(violations) > 1
    lines = [f"{contract.name}: {len(violations)} argument{'s break' if plural else ' breaks'} the contract"]
    headline = None
    for violation in violations:
        if violation.headline != headline:
            headline = violation.headline
            lines.append(f"  {headline}")
        lines += [f"      {detail}" for detail in violation.details]
    if bound.sources:
        lines.append(f"  with {', '.join(bound.sources)}")
    return "\n".join(lines)
