"""What a server's steps cost beside a plain decode: mixed steps, drafts, checkpoints, memory.

    python benchmarks/serving.py [--only single,mixed,drafts,checkpoints,memory] [--toy]
                                 [--output FILE]

Layers of Kimi-Linear's size, one behind the other as in layer_decode.py, whose ways these are:
bfloat16 weights, float32 states, every layer with its own weights, cache and slots, in one jitted
loop, by the clock. Each case stands beside what it is measured by, in the same run:

- `single`: 64 one-token rows by kda_prefill, beside kda_decode.
- `mixed`: 8 prompts of 512 tokens and 56 one-token rows in one kda_prefill, beside the prompts.
- `drafts`: kda_verify of 4 tokens and kda_commit of 1 to 4 of them, beside one kda_decode.
- `checkpoints`: one prompt of 8192 tokens with a state kept every 64 tokens, beside none; the time
  of an in-place multiply over the kept bytes is taken off (`ratio`), or not (`ratio_whole`).
- `memory`: temporaries of kda_prefill of 2048 tokens, of 2048 sequences beside one; the compiler's.

Every case meets kda_decode, or a prefill of its parts, before it is timed.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from layer_decode import CONFIGS, apart, multiply_us, weight_bytes

import kda_jax
from kda_jax.tools import oracle, records
from kda_jax.tools.bench import need_a_gpu
from kda_jax.tools.timing import layers_for, time_layers

STEPS = 20
LIMIT = 3e-2  # relative: activations are rounded to bfloat16 after every product
KINDS = ("single", "mixed", "drafts", "checkpoints", "memory")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many rows, prompts and tokens the cases have."""

    rows: int = 64
    prompts: int = 8
    prompt: int = 512
    drafts: tuple[int, ...] = (8, 32)
    draft: int = 4
    long: int = 8192
    every: int = 64
    sequences: int = 2048


TOY = Sizes(rows=3, prompts=2, prompt=70, drafts=(2,), draft=3, long=192, sequences=24)


def layer(config, rows, kept, seed):
    """`(cache, (params, slots, table))`: slots of rows and of kept states, anywhere in a pool."""
    S = rows + kept + 3
    slots = np.random.default_rng(seed).permutation(S)[: rows + kept].astype(np.int32)
    params = kda_jax.init_params(config, jax.random.key(seed))
    empty = kda_jax.init_cache(config, S, params=params)
    keys = jax.random.split(jax.random.key(seed + 100))
    conv, state = map(jax.random.normal, keys, (empty.conv.shape, empty.state.shape))
    cache = kda_jax.KDACache(conv.astype(empty.conv.dtype), state)
    table = jnp.asarray(slots[rows:].reshape(1, -1))
    return cache, (params, jnp.asarray(slots[:rows]), table)


def over_layers(step: Callable[..., Any]):
    """An op of all layers, each of which takes what the one before it returned.

    step: `(params, x, cache, slots, table) -> (x, cache)`.
    """

    def op(pool, inputs):
        x, caches = pool
        after = []
        for cache, (params, slots, table) in zip(caches, inputs, strict=True):
            x, params = apart(x, params)
            x, cache = step(params, x, cache, slots, table)
            after.append(cache)
        return (), (x, after)

    return op


def prefill(config, bounds, every=None):
    bounds = jnp.asarray(bounds, jnp.int32)

    def step(params, x, cache, slots, table):
        kept = {} if every is None else dict(checkpoints=table, checkpoint_every=every)
        return kda_jax.kda_prefill(params, x, cache, slots, bounds, config=config, **kept)

    return step


def verify_and_commit(config, accepted):
    def step(params, x, cache, slots, table):
        y, drafts = kda_jax.kda_verify(params, x, cache, slots, config=config)
        return y, kda_jax.kda_commit(cache, drafts, slots, accepted)

    return step


