"""Tensors of a checkpoint as NumPy, a part at a time: cut for a rank, expanded, normalized."""

import math
from contextlib import ExitStack, contextmanager

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kda_contracts import (
    BadFileError,
    ContractError,
    identity,
    normalize_A_log,
    normalize_dt_bias,
    printable,
)

ROWS = 1024  # of a quantized weight that are expanded at a time
BLOCK = 2**24  # elements that are judged at a time
FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


@contextmanager
def opened(found):
    """`read(source, slices)`, the values of a part of a tensor; each file is opened once.

    What is read is what was judged: a file that was exchanged or written to since is refused.
    """
    try:
        from safetensors import SafetensorError, safe_open  # an extra
    except ImportError as error:
        raise ImportError(
            "reading weights needs safetensors: install kda-jax with the extra `checkpoint`"
        ) from error
    files = {}

    def require_unchanged(header):
        try:
            same = identity(header.path) == header.identity
        except OSError as error:
            raise BadFileError(header.path, error.strerror or str(error)) from None
        if not same:
            raise BadFileError(header.path, "changed since it was checked: check it again")

    def read(source, slices):
        header = source.header
        if header.path not in files:
            files[header.path] = (
                header,
                stack.enter_context(safe_open(header.path, framework="numpy")),
            )
            require_unchanged(header)
        if source.array.dtype not in FLOAT8:
            return files[header.path][1].get_slice(source.name)[slices]
        # safetensors 0.8 has no FP8 for NumPy: what it wants to look up there does not exist.
        shape = header.entries[source.name][1]
        stored = np.memmap(header.path, np.uint8, "r", header.start(source.name), shape)
        return np.array(stored[slices]).view(FLOAT8[source.array.dtype])

    with ExitStack() as stack:
        try:
            yield read
            for header, _ in files.values():
                require_unchanged(header)
        except SafetensorError as error:
            raise BadFileError(found.report.path, f"safetensors cannot read it: {error}") from error


def read_part(read, source, tensor, how, sizes, rank, ranks, dtype):
    """A rank's part of one tensor, as NumPy, in the form that KDAParams wants."""
    if how == "normalize":  # small, and may be padded: whole first
        try:
            x = normalized(read, source, tensor, sizes)
        except ContractError as error:
            raise ContractError(f"{printable(source.name)}: {error}") from None
        return x[_slices(tensor, x.shape, rank, ranks)]
    shape = tensor.shape(sizes)
    slices = _slices(tensor, shape, rank, ranks)
    if source.scale:
        x = _expanded(read, source, slices, dtype)
    elif source.array.shape == shape:
        x = read(source, _shifted(slices, source.begin))
    else:  # a convolution's weight, small, in another shape
        x = _whole_of(read, source).reshape(shape)[slices]
    if how == "transpose":
        return x.T
    return x[:, 0] if how == "squeeze" else x


def _slices(tensor, shape, rank, ranks):
    """A slice of each axis: a rank's part of the one that is cut over the heads."""
    slices = [slice(0, size) for size in shape]
    if tensor.cut is not None:
        width = shape[tensor.cut] // ranks
        slices[tensor.cut] = slice(rank * width, (rank + 1) * width)
    return tuple(slices)


def _shifted(slices, begin):
    """The slices of rows that begin further down, in a tensor that is joined of several."""
    first, *rest = slices
    return slice(first.start + begin, first.stop + begin), *rest


def _whole_of(read, source):
    """All that a source stands for."""
    slices = tuple(slice(0, size) for size in source.array.shape)
    return read(source, _shifted(slices, source.begin))


def _expanded(read, source, slices, dtype):
    """A part of a quantized weight times its scales, rounded once from float32."""
    rows, columns = slices
    block_rows, block_columns = source.block
    scale = read(source.scale, tuple(slice(0, size) for size in source.scale.array.shape))
    height, width = source.array.shape
    scale = scale.reshape(-(-height // block_rows), -(-width // block_columns)).astype(np.float32)
    scale = scale[:, np.arange(columns.start, columns.stop) // block_columns]
    size = rows.stop - rows.start, columns.stop - columns.start
    result = np.empty(size, ml_dtypes.bfloat16 if dtype is None else jnp.dtype(dtype))
    for begin in range(rows.start, rows.stop, ROWS):
        end = min(begin + ROWS, rows.stop)
        values = read(source, (slice(begin, end), columns)).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # what a check of values reports
            values *= scale[np.arange(begin, end) // block_rows]
        result[begin - rows.start : end - rows.start] = cast(values, result.dtype, source.name)
    return result


def cast(x, dtype, name):
    """x in another dtype; what is finite and does not fit is refused."""
    with np.errstate(over="ignore"):
        result = x.astype(dtype, copy=False)
    if dtype == np.float16 and (np.isinf(result) & np.isfinite(x)).any():
        raise ContractError(
            f"{printable(name)}: values beyond float16's 65504; load them as bfloat16 or float32"
        )
    return result


def normalized(read, source, tensor, sizes):
    """All of A_log or dt_bias, in float32."""
    x = _whole_of(read, source).astype(np.float32)
    if tensor.name == "A_log":
        return normalize_A_log(x, sizes["HV"])
    return normalize_dt_bias(x, sizes["HV"], sizes["K"])


def blocks(read, source):
    """A tensor's rows, a block at a time; a quantized one's as they are expanded to float32."""
    rows, *rest = source.array.shape
    step = max(1, BLOCK // max(1, math.prod(rest)))
    for start in range(0, rows, step):
        slices = (slice(start, min(start + step, rows)), *(slice(0, size) for size in rest))
        if source.scale:
            yield _expanded(read, source, slices, np.float32)
        else:
            yield read(source, _shifted(slices, source.begin))
