"""The Mosaic kernel without a GPU: its tiles, and that every one of them lowers for CUDA."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cases import POOL_DTYPES
from support import lowered_text

import kda_jax
from kda_contracts import Sizes
from kda_jax import decode_mosaic_gpu
from kda_jax.call import Maths, Operands, Static

KEY_SIZES = range(32, 257, 32)
VALUE_SIZES = (16, 32, 48, 128)
BATCHES = (1, 40, 600)  # below, between and above the heuristic's steps


def sizes_of(K, V, B):
    return Sizes(B=B, H=1, HV=3, K=K, V=V, S=700)


def packed_static(sizes, maths, out_dtype):
    sizes = dataclasses.replace(sizes, T=1, N=sizes.B)
    return Static("kda_packed_decode", sizes, maths, jnp.dtype(out_dtype), packed=True)


def decode(static, mixed_qkv, *others):
    names = ("a", "b", "A_log", "dt_bias", "pool", "slots", "sources")
    row = dict.fromkeys("qkv", mixed_qkv)
    operands = Operands(**row, **dict(zip(names, others, strict=False)))
    return decode_mosaic_gpu.kda_packed_decode_mosaic_gpu(operands, static=static)


def test_the_sizes_it_takes():
    taken = [K for K in range(1, 300) if decode_mosaic_gpu.unsupported(sizes_of(K, 16, 1)) is None]
    assert taken == list(KEY_SIZES)
    assert [
        V for V in range(1, 70) if decode_mosaic_gpu.unsupported(sizes_of(32, V, 1)) is None
    ] == [
        16,
        32,
        48,
        64,
    ]
    assert "blocks of a grid" in decode_mosaic_gpu.unsupported(sizes_of(32, 2**20, 2**20))


@pytest.mark.parametrize("pool_dtype", POOL_DTYPES)
@pytest.mark.parametrize("K", KEY_SIZES)
def test_the_order_of_a_rows_sums_does_not_follow_the_batch(K, pool_dtype):
    configs = {
        decode_mosaic_gpu.choose_config(sizes_of(K, V, B), pool_dtype, several_tokens)
        for V in VALUE_SIZES
        for B in BATCHES
        for several_tokens in (False, True)
    }
    assert len({(config.lanes, config.vector) for config in configs}) == 1
    for config in configs:
        assert K % (config.lanes * config.vector) == 0
        assert 1 <= config.tile_rows // config.step_rows <= 4
    assert any(config.fold for config in configs) == (K in (32, 64, 128, 256))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lanes": 4}, "self.lanes=4 must be 8, 16 or 32"),
        ({"vector": 2}, "self.vector=2 must be 4 or 8"),
        ({"step_rows": 6}, "self.step_rows=6 must be a multiple of self.rows_per_pass=4"),
        ({"tile_rows": 20}, "self.tile_rows=20 must be a multiple of self.step_rows=8"),
        ({"tile_rows": 0}, "self.tile_rows=0 must be a multiple"),
    ],
)
def test_a_config_validates_itself(wrong, message):
    with pytest.raises(ValueError, match=message):
        decode_mosaic_gpu.Config(
            **{"tile_rows": 16, "step_rows": 8, "lanes": 32, "vector": 4} | wrong
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("K", "dtype", "pool_dtype"),
    [
        pytest.param(K, dtype, pool_dtype, marks=[pytest.mark.slow] * (dtype != "bfloat16"))
        for K in KEY_SIZES
        for dtype in POOL_DTYPES
        for pool_dtype in POOL_DTYPES
        if dtype == "bfloat16" or K in (96, 128)  # how an operand is loaded does not hang on K
    ],
)
def test_every_config_and_dtype_lowers_for_cuda(K, dtype, pool_dtype):
    programs = {}
    for V in VALUE_SIZES:
        for B in BATCHES:
            sizes = sizes_of(K, V, B)
            config = decode_mosaic_gpu.choose_config(sizes, pool_dtype)
            if config in programs:
                continue
            shapes = (B, 2 * K + 3 * V), (B, 3 * K), (B, 3), (3,), (3 * K,), (700, 3, V, K), (B,)
            dtypes = dtype, dtype, dtype, "float32", "float32", pool_dtype, "int32"
            maths = Maths(0.1, True, None if B == 1 else -5.0)
            if len(programs) % 2:
                shapes, dtypes = (*shapes, (B,)), (*dtypes, "int32")  # source_indices
            programs[config] = lowered_text(
                functools.partial(decode, packed_static(sizes, maths, dtype)),
                *map(jax.ShapeDtypeStruct, shapes, map(jnp.dtype, dtypes)),
            )
    assert len(programs) >= 2
    for text in programs.values():
        assert text.count("@mosaic_gpu_v2") == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pool_dtype", POOL_DTYPES)
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("draft", ["", "returned", "slots", "accepted", "both"])
def test_every_form_of_the_update_lowers_for_cuda(draft, varlen, pool_dtype):
    options = dict(update_state=draft != "slots", implementation="mosaic_gpu", softplus_beta=2.0)
    for B, T, N, S, K in (
        ((1, 9, 3, 5, 64), (600, 2, 600, 700, 256)) if not varlen else ((1, 9, 3, 5, 96),)
    ):
        struct = jax.ShapeDtypeStruct
        shapes = dict(q=(B, T, 1, K), k=(B, T, 1, K), v=(B, T, 2, 32), a=(B, T, 2 * K), b=(B, T, 2))
        if B == 1 and not varlen:
            shapes, N = {name: (3, 3, *shape[2:]) for name, shape in shapes.items()}, 3
        x = {name: struct(shape, jnp.bfloat16) for name, shape in shapes.items()}
        x |= dict(A_log=struct((2,), jnp.float32), dt_bias=struct((2 * K,), jnp.float32))
        x |= dict(initial_state_source=struct((S, 2, 32, K), jnp.dtype(pool_dtype)))
        x |= dict(initial_state_indices=struct((N,), jnp.int32))
        if varlen:
            x["cu_seqlens"] = struct((N + 1,), jnp.int32)
        if draft in ("slots", "accepted", "both"):
            x["intermediate_states"] = struct(
                shapes["b"][:2] if B != 1 or varlen else (3, 3), jnp.int32
            )
        if draft in ("accepted", "both"):
            x["num_accepted_tokens"] = struct((N,), jnp.int32)
        if draft == "returned":
            options["intermediate_states"] = True
        text = lowered_text(lambda x: kda_jax.fused_sigmoid_gating_kda_update(**x, **options), x)
        assert text.count("@mosaic_gpu_v2") == 1


def test_one_lowering_serves_all_call_sites():
    sizes = sizes_of(32, 16, 2)
    shapes = (2, 112), (2, 96), (2, 3), (3,), (96,), (700, 3, 16, 32)
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    static = packed_static(sizes, Maths(0.1, True), "float32")

    def layers(*x):
        pools = [x[5], x[5] + 1, x[5] + 2]
        return [decode(static, *x[:5], pool, x[6]) for pool in pools]

    text = lowered_text(layers, *structs, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert text.count("@mosaic_gpu_v2") == 1
    assert text.count("call @kda_packed_decode_mosaic_gpu") == 3


@pytest.mark.parametrize("written", [True, False])
def test_every_operand_and_result_stands_behind_a_barrier(written):
    """XLA puts a kernel into a fusion that may lose it.

    It does so where an operand is a slice, or where a result is written back.
    """
    struct, f32 = jax.ShapeDtypeStruct, jnp.float32
    shapes = dict(
        q=(2, 5, 1, 32),
        k=(2, 5, 1, 32),
        v=(2, 5, 3, 16),
        a=(2, 5, 96),
        b=(2, 5, 3),
        A_log=(3,),
        dt_bias=(96,),
    )
    x = {name: struct(shape, f32) for name, shape in shapes.items()}
    x |= dict(
        initial_state_source=struct((7, 3, 16, 32), f32),
        initial_state_indices=struct((2,), jnp.int32),
    )
    options = dict(update_state=written, intermediate_states=True, implementation="mosaic_gpu")
    text = lowered_text(lambda x: kda_jax.fused_sigmoid_gating_kda_update(**x, **options), x)
    behind = re.findall(r"(%\w+)(?::\d+)? = stablehlo.optimization_barrier", text)
    ((results, count, operands),) = re.findall(
        r"(%\w+):(\d+) = stablehlo.custom_call @mosaic_gpu_v2\((.*?)\)", text
    )
    names = {name.split("#")[0] for name in operands.split(", ")}
    assert len(operands.split(", ")) == 9
    assert names <= set(behind)
    barrier = next(
        line
        for line in text.splitlines()
        if "optimization_barrier" in line and f"{results}#0" in line
    )
    assert all(f"{results}#{result}" in barrier for result in range(int(count)))
