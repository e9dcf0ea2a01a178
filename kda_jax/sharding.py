"""The layer over several devices: heads over one axis of a mesh, slots and the batch over another.

Everything but the output projection works on a device's own heads and slots, so a step has one
collective: the sum of the output projections over the heads' axis.

Over 350 lines, since half of them are docstrings with examples.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kda_contracts import (
    LAYER_COMMIT,
    LAYER_DECODE,
    LAYER_VERIFY,
    Contract,
    ContractError,
    split_heads,
)
from kda_jax.call import Array, Implementation
from kda_jax.drafts import KDADrafts, kda_commit, kda_verify
from kda_jax.layer import kda_decode, kda_prefill
from kda_jax.pools import as_int32, inside
from kda_jax.update_drafts import DRAFTED, Drafts
from kda_jax.weights import KDACache, KDAConfig, KDAParams


def specs(
    contract: Contract,
    *,
    heads: str | None,
    rows: str | None = None,
) -> tuple[dict[str, P], tuple[P, ...]]:
    """How each operand and result of an operator is cut, as its table's axes say.

    Args:
      contract: a table of `kda_contracts`, such as `PACKED_DECODE`.
      heads: the mesh axis of the heads, or None.
      rows: the mesh axis of the slots and the batch, or None.

    Returns:
      `(operands, results)`: a dict of PartitionSpecs by name, optional operands included, and a
      tuple of them. A packed axis, such as that of `mixed_qkv`, must be in `split_packed`'s order:
      otherwise a shard gets parts of heads. Slots are local (`local_slots`).

    Raises:
      Nothing.

    >>> from kda_contracts import PACKED_DECODE
    >>> operands, (out, state) = specs(PACKED_DECODE, heads="tp", rows="dp")
    >>> tuple(operands["dt_bias"]), tuple(operands["source_indices"]), tuple(state)
    (('tp',), ('dp',), ('dp', 'tp', None, None))
    """
    operands = {operand.name: _spec(operand, heads, rows) for operand in contract.operands}
    return operands, tuple(_spec(result, heads, rows) for result in contract.results)


def _spec(operand, heads, rows):
    if operand.cut is operand.rows is None:
        return P()
    at = {operand.rows: rows, operand.cut: heads}
    return P(*(at.get(axis) for axis in range(len(operand.axes.split()))))


def params_specs(params: KDAParams, heads: str | None) -> KDAParams:
    """How each weight of a layer is cut over the mesh axis `heads`.

    Args:
      params: `KDAParams`, arrays or shapes. heads: the mesh axis, or None for whole weights.

    Returns:
      `KDAParams` of PartitionSpecs, None where a weight is None.

    Raises:
      Nothing.

    >>> config = KDAConfig(D=16, H=2, HV=2, K=8, V=4)
    >>> from kda_jax.weights import init_params
    >>> tuple(params_specs(init_params(config, jax.random.key(0)), "tp").o_proj)
    ('tp', None)
    """
    cuts, _ = specs(LAYER_DECODE, heads=heads)
    fields: Any = {name: None if x is None else cuts[name] for name, x in vars(params).items()}
    return KDAParams(**fields)


def cache_specs(heads: str | None, rows: str | None = None) -> KDACache:
    """How a layer's two pools are cut.

    Each device's channels of `conv` are q, k and v of its own heads (`split_packed`).

    Args:
      heads: the mesh axis of the heads, or None. rows: the mesh axis of the slots, or None.

    Returns:
      `KDACache` of PartitionSpecs.

    Raises:
      Nothing.

    >>> tuple(cache_specs("tp", "dp").state)
    ('dp', 'tp', None, None)
    """
    cuts, _ = specs(LAYER_DECODE, heads=heads, rows=rows)
    fields: Any = {name: cuts[name] for name in ("conv", "state")}
    return KDACache(**fields)


def split_packed(x: Array, ranks: int, config: KDAConfig, *, axis: int = -1) -> jax.Array:
    """A packed axis `q | k | v` in the order q0 k0 v0 | q1 ...: a cut gives each shard its heads.

    Args:
      x: any array with `2*H*K+HV*V` elements along the axis: `mixed_qkv`, a convolution's pool or
        its kernel.
      ranks: shards that the heads are split over; must divide H and HV.
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
    return _reorder("split_packed", x, ranks, config, axis, ranks_first=False)


def join_packed(x: Array, ranks: int, config: KDAConfig, *, axis: int = -1) -> jax.Array:
    """The way back from `split_packed`: q of all heads, k of all, v of all.

    Args, Returns, Raises: as `split_packed`.

    >>> config = KDAConfig(D=1, H=2, HV=2, K=1, V=1)
    >>> join_packed(jnp.array([10, 20, 30, 11, 21, 31]), 2, config).tolist()
    [10, 11, 20, 21, 30, 31]
    """
    return _reorder("join_packed", x, ranks, config, axis, ranks_first=True)


