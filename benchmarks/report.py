"""The figures of README and docs, from the JSON files in benchmarks/results/: never typed.

python benchmarks/report.py        rewrites the tables between the markers of README and docs, and docs/decode-*.svg
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLORS = {
    "mosaic_gpu": "tab:blue",
    "triton": "tab:orange",
    "fla": "tab:gray",
    "sglang": "tab:green",
}


def load(name):
    return json.loads((RESULTS / f"nvidia-h200-{name}.json").read_text())


def markdown(head, rows):
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def where(results):
    return f"{results['device']}, JAX {results['jax']}, {results['date']}, commit {results['commit'][:7]}"


def by_size(results):
    return sorted(results["rows"], key=lambda row: (row["B"] * row["HV"], row["B"]))


def decode():
    """The float32 pool: kernel times with their share of the ceiling, a layer's time beside the peers'."""
    ours, peers = load("decode-float32"), load("peers")
    by_shape = {(row["B"], row["HV"]): row for row in peers["rows"]}
    rows = []
    for row in by_size(ours):
        cells = [f"{row['B']} x {row['HV']}", f"{row['ceiling']['kernel_us']:.1f}"]
        cells += [
            f"{row[x]['kernel_us']:.1f} ({row[x]['share_of_ceiling']:.2f})"
            for x in ("mosaic_gpu", "triton")
        ]
        peer, layer_us = by_shape[row["B"], row["HV"]], row["mosaic_gpu"]["layer_us"]
        cells += [f"{layer_us:.1f}"]
        cells += [
            f"{peer[key]:.1f} ({peer[key] / layer_us:.2f}x)" for key in ("sglang_us", "fla_us")
        ]
        rows.append(cells)
    head = [
        "B x HV",
        "multiply",
        "`mosaic_gpu`",
        "`triton`",
        "a layer: `mosaic_gpu`",
        "SGLang (Triton)",
        "FLA",
    ]
    return [
        *markdown(head, rows),
        "",
        f"Microseconds on an {where(ours)}: float32 pool, K = V = 128,",
        "softplus gate, random slots, cold L2 (but for 1 x 3 and 1 x 12). First the kernels' own times (profiler medians),",
        "with the share of an in-place multiply over the same bytes in the same run; then the time of a layer by the clock: ours",
        f"in a jitted loop of 2 to 96 layers, the peers' (PyTorch {peers['torch'].partition('+')[0]}) in a captured",
        "CUDA graph of as many, in a run of their own on that machine, and how many times ours theirs is.",
    ]


def suite():
    """What passed on that machine."""
    results = load("tests")
    passed = f"{results['tests']['passed']} tests passed, {results['gpu_tests']['passed']} of them for GPUs only"
    lines = [
        f"The suite on that machine, commit {results['commit'][:7]}: {passed}, {results['tests']['failed']} failed."
    ]
    failures = results.get("failures", ())
    return lines + [
        f"- {x['tests']} ({x['reason']}); by themselves: {x['alone']}" for x in failures
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
    times = {
        (row["implementation"], row["intermediate"], row["T"]): row["kernel_us"]
        for row in results["rows"]
    }
    tokens = sorted({T for _, _, T in times})
    rows = []
    for name, intermediate in dict.fromkeys(key[:2] for key in times):
        one = times[name, False, 1]
        cells = (
            f"{times[name, intermediate, T]:.1f} ({times[name, intermediate, T] / one:.2f}x)"
            for T in tokens
        )
        rows.append(
            [f"`{name}`", "all returned" if intermediate else "the last is written", *cells]
        )
    return [
        *markdown(["implementation", "states", *(f"T = {T}" for T in tokens)], rows),
        "",
        f"Microseconds of the kernel, and how many times one token's that is: {results['N']} sequences, HV = {results['HV']}, "
        f"K = V = {results['K']},",
        f"float32 pool; the multiply takes {results['ceiling_us']:.1f}. {where(results)}.",
    ]


def layer():
    """kda_decode beside what its weights and states cost at least."""
    results = load("layer")
    rows = []
    for row in results["rows"]:
        cells = [str(row["B"])] + [
            f"{row[key]:.1f}" for key in ("layer_us", "matmuls_us", "weights_us", "multiply_us")
        ]
        rows.append([*cells, f"{row['ratio']:.2f}x"])
    head = [
        "B",
        "a layer",
        "its products alone",
        "reading its weights",
        "multiply",
        "layer / (weights + multiply)",
    ]
    config = results["config"]
    return [
        *markdown(head, rows),
        "",
        f"Microseconds by the clock, in a jitted loop of {results['rows'][0]['layers']} layers: D = {config['D']}, H = HV = "
        f"{config['HV']}, K = V = {config['K']}, {results['dtype']} weights of",
        f"{results['weight_bytes'] / 1e6:.0f} MB, float32 pool. Reading is half an in-place multiply of as many bytes. "
        f"{where(results)}.",
    ]


def prefill():
    """chunk_kda over one long sequence."""
    results = load("prefill")
    rows = [
        [
            str(row["T"]),
            f"{row['recurrence_ms']:.2f}",
            f"{row['gates_ms']:.2f}",
            f"{row['peak_bytes'] / 2**30:.1f}",
        ]
        for row in results["rows"]
    ]
    return [
        *markdown(["tokens", "`chunk_kda`, ms", "with its gates, ms", "peak memory, GiB"], rows),
        "",
        f"One sequence, H = {results['H']}, K = V = {results['K']}, {results['dtype']} operands, by the clock. "
        f"{where(results)}.",
    ]


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
    ]


TABLES = {
    "decode": decode,
    "suite": suite,
    "bfloat16": lambda: shares("decode-bfloat16"),
    "ordered": lambda: shares("decode-ordered"),
    "xla": lambda: shares("decode-xla"),
    "update": update,
    "layer": layer,
    "prefill": prefill,
    "sharded": sharded,
}
DOCUMENTS = ("README.md", "docs/performance.md")


def filled(text):
    """A document with what stands between its markers made anew."""

    def table(found):
        begin, name, end = found.group(1), found.group(2), found.group(3)
        return begin + "\n".join(TABLES[name]()) + "\n" + end

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


def main():
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text()))
    plot_share(ROOT / "docs" / "decode-share.svg")


if __name__ == "__main__":
    main()
