"""A checkpoint's KDA layers as `KDAParams`: judged by the headers, then read by rank."""

import dataclasses
import functools
import itertools
import math
import sys
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kda_contracts import (
    CHECKPOINT,
    FLOATS,
    BadFileError,
    CheckpointReport,
    ContractError,
    Fault,
    Option,
    check_checkpoint,
    find_tensors,
    judge_option,
    normalize_A_log,
    normalize_dt_bias,
    printable,
    read_json,
)
from kda_jax.weights import KDAConfig, KDAParams, config_from_hf

# A tensor's name -> the field of KDAParams, and what makes the one the other. CHECKPOINT says where
# it is cut.
FIELDS = {
    "q_proj.weight": ("q_proj", "transpose"),
    "k_proj.weight": ("k_proj", "transpose"),
    "v_proj.weight": ("v_proj", "transpose"),
    "q_conv1d.weight": ("q_conv", "squeeze"),
    "k_conv1d.weight": ("k_conv", "squeeze"),
    "v_conv1d.weight": ("v_conv", "squeeze"),
    "b_proj.weight": ("b_proj", "transpose"),
    "A_log": ("A_log", "normalize"),
    "dt_bias": ("dt_bias", "normalize"),
    "o_norm.weight": ("norm", "keep"),
    "o_proj.weight": ("o_proj", "transpose"),
    # the released models
    "f_a_proj.weight": ("f_down", "transpose"),
    "f_b_proj.weight": ("f_up", "transpose"),
    "g_a_proj.weight": ("g_down", "transpose"),
    "g_b_proj.weight": ("g_up", "transpose"),
    "g_proj.weight": ("g_up", "transpose"),
    # FLA's own layer
    "f_proj.0.weight": ("f_down", "transpose"),
    "f_proj.1.weight": ("f_up", "transpose"),
    "g_proj.0.weight": ("g_down", "transpose"),
    "g_proj.1.weight": ("g_up", "transpose"),
    "g_proj.1.bias": ("g_bias", "keep"),
}
DTYPE = Option("dtype", "dtype", "dtype of the weights", FLOATS)
BLOCK = 2**24  # elements that are judged at a time


def load_layer(
    path: str | PathLike[str],
    layer: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    dtype: DTypeLike | None = None,
) -> tuple[KDAConfig, KDAParams]:
    """One KDA layer of a checkpoint: all of it, or what one tensor-parallel rank holds.

    Args:
      path: a safetensors file, or a folder of them as a hub has it, with `config.json` beside it:
        Kimi-Linear, Kimi-K3, GLM-5.3 or FLA's own layer.
      layer: the layer's number in the tensors' names.
      rank: 0 to `ranks - 1`. ranks: ranks that the heads are split over; only this rank's part of
        the file is read.
      dtype: of the weights, a float one; None keeps each tensor's own. A_log and dt_bias are
        float32.

    Returns:
      `(KDAConfig, KDAParams)`: the config of the whole model, and the rank's weights, on JAX's
      default device.

    Raises:
      ContractError: the headers break the contract, there is no such KDA layer, the heads cannot be
        split over `ranks`, `rank` is out of range, `dtype` is not a float dtype, or the tail of a
        padded A_log is not zero.
      BadFileError: a file that cannot be judged or read.
      ImportError: without `safetensors` (the extra `checkpoint`).

    >>> import tempfile
    >>> from kda_jax.tools.synthetic import write_layer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_layer(folder, "kimi-linear-48b", layer=2)
    ...     config, params = load_layer(folder, 2, rank=7, ranks=8)
    >>> config.HV, params.A_log.shape, params.q_proj.shape, params.q_proj.dtype.name
    (32, (4,), (2304, 512), 'bfloat16')
    """
    config, layers = _load(path, layer, rank, ranks, dtype, progress=False)
    return config, layers[layer]