def _reorder(name, x, ranks, config, axis, *, ranks_first):
    c = config
    H, HV = split_heads(c.H, c.HV, ranks)
    if x.shape[axis] != c.channels:
        raise ContractError(
            f"kda_jax.{name}: axis {axis} must have 2*H*K+HV*V = {c.channels} elements "
            f"(got {x.shape[axis]})"
        )
    x = jnp.moveaxis(x, axis, -1)
    parts = (H * c.K, H * c.K, HV * c.V)
    if ranks_first:
        pieces = jnp.split(x.reshape(*x.shape[:-1], ranks, -1), [parts[0], 2 * parts[0]], axis=-1)
        x = jnp.concatenate([y.reshape(*x.shape[:-1], -1) for y in pieces], axis=-1)
    else:
        pieces = jnp.split(x, [ranks * parts[0], 2 * ranks * parts[0]], axis=-1)
        split = [
            y.reshape(*x.shape[:-1], ranks, part) for y, part in zip(pieces, parts, strict=True)
        ]
        x = jnp.concatenate(split, axis=-1).reshape(x.shape)
    return jnp.moveaxis(x, -1, axis)


def local_slots(slots: Array, shard: int | jax.Array, slots_per_shard: int) -> jax.Array:
    """A shard's own slot numbers from global ones; a row of another shard becomes a padded row.

    Args:
      slots: signed integers of any shape, a NumPy or JAX array; the slots of the whole pool.
      shard: this shard's number (`jax.lax.axis_index` under `shard_map`).
      slots_per_shard: S of one shard's pool.

    Returns:
      int32 of the same shape.

    Raises:
      Nothing.

    >>> local_slots(jnp.array([4, 1, -1, 7]), 1, 4).tolist()
    [0, -1, -1, 3]
    """
    own = as_int32(slots) - shard * slots_per_shard
    return jnp.where(inside(own, slots_per_shard), own, -1)


def place(
    mesh: Mesh,
    config: KDAConfig,
    params: KDAParams,
    cache: KDACache,
    *,
    heads: str | None,
    rows: str | None = None,
) -> tuple[KDAParams, KDACache]:
    """A whole layer's weights and cache on a mesh, as `make_decode` and `make_prefill` want.

    Args:
      mesh: a `jax.sharding.Mesh`. config: the layer's.
      params: `KDAParams`, whole. cache: `KDACache`, whole, its `conv` in the order q | k | v.
      heads, rows: axes of the mesh, or None.

    Returns:
      `(params, cache)`, sharded.

    Raises:
      ContractError: heads that cannot be cut over that axis.

    >>> from kda_jax.weights import init_cache, init_params
    >>> config, mesh = KDAConfig(D=16, H=2, HV=2, K=8, V=4), jax.make_mesh((1,), ("tp",))
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 4)
    >>> tuple(place(mesh, config, params, cache, heads="tp")[1].state.sharding.spec)
    (None, 'tp', None, None)
    """
    ranks = 1 if heads is None else mesh.shape[heads]
    cache = dataclasses.replace(cache, conv=split_packed(cache.conv, ranks, config, axis=1))

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, params, params_specs(params, heads)), jax.tree.map(
        put, cache, cache_specs(heads, rows)
    )


def make_decode(
    mesh: Mesh,
    config: KDAConfig,
    params: KDAParams,
    *,
    heads: str | None,
    rows: str | None = None,
    implementation: Implementation = "auto",
) -> Callable[..., tuple[jax.Array, KDACache]]:
    """`kda_decode` over a mesh.

    Args:
      mesh: a `jax.sharding.Mesh`. config: the whole layer's. params: for which weights there are.
      heads: the mesh axis of the heads, or None. rows: that of the slots and the batch, or None.
      implementation: of the recurrence.

    Returns:
      A function `(params, x, cache, slots, sources=None) -> (y, cache)` for `jit`, with everything
      as `place` puts it, `x` `[B, D]`, `slots` and `sources` `[B]` (on a mesh of Explicit axes they
      must be placed too). Slots are global; with `rows`, a row's slot must be one of the shard that
      the row is on, or the row is a padded one there. So must its source, or the row starts from
      nothing.

    Raises:
      ContractError: as `kda_decode`, and for heads that cannot be cut so.

    >>> from kda_jax.weights import init_cache, init_params
    >>> config, mesh = KDAConfig(D=16, H=2, HV=2, K=8, V=4), jax.make_mesh((1,), ("tp",))
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 4)
    >>> params, cache = place(mesh, config, params, cache, heads="tp")
    >>> step = jax.jit(make_decode(mesh, config, params, heads="tp"), donate_argnums=2)
    >>> step(params, jnp.ones((2, 16), jnp.bfloat16), cache, jnp.array([3, 0]))[0].shape
    (2, 16)
    """
    split_heads(config.H, config.HV, 1 if heads is None else mesh.shape[heads])
    cuts, (y, *_) = specs(LAYER_DECODE, heads=heads, rows=rows)
    cache = cache_specs(heads, rows)

    def step(params, x, cache, slots, sources):
        slots, sources = (_own(each, cache, rows) for each in (slots, sources))
        options = dict(config=config, sources=sources, implementation=implementation)
        y, cache = kda_decode(params, x, cache, slots, **options)
        return _summed(y, heads), cache

    cuts = (params_specs(params, heads), cuts["x"], cache, cuts["slots"], cuts["sources"])
    over_mesh = jax.shard_map(step, mesh=mesh, in_specs=cuts, out_specs=(y, cache), check_vma=False)

    def decode(params, x, cache, slots, sources=None):
        return over_mesh(params, x, cache, slots, sources)

    return decode


