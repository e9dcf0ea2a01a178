"""Docstrings are written by hand: here their shapes are compared with the tables."""

import inspect
import re
from pathlib import Path

import pytest

import kda_contracts
import kda_jax
from kda_contracts import (
    BETA,
    CHUNK_KDA,
    COMMIT,
    CONV_DECODE,
    CONV_PREFILL,
    FLOATS,
    GATED_RMS_NORM,
    KDA_UPDATE,
    LAYER_APPLY,
    LAYER_COMMIT,
    LAYER_DECODE,
    LAYER_PREFILL,
    LAYER_VERIFY,
    LOG_DECAY,
    PACKED_DECODE,
    RECURRENT_KDA,
    RECURRENT_VERIFY,
)
from kda_contracts.spec import INDICES
from kda_jax.call import Operands

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    contract.name.removeprefix("kda_jax."): contract
    for contract in (
        *(BETA, CHUNK_KDA, COMMIT, CONV_DECODE, CONV_PREFILL, GATED_RMS_NORM),
        *(KDA_UPDATE, LOG_DECAY, PACKED_DECODE, RECURRENT_KDA, RECURRENT_VERIFY),
    )
}
STEPS = {"kda_apply": LAYER_APPLY, "kda_decode": LAYER_DECODE, "kda_prefill": LAYER_PREFILL}
STEPS |= {"kda_commit": LAYER_COMMIT, "kda_verify": LAYER_VERIFY}
# What comes to these in a dataclass: `Drafts` and its fields.
IN_A_HOLDER = {"commit": {"k", "v", "log_decay", "beta"}}
ENTRY = re.compile(r"^  (\w+): (?:\w+, or |False; .* or )?`(\[[^`]*\])`\s+([^;:.(]*)", re.M)
# How docstrings name a set of dtypes; the first two are explained in kda_jax/__init__.py.
DTYPES = {FLOATS: "float", INDICES: "integer", ("int32", "int64"): "int32 or int64"}
MODULES = {
    "": (kda_jax, kda_jax.__all__),
    "sharding.": (kda_jax.sharding, vars(kda_jax.sharding)),
    "nnx.": (kda_jax.nnx, vars(kda_jax.nnx)),
    "kda_contracts.": (kda_contracts, vars(kda_contracts)),
}
# What kda_contracts shows to kda_jax, and not to callers.
NOT_FOR_CALLERS = {"add_check", "parse_command", "positive_number", "judge_option", "printable"}
NOT_FOR_CALLERS |= {"facts", "find_tensors", "layer_numbers", "numbers_of", "identity"}
NOT_FOR_CALLERS |= {"layout_of", "survey", "Survey", "Source", "unbroken"}


def public_functions():
    """{name: function} of everything that a caller may call, each once."""
    functions, seen = {}, set()
    for prefix, (module, names) in MODULES.items():
        for name in sorted(names):
            x = getattr(module, name)
            if not inspect.isfunction(x) or name.startswith("_") or x in seen:
                continue
            # What a module imports from its neighbours is not its own.
            own = prefix in ("", "kda_contracts.") or x.__module__ == module.__name__
            if own and name not in NOT_FOR_CALLERS:
                seen.add(x)
                functions[prefix + name] = x
    return functions


FUNCTIONS = public_functions()


def entries(function):
    return {name: (axes, rest) for name, axes, rest in ENTRY.findall(inspect.getdoc(function))}


@pytest.mark.parametrize("name", [*CONTRACTS, *STEPS])
def test_each_operand_is_documented_with_the_tables_axes_and_dtypes(name):
    contract, documented = (CONTRACTS | STEPS)[name], entries(getattr(kda_jax, name))
    parameters = inspect.signature(getattr(kda_jax, name)).parameters
    for operand in contract.operands:
        if operand.name in parameters and (operand.required or operand.name in documented):
            axes, rest = documented[operand.name]
            assert axes == operand.expected, operand.name
            wanted = DTYPES.get(operand.dtypes, " or ".join(operand.dtypes))
            assert rest.split(",")[0].strip() == wanted, operand.name


def test_no_docstring_lists_dtypes():
    listed = re.compile(r"(float32|bfloat16|float16),\s+\w+\s+or\s+\w*float|int8\s+to\s+int64")
    assert listed.search(kda_jax.__doc__)
    names = {name for name, x in FUNCTIONS.items() if listed.search(x.__doc__)}
    assert not names


def test_the_api_page_is_what_its_script_makes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import make_api

    assert make_api.PAGE.read_text() == make_api.page(), "run python docs/make_api.py"
    shown = {name for _, module, names in make_api.GROUPS for name in names.split()}
    assert set(kda_jax.__all__) <= shown
    assert {name.rpartition(".")[2] for name in FUNCTIONS} <= shown


def test_the_functions_are_found():
    assert {
        "packed_decode",
        "kda_beta",
        "sharding.place",
        "kda_contracts.check",
    } <= FUNCTIONS.keys()
    assert len(FUNCTIONS) > 35


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_docstrings_are_whole(name):
    function = FUNCTIONS[name]
    text = inspect.getdoc(function)
    returns = str(inspect.signature(function).return_annotation) != "None"
    assert re.search(r"^Args(:|, )", text, re.M)
    assert re.search(r"^(Args, )?.*Raises:", text, re.M)
    assert not returns or re.search(r"Returns[:,]", text)
    assert ">>> " in text


@pytest.mark.parametrize("name", CONTRACTS)
def test_parameters_are_the_tables(name):
    contract = CONTRACTS[name]
    parameters = inspect.signature(getattr(kda_jax, name)).parameters
    positional = [x.name for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert positional == [
        operand.name for operand in contract.operands if operand.name in positional
    ]
    known = {x.name for x in (*contract.operands, *contract.options)} - {"out"}
    known -= IN_A_HOLDER.get(name, set())
    assert known <= set(parameters) | {"use_qk_l2norm_in_kernel"}
    assert set(parameters) - known <= {"implementation"}


# What each operator calls the operands of an implementation.
PACKED = {"pool": "initial_state", "slots": "ssm_state_indices", "sources": "source_indices"}
UPDATE = {"pool": "initial_state_source", "writes": "intermediate_states"}
UPDATE |= {"slots": "initial_state_indices", "sources": "source_indices"}
# Operands of some operators alone.
OF_OTHERS = {"lengths": (COMMIT, "num_accepted"), "checkpoints": (CHUNK_KDA, "checkpoints")}
RECURRENT = {"a": "log_decay", "b": "beta"}


def test_the_shapes_of_an_implementations_operands_are_the_tables():
    for name, hint in Operands.__annotations__.items():
        axes = hint.__metadata__[0]
        if name in OF_OTHERS:
            contract, other = OF_OTHERS[name]
            assert axes == contract.by_name[other].axes, name
            continue
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
    fields = re.findall(
        r"^    (\w+): jax\.Array(?: \| None(?: = None)?)?  # (\[.*?\])", source, re.M
    )
    assert len(fields) == 21
    for name, shape in fields:
        expected = LAYER_DECODE.by_name[name].expected
        assert shape.replace(" ", "") == expected.replace(" ", ""), name
