"""Docstrings are written by hand: here their shapes are compared with the tables."""

import inspect
import re
from pathlib import Path

import pytest

import kda_jax
from kda_contracts import CHUNK_KDA, COMMIT, KDA_UPDATE, LAYER_DECODE, PACKED_DECODE, RECURRENT_KDA
from kda_jax.call import Operands

CONTRACTS = {
    contract.name.removeprefix("kda_jax."): contract
    for contract in (CHUNK_KDA, COMMIT, KDA_UPDATE, PACKED_DECODE, RECURRENT_KDA)
}
ENTRY = re.compile(r"^      (\w+): `(\[[^`]*\])`(.*)$", re.M)


def entries(function):
    return {name: (axes, rest) for name, axes, rest in ENTRY.findall(function.__doc__)}


@pytest.mark.parametrize("name", CONTRACTS)
def test_each_operand_is_documented_with_the_tables_axes(name):
    contract, documented = CONTRACTS[name], entries(getattr(kda_jax, name))
    assert documented
    for operand in contract.operands:
        if operand.required or operand.name in documented:
            axes, rest = documented[operand.name]
            assert axes == operand.expected, operand.name
            if "int8" not in operand.dtypes and (found := set(re.findall(r"b?float\d+", rest))):
                assert found == set(operand.dtypes), operand.name


@pytest.mark.parametrize(
    "name",
    [n for n in dir(kda_jax) if not n.startswith("_") and inspect.isfunction(getattr(kda_jax, n))],
)
def test_public_docstrings_are_whole(name):
    text = getattr(kda_jax, name).__doc__
    for part in (
        ">>> ",
        "Raises:",
        "Args:" if name.startswith("validate_") or name == "commit" else "Returns:",
    ):
        assert part in text, f"{name}: no {part!r}"


@pytest.mark.parametrize("name", CONTRACTS)
def test_parameters_are_the_tables(name):
    contract = CONTRACTS[name]
    parameters = inspect.signature(getattr(kda_jax, name)).parameters
    positional = [x.name for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert positional == [
        operand.name for operand in contract.operands if operand.name in positional
    ]
    known = {x.name for x in (*contract.operands, *contract.options)} - {"out"}
    assert known <= set(parameters) | {"use_qk_l2norm_in_kernel"}
    assert set(parameters) - known <= {"implementation"}


# What each operator calls the operands of an implementation.
PACKED = {"pool": "initial_state", "slots": "ssm_state_indices", "sources": "source_indices"}
UPDATE = {"pool": "initial_state_source", "writes": "intermediate_states"}
UPDATE |= {"slots": "initial_state_indices", "sources": "initial_state_indices"}
RECURRENT = {"a": "log_decay", "b": "beta", "pool": "initial_state"}


def test_the_shapes_of_an_implementations_operands_are_the_tables():
    for name, hint in Operands.__annotations__.items():
        axes = hint.__metadata__[0]
        update, packed = (
            contract.by_name.get(names.get(name, name))
            for contract, names in ((KDA_UPDATE, UPDATE), (PACKED_DECODE, PACKED))
        )
        assert axes in (update.axes, *update.also), name
        if packed is not None and name not in ("a", "b", "slots", "sources"):
            assert axes == packed.axes, name
    for contract in (RECURRENT_KDA, CHUNK_KDA):
        for name in ("q", "k", "v", "a", "b", "pool", "slots", "cu_seqlens"):
            axes = Operands.__annotations__[name].__metadata__[0]
            assert axes == contract.by_name[RECURRENT.get(name, name)].axes, name


def test_the_shapes_beside_the_layers_fields_are_the_tables():
    source = (Path(kda_jax.__file__).parent / "weights.py").read_text()
    fields = re.findall(r"^    (\w+): jax\.Array(?: \| None = None)?  # (\[.*?\])", source, re.M)
    assert len(fields) == 18
    for name, shape in fields:
        expected = LAYER_DECODE.by_name[name].expected
        assert shape.replace(" ", "") == expected.replace(" ", ""), name
