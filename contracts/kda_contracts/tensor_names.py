"""The names of a layer's tensors, as the public writers have them: to the released ones.

`...layers.<i>.<block>.<tensor>`, where words that wrappers add are left out wherever they stand.
"""

import re
from dataclasses import dataclass
from typing import Any

from kda_contracts.arrays import ArrayFacts
from kda_contracts.safetensors_header import BadFileError, Header

# torch.compile, DDP, FSDP, activation checkpointing, NeMo's float32 holder
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
WRAPPERS += ("_fp32_params",)
WRAPPED = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(WRAPPERS)})\.")
BLOCKS = ("self_attn", "attn", "linear_attn", "attention")
LAYER = re.compile(
    rf"(?P<prefix>(?:.*\.)?layers\.(?P<index>[0-9]{{1,6}})\.(?:{'|'.join(BLOCKS)}))"
    r"\.(?P<tensor>.+)",
    re.S,
)
LAYER_NUMBER = re.compile(r"(?:^|(?<=\.))(?:layers|blocks|h)\.([0-9]{1,6})\.(?=.)", re.S)
MOST_RESTS = 1000  # names of a layer that are held at once to find the first few
MOST_TENSORS = 20_000  # of all attention blocks, far above any model
KDA_ONLY = frozenset({"A_log", "dt_bias"})  # what no full-attention layer has
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
UNMERGED = "merge the adapter into the model first"
RENAME = "write it back under the released names first"
# What a name begins with, or holds -> whose it is, and what to do.
FOREIGN = {
    "lora_": ("an adapter that is not merged", UNMERGED),
    "base_layer": ("an adapter that is not merged", UNMERGED),
    "conv.conv.": ("MLX's names", RENAME),
    "fused_": ("SGLang's joined tensors", RENAME),
    "in_proj_qkvbfg": ("vLLM's joined tensors", RENAME),
    "in_proj_qkvgfab": ("vLLM's joined tensors", RENAME),
    "qkvb_proj": ("vLLM's joined tensors", RENAME),
    "qkv_conv1d": ("joined tensors of a server or of MLX", RENAME),
    "qkv_proj": ("joined tensors of a server or of MLX", RENAME),
}


@dataclass(frozen=True)
class Source:
    """Where a tensor is stored: its file's header, its name there, and the row at which it begins,
    in one that is joined of several; with the scales of a quantized one.
    """

    header: Header
    name: str
    array: ArrayFacts
    begin: int = 0
    scale: Any = None  # Source
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale


def released_name(tensor):
    """The released name of a tensor below its layer's block."""
    tensor = tensor.removeprefix("forget_gate.")
    return "o_proj" + tensor.removeprefix("dense") if tensor.startswith("dense.") else tensor


def of_attention(name):
    """Whether a tensor may be one of an attention block: a word that is quickly found."""
    return "attn." in name or "attention." in name or name.endswith(("A_log", "dt_bias"))


def find_layers(headers: dict[str, Header]) -> dict[int, dict[str, dict[str, Source]]]:
    """{layer: {prefix: {released name: Source}}} of all attention blocks."""
    found: dict[int, dict[str, dict[str, Source]]] = {}
    count = 0
    for name, header in headers.items():
        if name not in header.entries:
            continue  # of 21,000 names 20,000
        if match := LAYER.fullmatch(WRAPPED.sub("", name)):
            count += 1
            if count > MOST_TENSORS:
                raise BadFileError(
                    header.path, f"more than {MOST_TENSORS} tensors of attention blocks"
                )
            tensors = found.setdefault(int(match["index"]), {}).setdefault(match["prefix"], {})
            tensor = released_name(match["tensor"])
            # What two stored tensors mean stays under its own name, which no layout has.
            tensors[name if tensor in tensors else tensor] = Source(
                header, name, header.facts(name)
            )
    return found


def foreign(tensors):
    """`(whose names these are, one of them, what to do)` of a layout that is recognised and not
    read, or None.
    """
    names = sorted(tensors)
    for mark, (who, cure) in FOREIGN.items():
        if name := next((name for name in names if mark in name), None):
            return who, name, cure
    return None


def below(headers, layers) -> dict[int, list[str]]:
    """{layer: what stands below `layers.<i>.` under whatever names, sorted; of many the first}."""
    found: dict[int, list[str]] = {}
    for name in headers:
        match = LAYER_NUMBER.search(name)
        if match and (index := int(match[1])) in layers:
            rests = found.setdefault(index, [])
            rests.append(name[match.end() :])
            if len(rests) > MOST_RESTS:
                found[index] = sorted(rests)[: MOST_RESTS // 2]
    return {index: sorted(rests) for index, rests in found.items()}


def separated(tensors, sizes):
    """The tensors with a joined convolution, `conv1d.weight` of q, k and v, taken apart."""
    rows = [sizes["H"] * sizes["K"], sizes["H"] * sizes["K"], sizes["HV"] * sizes["V"]]
    result = {}
    for name, source in tensors.items():
        first, _, kind = name.partition(".")
        joined = first == "conv1d" and kind in ("weight", "bias")
        apart = any(f"{conv}.{kind}" in tensors for conv in CONVOLUTIONS)
        if not joined or apart or source.array.shape[:1] != (sum(rows),):
            result[name] = source
            continue
        begin = 0
        for conv, count in zip(CONVOLUTIONS, rows, strict=True):
            array = ArrayFacts((count, *source.array.shape[1:]), source.array.dtype)
            result[f"{conv}.{kind}"] = Source(source.header, source.name, array, begin)
            begin += count
    return result
