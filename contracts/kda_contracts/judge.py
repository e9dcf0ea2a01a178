"""check(): judges what a caller passes against a contract, and reports all violations at once."""

import math
import operator
from dataclasses import dataclass, fields
from typing import Any

from kda_contracts import remedy
from kda_contracts.arrays import (
    ArrayFacts,
    compact,
    differ,
    facts,
    is_array,
    known,
    last_axis_contiguous,
    shape_text,
)
from kda_contracts.axes import AXES
from kda_contracts.bind import Bound, bind, odd_ones, packed_fault, packed_sizes
from kda_contracts.options import judge_option, one_of
from kda_contracts.spec import Contract, Option, Rule


@dataclass(frozen=True, repr=False)
class Sizes:
    """The sizes of one call, by the letters of the legend: numbers, or symbolic dimensions.

    A letter that the call's contract does not have is None.
    """

    B: Any = None
    H: Any = None
    HV: Any = None
    K: Any = None
    V: Any = None
    S: Any = None
    T: Any = None
    N: Any = None

    def __repr__(self):
        letters = (f"{letter}={x}" for letter, x in vars(self).items() if x is not None)
        return f"Sizes({', '.join(letters)})"


@dataclass(frozen=True)
class Violation:
    """One broken rule: its number in the contract, the argument, its first line and its others."""

    rule: int
    argument: str
    headline: str
    details: tuple[str, ...]


class ContractError(ValueError):
    """What a caller passed breaks the contract.

    `violations` has one entry per argument, in the rules' order.
    """

    def __init__(self, message: str, violations: tuple[Violation, ...] = ()):
        super().__init__(message)
        self.violations = violations


def check(contract: Contract, sizes: dict | None = None, /, **operands_and_options) -> Sizes:
    """Judges a call against a contract.

    Args:
      contract: the table, such as `PACKED_DECODE`.
      sizes: letters whose values are known beforehand, from a config; they overrule the shapes.
      **operands_and_options: the arrays by name (NumPy, JAX, torch, tracers, anything with `.shape`
        and `.dtype`) and the static options (`scale`, `lower_bound`, `out_dtype`; a dtype may be
        an object or its name). Strides are judged where the array carries them.

    Returns:
      `Sizes`, read from the shapes.

    Raises:
      ContractError: lists every argument that breaks a rule, with its remedy.
      TypeError: an unknown or missing name, or a number that is traced and so not static.

    >>> import numpy as np
    >>> from kda_contracts import PACKED_DECODE
    >>> x = {"mixed_qkv": np.zeros((3, 384), "float32"), "a": np.zeros((3, 256), "float32")}
    >>> x |= {"b": np.zeros((3, 4), "float32"), "A_log": np.zeros(4, "float32")}
    >>> x |= {"dt_bias": np.zeros(256, "float32"), "ssm_state_indices": np.array([4, -1, 0])}
    >>> x |= {"initial_state": np.zeros((6, 4, 32, 64), "float32")}
    >>> check(PACKED_DECODE, **x)
    Sizes(B=3, H=2, HV=4, K=64, V=32, S=6)
    >>> check(PACKED_DECODE, **x | {"dt_bias": np.zeros(8, "float32")})
    Traceback (most recent call last):
    ...
    kda_contracts.judge.ContractError: kda_jax.packed_decode: 1 argument breaks the contract
      `dt_bias` must have 256 elements (got 8).
          expected [HV*K] = (256,), got (8,) float32
      with HV=4, V=32, K=64 from `initial_state` (6, 4, 32, 64), H=2 from `mixed_qkv` (3, 384)
    """
    given = {name: x for name, x in operands_and_options.items() if not _absent(contract, name, x)}
    if missing := [o.name for o in contract.operands if o.required and o.name not in given]:
        raise TypeError(f"{contract.name}: missing {', '.join(missing)}")
    arrays = {
        o.name: facts(given[o.name]) for o in contract.operands if is_array(given.get(o.name))
    }
    bound = bind(contract, arrays, sizes or {})
    violations: list[Violation] = []
    for number, rule in enumerate(contract.rules, 1):
        for argument in rule.arguments.split():
            absent = argument not in given and rule.kind != "needed"
            if absent or any(violation.argument == argument for violation in violations):
                continue
            if found := _judge(contract, rule, argument, given, arrays, bound):
                violations.append(Violation(number, argument, *found))
    if violations:
        raise ContractError(_report(contract, violations, bound), tuple(violations))
    return Sizes(**{field.name: bound.sizes.get(field.name) for field in fields(Sizes)})


