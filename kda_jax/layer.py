"""A whole KDA layer: projections, short convolution, gates, recurrence, gated norm."""

import jax
import jax.numpy as jnp

from kda_contracts import LAYER_APPLY, LAYER_DECODE, LAYER_PREFILL
from kda_jax import call, conv, conv_xla, dispatch, pools, projections
from kda_jax.call import Array, Implementation
from kda_jax.decode import packed_decode
from kda_jax.layer_call import arrays_of, in_auto_axes, judge, pools_of
from kda_jax.prefill import chunk_kda
from kda_jax.sequences import bounded, owners, positions, segments
from kda_jax.weights import KDACache, KDAConfig, KDAParams, require_containers


def kda_decode(
    params: KDAParams,
    x: Array,
    cache: KDACache,
    slots: Array,
    *,
    config: KDAConfig,
    sources: Array | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, KDACache]:
    """One token of each row through the layer.

    Args:
      params: `KDAParams`.
      x: `[B, D]` float; the normed input of the layer.
      cache: `KDACache`, whose pools may be `jax.Ref`s.
      slots: `[B]` integer; outside `[0, S)`: a padded row, whose output is zero and which touches
        no slot.
      config: `KDAConfig`, static.
      sources: None, or `[B]` integer; the slot that each row goes on from, convolution and state.
        Outside `[0, S)`: from nothing. None is its own. A slot that one row reads and another
        writes is the caller's mistake (`validate_slots` finds it).
      implementation: of the recurrence, as in `packed_decode`.

    Returns:
      `(y, cache)`: `[B, D]` in x's dtype, to be added to the residual stream, and the cache,
      advanced by one token.

    Effects:
      A cache that is donated to the surrounding `jit` advances in place. Under `shard_map` with the
      heads sharded, `y` is this shard's part of the sum over them (`kda_jax.sharding`).

    Raises:
      ContractError, TypeError, NotImplementedError: as `packed_decode`.

    Source: the layer of the Kimi Linear paper.

    >>> import jax
    >>> from kda_jax.weights import init_cache, init_params
    >>> config = KDAConfig(D=16, H=1, HV=2, K=8, V=4, gate_rank=4)
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 3)
    >>> def step(cache, x, slots):
    ...     return kda_decode(params, x, cache, slots, config=config)
    >>> step = jax.jit(step, donate_argnums=0)
    >>> y, cache = step(cache, jnp.ones((2, 16), jnp.bfloat16), jnp.array([2, -1]))
    >>> y.shape, bool(y[1].any()), bool(cache.state[2].any())
    ((2, 16), False, True)
    """
    require_containers(LAYER_DECODE.name, params=params, cache=cache, config=config)
    operands = dict(x=x, slots=slots, sources=sources) | arrays_of(params) | pools_of(cache)
    sizes = judge(LAYER_DECODE, params, config, operands)
    choice = dispatch.choose(LAYER_DECODE, implementation, sizes, operands)
    if call.is_cut(operands):
        options = dict(config=config, implementation=choice.name)
        return _in_auto_axes(kda_decode, LAYER_DECODE, operands, **options)
    B, slots, sources = x.shape[0], pools.as_int32(slots), pools.as_int32(sources)
    if isinstance(B, int) and choice.rows > B:
        x = jnp.pad(x, ((0, choice.rows - B), (0, 0)))
        slots, sources = pools.padded(choice.rows - B, slots, sources)
    live = pools.inside(slots, sizes.S)
    if choice.name == "xla":
        # The kernels pass over padded rows, whatever they hold. XLA's gather does not, nor its
        # derivatives.
        x = projections.masked(x, live)
    mixed_qkv, window = conv_xla.one_token(
        projections.channels(params, x),
        conv_xla.joined(projections.conv_kernels(params)),
        cache.conv,
        slots,
        sources,
        conv_xla.joined(projections.conv_biases(params)),
    )
    out, state = packed_decode(
        mixed_qkv,
        projections.forget(params, x),
        projections.times(x, params.b_proj),
        params.A_log,
        params.dt_bias,
        cache.state,
        slots,
        source_indices=sources,
        use_qk_l2norm_in_kernel=True,
        lower_bound=config.lower_bound,
        allow_neg_eigval=config.allow_neg_eigval,
        implementation=choice.name,
    )
    return projections.output(params, x, out[:, 0], live, config)[:B], KDACache(window, state)


