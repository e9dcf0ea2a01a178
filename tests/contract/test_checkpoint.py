"""Checkpoints judged by their headers: released layouts pass, wrong ones say what is wrong."""

import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kda_contracts import CHECKPOINT, BadFileError, check_checkpoint, find_tensors
from kda_contracts.cli import main
from kda_contracts.quantized import REMEDY
from kda_jax.tools import demo, synthetic
from kda_jax.tools.synthetic import write_safetensors

pytestmark = pytest.mark.slow  # it hangs on no JAX version

LOW_RANK, FULL_RANK, FLA, FULL_GATES, FULL_FORGET = CHECKPOINT
KIMI = {"H": 32, "HV": 32, "K": 128, "V": 128, "D": 2304, "W": 4}
K3 = {"H": 96, "HV": 96, "K": 128, "V": 128, "D": 7168, "W": 4}


def config_of(sizes, kda_layers, full_attn_layers=(), **more):
    linear = {"num_heads": sizes["H"], "head_dim": sizes["K"], "short_conv_kernel_size": sizes["W"]}
    linear |= {"kda_layers": list(kda_layers), "full_attn_layers": list(full_attn_layers)} | more
    return {"hidden_size": sizes["D"], "linear_attn_config": linear}


def layer_of(layout, sizes, prefix="model.layers.0.self_attn", **shapes):
    """{name: (dtype, shape)} of one layer; `shapes` replaces, None removes."""
    entries = {}
    for tensor in (x for x in layout.tensors if x.required):
        dtype = "F32" if tensor.name in ("A_log", "dt_bias") else "BF16"
        entries[f"{prefix}.{tensor.name}"] = (dtype, tensor.shape(sizes))
    for name, shape in shapes.items():
        name = f"{prefix}.{name.replace('__', '.')}"
        if shape is None:
            del entries[name]
        elif isinstance(shape[0], str):
            entries[name] = shape
        else:
            entries[name] = (entries.get(name, ("BF16",))[0], shape)
    return entries