def _absent(contract, name, x):
    entry = contract.by_name.get(name)
    if entry is None:
        raise TypeError(
            f"{contract.name} has no operand or option {name!r}; "
            f"it has {', '.join(contract.by_name)}"
        )
    return x is None and not entry.required


def _judge(contract: Contract, rule: Rule, argument: str, given: dict, arrays: dict, bound: Bound):
    """(headline, details) where the argument breaks the rule, else None.

    Over 60 lines, since each kind of rule has words of its own.
    """
    entry, sizes = contract.by_name[argument], bound.sizes
    words = {letter: sizes.get(letter, "?") for letter in AXES} | {"argument": argument}
    if rule.kind == "needed":
        lonely = argument not in given and rule.beside not in given
        return (rule.message, (remedy.NEEDED,)) if lonely else None
    if rule.kind == "beside":
        return (rule.message, (remedy.BESIDE,)) if rule.beside not in given else None
    if rule.kind == "alone":
        return (rule.message, (remedy.ALONE,)) if rule.beside in given else None
    if rule.kind in ("multiple", "equal"):
        return _against(contract, rule, argument, given)
    if isinstance(entry, Option):
        found = judge_option(rule.kind, entry, given[argument])
        if found is None:
            return None
        allowed, got, cure = found
        return rule.message.format(allowed=allowed, got=got, **words), cure
    if argument not in arrays:
        lines = (_expectation(entry, sizes), remedy.for_none(argument, given, arrays, sizes))
        return (
            f"`{argument}` must be an array (got {type(given[argument]).__name__}).",
            tuple(line for line in lines if line),
        )
    array = arrays[argument]
    if rule.kind == "rank" and argument == contract.pool and bound.pool_overruled:
        return _pool_violation(argument, array, sizes)
    broken, extra = _breaks(contract, rule.kind, argument, arrays, sizes)
    if not broken:
        return None
    wanted = entry.shape(sizes)
    complete = None not in wanted
    words |= {"wanted": shape_text(wanted) if complete else entry.expected}
    words |= {"elements": math.prod(wanted) if complete else "?"}
    words |= {"allowed": one_of(entry.dtypes), "got": array.dtype, "array": array} | extra
    words |= {"expected": entry.expected, "form": "varlen" if "cu_seqlens" in given else "dense"}
    words |= {
        name: arrays.get(name, ArrayFacts((), "none")) for name in contract.by_name if name in given
    }
    if rule.kind in (
        "rank",
        "shape",
        "layout",
        "table",
        "batch",
        "heads",
        "numel",
        "form",
        "channels",
        "counted",
        "one_row",
    ) or rule.kind.startswith("packed"):
        told = (
            None
            if rule.kind in ("form", "heads", "channels", "one_row")
            else f"{_expectation(entry, sizes)}, got {array}"
        )
        cure = (
            remedy.end_to_end(array)
            if rule.kind == "one_row"
            else remedy.for_shape(argument, entry, arrays, sizes, contract.pool)
        )
        odd = () if cure else odd_ones(contract, argument, arrays, bound)
        lines = (told or f"got {array}", cure, *odd)
    elif rule.kind == "dtype":
        lines = (f"got {array}", remedy.for_dtype(argument, array))
    elif rule.kind == "device":
        lines = (
            f"on {array.device}, but `{contract.anchor}` is on {arrays[contract.anchor].device}",
        )
    else:
        lines = (
            f"got {array} with strides {shape_text(array.strides)} (in elements)",
            remedy.LAYOUT,
        )
    head, *rest = [line for line in lines if line]
    return rule.message.format(**words), (f"`{argument}`: {head}" if rule.shared else head, *rest)


