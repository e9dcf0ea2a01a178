"""kda_apply: rows from nothing, segments in a row, padding, derivatives, meshes, messages."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import kernels_here
from jax.sharding import AxisType
from layers import CONFIGS
from support import assert_near, assert_same_bits

import kda_jax
from kda_contracts import LAYER_APPLY
from kda_jax.sharding import params_specs, specs
from kda_jax.tools import oracle

B, T, D = 2, 70, 24
# Segments of one token, over the border between two chunks of 64, an id that comes back, padding
# between segments and behind them, ids below 0.
RUNS = (
    ((0, 3), (5, 17), (2, 47), (5, 1), (-9, 2)),
    ((1, 1), (2, 1), (1, 3), (0, 2), (3, 60), (0, 3)),
)
IDS = np.stack([np.repeat(*zip(*runs, strict=True)) for runs in RUNS]).astype(np.int32)


def segments():
    """(row, start, end) of each segment."""
    for row, runs in enumerate(RUNS):
        ends = np.cumsum([length for _, length in runs]).tolist()
        for (number, length), end in zip(runs, ends, strict=True):
            if number:
                yield row, end - length, end


@functools.cache
def make(name):
    """Config, weights, and an x: NumPy arrays, none of which is zero or all alike."""
    config = CONFIGS[name]
    params = kda_jax.init_params(config, jax.random.key(1), dtype=jnp.float32)
    rng = np.random.default_rng(2)
    params = jax.tree.map(
        lambda w: np.asarray(w) + np.float32(0.1) * rng.standard_normal(w.shape, np.float32), params
    )
    return config, params, rng.standard_normal((B, T, D), np.float32)


COTANGENT = np.random.default_rng(3).standard_normal((B, T, D), np.float32)


def value(params, x, cotangent, **options):
    y = kda_jax.kda_apply(params, x, **options)
    return (y.astype(jnp.float32) * cotangent).sum(), y


step = jax.jit(
    jax.value_and_grad(value, argnums=(0, 1), has_aux=True),
    static_argnames=("config", "implementation"),
)


@functools.cache
def one_by_one(name):
    """`(y, slopes of the weights, slopes of x)`: each segment alone, by the recurrence itself.

    All are brought to one length: behind its end a segment sees nothing and gives nothing.
    """
    config, params, x = make(name)
    parts = list(segments())
    longest = max(end - start for _, start, end in parts)
    alone, weights = np.zeros((2, len(parts), longest, D), np.float32)
    for n, (row, start, end) in enumerate(parts):
        alone[n, : end - start] = x[row, start:end]
        weights[n, : end - start] = COTANGENT[row, start:end]
    (_, ys), slopes = step(params, alone, weights, config=config)
    y, by_x = np.zeros((2, B, T, D), np.float32)
    for n, (row, start, end) in enumerate(parts):
        y[row, start:end] = ys[n, : end - start]
        by_x[row, start:end] = slopes[1][n, : end - start]
    return y, slopes[0], by_x


def assert_slopes(got, wanted, limit=2e-5):
    """Of A_log and dt_bias within three times the limit.

    Their slopes are sums of decays' over all tokens, which in chunks of other borders differ by
    their rounding: in float32 chunk_kda has them within 1.6e-5 of the recurrence.
    """
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (place, w), y in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(got), strict=True
    ):
        assert np.asarray(w).any(), place
        rounded = str(place[-1]) in (".A_log", ".dt_bias")
        assert_near(y, w, 3 * limit if rounded else limit)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_row_meets_a_float64_layer(name):
    config, params, x = make(name)
    apply = jax.jit(functools.partial(kda_jax.kda_apply, config=config))
    nothing = np.zeros((config.channels, config.W - 1)), np.zeros((config.HV, config.V, config.K))
    for row, y in enumerate(apply(params, x)):
        assert_near(y, oracle.layer(params, x[row], *nothing, config)[0], 1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "softplus, low rank",
        pytest.param("safe, full rank", marks=pytest.mark.long),
        pytest.param("doubled beta, biased, full forget gate", marks=pytest.mark.slow),
    ],
)
def test_segments_in_a_row_equal_each_alone(name):
    """y, and the slopes of x and of every weight; NaN stands in the padding."""
    config, params, x = make(name)
    x = np.where((IDS != 0)[..., None], x, np.nan)
    (_, y), slopes = step(params, x, COTANGENT, config=config, segment_ids=IDS)
    wanted, by_weights, by_x = one_by_one(name)
    assert_near(y, wanted, 1e-5)
    assert_slopes(slopes, (by_weights, by_x))
    for got in (y, slopes[1]):
        assert not np.asarray(got)[IDS == 0].any()


@pytest.mark.slow
def test_sequences_by_their_boundaries_equal_each_alone():
    """With an empty one, and tokens of none behind the last, which hold NaN."""
    config, params, x = make("softplus, low rank")
    parts = list(segments())
    flat = np.concatenate([x[row, start:end] for row, start, end in parts])
    cotangent = np.concatenate([COTANGENT[row, start:end] for row, start, end in parts])
    lengths = [end - start for _, start, end in parts]
    lengths.insert(2, 0)
    bounds = np.cumsum([0, *lengths])
    tail = np.full((3, D), np.nan, np.float32)
    flat, cotangent = np.append(flat, tail, 0)[None], np.append(cotangent, tail * 0 + 1, 0)[None]
    cotangent = np.nan_to_num(cotangent, nan=1.0)
    (_, y), slopes = step(params, flat, cotangent, config=config, cu_seqlens=bounds)
    wanted, by_weights, by_x = one_by_one("softplus, low rank")
    wanted, by_x = (
        np.concatenate([z[row, start:end] for row, start, end in parts]) for z in (wanted, by_x)
    )
    assert_near(y[0, :-3], wanted, 1e-5)
    assert_slopes((slopes[0], slopes[1][:, :-3]), (by_weights, by_x[None]))
    assert not np.asarray(y)[0, -3:].any() and not np.asarray(slopes[1])[0, -3:].any()


def test_it_is_prefill_of_a_fresh_cache():
    config, params, x = make("doubled beta, biased, full forget gate")
    cache = kda_jax.init_cache(config, B)
    y, _ = jax.jit(functools.partial(kda_jax.kda_prefill, config=config))(
        params, x.reshape(-1, D), cache, jnp.arange(B), jnp.arange(B + 1) * T
    )
    assert_near(kda_jax.kda_apply(params, x, config=config).reshape(-1, D), y, 1e-6)
    packed = kda_jax.kda_apply(
        params, x.reshape(1, -1, D), config=config, cu_seqlens=jnp.arange(B + 1) * T
    )
    assert_near(packed[0], y, 1e-6)


def test_ids_are_told_apart_by_value():
    """Of every width, and as NumPy has them: 2**32 is an id, not the padding that it is narrowed
    to.
    """
    config, params, x = make("safe, full rank")
    x, ids = x[:, :9], np.array([[1, 1, 2, 2, 1, 0, 1, 3, 3]] * B)
    wanted = kda_jax.kda_apply(params, x, config=config, segment_ids=ids)
    for other in (
        np.where(ids == 1, 2**32, ids),
        np.where(ids == 1, -128, ids).astype(np.int8),
        jnp.asarray(ids, jnp.int16),
    ):
        y = kda_jax.kda_apply(params, x, config=config, segment_ids=other)
        assert_same_bits(y, wanted)
    again = kda_jax.kda_apply(params, x[:, 4:5], config=config)
    assert_near(wanted[:, 4:5], again, 1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_no_rows_or_no_tokens(shape):
    config, params, _ = make("softplus, low rank")
    x, ids = np.zeros((*shape, D), np.float32), np.zeros(shape, np.int32)
    for options in ({}, dict(segment_ids=ids)):
        assert kda_jax.kda_apply(params, x, config=config, **options).shape == x.shape


@pytest.mark.slow
def test_the_slopes_are_those_of_differences():
    """Of every weight along a direction of its own."""
    config, params, x = make("doubled beta, biased, full forget gate")
    ids = np.where(IDS == -9, 0, IDS)
    loss = jax.jit(lambda params: value(params, x, COTANGENT, config=config, segment_ids=ids)[0])
    slopes = jax.jit(jax.grad(loss))(params)
    rng, size = np.random.default_rng(5), 3e-4
    for name, slope in vars(slopes).items():
        if slope is None:
            continue
        way = rng.standard_normal(slope.shape, np.float32)
        ends = [
            loss(dataclasses.replace(params, **{name: getattr(params, name) + sign * size * way}))
            for sign in (1, -1)
        ]
        numeric = float(ends[0] - ends[1]) / (2 * size)
        assert abs(float((slope * way).sum()) - numeric) <= 0.03 * max(1.0, abs(numeric)), name


@pytest.mark.slow
def test_what_training_loops_do_with_a_layer():
    """jax.checkpoint, a scan over stacked layers, vmap over a further axis, forward mode."""
    config, params, x = make("safe, full rank")
    x, ids = x[:, :12], IDS[:, 15:27]
    apply = functools.partial(kda_jax.kda_apply, config=config, segment_ids=ids)
    plain = jax.jit(lambda params, x: x + apply(params, apply(params, x)))

    def scanned(params, x):
        stacked = jax.tree.map(lambda w: jnp.stack([w, w]), params)
        layer = jax.checkpoint(lambda y, params: (apply(params, y), None))
        return x + jax.lax.scan(layer, x, stacked)[0]

    def loss(f):
        return lambda params, x: (f(params, x) * COTANGENT[:, :12]).sum()

    wanted, slopes = jax.jit(jax.value_and_grad(loss(plain)))(params, x)
    got, others = jax.jit(jax.value_and_grad(loss(scanned)))(params, x)
    assert_near(got, wanted, 1e-5)
    assert_slopes(others, slopes)
    _, along = jax.jvp(functools.partial(loss(plain), params), (x,), (x,))
    by_x = jax.jit(jax.grad(loss(plain), argnums=1))(params, x)
    assert_near(along, (by_x * x).sum(), 1e-4)
    mapped = jax.jit(jax.vmap(plain, in_axes=(None, 1), out_axes=1))
    each = mapped(params, np.stack([x, 2 * x], 1))
    for n, y in enumerate((plain(params, x), plain(params, 2 * x))):
        assert_near(each[:, n], y, 1e-6)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("by", ["segment_ids", pytest.param("cu_seqlens", marks=pytest.mark.long)])
@pytest.mark.slow
def test_training_in_shard_map_with_its_check_on(by):
    """Rows over one axis and heads over another: y and the slopes of one device."""
    config, params, x = make("softplus, low rank")
    if by == "segment_ids":
        options, rows = dict(segment_ids=IDS), "rows"
    else:
        x, options, rows = x.reshape(1, -1, D), dict(cu_seqlens=np.array([0, 60, 140])), None
    cotangent = COTANGENT.reshape(x.shape)
    (_, y), slopes = step(params, x, cotangent, config=config, **options)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2,
                         devices=jax.devices()[:4])  # fmt: skip
    cuts, (of_y,) = specs(LAYER_APPLY, heads="heads", rows=rows)

    def local(params, x, given):
        y = kda_jax.kda_apply(params, x, config=config, **given)
        return jax.lax.psum(y, "heads")

    over = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(params_specs(params, "heads"), cuts["x"], {by: cuts[by]}),
        out_specs=of_y,
    )

    def loss(params, x):
        y = over(params, x, options)
        return (y * cotangent).sum(), y

    (_, got), others = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    assert_near(got, y, 2e-6)
    assert_slopes(others, slopes)


@pytest.mark.long
def test_in_the_kernels_segments_are_those_of_xla():
    """y and the slopes of every weight, all in bfloat16; a number of tokens that is padded."""
    config = kda_jax.KDAConfig(D=D, H=1, HV=2, K=64, V=64, gate_rank=64)
    params = kda_jax.init_params(config, jax.random.key(1))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((B, T, D)), jnp.bfloat16)
    options = dict(config=config, segment_ids=IDS)
    with kernels_here():
        got = step(params, x, COTANGENT, **options, implementation="mosaic_gpu")
        (_, y), slopes = jax.block_until_ready(got)
    exact = jax.tree.map(lambda w: w.astype(jnp.float32), (params, x))
    (_, wanted), others = step(*exact, COTANGENT, **options, implementation="xla")
    for got, expected in zip(
        jax.tree.leaves((y, slopes)), jax.tree.leaves((wanted, others)), strict=True
    ):
        assert_near(got.astype(jnp.float32), expected, 2e-2)


def test_the_dtype_is_that_of_x():
    config, params, x = make("softplus, low rank")
    y = kda_jax.kda_apply(params, jnp.asarray(x, jnp.bfloat16), config=config)
    assert y.dtype == jnp.bfloat16
    assert_near(y.astype(jnp.float32), kda_jax.kda_apply(params, x, config=config), 3e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: dict(segment_ids=IDS, cu_seqlens=np.arange(3)), "exclude each other"),
        (lambda x: dict(cu_seqlens=np.arange(3)), "`x` must be .1, T, D. beside `cu_seqlens`"),
        (lambda x: dict(segment_ids=IDS[:, 1:]), "`segment_ids` must have shape .2, 70."),
        (lambda x: dict(segment_ids=IDS[0]), "`segment_ids` must have shape .2, 70."),
        (lambda x: dict(segment_ids=IDS > 1), "`segment_ids` must be int8, int16, int32 or int64"),
        (lambda x: dict(segment_ids=[1]), "`segment_ids` must be an array .got list"),
        (lambda x: dict(x=x[0]), r"`x` must be \[B, T, D\](?s:.*)x\[None\]"),
        (lambda x: dict(x=x[..., 1:]), "`x` must have shape .2, 70, 24. .got .2, 70, 23.."),
        (lambda x: dict(implementation="triton"), "no such kernel"),
    ],
)
def test_messages_of_kda_apply(change, message):
    config, params, x = make("softplus, low rank")
    given = dict(x=x) | change(x)
    error = NotImplementedError if "implementation" in given else kda_jax.ContractError
    with pytest.raises(error, match=message):
        kda_jax.kda_apply(params, config=config, **given)
    with pytest.raises(error, match=message):
        kda_jax.explain(kda_jax.kda_apply, params, config=config, **given)


def test_prefill_of_rows_says_the_cure():
    config, params, x = make("softplus, low rank")
    cache, slots, bounds = kda_jax.init_cache(config, B), jnp.arange(B), jnp.arange(B + 1)
    with pytest.raises(kda_jax.ContractError, match=r"kda_apply.*x.reshape\(140, 24\)"):
        kda_jax.kda_prefill(params, x, cache, slots, bounds, config=config)
    cure = kda_jax.kda_prefill(
        params, x.reshape(140, 24), cache, slots, np.arange(3) * 70, config=config
    )[0]
    assert_near(cure.reshape(x.shape), kda_jax.kda_apply(params, x, config=config), 1e-6)


def test_the_runs_of_the_tests_are_what_they_say():
    assert IDS.shape == (B, T)
    assert [x for x, _ in itertools.groupby(IDS[0].tolist())] == [0, 5, 2, 5, -9]
    assert len(list(segments())) == 8
