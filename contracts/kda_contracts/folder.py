"""Which files a checkpoint's folder consists of, and the tensors in them."""

import os
import re
from pathlib import Path

from kda_contracts.arrays import ArrayFacts
from kda_contracts.judge import ContractError
from kda_contracts.safetensors_header import BadFileError, Header, read_header, read_json, short
from kda_contracts.tensor_names import of_attention

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Released ones have five digits, or five and six (model-00001-of-000096).
NUMBERED = re.compile(r"(.*)-([0-9]{1,8})-of-([0-9]{1,8})\.safetensors")
# A config.json has 0.1 MB, the index of 110,000 tensors 12 MB, and their headers 17 MB. All of it
# has 2 s and 256 MiB, so the index of a larger model is not parsed (Kimi-K3's 500,000 tensors have
# one of 66 MB): its files are numbered.
CONFIG_BYTES = 4_000_000
INDEX_BYTES = 12_000_000
ALL_HEADERS_BYTES = 25_000_000
NUMBERED_HEADERS_BYTES = 130_000_000
NUMBERED_TENSORS = 800_000
# The least bytes for each mark. A config's lists are judged by name; an entry of an index has two
# long strings.
OF_A_CONFIG = {"{": 45, "[": 20, '"': 5}
OF_AN_INDEX = {"{": 10_000, "[": 10_000, '"': 12, ",": 45, ":": 45}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def located(path) -> Path:
    """The path of a file or folder that is there, with ~ expanded. Raises BadFileError."""
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise ContractError(f"`path` must be a str or a path (got {type(path).__name__})")
    given, path = os.fspath(path), Path(path)
    try:
        path = path.expanduser()
        path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        reason = "no such file or folder" if isinstance(error, FileNotFoundError) else str(error)
        if isinstance(error, FileNotFoundError) and HUB_ID.fullmatch(str(given)):
            reason += "; the name of a model on a hub? download it first, and give its folder"
        raise BadFileError(short(str(path)), reason) from None
    return path


def home_of(path) -> Path:
    """The folder in which config.json stands."""
    return path if path.is_dir() else path.parent


def read_config(path) -> dict:
    """The content of the config.json beside or in `path`. Raises BadFileError."""
    return read_json(inside(home_of(path), "config.json"), CONFIG_BYTES, OF_A_CONFIG)


def find_tensors(path) -> dict[str, tuple[Path, ArrayFacts]]:
    """{name: (file, ArrayFacts)} of a safetensors file or a folder of them. Raises BadFileError."""
    headers = find_headers(located(path), only=None)
    return {name: (x.path, x.facts(name)) for name, x in headers.items()}


def find_headers(path: Path, only=of_attention) -> dict[str, Header]:
    """{tensor name: the header of the file that holds it}, with entries as `only` asks for.

    Raises BadFileError.
    """
    if not path.is_dir():
        match = NUMBERED.fullmatch(path.name)
        if match and int(match[3]) > 1:
            raise BadFileError(path, f"this is one of {int(match[3])} files: give the folder")
        return _of_file(path, only)
    try:
        files = sorted(x.name for x in path.iterdir() if x.name.endswith(".safetensors"))
    except OSError as error:
        raise BadFileError(path, error.strerror or str(error)) from None
    if SINGLE in files:
        return _of_file(inside(path, SINGLE), only)
    if os.path.lexists(path / INDEX):
        return _of_index(path, only)
    if len(files) == 1:
        return _of_file(inside(path, files[0]), only)
    raise BadFileError(
        path,
        f"{len(files)} safetensors files, no {SINGLE} and no {INDEX}"
        if files
        else "no safetensors file",
    )


def _of_file(path, only):
    header = read_header(path, only)
    return dict.fromkeys(header.names, header)


def _of_index(folder, only):
    if inside(folder, INDEX).stat().st_size > INDEX_BYTES:
        return _of_numbered(folder, only)
    weight_map = read_json(inside(folder, INDEX), INDEX_BYTES, OF_AN_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or None in set(map(_file_name, weight_map.values())):
        raise BadFileError(folder / INDEX, "weight_map must be an object of file names")
    named: dict[str, set] = {}
    for name, file in weight_map.items():
        named.setdefault(file, set()).add(name)
    del weight_map
    headers, left = {}, ALL_HEADERS_BYTES
    for file in sorted(named):
        header, names = read_header(inside(folder, file), only), named.pop(file)
        left -= header.data_start
        if left < 0:
            raise BadFileError(
                folder / INDEX, f"its files have more than {ALL_HEADERS_BYTES} bytes of headers"
            )
        if lost := names.difference(header.names):
            raise BadFileError(
                folder / INDEX,
                f"{short(min(lost))!a} is said to be in {file}, which does not hold it",
            )
        # The header's own strings: those of the index are given back.
        headers.update((name, header) for name in header.names if name in names)
    return headers


def _file_name(x):
    """A file's name in an index, or None for what is none."""
    return x if isinstance(x, str) and x not in ("", ".", "..") else None


def _of_numbered(folder, only):
    """The tensors of files that say how many they are: no index is needed for that."""
    groups: dict[tuple, dict] = {}
    for file in sorted(x.name for x in folder.iterdir()):
        if match := NUMBERED.fullmatch(file):
            groups.setdefault((match[1], int(match[3])), {})[int(match[2])] = file
    whole = [
        files
        for (_, count), files in groups.items()
        if len(files) == count and min(files) == 1 and max(files) == count
    ]
    if len(whole) != 1:
        raise BadFileError(
            folder / INDEX,
            f"more than {INDEX_BYTES} bytes, and {len(whole) or 'no'} whole sets of files "
            "-00001-of-... beside it: one is needed",
        )
    headers, size, tensors = {}, 0, 0
    for _, file in sorted(whole[0].items()):
        path = inside(folder, file)
        header = read_header(path, only)
        size, tensors = size + header.data_start, tensors + len(header.names)
        if size > NUMBERED_HEADERS_BYTES or tensors > NUMBERED_TENSORS:
            raise BadFileError(
                folder,
                f"its files have more than {NUMBERED_HEADERS_BYTES} bytes of headers, or more "
                f"than {NUMBERED_TENSORS} tensors",
            )
        for name in header.names:
            if name in headers:
                raise BadFileError(path, f"{short(name)!a} is in {headers[name].path.name} too")
            headers[name] = header
    return headers


def inside(folder, name):
    """folder/name, which must lie there; a hub cache keeps its files as links to ../../blobs."""
    path = folder / name
    try:
        target, home = path.resolve(strict=True), folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadFileError(folder / short(name), reason) from None
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if Path(name).name != name or not any(target.is_relative_to(x) for x in homes):
        raise BadFileError(folder / short(name), "points outside the folder")
    return path
