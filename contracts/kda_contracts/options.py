"""Static options: what each kind allows, and what is wrong with a value."""

import math
import struct

from kda_contracts import remedy
from kda_contracts.arrays import dtype_name

ALLOWED = {
    "flag": "True or False",
    "positive": "a finite number above 0",
    "negative": "a finite number below 0",
    "number": "a finite number",
}


def judge_option(kind, option, value):
    """(what is allowed, what came, remedy lines) where an option breaks a rule of this kind, else None."""
    shown = f"{type(value).__name__} {value!r:.60}"
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
    if math.isfinite(held) and (
        held > 0 if option.kind == "positive" else held < 0 or option.kind == "number"
    ):
        return None
    if held != number and math.isfinite(number):
        return allowed, number, (f"in float32 it is {held}",)
    return allowed, number, remedy.for_option(option.name, number)


def one_of(names):
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _as_float32(number):
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
