"""The layer over several devices: heads over one axis of a mesh, slots and the batch over another.

Everything but the output projection works on a device's own heads and slots, so a step has one collective: the sum of
the output projections over the heads' axis.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kda_contracts import ContractError
from kda_jax.call import Implementation
from kda_jax.layer import kda_decode, kda_prefill
from kda_jax.pools import as_int32
from kda_jax.weights import KDACache, KDAConfig, KDAParams


def packed_decode_specs(heads, rows=None):
    """How each operand and result of `packed_decode` is cut.

    Args:
      heads: the mesh axis of the heads, or None. rows: the mesh axis of the slots and the batch, or None.

    Returns:
      `(operands, results)`: a dict of PartitionSpecs by argument, and those of `(out, state)`. `mixed_qkv` must be in
      `split_packed`'s order, or a cut tears its heads apart; slots are local (`local_slots`).

    Raises:
      Nothing.

    >>> tuple(packed_decode_specs("tp")[0]["dt_bias"])
    ('tp',)
    """
    operands = dict(
        mixed_qkv=P(rows, heads),
        a=P(rows, heads),
        b=P(rows, heads),
        A_log=P(heads),
        dt_bias=P(heads),
        initial_state=P(rows, heads, None, None),
        ssm_state_indices=P(rows),
    )
    return operands, (P(rows, None, heads, None), P(rows, heads, None, None))


def params_specs(params: KDAParams, heads) -> KDAParams:
    """How each weight of a layer is cut over the mesh axis `heads`: a `KDAParams` of PartitionSpecs, for its weights.

    Args:
      params: `KDAParams`, arrays or shapes. heads: the mesh axis, or None for weights that every device has whole.

    Returns:
      `KDAParams` of PartitionSpecs, None where a weight is None.

    Raises:
      Nothing.

    >>> config = KDAConfig(D=16, H=2, HV=2, K=8, V=4)
    >>> from kda_jax.weights import init_params
    >>> tuple(params_specs(init_params(config, jax.random.key(0)), "tp").o_proj)
    ('tp', None)
    """
    last, first, whole = P(None, heads), P(heads, None), P()
    specs = dict(
        q_proj=last,
        k_proj=last,
        v_proj=last,
        q_conv=first,
        k_conv=first,
        v_conv=first,
        o_proj=first,
    )
    specs |= dict(f_down=whole, f_up=last, b_proj=last, A_log=P(heads), dt_bias=P(heads))
    specs |= dict(g_down=whole, g_up=last, g_bias=P(heads), norm=whole)
    cuts: Any = {name: None if getattr(params, name) is None else x for name, x in specs.items()}
    return KDAParams(**cuts)


def cache_specs(heads, rows=None) -> KDACache:
    """How a layer's pools are cut; each device's channels of `conv` are q, k and v of its own heads (`split_packed`).

    Args:
      heads: the mesh axis of the heads, or None. rows: the mesh axis of the slots, or None.

    Returns:
      `KDACache` of PartitionSpecs.

    Raises:
      Nothing.

    >>> tuple(cache_specs("tp", "dp").state)
    ('dp', 'tp', None, None)
    """
    cuts: Any = dict(conv=P(rows, heads, None), state=P(rows, heads, None, None))
    return KDACache(**cuts)


def split_packed(x, shards, config: KDAConfig, *, axis=-1):
    """A packed axis `q | k | v` in the order in which a contiguous cut gives each shard its heads: q0 k0 v0 | q1 ...

    Args:
      x: any array with `2*H*K+HV*V` elements along the axis: `mixed_qkv`, a convolution's pool or its kernel.
      shards: devices that the heads are cut over; must divide H and HV.
      config: for H, HV, K, V of the whole.
      axis: the packed one.

    Returns:
      The array, reordered. `join_packed` is the way back.

    Raises:
      ContractError: another number of elements, or heads that cannot be cut so.

    >>> config = KDAConfig(D=1, H=2, HV=2, K=1, V=1)
    >>> split_packed(jnp.array([10, 11, 20, 21, 30, 31]), 2, config).tolist()
    [10, 20, 30, 11, 21, 31]
    """
    return _reorder("split_packed", x, shards, config, axis, shards_first=False)


def join_packed(x, shards, config: KDAConfig, *, axis=-1):
    """The way back from `split_packed`: q of all heads, k of all, v of all.

    Args, Returns, Raises: as `split_packed`.

    >>> config = KDAConfig(D=1, H=2, HV=2, K=1, V=1)
    >>> join_packed(jnp.array([10, 20, 30, 11, 21, 31]), 2, config).tolist()
    [10, 11, 20, 21, 30, 31]
    """
    return _reorder("join_packed", x, shards, config, axis, shards_first=True)


def _reorder(name, x, shards, config, axis, *, shards_first):
    c = config
    _refuse_torn_heads(name, config, shards)
    if x.shape[axis] != c.channels:
        raise ContractError(
            f"kda_jax.{name}: axis {axis} must have 2*H*K+HV*V = {c.channels} elements (got {x.shape[axis]})"
        )
    x = jnp.moveaxis(x, axis, -1)
    parts = (c.H * c.K // shards, c.H * c.K // shards, c.HV * c.V // shards)
    if shards_first:
        pieces = jnp.split(x.reshape(*x.shape[:-1], shards, -1), [parts[0], 2 * parts[0]], axis=-1)
        x = jnp.concatenate([y.reshape(*x.shape[:-1], -1) for y in pieces], axis=-1)
    else:
        pieces = jnp.split(x, [shards * parts[0], 2 * shards * parts[0]], axis=-1)
        split = [
            y.reshape(*x.shape[:-1], shards, part) for y, part in zip(pieces, parts, strict=True)
        ]
        x = jnp.concatenate(split, axis=-1).reshape(x.shape)
    return jnp.moveaxis(x, -1, axis)


def _refuse_torn_heads(name, config, shards):
    if shards < 1 or config.H % shards or config.HV % shards:
        raise ContractError(
            f"kda_jax.{name}: H={config.H} and HV={config.HV} heads cannot be cut over {shards} shards"
        )


def local_slots(indices, shard, slots_per_shard):
    """A shard's own slot numbers from global ones: a row of another shard becomes a padded row, like a padded one.

    Args:
      indices: `[B]` signed integers, a NumPy or JAX array; the slots of the whole pool.
      shard: this shard's number (`jax.lax.axis_index` under `shard_map`).
      slots_per_shard: S of one shard's pool.

    Returns:
      `[B]` int32.

    Raises:
      Nothing.

    >>> local_slots(jnp.array([4, 1, -1, 7]), 1, 4).tolist()
    [0, -1, -1, 3]
    """
    own = as_int32(indices) - shard * slots_per_shard
    return jnp.where((own >= 0) & (own < slots_per_shard), own, -1)


def place(params: KDAParams, cache: KDACache, mesh, config: KDAConfig, *, heads, rows=None):
    """A whole layer's weights and cache, put on a mesh as `sharded_decode` and `sharded_prefill` want them.

    Args:
      params: `KDAParams`, whole. cache: `KDACache`, whole, its `conv` in the order q | k | v.
      mesh: a `jax.sharding.Mesh`. config: the layer's. heads, rows: its axes, or None.

    Returns:
      `(params, cache)`, sharded.

    Raises:
      ContractError: heads that cannot be cut over that axis.

    >>> from kda_jax.weights import init_cache, init_params
    >>> config, mesh = KDAConfig(D=16, H=2, HV=2, K=8, V=4), jax.make_mesh((1,), ("tp",))
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 4)
    >>> tuple(place(params, cache, mesh, config, heads="tp")[1].state.sharding.spec)
    (None, 'tp', None, None)
    """
    shards = 1 if heads is None else mesh.shape[heads]
    cache = dataclasses.replace(cache, conv=split_packed(cache.conv, shards, config, axis=1))

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, params, params_specs(params, heads)), jax.tree.map(
        put, cache, cache_specs(heads, rows)
    )


def sharded_decode(
    mesh,
    config: KDAConfig,
    params: KDAParams,
    *,
    heads,
    rows=None,
    implementation: Implementation = "auto",
):
    """`kda_decode` over a mesh.

    Args:
      mesh: a `jax.sharding.Mesh`. config: the whole layer's. params: for which weights there are.
      heads: the mesh axis of the heads, or None. rows: that of the slots and the batch, or None.
      implementation: of the recurrence.

    Returns:
      A function `(params, x, cache, slots) -> (y, cache)` for `jit`, with everything as `place` puts it, `x` `[B, D]`
      and `slots` `[B]` (on a mesh of Explicit axes they must be placed too). Slots are global; with `rows`, a row's
      slot must be one of the shard that the row is on, or the row is a padded one there.

    Raises:
      ContractError: as `kda_decode`, and for heads that cannot be cut so.

    >>> from kda_jax.weights import init_cache, init_params
    >>> config, mesh = KDAConfig(D=16, H=2, HV=2, K=8, V=4), jax.make_mesh((1,), ("tp",))
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 4)
    >>> params, cache = place(params, cache, mesh, config, heads="tp")
    >>> step = jax.jit(sharded_decode(mesh, config, params, heads="tp"), donate_argnums=2)
    >>> step(params, jnp.ones((2, 16), jnp.bfloat16), cache, jnp.array([3, 0]))[0].shape
    (2, 16)
    """
    _refuse_torn_heads("sharded_decode", config, 1 if heads is None else mesh.shape[heads])
    cache = cache_specs(heads, rows)

    def step(params, x, cache, slots):
        slots = _own(slots, cache, rows)
        y, cache = kda_decode(params, x, cache, slots, config=config, implementation=implementation)
        return _summed(y, heads), cache

    specs = (params_specs(params, heads), P(rows, None), cache, P(rows))
    return jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(P(rows, None), cache), check_vma=False
    )


def sharded_prefill(
    mesh,
    config: KDAConfig,
    params: KDAParams,
    *,
    heads,
    rows=None,
    implementation: Implementation = "auto",
):
    """`kda_prefill` over a mesh.

    Args:
      mesh, config, params, heads, rows, implementation: as `sharded_decode`.

    Returns:
      A function `(params, x, cache, slots, cu_seqlens, fresh=None) -> (y, cache)` for `jit`. Without `rows`, `x` is
      `[T, D]`, `slots` `[N]`, `cu_seqlens` `[N+1]`. With R shards of rows, each has T/R tokens and N/R sequences of its
      own, end to end from its first token, and `cu_seqlens` is `[R, N/R+1]`.

    Raises:
      ContractError: as `kda_prefill`, and for heads that cannot be cut so.

    >>> from kda_jax.weights import init_cache, init_params
    >>> config, mesh = KDAConfig(D=16, H=2, HV=2, K=8, V=4), jax.make_mesh((1,), ("tp",))
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 4)
    >>> params, cache = place(params, cache, mesh, config, heads="tp")
    >>> step = jax.jit(sharded_prefill(mesh, config, params, heads="tp"), donate_argnums=2)
    >>> step(params, jnp.ones((5, 16), jnp.bfloat16), cache, jnp.array([3, 0]), jnp.array([0, 3, 5]))[0].shape
    (5, 16)
    """
    _refuse_torn_heads("sharded_prefill", config, 1 if heads is None else mesh.shape[heads])
    cache = cache_specs(heads, rows)

    def step(params, x, cache, slots, cu_seqlens, fresh):
        cu_seqlens = cu_seqlens if rows is None else cu_seqlens[0]
        slots = _own(slots, cache, rows)
        options = dict(config=config, fresh=fresh, implementation=implementation)
        y, cache = kda_prefill(params, x, cache, slots, cu_seqlens, **options)
        return _summed(y, heads), cache

    bounds = P() if rows is None else P(rows, None)
    specs = (params_specs(params, heads), P(rows, None), cache, P(rows), bounds, P(rows))
    over_mesh = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(P(rows, None), cache), check_vma=False
    )

    def prefill(params, x, cache, slots, cu_seqlens, fresh=None):
        fresh = jnp.zeros(slots.shape, bool) if fresh is None else fresh
        return over_mesh(params, x, cache, slots, cu_seqlens, fresh)

    return prefill


def _own(slots, cache, rows):
    return (
        slots
        if rows is None
        else local_slots(slots, jax.lax.axis_index(rows), cache.state.shape[0])
    )


def _summed(y, heads):
    """The sum over the heads' shards, in float32."""
    if heads is None or jax.lax.axis_size(heads) == 1:
        return y
    return jax.lax.psum(y.astype(jnp.float32), heads).astype(y.dtype)
