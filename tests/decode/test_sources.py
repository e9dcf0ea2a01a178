"""source_indices: a row's state read from another slot, or from nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GATES, SHAPES, make_call
from support import (
    IMPLEMENTATIONS,
    assert_meets_oracle,
    assert_same_bits,
    decode,
    lowered_text,
    on_device,
    running,
)

import kda_jax
from kda_contracts import ContractError

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def forked_call(pool_dtype="float32"):
    """Rows that read a shared prefix, their own slot, nothing; a padded row, its source poison."""
    call = make_call(SHAPES["k32_v16"], dtype="float32", padded=False, pool_dtype=pool_dtype)
    call.operands["ssm_state_indices"][:] = 4, -1, 0, 8
    call.operands["source_indices"] = np.array([6, 1, 6, -1], np.int32)
    pool = call.operands["initial_state"]
    pool[:] = np.nan  # slots 4, 0 and 8 are written and never read
    pool[6] = make_call(SHAPES["k32_v16"], seed=1, padded=False).operands["initial_state"][6]
    pool[6] = np.random.default_rng(0).standard_normal(pool[6].shape).astype(pool.dtype)
    return call.__class__(call.sizes, call.operands, call.operands["ssm_state_indices"] >= 0)


@each_implementation
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_a_row_reads_its_source(implementation, gate, pool_dtype):
    call = forked_call(pool_dtype)
    options = dict(use_qk_l2norm_in_kernel=True, lower_bound=GATES[gate])
    assert_meets_oracle(call, *decode(call.operands, implementation, **options), **options)


@each_implementation
@pytest.mark.parametrize("outside", [-1, 9, 2**31 - 1, -(2**31)])
def test_a_source_outside_the_pool_is_a_zero_state(implementation, outside):
    call = forked_call()
    call.operands["source_indices"][3] = outside
    assert_meets_oracle(call, *decode(call.operands, implementation))


@each_implementation
def test_own_slots_as_sources_change_no_bit(implementation):
    call = make_call(SHAPES["k64_v32"])
    expected = decode(call.operands, implementation)
    got = decode(
        call.operands | {"source_indices": call.operands["ssm_state_indices"]}, implementation
    )
    assert_same_bits(got[0], expected[0])
    assert_same_bits(got[1], expected[1])


@each_implementation
def test_a_64_bit_source_is_judged_before_it_is_narrowed(implementation):
    call = forked_call()
    call.operands["source_indices"] = np.array([6, 1, 6, 2**32])
    with running(implementation):
        got = kda_jax.packed_decode(**call.operands, implementation=implementation)
    assert_meets_oracle(call, *got)


@each_implementation
def test_under_jit_with_a_ref(implementation):
    call = forked_call()
    x = on_device(call.operands)
    ref = jax.new_ref(x.pop("initial_state"))
    with running(implementation):
        out = jax.jit(
            lambda ref, x: kda_jax.packed_decode(
                initial_state=ref, **x, implementation=implementation
            )[0]
        )(ref, x)
    assert_meets_oracle(call, out, ref[...])


@each_implementation
def test_vmap_over_sources_alone(implementation):
    call = forked_call()
    x = on_device(call.operands)
    sources = jnp.stack([x["source_indices"], jnp.full((4,), -1)])

    def step(sources):
        return kda_jax.packed_decode(
            **x | {"source_indices": sources}, implementation=implementation
        )

    with running(implementation):
        out, state = jax.vmap(step)(sources)
    for i in range(2):
        call.operands["source_indices"] = np.asarray(sources[i])
        assert_meets_oracle(call, out[i], state[i])


def test_without_sources_the_program_has_no_trace_of_them():
    call = make_call(SHAPES["k32_v16"])
    for implementation in IMPLEMENTATIONS:
        text = lowered_text(
            lambda x, name=implementation: kda_jax.packed_decode(**x, implementation=name),
            call.operands,
        )
        (head,) = (
            line
            for line in text.splitlines()
            if "func.func private" in line and "kda_packed_decode_" in line
        )
        assert head.count("4xi32") == 1, head


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            np.zeros(3, np.int32),
            r"`source_indices` must have shape \[B\] \(got \(3,\); expected \(4,\)\)",
        ),
        (
            np.zeros((4, 1), np.int32),
            r"`source_indices` must be 1D for packed decode \(got ndim=2\)",
        ),
        (
            np.zeros(4, np.uint32),
            r"`source_indices` must be int8, .*\n.*\n.*source_indices.astype\('int32'\)",
        ),
    ],
)
def test_a_wrong_source_operand(wrong, message):
    with pytest.raises(ContractError, match=message):
        kda_jax.packed_decode(**forked_call().operands | {"source_indices": wrong})


def test_validate_slots_sees_a_source_that_another_row_writes():
    kda_jax.validate_slots([4, -1, 0, 8], 9, sources=[6, 4, 6, -1])
    kda_jax.validate_slots([4, 0], 9, sources=[4, 0])
    with pytest.raises(
        ContractError, match="row 0 reads slot 0, which row 1 writes in the same step"
    ):
        kda_jax.validate_slots([4, 0], 9, sources=[0, 3])
    with pytest.raises(
        ContractError, match=r"row 1 has source 9: it must be -1 \(a zero state\) or in \[0, 9\)"
    ):
        kda_jax.validate_slots([4, 0], 9, sources=[4, 9])
    with pytest.raises(ContractError, match="1 sources for 2 rows"):
        kda_jax.validate_slots([4, 0], 9, sources=[4])
