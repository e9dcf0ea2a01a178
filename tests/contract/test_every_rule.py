"""Each rule of each table, for each of its arguments, broken alone: its number and argument come.

The calls are built from the tables: stand-ins with a shape, a dtype, strides and a device.
"""

import math

import pytest

import kda_contracts
from kda_contracts import (
    COMMIT,
    KDA_CONFIG,
    LAYER_APPLY,
    LAYER_COMMIT,
    LAYER_DECODE,
    LAYER_PREFILL,
    LAYER_VERIFY,
    LOG_DECAY,
    Contract,
    ContractError,
    Operand,
    check,
)

LAYERS = (LAYER_APPLY, LAYER_DECODE, LAYER_PREFILL, LAYER_VERIFY)
CONTRACTS = [x for x in vars(kda_contracts).values() if isinstance(x, Contract)]
SIZES = dict(B=3, T=5, N=3, S=9, H=2, HV=4, K=8, V=16, W=4, D=7, R=6, C=10, M=2) | {"...": (3, 5)}
NUMBERS = dict(D=7, H=2, HV=4, K=8, V=16, W=4, lower_bound=-5.0, norm_eps=1e-5, gate_rank=16)
OPTIONS = dict(
    flag=True, positive=0.5, negative=-5.0, number=20.0, nonnegative=0.0, size=3, chunks=64
)
WRONG_OPTIONS = dict(flag=2, positive=-0.5, negative=0.5, number=math.inf, nonnegative=-1.0)
WRONG_OPTIONS |= dict(size=0, chunks=96)
CASES = [
    pytest.param(contract, number, argument, id=f"{contract.name[8:]}-{number}-{argument}")
    for contract in CONTRACTS
    for number, rule in enumerate(contract.rules, 1)
    for argument in rule.arguments.split()
]


class Tensor:
    """What the contract sees of a torch tensor; strides count elements."""

    __module__ = "torch"

    def __init__(self, shape, dtype="float32", strides=None, device="cuda:0"):
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.strides = strides or rows_first(self.shape)

    def stride(self):
        return self.strides

    def but(self, **changes):
        return Tensor(**dict(shape=self.shape, dtype=self.dtype, device=self.device) | changes)


def rows_first(shape):
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def call(contract, **sizes):
    """A call of every operand and option that meets the contract, at sizes of its own."""
    if contract is KDA_CONFIG:
        return dict(NUMBERS)
    sizes = SIZES | sizes
    operands = {
        x.name: Tensor(x.shape(sizes), x.dtypes[-1])
        for x in contract.operands
        if x.name != "cu_seqlens" or x.required
    }
    options = {x.name: x.dtypes[0] if x.dtypes else OPTIONS[x.kind] for x in contract.options}
    return operands | options


def letters(contract):
    """What the config of a layer says beforehand."""
    known = ("D", "H", "HV", "K", "V", "W") if contract in LAYERS else ()
    return {letter: SIZES[letter] for letter in known}


def longer(x, axis):
    return x.but(shape=(*x.shape[:axis], x.shape[axis] + 1, *x.shape[axis + 1 :]))


