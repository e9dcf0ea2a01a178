"""Docstrings are written by hand: here their shapes are compared with the table."""

import inspect
import re
from pathlib import Path

import pytest

import kda_jax
from kda_contracts import PACKED_DECODE

ENTRY = re.compile(r"^      (\w+): `(\[[^`]*\])`(.*)$", re.M)


def entries(function):
    return {name: (axes, rest) for name, axes, rest in ENTRY.findall(function.__doc__)}


def test_packed_decode_documents_each_operand_with_the_tables_axes():
    documented = entries(kda_jax.packed_decode)
    for operand in (*PACKED_DECODE.operands, *PACKED_DECODE.results):
        if operand.required:
            axes, rest = documented[operand.name]
            assert axes == operand.expected, operand.name
            if operand in PACKED_DECODE.operands and operand.name != "ssm_state_indices":
                assert set(re.findall(r"b?float\d+", rest)) == set(operand.dtypes), operand.name


@pytest.mark.parametrize(
    "name", [n for n in dir(kda_jax) if not n.startswith("_") and inspect.isfunction(getattr(kda_jax, n))]
)
def test_public_docstrings_are_whole(name):
    text = getattr(kda_jax, name).__doc__
    for part in (">>> ", "Raises:", "Returns:" if name != "validate_slots" else "Args:"):
        assert part in text, f"{name}: no {part!r}"


def test_parameters_are_the_tables():
    parameters = list(inspect.signature(kda_jax.packed_decode).parameters)
    operands = [operand.name for operand in PACKED_DECODE.operands if operand.required]
    assert parameters[: len(operands)] == operands
    assert parameters == list(inspect.signature(kda_jax.explain).parameters)


OPERANDS = {"pool": "initial_state", "slots": "ssm_state_indices", "sources": "source_indices"}


@pytest.mark.parametrize("module", ["reference", "mosaic_gpu", "triton_gpu"])
def test_the_shapes_beside_an_implementations_parameters_are_the_tables(module):
    source = (Path(kda_jax.__file__).parent / f"{module}.py").read_text()
    found = re.findall(r"^    (\w+?)(?:_gmem)?(?:=None)?,  # (\[.*?\])", source, re.M)
    assert len(found) >= 8
    for name, shape in found:
        operand = PACKED_DECODE.by_name[OPERANDS.get(name, name)]
        assert shape.replace(" ", "") == operand.expected.replace(" ", ""), (module, name)
