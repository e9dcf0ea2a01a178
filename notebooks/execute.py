"""Executes the notebooks beside this file from top to bottom, and fails where one raises or warns.

    python notebooks/execute.py            to see whether they run
    python notebooks/execute.py --keep     keeps the new outputs in the files, without timestamps

It needs the dependency group `notebooks`.
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def execute(path, keep):
    """Runs one notebook in a fresh kernel, in its own folder; `keep` writes it back."""
    notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
    NotebookClient(
        notebook,
        timeout=60,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
        extra_arguments=["--log-level=ERROR"],
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    if warned := [output.text for output in outputs if output.get("name") == "stderr"]:
        sys.exit(f"{path.name} warns:\n{''.join(warned)}")
    print(f"{path.name}: {time.perf_counter() - start:.0f} s")
    if keep:
        for part in (*notebook.cells, *(output for output in outputs if "metadata" in output)):
            part.metadata = nbformat.NotebookNode()
        notebook.metadata = nbformat.from_dict(METADATA)
        nbformat.write(notebook, path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="keep the new outputs in the files")
    options = parser.parse_args()
    for path in sorted(FOLDER.glob("*.ipynb")):
        execute(path, options.keep)


if __name__ == "__main__":
    main()
