"""The layer over 8 host devices equals the layer on one; no pool is gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import assert_near, assert_same_bits

import kda_jax
from kda_contracts import (
    CHECKPOINT,
    CHUNK_KDA,
    COMMIT,
    KDA_UPDATE,
    LAYER_APPLY,
    LAYER_COMMIT,
    LAYER_DECODE,
    LAYER_PREFILL,
    LAYER_VERIFY,
    PACKED_DECODE,
    RECURRENT_KDA,
    RECURRENT_VERIFY,
    ContractError,
)
from kda_jax import sharding

CONFIG = kda_jax.KDAConfig(D=24, H=8, HV=16, K=8, V=4, gate_rank=4)
FULL = kda_jax.KDAConfig(D=24, H=8, HV=8, K=8, V=4, lower_bound=-5.0)
S, LIMIT = 8, 1e-5
MESHES = [((2,), ("tp",)), ((8,), ("tp",)), ((2, 4), ("dp", "tp"))]
MESHES += [
    pytest.param(*mesh, marks=pytest.mark.slow)
    for mesh in (((4,), ("tp",)), ((4, 2), ("tp", "dp")))
]


def mesh_of(shape, names):
    count = int(np.prod(shape))
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    return jax.make_mesh(
        shape, names, devices=jax.devices()[:count], axis_types=(AxisType.Auto,) * len(shape)
    )


def layer(config):
    params = kda_jax.init_params(config, jax.random.key(1), dtype=jnp.float32)
    cache = kda_jax.init_cache(config, S, conv_dtype=jnp.float32)
    keys = jax.random.split(jax.random.key(2), 2)
    return params, kda_jax.KDACache(
        *(
            jax.random.normal(k, x.shape)
            for k, x in zip(keys, (cache.conv, cache.state), strict=True)
        )
    )


def whole(cache, config, shards):
    return sharding.join_packed(np.asarray(cache.conv), shards, config, axis=1), np.asarray(
        cache.state
    )


def assert_no_gather(step, *arguments):
    text = step.lower(*arguments).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert "collective-permute" not in text
    assert text.count("all-reduce(") + text.count("all-reduce-start(") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [CONFIG, FULL], ids=["low rank", "full rank"])
@pytest.mark.parametrize(("shape", "names"), MESHES, ids=str)
def test_decode_equals_one_device(shape, names, config):
    mesh, (params, cache) = mesh_of(shape, names), layer(config)
    rows = "dp" if "dp" in names else None
    x = jax.random.normal(jax.random.key(3), (4, config.D))
    # With two shards of rows, slots 0 to 3 live on the first, and so do the first two rows.
    slots = jnp.array([1, -1, 7, 4])
    wanted, after = kda_jax.kda_decode(params, x, cache, slots, config=config)
    params, cache = sharding.place(mesh, config, params, cache, heads="tp", rows=rows)
    step = jax.jit(
        sharding.make_decode(mesh, config, params, heads="tp", rows=rows), donate_argnums=2
    )
    assert_no_gather(step, params, x, cache, slots)
    y, got = step(params, x, cache, slots)
    assert got.state.sharding.spec[1] == "tp"
    assert_near(y, wanted, LIMIT)
    conv, state = whole(got, config, mesh.shape["tp"])
    assert_near(state, after.state, LIMIT)
    assert_near(conv, after.conv, LIMIT)
    assert_same_bits(state[0], after.state[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("shape", "names"), MESHES, ids=str)
def test_prefill_equals_one_device(shape, names):
    mesh, (params, cache) = mesh_of(shape, names), layer(CONFIG)
    rows = "dp" if "dp" in names else None
    x = jax.random.normal(jax.random.key(3), (140, CONFIG.D))
    slots, bounds = jnp.array([1, 2, 7, 4]), jnp.array([0, 66, 70, 70, 140])
    wanted, after = kda_jax.kda_prefill(params, x, cache, slots, bounds, config=CONFIG)
    params, cache = sharding.place(mesh, CONFIG, params, cache, heads="tp", rows=rows)
    step = jax.jit(
        sharding.make_prefill(mesh, CONFIG, params, heads="tp", rows=rows), donate_argnums=2
    )
    bounds = bounds if rows is None else jnp.array([[0, 66, 70], [0, 0, 70]])
    assert_no_gather(step, params, x, cache, slots, bounds)
    y, got = step(params, x, cache, slots, bounds)
    assert_near(y, wanted, LIMIT)
    conv, state = whole(got, CONFIG, mesh.shape["tp"])
    assert_near(state, after.state, LIMIT)
    assert_near(conv, after.conv, LIMIT)


@pytest.mark.long
@pytest.mark.slow
def test_a_fresh_sequence_forgets_its_slot_on_its_shard():
    mesh, (params, cache) = mesh_of((2, 4), ("dp", "tp")), layer(CONFIG)
    x, slots = jax.random.normal(jax.random.key(3), (8, CONFIG.D)), jnp.array([1, 6])
    sources, bounds = jnp.array([-1, 6]), jnp.array([0, 4, 8])
    wanted, after = kda_jax.kda_prefill(
        params, x, cache, slots, bounds, config=CONFIG, sources=sources
    )
    params, cache = sharding.place(mesh, CONFIG, params, cache, heads="tp", rows="dp")
    step = jax.jit(sharding.make_prefill(mesh, CONFIG, params, heads="tp", rows="dp"))
    y, got = step(params, x, cache, slots, jnp.array([[0, 4], [0, 4]]), sources)
    assert_near(y, wanted, LIMIT)
    assert_near(got.state, after.state, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "names"),
    [pytest.param((2,), ("tp",), marks=pytest.mark.long), ((2, 4), ("dp", "tp"))],
)
def test_drafts_and_checkpoints_over_a_mesh_are_those_of_one_device(shape, names):
    mesh, (params, cache) = mesh_of(shape, names), layer(CONFIG)
    rows = "dp" if "dp" in names else None
    axes = dict(heads="tp", rows=rows)
    slots, accepted = jnp.array([1, 6]), jnp.array([2, 3])
    x = jax.random.normal(jax.random.key(3), (2, 3, CONFIG.D))
    wanted, drafts = kda_jax.kda_verify(params, x, cache, slots, config=CONFIG)
    after = kda_jax.kda_commit(cache, drafts, slots, accepted)
    prompts = jax.random.normal(jax.random.key(4), (144, CONFIG.D))
    table = jnp.array([[2, -1], [5, 7]])
    bounds = jnp.array([0, 72, 144])
    kept = dict(checkpoints=table, checkpoint_every=64)
    y, prefilled = kda_jax.kda_prefill(params, prompts, cache, slots, bounds, config=CONFIG, **kept)

    params, cache = sharding.place(mesh, CONFIG, params, cache, **axes)
    verify = jax.jit(sharding.make_verify(mesh, CONFIG, params, **axes))
    commit = jax.jit(sharding.make_commit(mesh, **axes))
    got, drafts = verify(params, x, cache, slots)
    assert_near(got, wanted, LIMIT)
    committed = commit(cache, drafts, slots, accepted)
    assert_near(committed.state, after.state, LIMIT)
    prefill = jax.jit(sharding.make_prefill(mesh, CONFIG, params, **axes, checkpoint_every=64))
    bounds = bounds if rows is None else jnp.array([[0, 72], [0, 72]])
    got, whole = prefill(params, prompts, cache, slots, bounds, None, table)
    assert_near(got, y, LIMIT)
    assert_near(whole.state, prefilled.state, LIMIT)


def test_a_row_on_the_wrong_shard_is_padded_there():
    mesh, (params, cache) = mesh_of((2,), ("dp",)), layer(CONFIG)
    before = np.asarray(cache.state)
    params, cache = sharding.place(mesh, CONFIG, params, cache, heads=None, rows="dp")
    step = jax.jit(sharding.make_decode(mesh, CONFIG, params, heads=None, rows="dp"))
    y, got = step(params, jnp.ones((2, CONFIG.D)), cache, jnp.array([7, 0]))
    assert not np.asarray(y).any()
    assert_same_bits(got.state, before)


def test_a_packed_row_is_cut_by_heads():
    config = kda_jax.KDAConfig(D=1, H=2, HV=4, K=3, V=5)
    x = np.arange(2 * config.channels).reshape(2, config.channels)
    split = np.asarray(sharding.split_packed(jnp.asarray(x), 2, config))
    q, k, v = np.split(x, [6, 12], axis=1)
    for shard, part in enumerate(np.split(split, 2, axis=1)):
        expected = [q[:, shard * 3 :][:, :3], k[:, shard * 3 :][:, :3], v[:, shard * 10 :][:, :10]]
        assert (part == np.concatenate(expected, axis=1)).all()
    assert (np.asarray(sharding.join_packed(split, 2, config)) == x).all()
    assert (np.asarray(sharding.split_packed(x.T, 2, config, axis=0)) == split.T).all()


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_local_slots_of_any_width(dtype):
    slots = np.array([5, 0, -1, 100], dtype)
    assert sharding.local_slots(slots, 0, 200).tolist() == [5, 0, -1, 100]
    assert sharding.local_slots(slots, 1, 60).tolist() == [-1, -1, -1, 40]
    if dtype == "int64":
        assert sharding.local_slots(slots + 2**32, 0, 200).tolist() == [-1] * 4


def test_what_cannot_be_cut_is_refused():
    config = kda_jax.KDAConfig(D=1, H=2, HV=4, K=3, V=5)
    with pytest.raises(ContractError, match="2 key and 4 value heads cannot be split over 4 ranks"):
        sharding.split_packed(jnp.zeros(32), 4, config)
    mesh = mesh_of((4,), ("tp",))
    params = jax.eval_shape(lambda: kda_jax.init_params(config, jax.random.key(0)))
    for make in (sharding.make_decode, sharding.make_prefill):
        with pytest.raises(ContractError, match="heads cannot be split over 4 ranks"):
            make(mesh, config, params, heads="tp")
    with pytest.raises(ContractError, match="heads cannot be split over 4 ranks"):
        kda_jax.init_cache(config, 3, ranks=4)
    assert kda_jax.init_cache(config, 3, ranks=2).conv.shape == (3, 16, 3)
    with pytest.raises(
        ContractError, match=r"axis -1 must have 2\*H\*K\+HV\*V = 32 elements \(got 31\)"
    ):
        sharding.join_packed(jnp.zeros(31), 2, config)


@pytest.mark.parametrize(("shape", "names"), [((8,), ("tp",)), ((2, 4), ("dp", "tp"))], ids=str)
def test_packed_decode_by_its_specs(shape, names):
    mesh, rows = mesh_of(shape, names), "dp" if "dp" in names else None
    rng = np.random.default_rng(0)
    B, HV, K, V = 4, 16, 8, 4

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))

    x = dict(
        mixed_qkv=normal(B, CONFIG.channels), a=normal(B, HV * K), b=normal(B, HV), A_log=normal(HV)
    )
    x |= dict(
        dt_bias=normal(HV * K),
        initial_state=normal(S, HV, V, K),
        ssm_state_indices=jnp.array([1, -1, 7, 4]),
        # A row may start from another slot of its own shard, or from nothing.
        source_indices=jnp.array([2, -1, -1, 5]),
    )
    wanted_out, wanted = kda_jax.packed_decode(**x)
    operands, results = sharding.specs(PACKED_DECODE, heads="tp", rows=rows)
    operands = {name: operands[name] for name in x}
    x["mixed_qkv"] = sharding.split_packed(x["mixed_qkv"], mesh.shape["tp"], CONFIG)

    def step(x):
        slots = {name: x[name] for name in ("ssm_state_indices", "source_indices")}
        if rows:
            own = jax.lax.axis_index(rows), x["initial_state"].shape[0]
            slots = {name: sharding.local_slots(y, *own) for name, y in slots.items()}
        return kda_jax.packed_decode(**x | slots)

    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(operands,), out_specs=results, check_vma=False)
    )
    out, state = step(x)
    assert_near(out, wanted_out, 1e-6)
    assert_near(state, wanted, 1e-6)


# Every cut, typed: what the tables' axes must say.
POOL, WHOLE, LAST, FIRST = P("dp", "tp", None, None), P(), P(None, "tp"), P("tp", None)
TOKENS = dict.fromkeys(("q", "k", "v"), P("dp", None, "tp", None))
CU_SEQLENS, TABLE = WHOLE, P("dp", None)
DRAFT = dict(cu_seqlens=CU_SEQLENS, intermediate_states=TABLE, num_accepted_tokens=P("dp"))
WEIGHTS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "f_up", "b_proj", "g_up"), LAST)
WEIGHTS |= dict.fromkeys(("q_conv", "k_conv", "v_conv", "o_proj"), FIRST)
BIASES = ("q_conv_bias", "k_conv_bias", "v_conv_bias")
WEIGHTS |= dict.fromkeys(("A_log", "dt_bias", "g_bias", *BIASES), P("tp"))
WEIGHTS |= dict.fromkeys(("f_down", "g_down", "norm"), WHOLE)
DRAFTED = TOKENS | dict(log_decay=TOKENS["k"], beta=P("dp", None, "tp"))
del DRAFTED["q"]
POOLS = dict(conv=P("dp", "tp", None), state=POOL)
CUTS = {
    PACKED_DECODE: dict(
        dict.fromkeys(("mixed_qkv", "a", "b"), P("dp", "tp")),
        **dict.fromkeys(("A_log", "dt_bias"), P("tp")),
        **dict.fromkeys(("ssm_state_indices", "source_indices"), P("dp")),
        initial_state=POOL,
        out=P("dp", None, "tp", None),
    ),
    KDA_UPDATE: dict(
        TOKENS,
        **DRAFT,
        **dict.fromkeys(("A_log", "dt_bias"), P("tp")),
        **dict.fromkeys(("a", "b"), P("dp", None, "tp")),
        initial_state_source=POOL,
        initial_state_indices=P("dp"),
        source_indices=P("dp"),
    ),
    COMMIT: dict(
        pool=POOL,
        intermediate=P("dp", None, "tp", None, None),
        slots=P("dp"),
        num_accepted=P("dp"),
        sources=P("dp"),
        cu_seqlens=CU_SEQLENS,
        **DRAFTED,
    ),
    LAYER_APPLY: WEIGHTS
    | dict(x=P("dp", None, None), segment_ids=P("dp", None), cu_seqlens=CU_SEQLENS),
    LAYER_DECODE: WEIGHTS | POOLS | dict(x=P("dp", None), slots=P("dp"), sources=P("dp")),
    LAYER_PREFILL: WEIGHTS
    | POOLS
    | dict(x=WHOLE, slots=P("dp"), cu_seqlens=CU_SEQLENS, sources=P("dp"))
    | dict(checkpoints=P("dp", None)),
    LAYER_VERIFY: WEIGHTS | POOLS | dict(x=P("dp", None, None), slots=P("dp"), sources=P("dp")),
    LAYER_COMMIT: POOLS | DRAFTED | dict.fromkeys(("slots", "sources", "num_accepted"), P("dp")),
}
CUTS[LAYER_COMMIT]["inputs"] = P("dp", None, "tp")
ACTIVATED = dict(log_decay=P("dp", None, "tp", None), beta=P("dp", None, "tp"))
ACTIVATED |= TOKENS | {RECURRENT_KDA.pool: POOL} | dict.fromkeys(("slots", "sources"), P("dp"))
CUTS[RECURRENT_KDA] = ACTIVATED | DRAFT
CUTS[RECURRENT_VERIFY] = ACTIVATED | dict(cu_seqlens=CU_SEQLENS)
CUTS[CHUNK_KDA] = ACTIVATED | dict(checkpoints=P("dp", None), cu_seqlens=CU_SEQLENS)


@pytest.mark.parametrize("contract", CUTS, ids=lambda contract: contract.name)
def test_the_tables_axes_say_where_each_tensor_is_cut(contract):
    operands, results = sharding.specs(contract, heads="tp", rows="dp")
    assert operands == CUTS[contract]
    for cut, result in zip(results, contract.results, strict=True):
        wanted = {"state": POOL, "out": P("dp", None, "tp", None), "y": CUTS[contract].get("x")}
        wanted |= DRAFTED | {"conv": POOLS["conv"], "inputs": P("dp", None, "tp")}
        assert cut == wanted[result.name]
    whole, _ = sharding.specs(contract, heads=None)
    assert all(part is None for spec in whole.values() for part in spec)


def test_weights_and_pools_are_cut_as_the_layers_operands():
    params, _ = layer(FULL)
    cuts = sharding.params_specs(params, "tp")
    assert cuts.g_down is cuts.g_bias is None
    assert vars(cuts) == WEIGHTS | dict.fromkeys(("g_down", "g_bias", *BIASES))
    assert vars(sharding.cache_specs("tp", "dp")) == POOLS


def test_a_checkpoints_tensors_are_cut_over_their_heads():
    cut = {0: ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "b_proj")}
    cut[0] += (
        "A_log",
        "dt_bias",
        "f_b_proj",
        "g_b_proj",
        "g_proj",
        "f_proj.1",
        "g_proj.1",
        "f_proj",
    )
    cut |= {1: ("o_proj",), None: ("o_norm", "f_a_proj", "g_a_proj", "f_proj.0", "g_proj.0")}
    for layout in CHECKPOINT:
        for tensor in layout.tensors:
            name = tensor.name.removesuffix(".weight").removesuffix(".bias")
            assert name in cut[tensor.cut], tensor.name
