"""The shape table of the suite, and calls made from it.

Distinct sizes, live pools, poison where nothing may be read.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from kda_contracts import Sizes
from kda_jax import decode_mosaic_gpu
from kda_jax.tools.synthetic import model_sizes, random_operands

SHAPES = {
    "k1_v1": Sizes(B=2, H=1, HV=2, K=1, V=1, S=4),
    "k2_v3": Sizes(B=3, H=1, HV=1, K=2, V=3, S=5),
    "k40_v24": Sizes(B=4, H=1, HV=3, K=40, V=24, S=6),
    "k60_v24": Sizes(B=5, H=2, HV=4, K=60, V=24, S=7),
    "k100_v7": Sizes(B=3, H=3, HV=9, K=100, V=7, S=5),
    "k32_v16": Sizes(B=4, H=1, HV=2, K=32, V=16, S=9),
    "k32_v32": Sizes(
        B=3, H=1, HV=2, K=32, V=32, S=5
    ),  # square: values alone show a transposed state
    "k32_v80": Sizes(B=2, H=1, HV=3, K=32, V=80, S=5),
    "k64_v32": Sizes(B=3, H=2, HV=4, K=64, V=32, S=6),
    "k64_v48": Sizes(B=5, H=1, HV=2, K=64, V=48, S=3),  # fewer slots than rows
    "k96_v48": Sizes(B=3, H=2, HV=6, K=96, V=48, S=5),
    "k128_v16": Sizes(B=7, H=1, HV=2, K=128, V=16, S=11),
    "k128_v96": Sizes(B=2, H=1, HV=2, K=128, V=96, S=5),  # three tiles or more
    "k160_v32": Sizes(B=2, H=1, HV=3, K=160, V=32, S=4),
    "k192_v64": Sizes(B=3, H=1, HV=2, K=192, V=64, S=4),
    "k224_v16": Sizes(B=2, H=2, HV=4, K=224, V=16, S=5),
    "k256_v48": Sizes(B=2, H=1, HV=2, K=256, V=48, S=4),
}
MOSAIC_SHAPES = {
    name: sizes for name, sizes in SHAPES.items() if decode_mosaic_gpu.unsupported(sizes) is None
}
GATES = {"softplus": None, "safe": -5.0}
POOL_DTYPES = ("float32", "bfloat16", "float16")

# Local heads of the released models: (model, tensor-parallel ranks).
MODEL_RANKS = (
    ("kimi-linear-48b", 1),
    ("kimi-k3", 1),
    ("kimi-k3", 8),
    ("kimi-k3", 32),
    ("glm-5.3", 1),
)
MODEL_SHAPES = {
    f"{model}-tp{tp}-B{batch}": model_sizes(model, tp=tp, batch=batch, slots=batch + 3)
    for model, tp in MODEL_RANKS
    for batch in (1, 7, 64)
}


@dataclass(frozen=True)
class Call:
    """One call: operands by name (NumPy), which rows are live, which slots they name."""

    sizes: Sizes
    operands: dict
    live: np.ndarray  # [rows] bool

    @property
    def slots(self):
        return self.operands["ssm_state_indices"][self.live]

    @property
    def other_slots(self):
        return np.setdiff1d(np.arange(self.sizes.S), self.slots)


def make_call(sizes, *, seed=0, padded=True, **dtypes):
    """A call with padded rows (-1, S, the largest int32, as rows allow).

    The inputs of padded rows, and all slots that no row names, hold poison.
    """
    operands = random_operands(sizes, seed=seed, **dtypes)
    slots = operands["ssm_state_indices"]
    if padded and sizes.B >= 2:
        slots[1] = -1
    if padded and sizes.B >= 4:
        slots[3] = sizes.S
    if padded and sizes.B >= 7:
        slots[6] = np.iinfo(np.int32).max
    live = (slots >= 0) & (slots < sizes.S)
    for name, poison in (("mixed_qkv", np.nan), ("a", np.inf), ("b", np.nan)):
        operands[name][~live] = poison
    call = Call(sizes, operands, live)
    operands["initial_state"][call.other_slots] = np.nan
    return call


def rounding(dtype):
    """Half a unit in the last place, relative."""
    return float(jnp.finfo(dtype).eps) / 2
