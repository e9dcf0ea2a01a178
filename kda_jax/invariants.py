"""What every implementation may rely on after the contract: our own mistakes, found while tracing."""

import chex
import jax.numpy as jnp

from kda_contracts import PACKED_DECODE


def assert_operands(sizes, mixed_qkv, a, b, A_log, dt_bias, pool, slots, sources):
    """chex assertions of the table's shapes and of what became of the indices; symbolic sizes are not compared."""
    chex.assert_type([slots] if sources is None else [slots, sources], jnp.int32)
    arrays = dict(
        mixed_qkv=mixed_qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, initial_state=pool, ssm_state_indices=slots
    )
    if sources is not None:
        arrays["source_indices"] = sources
    for name, array in arrays.items():
        shape = PACKED_DECODE.by_name[name].shape(vars(sizes))
        chex.assert_shape(array, tuple(size if isinstance(size, int) else None for size in shape))
