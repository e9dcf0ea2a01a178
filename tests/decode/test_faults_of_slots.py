"""Real faults of kernels of this kind, each reduced to a small input and its answer.

Here: slots, pools, stale state.
Each runs on every implementation that it can reach. Those that need a GPU, or a pool of many
gigabytes, carry the marker `gpu`.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import rounding
from faults import base, each_implementation, untouched
from support import (
    ON_GPU,
    STATE_LIMIT,
    assert_near,
    assert_same_bits,
    decode,
    on_device,
    running,
)

import kda_jax
from kda_contracts import ContractError
from kda_jax.tools import oracle

# Slot index and padding


@each_implementation
def test_minus_one_does_not_wrap(implementation):
    x = base((-1, 3), S=5)
    out, state = decode(x, implementation)
    untouched(x["initial_state"], state, [3])
    assert not np.asarray(out)[0].any()


@each_implementation
def test_padding_is_not_the_last_slot(implementation):
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
def test_slot_0_is_an_ordinary_slot(implementation, slots):
    x = base(slots)
    out, state = decode(x, implementation)
    assert np.asarray(out)[0].any()
    assert (np.asarray(state)[0] != x["initial_state"][0]).any()


@each_implementation
def test_padded_rows_are_zero_over_dirty_memory(implementation):
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
def test_a_padded_tail_changes_no_slot(implementation):
    slots = np.asarray(kda_jax.pad_slots(np.array([4, 2, 0], np.int32), 8))
    x = base(tuple(slots))
    _, state = decode(x, implementation)
    changed = (np.asarray(state) != x["initial_state"]).any((1, 2, 3))
    assert changed.tolist() == [True, False, True, False, True, False]
    with pytest.raises(ContractError, match="row 6 has slot 4, as row 0 has"):
        kda_jax.validate_slots([4, 2, 0, 5, 1, 3, 4, 2], 6)


@each_implementation
@pytest.mark.parametrize("slots", [(6, -1, 0), (2**31 - 1, 0, 1), (-(2**31), 0, 6)])
def test_an_index_out_of_range_is_a_padded_row(implementation, slots):
    x = base(slots)
    out, state = decode(x, implementation)
    live = [row for row, slot in enumerate(slots) if 0 <= slot < 6]
    untouched(x["initial_state"], state, [slots[row] for row in live])
    assert np.asarray(out).any((1, 2, 3)).nonzero()[0].tolist() == live


@each_implementation
def test_a_bad_index_breaks_no_later_operation(implementation):
    decode(base((2**31 - 1, 7, -5)), implementation)
    assert jnp.ones(10).sum() == 10
    with pytest.raises(ContractError, match="row 1 has slot 7"):
        kda_jax.validate_slots([0, 7], 6)


@each_implementation
def test_a_64_bit_index_is_never_narrowed_to_a_live_slot(implementation):
    x = base((0, 0, 0, 0))
    with running(implementation):
        x["ssm_state_indices"] = np.array([2**32, 2**32 + 3, 2**63 - 1, -(2**63)])
        out, state = kda_jax.packed_decode(**x, implementation=implementation)
    assert not np.asarray(out).any()
    assert_same_bits(state, x["initial_state"])
    with pytest.raises(ContractError, match="row 0 has slot 4294967296"):
        kda_jax.validate_slots(x["ssm_state_indices"], 6)


@each_implementation
def test_signed_indices_agree_and_others_are_refused(implementation):
    x = base()
    expected = decode(x, implementation)
    for dtype in ("int8", "int16", "int64"):
        with jax.enable_x64(dtype == "int64"):
            got = decode(
                x | {"ssm_state_indices": x["ssm_state_indices"].astype(dtype)}, implementation
            )
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])
        slots = {"ssm_state_indices": x["ssm_state_indices"].astype(dtype)}  # a NumPy array
        with running(implementation):
            got = kda_jax.packed_decode(**on_device(x) | slots, implementation=implementation)
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])
    for dtype in ("uint32", "uint8", "bool", "float32"):
        with pytest.raises(
            ContractError, match=rf"`ssm_state_indices` must be int8, .* \(got {dtype}\)"
        ):
            decode(x | {"ssm_state_indices": x["ssm_state_indices"].astype(dtype)}, implementation)


# Integer width, pool size


@pytest.mark.gpu
@pytest.mark.large_pool
@each_implementation
@pytest.mark.parametrize(
    ("HV", "slots", "slot", "dtype"),
    [(32, 4200, 4150, "float32"), (96, 1400, 1370, "float32"), (96, 1400, 1370, "bfloat16")],
)
def test_slots_beyond_2_to_31_elements(implementation, HV, slots, slot, dtype):
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
    if implementation == "xla":  # its fusions may move last bits with the pool's size
        assert_near(out, expected_out, 2 * rounding("bfloat16"))
        assert_near(
            pool[slot], expected[3], STATE_LIMIT if dtype == "float32" else 2 * rounding(dtype)
        )
    else:
        assert_same_bits(out, expected_out)
        assert_same_bits(pool[slot], expected[3])
    assert not pool[:11].any()
    assert not pool[slot + 1 :].any()


@each_implementation
def test_64_bit_mode_changes_no_bit(implementation):
    x = base()
    expected = decode(x, implementation, scale=0.25)
    for scale in (0.25, np.float64(0.25)):
        with jax.enable_x64(True):
            got = decode(x, implementation, scale=scale)
        assert got[0].dtype == jnp.bfloat16
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])


@pytest.mark.gpu
@pytest.mark.large_pool
@each_implementation
def test_a_pool_of_most_of_the_memory(implementation):
    HV, per_slot = 32, 32 * 128 * 128 * 4
    slots = int(0.6 * jax.devices()[0].memory_stats()["bytes_limit"] // per_slot)
    x = on_device(base((slots - 1, -1, 0), H=HV, HV=HV, K=128, V=128, S=1))
    x.pop("initial_state")
    step = jax.jit(
        lambda pool, x: kda_jax.packed_decode(
            **x, initial_state=pool, implementation=implementation
        ),
        donate_argnums=0,
    )
    shape = jax.ShapeDtypeStruct((slots, HV, 128, 128), jnp.float32)
    memory = step.lower(shape, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= slots * per_slot
    assert memory.temp_size_in_bytes < slots * per_slot / 100
    _, pool = step(jnp.zeros(shape.shape), x)
    assert pool[slots - 1].any()
    assert pool[0].any()
    assert not pool[1:3].any()


# Stale and duplicate state


@each_implementation
def test_a_cleared_or_fresh_slot_equals_a_zero_state(implementation):
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
def test_duplicates_harm_their_own_slot_only(implementation):
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
def test_an_idle_step_changes_nothing(implementation):
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
