"""Random operands for unchanged_calls.py: distinct sizes, live pools, NaN where none may read.

They are the same in every process: a seed follows from the sizes.
"""

import zlib

import jax.numpy as jnp
import numpy as np


def normal(rng, *shape, dtype="float32"):
    return rng.standard_normal(shape, dtype=np.float32).astype(jnp.dtype(dtype))


def slots_of(rng, n, S):
    """Slots in random order; of three and more the second is padded, of four and more the last."""
    slots = np.full(n, -1, np.int32)
    slots[: min(n, S)] = rng.permutation(S)[:n]
    if n >= 3:
        slots[1] = -1
    if n >= 4:
        slots[-1] = S
    return slots


def _gates(rng, HV, K, dtype="float32"):
    A_log = np.log(rng.uniform(1, 16, HV)).astype(jnp.dtype(dtype))
    return A_log, (normal(rng, HV * K) - np.float32(2)).astype(jnp.dtype(dtype))


def packed(
    B=5, H=2, HV=4, K=32, V=16, S=8, seed="", dtype="bfloat16", pool="float32", gates="float32"
):
    """The seven operands of packed_decode; padded rows are NaN."""
    rng = np.random.default_rng(zlib.crc32(repr((B, H, HV, K, V, S, seed)).encode()))
    slots = slots_of(rng, B, S)
    x = [normal(rng, B, width, dtype=dtype) for width in (2 * H * K + HV * V, HV * K, HV)]
    for array in x:
        array[(slots < 0) | (slots >= S)] = np.nan
    return *x, *_gates(rng, HV, K, gates), normal(rng, S, HV, V, K, dtype=pool), slots


def unpacked(B=4, T=3, H=2, HV=4, K=32, V=16, S=7, lengths=None, dtype="bfloat16", pool="float32"):
    """The operands of an update, and `cu_seqlens` (None if dense); padded sequences are NaN."""
    rng = np.random.default_rng(zlib.crc32(repr((B, T, H, HV, K, V, S, lengths)).encode()))
    cu_seqlens, N = None, B
    if lengths:
        # One token lies behind the last sequence.
        B, N, T = 1, len(lengths), sum(lengths) + 1
        cu_seqlens = np.cumsum((0, *lengths)).astype(np.int32)
    slots = slots_of(rng, N, S)
    held = np.repeat((slots >= 0) & (slots < S), lengths or (T,) * N)
    held = np.append(held, False) if lengths else held
    shapes = ((H, K), (H, K), (HV, V), (HV * K,), (HV,))
    x = [normal(rng, B, T, *shape, dtype=dtype) for shape in shapes]
    for array in x:
        array[~held.reshape(B, T)] = np.nan
    state = normal(rng, S, HV, V, K, dtype=pool)
    return (*_gates(rng, HV, K), *x, state, slots), cu_seqlens


def activated(
    B=2, T=70, H=2, HV=4, K=32, V=24, S=6, lengths=None, dtype="float32", pool="float32", decay=1.0
):
    """The operands of recurrent_kda and chunk_kda, and `cu_seqlens` (None if dense); all finite."""
    rng = np.random.default_rng(zlib.crc32(repr((B, T, H, HV, K, V, S, lengths)).encode()))
    cu_seqlens, N = None, B
    if lengths:
        B, N, T = 1, len(lengths), sum(lengths) + 1
        cu_seqlens = np.cumsum((0, *lengths)).astype(np.int32)
    q, k = normal(rng, B, T, H, K), normal(rng, B, T, H, K)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = normal(rng, B, T, HV, V)
    log_decay = np.float32(-decay) * np.abs(normal(rng, B, T, HV, K))
    beta = rng.uniform(0, 1, (B, T, HV)).astype(np.float32)
    q, k, v = (x.astype(jnp.dtype(dtype)) for x in (q, k, v))
    return (q, k, v, log_decay, beta, normal(rng, S, HV, V, K, dtype=pool), slots_of(rng, N, S)), (
        cu_seqlens
    )
