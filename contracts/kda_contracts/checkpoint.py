"""A checkpoint judged before it is loaded: its KDA layers, by the headers of safetensors files.

Over 350 lines, since the report and what it is made of belong together.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kda_contracts import remedy
from kda_contracts.arrays import ArrayFacts, shape_text
from kda_contracts.heads import split_heads
from kda_contracts.judge import ContractError, check
from kda_contracts.layer import CHECKPOINT, KDA_CONFIG, LOWER_BOUND, NORM_EPS
from kda_contracts.normalize import padded
from kda_contracts.options import judge_option, one_of, shown_value
from kda_contracts.safetensors_header import BadFileError, printable, read_header, read_json
from kda_contracts.spec import Operand

LAYER = re.compile(
    r"(?P<prefix>(?:.*\.)?layers\.(?P<index>\d{1,6})\.(?:self_attn|attn|linear_attn))\.(?P<tensor>.+)",
    re.S,
)
KDA_ONLY = frozenset({"A_log", "dt_bias"})  # what no full-attention layer has
CONFIG_BYTES = 10_000_000
INDEX = "model.safetensors.index.json"


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

    @property
    def ok(self):
        return not self.faults and not any(layer.faults for layer in self.layers)

    def __str__(self):
        """A line a layer, then every fault with its remedy, then a rank's share."""
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
            f"{sizes}, {gate}"
        ]
        for layer in self.layers:
            verdict = "ok" if not layer.faults else f"{len(layer.faults)} wrong"
            lines.append(
                f"  layer {layer.index:<4} {verdict:<8} {'; '.join((layer.layout, *layer.notes))}"
            )
        faults = [*self.faults, *(fault for layer in self.layers for fault in layer.faults)]
        for fault in faults:
            lines.append(f"  {fault.message}.")
            if fault.remedy:
                lines.append(f"      {fault.remedy}")
        if self.rank and not faults:
            lines.append(
                f"  each of {self.tp} ranks holds, a layer:" if self.tp > 1 else "  a layer holds:"
            )
            lines += [f"      {name:<16} {shape_text(shape)}" for name, shape in self.rank.items()]
        return "\n".join(map(printable, lines))


def check_checkpoint(path, tp=1) -> CheckpointReport:
    """Judges the KDA layers of a checkpoint by its headers; no weight is read.

    Args:
      path: a safetensors file, or a folder of them (with `model.safetensors.index.json` where there
        are several); `config.json` beside it. Nothing outside that folder is followed, except the
        blobs of a hub cache.
      tp: tensor-parallel ranks that the heads are to be split over.

    Returns:
      `CheckpointReport`: a `LayerReport` for each KDA layer that the config or the names tell, with
      every fault.

    Raises:
      BadFileError: a file that cannot be judged, in one line.

    >>> check_checkpoint("nowhere")
    Traceback (most recent call last):
    ...
    kda_contracts.safetensors_header.BadFileError: nowhere: no such file or folder
    """
    path = Path(path)
    try:
        path.stat()
    except (OSError, ValueError) as error:
        reason = "no such file or folder" if isinstance(error, FileNotFoundError) else str(error)
        raise BadFileError(path, reason) from None
    folder = path if path.is_dir() else path.parent
    config = read_json(_inside(folder, "config.json"), CONFIG_BYTES)
    sizes, lower_bound, listed = _geometry(folder / "config.json", config)
    found: dict[int, dict[str, dict[str, ArrayFacts]]] = {}
    for name, (_, array) in find_tensors(path).items():
        if match := LAYER.fullmatch(name):
            found.setdefault(int(match["index"]), {}).setdefault(match["prefix"], {})[
                match["tensor"]
            ] = array
    declared = _declared(
        listed,
        {index for index, x in found.items() if any(KDA_ONLY & y.keys() for y in x.values())},
    )
    layers = []
    for index in sorted(found.keys() | declared.get("kda", frozenset())):
        by_prefix = found.get(index, {})
        kda = {prefix: x for prefix, x in by_prefix.items() if KDA_ONLY & x.keys()}
        if not kda and index in declared.get("kda", ()):
            layers.append(_missing_layer(index, by_prefix))
        for prefix, tensors in kda.items():
            layers.append(_judge_layer(index, prefix, tensors, sizes, declared))
    faults = (
        []
        if layers
        else [Fault("", "no KDA layer was found: no tensor is called A_log or dt_bias")]
    )
    bound = None if judge_option("option", LOWER_BOUND, lower_bound) else lower_bound
    if lower_bound is not None and bound is None:
        message = (
            "the gate's lower bound in config.json must be null or a finite number below 0 "
            f"(got {_shown(lower_bound)})"
        )
        faults.append(Fault("", message))
    key, eps = _norm_eps(config)
    if judge_option("option", NORM_EPS, eps):
        message = f"{key} in config.json must be a finite number above 0 (got {_shown(eps)})"
        faults.append(Fault("", message))
    rank = {}
    try:
        share = sizes | dict(
            zip(("H", "HV"), split_heads(sizes["H"], sizes["HV"], tp), strict=True)
        )
        layout = next((x for x in CHECKPOINT for layer in layers if x.name == layer.layout), None)
        if layout:
            rank = {tensor.name: tensor.shape(share) for tensor in layout.tensors}
    except ContractError as error:
        message, _, ways = str(error).partition("\n  ")
        faults.append(Fault("", message, ways or None))
    return CheckpointReport(str(path), sizes, bound, tp, tuple(layers), tuple(faults), rank)


