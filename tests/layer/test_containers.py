"""KDAParams and KDACache as they meet a caller: printed, and in another library's hands."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import kda_jax
from kda_jax.sharding import cache_specs, params_specs

CONFIG = kda_jax.KDAConfig(D=64, H=2, HV=4, K=16, V=16, gate_rank=16)
RNG = np.random.default_rng(0)
# Drawn by NumPy: every worker imports this module, and init_params compiles for seconds.
PARAMS = jax.tree.map(
    lambda x: jnp.asarray((0.2 * RNG.standard_normal(x.shape)).astype(x.dtype)),
    jax.eval_shape(lambda: kda_jax.init_params(CONFIG, jax.random.key(0))),
)
CACHE = kda_jax.init_cache(CONFIG, 3)
X, SLOTS = jnp.zeros((2, 64)), jnp.arange(2)


def test_a_repr_shows_shapes_and_dtypes_instead_of_values():
    shown = repr(PARAMS)
    assert shown.startswith("KDAParams(q_proj=bfloat16[64, 32], k_proj=bfloat16[64, 32], ")
    assert "A_log=float32[4]" in shown
    assert shown.endswith("g_bias=None, q_conv_bias=None, k_conv_bias=None, v_conv_bias=None)")
    assert len(shown) < 700
    assert repr(CACHE) == "KDACache(conv=float32[3, 128, 3], state=float32[3, 4, 16, 16])"


def test_a_repr_shows_what_stands_for_an_array():
    conv, state = P(None, "tp", None), P(None, "tp", None, None)
    assert repr(cache_specs("tp")) == f"KDACache(conv={conv}, state={state})"
    assert len(repr(params_specs(PARAMS, "tp"))) < 1500
    traced = []
    jax.jit(lambda cache: traced.append(repr(cache)) or cache.state)(CACHE)
    assert traced == [repr(CACHE)]
    values = kda_jax.KDACache(conv=list(range(1000)), state=np.zeros((2, 1), np.int8))
    assert len(repr(values)) < 120
    assert repr(values).endswith("state=int8[2, 1])")


def step(params=PARAMS, cache=CACHE, config=CONFIG):
    return kda_jax.kda_decode(params, X, cache, SLOTS, config=config)


def prefill(params=PARAMS, cache=CACHE, config=CONFIG):
    return kda_jax.kda_prefill(params, X, cache, SLOTS, jnp.arange(3), config=config)


def applied(params=PARAMS, config=CONFIG):
    return kda_jax.kda_apply(params, X[None], config=config)


def explained_apply(params=PARAMS, config=CONFIG):
    return kda_jax.explain(kda_jax.kda_apply, params, X[None], config=config)


def explained(params=PARAMS, cache=CACHE, config=CONFIG):
    return kda_jax.explain(kda_jax.kda_decode, params, X, cache, SLOTS, config=config)


@pytest.mark.parametrize("call", [step, prefill, applied, explained, explained_apply])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(params=vars(PARAMS)), "`params` must be a KDAParams .got dict.*KDAParams...x."),
        (dict(params=[PARAMS]), "`params` must be a KDAParams .got list.*KDAParams...x."),
        (dict(cache=[CACHE]), "`cache` must be a KDACache .got list.*KDACache...x."),
        (dict(cache=vars(CACHE)), "`cache` must be a KDACache .got dict.*KDACache...x."),
        (dict(config=vars(CONFIG)), "`config` must be a KDAConfig .got dict.*KDAConfig...x."),
        (dict(config=None), "`config` must be a KDAConfig .got NoneType"),
    ],
)
def test_a_dict_or_a_list_in_place_of_a_layers_own_type(call, wrong, message):
    if "cache" in wrong and "cache" not in inspect.signature(call).parameters:
        return  # kda_apply takes none
    with pytest.raises(kda_jax.ContractError, match=rf"^kda_jax\.kda_\w+: {message}"):
        call(**wrong)


def test_the_cure_that_the_message_names_is_right():
    assert jax.tree.map(jnp.array_equal, step(), step(kda_jax.KDAParams(**vars(PARAMS))))
