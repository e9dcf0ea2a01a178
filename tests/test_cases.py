"""Real faults of kernels of this kind, each reduced to a small input and its right answer.

They are numbered as in the collection that they come from; every one runs on every implementation that it can reach.
Those that need a GPU or a pool of many gigabytes carry the marker `gpu`.
"""

import gc
import subprocess
import sys
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SHAPES, make_call
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import (
    IMPLEMENTATIONS,
    ON_GPU,
    assert_meets_oracle,
    assert_near,
    assert_same_bits,
    decode,
    lowered_text,
    on_device,
    running,
)

import kda_jax
from kda_contracts import PACKED_DECODE, ContractError, Sizes, check
from kda_jax import oracle
from kda_jax.synthetic import random_operands

BASE = Sizes(B=3, H=2, HV=4, K=64, V=32, S=6)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def base(slots=(4, -1, 0), *, dtype="bfloat16", seed=0, **sizes):
    """The operands of the collection's base case: a pool of 0.1 * N(0, 1), never zeros."""
    sizes = Sizes(**vars(BASE) | {"B": len(slots)} | sizes)
    x = random_operands(sizes, seed=seed, dtype=dtype)
    x["initial_state"] *= np.float32(0.1)
    x["ssm_state_indices"] = np.array(slots, np.int32)
    return x


def untouched(before, after, slots):
    """Slots that no row names keep their bits."""
    others = np.setdiff1d(np.arange(len(before)), slots)
    assert_same_bits(np.asarray(after)[others], np.asarray(before)[others])


def one_row(k=(0, 2), v=(1, -1), q=(3, 4), pool=((1, 2), (3, 4)), *, slots=3, slot=2, K=32, V=16):
    """A case worked out by hand for K = V = 2, H = HV = 1, in the corner of a larger head of zeros."""

    def corner(values, length):
        return np.pad(np.array(values, np.float32), (0, length - len(values)))

    state = np.zeros((slots, 1, V, K), np.float32)
    state[slot, 0, :2, :2] = pool
    return {
        "mixed_qkv": np.concatenate([corner(q, K), corner(k, K), corner(v, V)])[None],
        "a": np.zeros((1, K), np.float32),
        "b": np.zeros((1, 1), np.float32),
        "A_log": np.zeros(1, np.float32),
        "dt_bias": np.zeros(K, np.float32),
        "initial_state": state,
        "ssm_state_indices": np.array([slot], np.int32),
    }


def gate_rows(a, dt_bias, A_log, implementation, lower_bound=None, **more):
    """exp(log_decay), [HV, K], made visible: with q = k = v = 0 a pool of ones becomes the decay."""
    HV, K = np.shape(a)
    x = {
        "mixed_qkv": np.zeros((1, HV * (2 * K + 16)), np.float32),
        "a": np.asarray(a, np.float32).reshape(1, -1),
        "b": np.zeros((1, HV), np.float32),
        "A_log": np.asarray(A_log, np.float32),
        "dt_bias": np.asarray(dt_bias, np.float32).reshape(-1),
        "initial_state": np.ones((1, HV, 16, K), np.float32),
        "ssm_state_indices": np.zeros(1, np.int32),
    }
    _, state = decode(x, implementation, lower_bound=lower_bound, **more)
    state = np.asarray(state)[0]
    assert (state == state[:, :1]).all()
    return state[:, 0]


# A. Slot index and padding


@each_implementation
def test_B01_minus_one_does_not_wrap(implementation):
    x = base((-1, 3), S=5)
    out, state = decode(x, implementation)
    untouched(x["initial_state"], state, [3])
    assert not np.asarray(out)[0].any()


@each_implementation
def test_B03_padding_is_not_the_last_slot(implementation):
    x = base((-1, 3, -1), S=4)
    x["mixed_qkv"][[0, 2]] = 1e4
    out, state = decode(x, implementation)
    alone = {name: x[name][1:2] for name in ("mixed_qkv", "a", "b", "ssm_state_indices")}
    out_alone, state_alone = decode(x | alone, implementation)
    untouched(x["initial_state"], state, [3])
    assert not np.asarray(out)[[0, 2]].any()
    if implementation != "xla" or not ON_GPU:
        assert_same_bits(out[1], out_alone[0])
        assert_same_bits(state[3], state_alone[3])


@each_implementation
@pytest.mark.parametrize("slots", [(0,), (0, -1, -1)])
def test_B04_slot_0_is_an_ordinary_slot(implementation, slots):
    x = base(slots)
    out, state = decode(x, implementation)
    assert np.asarray(out)[0].any()
    assert (np.asarray(state)[0] != x["initial_state"][0]).any()


@each_implementation
def test_B05_padded_rows_are_zero_over_dirty_memory(implementation):
    x = base((-1, -1, -1))
    out, _ = decode(x, implementation)
    for _ in range(3):
        dirty = jnp.full(out.shape, jnp.nan, out.dtype).block_until_ready()
        del dirty
        gc.collect()
        out, state = decode(x, implementation)
        assert_same_bits(out, np.zeros(out.shape, out.dtype))
        assert_same_bits(state, x["initial_state"])


@each_implementation
def test_B08_a_padded_tail_changes_no_slot(implementation):
    slots = np.asarray(kda_jax.pad_slots(np.array([4, 2, 0], np.int32), 8))
    x = base(tuple(slots))
    _, state = decode(x, implementation)
    changed = (np.asarray(state) != x["initial_state"]).any((1, 2, 3))
    assert changed.tolist() == [True, False, True, False, True, False]
    with pytest.raises(ContractError, match="row 6 has slot 4, as row 0 has"):
        kda_jax.validate_slots([4, 2, 0, 5, 1, 3, 4, 2], 6)


