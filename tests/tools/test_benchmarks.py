"""The benchmarks at toy size on this machine; the oracle before each, fed wrong answers."""

import dataclasses
import functools
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU, running

import kda_jax
from kda_jax.tools import bench, demo, oracle, timing

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import layer_decode
import memcheck
import prefill_times
import run_all
import serving
import stacked_pools
import train
import tuning
import update_times


def scaled(op, *factors):
    """The op with each of its results times a factor; one that is a tree, leaf by leaf."""

    def wrong(*operands):
        return tuple(
            jax.tree.map(lambda x, factor=factor: (x * factor).astype(x.dtype), result)
            for result, factor in zip(op(*operands), factors, strict=True)
        )

    return wrong


def test_near_wants_the_shape_and_the_values():
    right = np.linspace(1, 2, 12).reshape(3, 4)
    oracle.must_be_near("x", right.astype(np.float32), right, 1e-6)
    for wrong in (right * 1.001, right[:1], right * np.nan):
        with pytest.raises(SystemExit, match="nothing is timed"):
            oracle.must_be_near("x", wrong, right, 1e-6)


@pytest.mark.parametrize("spoiled", [{"untouched": False}, {"err_out": 1.0}, {"err_state": 1.0}])
def test_the_demo_passes_only_where_all_is_right(spoiled):
    right = {"untouched": True, "err_out": 0.0, "err_state": 0.0}
    assert demo.passed(right)
    assert not demo.passed(right | spoiled)


@pytest.mark.parametrize("factors", [(1.01, 1.0), (1.0, 1.001)])
def test_packed_decode_is_not_timed_with_a_wrong_answer(factors):
    op = bench.packed_decode("xla")
    bench.check(op, 2, "float32")
    with pytest.raises(SystemExit, match=r"wrong answer.*nothing is timed"):
        bench.check(scaled(op, *factors), 2, "float32")


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["y", "conv", "state"])
def test_the_layer_is_not_timed_with_a_wrong_answer(what):
    config = layer_decode.CONFIGS["toy"]
    step = functools.partial(kda_jax.kda_decode, config=config)
    factor = {"y": 1.0, "conv": 1.0, "state": 1.0} | {what: 1.1}

    def wrong(*operands):
        y, cache = step(*operands)
        after = kda_jax.KDACache(
            cache.conv * jnp.bfloat16(factor["conv"]), cache.state * factor["state"]
        )
        return y * jnp.bfloat16(factor["y"]), after

    layer_decode.check(step, config, 3)
    with pytest.raises(SystemExit, match=f"kda_decode, {what}: wrong answer"):
        layer_decode.check(wrong, config, 3)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [0, 1])
@pytest.mark.parametrize("factors", [(1.02, 1.0), (1.0, 1.02)])
def test_prefill_is_not_timed_with_a_wrong_answer(factors, spoiled):
    steps = [
        functools.partial(function, implementation="xla")
        for function in (prefill_times.recurrence, prefill_times.with_gates)
    ]
    prefill_times.check(*steps, 70, 1)
    steps[spoiled] = scaled(steps[spoiled], *factors)
    with pytest.raises(SystemExit, match=r"chunk_kda.*wrong answer"):
        prefill_times.check(*steps, 70, 1)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["out", "pool", "intermediate"])
def test_the_update_is_not_timed_with_a_wrong_answer(what):
    op = update_times.update("xla", True)
    factor = {"out": 1.01, "pool": 1.001, "intermediate": 1.001}[what]

    def wrong(pool, x):
        (out, states), after = op(pool, x)
        spoiled = {"out": out, "pool": after, "intermediate": states[0]}
        spoiled[what] = (spoiled[what] * factor).astype(spoiled[what].dtype)
        return (spoiled["out"], [spoiled["intermediate"]]), spoiled["pool"]

    update_times.check(op, 3, 4, 2)
    with pytest.raises(SystemExit, match=f"T = 3, {what}: wrong answer"):
        update_times.check(wrong, 3, 4, 2)