def kda_prefill(
    params: KDAParams,
    x: Array,
    cache: KDACache,
    slots: Array,
    cu_seqlens: Array,
    *,
    config: KDAConfig,
    sources: Array | None = None,
    checkpoints: Array | None = None,
    checkpoint_every: int | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, KDACache]:
    """All tokens of sequences that lie end to end through the layer.

    Each sequence continues what its slot, or its source, holds. Prompts, pieces of them and single
    tokens may come together.

    Args:
      params: `KDAParams`.
      x: `[T, D]` float; the normed inputs of all sequences.
      cache: `KDACache`, whose pools may be `jax.Ref`s.
      slots: `[N]` integer; the slot of each sequence. Outside `[0, S)`: a padded one, whose output
        is zero.
      cu_seqlens: `[N+1]` int32 or int64; sequence n is tokens `cu_seqlens[n]` to
        `cu_seqlens[n+1] - 1`. Tokens behind the last boundary belong to none.
      config: `KDAConfig`, static.
      sources: None, or `[N]` integer; the slot that each sequence goes on from, convolution and
        state, as in `kda_decode`. -1 starts a new request, whatever its slot holds.
      checkpoints: None, or `[N, M]` integer; the slot in column m takes convolution and state after
        `(m + 1) * checkpoint_every` tokens of the sequence in this call. Outside `[0, S)`, or where
        the sequence is shorter: not kept. No slot of the call may be among them, as a source
        neither (`validate_slots` finds it).
      checkpoint_every: with `checkpoints`, a static multiple of 64.
      implementation: of the recurrence, as in `chunk_kda`.

    Returns:
      `(y, cache)`: `[T, D]` in x's dtype, and the cache, advanced by all tokens.

    Effects:
      As `kda_decode`. It differentiates. The recurrence of a sequence that goes on from a
      checkpoint has the bits of the unbroken one where `chunk_kda` says so, from the same tokens.
      The projections' products may differ in their last bits with the number of tokens in a call.

    Raises:
      ContractError, TypeError, NotImplementedError: as `kda_decode`.

    >>> import jax
    >>> from kda_jax.weights import init_cache, init_params
    >>> config = KDAConfig(D=16, H=1, HV=2, K=8, V=4, gate_rank=4)
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 3)
    >>> x = jnp.ones((5, 16), jnp.bfloat16)
    >>> slots, bounds = jnp.array([2, 0]), jnp.array([0, 3, 5])
    >>> y, cache = kda_prefill(params, x, cache, slots, bounds, config=config)
    >>> y.shape, cache.state.any((1, 2, 3)).tolist()
    ((5, 16), [True, False, True])
    """
    require_containers(LAYER_PREFILL.name, params=params, cache=cache, config=config)
    operands = dict(x=x, slots=slots, cu_seqlens=cu_seqlens, sources=sources)
    operands |= dict(checkpoints=checkpoints) | arrays_of(params) | pools_of(cache)
    every = dict(checkpoint_every=checkpoint_every)
    sizes = judge(LAYER_PREFILL, params, config, operands, **every)
    choice = dispatch.choose(LAYER_PREFILL, implementation, sizes, operands)
    if call.is_cut(operands):
        options = dict(config=config, implementation=choice.name) | every
        return _in_auto_axes(kda_prefill, LAYER_PREFILL, operands, **options)
    tokens, slots, cu_seqlens = x.shape[0], pools.as_int32(slots), pools.as_int32(cu_seqlens)
    sources, checkpoints = pools.as_int32(sources), pools.as_int32(checkpoints)
    cu_seqlens = bounded(cu_seqlens, tokens)  # no sequence reaches into the padding
    if choice.tokens > 1:
        # Padded here, where it costs least: chunk_kda would pad five wider operands.
        x = jnp.pad(x, ((0, -tokens % choice.tokens), (0, 0)))
    T = x.shape[0]
    live = jnp.append(pools.inside(slots, sizes.S), False)[owners(cu_seqlens, T)]
    x = projections.masked(x, live)
    kernels = choice.name == "mosaic_gpu"
    mixed, window = conv.all_tokens(
        projections.channels_apart(params, x) if kernels else (projections.channels(params, x),),
        projections.conv_kernels(params),
        cache.conv,
        slots,
        cu_seqlens,
        sources,
        checkpoints,
        projections.conv_biases(params),
        every=checkpoint_every or 0,
        kernels=kernels,
    )
    q, k, v, log_decay, beta = projections.in_heads(params, x, mixed, config, sizes, (1, T))
    out, state = chunk_kda(
        q,
        k,
        v,
        log_decay,
        beta,
        cache.state,
        slots,
        sources=sources,
        cu_seqlens=cu_seqlens,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        use_qk_l2norm_in_kernel=True,
        implementation=choice.name,
    )
    return projections.output(params, x, out[0], live, config)[:tokens], KDACache(window, state)