@each_implementation
@pytest.mark.parametrize("slots", [(6, -1, 0), (2**31 - 1, 0, 1), (-(2**31), 0, 6)])
def test_B09_an_index_out_of_range_is_a_padded_row(implementation, slots):
    x = base(slots)
    out, state = decode(x, implementation)
    live = [row for row, slot in enumerate(slots) if 0 <= slot < 6]
    untouched(x["initial_state"], state, [slots[row] for row in live])
    assert np.asarray(out).any((1, 2, 3)).nonzero()[0].tolist() == live


@each_implementation
def test_B10_a_bad_index_breaks_no_later_operation(implementation):
    decode(base((2**31 - 1, 7, -5)), implementation)
    assert jnp.ones(10).sum() == 10
    with pytest.raises(ContractError, match="row 1 has slot 7"):
        kda_jax.validate_slots([0, 7], 6)


@each_implementation
def test_B13_a_64_bit_index_is_never_narrowed_to_a_live_slot(implementation):
    x = base((0, 0))
    with running(implementation):
        x["ssm_state_indices"] = np.array([2**32, 2**32 + 3])
        out, state = kda_jax.packed_decode(**x, implementation=implementation)
    assert not np.asarray(out).any()
    assert_same_bits(state, x["initial_state"])
    with pytest.raises(ContractError, match="row 0 has slot 4294967296"):
        kda_jax.validate_slots(x["ssm_state_indices"], 6)


@each_implementation
def test_B14_signed_indices_agree_and_others_are_refused(implementation):
    x = base()
    expected = decode(x, implementation)
    for dtype in ("int8", "int16", "int64"):
        with jax.enable_x64(dtype == "int64"):
            got = decode(x | {"ssm_state_indices": x["ssm_state_indices"].astype(dtype)}, implementation)
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])
    for dtype in ("uint32", "uint8", "bool", "float32"):
        with pytest.raises(ContractError, match=rf"`ssm_state_indices` must be int8, .* \(got {dtype}\)"):
            decode(x | {"ssm_state_indices": x["ssm_state_indices"].astype(dtype)}, implementation)


# B. Integer width, pool size


@pytest.mark.gpu
@each_implementation
@pytest.mark.parametrize(
    ("HV", "slots", "slot", "dtype"),
    [(32, 4200, 4150, "float32"), (96, 1400, 1370, "float32"), (96, 1400, 1370, "bfloat16")],
)
def test_B15_slots_beyond_2_to_31_elements(implementation, HV, slots, slot, dtype):
    x = base((3,), H=HV, HV=HV, K=128, V=128, S=6)
    x["initial_state"] = x["initial_state"].astype(jnp.dtype(dtype))
    rest = on_device({name: x[name] for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias")})
    step = jax.jit(
        lambda pool, slots: kda_jax.packed_decode(
            **rest, initial_state=pool, ssm_state_indices=slots, implementation=implementation
        ),
        donate_argnums=0,
    )
    expected_out, expected = step(jnp.asarray(x["initial_state"]), jnp.array([3]))
    place = jax.jit(lambda pool, state: pool.at[slot].set(state), donate_argnums=0)
    pool = place(jnp.zeros((slots, HV, 128, 128), dtype), x["initial_state"][3])
    out, pool = step(pool, jnp.array([slot]))
    assert_same_bits(out, expected_out)
    assert_same_bits(pool[slot], expected[3])
    assert not pool[:11].any()
    assert not pool[slot + 1 :].any()


@each_implementation
def test_B18_64_bit_mode_changes_no_bit(implementation):
    x = base()
    expected = decode(x, implementation, scale=0.25)
    for scale in (0.25, np.float64(0.25)):
        with jax.enable_x64(True):
            got = decode(x, implementation, scale=scale)
        assert got[0].dtype == jnp.bfloat16
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])


@pytest.mark.gpu
@each_implementation
def test_B19_a_pool_of_most_of_the_memory(implementation):
    HV, per_slot = 32, 32 * 128 * 128 * 4
    slots = int(0.6 * jax.devices()[0].memory_stats()["bytes_limit"] // per_slot)
    x = on_device(base((slots - 1, -1, 0), H=HV, HV=HV, K=128, V=128, S=1))
    x.pop("initial_state")
    step = jax.jit(
        lambda pool, x: kda_jax.packed_decode(**x, initial_state=pool, implementation=implementation), donate_argnums=0
    )
    shape = jax.ShapeDtypeStruct((slots, HV, 128, 128), jnp.float32)
    memory = step.lower(shape, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= slots * per_slot
    assert memory.temp_size_in_bytes < slots * per_slot / 100
    _, pool = step(jnp.zeros(shape.shape), x)
    assert pool[slots - 1].any()
    assert pool[0].any()
    assert not pool[1:3].any()


# C. Stale and duplicate state


@each_implementation
def test_B20_a_cleared_or_fresh_slot_equals_a_zero_state(implementation):
    x = base((2,))
    x["initial_state"][2] *= 100
    zero = x["initial_state"].copy()
    zero[2] = 0
    expected = decode(x | {"initial_state": zero}, implementation)
    cleared = kda_jax.clear_slots(jnp.asarray(x["initial_state"]), jnp.array([2, -1, 99]))
    for got in (
        decode(x | {"initial_state": cleared}, implementation),
        decode(x | {"source_indices": np.array([-1], np.int32)}, implementation),
    ):
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])


@each_implementation
def test_B23_duplicates_harm_their_own_slot_only(implementation):
    x = base((3, 3, 5), V=128)
    expected = oracle.packed_decode(**x)
    for _ in range(3):
        out, state = decode(x, implementation)
        untouched(x["initial_state"], state, [3, 5])
        assert_near(np.asarray(state)[5], expected[1][5], 2e-6)
        assert_near(np.asarray(out, np.float64)[2], expected[0][2], 5e-3)
    with pytest.raises(ContractError, match="row 1 has slot 3, as row 0 has"):
        kda_jax.validate_slots([3, 3], 6)
    kda_jax.validate_slots([-1, -1], 6)


