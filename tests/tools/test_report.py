"""What the tables refuse, how they divide, and which results are older than their code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import report

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results in a repository of its own; `put(name, **entries)` adds one."""
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", folder)
    monkeypatch.setattr(report, "CODE", {"update": ("op.py", "kernel.py")})
    for name in ("op.py", "kernel.py"):
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "op.py", "kernel.py")
    git(tmp_path, "commit", "-q", "-m", "one")

    def put(name, **entries):
        head = {"device": "GPU", "jax": "1", "date": "today", "finished": True, "command": "x"}
        head |= {"commit": git(tmp_path, "rev-parse", "HEAD")}
        (folder / f"nvidia-h200-{name}.json").write_text(json.dumps(head | entries))

    return put


def git(root, *arguments):
    identity = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
    done = subprocess.run(
        ["git", "-C", root, *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_code_that_a_results_file_is_of_exists():
    assert all((ROOT / path).exists() for paths in report.CODE.values() for path in paths)


def test_a_result_is_older_than_its_code_after_a_change_of_any_file_of_it(results, tmp_path):
    assert report.complaints("update") == ["is not there"]
    results("update")
    assert report.complaints("update") == []
    assert report.check() == 0
    (tmp_path / "kernel.py").write_text("2\n")
    git(tmp_path, "commit", "-q", "-am", "two")
    (found,) = report.complaints("update")
    assert found.startswith("kernel.py changed since")
    assert report.check() == 1


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ({"command": None}, "one whole run of a script"),
        ({"finished": False}, "one whole run of a script"),
        ({"toy": True}, "one whole run of a script"),
        ({"commit": None}, "not of this history"),
        ({"commit": "0" * 40}, "not of this history"),
    ],
)
def test_a_result_made_by_hand_or_half_or_elsewhere_is_named(results, entries, found):
    results("update", **entries)
    assert any(found in line for line in report.complaints("update"))


def test_a_file_that_no_script_makes_is_named(results, capsys):
    results("update")
    results("notes")
    assert report.check() == 1
    assert "nvidia-h200-notes.json" in capsys.readouterr().out


SUITE = {"passed": 12, "failed": 0, "error": 0, "skipped": 3}


def test_the_suites_line_is_of_a_whole_run_in_which_nothing_failed(results):
    results("tests", whole=True, tests=SUITE, gpu_tests=SUITE | {"passed": 5})
    assert "12 tests passed, 5 of them for GPUs only; none failed" in " ".join(report.suite())


@pytest.mark.parametrize(
    ("whole", "tests"),
    [(True, SUITE | {"failed": 1}), (True, SUITE | {"error": 1}), (False, SUITE), (None, SUITE)],
)
def test_a_suite_that_failed_or_was_a_part_is_refused(results, whole, tests):
    results("tests", whole=whole, tests=tests, gpu_tests=SUITE)
    with pytest.raises(SystemExit, match="nothing failed"):
        report.suite()


def entry(kernel_us, layer_us, share=0.5):
    return {"kernel_us": kernel_us, "layer_us": layer_us, "share_of_ceiling": share}


def test_each_time_is_divided_by_the_multiply_of_its_own_harness(results):
    row = {"B": 1, "HV": 32, "ceiling": entry(1.5, 2.0)}
    row |= {"mosaic_gpu": entry(2.5, 3.0), "triton": entry(2.4, 5.0)}
    results("decode-float32", rows=[row, row | {"B": 3}])
    peer = {"B": 1, "HV": 32, "ceiling_us": 4.0, "fla_us": 6.0, "sglang_us": 7.0}
    results("peers", torch="2.9+cu1", rows=[peer])
    lines = report.layers(report.FEW)
    assert (
        lines[2] == "| 1 x 32 | 2.0 | 3.0 (1.50x) | 5.0 (2.50x) | 4.0 | 7.0 (1.75x) | 6.0 (1.50x) |"
    )
    # A peer that was left out has no figure.
    results("peers", torch="2.9", rows=[{"B": 1, "HV": 32, "ceiling_us": 4.0, "fla_us": 6.0}])
    assert report.layers()[2].endswith("| 4.0 | - | 6.0 (1.50x) |")
    printed = " ".join(report.kernels())
    assert "| 1 x 32 | 1.5 | 2.5 (0.50) | 2.4 (0.50) | 0.5 | 0.5 | 2.6 |" in printed
    assert "Triton's kernel is the faster one at 2 of 2 shapes: 1 x 32, 3 x 32." in printed
    assert "Triton's layer is the faster one at 0 of 2 shapes." in printed


def test_a_table_without_its_results_says_so(results):
    text = "a\n<!-- figures memcheck: made by x -->\nold\n<!-- end of figures -->\nb"
    assert "\nNot measured yet (`nvidia-h200-memcheck.json`).\n" in report.filled(text)
    results("memcheck", tool="the checker", errors=0, ran=["a", "b"])
    assert "the checker saw 0 errors in 2 programs" in report.filled(text)


def test_tuning_names_what_the_fastest_config_changes(results):
    row = {"implementation": "mosaic_gpu", "B": 1, "HV": 32, "T": 1}
    own = row | {"config": {"rows": 8, "ahead": 2}, "kernel_us": 3.0, "chosen": True}
    other = row | {"config": {"rows": 16, "ahead": 2}, "kernel_us": 2.5, "chosen": False}
    results("tuning-float32", rows=[own, other], pool_dtype="float32")
    line = report.tuning("tuning-float32")[2]
    assert line == "| `mosaic_gpu` | 1 x 32 | 1 | 2 | 3.00 | 2.50 | rows 16 |"


def test_a_kernels_time_is_found_by_its_name():
    named = {"kda_prefill_chunks_kernel": 430.0, "fusion": 9.0}
    assert report.kernel(named, "kda_prefill_chunks", scale=1e-3) == "0.43"
    assert report.kernel(named, "kda_prefill_states") == "-"
