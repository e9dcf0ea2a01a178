"""The notebooks as they are kept: executed in order, small, drawn from the present results.

./check executes them; `python notebooks/execute.py --keep` keeps new outputs.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RESULTS = re.compile(r'RESULTS / "([\w.-]+)"')


def printed(cell):
    return "".join("".join(output.get("text", ())) for output in cell["outputs"])


def test_the_notebooks_are_found():
    names = ["01_contracts", "02_packed_decode", "03_layer", "04_training"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_executed_and_small(path):
    assert path.stat().st_size < 300_000
    notebook = json.loads(path.read_text())
    assert len(notebook["cells"]) <= 20
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert not any(cell["metadata"] for cell in notebook["cells"]), (
        "run notebooks/execute.py --keep"
    )
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code[1:])  # the first one imports
    kinds = {
        output.get("name", output["output_type"]) for cell in code for output in cell["outputs"]
    }
    assert kinds <= {"stdout", "display_data"}, "an error or a warning is kept"
    assert not re.search(r"/(home|root|tmp|work|Users)/", "".join(map(printed, code)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_picture_of_results_is_of_the_present_ones(path):
    for cell in json.loads(path.read_text())["cells"]:
        for name in RESULTS.findall("".join(cell["source"])):
            results = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
            assert f"{results['date']}, commit {results['commit'][:7]}" in printed(cell), (
                "run notebooks/execute.py --keep"
            )
