"""The oracle itself: on answers that were worked out by hand, its gradients on differences."""

import numpy as np
import pytest
from chunks import GRADIENT_CASES, gradient_case

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


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradients_are_those_of_differences(case):
    """Along one random direction of each operand; -inf stays where it is."""
    x, options, d_out, d_state = gradient_case(case, T=70, H=1, HV=2, K=4, V=3)
    slots = x.pop("slots")
    x = {name: y.astype(np.float64) for name, y in x.items()}
    options |= dict(scale=0.7)
    got = oracle.update_gradients(*x.values(), slots, d_out, d_state, **options)
    rng = np.random.default_rng(2)

    def loss(**changed):
        out, state, _ = oracle.update(*(x | changed).values(), slots, **options)
        return (out * d_out).sum() + (state * d_state).sum()

    for name, y in x.items():
        assert got[name].shape == y.shape
        direction = rng.standard_normal(y.shape) * np.isfinite(y)
        # A key of 0 under the norm turns within 1e-3.
        step = 1e-7 if case == "zero keys" else 1e-5
        moved = step * direction
        difference = (loss(**{name: y + moved}) - loss(**{name: y - moved})) / (2 * step)
        assert (got[name] * direction).sum() == pytest.approx(difference, rel=1e-6, abs=1e-6)


def test_tokens_of_padded_sequences_have_no_gradient():
    x, options, d_out, d_state = gradient_case("packed borders", T=140)
    for name in ("q", "k", "v", "log_decay", "beta"):
        x[name][:, 129:] = np.nan
    got = oracle.update_gradients(*x.values(), d_out, d_state, **options)
    for name in ("q", "k", "v", "log_decay", "beta"):
        assert not got[name][:, 129:].any()
        assert np.isfinite(got[name]).all()
        assert got[name][:, :129].any()
    # What no sequence writes passes the cotangent on.
    empty = [x["slots"][1], *np.setdiff1d(np.arange(len(x["pool"])), x["slots"])]
    assert (got["pool"][empty] == d_state[empty]).all()
