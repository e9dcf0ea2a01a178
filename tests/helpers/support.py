"""Comparisons and ways to run. test_support.py feeds each comparison a wrong answer."""

import contextlib
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from cases import GATES, make_call, rounding
from jax.experimental.pallas import mosaic_gpu as plgpu

import kda_jax
from kda_jax.tools import oracle

jax.config.update("jax_num_cpu_devices", 8)  # before the first backend starts: meshes without a GPU

ON_GPU = jax.default_backend() == "gpu"
WITH_TRITON = (
    ON_GPU and importlib.util.find_spec("jax_triton") is not None
)  # it has no interpreter for a CPU
IMPLEMENTATIONS = ("xla", "mosaic_gpu", *(("triton",) if WITH_TRITON else ()))
STATE_LIMIT = 2e-6  # relative norm, float32 pools
ORACLE_OPTIONS = ("scale", "use_qk_l2norm_in_kernel", "lower_bound", "allow_neg_eigval")


def running(implementation):
    """A context in which it runs here: for a kernel on a CPU, Pallas's interpreter."""
    if implementation == "xla" or ON_GPU:
        return contextlib.nullcontext()
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())


def decode(operands, implementation, **options):
    """packed_decode where the implementation runs here. NumPy operands go to the device first."""
    operands = {
        name: x if isinstance(x, jax.Ref) else jnp.asarray(x) for name, x in operands.items()
    }
    with running(implementation):
        return kda_jax.packed_decode(**operands, implementation=implementation, **options)


def assert_near(got, expected, limit):
    """Finite, of one shape, and near in the norm and in the worst element."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    assert np.isfinite(got).all(), "not finite"
    if not expected.size:
        return
    norm, worst = np.linalg.norm(expected), np.abs(expected).max()
    assert np.linalg.norm(got - expected) <= limit * norm, (
        f"{np.linalg.norm(got - expected) / norm:.2e} > {limit:.2e}"
    )
    assert np.abs(got - expected).max() <= 8 * limit * worst, (
        f"worst {np.abs(got - expected).max() / worst:.2e}"
    )


def assert_near_but_for_nans(got, expected, limit):
    """NaN in the same places, and near everywhere else."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert np.array_equal(np.isnan(got), np.isnan(expected)), "NaN in other places"
    assert_near(got[~np.isnan(got)], expected[~np.isnan(expected)], limit)


def assert_rounded(got, expected, limit):
    """`got` is `expected` rounded to nearest even, but where `limit` may carry it over a tie."""
    dtype = np.asarray(got).dtype
    assert_near(got, expected, limit + rounding(dtype))
    if dtype != np.float32 and np.asarray(got).size >= 200:
        wrong = np.mean(np.asarray(got) != np.asarray(expected).astype(dtype))
        assert wrong <= 0.01, f"{wrong:.1%} of the elements are not the nearest {dtype}"


def assert_same_bits(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes(), "bits differ"


def assert_meets_oracle(call, out, state, **options):
    """Against the oracle: live rows near, padded rows zero, all other slots bit for bit."""
    expected_out, expected_state = oracle.packed_decode(
        **call.operands, **{name: x for name, x in options.items() if name in ORACLE_OPTIONS}
    )
    out, state = np.asarray(out), np.asarray(state)
    assert out.shape == (call.sizes.B, 1, call.sizes.HV, call.sizes.V)
    assert state.dtype == call.operands["initial_state"].dtype
    assert_rounded(out[call.live], expected_out[call.live], STATE_LIMIT)
    assert_rounded(state[call.slots], expected_state[call.slots], STATE_LIMIT)
    assert_same_bits(out[~call.live], np.zeros_like(out[~call.live]))
    assert_same_bits(state[call.other_slots], call.operands["initial_state"][call.other_slots])


def assert_decodes(implementation, sizes, gate, allow_neg_eigval=False, **dtypes):
    """packed_decode meets the oracle on one call of these sizes, with a gate of cases.GATES."""
    call = make_call(sizes, **dtypes)
    options = dict(use_qk_l2norm_in_kernel=True, lower_bound=GATES[gate])
    options |= dict(allow_neg_eigval=allow_neg_eigval)
    out, state = decode(call.operands, implementation, **options)
    assert out.dtype == call.operands["mixed_qkv"].dtype
    assert_meets_oracle(call, out, state, **options)


def on_device(operands):
    return {name: jnp.asarray(x) for name, x in operands.items()}


def load_example(name):
    """A program of the folder examples/ as a module."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lowered_text(function, *arguments, **options):
    """The program of a jitted function for CUDA, which needs no GPU."""
    return (
        jax.jit(function).trace(*arguments, **options).lower(lowering_platforms=("cuda",)).as_text()
    )
