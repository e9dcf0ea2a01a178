"""Random shapes, dtypes, index vectors and values against the oracle."""

import numpy as np
import pytest
from cases import MOSAIC_SHAPES, POOL_DTYPES, SHAPES, Call
from hypothesis import given, settings
from hypothesis import strategies as st
from support import IMPLEMENTATIONS, ON_GPU, WITH_TRITON, assert_meets_oracle, decode

from kda_contracts import Sizes
from kda_jax.tools.synthetic import random_operands

FEW = settings(max_examples=40, derandomize=True, deadline=None, database=None)
sizes_for_xla = st.builds(
    lambda B, H, group, K, V, S: Sizes(B=B, H=H, HV=H * group, K=K, V=V, S=S),
    B=st.integers(1, 6), H=st.integers(1, 3), group=st.integers(1, 3),
    K=st.integers(1, 40), V=st.integers(1, 24), S=st.integers(1, 9),
)  # fmt: skip
# One compiled kernel for each shape: the values, slots and dtypes vary within it.
sizes_for_kernels = st.sampled_from(
    [MOSAIC_SHAPES[name] for name in ("k32_v16", "k64_v32", "k128_v16")]
)
any_slot = st.integers(-3, 12) | st.sampled_from([-(2**31), 2**31 - 1, 2**31 - 2])
options = st.fixed_dictionaries(
    {
        "use_qk_l2norm_in_kernel": st.booleans(),
        "lower_bound": st.sampled_from([None, -5.0, -0.125]),
        "scale": st.sampled_from([None, 1.0, 0.0625]),
    }
)


def draw_call(data, sizes):
    """A call whose live rows name different slots, with values of any magnitude."""
    slots = np.array(
        data.draw(st.lists(any_slot, min_size=sizes.B, max_size=sizes.B)), np.int64
    ).astype(np.int32)
    seen = set()
    for row, slot in enumerate(slots.tolist()):
        if slot in seen:
            slots[row] = -1
        seen.add(slot)
    live = (slots >= 0) & (slots < sizes.S)
    x = random_operands(
        sizes,
        seed=data.draw(st.integers(0, 2**16)),
        dtype=data.draw(st.sampled_from(POOL_DTYPES)),
        pool_dtype=data.draw(st.sampled_from(POOL_DTYPES)),
    )
    x["ssm_state_indices"] = slots
    x["a"] = (x["a"] * data.draw(st.sampled_from([0, 1, 8]))).astype(x["a"].dtype)
    x["A_log"] = x["A_log"] + np.float32(data.draw(st.sampled_from([-20, 0, 3])))
    x["mixed_qkv"][~live] = np.nan
    call = Call(sizes, x, live)
    x["initial_state"][call.other_slots] = np.nan
    return call


@pytest.mark.slow
@FEW
@given(data=st.data(), sizes=sizes_for_xla, options=options)
def test_xla(data, sizes, options):
    call = draw_call(data, sizes)
    assert_meets_oracle(call, *decode(call.operands, "xla", **options), **options)


@pytest.mark.slow
@settings(FEW, max_examples=60 if ON_GPU else 15)
@given(data=st.data(), sizes=sizes_for_kernels, options=options)
def test_mosaic_gpu(data, sizes, options):
    call = draw_call(data, sizes)
    assert_meets_oracle(call, *decode(call.operands, "mosaic_gpu", **options), **options)


@pytest.mark.skipif(not WITH_TRITON, reason="needs a GPU and jax-triton")
@FEW
@given(
    data=st.data(),
    sizes=st.sampled_from([SHAPES[name] for name in ("k60_v24", "k100_v7", "k64_v32")]),
    options=options,
)
def test_triton(data, sizes, options):
    call = draw_call(data, sizes)
    assert_meets_oracle(call, *decode(call.operands, "triton", **options), **options)


def test_the_strategies_reach_every_kind_of_row():
    kinds = set()

    @settings(FEW, max_examples=60)
    @given(data=st.data())
    def collect(data):
        call = draw_call(data, SHAPES["k32_v16"])
        slots = call.operands["ssm_state_indices"]
        kinds.update(
            "live" if live else "low" if slot < 0 else "high"
            for slot, live in zip(slots, call.live, strict=True)
        )

    collect()
    assert kinds == {"live", "low", "high"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "initial_state"])
def test_poison_stays_in_its_row_and_head(implementation, name, poison):
    # One value of row 0, head 1. Its q and k serve heads 0 and 1 (H = 1), so poison goes into v.
    sizes = SHAPES["k32_v16"]
    x = random_operands(sizes, dtype="float32")
    clean = decode(x, implementation)
    slot = x["ssm_state_indices"][0]
    place = {
        "mixed_qkv": (0, 2 * 32 + 16 + 3),  # v[3] of head 1
        "a": (0, 32 + 5),
        "b": (0, 1),
        "initial_state": (slot, 1, 3, 5),
    }[name]
    x[name][place] = poison
    got = decode(x, implementation)
    touched = np.zeros(clean[1].shape, bool)
    touched[slot, 1, 3 if name in ("mixed_qkv", "initial_state") else slice(None)] = True
    assert np.array_equal(np.asarray(got[1])[~touched], np.asarray(clean[1])[~touched])
    read = np.zeros(clean[0].shape, bool)
    read[0, 0, 1, 3 if name in ("mixed_qkv", "initial_state") else slice(None)] = True
    assert np.array_equal(np.asarray(got[0])[~read], np.asarray(clean[0])[~read])
    if np.isnan(poison):
        assert np.isnan(np.asarray(got[1])[touched]).any()
