"""Drafts, prefixes and mixed steps of the layer, against one prefill of each request."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import CONFIGS, S, inputs, make
from support import ON_GPU, assert_near, assert_same_bits, running

import kda_jax
from kda_contracts import ContractError

LIMIT = 1e-5
N, T = 4, 3
SLOTS = jnp.array([5, -1, 0, 3])
ACCEPTED = jnp.array([2, 1, 0, 3])
statics = ("config", "implementation")
prefill = jax.jit(kda_jax.kda_prefill, static_argnames=(*statics, "checkpoint_every"))
decode = jax.jit(kda_jax.kda_decode, static_argnames=statics)
verify = jax.jit(kda_jax.kda_verify, static_argnames=statics)
commit = jax.jit(kda_jax.kda_commit, static_argnames="implementation")


def drafted(D, seed=5):
    return inputs(N * T, D, seed=seed).reshape(N, T, D)


def alone(params, x, cache, source, config):
    """`(y, conv, state)` of one sequence that goes on from a slot, by one prefill."""
    slots, sources = jnp.array([6]), jnp.array([source])
    y, after = prefill(
        params, x, cache, slots, jnp.array([0, len(x)]), config=config, sources=sources
    )
    return y, after.conv[6], after.state[6]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("with_sources", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_is_verified_and_then_committed_as_far_as_accepted(name, with_sources):
    config, params, cache = make(name)
    x = drafted(config.D)
    sources = jnp.array([1, 4, -1, 2]) if with_sources else SLOTS
    given = dict(sources=sources) if with_sources else {}
    y, drafts = verify(params, x, cache, SLOTS, config=config, **given)
    after = commit(cache, drafts, SLOTS, ACCEPTED, **given)
    assert not np.asarray(y[1]).any()
    for n in (0, 2, 3):
        expected, _, _ = alone(params, x[n], cache, int(sources[n]), config)
        assert_near(y[n], expected, LIMIT)
        count, slot = int(ACCEPTED[n]), int(SLOTS[n])
        if count:
            _, conv, state = alone(params, x[n, :count], cache, int(sources[n]), config)
            assert_near(after.conv[slot], conv, LIMIT)
            assert_near(after.state[slot], state, LIMIT)
    rest = np.array([0, 1, 2, 4, 6])  # slot 0's sequence accepted nothing
    assert_same_bits(after.conv[rest], cache.conv[rest])
    assert_same_bits(after.state[rest], cache.state[rest])


@pytest.mark.parametrize(
    "tokens", [3, *(pytest.param(tokens, marks=pytest.mark.long) for tokens in (1, 2))]
)
def test_greedy_steps_of_drafts_are_steps_of_single_tokens(tokens):
    """Each step drafts some tokens, of which a few are right: what follows is as without drafts."""
    config, params, cache = make("softplus, low rank")
    truth = inputs(12, config.D, seed=11)
    one_by_one, outs = cache, []
    for t in range(12):
        y, one_by_one = decode(params, truth[t][None], one_by_one, jnp.array([2]), config=config)
        outs.append(y[0])
    done, rng = 0, np.random.default_rng(tokens)
    while done < 12:
        right = min(int(rng.integers(1, tokens + 1)), 12 - done)
        x = inputs(tokens, config.D, seed=int(rng.integers(1000)))
        x = x.at[:right].set(truth[done : done + right])
        y, drafts = verify(params, x[None], cache, jnp.array([2]), config=config)
        cache = commit(cache, drafts, jnp.array([2]), jnp.array([right]))
        assert_near(y[0, :right], jnp.stack(outs[done : done + right]), LIMIT)
        done += right
    assert_near(cache.state, one_by_one.state, LIMIT)
    assert_near(cache.conv, one_by_one.conv, LIMIT)


def test_a_cache_of_refs_and_a_donated_one_are_committed_in_place():
    config, params, cache = make("safe, full rank")
    x = drafted(config.D)
    y, drafts = verify(params, x, cache, SLOTS, config=config)
    expected = commit(cache, drafts, SLOTS, ACCEPTED)
    refs = jax.tree.map(lambda each: jax.new_ref(each.copy()), cache)
    again, drafts = jax.jit(functools.partial(kda_jax.kda_verify, config=config))(
        params, x, refs, SLOTS
    )
    assert_near(again, y, 1e-6)
    assert_same_bits(refs.state[...], cache.state)
    none = jax.jit(kda_jax.kda_commit)(refs, drafts, SLOTS, ACCEPTED)
    assert none.conv is None and none.state is None
    assert_near(refs.state[...], expected.state, 1e-6)
    assert_near(refs.conv[...], expected.conv, 1e-6)
    step = jax.jit(kda_jax.kda_commit, donate_argnums=0)
    memory = step.lower(cache, drafts, SLOTS, ACCEPTED).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache.state.nbytes + cache.conv.nbytes


def test_rows_without_a_slot_may_hold_anything():
    config, params, cache = make("softplus, low rank")
    x = drafted(config.D)
    y, drafts = verify(params, x, cache, SLOTS, config=config)
    wanted = commit(cache, drafts, SLOTS, ACCEPTED)
    y_too, drafts = verify(params, x.at[1].set(jnp.nan), cache, SLOTS, config=config)
    assert_same_bits(y_too, y)
    after = commit(cache, drafts, SLOTS, ACCEPTED)
    assert_same_bits(after.state, wanted.state)
    assert_same_bits(after.conv, wanted.conv)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.long), 3])
def test_with_a_kernel_drafts_are_those_of_xla(rows):
    config = dataclasses.replace(CONFIGS["softplus, low rank"], K=32, V=16, gate_rank=16)
    params = kda_jax.init_params(config, jax.random.key(0), dtype=jnp.float32)
    cache = kda_jax.init_cache(config, S)
    state = jax.random.normal(jax.random.key(1), cache.state.shape)
    cache = kda_jax.KDACache(cache.conv, state)
    x, slots, accepted = drafted(config.D)[:rows], SLOTS[:rows], ACCEPTED[:rows]
    results = []
    for name in ("xla", "mosaic_gpu"):
        with running(name):
            y, drafts = verify(params, x, cache, slots, config=config, implementation=name)
            after = commit(cache, drafts, slots, accepted, implementation=name)
            assert jax.tree.leaves(drafts)[0].shape[0] == rows
            results.append(jax.block_until_ready((y, after)))
    for got, expected in zip(*map(jax.tree.leaves, results), strict=True):
        assert_near(got, expected, LIMIT)


# Prefixes.


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_is_gone_on_from_without_a_copy(name):
    """128 tokens into slot 1; two more tokens from there into slot 2, and others into slot 4."""
    config, params, cache = make(name)
    x = inputs(130, config.D)
    _, cache = prefill(
        params,
        x[:128],
        cache,
        jnp.array([1]),
        jnp.array([0, 128]),
        config=config,
        sources=jnp.array([-1]),
    )
    ends = jnp.concatenate([x[128:], inputs(3, config.D, seed=8)])
    y, after = prefill(
        params,
        ends,
        cache,
        jnp.array([2, 4]),
        jnp.array([0, 2, 5]),
        config=config,
        sources=jnp.array([1, 1]),
    )
    expected, whole = prefill(
        params,
        x,
        cache,
        jnp.array([2]),
        jnp.array([0, 130]),
        config=config,
        sources=jnp.array([-1]),
    )
    assert_near(y[:2], expected[128:], 1e-6)
    assert_near(after.state[2], whole.state[2], 1e-6)
    assert_same_bits(after.state[1], cache.state[1])
    assert_same_bits(after.conv[1], cache.conv[1])
    step, _ = decode(
        params, x[128:129], cache, jnp.array([2]), config=config, sources=jnp.array([1])
    )
    assert_near(step, expected[128:129], 1e-6)


@pytest.mark.slow
def test_checkpoints_of_the_layer_hold_convolution_and_state():
    config, params, cache = make("softplus, low rank")
    x, bounds = inputs(150, config.D), jnp.array([0, 131, 150])
    table = jnp.array([[4, 5, 6], [0, -1, 2]])
    y, after = prefill(
        params,
        x,
        cache,
        jnp.array([1, 3]),
        bounds,
        config=config,
        checkpoints=table,
        checkpoint_every=64,
    )
    for m, slot in enumerate((4, 5)):
        end = 64 * (m + 1)
        _, kept = prefill(
            params, x[:end], cache, jnp.array([1]), jnp.array([0, end]), config=config
        )
        assert_near(after.state[slot], kept.state[1], LIMIT)
        assert_same_bits(after.conv[slot], kept.conv[1])
    untouched = np.array([0, 2, 6])
    assert_same_bits(after.state[untouched], cache.state[untouched])
    assert_same_bits(after.conv[untouched], cache.conv[untouched])
    rest, _ = prefill(
        params,
        x[128:131],
        after,
        jnp.array([1]),
        jnp.array([0, 3]),
        config=config,
        sources=jnp.array([5]),
    )
    assert_near(rest, y[128:131], LIMIT)


def test_copied_slots_are_copies_and_padding_touches_nothing():
    _, _, cache = make("softplus, low rank")
    pairs = jnp.array([2, -1, 3, 6, S]), jnp.array([0, 1, -1, S, 4])
    got = jax.jit(kda_jax.copy_slots)([cache, cache.state], *pairs)
    for each, before in ((got[0].conv, cache.conv), (got[1], cache.state)):
        expected = np.array(before)
        expected[0] = expected[2]
        expected[[1, 4]] = 0
        assert_same_bits(each, expected)
    ref = jax.new_ref(cache.state.copy())
    assert jax.jit(kda_jax.copy_slots)(ref, *pairs) is None
    assert_same_bits(ref[...], got[1])
    swapped = kda_jax.copy_slots(cache.state, [2, 3], [3, 2])
    assert_same_bits(swapped[2:4], cache.state[jnp.array([3, 2])])
    with pytest.raises(ContractError, match="got 2 sources and 1 destinations"):
        kda_jax.copy_slots(cache, [0, 1], [2])
    with pytest.raises(ContractError, match=r"destinations must be \[n\] signed integers"):
        kda_jax.copy_slots(cache, [0], [[2]])
    cleared = kda_jax.clear_slots(cache, jnp.array([1]))
    assert not np.asarray(cleared.conv[1]).any() and not np.asarray(cleared.state[1]).any()


def test_validate_slots_sees_tables_and_counts():
    check = functools.partial(kda_jax.validate_slots, [0, 1, -1], 9)
    table = [[0, 3, 4], [5, -1, 6], [0, 0, 99]]  # of a padded row nothing is judged
    check(intermediate_states=table, num_accepted_tokens=[3, 0, 7])
    check(intermediate_states=jnp.array([[3, 4, 0, 1]]))  # a varlen call's: whose, nobody knows
    check(checkpoints=[[4, -1], [5, 6], [5, 5]])
    check([4, 4, -1], checkpoints=[[2], [3], [-1]])
    for options, message in (
        (
            dict(intermediate_states=[[3, 4], [5, 3], [6, 7]]),
            "row 1 has draft slot 3 in column 1, a",
        ),
        (
            dict(intermediate_states=[[3, 1], [5, 6], [7, 8]]),
            "slot 1 in column 1, which row 1 reads",
        ),
        (
            dict(intermediate_states=[[3], [9], [7]]),
            r"9 in column 0: it must be -1 \(not kept\) or",
        ),
        (dict(intermediate_states=[[3], [4]]), "2 rows of intermediate_states for 3 rows"),
        (
            dict(intermediate_states=table, num_accepted_tokens=[4, 0, 0]),
            r"row 0 has 4 accepted tokens: it must be in \[0, 3\], the columns",
        ),
        (
            dict(intermediate_states=table, num_accepted_tokens=[1, 0]),
            "2 numbers of accepted tokens for 3 rows",
        ),
        (dict(num_accepted_tokens=[1, 0, 0]), "pass them too"),
        (dict(checkpoints=[[1], [4], [5]]), "row 0 has checkpoint 1 in column 0, which row 1"),
        (dict(checkpoints=[[4], [4], [5]]), "row 1 has checkpoint 4 in column 0, as row 0 has"),
        (dict(sources=[7, 1, 0], checkpoints=[[7], [4], [5]]), "checkpoint 7 in column 0, which"),
        (dict(checkpoints=[[4], [5]]), "2 rows of checkpoints for 3 rows"),
    ):
        with pytest.raises(ContractError, match=message):
            check(**options)


# Mixed steps.


@pytest.mark.slow
def test_prompts_pieces_and_single_tokens_come_in_one_call():
    """Behind the last boundary the batch is filled up with tokens of no sequence."""
    config, params, cache = make("softplus, low rank")
    lengths, slots = (150, 1, 0, 64, 1, 65, 9), jnp.array([4, 1, 3, 0, 2, -1, 6])
    bounds, x = np.cumsum((0, *lengths)), inputs(300, config.D)
    kda_jax.validate_cu_seqlens(bounds, 300)
    sources = jnp.array([-1, 1, 3, 5, 2, 0, 6])
    y, after = prefill(params, x, cache, slots, bounds, config=config, sources=sources)
    for n, length in enumerate(lengths):
        if not length or n == 5:
            assert not np.asarray(y[bounds[n] : bounds[n + 1]]).any()
            continue
        own = x[bounds[n] : bounds[n + 1]]
        given = dict(config=config, sources=sources[n : n + 1])
        expected, one = prefill(
            params, own, cache, slots[n : n + 1], jnp.array([0, length]), **given
        )
        assert_near(y[bounds[n] : bounds[n + 1]], expected, LIMIT)
        assert_near(after.state[slots[n]], one.state[slots[n]], LIMIT)
        assert_near(after.conv[slots[n]], one.conv[slots[n]], LIMIT)
    assert not np.asarray(y[bounds[-1] :]).any()
    for untouched in (3, 5):
        assert_same_bits(after.state[untouched], cache.state[untouched])


def test_one_token_each_by_prefill_is_a_decode():
    config, params, cache = make("safe, full rank")
    x, slots = inputs(5, config.D), jnp.array([3, 0, -1, 5, 1])
    sources = jnp.array([3, 6, 2, -1, 1])
    y, after = prefill(params, x, cache, slots, jnp.arange(6), config=config, sources=sources)
    expected, one = decode(params, x, cache, slots, config=config, sources=sources)
    assert_near(y, expected, LIMIT)
    assert_near(after.state, one.state, LIMIT)
    assert_near(after.conv, one.conv, LIMIT)


@pytest.mark.slow
def test_temporaries_follow_the_tokens_and_not_the_sequences():
    """256 tokens: 13, 185 and 708 MiB for 1, 64 and 256 sequences, when each had a chunk."""
    config = kda_jax.KDAConfig(D=64, H=4, HV=4, K=64, V=64, gate_rank=64)
    params = kda_jax.init_params(config, jax.random.key(0), dtype=jnp.float32)
    step = jax.jit(functools.partial(kda_jax.kda_prefill, config=config), donate_argnums=2)

    def temporaries(count, slots):
        shapes = [((256, 64), "float32"), ((count,), "int32"), ((count + 1,), "int32")]
        x, *indices = (jax.ShapeDtypeStruct(*each) for each in shapes)
        cache = jax.eval_shape(lambda: kda_jax.init_cache(config, slots))
        compiled = step.lower(params, x, cache, *indices).compile()
        memory = compiled.memory_analysis()
        pool = sum(each.size * 4 for each in jax.tree.leaves(cache))
        assert memory.alias_size_in_bytes >= pool
        return memory.temp_size_in_bytes

    one = temporaries(1, 256)
    assert temporaries(256, 2560) < 1.7 * one


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="it measures a CPU; benchmarks/serving.py measures a GPU")
def test_single_tokens_cost_prefill_at_most_twice_what_they_cost_decode():
    """On a CPU, 64 rows: 352 ms and 19 when each row had a chunk.

    The least time of the process in some runs, both by turns: what else runs does not count.
    """
    import time

    config = kda_jax.KDAConfig(D=256, H=8, HV=8, K=128, V=128, gate_rank=128)
    params = kda_jax.init_params(config, jax.random.key(0), dtype=jnp.float32)
    cache = kda_jax.init_cache(config, 64)
    x, slots, bounds = inputs(64, 256), jnp.arange(64), jnp.arange(65)

    def seconds(step):
        start = time.process_time()
        jax.block_until_ready(step())
        return time.process_time() - start

    steps = (
        lambda: prefill(params, x, cache, slots, bounds, config=config),
        lambda: decode(params, x, cache, slots, config=config),
    )
    times = [[seconds(step) for step in steps] for _ in range(20)]  # the first ones compile
    by_prefill, by_decode = map(min, zip(*times, strict=True))
    assert by_prefill < 2 * by_decode, (by_prefill, by_decode)


# Errors.


def test_what_is_wrong_with_a_draft_is_said():
    config, params, cache = make("softplus, low rank")
    x = drafted(config.D)
    _, drafts = verify(params, x, cache, SLOTS, config=config)
    for call, message in (
        (
            lambda: kda_jax.kda_verify(params, x[:, 0], cache, SLOTS, config=config),
            r"`x` must be \[N, T, D\] \(got ndim=2\)",
        ),
        (
            lambda: kda_jax.kda_decode(params, x, cache, SLOTS, config=config),
            "several tokens a row: kda_verify takes drafts",
        ),
        (
            lambda: kda_jax.kda_verify(params, x, cache, SLOTS[:3], config=config),
            "`slots` must have shape",
        ),
        (
            lambda: kda_jax.kda_commit(cache, drafts, SLOTS, ACCEPTED[:2]),
            "`num_accepted` must have shape",
        ),
        (
            lambda: kda_jax.kda_commit(cache, drafts.tokens, SLOTS, ACCEPTED),
            r"`drafts` must be a KDADrafts \(got Drafts\)",
        ),
        (
            lambda: kda_jax.kda_commit(
                kda_jax.KDACache(cache.conv[:, :-1], cache.state), drafts, SLOTS, ACCEPTED
            ),
            "`conv` must have shape",
        ),
    ):
        with pytest.raises(ContractError, match=message):
            call()


def test_explain_speaks_of_a_layers_drafts():
    config, params, cache = make("softplus, low rank")
    x = drafted(config.D)
    told = kda_jax.explain(
        kda_jax.kda_verify, params, x, cache, SLOTS, config=config, implementation="xla"
    )
    assert (told.implementation, told.sizes.N, told.sizes.T) == ("xla", N, T)
    _, drafts = verify(params, x, cache, SLOTS, config=config)
    told = kda_jax.explain(kda_jax.kda_commit, cache, drafts, SLOTS, ACCEPTED, implementation="xla")
    assert (told.implementation, told.sizes.N, told.sizes.T) == ("xla", N, T)
