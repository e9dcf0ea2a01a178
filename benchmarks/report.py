"""The figures of README and docs, from the JSON files in benchmarks/results: never typed.

python benchmarks/report.py           rewrites what stands between the markers, and docs/*-share.svg
python benchmarks/report.py --check   names the results that are older than their code, or made by
                                      hand, or not there; the exit code is 1 where there are any

Over 350 lines, since it is one function for each table of the documents.
"""

import argparse
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# README's shapes, of the 24 that are measured.
FEW = ((1, 32), (8, 32), (32, 12), (64, 32), (256, 32), (128, 96))
COLORS = {"mosaic_gpu": "tab:blue", "triton": "tab:orange"}

DECODE = (
    "kda_jax/decode.py",
    "kda_jax/decode_xla.py",
    "kda_jax/decode_mosaic_gpu.py",
    "kda_jax/decode_mosaic_gpu_kernel.py",
    "kda_jax/call.py",
    "kda_jax/pools.py",
    "kda_jax/decode_triton.py",
    "kda_jax/decode_triton_kernel.py",
    "kda_jax/gates.py",
    "kda_jax/mosaic.py",
)
PREFILL = ("kda_jax/prefill.py", "kda_jax/prefill_xla.py", "kda_jax/prefill_mosaic_gpu.py")
LAYER = ("kda_jax/layer.py", "kda_jax/conv.py", "kda_jax/norm.py", *DECODE)
UPDATE = ("kda_jax/update.py", *DECODE)
BENCH = ("benchmarks/decode_times.py", "kda_jax/tools/bench.py", "kda_jax/tools/timing.py")
# The code whose figures each results file has: where one changed since, the file is too old.
CODE = {
    "decode-float32": (*BENCH, *DECODE),
    "decode-bfloat16": (*BENCH, *DECODE),
    "decode-ordered": (*BENCH, *DECODE),
    "decode-xla": (*BENCH, *DECODE),
    "peers": ("benchmarks/peers.py",),
    "update": ("benchmarks/update_times.py", *UPDATE),
    "layer": ("benchmarks/layer_decode.py", *LAYER),
    "prefill": ("benchmarks/prefill_times.py", "kda_jax/gates.py", "kda_jax/mosaic.py", *PREFILL),
    "sharded": ("benchmarks/sharded.py", "kda_jax/sharding.py", *PREFILL, *LAYER),
    "tuning-float32": ("benchmarks/tuning.py", *UPDATE),
    "tuning-bfloat16": ("benchmarks/tuning.py", *UPDATE),
    "stacked-pools": ("benchmarks/stacked_pools.py", "kda_jax/transforms.py", *DECODE),
    "memcheck": ("tests/helpers/memcheck.py", *PREFILL, *UPDATE),
    "tests": ("kda_jax", "contracts/kda_contracts", "tests"),
    "drift": ("benchmarks/drift.py", *DECODE),
}


def path_of(name):
    return RESULTS / ("drift.json" if name == "drift" else f"nvidia-h200-{name}.json")


def load(name):
    """A results file, or MissingError."""
    path = path_of(name)
    if not path.exists():
        raise MissingError(name)
    return json.loads(path.read_text())


class MissingError(Exception):
    """A results file that is not made yet."""


def markdown(head, rows):
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def where(results):
    commit = results["commit"][:7]
    return f"{results['device']}, JAX {results['jax']}, {results['date']}, commit {commit}"


def by_size(results):
    return sorted(results["rows"], key=lambda row: (row["B"] * row["HV"], row["B"]))


def times(us, ceiling_us):
    """Microseconds, and how many times the multiply of the same harness that is."""
    return f"{us:.1f} ({us / ceiling_us:.2f}x)"


