"""How a contract is written: operands whose axes are text ("B HV*K"), parsed and never run."""

import math
from dataclasses import dataclass, field
from functools import cache

from kda_contracts.axes import AXES

FLOATS = ("float32", "bfloat16", "float16")
INDICES = ("int8", "int16", "int32", "int64")


@dataclass(frozen=True)
class Operand:
    """One array: `axes` such as "B HV*K", the dtypes it may have, what it means.

    "..." in front stands for any number of axes, whose sizes count as one letter.

    `also` has other axes under which it may come. Of all of them, an axis B or T of length 1 may
    be left out.
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

    @property
    def cut(self):
        """The axis that is cut over the heads, None where there is none.

        Where it is packed of several parts, such as "2*H*K+HV*V", each part is to be cut.
        """
        for number, axis in enumerate(self.axes.split()):
            if axis != "..." and any(
                letter in ("H", "HV") for _, letters in parse_axis(axis) for letter in letters
            ):
                return number
        return None

    @property
    def rows(self):
        """The axis that is cut over the slots or the batch, None where there is none."""
        axes = self.axes.split()
        return next((axes.index(letter) for letter in ("S", "B", "N") if letter in axes), None)

    def shape(self, sizes) -> tuple:
        """The shape in numbers, None where a letter is not known."""
        leading, axes = (), self.axes.split()
        if axes[0] == "...":
            leading, axes = sizes.get("...", (None,)), axes[1:]
        return (*leading, *(axis_value(axis, sizes) for axis in axes))

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


CU_SEQLENS = Operand(
    "cu_seqlens",
    "N+1",
    ("int32", "int64"),
    "where each sequence starts, and the last one ends",
    required=False,
)


SOURCES = Operand(
    "sources",
    "N",
    INDICES,
    "slot that a sequence starts from; outside [0, S): from nothing",
    required=False,
)
CHECKPOINTS = Operand(
    "checkpoints",
    "N M",
    INDICES,
    "slot that takes the state after every so many tokens; outside [0, S): not kept",
    required=False,
)


@dataclass(frozen=True)
class Layout:
    """One way in which a layer is released. `known_by` are the tensors that identify it: all of
    them are there, and of two such layouts it is the one with more.
    """

    name: str
    known_by: tuple[str, ...]
    tensors: tuple[Operand, ...]


@dataclass(frozen=True)
class Option:
    """One static option. `kind` is a number's ("size", "positive", ..., see options.py), "flag" or
    "dtype". One that is `required` may not be None.
    """

    name: str
    kind: str
    meaning: str
    dtypes: tuple[str, ...] = ()
    required: bool = False


CHECKPOINT_EVERY = Option("checkpoint_every", "chunks", "tokens from one checkpoint to the next")


@dataclass(frozen=True)
class Rule:
    """One condition: what is judged, on which arguments, and the first line of its error.

    `kind`: see judge.py. `beside` names the argument beside which this one may be left out (of the
    kind "needed"), that it must be a multiple of ("multiple") or equal to ("equal"), beside which
    it may not be given ("alone"), or without which it may not ("beside").
    """

    kind: str
    arguments: str
    message: str
    beside: str = ""

    @property
    def shared(self):
        """Whether the message speaks of several arguments, so that a detail must name its own."""
        return " " in self.arguments and "{argument}" not in self.message


TOGETHER = tuple(
    Rule("beside", argument, "`checkpoints` and `checkpoint_every` come together.", beside=other)
    for argument, other in (
        ("checkpoints", "checkpoint_every"),
        ("checkpoint_every", "checkpoints"),
    )
)


@dataclass(frozen=True)
class Contract:
    """An operator's operands, options and rules, which are numbered from 1 in their order.

    `pool` names the state pool, `anchor` the operand whose device the others share, `sizes_from`
    the operands that the letters are read from, in order (none: as bind.py reads a packed row).
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
            for axis in operand.axes.removeprefix("... ").split():
                parse_axis(axis)
        for rule in self.rules:
            if unknown := set(rule.arguments.split()) - set(self.by_name):
                raise ValueError(
                    f"{self.name}: rule {rule.message!r} names unknown arguments {sorted(unknown)}"
                )


@cache
def parse_axis(text):
    """'2*H*K+HV*V' -> ((2, ('H', 'K')), (1, ('HV', 'V'))).

    A sum of products of a number and letters of the legend.
    """
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
