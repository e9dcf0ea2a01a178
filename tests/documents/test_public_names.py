"""What `kda_jax` shows: its public names, and two modules that are loaded when they are used."""

import subprocess
import sys

import pytest

import kda_jax

PUBLIC = [
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


def fresh(code):
    """What a new process prints: in this one, everything was imported long ago."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_the_public_names_are_these():
    assert sorted(kda_jax.__all__) == sorted(PUBLIC)
    assert dir(kda_jax) == sorted([*PUBLIC, "nnx", "sharding"])
    assert all(hasattr(kda_jax, name) for name in dir(kda_jax))


def test_a_star_import_brings_no_submodule():
    names = {}
    exec("from kda_jax import *", names)
    assert sorted(set(names) - {"__builtins__"}) == sorted(PUBLIC)


def test_an_import_loads_neither_flax_nor_a_kernel_nor_a_device():
    code = """
import sys, kda_jax
print(*(x for x in ("flax", "safetensors", "kda_jax.sharding", "kda_jax.nnx") if x in sys.modules))
print(*(x for x in sys.modules if x.startswith("kda_jax") and ("mosaic" in x or "triton" in x)))
print(*(x for x in ("triton", "jax_triton", "jax.experimental.pallas") if x in sys.modules))
print("kda_jax.tools" in sys.modules, kda_jax.sharding.__name__, kda_jax.nnx.__name__)
import jax._src.xla_bridge as bridge
print(bridge.backends_are_initialized())
"""
    assert fresh(code) == ["False", "kda_jax.sharding", "kda_jax.nnx", "False"]


@pytest.mark.parametrize(
    "use", ["kda_jax.nnx", "from kda_jax import nnx", "from kda_jax.nnx import KDALayer"]
)
def test_without_flax_the_extra_is_named(use):
    code = f"""
import sys; sys.modules["flax"] = None
import importlib.util; importlib.util.find_spec = lambda name, *rest: None
import kda_jax
print("nnx" in dir(kda_jax))
help(kda_jax)
try:
    {use}
except ImportError as error:
    print(error)
"""
    lines = " ".join(fresh(code))
    assert lines.startswith("False ")
    assert lines.endswith("kda_jax.nnx needs flax: install kda-jax with the extra `flax`")


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kda_jax' has no attribute 'packed_decod'"):
        getattr(kda_jax, "packed_decod")  # noqa: B009