def find_tensors(path) -> dict[str, tuple[Path, ArrayFacts]]:
    """{name: (file, ArrayFacts)} of a safetensors file or a folder of them. Raises BadFileError."""
    path = Path(path)
    if not path.is_dir():
        return _of_file(path)
    try:
        files = sorted(x.name for x in path.iterdir() if x.name.endswith(".safetensors"))
    except OSError as error:
        raise BadFileError(path, error.strerror or str(error)) from None
    if not (path / INDEX).exists():
        if len(files) == 1:
            return _of_file(_inside(path, files[0]))
        raise BadFileError(
            path,
            f"{len(files)} safetensors files and no {INDEX}" if files else "no safetensors file",
        )
    weight_map = read_json(_inside(path, INDEX)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise BadFileError(path / INDEX, "weight_map is no object of file names")
    headers = {file: _of_file(_inside(path, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise BadFileError(
                path / INDEX, f"{name[:80]!a} is said to be in {file}, which does not hold it"
            )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _of_file(path):
    return {name: (path, array) for name, array in read_header(path).items()}


def _inside(folder, name):
    """folder/name, which must lie there; a hub cache keeps its files as links to ../../blobs."""
    path = folder / name
    try:
        target, home = path.resolve(strict=True), folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise BadFileError(path, getattr(error, "strerror", None) or str(error)) from None
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if Path(name).name != name or not any(target.is_relative_to(x) for x in homes):
        raise BadFileError(path, "points outside the folder")
    return path


def _geometry(path, config) -> tuple[dict, Any, dict]:
    """(sizes by letter, lower_bound, {"kda": layers, "full": layers}), as config.json has them."""
    config = config.get("text_config", config)
    linear = config.get("linear_attn_config") if isinstance(config, dict) else None
    if isinstance(linear, dict):
        names = {"H": "num_heads", "K": "head_dim", "W": "short_conv_kernel_size"}
        sizes: dict = {letter: linear.get(name) for letter, name in names.items()}
        sizes |= {"HV": sizes["H"], "V": sizes["K"], "D": config.get("hidden_size")}
        lists = {"kda": linear.get("kda_layers"), "full": linear.get("full_attn_layers")}
        listed = {
            kind: {x for x in layers if type(x) is int}
            for kind, layers in lists.items()
            if isinstance(layers, list)
        }
        lower_bound = linear.get(
            "gate_lower_bound", linear.get("lower_bound", config.get("gate_lower_bound"))
        )
    elif isinstance(config, dict) and config.get("model_type") == "kda":
        names = {"H": "num_heads", "K": "head_dim", "W": "conv_size", "D": "hidden_size"}
        sizes = {letter: config.get(name) for letter, name in names.items()}
        expand = config.get("expand_v", 1)
        whole = (
            type(sizes["K"]) is int
            and type(expand) in (int, float)
            and 0 < expand < 2**31
            and 0 < sizes["K"] < 2**31
        )
        sizes |= {
            "HV": config.get("num_v_heads") or sizes["H"],
            "V": int(sizes["K"] * expand) if whole else None,
        }
        listed, lower_bound = {}, config.get("lower_bound")
    else:
        raise BadFileError(path, "no linear_attn_config: this is no KDA model's config")
    if wrong := [
        letter for letter, size in sizes.items() if type(size) is not int or not 0 < size < 2**31
    ]:
        raise BadFileError(
            path, f"no usable number for {', '.join(wrong)} (num_heads, head_dim, hidden_size, ...)"
        )
    return sizes, lower_bound, listed


def layer_numbers(config) -> dict:
    """What a config.json's content says of its KDA layers, as the keywords of a `KDAConfig`.

    {letter: size, "lower_bound", "norm_eps", "gate_rank"}. Raises BadFileError where it is no KDA
    model's, or where a number is missing or wrong.
    """
    path = Path("config.json")
    sizes, lower_bound, _ = _geometry(path, config)
    if lower_bound is not None and judge_option("option", LOWER_BOUND, lower_bound):
        raise BadFileError(path, f"the gate's lower bound is {_shown(lower_bound)}")
    key, eps = _norm_eps(config)
    config = config.get("text_config", config)
    linear = config.get("linear_attn_config") or {}
    full = linear.get("use_full_rank_gate", config.get("use_full_rank_gate", False))
    numbers = sizes | {
        "lower_bound": lower_bound,
        "norm_eps": eps,
        "gate_rank": None if full else sizes["V"],
    }
    try:
        check(KDA_CONFIG, **numbers)
    except ContractError as error:
        faults = " ".join(violation.headline for violation in error.violations)
        raise BadFileError(path, faults.replace("`norm_eps`", f"`{key}`")) from None
    return numbers


def _norm_eps(config):
    """(the key, the number) of a config.json's epsilon of its norms."""
    config = config.get("text_config", config)
    key = "rms_norm_eps" if "rms_norm_eps" in config else "norm_eps"
    return key, config.get(key, 1e-5)


def _shown(x):
    """A value of a JSON file, at most 40 characters of it."""
    return f"{x!r:.40}" if not isinstance(x, int) or x.bit_length() < 128 else shown_value(x)


def _declared(listed, found):
    """The layers that the config calls KDA and full attention, by number in the names.

    A config counts from 0 or from 1 and does not say so: what fits the layers that were found
    decides, then 1 where no layer is called 0.
    """
    if not listed.get("kda"):
        return {}
    lowest = min(set().union(*listed.values()))
    first = max(
        (0, 1),
        key=lambda first: (
            len({x - first for x in listed["kda"]} & found),
            first == min(lowest, 1),
        ),
    )
    return {kind: frozenset(x - first for x in layers) for kind, layers in listed.items()}


def _missing_layer(index, by_prefix):
    held = sorted(name for tensors in by_prefix.values() for name in tensors)
    kind = (
        "MLA"
        if any("kv_a_proj" in name for name in held)
        else "another kind of layer"
        if held
        else "missing"
    )
    message = f"layer {index} is a KDA layer by config.json, but has no A_log and no dt_bias"
    seen = (
        f"this looks like {kind}: it holds {', '.join(held[:4])}"
        if held
        else "the file holds nothing of it"
    )
    return LayerReport(
        index, next(iter(by_prefix), f"layers.{index}"), "none", (), (Fault("", message, seen),)
    )


def _judge_layer(index, prefix, tensors, sizes, declared):
    layout = next((x for x in CHECKPOINT if x.known_by in tensors), None)
    faults = []
    if declared and index not in declared["kda"]:
        faults.append(
            Fault("", f"layer {index} is no KDA layer by config.json, but holds A_log or dt_bias")
        )
    if layout is None:
        told = ", ".join(x.known_by for x in CHECKPOINT)
        message = f"layer {index} has an unknown layout: none of {told} is there"
        faults.append(Fault("", message, f"it holds {', '.join(sorted(tensors)[:6])}"))
        return LayerReport(index, prefix, "unknown", (), tuple(faults))
    notes: list[str] = []
    known = {tensor.name: tensor for tensor in layout.tensors}
    for name, tensor in known.items():
        if name not in tensors:
            faults.append(
                Fault(name, f"`{prefix}.{name}` is missing", f"expected {_expected(tensor, sizes)}")
            )
        elif fault := _judge_tensor(prefix, tensor, tensors[name], sizes, notes):
            faults.append(fault)
    faults += [
        Fault(
            name, f"`{prefix}.{name}` is no tensor of such a KDA layer", remedy.for_stranger(name)
        )
        for name in sorted(tensors.keys() - known.keys())
    ]
    return LayerReport(index, prefix, layout.name, tuple(notes), tuple(faults))


def _judge_tensor(prefix, tensor: Operand, array: ArrayFacts, sizes, notes):
    wanted = tensor.shape(sizes)
    if (
        tensor.name in KDA_ONLY
        and array.shape != wanted
        and _normalizable(tensor.name, array, sizes)
    ):
        tail = array.size - math.prod(wanted)
        padding = f", its tail of {tail} is judged when it is loaded" if tail else ""
        notes.append(
            f"{tensor.name} is {shape_text(array.shape)}: normalize_{tensor.name} gives "
            f"{shape_text(wanted)}{padding}"
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
        return Fault(
            tensor.name,
            f"`{prefix}.{tensor.name}` {message}",
            f"{detail}; {cure}" if cure else detail,
        )
    if array.dtype not in tensor.dtypes:
        message = f"`{prefix}.{tensor.name}` must be {one_of(tensor.dtypes)}"
        return Fault(
            tensor.name, f"{message} (got {array.dtype})", remedy.for_tensor_dtype(array.dtype)
        )
    if tensor.name in KDA_ONLY and array.dtype != "float32":
        notes.append(f"{tensor.name} is {array.dtype}; the released models keep it in float32")
    return None


def _normalizable(name, array, sizes):
    """Whether the normalizer would take it; one rate per channel is no padded A_log."""
    if array.size == math.prod((sizes["HV"], sizes["K"]) if name == "dt_bias" else (sizes["HV"],)):
        return True
    return name == "A_log" and padded(array, sizes["HV"]) and array.size != sizes["HV"] * sizes["K"]


def _expected(tensor, sizes):
    return f"{tensor.expected} = {shape_text(tensor.shape(sizes))}"
