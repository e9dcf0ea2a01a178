"""Random operands of unit scale and the released models' geometries: what the demo, tests and benchmarks run on."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from kda_contracts import PACKED_DECODE, Sizes

HEAD_DIMENSION = 128  # K and V of every released KDA model


@dataclass(frozen=True)
class Model:
    """What a released model's config says of its KDA layers: heads of one layer, the gate, how many layers."""

    heads: int
    lower_bound: float | None
    layers: int | None


MODELS = {
    "kimi-linear-48b": Model(heads=32, lower_bound=None, layers=20),
    "kimi-k3": Model(heads=96, lower_bound=-5.0, layers=69),
    "glm-5.3": Model(heads=64, lower_bound=-5.0, layers=None),
}


def model_sizes(model, *, tp, batch, slots):
    """Sizes of one tensor-parallel rank of a model's KDA layer."""
    heads = MODELS[model].heads
    if tp < 1 or heads % tp:
        raise ValueError(f"{model} has {heads} heads: they cannot be split over {tp} ranks")
    HV = heads // tp
    return Sizes(B=batch, H=HV, HV=HV, K=HEAD_DIMENSION, V=HEAD_DIMENSION, S=slots)


def random_operands(sizes, *, seed=0, dtype="bfloat16", gate_dtype="float32", pool_dtype="float32"):
    """The operands of one `packed_decode` call, by name, as NumPy arrays: no zeros, no constants, different slots.

    `dtype` is that of mixed_qkv, a and b, `gate_dtype` that of A_log and dt_bias. Slots are a random permutation; rows
    beyond S, if any, are padded (-1).
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