def make_prefill(
    mesh: Mesh,
    config: KDAConfig,
    params: KDAParams,
    *,
    heads: str | None,
    rows: str | None = None,
    checkpoint_every: int | None = None,
    implementation: Implementation = "auto",
) -> Callable[..., tuple[jax.Array, KDACache]]:
    """`kda_prefill` over a mesh.

    Args:
      mesh, config, params, heads, rows, implementation: as `make_decode`.
      checkpoint_every: as `kda_prefill`, where the function is given `checkpoints`.

    Returns:
      A function `(params, x, cache, slots, cu_seqlens, sources=None, checkpoints=None) -> (y,
      cache)` for `jit`; slots, sources and checkpoints are global, as in `make_decode`. Without
      `rows`, `x` is `[T, D]`, `slots` `[N]`, `cu_seqlens` `[N+1]`. With R shards of rows, each has
      T/R tokens and N/R sequences of its own, end to end from its first token, and `cu_seqlens` is
      `[R, N/R+1]`.

    Raises:
      ContractError: as `kda_prefill`, and for heads that cannot be cut so.

    >>> from kda_jax.weights import init_cache, init_params
    >>> config, mesh = KDAConfig(D=16, H=2, HV=2, K=8, V=4), jax.make_mesh((1,), ("tp",))
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 4)
    >>> params, cache = place(mesh, config, params, cache, heads="tp")
    >>> step = jax.jit(make_prefill(mesh, config, params, heads="tp"), donate_argnums=2)
    >>> x, slots, bounds = jnp.ones((5, 16)), jnp.array([3, 0]), jnp.array([0, 3, 5])
    >>> step(params, x, cache, slots, bounds)[0].shape
    (5, 16)
    """
    split_heads(config.H, config.HV, 1 if heads is None else mesh.shape[heads])
    cache = cache_specs(heads, rows)

    def step(params, x, cache, slots, cu_seqlens, sources, checkpoints):
        cu_seqlens = cu_seqlens if rows is None else cu_seqlens[0]
        slots, sources, checkpoints = (
            _own(each, cache, rows) for each in (slots, sources, checkpoints)
        )
        options: dict[str, Any] = dict(sources=sources, implementation=implementation)
        if checkpoints is not None:
            options |= dict(checkpoints=checkpoints, checkpoint_every=checkpoint_every)
        y, cache = kda_prefill(params, x, cache, slots, cu_seqlens, config=config, **options)
        return _summed(y, heads), cache

    # Not the table's cuts: each shard of rows has tokens and boundaries of its own.
    tokens, bounds = P(rows, None), P() if rows is None else P(rows, None)
    indices = P(rows), bounds, P(rows), P(rows, None)
    cuts = (params_specs(params, heads), tokens, cache, *indices)
    over_mesh = jax.shard_map(
        step, mesh=mesh, in_specs=cuts, out_specs=(tokens, cache), check_vma=False
    )

    def prefill(params, x, cache, slots, cu_seqlens, sources=None, checkpoints=None):
        return over_mesh(params, x, cache, slots, cu_seqlens, sources, checkpoints)

    return prefill


