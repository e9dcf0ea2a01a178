"""Ten ways to get the maths wrong, built into a copy of the package: the suite sees every one.

A mutant is a module's own source with one expression changed. It is judged by calls of the suite
itself, with its helpers and limits. A mutant that passes would mean that the suite is blind.

A transposed read is built into the XLA form alone: no one expression of the kernel transposes.
"""

import contextlib
import importlib
import shutil
import sys
from pathlib import Path

import pytest
import support
from cases import GATES, SHAPES
from faults import assert_epsilon_is_on_the_sum
from support import ON_GPU, assert_decodes

import kda_jax

pytestmark = pytest.mark.slow

# name -> {module: ((an expression, what replaces it), ...)}; in the kernel, then in the XLA form.
MUTANTS = {
    "wrong head map": {
        "decode_mosaic_gpu_kernel": (
            (
                "group, _ = divide(head, sizes.HV // sizes.H)",
                "_, group = divide(head, sizes.H)",
            ),
        ),
        "decode_xla": (
            ("jnp.repeat(x, HV // x.shape[2], axis=2)", "jnp.tile(x, (1, 1, HV // x.shape[2], 1))"),
        ),
    },
    "beta rounded to bfloat16": {
        "decode_mosaic_gpu_kernel": (
            ("k_q, gated[0][1]", "k_q, gated[0][1].astype(jnp.bfloat16).astype(F32)"),
        ),
        "decode_xla": (
            (
                "token_major = [",
                "tokens = *tokens[:4], tokens[4].astype(jnp.bfloat16).astype(f32)\n"
                "    token_major = [",
            ),
        ),
    },
    "epsilon outside the root": {
        "gates": (
            ("lax.rsqrt(sum_of_squares + NORM_EPS)", "1.0 / (jnp.sqrt(sum_of_squares) + NORM_EPS)"),
        ),
    },
    "-1 wrapped": {
        "decode_mosaic_gpu_kernel": (
            (
                'slot = refs["slots"][row]\n',
                'slot = refs["slots"][row]\n    slot = jnp.where(slot < 0, slot + S, slot)\n',
            ),
        ),
        "pools": (("return (slots >= 0) & (slots < S)", "return slots < S"),),
    },
    "transposed state": {
        "decode_xla": (
            (
                "pools.read(state, slots, sources).astype(f32)",
                "pools.read(state, slots, sources).astype(f32).swapaxes(2, 3)",
            ),
        ),
    },
    "softplus threshold flipped": {
        "gates": (
            (
                "softplus(x)\n        if beta == 1.0",
                "jnp.where(x < 20.0, x, softplus(x))\n        if beta == 1.0",
            ),
        ),
    },
    "gate by key head": {
        "decode_mosaic_gpu_kernel": (
            (
                'vector(refs["a"], tokens, head * chunks)',
                'vector(refs["a"], tokens, group * chunks)',
            ),
        ),
        "decode_xla": (
            (
                "q, k, v, a, b = tokens",
                "H = tokens[0].shape[2]\n    q, k, v, a, b = tokens\n"
                "    a = jnp.repeat(a[:, :, :H], HV // H, axis=2)",
            ),
        ),
    },
    "state rounded before the read": {
        "decode_mosaic_gpu_kernel": (
            (
                "state_q = _total(block, [d * along_keys(x)",
                "state_q = _total(block, [d.astype(pool.dtype).astype(F32) * along_keys(x)",
            ),
        ),
        "decode_xla": (
            (
                "return (state * q[..., None, :]).sum(-1), state",
                # XLA leaves out a cast down and up again.
                "return (jax.lax.reduce_precision(state, 8, 7) * q[..., None, :]).sum(-1), state",
            ),
        ),
    },
    "scale on k": {
        "decode_mosaic_gpu_kernel": (
            (
                'q = [part * maths.scale for part in key("q", q_start)]',
                'q, k = key("q", q_start), [part * maths.scale for part in k]',
            ),
        ),
        "decode_xla": (("(q * jnp.float32(maths.scale), k)", "(q, k * jnp.float32(maths.scale))"),),
    },
    "padded row unwritten": {
        "decode_mosaic_gpu_kernel": (("pl.when(jnp.logical_not(live))", "pl.when(slot == 2**30)"),),
        "decode_xla": (
            (
                "out = jnp.where(_spread(live_tokens, out), out, 0)",
                "out = out",
            ),
            ("jnp.where(_spread(live_tokens, x), x.astype(f32), 0)", "x.astype(f32)"),
        ),
    },
}
FILES = {
    "xla": ("gates", "pools", "decode_xla"),
    "mosaic_gpu": ("gates", "decode_mosaic_gpu_kernel"),
}
RUNS = [
    (name, module, implementation)
    for name, modules in MUTANTS.items()
    for module in modules
    for implementation in ("xla", "mosaic_gpu")
    if module in FILES[implementation]
]


@contextlib.contextmanager
def mutated(folder, module, changes):
    """The helpers call a changed copy of the package, whatever calls the changed line."""
    package = Path(kda_jax.__file__).parent
    copy = shutil.copytree(
        package, folder / "kda_jax", ignore=shutil.ignore_patterns("__pycache__")
    )
    source = (copy / f"{module}.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{module}.py has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    (copy / f"{module}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch, _without_the_package():
        patch.syspath_prepend(folder)
        mutant = importlib.import_module("kda_jax")
        assert Path(mutant.__file__).parent == copy
        patch.setattr(support, "kda_jax", mutant)
        yield


@contextlib.contextmanager
def _without_the_package():
    """kda_jax's modules are imported anew inside, and those of before are back behind it."""

    def taken_out():
        names = [name for name in sys.modules if name.partition(".")[0] == "kda_jax"]
        return {name: sys.modules.pop(name) for name in names}

    before = taken_out()
    try:
        yield
    finally:
        taken_out()
        sys.modules.update(before)


def battery(implementation):
    """Raises AssertionError unless these of the suite's own calls are right."""
    for shape in ("k32_v32", "k32_v16", "k64_v32"):
        for gate in GATES:
            assert_decodes(implementation, SHAPES[shape], gate, dtype="float32")
    assert_decodes(implementation, SHAPES["k64_v32"], "safe", pool_dtype="bfloat16")
    assert_epsilon_is_on_the_sum(implementation)


@pytest.mark.skipif(
    ON_GPU, reason="XLA for GPUs keeps excess precision: a rounding put into the reference vanishes"
)
@pytest.mark.parametrize(
    ("name", "module", "implementation"), RUNS, ids=lambda x: x.replace(" ", "_")
)
def test_a_mutant_is_caught(tmp_path, name, module, implementation):
    with mutated(tmp_path, module, MUTANTS[name][module]), pytest.raises(AssertionError):
        battery(implementation)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_an_unchanged_copy_passes(tmp_path, implementation):
    with mutated(tmp_path, "gates", ()):
        battery(implementation)


def test_there_are_ten():
    assert len(MUTANTS) == 10
