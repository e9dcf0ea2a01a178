"""The benchmarks at toy size on this machine; the oracle before each, fed wrong answers."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU

import kda_jax
from kda_jax.tools import bench, oracle, timing

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import layer_decode
import prefill_times
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


@pytest.mark.parametrize("factors", [(1.01, 1.0), (1.0, 1.001)])
def test_packed_decode_is_not_timed_with_a_wrong_answer(factors):
    op = bench.packed_decode("xla")
    bench.check(op, 2, "float32")
    with pytest.raises(SystemExit, match=r"wrong answer.*nothing is timed"):
        bench.check(scaled(op, *factors), 2, "float32")


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
    with pytest.raises(SystemExit, match="chunk_kda.*wrong answer"):
        prefill_times.check(*steps, 70, 1)


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
@pytest.mark.parametrize("script", [layer_decode, prefill_times, update_times])
def test_without_a_gpu_only_a_toy_is_timed(script):
    with pytest.raises(ValueError, match="on a GPU only"):
        script.main([])


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
