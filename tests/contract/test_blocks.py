"""The tables of convolution, gated norm and gates: what they take, and what they say of the rest."""

import numpy as np
import pytest

from kda_contracts import (
    BETA,
    CONV_DECODE,
    CONV_PREFILL,
    GATED_RMS_NORM,
    LOG_DECAY,
    ContractError,
    check,
)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def slots(n):
    return np.arange(n, dtype=np.int32)


# B=2, C=96, W=4, S=5; and T=9, N=3
DECODE = dict(x=zeros(2, 96), weight=zeros(96, 4), pool=zeros(5, 96, 3), slots=slots(2))
PREFILL = DECODE | dict(x=zeros(9, 96), slots=slots(3), cu_seqlens=slots(4), sources=slots(3))
NORM = dict(x=zeros(2, 3, 8), gate=zeros(2, 3, 8), weight=zeros(8), eps=1e-5)
# B=2, T=3, HV=4, K=8
GATE = dict(a=zeros(2, 3, 32), A_log=zeros(4), dt_bias=zeros(32), lower_bound=None)
GATE |= dict(softplus_beta=1.0, softplus_threshold=20.0)


def error(contract, operands):
    with pytest.raises(ContractError) as caught:
        check(contract, **operands)
    return caught.value


def test_what_the_tables_read():
    assert str(check(CONV_DECODE, **DECODE)) == "Sizes(B=2, S=5)"
    assert str(check(CONV_PREFILL, **PREFILL)) == "Sizes(S=5, T=9, N=3)"
    assert str(check(CONV_PREFILL, **PREFILL | dict(sources=None))) == "Sizes(S=5, T=9, N=3)"
    assert str(check(GATED_RMS_NORM, **NORM)) == "Sizes(V=8)"
    assert str(check(BETA, b=zeros(2, 3, 4), allow_neg_eigval=False)) == "Sizes(B=2, HV=4, T=3)"
    assert str(check(LOG_DECAY, **GATE)) == "Sizes(B=2, HV=4, K=8, T=3)"


@pytest.mark.parametrize(
    ("wrong", "cures"),
    [
        (dict(pool=zeros(5, 3, 96)), {"pool": "transposed: np.swapaxes(pool, 1, 2)"}),
        (dict(weight=zeros(4, 96)), {"weight": "transposed: weight.T"}),
        (
            dict(pool=zeros(5, 3, 96), weight=zeros(4, 96)),
            {"weight": "transposed: weight.T", "pool": "transposed: np.swapaxes(pool, 1, 2)"},
        ),
        (
            dict(pool=zeros(5, 96, 5)),
            {"pool": "`weight` (96, 4) has W=4 and `pool` (5, 96, 5) has W=6: one of the two"},
        ),
        (dict(pool=zeros(5, 96, 2)), {"pool": "has W=3: one of the two is wrong"}),
        (dict(weight=zeros(95, 4)), {"weight": "expected [C, W] = (96, 4), got (95, 4) float32"}),
        (
            dict(weight=zeros(96, 1, 4)),
            {"weight": "the same elements in another shape: weight.reshape(96, 4)"},
        ),
        (dict(pool=zeros(7, 5, 96, 3)), {"pool": "this looks like the pools of all layers"}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("contract", "right"), [(CONV_DECODE, DECODE), (CONV_PREFILL, PREFILL)], ids=["one", "many"]
)
def test_a_convolutions_wrong_operand_is_named_with_its_cure(contract, right, wrong, cures):
    found = {x.argument: "\n".join(x.details) for x in error(contract, right | wrong).violations}
    assert found.keys() == cures.keys()
    for argument, cure in cures.items():
        assert cure in found[argument]


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (0, 8), (2, 3, 5, 8)])
def test_a_norm_takes_any_number_of_axes(shape):
    check(GATED_RMS_NORM, **NORM | dict(x=zeros(*shape), gate=zeros(*shape)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(gate=zeros(2, 8)), "`gate` must have shape (2, 3, 8) (got (2, 8))."),
        (dict(gate=zeros(2, 3, 1)), "`gate` must have shape (2, 3, 8) (got (2, 3, 1))."),
        (dict(weight=zeros(3, 8)), "`weight` must be [V] (got ndim=2)."),
        (dict(x=zeros()), "`x` must be [..., V] (got ndim=0)."),
        (dict(eps=-1e-9), "`eps` must be a finite number, 0 or above (got -1e-09)."),
        (dict(eps=None), "`eps` must be a finite number, 0 or above (got NoneType None)."),
        (dict(eps=True), "`eps` must be a finite number, 0 or above (got bool True)."),
    ],
    ids=str,
)
def test_a_norms_wrong_operand(wrong, message):
    assert [x.headline for x in error(GATED_RMS_NORM, NORM | wrong).violations] == [message]
    check(GATED_RMS_NORM, **NORM | dict(eps=0))


@pytest.mark.parametrize(
    "changed",
    [
        dict(a=zeros(2, 3, 4, 8)),
        dict(dt_bias=None),
        dict(A_log=zeros(1, 1, 4, 1), dt_bias=zeros(4, 8)),
        dict(A_log=None, a=zeros(2, 3, 4, 8), lower_bound=-5.0),
    ],
    ids=str,
)
def test_the_heads_of_a_gate_are_counted_by_a_or_by_A_log(changed):
    assert str(check(LOG_DECAY, **GATE | changed)) == "Sizes(B=2, HV=4, K=8, T=3)"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(A_log=None), "`A_log` may be None only with a `lower_bound`."),
        (dict(a=zeros(2, 32)), "`a` must be [B, T, HV*K] or [B, T, HV, K] (got (2, 32))."),
        (
            dict(A_log=None, lower_bound=-5.0),
            "`a` must be [B, T, HV, K], or [B, T, HV*K] of the heads that `A_log` has "
            "(got (2, 3, 32)).",
        ),
        (
            dict(A_log=zeros(5), dt_bias=None),
            "`a` must be [B, T, HV, K], or [B, T, HV*K] of the heads that `A_log` has "
            "(got (2, 3, 32)).",
        ),
        (
            dict(a=zeros(2, 3, 4, 8), A_log=zeros(5)),
            "Unexpected A_log shape: (5,); expected numel=4",
        ),
        (
            dict(a=zeros(2, 3, 4, 8), dt_bias=zeros(8)),
            "Unexpected dt_bias shape: (8,); expected numel=32",
        ),
        (dict(softplus_beta=None), "`softplus_beta` must be a finite number above 0"),
    ],
    ids=str,
)
def test_a_gates_wrong_operand(wrong, message):
    headlines = [x.headline for x in error(LOG_DECAY, GATE | wrong).violations]
    assert any(headline.startswith(message) for headline in headlines)
