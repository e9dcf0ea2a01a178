"""A layer's static numbers, judged when a config is made, and heads split over ranks."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_contracts import (
    KDA_CONFIG,
    LAYER_APPLY,
    LAYER_DECODE,
    LAYER_PREFILL,
    LAYER_VERIFY,
    BadFileError,
    ContractError,
    check,
    layer_numbers,
    split_heads,
)

RIGHT = dict(D=32, H=2, HV=4, K=8, V=16, W=4, lower_bound=-5.0, norm_eps=1e-5, gate_rank=16)
SIZE = "must be a whole number from 1 to 2147483647"
# field -> values that it must not have, each with what the error shows of it
NOT_SIZES = {
    0: "int 0",
    -16: "int -16",
    2**31: "int 2147483648",
    10**5000: "int of 16610 bits",
    4.0: "float 4.0",
    True: "bool True",
    "4": "str '4'",
    (4,): "tuple (4,)",
    None: "NoneType None",
}
NOT_BOUNDS = {
    0.0: "0.0",
    5: "5.0",
    float("nan"): "nan",
    float("-inf"): "-inf",
    True: "bool True",
    "-5": "str '-5'",
    (-5.0,): "tuple (-5.0,)",
    -(10**400): "int of 1329 bits",
    -1e-60: "-1e-60",  # 0 in float32
}
NOT_EPS = {0: "0.0", -1e-5: "-1e-05", None: "NoneType None", 1e39: "1e+39"}
NOT_EPS |= {x: NOT_BOUNDS[x] for x in (True, (-5.0,), 0.0)} | {float("inf"): "inf", "x": "str 'x'"}
WRONG = [
    *(("D", x, f"`D` {SIZE} (got {shown}).") for x, shown in NOT_SIZES.items()),
    *((name, 0, f"`{name}` {SIZE} (got int 0).") for name in ("H", "HV", "K", "V", "W")),
    *((name, None, f"`{name}` {SIZE} (got NoneType None).") for name in ("H", "HV", "K", "V", "W")),
    ("HV", 3, "`HV` must be a multiple of H=2 (got 3)."),
    ("HV", 1, "`HV` must be a multiple of H=2 (got 1)."),
    (
        "gate_rank",
        8,
        "`gate_rank` must be V=16 (got 8).\n      None is an output gate of full rank",
    ),
    ("gate_rank", 16.0, f"`gate_rank` {SIZE} (got float 16.0)."),
]
for name, values, sign in (("lower_bound", NOT_BOUNDS, "below"), ("norm_eps", NOT_EPS, "above")):
    for value, shown in values.items():
        message = f"`{name}` must be a finite number {sign} 0 (got {shown})."
        WRONG.append((name, value, message))


def short(x):
    return x[:20] if isinstance(x, str) else type(x).__name__


@pytest.mark.parametrize(
    ("name", "value", "message"),
    WRONG,
    ids=short,
)
def test_a_config_is_refused_when_it_is_made(name, value, message):
    for make in (kda_jax.KDAConfig, lambda **numbers: check(KDA_CONFIG, **numbers)):
        with pytest.raises(ContractError) as caught:
            make(**RIGHT | {name: value})
        start = "kda_jax.KDAConfig: 1 argument breaks the contract\n  "
        assert str(caught.value).startswith(start + message)
    config = kda_jax.KDAConfig(**RIGHT)
    with pytest.raises(ContractError):
        dataclasses.replace(config, **{name: value})


def test_all_faults_of_a_config_are_one_error_and_a_wrong_size_silences_what_needs_it():
    with pytest.raises(ContractError) as caught:
        kda_jax.KDAConfig(**RIGHT | dict(H=0, HV=3, V="x", norm_eps=-1.0))
    assert "kda_jax.KDAConfig: 3 arguments break the contract" in str(caught.value)
    assert [x.argument for x in caught.value.violations] == ["H", "V", "norm_eps"]


@pytest.mark.parametrize(
    "numbers",
    [
        dict(gate_rank=None),
        dict(lower_bound=None),
        dict(W=1),
        dict(D=2**31 - 1),
        dict(D=np.int64(32)),
        dict(norm_eps=np.float32(1e-6)),
        dict(lower_bound=-1),
    ],
    ids=str,
)
def test_a_right_config_keeps_its_numbers(numbers):
    config = kda_jax.KDAConfig(**RIGHT | numbers)
    for name, number in (RIGHT | numbers).items():
        assert getattr(config, name) is number
    hash(config)


def test_numbers_are_static():
    def make(x):
        return kda_jax.KDAConfig(**RIGHT | dict(norm_eps=x))

    with pytest.raises(TypeError, match="`norm_eps` must be static"):
        jax.jit(lambda x: make(x) and x)(1.0)
    with pytest.raises(TypeError, match="`D` must be static"):
        jax.jit(lambda x: kda_jax.KDAConfig(**RIGHT | dict(D=x)) and x)(3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gate_rank", [None, 16])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_random_weights_of_an_allowed_config_are_the_steps(gate_rank, lower_bound):
    config = kda_jax.KDAConfig(**RIGHT | dict(gate_rank=gate_rank, lower_bound=lower_bound))
    params, cache = kda_jax.init_params(config, jax.random.key(0)), kda_jax.init_cache(config, 3)
    x, slots = jnp.ones((2, 32), jnp.bfloat16), jnp.array([2, 0])
    y, _ = kda_jax.kda_decode(params, x, cache, slots, config=config)
    assert y.shape == (2, 32)


@pytest.mark.parametrize(
    "contract", [LAYER_APPLY, LAYER_DECODE, LAYER_PREFILL, LAYER_VERIFY], ids=lambda x: x.name
)
def test_a_layers_step_judges_its_bound_and_epsilon_under_their_own_names(contract):
    sizes = dict(D=7, H=2, HV=4, K=8, V=16, W=4)
    more = sizes | dict(R=8, S=5, B=3, T=9, N=3)
    x = {
        operand.name: np.zeros(operand.shape(more), operand.dtypes[0])
        for operand in contract.operands
        if operand.name != ("cu_seqlens" if contract is LAYER_APPLY else "checkpoints")
    }
    check(contract, sizes, **x, lower_bound=None, norm_eps=1e-5)
    with pytest.raises(ContractError) as caught:
        check(contract, sizes, **x, lower_bound=0.0, norm_eps=None)
    assert [y.headline for y in caught.value.violations] == [
        "`lower_bound` must be a finite number below 0 (got 0.0).",
        "`norm_eps` must be a finite number above 0 (got NoneType None).",
    ]


LINEAR = dict(num_heads=4, head_dim=16, short_conv_kernel_size=4)
FLA = dict(model_type="kda", hidden_size=32, num_heads=4, head_dim=16, conv_size=4)


@pytest.mark.parametrize("eps", [None, "x", 10**400, -1, 0, True, [1]], ids=short)
def test_a_files_epsilon_is_judged(eps):
    kimi = dict(hidden_size=32, linear_attn_config=LINEAR, rms_norm_eps=eps)
    for read in (layer_numbers, kda_jax.config_from_hf):
        for config in (kimi, dict(text_config=kimi)):
            with pytest.raises(
                BadFileError, match="`rms_norm_eps` must be a finite number above 0"
            ):
                read(config)
        with pytest.raises(BadFileError, match="`norm_eps` must be a finite number above 0"):
            read(FLA | dict(norm_eps=eps))


def test_other_numbers_of_a_file_are_judged_as_a_configs():
    with pytest.raises(
        BadFileError, match=r"config.json: `HV` must be a multiple of H=4 \(got 6\)"
    ):
        layer_numbers(FLA | dict(num_v_heads=6))
    with pytest.raises(
        BadFileError,
        match=r"`lower_bound` must be null or a finite number below 0 \(got int of 1329 bits",
    ):
        layer_numbers(FLA | dict(lower_bound=-(10**400)))
    assert layer_numbers(FLA)["norm_eps"] == 1e-6  # FLA's default


def test_heads_are_split_over_ranks():
    assert split_heads(16, 32, 8) == (2, 4)
    assert split_heads(16, 32, 1) == (16, 32)
    assert split_heads(16, 32, np.int64(16)) == (1, 2)


@pytest.mark.parametrize(
    ("heads", "ranks", "message"),
    [
        ((32, 32), 3, "32 heads cannot be split over 3 ranks\n  it can be 1, 2, 4, 8, 16, 32"),
        ((16, 24), 16, "16 key and 24 value heads cannot be split over 16 ranks\n  it can be 1, 2"),
        ((4, 4), 0, "4 heads cannot be split over 0 ranks\n  it can be 1, 2, 4"),
        ((4, 4), -2, "4 heads cannot be split over -2 ranks"),
        ((4, 4), 10**5000, "4 heads cannot be split over int of 16610 bits ranks"),
        ((4, 4), 2.0, "`ranks` must be a whole number above 0 (got float 2.0)"),
        ((4, 4), "2", "`ranks` must be a whole number above 0 (got str '2')"),
        ((4, 4), True, "`ranks` must be a whole number above 0 (got bool True)"),
        ((4, 4), None, "`ranks` must be a whole number above 0 (got NoneType None)"),
    ],
    ids=short,
)
def test_heads_that_cannot_be_split_say_what_can_be(heads, ranks, message):
    with pytest.raises(ContractError) as caught:
        split_heads(*heads, ranks)
    assert str(caught.value).startswith(message)


def test_the_search_for_a_hint_is_short_however_many_heads_there_are():
    start = time.process_time()
    with pytest.raises(ContractError, match=r"it can be 1$"):
        split_heads(2**31 - 1, 2**31 - 1, 3)
    assert time.process_time() - start < 0.1
