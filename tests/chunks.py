"""Operands of chunk_kda, and what it should return."""

import jax.numpy as jnp
import numpy as np

from kda_jax import oracle

H, HV, K, V, S = 2, 4, 32, 24, 6


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
    return x | dict(initial_state=normal(S, HV, V, K), slots=rng.permutation(S)[: N or B].astype(np.int32))


def wanted(x, cu_seqlens=None, **options):
    out, state, _ = oracle.update(*(x[name] for name in x), cu_seqlens=cu_seqlens, **options)
    return out, state