@each_implementation
def test_B24_an_idle_step_changes_nothing(implementation):
    x = base(())
    rest = on_device({name: x[name] for name in x if name != "initial_state"})
    pool = jnp.asarray(x["initial_state"])

    def step(pool):
        return kda_jax.packed_decode(**rest, initial_state=pool, implementation=implementation)

    for function in (step, jax.jit(step), jax.jit(step, donate_argnums=0)):
        out, pool = function(pool)
        assert out.shape == (0, 1, 4, 32)
        assert_same_bits(pool, x["initial_state"])
    text = jax.jit(step, donate_argnums=0).lower(pool).as_text()
    assert "tf.aliasing_output" in text
    assert jnp.ones(3).sum() == 3


# D. Gates


@each_implementation
def test_B25_dt_bias_is_per_channel(implementation):
    bias = np.full((2, 32), 2.0, np.float32)
    bias[:, :4] = np.arange(8).reshape(2, 4)
    rows = gate_rows(np.zeros((2, 32)), bias, np.zeros(2), implementation)
    assert rows[:, :4] == pytest.approx(
        np.array([[0.5, 0.268941, 0.119203, 0.047426], [0.017986, 0.006693, 0.002473, 0.000911]]), abs=1e-6
    )


@each_implementation
@pytest.mark.parametrize("shape", [(4,), (64,), (255,), (257,), (4, 64), (1, 256), (0,)])
def test_B26_a_dt_bias_of_another_size(implementation, shape):
    with pytest.raises(ContractError) as caught:
        decode(base() | {"dt_bias": np.zeros(shape, np.float32)}, implementation)
    assert "dt_bias" in str(caught.value)
    assert "(256,)" in str(caught.value)
    assert f"got {shape}" in str(caught.value)


@each_implementation
def test_B27_an_A_log_sized_by_the_projection(implementation):
    for values in (np.zeros(256, np.float32), np.log(np.linspace(1, 16, 256, dtype=np.float32))):
        with pytest.raises(ContractError, match=r"`A_log` must have 4 elements \(got 256\)"):
            decode(base() | {"A_log": values}, implementation)


@each_implementation
def test_B28_a_padded_A_log(implementation):
    x = base((0,), H=96, HV=96, K=128, V=128, S=1)
    padded = np.pad(x["A_log"], (0, 32))
    with pytest.raises(ContractError, match=r"`A_log` must have 96 elements \(got 128\).[\s\S]*its tail is zero"):
        decode(x | {"A_log": padded}, implementation)
    assert_same_bits(kda_jax.normalize_A_log(padded, 96), x["A_log"])
    with pytest.raises(ContractError, match="its tail is not zero"):
        kda_jax.normalize_A_log(padded + 1, 96)


@each_implementation
def test_B29_A_log_and_a_in_a_checkpoints_shapes(implementation):
    x = base()
    with pytest.raises(ContractError) as caught:
        decode(x | {"A_log": x["A_log"].reshape(1, 1, 4, 1), "a": x["a"].reshape(3, 4, 64)}, implementation)
    for part in ("must be 1D", "(4,)", "A_log.reshape(4)", "must be 2D", "(3, 256)", "a.reshape(3, 256)"):
        assert part in str(caught.value)


@each_implementation
def test_B32_no_overflow_in_softplus(implementation):
    values = [19.99, 20, 20.01, 50, 88, 89, 100, 1e4, 3e38, np.inf]
    x = np.zeros((1, 32))
    x[0, : len(values)] = values
    rows = gate_rows(x, np.zeros((1, 32)), np.zeros(1), implementation)[0, : len(values)]
    exact = np.exp(-np.minimum(np.array(values), 800.0))
    assert rows == pytest.approx(exact, rel=1e-5, abs=1e-38)


@each_implementation
def test_B34_the_negative_tail_of_softplus_is_kept(implementation):
    x = np.zeros((1, 32))
    x[0, :2] = -16, -17
    rows = gate_rows(x, np.zeros((1, 32)), np.log([16.0]), implementation)[0, :2].astype(np.float64)
    one_step = -16 * np.log1p(np.exp(np.array([-16.0, -17.0])))
    # float32 holds 1 - 6.6e-7 to within half of 6e-8; the log(1 + exp) form gives exactly 1 for -17.
    assert rows == pytest.approx(np.exp(one_step), abs=6e-8)
    assert rows[1] < 1


@each_implementation
def test_B35_the_safe_gate_is_a_sigmoid(implementation):
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
    ids=["B36-softplus", "B36-safe", "B50-l2norm-off"],
)
def test_B36_B50_B52_by_hand(implementation, l2norm, lower_bound, out, state):
    got_out, got_state = decode(
        one_row(), implementation, scale=1.0, use_qk_l2norm_in_kernel=l2norm, lower_bound=lower_bound
    )
    assert np.asarray(got_out)[0, 0, 0, :2] == pytest.approx(out, abs=2e-6)
    assert np.asarray(got_state)[2, 0, :2, :2] == pytest.approx(np.array(state), abs=2e-6)
    assert not np.asarray(got_state)[:2].any()


@each_implementation
def test_B37_lower_bound_out_of_range(implementation):
    x = base()
    for wrong in (0.0, -0.0, 1.0, float("nan"), float("-inf"), "\u22125", "-5", True):
        with pytest.raises(ContractError, match="`lower_bound` must be a finite number below 0"):
            decode(x, implementation, lower_bound=wrong)
    expected = decode(x, implementation, lower_bound=-5.0)
    for right in (np.float32(-5), jnp.float32(-5), -5):
        assert_same_bits(decode(x, implementation, lower_bound=right)[1], expected[1])
    with pytest.raises(TypeError, match="`lower_bound` must be static"):
        jax.jit(lambda bound: kda_jax.packed_decode(**x, lower_bound=bound, implementation=implementation))(-5.0)


