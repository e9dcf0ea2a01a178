"""The figures of README and docs, from the JSON files in benchmarks/results/: never typed.

python benchmarks/report.py        rewrites README's table between its markers, and docs/decode-*.svg
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: made by benchmarks/report.py -->\n", "<!-- end of figures -->\n"
COLORS = {"mosaic_gpu": "tab:blue", "triton": "tab:orange", "fla": "tab:gray", "sglang": "tab:green"}


def load(name):
    return json.loads((RESULTS / f"nvidia-h200-{name}.json").read_text())


def table():
    """README's table: kernel times with their share of the ceiling, and replays beside the peers', and where from."""
    ours, peers, suite = load("decode-float32"), load("peers"), load("tests")
    by_shape = {(row["B"], row["HV"]): row for row in peers["rows"]}
    lines = [
        "| B x HV | multiply | `mosaic_gpu` | `triton` | replay: `mosaic_gpu` | SGLang (Triton) | FLA |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(ours["rows"], key=lambda row: row["B"] * row["HV"]):
        cells = [f"{row['B']} x {row['HV']}", f"{row['ceiling']['kernel_us']:.1f}"]
        cells += [f"{row[x]['kernel_us']:.1f} ({row[x]['share_of_ceiling']:.2f})" for x in ("mosaic_gpu", "triton")]
        peer = by_shape.get((row["B"], row["HV"]), {})
        cells += [f"{row['mosaic_gpu']['layer_us']:.1f}" if peer else ""]
        cells += [f"{peer[key]:.1f}" if key in peer else "" for key in ("sglang_us", "fla_us")]
        lines.append(f"| {' | '.join(cells)} |")
    passed = f"{suite['tests']['passed']} tests passed there, {suite['gpu_tests']['passed']} of them for GPUs only"
    lines += [
        "",
        f"Microseconds on an {ours['device']}, JAX {ours['jax']}, {ours['date']}, commit {ours['commit'][:7]}: float32 pool,"
        " K = V = 128,",
        "softplus gate, random slots, cold L2 (but for 1 x 3). First the kernels' own times (profiler medians), with the",
        "share of an in-place multiply over the same bytes in the same run; then whole replays per layer: ours of a jitted",
        "step of up to 32 layers (at 1 x 32 the host's dispatch of that step is what it shows, not the GPU), the peers'",
        f"(PyTorch {peers['torch'].partition('+')[0]}) of a captured CUDA graph, in a run of their own on that machine.",
        f"On the same commit {passed}, and {suite['tests']['failed']} failed.",
    ]
    return "\n".join(lines) + "\n"


def readme(text):
    """README with its figures replaced."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


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
        axes.semilogx(sizes, [row[name]["share_of_ceiling"] for row in rows], "o-", color=COLORS[name], label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("states in the call (B x HV), each 64 KB")
    axes.set_ylabel("share of an in-place multiply's speed")
    axes.set_title(f"packed_decode, float32 pool ({ours['device']}, kernel times)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def main():
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text()))
    plot_share(ROOT / "docs" / "decode-share.svg")


if __name__ == "__main__":
    main()
