"""Which files a checkpoint's folder consists of, and the tensors in them."""

import os
import re
from pathlib import Path

from kda_contracts.arrays import ArrayFacts
from kda_contracts.judge import ContractError
from kda_contracts.safetensors_header import BadFileError, Header, read_header, read_json, short

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A config.json has 0.1 MB, the index of 140,000 tensors 14 MB, and their headers 20 MB. What has
# more is not parsed, since all of it has 2 s and 256 MiB.
CONFIG_BYTES = 4_000_000
INDEX_BYTES = 16_000_000
ALL_HEADERS_BYTES = 20_000_000
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
    return {name: (x.path, x.facts(name)) for name, x in find_headers(located(path)).items()}


def find_headers(path: Path) -> dict[str, Header]:
    """{tensor name: the header of the file that holds it}. Raises BadFileError."""
    if not path.is_dir():
        return _of_file(path)
    try:
        files = sorted(x.name for x in path.iterdir() if x.name.endswith(".safetensors"))
    except OSError as error:
        raise BadFileError(path, error.strerror or str(error)) from None
    if SINGLE in files:
        return _of_file(inside(path, SINGLE))
    if os.path.lexists(path / INDEX):
        return _of_index(path)
    if len(files) == 1:
        return _of_file(inside(path, files[0]))
    raise BadFileError(
        path,
        f"{len(files)} safetensors files, no {SINGLE} and no {INDEX}"
        if files
        else "no safetensors file",
    )


def _of_file(path):
    header = read_header(path)
    return dict.fromkeys(header.entries, header)


def _of_index(folder):
    weight_map = read_json(inside(folder, INDEX), INDEX_BYTES, OF_AN_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise BadFileError(folder / INDEX, "weight_map must be an object of file names")
    named: dict[str, set] = {}
    for name, file in weight_map.items():
        named.setdefault(file, set()).add(name)
    del weight_map
    headers, left = {}, ALL_HEADERS_BYTES
    for file in sorted(named):
        header, names = read_header(inside(folder, file)), named.pop(file)
        left -= header.data_start
        if left < 0:
            raise BadFileError(
                folder / INDEX, f"its files have more than {ALL_HEADERS_BYTES} bytes of headers"
            )
        if lost := names - header.entries.keys():
            raise BadFileError(
                folder / INDEX,
                f"{short(min(lost))!a} is said to be in {file}, which does not hold it",
            )
        # The header's own strings: those of the index are given back.
        headers.update((name, header) for name in header.entries if name in names)
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
