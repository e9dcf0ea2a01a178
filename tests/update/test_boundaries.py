"""Boundaries that break the rule: taken from 0 to T and ascending, by every operator alike."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import IMPLEMENTATIONS, assert_same_bits, running

import kda_jax

BROKEN = [([0, 5, 3], [0, 5, 5]), ([0, 4, 20], [0, 4, 8]), ([-7, 4, 8], [0, 4, 8])]
BROKEN += [([2, 4, 8], [2, 4, 8]), ([6, 1, 7], [6, 6, 7])]
SLOTS = np.array([1, 2], np.int32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def tokens(T=8, H=2, K=32):
    q, k, v, decay = (normal(1, T, H, K, seed=seed) for seed in range(4))
    return q, k, v, -np.abs(decay), np.abs(normal(1, T, H, seed=4)) % 1


def results(name, bounds, implementation="xla"):
    bounds, pool = jnp.asarray(bounds), normal(4, 2, 32, 32, seed=5)
    with running(implementation):
        if name in ("recurrent_kda", "chunk_kda"):
            op = getattr(kda_jax, name)
            return op(*tokens(), pool, SLOTS, cu_seqlens=bounds, implementation=implementation)
        if name == "commit":
            _, drafts = kda_jax.recurrent_verify(*tokens(), pool, SLOTS, cu_seqlens=bounds)
            accepted, options = np.array([2, 1]), dict(implementation=implementation)
            return (kda_jax.commit(pool, drafts, SLOTS, accepted, cu_seqlens=bounds, **options),)
        if name == "conv_prefill":
            x, weight = normal(8, 6, seed=6), normal(6, 4, seed=7)
            return kda_jax.conv_prefill(x, weight, normal(4, 6, 3, seed=8), SLOTS, bounds)
        return layer_results(name, bounds)


def layer_results(name, bounds):
    import jax

    config = kda_jax.KDAConfig(D=16, H=2, HV=2, K=8, V=4, gate_rank=4)
    params = kda_jax.init_params(config, jax.random.key(0), dtype=jnp.float32)
    x = normal(8, 16, seed=9)
    if name == "kda_apply":
        return (kda_jax.kda_apply(params, x[None], config=config, cu_seqlens=bounds),)
    cache = kda_jax.init_cache(config, 4)
    y, cache = kda_jax.kda_prefill(params, x, cache, SLOTS, bounds, config=config)
    return y, cache.conv, cache.state


CALLS = [(name, "xla") for name in ("chunk_kda", "conv_prefill", "kda_prefill", "kda_apply")]
CALLS += [(name, each) for name in ("recurrent_kda", "commit") for each in IMPLEMENTATIONS]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("broken", "meant"), BROKEN, ids=str)
@pytest.mark.parametrize(("name", "implementation"), CALLS)
def test_broken_boundaries_have_one_meaning(name, implementation, broken, meant):
    got, expected = (results(name, bounds, implementation) for bounds in (broken, meant))
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)
