"""Ten ways to get the maths wrong, built into a copy of the kernel and of the reference: the suite sees every one.

A transposed read is built into the reference alone: no one expression of the kernel transposes its tile.

A mutant is the module's own source with one expression changed. It is judged by what judges the real ones, on calls
that the suite makes too: a mutant that passes would mean that the suite is blind there.
"""

import importlib.util
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cases import SHAPES, make_call
from support import ON_GPU, assert_meets_oracle, on_device, running

import kda_jax
from kda_contracts import Sizes
from kda_jax.gates import Maths

pytestmark = pytest.mark.slow
SQUARE = Sizes(B=3, H=1, HV=2, K=32, V=32, S=5)  # K == V: only values can show a transposed state

# name -> {module: ((what stands there, what stands there instead), ...)}; in the kernel, then in the reference.
MUTANTS = {
    "wrong head map": {
        "decode_mosaic_gpu": (("group, _ = divide(head, HV // H)", "_, group = divide(head, H)"),),
        "decode_xla": (
            ("jnp.repeat(x, HV // x.shape[2], axis=2)", "jnp.tile(x, (1, 1, HV // x.shape[2], 1))"),
        ),
    },
    "beta rounded to bfloat16": {
        "decode_mosaic_gpu": (
            ("dot(k, q), gated[0][1]", "dot(k, q), gated[0][1].astype(jnp.bfloat16).astype(f32)"),
        ),
        "decode_xla": (
            (
                "token_major = [",
                "beta = beta.astype(jnp.bfloat16).astype(f32)\n    token_major = [",
            ),
        ),
    },
    "epsilon outside the root": {
        "gates": (
            ("lax.rsqrt(sum_of_squares + NORM_EPS)", "1.0 / (jnp.sqrt(sum_of_squares) + NORM_EPS)"),
        ),
    },
    "-1 wrapped": {
        "decode_mosaic_gpu": (
            (
                'slot = refs["slots"][row]\n',
                'slot = refs["slots"][row]\n    slot = jnp.where(slot < 0, slot + S, slot)\n',
            ),
        ),
        "decode_xla": (
            ("live = (slots >= 0) & (slots < S)", "slots = slots % S; live = slots >= 0"),
        ),
    },
    "transposed state": {
        "decode_xla": (
            (
                'mode="fill", fill_value=0).astype(f32)',
                'mode="fill", fill_value=0).astype(f32).swapaxes(2, 3)',
            ),
        ),
    },
    "softplus threshold flipped": {
        "gates": (("value = softplus(x) if", "value = jnp.where(x < 20.0, x, softplus(x)) if"),),
    },
    "gate by key head": {
        "decode_mosaic_gpu": (
            (
                'vector(refs["a"], tokens, head * chunks)',
                'vector(refs["a"], tokens, group * chunks)',
            ),
        ),
        "decode_xla": (
            (
                "a.reshape(B, 1, HV, K)",
                "jnp.repeat(a.reshape(B, 1, HV, K)[:, :, :H], HV // H, axis=2)",
            ),
        ),
    },
    "state rounded before the read": {
        "decode_mosaic_gpu": (
            (
                "state_q = total([d * along_keys(x)",
                "state_q = total([d.astype(pool.dtype).astype(f32) * along_keys(x)",
            ),
        ),
        "decode_xla": (
            (
                "return (state * q[..., None, :]).sum(-1), state",
                "return (state.astype(jnp.bfloat16).astype(jnp.float32) * q[..., None, :]).sum(-1), state",
            ),
        ),
    },
    "scale on k": {
        "decode_mosaic_gpu": (
            ("q = [part * maths.scale for part in q]", "k = [part * maths.scale for part in k]"),
        ),
        "decode_xla": (("(q * f32(maths.scale), k)", "(q, k * f32(maths.scale))"),),
    },
    "padded row unwritten": {
        "decode_mosaic_gpu": (("pl.when(jnp.logical_not(live))", "pl.when(slot == 2**30)"),),
        "decode_xla": (
            ("jnp.where(_spread(live_tokens, out), out, 0)", "out"),
            ("jnp.where(_spread(live_tokens, x), x.astype(f32), 0)", "x.astype(f32)"),
        ),
    },
}
RUNS = [
    (name, module, implementation)
    for name, modules in MUTANTS.items()
    for module in modules
    for implementation in (("decode_xla", "decode_mosaic_gpu") if module == "gates" else (module,))
]


def mutate(monkeypatch, module, changes):
    """Loads a changed copy of kda_jax/<module>.py, and of the implementations that use it, in the originals' places."""
    affected = ["gates", "decode_xla", "decode_mosaic_gpu"] if module == "gates" else [module]
    loaded = {}
    for name in affected:
        source = (Path(kda_jax.__file__).parent / f"{name}.py").read_text()
        for old, new in changes if name == module else ():
            assert source.count(old) == 1, f"{name}.py has {old!r} {source.count(old)} times"
            source = source.replace(old, new)
        mutant = types.ModuleType(f"kda_jax.{name}")
        mutant.__file__ = importlib.util.find_spec(f"kda_jax.{name}").origin
        monkeypatch.setitem(sys.modules, f"kda_jax.{name}", mutant)
        monkeypatch.setattr(kda_jax, name, mutant, raising=False)
        exec(compile(source, f"{name} with a fault", "exec"), mutant.__dict__)
        loaded[name] = mutant
    return loaded


def battery(implement, interpreted):
    """Raises AssertionError unless the implementation is right on a few of the suite's calls."""
    for sizes, dtypes in (
        (SQUARE, {"dtype": "float32"}),
        (SHAPES["k32_v16"], {"dtype": "float32"}),
        (SHAPES["k64_v32"], {"dtype": "bfloat16", "pool_dtype": "bfloat16"}),
    ):
        call = make_call(sizes, **dtypes)
        if dtypes["dtype"] == "float32":
            call.operands["mixed_qkv"] *= np.float32(1e-3)  # where an epsilon's place shows
        x = on_device(call.operands)
        options = dict(use_qk_l2norm_in_kernel=True, scale=0.25, lower_bound=None)
        with running(interpreted):
            out, state = implement(
                *(
                    x[name]
                    for name in (
                        "mixed_qkv",
                        "a",
                        "b",
                        "A_log",
                        "dt_bias",
                        "initial_state",
                        "ssm_state_indices",
                    )
                ),
                sizes=sizes,
                maths=Maths(scale=0.25, use_qk_l2norm=True),
                out_dtype=jnp.dtype("float32"),
            )
        assert_meets_oracle(call, out, state, **options)


def judge(loaded, implementation):
    if implementation == "decode_xla":
        battery(loaded["decode_xla"].kda_packed_decode_xla, "xla")
    else:
        battery(loaded["decode_mosaic_gpu"].kda_packed_decode_mosaic_gpu, "mosaic_gpu")


@pytest.mark.skipif(
    ON_GPU, reason="XLA for GPUs keeps excess precision: a rounding put into the reference vanishes"
)
@pytest.mark.parametrize(
    ("name", "module", "implementation"), RUNS, ids=lambda x: x.replace(" ", "_")
)
def test_a_mutant_is_caught(monkeypatch, name, module, implementation):
    loaded = mutate(monkeypatch, module, MUTANTS[name][module])
    with pytest.raises(AssertionError):
        judge(loaded, implementation)


@pytest.mark.parametrize(("module", "implementation"), sorted({run[1:] for run in RUNS}))
def test_an_unchanged_copy_passes(monkeypatch, module, implementation):
    judge(mutate(monkeypatch, module, ()), implementation)


def test_there_are_ten():
    assert len(MUTANTS) == 10
