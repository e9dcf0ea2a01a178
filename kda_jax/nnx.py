"""The layer as a Flax NNX module: a thin holder of its weights. Needs the extra `flax`."""

import dataclasses
from typing import Any

import jax
from jax.typing import DTypeLike

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ImportError("kda_jax.nnx needs flax: install kda-jax with the extra `flax`") from error

from kda_jax.call import Array, Implementation
from kda_jax.drafts import KDADrafts, kda_verify
from kda_jax.layer import kda_apply, kda_decode, kda_prefill
from kda_jax.weights import KDACache, KDAConfig, KDAParams, init_cache, init_params


class KDALayer(nnx.Module):
    """A KDA layer whose weights are `nnx.Param`s under the names of `KDAParams`.

    Args:
      config: `KDAConfig`.
      params: `KDAParams` of a checkpoint; random ones where it is None.
      dtype: of random weights.
      rngs: `nnx.Rngs` for random weights.

    The cache is no part of the module: it belongs to the requests, and is passed and returned, so
    that a donating `nnx.jit` advances it in place.

    >>> import jax, jax.numpy as jnp
    >>> layer = KDALayer(KDAConfig(D=16, H=1, HV=2, K=8, V=4), rngs=nnx.Rngs(0), dtype=jnp.float32)
    >>> cache = layer.init_cache(3)
    >>> x, slots = jnp.ones((2, 16)), jnp.array([2, -1])
    >>> step = nnx.jit(lambda layer, cache: layer.decode(x, cache, slots))
    >>> y, cache = step(layer, cache)
    >>> y.shape, len(jax.tree.leaves(nnx.state(layer, nnx.Param)))
    ((2, 16), 14)
    """

    def __init__(
        self,
        config: KDAConfig,
        *,
        params: KDAParams | None = None,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        self.config = config
        if params is None:
            if rngs is None:
                raise ValueError("KDALayer needs `params`, or `rngs` to make random ones")
            params = init_params(
                config, rngs.params(), **({} if dtype is None else {"dtype": dtype})
            )
        for field in dataclasses.fields(params):
            weight = getattr(params, field.name)
            setattr(self, field.name, None if weight is None else nnx.Param(weight))

    @property
    def params(self) -> KDAParams:
        """The weights as the functions take them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(KDAParams)}
        weights: Any = {name: None if x is None else x[...] for name, x in fields.items()}
        return KDAParams(**weights)

    def init_cache(self, num_slots: int, **options: Any) -> KDACache:
        """As `kda_jax.init_cache`, for these weights."""
        return init_cache(self.config, num_slots, params=self.params, **options)

    def __call__(
        self,
        x: Array,
        *,
        segment_ids: Array | None = None,
        cu_seqlens: Array | None = None,
        implementation: Implementation = "auto",
    ) -> jax.Array:
        """As `kda_jax.kda_apply`: for training, without a cache."""
        return kda_apply(
            self.params,
            x,
            config=self.config,
            segment_ids=segment_ids,
            cu_seqlens=cu_seqlens,
            implementation=implementation,
        )

    def decode(
        self,
        x: Array,
        cache: KDACache,
        slots: Array,
        *,
        sources: Array | None = None,
        implementation: Implementation = "auto",
    ) -> tuple[jax.Array, KDACache]:
        """As `kda_jax.kda_decode`."""
        return kda_decode(
            self.params,
            x,
            cache,
            slots,
            config=self.config,
            sources=sources,
            implementation=implementation,
        )

    def prefill(
        self,
        x: Array,
        cache: KDACache,
        slots: Array,
        cu_seqlens: Array,
        *,
        sources: Array | None = None,
        checkpoints: Array | None = None,
        checkpoint_every: int | None = None,
        implementation: Implementation = "auto",
    ) -> tuple[jax.Array, KDACache]:
        """As `kda_jax.kda_prefill`."""
        return kda_prefill(
            self.params,
            x,
            cache,
            slots,
            cu_seqlens,
            config=self.config,
            sources=sources,
            checkpoints=checkpoints,
            checkpoint_every=checkpoint_every,
            implementation=implementation,
        )

    def verify(
        self,
        x: Array,
        cache: KDACache,
        slots: Array,
        *,
        sources: Array | None = None,
        implementation: Implementation = "auto",
    ) -> tuple[jax.Array, KDADrafts]:
        """As `kda_jax.kda_verify`; `kda_jax.kda_commit` needs no weights."""
        return kda_verify(
            self.params,
            x,
            cache,
            slots,
            config=self.config,
            sources=sources,
            implementation=implementation,
        )
