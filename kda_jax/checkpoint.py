"""A checkpoint's KDA layers as `KDAParams`: judged by the headers, then read by rank."""

import dataclasses
import itertools
import math
import operator
import sys
from os import PathLike
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kda_contracts import (
    FLOATS,
    CheckpointReport,
    ContractError,
    Fault,
    Option,
    judge_option,
    layout_of,
    numbers_of,
    printable,
    survey,
)
from kda_jax import stored
from kda_jax.weights import KDAConfig, KDAParams

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
    "q_conv1d.bias": ("q_conv_bias", "keep"),
    "k_conv1d.bias": ("k_conv_bias", "keep"),
    "v_conv1d.bias": ("v_conv_bias", "keep"),
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
    "f_proj.weight": ("f_up", "transpose"),
    # FLA's own layer
    "f_proj.0.weight": ("f_down", "transpose"),
    "f_proj.1.weight": ("f_up", "transpose"),
    "g_proj.0.weight": ("g_down", "transpose"),
    "g_proj.1.weight": ("g_up", "transpose"),
    "g_proj.1.bias": ("g_bias", "keep"),
}
DTYPE = Option("dtype", "dtype", "dtype of the weights", FLOATS)


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
        Kimi-Linear, Kimi-K3, GLM-5.3, Ling-3.0 or FLA's own layer, as released or as transformers
        writes them.
      layer: the layer's number in the tensors' names.
      rank: 0 to `ranks - 1`. ranks: ranks that the heads are split over; only this rank's part of
        the file is read.
      dtype: of the weights, a float one; None keeps each tensor's own, and makes bfloat16 of FP8
        weights, which are expanded by their scales. A_log and dt_bias are float32.

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
    layer = _whole("layer", layer)
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
    found = survey(path, tp)
    with stored.opened(found) as read:
        judged = [
            _judge_values(read, layer, tensors, found.report.sizes, every)
            for layer, tensors in _shown(_pairs(found), "judging", progress)
        ]
    return dataclasses.replace(found.report, layers=tuple(judged))


def _load(path, wanted, rank, ranks, dtype, progress):
    """The config, and {layer: KDAParams} of all layers, or of the one that is wanted."""
    if dtype is not None and (fault := judge_option("dtype", DTYPE, dtype)):
        raise ContractError(f"`dtype` must be {fault[0]} (got {fault[1]})")
    rank, ranks = _whole("rank", rank), _whole("ranks", ranks)
    found = survey(path, ranks)
    chosen = _chosen(found, wanted)
    if not 0 <= rank < ranks:
        raise ContractError(f"`rank` must be 0 to {ranks - 1} (got {rank})")
    with stored.opened(found) as read:
        loaded = {
            layer.index: _read_layer(read, layer, tensors, found.report.sizes, rank, ranks, dtype)
            for layer, tensors in _shown(chosen, "loading", progress)
        }
    # Not every release's config says which gates it has; the tensors do.
    first = loaded[chosen[0][0].index]
    numbers: dict[str, Any] = numbers_of(found.model) | dict(
        gate_rank=None if first.g_down is None else found.model.sizes["V"],
        forget_rank=None if first.f_down is None else first.f_down.shape[1],
        conv_bias=first.q_conv_bias is not None,
    )
    return KDAConfig(**numbers), loaded


def _whole(name, x):
    """A whole number that a caller gave."""
    if isinstance(x, bool) or not hasattr(x, "__index__"):
        raise ContractError(f"`{name}` must be a whole number (got {type(x).__name__} {x!r:.60})")
    return operator.index(x)


def _pairs(found):
    """The layers of a report, each with its tensors' sources."""
    return list(zip(found.report.layers, found.sources, strict=True))


def _chosen(found, wanted):
    """The layers to load, with their sources; they meet the contract."""
    report = found.report
    chosen = [pair for pair in _pairs(found) if wanted is None or pair[0].index == wanted]
    layers = tuple(layer for layer, _ in chosen)
    if report.layers and not layers:
        known = ", ".join(str(layer.index) for layer in report.layers[:100])
        raise ContractError(
            f"{report.path}: layer {wanted} is not a KDA layer; the KDA layers are {known}"
        )
    if report.faults or any(layer.faults for layer in layers):
        raise ContractError(str(dataclasses.replace(report, layers=layers)))
    tensors = {layer.index: sources.keys() for layer, sources in chosen}
    for one, other in itertools.pairwise(layers):  # they are sorted
        if one.index == other.index:
            names = f"{one.prefix} and {other.prefix}"
            raise ContractError(
                f"{report.path}: two layers have the number {one.index}: {printable(names)}"
            )
        if one.layout != other.layout or tensors[one.index] != tensors[other.index]:
            raise ContractError(
                f"{report.path}: layers {one.index} and {other.index} have other layouts or "
                "biases: load them one by one"
            )
    return chosen


def _read_layer(read, layer, tensors, sizes, rank, ranks, dtype):
    fields: dict[str, Any] = {"f_down": None}
    layout = layout_of(layer)
    for tensor in layout.tensors if layout else ():
        if tensor.name not in tensors:
            continue  # one that may be missing
        field, how = FIELDS[tensor.name]
        part = stored.read_part(read, tensors[tensor.name], tensor, how, sizes, rank, ranks, dtype)
        if how != "normalize" and dtype is not None:
            part = stored.cast(part, jnp.dtype(dtype), tensors[tensor.name].name)
        fields[field] = jnp.asarray(part)
    return KDAParams(**fields)


def _judge_values(read, layer, tensors, sizes, every):
    """The layer's report with the faults of values.

    A tensor whose header is at fault is not read.
    """
    faulty, layout = {fault.tensor for fault in layer.faults}, layout_of(layer)
    found = []
    for tensor in layout.tensors if layout else ():
        normalized = FIELDS[tensor.name][1] == "normalize"
        if tensor.name in tensors and tensor.name not in faulty and (normalized or every):
            found.append(_value_fault(read, tensors[tensor.name], tensor, normalized, sizes))
    notes = layer.notes
    if not any(fault and fault.tensor == "A_log" for fault in found):
        notes = tuple(note.replace("is judged when it is loaded", "is zero") for note in notes)
    return dataclasses.replace(layer, notes=notes, faults=(*layer.faults, *filter(None, found)))


def _value_fault(read, source, tensor, normalized, sizes):
    """What is wrong with one tensor's values, or None."""
    name = source.name
    try:
        blocks = stored.blocks(read, source)
        if normalized:
            blocks = [stored.normalized(read, source, tensor, sizes)]
    except ContractError as error:  # the tail of a padded A_log
        message, _, cure = str(error).partition(". ")
        return Fault(tensor.name, message.replace(f"`{tensor.name}`", f"`{name}`"), cure)
    wrong, first, start = 0, "", source.begin
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
    count = f"{wrong} value{'s' * (wrong != 1)} of {math.prod(source.array.shape)}"
    cure = "a damaged file, or a model that diverged: compare its checksum with the release's"
    return Fault(tensor.name, f"`{name}` must be {allowed} (got {first}, {count})", cure)


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
