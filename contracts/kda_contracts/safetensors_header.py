"""The header of a safetensors file: every tensor's shape and dtype, without reading one weight.

The format: 8 bytes of length (little endian), that many bytes of JSON, then the data, to which the
JSON has offsets.
"""

import gc
import json
import math
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter, le, mul, sub
from pathlib import Path

from kda_contracts.arrays import ArrayFacts

# Four times the header of 48e9 parameters with 256 experts a layer in one file (3.0e6 bytes), and
# what is parsed within 2 s and 256 MiB whatever it holds. The format's own limit is 1e8.
MAX_HEADER_BYTES = 12_500_000
# Characters of JSON that are parsed whatever they are, and twice to say which key stands twice.
SHORT = 1_000_000
MAX_RANK = 16
MAX_NAME = 80  # characters of a name that an error shows
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
KEYS = frozenset({"dtype", "shape", "data_offsets"})
# The least bytes of JSON for each mark, as a scalar with a name of one letter has them.
OF_TENSORS = {"{": 45, "[": 20, '"': 5, ",": 10, ":": 12}
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class BadFileError(Exception):
    """A file that cannot be judged: what is wrong, in one line that begins with its path."""

    def __init__(self, path, fault):
        super().__init__(printable(f"{path}: {fault}"))


def printable(text):
    """The text without what a terminal would obey or an encoding refuse: names come from files."""
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


def short(name):
    """A name from a file, at most 80 characters of it."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."


@dataclass(frozen=True)
class Header:
    """What one file says of its tensors, all judged: their names, and of those that were asked for
    {name: (dtype, shape, where its data begin)}.

    A tuple has a fifth of the bytes of the JSON's objects, and a folder has 100,000 of them.
    `identity` tells the file from another that took its place later.
    """

    path: Path
    names: tuple
    entries: dict
    data_start: int
    identity: tuple

    def facts(self, name) -> ArrayFacts:
        dtype, shape, _ = self.entries[name]
        return ArrayFacts(shape, NAMES.get(dtype, dtype))

    def start(self, name) -> int:
        """Where a tensor's data begin in the file, in bytes."""
        return self.data_start + self.entries[name][2]


@contextmanager
def without_collector():
    """While JSON is read: the collector looks at 100,000 new objects again and again, in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def identity(file):
    """What changes when a file, a path or an open one's number, is exchanged or written to."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_header(path, only=None) -> Header:
    """The header of a safetensors file. Raises BadFileError, and nothing else.

    `only(name)` says of which tensors the entries are kept, after all were judged.
    """
    with _open_regular(path) as file:
        known = identity(file.fileno())
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
                path, f"its header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed"
            )
        if length > file_bytes - 8:
            raise BadFileError(
                path, f"truncated: its header claims {length} bytes, and {file_bytes - 8} follow"
            )
        text = _text(path, file.read(length))
    entries, metadata = _entries(path, text)
    _judge(path, entries, file_bytes - 8 - length)
    if len(text) > SHORT and not _each_key_once(text, entries, metadata):
        raise BadFileError(path, "a key stands twice in one JSON object")
    kept = {name: x for name, x in entries.items() if only(name)} if only else entries
    return Header(Path(path), tuple(entries), _small(kept), 8 + length, known)


def read_json(path, limit, most):
    """The object in a JSON file of at most `limit` bytes, as dense as `parse_json` says."""
    with _open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise BadFileError(path, f"more than {limit} bytes of JSON")
        text = _text(path, file.read(limit))  # the bytes are not kept beside the text
    return parse_json(path, text, most=most)


