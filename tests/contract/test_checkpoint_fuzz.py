"""config.json and the index under fuzz: a verdict or one clear line, never another error.

The headers' own fuzz is in test_checkpoint.py.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_contracts import CHECKPOINT, BadFileError, ContractError, check_checkpoint
from kda_jax import KDAConfig, config_from_hf
from kda_jax.tools.synthetic import write_safetensors

LOW_RANK = CHECKPOINT[0]
SIZES = dict.fromkeys(("H", "HV", "K", "V", "D", "W"), 2)
LINEAR = dict(num_heads=2, head_dim=2, short_conv_kernel_size=2, kda_layers=[1])
CONFIGS = (
    dict(hidden_size=2, rms_norm_eps=1e-5, linear_attn_config=LINEAR | dict(full_attn_layers=[])),
    dict(
        text_config=dict(hidden_size=2, linear_attn_config=LINEAR | dict(gate_lower_bound=-5.0)),
        rms_norm_eps=1e-5,
    ),
    dict(
        model_type="kda", hidden_size=2, num_heads=2, head_dim=2, num_v_heads=2, conv_size=2,
        expand_v=1.0, safe_gate=False, lower_bound=None, norm_eps=1e-5,
    ),
)  # fmt: skip
FILES = ("model-1.safetensors", "model-2.safetensors")

# Numbers that count, and that almost count; and such as no float64 holds.
NUMBERS = [0, 1, 2, 3, -1, -5.0, 2.0, 0.5, 1e-5, 2**31, 2**63, 1e308, 10**30]
NUMBERS += [float("nan"), float("-inf")]
TOO_LARGE = [10**400, -(10**400)]
numbers = st.sampled_from(NUMBERS) | st.integers() | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
names = st.sampled_from(
    [*FILES, "nothing.safetensors", "../model-1.safetensors", "/etc/passwd", "", ".", "\0", "a\nb"]
)

pytestmark = pytest.mark.slow  # it hangs on no JAX version


def entries(table):
    """(inner table, key) of every entry, at any depth."""
    for key in sorted(table):
        yield table, key
        if isinstance(table[key], dict):
            yield from entries(table[key])


def changed(data, table):
    """The table with one or two of its entries, at any depth, replaced, removed or renamed."""
    table = json.loads(json.dumps(table))
    for _ in range(data.draw(st.integers(1, 2))):
        if not (places := list(entries(table))):
            break
        inner, key = data.draw(st.sampled_from(places))
        what = data.draw(st.sampled_from(["number", "list", "value", "removed", "another name"]))
        if what == "number":
            inner[key] = data.draw(numbers)
        elif what == "list":
            inner[key] = data.draw(st.lists(numbers, max_size=3))
        elif what == "value":
            inner[key] = data.draw(values)
        else:
            old = inner.pop(key)
            if what == "another name":
                inner[data.draw(st.text(max_size=5))] = old
    return table


def spoilt(data, text):
    """The text with some bytes flipped, or cut short."""
    content = bytearray(text.encode())
    if data.draw(st.booleans()):
        return bytes(content[: data.draw(st.integers(0, len(content)))])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    return bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One valid layer in two files with an index."""
    folder = tmp_path_factory.mktemp("fuzz")
    tensors = {
        f"model.layers.0.self_attn.{tensor.name}": (
            "F32" if tensor.name in ("A_log", "dt_bias") else "BF16",
            tensor.shape(SIZES),
        )
        for tensor in LOW_RANK.tensors
    }
    for which, file in enumerate(FILES):
        part = sorted(tensors)[which::2]
        write_safetensors(folder / file, {name: tensors[name] for name in part})
    weight_map = {name: FILES[n % 2] for n, name in enumerate(sorted(tensors))}
    index = dict(metadata={}, weight_map=weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIGS[0]))
    assert check_checkpoint(folder).ok
    return folder


def judge(folder, verdicts):
    try:
        report = check_checkpoint(folder)
    except BadFileError as error:
        assert "\n" not in str(error)
        verdicts["refused"] += 1
    else:
        assert str(report)
        verdicts["ok" if report.ok else "faulty"] += 1


def fuzz(folder, file, content):
    """Judges the folder under 400 contents of one file; the valid one is back behind it."""
    path, verdicts = folder / file, dict(ok=0, faulty=0, refused=0)
    valid = path.read_bytes()

    @settings(max_examples=400, derandomize=True, deadline=None, database=None)
    @given(data=st.data())
    def run(data):
        path.write_bytes(content(data, valid))
        judge(folder, verdicts)

    try:
        run()
    finally:
        path.write_bytes(valid)
    return verdicts


@pytest.mark.slow
def test_a_fuzzed_config_gives_a_verdict_or_a_clear_error(folder):
    def content(data, _):
        config = data.draw(st.sampled_from(CONFIGS))
        if data.draw(st.integers(0, 4)) == 0:
            return spoilt(data, json.dumps(config))
        return json.dumps(changed(data, config)).encode()

    verdicts = fuzz(folder, "config.json", content)
    assert min(verdicts["ok"], verdicts["refused"]) > 10
    assert verdicts["faulty"]


def judge_with_each_number(folder, config, numbers):
    """Puts each number, and a list of it, at each place of the config in turn."""
    path, verdicts = folder / "config.json", dict(ok=0, faulty=0, refused=0)
    valid, text = path.read_bytes(), json.dumps(config)
    wrong = [x for number in numbers for x in (number, [number])]
    try:
        for place in range(len(list(entries(config)))):
            for x in wrong:
                changed = json.loads(text)
                inner, key = list(entries(changed))[place]
                inner[key] = x
                path.write_text(json.dumps(changed))
                judge(folder, verdicts)
    finally:
        path.write_bytes(valid)
    return verdicts


@pytest.mark.parametrize("config", CONFIGS, ids=["flat", "text_config", "fla"])
def test_any_number_anywhere_in_a_config_is_judged(folder, config):
    assert judge_with_each_number(folder, config, NUMBERS)["refused"] > 10


@pytest.mark.parametrize("config", CONFIGS, ids=["flat", "text_config", "fla"])
def test_a_number_beyond_float64_anywhere_in_a_config_is_judged(folder, config):
    judge_with_each_number(folder, config, TOO_LARGE)


@pytest.mark.slow
def test_a_fuzzed_index_gives_a_verdict_or_a_clear_error(folder):
    def content(data, valid):
        index = json.loads(valid)
        kind = data.draw(st.sampled_from(["files", "values", "bytes"]))
        if kind == "bytes":
            return spoilt(data, valid.decode())
        if kind == "values":
            return json.dumps(changed(data, index)).encode()
        weight_map = index["weight_map"]
        for name in data.draw(st.lists(st.sampled_from(sorted(weight_map)), max_size=3)):
            weight_map[name] = data.draw(names)
        return json.dumps(index).encode()

    verdicts = fuzz(folder, "model.safetensors.index.json", content)
    assert min(verdicts["ok"], verdicts["refused"]) > 10


@pytest.mark.slow
def test_a_fuzzed_config_makes_a_layers_sizes_or_a_clear_error():
    made = dict(made=0, refused=0)

    @settings(max_examples=400, derandomize=True, deadline=None, database=None)
    @given(data=st.data())
    def run(data):
        config = changed(data, data.draw(st.sampled_from(CONFIGS)))
        try:
            assert isinstance(config_from_hf(config), KDAConfig)
            made["made"] += 1
        except (BadFileError, ContractError):
            made["refused"] += 1

    run()
    assert min(made.values()) > 10