@each_implementation
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_B38_four_tokens_in_both_gates(implementation, lower_bound):
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
def test_B40_an_exponentiated_A_log_shows_in_the_second_step(implementation):
    # Nothing can detect it; what must hold is that a second step, or a pool that is not zero, tells the two apart.
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
def test_B41_no_A_log(implementation):
    with pytest.raises(ContractError, match=r"`A_log` must be an array \(got NoneType\)"), running(implementation):
        kda_jax.packed_decode(**base() | {"A_log": None}, lower_bound=-5.0, implementation=implementation)


# E. Beta


@each_implementation
@pytest.mark.parametrize(("b", "beta"), [(0.5, 0.62245935), (-0.5, 0.37754068), (-200.0, 0.0), (200.0, 1.0)])
def test_B43_B44_beta_is_one_float32_sigmoid(implementation, b, beta):
    x = one_row(k=(1, 0), v=(1, 1), pool=((0, 0), (0, 0)))
    x["b"] = np.full((1, 1), b, jnp.bfloat16)
    _, state = decode(x, implementation)
    assert np.asarray(state)[2, 0, :2, 0] == pytest.approx([beta, beta], abs=1e-7)


def test_B45_all_implementations_agree():
    x = base((0, 1, 2), dtype="bfloat16", H=2, HV=2, K=128, V=128)
    x["b"][:] = -0.5
    states = [np.asarray(decode(x, name, use_qk_l2norm_in_kernel=True)[1]) for name in IMPLEMENTATIONS]
    for state in states[1:]:
        assert_near(state, states[0], 1e-6)


# F. Norm and scale


@each_implementation
def test_B48_epsilon_is_on_the_sum(implementation):
    # k of norm 1e-3, so that k/sqrt(1e-6 + 1e-6) is 1/sqrt(2) in norm; the mean form would give 0.087.
    x = one_row(k=(1e-3, 0), v=(1, 1), q=(1, 0), pool=((0, 0), (0, 0)))
    x["b"][:] = 50
    _, state = decode(x, implementation, use_qk_l2norm_in_kernel=True)
    assert np.asarray(state)[2, 0, 0, 0] == pytest.approx(0.70710678, rel=1e-6)
    tokens = [base((0,), H=1, HV=1, K=128, V=16, S=1, seed=t, dtype="float32") for t in range(64)]
    pool = np.zeros((1, 1, 16, 128), np.float32)
    for token in tokens:
        _, pool = decode(token | {"initial_state": pool}, implementation, use_qk_l2norm_in_kernel=True)
    assert np.abs(np.asarray(pool)).max() < 5 * np.sqrt(64)


@each_implementation
def test_B51_out_is_linear_in_scale_and_the_pool_is_not_touched_by_it(implementation):
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


# G. Layout, dtype, precision


@each_implementation
def test_B52_a_transposed_pool(implementation):
    x = base()
    with pytest.raises(
        ContractError, match=r"must be \[S, HV, V, K\] with HV=4, K=64[\s\S]*transpose the last two axes"
    ):
        decode(x | {"initial_state": x["initial_state"].swapaxes(2, 3)}, implementation)
    kv = kda_jax.state_to_kv(jnp.asarray(x["initial_state"]))
    assert_same_bits(kda_jax.state_from_kv(kv), x["initial_state"])


@each_implementation
def test_B53_the_pool_is_not_rounded_to_the_activations(implementation):
    x = base(dtype="bfloat16")
    _, state = decode(x, implementation, use_qk_l2norm_in_kernel=True)
    assert state.dtype == jnp.float32
    updated = np.asarray(state)[[4, 0]]
    assert (updated != updated.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.9
    _, expected = oracle.packed_decode(**x, use_qk_l2norm_in_kernel=True)
    assert_near(updated, expected[[4, 0]], 2e-6)


@each_implementation
def test_B57_mixed_dtypes_and_a_half_precision_overflow(implementation):
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
def test_B58_other_pool_dtypes_are_refused(implementation, dtype):
    x = base()
    with jax.enable_x64(True):
        pool = jnp.asarray(x["initial_state"]).astype(dtype)
        with pytest.raises(ContractError, match=rf"`initial_state` must be float32, bfloat16 or float16 \(got {dtype}"):
            decode(x | {"initial_state": pool}, implementation)


@each_implementation
@pytest.mark.parametrize("precision", ["bfloat16", "tensorfloat32", "highest"])
def test_B59_no_matrix_unit_rounds_the_sums(implementation, precision):
    x = base((4, 2, 0), dtype="float32")
    _, expected = oracle.packed_decode(**x, use_qk_l2norm_in_kernel=True)
    with jax.default_matmul_precision(precision):
        _, state = decode(x, implementation, use_qk_l2norm_in_kernel=True)
    assert_near(state, expected, 1e-6)
    text = lowered_text(lambda y: kda_jax.packed_decode(**y, implementation=implementation), x)
    assert "dot_general" not in text


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "xla"])
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_B61_the_same_bits_alone_and_in_any_batch(implementation, pool_dtype):
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
def test_B62_rounding_is_not_stochastic(implementation, dtype):
    x = base()
    x["initial_state"] = x["initial_state"].astype(jnp.dtype(dtype))
    first, second = (decode(x, implementation) for _ in range(2))
    assert_same_bits(first[0], second[0])
    assert_same_bits(first[1], second[1])


# H. Heads, packing, sharding


