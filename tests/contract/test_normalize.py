"""The layouts of checkpoints and callers, brought to the contract's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_contracts import ContractError, normalize_a, normalize_A_log, normalize_dt_bias

LIBRARIES = [np.asarray, jnp.asarray]
HV, K, N = 3, 5, 4
VALUES = np.arange(1.0, 1 + N * HV * K, dtype=np.float32)


@pytest.fixture(params=LIBRARIES, ids=["numpy", "jax"])
def array(request):
    return request.param


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3, 1), (3, 1)])
def test_A_log_of_any_shape(array, shape):
    got = normalize_A_log(array(VALUES[:HV].reshape(shape)), HV)
    assert type(got) is type(array(VALUES))
    assert np.asarray(got).tolist() == [1.0, 2.0, 3.0]


def test_a_padded_A_log_loses_its_zero_tail(array):
    assert np.asarray(
        normalize_A_log(array(np.append(VALUES[:HV], np.zeros(5, np.float32))), HV)
    ).tolist() == [
        1.0,
        2.0,
        3.0,
    ]


@pytest.mark.parametrize("tail", [1e-30, -1.0, np.nan])
def test_a_tail_that_is_not_zero_is_refused(array, tail):
    padded = np.append(VALUES[:HV], np.array([0, 0, tail, 0], np.float32))
    with pytest.raises(
        ContractError,
        match=r"`A_log` has 7 elements for HV=3, and its tail is not zero: A_log\[5\]",
    ):
        normalize_A_log(array(padded), HV)


@pytest.mark.parametrize("place", [3, 4, 5])
def test_a_tail_is_refused_wherever_its_value_is(array, place):
    padded = np.append(VALUES[:HV], np.zeros(3, np.float32))
    padded[place] = 5.0
    with pytest.raises(ContractError, match=rf"its tail is not zero: A_log\[{place}\] is 5.0"):
        normalize_A_log(array(padded), HV)


@pytest.mark.parametrize("shape", [(2,), (3, 5), (4, 1), (0,)])
def test_other_A_logs_are_refused_with_the_operators_message(array, shape):
    with pytest.raises(ContractError) as caught:
        normalize_A_log(array(np.zeros(shape, np.float32)), HV)
    assert str(caught.value).startswith(f"Unexpected A_log shape: {shape}; expected numel=3")


def test_a_traced_padded_A_log_is_a_type_error():
    with pytest.raises(TypeError, match="call normalize_A_log before jit"):
        jax.jit(lambda x: normalize_A_log(x, HV))(np.zeros(7, np.float32))
    assert jax.jit(lambda x: normalize_A_log(x, HV))(np.zeros((1, 1, 3, 1), np.float32)).shape == (
        3,
    )


@pytest.mark.parametrize("shape", [(15,), (3, 5), (1, 3, 5)])
def test_dt_bias(array, shape):
    got = normalize_dt_bias(array(VALUES[: HV * K].reshape(shape)), HV, K)
    assert np.asarray(got).tolist() == VALUES[: HV * K].tolist()


def test_dt_bias_of_another_size_is_refused_with_the_operators_message(array):
    with pytest.raises(ContractError) as caught:
        normalize_dt_bias(array(np.zeros(3, np.float32)), HV, K)
    assert str(caught.value).startswith("Unexpected dt_bias shape: (3,); expected numel=15")
    assert "one bias per head; repeat each K=5 times" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "varlen"),
    [
        ((4, 15), False),
        ((4, 3, 5), False),
        ((4, 1, 3, 5), False),
        ((4, 15), True),
        ((1, 4, 3, 5), True),
    ],
)
def test_a(array, shape, varlen):
    got = normalize_a(array(VALUES.reshape(shape)), N, HV, K, varlen=varlen)
    assert got.shape == (4, 15)
    assert np.asarray(got).ravel().tolist() == VALUES.tolist()


@pytest.mark.parametrize(
    ("shape", "varlen", "form"),
    [((1, 4, 3, 5), False, "dense"), ((4, 1, 3, 5), True, "varlen"), ((4, 3), False, "dense")],
)
def test_other_as_are_refused_with_the_operators_message(array, shape, varlen, form):
    with pytest.raises(ContractError) as caught:
        normalize_a(array(np.zeros(shape, np.float32)), N, HV, K, varlen=varlen)
    assert str(caught.value).startswith(f"Unexpected a shape for {form}: {shape}")


def test_shapes_without_values():
    struct = jax.ShapeDtypeStruct((1, 1, 3, 1), jnp.float32)
    assert normalize_A_log(struct, HV) == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert normalize_A_log(jax.ShapeDtypeStruct((7,), jnp.float32), HV).shape == (3,)
    assert normalize_dt_bias(jax.ShapeDtypeStruct((3, 5), jnp.float32), HV, K).shape == (15,)
