"""Which implementation runs, and what is said of the others."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SHAPES, make_call
from support import ON_GPU, WITH_TRITON

import kda_jax


def structs(shape):
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in make_call(SHAPES[shape]).operands.items()
    }


def test_auto_takes_the_first_that_can_run():
    explained = kda_jax.explain(**structs("k64_v32"))
    assert explained.implementation == ("mosaic_gpu" if ON_GPU else "xla")
    assert explained.sizes == SHAPES["k64_v32"]
    assert kda_jax.explain(**structs("k60_v24")).implementation == (
        "triton" if WITH_TRITON else "xla"
    )


def test_explain_says_why_not():
    explained = kda_jax.explain(**structs("k60_v24"))
    assert list(explained.reasons) == ["mosaic_gpu", "triton", "xla"]
    assert (
        "K=60 is not a multiple of 32 up to 256; use implementation='xla'"
        in explained.reasons["mosaic_gpu"]
    )
    assert explained.reasons[explained.implementation] is None
    chosen = [line for line in str(explained).splitlines() if line.startswith("  -> ")]
    assert chosen == [f"  -> {explained.implementation:<11} runs"]


@pytest.mark.skipif(ON_GPU, reason="asks what a CPU says")
def test_explain_on_a_cpu():
    assert (
        kda_jax.explain(**structs("k64_v32")).reasons["mosaic_gpu"]
        == "the default backend is cpu, not gpu"
    )


def test_explain_takes_arrays_and_refuses_as_packed_decode_does():
    call = make_call(SHAPES["k64_v32"])
    assert (
        kda_jax.explain(**call.operands, lower_bound=-5.0, implementation="xla").reasons["xla"]
        is None
    )
    with pytest.raises(kda_jax.ContractError):
        kda_jax.explain(**call.operands | {"dt_bias": np.zeros(4, np.float32)})


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("k60_v24", "K=60 is not a multiple of 32 up to 256; use implementation='xla' or 'auto'"),
        ("k100_v7", "K=100 is not a multiple of 32"),
    ],
)
def test_a_named_implementation_runs_or_raises(shape, reason):
    with pytest.raises(NotImplementedError, match=reason):
        kda_jax.packed_decode(**make_call(SHAPES[shape]).operands, implementation="mosaic_gpu")


def test_an_unknown_name():
    with pytest.raises(
        ValueError, match="must be 'auto', 'mosaic_gpu', 'triton' or 'xla' \\(got 'cuda'\\)"
    ):
        kda_jax.packed_decode(**make_call(SHAPES["k64_v32"]).operands, implementation="cuda")


def test_a_symbolic_batch_is_for_xla():
    B = jax.export.symbolic_shape("B")[0]
    operands = structs("k64_v32")
    for name in ("mixed_qkv", "a", "b", "ssm_state_indices"):
        operands[name] = jax.ShapeDtypeStruct((B, *operands[name].shape[1:]), operands[name].dtype)
    exported = jax.export.export(
        jax.jit(lambda x: kda_jax.packed_decode(**x, implementation="xla"))
    )(operands)
    call = make_call(SHAPES["k64_v32"])
    expected = kda_jax.packed_decode(**call.operands, implementation="xla")
    got = exported.call({name: jnp.asarray(x) for name, x in call.operands.items()})
    assert np.asarray(got[0]).tobytes() == np.asarray(expected[0]).tobytes()
    with pytest.raises(
        NotImplementedError, match="B is symbolic, and a kernel's grid needs a number"
    ):
        jax.export.export(
            jax.jit(lambda x: kda_jax.packed_decode(**x, implementation="mosaic_gpu"))
        )(operands)


@pytest.mark.skipif(ON_GPU, reason="asks what a CPU says")
def test_a_kernel_on_a_cpu_fails_with_jaxs_own_message():
    with pytest.raises(Exception, match=r"(?i)cpu"):
        kda_jax.packed_decode(**make_call(SHAPES["k64_v32"]).operands, implementation="mosaic_gpu")


def test_importing_kda_jax_loads_no_kernel_backend():
    program = (
        "import sys, kda_jax; print([m for m in sys.modules if 'pallas' in m or m == 'triton'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