def kda_apply(
    params: KDAParams,
    x: Array,
    *,
    config: KDAConfig,
    segment_ids: Array | None = None,
    cu_seqlens: Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """A batch of rows through the layer, each from nothing: for training, without cache and slots.

    Several sequences may share a row: told apart by `segment_ids`, or, in one row, by `cu_seqlens`.
    State and short convolution start from nothing at each.

    Args:
      params: `KDAParams`.
      x: `[B, T, D]` float; the normed inputs of the layer.
      config: `KDAConfig`, static.
      segment_ids: None, or `[B, T]` integer; a segment starts wherever the id changes, also to one
        that was there before. 0 is padding: zeros come out, and no gradient goes in, whatever x
        holds there.
      cu_seqlens: None, or `[N+1]` int32 or int64, with B = 1 and without `segment_ids`; sequence n
        is tokens `cu_seqlens[n]` to `cu_seqlens[n+1] - 1`. Tokens of none are padding.
      implementation: of the recurrence, as in `chunk_kda`.

    Returns:
      `[B, T, D]` in x's dtype, to be added to the residual stream.

    Effects:
      It differentiates in x and in every weight. The state is float32. Under `shard_map` with the
      heads sharded, the result is this shard's part of the sum over them.

    Raises:
      ContractError, TypeError, NotImplementedError: as `chunk_kda`.

    Source: the layer of the Kimi Linear paper.

    >>> import jax
    >>> from kda_jax.weights import init_params
    >>> config = KDAConfig(D=16, H=1, HV=2, K=8, V=4, gate_rank=4)
    >>> params, x = init_params(config, jax.random.key(0)), jnp.ones((2, 5, 16))
    >>> ids = jnp.array([[7, 7, 7, 7, 7], [1, 1, 2, 2, 0]])  # two sequences in the second row
    >>> y = kda_apply(params, x, config=config, segment_ids=ids)
    >>> bool(jnp.allclose(y[1, 2:4], y[0, :2])), y.any(-1)[1].tolist()
    (True, [True, True, True, True, False])
    """
    require_containers(LAYER_APPLY.name, params=params, config=config)
    operands = dict(x=x, segment_ids=segment_ids, cu_seqlens=cu_seqlens) | arrays_of(params)
    sizes = judge(LAYER_APPLY, params, config, operands)
    choice = dispatch.choose(LAYER_APPLY, implementation, sizes, operands)
    if call.is_cut(operands):
        return in_auto_axes(
            kda_apply, LAYER_APPLY, operands, config=config, implementation=choice.name
        )
    (B, tokens), cu_seqlens = x.shape[:2], pools.as_int32(cu_seqlens)
    x, N = jnp.asarray(x), B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if choice.tokens > 1:
        # Padded here, where it costs least: chunk_kda would pad five wider operands.
        x = jnp.pad(x, ((0, 0), (0, -tokens % choice.tokens), (0, 0)))
    T, live, begins, position = x.shape[1], None, None, None
    if segment_ids is not None:
        live, begins, position = segments(segment_ids, T)
    elif cu_seqlens is not None:
        cu_seqlens = bounded(cu_seqlens, tokens)
        owner = owners(cu_seqlens, T)
        live, position = (owner < N)[None], positions(cu_seqlens, owner)[None]
    x = projections.masked(x, live)
    mixed = conv_xla.without_pool(
        projections.channels(params, x),
        projections.conv_kernels(params),
        position,
        projections.conv_biases(params),
    )
    q, k, v, log_decay, beta = projections.in_heads(params, x, mixed, config, sizes, (B, T))
    if begins is not None:
        # Exact: exp(-inf) is 0, and nothing of the segment before is left.
        log_decay = jnp.where(begins[..., None, None], -jnp.inf, log_decay)
    out, _ = chunk_kda(
        q,
        k,
        v,
        log_decay,
        beta,
        jnp.zeros((N, sizes.HV, sizes.V, sizes.K), jnp.float32),
        jnp.arange(N, dtype=jnp.int32),
        sources=jnp.full(N, -1, jnp.int32),
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=True,
        implementation=choice.name,
    )
    return projections.output(params, x, out, live, config)[:, :tokens]


def _in_auto_axes(step, contract, operands, **options):
    """A step with a cache, whose operands are cut by Explicit mesh axes."""

    def in_arrays(*args, **kwargs):
        y, cache = step(*args, **kwargs)
        return y, cache.conv, cache.state

    y, *pools_of_cache = in_auto_axes(in_arrays, contract, operands, **options)
    return y, KDACache(*pools_of_cache)
