"""Legal inputs that are easily forgotten; mistakes that must not end in another library's error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SHAPES, make_call
from support import IMPLEMENTATIONS, assert_meets_oracle, assert_same_bits, decode, running

import kda_jax
from kda_contracts import PACKED_DECODE, ContractError, Sizes, check
from kda_jax.tools import oracle
from kda_jax.tools.synthetic import random_operands

SIZES = Sizes(B=3, H=1, HV=2, K=32, V=16, S=6)


def operands(**options):
    return random_operands(SIZES, dtype="float32", **options)


@pytest.mark.parametrize(
    "name", ["mixed_qkv", "a", "b", "A_log", "dt_bias", "initial_state", "ssm_state_indices"]
)
def test_numpy_operands_of_another_byte_order(name):
    x = operands()
    expected = kda_jax.packed_decode(**x)
    got = kda_jax.packed_decode(**x | {name: x[name].astype(x[name].dtype.newbyteorder(">"))})
    assert_same_bits(got[0], expected[0])
    assert_same_bits(got[1], expected[1])


@pytest.mark.parametrize(("B", "S"), [(0, 6), (3, 0), (0, 0)])
def test_fresh_numpy_arrays_without_elements(B, S):
    # Their strides are all 0 in NumPy 2.5, and their layout no mistake.
    x = operands()
    empty = {
        name: np.zeros((B, *x[name].shape[1:]), x[name].dtype)
        for name in ("mixed_qkv", "a", "b", "ssm_state_indices")
    }
    pool = np.zeros((S, *x["initial_state"].shape[1:]), np.float32)
    out, state = kda_jax.packed_decode(**x | empty | {"initial_state": pool})
    assert out.shape == (B, 1, 2, 16)
    assert state.shape == pool.shape


def test_numpy_integers_as_dimensions():
    structs = {
        name: jax.ShapeDtypeStruct(tuple(map(np.int64, x.shape)), x.dtype)
        for name, x in operands().items()
    }
    assert check(PACKED_DECODE, **structs) == SIZES
    with pytest.raises(ContractError, match="`dt_bias` must have 64 elements"):
        check(
            PACKED_DECODE, **structs | {"dt_bias": jax.ShapeDtypeStruct((np.int64(5),), "float32")}
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 1e39}, "above 0 \\(got 1e\\+39\\).\n      in float32 it is inf"),
        ({"scale": 1e-300}, "in float32 it is 0.0"),
        ({"scale": 10**400}, "`scale` must be a finite number above 0"),
        ({"scale": [1.0]}, "got list \\[1.0\\]"),
        ({"scale": 1j}, "got complex 1j"),
        ({"scale": np.bool_(True)}, "`scale` must be a finite number above 0"),
        ({"lower_bound": -1e39}, "in float32 it is -inf"),
        (
            {"use_qk_l2norm_in_kernel": "no"},
            "`use_qk_l2norm_in_kernel` must be True or False \\(got str 'no'\\)",
        ),
        ({"use_qk_l2norm_in_kernel": 1}, "must be True or False"),
        ({"use_qk_l2norm_in_kernel": np.array([True, False])}, "must be True or False"),
        ({"out_dtype": np.zeros(3)}, "`out_dtype` must be float32, .* \\(got ndarray"),
    ],
)
def test_an_option_that_is_no_such_thing(options, message):
    with pytest.raises(ContractError, match=message):
        kda_jax.packed_decode(**operands(), **options)


def test_a_traced_flag_is_named():
    with pytest.raises(TypeError, match="`use_qk_l2norm_in_kernel` must be static"):
        jax.jit(lambda flag: kda_jax.packed_decode(**operands(), use_qk_l2norm_in_kernel=flag))(
            True
        )
    assert check(PACKED_DECODE, **operands(), use_qk_l2norm_in_kernel=np.bool_(True)) == SIZES


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_no_operand(implementation):
    x = {name: jnp.asarray(array) for name, array in operands().items()}
    ref = jax.new_ref(jnp.stack([x["initial_state"]] * 2))
    struct = jax.ShapeDtypeStruct((3,), jnp.int32)
    with pytest.raises(
        ContractError,
        match=r"`initial_state` must be an array .*a view of a jax\.Ref is not supported",
    ):
        jax.jit(
            lambda ref: kda_jax.packed_decode(
                **x | {"initial_state": ref.at[0]}, implementation=implementation
            )
        )(ref)
    for wrong, message in (
        ({"a": jax.new_ref(x["a"])}, "`a` must be an array .*only the pool may be a jax.Ref"),
        (
            {"ssm_state_indices": jax.new_ref(x["ssm_state_indices"])},
            "`ssm_state_indices` .*only the pool",
        ),
        ({"source_indices": struct}, "`source_indices` .*kda_jax.explain takes it"),
    ):
        with pytest.raises(ContractError, match=message):
            kda_jax.packed_decode(**x | wrong, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "name", ["mixed_qkv", "a", "b", "A_log", "dt_bias", "ssm_state_indices", "source_indices"]
)
def test_an_unmapped_ref_whatever_is_mapped(implementation, name):
    x = {key: jnp.asarray(array) for key, array in operands().items()}
    x["source_indices"] = x["ssm_state_indices"]
    ref = jax.new_ref(x.pop("initial_state"))

    def step(y):
        return kda_jax.packed_decode(
            **x | {name: y}, initial_state=ref, implementation=implementation
        )[0]

    with pytest.raises(NotImplementedError, match="under vmap"), running(implementation):
        jax.vmap(step)(jnp.stack([x[name]] * 2))


def test_jax_narrows_an_int64_numpy_index_at_jits_door():
    # Nothing inside can see it, and the docstring says so. If JAX changes, the docstring must, too.
    x = operands()
    slots = np.array([2**32 + 4, -1, 0])
    out, _ = jax.jit(lambda slots: kda_jax.packed_decode(**x | {"ssm_state_indices": slots}))(slots)
    assert np.asarray(out)[0].any()
    out, _ = kda_jax.packed_decode(**x | {"ssm_state_indices": slots})
    assert not np.asarray(out)[0].any()


ENDS = {
    "the safe gate's far end": dict(lower_bound=-5.0, A_log=np.log(16.0), a=-6.0),
    "a saturated beta": dict(b=-100.0),
    "an overflowing rate": dict(A_log=100.0),
    "exactly zero": dict(a=0.0),
    "ordinary": dict(),
    "ordinary, safe": dict(lower_bound=-5.0),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "A_log", "dt_bias", "initial_state"])
def test_gradients_at_the_gates_ends(case, name):
    values = dict(ENDS[case])
    lower_bound = values.pop("lower_bound", None)
    x = operands()
    if "a" in values:
        x["dt_bias"][:] = 0
    for key, value in values.items():
        x[key][:] = value
    x["ssm_state_indices"][1] = -1
    for key in ("mixed_qkv", "a", "b"):
        x[key][1] = np.nan  # a padded row disturbs no derivative
    fixed = {key: array for key, array in x.items() if key != name}

    def loss(y):
        out, state = kda_jax.packed_decode(
            **fixed, **{name: y}, lower_bound=lower_bound, implementation="xla"
        )
        return (out * 0.5).sum() + (state * state).sum()

    def exact(y):
        out, state = oracle.packed_decode(**fixed, **{name: y}, lower_bound=lower_bound)
        return (out * 0.5).sum() + (state * state).sum()

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(x[name])), np.float64)
    assert np.isfinite(gradient).all()
    direction = np.random.default_rng(0).standard_normal(x[name].shape)
    step = 1e-5
    slope = (exact(x[name] + step * direction) - exact(x[name] - step * direction)) / (2 * step)
    assert (gradient * direction).sum() == pytest.approx(slope, rel=2e-3, abs=1e-3)


def test_slot_helpers_refuse_what_they_would_spoil():
    pools = [jnp.ones((3, 2)), jnp.ones((3, 2))]
    for wrong in (jnp.ones(()), [*pools, 3.0]):
        with pytest.raises(ContractError, match="the pool must be an array led by S"):
            kda_jax.clear_slots(wrong, [0])
    for wrong in (np.array([1], "u4"), np.array([True]), [1.5], 1, [[1]]):
        with pytest.raises(
            ContractError, match=r"kda_jax.clear_slots: slots must be \[n\] signed integers"
        ):
            kda_jax.clear_slots(pools[0], wrong)
        with pytest.raises(
            ContractError, match=r"kda_jax.pad_slots: slots must be \[n\] signed integers"
        ):
            kda_jax.pad_slots(wrong, 3)


def test_pack_qkv_at_its_edges():
    q, v = jnp.ones((2, 1, 3)), jnp.ones((2, 2, 4))
    assert kda_jax.pack_qkv(q[:0], q[:0], v[:0]).shape == (0, 14)
    assert kda_jax.pack_qkv(jnp.ones((0, 14)), H=1, K=3, V=4).shape == (0, 14)
    for wrong in (dict(H=1, K=-1, V=4), dict(H=0, K=3, V=4), dict(H=1, K=3, V=0)):
        with pytest.raises(ContractError, match="an interleaved row must be"):
            kda_jax.pack_qkv(jnp.ones((2, 14)), **wrong)
    with pytest.raises(ContractError, match="an interleaved row must be"):
        kda_jax.pack_qkv(jnp.ones(()), H=1, K=3, V=4)
    with pytest.raises(ContractError, match="must share a dtype"):
        kda_jax.pack_qkv(q, q, v.astype(jnp.bfloat16))
    with pytest.raises(ContractError, match="q and k must be"):
        kda_jax.pack_qkv([[1.0]], [[1.0]], [[1.0]])


def test_normalizers_at_their_edges():
    with pytest.raises(ContractError, match="this is the other form: pass varlen=True"):
        kda_jax.normalize_a(np.zeros((1, 3, 4, 8)), 3, 4, 8)
    with pytest.raises(ContractError, match="HV must be positive"):
        kda_jax.normalize_A_log(np.zeros(4), -1)
    with pytest.raises(ContractError, match="`dt_bias` must be an array"):
        kda_jax.normalize_dt_bias([0.0], 1, 1)
    n = jax.export.symbolic_shape("n")[0]
    with pytest.raises(ContractError, match="Unexpected A_log shape"):
        kda_jax.normalize_A_log(jax.ShapeDtypeStruct((n,), jnp.float32), 4)
    x = operands()
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**x | {"A_log": x["dt_bias"], "dt_bias": x["A_log"]})
    assert str(caught.value).count("this looks like `A_log` and `dt_bias` swapped") == 2


def test_a_pool_without_values_is_for_xla():
    x = operands()
    x |= {
        "initial_state": np.zeros((6, 2, 0, 32), np.float32),
        "mixed_qkv": np.zeros((3, 64), np.float32),
    }
    out, state = kda_jax.packed_decode(**x)
    assert out.shape == (3, 1, 2, 0)
    assert state.shape == (6, 2, 0, 32)
    with pytest.raises(NotImplementedError, match="V=0"):
        kda_jax.packed_decode(**x, implementation="mosaic_gpu")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_more_rows_than_slots_and_one_slot(implementation):
    call = make_call(Sizes(B=5, H=1, HV=2, K=32, V=16, S=1), dtype="float32")
    assert_meets_oracle(call, *decode(call.operands, implementation))


def test_every_shape_of_the_table_is_distinct():
    for name, sizes in SHAPES.items():
        assert sizes.K != sizes.V or name in ("k1_v1", "k32_v32"), name
