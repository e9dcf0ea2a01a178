"""Kimi Delta Attention decode for JAX: `packed_decode` and what belongs to it."""

__version__ = "0.1.0"

from kda_contracts import BadFileError as BadFileError
from kda_contracts import ContractError as ContractError
from kda_contracts import normalize_a as normalize_a
from kda_contracts import normalize_A_log as normalize_A_log
from kda_contracts import normalize_dt_bias as normalize_dt_bias
from kda_jax.checkpoint import check_values as check_values
from kda_jax.checkpoint import load_layer as load_layer
from kda_jax.checkpoint import load_layers as load_layers
from kda_jax.decode import packed_decode as packed_decode
from kda_jax.dispatch import Explanation as Explanation
from kda_jax.dispatch import explain as explain
from kda_jax.layer import kda_decode as kda_decode
from kda_jax.layer import kda_prefill as kda_prefill
from kda_jax.layouts import pack_qkv as pack_qkv
from kda_jax.layouts import state_from_kv as state_from_kv
from kda_jax.layouts import state_to_kv as state_to_kv
from kda_jax.prefill import chunk_kda as chunk_kda
from kda_jax.sequences import validate_cu_seqlens as validate_cu_seqlens
from kda_jax.slots import clear_slots as clear_slots
from kda_jax.slots import pad_slots as pad_slots
from kda_jax.slots import validate_slots as validate_slots
from kda_jax.update import commit as commit
from kda_jax.update import fused_sigmoid_gating_kda_update as fused_sigmoid_gating_kda_update
from kda_jax.update import recurrent_kda as recurrent_kda
from kda_jax.weights import KDACache as KDACache
from kda_jax.weights import KDAConfig as KDAConfig
from kda_jax.weights import KDAParams as KDAParams
from kda_jax.weights import config_from_hf as config_from_hf
from kda_jax.weights import init_cache as init_cache
from kda_jax.weights import init_params as init_params
