"""Checkpoints that were made to hurt: a verdict in 2 s and 256 MiB, whatever stands in the files.

Time and memory are those of a child of fuzz_folders.py, which holds no more than kda_contracts.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import fuzz_folders
import pytest
from fuzz_folders import INDEX, SINGLE, Outcome, broken_promises, encoded, header_of, released

from kda_contracts.cli import main
from kda_contracts.folder import CONFIG_BYTES, INDEX_BYTES
from kda_contracts.model_config import MAX_LAYERS, MAX_SIZE
from kda_contracts.safetensors_header import MAX_HEADER_BYTES

pytestmark = pytest.mark.slow  # it hangs on no JAX version

EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def measured(folder, *options, seconds=fuzz_folders.SECONDS) -> Outcome:
    """A check of the folder, which has to keep every promise: its time the least of three."""
    script = [sys.executable, fuzz_folders.__file__, "--folder", str(folder)]
    limit = seconds * fuzz_folders.slowness()
    for _ in range(3):
        run = subprocess.run([*script, *options], capture_output=True, text=True, check=True)
        outcome = Outcome(**json.loads(run.stdout))
        if outcome.seconds <= limit:
            break
    assert not broken_promises(outcome, "--json" in options, limit), outcome
    return outcome


def write(folder, config=None, header=None, index=None):
    """A folder of the released form, of which some files are others: objects, or bytes."""
    valid, tensors = released()
    header = header_of(tensors) if header is None else header
    data = 0
    if isinstance(header, dict):
        data = max((x["data_offsets"][1] for x in header.values()), default=0)
    draft = fuzz_folders.Draft(valid if config is None else config, {SINGLE: [header, data]}, index)
    if index is not None:
        draft.headers = {}
    draft.write(folder)
    return folder


def with_linear(**changes):
    config, _ = released()
    return config | dict(linear_attn_config=config["linear_attn_config"] | changes)


def test_200_folders_damaged_at_random(tmp_path):
    script = [sys.executable, fuzz_folders.__file__, "--count", "200", "--seed", "3"]
    run = subprocess.run(script, capture_output=True, text=True, env=os.environ | home_of(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    counts = run.stdout.splitlines()[-4].partition("folders, ")[2]
    codes = {int(x.split()[2]): int(x.split()[0]) for x in counts.split(", ")}
    assert codes.keys() == {0, 1, 2}
    assert min(codes.values()) >= 10
    assert not list(tmp_path.iterdir())


def home_of(folder):
    return {"TMPDIR": str(folder)}


def test_a_folder_of_the_fuzzer_is_made_again(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        options = [fuzz_folders.make_folder(tmp_path / name / str(i), 7, i) for i in range(20)]
    again = [fuzz_folders.make_folder(tmp_path / "c" / str(i), 7, i) for i in range(20)]
    assert again == options
    files = [
        sorted((x.relative_to(tmp_path / name), x.stat().st_size) for x in path.rglob("*"))
        for name in ("a", "b", "c")
        for path in [tmp_path / name]
    ]
    names = [[(x, size) for x, size in y if x.suffix] for y in files]
    assert names[0] == names[1] == names[2]


PROMISES = {
    "a signal": (dict(code=-9), "it ends with 0, 1 or 2"),
    "a traceback": (dict(err="cannot be judged: Traceback\n"), "it shows no traceback"),
    "an escape": (dict(err="cannot be judged: \x1b\n"), "it shows nothing that a terminal obeys"),
    "slow": (dict(seconds=2.1), "it takes 2.0 s"),
    "large": (dict(mebibytes=257), "it takes 256 MiB"),
    "two lines": (dict(err="cannot be judged: a\nb\n"), "it says in one line"),
    "a long line": (dict(err=f"cannot be judged: {'x' * 500}\n"), "that line has 500"),
    "nothing": (dict(err=""), "it says in one line"),
}


@pytest.mark.parametrize("case", PROMISES)
def test_the_fuzzer_sees_a_broken_promise(case):
    changes, promise = PROMISES[case]
    kept = dict(code=2, out="", err="cannot be judged: x\n", seconds=0.1, mebibytes=20)
    assert not broken_promises(Outcome(**kept), as_json=False)
    broken = broken_promises(Outcome(**kept | changes), as_json=False)
    assert any(x.startswith(promise) for x in broken)


@pytest.mark.parametrize(
    "out", ["", "{}", '{"ok": true, "error": ""}', '{"ok": false, "error": NaN}', "{}{}"]
)
def test_the_fuzzer_sees_what_is_no_report(out):
    outcome = Outcome(2, out, "", 0.1, 20)
    assert broken_promises(outcome, as_json=True) == ["with --json it prints one JSON object"]


# Numbers of config.json

MANY = 2**31 - 1
NUMBERS = {
    "heads": (with_linear(num_heads=MANY), f"`linear_attn_config.num_heads` must be .* {MANY}"),
    "a bound of 400 digits": (with_linear(gate_lower_bound=-(10**400)), "gate_lower_bound"),
    "a layer below 0": (with_linear(kda_layers=[3, -77]), "kda_layers` must hold layer numbers"),
    "a layer of 4300 digits": (
        with_linear(kda_layers=[3, 1 - 10**4300]),
        r"kda_layers` must hold layer numbers up to 10000 \(got int of \d+ bits",
    ),
    "120,000 layers": (
        with_linear(kda_layers=list(range(1, 120_001))),
        "kda_layers` has 120000 entries, more than 10000",
    ),
    "1,200,000 layers": (
        with_linear(kda_layers=list(range(1, 1_200_001))),
        f"more than {CONFIG_BYTES} bytes of JSON",
    ),
    "layer types": (
        dict(
            linear_num_heads=4,
            linear_head_dim=16,
            hidden_size=32,
            layer_types=["linear_attention"] * 120_000,
        ),
        "`layer_types` has 120000 entries",
    ),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_of_config_json_that_no_model_has(tmp_path, case):
    config, message = NUMBERS[case]
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    write(tmp_path, config)
    sys.set_int_max_str_digits(limit)
    for options in ((), ("--tp", "3"), ("--json",)):
        outcome = measured(tmp_path, *options)
        assert outcome.code == 2
        assert outcome.seconds < 1
        assert re.search(message, outcome.err + outcome.out)


def test_the_most_heads_over_three_ranks(tmp_path):
    write(tmp_path, with_linear(num_heads=MAX_SIZE))
    outcome = measured(tmp_path, "--tp", "3")
    assert outcome.code == 1
    assert outcome.seconds < 1
    assert f"{MAX_SIZE} heads cannot be split over 3 ranks" in outcome.out


@pytest.mark.parametrize("names", ["none", "many"])
def test_as_many_missing_layers_as_are_read(tmp_path, names):
    """Each of them asks what the file holds of it: one look at all names answers all."""
    header = {f"layers.{i % 5000}.{i:x}": EMPTY for i in range(80_000)} if names == "many" else {}
    write(tmp_path, with_linear(kda_layers=list(range(1, MAX_LAYERS + 1))), header)
    outcome = measured(tmp_path)
    assert outcome.code == 1
    assert outcome.out.count("but has no A_log") + outcome.out.count("an unknown layout") == 50
    assert f"and {MAX_LAYERS - 50} more; --json has all of them." in outcome.out
    report = json.loads(measured(tmp_path, "--json").out)
    assert len(report["layers"]) == MAX_LAYERS


def test_as_many_wrong_layers_as_are_read(tmp_path):
    names = ("attn.A_log", "attn.g_a_proj.weight", *(f"attn.x{i}.weight" for i in range(17)))
    header = {f"layers.{layer}.{name}": EMPTY for layer in range(1000) for name in names}
    write(tmp_path, with_linear(kda_layers=list(range(1000))), header)
    assert measured(tmp_path).code == 1
    report = json.loads(measured(tmp_path, "--json").out)
    assert Counter(len(x["faults"]) for x in report["layers"]) == {32: 1000}


def test_more_layers_than_any_model_has(tmp_path):
    write(tmp_path, header={f"layers.{i}.attn.A_log": EMPTY for i in range(1001)})
    assert "it has 1001 attention blocks, more than 1000" in measured(tmp_path).err


def test_more_tensors_than_any_layer_has(tmp_path):
    prefix = "model.layers.0.self_attn."
    write(tmp_path, header={f"{prefix}A_log.{i}": EMPTY for i in range(20_001)})
    assert "more than 20000 tensors of attention blocks" in measured(tmp_path).err
    strangers = {f"{prefix}x{i}": EMPTY for i in range(15_000)}
    write(tmp_path, header=header_of(released()[1]) | strangers)
    outcome = measured(tmp_path)
    assert "layer 0    51 wrong" in outcome.out
    report = json.loads(measured(tmp_path, "--json").out)
    last = report["layers"][0]["faults"][-1]["message"]
    assert last == "layer 0 has 14950 more tensors of no such KDA layer"


# Headers, the index, and names


@pytest.mark.parametrize("name", fuzz_folders.WORST)
def test_the_worst_header_of_its_length(tmp_path, name):
    write(tmp_path, header=fuzz_folders.worst_json(name, MAX_HEADER_BYTES))
    assert measured(tmp_path).code in (1, 2)


@pytest.mark.parametrize("name", fuzz_folders.WORST)
def test_the_worst_config_of_its_length(tmp_path, name):
    write(tmp_path, config=fuzz_folders.worst_json(name, CONFIG_BYTES))
    assert measured(tmp_path).code == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz_folders.WORST)
def test_the_worst_index_of_its_length(tmp_path, name):
    write(tmp_path, index=fuzz_folders.worst_json(name, INDEX_BYTES))
    assert measured(tmp_path).code == 2


def shards(folder, count, size_of_all, name="layers.{0}.mlp.experts.{1}.w1.weight"):
    """As many tensors as so many bytes of headers hold, over some files with an index."""
    weight_map, number = {}, 0
    for shard in range(1, count + 1):
        file = f"model-{shard:05}-of-{count:05}.safetensors"
        pieces, size = [], 2
        while True:
            piece = (
                f'"{name.format(number % 60, number)}":{{"dtype":"BF16","shape":[1024,2304],'
                f'"data_offsets":[{len(pieces) * 4718592},{len(pieces) * 4718592 + 4718592}]}},'
            )
            size += len(piece)
            if size > size_of_all // count - 8:
                break
            pieces.append(piece)
            weight_map[name.format(number % 60, number)] = file
            number += 1
        header = ("{" + "".join(pieces)[:-1] + "}").encode()
        (folder / file).write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(folder / file, 8 + len(header) + len(pieces) * 4718592)
    index = json.dumps(dict(metadata={}, weight_map=weight_map))
    write(folder, index=index.encode())
    return number


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 40])
def test_the_headers_beside_an_index_at_its_budget(tmp_path, count):
    assert shards(tmp_path, count, 17_500_000) > 130_000
    assert 0.9 * INDEX_BYTES < (tmp_path / INDEX).stat().st_size <= INDEX_BYTES
    outcome = measured(tmp_path)
    assert "file holds mlp.experts.0.w1.weight, " in outcome.out


@pytest.mark.slow
def test_a_model_of_half_a_million_tensors_is_read_by_its_numbered_files(tmp_path):
    name = "language_model.model.layers.{0}.block_sparse_moe.experts.{1}.w1.weight_packed"
    assert shards(tmp_path, 96, 80_000_000, name) > 450_000
    assert (tmp_path / INDEX).stat().st_size > 4 * INDEX_BYTES
    outcome = measured(tmp_path, seconds=4)  # 80 MB, of which json.loads takes half of the time
    assert outcome.code == 1
    assert "has an unknown layout" in outcome.out
    last = tmp_path / "model-00096-of-00096.safetensors"
    last.rename(tmp_path / "elsewhere.safetensors")
    assert "and no whole sets of files" in measured(tmp_path).err


def test_more_headers_than_the_budget(tmp_path):
    header = b"{" + b" " * (9_000_000 - 2) + b"}"
    files = [f"{x}.safetensors" for x in "abc"]
    write(tmp_path, index=dict(weight_map=dict.fromkeys("a")))
    (tmp_path / INDEX).write_text(json.dumps(dict(weight_map={})))
    for file in files:
        header = encoded({file: EMPTY}).ljust(9_000_000)
        (tmp_path / file).write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / INDEX).write_text(json.dumps(dict(weight_map={x: x for x in files})))
    assert "its files have more than 25000000 bytes of headers" in measured(tmp_path).err


def test_a_header_above_the_budget_is_refused_unread(tmp_path):
    write(tmp_path)
    with open(tmp_path / SINGLE, "wb") as file:
        file.write((2**34).to_bytes(8, "little"))
        file.truncate(2**35)
    outcome = measured(tmp_path)
    assert f"its header claims {2**34} bytes, more than the 12500000 allowed" in outcome.err
    assert outcome.seconds < 0.5
    assert outcome.mebibytes < 32


def test_an_index_above_the_budget_is_refused_unread(tmp_path):
    write(tmp_path, index=b"")
    os.truncate(tmp_path / INDEX, 2**35)
    outcome = measured(tmp_path)
    assert f"{INDEX}: more than {INDEX_BYTES} bytes, and no whole sets of files" in outcome.err
    assert outcome.mebibytes < 32


LONG = "x" * 1_000_000
PREFIX = "model.layers.0.self_attn."


def with_tensor(name, **entry):
    """The released form with one tensor more, of a long name."""
    header = header_of(released()[1])
    end = max(x["data_offsets"][1] for x in header.values())
    return header | {name: dict(dtype="F32", shape=[1], data_offsets=[end, end + 4]) | entry}


LONG_NAMES = {
    "a stranger": (with_tensor(PREFIX + LONG), 1),
    "a prefix": (with_tensor(f"{LONG}.layers.7.self_attn.A_log"), 1),
    "an adapter": (with_tensor(f"{PREFIX}lora_{LONG}"), 1),
    "below a layer": ({f"model.layers.0.{LONG}": EMPTY}, 1),
    "beside a layer": ({f"{PREFIX}{LONG}": EMPTY}, 1),
    "a rate elsewhere": ({f"{LONG}.A_log": EMPTY}, 1),
    "no dtype": (with_tensor(LONG, dtype=LONG), 2),
    "no shape": (with_tensor(LONG, shape=[LONG]), 2),
    "no offsets": (with_tensor(LONG, data_offsets=[-1, 0]), 2),
    "a gap": (with_tensor(LONG, data_offsets=[10**6, 10**6 + 4]), 2),
    "no entry": (encoded({LONG: 1}), 2),
    "twice": (f'{{"{LONG[:1000]}":{{}},"{LONG[:1000]}":{{}}}}'.encode(), 2),
}


@pytest.mark.parametrize("case", LONG_NAMES)
def test_a_long_name_is_cut_in_every_output(tmp_path, case):
    header, code = LONG_NAMES[case]
    write(tmp_path, with_linear(kda_layers=[] if "elsewhere" in case else [1]), header)
    for options in ((), ("--json",)):
        outcome = measured(tmp_path, *options)
        assert outcome.code == code
        assert "xxxxxxx" in outcome.out + outcome.err or (case, options) == ("a prefix", ())
        assert "x" * 81 not in outcome.out + outcome.err
        assert len(outcome.out + outcome.err) < 10_000


def test_a_long_name_of_the_index_is_cut(tmp_path):
    for weight_map in ({LONG: SINGLE}, {"x": LONG}, {"x": f"{LONG[:250]}.safetensors"}):
        write(tmp_path)
        (tmp_path / INDEX).write_text(json.dumps(dict(weight_map=weight_map)))
        (tmp_path / SINGLE).rename(tmp_path / "a.safetensors")
        (tmp_path / INDEX).write_text(
            (tmp_path / INDEX).read_text().replace(SINGLE, "a.safetensors")
        )
        outcome = measured(tmp_path)
        assert outcome.code == 2
        assert "x" * 81 not in outcome.err


def test_a_long_key_of_config_json_is_cut(tmp_path):
    for config in (with_linear(**{LONG: 1}), released()[0] | {f"kda_{LONG}": LONG}):
        outcome = measured(write(tmp_path, config))
        assert outcome.code == 2
        assert "x" * 81 not in outcome.err


@pytest.mark.parametrize("digit", ["\u0663", "\u0967", "\uff13", "\u00b3"])
def test_a_digit_of_another_script_is_no_layer_number(tmp_path, digit):
    tensors = {name.replace("s.0.", f"s.{digit}."): x for name, x in released()[1].items()}
    write(tmp_path, with_linear(kda_layers=[1, 2, 4]), header_of(tensors))
    report = json.loads(measured(tmp_path, "--json").out)
    assert [(x["index"], x["layout"]) for x in report["layers"]] == [
        (0, "none"),
        (1, "low-rank output gate (Kimi-Linear, GLM-5.3)"),
        (3, "none"),
    ]


def test_half_of_a_pair_of_surrogates_is_shown_as_no_letter(tmp_path):
    write(tmp_path, header=with_tensor(f"{PREFIX}a\\\ud800\udc00\udc00"))
    report = json.loads(measured(tmp_path, "--json").out)
    assert report["layers"][0]["faults"][0]["tensor"] == "a\\\U00010000\ufffd"


def test_a_terminal_without_unicode(tmp_path):
    folder = tmp_path / "größe"
    folder.mkdir()
    write(folder, header=with_tensor(f"{PREFIX}\u0663"))
    command = [sys.executable, "-m", "kda_contracts", "check", str(folder)]
    run = subprocess.run(
        command, capture_output=True, env=os.environ | dict(PYTHONIOENCODING="ascii")
    )
    assert run.returncode == 1
    assert rb"gr\xf6\xdfe: 2 KDA layers" in run.stdout
    assert run.stderr == b""


# A closed pipe

CHECK = ("-m", "kda_contracts", "check")
COMMANDS = {
    "check": ((*CHECK, "FOLDER"), 0),
    "check, wrong": ((*CHECK, "FOLDER", "--tp", "3"), 1),
    "check --json": ((*CHECK, "FOLDER", "--json"), 0),
    "check --help": ((*CHECK, "--help"), 0),
    "check nothing --json": ((*CHECK, "FOLDER/nothing", "--json"), 2),
    "kda_jax check": (("-m", "kda_jax", "check", "FOLDER"), 0),
    "kda_jax explain": (("-m", "kda_jax", "explain"), 0),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_reader_that_leaves_changes_nothing(tmp_path, case):
    write(tmp_path)
    command, code = COMMANDS[case]
    command = [sys.executable, *(x.replace("FOLDER", str(tmp_path)) for x in command)]
    first = ["/bin/bash", "-c", '"$@" | head -1; exit ${PIPESTATUS[0]}', "bash", *command]
    run = subprocess.run(first, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (code, "")
    assert run.stdout.count("\n") == 1
    # One that is gone before the first line
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as gone:
        gone.stdout.close()
        assert gone.stderr.read() == b""
    assert gone.returncode == code


def test_the_checks_own_command_says_the_same(tmp_path, capsys):
    """What is measured here is what the command prints."""
    write(tmp_path)
    outcome = measured(tmp_path)
    assert main(["check", str(tmp_path)]) == outcome.code == 0
    assert capsys.readouterr().out == outcome.out


def test_what_a_terminal_obeys_is_not_shown_of_a_files_name(tmp_path):
    write(tmp_path, index=dict(weight_map=dict(x="\x1b[2J\n\u202e.safetensors")))
    assert "\\x1b[2J\\n\\u202e.safetensors: No such file" in measured(tmp_path).err
