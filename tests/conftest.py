"""Fixtures and markers. The summary says how many GPU tests ran; --record writes that to a file."""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter

import gpu_share
import jax
import pytest
from support import ON_GPU

from kda_jax.tools import records

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
# Optional packages that tests need, and skip without.
PACKAGES = ("jax-triton", "triton", "torch", "fla-core", "transformers", "flax", "safetensors")


ENDED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)  # not interrupted
BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write the outcome as a results file")
    parser.addoption(
        "--commit", metavar="HASH", help="the commit for --record, where there is no git"
    )


def pytest_configure(config):
    config.stash[BEGUN] = time.perf_counter()
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        try:
            records.commit_of(config.getoption("--commit"))
        except ValueError as error:
            raise pytest.UsageError(f"--record: {error}") from None


@pytest.hookimpl(tryfirst=True)  # before -m takes its choice
def pytest_collection_modifyitems(items):
    numbers = Counter()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            (step,), name = sampled.args, (item.path, item.originalname)
            if numbers[name] % step:
                item.add_marker(pytest.mark.long)
            numbers[name] += 1
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("large_pool"):
            item.add_marker(pytest.mark.xdist_group("large_pool"))  # one worker runs them, in turn


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test of a large pool runs in a process of its own, with more memory than a worker has."""
    if not (gpu_share.IS_WORKER and ON_GPU and pyfuncitem.get_closest_marker("large_pool")):
        return None
    name, _, _ = pyfuncitem.nodeid.partition("@large_pool")  # xdist's name of its group
    kept = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:benchmark", "-m", "", name],
        capture_output=True,
        text=True,
        cwd=pyfuncitem.config.rootpath,
        env=kept | {"XLA_PYTHON_CLIENT_MEM_FRACTION": gpu_share.LARGE_SHARE},
    )
    # A child that skipped the test exits with 0 too.
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout[-4000:]
    return True


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    counts, gpu = outcomes(terminalreporter.stats)
    device = jax.devices()[0].device_kind
    terminalreporter.write_line(
        f"gpu tests on {device}: {gpu['passed'] + gpu['failed'] + gpu['error']} ran, "
        f"{gpu['passed']} passed, {gpu['skipped']} skipped"
    )
    if (path := config.getoption("--record")) and not hasattr(config, "workerinput"):
        options = argparse.Namespace(output=path, commit=config.getoption("--commit"))
        argv = ["pytest", *config.invocation_params.args]
        record = records.start(options, packages=PACKAGES, argv=argv)
        record.begun = config.stash[BEGUN]
        record.results |= {
            "whole": selects_all(config) and exitstatus in ENDED,
            "tests": {outcome: counts[outcome] for outcome in OUTCOMES},
            "gpu_tests": {outcome: gpu[outcome] for outcome in OUTCOMES},
            "failures": failures(terminalreporter.stats),
        }
        record.finish()


def outcomes(stats):
    """(how many tests by outcome, the same of those for a GPU)."""
    counts = Counter({outcome: len(stats.get(outcome, [])) for outcome in OUTCOMES})
    gpu = Counter(
        outcome
        for outcome in OUTCOMES
        for report in stats.get(outcome, [])
        if "gpu" in getattr(report, "keywords", ())
    )
    return counts, gpu


def failures(stats):
    """The names of the tests that failed or did not come to run."""
    return sorted(report.nodeid for name in ("failed", "error") for report in stats.get(name, []))


def selects_all(config):
    """Whether this run is one of all tests."""
    if config.args_source == pytest.Config.ArgsSource.ARGS:
        return False
    options = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "maxfail")
    return not any(config.getoption(option, None) for option in options)
