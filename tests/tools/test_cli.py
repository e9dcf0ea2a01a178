"""The command line, run in this process."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import pytest
from support import ON_GPU, WITH_TRITON

import kda_contracts
import kda_jax
from kda_contracts import cli as contracts_cli
from kda_contracts.cli import kda_jax as kda_jax_of_contracts
from kda_jax.tools import bench, cli, demo
from kda_jax.tools.synthetic import write_layer

ROOT = Path(__file__).parents[2]
KERNEL = "mosaic_gpu" if ON_GPU else "xla"


def test_demo_prints_a_table(capsys):
    assert cli.main(["demo", "--tp", "16", "--batch", "3", "--steps", "2"]) == 0
    lines = {line[2:17].strip(): line[18:] for line in capsys.readouterr().out.splitlines()}
    assert lines["sizes"] == "B=3, H=2, HV=2, K=128, V=128, S=7; 2 rows live, 1 padded"
    assert lines["ran"] == KERNEL
    assert lines["gate"] == "softplus"
    assert lines["verdict"] == "right"
    assert lines["time per step"].endswith(" us")


@pytest.mark.parametrize(
    ("model", "heads"), [("kimi-linear-48b", 32), ("kimi-k3", 96), ("glm-5.3", 64)]
)
def test_demo_as_json(capsys, model, heads):
    assert (
        cli.main(
            [
                "demo",
                "--model",
                model,
                "--tp",
                str(heads // 2),
                "--batch",
                "2",
                "--steps",
                "3",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert not any(isinstance(x, (dict, list)) for x in result.values())
    assert 0 < result["err_state"] < 2e-6
    assert 0 < result["err_out"] < 4e-6
    assert (result["HV"], result["B"], result["live_rows"], result["implementation"]) == (
        2,
        2,
        1,
        KERNEL,
    )
    assert result["us_per_step"] > 0


def test_one_row_is_not_padded(capsys):
    assert cli.main(["demo", "--tp", "32", "--batch", "1", "--steps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["live_rows"] == 1


def test_demo_fails_where_the_answer_is_wrong(capsys, monkeypatch):
    exact = demo.oracle.packed_decode
    monkeypatch.setattr(
        demo.oracle, "packed_decode", lambda **x: tuple(1.0001 * y for y in exact(**x))
    )
    assert cli.main(["demo", "--tp", "32", "--batch", "2", "--steps", "1"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [dict(untouched=False), dict(err_out=1.0), dict(err_state=1.0)])
def test_one_fault_alone_fails_the_demo(fault):
    right = dict(untouched=True, err_out=0.0, err_state=0.0)
    assert demo.passed(right)
    assert not demo.passed(right | fault)


@pytest.mark.parametrize("name", ["err_out", "err_state"])
def test_an_error_that_is_nan_fails_the_demo(name):
    assert not demo.passed(dict(untouched=True, err_out=0.0, err_state=0.0) | {name: float("nan")})


@pytest.mark.parametrize(("of_out", "of_state"), [(1.01, 1.0), (1.0, 1.001)], ids=["out", "state"])
def test_bench_times_nothing_that_is_wrong(of_out, of_state):
    op = bench.packed_decode("xla")
    bench.check(op, 2, "float32")

    def wrong(pool, inputs):
        out, state = op(pool, inputs)
        return out * jnp.asarray(of_out, out.dtype), state * jnp.float32(of_state)

    with pytest.raises(SystemExit, match="wrong answer, relative error"):
        bench.check(wrong, 2, "float32")


def test_explain_prints_the_implementations(capsys):
    assert cli.main(["explain", "--model", "kimi-k3", "--K", "60"]) == 0
    out = capsys.readouterr().out
    assert "HV=96, K=60" in out
    assert f"-> {'triton' if WITH_TRITON else 'xla':<11} runs" in out
    assert "K=60 is not a multiple of 32" in out
    assert ("the default backend is cpu, not gpu; K=60" in out) != ON_GPU


NUMBERS = [
    ("demo", "--tp"),
    ("demo", "--batch"),
    ("demo", "--steps"),
    *(("explain", f"--{x}") for x in ("H", "HV", "K", "V", "S", "tokens", "batch", "tp")),
    ("check folder", "--tp"),
]
WORDS = [
    ("demo", "--model", "kimi-linear-48b"),
    ("demo", "--implementation", "triton"),
    ("explain", "--model", "glm-5.3"),
    ("explain", "--op", "recurrent_kda"),
    ("explain", "--pool-dtype", "bfloat16"),
    ("bench", "--pool-dtype", "float32"),
]
WRONG = [
    *(
        (command, option, value, f"argument {option}: {value[:40]} is not a positive number\n")
        for command, option in NUMBERS
        for value in ("abc", "0", "-3", "1.5", "", "9" * 5000)
    ),
    *(
        (command, option, "nope", f"argument {option}: invalid choice: 'nope'")
        for command, option, _ in WORDS
    ),
    *(
        ("bench", "--shapes", x, f"argument --shapes: {x} is not of the form BxHV,")
        for x in ("8", "8x", "0x3", "8x32,")
    ),
    *(
        (command, "--foo", "1", "unrecognized arguments: --foo 1\n")
        for command in ("demo", "explain", "check folder", "bench")
    ),
    ("check", "--json", "--tp=2", "the following arguments are required: checkpoint"),
]


@pytest.mark.parametrize(("command", "option", "value", "message"), WRONG, ids=lambda x: x[:30])
def test_a_wrong_option_is_named_under_its_own_commands_usage(
    capsys, command, option, value, message
):
    for start in (cli.main, kda_jax_of_contracts):
        with pytest.raises(SystemExit) as caught:
            start([*command.split(), option, value])
        assert caught.value.code == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"usage: kda-jax {command.split()[0]} ")
        assert message in printed


@pytest.mark.parametrize(("command", "option", "value"), WORDS)
def test_each_choice_of_the_table_is_one(command, option, value, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, option, value, "--help"])
    assert caught.value.code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--tp", "5"], "32 heads cannot be split over 5 ranks"),
        (
            ["demo", "--implementation", "mosaic_gpu", "--checkpoint", "nowhere"],
            "no such file or folder",
        ),
        (["explain", "--H", "3"], "Invalid head config"),
    ],
)
def test_what_cannot_run_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("start", [cli.main, kda_jax_of_contracts, contracts_cli.main])
def test_the_version(capsys, start):
    with pytest.raises(SystemExit) as caught:
        start(["--version"])
    assert caught.value.code == 0
    package = kda_contracts if start is contracts_cli.main else kda_jax
    name = package.__name__.replace("_", "-")
    assert capsys.readouterr().out == f"{name} {package.__version__}\n"


def test_a_check_by_headers_loads_no_jax(tmp_path):
    write_layer(tmp_path, "kimi-linear-48b")
    code = (
        "import sys; from kda_contracts.cli import kda_jax; "
        f"code = kda_jax(['check', {str(tmp_path)!r}]); print(code, 'jax' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert printed.endswith("0 False\n")


def test_the_script_starts_there():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"kda-jax": "kda_contracts.cli:kda_jax"}


def test_the_script_passes_a_check_by_values_on(capsys, tmp_path):
    write_layer(tmp_path, "glm-5.3")
    (tensors,) = tmp_path.glob("*.safetensors")
    assert kda_jax_of_contracts(["check", str(tmp_path), "--values"]) == 0
    assert "its tail" not in capsys.readouterr().out
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-2] + b"\xff\xff")  # NaN, in whichever tensor is the last
    assert kda_jax_of_contracts(["check", str(tmp_path)]) == 0
    for option in ("--values", "--val"):
        assert kda_jax_of_contracts(["check", option, str(tmp_path)]) == 1
    assert "must be finite" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        kda_jax_of_contracts(["check", "--help"])
    assert "--values" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_json_file_in_place_of_the_folder(capsys, tmp_path, name):
    write_layer(tmp_path, "kimi-k3")
    if name not in {path.name for path in tmp_path.iterdir()}:
        (tmp_path / name).write_text(' \n{"weight_map": {}}')
    for start in (cli.main, kda_jax_of_contracts, contracts_cli.main):
        assert start(["check", str(tmp_path / name)]) == 2
        error = f"{tmp_path / name}: this is JSON: give the folder"
        assert capsys.readouterr().err == f"cannot be judged: {error}\n"
        assert start(["check", str(tmp_path / name), "--json"]) == 2
        assert json.loads(capsys.readouterr().out) == {"ok": False, "error": error}


def test_check_is_part_of_it(capsys, tmp_path):
    write_layer(tmp_path, "glm-5.3")
    assert cli.main(["check", str(tmp_path), "--tp", "8"]) == 0
    assert "each of 8 ranks holds" in capsys.readouterr().out
    assert cli.main(["check", str(tmp_path / "nothing")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_demo_on_a_checkpoint(capsys, tmp_path):
    write_layer(tmp_path, "kimi-k3")
    assert (
        cli.main(
            [
                "demo",
                "--checkpoint",
                str(tmp_path),
                "--tp",
                "48",
                "--batch",
                "2",
                "--steps",
                "2",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["HV"], result["gate"]) == (2, "safe, lower_bound -5.0")


@pytest.mark.skipif(ON_GPU, reason="asks what a CPU says")
def test_bench_wants_a_gpu(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--shapes", "1x3"])
    assert "on a GPU only" in capsys.readouterr().err
