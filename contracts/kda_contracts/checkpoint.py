"""A checkpoint judged before it is loaded: its KDA layers, by the headers of safetensors files.

Over 350 lines, since the report and what it is made of belong together.
"""

import math
from dataclasses import dataclass, field

from kda_contracts import quantized, remedy, tensor_names
from kda_contracts.arrays import longer_axes, shape_text
from kda_contracts.folder import find_headers, home_of, located, read_config
from kda_contracts.heads import split_heads
from kda_contracts.judge import ContractError
from kda_contracts.layer import CHECKPOINT
from kda_contracts.model_config import ModelConfig, read_model_config
from kda_contracts.normalize import padded
from kda_contracts.options import one_of
from kda_contracts.safetensors_header import (
    BadFileError,
    printable,
    short,
    without_collector,
)
from kda_contracts.spec import Layout, Operand
from kda_contracts.tensor_names import KDA_ONLY, Source

MOST_FAULTS = 50  # that `str()` of a report tells
MOST_STRANGERS = 50  # tensors of one layer that are no tensors of it, and are told one by one
MOST_BLOCKS = 1000  # of attention, far above any model's


@dataclass(frozen=True)
class Fault:
    """One thing wrong with one tensor, or with tensor "" a whole layer; the remedy, if known."""

    tensor: str
    message: str
    remedy: str | None = None


@dataclass(frozen=True)
class LayerReport:
    """One KDA layer: its number, where its names begin, its layout, what to know, what is wrong."""

    index: int
    prefix: str
    layout: str
    notes: tuple[str, ...]
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class CheckpointReport:
    """What `check_checkpoint` found; `str()` of it is what the command prints.

    `rank` is {tensor: shape} that each of `tp` ranks would hold.
    """

    path: str
    sizes: dict
    lower_bound: float | None
    tp: int
    layers: tuple[LayerReport, ...]
    faults: tuple[Fault, ...]
    rank: dict = field(default_factory=dict)
    allow_neg_eigval: bool = False

    @property
    def ok(self):
        return not self.faults and not any(layer.faults for layer in self.layers)

    def __str__(self):
        """A line a layer, then the first faults with their remedies, then a rank's share."""
        sizes = ", ".join(
            f"{letter}={self.sizes[letter]}" for letter in ("H", "HV", "K", "V", "D", "W")
        )
        gate = (
            "softplus gate"
            if self.lower_bound is None
            else f"safe gate, lower_bound {self.lower_bound}"
        )
        lines = [
            f"{self.path}: {len(self.layers)} KDA layer{'s' * (len(self.layers) != 1)}, "
            f"{sizes}, {gate}{', beta doubled' if self.allow_neg_eigval else ''}"
        ]
        for layer in self.layers:
            verdict = "ok" if not layer.faults else f"{len(layer.faults)} wrong"
            lines.append(
                f"  layer {layer.index:<4} {verdict:<8} {'; '.join((layer.layout, *layer.notes))}"
            )
        faults = [*self.faults, *(fault for layer in self.layers for fault in layer.faults)]
        for fault in faults[:MOST_FAULTS]:
            lines.append(f"  {fault.message}.")
            if fault.remedy:
                lines.append(f"      {fault.remedy}")
        if len(faults) > MOST_FAULTS:
            lines.append(f"  and {len(faults) - MOST_FAULTS} more; --json has all of them.")
        if self.rank and not faults:
            lines.append(
                f"  each of {self.tp} ranks holds, a layer:" if self.tp > 1 else "  a layer holds:"
            )
            lines += [f"      {name:<16} {shape_text(shape)}" for name, shape in self.rank.items()]
        return "\n".join(map(printable, lines))


@dataclass(frozen=True)
class Survey:
    """A report, and what a loader needs beside it: the config, and for each layer of the report
    where its tensors are, by their released names.
    """

    report: CheckpointReport
    model: ModelConfig
    sources: tuple[dict[str, Source], ...]


def check_checkpoint(path, tp=1) -> CheckpointReport:
    """Judges the KDA layers of a checkpoint by its headers; no weight is read.

    Args:
      path: a safetensors file, or a folder of them (`model.safetensors`, or what
        `model.safetensors.index.json` lists, or the only one; where that index is larger than 12 MB
        the numbered files); `config.json` beside it. Nothing outside that folder is followed,
        except the blobs of a hub cache.
      tp: tensor-parallel ranks that the heads are to be split over.

    Returns:
      `CheckpointReport`: a `LayerReport` for each KDA layer that the config or the names tell, with
      every fault.

    Raises:
      BadFileError: a file that cannot be judged, in one line.
      ContractError: `path` is no path.

    >>> check_checkpoint("nowhere")
    Traceback (most recent call last):
    ...
    kda_contracts.safetensors_header.BadFileError: nowhere: no such file or folder
    """
    return survey(path, tp).report


