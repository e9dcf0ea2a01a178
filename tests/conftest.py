"""Fixtures and the GPU marker. The summary says how many GPU tests ran; --record writes that to a file."""

import datetime
import json
import os
import platform
import subprocess
from collections import Counter

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the workers share a GPU

import jax
import jaxlib
import numpy as np
import pytest
from support import ON_GPU

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption(
        "--record", metavar="FILE", help="write the outcome, device, versions and commit as JSON"
    )
    parser.addoption(
        "--commit", metavar="HASH", help="the commit for --record, where there is no git"
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter, config):
    counts = {
        outcome: len(terminalreporter.stats.get(outcome, []))
        for outcome in ("passed", "failed", "error", "skipped")
    }
    gpu = Counter(
        outcome
        for outcome in counts
        for report in terminalreporter.stats.get(outcome, [])
        if "gpu" in getattr(report, "keywords", ())
    )
    device = jax.devices()[0].device_kind
    terminalreporter.write_line(
        f"gpu tests on {device}: {gpu['passed'] + gpu['failed'] + gpu['error']} ran, {gpu['passed']} passed, "
        f"{gpu['skipped']} skipped"
    )
    if path := config.getoption("--record"):
        record = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": config.getoption("--commit") or _commit(),
            "device": device,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
            "tests": counts,
            "gpu_tests": {outcome: gpu[outcome] for outcome in counts},
        }
        with open(path, "w") as file:
            json.dump(record, file, indent=2)
            file.write("\n")


def _commit():
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or None
