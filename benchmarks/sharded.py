"""How the layer and its recurrence scale over one host's GPUs, cut by heads or by slots and batch.

    python benchmarks/sharded.py [--devices 2] [--toy] [--output FILE]

Every cut is first compared with one device, and every compiled program searched for collectives and
for copies of the pools. Then, on GPUs: medians by the clock of a layer in a jitted loop, over
layers whose pools are donated and cold. `scaling` is one GPU's time over that of all; `all_reduces`
are those in the text of a loop over `layers` layers, which XLA may have unrolled. `--toy` does all
this at toy sizes on any backend, and its times mean nothing.

Over 350 lines, since what is timed is what was compared just before.
"""

import argparse
import functools
import math
import os
import re
import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kda_jax
from kda_contracts import PACKED_DECODE, Sizes
from kda_jax import sharding
from kda_jax.tools import records
from kda_jax.tools.bench import OPTIONS
from kda_jax.tools.synthetic import HEAD_DIMENSION, MODELS, random_operands
from kda_jax.tools.timing import layers_for

LIMIT = 1e-5  # of the norm; the sum over the heads has another order on several devices
TEMPORARIES = 0.01  # of a device's share of a pool; of several layers' looped pools, of one of them
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
FORBIDDEN = ("all-gather", "all-to-all", "collective-permute")
LENGTHS = (66, 4)  # of the prefilled sequences: more than a chunk, and less
# Host devices that outnumber the cores starve one another in the threads they share; their code
# need not be fast.
ON_CPU = {"xla_cpu_multi_thread_eigen": False, "xla_backend_optimization_level": 1}


@dataclass(frozen=True)
class Cut:
    """A mesh, and the axes of it that cut the heads, and the slots with their rows.

    Neither: one device, unsharded.
    """

    mesh: Mesh
    heads: str | None = None
    rows: str | None = None

    def __str__(self):
        return ",".join(f"{name}={size}" for name, size in self.mesh.shape.items())

    def shards(self, axis):
        return 1 if axis is None else self.mesh.shape[axis]


def cuts_of(n):
    """(one device, [the cuts over n devices]): heads, rows, both axes in both orders."""

    def cut(heads=None, rows=None, **axes):
        devices = jax.devices()[: int(np.prod([*axes.values()]))]
        types = (AxisType.Auto,) * len(axes)
        return Cut(
            jax.make_mesh((*axes.values(),), (*axes,), devices=devices, axis_types=types),
            heads,
            rows,
        )

    cuts = [cut("tp", tp=n), cut(None, "dp", dp=n)]
    halves = [1, 2] if n == 2 else [2] if n % 2 == 0 else [n]
    for dp in halves:
        cuts += [cut("tp", "dp", dp=dp, tp=n // dp), cut("tp", "dp", tp=n // dp, dp=dp)]
    return cut(tp=1), cuts


def shaped(cut, tree, specs):
    """The shapes of a tree, with where they lie."""

    def shape(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(cut.mesh, spec))

    return jax.tree.map(shape, tree, specs)


def put(cut, tree, specs):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(cut.mesh, spec)), tree, specs
    )


def zeros(cut, tree, specs):
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shaped(cut, tree, specs)
    )


def random(shapes, seed, dtype=None):
    """Arrays of these shapes, of variance 1 over the first axis; large ones repeat themselves."""
    rng = np.random.default_rng(seed)

    def draw(x):
        noise = rng.standard_normal(min(x.size, 2**20), np.float32) * np.float32(x.shape[0] ** -0.5)
        return np.resize(noise.astype(dtype or x.dtype), x.shape)

    return jax.tree.map(draw, shapes)


