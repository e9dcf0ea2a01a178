"""Static options: what each kind allows, and what is wrong with a value."""

import math
import operator
import struct

from kda_contracts import remedy
from kda_contracts.arrays import dtype_name

ALLOWED = {
    "flag": "True or False",
    "size": "a whole number from 1 to 2147483647",
    "chunks": "a multiple of 64 from 64 to 2147483584",
    "positive": "a finite number above 0",
    "negative": "a finite number below 0",
    "nonnegative": "a finite number, 0 or above",
    "number": "a finite number",
}
WHOLE = {"size": 1, "chunks": 64}  # what a whole number is a multiple of
IN_RANGE = {
    "positive": lambda number: number > 0,
    "negative": lambda number: number < 0,
    "nonnegative": lambda number: number >= 0,
    "number": lambda number: True,
}


def judge_option(kind, option, value):
    """(what is allowed, what came, remedy lines) of an option that breaks such a rule, or None."""
    shown = shown_value(value)
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    if kind == "dtype":
        name = shown if is_array and not isinstance(value, type) else dtype_name(value)
        return None if name in option.dtypes else (one_of(option.dtypes), name, ())
    allowed = ALLOWED[option.kind]
    if is_array and value.shape != ():
        return allowed, shown, ()
    is_bool = isinstance(value, bool) or (is_array and dtype_name(value.dtype) == "bool")
    if is_bool != (option.kind == "flag") or isinstance(value, (str, bytes)):
        return allowed, shown, ()
    try:
        number = operator.index(value) if option.kind in WHOLE else float(value)
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
    if option.kind in WHOLE:
        right = 0 < number < 2**31 and number % WHOLE[option.kind] == 0
        return None if right else (allowed, shown, ())
    held = _as_float32(number)
    if math.isfinite(held) and IN_RANGE[option.kind](held):
        return None
    if held != number and math.isfinite(number):
        return allowed, number, (f"in float32 it is {held}",)
    return allowed, number, remedy.for_option(option.name, number)


def shown_value(value):
    """A value as an error shows it, with its type: at most 60 characters, however large it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"int of {value.bit_length()} bits"  # Python may refuse to write its digits
    return f"{type(value).__name__} {value!r:.60}"


def one_of(names):
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _as_float32(number):
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
