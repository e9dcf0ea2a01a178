"""The parts of a layer as functions of their own: what they take and refuse, their numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_near, assert_same_bits

import kda_jax

RNG = np.random.default_rng(0)
B, T, HV, K, C, W, S = 2, 3, 4, 8, 6, 4, 5


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


ROW, WEIGHT, POOL = normal(B, C), normal(C, W), normal(S, C, W - 1)
A, A_LOG, BIAS = normal(B, T, HV * K), normal(HV), normal(HV * K)


@pytest.mark.parametrize(
    ("changed", "cure"),
    [
        (dict(pool=normal(S, W - 1, C)), "`pool`.*transposed: np.swapaxes.pool, 1, 2."),
        (dict(weight=normal(W, C)), "`weight`.*transposed: weight.T"),
        (dict(pool=normal(S, C, W)), "one of the two is wrong"),
        (dict(pool=normal(S, C, W - 2)), "one of the two is wrong"),
        (dict(slots=np.zeros(B, np.uint8)), "`slots` must be int8, int16, int32 or int64"),
        (dict(slots=[0, 1]), "`slots` must be an array .got list."),
        (dict(x=ROW.astype(np.float64)), "`x` must be float32, bfloat16 or float16 .got float64"),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefill", [False, True])
def test_a_convolutions_wrong_operand_is_one_error(changed, cure, prefill):
    operands = dict(x=ROW, weight=WEIGHT, pool=POOL, slots=np.arange(2)) | changed
    if prefill:
        call, more = kda_jax.conv_prefill, dict(cu_seqlens=np.array([0, 1, 2]))
    else:
        call, more = kda_jax.conv_decode, {}
    with pytest.raises(kda_jax.ContractError, match=f"(?s)1 argument breaks the contract.*{cure}"):
        call(**operands, **more)


def test_a_convolution_takes_numpy_arrays_and_wide_indices():
    slots = np.array([2**32, 3])
    y, pool = kda_jax.conv_decode(ROW, WEIGHT, np.asfortranarray(POOL), slots)
    assert not np.asarray(y[0]).any()
    assert_same_bits(pool[:3], POOL[:3])
    again = kda_jax.conv_prefill(ROW, WEIGHT, POOL, slots, np.array([0, 1, 2]))
    assert_near(again[0][1], y[1], 1e-6)
    assert_same_bits(again[1], pool)


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf"), None, "1e-5", True])
def test_an_eps_that_is_none_is_refused(eps):
    with pytest.raises(kda_jax.ContractError, match="`eps` must be a finite number, 0 or above"):
        kda_jax.gated_rms_norm(A, A, BIAS, eps=eps)


def test_a_traced_option_is_a_type_error():
    for call, option in (
        (functools.partial(kda_jax.gated_rms_norm, A, A, BIAS), "eps"),
        (functools.partial(kda_jax.kda_log_decay, A, A_LOG, BIAS), "softplus_beta"),
        (functools.partial(kda_jax.kda_log_decay, A, A_LOG, BIAS), "lower_bound"),
    ):
        traced = jax.jit(lambda x, call=call, option=option: call(**{option: x}))
        with pytest.raises(TypeError, match=f"`{option}` must be static"):
            traced(1.0)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gates_by_hand(lower_bound, dtype):
    a = np.asarray(jnp.asarray(A, dtype).astype(jnp.float32), np.float64).reshape(B, T, HV, K)
    x, rate = a + BIAS.reshape(HV, K), np.exp(A_LOG.astype(np.float64))[:, None]
    softplus, safe = np.logaddexp(0, 2.5 * x) / 2.5, 1 / (1 + np.exp(-rate * x))
    wanted = -rate * softplus if lower_bound is None else lower_bound * safe
    options = dict(lower_bound=lower_bound, softplus_beta=2.5)
    given = jnp.asarray(A, dtype), A_LOG.reshape(1, 1, HV, 1), BIAS.reshape(HV, K)
    decay = kda_jax.kda_log_decay(*given, **options)
    assert (decay.shape, decay.dtype) == ((B, T, HV, K), jnp.float32)
    assert_near(decay, wanted, 2e-6)
    assert_same_bits(
        kda_jax.kda_log_decay(given[0].reshape(B, T, HV, K), A_LOG, BIAS, **options), decay
    )
    b = jnp.asarray(A[..., :HV], dtype)
    beta = kda_jax.kda_beta(b, allow_neg_eigval=True)
    assert (beta.shape, beta.dtype) == ((B, T, HV), jnp.float32)
    assert_near(beta, 2 / (1 + np.exp(-np.asarray(b, np.float64))), 1e-6)
    assert_same_bits(kda_jax.kda_beta(b), beta / 2)


def test_the_gates_and_the_recurrence_are_the_update():
    q, k, v = normal(B, T, 2, K), normal(B, T, 2, K), normal(B, T, HV, 5)
    pool, b, slots = normal(S, HV, 5, K), normal(B, T, HV), np.array([3, 1])
    options = dict(lower_bound=-5.0)
    out, after = kda_jax.recurrent_kda(
        *(q, k, v, kda_jax.kda_log_decay(A, A_LOG, None, **options), kda_jax.kda_beta(b)),
        *(pool, slots),
        use_qk_l2norm_in_kernel=True,
    )
    wanted, state = kda_jax.fused_sigmoid_gating_kda_update(
        A_LOG, None, q, k, v, A, b, pool, slots, **options
    )
    assert_near(out, wanted, 2e-6)
    assert_near(after, state, 2e-6)


def test_a_rate_that_is_none_is_one():
    a = A.reshape(B, T, HV, K)
    decay = kda_jax.kda_log_decay(a, None, None, lower_bound=-5.0)
    assert_same_bits(decay, kda_jax.kda_log_decay(a, jnp.zeros(HV), None, lower_bound=-5.0))
    with pytest.raises(
        kda_jax.ContractError, match="`A_log` may be None only with a `lower_bound`"
    ):
        kda_jax.kda_log_decay(a, None, None)


def test_the_gates_differentiate_where_an_exponential_overflows():
    slope = jax.grad(lambda a: kda_jax.kda_log_decay(a, jnp.full(HV, 90.0), None).sum())
    assert np.isfinite(slope(jnp.asarray(A) - 100)).all()
    slope = jax.grad(lambda b: kda_jax.kda_beta(b).sum())
    assert np.isfinite(slope(jnp.full((1, 1, 2), -200.0))).all()


@pytest.mark.parametrize(
    "op", ["conv_decode", "conv_prefill", "gated_rms_norm", "kda_log_decay", "kda_beta", "commit"]
)
def test_explain_and_the_command_know_a_building_block(op, capsys):
    from kda_jax.tools import cli

    assert cli.main(["explain", "--op", op, "--tp", "16"]) == 0
    assert "-> xla         runs" in capsys.readouterr().out
