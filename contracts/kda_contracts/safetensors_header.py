"""The header of a safetensors file: every tensor's shape and dtype, without reading one weight.

The format: 8 bytes of length (little endian), that many bytes of JSON, then the data, to which the
JSON has offsets.
"""

import json
import math
import os
import stat

from kda_contracts.arrays import ArrayFacts

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_RANK = 16
ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(
        ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class BadFileError(Exception):
    """A file that cannot be judged: what is wrong, in one line that begins with its path."""

    def __init__(self, path, fault):
        super().__init__(printable(f"{path}: {fault}"))


def printable(text):
    """The text without what a terminal would obey or an encoding refuse: names come from files."""
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


def read_header(path):
    """{tensor name: ArrayFacts} of a safetensors file. Raises BadFileError, and nothing else."""
    with _open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise BadFileError(
                path, f"truncated: {file_bytes} bytes are too few for a safetensors header"
            )
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES and prefix.lstrip().startswith(b"{"):
            raise BadFileError(path, "this is JSON: give the folder")
        if length > MAX_HEADER_BYTES:
            raise BadFileError(
                path, f"its header claims {length} bytes, more than the format's {MAX_HEADER_BYTES}"
            )
        if length > file_bytes - 8:
            raise BadFileError(
                path, f"truncated: its header claims {length} bytes, and {file_bytes - 8} follow"
            )
        header = parse_json(path, file.read(length))
    return _judge(path, header, file_bytes - 8 - length)


def read_json(path, limit=MAX_HEADER_BYTES):
    """The object in a JSON file of at most `limit` bytes. Raises BadFileError."""
    with _open_regular(path) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise BadFileError(path, f"more than {limit} bytes of JSON")
    return parse_json(path, text)


def parse_json(path, text):
    """The JSON object in `text`, bytes. Raises BadFileError on anything else, or a key twice."""

    def without_duplicates(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            seen = set()
            key = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise BadFileError(path, f"the key {key[:80]!a} stands twice in one JSON object")
        return result

    def refuse(constant):
        raise BadFileError(path, f"{constant} is not JSON")

    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=refuse
        )
    except UnicodeDecodeError as error:
        raise BadFileError(path, f"not UTF-8 at byte {error.start} of the JSON") from None
    except json.JSONDecodeError as error:
        raise BadFileError(path, f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadFileError(path, "its JSON is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise BadFileError(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadFileError(path, f"the JSON must be an object (got {type(value).__name__})")
    return value


def _open_regular(path):
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadFileError(path, "not a regular file")
        return open(path, "rb")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadFileError(path, reason) from None


def _judge(path, header, data_bytes):
    tensors, spans = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shown = ascii(name if len(name) <= 80 else name[:77] + "...")
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise BadFileError(path, f"{shown} has no dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BITS:
            raise BadFileError(path, f"{shown} has the unknown dtype {str(dtype)[:40]!a}")
        if not _naturals(shape) or len(shape) > MAX_RANK:
            raise BadFileError(path, f"{shown} has an absurd shape: {str(shape)[:80]}")
        if not _naturals(offsets) or len(offsets) != 2:
            raise BadFileError(path, f"{shown} has no pair of offsets: {str(offsets)[:80]}")
        begin, end = offsets
        if not begin <= end <= data_bytes:
            raise BadFileError(
                path,
                f"{shown} lies at {begin}..{end}, outside the file's {data_bytes} bytes of data",
            )
        bits = math.prod(shape) * ITEM_BITS[dtype]
        if bits != (end - begin) * 8:
            raise BadFileError(
                path, f"{shown} is {shape} {dtype}, {bits // 8} bytes, and has {end - begin}"
            )
        tensors[name] = ArrayFacts(tuple(shape), NAMES.get(dtype, dtype))
        spans.append((begin, end, shown))
    spans.sort()
    reached = 0
    for begin, end, shown in spans:
        if begin != reached:
            raise BadFileError(
                path,
                f"{shown} {'overlaps' if begin < reached else 'leaves a gap behind'} "
                "the tensor before it",
            )
        reached = end
    if reached != data_bytes:
        raise BadFileError(
            path, f"{data_bytes - reached} bytes behind the last tensor belong to none"
        )
    return tensors


def _naturals(values):
    return isinstance(values, list) and all(type(x) is int and 0 <= x < 2**63 for x in values)