def layers(shapes=None):
    """A layer by the clock: ours and the peers', each beside the multiply of its own harness."""
    ours, peers = load("decode-float32"), load("peers")
    by_shape = {(row["B"], row["HV"]): row for row in peers["rows"]}
    rows = []
    for row in by_size(ours):
        shape = row["B"], row["HV"]
        if shape not in by_shape or (shapes and shape not in shapes):
            continue
        peer, ceiling_us = by_shape[shape], row["ceiling"]["layer_us"]
        cells = [f"{row['B']} x {row['HV']}", f"{ceiling_us:.1f}"]
        cells += [times(row[x]["layer_us"], ceiling_us) for x in ("mosaic_gpu", "triton")]
        cells += [f"{peer['ceiling_us']:.1f}"]
        cells += [
            times(peer[key], peer["ceiling_us"]) if key in peer else "-"
            for key in ("sglang_us", "fla_us")
        ]
        rows.append(cells)
    head = ["B x HV", "JAX: multiply", "`mosaic_gpu`", "`triton`"]
    head += ["PyTorch: multiply", "SGLang (Triton)", "FLA"]
    return [
        *markdown(head, rows),
        "",
        *wrapped(
            f"Microseconds of a layer by the clock, on an {where(ours)}: float32 pool, "
            "K = V = 128, softplus gate, random slots, cold L2 (but for 1 x 3 and 1 x 12). JAX "
            "runs a jitted loop of 2 to 96 layers, PyTorch "
            f"{peers['torch'].partition('+')[0]} a captured CUDA graph of as many, in a run of its "
            "own on that machine. Each time is divided by that of an in-place multiply over the "
            "same bytes in its own harness."
        ),
    ]


def kernels():
    """The float32 pool: the kernels' own times, and what a layer takes beside them."""
    results = load("decode-float32")
    rows = []
    for row in by_size(results):
        cells = [f"{row['B']} x {row['HV']}", f"{row['ceiling']['kernel_us']:.1f}"]
        for name in ("mosaic_gpu", "triton"):
            entry = row[name]
            cells.append(f"{entry['kernel_us']:.1f} ({entry['share_of_ceiling']:.2f})")
        cells += [
            f"{row[name]['layer_us'] - row[name]['kernel_us']:.1f}"
            for name in ("ceiling", "mosaic_gpu", "triton")
        ]
        rows.append(cells)
    head = ["B x HV", "multiply", "`mosaic_gpu`", "`triton`"]
    head += ["a layer takes more: multiply", "`mosaic_gpu`", "`triton`"]
    return [
        *markdown(head, rows),
        "",
        f"Microseconds, {where(results)}.",
        *faster(results),
    ]


def faster(results):
    """Where Triton is faster, by its kernel and by the clock."""
    lines = []
    for what, key in (("kernel", "kernel_us"), ("layer", "layer_us")):
        shapes = [
            f"{row['B']} x {row['HV']}"
            for row in by_size(results)
            if row["triton"][key] < row["mosaic_gpu"][key]
        ]
        counted = f"{len(shapes)} of {len(results['rows'])} shapes"
        named = f": {', '.join(shapes)}" if shapes else ""
        lines += ["", *wrapped(f"Triton's {what} is the faster one at {counted}{named}.")]
    return lines


