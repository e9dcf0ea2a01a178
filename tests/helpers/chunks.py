"""Operands of chunk_kda, what it should return, and cases for its gradients."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import prefill_grad_mosaic_gpu, prefill_mosaic_gpu
from kda_jax.tools import oracle

H, HV, K, V, S = 2, 4, 32, 24, 6
DECAY_PATTERNS = ("strong", "strong then weak", "every third", "none at all", "-inf", "-3e38")


def operands(B, T, *, N=None, seed=0, dtype="float32", decay=1.0, H=H, HV=HV, K=K, V=V):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    k = normal(B, T, H, K)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    x = dict(q=normal(B, T, H, K), k=k, v=normal(B, T, HV, V))
    x = {name: y.astype(jnp.dtype(dtype)) for name, y in x.items()}
    x["log_decay"] = (-decay * np.abs(normal(B, T, HV, K))).astype(np.float32)
    x["beta"] = rng.uniform(0, 1, (B, T, HV)).astype(np.float32)
    return x | dict(pool=normal(S, HV, V, K), slots=rng.permutation(S)[: N or B].astype(np.int32))


def wanted(x, cu_seqlens=None, **options):
    out, state, _ = oracle.update(*(x[name] for name in x), cu_seqlens=cu_seqlens, **options)
    return out, state


def set_decays(log_decay, pattern):
    """Writes one of DECAY_PATTERNS into `[B, T, HV, K]`, T at least 100."""
    T = np.arange(log_decay.shape[1])
    if pattern == "strong":
        log_decay[:] = -50.0
    elif pattern == "strong then weak":
        log_decay[:, :32] = -50.0
        log_decay[:, 70:100] = -900.0
    elif pattern == "every third":
        log_decay[:, T % 3 == 0] = -50.0
    elif pattern == "none at all":
        log_decay[:] = 0.0
    else:
        log_decay[:, T % 20 == 7, :, ::2] = float(pattern)


def gradient_case(name, *, T=150, dtype="float32", **sizes):
    """`(x, options, d_out, d_state)` of one of GRADIENT_CASES: two live sequences, one padded.

    x: as `operands` gives them. options: `cu_seqlens`, `sources` and `l2norm`, of the oracle.
    d_out, d_state: float32 cotangents of the results.
    """
    packed = name == "packed borders"
    x = operands(1 if packed else 3, T, N=5 if packed else 3, dtype=dtype, decay=0.3, **sizes)
    rng = np.random.default_rng(1)
    options = dict(cu_seqlens=None, l2norm=True, sources=x["slots"])
    if packed:
        # Borders at a chunk's edges and beside them; an empty sequence; a padded one.
        bounds = np.array([0, 64, 64, 65, min(129, T - 2), T], np.int32)
        options |= dict(cu_seqlens=bounds, l2norm=False, sources=x["slots"].copy())
        x["slots"][4] = -1
    else:
        options |= dict(sources=np.where(np.arange(3) == 2, -1, x["slots"]).astype(np.int32))
        x["slots"][1] = S
    GRADIENT_CASES[name](x, rng)
    d_out = rng.standard_normal(x["v"].shape, dtype=np.float32)
    return x, options, d_out, rng.standard_normal(x["pool"].shape, dtype=np.float32)


def _silu_keys(x, rng):
    """As a layer makes them: all point in one direction more than in others."""
    common = 2 * rng.standard_normal(x["k"].shape[-1])
    for name in ("q", "k"):
        y = common + rng.standard_normal(x[name].shape)
        x[name][:] = y / (1 + np.exp(-y))


def _many_decays(x, rng):
    x["log_decay"][:] = -np.exp(rng.uniform(np.log(1e-4), np.log(20.0), x["log_decay"].shape))


def _decays_by_turns(x, rng):
    """For 7 tokens half of the channels lose all but e^-8 a token, then the other half."""
    T, K = x["log_decay"].shape[1], x["log_decay"].shape[3]
    even = (np.arange(T) // 7 % 2 == 0)[None, :, None, None]
    first = (np.arange(K) < K // 2)[None, None, None]
    x["log_decay"][:] = np.where(even == first, -8.0, -1e-3)


def _zero_keys(x, rng):
    x["k"][:, ::3] = 0
    x["q"][:, 1::5] = 0


def _saturated_gates(x, rng):
    x["beta"][:] = rng.integers(0, 2, x["beta"].shape)
    x["log_decay"][:] = np.where(rng.uniform(size=x["log_decay"].shape) < 0.05, -np.inf, 0.0)


def _equal_keys(x, rng):
    x["k"][:] = x["k"][:, :1]
    x["log_decay"][:] *= 0.01


GRADIENT_CASES = {
    "random keys": lambda x, rng: None,
    "SiLU keys with a common part": _silu_keys,
    "decays of 1e-4 to 20 a token": _many_decays,
    "channels that decay by turns": _decays_by_turns,
    "zero keys": _zero_keys,
    "saturated gates": _saturated_gates,
    "equal keys": _equal_keys,
    "packed borders": lambda x, rng: None,
}


@contextlib.contextmanager
def kernels_here():
    """Where the prefill kernels run here: on a CPU in Pallas's interpreter, their products in XLA.

    The interpreter has no wgmma of registers. Gives what stands in for them, None on a GPU.
    """
    from support import ON_GPU, running  # it asks for 8 devices, which a benchmark cannot

    if ON_GPU:
        yield None
        return

    def value(x):
        is_array = isinstance(x, jax.Array) and not hasattr(jax.typeof(x), "inner_aval")
        return x if is_array else x[...]

    def products(*operands):
        return [
            onto + jnp.dot(value(a), value(b), preferred_element_type=jnp.float32)
            for a, b, onto in operands
        ]

    with pytest.MonkeyPatch.context() as patch, running("mosaic_gpu"):
        for module in (prefill_mosaic_gpu, prefill_grad_mosaic_gpu):
            patch.setattr(module, "products", products)
        yield products
