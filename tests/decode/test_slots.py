"""validate_slots, and how indices are narrowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_contracts import ContractError
from kda_jax.pools import as_int32


@pytest.mark.parametrize(
    "indices", [[4, -1, 0, -1], [], [5], np.array([0, 1], np.int8), jnp.array([-1, -1])]
)
def test_valid(indices):
    kda_jax.validate_slots(indices, 6)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (
            [6, -1, 0],
            r"1 row breaks the contract\n"
            r"  row 0 has slot 6: it must be -1 \(a padded row\) or in \[0, 6\)",
        ),
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


@pytest.mark.parametrize("library", [list, np.array, jnp.array])
def test_pad_slots(library):
    got = kda_jax.pad_slots(library([4, 2]), 4)
    assert np.asarray(got).tolist() == [4, 2, -1, -1]
    assert isinstance(got, jax.Array) == (library is jnp.array)
    assert jax.jit(lambda x: kda_jax.pad_slots(x, 3))(jnp.array([1])).tolist() == [1, -1, -1]
    with pytest.raises(ContractError, match=r"must be \[n\] with n <= B=1 \(got \(2,\)\)"):
        kda_jax.pad_slots(library([4, 2]), 1)


@pytest.mark.parametrize(
    "indices", [[1, 3, 1], np.array([1, 3, -1, 9, 2**40]), jnp.array([3, 1, -5, 5]), []]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clear_slots(indices, dtype):
    pool = np.full((5, 2, 3, 4), 7, jnp.dtype(dtype))
    expected = pool.copy()
    if len(indices):
        expected[[1, 3]] = 0
    before = jnp.asarray(pool)
    assert np.array_equal(kda_jax.clear_slots(before, indices), expected)
    assert np.array_equal(before, pool)
    ref = jax.new_ref(before)
    assert kda_jax.clear_slots(ref, indices) is None
    assert np.array_equal(ref[...], expected)


def test_clear_slots_copies_no_donated_pool():
    shape = jax.ShapeDtypeStruct((1000, 4, 32, 64), jnp.float32)
    step = jax.jit(lambda pool, slots: kda_jax.clear_slots(pool, slots), donate_argnums=0)
    memory = step.lower(shape, jax.ShapeDtypeStruct((3,), jnp.int32)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 1000 * 4 * 32 * 64 * 4
    assert memory.temp_size_in_bytes < 4 * 4 * 32 * 64 * 4


def test_clear_slots_refuses_other_indices():
    for wrong in (np.array([0.5]), np.array([[1]]), np.array([1], np.uint32), np.array([True])):
        with pytest.raises(ContractError, match=r"slots must be \[n\] signed integers"):
            kda_jax.clear_slots(jnp.zeros((3, 1)), wrong)
