"""The gates of Kimi Delta Attention: two public functions, and the maths of float32 values inside.

XLA and Mosaic kernels share that. It uses only what Mosaic GPU can lower on every supported JAX: no
log1p, expm1, logaddexp or pow.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kda_contracts import BETA, LOG_DECAY
from kda_jax import call
from kda_jax.call import Array, Maths

FLOAT32_MAX = 3.4028235e38
NORM_EPS = 1e-6


def kda_log_decay(
    a: Array,
    A_log: Array | None,
    dt_bias: Array | None,
    *,
    lower_bound: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> jax.Array:
    """The log decay that `recurrent_kda` and `chunk_kda` take, from the raw forget gate.

    With x = a + dt_bias, in float32 throughout:

        log_decay = -exp(A_log) * softplus(x)     or  lower_bound * sigmoid(exp(A_log) * x)

    Finite operands, or an `A_log` of -inf, never give NaN. It differentiates.

    Args:
      a: `[B, T, HV*K]` float, or `[B, T, HV, K]`; raw forget-gate input.
      A_log: `[HV]` float, in any shape of HV elements; natural log of the decay rate. None, only
        with a `lower_bound`, is a rate of 1.
      dt_bias: `[HV*K]` float, in any shape of HV*K elements; added to `a`. None is 0.
      lower_bound: None for the softplus gate, or a static finite number < 0 for the safe gate.
      softplus_beta, softplus_threshold: the softplus is `log(1 + exp(beta * x)) / beta`, and x
        where `beta * x` is above the threshold. Static numbers, the first > 0; the softplus gate
        only.

    Returns:
      `[B, T, HV, K]` float32, at most 0: natural log of the decay of each key channel.

    Raises:
      ContractError: a ValueError, at trace time, that lists every argument that breaks the
        contract.
      TypeError: an option is traced.

    Source: the gates of SGLang's `cutedsl_fused_sigmoid_gating_kda_update`.

    >>> a = jnp.zeros((1, 2, 3))  # of one value head, with K = 3
    >>> kda_log_decay(a, jnp.zeros(1), None, lower_bound=-5.0)[0, :, 0].tolist()
    [[-2.5, -2.5, -2.5], [-2.5, -2.5, -2.5]]
    """
    options = dict(
        lower_bound=lower_bound, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold
    )
    arrays, sizes = call.taken(LOG_DECAY, dict(a=a, A_log=A_log, dt_bias=dt_bias), **options)
    B, T, HV, K = sizes.B, sizes.T, sizes.HV, sizes.K
    x = jnp.asarray(arrays["a"], jnp.float32).reshape(B, T, HV, K)
    if dt_bias is not None:
        x = x + jnp.asarray(arrays["dt_bias"], jnp.float32).reshape(1, 1, HV, K)
    rate = jnp.zeros(HV) if A_log is None else jnp.asarray(arrays["A_log"], jnp.float32)
    bound = None if lower_bound is None else float(lower_bound)
    return differentiable_log_decay(
        x, rate.reshape(1, 1, HV, 1), bound, float(softplus_beta), float(softplus_threshold)
    )


def kda_beta(b: Array, *, allow_neg_eigval: bool = False) -> jax.Array:
    """The update strength that `recurrent_kda` and `chunk_kda` take: the sigmoid of b, in float32.

    Args:
      b: `[B, T, HV]` float; raw beta logits.
      allow_neg_eigval: whether beta is doubled, to `(0, 2)`; static.

    Returns:
      `[B, T, HV]` float32.

    Raises:
      ContractError: a ValueError, at trace time, that lists every argument that breaks the
        contract.
      TypeError: `allow_neg_eigval` is traced.

    Source: the gates of SGLang's `cutedsl_fused_sigmoid_gating_kda_update`.

    >>> kda_beta(jnp.zeros((1, 2, 1)), allow_neg_eigval=True).ravel().tolist()
    [1.0, 1.0]
    """
    arrays, _ = call.taken(BETA, dict(b=b), allow_neg_eigval=allow_neg_eigval)
    b = jnp.asarray(arrays["b"], jnp.float32)
    return _strength(b, differentiable_sigmoid, allow_neg_eigval)


def decay_and_beta(a, b, A_log, dt_bias, maths: Maths, differentiable=False):
    """`(log_decay, beta)` of float32 operands.

    `a` and `dt_bias` are `[..., K]`, `A_log` `[..., 1]`, `b` of any shape.
    """
    if maths.activated:
        return a, b
    gate, logistic = (
        (differentiable_log_decay, differentiable_sigmoid)
        if differentiable
        else (log_decay, sigmoid)
    )
    decay = gate(
        a + dt_bias, A_log, maths.lower_bound, maths.softplus_beta, maths.softplus_threshold
    )
    return decay, _strength(b, logistic, maths.allow_neg_eigval)


def _strength(b, logistic, allow_neg_eigval):
    beta = logistic(b)
    return 2.0 * beta if allow_neg_eigval else beta


def log_decay(x, A_log, lower_bound, softplus_beta=1.0, softplus_threshold=20.0):
    """Natural log of the forget factor per key channel, <= 0.

    Args:
      x: `a + dt_bias`, float32.
      A_log: natural log of the decay rate of x's head, float32, broadcastable against x.
      lower_bound: None for the softplus gate, `-exp(A_log) * softplus(x)`; a negative float for the
        safe gate, `lower_bound * sigmoid(exp(A_log) * x)`.
      softplus_beta, softplus_threshold: the softplus is `softplus(beta * x) / beta`, and x where
        beta * x is above the threshold. From 20 on that is the softplus itself in float32, and
        nothing is compared.

    Finite x and A_log, or A_log = -inf, never give NaN: an overflowing rate or x counts as the
    largest float32.
    """
    rate = _below_infinity(jnp.exp(A_log))
    x = jnp.where(x < -FLOAT32_MAX, -FLOAT32_MAX, _below_infinity(x))
    if lower_bound is None:
        return -rate * _sharpened(x, softplus_beta, softplus_threshold)
    return lower_bound * sigmoid(rate * x)


def _sharpened(x, beta, threshold):
    value = (
        softplus(x)
        if beta == 1.0
        else _below_infinity(softplus(jnp.minimum(x * beta, FLOAT32_MAX)) / beta)
    )
    return value if threshold >= 20.0 else jnp.where(x * beta > threshold, x, value)


def softplus(x):
    """log(1 + exp(x)) within 2.4e-7 relative over the whole range: max(x, 0) + log1p(exp(-|x|)).

    log1p(e) is 2 * atanh(e / (2 + e)), and atanh's argument is at most 1/3, so seven terms of its
    series are enough.
    """
    e = jnp.exp(-jnp.abs(x))
    z = e / (2.0 + e)
    z_squared = z * z
    series = 2.0 / 13.0
    for coefficient in (2.0 / 11.0, 2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0, 2.0):
        series = series * z_squared + coefficient
    return jnp.maximum(x, 0.0) + z * series


def sigmoid(x):
    """1 / (1 + exp(-x)): 0 and 1 at the infinities."""
    return 1.0 / (1.0 + jnp.exp(-x))


def inverse_norm(sum_of_squares):
    """1 / sqrt(sum + 1e-6), the factor that l2-normalizes q and k: epsilon is on the sum."""
    return lax.rsqrt(sum_of_squares + NORM_EPS)


def _below_infinity(x):
    return jnp.where(x > FLOAT32_MAX, FLOAT32_MAX, x)  # a NaN passes


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def differentiable_log_decay(x, A_log, lower_bound, softplus_beta=1.0, softplus_threshold=20.0):
    """log_decay with its exact derivative: that of the formulas is NaN where an exponential
    overflows.
    """
    return log_decay(x, A_log, lower_bound, softplus_beta, softplus_threshold)


@differentiable_log_decay.defjvp
def _log_decay_jvp(lower_bound, softplus_beta, softplus_threshold, primals, tangents):
    x, A_log = primals
    rate = _below_infinity(jnp.exp(A_log))
    value = log_decay(x, A_log, lower_bound, softplus_beta, softplus_threshold)
    if lower_bound is None:
        slope = sigmoid(softplus_beta * x)
        if softplus_threshold < 20.0:
            slope = jnp.where(softplus_beta * x > softplus_threshold, 1.0, slope)
        by_x, by_A_log = -rate * slope, jnp.where(value < -FLOAT32_MAX, -FLOAT32_MAX, value)
    else:
        s = sigmoid(rate * x)
        slope = lower_bound * s * (1.0 - s)
        by_x, by_A_log = slope * rate, jnp.where(slope == 0.0, 0.0, slope * (rate * x))
    return value, by_x * tangents[0] + by_A_log * tangents[1]


@jax.custom_jvp
def differentiable_sigmoid(x):
    """sigmoid with its exact derivative, for the same reason."""
    return sigmoid(x)


@differentiable_sigmoid.defjvp
def _sigmoid_jvp(primals, tangents):
    s = sigmoid(primals[0])
    return s, s * (1.0 - s) * tangents[0]
