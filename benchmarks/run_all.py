"""All results files of one GPU, in one command, each script in a process and a time of its own.

    python benchmarks/run_all.py --folder FOLDER [--commit HASH] [--only decode-float32,layer]
                                 [--bundle FILE.tar] [--sglang FOLDER] [--toy]

A part that fails, or takes longer than its limit, does not stop the rest. What each prints goes
into FOLDER as well; --bundle packs the folder into one file, after every part. The files go to
benchmarks/results as they are. The exit code says whether all parts came to their end.
"""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEVICE = "nvidia-h200"


@dataclasses.dataclass(frozen=True)
class Part:
    """One script's run: its limit in seconds, and whether a toy run of it takes --toy."""

    script: str
    arguments: tuple[str, ...] = ()
    limit: int = 120
    toy: bool = True


def decode(*arguments, limit=120):
    return Part("benchmarks/decode_times.py", arguments, limit)


KERNELS = ("--implementations", "mosaic_gpu,triton")
NARROW = "1x32,8x12,8x32,32x12,64x12,64x32,128x32,256x32,128x96,256x64,512x32"
TUNED_NARROW = ("--pool-dtype", "bfloat16", "--shapes", "8x12:1,256x32:1")
# In the order of their worth, should the time end.
PARTS = {
    "decode-float32": decode(*KERNELS, limit=360),
    "layer": Part("benchmarks/layer_decode.py", limit=150),
    "prefill": Part("benchmarks/prefill_times.py", limit=150),
    "update": Part("benchmarks/update_times.py", limit=180),
    "serving": Part("benchmarks/serving.py", limit=240),
    "peers": Part("benchmarks/peers.py", limit=240, toy=False),
    "decode-bfloat16": decode(*KERNELS, "--pool-dtype", "bfloat16", "--shapes", NARROW, limit=240),
    "memcheck": Part("tests/helpers/memcheck.py", limit=300, toy=False),
    "decode-ordered": decode(*KERNELS, "--ordered", "--shapes", "64x32,256x32,128x96"),
    "decode-xla": decode("--implementations", "xla", "--shapes", "8x4,8x32"),
    "stacked-pools": Part("benchmarks/stacked_pools.py", limit=90, toy=False),
    "tuning-float32": Part("benchmarks/tuning.py", limit=300, toy=False),
    "tuning-bfloat16": Part("benchmarks/tuning.py", TUNED_NARROW, limit=180, toy=False),
}


def command(name, part, options):
    """The command of one part."""
    words = [sys.executable, part.script, *part.arguments]
    if options.toy:
        # The shapes of a GPU are no toys.
        return [sys.executable, part.script, "--toy"]
    words += ["--output", str(output(name, options))]
    words += ["--commit", options.commit] if options.commit else []
    words += ["--sglang", options.sglang] if options.sglang and name == "peers" else []
    return words


def output(name, options):
    return Path(options.folder).resolve() / f"{DEVICE}-{name}.json"


def run(words, limit, log):
    """The exit code, and None past the limit; what the command prints goes to the log."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path_of_modules())}
    with open(log, "w") as file:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            # Its own children too, such as the program under a checker.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def path_of_modules():
    """Where Python finds the packages of this tree, installed or not."""
    given = os.environ.get("PYTHONPATH")
    return [str(ROOT), str(ROOT / "contracts"), *([given] if given else [])]


def pack(folder, bundle):
    with tarfile.open(bundle, "w") as file:
        for path in sorted(Path(folder).iterdir()):
            if path.suffix in (".json", ".txt"):
                file.add(path, arcname=path.name)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="where the results go")
    parser.add_argument("--commit", metavar="HASH", help="the commit, where there is no git")
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--bundle", metavar="FILE.tar", help="pack the folder into this file")
    parser.add_argument("--sglang", help="the folder of the installed package sglang")
    parser.add_argument("--toy", action="store_true", help="toy sizes, nothing is written")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else [*PARTS]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    if options.toy:
        names = [name for name in names if PARTS[name].toy]
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    begun, failed = time.perf_counter(), []
    for name in names:
        part, start = PARTS[name], time.perf_counter()
        log = Path(options.folder) / f"{name}.txt"
        print(f"{start - begun:6.1f} s  {name}: at most {part.limit} s", flush=True)
        code = run(command(name, part, options), part.limit, log)
        end = "done" if code == 0 else "past its limit" if code is None else f"exit code {code}"
        print(f"          {name}: {end} in {time.perf_counter() - start:.1f} s", flush=True)
        if code != 0:
            failed.append(name)
            print("".join(f"          | {line}\n" for line in tail(log)), end="", flush=True)
        if options.bundle:
            pack(options.folder, options.bundle)
    print(f"{len(names) - len(failed)} of {len(names)} parts; not to their end: {failed or 'none'}")
    return 1 if failed else 0


def tail(log, lines=8):
    return Path(log).read_text(errors="replace").splitlines()[-lines:]


if __name__ == "__main__":
    sys.exit(main())