def own_slots(B, S, n, seed=0):
    """[B] random slots; each row is on the shard of its slot, for every cut into a divisor of n."""
    rng = np.random.default_rng(seed)
    parts = [shard * (S // n) + rng.permutation(S // n)[: B // n] for shard in range(n)]
    return np.concatenate(parts).astype(np.int32)


def boundaries(cut, lengths):
    """cu_seqlens of these sequences; with rows cut, those of each shard."""
    parts = np.reshape(lengths, (cut.shards(cut.rows), -1))
    ends = np.pad(np.cumsum(parts, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    return put(cut, ends, P(cut.rows, None)) if cut.rows else put(cut, ends[0], P())


def recurrence_specs(cut):
    """The cuts of the operands that a call must have, and those of its results."""
    operands, results = sharding.specs(PACKED_DECODE, heads=cut.heads, rows=cut.rows)
    return {x.name: operands[x.name] for x in PACKED_DECODE.operands if x.required}, results


def recurrence_step(cut):
    """(pool, other operands) -> (out, pool), cut so."""

    def step(pool, x):
        slots = x["ssm_state_indices"]
        if cut.rows:
            slots = sharding.local_slots(slots, jax.lax.axis_index(cut.rows), pool.shape[0])
        return kda_jax.packed_decode(
            **x | dict(ssm_state_indices=slots), initial_state=pool, **OPTIONS
        )

    if cut.heads is cut.rows is None:
        return step
    operands, results = recurrence_specs(cut)
    pool = operands.pop("initial_state")
    return jax.shard_map(
        step, mesh=cut.mesh, in_specs=(pool, operands), out_specs=results, check_vma=False
    )


def put_operands(cut, x, config):
    specs, _ = recurrence_specs(cut)
    x = x | dict(mixed_qkv=sharding.split_packed(x["mixed_qkv"], cut.shards(cut.heads), config))
    return {name: put(cut, value, specs[name]) for name, value in x.items()}


def layer_step(cut, config, params, *, prefill=False):
    if cut.heads is cut.rows is None:
        return functools.partial(
            kda_jax.kda_prefill if prefill else kda_jax.kda_decode, config=config
        )
    over_mesh = sharding.make_prefill if prefill else sharding.make_decode
    return over_mesh(cut.mesh, config, params, heads=cut.heads, rows=cut.rows)


def layer_shapes(config, S):
    """The shapes of a layer's weights and of its cache of S slots."""
    params = jax.eval_shape(functools.partial(kda_jax.init_params, config), jax.random.key(0))
    return params, jax.eval_shape(lambda: kda_jax.init_cache(config, S, params=params))


def config_of(name, n, toy):
    """A released model's layer, or a toy of the same kind."""
    model = MODELS[name]
    D, heads, K = (32, 2 * n, 32) if toy else (model.hidden_size, model.heads, HEAD_DIMENSION)
    return kda_jax.KDAConfig(
        D=D,
        H=heads,
        HV=heads,
        K=K,
        V=K,
        lower_bound=model.lower_bound,
        gate_rank=None if "g_proj.weight" in model.known_by else K,
        forget_rank=None if "f_proj.weight" in model.known_by else K,
    )


def program(record, what, cut, step, *operands, donated, all_reduces=None, pools=0, **options):
    """The compiled step. Raises for a wrong collective; notes a fault where the donated is copied.

    `all_reduces`: how many there must be, if that is sure. `pools`: how many pools of a server's
    size are donated, so that temporaries can be held against one of them.
    """
    compiled = jax.jit(step, donate_argnums=donated, **options).lower(*operands)
    compiled = compiled.compile(ON_CPU if jax.default_backend() == "cpu" else None)
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    counts = {name: len(re.findall(rf"\b{name}(?:-start)?\(", text)) for name in COLLECTIVES}
    leaves = jax.tree.leaves(operands[donated])
    share = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    sizes = {"share": share}
    sizes["temporaries"] = memory.temp_size_in_bytes  # pyrefly: ignore[missing-attribute]
    sizes["aliased"] = memory.alias_size_in_bytes  # pyrefly: ignore[missing-attribute]
    record.add("collectives", {"what": what, "mesh": str(cut)} | counts | sizes)
    if any(counts[name] for name in FORBIDDEN) or all_reduces not in (None, counts["all-reduce"]):
        raise SystemExit(
            f"{what}, {cut}: wrong collectives (all-reduces wanted: {all_reduces}): {counts}"
        )
    # XLA's gather holds the live states, so the limit is one for the kernels.
    held = (
        pools
        and jax.default_backend() == "gpu"
        and sizes["temporaries"] > TEMPORARIES * share / pools
    )
    if sizes["aliased"] < share or held:
        record.add("faults", {"what": what, "mesh": str(cut)} | sizes)
    return compiled, counts["all-reduce"]


def agree(record, what, cut, got, wanted, limit):
    """Records the error, of the norm; raises unless it is within the limit. 0: the same bits."""
    got, wanted, error = np.asarray(got), np.asarray(wanted), float("inf")
    if got.shape == wanted.shape and got.dtype == wanted.dtype:
        exact = wanted.astype(np.float64)
        error = float(np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact))
    right = error <= limit and (limit > 0 or got.tobytes() == wanted.tobytes())
    entry = {"what": what, "mesh": str(cut), "error": error}
    record.add("equal", entry | {"limit": limit, "equal": right})
    if not right:
        raise SystemExit(
            f"{what}, {cut}: not what one device gives, error {error:.1e}, limit {limit:.0e}"
        )


def compare(record, what, one, cuts, run, limit):
    """`run(cut)` gives the results by name."""
    wanted = run(one)
    for cut in cuts:
        for name, got in run(cut).items():
            agree(record, f"{what}: {name}", cut, got, wanted[name], limit)


def compare_recurrence(record, one, cuts, n):
    sizes = Sizes(B=2 * n, H=2 * n, HV=4 * n, K=32, V=16, S=4 * n)
    config = kda_jax.KDAConfig(D=1, H=sizes.H, HV=sizes.HV, K=sizes.K, V=sizes.V)
    x = random_operands(sizes, dtype="float32") | dict(
        ssm_state_indices=own_slots(sizes.B, sizes.S, n)
    )
    x["ssm_state_indices"][1] = -1

    def run(cut):
        own = put_operands(cut, x, config)
        pool, step = own.pop("initial_state"), recurrence_step(cut)
        compiled, _ = program(record, "recurrence", cut, step, pool, own, donated=0, all_reduces=0)
        return dict(zip(("out", "state"), compiled(pool, own), strict=True))

    # A kernel's bits depend on no other row or head; XLA on a CPU contracts products and sums as
    # the shape has it.
    compare(record, "recurrence", one, cuts, run, 0.0 if jax.default_backend() == "gpu" else 1e-6)


def compare_layer(record, one, cuts, n, *, prefill):
    config = kda_jax.KDAConfig(D=48, H=2 * n, HV=4 * n, K=32, V=16, gate_rank=16)
    what, lengths, slots = (
        "prefill" if prefill else "decode",
        np.tile(LENGTHS, n),
        own_slots(2 * n, 4 * n, n),
    )
    slots[1] = -1
    x = jax.ShapeDtypeStruct((sum(LENGTHS) * n if prefill else 2 * n, config.D), jnp.float32)
    params, cache, x = random((*layer_shapes(config, 4 * n), x), 1, jnp.float32)

    def run(cut):
        own, pools = sharding.place(cut.mesh, config, params, cache, heads=cut.heads, rows=cut.rows)
        operands = own, put(cut, x, P(cut.rows, None)), pools, put(cut, slots, P(cut.rows))
        operands += (boundaries(cut, lengths),) if prefill else ()
        step, sums = (
            layer_step(cut, config, params, prefill=prefill),
            int(cut.shards(cut.heads) > 1),
        )
        compiled, _ = program(record, what, cut, step, *operands, donated=2, all_reduces=sums)
        y, after = compiled(*operands)
        conv = sharding.join_packed(np.asarray(after.conv), cut.shards(cut.heads), config, axis=1)
        return dict(y=y, state=after.state, conv=conv)

    compare(record, what, one, cuts, run, LIMIT)


def check_memory(record, cuts, n, toy):
    """One decode step over a pool as a server has it: compiled only, so the pool need not exist."""
    config, B = config_of("kimi-linear-48b", n, toy), n * -(-64 // n)
    params, pools = layer_shapes(config, 1024 * n)
    x, slots = (
        jax.ShapeDtypeStruct((B, config.D), jnp.bfloat16),
        jax.ShapeDtypeStruct((B,), jnp.int32),
    )
    for cut in cuts:
        if config.HV % cut.shards(cut.heads):
            continue
        specs = sharding.params_specs(params, cut.heads), P(cut.rows, None)
        specs += sharding.cache_specs(cut.heads, cut.rows), P(cut.rows)
        operands = shaped(cut, (params, x, pools, slots), specs)
        step, sums = layer_step(cut, config, params), 0 if cut.heads is None else 1
        what, real = f"decode, {1024 * n} slots", 0 if toy else 1
        program(record, what, cut, step, *operands, donated=2, all_reduces=sums, pools=real)


def layer_us(record, what, cut, step, carry, inputs, *, steps, repeats=(5, 3), pools=0):
    """(microseconds of a layer, all-reduces in the program) of a loop over layers.

    step: `(x, pool, own) -> (x, pool)`.
    """

    def loop(carry, inputs):
        def body(_, carry):
            x, pools = carry[0], list(carry[1])
            for layer, own in enumerate(inputs):
                # Nothing is prepared from the weights outside the loop: a model's step meets each
                # of them once.
                x, own = jax.lax.optimization_barrier((x, own))
                x, pools[layer] = step(x, pools[layer], own)
            return x, pools

        return jax.lax.fori_loop(0, steps, body, carry)

    shards = jax.tree.map(lambda x: x.sharding, carry)
    what = f"{what}, looped"
    compiled, sums = program(
        record, what, cut, loop, carry, inputs, donated=0, pools=pools, out_shardings=shards
    )
    carry, seconds = jax.block_until_ready(compiled(carry, inputs)), []
    for _ in range(repeats[0]):
        start = time.perf_counter()
        for _ in range(repeats[1]):  # not waited for: the host keeps ahead of the GPUs
            carry = compiled(carry, inputs)
        jax.block_until_ready(carry)
        seconds.append((time.perf_counter() - start) / repeats[1])
    if not np.isfinite(np.asarray(carry[0]).astype(np.float32)).all():
        raise SystemExit(f"{what}, {cut}: not finite")
    return statistics.median(seconds) / (steps * len(inputs)) * 1e6, sums


def scale(record, what, one, cuts, build, *, toy, steps, **sizes):
    """One row for each cut that can be: `build(cut)` gives the step, its carry and its inputs."""
    options: dict = dict(steps=2, repeats=(1, 1)) if toy else dict(steps=steps)
    if not toy and "T" not in sizes:  # a prefill's activations are many times its pool
        options["pools"] = sizes["layers"]
    one_us, _ = layer_us(record, what, one, *build(one), **options)
    for cut in cuts:
        if sizes["HV"] % cut.shards(cut.heads) == 0:
            us, sums = layer_us(record, what, cut, *build(cut), **options)
            row = dict(
                what=what, mesh=str(cut), **sizes, one_us=one_us, sharded_us=us, scaling=one_us / us
            )
            record.add("rows", row | {"all_reduces": sums})


def scale_recurrence(record, one, cuts, n, toy, layers=2):
    HV, K = (2 * n, 32) if toy else (96, HEAD_DIMENSION)
    B = n * -(-(2 if toy else 256) // n)
    S = B + n * max(B // n // 4, 1)
    config = kda_jax.KDAConfig(D=1, H=HV, HV=HV, K=K, V=K)
    operands = [
        random_operands(Sizes(B=B, H=HV, HV=HV, K=K, V=K, S=1), seed=layer)
        for layer in range(layers)
    ]
    for layer, x in enumerate(operands):
        del x["initial_state"]
        x["ssm_state_indices"] = own_slots(B, S, n, seed=layer)
    shapes = (
        jax.ShapeDtypeStruct((B, 1, HV, K), jnp.bfloat16),
        jax.ShapeDtypeStruct((S, HV, K, K), jnp.float32),
    )

    def build(cut):
        recurrence, (_, specs) = (
            recurrence_step(cut),
            recurrence_specs(cut),
        )
        pools = [zeros(cut, shapes[1], specs[1]) for _ in operands]
        inputs = [put_operands(cut, x, config) for x in operands]
        return (
            lambda _, pool, x: recurrence(pool, x),
            (zeros(cut, shapes[0], specs[0]), pools),
            inputs,
        )

    scale(record, "recurrence", one, cuts, build, toy=toy, steps=8, B=B, HV=HV, layers=layers)


def scale_layer(record, name, one, cuts, n, toy, *, B=0, T=0):
    """Decode of B rows, or prefill of one sequence of T tokens.

    y and a constant are the next layer's x.
    """
    config = config_of(name, n, toy)
    weights, cache = layer_shapes(config, 16 * B or 4)
    touched = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))
        + B * config.HV * config.V * config.K * 4
    )
    layers = 1 if T or toy else layers_for(touched / n)
    params = [jax.tree.map(jnp.asarray, random(weights, layer)) for layer in range(layers)]
    x = random(jax.ShapeDtypeStruct((B or T, config.D), jnp.bfloat16), layers)

    def build(cut):
        decode_or_prefill = layer_step(cut, config, weights, prefill=T > 0)

        def step(x, cache, own):
            params, x_0, *others = own
            y, cache = decode_or_prefill(params, x, cache, *others)
            return x_0 + y, cache

        def inputs(layer):
            own = (
                put(cut, params[layer], sharding.params_specs(weights, cut.heads)),
                put(cut, x, P(cut.rows, None)),
            )
            if T:
                return *own, put(cut, np.zeros(1, np.int32), P()), boundaries(cut, [T])
            return *own, put(cut, own_slots(B, 16 * B, n, seed=layer), P(cut.rows))

        caches = [zeros(cut, cache, sharding.cache_specs(cut.heads, cut.rows)) for _ in params]
        return (
            step,
            (zeros(cut, x, P(cut.rows, None)), caches),
            [inputs(layer) for layer in range(layers)],
        )

    what, sizes = f"{'prefill' if T else 'decode'} {name}", dict(T=T) if T else dict(B=B)
    steps = 2 if T else 20
    scale(
        record,
        what,
        one,
        cuts,
        build,
        toy=toy,
        steps=steps,
        **sizes,
        HV=config.HV,
        layers=layers,
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=int, default=len(jax.devices()), help="how many (default: all)"
    )
    parser.add_argument("--toy", action="store_true", help="toy sizes, on any backend")
    options = records.parse(parser, arguments)
    n, toy, on_gpu = options.devices, options.toy, jax.default_backend() == "gpu"
    if not 2 <= n <= len(jax.devices()):
        parser.error(f"--devices must be 2 to the {len(jax.devices())} that are here (got {n})")
    record = records.start(
        options, xla_flags=os.environ.get("XLA_FLAGS", ""), devices=n, toy=toy, rows=[]
    )
    one, cuts = cuts_of(n)
    compare_recurrence(record, one, cuts, n)
    compare_layer(record, one, cuts, n, prefill=False)
    compare_layer(record, one, cuts, n, prefill=True)
    check_memory(record, cuts[:2], n, toy)
    if not on_gpu:
        print(
            "the backend is not a GPU: times mean nothing" + ("" if toy else ", and none are taken")
        )
    if on_gpu or toy:
        scale_recurrence(record, one, cuts[:2], n, toy)
        decodes = (
            ("kimi-linear-48b", 64),
            ("kimi-linear-48b", 256),
            ("kimi-k3", 64),
            ("kimi-k3", 256),
        )
        for name, B in (("kimi-k3", 4),) if toy else decodes:
            scale_layer(record, name, one, cuts[:2], n, toy, B=n * -(-B // n))
        scale_layer(record, "kimi-linear-48b", one, cuts[:1], n, toy, T=128 if toy else 8192)
    results = record.finish()
    if faults := results.get("faults"):
        raise SystemExit(
            f"{len(faults)} programs copy their pools, or hold too much beside them: see faults"
        )
    return results


if __name__ == "__main__":
    main()