@each_implementation
def test_B63_value_heads_divide_by_the_group(implementation):
    H, HV, K, V = 2, 4, 32, 16
    keys = np.eye(H, K, dtype=np.float32).ravel()
    x = {
        "mixed_qkv": np.concatenate([keys, keys, np.arange(1, HV * V + 1, dtype=np.float32)])[None],
        "a": np.zeros((1, HV * K), np.float32),
        "b": np.full((1, HV), 50, np.float32),
        "A_log": np.zeros(HV, np.float32),
        "dt_bias": np.zeros(HV * K, np.float32),
        "initial_state": np.zeros((1, HV, V, K), np.float32),
        "ssm_state_indices": np.zeros(1, np.int32),
    }
    _, state = decode(x, implementation)
    assert np.asarray(state)[0, :, 0].astype(bool).argmax(-1).tolist() == [0, 0, 1, 1]


@each_implementation
@pytest.mark.parametrize(
    ("width", "message"),
    [
        (512, "H=3, HV=4"),
        (128, "last dim=128 for HV=4, V=32"),
        (129, "last dim=129"),
        (320, "Invalid packed Q size 96: must be divisible by K=64"),
        (1152, "H=8, HV=4"),
    ],
)
def test_B66_a_width_that_gives_no_heads(implementation, width, message):
    with pytest.raises(ContractError, match=message):
        decode(base() | {"mixed_qkv": np.zeros((3, width), np.float32)}, implementation)


def test_B67_flat_and_interleaved_rows():
    flat = np.arange(1, 13, dtype=np.float32)[None]  # q 1..4, k 5..8, v 9..12, two heads of two
    q, k, v = (flat[:, i : i + 4].reshape(1, 2, 2) for i in (0, 4, 8))
    assert_same_bits(kda_jax.pack_qkv(q, k, v), flat)
    interleaved = np.array([[1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12]], np.float32)
    assert_same_bits(kda_jax.pack_qkv(interleaved, H=2, K=2, V=2), flat)
    grouped = np.array([[1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12]], np.float32)  # one v of 1 element for each of 4 heads
    assert_same_bits(kda_jax.pack_qkv(grouped, H=2, K=2, V=1), flat)
    for wrong in (dict(H=5, K=2, V=2), dict(H=2, K=3, V=2), dict(H=2, K=2), dict(H=2, K=1, V=3)):
        with pytest.raises(ContractError, match="an interleaved row"):
            kda_jax.pack_qkv(interleaved, **wrong)
    for wrong in ((q, k[:, :1], v), (q, k, v[:, :1]), (q, k, None), (q[0], k[0], v[0])):
        with pytest.raises(ContractError, match=r"kda_jax\.pack_qkv"):
            kda_jax.pack_qkv(*wrong)


def reordered_for_ranks(row, ranks, H, HV, K, V):
    """[q0 k0 v0 | q1 k1 v1]: the packed row, so that a contiguous cut gives each rank its heads' flat row."""
    q, k, v = jnp.split(row, [H * K, 2 * H * K], axis=1)
    return jnp.concatenate([x.reshape(len(row), ranks, -1) for x in (q, k, v)], axis=2).reshape(len(row), -1)


HEADS_SPECS = dict(
    mixed_qkv=P(None, "tp"), a=P(None, "tp"), b=P(None, "tp"), A_log=P("tp"), dt_bias=P("tp"),
    initial_state=P(None, "tp"), ssm_state_indices=P(),
)  # fmt: skip


def mesh_of(count, name):
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    return Mesh(np.array(jax.devices()[:count]), (name,))


def sharded_over_heads(implementation, check_vma, mesh):
    def local(x):
        return kda_jax.packed_decode(**x, implementation=implementation)

    out_specs = (P(None, None, "tp"), P(None, "tp"))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(HEADS_SPECS,), out_specs=out_specs, check_vma=check_vma))


@each_implementation
def test_B68_heads_over_two_ranks_equal_one(implementation):
    mesh = mesh_of(2, "tp")
    x = on_device(base(dtype="float32"))
    expected = decode(x, implementation)
    ranks = x | {"mixed_qkv": reordered_for_ranks(x["mixed_qkv"], 2, 2, 4, 64, 32)}
    with running(implementation):
        got = sharded_over_heads(implementation, False, mesh)(ranks)
        naive = sharded_over_heads(implementation, False, mesh)(x)
    assert_near(got[0], expected[0], 1e-6)
    assert_near(got[1], expected[1], 1e-6)
    # A contiguous cut of the packed row passes every shape check, and is wrong: that is why the reordering exists.
    assert np.abs(np.asarray(naive[1]) - np.asarray(expected[1])).max() > 1e-2


@each_implementation
def test_B70_operands_that_are_slices_and_transposes_inside_jit(implementation):
    x = on_device(base(dtype="float32"))
    expected = decode(x, implementation)
    fused = jnp.pad(jnp.concatenate([x["mixed_qkv"], x["a"]], 1), ((0, 0), (8, 5)))
    layers = jnp.moveaxis(jnp.stack([x["initial_state"] * 0, x["initial_state"]]), 0, 1)

    @jax.jit
    def step(fused, across, layers, rest):
        operands = {"mixed_qkv": fused[:, 8 : 8 + 384], "a": fused[:, 392 : 392 + 256], "b": across.T}
        return kda_jax.packed_decode(**rest | operands, initial_state=layers[:, 1], implementation=implementation)

    rest = {name: x[name] for name in ("A_log", "dt_bias", "ssm_state_indices")}
    with running(implementation):
        got = step(fused, x["b"].T, layers, rest)
    assert_near(got[0], expected[0], 1e-6 if implementation == "xla" else 0.0)
    assert_near(got[1], expected[1], 1e-6 if implementation == "xla" else 0.0)


