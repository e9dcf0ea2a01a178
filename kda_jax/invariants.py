"""What every implementation may rely on after the contract: our own mistakes, found while tracing."""

import chex
import jax.numpy as jnp


def assert_operands(contract, sizes, *arrays):
    """chex assertions of a table's shapes, on its operands in the table's order, and of what became of the indices.

    Symbolic sizes are not compared, and neither is an operand that is None.
    """
    for operand, array in zip(contract.operands, arrays, strict=False):
        if array is None:
            continue
        if "int32" in operand.dtypes:
            chex.assert_type(array, jnp.int32)
        shape = operand.shape(vars(sizes))
        chex.assert_shape(array, tuple(size if isinstance(size, int) else None for size in shape))
