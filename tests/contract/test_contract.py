"""The 24 rules of PACKED_DECODE, each with its message; what check() reads; and that it needs no array library."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import kda_jax
from kda_contracts import AXES, PACKED_DECODE, ContractError, Sizes, check
from kda_contracts.spec import Contract, Operand, Rule, axis_value, parse_axis

# B=3, H=2, HV=4, K=64, V=32, S=6
BASE = {
    "mixed_qkv": np.zeros((3, 384), np.float32),
    "a": np.zeros((3, 256), np.float32),
    "b": np.zeros((3, 4), np.float32),
    "A_log": np.zeros(4, np.float32),
    "dt_bias": np.zeros(256, np.float32),
    "initial_state": np.zeros((6, 4, 32, 64), np.float32),
    "ssm_state_indices": np.array([4, -1, 0], np.int32),
}
SIZES = Sizes(B=3, H=2, HV=4, K=64, V=32, S=6)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def every_second(*shape):
    """An array of this shape with gaps along its last axis."""
    return np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2]


def on_device(device, shape):
    """What the contract sees of a torch tensor: element strides from a method, a device, a dtype without a name."""
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    tensor = type("Tensor", (), {"__module__": "torch", "stride": lambda self: strides})()
    tensor.__dict__.update(shape=shape, dtype=SimpleNamespace(__str__=None), device=device)
    tensor.dtype = type("dtype", (), {"__str__": lambda self: "torch.float32"})()
    return tensor


def torch_like(**devices):
    tensors = {name: on_device(devices.get(name, "cuda:0"), x.shape) for name, x in BASE.items()}
    tensors["ssm_state_indices"].dtype = "int32"
    return tensors


# rule -> (what is passed instead, part of the message); through packed_decode unless it needs strides or an `out`.
THROUGH_THE_OP = {
    1: ({"mixed_qkv": zeros(3, 1, 384)}, "`mixed_qkv` must be a 2D tensor (got ndim=3)."),
    3: ({"a": zeros(3, 4, 64)}, "`a` and `b` must be 2D tensors (got a.ndim=3, b.ndim=2)."),
    5: (
        {"A_log": zeros(1, 1, 4, 1)},
        "`A_log`/`dt_bias` must be 1D tensors.\n      `A_log`: expected [HV] = (4,)",
    ),
    7: (
        {"ssm_state_indices": zeros(3, 1, dtype=np.int32)},
        "`ssm_state_indices` must be 1D for packed decode (got ndim=2).",
    ),
    10: (
        {"b": zeros(2, 4)},
        "Mismatched batch sizes: mixed_qkv.shape[0]=3, a.shape[0]=3, b.shape[0]=2.",
    ),
    11: (
        {"ssm_state_indices": zeros(4, dtype=np.int32)},
        "`ssm_state_indices` must have shape [B] (got (4,); expected (3,)).",
    ),
    12: ({"initial_state": zeros(6, 128, 64)}, "`initial_state` must be a 4D tensor (got ndim=3)."),
    14: (
        {"a": zeros(3, 255)},
        "`a` must have shape [B, HV*K] with HV=4, K=64 (got a.shape=(3, 255)).",
    ),
    15: ({"b": zeros(3, 5)}, "`b` must have shape [B, HV] with HV=4 (got b.shape=(3, 5))."),
    16: ({"A_log": zeros(5)}, "`A_log` must have 4 elements (got 5)."),
    17: ({"dt_bias": zeros(4)}, "`dt_bias` must have 256 elements (got 4)."),
    19: ({"mixed_qkv": zeros(3, 257)}, "Invalid packed `mixed_qkv` last dim=257 for HV=4, V=32."),
    20: ({"mixed_qkv": zeros(3, 320)}, "Invalid packed Q size 96: must be divisible by K=64."),
    21: ({"mixed_qkv": zeros(3, 512)}, "Invalid head config inferred from mixed_qkv: H=3, HV=4."),
    22: (
        {"initial_state": zeros(6, 4, 32, 64, dtype=np.int16)},
        "`initial_state` must be float32, bfloat16 or float16 (got int16).",
    ),
    23: ({"scale": -1.0}, "`scale` must be a finite number above 0 (got -1.0)."),
}
THROUGH_CHECK = {
    2: ({"mixed_qkv": every_second(3, 384)}, "`mixed_qkv` must be contiguous in the last dim."),
    4: (
        {"b": every_second(3, 4)},
        "`a`/`b` must be contiguous in the last dim.\n      `b`: got (3, 4) float32 with strides",
    ),
    6: (
        {"dt_bias": every_second(256)},
        "`A_log`/`dt_bias` must be contiguous.\n      `dt_bias`: got (256,)",
    ),
    8: ({"out": zeros(4, 1, 3, 32).transpose(2, 1, 0, 3)}, "`out` must be contiguous."),
    9: (
        torch_like(b="cuda:1"),
        "All inputs must be on the same device.\n      `b`: on cuda:1, but `mixed_qkv` is on cuda:0",
    ),
    13: (
        {"initial_state": every_second(6, 4, 32, 64)},
        "`initial_state` must be contiguous in the last dim.",
    ),
    18: (
        {"out": zeros(3, 4, 32)},
        "`out` must have shape (3, 1, 4, 32) (got out.shape=(3, 4, 32)).",
    ),
    24: (
        {"initial_state": zeros(6, 32, 4, 64).swapaxes(1, 2)},
        "`initial_state` must hold each slot's [HV, V, K] block compactly.",
    ),
}


def judge_through_the_op(wrong):
    kda_jax.packed_decode(**BASE | wrong)


def judge_through_check(wrong):
    check(PACKED_DECODE, **BASE | wrong)


def test_every_rule_has_a_case():
    assert (
        sorted(THROUGH_THE_OP | THROUGH_CHECK)
        == list(range(1, len(PACKED_DECODE.rules) + 1))
        == list(range(1, 25))
    )


@pytest.mark.parametrize("rule", sorted(THROUGH_THE_OP | THROUGH_CHECK))
def test_rule(rule):
    wrong, message = (THROUGH_THE_OP | THROUGH_CHECK)[rule]
    with pytest.raises(ContractError) as caught:
        (judge_through_the_op if rule in THROUGH_THE_OP else judge_through_check)(wrong)
    assert str(caught.value).startswith("kda_jax.packed_decode: 1 argument breaks the contract\n  ")
    assert message in str(caught.value)
    assert [violation.rule for violation in caught.value.violations] == [rule]


def test_the_error_that_brings_people_here():
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(
            mixed_qkv=zeros(8, 12288),
            a=zeros(8, 4096),
            b=zeros(8, 32),
            A_log=zeros(32),
            dt_bias=zeros(32),
            initial_state=jax.ShapeDtypeStruct((64, 32, 128, 128), jnp.float32),
            ssm_state_indices=zeros(8, dtype=np.int32),
        )
    assert str(caught.value) == (
        "kda_jax.packed_decode: 1 argument breaks the contract\n"
        "  `dt_bias` must have 4096 elements (got 32).\n"
        "      expected [HV*K] = (4096,), got (32,) float32\n"
        "      32 is HV: this looks like one bias per head; repeat each K=128 times, e.g. np.repeat(dt_bias, 128)\n"
        "  with HV=32, V=128, K=128 from `initial_state` (64, 32, 128, 128), H=32 from `mixed_qkv` (8, 12288)"
    )


def test_three_wrong_arguments_are_all_reported_in_the_rules_order():
    wrong = {"lower_bound": 1.0, "dt_bias": zeros(64), "a": zeros(3, 4, 64)}
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**BASE | wrong)
    assert [(v.rule, v.argument) for v in caught.value.violations] == [
        (3, "a"),
        (17, "dt_bias"),
        (23, "lower_bound"),
    ]
    text = str(caught.value)
    assert "3 arguments break the contract" in text
    assert "np.tile(dt_bias, 4)" in text
    assert "a.reshape(3, 256)" in text


POOLS = {
    "transposed": (zeros(6, 4, 64, 32), "transpose the last two axes"),
    "heads and V swapped": (zeros(6, 32, 4, 64), "swap axes 1 and 2"),
    "heads first": (zeros(4, 6, 32, 64), "swap axes 0 and 1"),
    "all ranks' heads": (zeros(6, 8, 32, 64), "slice this rank's 4 heads on axis 1"),
    "another model's": (zeros(6, 3, 16, 128), "must be [S, HV, V, K] with HV=4, K=64"),
}


@pytest.mark.parametrize("pool", POOLS)
def test_a_wrong_pool_is_the_one_violation(pool):
    wrong, remedy = POOLS[pool]
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**BASE | {"initial_state": wrong})
    assert [v.argument for v in caught.value.violations] == ["initial_state"]
    assert (
        "`initial_state` must be [S, HV, V, K] with HV=4, K=64 as `a`, `b`, `A_log` and `dt_bias` have it "
        f"(got {wrong.shape})" in str(caught.value)
    )
    assert remedy in str(caught.value)


def test_a_wrong_pool_hides_no_other_violation():
    wrong = {
        "initial_state": zeros(6, 4, 64, 32),
        "mixed_qkv": zeros(3, 257),
        "ssm_state_indices": zeros(2, dtype=np.int32),
    }
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**BASE | wrong)
    assert [v.argument for v in caught.value.violations] == [
        "ssm_state_indices",
        "initial_state",
        "mixed_qkv",
    ]


REMEDIES = {
    "swapped gate and beta": ({"a": BASE["b"], "b": BASE["a"]}, "looks like `a` and `b` swapped"),
    "per-head gate": ({"a": zeros(3, 4)}, "one gate per head is GDN's"),
    "bias [HV, K]": (
        {"dt_bias": zeros(4, 64)},
        "dt_bias.reshape(256), or kda_contracts.normalize_dt_bias",
    ),
    "bias of two ranks": ({"dt_bias": zeros(512)}, "slice this rank's 256 elements"),
    "empty bias": ({"dt_bias": zeros(0)}, "`dt_bias` must have 256 elements (got 0)"),
    "A_log of a checkpoint": (
        {"A_log": zeros(1, 1, 4, 1)},
        "A_log.reshape(4), or kda_contracts.normalize_A_log",
    ),
    "padded A_log": (
        {"A_log": zeros(128)},
        "normalize_A_log(A_log, 4) checks that its tail is zero",
    ),
    "A_log per channel": (
        {"A_log": zeros(256)},
        "256 is HV*K: this looks like one rate per channel",
    ),
    "token axis": ({"mixed_qkv": zeros(3, 1, 384)}, "mixed_qkv.reshape(3, 384)"),
    "unsigned slots": (
        {"ssm_state_indices": zeros(3, dtype=np.uint32)},
        "ssm_state_indices.astype('int32')",
    ),
    "bool slots": ({"ssm_state_indices": zeros(3, dtype=bool)}, "slots are integers"),
    "float slots": ({"ssm_state_indices": zeros(3)}, "slots are integers"),
    "float64 rows": ({"mixed_qkv": zeros(3, 384, dtype=np.float64)}, "mixed_qkv.astype('float32')"),
    "8-bit pool": (
        {"initial_state": zeros(6, 4, 32, 64, dtype=jnp.float8_e4m3fn)},
        "got float8_e4m3fn",
    ),
    "all layers' pools": (
        {"initial_state": zeros(2, 6, 4, 32, 64)},
        "keep the layers' pools in a list",
    ),
    "no A_log": (
        {"A_log": None},
        "`A_log` must be an array (got NoneType).\n      expected [HV] = (4,)",
    ),
    "a list of slots": (
        {"ssm_state_indices": [4, -1, 0]},
        "`ssm_state_indices` must be an array (got list)",
    ),
    "out_dtype": (
        {"out_dtype": "float64"},
        "`out_dtype` must be float32, bfloat16 or float16 (got float64)",
    ),
    "zero lower_bound": ({"lower_bound": 0.0}, "None is the softplus gate"),
    "positive lower_bound": ({"lower_bound": 1.0}, "a finite number below 0 (got 1.0)"),
    "NaN lower_bound": ({"lower_bound": float("nan")}, "a finite number below 0 (got nan)"),
    "infinite lower_bound": ({"lower_bound": float("-inf")}, "a finite number below 0 (got -inf)"),
    "text lower_bound": ({"lower_bound": "-5"}, "a finite number below 0 (got str '-5')"),
    "zero scale": ({"scale": 0.0}, "None is K**-0.5"),
}


@pytest.mark.parametrize("case", REMEDIES)
def test_remedy(case):
    wrong, message = REMEDIES[case]
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**BASE | wrong)
    assert message in str(caught.value)


@pytest.mark.parametrize("option", ["scale", "lower_bound"])
def test_a_traced_option_is_a_type_error_that_names_it(option):
    with pytest.raises(TypeError, match=f"`{option}` must be static"):
        jax.jit(lambda x: kda_jax.packed_decode(**BASE, **{option: x}))(-1.0)


@pytest.mark.parametrize(
    "number", [np.float32(-5), np.float64(-5), jnp.float32(-5), np.array(-5.0), -5]
)
def test_static_numbers_of_any_library(number):
    assert check(PACKED_DECODE, **BASE, lower_bound=number) == SIZES


@pytest.mark.parametrize(
    "dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.float32, np.dtype("float16")]
)
def test_dtypes_by_object_or_name(dtype):
    assert check(PACKED_DECODE, **BASE, out_dtype=dtype) == SIZES


def test_unknown_and_missing_names():
    with pytest.raises(TypeError, match="has no operand or option 'alog'"):
        check(PACKED_DECODE, **BASE, alog=zeros(4))
    with pytest.raises(TypeError, match="missing dt_bias"):
        check(PACKED_DECODE, **{name: x for name, x in BASE.items() if name != "dt_bias"})


def test_sizes_from_every_kind_of_array():
    assert check(PACKED_DECODE, **BASE) == SIZES
    assert check(PACKED_DECODE, **{name: jnp.asarray(x) for name, x in BASE.items()}) == SIZES
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BASE.items()}
    assert check(PACKED_DECODE, **structs) == SIZES
    assert check(PACKED_DECODE, **torch_like()) == SIZES
    seen = []
    jax.eval_shape(lambda operands: seen.append(check(PACKED_DECODE, **operands)), structs)
    assert seen == [SIZES]


def test_real_torch_tensors():
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(x) for name, x in BASE.items()}
    assert check(PACKED_DECODE, **tensors) == SIZES
    assert check(PACKED_DECODE, **tensors | {"a": tensors["a"].bfloat16()}) == SIZES
    with pytest.raises(ContractError, match="must be contiguous in the last dim"):
        check(
            PACKED_DECODE,
            **tensors | {"initial_state": tensors["initial_state"].mT.contiguous().mT},
        )


def test_symbolic_dimensions_are_never_compared():
    B, S = export.symbolic_shape("B, S")
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in BASE.items()}
    for name in ("mixed_qkv", "a", "b", "ssm_state_indices"):
        structs[name] = jax.ShapeDtypeStruct((B, *structs[name].shape[1:]), structs[name].dtype)
    structs["initial_state"] = jax.ShapeDtypeStruct((S, 4, 32, 64), jnp.float32)
    assert check(PACKED_DECODE, **structs) == Sizes(B=B, H=2, HV=4, K=64, V=32, S=S)
    with pytest.raises(ContractError, match="must have 256 elements"):
        check(PACKED_DECODE, **structs | {"dt_bias": zeros(4)})


def test_an_empty_batch_is_judged_all_the_same():
    empty = {name: BASE[name][:0] for name in ("mixed_qkv", "a", "b", "ssm_state_indices")}
    assert check(PACKED_DECODE, **BASE | empty).B == 0
    with pytest.raises(ContractError, match="`dt_bias` must have 256 elements"):
        kda_jax.packed_decode(**BASE | empty | {"dt_bias": zeros(4)})


@pytest.mark.parametrize("pool", [(6, 0, 32, 64), (6, 4, 32, 0)])
def test_empty_heads_or_keys_are_a_violation_and_no_crash(pool):
    with pytest.raises(ContractError):
        check(PACKED_DECODE, **BASE | {"initial_state": zeros(*pool)})


def test_axes_are_parsed_and_not_run():
    assert parse_axis("2*H*K+HV*V") == ((2, ("H", "K")), (1, ("HV", "V")))
    assert axis_value("2*H*K+HV*V", {"H": 2, "K": 64, "HV": 4, "V": 32}) == 384
    assert axis_value("HV*K", {"HV": 4}) is None
    with pytest.raises(ValueError, match="neither a number nor a letter"):
        parse_axis("__import__('os')")
    with pytest.raises(ValueError, match="unknown arguments"):
        Contract("x", (Operand("a", "B", ("float32",), ""),), (), (), (Rule("rank", "q", ""),))


def test_every_letter_of_the_tables_is_in_the_legend():
    letters = {
        x
        for o in PACKED_DECODE.operands
        for axis in o.axes.split()
        for _, term in parse_axis(axis)
        for x in term
    }
    assert letters == {"B", "H", "HV", "K", "V", "S"} <= set(AXES)


def test_contracts_need_no_array_library():
    # The finder refuses them; the last line proves that it does.
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "jax", "jaxlib", "torch", "chex", "ml_dtypes"}:
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
import kda_contracts, kda_contracts.cli
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - {"kda_contracts"}
assert loaded <= sys.stdlib_module_names, loaded
class Array:
    def __init__(self, *shape, dtype="float32"): self.shape, self.dtype = shape, dtype
x = dict(mixed_qkv=Array(3, 384), a=Array(3, 256), b=Array(3, 4), A_log=Array(4), dt_bias=Array(256),
         initial_state=Array(6, 4, 32, 64), ssm_state_indices=Array(3, dtype="int32"))
assert kda_contracts.check(kda_contracts.PACKED_DECODE, **x).H == 2
try: kda_contracts.check(kda_contracts.PACKED_DECODE, **x | {"dt_bias": Array(4)})
except kda_contracts.ContractError: print("judged")
try: import numpy
except ImportError: print("refused")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["judged", "refused"]