def parse_json(path, text, judge_keys=True, most=OF_TENSORS):
    """The JSON object in a text. Raises BadFileError on anything else.

    `judge_keys`: whether a key that stands twice is found, which takes twice as long. `most`: of
    each mark, how many bytes of the text there are for one at the least.
    """

    def without_duplicates(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            seen = set()
            key = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise BadFileError(path, f"the key {short(key)!a} stands twice in one JSON object")
        return result

    def refuse(constant):
        raise BadFileError(path, f"{constant} is not JSON")

    # JSON that is all brackets takes 30 times its size, and a second for each 2 MB.
    for mark, bytes_each in most.items() if len(text) > SHORT else ():
        if text.count(mark) > 2000 + len(text) // bytes_each:
            raise BadFileError(path, f"its JSON has {text.count(mark)} {mark} in {len(text)} bytes")
    try:
        hook = without_duplicates if judge_keys else None
        value = json.loads(text, object_pairs_hook=hook, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise BadFileError(path, f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadFileError(path, "its JSON is nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise BadFileError(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadFileError(path, f"the JSON must be an object (got {type(value).__name__})")
    return value


def _text(path, content):
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFileError(path, f"not UTF-8 at byte {error.start} of the JSON") from None


def _entries(path, text):
    """`({name: entry}, metadata)` of a header's JSON; in a short one no key stands twice."""
    entries = parse_json(path, text, judge_keys=False)
    metadata = entries.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if type(metadata) is not dict or not set(map(type, metadata.values())) <= {str}:
        raise BadFileError(path, "its __metadata__ must be an object of strings")
    # An escape may hide that two keys are one.
    if len(text) <= SHORT and ("\\" in text or not _each_key_once(text, entries, metadata)):
        parse_json(path, text)
    return entries, metadata


def _each_key_once(text, entries, metadata):
    """As many keys as entries: then none stands twice, and none was lost."""
    others = [*entries, *metadata, *metadata.values()]
    return all(text.count(f'"{key}"') == len(entries) + others.count(key) for key in KEYS)


def _small(entries):
    """The judged entries as tuples, which share their shapes."""
    shapes, dtypes = {}, {dtype: dtype for dtype in ITEM_BITS}
    return {
        name: (
            dtypes[entry["dtype"]],
            shapes.setdefault(shape := tuple(entry["shape"]), shape),
            entry["data_offsets"][0],
        )
        for name, entry in entries.items()
    }


def _open_regular(path):
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadFileError(path, "not a regular file")
        return open(path, "rb")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadFileError(path, reason) from None


def _judge(path, header, data_bytes):
    """Every rule over all tensors at once, in C: a loop over 21,000 of them took five times as long
    as their JSON.

    Only where a rule is broken is the first tensor that breaks it looked for.
    """
    entries = list(header.values())

    def require(holds, ok, fault):
        if not holds:
            for name, entry in header.items():
                if not ok(entry):
                    raise BadFileError(path, f"{short(name)!a} {fault(entry)}")

    require(
        set(map(type, entries)) <= {dict} and all(map(KEYS.issubset, entries)),
        lambda entry: type(entry) is dict and entry.keys() >= KEYS,
        lambda entry: "has no dtype, shape and data_offsets",
    )
    dtypes = [entry["dtype"] for entry in entries]
    require(
        set(map(type, dtypes)) <= {str} and set(dtypes) <= ITEM_BITS.keys(),
        lambda entry: type(entry["dtype"]) is str and entry["dtype"] in ITEM_BITS,
        lambda entry: f"has the unknown dtype {str(entry['dtype'])[:40]!a}",
    )
    shapes = [entry["shape"] for entry in entries]
    require(
        _naturals(shapes) and max(map(len, shapes), default=0) <= MAX_RANK,
        lambda entry: _naturals([entry["shape"]]) and len(entry["shape"]) <= MAX_RANK,
        lambda entry: f"has an absurd shape: {str(entry['shape'])[:80]}",
    )
    offsets = [entry["data_offsets"] for entry in entries]
    require(
        _naturals(offsets) and set(map(len, offsets)) <= {2},
        lambda entry: _naturals([entry["data_offsets"]]) and len(entry["data_offsets"]) == 2,
        lambda entry: f"has no pair of offsets: {str(entry['data_offsets'])[:80]}",
    )
    begins, ends = [list(map(itemgetter(i), offsets)) for i in (0, 1)]
    require(
        all(map(le, begins, ends)) and max(ends, default=0) <= data_bytes,
        lambda entry: entry["data_offsets"][0] <= entry["data_offsets"][1] <= data_bytes,
        lambda entry: (
            f"lies at {entry['data_offsets'][0]}..{entry['data_offsets'][1]}, outside "
            f"the file's {data_bytes} bytes of data"
        ),
    )
    bits = list(map(mul, map(math.prod, shapes), map(ITEM_BITS.get, dtypes)))
    require(
        bits == list(map(mul, map(sub, ends, begins), repeat(8))),
        lambda entry: _bits(entry) == _length(entry) * 8,
        lambda entry: (
            f"is {entry['shape']} {entry['dtype']}, {_bits(entry) // 8} bytes, and has "
            f"{_length(entry)}"
        ),
    )
    # Each tensor begins where one ends: then every byte belongs to one alone.
    begins.sort()
    ends.sort()
    if begins != [0, *ends][:-1]:
        _name_gap(path, header)
    reached = ends[-1] if ends else 0
    if reached != data_bytes:
        raise BadFileError(
            path, f"{data_bytes - reached} bytes behind the last tensor belong to none"
        )


def _name_gap(path, header):
    reached = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != reached:
            raise BadFileError(
                path,
                f"{short(name)!a} {'overlaps' if begin < reached else 'leaves a gap behind'} "
                "the tensor before it",
            )
        reached = end


def _bits(entry):
    return math.prod(entry["shape"]) * ITEM_BITS[entry["dtype"]]


def _length(entry):
    begin, end = entry["data_offsets"]
    return end - begin


def _naturals(lists):
    """Whether all of them are lists of whole numbers from 0 to 2**63 - 1."""
    if not set(map(type, lists)) <= {list}:
        return False
    numbers = list(chain.from_iterable(lists))
    if not set(map(type, numbers)) <= {int}:
        return False
    return not numbers or (min(numbers) >= 0 and max(numbers) < 2**63)
