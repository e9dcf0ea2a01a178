"""A caller's file for mypy and pyrefly. A line marked `wrong` must fail, all others pass."""

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_jax import Implementation, KDACache, KDAConfig, KDAParams, packed_decode


def decode(x: jax.Array, ref: jax.Ref, slots: np.ndarray, name: Implementation) -> jax.Array:
    out, pool = packed_decode(x, x, x, x, x, x, slots, scale=0.5, lower_bound=None)
    out, _ = packed_decode(x, x, x, x, x, ref, slots, out_dtype="bfloat16", implementation="xla")
    out, pool = packed_decode(x, x, x, x, x, pool, slots, source_indices=slots, implementation=name)
    out, pool = kda_jax.chunk_kda(x, x, x, x, x, pool, slots, out_dtype=jnp.float16)
    return out.reshape(pool.shape)


def drafts(x: jax.Array, pool: jax.Array, slots: jax.Array) -> jax.Array:
    out, pool = kda_jax.recurrent_kda(x, x, x, x, x, pool, slots, update_state=False)
    out, pool, states = kda_jax.fused_sigmoid_gating_kda_update(
        x, None, x, x, x, x, x, pool, slots, intermediate_states=True, num_accepted_tokens=slots
    )
    pool = kda_jax.commit(pool, states, slots, slots)
    out, drafts = kda_jax.recurrent_verify(x, x, x, x, x, pool, slots, sources=slots)
    pool = kda_jax.commit(pool, drafts, slots, slots, sources=slots, implementation="xla")
    out, pool = kda_jax.chunk_kda(
        x, x, x, x, x, pool, slots, checkpoints=slots[:, None], checkpoint_every=64
    )
    pool = kda_jax.copy_slots(pool, [1, 2], slots)
    return kda_jax.clear_slots(pool, [1, 2]) + out.astype(pool.dtype)


def layer(x: jax.Array) -> tuple[KDAParams, KDACache]:
    config = KDAConfig(D=16, H=1, HV=2, K=8, V=4, lower_bound=-5)
    params = kda_jax.init_params(config, jax.random.key(0), dtype=jnp.float32)
    cache = kda_jax.init_cache(config, 3, conv_dtype="float32")
    y, cache = kda_jax.kda_decode(params, x, cache, np.arange(2), config=config)
    y, cache = kda_jax.kda_prefill(params, y, cache, np.arange(2), np.arange(3), config=config)
    y, drafts = kda_jax.kda_verify(params, y, cache, np.arange(2), config=config, sources=y)
    cache = kda_jax.kda_commit(kda_jax.clear_slots(cache, [1]), drafts, np.arange(2), np.arange(2))
    config, params = kda_jax.load_layer("folder", 2, rank=1, ranks=8, dtype="bfloat16")
    _, layers = kda_jax.load_layers("folder")
    width: int = params.q_proj.shape[0] + layers[2].A_log.ndim + cache.state.shape[0] + y.ndim
    print(width, kda_jax.explain(packed_decode, implementation="xla").reasons["triton"])
    return params, cache


def on_the_host(slots: np.ndarray) -> None:
    kda_jax.validate_slots([0, -1], 6, sources=slots)
    kda_jax.validate_slots([0], 6, intermediate_states=[[3, 4]], num_accepted_tokens=[1])
    kda_jax.validate_cu_seqlens(slots, 8)
    print(kda_jax.pad_slots([1, 2], 4).shape, kda_jax.pack_qkv(slots, H=1, K=2, V=3).ndim)
    print(kda_jax.state_from_kv(kda_jax.state_to_kv(slots)).dtype)
    print(kda_jax.sharding.place, kda_jax.nnx.KDALayer, kda_jax.check_values("folder").ok)


def refused(x: jax.Array, slots: np.ndarray, config: KDAConfig, params: KDAParams) -> None:
    packed_decode(1, 2, 3, 4, 5, 6, 7, scale="x", implementation="nope")  # wrong
    a: int = packed_decode(x, x, x, x, x, x, slots)  # wrong
    packed_decode(x, x, x, x, x, x, slots, implementation="mosaic")  # wrong
    packed_decode(x, x, x, x, x, x, slots, scale="x")  # wrong
    packed_decode(x, x, x, x, x, x, [0, 1])  # wrong
    packed_decode(x, x, x, x, x, x, slots, sources=slots)  # wrong
    b: jax.Array = kda_jax.recurrent_kda(x, x, x, x, x, x, slots)  # wrong
    kda_jax.recurrent_kda(x, x, x, x, x, x, slots, update_state="no")  # wrong
    kda_jax.chunk_kda(x, x, x, x, x, x, slots, implementation="cuda")  # wrong
    c: int = kda_jax.commit(x, x, slots, slots)  # wrong
    cache = kda_jax.init_cache(config, "3")  # wrong
    kda_jax.kda_decode(vars(params), x, cache, slots, config=config)  # wrong
    kda_jax.kda_decode(params, x, [cache], slots, config=config)  # wrong
    kda_jax.kda_prefill(params, x, cache, slots, slots, config=config, fresh=slots)  # wrong
    kda_jax.kda_commit(cache, x, slots, slots)  # wrong
    f: jax.Array = kda_jax.recurrent_verify(x, x, x, x, x, x, slots)  # wrong
    y: jax.Array = kda_jax.kda_prefill(params, x, cache, slots, slots, config=config)  # wrong
    d: str = params.q_proj  # wrong
    kda_jax.load_layer("folder", "2")  # wrong
    KDAConfig(D=16, H=1, HV=2, K=8, V=4, lower_bound="-5")  # wrong
    kda_jax.pad_slots(3, 4)  # wrong
    kda_jax.validate_cu_seqlens([0, 3], None)  # wrong
    kda_jax.clear_slots(x)  # wrong
    print(kda_jax.packed_decod)  # wrong
    print(kda_jax.explain(packed_decode).reason)  # wrong
    e: Implementation = "pallas"  # wrong
    print(a, b, c, d, e, f, y)
