"""Random operands and the released models' geometries, for the demo, tests and benchmarks."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from kda_contracts import CHECKPOINT, ITEM_BITS, PACKED_DECODE, Sizes, split_heads

HEAD_DIMENSION = 128  # K and V of every released KDA model


@dataclass(frozen=True)
class Model:
    """What a released model's files say of a KDA layer, and how it is stored."""

    heads: int
    hidden_size: int
    lower_bound: float | None
    known_by: tuple[str, ...]
    A_log_shape: tuple[int, ...]
    block: str = "self_attn"


MODELS = {
    "kimi-linear-48b": Model(32, 2304, None, ("g_a_proj.weight",), (1, 1, 32, 1)),
    "kimi-k3": Model(96, 7168, -5.0, ("g_proj.weight",), (128,)),
    "glm-5.3": Model(64, 4096, -5.0, ("g_a_proj.weight",), (64,)),
    "ling-3.0-tiny": Model(
        16, 1536, -5.0, ("f_proj.weight", "g_proj.weight"), (16,), block="attention"
    ),
}


def model_sizes(model, *, tp, batch, slots):
    """Sizes of one tensor-parallel rank of a model's KDA layer."""
    heads = MODELS[model].heads
    H, HV = split_heads(heads, heads, tp)
    return Sizes(B=batch, H=H, HV=HV, K=HEAD_DIMENSION, V=HEAD_DIMENSION, S=slots)


def random_operands(sizes, *, seed=0, dtype="bfloat16", gate_dtype="float32", pool_dtype="float32"):
    """The operands of one `packed_decode` call, by name, as NumPy arrays.

    There are no zeros and no constants, and slots differ.

    `dtype` is that of mixed_qkv, a and b, `gate_dtype` that of A_log and dt_bias. Slots are a
    random permutation; rows beyond S, if any, are padded (-1).
    """
    rng = np.random.default_rng(seed)
    shapes = {operand.name: operand.shape(vars(sizes)) for operand in PACKED_DECODE.operands}

    def normal(name, dtype):
        return rng.standard_normal(shapes[name], dtype=np.float32).astype(jnp.dtype(dtype))

    slots = np.full(sizes.B, -1, np.int32)
    live = min(sizes.B, sizes.S)
    slots[:live] = rng.permutation(sizes.S)[:live]
    half = np.float32(0.5)
    return {
        "mixed_qkv": normal("mixed_qkv", dtype),
        "a": (normal("a", "float32") * half).astype(jnp.dtype(dtype)),
        "b": normal("b", dtype),
        "A_log": np.log(rng.uniform(1, 16, sizes.HV)).astype(jnp.dtype(gate_dtype)),
        "dt_bias": (normal("dt_bias", "float32") - np.float32(2)).astype(jnp.dtype(gate_dtype)),
        "initial_state": normal("initial_state", pool_dtype),
        "ssm_state_indices": slots,
    }


def write_layer(folder, model, *, layer=0, seed=0):
    """Writes a checkpoint of one KDA layer: config.json and model.safetensors.

    Names and shapes are the model's.

    A_log and dt_bias hold random values; the projections are a hole in a sparse file, so that
    nothing is stored.
    """
    folder, released = Path(folder), MODELS[model]
    heads = released.heads
    sizes = {
        "H": heads,
        "HV": heads,
        "K": HEAD_DIMENSION,
        "V": HEAD_DIMENSION,
        "D": released.hidden_size,
        "W": 4,
    }
    linear = {
        "num_heads": heads,
        "head_dim": HEAD_DIMENSION,
        "short_conv_kernel_size": 4,
        "kda_layers": [layer],
    }
    linear |= {"full_attn_layers": [], "gate_lower_bound": released.lower_bound}
    config = {"hidden_size": released.hidden_size, "linear_attn_config": linear}
    (folder / "config.json").write_text(json.dumps(config))

    (layout,) = (x for x in CHECKPOINT if x.known_by == released.known_by)
    values = random_operands(
        Sizes(B=1, H=heads, HV=heads, K=HEAD_DIMENSION, V=HEAD_DIMENSION, S=1), seed=seed
    )
    A_log = np.zeros(math.prod(released.A_log_shape), np.float32)
    A_log[:heads] = values["A_log"]
    stored = {"A_log": A_log.reshape(released.A_log_shape), "dt_bias": values["dt_bias"]}
    prefix = f"model.layers.{layer}.{released.block}"
    entries = {
        f"{prefix}.{tensor.name}": ("BF16", tensor.shape(sizes))
        for tensor in layout.tensors
        if tensor.required
    }
    entries |= {f"{prefix}.{name}": ("F32", array.shape) for name, array in stored.items()}
    write_safetensors(
        folder / "model.safetensors",
        entries,
        {f"{prefix}.{name}": array for name, array in stored.items()},
    )


def write_safetensors(path, entries, values=None):
    """Writes {name: (the format's dtype, shape)} at its real length.

    What has no values is a hole in the file.
    """
    header, offset = {}, 0
    for name, (dtype, shape) in entries.items():
        size = math.prod(shape) * ITEM_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + size)}
        offset += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in (values or {}).items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(array.tobytes())
        file.truncate(8 + len(text) + offset)