def wrapped(text, width=100):
    """The text in lines of at most so many columns."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def suite():
    """What passed on that machine, in one run of all tests in which nothing failed."""
    results = load("tests")
    tests, gpu = results["tests"], results["gpu_tests"]
    if tests["failed"] or tests["error"] or not results.get("whole"):
        raise SystemExit(
            f"{path_of('tests').name}: {tests['failed']} failed, {tests['error']} errors, whole: "
            f"{results.get('whole')}; README shows only a run of all tests in which nothing failed"
        )
    return [
        f"The suite on that machine, commit {results['commit'][:7]}, in one run: {tests['passed']} "
        "tests passed,",
        f"{gpu['passed']} of them for GPUs only; none failed, {tests['skipped']} were skipped.",
    ]


def shares(name):
    """Kernel times and shares of one results file."""
    results = load(name)
    names = [x for x in ("mosaic_gpu", "triton", "xla") if x in results["rows"][0]]
    rows = []
    for row in by_size(results):
        cells = (f"{row[x]['kernel_us']:.1f} ({row[x]['share_of_ceiling']:.2f})" for x in names)
        rows.append([f"{row['B']} x {row['HV']}", f"{row['ceiling']['kernel_us']:.1f}", *cells])
    return [
        *markdown(["B x HV", "multiply", *(f"`{x}`" for x in names)], rows),
        "",
        f"Microseconds, {where(results)}.",
    ]


def update():
    """Several tokens in one call."""
    results = load("update")
    by_form = {
        (row["implementation"], row["intermediate"], row["T"]): row["kernel_us"]
        for row in results["rows"]
    }
    tokens = sorted({T for _, _, T in by_form})
    rows = []
    for name, intermediate in dict.fromkeys(key[:2] for key in by_form):
        one = by_form[name, False, 1]
        cells = (times(by_form[name, intermediate, T], one) for T in tokens)
        rows.append(
            [f"`{name}`", "all returned" if intermediate else "the last is written", *cells]
        )
    return [
        *markdown(["implementation", "states", *(f"T = {T}" for T in tokens)], rows),
        "",
        *wrapped(
            "Microseconds of the kernel, and how many times one token's that is: "
            f"{results['N']} sequences, HV = {results['HV']}, K = V = {results['K']}, float32 "
            f"pool; the multiply takes {results['ceiling_us']:.1f}. {where(results)}."
        ),
    ]


def layer():
    """kda_decode beside what its weights and states cost at least."""
    results = load("layer")
    keys = ("layer_us", "matmuls_us", "weights_us", "multiply_us")
    rows = []
    for row in results["rows"]:
        named = row.get("longest_kernels_us", {})
        cells = [str(row["B"]), *(f"{row[key]:.1f}" for key in keys)]
        cells += [kernel(named, "kda_packed_decode"), f"{row['ratio']:.2f}x"]
        rows.append(cells)
    head = ["B", "a layer", "its products alone", "reading its weights", "multiply"]
    head += ["its recurrence", "layer / (weights + multiply)"]
    config, weights = results["config"], f"{results['weight_bytes'] / 1e6:.0f} MB"
    return [
        *markdown(head, rows),
        "",
        *wrapped(
            f"Microseconds by the clock, in a jitted loop of {results['rows'][0]['layers']} "
            f"layers: D = {config['D']}, H = HV = {config['HV']}, K = V = {config['K']}, "
            f"{results['dtype']} weights of {weights}, float32 pool. Reading is half an in-place "
            f"multiply of as many bytes. {where(results)}."
        ),
    ]


def kernel(named, *names, scale=1.0):
    """The time of the kernels of these names, where the longest ones include them."""
    found = [us for name, us in named.items() if any(x in name for x in names)]
    return f"{sum(found) * scale:.2f}" if found else "-"


def prefill():
    """chunk_kda over one long sequence."""
    results = load("prefill")
    rows = []
    for row in results["rows"]:
        named = row.get("longest_kernels_us", {})
        cells = [f"`{row.get('implementation', 'mosaic_gpu')}`", str(row["T"])]
        cells += [f"{row['recurrence_ms']:.2f}", f"{row['gates_ms']:.2f}"]
        cells += [kernel(named, f"kda_prefill_{x}", scale=1e-3) for x in ("chunks", "states")]
        rows.append([*cells, f"{row['peak_bytes'] / 2**30:.1f}"])
    head = ["implementation", "tokens", "`chunk_kda`, ms", "with its gates, ms"]
    head += ["kernel of the chunks, ms", "kernel of the states, ms", "peak memory, GiB"]
    return [
        *markdown(head, rows),
        "",
        *wrapped(
            f"One sequence, H = {results['H']}, K = V = {results['K']}, {results['dtype']} "
            f"operands, by the clock. {where(results)}."
        ),
    ]


def tuning(name):
    """The Config that a kernel takes, beside the fastest that was tried."""
    results = load(name)
    groups: dict = {}
    for row in results["rows"]:
        groups.setdefault((row["implementation"], row["B"], row["HV"], row["T"]), []).append(row)
    rows = []
    for (implementation, B, HV, T), group in groups.items():
        own = next(row for row in group if row["chosen"])
        best = min(group, key=lambda row: row["kernel_us"])
        changed = {x: y for x, y in best["config"].items() if own["config"][x] != y}
        what = ", ".join(f"{x} {y}" for x, y in changed.items()) or "the same"
        cells = [f"`{implementation}`", f"{B} x {HV}", str(T), str(len(group))]
        rows.append([*cells, f"{own['kernel_us']:.2f}", f"{best['kernel_us']:.2f}", what])
    head = ["implementation", "B x HV", "T", "tried", "as it is", "fastest", "which is"]
    return [
        *markdown(head, rows),
        "",
        f"Microseconds of the kernel, {results['pool_dtype']} pool. {where(results)}.",
    ]


def memcheck():
    """What ran under the memory checker."""
    results = load("memcheck")
    return wrapped(
        f"{results['tool']} saw {results['errors']} errors in {len(results['ran'])} programs of "
        "all kernels, around the 4 GiB edge of a pool and past every operand's end. "
        f"{where(results)}."
    )


def sharded():
    """One GPU against several."""
    results = load("sharded")
    cuts = {"tp": "heads", "dp": "slots and batch"}
    rows = []
    for row in results["rows"]:
        size = f"T = {row['T']}" if "T" in row else f"B = {row['B']}"
        times = [f"{row[key]:.0f}" for key in ("one_us", "sharded_us")]
        cut = cuts[row["mesh"].partition("=")[0]]
        rows.append(
            [row["what"], f"{size}, HV = {row['HV']}", cut, *times, f"{row['scaling']:.2f}x"]
        )
    head = ["what", "size", "cut over the GPUs", "one GPU", f"{results['devices']} GPUs", "faster"]
    return [
        *markdown(head, rows),
        "",
        f"Microseconds of a layer by the clock. {results['devices']} x {where(results)}.",
        *held(results),
    ]


def held(results):
    """The programs that hold more than 1 % of a pool beside it, or copy it."""
    lines = []
    for fault in results.get("faults", ()):
        share = fault["temporaries"] / fault["share"]
        what = (
            f"{fault['what']}, {fault['mesh']}: {share:.1%} of the layers' pools held beside them."
        )
        lines += ["", *wrapped(what)]
    return lines


TABLES = {
    "decode": lambda: layers(FEW),
    "suite": suite,
    "layers": layers,
    "kernels": kernels,
    "bfloat16": lambda: shares("decode-bfloat16"),
    "ordered": lambda: shares("decode-ordered"),
    "xla": lambda: shares("decode-xla"),
    "update": update,
    "layer": layer,
    "prefill": prefill,
    "sharded": sharded,
    "tuning": lambda: tuning("tuning-float32"),
    "narrow_tuning": lambda: tuning("tuning-bfloat16"),
    "memcheck": memcheck,
}
DOCUMENTS = ("README.md", "docs/performance.md")


def filled(text):
    """A document with what is between its markers made anew."""

    def table(found):
        begin, name, end = found.group(1), found.group(2), found.group(3)
        try:
            lines = TABLES[name]()
        except MissingError as error:
            lines = [f"Not measured yet (`{path_of(str(error)).name}`)."]
        return begin + "\n".join(lines) + "\n" + end

    return re.sub(
        r"(<!-- figures (\w+): made by .*? -->\n).*?(<!-- end of figures -->)",
        table,
        text,
        flags=re.S,
    )


def plot_share(path):
    """Share of the ceiling against the size of the call, one line for each implementation."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kda_jax"  # the same file from the same figures
    from matplotlib import pyplot as plt

    ours = load("decode-float32")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    rows = sorted(ours["rows"], key=lambda row: row["B"] * row["HV"])
    sizes = [row["B"] * row["HV"] for row in rows]
    for name in ("mosaic_gpu", "triton"):
        axes.semilogx(
            sizes,
            [row[name]["share_of_ceiling"] for row in rows],
            "o-",
            color=COLORS[name],
            label=name,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("states in the call (B x HV), each 64 KB")
    axes.set_ylabel("share of an in-place multiply's speed")
    axes.set_title(f"packed_decode, float32 pool ({ours['device']}, kernel times)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def git(*arguments):
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else None


def complaints(name):
    """What is wrong with a results file: not there, not made by a script, older than its code."""
    if not path_of(name).exists():
        return ["is not there"]
    results = load(name)
    found = []
    if not results.get("finished") or not results.get("command") or results.get("toy"):
        found.append("is not of one whole run of a script")
    commit = results.get("commit")
    if not commit or git("cat-file", "-t", commit) is None:
        return [*found, f"its commit is not of this history ({commit})"]
    return found + [
        f"{path} changed since {commit[:7]}, last at {later[0]}"
        for path in CODE[name]
        if (later := git("log", "--format=%h", f"{commit}..HEAD", "--", path))
    ]


def check():
    """Prints each results file with its complaints; returns how many files have any."""
    files = {name: complaints(name) for name in CODE}
    for name, found in files.items():
        print(f"{path_of(name).name}:{'' if found else ' of the present code'}")
        print("".join(f"    {line}\n" for line in found), end="")
    known = {path_of(name) for name in CODE}
    strange = [path for path in RESULTS.glob("*.json") if path not in known]
    for path in strange:
        print(f"{path.name}: no script of CODE makes it")
    return sum(map(bool, files.values())) + len(strange)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="are the results of this code?")
    if parser.parse_args().check:
        return 1 if check() else 0
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text()))
    plot_share(ROOT / "docs" / "decode-share.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
