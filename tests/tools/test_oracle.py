"""The oracle itself, on answers that were worked out by hand."""

import numpy as np
import pytest

from kda_jax.tools import oracle

ROW = np.array([[3.0, 4.0, 0.0, 2.0, 1.0, -1.0]])
POOL = np.zeros((3, 1, 2, 2))
POOL[2, 0] = [[1, 2], [3, 4]]
ZEROS = np.zeros((1, 2)), np.zeros((1, 1)), np.zeros(1), np.zeros(2)
BY_HAND = {
    (True, None): ([1.1, 1.3], [[0.5, 1.0], [1.5, 0.5]]),
    (True, -5.0): ([0.514919, -0.120911], [[0.082085, 0.582085], [0.246255, -0.335830]]),
    (False, None): ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]]),
}


@pytest.mark.parametrize(("l2norm", "lower_bound"), BY_HAND)
def test_by_hand(l2norm, lower_bound):
    out, state = oracle.packed_decode(
        ROW,
        *ZEROS,
        POOL,
        np.array([2]),
        scale=1.0,
        use_qk_l2norm_in_kernel=l2norm,
        lower_bound=lower_bound,
    )
    expected_out, expected_state = BY_HAND[l2norm, lower_bound]
    assert out.ravel() == pytest.approx(expected_out, abs=2e-6)
    assert state[2, 0] == pytest.approx(np.array(expected_state), abs=2e-6)
    assert not state[:2].any()


@pytest.mark.parametrize("slot", [-1, 3, 2**40, -(2**40)])
def test_padded_rows(slot):
    out, state = oracle.packed_decode(ROW * np.nan, *ZEROS, POOL, np.array([slot]))
    assert not out.any()
    assert (state == POOL).all()