def load_layers(
    path: str | PathLike[str],
    *,
    rank: int = 0,
    ranks: int = 1,
    dtype: DTypeLike | None = None,
    progress: bool = True,
) -> tuple[KDAConfig, dict[int, KDAParams]]:
    """All KDA layers of a checkpoint.

    Args:
      path, rank, ranks, dtype: as in `load_layer`.
      progress: whether a terminal shows how far it is, where `rich` is installed (the extra
        `checkpoint`).

    Returns:
      `(KDAConfig, {layer: KDAParams})`, the layers by their numbers in the tensors' names,
      ascending.

    Raises:
      ContractError, BadFileError, ImportError: as `load_layer`; one faulty layer is enough.

    >>> import tempfile
    >>> from kda_jax.tools.synthetic import write_layer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_layer(folder, "kimi-linear-48b", layer=2)
    ...     config, layers = load_layers(folder, ranks=32)
    >>> list(layers), layers[2].o_proj.shape
    ([2], (128, 2304))
    """
    return _load(path, None, rank, ranks, dtype, progress)


def check_values(
    path: str | PathLike[str],
    *,
    tp: int = 1,
    every: bool = False,
    progress: bool = True,
) -> CheckpointReport:
    """Judges a checkpoint's KDA layers by the headers, as `check_checkpoint` does, and by values.

    A_log must be finite or -inf, with zeros alone behind its heads; dt_bias must be finite.

    Args:
      path: as in `load_layer`. tp: tensor-parallel ranks that the heads are to be split over.
      every: also read and check all remaining tensors of those layers.
      progress: as in `load_layers`.

    Returns:
      `CheckpointReport`, with the faults of values behind those of the headers.

    Raises:
      BadFileError, ImportError: as `load_layer`.

    >>> import tempfile
    >>> from kda_jax.tools.synthetic import write_layer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_layer(folder, "kimi-k3")
    ...     check_values(folder).layers[0].notes
    ('A_log is (128,): normalize_A_log gives (96,), its tail of 32 is zero',)
    """
    report = check_checkpoint(path, tp=tp)
    with _opened(path) as file_of:
        layers = [
            _judge_values(file_of, layer, report.sizes, every)
            for layer in _shown(report.layers, "judging", progress)
        ]
    return dataclasses.replace(report, layers=tuple(layers))


def _load(path, wanted, rank, ranks, dtype, progress):
    """The config, and {layer: KDAParams} of all layers, or of the one that is wanted."""
    if dtype is not None and (fault := judge_option("dtype", DTYPE, dtype)):
        raise ContractError(f"`dtype` must be {fault[0]} (got {fault[1]})")
    report = check_checkpoint(path, tp=ranks)
    layers = _chosen(report, wanted)
    if not 0 <= rank < ranks:
        raise ContractError(f"`rank` must be 0 to {ranks - 1} (got {rank})")
    with _opened(path) as file_of:
        loaded = {
            layer.index: _read_layer(file_of, layer, report.sizes, rank, ranks, dtype)
            for layer in _shown(layers, "loading", progress)
        }
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    config = config_from_hf(read_json(folder / "config.json"))
    # Not every release's config says which output gate it has; the tensors do.
    low_rank = loaded[layers[0].index].g_down is not None
    return dataclasses.replace(config, gate_rank=config.V if low_rank else None), loaded


def _chosen(report, wanted):
    """The layers to load, which meet the contract."""
    layers = [layer for layer in report.layers if wanted is None or layer.index == wanted]
    if report.layers and not layers:
        known = ", ".join(str(layer.index) for layer in report.layers)
        raise ContractError(f"{report.path}: layer {wanted} is no KDA layer; those are {known}")
    if report.faults or any(layer.faults for layer in layers):
        raise ContractError(str(dataclasses.replace(report, layers=tuple(layers))))
    for one, other in itertools.pairwise(layers):  # they are sorted
        if one.index == other.index:
            names = f"{one.prefix} and {other.prefix}"
            raise ContractError(
                f"{report.path}: two layers have the number {one.index}: {printable(names)}"
            )
    return layers


@contextmanager
def _opened(path):
    """A function from a tensor's name to its file; each is opened once."""
    try:
        from safetensors import SafetensorError, safe_open  # an extra
    except ImportError as error:
        raise ImportError(
            "reading weights needs safetensors: install kda-jax with the extra `checkpoint`"
        ) from error
    files = find_tensors(path)
    with ExitStack() as stack:

        @functools.cache
        def opened(file):
            return stack.enter_context(safe_open(file, framework="numpy"))

        try:
            yield lambda name: opened(files[name][0])
        except SafetensorError as error:
            raise BadFileError(path, f"safetensors cannot read it: {error}") from error


