"""The gates against float64, over the whole range of float32 and beyond its ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import gates

FLOAT32_MAX = np.finfo(np.float32).max


# Of the softplus. x * 2.5 overflows; so does softplus / 0.12, which XLA makes a product.
BETAS = (1.0, 2.5, 0.12)


def decay(x, A_log=0.0, lower_bound=None, softplus_beta=1.0):
    x, A_log = jnp.float32(x), jnp.float32(A_log)
    return float(jnp.exp(gates.log_decay(x, A_log, lower_bound, softplus_beta)))


def test_softplus_over_the_whole_range():
    x = np.linspace(-86, 200, 200_001).astype(np.float32)
    exact = np.logaddexp(0, x.astype(np.float64))
    assert (
        np.max(np.abs(np.asarray(gates.softplus(jnp.asarray(x))) - exact) / exact) < 3e-7
    )  # 2.3e-7 by the CPU's exp, 2.8e-7 by the H200's


@pytest.mark.parametrize("x", [19.99, 20, 20.01, 50, 88, 89, 100, 1e4, 3e38, np.inf])
def test_the_softplus_gate_never_overflows_into_nan(x):
    assert decay(x) == pytest.approx(np.exp(-min(float(x), 800.0)), rel=1e-5, abs=1e-38)


def test_the_negative_tail_is_not_lost():
    # log(1 + exp(x)) is 0 below about -17 in float32: 10,000 steps would leave the state at 1.
    steps = 10_000
    exact = np.exp(-16 * np.log1p(np.exp(-17.0)) * steps)
    log_decay = float(gates.log_decay(jnp.float32(-17), jnp.log(jnp.float32(16)), None))
    assert np.exp(steps * log_decay) == pytest.approx(exact, rel=1e-5)
    assert exact == pytest.approx(0.9934, abs=1e-4)


@pytest.mark.parametrize(
    ("A_log", "x", "expected"),
    [(0, 0, -2.5), (0, 2, -4.403985), (1, 1, -4.690484), (np.log(16), -3, 0.0)],
)
def test_the_safe_gate_is_a_sigmoid_and_no_clamp(A_log, x, expected):
    got = float(gates.log_decay(jnp.float32(x), jnp.float32(A_log), -5.0))
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-20)


@pytest.mark.parametrize(
    ("lower_bound", "softplus_beta"), [(-5.0, 1.0), *((None, x) for x in BETAS)]
)
@pytest.mark.parametrize("A_log", [-np.inf, -FLOAT32_MAX, -100, 0, 88, 89, 1000, FLOAT32_MAX])
@pytest.mark.parametrize(
    "x", [-FLOAT32_MAX, -1e4, -88, -0.0, 0.0, 1e-30, 88, FLOAT32_MAX, np.inf, -np.inf]
)
def test_finite_inputs_never_give_nan(x, A_log, lower_bound, softplus_beta):
    assert 0 <= decay(x, A_log, lower_bound, softplus_beta) <= 1


@pytest.mark.parametrize("softplus_beta", BETAS)
def test_a_sharpened_softplus_never_overflows(softplus_beta):
    x = jnp.array([3e38, FLOAT32_MAX, 3e38, 0.0])
    A_log = jnp.array([-jnp.inf, -jnp.inf, 0.0, 0.0])
    step = jax.jit(lambda x, A_log: gates.log_decay(x, A_log, None, softplus_beta))
    got = np.asarray(step(x, A_log))
    assert np.isfinite(got).all()
    assert got[:2].tolist() == [0.0, 0.0]
    assert got[3] == pytest.approx(-np.log(2) / softplus_beta, rel=1e-6)


def test_no_decay_at_all():
    assert decay(3.0, -np.inf) == 1.0
    assert decay(3.0, -np.inf, -5.0) == pytest.approx(np.exp(-2.5), rel=1e-6)
    assert decay(-FLOAT32_MAX, 100.0) == 1.0  # an overflowing rate times a zero softplus


@pytest.mark.parametrize(
    ("lower_bound", "softplus_beta"), [(-5.0, 1.0), *((None, x) for x in BETAS)]
)
def test_a_nan_is_not_hidden(lower_bound, softplus_beta):
    assert np.isnan(decay(np.nan, 0.0, lower_bound, softplus_beta))
    assert np.isnan(decay(0.5, np.nan, lower_bound, softplus_beta))


def test_sigmoid_keeps_its_ends():
    x = jnp.array([-np.inf, -FLOAT32_MAX, -0.5, 0.0, 0.5, FLOAT32_MAX, np.inf], jnp.float32)
    assert np.asarray(gates.sigmoid(x)) == pytest.approx(
        [0, 0, 0.37754068, 0.5, 0.62245935, 1, 1], rel=1e-6
    )


def test_the_norms_epsilon_is_on_the_sum():
    assert float(gates.inverse_norm(jnp.float32(0.0))) == pytest.approx(1000.0, rel=1e-6)
