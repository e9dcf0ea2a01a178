"""The layer without a cache: against float64, in segments, under JAX's transformations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import kernels_here
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import CONFIGS, inputs, make
from support import ON_GPU, assert_near, assert_same_bits

import kda_jax
from kda_contracts import ContractError
from kda_jax.tools import oracle

LIMIT, GRADIENT_LIMIT = 1e-5, 2e-5
NAMES = list(CONFIGS)
# Two rows; an id that comes back, padding in front, between and behind, a segment over a chunk.
LENGTHS = (((7, 5), (1, 66), (0, 3), (7, 1), (2, 5)), ((0, 2), (3, 1), (4, 77)))
apply = jax.jit(kda_jax.kda_apply, static_argnames="config")


def ids_of(lengths):
    return jnp.asarray([np.repeat(*np.transpose(row)) for row in lengths], jnp.int32)


def segments(lengths):
    """`(row, start, end)` of each segment that is no padding."""
    for row, pairs in enumerate(lengths):
        at = 0
        for number, length in pairs:
            if number:
                yield row, at, at + length
            at += length


def zeros(config, params):
    pools = kda_jax.init_cache(config, 1, params=params)
    return pools.conv[0], pools.state[0]


def loss(params, x, weights, config, **options):
    """Of one sign: with random ones A_log's gradient, a sum over all tokens, cancels."""
    y = kda_jax.kda_apply(params, x, config=config, **options)
    return (y**2 * weights**2).sum()


gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnames="config")


def assert_trees_are_near(got, expected, limit):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_near(a, b, limit)


@pytest.mark.optimized
@pytest.mark.parametrize("name", NAMES)
def test_each_row_meets_a_float64_layer(name):
    config, params, _ = make(name)
    x = jnp.stack([inputs(70, config.D, seed) for seed in (3, 4)])
    y = apply(params, x, config=config)
    for row in range(2):
        wanted, _, _ = oracle.layer(params, x[row], *zeros(config, params), config)
        assert_near(y[row], wanted, LIMIT)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[::-1])
def test_segments_are_what_each_is_alone(name):
    """Values, and the gradients of x and of every weight; padding holds NaN, and has none."""
    config, params, _ = make(name)
    ids = ids_of(LENGTHS)
    x = jnp.stack([inputs(80, config.D, seed) for seed in (3, 4)])
    weights = jnp.stack([inputs(80, config.D, seed) for seed in (5, 6)])
    given = jnp.where(ids[..., None] == 0, jnp.nan, x)
    y = apply(params, given, config=config, segment_ids=ids)
    by_params, by_x = gradients(params, given, weights, config=config, segment_ids=ids)
    assert not np.asarray(y)[np.asarray(ids) == 0].any()
    assert not np.asarray(by_x)[np.asarray(ids) == 0].any()
    total = jax.tree.map(jnp.zeros_like, params)
    for row, start, end in segments(LENGTHS):
        alone = x[row : row + 1, start:end]
        assert_near(y[row, start:end], apply(params, alone, config=config)[0], LIMIT)
        of_one, by_one = gradients(params, alone, weights[row : row + 1, start:end], config=config)
        assert_near(by_x[row, start:end], by_one[0], GRADIENT_LIMIT)
        total = jax.tree.map(jnp.add, total, of_one)
    assert_trees_are_near(by_params, total, GRADIENT_LIMIT)


@pytest.mark.slow
def test_boundaries_are_what_ids_are():
    config, params, _ = make(NAMES[0])
    x, weights = inputs(80, config.D)[None], inputs(80, config.D, 5)[None]
    bounds = jnp.array([0, 5, 5, 71, 74])  # an empty sequence; tokens of none behind the last
    ids = ids_of([((1, 5), (2, 66), (3, 3), (0, 6))])
    x = x.at[:, 74:].set(jnp.nan)
    assert_near(
        apply(params, x, config=config, cu_seqlens=bounds),
        apply(params, x, config=config, segment_ids=ids),
        LIMIT,
    )
    assert_trees_are_near(
        gradients(params, x, weights, config=config, cu_seqlens=bounds),
        gradients(params, x, weights, config=config, segment_ids=ids),
        GRADIENT_LIMIT,
    )


