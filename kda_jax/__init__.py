"""Kimi Delta Attention for JAX: its operators, a whole layer, and what brings a model to them.

Public are the names in `__all__`, and the modules `kda_jax.sharding` (a layer over a mesh) and
`kda_jax.nnx` (the layer as a Flax module), which are loaded when they are first used. All other
modules are the package's own, and may change.

In docstrings float means float32, bfloat16 or float16, and integer means int8 to int64. Letters of
shapes: B rows, T tokens of a row, N sequences, S slots, H key heads and HV value heads, K and V
their dimensions, W the width of the convolution, C its channels, D the model's width, L columns of
a table of slots, M checkpoints of a sequence.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from kda_contracts import (
    BadFileError,
    ContractError,
    normalize_a,
    normalize_A_log,
    normalize_dt_bias,
)
from kda_jax.call import Implementation
from kda_jax.checkpoint import check_values, load_layer, load_layers
from kda_jax.conv import conv_decode, conv_prefill
from kda_jax.decode import packed_decode
from kda_jax.dispatch import Explanation, explain
from kda_jax.drafts import KDADrafts, kda_commit, kda_verify
from kda_jax.gates import kda_beta, kda_log_decay
from kda_jax.layer import kda_apply, kda_decode, kda_prefill
from kda_jax.layouts import pack_qkv, state_from_kv, state_to_kv
from kda_jax.norm import gated_rms_norm
from kda_jax.prefill import chunk_kda
from kda_jax.sequences import validate_cu_seqlens
from kda_jax.slots import clear_slots, copy_slots, pad_slots, validate_slots
from kda_jax.update import fused_sigmoid_gating_kda_update, recurrent_kda
from kda_jax.update_drafts import Drafts, commit, recurrent_verify
from kda_jax.weights import (
    KDACache,
    KDAConfig,
    KDAParams,
    config_from_hf,
    init_cache,
    init_params,
)

__version__ = "0.1.0"

__all__ = [
    "BadFileError",
    "ContractError",
    "Drafts",
    "Explanation",
    "Implementation",
    "KDACache",
    "KDAConfig",
    "KDADrafts",
    "KDAParams",
    "check_values",
    "chunk_kda",
    "clear_slots",
    "commit",
    "config_from_hf",
    "conv_decode",
    "conv_prefill",
    "copy_slots",
    "explain",
    "fused_sigmoid_gating_kda_update",
    "gated_rms_norm",
    "init_cache",
    "init_params",
    "kda_apply",
    "kda_beta",
    "kda_commit",
    "kda_decode",
    "kda_log_decay",
    "kda_prefill",
    "kda_verify",
    "load_layer",
    "load_layers",
    "normalize_A_log",
    "normalize_a",
    "normalize_dt_bias",
    "pack_qkv",
    "packed_decode",
    "pad_slots",
    "recurrent_kda",
    "recurrent_verify",
    "state_from_kv",
    "state_to_kv",
    "validate_cu_seqlens",
    "validate_slots",
]

if TYPE_CHECKING:
    from kda_jax import nnx as nnx
    from kda_jax import sharding as sharding
else:  # a checker that saw this function would accept every name

    def __getattr__(name):
        if name in ("nnx", "sharding"):
            return importlib.import_module(f"kda_jax.{name}")
        raise AttributeError(f"module 'kda_jax' has no attribute {name!r}")


def __dir__():
    # help() gets every name that stands here: nnx needs Flax.
    on_demand = ["sharding", "nnx"] if importlib.util.find_spec("flax") else ["sharding"]
    return sorted([*__all__, *on_demand])
