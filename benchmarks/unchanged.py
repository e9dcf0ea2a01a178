"""Proves that a refactoring changes nothing that a user computes: two checkouts, one list of calls.

    python benchmarks/unchanged.py OLD_CHECKOUT [--new NEW] [--output FILE.json]
        [--only xla|interpret|lowered|triton|gpu|times] [-k SUBSTRING] [--rows few]

NEW is the tree in which this file lies. Each checkout runs in a process of its own, with this
Python. The calls are those of unchanged_calls.py. One line a call says what is the same; the exit
status is 1 if anything differs. The parts:

    xla        The compiled CPU program without metadata and names, and all results, pools included.
               Same text is nice, same bits are required.
    interpret  The Mosaic decode kernel in Pallas's interpreter: the same bits.
    lowered    The Mosaic kernels as JAX lowers them for CUDA, without locations and names: the same
               text. Where the program around them differs, a note says so.
    triton     The Triton kernel's PTX for 9.0 and 8.0, and what it is launched with, by both of
               jax-triton's calling conventions: the same text.
    gpu        Every implementation on this GPU: the same bits.
    times      GPU times of old, new, old, new, each in a new process. `ratio` is new by old,
               `spread` what the two runs of old differ by. It differs if new is slower by more than
               1 % and by more than the spread. `--rows few` leaves out most sizes.

The first four need no GPU and take about five minutes on two cores. The last two run on a GPU only.
One process may not name kernels as another one does while a name depends on PYTHONHASHSEED, so it
is fixed. Machine code is not optimized on the CPU: that halves the time, and both sides have it.
"""

import argparse
import datetime
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kda_jax.tools import records