def test_ids_of_64_bits_are_compared_before_they_are_narrowed():
    config, params, _ = make(NAMES[1])
    x = inputs(4, config.D)[None]
    with jax.enable_x64(True):
        ids = jnp.asarray([[2**32, 2**32, 1, 1]], jnp.int64)
        y = kda_jax.kda_apply(params, x, config=config, segment_ids=ids)
    expected = kda_jax.kda_apply(params, x, config=config, segment_ids=ids_of([((9, 2), (1, 2))]))
    assert_near(y, expected, LIMIT)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_prefill_of_a_fresh_cache(name):
    config, params, cache = make(name)
    x = inputs(40, config.D)
    y, _ = kda_jax.kda_prefill(
        params, x, cache, jnp.array([2]), jnp.array([0, 40]), config=config, fresh=jnp.array([True])
    )
    assert_near(apply(params, x[None], config=config)[0], y, LIMIT)


@pytest.mark.slow
def test_every_weights_gradient_is_a_difference_quotient():
    config, params, _ = make(NAMES[2])
    x, weights = inputs(9, config.D)[None], inputs(9, config.D, 5)[None]
    by_params, by_x = gradients(params, x, weights, config=config)
    directions = [
        jax.random.normal(jax.random.key(n), y.shape)
        for n, y in enumerate(jax.tree.leaves((params, x)))
    ]
    leaves, tree = jax.tree.flatten((params, x))
    value = jax.jit(lambda leaves: loss(*jax.tree.unflatten(tree, leaves), weights, config))
    for n, (direction, gradient) in enumerate(
        zip(directions, jax.tree.leaves((by_params, by_x)), strict=True)
    ):
        step = 1e-2 / float(jnp.linalg.norm(direction))
        up, down = (
            value([y + sign * step * direction if i == n else y for i, y in enumerate(leaves)])
            for sign in (1, -1)
        )
        slope = float((gradient * direction).sum())
        assert abs(float(up - down) / (2 * step) - slope) <= 2e-2 * max(abs(slope), 1.0)


@pytest.mark.slow
def test_layers_are_scanned_recomputed_and_mapped():
    config, params, _ = make(NAMES[0])
    x = jnp.stack([inputs(20, config.D, seed) for seed in (3, 4, 5)])
    stacked = jax.tree.map(lambda y: jnp.stack([y, 0.5 * y]), params)

    def model(stacked, x):
        def layer(x, params):
            return x + kda_jax.kda_apply(params, x, config=config), None

        return (jax.lax.scan(jax.checkpoint(layer), x, stacked)[0] ** 2).sum()

    def plain(stacked, x):
        for n in range(2):
            params = jax.tree.map(lambda y, n=n: y[n], stacked)
            x = x + kda_jax.kda_apply(params, x, config=config)
        return (x**2).sum()

    got, expected = (jax.jit(jax.value_and_grad(f))(stacked, x) for f in (model, plain))
    assert_trees_are_near(got, expected, GRADIENT_LIMIT)
    mapped = jax.vmap(lambda x: kda_jax.kda_apply(params, x[None], config=config)[0])(x)
    assert_near(mapped, apply(params, x, config=config), LIMIT)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["shard_map", "explicit"])
def test_rows_over_a_mesh_equal_one_device(form):
    config, params, _ = make(NAMES[0])
    x = jnp.stack([inputs(40, config.D, seed) for seed in range(4)])
    weights = jnp.stack([inputs(40, config.D, seed) for seed in range(4, 8)])
    ids = jnp.tile(ids_of([((1, 20), (2, 20))]), (4, 1))
    expected = gradients(params, x, weights, config=config, segment_ids=ids)
    y = apply(params, x, config=config, segment_ids=ids)
    if form == "explicit":
        mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            cut, cut_ids = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (x, ids))
            got = jax.jit(kda_jax.kda_apply, static_argnames="config")(
                params, cut, config=config, segment_ids=cut_ids
            )
        assert_near(got, y, LIMIT)
        return
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d"), P("d"), P("d")), out_specs=(P(), P("d"))
    )
    def step(params, x, weights, ids):
        def total(params, x):
            return jax.lax.psum(loss(params, x, weights, config, segment_ids=ids), "d")

        return jax.grad(total, argnums=(0, 1))(params, x)

    assert_trees_are_near(step(params, x, weights, ids), expected, GRADIENT_LIMIT)


