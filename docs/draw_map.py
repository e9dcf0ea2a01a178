"""Draws docs/map.svg: the files of both packages by floor.

    python docs/draw_map.py

The table is here, once. tests/documents/test_floors.py holds the code and the picture to it: an
import goes to a lower floor, never level or up.
"""

from pathlib import Path

# floor: (title, what it is, the files). tools and __main__ are one room and may import each other.
FLOORS = {
    "kda_jax": {
        12: (
            "tools",
            "no product file imports them",
            "__main__ tools.__init__ tools.cli tools.demo tools.bench tools.timing tools.records "
            "tools.synthetic tools.oracle",
        ),
        11: ("kda_jax", "the public names", "__init__"),
        10: ("over the layer", "several devices; Flax NNX", "sharding nnx"),
        9: ("the layer", "decoded, prefilled, verified, trained", "layer drafts"),
        8: ("operators", "public, with their contracts", "decode update update_drafts prefill"),
        7: ("a call of several", "contract, choice, call", "update_call layer_call"),
        6: (
            "around the operators",
            "choose, explain; projections",
            "dispatch projections prefill_pool conv fused_mosaic_gpu",
        ),
        5: (
            "implementations",
            "by operator and implementation",
            "decode_xla decode_mosaic_gpu decode_triton prefill_xla prefill_mosaic_gpu "
            "prefill_grad_mosaic_gpu conv_mosaic_gpu norm checkpoint",
        ),
        4: (
            "a kernel; chunks; files",
            "their users are above",
            "decode_mosaic_gpu_kernel prefill_plan prefill_walk conv_xla stored",
        ),
        3: ("what they share", "gates, slots, weights", "gates slots sequences layouts weights"),
        2: ("a call", "Operands, Static", "call"),
        1: ("the pool; wgmma", "as XLA reads and writes it", "pools wgmma"),
        0: (
            "JAX, Mosaic, Triton",
            "no word of a call",
            "transforms mosaic decode_triton_kernel",
        ),
    },
    "kda_contracts": {
        8: ("python -m", "", "__main__"),
        7: ("kda_contracts", "the public names", "__init__"),
        6: ("the command", "check", "cli"),
        5: ("files", "before they are loaded", "checkpoint"),
        4: (
            "what comes in",
            "shapes, heads, files, configs",
            "normalize heads folder model_config",
        ),
        3: ("the judge", "check(); weights with scales", "judge quantized"),
        2: (
            "tables",
            "shapes, names, and how they are read",
            "kda layer blocks bind options tensor_names",
        ),
        1: ("words", "axes as text, remedies, headers", "spec remedy safetensors_header"),
        0: ("arrays", "what an array says of itself", "arrays axes version"),
    },
}
FOLDERS = {"kda_jax": "kda_jax", "kda_contracts": "contracts/kda_contracts"}
HEADINGS = {
    "kda_jax": "kda_jax: an import goes to a lower floor",
    "kda_contracts": "kda_contracts, below all: the standard library alone",
}
COLORS = {"kda_jax": ("#eef2fb", "#4051b5"), "kda_contracts": ("#eef7ee", "#3c8c40")}
WIDTH, LEFT, HIGH, STEP = 960, 240, 24, 30


def text(x, y, words, **style):
    style = {"text-anchor": "start"} | {name.replace("_", "-"): x for name, x in style.items()}
    shown = " ".join(f'{name}="{value}"' for name, value in style.items())
    return f'  <text x="{x}" y="{y}" {shown}>{words}</text>'


def boxes(names, y, fill, stroke):
    """`(lines, y)`: a box for each file, in rows, and where the last row is."""
    lines, x = [], LEFT
    for name in names:
        width = int(len(name) * 7.4) + 18
        if x + width > WIDTH - 20:
            x, y = LEFT, y + STEP
        shape = f'x="{x}" y="{y}" width="{width}" height="{HIGH}" rx="4"'
        lines.append(f'  <rect {shape} fill="{fill}" stroke="{stroke}"/>')
        lines.append(text(x + width // 2, y + 17, name, text_anchor="middle"))
        x += width + 8
    return lines, y


def picture():
    lines, y = [], 30
    for package, floors in FLOORS.items():
        lines.append(text(20, y, HEADINGS[package], font_weight="bold", font_size=15))
        y += 20
        for floor, (title, what, files) in floors.items():
            names = [name.removeprefix("tools.") for name in files.split()]
            shown = [name for name in names if name != "__init__" or len(names) == 1]
            row, last = boxes(shown, y, *COLORS[package])
            lines.append(text(20, y + 11, f"{floor}  {title}", font_weight="bold"))
            lines.append(text(20, y + 26, what, font_size=11, fill="#555"))
            lines += row
            y = last + 42
        y += 24
    box = f'viewBox="0 0 {WIDTH} {y - 30}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-labelledby="title"',
        '     font-family="sans-serif" font-size="12.5">',
        '  <title id="title">The files of kda_jax and kda_contracts, by floor</title>',
        f'  <rect width="{WIDTH}" height="{y - 30}" rx="8" fill="#fff"/>',
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "map.svg").write_text(picture())