@each_implementation
def test_B71_a_stacked_pool_is_right_and_a_list_is_in_place(implementation):
    L, x = 3, on_device(base(dtype="float32"))
    pool = x.pop("initial_state")
    expected = [decode(x | {"initial_state": pool * (i + 1)}, implementation)[1] for i in range(L)]

    def layer(pool):
        return kda_jax.packed_decode(**x, initial_state=pool, implementation=implementation)[1]

    def stacked(states):
        return jax.lax.fori_loop(0, L, lambda i, states: states.at[i].set(layer(states[i])), states)

    def unrolled(states):
        for i in range(L):
            states = states.at[i].set(layer(states[i]))
        return states

    def through_refs(states):
        for i in range(L):
            ref = jax.new_ref(states[i])
            layer(ref)
            states = states.at[i].set(jax.freeze(ref))
        return states

    for steps in (stacked, unrolled, through_refs):
        with running(implementation):
            got = jax.jit(steps, donate_argnums=0)(jnp.stack([pool * (i + 1) for i in range(L)]))
        for i in range(L):
            assert_near(got[i], expected[i], 1e-6)

    def listed(pools):
        return [layer(pool) for pool in pools]

    if implementation == "xla" or ON_GPU:
        shapes = [jax.ShapeDtypeStruct((600, 4, 32, 64), jnp.float32)] * L
        memory = jax.jit(listed, donate_argnums=0).lower(shapes).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 600 * 4 * 32 * 64 * 4 / 20


# I. Sizes


@pytest.mark.parametrize("K", [1, 2, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256])
def test_B73_every_K_is_right_or_refused(K):
    for V in (1, 16, 24, 48, 100):
        sizes = Sizes(B=2, H=1, HV=2, K=K, V=V, S=3)
        for implementation in IMPLEMENTATIONS if V in (16, 48, 24) else ("xla",):
            call = make_call(sizes, dtype="float32", seed=V)
            options = dict(use_qk_l2norm_in_kernel=True)
            try:
                got = decode(call.operands, implementation, **options)
            except NotImplementedError as error:
                assert implementation == "mosaic_gpu" and (K % 32 or V % 16)
                assert "is not a multiple of" in str(error)
            else:
                assert_meets_oracle(call, *got, **options)


def test_B75_a_tiny_head_works_by_default():
    call = make_call(Sizes(B=1, H=1, HV=1, K=16, V=8, S=2), dtype="float32")
    assert_meets_oracle(call, *kda_jax.packed_decode(**on_device(call.operands)))
    assert "K=16 is not a multiple of 32" in kda_jax.explain(**call.operands).reasons["mosaic_gpu"]


# J. JAX and Pallas


def test_B76_no_deprecation_warning_from_our_code():
    program = """
import jax, jax.numpy as jnp, kda_jax
x = dict(a=jnp.zeros((1, 32)), b=jnp.zeros((1, 1)), A_log=jnp.zeros(1), dt_bias=jnp.zeros(32))
f = lambda pool: kda_jax.packed_decode(jnp.ones((1, 80)), **x, initial_state=pool,
                                       ssm_state_indices=jnp.array([0]), implementation="mosaic_gpu")
jax.jit(f).trace(jnp.zeros((2, 1, 16, 32))).lower(lowering_platforms=("cuda",))
"""
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", program], check=True)


@each_implementation
def test_B78_a_thousand_slots_stay(implementation):
    x = base(S=1000)
    before = jnp.asarray(x["initial_state"])
    _, state = decode(x | {"initial_state": before}, implementation)
    untouched(x["initial_state"], state, [4, 0])
    assert_same_bits(before, x["initial_state"])


@each_implementation
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_B79_B81_donation_is_used_and_the_old_pool_is_gone(implementation, pool_dtype):
    x = on_device(base())
    pool = x.pop("initial_state").astype(pool_dtype)
    step = jax.jit(
        lambda pool: kda_jax.packed_decode(**x, initial_state=pool, implementation=implementation), donate_argnums=0
    )
    with warnings.catch_warnings(), running(implementation):
        warnings.simplefilter("error")
        out, new = step(pool)
    assert pool.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="deleted"), running(implementation):
        step(pool)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert new.shape == (6, 4, 32, 64)


@each_implementation
def test_B82_B90_the_first_call_steps_once_and_nothing_retraces(implementation):
    call, traces = make_call(SHAPES["k32_v16"], dtype="float32"), []

    @jax.jit
    def step(x, scale_is=None):
        traces.append(1)
        return kda_jax.packed_decode(**x, implementation=implementation)

    with running(implementation):
        assert_meets_oracle(call, *step(on_device(call.operands)))
        for seed in range(3 if implementation != "xla" and not ON_GPU else 100):
            x = make_call(SHAPES["k32_v16"], seed=seed, dtype="float32")
            got = step(on_device(x.operands))
    assert_meets_oracle(x, *got)
    assert len(traces) == 1


@each_implementation
def test_B84_vmap_equals_a_loop(implementation):
    calls = [make_call(SHAPES["k32_v16"], seed=seed, dtype="float32") for seed in range(3)]
    stacked = {name: jnp.stack([call.operands[name] for call in calls]) for name in calls[0].operands}

    def step(x):
        return kda_jax.packed_decode(**x, implementation=implementation)

    with running(implementation):
        out, state = jax.vmap(step)(stacked)
    for i, call in enumerate(calls):
        assert_meets_oracle(call, out[i], state[i])
    shared = stacked | {"initial_state": jnp.ones_like(stacked["initial_state"][0])}
    axes = {name: None if name == "initial_state" else 0 for name in stacked}
    with running(implementation):
        out, state = jax.vmap(step, in_axes=(axes,))(shared)
        moved = stacked | {"initial_state": jnp.moveaxis(stacked["initial_state"], 0, 2)}
        by_axis_2 = jax.vmap(step, in_axes=({name: 2 if name == "initial_state" else 0 for name in stacked},))(moved)
    assert state.shape == (3, *shared["initial_state"].shape)
    for i, call in enumerate(calls):
        one = {name: x if axes[name] is None else x[i] for name, x in shared.items()}
        expected = decode(one, implementation)
        assert_near(out[i], expected[0], 1e-6)
        assert_near(state[i], expected[1], 1e-6)
        assert_meets_oracle(call, by_axis_2[0][i], by_axis_2[1][i])


