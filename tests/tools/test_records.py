"""Results files: a clean tree at a known commit, or none; and what stands in them."""

import argparse
import importlib.util
import json
import subprocess
import types
from pathlib import Path

import jax
import pytest

from kda_jax.tools import records

HASH = "0123456789abcdef0123456789abcdef01234567"


def git(root, *arguments):
    identity = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
    done = subprocess.run(
        ["git", "-C", root, *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path):
    """A repository of one commit, at the root of which the records look for git."""
    root = tmp_path / "clone"
    (root / records.RESULTS).mkdir(parents=True)
    git(tmp_path, "init", "-q", str(root))
    (root / "code.py").write_text("x = 1\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    return root


def options(output, commit=None):
    return argparse.Namespace(output=str(output) if output else None, commit=commit)


def test_a_clean_tree_gives_its_commit(clone):
    head = git(clone, "rev-parse", "HEAD")
    assert records.commit_of(root=clone) == head
    assert records.commit_of(head, root=clone) == head
    # What one script wrote does not stop the next one.
    (clone / records.RESULTS / "a.json").write_text("{}")
    assert records.commit_of(root=clone) == head


@pytest.mark.parametrize("change", ["x = 2\n", None])
def test_a_tree_with_changes_is_refused_with_and_without_a_named_commit(clone, change):
    if change:
        (clone / "code.py").write_text(change)
    else:
        (clone / "new.py").write_text("y = 1\n")
    for given in (None, git(clone, "rev-parse", "HEAD")):
        with pytest.raises(ValueError, match="needs a clean tree"):
            records.commit_of(given, root=clone)


def test_another_commit_than_the_trees_is_refused(clone):
    with pytest.raises(ValueError, match=f"not at {HASH}"):
        records.commit_of(HASH, root=clone)


@pytest.mark.parametrize("given", [None, "none", "abc1234", HASH.upper()])
def test_without_git_the_commit_must_be_named_in_full(tmp_path, given):
    assert records.commit_of(HASH, root=tmp_path) == HASH
    with pytest.raises(ValueError, match="pass --commit with the 40 digits"):
        records.commit_of(given, root=tmp_path)


def test_gits_own_complaint_is_shown(tmp_path):
    (tmp_path / ".git").write_text("gitdir: nowhere")
    with pytest.raises(ValueError, match="git rev-parse: fatal"):
        records.commit_of(HASH, root=tmp_path)


def test_a_record_says_where_with_what_when_and_how(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "commit_of", lambda given: HASH)
    path = tmp_path / "a.json"
    record = records.start(
        options(path), packages=("pytest", "no-such-package"), argv=["x.py", "--n", "3"], K=5
    )
    record.add("rows", {"us": 1.5})
    begun = json.loads(path.read_text())
    assert begun["rows"] == [{"us": 1.5}]
    assert not begun["finished"]
    assert '{"us": 1.5}' in capsys.readouterr().out
    record.add("rows", {"us": 2.5})
    assert record.finish() == json.loads(path.read_text())
    results = record.results
    assert results["finished"]
    assert results["seconds"] >= 0
    assert (results["commit"], results["K"]) == (HASH, 5)
    assert (results["device"], results["jax"]) == (jax.devices()[0].device_kind, jax.__version__)
    assert results["pytest"] == pytest.__version__
    assert results["no_such_package"] is None
    assert {"date", "driver", "compute_capability", "python", "jaxlib", "numpy"} <= set(results)
    assert [x["us"] for x in results["rows"]] == [1.5, 2.5]
    assert [x.name for x in tmp_path.iterdir()] == ["a.json"]


def test_a_file_is_refused_once_the_tree_changes_under_the_run(clone, monkeypatch):
    commit = records.commit_of
    monkeypatch.setattr(records, "commit_of", lambda given=None: commit(given, root=clone))
    path = clone / records.RESULTS / "a.json"
    record = records.start(options(path))
    record.add("rows", {"us": 1.0})
    (clone / "code.py").write_text("x = 3\n")
    with pytest.raises(ValueError, match="needs a clean tree"):
        record.finish()
    assert not json.loads(path.read_text())["finished"]


def test_without_an_output_no_commit_is_asked_for(monkeypatch):
    monkeypatch.setattr(records, "commit_of", lambda given: pytest.fail("asked"))
    record = records.start(options(None))
    record.add("rows", {})
    assert record.finish()["commit"] is None
    with pytest.raises(ValueError, match="names the commit"):
        records.write("nowhere.json", record.results)


def test_a_refused_commit_ends_a_script_before_it_measures(monkeypatch, capsys):
    def refuse(given):
        raise ValueError("a clean tree is needed")

    monkeypatch.setattr(records, "commit_of", refuse)
    with pytest.raises(SystemExit):
        records.parse(argparse.ArgumentParser(), ["--output", "a.json"])
    assert "a clean tree is needed" in capsys.readouterr().err
    assert records.parse(argparse.ArgumentParser(), []).output is None


def test_the_command_line_names_no_folder_of_the_machine():
    script = str(records.ROOT / "benchmarks" / "decode.py")
    line = records.command_line([script, "--shapes", "1x3", "--output", "/a/b/c.json", "-x=/a/b"])
    assert line == "python benchmarks/decode.py --shapes 1x3 --output c.json -x=b"
    assert records.command_line(["/usr/bin/kda-jax", "bench", "a b"]) == "kda-jax bench 'a b'"


def test_driver_and_capability_come_from_nvidia_smi(monkeypatch):
    class Done:
        stdout = "580.12, 9.0\n580.12, 9.0\n"

    monkeypatch.setattr(records.subprocess, "run", lambda *args, **kwargs: Done)
    got = records.environment(device="NVIDIA X")
    assert (got["device"], got["driver"]) == ("NVIDIA X", "580.12")
    assert got["compute_capability"] == "9.0"


@pytest.fixture(scope="module")
def suite():
    """tests/conftest.py, as a module of its own."""
    path = Path(__file__).parents[1] / "conftest.py"
    spec = importlib.util.spec_from_file_location("suites_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(source="TESTPATHS", **options):
    return types.SimpleNamespace(
        args_source=getattr(pytest.Config.ArgsSource, source),
        getoption=lambda name, default=None: options.get(name, default),
    )


@pytest.mark.parametrize(
    ("config", "whole"),
    [
        (config_of(), True),
        (config_of(keyword="", maxfail=0, deselect=None), True),
        (config_of("ARGS"), False),
        (config_of(keyword="decode"), False),
        (config_of(markexpr="not slow"), False),
        (config_of(ignore=["tests/peers"]), False),
        (config_of(maxfail=1), False),
    ],
)
def test_a_selection_is_not_the_suite(suite, config, whole):
    assert suite.selects_all(config) is whole


def test_the_suites_outcome_is_counted_by_test(suite):
    def report(name, *keywords):
        return types.SimpleNamespace(nodeid=name, keywords=keywords)

    stats = {"passed": [report("a", "gpu"), report("b")], "failed": [report("d", "gpu")]}
    stats |= {"error": [report("c")], "skipped": [report("e", "gpu"), report("f")]}
    counts, gpu = suite.outcomes(stats)
    assert (counts["passed"], counts["failed"], counts["error"], counts["skipped"]) == (2, 1, 1, 2)
    assert (gpu["passed"], gpu["failed"], gpu["error"], gpu["skipped"]) == (1, 1, 0, 1)
    assert suite.failures(stats) == ["c", "d"]