def test_it_keeps_the_dtype_and_takes_no_token():
    config, params, _ = make(NAMES[1], dtype=jnp.bfloat16)
    x = jnp.ones((2, 3, config.D), jnp.bfloat16)
    assert apply(params, x, config=config).dtype == jnp.bfloat16
    for shape in ((2, 0), (0, 3)):
        assert apply(params, jnp.zeros((*shape, config.D)), config=config).shape == (
            *shape,
            config.D,
        )


def test_explain_answers_for_it():
    config, params, _ = make(NAMES[0])
    answer = kda_jax.explain(kda_jax.kda_apply, params, jnp.ones((1, 4, config.D)), config=config)
    assert answer.implementation == "xla" or ON_GPU


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            lambda x: dict(segment_ids=jnp.ones((2, 5), int), cu_seqlens=jnp.array([0, 5])),
            "`segment_ids` and `cu_seqlens` exclude each other.",
        ),
        (
            lambda x: dict(cu_seqlens=jnp.array([0, 10])),
            "`x` must be [1, T, D] beside `cu_seqlens`",
        ),
        (lambda x: dict(segment_ids=jnp.ones((2, 4), int)), "`segment_ids` must have shape (2, 5)"),
        (lambda x: dict(segment_ids=jnp.ones((2, 5))), "`segment_ids` must be"),
        (lambda x: dict(x=x[0]), "x[None]"),
    ],
)
def test_messages_of_kda_apply(options, message):
    config, params, _ = make(NAMES[0])
    x = jnp.ones((2, 5, config.D))
    with pytest.raises(ContractError) as error:
        kda_jax.kda_apply(params, **dict(x=x) | options(x), config=config)
    assert message in str(error.value)


def test_prefill_of_rows_names_the_cure():
    config, params, cache = make(NAMES[0])
    x = jnp.ones((2, 3, config.D))
    with pytest.raises(ContractError, match="rows of tokens are for kda_apply"):
        kda_jax.kda_prefill(
            params, x, cache, jnp.array([0, 1]), jnp.array([0, 3, 6]), config=config
        )


def test_the_module_is_the_function():
    nnx = pytest.importorskip("flax.nnx")
    config, params, _ = make(NAMES[0])
    layer, x = kda_jax.nnx.KDALayer(config, params=params), inputs(7, config.D)[None]
    ids = ids_of([((1, 3), (2, 4))])
    got = nnx.jit(lambda layer: layer(x, segment_ids=ids))(layer)
    assert_same_bits(got, apply(params, x, config=config, segment_ids=ids))


@pytest.mark.gpu
def test_in_the_kernels_segments_are_what_each_is_alone():
    """bfloat16; limits of the kernels, at each segment's own alignment."""
    config = kda_jax.KDAConfig(D=64, H=2, HV=4, K=128, V=128, gate_rank=128)
    params = kda_jax.init_params(config, jax.random.key(1), dtype=jnp.bfloat16)
    x = jnp.stack([inputs(80, config.D, seed, jnp.bfloat16) for seed in (3, 4)])
    weights = jnp.stack([inputs(80, config.D, seed, jnp.bfloat16) for seed in (5, 6)])
    ids = ids_of(LENGTHS)
    text = apply.lower(params, x, config=config, segment_ids=ids).compile().as_text()
    assert "kda_prefill_states" in text
    with kernels_here():
        got = gradients(params, x, weights, config=config, segment_ids=ids)
    exact = jax.tree.map(lambda y: y.astype(jnp.float32), (params, x, weights))
    expected = gradients(*exact, config=dataclasses.replace(config), segment_ids=ids)
    assert_trees_are_near(got, expected, 4e-2)
