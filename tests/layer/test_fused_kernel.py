"""The kernel of a whole decode step against the three operators that it stands for.

On a CPU in Pallas's interpreter, where sums over a cluster go through global memory.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU, assert_near, assert_same_bits, lowered_text, running

import kda_jax
from kda_contracts import Sizes
from kda_jax import call, fused_mosaic_gpu

S, EPS = 7, 1e-5
LIMIT = dict(float32=2e-6, bfloat16=1e-2)
SHAPES = (
    dict(B=3, H=2, HV=2, K=128, V=128),
    dict(B=3, H=1, HV=2, K=128, V=64, biased=True),
    dict(B=2, H=1, HV=1, K=256, V=128, dtype="bfloat16", pool_dtype="bfloat16"),
)


def make(*, B, H, HV, K, V, W=4, dtype="float32", pool_dtype="float32", biased=False):
    """`(operands by name, static)`; the last row is padded, the first from another slot."""

    def normal(number, *shape, dtype=dtype):
        return jax.random.normal(jax.random.key(number), shape).astype(dtype)

    C = 2 * H * K + HV * V
    x = dict(x=normal(0, B, C), weight=normal(1, C, W), bias=normal(2, C) if biased else None)
    x |= dict(conv=normal(3, S, C, W - 1), state=normal(4, S, HV, V, K, dtype=pool_dtype))
    x |= dict(a=normal(5, B, HV * K), b=normal(6, B, HV))
    x |= dict(A_log=normal(7, HV, dtype="float32"), dt_bias=normal(8, HV * K, dtype="float32"))
    x |= dict(gate=normal(9, B, HV * V), norm=normal(10, V))
    slots = np.random.default_rng(0).permutation(S).astype(np.int32)
    sources = slots[:B].copy()
    sources[0] = slots[-1]
    slots[B - 1] = -1
    x |= dict(slots=jnp.asarray(slots[:B]), sources=jnp.asarray(sources))
    static = call.Static(
        op="kda_fused_decode",
        sizes=Sizes(B=B, H=H, HV=HV, K=K, V=V, S=S, T=1, N=B),
        maths=call.maths_of(K, use_qk_l2norm_in_kernel=True),
        out_dtype=jnp.dtype(dtype),
    )
    return x, static


def apart(x):
    """`(out, conv, state)` by the three operators, in float32."""
    rows, slots, sources = x["x"].astype("float32"), x["slots"], x["sources"]
    mixed, conv = kda_jax.conv_decode(
        rows, x["weight"], x["conv"], slots, sources=sources, bias=x["bias"]
    )
    gates = (x[name] for name in ("a", "b", "A_log", "dt_bias"))
    out, state = kda_jax.packed_decode(
        mixed,
        *gates,
        x["state"],
        slots,
        source_indices=sources,
        use_qk_l2norm_in_kernel=True,
        implementation="xla",
    )
    gate = x["gate"].astype("float32").reshape(out[:, 0].shape)
    return kda_jax.gated_rms_norm(out[:, 0], gate, x["norm"], eps=EPS), conv, state


def fused(x, static, parts):
    run = functools.partial(fused_mosaic_gpu.run, static=static, eps=EPS, parts=parts, peers=ON_GPU)
    with running("mosaic_gpu"):
        return jax.block_until_ready(jax.jit(run)(x))


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_three_operators(shape, parts):
    x, static = make(**shape)
    x["x"] = x["x"].at[-1].set(jnp.nan)  # of the padded row
    x["state"] = x["state"].at[-2].set(jnp.nan)
    if parts > x["norm"].shape[0] // 32:
        pytest.skip("a part has rows for a step at least")
    wanted, got = apart(x), fused(x, static, parts)
    limit = LIMIT[shape.get("dtype", "float32")]
    assert_near(got[0].astype("float32"), wanted[0], limit)
    assert_same_bits(got[0][-1], np.zeros_like(got[0][-1]))
    assert_same_bits(got[1], wanted[1])
    touched = np.asarray(x["slots"])[:-1]
    assert_near(np.float32(got[2])[touched], np.float32(wanted[2])[touched], limit)
    others = np.setdiff1d(np.arange(S), touched)
    assert_same_bits(np.asarray(got[2])[others], np.asarray(x["state"])[others])


@pytest.mark.slow
@pytest.mark.parametrize("gate", [dict(lower_bound=-5.0), dict(allow_neg_eigval=True)], ids=str)
def test_its_gates_are_those_of_decode(gate):
    x, static = make(**SHAPES[0])
    maths = call.maths_of(128, use_qk_l2norm_in_kernel=True, **gate)
    static = static.__class__(**vars(static) | dict(maths=maths))
    mixed, _ = kda_jax.conv_decode(x["x"], x["weight"], x["conv"], x["slots"], sources=x["sources"])
    _, state = kda_jax.packed_decode(
        mixed,
        *(x[name] for name in ("a", "b", "A_log", "dt_bias", "state", "slots")),
        source_indices=x["sources"],
        use_qk_l2norm_in_kernel=True,
        implementation="xla",
        **gate,
    )
    assert_near(fused(x, static, 2)[2], state, LIMIT["float32"])


@pytest.mark.parametrize("parts", [1, 8])
def test_it_lowers_for_cuda_with_reads_of_other_blocks(parts):
    x, static = make(**SHAPES[0])
    run = functools.partial(fused_mosaic_gpu.run, static=static, eps=EPS, parts=parts)
    assert "kda_fused_decode" in lowered_text(run, x)


def test_small_calls_share_a_head_among_blocks():
    def parts(B, H):
        _, static = make(B=1, H=1, HV=1, K=128, V=128)
        sizes = Sizes(**vars(static.sizes) | dict(B=B, N=B, H=H, HV=H))
        config = fused_mosaic_gpu.decode_mosaic_gpu.choose_config(sizes, jnp.float32)
        return fused_mosaic_gpu.choose_parts(sizes, config)

    assert [parts(1, 3), parts(8, 12), parts(64, 32)] == [8, 2, 1]


def test_what_it_does_not_take():
    sizes = Sizes(B=1, H=1, HV=1, K=64, V=128, S=2, T=1, N=1)
    assert "K=64" in fused_mosaic_gpu.unsupported(sizes, 4)
    sizes = Sizes(**vars(sizes) | dict(K=128))
    assert "W=1" in fused_mosaic_gpu.unsupported(sizes, 1)
    assert fused_mosaic_gpu.unsupported(sizes, 4) is None
