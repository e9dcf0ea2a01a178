"""Weights that are stored with scales: FP8 is read, all else is named.

FP8 as released: `<weight>_scale_inv` or `<weight>_scale` beside an F8_E4M3 or F8_E5M2 `<weight>`.
The scale multiplies, whatever it is called: one for each block of rows and columns, for each row,
or for all.
"""

import dataclasses

from kda_contracts.safetensors_header import ITEM_BITS, NAMES
from kda_contracts.tensor_names import Source

FP8 = ("F8_E4M3", "F8_E5M2")
SCALE_DTYPES = ("float32", "bfloat16", "float16", "F8_E8M0")
SCALES = ("_scale_inv", "_scale")
BLOCK = (128, 128)
# What a step in a float dtype has no use for: the scales of quantized activations.
OF_ACTIVATIONS = ("input_scale", "activation_scale", "output_scale")
# The last word of a tensor's name -> who quantizes so.
SCHEMES = {
    "weight_packed": "compressed-tensors (packed integers or FP4)",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ or AWQ",
    "biases": "MLX",
    "scales": "MLX, GPTQ or AWQ",
    "SCB": "bitsandbytes (8 bits)",
    "absmax": "bitsandbytes (4 bits)",
    "quant_map": "bitsandbytes (4 bits)",
    "nested_absmax": "bitsandbytes (4 bits)",
    "weight_scale_2": "NVFP4",
    "weight_zero_point": "compressed-tensors (integers)",
}
REMEDY = (
    "expand it to a float dtype first; read as it is: F8_E4M3 or F8_E5M2 with weight_scale_inv or "
    "weight_scale by blocks, rows or tensors"
)
UNREAD = ITEM_BITS.keys() - NAMES.keys() - set(FP8)


def with_scales(tensors: dict[str, Source], quantization: dict):
    """`(tensors, wrong)`: FP8 weights with their scales, which are no tensors of the layer then.

    `wrong`: {weight: what is wrong with its scales}.
    """
    result, wrong, taken = dict(tensors), {}, set()
    for name, source in tensors.items():
        if source.array.dtype not in FP8 or source.array.ndim != 2 or "conv1d" in name:
            continue
        scales = [name + end for end in SCALES if name + end in tensors]
        if not scales:
            wrong[name] = "has no `weight_scale_inv` and no `weight_scale` beside it"
            continue
        scale = tensors[scales[0]]
        taken |= set(scales)
        block = block_of(source.array.shape, scale.array.shape, _block_size(quantization))
        if scale.array.dtype not in SCALE_DTYPES:
            wrong[name] = f"has scales of {scale.array.dtype}"
        elif len(scales) > 1:
            wrong[name] = (
                "has a `weight_scale_inv` and a `weight_scale` beside it: which one counts?"
            )
        elif block is None:
            wrong[name] = f"is {source.array}, and its scales are {scale.array}: no known blocks"
        else:
            result[name] = dataclasses.replace(source, scale=scale, block=block)
    if taken:
        taken |= {name for name in tensors if name.rpartition(".")[2] in OF_ACTIVATIONS}
    return {name: x for name, x in result.items() if name not in taken}, wrong


def block_of(shape, scales, size):
    """(rows, columns) that share a scale, or None where the scales' shape is none of the known."""
    rows, columns = shape
    if len(scales) == 4 and scales[1] == scales[3] == 1:
        scales = (scales[0], scales[2])
    if scales == (-(-rows // size[0]), -(-columns // size[1])):
        return size
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    return (rows, columns) if scales in ((), (1,), (1, 1)) else None


def _block_size(quantization):
    """(rows, columns) of a block by the config, else 128 x 128."""
    groups = quantization.get("config_groups")
    tables = [x for x in groups.values() if isinstance(x, dict)] if isinstance(groups, dict) else []
    weights = [x["weights"] for x in tables if isinstance(x.get("weights"), dict)]
    for size in (
        quantization.get("weight_block_size"),
        *(x.get("block_structure") for x in weights),
    ):
        if isinstance(size, list) and len(size) == 2 and all(_is_size(x) for x in size):
            return tuple(size)
    return BLOCK


def _is_size(x):
    return type(x) is int and 0 < x <= 2**20


def scheme(tensors: dict[str, Source], quantization: dict):
    """Who quantized a layer in a way that is not read, or None."""
    words = {name.rpartition(".")[2] for name in tensors}
    unread = {x.array.dtype for x in tensors.values() if x.array.dtype in UNREAD}
    if not unread:
        return None
    known = next((SCHEMES[word] for word in SCHEMES if word in words), "an unknown scheme")
    method = quantization.get("quant_method")
    who = method[:40] if isinstance(method, str) and method else known
    return f"{who}, as {' and '.join(sorted(unread))}"
