"""Each comparison is fed a wrong answer: one that cannot fail would make the suite worthless."""

import jax.numpy as jnp
import numpy as np
import pytest
import support
from cases import SHAPES, make_call

from kda_jax.tools import oracle

RIGHT = np.linspace(1.0, 2.0, 500, dtype=np.float32)


def test_near_accepts_the_right_answer():
    support.assert_near(RIGHT, RIGHT.astype(np.float64), 1e-7)


@pytest.mark.parametrize(
    "wrong", [RIGHT * 1.00001, RIGHT[:-1], np.where(RIGHT == 1.0, np.nan, RIGHT)]
)
def test_near_refuses(wrong):
    with pytest.raises(AssertionError):
        support.assert_near(wrong, RIGHT, 2e-6)


def test_near_refuses_one_wrong_element_that_the_norm_hides():
    got = np.ones(1_000_000)
    got[3] += 1e-3
    with pytest.raises(AssertionError, match="worst"):
        support.assert_near(got, np.ones(1_000_000), 2e-6)


@pytest.mark.parametrize("wrong", [[1.0, 0.0], [np.nan, np.nan], [1.1, np.nan]])
def test_near_but_for_nans_refuses(wrong):
    support.assert_near_but_for_nans([1.0, np.nan], [1.0, np.nan], 1e-6)
    with pytest.raises(AssertionError):
        support.assert_near_but_for_nans(wrong, [1.0, np.nan], 1e-6)


def test_rounded_refuses_truncation():
    exact = np.random.default_rng(0).standard_normal(1000)
    nearest = exact.astype(jnp.bfloat16)
    support.assert_rounded(nearest, exact, 2e-6)
    truncated = (
        (exact.astype(np.float32).view(np.uint32) & 0xFFFF0000)
        .view(np.float32)
        .astype(jnp.bfloat16)
    )
    with pytest.raises(AssertionError):
        support.assert_rounded(truncated, exact, 2e-6)


@pytest.mark.parametrize(
    "wrong", [-np.zeros(3, np.float32), np.zeros(3, np.float64), np.zeros((3, 1), np.float32)]
)
def test_same_bits_refuses(wrong):
    with pytest.raises(AssertionError):
        support.assert_same_bits(wrong, np.zeros(3, np.float32))


def _write_other_slot(out, state, call):
    state[call.other_slots[0]] = 0.0


def _transpose_heads(out, state, call):
    state[call.slots] = state[call.slots][:, ::-1]


def _leave_padded_row(out, state, call):
    out[~call.live] = 1e-30


def _skip_the_update(out, state, call):
    state[call.slots[0]] = call.operands["initial_state"][call.slots[0]]


@pytest.mark.parametrize(
    "spoil", [_write_other_slot, _transpose_heads, _leave_padded_row, _skip_the_update]
)
def test_the_oracle_comparison_refuses(spoil):
    call = make_call(SHAPES["k64_v32"])
    out, state = oracle.packed_decode(**call.operands)
    out, state = out.astype(np.float32), state.astype(np.float32)
    # the oracle widens and narrows the untouched slots' NaNs: take their bits from the pool
    state[call.other_slots] = call.operands["initial_state"][call.other_slots]
    support.assert_meets_oracle(call, out, state)
    spoil(out, state, call)
    with pytest.raises(AssertionError):
        support.assert_meets_oracle(call, out, state)