@each_implementation
def test_B84_an_unmapped_ref_under_vmap(implementation):
    x = on_device(base())
    ref = jax.new_ref(x.pop("initial_state"))

    def step(slots):
        return kda_jax.packed_decode(
            **x | {"ssm_state_indices": slots}, initial_state=ref, implementation=implementation
        )[0]

    with pytest.raises(NotImplementedError, match="under vmap"), running(implementation):
        jax.vmap(step)(jnp.array([[0, 1, 2], [3, 4, 5]]))


def test_B85_shard_map_with_its_check_on():
    mesh = mesh_of(2, "tp")
    x = on_device(base(dtype="float32"))
    ranks = x | {"mixed_qkv": reordered_for_ranks(x["mixed_qkv"], 2, 2, 4, 64, 32)}
    got = sharded_over_heads("xla", True, mesh)(ranks)
    assert_near(got[1], decode(x, "xla")[1], 1e-6)
    for name in set(IMPLEMENTATIONS) - {"xla"}:
        with pytest.raises(NotImplementedError, match="pass check_vma=False"), running(name):
            sharded_over_heads(name, True, mesh)(ranks)


def test_B86_a_sharded_pool_without_shard_map():
    mesh = mesh_of(2, "tp")
    x = on_device(base(dtype="float32"))
    pool = jax.device_put(x.pop("initial_state"), NamedSharding(mesh, P(None, "tp")))
    for name in set(IMPLEMENTATIONS) - {"xla"}:
        with pytest.raises(NotImplementedError, match="sharded over several devices outside shard_map"):
            decode(x | {"initial_state": pool}, name)
    assert_near(
        decode(x | {"initial_state": pool}, "xla")[1], decode(x | {"initial_state": np.asarray(pool)}, "xla")[1], 1e-6
    )