HERE = Path(__file__).resolve().parent
ON_CPU = ("xla", "interpret", "lowered", "triton")
ON_GPU = ("gpu", "times")
CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
# Without autotuning, which may choose another matrix kernel in each process.
SAME_BITS = {
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def start(checkout, part, file, *arguments, **variables):
    """Starts one part in one checkout; its results go to the file."""
    path = f"{checkout}{os.pathsep}{checkout / 'contracts'}"
    # Nothing of an earlier run is found in a cache.
    variables |= {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "TRITON_CACHE_DIR": f"{file}.cache"}
    variables |= {"TRITON_DEFAULT_FP_FUSION": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, str(HERE / "unchanged_child.py"), part, str(file), *arguments]
    return subprocess.Popen(command, env=os.environ | variables, cwd=checkout)


def results_of(process, file):
    if process.wait():
        raise SystemExit(f"{' '.join(process.args)} failed")
    return pickle.loads(file.read_bytes())


def compare(old, new):
    """`(same, what is the same or differs)` of one call's results in both checkouts."""
    for side, x in (("old", old), ("new", new)):
        if x is None:
            return False, f"not run in the {side} checkout"
        if "error" in x:
            lines = [line for line in x["error"].splitlines() if line.strip()]
            wanted = [line for line in lines if "Error" in line] or lines
            return False, f"the {side} checkout raises {wanted[-1].strip()}"
    exact = [x.get("exact", {}) for x in (old, new)]
    if faults := [fault for fault in _other_texts(*exact) if fault]:
        return False, "; ".join(faults)
    if faults := _other_bits(old.get("results", {}), new.get("results", {})):
        return False, "; ".join(faults)
    same = "same bits" if "results" in old else "same text"
    notes = _other_texts(old.get("loose", {}), new.get("loose", {}))
    if notes:
        return True, f"{same} (other {'; '.join(notes)})"
    return True, "same text and bits" if old.get("loose") and "results" in old else same


def _other_texts(old, new):
    faults = [f"only one checkout has {name}" for name in sorted(old.keys() ^ new.keys())]
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            before, after = old[name].splitlines(), new[name].splitlines()
            pairs = zip([*before, ""], [*after, ""], strict=False)
            first = next(((x, y) for x, y in pairs if x != y), ("", ""))
            shown = " / ".join(line.strip()[:100] for line in first)
            faults.append(f"{name}: {len(after)} lines for {len(before)}, first: {shown}")
    return faults


def _other_bits(old, new):
    faults = [f"only one checkout returns {name}" for name in sorted(old.keys() ^ new.keys())]
    for name in sorted(old.keys() & new.keys()):
        x, y = old[name], new[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            faults.append(f"{name}: {x.dtype}{list(x.shape)} became {y.dtype}{list(y.shape)}")
        elif x.tobytes() != y.tobytes():
            bits = (np.frombuffer(z.tobytes(), np.uint8).reshape(z.size, -1) for z in (x, y))
            differ = np.not_equal(*bits).any(1)
            with np.errstate(invalid="ignore"):
                worst = np.abs(x.astype(np.float64) - y.astype(np.float64)).ravel()[differ].max()
            faults.append(f"{name}: {differ.sum()} of {x.size} elements, by up to {worst:.1e}")
    return faults


def compare_times(runs):
    """Rows of the four runs old, new, old, new: `ratio`, `spread`, and whether new is as fast."""
    for name in sorted(set().union(*runs)):
        if missing := [n for n, run in enumerate(runs) if name not in run]:
            yield {"part": "times", "call": name, "same": False, "what": f"not in runs {missing}"}
            continue
        old, new = ([run[name] for run in runs[side::2]] for side in (0, 1))
        ratio = statistics.median(new) / statistics.median(old)
        spread = abs(old[0] - old[1]) / statistics.median(old)
        yield {
            "part": "times",
            "call": name,
            "same": ratio <= 1 + max(0.01, spread),
            "what": f"{ratio:.4f} of old (which differs by {spread:.4f})",
            "old": old,
            "new": new,
            "ratio": ratio,
            "spread": spread,
        }


def commit_of(checkout):
    """The checkout's commit, with a + where files differ from it; None where there is no git."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "") or None


def run(options, part, folder):
    """Yields the rows of a part."""
    sides = {"old": options.old, "new": options.new}
    if part == "times":
        runs = []
        for n, side in enumerate(("old", "new", "old", "new")):
            file = folder / f"times-{n}"
            runs.append(results_of(start(sides[side], part, file, options.rows), file))
        yield from (row for row in compare_times(runs) if options.k in str(row["call"]))
        return
    variables = SAME_BITS if part == "gpu" else CPU
    files = {side: folder / f"{part}-{side}" for side in sides}
    if part == "gpu":
        both = []
        for side, file in files.items():
            both.append(results_of(start(sides[side], part, file, options.k, **variables), file))
    else:
        # Side by side: there are two cores, and a compilation takes one.
        started = [start(sides[x], part, files[x], options.k, **variables) for x in sides]
        both = [results_of(*x) for x in zip(started, files.values(), strict=True)]
    old, new = both
    for name in old | new:
        same, what = compare(old.get(name), new.get(name))
        yield {"part": part, "call": name, "same": same, "what": what}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=lambda path: Path(path).resolve())
    parser.add_argument("--new", type=lambda path: Path(path).resolve(), default=HERE.parent)
    parser.add_argument("--only", choices=(*ON_CPU, *ON_GPU))
    parser.add_argument("-k", default="", help="calls whose name contains this")
    parser.add_argument("--rows", default="all", choices=("all", "few"), help="of the times")
    parser.add_argument("--old-commit", help="the old commit, where there is no git")
    parser.add_argument("--new-commit", help="the new commit, where there is no git")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    results: dict = {"command": records.command_line(sys.argv)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "about"
        results |= results_of(start(options.new, "about", file), file)
        results["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        results["old_commit"] = options.old_commit or commit_of(options.old)
        results["new_commit"] = options.new_commit or commit_of(options.new)
        results |= {"seconds": {}, "rows": []}
        on_gpu = results["backend"] == "gpu"
        if options.only in ON_GPU and not on_gpu:
            raise SystemExit(f"{options.only} needs a GPU (got {results['backend']})")
        parts = (options.only,) if options.only else (*ON_CPU, *(ON_GPU if on_gpu else ()))
        for part in parts:
            begin = time.perf_counter()
            for row in run(options, part, Path(folder)):
                mark = "" if row["same"] else "DIFFERS: "
                print(f"{part:9}  {row['call']}: {mark}{row['what']}", flush=True)
                results["rows"].append(row)
            results["seconds"][part] = round(time.perf_counter() - begin, 1)
            if options.output:
                Path(options.output).write_text(json.dumps(results, indent=1) + "\n")
    differ = sum(not row["same"] for row in results["rows"])
    print(f"{len(results['rows'])} compared, {differ} differ; seconds: {results['seconds']}")
    if not results["rows"]:
        raise SystemExit("nothing was compared")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
