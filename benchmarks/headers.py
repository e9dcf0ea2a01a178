"""How long a checkpoint's check takes: whole models' headers, in sparse files, by process time.

    python benchmarks/headers.py [--only kimi-linear-48b,...] [--repeats N]

Needs no GPU, no JAX, and no disk: the weights are holes. Printed for each model and each form of
its config: tensors, bytes of headers, and milliseconds of a check beyond the command's own start
(`python -m kda_contracts --version`), the least of N, for 1 and 64 ranks or as many as divide its
heads; beside it what json.loads takes for the same headers.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "contracts")]

from kda_contracts import CHECKPOINT  # noqa: E402
from kda_jax.tools.synthetic import write_safetensors  # noqa: E402

PARSE = """
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    with open(path, "rb") as file:
        json.loads(file.read(int.from_bytes(file.read(8), "little")))
"""


@dataclass(frozen=True)
class Model:
    """What a released model's headers consist of, as its public readers have it."""

    sizes: dict
    layers: int
    full: tuple[int, ...]  # layers of full attention, from 0
    experts: int
    files: int
    layout: int  # of kda_contracts.CHECKPOINT
    prefix: str
    block: str
    ranks: int  # that divide its heads, at most 64
    packed: bool = False  # each expert's matrix with a tensor of scales


def sizes(heads, D):
    return {"H": heads, "HV": heads, "K": 128, "V": 128, "D": D, "W": 4}


MODELS = {
    "kimi-linear-48b": Model(
        sizes(32, 2304), 27, (3, 7, 11, 15, 19, 23, 26), 256, 20, 0, "model", "self_attn", 32
    ),
    "kimi-k3": Model(
        sizes(96, 7168), 93, tuple(range(3, 93, 4)) + (92,), 896, 96, 1,
        "language_model.model", "self_attn", 32, packed=True,
    ),
    "glm-5.3-flash": Model(
        sizes(64, 4096), 45, tuple(range(3, 45, 4)), 288, 40, 0,
        "model.language_model", "self_attn", 64,
    ),
    "ling-3.0-tiny": Model(
        sizes(16, 1536), 24, tuple(range(3, 24, 4)), 128, 4, 3, "model", "attention", 16
    ),
}  # fmt: skip


def tensors(model):
    """{name: (dtype, shape)} of the whole model, layer after layer."""
    D, entries = model.sizes["D"], {}
    for i in range(model.layers):
        layer = f"{model.prefix}.layers.{i}"
        if i in model.full:
            entries[f"{layer}.{model.block}.kv_a_proj_with_mqa.weight"] = ("BF16", (576, D))
        else:
            for tensor in CHECKPOINT[model.layout].tensors:
                if tensor.required:
                    dtype = "F32" if tensor.name in ("A_log", "dt_bias") else "BF16"
                    entries[f"{layer}.{model.block}.{tensor.name}"] = (
                        dtype,
                        tensor.shape(model.sizes),
                    )
        for expert in range(model.experts):
            for name in ("w1", "w2", "w3"):
                matrix = f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"
                if model.packed:
                    entries[f"{matrix}_packed"] = ("U8", (2048, D // 2))
                    entries[f"{matrix}_scale"] = ("U8", (2048, D // 32))
                else:
                    entries[matrix] = ("BF16", (1024, D))
    return entries


def configs(name, model):
    """{form: the config.json}."""
    s, kda = model.sizes, [i for i in range(model.layers) if i not in model.full]
    first = 0 if name.startswith("glm") else 1
    linear = dict(num_heads=s["H"], head_dim=s["K"], short_conv_kernel_size=s["W"])
    linear |= dict(kda_layers=[i + first for i in kda])
    linear |= dict(full_attn_layers=[i + first for i in model.full])
    base = dict(hidden_size=s["D"], num_hidden_layers=model.layers, rms_norm_eps=1e-5)
    types = ["linear_attention" if i in kda else "full_attention" for i in range(model.layers)]
    flat = base | dict(linear_num_heads=s["H"], linear_head_dim=s["K"], layer_types=types)
    flat |= dict(linear_conv_kernel_dim=s["W"])
    if name.startswith("ling"):
        ling = dict(kda_safe_gate=True, kda_lower_bound=-5.0, no_kda_lora=True)
        released = base | ling | dict(num_attention_heads=s["H"], head_dim=s["K"])
        released |= dict(short_conv_kernel_size=s["W"], layer_group_size=4)
        return {"released": released, "flat": flat | ling}
    if name == "kimi-k3":
        linear |= dict(gate_lower_bound=-5.0, use_full_rank_gate=True)
        return {"released": dict(text_config=base | dict(linear_attn_config=linear))}
    if name.startswith("glm"):
        linear |= dict(gate_lower_bound=-5.0)
        kind = dict(model_type="glm5_next_text")
        released = dict(text_config=base | kind | dict(linear_attn_config=linear))
        return {"released": released, "flat": flat | kind | dict(linear_lower_bound=-5.0)}
    return {"released": base | dict(linear_attn_config=linear), "flat": flat}


def write(folder, entries, files):
    """The tensors in their order over so many files, with an index."""
    names, weight_map = list(entries), {}
    each = -(-len(names) // files)
    for number in range(files):
        held = names[number * each : (number + 1) * each]
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        write_safetensors(folder / file, {name: entries[name] for name in held})
        weight_map |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def milliseconds(*arguments):
    """The processor time of a Python process, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "contracts")}
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def least(repeats, *arguments):
    return min(milliseconds(*arguments) for _ in range(repeats))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    command = ("-m", "kda_contracts")
    start = least(options.repeats, *command, "--version")
    interpreter = least(options.repeats, "-c", "pass")
    print(f"the command's start {start:.0f} ms, the interpreter's {interpreter:.0f} ms")
    for name in options.only.split(","):
        model = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            entries = tensors(model)
            write(folder, entries, model.files)
            size = sum(
                int.from_bytes(path.open("rb").read(8), "little")
                for path in folder.glob("*.safetensors")
            )
            parse = least(options.repeats, "-c", PARSE, str(folder)) - interpreter
            print(f"{name}: {len(entries)} tensors, {size / 1e6:.1f} MB, json.loads {parse:.0f} ms")
            for form, config in configs(name, model).items():
                (folder / "config.json").write_text(json.dumps(config))
                for ranks in (1, model.ranks):
                    check = ("check", str(folder), "--tp", str(ranks))
                    spent = least(options.repeats, *command, *check) - start
                    print(f"    {form:<9} {ranks:>2} ranks: {spent:.0f} ms")


if __name__ == "__main__":
    main()
