"""The NNX module is the functions' layer: same weights, same bits, trainable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_same_bits

import kda_jax

nnx = pytest.importorskip("flax.nnx")


@pytest.mark.slow
def test_the_module_is_the_functions():
    from kda_jax.nnx import KDALayer

    switches = dict(allow_neg_eigval=True, conv_bias=True, forget_rank=None)
    config = kda_jax.KDAConfig(D=16, H=1, HV=2, K=8, V=4, gate_rank=4, **switches)
    params = kda_jax.init_params(config, jax.random.key(0), dtype=jnp.float32)
    layer = KDALayer(config, params=params)
    cache = layer.init_cache(3)
    assert cache.conv.dtype == jnp.float32
    x, slots, bounds = jnp.ones((5, 16)), jnp.array([2, 0]), jnp.array([0, 3, 5])
    y, after = layer.prefill(x, cache, slots, bounds)
    wanted, advanced = kda_jax.kda_prefill(params, x, cache, slots, bounds, config=config)
    assert_same_bits(y, wanted)
    y, after = layer.decode(x[:2], after, slots)
    wanted, advanced = kda_jax.kda_decode(params, x[:2], advanced, slots, config=config)
    assert_same_bits(y, wanted)
    assert_same_bits(after.state, advanced.state)
    rows, ids = jnp.stack([x, 2 * x]), jnp.array([[1, 1, 2, 2, 0], [3] * 5])
    wanted = kda_jax.kda_apply(params, rows, config=config, segment_ids=ids)
    assert_same_bits(layer(rows, segment_ids=ids), wanted)
    wanted = kda_jax.kda_apply(params, x[None], config=config, cu_seqlens=bounds)
    assert_same_bits(layer(x[None], cu_seqlens=bounds), wanted)


@pytest.mark.slow
def test_the_module_trains():
    from kda_jax.nnx import KDALayer

    layer = KDALayer(
        kda_jax.KDAConfig(D=16, H=1, HV=2, K=8, V=4), rngs=nnx.Rngs(0), dtype=jnp.float32
    )

    def loss(layer):
        return (layer(jnp.ones((2, 5, 16))) ** 2).sum()

    slopes = jax.tree.leaves(nnx.grad(loss)(layer))
    assert len(slopes) == 14
    assert all(np.isfinite(slope).all() for slope in slopes)
    with pytest.raises(ValueError, match="needs `params`, or `rngs`"):
        KDALayer(layer.config)
