"""Checkpoints that are damaged at random, and what `check` says of them.

    python tests/helpers/fuzz_folders.py --count 2000 --seed 1

Folder n of a seed can be made again alone: `--only n`. Each is checked in a forked child of this
process, which holds no more than kda_contracts: a child counts its parent's pages as its own.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kda_contracts import CHECKPOINT, ITEM_BITS
from kda_contracts.cli import main as check

SECONDS = 2  # of the processor
MEBIBYTES = 256
CHARACTERS = 500  # of the line that tells why a folder cannot be judged
CRASHED = 99
SIZES = dict(H=4, HV=4, K=16, V=16, D=32, W=4)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Outcome:
    """What one check did. `code` is negative where a signal ended it."""

    code: int
    out: str
    err: str
    seconds: float
    mebibytes: float


def run_check(arguments, folder, deadline=30) -> Outcome:
    """Runs `check` in a forked child; its output goes to files beside `folder`."""
    streams = [Path(f"{folder}.{name}") for name in ("out", "err")]
    child = os.fork()
    if not child:
        _run_here(arguments, streams, deadline)
    _, status, used = os.wait4(child, 0)
    out, err = (x.read_bytes().decode("utf-8", "surrogateescape") for x in streams)
    for stream in streams:
        stream.unlink()
    seconds = used.ru_utime + used.ru_stime
    return Outcome(os.waitstatus_to_exitcode(status), out, err, seconds, used.ru_maxrss / 1024)


def _run_here(arguments, streams, deadline):
    code = CRASHED
    signal.alarm(deadline)
    try:
        for stream, number in zip(streams, (1, 2), strict=True):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = check(["check", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def broken_promises(outcome, as_json, seconds=SECONDS):
    """What the command promises of every folder, and did not keep here."""
    broken = []

    def require(holds, promise):
        if not holds:
            broken.append(promise)

    code, out, err = outcome.code, outcome.out, outcome.err
    require(code in (0, 1, 2), f"it ends with 0, 1 or 2, not {code}")
    require("Traceback" not in out + err, "it shows no traceback")
    require((out + err).replace("\n", "").isprintable(), "it shows nothing that a terminal obeys")
    require(outcome.seconds <= seconds, f"it takes {seconds:.1f} s at the most")
    require(outcome.mebibytes <= MEBIBYTES, f"it takes {MEBIBYTES} MiB at the most")
    if as_json:
        require(not err, "with --json it writes to stdout alone")
        require(_is_report(out, code), "with --json it prints one JSON object")
    elif code == 2:
        require(not out, "it prints no report of what cannot be judged")
        require(
            err.startswith("cannot be judged: ") and err.count("\n") == 1 and err.endswith("\n"),
            "it says in one line why a folder cannot be judged",
        )
        require(len(err) <= CHARACTERS, f"that line has {CHARACTERS} characters at the most")
    else:
        require(not err, "a report goes to stdout alone")
        require(out.count(" KDA layer") > 0, "it prints a report")
        require((" wrong  " in out or "\n  " in out) or code == 0, "it says what is wrong")
    return broken


def _is_report(out, code):
    def refuse(constant):
        raise ValueError(constant)

    try:
        report = json.loads(out, parse_constant=refuse)
        json.dumps(report, ensure_ascii=False).encode()  # no half of a pair of surrogates
    except ValueError:
        return False
    keys = {"ok", "error"} if code == 2 else {"ok", "layers", "faults"}
    return isinstance(report, dict) and report.get("ok") is (code == 0) and keys <= report.keys()


# The worst JSON for its length: what begins it, what is repeated (with the number of times), and
# what ends it. Some is refused by its marks alone; the rest has just as many as may be parsed.
WORST = {
    "brackets": ('{"a":', lambda i: "[", ""),
    "braces": ("", lambda i: '{"":', ""),
    "empty lists": ('{"a":[', lambda i: "[],", "0]}"),
    "empty objects": ('{"a":[', lambda i: "{},", "0]}"),
    "one string": ('{"a":"', lambda i: "x", '"}'),
    "one wide string": ('{"a":"\U0001f600', lambda i: "x", '"}'),
    "one string of escapes": ('{"a":"', lambda i: "\\n", '"}'),
    "short strings": ('{"a":[', lambda i: '"",', "0]}"),
    "strings": ('{"a":[', lambda i: f'"{i:08x}",', "0]}"),
    "numbers": ('{"a":[', lambda i: "1.2345678,", "0]}"),
    "large numbers": ('{"a":[', lambda i: "9" * 4300 + ",", "0]}"),
    "a larger number": ('{"a":', lambda i: "9", "}"),
    "lists": ('{"a":[', lambda i: "[1.23456],[1.2345678901234567890123456], ", "0]}"),
    "deep lists": ('{"a":[', lambda i: "[" * 900 + " " * 17_200 + "]" * 900 + ",", "0]}"),
    "objects": ("{", lambda i: f'"{i:010x}":{{"{i:010x}":1.5,"b":1.5,"c":1}},', '"":0}'),
    "keys": ("{", lambda i: f'"{i:08x}":.5,'.replace(".5", "10"), '"":0}'),
    "wide keys": ('{"\U0001f600":0,', lambda i: f'"{i:08x}":10,', '"":0}'),
    "one key": ("{", lambda i: '"aaaaaaaa":1,', '"":0}'),
    "metadata": ('{"__metadata__":{', lambda i: f'"{i:014x}":"",', '"":""}}'),
    "objects and lists": (
        '{"\U0001f600":0,',
        lambda i: f'"{i:010x}":{{"a":[1.5,2.5],"b":[2.5],"":"dddd"}}, ',
        '"":0}',
    ),
    "tensors": (
        "{",
        lambda i: f'"{i:x}":{{"dtype":"I8","shape":[0],"data_offsets":[0,0]}},',
        '"":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}',
    ),
    "a layer's tensors": (
        "{",
        lambda i: f'"layers.0.attn.A_log.{i:x}":{{"dtype":"I8","shape":[0],"data_offsets":[0,0]}},',
        '"":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}',
    ),
    "layers": (
        "{",
        lambda i: f'"layers.{i}.attn.A_log":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}},',
        '"":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}',
    ),
    "long entries": ('{"weight_map":{', lambda i: f'"{i:x}{"x" * 20}":"{SINGLE}",', '"":""}}'),
}


def worst_json(name, length):
    """Such JSON, of exactly so many bytes: what is left is spaces."""
    begin, piece, end = WORST[name]
    left = length - len(begin.encode()) - len(end)
    pieces, i = [], 0
    while len(text := piece(i)) <= left:
        pieces.append(text)
        left -= len(text)
        i += 1
    return (begin + "".join(pieces) + " " * left + end).encode()


# The valid folders: (config, {file: {name: (dtype, shape)}}) of each public form.


def _linear(**more):
    lists = dict(kda_layers=[1, 2], full_attn_layers=[])
    return dict(num_heads=4, head_dim=16, short_conv_kernel_size=4) | lists | more


def _tensors(known_by, prefix, layers=2):
    (layout,) = (x for x in CHECKPOINT if x.known_by == known_by)
    return {
        f"{prefix.format(layer)}.{x.name}": (
            "F32" if x.name in ("A_log", "dt_bias") else "BF16",
            list(x.shape(SIZES)),
        )
        for layer in range(layers)
        for x in layout.tensors
        if x.required
    }


LOW_RANK = ("g_a_proj.weight",)
SAME = dict(hidden_size=32, rms_norm_eps=1e-5, num_hidden_layers=2)


def released():
    config = SAME | dict(model_type="kimi_linear", linear_attn_config=_linear())
    return config, _tensors(LOW_RANK, "model.layers.{}.self_attn")


def flat():
    config = SAME | dict(model_type="kimi_linear", layer_types=["linear_attention"] * 2)
    config |= dict(linear_num_heads=4, linear_head_dim=16, linear_conv_kernel_dim=4)
    return config, _tensors(LOW_RANK, "model.layers.{}.self_attn")


def ling():
    config = SAME | dict(num_attention_heads=4, head_dim=16, short_conv_kernel_size=4)
    config |= dict(kda_safe_gate=True, kda_lower_bound=-5.0)
    return config, _tensors(("f_proj.weight", "g_proj.weight"), "model.layers.{}.attention")


def fla():
    config = dict(model_type="kda", hidden_size=32, num_heads=4, head_dim=16, conv_size=4)
    config |= dict(norm_eps=1e-6, allow_neg_eigval=False, use_short_conv=True, lower_bound=None)
    return config, _tensors(("f_proj.0.weight",), "model.layers.{}.attn")


def glm():
    linear = _linear(kda_layers=[0, 1], gate_lower_bound=-5.0)
    text = SAME | dict(model_type="glm5_next_text", linear_attn_config=linear)
    tensors = _tensors(LOW_RANK, "model.language_model.layers.{}.self_attn")
    return dict(model_type="glm5_next", text_config=text), tensors


def fp8():
    config, tensors = released()
    for name, (_, shape) in list(tensors.items()):
        if len(shape) == 2 and "proj" in name:
            tensors[name] = ("F8_E4M3", shape)
            tensors[f"{name}_scale_inv"] = ("F32", [-(-x // 128) for x in shape])
    quantization = dict(quant_method="fp8", weight_block_size=[128, 128])
    return config | dict(quantization_config=quantization), tensors


BASES = (released, flat, ling, fla, glm, fp8)


def header_of(tensors):
    header, begin = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * ITEM_BITS[dtype] // 8
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[begin, end])
        begin = end
    return header


@dataclass
class Draft:
    """A folder before it is written: its JSON files, as objects or as bytes."""

    config: object
    headers: dict  # {file: header}
    index: object = None
    longer: int = 0  # bytes that a file has more than its header says
    claimed: int | None = None  # the length that a header claims, where it is wrong

    def write(self, folder):
        (folder / "config.json").write_bytes(encoded(self.config))
        if self.index is not None:
            (folder / INDEX).write_bytes(encoded(self.index))
        for file, (header, data) in self.headers.items():
            text = encoded(header)
            length = len(text) if self.claimed is None else self.claimed
            with open(folder / file, "wb") as stream:
                stream.write(length.to_bytes(8, "little") + text)
                stream.truncate(max(0, 8 + len(text) + data + self.longer))


def encoded(x):
    return x if isinstance(x, bytes) else json.dumps(x).encode("utf-8", "surrogatepass")


def draft_of(rng):
    base = rng.choice(BASES)
    config, tensors = base()
    sharded = rng.random() < 0.35
    files, parts = [SINGLE], [tensors]
    if sharded:
        files = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
        names = sorted(tensors)
        parts = [{x: tensors[x] for x in names[i::2]} for i in (0, 1)]
    headers = {}
    for file, part in zip(files, parts, strict=True):
        header = header_of(part)
        headers[file] = [header, max(x["data_offsets"][1] for x in header.values())]
    index = None
    if sharded:
        weight_map = {x: file for file, part in zip(files, parts, strict=True) for x in part}
        index = dict(metadata=dict(total_size=1), weight_map=weight_map)
    return Draft(config, headers, index)


# What a value may become. Lambdas, since the large ones are made only where they are drawn.
NASTY = (
    lambda r: None,
    lambda r: r.choice([True, False]),
    lambda r: r.choice([0, 1, -1, 2, 3, 4, 31, 2**31 - 1, 2**63, 2**64, 2**200, -(2**70)]),
    lambda r: 10 ** r.choice([30, 400, 4200]),
    lambda r: r.choice([0.5, -5.0, 1e308, -1e-320, 1e-5, float("nan"), float("inf")]),
    lambda r: "x" * r.choice([0, 1, 90, 10_000, 300_000]),
    lambda r: r.choice(["\x1b[2J\x1b]0;x\x07", "\ud800", "\u0663", "\u202egpj", "a\nb", "\0", "é"]),
    lambda r: list(range(r.choice([0, 1, 3, 200, 20_000, 100_000]))),
    lambda r: {str(i): i for i in range(r.choice([0, 1, 3, 20_000]))},
    lambda r: _nested(r, []),
    lambda r: _nested(r, {}),
    lambda r: [[r.choice([0, "x", None])] * 3] * r.choice([1, 3, 500]),
)


def _nested(rng, inner):
    for _ in range(rng.choice([1, 3, 50, 400, 900])):
        inner = {"x": inner} if isinstance(inner, dict) else [inner]
    return inner


def places(x):
    """(container, key) of every value in an object, at any depth."""
    for key in list(x) if isinstance(x, dict) else range(len(x)):
        yield x, key
        if isinstance(x[key], (dict, list)) and len(x[key]) < 200:
            yield from places(x[key])


def change_value(rng, table):
    """Replaces, removes, renames or adds one entry at any depth."""
    found = list(places(table))
    if not found:
        return
    inner, key = rng.choice(found)
    kind = rng.choice(["nasty", "nasty", "near", "removed", "renamed", "added"])
    if kind == "near" and type(inner[key]) in (int, float):
        inner[key] = rng.choice([inner[key] + 1, inner[key] * 2, -inner[key], str(inner[key])])
    elif kind == "removed":
        del inner[key]
    elif kind == "renamed" and isinstance(inner, dict):
        inner[new_name(rng, key)] = inner.pop(key)
    elif kind == "added" and isinstance(inner, dict):
        inner[new_name(rng, key)] = rng.choice(NASTY)(rng)
    else:
        inner[key] = rng.choice(NASTY)(rng)


def new_name(rng, name):
    return rng.choice(
        [
            name + "x",
            name[:-1],
            name.upper(),
            name + "y" * rng.choice([100, 10_000, 1_000_000]),
            name + rng.choice(["\x1b[31m", "\ud800", "\u0663", "\n", "\u202e", "é", "\0"]),
            re.sub("[0-9]", rng.choice(["7", "999999", "1000000", "9" * 400, "\u0663"]), name),
            rng.choice(["lora_", "fused_", "_orig_mod.", "module."]) + name,
            name + rng.choice(["_scale", "_scale_inv", ".qweight", "_packed", ".biases"]),
            re.sub("weight$", "bias", name),
        ]
    )


def change_tensor(rng, draft):
    """Changes one entry of a header; the rest keeps its place where the change allows it."""
    file = rng.choice(sorted(draft.headers))
    header, _ = draft.headers[file]
    if not isinstance(header, dict) or not header:
        return
    kind = rng.choice(["shape", "shape", "dtype", "removed", "renamed", "offsets", "value", "twin"])
    if kind == "value":
        change_value(rng, header)
        return
    tensors = {
        name: [x["dtype"], list(x["shape"])]
        for name, x in header.items()
        if isinstance(x, dict) and {"dtype", "shape"} <= x.keys() and isinstance(x["shape"], list)
    }
    if not tensors:
        return
    name = rng.choice(sorted(tensors))
    if kind == "offsets" and "data_offsets" in header[name]:
        header[name]["data_offsets"] = [rng.choice([0, 1, 8, 2**63, -1]) for _ in range(2)]
        return
    if kind == "shape":
        shape = tensors[name][1]
        tensors[name][1] = rng.choice([shape[::-1], [*shape, 1], [1, *shape], shape[1:], [7, 3]])
    elif kind == "dtype":
        tensors[name][0] = rng.choice(["F32", "F16", "BF16", "I8", "F8_E4M3", "F64", "I64"])
    elif kind == "removed":
        del tensors[name]
    else:
        entry = tensors[name] if kind == "twin" else tensors.pop(name)
        tensors[new_name(rng, name)] = entry
    with contextlib.suppress(KeyError, TypeError, OverflowError, ValueError):
        header = header_of(tensors)
        data = max((x["data_offsets"][1] for x in header.values()), default=0)
        if data < 2**40:
            draft.headers[file] = [header, data]
            if draft.index and rng.random() < 0.8 and isinstance(draft.index, dict):
                draft.index["weight_map"] = {
                    x: f for f, (h, _) in draft.headers.items() if isinstance(h, dict) for x in h
                }


def spoil(rng, content):
    """The bytes with some of them flipped, cut, doubled or replaced."""
    content = bytearray(content)
    kind = rng.choice(["flip", "flip", "cut", "twice", "number", "nest", "repeat", "key"])
    at = rng.randrange(len(content) + 1)
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 3, 30])):
            if content:
                content[rng.randrange(len(content))] = rng.randrange(256)
    elif kind == "cut":
        del content[at:]
    elif kind == "twice":
        content[at:at] = content[at : at + 200]
    elif kind == "number":
        digits = b"9" * rng.choice([20, 400, 5000, 200_000])
        content = bytearray(re.sub(rb"\d+", digits, bytes(content), count=rng.choice([1, 2, 3])))
    elif kind == "nest":
        mark = rng.choice([b"[", b'{"":', b"[[],", b'"a",'])
        content[at:at] = mark * rng.choice([10, 1000, 5000, 500_000])
    elif kind == "repeat":
        content[1:1] = rng.choice([b'"hidden_size":1,', b'"x":{},']) * rng.choice([1, 2, 1000])
    elif keys := list(re.finditer(rb'"[^"]*": ?', content)):  # a key that stands twice
        content[1:1] = rng.choice(keys)[0] + b"4,"
    return bytes(content)


def change(rng, draft):
    """One change of a folder."""
    kind = rng.choice(["config", "config", "tensor", "tensor", "tensor", "index", "bytes", "file"])
    if kind == "config" and isinstance(draft.config, dict):
        change_value(rng, draft.config)
    elif kind == "tensor":
        change_tensor(rng, draft)
    elif kind == "index" and isinstance(draft.index, dict):
        change_value(rng, draft.index)
    elif kind == "bytes":
        what = rng.choice(["config", "header", "index"])
        if what == "config":
            draft.config = spoil(rng, encoded(draft.config))
        elif what == "index" and draft.index is not None:
            draft.index = spoil(rng, encoded(draft.index))
        else:
            part = draft.headers[rng.choice(sorted(draft.headers))]
            part[0] = spoil(rng, encoded(part[0]))
    elif kind == "file" and rng.random() < 0.1:
        part = draft.headers[rng.choice(sorted(draft.headers))]
        part[0] = worst_json(rng.choice(sorted(WORST)), rng.choice([10**5, 10**6, 12_500_000]))
    elif kind == "file" and rng.random() < 0.5:
        draft.longer = rng.choice([-(10**9), -100, -1, 1, 100, 2**33])
    elif kind == "file":
        draft.claimed = rng.choice([0, 1, 7, 100, 12_500_000, 12_500_001, 10**8, 2**63, 2**64 - 1])


def make_folder(folder, seed, number):
    """Writes folder `number` of a seed, and returns the options that it is checked with."""
    rng = random.Random(f"{seed}-{number}")
    draft = draft_of(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
        change(rng, draft)
    folder.mkdir(parents=True)
    draft.write(folder)
    options = ["--json"] if rng.random() < 0.5 else []
    return options + rng.choice([[], [], ["--tp", "2"], ["--tp", "3"], ["--tp", str(2**31)]])


def slowness():
    """How many times slower than an idle core this one is now, 1 at the least."""
    begin = time.process_time()
    json.loads("[" + '{"dtype":"BF16","shape":[1024,2304],"data_offsets":[0,1]},' * 20_000 + "0]")
    return max(1.0, (time.process_time() - begin) / 0.03)


def judge(home, seed, number, keep=False):
    """`(Outcome, broken promises)` of one folder."""
    folder = home / f"{seed}-{number}"
    # In a child: what a folder's bytes take here would be counted as each later child's.
    told = home / "options"
    child = os.fork()
    if not child:
        code = 1
        try:
            told.write_text(json.dumps(make_folder(folder, seed, number)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"folder {number} of seed {seed} could not be made")
    options = json.loads(told.read_text())
    outcome = run_check([folder, *options], folder)
    broken = broken_promises(outcome, "--json" in options)
    if broken and outcome.seconds > SECONDS:
        broken = broken_promises(outcome, "--json" in options, SECONDS * slowness())
    if not keep:
        shutil.rmtree(folder)
    return outcome, broken


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="make, check and keep this folder alone")
    parser.add_argument("--folder", type=Path, help="measure a check of this folder, as JSON")
    parser.add_argument(
        "--worst", nargs=2, metavar=("NAME", "LENGTH"), help="write such JSON there"
    )
    options, rest = parser.parse_known_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="fuzz-"))
    if options.folder and options.worst:
        options.folder.write_bytes(worst_json(options.worst[0], int(options.worst[1])))
        return 0
    if options.folder:
        outcome = run_check([options.folder, *rest], home / "check")
        shutil.rmtree(home)
        print(json.dumps(vars(outcome)))
        return 0
    alone = options.only is not None
    numbers = [options.only] if alone else range(options.count)
    begin, codes, failed = time.perf_counter(), Counter(), []
    most = dict(seconds=(0, 0), mebibytes=(0, 0))
    for number in numbers:
        outcome, broken = judge(home, options.seed, number, keep=alone)
        codes[outcome.code] += 1
        for what, held in most.items():
            most[what] = max(held, (getattr(outcome, what), number))
        if broken:
            failed.append(number)
            print(f"folder {number} of seed {options.seed}: {'; '.join(broken)}")
            print(f"  {(outcome.out + outcome.err)[-300:]!a}")
        if alone:
            print(f"{home}/{options.seed}-{number}\n{(outcome.out + outcome.err)[:3000]}")
    if not alone:
        shutil.rmtree(home)
    told = ", ".join(f"{codes[code]} with {code}" for code in sorted(codes))
    print(f"seed {options.seed}: {sum(codes.values())} folders, {told}")
    print("most time {:.2f} s, folder {}".format(*most["seconds"]))
    print("most memory {:.0f} MiB, folder {}".format(*most["mebibytes"]))
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
