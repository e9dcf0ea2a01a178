"""The documents' code runs, in order and in one namespace a file, and prints what they say."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in sorted(ROOT.glob("**/*.md"))
    # What is hidden is not the project's: an environment, another checkout.
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    and "```python" in path.read_text()
]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.S)


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_run(path, capsys):
    names = {}
    for code, printed in BLOCK.findall(path.read_text()):
        exec(compile(code, str(path), "exec"), names)
        got = capsys.readouterr().out
        # A line's value may stand in a comment behind its print().
        commented = re.findall(r"^print\(.*# ([^:\n]*)", code, re.M)
        assert all(expected.strip() in got for expected in commented)
        assert commented or printed or "print(" not in code, "a print whose output nothing states"
        if printed:
            assert got == printed


def test_the_documents_are_found():
    assert {"README.md", "contracts/README.md"} <= {
        str(path.relative_to(ROOT)) for path in DOCUMENTS
    }


def test_every_test_that_the_documents_name_exists():
    named = {
        name
        for path in ROOT.glob("docs/*.md")
        for name in re.findall(r"`(test_\w+)`", path.read_text())
    }
    defined = {
        name
        for path in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert named
    assert named <= defined, sorted(named - defined)


def test_no_two_tests_have_one_name():
    """A promise in the documents then names one test."""
    names = Counter(
        name
        for path in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_figures_come_from_the_results():
    sys.path.append(str(ROOT / "benchmarks"))
    import report

    for name in report.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert report.filled(text) == text, "run python benchmarks/report.py"
    shown = {
        name
        for path in report.DOCUMENTS
        for name in re.findall(r"<!-- figures (\w+):", (ROOT / path).read_text())
    }
    assert shown == set(report.TABLES)
