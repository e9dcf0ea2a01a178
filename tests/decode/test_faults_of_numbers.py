"""Real faults of kernels of this kind, each reduced to a small input and its answer.

Here: gates, beta, norms, precision.
Each runs on every implementation that it can reach. Those that need a GPU, or a pool of many
gigabytes, carry the marker `gpu`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import (
    assert_epsilon_is_on_the_sum,
    base,
    each_implementation,
    gate_rows,
    one_row,
)
from support import (
    IMPLEMENTATIONS,
    ON_GPU,
    assert_near,
    assert_same_bits,
    decode,
    lowered_text,
    running,
)

import kda_jax
from kda_contracts import ContractError
from kda_jax.tools import oracle

# Gates


@each_implementation
def test_dt_bias_is_per_channel(implementation):
    bias = np.full((2, 32), 2.0, np.float32)
    bias[:, :4] = np.arange(8).reshape(2, 4)
    rows = gate_rows(np.zeros((2, 32)), bias, np.zeros(2), implementation)
    assert rows[:, :4] == pytest.approx(
        np.array([[0.5, 0.268941, 0.119203, 0.047426], [0.017986, 0.006693, 0.002473, 0.000911]]),
        abs=1e-6,
    )


@each_implementation
@pytest.mark.parametrize("shape", [(4,), (64,), (255,), (257,), (4, 64), (1, 256), (0,)])
def test_a_dt_bias_of_another_size_is_refused(implementation, shape):
    with pytest.raises(ContractError) as caught:
        decode(base() | {"dt_bias": np.zeros(shape, np.float32)}, implementation)
    assert "dt_bias" in str(caught.value)
    assert "(256,)" in str(caught.value)
    assert f"got {shape}" in str(caught.value)


@each_implementation
def test_an_A_log_sized_by_the_projection_is_refused(implementation):
    for values in (np.zeros(256, np.float32), np.log(np.linspace(1, 16, 256, dtype=np.float32))):
        with pytest.raises(ContractError, match=r"`A_log` must have 4 elements \(got 256\)"):
            decode(base() | {"A_log": values}, implementation)


@each_implementation
def test_a_padded_A_log_is_refused_and_normalized(implementation):
    x = base((0,), H=96, HV=96, K=128, V=128, S=1)
    padded = np.pad(x["A_log"], (0, 32))
    with pytest.raises(
        ContractError, match=r"`A_log` must have 96 elements \(got 128\).[\s\S]*its tail is zero"
    ):
        decode(x | {"A_log": padded}, implementation)
    assert_same_bits(kda_jax.normalize_A_log(padded, 96), x["A_log"])
    with pytest.raises(ContractError, match="its tail is not zero"):
        kda_jax.normalize_A_log(padded + 1, 96)


@each_implementation
def test_A_log_and_a_in_a_checkpoints_shapes_are_refused(implementation):
    x = base()
    with pytest.raises(ContractError) as caught:
        decode(
            x | {"A_log": x["A_log"].reshape(1, 1, 4, 1), "a": x["a"].reshape(3, 4, 64)},
            implementation,
        )
    for part in (
        "must be 1D",
        "(4,)",
        "A_log.reshape(4)",
        "must be 2D",
        "(3, 256)",
        "a.reshape(3, 256)",
    ):
        assert part in str(caught.value)


@each_implementation
def test_no_overflow_in_softplus(implementation):
    values = [19.99, 20, 20.01, 50, 88, 89, 100, 1e4, 3e38, np.inf]
    x = np.zeros((1, 32))
    x[0, : len(values)] = values
    rows = gate_rows(x, np.zeros((1, 32)), np.zeros(1), implementation)[0, : len(values)]
    exact = np.exp(-np.minimum(np.array(values), 800.0))
    assert rows == pytest.approx(exact, rel=1e-5, abs=1e-38)


@each_implementation
def test_the_negative_tail_of_softplus_is_kept(implementation):
    x = np.zeros((1, 32))
    x[0, :2] = -16, -17
    rows = gate_rows(x, np.zeros((1, 32)), np.log([16.0]), implementation)[0, :2].astype(np.float64)
    one_step = -16 * np.log1p(np.exp(np.array([-16.0, -17.0])))
    # float32 holds 1 - 6.6e-7 to within half of 6e-8. log(1 + exp) would give 1 for -17.
    assert rows == pytest.approx(np.exp(one_step), abs=6e-8)
    assert rows[1] < 1


@each_implementation
def test_the_safe_gate_is_a_sigmoid(implementation):
    A_log, x = np.array([0, 0, 1, np.log(16)]), np.zeros((4, 32))
    x[:, 0] = 0, 2, 1, -3
    rows = gate_rows(x, np.zeros((4, 32)), A_log, implementation, lower_bound=-5.0)[:, 0]
    assert np.log(rows) == pytest.approx([-2.5, -4.403985, -4.690484, 0.0], rel=2e-6, abs=1e-6)


@each_implementation
@pytest.mark.parametrize(
    ("l2norm", "lower_bound", "out", "state"),
    [
        (True, None, [1.1, 1.3], [[0.5, 1.0], [1.5, 0.5]]),
        (True, -5.0, [0.514919, -0.120911], [[0.082085, 0.582085], [0.246255, -0.335830]]),
        (False, None, [1.5, -7.5], [[0.5, 0], [1.5, -3]]),
    ],
    ids=["softplus", "safe", "l2norm-off"],
)
def test_a_step_worked_out_by_hand(implementation, l2norm, lower_bound, out, state):
    got_out, got_state = decode(
        one_row(),
        implementation,
        scale=1.0,
        use_qk_l2norm_in_kernel=l2norm,
        lower_bound=lower_bound,
    )
    assert np.asarray(got_out)[0, 0, 0, :2] == pytest.approx(out, abs=2e-6)
    assert np.asarray(got_state)[2, 0, :2, :2] == pytest.approx(np.array(state), abs=2e-6)
    assert not np.asarray(got_state)[:2].any()


@each_implementation
def test_a_lower_bound_out_of_range_is_refused(implementation):
    x = base()
    for wrong in (0.0, -0.0, 1.0, float("nan"), float("-inf"), "\u22125", "-5", True):
        with pytest.raises(ContractError, match="`lower_bound` must be a finite number below 0"):
            decode(x, implementation, lower_bound=wrong)
    expected = decode(x, implementation, lower_bound=-5.0)
    for right in (np.float32(-5), jnp.float32(-5), -5):
        assert_same_bits(decode(x, implementation, lower_bound=right)[1], expected[1])
    with pytest.raises(TypeError, match="`lower_bound` must be static"):
        jax.jit(
            lambda bound: kda_jax.packed_decode(
                **x, lower_bound=bound, implementation=implementation
            )
        )(-5.0)


@each_implementation
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decode_takes_the_gate_that_prefill_takes(implementation, lower_bound):
    x, state = base((4, 2, 0), dtype="float32"), None
    for token in range(4):
        more = base((4, 2, 0), dtype="float32", seed=token)
        x |= {name: more[name] for name in ("mixed_qkv", "a", "b")}
        x["initial_state"] = x["initial_state"] if state is None else np.asarray(state)
        options = dict(lower_bound=lower_bound, use_qk_l2norm_in_kernel=True)
        expected_out, expected = oracle.packed_decode(**x, **options)
        out, state = decode(x, implementation, **options)
        assert_near(out, expected_out, 2e-6)
        assert_near(state, expected, 2e-6)


@each_implementation
def test_an_exponentiated_A_log_shows_in_the_second_step(implementation):
    # Nothing can detect it. But a second step, or a pool that is not zero, tells the two apart.
    x = one_row(pool=((0, 0), (0, 0)))
    x["a"][:] = 0.5
    wrong = x | {"A_log": np.full(1, -np.exp(-3.2), np.float32)}
    right = x | {"A_log": np.full(1, -3.2, np.float32)}
    first = [decode(y, implementation, scale=1.0)[1] for y in (right, wrong)]
    assert_same_bits(*first)
    second = [
        decode(y | {"initial_state": z}, implementation, scale=1.0)[1]
        for y, z in zip((right, wrong), first, strict=True)
    ]
    assert np.abs(np.asarray(second[0]) - np.asarray(second[1])).max() > 0.1


@each_implementation
def test_no_A_log_is_refused(implementation):
    with (
        pytest.raises(ContractError, match=r"`A_log` must be an array \(got NoneType\)"),
        running(implementation),
    ):
        kda_jax.packed_decode(
            **base() | {"A_log": None}, lower_bound=-5.0, implementation=implementation
        )


# Beta


@each_implementation
@pytest.mark.parametrize(
    ("b", "beta"), [(0.5, 0.62245935), (-0.5, 0.37754068), (-200.0, 0.0), (200.0, 1.0)]
)
def test_beta_is_one_float32_sigmoid(implementation, b, beta):
    x = one_row(k=(1, 0), v=(1, 1), pool=((0, 0), (0, 0)))
    x["b"] = np.full((1, 1), b, jnp.bfloat16)
    _, state = decode(x, implementation)
    assert np.asarray(state)[2, 0, :2, 0] == pytest.approx([beta, beta], abs=1e-7)


def test_all_implementations_have_one_beta():
    x = base((0, 1, 2), dtype="bfloat16", H=2, HV=2, K=128, V=128)
    x["b"][:] = -0.5
    states = [
        np.asarray(decode(x, name, use_qk_l2norm_in_kernel=True)[1]) for name in IMPLEMENTATIONS
    ]
    for state in states[1:]:
        assert_near(state, states[0], 1e-6)


# Norm and scale


@each_implementation
def test_epsilon_is_on_the_sum(implementation):
    assert_epsilon_is_on_the_sum(implementation)
    tokens = [base((0,), H=1, HV=1, K=128, V=16, S=1, seed=t, dtype="float32") for t in range(64)]
    pool = np.zeros((1, 1, 16, 128), np.float32)
    for token in tokens:
        _, pool = decode(
            token | {"initial_state": pool}, implementation, use_qk_l2norm_in_kernel=True
        )
    assert np.abs(np.asarray(pool)).max() < 5 * np.sqrt(64)


@each_implementation
def test_out_is_linear_in_scale_and_the_pool_is_not_touched_by_it(implementation):
    x = base(dtype="float32")
    default = decode(x, implementation)
    assert_same_bits(decode(x, implementation, scale=64**-0.5)[0], default[0])
    one = decode(x, implementation, scale=1.0)
    for scale in (0.5, 2.0, 0.25):
        out, state = decode(x, implementation, scale=scale)
        assert_same_bits(out, np.asarray(one[0]) * np.float32(scale))
        assert_same_bits(state, one[1])
    assert_near(decode(x, implementation, scale=32**-0.5)[0], np.asarray(one[0]) * 32**-0.5, 1e-6)
    for wrong in (0.0, -1.0):
        with pytest.raises(ContractError, match="`scale` must be a finite number above 0"):
            decode(x, implementation, scale=wrong)


# Layout, dtype, precision


@each_implementation
def test_a_transposed_pool_is_refused(implementation):
    x = base()
    with pytest.raises(
        ContractError,
        match=r"must be \[S, HV, V, K\] with HV=4, K=64[\s\S]*transpose the last two axes",
    ):
        decode(x | {"initial_state": x["initial_state"].swapaxes(2, 3)}, implementation)
    kv = kda_jax.state_to_kv(jnp.asarray(x["initial_state"]))
    assert_same_bits(kda_jax.state_from_kv(kv), x["initial_state"])


@each_implementation
def test_the_pool_is_not_rounded_to_the_activations(implementation):
    x = base(dtype="bfloat16")
    _, state = decode(x, implementation, use_qk_l2norm_in_kernel=True)
    assert state.dtype == jnp.float32
    updated = np.asarray(state)[[4, 0]]
    assert (updated != updated.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.9
    _, expected = oracle.packed_decode(**x, use_qk_l2norm_in_kernel=True)
    assert_near(updated, expected[[4, 0]], 2e-6)


@each_implementation
def test_mixed_dtypes_and_a_half_precision_overflow(implementation):
    x = base(dtype="bfloat16")
    x["a"], x["b"] = x["a"].astype(np.float32), x["b"].astype(np.float16)
    out, state = decode(x, implementation)
    assert out.dtype == jnp.bfloat16
    assert_near(np.asarray(state)[[4, 0]], oracle.packed_decode(**x)[1][[4, 0]], 2e-6)
    x = one_row(k=(0, 0), v=(0, 0), q=(1, 0), pool=((60000, 0), (6e-8, 0)))
    x["initial_state"] = x["initial_state"].astype(np.float16)
    out, state = decode(x, implementation, scale=2.0, lower_bound=-1e-6, out_dtype="float16")
    assert np.asarray(out)[0, 0, 0, 0] == np.inf  # 120000 has no float16
    assert np.asarray(state)[2, 0, :2, 0].tolist() == x["initial_state"][2, 0, :2, 0].tolist()


@each_implementation
@pytest.mark.parametrize("dtype", ["int16", "float8_e4m3fn", "float64"])
def test_other_pool_dtypes_are_refused(implementation, dtype):
    x = base()
    with jax.enable_x64(True):
        pool = jnp.asarray(x["initial_state"]).astype(dtype)
        with pytest.raises(
            ContractError,
            match=rf"`initial_state` must be float32, bfloat16 or float16 \(got {dtype}",
        ):
            decode(x | {"initial_state": pool}, implementation)


@each_implementation
@pytest.mark.parametrize("precision", ["bfloat16", "tensorfloat32", "highest"])
def test_no_matrix_unit_rounds_the_sums(implementation, precision):
    x = base((4, 2, 0), dtype="float32")
    _, expected = oracle.packed_decode(**x, use_qk_l2norm_in_kernel=True)
    with jax.default_matmul_precision(precision):
        _, state = decode(x, implementation, use_qk_l2norm_in_kernel=True)
    assert_near(state, expected, 1e-6)
    text = lowered_text(lambda y: kda_jax.packed_decode(**y, implementation=implementation), x)
    assert "dot_general" not in text


@pytest.mark.optimized
@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "xla"])
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_the_same_bits_alone_and_in_any_batch(implementation, pool_dtype):
    alone = base((2,), K=128, V=32, S=40)
    alone["initial_state"] = alone["initial_state"].astype(jnp.dtype(pool_dtype))
    out, state = decode(alone, implementation)
    for B in (2, 7, 8, 9, 33) if ON_GPU else (2, 7):
        row = B // 2
        slots = np.delete(np.arange(40), 2)[:B]
        slots[row] = 2
        x = base(tuple(slots), K=128, V=32, S=40, seed=B)
        for name in ("mixed_qkv", "a", "b"):
            x[name][row] = alone[name][0]
        x |= {name: alone[name] for name in ("A_log", "dt_bias", "initial_state")}
        for _ in range(50 if ON_GPU else 1):
            got_out, got_state = decode(x, implementation)
            assert_same_bits(got_out[row], out[0])
            assert_same_bits(got_state[2], state[2])


@each_implementation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_not_stochastic(implementation, dtype):
    x = base()
    x["initial_state"] = x["initial_state"].astype(jnp.dtype(dtype))
    first, second = (decode(x, implementation) for _ in range(2))
    assert_same_bits(first[0], second[0])
    assert_same_bits(first[1], second[1])