def survey(path, tp=1) -> Survey:
    """What `check_checkpoint` finds, with the sources of each layer's tensors."""
    path = located(path)
    model = read_model_config(home_of(path) / "config.json", read_config(path))
    with without_collector():
        headers = find_headers(path)
    found = tensor_names.find_layers(headers)
    with_rates = {i for i, x in found.items() if any(KDA_ONLY & y.keys() for y in x.values())}
    declared = _declared(model, with_rates)
    blocks = sum(map(len, found.values()))
    if blocks > MOST_BLOCKS:
        raise BadFileError(path, f"it has {blocks} attention blocks, more than {MOST_BLOCKS}")
    layers, sources = [], []
    wanted = declared.get("kda", frozenset())
    missing = wanted - found.keys()
    others = tensor_names.below(headers, missing) if missing else {}
    if not model.listed:  # a rule names more layers than a part of a model has
        wanted = {index for index in wanted if index in found or index in others}
    for index in sorted(with_rates | wanted):
        by_prefix = found.get(index, {})
        kda = {prefix: x for prefix, x in by_prefix.items() if KDA_ONLY & x.keys()}
        if not kda:
            layers.append(_missing_layer(index, by_prefix, others.get(index)))
            sources.append({})
        for prefix, tensors in kda.items():
            layer, tensors = _judge_layer(index, prefix, tensors, model, declared)
            layers.append(layer)
            sources.append(tensors)
    faults = [] if layers else [_nothing_found(headers)]
    rank = {}
    try:
        heads = split_heads(model.sizes["H"], model.sizes["HV"], tp)
        share = model.sizes | dict(zip(("H", "HV"), heads, strict=True))
        for layer, tensors in zip(layers, sources, strict=True):
            if not rank and (layout := layout_of(layer)):
                shown = [x for x in layout.tensors if x.required or x.name in tensors]
                rank = {tensor.name: tensor.shape(share) for tensor in shown}
    except ContractError as error:
        message, _, ways = str(error).partition("\n  ")
        faults.append(Fault("", message, ways or None))
    report = CheckpointReport(
        short(str(path)) if len(str(path)) > 4096 else str(path),
        model.sizes,
        model.lower_bound,
        tp,
        tuple(layers),
        tuple(faults),
        rank,
        model.allow_neg_eigval,
    )
    return Survey(report, model, tuple(sources))


def layout_of(layer: LayerReport) -> Layout | None:
    """The layout of a layer, None where it is unknown."""
    return next((layout for layout in CHECKPOINT if layout.name == layer.layout), None)


def _declared(model, found):
    """The layers that the config calls KDA and full attention, by number in the names.

    A list of a config counts from 0 or from 1 and does not say so: what fits the layers that were
    found decides, then 1 where no layer is called 0.
    """
    listed = model.layers
    if not listed.get("kda"):
        return {}
    first = model.counted_from
    if first is None:
        lowest = min(set().union(*listed.values()))
        first = max(
            (0, 1),
            key=lambda first: (
                len({x - first for x in listed["kda"]} & found),
                first == min(lowest, 1),
            ),
        )
    return {kind: frozenset(x - first for x in layers) for kind, layers in listed.items()}


def _missing_layer(index, by_prefix, others):
    """The report of a layer that config.json calls KDA, and that has none of KDA's own tensors."""
    held = sorted(name for tensors in by_prefix.values() for name in tensors)
    message = f"layer {index} is a KDA layer by config.json, but has no A_log and no dt_bias"
    if held:
        kind = "MLA" if any("kv_a_proj" in name for name in held) else "another kind of layer"
        seen = f"this looks like {kind}: it holds {_some(held, 4)}"
    elif others:
        message = f"layer {index} is a KDA layer by config.json, and has an unknown layout"
        seen = f"below `layers.{index}.` the file holds {_some(others, 4)}"
    else:
        seen = "the file holds nothing of it"
    prefix = short(next(iter(by_prefix), f"layers.{index}"))
    return LayerReport(index, prefix, "none", (), (Fault("", message, seen),))


def _nothing_found(headers):
    rates = sorted(name for name in headers if name.rpartition(".")[2] in KDA_ONLY)
    if rates:
        return Fault(
            "",
            f"no KDA layer was found under a known name, but {_some(rates, 2)}",
            f"known are layers.<i>. with one of {', '.join(tensor_names.BLOCKS)} behind it",
        )
    return Fault("", "no KDA layer was found: no tensor is called A_log or dt_bias")


def _some(names, most):
    shown = ", ".join(short(name) for name in names[:most])
    return f"{shown}, ..." if len(names) > most else shown


