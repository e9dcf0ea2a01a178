"""Drafted tokens through a layer: verified without a trace, then committed as far as accepted."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kda_contracts import LAYER_COMMIT, LAYER_VERIFY, check
from kda_jax import call, conv, dispatch, pools, projections
from kda_jax.call import Array, Implementation
from kda_jax.layer_call import arrays_of, in_auto_axes, judge, pools_of
from kda_jax.update_drafts import DRAFTED, Drafts, commit, recurrent_verify
from kda_jax.weights import KDACache, KDAConfig, KDAParams, require_container, require_containers


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["inputs", "tokens"], meta_fields=[]
)
@dataclass(frozen=True)
class KDADrafts:
    """What `kda_verify` keeps of its tokens, so that `kda_commit` runs some of them again."""

    inputs: Any  # [N, T, 2*H*K+HV*V], of the short convolution
    tokens: Drafts


def kda_verify(
    params: KDAParams,
    x: Array,
    cache: KDACache,
    slots: Array,
    *,
    config: KDAConfig,
    sources: Array | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, KDADrafts]:
    """Some drafted tokens of each sequence through the layer, which is left as it was.

    A target model checks a draft so: its own tokens come of `y`, and `kda_commit` advances the
    cache by those that were right. A sequence with a shorter draft commits fewer.

    Args:
      params: `KDAParams`.
      x: `[N, T, D]` float; the normed inputs of the layer, T tokens of each sequence.
      cache: `KDACache`, whose pools may be `jax.Ref`s. It is read alone.
      slots: `[N]` integer; outside `[0, S)`: a padded sequence, whose output is zero.
      config: `KDAConfig`, static.
      sources: None, or `[N]` integer, as in `kda_decode`; `kda_commit` takes the same.
      implementation: of the recurrence, as in `recurrent_kda`.

    Returns:
      `(y, drafts)`: `[N, T, D]` in x's dtype, and `KDADrafts`, 2 kB a token and head with
      K = V = 128 and bfloat16.

    Effects:
      None.

    Raises:
      ContractError, TypeError, NotImplementedError: as `kda_decode`.

    >>> import jax
    >>> from kda_jax.weights import init_cache, init_params
    >>> config = KDAConfig(D=16, H=1, HV=2, K=8, V=4, gate_rank=4)
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 3)
    >>> x, slots = jnp.ones((2, 4, 16), jnp.bfloat16), jnp.array([2, 0])
    >>> y, drafts = kda_verify(params, x, cache, slots, config=config)
    >>> cache = kda_commit(cache, drafts, slots, jnp.array([3, 0]))
    >>> y.shape, cache.state.any((1, 2, 3)).tolist()
    ((2, 4, 16), [False, False, True])
    """
    require_containers(LAYER_VERIFY.name, params=params, cache=cache, config=config)
    operands = dict(x=x, slots=slots, sources=sources) | arrays_of(params) | pools_of(cache)
    sizes = judge(LAYER_VERIFY, params, config, operands)
    choice = dispatch.choose(LAYER_VERIFY, implementation, sizes, operands)
    if call.is_cut(operands):
        options = dict(config=config, implementation=choice.name)
        y, inputs, *tensors = in_auto_axes(_verified, LAYER_VERIFY, operands, **options)
        return y, KDADrafts(inputs, Drafts(*tensors, use_qk_l2norm_in_kernel=True))
    (N, T), slots, sources = x.shape[:2], pools.as_int32(slots), pools.as_int32(sources)
    x, more = jnp.asarray(x), 0
    if isinstance(N, int) and isinstance(T, int) and 0 < N * T < choice.rows:
        more = -(-choice.rows // T) - N
        x = jnp.pad(x, ((0, more), (0, 0), (0, 0)))
        slots, sources = pools.padded(more, slots, sources)
    live = pools.inside(slots, sizes.S)[:, None]
    x = projections.masked(x, live)
    inputs = projections.channels(params, x)
    mixed = conv.drafted(
        inputs,
        projections.conv_kernels(params),
        cache.conv,
        slots,
        sources,
        projections.conv_biases(params),
        kernels=choice.name == "mosaic_gpu",
    )
    tensors = projections.in_heads(params, x, mixed, config, sizes, x.shape[:2])
    out, tokens = recurrent_verify(
        *tensors,
        cache.state,
        slots,
        sources=sources,
        use_qk_l2norm_in_kernel=True,
        implementation=choice.name,
    )
    y = projections.output(params, x, out, live, config)
    return jax.tree.map(lambda each: each[:N] if more else each, (y, KDADrafts(inputs, tokens)))


def _verified(*args, **kwargs):
    """`kda_verify`, with its drafts as arrays."""
    y, drafts = kda_verify(*args, **kwargs)
    return y, drafts.inputs, *(getattr(drafts.tokens, name) for name in DRAFTED)


def kda_commit(
    cache: KDACache,
    drafts: KDADrafts,
    slots: Array,
    num_accepted: Array,
    *,
    sources: Array | None = None,
    implementation: Implementation = "auto",
) -> KDACache:
    """Advances a layer's cache by the accepted tokens of a draft, and by no others.

    Args:
      cache: `KDACache`, as it was when the draft was verified.
      drafts: `KDADrafts`, as `kda_verify` returned them.
      slots: `[N]` integer; the slot of each sequence. Outside `[0, S)`: passed over.
      num_accepted: `[N]` integer, 0 to T. 0, or more than T, leaves the slot as it is.
      sources: as in the call of `kda_verify`.
      implementation: as in `kda_verify`.

    Returns:
      `KDACache`, its convolution and its states behind the accepted tokens.

    Effects:
      As `kda_decode`: in place where the cache is donated to the surrounding `jit`, or Refs.

    Raises:
      ContractError, NotImplementedError: as `kda_decode`.

    >>> import jax
    >>> from kda_jax.weights import init_cache, init_params
    >>> config = KDAConfig(D=16, H=1, HV=2, K=8, V=4, gate_rank=4)
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 3)
    >>> x, slots = jnp.ones((1, 2, 16), jnp.bfloat16), jnp.array([1])
    >>> _, drafts = kda_verify(params, x, cache, slots, config=config)
    >>> none, both = (kda_commit(cache, drafts, slots, jnp.array([n])) for n in (0, 2))
    >>> none.state.any((1, 2, 3)).tolist(), both.state.any((1, 2, 3)).tolist()
    ([False, False, False], [False, True, False])
    """
    require_containers(LAYER_COMMIT.name, cache=cache)
    require_container(LAYER_COMMIT.name, "drafts", drafts, KDADrafts)
    arrays = dict(inputs=drafts.inputs) | {x: getattr(drafts.tokens, x) for x in DRAFTED}
    arrays |= pools_of(cache)
    arrays |= dict(slots=slots, num_accepted=num_accepted, sources=sources)
    sizes = check(LAYER_COMMIT, **arrays)
    choice = dispatch.choose(LAYER_COMMIT, implementation, sizes, arrays)
    if call.is_cut(arrays):
        again = functools.partial(_committed, choice.name)
        specs = call.result_cuts(LAYER_COMMIT, arrays)
        return KDACache(*call.in_auto_axes(again, LAYER_COMMIT.name, arrays, specs))
    slots, sources, accepted = map(pools.as_int32, (slots, sources, num_accepted))
    kernels = choice.name == "mosaic_gpu"
    window = conv.advanced(drafts.inputs, cache.conv, slots, sources, accepted, kernels=kernels)
    state = commit(
        cache.state,
        drafts.tokens,
        slots,
        accepted,
        sources=sources,
        implementation=choice.name,
    )
    return KDACache(window, state)


def _committed(implementation, *, inputs, conv, state, sources=None, slots, num_accepted, **tokens):
    """`kda_commit` of arrays by name."""
    drafts = KDADrafts(inputs, Drafts(**tokens, use_qk_l2norm_in_kernel=True))
    cache = kda_commit(
        KDACache(conv, state),
        drafts,
        slots,
        num_accepted,
        sources=sources,
        implementation=implementation,
    )
    return cache.conv, cache.state
