"""What an array says of itself: of NumPy, JAX or torch, a tracer, or a shape without values."""

import math
import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class ArrayFacts:
    """Shape, dtype name, strides and device of one array-like.

    `strides` counts elements, and is None where the framework owns the layout (JAX). `device` is
    None except for torch. `library` is the name that its functions are called under.
    """

    shape: tuple
    dtype: str
    strides: tuple | None = None
    device: str | None = None
    library: str = "jnp"

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def rows(self):
        return self.shape[0] if self.shape else "none"

    def __str__(self):
        return f"{shape_text(self.shape)} {self.dtype}"


def is_array(x):
    return hasattr(x, "shape") and hasattr(x, "dtype")


def facts(x):
    """ArrayFacts of an array-like (anything with `.shape` and `.dtype`)."""
    root = type(x).__module__.partition(".")[0]
    return ArrayFacts(
        shape=tuple(map(_dimension, x.shape)),
        dtype=dtype_name(x.dtype),
        strides=_strides(x),
        device=str(x.device) if root == "torch" else None,
        library={"numpy": "np", "torch": "torch"}.get(root, "jnp"),
    )


def dtype_name(dtype):
    """'bfloat16' from a NumPy, ml_dtypes, JAX or torch dtype, a scalar type, or its name."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(name := getattr(dtype, "name", None), str):
        return name
    if isinstance(dtype, type):
        return dtype.__name__
    return str(dtype).rsplit(".", 1)[-1]


def known(dimension):
    """Whether a dimension is a plain number: symbolic ones are never compared."""
    return isinstance(dimension, int)


def differ(got, wanted):
    return known(got) and known(wanted) and got != wanted


def shape_text(shape):
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def longer_axes(shape):
    """The axes of a shape that are longer than 1: what their order says is all that it says."""
    return [size for size in shape if size != 1]


def last_axis_contiguous(array):
    if array.strides is None or not array.shape or 0 in array.shape:
        return True
    return array.shape[-1] == 1 or array.strides[-1] == 1


def compact(array, axes):
    """Whether the last `axes` axes lie in memory row-major, without gaps."""
    if array.strides is None or 0 in array.shape:
        return True
    step = 1
    for dimension, stride in list(zip(array.shape, array.strides, strict=True))[::-1][:axes]:
        if dimension > 1 and stride != step:
            return False
        step *= dimension
    return True


def _dimension(dimension):
    try:
        return operator.index(dimension)  # a NumPy integer becomes a plain one
    except TypeError:
        return dimension  # symbolic


def _strides(x):
    if callable(stride := getattr(x, "stride", None)):  # torch: in elements
        return tuple(stride())
    strides = getattr(x, "strides", None)  # NumPy: in bytes
    return tuple(s // x.itemsize for s in strides) if isinstance(strides, tuple) else None