def _read_layer(file_of, layer, sizes, rank, ranks, dtype):
    fields = {}
    for tensor in _tensors(layer):
        field, how = FIELDS[tensor.name]
        name = f"{layer.prefix}.{tensor.name}"
        part = _read_part(file_of(name), name, tensor, how, sizes, rank, ranks)
        fields[field] = jnp.asarray(
            part, part.dtype if how == "normalize" or dtype is None else dtype
        )
    return KDAParams(**fields)


def _read_part(file, name, tensor, how, sizes, rank, ranks):
    """A rank's part of one tensor, as NumPy, in the form that KDAParams wants."""

    def part(x, shape):
        if tensor.cut is None:
            return x[:]
        width = shape[tensor.cut] // ranks
        return x[(slice(None),) * tensor.cut + (slice(rank * width, (rank + 1) * width),)]

    if how == "normalize":  # small, and may be padded: whole first
        try:
            x = _normalized(file, name, tensor, sizes)
        except ContractError as error:
            raise ContractError(f"{printable(name)}: {error}") from None
        return part(x, x.shape)
    x = part(file.get_slice(name), tensor.shape(sizes))
    if how == "transpose":
        return x.T
    return x[:, 0] if how == "squeeze" else x


def _normalized(file, name, tensor, sizes):
    """All of A_log or dt_bias, in float32."""
    x = file.get_tensor(name).astype(np.float32)
    if tensor.name == "A_log":
        return normalize_A_log(x, sizes["HV"])
    return normalize_dt_bias(x, sizes["HV"], sizes["K"])


def _judge_values(file_of, layer, sizes, every):
    """The layer's report with the faults of values.

    A tensor whose header is at fault is not read.
    """
    faulty = {fault.tensor for fault in layer.faults}
    found = []
    for tensor in _tensors(layer):
        normalized = FIELDS[tensor.name][1] == "normalize"
        if tensor.name not in faulty and (normalized or every):
            name = f"{layer.prefix}.{tensor.name}"
            found.append(_value_fault(file_of(name), name, tensor, normalized, sizes))
    notes = layer.notes
    if not any(fault and fault.tensor == "A_log" for fault in found):
        notes = tuple(note.replace("is judged when it is loaded", "is zero") for note in notes)
    return dataclasses.replace(layer, notes=notes, faults=(*layer.faults, *filter(None, found)))


def _value_fault(file, name, tensor, normalized, sizes):
    """What is wrong with one tensor's values, or None."""
    try:
        blocks = (
            [_normalized(file, name, tensor, sizes)]
            if normalized
            else _blocks(file.get_slice(name))
        )
    except ContractError as error:  # the tail of a padded A_log
        message, _, cure = str(error).partition(". ")
        return Fault(tensor.name, message.replace(f"`{tensor.name}`", f"`{name}`"), cure)
    wrong, first, start = 0, "", 0
    for block in blocks:
        bad = ~np.isfinite(block)
        if tensor.name == "A_log":
            bad &= block != -np.inf  # a head that does not decay
        if bad.any():
            place = np.unravel_index(bad.argmax(), bad.shape)
            index = ", ".join(map(str, (start + place[0], *place[1:])))
            first = first or f"{float(block[place])} at [{index}]"
            wrong += int(np.count_nonzero(bad))
        start += len(block)
    if not wrong:
        return None
    allowed = "finite or -inf" if tensor.name == "A_log" else "finite"
    count = f"{wrong} value{'s' * (wrong != 1)} of {math.prod(tensor.shape(sizes))}"
    cure = "a damaged file, or a model that diverged: compare its checksum with the release's"
    return Fault(tensor.name, f"`{name}` must be {allowed} (got {first}, {count})", cure)


def _blocks(x):
    """A tensor's rows, a block at a time."""
    rows, *rest = x.get_shape()
    step = max(1, BLOCK // max(1, math.prod(rest)))
    return (x[start : min(start + step, rows)] for start in range(0, rows, step))


def _tensors(layer):
    """The tensors of a layer's layout; none where it is unknown."""
    return next((layout.tensors for layout in CHECKPOINT if layout.name == layer.layout), ())


def _shown(layers, doing, progress):
    """The layers one by one, with a bar on a terminal."""
    if not (progress and sys.stderr.isatty()):
        return layers
    try:
        from rich.console import Console  # an extra
        from rich.progress import track
    except ImportError:
        return layers
    return track(layers, f"{doing} KDA layers", console=Console(stderr=True), transient=True)
