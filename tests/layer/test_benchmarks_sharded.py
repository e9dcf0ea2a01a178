"""benchmarks/sharded.py on two host devices, at toy sizes; its checks, fed what is wrong."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import ON_GPU

from kda_jax.tools import records

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import sharded

on_the_host = pytest.mark.skipif(ON_GPU, reason="needs several devices, at the CPU's compile times")


@pytest.mark.long
@on_the_host
@pytest.mark.slow
def test_a_toy_run_over_two_devices():
    results = sharded.main(["--devices", "2", "--toy"])
    assert results["finished"]
    compared = {(entry["what"], entry["mesh"]) for entry in results["equal"]}
    for mesh in ("tp=2", "dp=2"):
        assert {f"{step}: y" for step in ("decode", "prefill")} <= {
            what for what, where in compared if where == mesh
        }
        assert ("recurrence: state", mesh) in compared
    assert all(entry["equal"] for entry in results["equal"])
    assert not any(entry["all-gather"] for entry in results["collectives"])
    assert "faults" not in results
    assert {(row["what"].split()[0], row["mesh"]) for row in results["rows"]} == {
        *(("recurrence", mesh) for mesh in ("tp=2", "dp=2")),
        *(("decode", mesh) for mesh in ("tp=2", "dp=2")),
        ("prefill", "tp=2"),
    }
    assert all(row["scaling"] > 0 for row in results["rows"])


@pytest.mark.parametrize(
    ("got", "limit"),
    [
        ([1.0, 1.001], 1e-5),
        ([1.0, np.nan], 1e-5),
        ([1.0, 1.0, 1.0], 1e-5),
        ([1.0, 1.0 + 2**-23], 0.0),
    ],
)
def test_a_wrong_answer_ends_the_run(got, limit):
    record, right = records.Record({}), np.ones(2, np.float32)
    sharded.agree(record, "y", "tp=2", right.copy(), right, limit)
    with pytest.raises(SystemExit, match="y, tp=2: not what one device gives"):
        sharded.agree(record, "y", "tp=2", np.array(got, np.float32), right, limit)
    assert [entry["equal"] for entry in record.results["equal"]] == [True, False]


def test_a_zero_of_the_other_sign_has_other_bits():
    with pytest.raises(SystemExit):
        sharded.agree(records.Record({}), "y", "tp=2", np.array([1, -0.0]), np.array([1, 0.0]), 0.0)


@on_the_host
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_program_that_gathers_or_copies_is_seen():
    _, (cut, *_) = sharded.cuts_of(2)
    x = sharded.zeros(cut, jax.ShapeDtypeStruct((4,), jnp.float32), P("tp"))
    record, whole = records.Record({}), NamedSharding(cut.mesh, P())

    def add(x):
        return x + 1

    def add_and_show(x):
        return x + 1, x - 1

    sharded.program(record, "step", cut, add, x, donated=0, all_reduces=0)
    with pytest.raises(SystemExit, match="wrong collectives"):
        sharded.program(record, "step", cut, add, x, donated=0, all_reduces=1)
    with pytest.raises(SystemExit, match="wrong collectives"):
        sharded.program(
            record, "step", cut, add_and_show, x, donated=0, out_shardings=(x.sharding, whole)
        )
    assert "faults" not in record.results
    sharded.program(record, "step", cut, jnp.sum, x, donated=0)
    assert len(record.results["faults"]) == 1
