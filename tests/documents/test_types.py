"""The types of the public names, as mypy and pyrefly read them in a caller's file."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kda_jax

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "tests" / "helpers" / "client.py"
LINES = CLIENT.read_text().splitlines()
WRONG = {number for number, line in enumerate(LINES, 1) if line.endswith("# wrong")}


def faults(checker, folder):
    """The numbers of the lines of the client that a checker refuses."""
    paths = [str(ROOT), str(ROOT / "contracts")]
    if checker == "mypy":
        (folder / "mypy.ini").write_text(f"[mypy]\nmypy_path = {':'.join(paths)}\n")
        options = ["--config-file", folder / "mypy.ini", "--cache-dir", folder / "cache"]
        options += ["--follow-imports", "silent"]  # what JAX's own files do is not judged
    else:
        (folder / "pyrefly.toml").write_text(f"search-path = {paths}\n")
        options = ["--config", folder / "pyrefly.toml", "--output-format", "min-text"]
        options += ["--python-interpreter-path", sys.executable]
        options = ["check", *options]
    command = [sys.executable, "-m", checker, *map(str, options), str(CLIENT)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    found = re.findall(r"client\.py:(\d+):(?!.* note: )", result.stdout)
    assert found or result.returncode == 0, result.stdout + result.stderr
    return {int(number) for number in found}


def functions(module, names):
    """The functions of these names that the module, or the package of that name, defines."""
    found = [getattr(module, name) for name in names if not name.startswith("_")]
    return [x for x in found if inspect.isfunction(x) and x.__module__.startswith(module.__name__)]


def test_every_public_function_says_all_its_types():
    found = functions(kda_jax, kda_jax.__all__)
    found += functions(kda_jax.sharding, vars(kda_jax.sharding))
    assert len(found) > 30
    for function in found:
        signature = inspect.signature(function)
        given = [x.annotation for x in signature.parameters.values()]
        assert inspect.Signature.empty not in (*given, signature.return_annotation), function


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyrefly"])
def test_right_calls_pass_and_each_wrong_one_fails(checker, tmp_path):
    pytest.importorskip(checker)
    assert len(WRONG) > 20
    assert faults(checker, tmp_path) == WRONG