def write_sharded(folder, entries, config, shards=3):
    names = sorted(entries)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        write_safetensors(
            folder / file, {name: entries[name] for name in names if weight_map[name] == file}
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_single(folder, entries, config):
    write_safetensors(folder / "model.safetensors", entries)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_two_kimi_linear_layers_over_three_files(tmp_path, capsys):
    # Layers count from 1 in the config and from 0 in the names; layer 3 (2 by name) is not KDA.
    entries = {}
    for index in (0, 1):
        entries |= layer_of(LOW_RANK, KIMI, f"model.layers.{index}.self_attn", A_log=(1, 1, 32, 1))
    entries["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"] = ("BF16", (576, 2304))
    entries["model.embed_tokens.weight"] = ("BF16", (163840, 2304))
    write_sharded(tmp_path, entries, config_of(KIMI, [1, 2], [3]))
    assert main(["check", str(tmp_path), "--tp", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("2 KDA layers, H=32, HV=32, K=128, V=128, D=2304, W=4, softplus gate")
    assert [line.split()[:3] for line in lines[1:3]] == [["layer", "0", "ok"], ["layer", "1", "ok"]]
    assert "A_log is (1, 1, 32, 1): normalize_A_log gives (32,)" in lines[1]
    assert "  each of 4 ranks holds, a layer:" in lines
    assert "      dt_bias          (1024,)" in lines
    assert "      o_proj.weight    (2304, 1024)" in lines
    assert "      f_a_proj.weight  (128, 2304)" in lines


def test_a_kimi_k3_layer_over_three_files(tmp_path):
    entries = layer_of(FULL_RANK, K3, "language_model.model.layers.0.self_attn", A_log=(128,))
    config = {"text_config": config_of(K3, [1], [2], gate_lower_bound=-5.0)}
    report = check_checkpoint(write_sharded(tmp_path, entries, config), tp=32)
    assert report.ok
    assert report.lower_bound == -5.0
    assert report.layers[0].notes == (
        "A_log is (128,): normalize_A_log gives (96,), its tail of 32 is judged when it is loaded",
    )
    assert report.rank["A_log"] == (3,)
    assert report.rank["o_norm.weight"] == (128,)


def test_a_glm_layer_counted_from_zero(tmp_path):
    sizes = KIMI | {"H": 64, "HV": 64, "D": 4096}
    entries = layer_of(LOW_RANK, sizes, "model.language_model.layers.0.self_attn")
    config = {"text_config": config_of(sizes, [0], [1], gate_lower_bound=-5.0)}
    assert check_checkpoint(write_single(tmp_path, entries, config)).ok


def test_flas_own_layer_with_more_value_heads(tmp_path):
    sizes = {"H": 2, "HV": 4, "K": 64, "V": 32, "D": 100, "W": 4}
    config = {
        "model_type": "kda",
        "hidden_size": 100,
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 64,
    }
    entries = layer_of(FLA, sizes, "model.layers.7.attn")
    folder = write_single(tmp_path, entries, config | {"conv_size": 4, "expand_v": 0.5})
    report = check_checkpoint(folder / "model.safetensors")
    assert report.ok
    assert report.layers[0].index == 7


def kimi(**shapes):
    return layer_of(LOW_RANK, KIMI, **shapes), config_of(KIMI, [1], [2])


PREFIX = "`model.layers.0.self_attn"
# what is in the file -> (the message, the remedy below it)
WRONG = {
    "bias per head": (
        kimi(dt_bias=(32,)),
        f"{PREFIX}.dt_bias` must have 4096 elements (got 32).",
        "expected [HV*K] = (4096,), got (32,) float32; "
        "32 is HV: this looks like one bias per head; "
        "repeat each K=128 times, e.g. jnp.repeat(dt_bias, 128)",
    ),
    "one rank's bias": (
        kimi(dt_bias=(1024,)),
        f"{PREFIX}.dt_bias` must have 4096 elements (got 1024).",
        "expected [HV*K] = (4096,), got (1024,) float32; "
        "axis 0 is 1/4 of it: one rank's slice of 4? "
        "join the ranks' files",
    ),
    "A_log per channel": (
        kimi(A_log=(4096,)),
        f"{PREFIX}.A_log` must have 32 elements (got 4096).",
        "expected [HV] = (32,), got (4096,) float32; "
        "4096 is HV*K: this looks like one rate per channel; "
        "A_log has one per value head",
    ),
    "A_log of fewer heads": (
        kimi(A_log=(16,)),
        f"{PREFIX}.A_log` must have 32 elements (got 16).",
        "expected [HV] = (32,), got (16,) float32; "
        "axis 0 is 1/2 of it: one rank's slice of 2? join the ranks' files",
    ),
    "cut on the wrong axis": (
        kimi(o_proj__weight=(576, 4096)),
        f"{PREFIX}.o_proj.weight` must be (2304, 4096).",
        "expected [D, HV*V] = (2304, 4096), got (576, 4096) bfloat16; "
        "axis 0 is 1/4 of it: a tensor-parallel slice "
        "cut on the wrong axis? this tensor is cut on axis 1",
    ),
    "transposed": (
        kimi(q_proj__weight=(2304, 4096)),
        f"{PREFIX}.q_proj.weight` must be (4096, 2304).",
        "expected [H*K, D] = (4096, 2304), got (2304, 4096) bfloat16; transposed: take .T",
    ),
    "taps first": (
        kimi(k_conv1d__weight=(4, 4096)),
        f"{PREFIX}.k_conv1d.weight` must be (4096, 1, 4).",
        "expected [H*K, 1, W] = (4096, 1, 4), got (4, 4096) bfloat16; "
        "the taps come first: swap the two axes",
    ),
    "quantized": (
        kimi(v_proj__weight=("F8_E4M3", (4096, 2304))),
        f"{PREFIX}.v_proj.weight` has no `weight_scale_inv` and no `weight_scale` beside it.",
        REMEDY,
    ),
    "missing": (
        kimi(b_proj__weight=None),
        f"{PREFIX}.b_proj.weight` is missing.",
        "expected [HV, D] = (32, 2304)",
    ),
    "a stranger": (
        kimi(in_proj_qkvz__weight=("BF16", (8, 8))),
        f"{PREFIX}.in_proj_qkvz.weight` is no tensor of such a KDA layer.",
        "this looks like Gated DeltaNet's layer, whose gate is per head",
    ),
    "unknown layout": (
        kimi(g_a_proj__weight=None),
        "layer 0 has an unknown layout: "
        "none of g_a_proj.weight, g_proj.weight, f_proj.0.weight, f_proj.weight is there.",
        "it holds A_log, b_proj.weight, dt_bias, f_a_proj.weight, f_b_proj.weight, g_b_proj.weight"
        ", ...",
    ),
    "full attention where KDA is declared": (
        (
            {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("BF16", (576, 2304))},
            config_of(KIMI, [1], [2]),
        ),
        "layer 0 is a KDA layer by config.json, but has no A_log and no dt_bias.",
        "this looks like MLA: it holds kv_a_proj_with_mqa.weight",
    ),
    "KDA where full attention is declared": (
        (
            layer_of(LOW_RANK, KIMI) | layer_of(LOW_RANK, KIMI, "model.layers.1.self_attn"),
            config_of(KIMI, [1], [2]),
        ),
        "layer 1 is no KDA layer by config.json, but holds A_log or dt_bias.",
        "",
    ),
    "no KDA layer": (
        ({"model.norm.weight": ("BF16", (2304,))}, config_of(KIMI, [])),
        "no KDA layer was found: no tensor is called A_log or dt_bias.",
        "",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_checkpoint(tmp_path, capsys, case):
    (entries, config), message, cure = WRONG[case]
    write_single(tmp_path, entries, config)
    assert main(["check", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"  {message}" in lines
    if cure:
        assert lines[lines.index(f"  {message}") + 1] == f"      {cure}"


def test_what_a_normalizer_mends_is_a_note(tmp_path):
    report = check_checkpoint(write_single(tmp_path, *kimi(dt_bias=(32, 128), A_log=(4, 8))))
    assert report.ok
    assert report.layers[0].notes == (
        "A_log is (4, 8): normalize_A_log gives (32,)",
        "dt_bias is (32, 128): normalize_dt_bias gives (4096,)",
    )
    assert demo.read_layer(tmp_path).dt_bias.shape == (4096,)


@pytest.mark.parametrize("bound", ["-5.0", 5, 0, True, float("-inf")])
def test_a_gate_that_is_none(tmp_path, capsys, bound):
    entries, _ = kimi()
    write_single(tmp_path, entries, config_of(KIMI, [1], [2], gate_lower_bound=1))
    text = (
        (tmp_path / "config.json")
        .read_text()
        .replace('"gate_lower_bound": 1', f'"gate_lower_bound": {json.dumps(bound)}')
    )
    (tmp_path / "config.json").write_text(text.replace("-Infinity", "-1e999"))
    message = "`linear_attn_config.gate_lower_bound` must be null or a finite number below 0 (got"
    assert main(["check", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert main(["check", str(tmp_path), "--json"]) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("eps", [None, "1e-5", 0, True, 10**400], ids=lambda x: type(x).__name__)
def test_an_epsilon_that_is_none_cannot_be_judged(tmp_path, capsys, eps):
    entries, config = kimi()
    write_single(tmp_path, entries, config | dict(rms_norm_eps=eps))
    assert main(["check", str(tmp_path)]) == 2
    line = "config.json: `rms_norm_eps` must be a finite number above 0 (got"
    assert line in capsys.readouterr().err
    with pytest.raises(BadFileError, match=re.escape(line)):
        check_checkpoint(tmp_path)


def test_layers_are_numbered_as_they_are_found(tmp_path):
    layer = layer_of(LOW_RANK, KIMI, "model.layers.5.self_attn")
    for listed in ([5], [6]):
        assert check_checkpoint(write_single(tmp_path, layer, config_of(KIMI, listed))).ok


def test_the_heads_that_cannot_be_split_are_named(tmp_path):
    sizes = {"H": 4, "HV": 8, "K": 64, "V": 64, "D": 100, "W": 4}
    config = {
        "model_type": "kda",
        "hidden_size": 100,
        "num_heads": 4,
        "num_v_heads": 8,
        "head_dim": 64,
        "conv_size": 4,
    }
    report = check_checkpoint(
        write_single(tmp_path, layer_of(FLA, sizes, "model.layers.0.attn"), config), tp=8
    )
    assert [fault.message for fault in report.faults] == [
        "4 key and 8 value heads cannot be split over 8 ranks"
    ]


def test_names_from_files_steer_nothing(tmp_path, capsys):
    entries, config = kimi(**{"evil\x1b[2J\n\ud800__weight": ("BF16", (8,))})
    write_single(tmp_path, entries, config)
    assert main(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "is no tensor of such a KDA layer" in out
    assert "\x1b" not in out
    assert out.isascii()
    with pytest.raises(BadFileError, match="File name too long"):
        check_checkpoint(tmp_path / ("x" * 300))
    config = {
        "model_type": "kda",
        "hidden_size": 1,
        "num_heads": 1,
        "head_dim": 64,
        "conv_size": 4,
        "expand_v": 1e308,
    }
    write_single(tmp_path, entries, config)
    with pytest.raises(BadFileError, match="`expand_v` must be a number above 0"):
        check_checkpoint(tmp_path)


def test_every_fault_is_reported_and_ranks_must_divide(tmp_path, capsys):
    entries, config = kimi(dt_bias=(32,), b_proj__weight=None, q_proj__weight=(2304, 4096))
    write_single(tmp_path, entries, config)
    assert main(["check", str(tmp_path), "--tp", "5"]) == 1
    out = capsys.readouterr().out
    assert "layer 0    3 wrong" in out
    assert "32 heads cannot be split over 5 ranks.\n      it can be 1, 2, 4, 8, 16, 32" in out


def test_json_for_machines(tmp_path, capsys):
    entries, config = kimi(dt_bias=(32,))
    write_single(tmp_path, entries, config)
    assert main(["check", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [fault["tensor"] for fault in report["layers"][0]["faults"]] == ["dt_bias"]
    assert main(["check", str(tmp_path / "nothing"), "--json"]) == 2
    assert "no such file or folder" in json.loads(capsys.readouterr().out)["error"]


def a_48b_model():
    """Names and shapes of 27 layers, 20 of them KDA, each with 256 experts: 48e9 parameters."""
    entries, kda = {}, [i for i in range(27) if i % 4 != 3]
    for index in range(27):
        prefix = f"model.layers.{index}"
        if index in kda:
            entries |= layer_of(LOW_RANK, KIMI, f"{prefix}.self_attn", A_log=(1, 1, 32, 1))
        else:
            entries[f"{prefix}.self_attn.kv_a_proj_with_mqa.weight"] = ("BF16", (576, 2304))
        for expert in range(256):
            for name, shape in (("w1", (1024, 2304)), ("w2", (2304, 1024)), ("w3", (1024, 2304))):
                entries[f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight"] = (
                    "BF16",
                    shape,
                )
    full = [i + 1 for i in range(27) if i not in kda]
    return entries, config_of(KIMI, [i + 1 for i in kda], full)


def process_time(*args: str) -> tuple[float, str]:
    """The processor seconds, user and system, of a Python process with these arguments; stdout."""
    before = os.times()
    run = subprocess.run([sys.executable, *args], capture_output=True, text=True)
    after = os.times()
    assert run.returncode == 0, run.stdout + run.stderr
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system, run.stdout


PARSE = """
import json, sys
with open(sys.argv[1], "rb") as file:
    json.loads(file.read(int.from_bytes(file.read(8), "little")))
"""


def test_a_48b_header_takes_a_few_times_its_parse(tmp_path):
    """Measured as a ratio, each the least of three: 4 times, of 0.07 s on an idle core."""
    write_single(tmp_path, *a_48b_model())
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 90e9
    parse = min(process_time("-c", PARSE, str(file))[0] for _ in range(3))
    checks = [process_time("-m", "kda_contracts", "check", str(tmp_path)) for _ in range(3)]
    assert all(printed.count(" ok ") == 21 for _, printed in checks)
    spent = min(seconds for seconds, _ in checks)
    assert spent < 10 * parse, f"{spent:.2f} s where json.loads takes {parse:.2f} s"


def replaced(path, entries, **change):
    """A file whose header has one entry changed; `raw` replaces the whole header's text."""
    write_safetensors(path, entries)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["x"] = header.get("x", {}) | {k: v for k, v in change.items() if k != "raw"}
    text = change["raw"] if "raw" in change else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


SMALL = {"x": ("F32", (2, 3)), "y": ("BF16", (4,))}
BAD = {
    "truncated": (lambda p: p.write_bytes(b"\x07\0\0"), "truncated: 3 bytes are too few"),
    "a length beyond the file": (
        lambda p: p.write_bytes((99).to_bytes(8, "little") + b"{}"),
        "claims 99 bytes, and 2",
    ),
    "a length beyond all bounds": (
        lambda p: p.write_bytes(b"\xff" * 8 + b"{}"),
        "more than the 12500000 allowed",
    ),
    "truncated data": (
        lambda p: (write_safetensors(p, SMALL), os.truncate(p, p.stat().st_size - 1)),
        "outside the file's 31 bytes",
    ),
    "data of no tensor": (
        lambda p: (write_safetensors(p, SMALL), os.truncate(p, p.stat().st_size + 5)),
        "5 bytes behind the last",
    ),
    "not JSON": (lambda p: replaced(p, SMALL, raw=b"{nonsense"), "not JSON: "),
    "not UTF-8": (lambda p: replaced(p, SMALL, raw=b'{"\xff": 1}'), "not UTF-8 at byte 2"),
    "no object": (
        lambda p: replaced(p, SMALL, raw=b"[1, 2]"),
        "the JSON must be an object (got list)",
    ),
    "duplicate keys": (
        lambda p: replaced(p, SMALL, raw=b'{"x": 1, "x": 2}'),
        "'x' stands twice in one JSON object",
    ),
    "too deep": (lambda p: replaced(p, SMALL, raw=b'{"x":' + b"[" * 200_000), "nested too deeply"),
    "all brackets": (
        lambda p: replaced(p, SMALL, raw=b'{"x":' + b"[" * 1_100_000),
        "JSON has 1100000 [",
    ),
    "a number of many digits": (
        lambda p: replaced(p, SMALL, raw=b'{"x": ' + b"9" * 5000 + b"}"),
        "not JSON: ",
    ),
    "NaN": (lambda p: replaced(p, SMALL, raw=b'{"x": NaN}'), "NaN is not JSON"),
    "no offsets": (
        lambda p: replaced(p, SMALL, raw=b'{"x": {"dtype": "F32"}}'),
        "no dtype, shape and data_offsets",
    ),
    "unknown dtype": (lambda p: replaced(p, SMALL, dtype="F33"), "the unknown dtype 'F33'"),
    "negative shape": (lambda p: replaced(p, SMALL, shape=[-2, 3]), "an absurd shape: [-2, 3]"),
    "a shape of no numbers": (lambda p: replaced(p, SMALL, shape=[True, 2.0]), "an absurd shape"),
    "a rank of 99": (lambda p: replaced(p, SMALL, shape=[1] * 99), "an absurd shape"),
    "a shape beyond its bytes": (
        lambda p: replaced(p, SMALL, shape=[2**62, 2**62]),
        "bytes, and has 24",
    ),
    "three offsets": (lambda p: replaced(p, SMALL, data_offsets=[0, 1, 2]), "no pair of offsets"),
    "offsets backwards": (lambda p: replaced(p, SMALL, data_offsets=[24, 0]), "lies at 24..0"),
    "offsets out of range": (
        lambda p: replaced(p, SMALL, data_offsets=[24, 48]),
        "lies at 24..48, outside",
    ),
    "overlap": (
        lambda p: replaced(p, SMALL, shape=[7], data_offsets=[0, 28]),
        "'y' overlaps the tensor before it",
    ),
    "gap": (
        lambda p: replaced(
            p, {"x": ("F32", (2, 3)), "z": ("F32", (6,))}, shape=[2], data_offsets=[0, 8]
        ),
        "leaves a gap",
    ),
    "a folder": (lambda p: p.mkdir(), "not a regular file"),
    "a pipe": (lambda p: os.mkfifo(p), "not a regular file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_clear_error(tmp_path, capsys, case):
    write, message = BAD[case]
    (tmp_path / "config.json").write_text(json.dumps(config_of(KIMI, [1])))
    write(tmp_path / "model.safetensors")
    assert main(["check", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.match(r"cannot be judged: \S*model.safetensors: ", captured.err)
    assert message in captured.err


def test_the_budget_of_a_header_is_exact(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((12_500_001).to_bytes(8, "little") + b"{}")
    with pytest.raises(BadFileError) as caught:
        find_tensors(path)
    assert str(caught.value) == (
        f"{path}: its header claims 12500001 bytes, more than the 12500000 allowed"
    )
    path.write_bytes((12_500_000).to_bytes(8, "little") + b"{}")
    with pytest.raises(BadFileError, match="truncated: its header claims 12500000 bytes"):
        find_tensors(path)


def sharded(folder):
    return write_sharded(folder, *kimi())


def rewrite_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def a_folder_below(folder):
    """The index names a whole and right file, which lies in a folder of the folder."""
    (sharded(folder) / "sub").mkdir()
    write_safetensors(folder / "sub" / "model.safetensors", {"x": ("F32", (2,))})
    rewrite_index(folder, lambda x: x["weight_map"].update(x="sub/model.safetensors"))


def outside_by_link(folder):
    (folder / "elsewhere").mkdir()
    home = folder / "elsewhere" / "home"
    home.mkdir()
    write_single(home, *kimi())
    target = folder / "secret.safetensors"
    (home / "model.safetensors").rename(target)
    (home / "model.safetensors").symlink_to(target)
    return home


BAD_FOLDERS = {
    "empty": (
        lambda f: (f / "config.json").write_text(json.dumps(config_of(KIMI, [1]))),
        "no safetensors file",
    ),
    "no config": (
        lambda f: write_safetensors(f / "model.safetensors", SMALL),
        "config.json: No such file",
    ),
    "another model's config": (
        lambda f: write_single(f, SMALL, {"hidden_size": 1}),
        "no linear_attn_config",
    ),
    "a config without sizes": (
        lambda f: write_single(f, SMALL, {"linear_attn_config": {"num_heads": "8"}}),
        "`linear_attn_config.num_heads` must be a whole number from 1 to 1048576 (got '8')",
    ),
    "a huge config": (
        lambda f: (f / "config.json").write_bytes(b" " * 4_000_002),
        "more than 4000000 bytes of JSON",
    ),
    "shards without an index": (
        lambda f: (sharded(f) / "model.safetensors.index.json").unlink(),
        "3 safetensors files, no model.safetensors and no",
    ),
    "an index without a map": (
        lambda f: rewrite_index(sharded(f), lambda x: x.pop("weight_map")),
        "weight_map must be an object",
    ),
    "an index that points up": (
        lambda f: rewrite_index(
            sharded(f), lambda x: x["weight_map"].update(x="../secret.safetensors")
        ),
        "secret.safetensors",
    ),
    "an index that points into a folder below": (
        a_folder_below,
        "sub/model.safetensors: points outside the folder",
    ),
    "an absolute index": (
        lambda f: rewrite_index(sharded(f), lambda x: x["weight_map"].update(x="/etc/hostname")),
        "/etc/hostname: points outside the folder",
    ),
    "an index with a missing file": (
        lambda f: rewrite_index(
            sharded(f), lambda x: x["weight_map"].update(x="model-9.safetensors")
        ),
        "model-9.safetensors: No such file",
    ),
    "an index with a missing tensor": (
        lambda f: rewrite_index(
            sharded(f), lambda x: x["weight_map"].update(x="model-00001-of-00003.safetensors")
        ),
        "'x' is said to be in model-00001-of-00003.safetensors, which does not hold it",
    ),
    "a link that leads out": (outside_by_link, "points outside the folder"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_one_clear_error(tmp_path, case):
    build, message = BAD_FOLDERS[case]
    home = build(tmp_path)
    with pytest.raises(BadFileError, match=re.escape(message)):
        check_checkpoint(home if isinstance(home, Path) else tmp_path)


def test_a_hub_cache_is_followed_to_its_blobs(tmp_path):
    home, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    home.mkdir(parents=True)
    blobs.mkdir()
    write_single(home, *kimi())
    (home / "model.safetensors").rename(blobs / "1234")
    (home / "model.safetensors").symlink_to(blobs / "1234")
    assert check_checkpoint(home).ok


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    write_single(
        folder, layer_of(LOW_RANK, dict.fromkeys(KIMI, 2)), config_of(dict.fromkeys(KIMI, 2), [1])
    )
    return folder


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "?"]) | json_values,
        "shape": st.lists(st.integers(-1, 2**64), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 2**64), max_size=3) | json_values,
    },
)
names = st.sampled_from([f"model.layers.0.self_attn.{x.name}" for x in LOW_RANK.tensors]) | st.text(
    max_size=8
)
shapes = st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.lists(st.integers(0, 4), max_size=4))
headers = st.dictionaries(names, entries, max_size=6).map(lambda x: json.dumps(x).encode())


@pytest.mark.slow
def test_fuzzed_headers_give_a_verdict_or_a_clear_error(fuzz_folder):
    path = fuzz_folder / "model.safetensors"
    valid = path.read_bytes()
    verdicts = {"judged": 0, "bad": 0}

    # The first draw loads tables: on a busy machine that took 40 s.
    @settings(
        max_examples=1000,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(data=st.data())
    def fuzz(data):
        kind = data.draw(st.sampled_from(["bytes", "header", "shapes", "flipped", "cut"]))
        if kind == "bytes":
            content = data.draw(st.binary(max_size=64))
        elif kind == "header":
            text = data.draw(headers)
            length = data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
            content = length.to_bytes(8, "little") + text + bytes(data.draw(st.integers(0, 64)))
        elif kind == "shapes":
            write_safetensors(path, data.draw(st.dictionaries(names, shapes, max_size=16)))
            content = path.read_bytes()
        elif kind == "flipped":
            content = bytearray(valid)
            for _ in range(data.draw(st.integers(1, 4))):
                content[data.draw(st.integers(0, len(valid) - 1))] = data.draw(st.integers(0, 255))
        else:
            content = valid[: data.draw(st.integers(0, len(valid)))]
        path.write_bytes(content)
        tracemalloc.start()
        try:
            check_checkpoint(fuzz_folder)
            verdicts["judged"] += 1
        except BadFileError as error:
            verdicts["bad"] += "\n" not in str(error)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * 2**20

    fuzz()
    path.write_bytes(valid)
    assert verdicts["judged"] + verdicts["bad"] >= 1000
    assert min(verdicts.values()) > 20


@pytest.mark.parametrize("model", synthetic.MODELS)
def test_the_demo_reads_a_layer_as_it_was_written(tmp_path, model):
    synthetic.write_layer(tmp_path, model, seed=3)
    layer = demo.read_layer(tmp_path)
    heads = synthetic.MODELS[model].heads
    assert layer.A_log.shape == (heads,)
    assert layer.dt_bias.shape == (heads * 128,)
    assert layer.lower_bound == synthetic.MODELS[model].lower_bound
    sizes = synthetic.model_sizes(model, tp=1, batch=1, slots=1)
    written = synthetic.random_operands(sizes, seed=3)
    assert np.array_equal(layer.A_log, written["A_log"])
    assert np.array_equal(layer.dt_bias, written["dt_bias"])


def test_the_demo_refuses_a_checkpoint_that_breaks_the_contract(tmp_path):
    write_single(tmp_path, *kimi(dt_bias=(32,)))
    with pytest.raises(ValueError, match="must have 4096 elements"):
        demo.read_layer(tmp_path)


def test_find_tensors_names_the_file(tmp_path):
    found = find_tensors(sharded(tmp_path))
    assert {path.name for path, _ in found.values()} == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
