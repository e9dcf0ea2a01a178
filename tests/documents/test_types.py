"""The types of the public names, as mypy and pyrefly read them in a caller's file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyrefly"])
def test_right_calls_pass_and_each_wrong_one_fails(checker, tmp_path):
    pytest.importorskip(checker)
    assert len(WRONG) > 20
    assert faults(checker, tmp_path) == WRONG