def breaks(contract, rule, argument):
    """Calls that break the rule at the argument, and so far as it can be nothing else."""
    right = call(contract)
    x, entry = right.get(argument), contract.by_name[argument]

    def changed(value):
        return right | {argument: value}

    if rule.kind == "option":
        return [changed(WRONG_OPTIONS[entry.kind]), changed("text"), changed([1])]
    if rule.kind == "beside":
        return [{name: x for name, x in right.items() if name != rule.beside}]
    if rule.kind == "alone":
        right = call(contract, B=1)
        return [right | {rule.beside: Tensor((4,), "int32")}]
    if rule.kind == "one_row":
        del right["segment_ids"]
        return [right | dict(cu_seqlens=Tensor((4,), "int32"))]
    if rule.kind == "multiple":
        return [changed(right["H"] + 1)]
    if rule.kind == "equal":
        return [changed(right["V"] - 1)]
    if contract is LOG_DECAY and rule.kind in ("needed", "numel"):
        right["a"] = Tensor((3, 5, 4, 8))  # which has its heads without A_log
    if rule.kind == "needed":
        return [{name: x for name, x in right.items() if name not in (argument, rule.beside)}]
    if rule.kind == "dtype" and not isinstance(entry, Operand):
        return [changed("float64")]
    if x is None:  # cu_seqlens, beside which sequences lie end to end
        right = call(contract, B=1, T=15)
        x = Tensor(entry.shape(SIZES), "int32")
        right[argument] = x
        right.pop("segment_ids", None)
    if rule.kind == "rank":
        return [changed(x.but(shape=() if "..." in entry.axes else (*x.shape, 1)))]
    if rule.kind == "dtype":
        return [changed(x.but(dtype="complex64"))]
    if rule.kind == "device":
        return [changed(x.but(device="cuda:1"))]
    strides = rows_first(x.shape)
    if rule.kind in ("last_axis", "contiguous"):
        return [changed(x.but(strides=tuple(2 * step for step in strides)))]
    if rule.kind == "compact":  # a gap between heads, which are whole themselves
        return [changed(x.but(strides=(2 * strides[0], 2 * strides[1], *strides[2:])))]
    if rule.kind == "form":
        right = call(contract, N=SIZES["B"] + 1)
        others = {"intermediate", "k"} - {argument} if contract is COMMIT else ()
        return [{name: x for name, x in right.items() if name not in others}]
    if rule.kind == "channels":
        return [call(contract, K=0)]
    if rule.kind == "heads":
        return [call(contract, HV=3)]
    if rule.kind == "counted":
        return [{name: x for name, x in right.items() if name != "A_log"}]
    if rule.kind.startswith("packed"):
        values = SIZES["HV"] * SIZES["V"]
        extra = dict(packed_width=1, packed_keys=2 * (SIZES["K"] + 1), packed_heads=6 * SIZES["K"])
        return [changed(x.but(shape=(SIZES["B"], values + extra[rule.kind])))]
    if rule.kind == "batch":
        return [changed(longer(x, 0))]
    # shape, layout, table, numel: the last axis, the first, the rank
    return [
        changed(longer(x, len(x.shape) - 1)),
        changed(longer(x, 0)),
        changed(x.but(shape=(*x.shape, 2))),
    ]


def found(contract, operands):
    try:
        check(contract, letters(contract), **operands)
    except ContractError as error:
        return [(violation.rule, violation.argument) for violation in error.violations]
    return []


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_the_call_that_is_broken_below_is_right(contract):
    assert found(contract, call(contract)) == []


@pytest.mark.parametrize(("contract", "number", "argument"), CASES)
def test_a_broken_rule_is_named_with_its_argument(contract, number, argument):
    calls = breaks(contract, contract.rules[number - 1], argument)
    assert [(number, argument)] in [found(contract, operands) for operands in calls]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_no_operand_and_no_option_is_left_unjudged(contract):
    judged = {
        kind: {
            name for rule in contract.rules if rule.kind == kind for name in rule.arguments.split()
        }
        for kind in ("dtype", "device", "option")
    }
    operands = {operand.name for operand in contract.operands}
    assert judged["dtype"] | judged["option"] == set(contract.by_name)
    assert operands <= judged["dtype"]
    several = len(operands) > 1 and contract not in (*LAYERS, LAYER_COMMIT)
    assert judged["device"] == (operands - {contract.anchor} if several else set())
    shapes = ("shape", "layout", "table", "numel", "rank", "packed_width")
    by_shape = [rule.arguments for rule in contract.rules if rule.kind in shapes]
    assert operands <= set(" ".join(by_shape).split())
    whole = ("shape", "layout", "table", "numel", "packed_width")
    read = {contract.pool, *contract.sizes_from}  # a letter may be read from an operand of a rank
    by_whole = [rule.arguments for rule in contract.rules if rule.kind in whole]
    assert operands - read <= set(" ".join(by_whole).split())
