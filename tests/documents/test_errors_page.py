"""docs/errors.md has every message that a caller can meet.

The tables' are there verbatim, the code's by their fixed words.
"""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import kda_contracts
from kda_contracts import (
    PACKED_DECODE,
    ContractError,
    normalize_a,
    normalize_A_log,
    normalize_dt_bias,
)
from kda_contracts.spec import Contract, Rule

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
WORDS = re.sub(r"\s+", " ", PAGE)
CONTRACTS = {x.name: x for x in vars(kda_contracts).values() if isinstance(x, Contract)}
# Where messages for callers are written, the tables apart.
SOURCES = {
    "contracts/kda_contracts": (
        "bind",
        "heads",
        "judge",
        "options",
        "normalize",
        "remedy",
        "checkpoint",
        "folder",
        "model_config",
        "quantized",
        "safetensors_header",
        "tensor_names",
    ),
    "kda_jax": (
        "call",
        "checkpoint",
        "dispatch",
        "drafts",
        "layer",
        "layer_call",
        "layouts",
        "nnx",
        "prefill",
        "sequences",
        "sharding",
        "slots",
        "stored",
        "transforms",
        "update",
        "weights",
    ),
}
FENCE = re.compile(r"(^##[^\n]*\n\n)?^```(\w+)\n(.*?)^```", re.M | re.S)


def fences(*, headed):
    """The text fences: right behind a heading, messages with placeholders; elsewhere, examples."""
    return [
        text
        for heading, kind, text in FENCE.findall(PAGE)
        if kind == "text" and bool(heading) == headed
    ]


def messages():
    """Every message of the page; in a fence an indented line belongs to the one before it."""
    return [
        line
        for text in fences(headed=True)
        for line in re.sub(r"\n +", " ", text.strip()).split("\n")
    ]


def missing(contract):
    return [rule.message for rule in contract.rules if rule.message not in messages()]


def is_known(example):
    """Whether the example's first line is a message of the page, its placeholders filled in."""
    patterns = (
        ".+?".join(map(re.escape, re.split(r"\{[\w.]+\}", message))) for message in messages()
    )
    first = re.sub(r"\n +", " ", example.strip())
    return any(re.match(pattern, first) for pattern in patterns)


def literals(source):
    """The fixed parts of each text of three words or more in a module.

    Docstrings and our own mistakes are left out.
    """
    tree = ast.parse(source)
    skipped = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {part for part in node.values if isinstance(part, ast.Constant)}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "AssertionError":
            skipped |= set(node.args)
    for node in set(ast.walk(tree)) - skipped:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        fixed = [
            part.value
            for part in parts
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if " " in "".join(fixed).strip() and len(re.findall(r"[A-Za-z]{2,}", " ".join(fixed))) >= 3:
            yield fixed


def is_on_the_page(fixed):
    return (
        re.search(".{0,150}?".join(re.escape(re.sub(r"\s+", " ", part)) for part in fixed), WORDS)
        is not None
    )


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_rule_of_the_tables(name):
    assert not missing(CONTRACTS[name]), "docs/errors.md needs an entry"


def test_every_text_of_the_code():
    paths = [ROOT / folder / f"{name}.py" for folder, names in SOURCES.items() for name in names]
    absent = [
        fixed for path in paths for fixed in literals(path.read_text()) if not is_on_the_page(fixed)
    ]
    assert not absent, "docs/errors.md needs an entry"


def test_every_example_is_a_message():
    examples = [text for text in fences(headed=False) if not is_known(text)]
    assert len(fences(headed=False)) > 30
    assert not examples


@pytest.mark.parametrize(
    "normalize",
    [
        lambda: normalize_A_log(Shaped((3,)), 4),
        lambda: normalize_dt_bias(Shaped((5,)), 4, 64),
        lambda: normalize_a(Shaped((5,)), 3, 4, 64),
        lambda: normalize_a(Shaped((5,)), 3, 4, 64, varlen=True),
        lambda: normalize_a(Shaped((5,)), 3, 0, 64),
    ],
)
def test_what_the_normalizers_raise(normalize):
    with pytest.raises(ContractError) as caught:
        normalize()
    assert is_known(str(caught.value))


def test_a_new_message_is_missed():
    rule = Rule("shape", "a", "`a` must be nowhere on the page (got {a.shape}).")
    assert missing(dataclasses.replace(PACKED_DECODE, rules=(*PACKED_DECODE.rules, rule))) == [
        rule.message
    ]
    new = next(
        literals('"a docstring"\nraise ValueError(f"`{x}` must be nowhere on the page (got {y})")')
    )
    assert new == ["`", "` must be nowhere on the page (got ", ")"]
    assert not is_on_the_page(new)
    assert not is_known("`a` is nowhere on the page (got 3).")


class Shaped:
    """A shape and a dtype, as the normalizers want them."""

    dtype = "float32"

    def __init__(self, shape):
        self.shape = shape