def _judge_layer(index, prefix, tensors, model, declared):
    """`(LayerReport, {released name: Source})`."""
    sizes, faults, notes = model.sizes, [], []
    other = declared and index not in declared["kda"]
    if other and (model.listed or index in declared["full"]):
        faults.append(
            Fault("", f"layer {index} is no KDA layer by config.json, but holds A_log or dt_bias")
        )

    def unknown(message, cure):
        faults.append(Fault("", f"layer {index} {message}", cure))
        return LayerReport(index, short(prefix), "unknown", (), tuple(faults)), {}

    if foreign := tensor_names.foreign(tensors):
        who, name, cure = foreign
        return unknown(f"has {who}: it holds {short(name)}", cure)
    tensors = tensor_names.separated(tensors, sizes)
    tensors, unscaled = quantized.with_scales(tensors, model.quantization)
    if scheme := quantized.scheme(tensors, model.quantization):
        return unknown(f"is quantized by {scheme}, which is not read", quantized.REMEDY)
    fits = [x for x in CHECKPOINT if tensors.keys() >= set(x.known_by)]
    if not fits:
        told = ", ".join(dict.fromkeys(x.known_by[0] for x in CHECKPOINT))
        held = f"it holds {_some(sorted(tensors), 6)}"
        return unknown(f"has an unknown layout: none of {told} is there", held)
    layout = max(fits, key=lambda x: len(x.known_by))
    known = {tensor.name: tensor for tensor in layout.tensors}
    biased = model.conv_bias or any(x in tensors for x in known if x.endswith("conv1d.bias"))
    for name, tensor in known.items():
        if name in tensors:
            if model.conv_bias is False and not tensor.required:
                told = f"`{_full(prefix, name)}` is there, and config.json says conv_bias is false"
                fault = Fault(name, told)
            elif name in unscaled:
                fault = Fault(name, f"`{_full(prefix, name)}` {unscaled[name]}", quantized.REMEDY)
            else:
                fault = _judge_tensor(prefix, tensor, tensors[name], sizes, notes)
            faults += [fault] if fault else []
        elif tensor.required or biased:
            wanted = f"expected {_expected(tensor, sizes)}"
            faults.append(Fault(name, f"`{_full(prefix, name)}` is missing", wanted))
    strangers = sorted(tensors.keys() - known.keys())
    for name in strangers[:MOST_STRANGERS]:
        told = f"`{_full(prefix, name)}` is no tensor of such a KDA layer"
        faults.append(Fault(short(name), told, remedy.for_stranger(name)))
    if more := len(strangers[MOST_STRANGERS:]):
        faults.append(Fault("", f"layer {index} has {more} more tensors of no such KDA layer"))
    if scaled := [x for x in tensors.values() if x.scale]:
        forms = sorted({f"{x.array.dtype} by {x.block[0]} x {x.block[1]}" for x in scaled})
        notes.append(
            f"{len(scaled)} weights with scales ({_some(forms, 3)}) are expanded when loaded"
        )
    return LayerReport(index, short(prefix), layout.name, tuple(notes), tuple(faults)), tensors


def _full(prefix, name):
    return f"{short(prefix)}.{short(name)}"


def _judge_tensor(prefix, tensor: Operand, source: Source, sizes, notes):
    array, wanted = source.array, tensor.shape(sizes)
    name = _full(prefix, tensor.name)
    # The dtype first: it explains a shape, and no shape explains a dtype.
    if array.dtype not in tensor.dtypes and not source.scale:
        message = f"`{name}` must be {one_of(tensor.dtypes)} (got {array.dtype})"
        return Fault(tensor.name, message, remedy.for_tensor_dtype(array.dtype))
    if array.shape != wanted and _readable(tensor, array, sizes):
        if tensor.name in KDA_ONLY:
            tail = array.size - math.prod(wanted)
            padding = f", its tail of {tail} is judged when it is loaded" if tail else ""
            notes.append(
                f"{tensor.name} is {shape_text(array.shape)}: normalize_{tensor.name} gives "
                f"{shape_text(wanted)}{padding}"
            )
        else:
            notes.append(
                f"{tensor.name} is {shape_text(array.shape)}: read as {shape_text(wanted)}"
            )
    elif array.shape != wanted:
        flat = ("*" in tensor.axes and " " not in tensor.axes) or tensor.name == "A_log"
        elements = f"must have {math.prod(wanted)} elements (got {array.size})"
        message = (
            elements
            if flat and array.size != math.prod(wanted)
            else f"must be {shape_text(wanted)}"
        )
        cure = remedy.for_tensor(tensor, array, sizes)
        detail = f"expected {_expected(tensor, sizes)}, got {array}"
        return Fault(tensor.name, f"`{name}` {message}", f"{detail}; {cure}" if cure else detail)
    if tensor.name in KDA_ONLY and array.dtype != "float32":
        notes.append(f"{tensor.name} is {array.dtype}; the released models keep it in float32")
    return None


def _readable(tensor, array, sizes):
    """Whether another shape than the released one means the same, beyond doubt."""
    if tensor.name in KDA_ONLY:
        return array.ndim > 0 and _normalizable(tensor.name, array, sizes)
    if "conv1d.weight" not in tensor.name:
        return False
    channels, _, taps = tensor.shape(sizes)
    return channels != taps and longer_axes(array.shape) == longer_axes((channels, taps))


def _normalizable(name, array, sizes):
    """Whether the normalizer would take it; one rate per channel is no padded A_log."""
    HV, K = sizes["HV"], sizes["K"]
    if name == "dt_bias":  # in the order of the heads: with K in front it is transposed
        return longer_axes(array.shape) in (longer_axes((HV, K)), longer_axes((HV * K,)))
    return array.size == HV or (padded(array, HV) and array.size != HV * K)


def _expected(tensor, sizes):
    return f"{tensor.expected} = {shape_text(tensor.shape(sizes))}"
