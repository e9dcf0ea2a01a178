"""Small layers of every form, with a cache in use."""

import jax
import jax.numpy as jnp

import kda_jax

CONFIGS = {
    "softplus, low rank": kda_jax.KDAConfig(D=24, H=2, HV=4, K=16, V=8, gate_rank=8),
    "safe, full rank": kda_jax.KDAConfig(D=24, H=1, HV=3, K=8, V=16, lower_bound=-5.0),
    "doubled beta, biased, full forget gate": kda_jax.KDAConfig(
        D=24, H=2, HV=2, K=8, V=16, W=3, forget_rank=None, allow_neg_eigval=True, conv_bias=True
    ),
}
S = 7


def make(name, *, dtype=jnp.float32):
    config = CONFIGS[name]
    params = kda_jax.init_params(config, jax.random.key(1), dtype=dtype)
    cache = kda_jax.init_cache(config, S, params=params)
    keys = jax.random.split(jax.random.key(2), 2)
    conv = jax.random.normal(keys[0], cache.conv.shape).astype(dtype)  # a pool in use
    return config, params, kda_jax.KDACache(conv, jax.random.normal(keys[1], cache.state.shape))


def inputs(T, D, seed=3, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (T, D)).astype(dtype)
