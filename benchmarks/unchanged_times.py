"""GPU times of one checkout, for unchanged.py: {what: microseconds, or seconds of compilation}.

Decode and update are a kernel's medians by the profiler, prefill and the layer the clock's medians,
all in jitted loops of layers by the checkout's own timing tool.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import unchanged_names

K = V = 128
SHAPES = ("1x32", "8x32", "32x12", "64x32", "256x32", "128x96")
FEW = ("1x32", "8x32", "256x32")
LENGTHS = (2048, 8192, 32768)
BATCHES = (1, 8, 32, 128)
STEPS = 20


def measure(rows="all"):
    """All times, or the few that say most."""
    kda, few = unchanged_names.names(), rows == "few"
    bench = unchanged_names.module("kda_jax.tools.bench", "kda_jax.bench")
    timing = unchanged_names.module("kda_jax.tools.timing", "kda_jax.timing")
    times: dict[str, float] = {}

    def add(name, function, *arguments):
        start = time.perf_counter()
        times[name] = function(*arguments)
        took = time.perf_counter() - start
        print(f"    {name}: {times[name]:.2f} (measured in {took:.1f} s)", flush=True)

    for pool in ("float32", "bfloat16"):
        for shape in FEW if few else SHAPES:
            B, HV = map(int, shape.split("x"))
            add(f"decode {shape} {pool} us", decode, kda, timing, B, HV, pool)
        if not few:
            add(f"update T=4 32x32 {pool} us", update, kda, timing, pool)
    for T in (8192,) if few else LENGTHS:
        add(f"prefill {T} us", prefill, kda, timing, T)
    if not few:
        for B in BATCHES:
            add(f"layer B={B} us", layer, kda, timing, B)
        add("lower and compile 69 layers s", lambda: bench.compile_seconds("mosaic_gpu")[69])
    return times


def _normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _slots(B, S, seed):
    return jnp.asarray(np.random.default_rng(seed).permutation(S)[:B].astype(np.int32))


def _gates(HV, seed):
    A_log = jax.random.uniform(jax.random.key(seed), (HV,), minval=0.0, maxval=2.7)
    return A_log, _normal(seed + 1, HV * K, dtype=jnp.float32) - 2


def decode(kda, timing, B, HV, pool):
    pool = jnp.dtype(pool)
    layers, S = timing.layers_for(B * HV * V * K * pool.itemsize), B + max(B // 4, 3)
    inputs = [
        (_normal(n, B, 3 * HV * K), _normal(n + 1, B, HV * K), _normal(n + 2, B, HV),
         *_gates(HV, n + 3), _slots(B, S, n))
        for n in range(layers)
    ]  # fmt: skip
    pools = [_normal(n, S, HV, V, K, dtype=pool) for n in range(layers)]

    def op(pool, x):
        *x, slots = x
        options = dict(use_qk_l2norm_in_kernel=True, implementation="mosaic_gpu")
        return kda.packed_decode(*x, pool, slots, **options)

    times, _ = timing.time_layers(op, pools, inputs, max(16, min(40, 1500 // layers)))
    return times.kernel_us


def update(kda, timing, pool):
    pool, N, HV, T = jnp.dtype(pool), 32, 32, 4
    layers, S = timing.layers_for(N * HV * V * K * pool.itemsize), N + N // 4
    shapes = ((HV, K), (HV, K), (HV, V), (HV * K,), (HV,))
    inputs = [
        (*_gates(HV, n), *(_normal(n + i, N, T, *x) for i, x in enumerate(shapes)), _slots(N, S, n))
        for n in range(layers)
    ]
    pools = [_normal(n, S, HV, V, K, dtype=pool) for n in range(layers)]

    def op(pool, x):
        *x, slots = x
        return kda.fused_sigmoid_gating_kda_update(*x, pool, slots, implementation="mosaic_gpu")

    times, _ = timing.time_layers(op, pools, inputs, 40)
    return times.kernel_us


def prefill(kda, timing, T, H=32):
    x = (_normal(0, 1, T, H, K), _normal(1, 1, T, H, K), _normal(2, 1, T, H, V))
    x += (-jnp.exp(_normal(3, 1, T, H, K, dtype=jnp.float32)), jax.nn.sigmoid(_normal(4, 1, T, H)))

    def op(pool, x):
        # What takes the tokens alone must not be done once for the whole loop.
        pool, x = jax.lax.optimization_barrier((pool, x))
        options = dict(use_qk_l2norm_in_kernel=True, implementation="mosaic_gpu")
        return kda.chunk_kda(*x, pool, jnp.zeros(1, jnp.int32), **options)

    pools = [jnp.zeros((2, H, V, K))]
    times, _ = timing.time_layers(op, pools, [x], max(4, 65536 // T))
    return times.layer_us


def layer(kda, timing, B, layers=4):
    config = kda.KDAConfig(D=2304, H=32, HV=32, K=K, V=V, gate_rank=128)
    S = B + max(B // 4, 3)
    params = [kda.init_params(config, jax.random.key(n)) for n in range(layers)]
    inputs = [[(p, _slots(B, S, n)) for n, p in enumerate(params)]]
    caches = [kda.init_cache(config, S, conv_dtype=jnp.bfloat16) for _ in range(layers)]

    def op(carry, inputs):
        x, caches = carry
        after = []
        for cache, (params, slots) in zip(caches, inputs, strict=True):
            x, params = jax.lax.optimization_barrier((x, params))
            x, cache = kda.kda_decode(params, x, cache, slots, config=config)
            after.append(cache)
        return (), (x, after)

    times, _ = timing.time_layers(op, [(_normal(0, B, config.D), caches)], inputs, STEPS)
    return times.layer_us / layers
