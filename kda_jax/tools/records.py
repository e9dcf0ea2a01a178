"""Results files: what was measured, on which device, with which versions, when and how.

A script writes its file whole, in one run at one clean commit. Where there is git, the commit is
git's, and a tree with changes is refused; where there is none, the caller names it (`--commit`).
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jaxlib
import numpy as np

import kda_jax

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"  # figures, not code: what one script writes there disturbs no other
HASH = re.compile(r"[0-9a-f]{40}")


def add_arguments(parser):
    """Adds what every script that writes a results file takes."""
    parser.add_argument("--output", metavar="FILE", help="JSON file to write (default: none)")
    parser.add_argument("--commit", metavar="HASH", help="the commit, where there is no git")


def parse(parser, arguments=None):
    """The script's options with those of `add_arguments`; a commit that is refused ends it here."""
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.output:
        try:
            commit_of(options.commit)
        except ValueError as error:
            parser.error(str(error))
    return options


def commit_of(given=None, root=ROOT):
    """The commit of the tree at `root`, as 40 digits.

    Raises:
      ValueError: the tree has changes, or is not at `given`; without git, `given` is no such hash.
    """
    if not (root / ".git").exists():
        if given and HASH.fullmatch(given):
            return given
        raise ValueError(
            "a results file names the commit it was made at, and there is no git here: pass "
            f"--commit with the 40 digits of `git rev-parse HEAD` (got {given})"
        )
    head = _git(root, "rev-parse", "HEAD")
    if given not in (None, head):
        raise ValueError(f"the tree is at commit {head}, not at {given}: leave --commit out")
    changes = _git(root, "status", "--porcelain", "--", ".", f":(exclude){RESULTS}")
    if changes:
        raise ValueError(f"a results file needs a clean tree: commit these first\n{changes}")
    return head


def _git(root, *arguments):
    git = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    if git.returncode:
        raise ValueError(f"git {arguments[0]}: {git.stderr.strip()}")
    return git.stdout.rstrip()


def environment(packages=(), device=None):
    """Device, driver and versions, by name; those of other installed `packages` too.

    device: its name, from a script that runs it without JAX.
    """
    on_gpu = device is not None or jax.default_backend() == "gpu"
    driver, capability = _driver() if on_gpu else (None, None)
    versions: dict = {"python": platform.python_version(), "jax": jax.__version__}
    versions |= {"jaxlib": jaxlib.__version__, "numpy": np.__version__}
    versions |= {"kda_jax": kda_jax.__version__}
    for package in packages:
        try:
            versions[package.replace("-", "_")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package.replace("-", "_")] = None
    where = {"device": device or jax.devices()[0].device_kind, "driver": driver}
    return where | {"compute_capability": capability} | versions


def _driver():
    """(driver's version, compute capability) of the first NVIDIA GPU; Nones without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    driver, capability = answer.splitlines()[0].split(", ")
    return driver, capability


def command_line(argv):
    """The command as it is repeated in a clone: no folder outside it is named."""
    script, *arguments = argv
    path = Path(script).resolve()
    inside = path.is_relative_to(ROOT) and path.suffix == ".py"
    script = f"python {path.relative_to(ROOT)}" if inside else path.name
    return " ".join([script, *(shlex.quote(re.sub(r"(^|=)/.*/", r"\1", x)) for x in arguments)])


@dataclass
class Record:
    """The results so far. They are written after every row, `finished` only by `finish`."""

    results: dict
    output: str | None = None
    begun: float = field(default_factory=time.perf_counter)

    def add(self, key, entry, *, quiet=False):
        """Appends an entry to the list under `key`, prints it unless `quiet`, writes the file."""
        self.results.setdefault(key, []).append(entry)
        if not quiet:
            print(f"{self.seconds:6.1f} s  {key}: {json.dumps(entry)}", flush=True)
        if self.output:
            write(self.output, self.results)

    def finish(self):
        """Marks the results as complete, writes the file and returns them."""
        self.results |= {"finished": True, "seconds": round(self.seconds, 1)}
        if self.output:
            write(self.output, self.results)
        return self.results

    @property
    def seconds(self):
        return time.perf_counter() - self.begun


def start(options, *, packages=(), device=None, argv=None, **head):
    """A Record that begins with where, with what, at which commit, when and how it is made.

    options: with `output` and `commit`. Without an output nothing is written, and no commit needed.
    """
    results = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    results |= {"commit": commit_of(options.commit) if options.output else None}
    results |= {"command": command_line(sys.argv if argv is None else argv)}
    results |= environment(packages, device)
    return Record(results | {"finished": False} | head, options.output)


def write(path, results):
    """Writes a results file at once, so that a reader finds a whole one.

    Raises:
      ValueError: the tree is no longer the clean one of the commit in `results`.
    """
    if results.get("commit") is None:
        raise ValueError(f"{path}: a results file names the commit it was made at (got None)")
    commit_of(results["commit"])
    new = Path(f"{path}.new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(new, path)
