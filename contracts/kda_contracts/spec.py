"""How a contract is written: operands whose axes are text ("B HV*K"), parsed once and never run as code."""

import math
from dataclasses import dataclass, field
from functools import cache

from kda_contracts.axes import AXES


@dataclass(frozen=True)
class Operand:
    """One array of an operator: `axes` such as "B HV*K", the dtypes it may have, what it means.

    `also` has other axes under which it may come; of all of them, an axis B or T of length 1 may be left out.
    """

    name: str
    axes: str
    dtypes: tuple[str, ...]
    meaning: str
    required: bool = True
    also: tuple[str, ...] = ()

    @property
    def expected(self):
        """The shape in letters, as errors and docstrings show it: "[B, HV*K]"."""
        return f"[{', '.join(self.axes.split())}]"

    def shape(self, sizes) -> tuple:
        """The shape in numbers, None where a letter is not known."""
        return tuple(axis_value(axis, sizes) for axis in self.axes.split())

    def shapes(self, sizes) -> list[tuple]:
        """All shapes that the operand may have, in numbers."""
        shapes = []
        for axes in (self.axes, *self.also):
            axes = axes.split()
            shapes.append(tuple(axis_value(axis, sizes) for axis in axes))
            unit = [axis for axis in ("B", "T") if axis in axes and sizes.get(axis) == 1]
            shapes += [
                tuple(axis_value(axis, sizes) for axis in axes if axis != left_out)
                for left_out in unit
            ]
        return list(dict.fromkeys(shapes))


@dataclass(frozen=True)
class Tensor(Operand):
    """One tensor of a checkpoint. `cut` is the axis that tensor parallelism cuts, None where each rank has it all."""

    cut: int | None = None


@dataclass(frozen=True)
class Layout:
    """One way in which a layer is released: the tensor whose name tells it, and all tensors."""

    name: str
    told_by: str
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Option:
    """One static option. `kind` is "positive", "negative" or "number" (finite, or None), "flag" or "dtype"."""

    name: str
    kind: str
    meaning: str
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One condition: what is judged (`kind`, see judge.py), on which arguments, and the first line of its error.

    `unless`, of the kind "needed", names the argument beside which this one may be left out.
    """

    kind: str
    arguments: str
    message: str
    unless: str | None = None

    @property
    def shared(self):
        """Whether the message speaks of several arguments at once, so that a detail must name its own."""
        return " " in self.arguments and "{argument}" not in self.message


@dataclass(frozen=True)
class Contract:
    """An operator's operands, options and rules. The rules are numbered from 1 in the order of `rules`.

    `pool` names the state pool, `anchor` the operand whose device the others share, `sizes_from` the operands that the
    letters are read from, in order (none: as bind.py reads a packed row).
    """

    name: str
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    options: tuple[Option, ...]
    rules: tuple[Rule, ...]
    pool: str = ""
    anchor: str = ""
    sizes_from: tuple[str, ...] = ()
    by_name: dict = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "by_name", {x.name: x for x in (*self.operands, *self.options)})
        for operand in (*self.operands, *self.results):
            for axis in operand.axes.split():
                parse_axis(axis)
        for rule in self.rules:
            if unknown := set(rule.arguments.split()) - set(self.by_name):
                raise ValueError(
                    f"{self.name}: rule {rule.message!r} names unknown arguments {sorted(unknown)}"
                )


@cache
def parse_axis(text):
    """'2*H*K+HV*V' -> ((2, ('H', 'K')), (1, ('HV', 'V'))): a sum of products of a number and letters of the legend."""
    terms = []
    for term in text.replace("-", "+-").split("+"):
        factor, letters = 1, []
        for word in term.split("*"):
            if word.removeprefix("-").isdigit():
                factor *= int(word)
            elif word in AXES:
                letters.append(word)
            else:
                raise ValueError(
                    f"axis {text!r}: {word!r} is neither a number nor a letter of the legend"
                )
        terms.append((factor, tuple(letters)))
    return tuple(terms)


def axis_value(text, sizes):
    """The number an axis stands for, or None where one of its letters is not in `sizes`."""
    terms = parse_axis(text)
    if any(sizes.get(letter) is None for _, letters in terms for letter in letters):
        return None
    return sum(factor * math.prod(sizes[letter] for letter in letters) for factor, letters in terms)
