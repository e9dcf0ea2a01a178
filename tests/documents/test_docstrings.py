"""Docstrings are written by hand: here their shapes are compared with the tables."""

import inspect
import re
from pathlib import Path

import pytest

import kda_jax
from kda_contracts import CHUNK_KDA, COMMIT, KDA_UPDATE, LAYER_DECODE, PACKED_DECODE, RECURRENT_KDA

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


def test_explain_takes_what_packed_decode_takes():
    assert list(inspect.signature(kda_jax.explain).parameters) == list(
        inspect.signature(kda_jax.packed_decode).parameters
    )


# What the implementations call the operands, in each of their two functions.
PACKED = {"pool": "initial_state", "slots": "ssm_state_indices", "sources": "source_indices"}
UPDATE = {"pool": "initial_state_source", "writes": "intermediate_states"}
UPDATE |= {"slots": "initial_state_indices", "sources": "initial_state_indices"}


@pytest.mark.parametrize("module", ["decode_xla", "decode_mosaic_gpu", "decode_triton"])
def test_the_shapes_beside_an_implementations_parameters_are_the_tables(module):
    source = (Path(kda_jax.__file__).parent / f"{module}.py").read_text()
    packed = source[source.index("def kda_packed_decode_") :]
    packed, update = packed.split("def kda_update_")
    for text, contract, names in ((packed, PACKED_DECODE, PACKED), (update, KDA_UPDATE, UPDATE)):
        found = re.findall(r"^    (\w+?)(?:=None)?,  # (\[.*?\])", text, re.M)
        assert len(found) >= 8
        for name, shape in found:
            operand = contract.by_name[names.get(name, name)]
            assert shape.replace(" ", "") == operand.expected.replace(" ", ""), (module, name)


def test_the_shapes_beside_prefills_parameters_and_the_layers_fields_are_the_tables():
    folder = Path(kda_jax.__file__).parent
    chunk = re.findall(
        r"^    (\w+?)(?:=None)?,  # (\[.*?\])", (folder / "prefill.py").read_text(), re.M
    )
    assert len(chunk) == len(CHUNK_KDA.operands)
    names = {"pool": "initial_state", "sources": "source_indices"}
    fields = re.findall(
        r"^    (\w+): Leaf(?: = None)?  # (\[.*?\])", (folder / "weights.py").read_text(), re.M
    )
    assert len(fields) == 18
    for contract, found in ((CHUNK_KDA, chunk), (LAYER_DECODE, fields)):
        for name, shape in found:
            assert shape.replace(" ", "") == contract.by_name[
                names.get(name, name)
            ].expected.replace(" ", ""), name