@pytest.mark.skipif(ON_GPU, reason="asks what a CPU says")
@pytest.mark.parametrize("script", [layer_decode, prefill_times, serving, train, update_times])
def test_without_a_gpu_only_a_toy_is_timed(script):
    with pytest.raises(ValueError, match="on a GPU only"):
        script.main([])


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "times"),
    [
        (layer_decode, ["--batches", "3"], ("layer_us", "matmuls_us", "multiply_us", "ratio")),
        (prefill_times, [], ("recurrence_ms", "gates_ms", "peak_bytes")),
        (update_times, [], ("kernel_us",)),
    ],
)
def test_a_toy_run(script, arguments, times):
    results = script.main(["--toy", *arguments])
    assert results["finished"]
    assert results["toy"]
    assert results["rows"]
    for row in results["rows"]:
        assert all(row[name] > 0 for name in times)


@pytest.mark.slow
def test_a_toy_run_of_serving():
    results = serving.main(["--toy", "--only", "drafts"])
    assert results["finished"]
    assert results["drafts"][0]["verify_and_commit_us"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong", "what"),
    [
        ("kda_commit", lambda cache, *rest: cache, "kda_commit, state"),
        pytest.param(
            "kda_prefill",
            lambda params, x, cache, *rest, **options: (x, cache),
            "single tokens",
            marks=pytest.mark.long,
        ),
    ],
)
def test_serving_is_not_timed_with_a_wrong_answer(monkeypatch, name, wrong, what):
    monkeypatch.setattr(serving.kda_jax, name, wrong)
    check = serving.check_drafts if name == "kda_commit" else serving.check_single
    with pytest.raises(SystemExit, match=f"{what}.*: wrong answer"):
        check(serving.CONFIGS["toy"], serving.TOY)


