"""validate_slots, and how indices are narrowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_contracts import ContractError
from kda_jax.slots import as_int32


@pytest.mark.parametrize("indices", [[4, -1, 0, -1], [], [5], np.array([0, 1], np.int8), jnp.array([-1, -1])])
def test_valid(indices):
    kda_jax.validate_slots(indices, 6)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([6, -1, 0], r"1 row breaks the contract\n  row 0 has slot 6: it must be -1 \(a padded row\) or in \[0, 6\)"),
        ([0, -2], r"row 1 has slot -2"),
        ([3, 1, 3], r"row 2 has slot 3, as row 0 has"),
        (np.array([2**32, 1]), r"row 0 has slot 4294967296"),
        ([4, 6, 4], r"2 rows break the contract"),
        (list(range(20, 40)), r"and 10 more"),
    ],
)
def test_invalid(indices, message):
    with pytest.raises(ContractError, match=message):
        kda_jax.validate_slots(indices, 6)


def test_not_integers_or_not_values():
    with pytest.raises(TypeError, match=r"takes \[B\] integers"):
        kda_jax.validate_slots([0.5], 6)
    with pytest.raises(TypeError, match=r"takes \[B\] integers"):
        kda_jax.validate_slots([[1]], 6)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: kda_jax.validate_slots(x, 6))(jnp.array([1]))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("library", [np.asarray, jnp.asarray])
def test_narrowing_keeps_small_values(dtype, library):
    with jax.enable_x64(True):
        got = as_int32(library(np.array([-128, -1, 0, 127], dtype)))
    assert got.dtype == np.int32
    assert np.asarray(got).clip(-1).tolist() == [-1, -1, 0, 127]


@pytest.mark.parametrize("library", [np.asarray, jnp.asarray])
def test_what_int32_cannot_hold_is_no_slot(library):
    with jax.enable_x64(True):
        got = np.asarray(as_int32(library(np.array([2**32, 2**32 + 3, -(2**32), 2**63 - 1, 5]))))
    assert got.tolist() == [2**31 - 1, 2**31 - 1, -1, 2**31 - 1, 5]