def make_verify(
    mesh: Mesh,
    config: KDAConfig,
    params: KDAParams,
    *,
    heads: str | None,
    rows: str | None = None,
    implementation: Implementation = "auto",
) -> Callable[..., tuple[jax.Array, KDADrafts]]:
    """`kda_verify` over a mesh.

    Args:
      mesh, config, params, heads, rows, implementation: as `make_decode`.

    Returns:
      A function `(params, x, cache, slots, sources=None) -> (y, drafts)` for `jit`, with `x`
      `[N, T, D]` and the rest as in `make_decode`; `make_commit` takes the drafts as they are.

    Raises:
      ContractError: as `kda_verify`, and for heads that cannot be cut so.

    >>> from kda_jax.weights import init_cache, init_params
    >>> config, mesh = KDAConfig(D=16, H=2, HV=2, K=8, V=4), jax.make_mesh((1,), ("tp",))
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 4)
    >>> params, cache = place(mesh, config, params, cache, heads="tp")
    >>> verify = jax.jit(make_verify(mesh, config, params, heads="tp"))
    >>> commit = jax.jit(make_commit(mesh, heads="tp"), donate_argnums=0)
    >>> slots = jnp.array([3, 0])
    >>> y, drafts = verify(params, jnp.ones((2, 3, 16)), cache, slots)
    >>> cache = commit(cache, drafts, slots, jnp.array([2, 0]))
    >>> y.shape, cache.state.any((1, 2, 3)).tolist()
    ((2, 3, 16), [False, False, False, True])
    """
    split_heads(config.H, config.HV, 1 if heads is None else mesh.shape[heads])
    cuts, (y, *_) = specs(LAYER_VERIFY, heads=heads, rows=rows)

    def step(params, x, cache, slots, sources):
        slots, sources = (_own(each, cache, rows) for each in (slots, sources))
        options = dict(config=config, sources=sources, implementation=implementation)
        y, drafts = kda_verify(params, x, cache, slots, **options)
        return _summed(y, heads), drafts

    in_specs = (params_specs(params, heads), cuts["x"], cache_specs(heads, rows))
    over_mesh = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(*in_specs, cuts["slots"], cuts["sources"]),
        out_specs=(y, _drafts_specs(heads, rows)),
        check_vma=False,
    )

    def verify(params, x, cache, slots, sources=None):
        return over_mesh(params, x, cache, slots, sources)

    return verify


def make_commit(
    mesh: Mesh,
    *,
    heads: str | None,
    rows: str | None = None,
    implementation: Implementation = "auto",
) -> Callable[..., KDACache]:
    """`kda_commit` over a mesh.

    Args:
      mesh, heads, rows, implementation: as `make_decode`.

    Returns:
      A function `(cache, drafts, slots, num_accepted, sources=None) -> cache` for `jit`, its drafts
      as `make_verify` gives them.

    Raises:
      ContractError: as `kda_commit`.

    >>> from kda_jax.weights import init_cache, init_params
    >>> config, mesh = KDAConfig(D=16, H=2, HV=2, K=8, V=4), jax.make_mesh((1,), ("tp",))
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 4)
    >>> params, cache = place(mesh, config, params, cache, heads="tp")
    >>> verify = jax.jit(make_verify(mesh, config, params, heads="tp"))
    >>> y, drafts = verify(params, jnp.ones((1, 3, 16)), cache, jnp.array([2]))
    >>> commit = jax.jit(make_commit(mesh, heads="tp"), donate_argnums=0)
    >>> cache = commit(cache, drafts, jnp.array([2]), jnp.array([1]))
    >>> cache.state.any((1, 2, 3)).tolist()
    [False, False, True, False]
    """
    cuts, _ = specs(LAYER_COMMIT, heads=heads, rows=rows)
    cache = cache_specs(heads, rows)

    def step(cache, drafts, slots, accepted, sources):
        slots, sources = (_own(each, cache, rows) for each in (slots, sources))
        options = dict(sources=sources, implementation=implementation)
        return kda_commit(cache, drafts, slots, accepted, **options)

    over_mesh = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(cache, _drafts_specs(heads, rows), cuts["slots"], P(rows), cuts["sources"]),
        out_specs=cache,
        check_vma=False,
    )

    def commit(cache, drafts, slots, num_accepted, sources=None):
        return over_mesh(cache, drafts, slots, num_accepted, sources)

    return commit


def _drafts_specs(heads, rows):
    """How the drafts of a layer are cut, as KDADrafts."""
    cuts, _ = specs(LAYER_COMMIT, heads=heads, rows=rows)
    tokens: Any = {name: cuts[name] for name in DRAFTED}
    return KDADrafts(cuts["inputs"], Drafts(**tokens, use_qk_l2norm_in_kernel=True))


def _own(slots, cache, rows):
    return (
        slots
        if rows is None or slots is None
        else local_slots(slots, jax.lax.axis_index(rows), cache.state.shape[0])
    )


def _summed(y, heads):
    """The sum over the heads' shards, in float32."""
    if heads is None or jax.lax.axis_size(heads) == 1:
        return y
    return jax.lax.psum(y.astype(jnp.float32), heads).astype(y.dtype)
