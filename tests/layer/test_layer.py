"""The layer: prefill, decode and a float64 layer compared; slots, contract, derivatives."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import CONFIGS, S, inputs, make
from support import assert_near, assert_same_bits, running

import kda_jax
from kda_contracts import ContractError
from kda_jax.tools import oracle

LIMIT = 1e-5
prefill = jax.jit(kda_jax.kda_prefill, static_argnames="config")
decode = jax.jit(kda_jax.kda_decode, static_argnames=("config", "implementation"))


@pytest.mark.optimized
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_meet_a_float64_layer(name):
    config, params, cache = make(name)
    x = inputs(70, config.D)
    y, after = prefill(params, x, cache, jnp.array([4]), jnp.array([0, 70]), config=config)
    wanted, conv, state = oracle.layer(params, x, cache.conv[4], cache.state[4], config)
    assert_near(y, wanted, LIMIT)
    assert_near(after.conv[4], conv, LIMIT)
    assert_near(after.state[4], state, LIMIT)
    y, after = decode(params, x[:1], cache, jnp.array([4]), config=config)
    wanted, conv, state = oracle.layer(params, x[:1], cache.conv[4], cache.state[4], config)
    assert_near(y, wanted, LIMIT)
    assert_near(after.conv[4], conv, LIMIT)
    assert_near(after.state[4], state, LIMIT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "T", [65, *(pytest.param(T, marks=pytest.mark.slow) for T in (1, 63, 64, 200))]
)
def test_prefill_then_decode_is_prefill_of_one_more(T, name):
    """In a batch with an empty, a padded and a short sequence, and tokens of none.

    One compilation serves all T.
    """
    config, params, cache = make(name)
    lengths, slots = (T, 0, 5, 2), jnp.array([3, 1, -1, 6])
    bounds = np.cumsum((0, *lengths))
    x = inputs(220, config.D)
    one_more = inputs(4, config.D, seed=9)
    y, after = prefill(params, x, cache, slots, jnp.asarray(bounds), config=config)
    last, stepped = decode(params, one_more, after, slots, config=config)

    longer = np.zeros_like(x)
    longer[: bounds[-1] + 4] = np.concatenate(
        [
            np.append(x[a:b], one_more[n : n + 1], 0)
            for n, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
    )
    ends = bounds + np.arange(5)
    whole, wanted = prefill(
        params, jnp.asarray(longer), cache, slots, jnp.asarray(ends), config=config
    )
    for n in range(4):
        assert_near(last[n], whole[ends[n + 1] - 1], LIMIT)
        assert_near(y[bounds[n] : bounds[n + 1]], whole[ends[n] : ends[n + 1] - 1], LIMIT)
    assert_near(stepped.conv, wanted.conv, LIMIT)
    assert_near(stepped.state, wanted.state, LIMIT)
    assert not np.asarray(last[2]).any()
    for untouched in (0, 2, 4, 5):
        assert_same_bits(stepped.state[untouched], cache.state[untouched])
        assert_same_bits(stepped.conv[untouched], cache.conv[untouched])


@pytest.mark.slow
def test_prefill_in_pieces_is_prefill_at_once():
    config, params, cache = make("softplus, low rank")
    x, slot = inputs(150, config.D), jnp.array([5])
    whole, wanted = prefill(params, x, cache, slot, jnp.array([0, 150]), config=config)
    parts, at = [], 0
    for length in (1, 2, 70, 77):
        y, cache = prefill(
            params, x[at : at + length], cache, slot, jnp.array([0, length]), config=config
        )
        parts, at = [*parts, y], at + length
    assert_near(jnp.concatenate(parts), whole, LIMIT)
    assert_near(cache.state, wanted.state, LIMIT)
    assert_near(cache.conv, wanted.conv, LIMIT)


@pytest.mark.slow
def test_a_fresh_sequence_forgets_its_slot():
    config, params, cache = make("safe, full rank")
    x = inputs(9, config.D)
    y, _ = prefill(
        params,
        x,
        cache,
        jnp.array([2, 3]),
        jnp.array([0, 4, 9]),
        config=config,
        sources=jnp.array([-1, 3]),
    )
    empty = kda_jax.init_cache(config, S, conv_dtype=jnp.float32)
    wanted, _ = prefill(params, x[:4], empty, jnp.array([2]), jnp.array([0, 4]), config=config)
    used, _ = prefill(params, x[4:], cache, jnp.array([3]), jnp.array([0, 5]), config=config)
    assert_near(y[:4], wanted, LIMIT)
    assert_near(y[4:], used, LIMIT)


def test_padded_rows_may_hold_anything():
    config, params, cache = make("softplus, low rank")
    x = inputs(3, config.D).at[1].set(jnp.nan)
    y, after = decode(params, x, cache, jnp.array([0, -1, 6]), config=config)
    assert np.isfinite(np.asarray(y)).all()
    assert not np.asarray(y)[1].any()
    assert np.isfinite(np.asarray(after.state)).all()
    y, after = prefill(
        params, x, cache, jnp.array([0, S, 6]), jnp.array([0, 1, 2, 3]), config=config
    )
    assert np.isfinite(np.asarray(y)).all()
    assert not np.asarray(y)[1].any()
    assert np.isfinite(np.asarray(after.state)).all() and np.isfinite(np.asarray(after.conv)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int64"])
def test_slots_of_any_width_in_a_large_pool(dtype):
    """A pool of 200 slots, which int8 cannot count; 2**32, which is not slot 0."""
    config, params, _ = make("softplus, low rank")
    cache = kda_jax.init_cache(config, 200, conv_dtype=jnp.float32)
    x, slots = inputs(3, config.D), np.array([5, -1, 100], np.int32)
    narrow = slots.astype(dtype)
    if dtype == "int64":
        narrow[1] = 2**32
    wanted, after = kda_jax.kda_decode(params, x, cache, slots, config=config)
    assert np.asarray(wanted)[2].any()
    y, got = kda_jax.kda_decode(params, x, cache, narrow, config=config)
    assert_same_bits(y, wanted)
    assert_same_bits(got.conv, after.conv)
    bounds = np.arange(4, dtype=np.int64)
    wanted, after = kda_jax.kda_prefill(params, x, cache, slots, bounds, config=config)
    y, got = kda_jax.kda_prefill(params, x, cache, narrow, bounds, config=config)
    assert_same_bits(y, wanted)
    assert_same_bits(got.conv, after.conv)
    assert_same_bits(got.state, after.state)


@pytest.mark.slow
def test_nan_where_nothing_is_live_reaches_no_derivative():
    config, params, cache = make("softplus, low rank")
    x = inputs(9, config.D).at[3:].set(jnp.nan)  # a padded sequence, and tokens of none

    def loss(params, x, decode):
        if decode:
            y, after = kda_jax.kda_decode(
                params, x[2:4], cache, jnp.array([1, -1]), config=config, implementation="xla"
            )
        else:
            y, after = kda_jax.kda_prefill(
                params, x, cache, jnp.array([1, -1]), jnp.array([0, 3, 6]), config=config
            )
        return (y**2).sum() + (after.state[1] ** 2).sum()

    for decode in (False, True):
        slopes = jax.grad(loss)(params, x, decode)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_nothing_to_do_is_a_step_like_any_other():
    config, params, cache = make("safe, full rank")
    x, none, empty = (
        inputs(3, config.D),
        jnp.zeros(0, jnp.int32),
        kda_jax.init_cache(config, 0, conv_dtype=jnp.float32),
    )
    y, after = kda_jax.kda_prefill(
        params, x[:0], cache, jnp.array([1]), jnp.array([0, 0]), config=config
    )
    assert y.shape == (0, config.D)
    assert_same_bits(after.state, cache.state)
    assert kda_jax.kda_decode(params, x[:0], cache, none, config=config)[0].shape == (0, config.D)
    y, after = kda_jax.kda_decode(params, x, empty, jnp.array([0, 1, 2]), config=config)
    assert not np.asarray(y).any()
    y, after = kda_jax.kda_prefill(
        params, x, empty, jnp.array([0]), jnp.array([0, 3]), config=config
    )
    assert not np.asarray(y).any()


def test_a_donated_cache_and_refs_advance_in_place():
    config, params, cache = make("softplus, low rank")
    x, slots = inputs(2, config.D), jnp.array([1, 4])
    wanted_y, wanted = decode(params, x, cache, slots, config=config)
    refs = kda_jax.KDACache(jax.new_ref(cache.conv.copy()), jax.new_ref(cache.state.copy()))
    y, none = jax.jit(functools.partial(kda_jax.kda_decode, config=config))(params, x, refs, slots)
    assert none.conv is None and none.state is None
    assert_near(y, wanted_y, 1e-6)
    assert_near(refs.state[...], wanted.state, 1e-6)
    assert_near(refs.conv[...], wanted.conv, 1e-6)
    step = jax.jit(
        lambda cache: kda_jax.kda_decode(params, x, cache, slots, config=config), donate_argnums=0
    )
    step(cache)
    assert cache.state.is_deleted() and cache.conv.is_deleted()


def test_a_bfloat16_model_keeps_its_dtypes():
    config, params, cache = make("softplus, low rank", dtype=jnp.bfloat16)
    x = inputs(5, config.D, dtype=jnp.bfloat16)
    y, after = prefill(params, x, cache, jnp.array([0]), jnp.array([0, 5]), config=config)
    assert (y.dtype, after.conv.dtype, after.state.dtype) == (
        jnp.bfloat16,
        jnp.bfloat16,
        jnp.float32,
    )
    assert_near(y, oracle.layer(params, x, cache.conv[0], cache.state[0], config)[0], 3e-2)


@pytest.mark.slow
def test_the_layer_differentiates():
    config, params, cache = make("safe, full rank")
    x = inputs(20, config.D)

    def loss(params, x):
        y, after = kda_jax.kda_prefill(
            params, x, cache, jnp.array([0]), jnp.array([0, 20]), config=config
        )
        return (y**2).sum() + (after.state**2).sum()

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    assert all(
        np.isfinite(leaf).all() and np.asarray(leaf).any() for leaf in jax.tree.leaves(slopes)
    )
    direction = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), (params, x)
    )
    along = sum(
        float((a * b).sum())
        for a, b in zip(*map(jax.tree.leaves, (slopes, direction)), strict=True)
    )
    step = 1e-3
    moved = [
        jax.tree.map(lambda y, d, sign=sign: y + sign * step * d, (params, x), direction)
        for sign in (1, -1)
    ]
    numeric = (float(loss(*moved[0])) - float(loss(*moved[1]))) / (2 * step)
    assert abs(along - numeric) <= 0.02 * abs(numeric)


@pytest.mark.parametrize(
    ("holder", "change", "message"),
    [
        ("params", lambda p: dict(q_proj=p.q_proj.T), "`q_proj` must have shape (24, 32)"),
        ("params", lambda p: dict(q_proj=p.q_proj.T), "transposed: q_proj.T"),
        (
            "params",
            lambda p: dict(A_log=p.A_log.reshape(1, 1, 4, 1)),
            "1 argument breaks the contract",
        ),
        (
            "params",
            lambda p: dict(dt_bias=p.A_log),
            "`dt_bias` must have shape (64,) (got (4,)).",
        ),
        (
            "params",
            lambda p: dict(g_up=p.g_up[:5]),
            "`g_up` must have shape (8, 32), or (D, HV*V)",
        ),
        ("cache", lambda c: dict(conv=c.conv[:, :, :2]), "`conv` must have shape (7, 96, 3)"),
        ("cache", lambda c: dict(state=c.state.mT), "`state` must have shape (7, 4, 8, 16)"),
    ],
)
def test_messages(holder, change, message):
    config, params, cache = make("softplus, low rank")
    given = dict(params=params, cache=cache)
    given[holder] = dataclasses.replace(given[holder], **change(given[holder]))
    with pytest.raises(ContractError) as error:
        kda_jax.kda_decode(x=inputs(2, config.D), slots=jnp.array([0, 1]), config=config, **given)
    assert message in str(error.value)
    with pytest.raises(ContractError) as error:
        kda_jax.kda_prefill(
            x=inputs(2, config.D),
            slots=jnp.array([0]),
            cu_seqlens=jnp.array([0, 2]),
            config=config,
            **given,
        )
    assert message in str(error.value)


def test_what_only_prefill_or_the_gate_can_have_wrong():
    config, params, cache = make("softplus, low rank")
    x, slots, bounds = inputs(2, config.D), jnp.array([0]), jnp.array([0, 2])
    for sources in (jnp.array([1, -1]), jnp.array([True])):
        with pytest.raises(ContractError, match="`sources` must"):
            kda_jax.kda_prefill(params, x, cache, slots, bounds, config=config, sources=sources)
    for options, message in (
        (dict(checkpoints=jnp.array([[1]])), "`checkpoints` and `checkpoint_every` come together"),
        (dict(checkpoint_every=64), "`checkpoints` and `checkpoint_every` come together"),
        (
            dict(checkpoints=jnp.array([[1]]), checkpoint_every=96),
            r"`checkpoint_every` must be a multiple of 64 from 64 to 2147483584 \(got int 96\)",
        ),
        (
            dict(checkpoints=jnp.array([1]), checkpoint_every=64),
            r"`checkpoints` must have shape \[N, M\] \(got \(1,\)\)",
        ),
    ):
        with pytest.raises(ContractError, match=message):
            kda_jax.kda_prefill(params, x, cache, slots, bounds, config=config, **options)
    for change, message in (
        (
            dict(g_down=None),
            r"`g_up` must be \[D, HV\*V\] = \(24, 32\) without a `g_down` \(got \(8, 32\)\)",
        ),
        (
            dict(g_up=jnp.zeros((24, 32))),
            r"`g_up` must be \[V, HV\*V\] = \(8, 32\) beside a `g_down`",
        ),
    ):
        with pytest.raises(ContractError, match=message):
            kda_jax.kda_decode(
                dataclasses.replace(params, **change), x, cache, jnp.array([0, 1]), config=config
            )


def test_configs_of_released_models():
    linear = dict(
        num_heads=32,
        head_dim=128,
        short_conv_kernel_size=4,
        kda_layers=[1, 2],
        full_attn_layers=[3],
    )
    kimi = kda_jax.config_from_hf(
        dict(hidden_size=2304, rms_norm_eps=1e-5, linear_attn_config=linear)
    )
    assert kimi == kda_jax.KDAConfig(D=2304, H=32, HV=32, K=128, V=128, gate_rank=128)
    k3 = dict(num_heads=96, gate_lower_bound=-5.0, use_full_rank_gate=True)
    k3 = kda_jax.config_from_hf(
        dict(text_config=dict(hidden_size=7168, rms_norm_eps=1e-6, linear_attn_config=linear | k3))
    )
    assert k3 == kda_jax.KDAConfig(
        D=7168, H=96, HV=96, K=128, V=128, lower_bound=-5.0, norm_eps=1e-6
    )
    with pytest.raises(
        kda_jax.BadFileError, match=r"`linear_attn_config.num_heads` must be a whole number"
    ):
        kda_jax.config_from_hf(
            dict(hidden_size=2304, linear_attn_config=dict(head_dim=128, short_conv_kernel_size=4))
        )


def test_switches_and_weights_that_do_not_fit():
    config, params, cache = make("doubled beta, biased, full forget gate")
    x, slots = inputs(2, config.D), jnp.array([0, 1])

    def refused(message, config=config, **change):
        for step, more in ((kda_jax.kda_decode, ()), (kda_jax.kda_prefill, (jnp.arange(3),))):
            with pytest.raises(ContractError, match=message):
                step(dataclasses.replace(params, **change), x, cache, slots, *more, config=config)

    refused("`k_conv_bias` must be an array, as config.conv_bias is True", k_conv_bias=None)
    unbiased = dataclasses.replace(config, conv_bias=False)
    refused("`q_conv_bias` must be None, as config.conv_bias is False", unbiased)
    refused(r"`f_up` must be \[R, HV\*K\] = \(8, 16\) beside a `f_down`", f_down=jnp.ones((24, 8)))
    low = jnp.ones((8, 16))
    refused(r"`f_up` must be \[D, HV\*K\] = \(24, 16\) without a `f_down`", f_up=low)
    refused("`v_conv_bias` must have shape", v_conv_bias=jnp.ones(31))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cache_is_as_wide_as_its_layer(dtype):
    config = CONFIGS["softplus, low rank"]
    params = kda_jax.init_params(config, jax.random.key(1), dtype=dtype)
    shapes = jax.eval_shape(lambda: params)
    assert kda_jax.init_cache(config, 2).conv.dtype == jnp.float32
    assert kda_jax.init_cache(config, 2, params=params).conv.dtype == dtype
    assert kda_jax.init_cache(config, 2, params=shapes).conv.dtype == dtype
    given = kda_jax.init_cache(config, 2, params=params, conv_dtype=jnp.bfloat16)
    assert given.conv.dtype == jnp.bfloat16
    assert {x.state.dtype.name for x in (given, kda_jax.init_cache(config, 2))} == {"float32"}


@pytest.mark.slow
def test_by_default_prefill_in_pieces_is_prefill_at_once():
    config = CONFIGS["softplus, low rank"]
    params = kda_jax.init_params(config, jax.random.key(1), dtype=jnp.float32)
    x, slot, cache = inputs(40, config.D), jnp.array([0]), kda_jax.init_cache(config, 1)
    whole, _ = prefill(params, x, cache, slot, jnp.array([0, 40]), config=config)
    half = jnp.array([0, 20])  # one program serves both
    first, cache = prefill(params, x[:20], cache, slot, half, config=config)
    rest, _ = prefill(params, x[20:], cache, slot, half, config=config)
    assert_near(jnp.concatenate([first, rest]), whole, 1e-6)


def test_lings_gates_are_full_where_transformers_writes_no_key_for_it():
    ling = dict(model_type="bailing_hybrid", hidden_size=40, num_attention_heads=4, head_dim=24)
    ling |= dict(short_conv_kernel_size=5, kda_safe_gate=True, kda_lower_bound=-5.0)
    sizes = dict(D=40, H=4, HV=4, K=24, V=24, W=5, lower_bound=-5.0, norm_eps=1e-6)
    full = kda_jax.KDAConfig(**sizes, gate_rank=None, forget_rank=None)
    assert kda_jax.config_from_hf(ling) == full
    assert kda_jax.config_from_hf(ling | dict(no_kda_lora=True)) == full
    low = kda_jax.config_from_hf(ling | dict(no_kda_lora=False))
    assert low == kda_jax.KDAConfig(**sizes, gate_rank=24, forget_rank=24)


def test_any_batch_exports_as_one_program():
    config, params, cache = make("softplus, low rank")
    B = jax.export.symbolic_shape("B")[0]
    shapes = jax.ShapeDtypeStruct((B, config.D), jnp.float32), jax.ShapeDtypeStruct((B,), jnp.int32)
    step = functools.partial(kda_jax.kda_decode, config=config, implementation="xla")
    program = jax.export.export(jax.jit(lambda x, slots: step(params, x, cache, slots)[0]))(*shapes)
    x, slots = inputs(3, config.D), jnp.array([4, -1, 0])
    assert_near(program.call(x, slots.astype(jnp.int32)), step(params, x, cache, slots)[0], LIMIT)


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("B", [1, 3, 9])
def test_with_a_kernel_a_few_rows_are_padded_and_nobody_sees_it(B):
    config = kda_jax.KDAConfig(D=24, H=2, HV=4, K=32, V=16, gate_rank=16)
    params, cache = (
        kda_jax.init_params(config, jax.random.key(1), dtype=jnp.float32),
        kda_jax.init_cache(config, 12),
    )
    x, slots = inputs(B, config.D), jnp.arange(B)[::-1]
    wanted, after = decode(params, x, cache, slots, config=config, implementation="xla")
    with running("mosaic_gpu"):
        y, got = kda_jax.kda_decode(
            params, x, cache, slots, config=config, implementation="mosaic_gpu"
        )
    assert_near(y, wanted, LIMIT)
    assert_near(got.state, after.state, LIMIT)
    assert_near(got.conv, after.conv, LIMIT)  # on a GPU one row's product is a sum of its own