def time_step(config, step, rows, shape, *, kept=0, op=None):
    """Microseconds of a layer's step by the clock."""
    layers = min(4, layers_for(weight_bytes(config)))
    made = [layer(config, rows, kept, seed) for seed in range(layers)]
    caches, inputs = map(list, zip(*made, strict=True))
    x = jax.random.normal(jax.random.key(layers), (*shape, config.D), jnp.bfloat16)
    times, _ = time_layers(op or over_layers(step), [(x, caches)], [inputs], STEPS)
    return times.layer_us / layers


def time_decode(config, rows):
    def step(params, x, cache, slots, table):
        return kda_jax.kda_decode(params, x, cache, slots, config=config)

    return time_step(config, step, rows, (rows,))


def one_layer(config, rows, kept=0):
    cache, (params, slots, table) = layer(config, rows, kept, seed=0)
    return cache, params, slots, table


def near(what, got, wanted):
    oracle.must_be_near(what, got, np.asarray(wanted, np.float64), LIMIT)


def check_single(config, sizes):
    """64 single tokens by prefill are those of decode."""
    cache, params, slots, table = one_layer(config, sizes.rows)
    x = jax.random.normal(jax.random.key(1), (sizes.rows, config.D), jnp.bfloat16)
    step = prefill(config, np.arange(sizes.rows + 1))
    y, after = jax.jit(step)(params, x, cache, slots, table)
    decode = jax.jit(functools.partial(kda_jax.kda_decode, config=config))
    wanted, one = decode(params, x, cache, slots)
    near("single tokens by kda_prefill, y", y, wanted)
    near("single tokens by kda_prefill, state", after.state, one.state)
    near("single tokens by kda_prefill, conv", after.conv, one.conv)


def check_drafts(config, sizes):
    """All drafted tokens committed are a decode after a decode."""
    rows, T = sizes.drafts[0], sizes.draft
    cache, params, slots, table = one_layer(config, rows)
    x = jax.random.normal(jax.random.key(2), (rows, T, config.D), jnp.bfloat16)
    step = verify_and_commit(config, jnp.full(rows, T))
    y, after = jax.jit(step)(params, x, cache, slots, table)
    decode = jax.jit(functools.partial(kda_jax.kda_decode, config=config))
    for t in range(T):
        wanted, cache = decode(params, x[:, t], cache, slots)
        near(f"kda_verify, token {t}", y[:, t], wanted)
    near("kda_commit, state", after.state, cache.state)
    near("kda_commit, conv", after.conv, cache.conv)


def check_parts(config, sizes):
    """A mixed step, and a prompt with checkpoints, are what a prefill of each part is."""
    lengths = [sizes.every + 6, 1, 1, 2 * sizes.every]
    bounds = np.cumsum([0, *lengths])
    cache, params, slots, table = one_layer(config, len(lengths), kept=2)
    x = jax.random.normal(jax.random.key(3), (int(bounds[-1]), config.D), jnp.bfloat16)
    kept = jnp.full((len(lengths), 2), -1).at[3].set(table[0])
    step = prefill(config, bounds, sizes.every)
    y, after = jax.jit(step)(params, x, cache, slots, kept)
    for n in range(len(lengths)):
        own = x[bounds[n] : bounds[n + 1]]
        alone = jax.jit(prefill(config, [0, lengths[n]]))
        wanted, one = alone(params, own, cache, slots[n : n + 1], None)
        near(f"kda_prefill, sequence {n}", y[bounds[n] : bounds[n + 1]], wanted)
        near(f"kda_prefill, state {n}", after.state[slots[n]], one.state[slots[n]])
    near("the last checkpoint", after.state[table[0, 1]], after.state[slots[3]])


def single(config, sizes):
    check_single(config, sizes)
    by_prefill = prefill(config, np.arange(sizes.rows + 1))
    prefill_us = time_step(config, by_prefill, sizes.rows, (sizes.rows,))
    decode_us = time_decode(config, sizes.rows)
    row = dict(rows=sizes.rows, prefill_us=prefill_us, decode_us=decode_us)
    return [row | dict(ratio=prefill_us / decode_us)]


