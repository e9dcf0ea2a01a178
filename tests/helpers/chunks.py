"""Operands of chunk_kda, and what it should return."""

import jax.numpy as jnp
import numpy as np

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