def _breaks(contract, kind, argument, arrays, sizes):
    """(whether the array breaks a rule of this kind, further words for its message)."""
    array, entry = arrays[argument], contract.by_name[argument]
    if kind == "rank":
        axes = entry.axes.split()
        return array.ndim < len(axes) - 1 if axes[0] == "..." else array.ndim != len(axes), {}
    if kind == "last_axis":
        return not last_axis_contiguous(array), {}
    if kind == "contiguous":
        return not compact(array, array.ndim), {}
    if kind == "compact":
        return not compact(array, 3), {"strides": shape_text(array.strides or ())}
    if kind == "device":
        first = arrays.get(contract.anchor)
        return None not in (
            first,
            array.device,
            first and first.device,
        ) and array.device != first.device, {}
    if kind == "batch":
        return differ(array.shape[0], sizes.get("B")), {}
    if kind == "shape":
        leading = "..." not in entry.axes or "..." in sizes
        return leading and not _has_shape(array, entry.shape(sizes)), {}
    if kind == "layout":
        parts_of_slots = argument == contract.pool and array.ndim == 1 and sizes.get("S", 0) is None
        return parts_of_slots or not any(
            _has_shape(array, shape) for shape in entry.shapes(sizes)
        ), {}
    if kind == "table":
        return not _is_table(array, entry.shape(sizes), sizes, "cu_seqlens" in arrays), {}
    if kind == "numel":
        return differ(array.size, math.prod(wanted)) if None not in (
            wanted := entry.shape(sizes)
        ) else False, {}
    if kind == "form":
        varlen = "cu_seqlens" in arrays
        return differ(sizes.get("B"), 1 if varlen else sizes.get("N")), {
            "wanted_rows": "one row" if varlen else "N rows"
        }
    if kind == "one_row":
        return "cu_seqlens" in arrays and differ(sizes.get("B"), 1), {}
    if kind == "channels":
        return sizes.get("K") == 0, {}
    if kind == "counted":
        return None in entry.shape(sizes), {}
    if kind == "heads":
        H, HV = sizes.get("H"), sizes.get("HV")
        return known(H) and known(HV) and (H == 0 or HV == 0 or HV % H != 0), {}
    if kind == "dtype":
        return array.dtype not in entry.dtypes, {}
    width, q_size = packed_sizes(array, sizes)
    return q_size is not None and packed_fault(sizes, width, q_size) == kind, {
        "width": width,
        "q_size": q_size,
        "H": q_size // sizes["K"]
        if kind == "packed_heads" and q_size is not None and sizes["K"]
        else "?",
    }


def _against(contract, rule, argument, given):
    """A static number that does not fit the one that its rule names, where that one is right."""
    other = contract.by_name[rule.beside]
    if rule.beside not in given or judge_option("option", other, given[rule.beside]):
        return None
    got, wanted = operator.index(given[argument]), operator.index(given[rule.beside])
    broken = got % wanted if rule.kind == "multiple" else got != wanted
    cure = remedy.NO_RANK if argument == "gate_rank" else None
    return (
        (rule.message.format(got=got, wanted=wanted), (cure,) if cure else ()) if broken else None
    )


def _is_table(array, wanted, sizes, varlen):
    """Whether slots are one for each token of the call, or a row of them for each sequence."""
    if _has_shape(array, wanted):
        return True
    if array.ndim != 2 or differ(array.shape[0], sizes.get("N")):
        return False
    T = sizes.get("T")
    return varlen or not (known(T) and known(array.shape[1])) or array.shape[1] >= T


def _has_shape(array, wanted):
    return array.ndim == len(wanted) and not any(map(differ, array.shape, wanted))


def _pool_violation(name, pool, sizes):
    HV, K = sizes["HV"], sizes["K"]
    headline = (
        f"`{name}` must be [S, HV, V, K] with HV={HV}, K={K} as `a`, `b`, `A_log` and `dt_bias` "
        f"have it (got {shape_text(pool.shape)})"
    )
    return headline, remedy.for_pool(pool, HV, K)


def _expectation(operand, sizes):
    """'expected [HV*K] = (256,)', without the numbers where a letter is not known."""
    wanted = operand.shape(sizes)
    return f"expected {operand.expected}" + ("" if None in wanted else f" = {shape_text(wanted)}")


def _report(contract, violations, bound):
    break_it = "argument breaks" if len(violations) == 1 else "arguments break"
    lines = [f"{contract.name}: {len(violations)} {break_it} the contract"]
    headline = None
    for violation in violations:
        if violation.headline != headline:
            headline = violation.headline
            lines.append(f"  {headline}")
        lines += [f"      {detail}" for detail in violation.details]
    if bound.sources:
        lines.append(f"  with {', '.join(bound.sources)}")
    return "\n".join(lines)