def mixed(config, sizes):
    check_parts(config, sizes)
    prompts = [sizes.prompt] * sizes.prompts
    lengths = [*prompts, *[1] * (sizes.rows - sizes.prompts)]
    times = {
        name: time_step(
            config, prefill(config, np.cumsum([0, *each])), len(each), (int(sum(each)),)
        )
        for name, each in dict(mixed=lengths, prompts=prompts).items()
    }
    row = dict(prompts=sizes.prompts, tokens=sizes.prompt, singles=len(lengths) - len(prompts))
    row |= {f"{name}_us": us for name, us in times.items()}
    return [row | dict(ratio=times["mixed"] / times["prompts"])]


def drafts(config, sizes):
    check_drafts(config, sizes)
    rows = []
    for B in sizes.drafts:
        accepted = jnp.asarray(np.random.default_rng(B).integers(1, sizes.draft + 1, B))
        step = verify_and_commit(config, accepted)
        both_us = time_step(config, step, B, (B, sizes.draft))
        decode_us = time_decode(config, B)
        row = dict(B=B, T=sizes.draft, verify_and_commit_us=both_us, decode_us=decode_us)
        rows.append(row | dict(ratio=both_us / decode_us))
    return rows


def checkpoints(config, sizes):
    T, kept = sizes.long, sizes.long // sizes.every
    with_them = prefill(config, [0, T], sizes.every)
    with_us = time_step(config, with_them, 1, (T,), kept=kept)
    without_us = time_step(config, prefill(config, [0, T]), 1, (T,), kept=kept)
    bytes_us = multiply_us(kept, config.HV, config.V, config.K)
    row = dict(T=T, every=sizes.every, with_us=with_us, without_us=without_us)
    row |= dict(multiply_us=bytes_us, ratio=(with_us - bytes_us) / without_us)
    return [row | dict(ratio_whole=with_us / without_us)]


def memory(config, sizes):
    """Bytes of temporaries, and of the pool that is updated in place."""
    params = jax.eval_shape(lambda: kda_jax.init_params(config, jax.random.key(0)))
    cache = jax.eval_shape(lambda: kda_jax.init_cache(config, 4, params=params))
    T = sizes.sequences
    step = jax.jit(functools.partial(kda_jax.kda_prefill, config=config), donate_argnums=2)
    rows = []
    for N in (1, sizes.sequences):
        shapes = (((T, config.D), "bfloat16"), ((N,), "int32"), ((N + 1,), "int32"))
        x, slots, bounds = (jax.ShapeDtypeStruct(*each) for each in shapes)
        analysis: Any = step.lower(params, x, cache, slots, bounds).compile().memory_analysis()
        row = dict(T=T, N=N, temporaries=analysis.temp_size_in_bytes)
        rows.append(row | dict(aliased=analysis.alias_size_in_bytes))
    rows[1]["ratio"] = rows[1]["temporaries"] / rows[0]["temporaries"]
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--toy", action="store_true", help="a tiny layer, on any backend")
    options = records.parse(parser, arguments)
    need_a_gpu(options.toy)
    config, sizes = (
        CONFIGS["toy" if options.toy else "kimi-linear"],
        TOY if options.toy else Sizes(),
    )
    record = records.start(
        options,
        toy=options.toy,
        config=dataclasses.asdict(config),
        dtype="bfloat16",
        pool_dtype="float32",
    )
    makers = dict(zip(KINDS, (single, mixed, drafts, checkpoints, memory), strict=True))
    for name in options.only.split(",") if options.only else KINDS:
        for row in makers[name](config, sizes):
            record.add(name, row)
    return record.finish()


if __name__ == "__main__":
    main()