@pytest.mark.slow
def test_a_toy_run_of_training_names_the_peers_that_are_not_here(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'jla'")

    monkeypatch.setattr(train, "jla_op", missing)
    monkeypatch.setattr(train, "is_right", lambda *operands: True)  # the next test's
    results = train.main(["--toy", "--only", "xla,jla", "--lengths", "2x35", "--tokens", "70"])
    assert results["finished"]
    assert "No module named 'jla'" in results["absent"]["jla"]
    (row,) = results["rows"]
    assert (row["op"], row["length"]) == ("xla", "2x35")
    assert min(row["compile_s"], row["step_ms"], row["temporary_bytes"]) > 0


@pytest.mark.slow
def test_training_is_not_timed_with_a_wrong_gradient():
    step = train.in_jax(functools.partial(train.chunk_kda, implementation="xla"))

    def wrong(*operands, l2norm):
        out, gradients = step(*operands, l2norm=l2norm)
        return out, gradients | dict(log_decay=gradients["log_decay"] * 1.03)

    absent = {}
    assert not train.is_right("jla", wrong, 66, 1, absent)
    assert "gradient of log_decay: wrong answer" in absent["jla"]
    with pytest.raises(SystemExit, match="gradient of log_decay: wrong answer"):
        train.is_right("xla", wrong, 66, 1, {})
    (row,) = train.errors(["random keys"], {"jla": wrong}, 66, 1)
    assert row["jla"]["log_decay"] == pytest.approx(0.03, abs=2e-3)
    assert row["jla"]["beta"] < 5e-3


@pytest.mark.slow
def test_whole_headers_are_judged_in_every_form():
    """The script ends with an error where a check does."""
    script = Path(__file__).parents[2] / "benchmarks" / "headers.py"
    for model in ("ling-3.0-tiny", "glm-5.3-flash"):
        command = [sys.executable, str(script), "--only", model, "--repeats", "1"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout.count("ranks:") == 4


@pytest.mark.long
@pytest.mark.slow
def test_a_toy_run_of_decode(capsys):
    import decode_times

    assert decode_times.main(["--toy", "--implementations", "xla"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["2x3", "5x2"]


def test_kernel_times_leave_out_what_runs_once_a_loop():
    """Four calls: a kernel of 10 us, a helper of 2 us twice a call, and the loop's own copy."""
    events = [("main", us) for us in (9.0, 10.0, 10.0, 11.0)]
    events += [("helper", 2.0)] * 8 + [("copy", 500.0)]
    middle, low, high, a_call = timing.kernel_times(events, 4)
    assert middle == 10 + 2 * 2
    assert low < middle < high
    assert a_call == 3


def test_the_variants_of_a_config_begin_with_the_chosen_one_and_are_distinct():
    for B, HV, T in ((1, 32, 1), (256, 32, 1), (32, 32, 4)):
        sizes = tuning.sizes_of(B, HV, T)
        configs = tuning.variants("mosaic_gpu", sizes, "float32")
        assert configs[0] == tuning.chosen("mosaic_gpu", sizes, "float32")
        assert len(set(configs)) == len(configs) > 2
        assert all(config.tile_rows <= 128 for config in configs)


@pytest.mark.slow
def test_the_kernel_runs_under_the_config_that_is_timed():
    own = tuning.chosen("mosaic_gpu", tuning.sizes_of(1, 2, 1), "float32")
    config = dataclasses.replace(own, tile_rows=2 * own.tile_rows)
    with running("mosaic_gpu"), tuning.under("mosaic_gpu", config):
        tuning.check("mosaic_gpu", "float32", 1, 2, 1)


def test_a_config_that_no_kernel_asked_for_is_not_timed():
    own = tuning.chosen("mosaic_gpu", tuning.sizes_of(1, 2, 1), "float32")
    with pytest.raises(SystemExit, match="did not ask"), tuning.under("mosaic_gpu", own):
        tuning.check("xla", "float32", 1, 2, 1)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="runs Pallas's interpreter")
def test_stacked_pools_at_toy_size():
    with running("mosaic_gpu"):
        rows = stacked_pools.main(["--toy"])["rows"]
    assert [(x["layers"], x["barrier"]) for x in rows[:2]] == [("looped", True), ("looped", False)]
    assert len(rows) == 6
    assert all(max(row["largest_error_by_layer"]) == 0 for row in rows)
    assert not any(row["fused"] for row in rows)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="a toy's sizes are not for kernels")
def test_the_memory_checkers_program_at_toy_size(capsys):
    memcheck.main(["--here", "--toy"])
    ran, errors = memcheck.counted(capsys.readouterr().out)
    assert len(ran) == 5
    assert errors is None


def test_the_memory_checkers_errors_are_counted():
    text = "ran: a, b\n========= Invalid __global__ read\n========= ERROR SUMMARY: {}\n"
    assert memcheck.counted(text.format("0 errors")) == (["a, b"], 0)
    assert memcheck.counted(text.format("17 errors")) == (["a, b"], 17)
    assert memcheck.counted(text.format("1 error")) == (["a, b"], 1)
    assert memcheck.counted("ran: a\n") == (["a"], None)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Four parts in place of the real ones: right, failing, endless, and right again."""
    right = (
        "import json, sys; json.dump(sys.argv, open(sys.argv[sys.argv.index('--output') + 1], 'w'))"
    )
    scripts = {"one": right, "two": "print('no such thing'); raise SystemExit(3)"}
    scripts |= {"three": "import time; time.sleep(60)", "four": right}
    made = {}
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
        limit = 3 if name == "three" else 60
        made[name] = run_all.Part(str(tmp_path / f"{name}.py"), ("--x", "1"), limit)
    monkeypatch.setattr(run_all, "PARTS", made)
    return tmp_path / "out"


def test_one_failing_part_does_not_stop_the_rest(parts, capsys):
    bundle, start = parts.with_suffix(".tar"), time.perf_counter()
    code = run_all.main(
        ["--folder", str(parts), "--commit", "abc", "--bundle", str(bundle), "--sglang", "/x"]
    )
    assert code == 1
    assert time.perf_counter() - start < 50
    printed = capsys.readouterr().out
    assert "two: exit code 3" in printed
    assert "| no such thing" in printed
    assert "three: past its limit" in printed
    assert "2 of 4 parts; not to their end: ['two', 'three']" in printed
    made = json.loads((parts / "nvidia-h200-four.json").read_text())
    assert made[1:3] == ["--x", "1"]
    assert made[-2:] == ["--commit", "abc"]
    with tarfile.open(bundle) as file:
        assert {"nvidia-h200-one.json", "nvidia-h200-four.json", "two.txt"} <= {*file.getnames()}


def test_only_the_named_parts_run(parts, capsys):
    assert run_all.main(["--folder", str(parts), "--only", "four"]) == 0
    assert [path.name for path in parts.glob("*.json")] == ["nvidia-h200-four.json"]
    with pytest.raises(SystemExit):
        run_all.main(["--folder", str(parts), "--only", "four,five"])
    assert "there is no part five" in capsys.readouterr().err


def test_every_parts_script_is_there():
    for part in run_all.PARTS.values():
        assert (run_all.ROOT / part.script).exists()