@each_implementation
def test_B87_export_for_cuda_and_back(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    x = on_device(call.operands)
    step = jax.jit(lambda x: kda_jax.packed_decode(**x, implementation=implementation))
    targets = ("mosaic_gpu_v2", "triton_kernel_call")
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    exported = jax.export.export(step, platforms=("cuda",), disabled_checks=checks)(x)
    back = jax.export.deserialize(exported.serialize())
    assert back.platforms == ("cuda",)
    assert f"kda_packed_decode_{implementation}" in back.mlir_module()
    if ON_GPU:
        assert_meets_oracle(call, *back.call(x))


@each_implementation
def test_B88_three_tiles_and_the_last_slot(implementation):
    call = make_call(Sizes(B=2, H=1, HV=2, K=96, V=112, S=4), dtype="float32", padded=False)
    call.operands["ssm_state_indices"][:] = 3, 0
    call.operands["initial_state"][:] = 0.5
    assert_meets_oracle(call, *decode(call.operands, implementation))


def test_B91_differentiation():
    x = on_device(base((4, 1, 0), dtype="float32"))

    def loss(row, implementation):
        return kda_jax.packed_decode(**x | {"mixed_qkv": row}, implementation=implementation)[0].sum()

    for name in set(IMPLEMENTATIONS) - {"xla"}:
        with pytest.raises(NotImplementedError, match="implementation='xla' differentiates"), running(name):
            jax.grad(loss)(x["mixed_qkv"], name)
    gradient = jax.grad(loss)(x["mixed_qkv"], "xla")
    direction = np.random.default_rng(0).standard_normal(x["mixed_qkv"].shape)
    ends = [
        oracle.packed_decode(
            **{n: np.asarray(y) for n, y in x.items()} | {"mixed_qkv": np.asarray(x["mixed_qkv"]) + h * direction}
        )[0].sum()
        for h in (1e-4, -1e-4)
    ]
    assert float((gradient * direction).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-4)


@pytest.mark.gpu
@each_implementation
def test_B92_captured_steps_follow_changed_indices(implementation):
    x = on_device(base((4, -1, 0), H=4, HV=4, K=128, V=128, S=6, dtype="float32"))
    pools = [x["initial_state"] * (i + 1) for i in range(16)]
    rest = {name: y for name, y in x.items() if name not in ("initial_state", "ssm_state_indices")}

    @jax.jit
    def step(pools, slots):
        return [
            kda_jax.packed_decode(**rest, initial_state=p, ssm_state_indices=slots, implementation=implementation)
            for p in pools
        ]

    for slots in ((4, -1, 0), (1, 2, 3), (-1, -1, 5), (0, 7, -3)):
        slots = jnp.array(slots, jnp.int32)
        for pool, (out, state) in zip(pools, step(pools, slots), strict=True):
            expected = oracle.packed_decode(
                **{n: np.asarray(y) for n, y in rest.items()},
                initial_state=np.asarray(pool),
                ssm_state_indices=np.asarray(slots),
            )
            assert_near(out, expected[0], 2e-6)
            assert_near(state, expected[1], 2e-6)


def test_B93_optional_packages_are_not_needed():
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax_triton", "triton", "torch", "safetensors", "flax", "matplotlib"}:
            raise ModuleNotFoundError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import jax.numpy as jnp, kda_jax
x = dict(a=jnp.zeros((1, 2)), b=jnp.zeros((1, 1)), A_log=jnp.zeros(1), dt_bias=jnp.zeros(2))
y = dict(initial_state=jnp.zeros((1, 1, 2, 2)), ssm_state_indices=jnp.array([0]))
print(kda_jax.packed_decode(jnp.ones((1, 6)), **x, **y)[0].shape)
try: kda_jax.packed_decode(jnp.ones((1, 6)), **x, **y, implementation="triton")
except NotImplementedError as error: print("triton" in str(error).lower())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["(1, 1, 1, 2)", "True"]


@each_implementation
@pytest.mark.parametrize("kept", [0, 1], ids=["only-out", "only-pool"])
def test_B94_neither_result_needs_the_other(implementation, kept):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    expected = decode(call.operands, implementation)
    with running(implementation):
        got = jax.jit(lambda x: kda_jax.packed_decode(**x, implementation=implementation)[kept])(
            on_device(call.operands)
        )
    assert_near(np.nan_to_num(got), np.nan_to_num(expected[kept]), 1e-6)


@each_implementation
def test_B95_a_step_without_a_live_row_keeps_the_pool(implementation):
    x = base((-1, -1, -1))
    _, state = decode(x, implementation)
    assert_same_bits(state, x["initial_state"])
    ref = jax.new_ref(jnp.asarray(x.pop("initial_state")))
    before = np.array(ref[...])
    decode(x | {"initial_state": ref}, implementation)
    assert_same_bits(ref[...], before)


@each_implementation
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_B96_odd_slot_sizes_at_every_slot(implementation, pool_dtype):
    K, V = (40, 24) if implementation == "xla" else (96, 48)
    for slots in ((5, 1, 4), (0, 3, 2)):
        call = make_call(Sizes(B=3, H=1, HV=3, K=K, V=V, S=6), padded=False, pool_dtype=pool_dtype)
        call.operands["ssm_state_indices"][:] = slots
        call.operands["initial_state"][:] = random_operands(call.sizes, seed=7, pool_dtype=pool_dtype)["initial_state"]
        assert_meets_oracle(call, *decode(call.operands, implementation))


# K. Contract checks


@each_implementation
def test_B97_checks_under_jit_need_no_values(implementation):
    x = on_device(base((7, -1, 0)))
    with running(implementation):
        out, _ = jax.jit(lambda x: kda_jax.packed_decode(**x, implementation=implementation))(x)
    assert not np.asarray(out)[0].any()
    chex.disable_asserts()
    try:
        with pytest.raises(ContractError):
            decode(x | {"dt_bias": jnp.zeros(4)}, implementation)
    finally:
        chex.enable_asserts()


@each_implementation
def test_B99_checkify_around_the_op(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32", padded=False)
    call.operands["initial_state"][:] = 0.5

    def step(x):
        checkify.check(x["b"].shape[0] == 4, "four rows")
        return kda_jax.packed_decode(**x, implementation=implementation)

    with running(implementation):
        error, got = checkify.checkify(jax.jit(step), errors=checkify.user_checks)(on_device(call.operands))
    error.throw()
    assert_meets_oracle(call, *got)


def test_B101_nothing_is_remembered_between_calls():
    for B in (4, 6, 4):
        assert check(PACKED_DECODE, **base(tuple(range(B)))).B == B


@each_implementation
def test_B102_per_device_shapes_under_pmap(implementation):
    calls = [make_call(SHAPES["k32_v16"], seed=seed, dtype="float32") for seed in range(2)]
    stacked = {name: jnp.stack([call.operands[name] for call in calls]) for name in calls[0].operands}

    def step(x):
        return kda_jax.packed_decode(**x, implementation=implementation)

    with chex.fake_pmap(), running(implementation):
        out, state = jax.pmap(step)(stacked)
    for i, call in enumerate(calls):
        assert_meets_oracle(call, out[i], state[i])
    with pytest.raises(ContractError, match=r"\(64,\)"), chex.fake_pmap():
        jax.pmap(step)(stacked | {"dt_bias": jnp.zeros((2, 2))})


def test_B103_the_truly_wrong_argument_is_blamed():
    x = base()
    swapped = x | {"a": x["b"], "b": x["a"]}
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**swapped)
    assert [violation.argument for violation in caught.value.violations] == ["a", "b"]
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**x | {"initial_state": x["initial_state"].swapaxes(2, 3)})
    assert [violation.argument for violation in caught.value.violations] == ["initial_state"]


# L. Questions


@each_implementation
def test_B104_the_first_token_after_a_handed_over_state(implementation):
    tokens = [base((3,), dtype="float32", seed=seed) for seed in range(33)]
    pool = np.zeros((6, 4, 32, 64))
    fixed = {name: tokens[0][name] for name in ("A_log", "dt_bias")}
    for token in tokens[:32]:
        _, pool = oracle.packed_decode(**token | fixed | {"initial_state": pool}, use_qk_l2norm_in_kernel=True)
    expected_out, expected = oracle.packed_decode(
        **tokens[32] | fixed | {"initial_state": pool}, use_qk_l2norm_in_kernel=True
    )
    handed = tokens[32] | fixed | {"initial_state": pool.astype(np.float32)}
    out, state = decode(handed, implementation, use_qk_l2norm_in_kernel=True)
    assert_near(out, expected_out, 2e-6)
    assert_near(np.asarray(state)[3], expected[3], 2e-6)


@each_implementation
def test_B106_which_implementation_ran_can_be_seen(implementation):
    x = base()
    assert kda_jax.explain(**x, implementation=implementation).implementation == implementation
    text = lowered_text(lambda y: kda_jax.packed_decode(**y, implementation=implementation), x)
    assert f"kda_packed_decode_{implementation}" in text
