"""A whole KDA layer: projections, short convolution, gates, recurrence, gated norm."""

import dataclasses

import jax
import jax.numpy as jnp

from kda_contracts import LAYER_DECODE, LAYER_PREFILL, ContractError, check
from kda_jax import call, conv, dispatch, gates, norm, pools
from kda_jax.call import Array, Implementation, Maths
from kda_jax.decode import packed_decode
from kda_jax.prefill import chunk_kda
from kda_jax.sequences import owners
from kda_jax.weights import KDACache, KDAConfig, KDAParams, letters, require_containers

WEIGHTS = tuple(field.name for field in dataclasses.fields(KDAParams))
CONV_BIASES = ("q_conv_bias", "k_conv_bias", "v_conv_bias")


def kda_decode(
    params: KDAParams,
    x: Array,
    cache: KDACache,
    slots: Array,
    *,
    config: KDAConfig,
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
    require_containers(LAYER_DECODE.name, params, cache, config)
    operands = dict(x=x, slots=slots) | _arrays(params, cache)
    sizes = _judge(LAYER_DECODE, params, config, operands)
    choice = dispatch.choose(LAYER_DECODE, implementation, sizes, operands)
    if call.is_cut(operands):
        options = dict(config=config, implementation=choice.name)
        return _in_auto_axes(kda_decode, LAYER_DECODE, operands, **options)
    B, slots = x.shape[0], pools.as_int32(slots)
    if isinstance(B, int) and choice.rows > B:
        x = jnp.pad(x, ((0, choice.rows - B), (0, 0)))
        slots = jnp.pad(slots, (0, choice.rows - B), constant_values=-1)
    live = pools.inside(slots, sizes.S)
    if choice.name == "xla":
        # The kernels pass over padded rows, whatever they hold. XLA's gather does not, nor its
        # derivatives.
        x = _masked(x, live)
    mixed_qkv, window = conv.one_token(
        _project(params, x), _kernels(params), cache.conv, slots, _biases(params)
    )
    out, state = packed_decode(
        mixed_qkv,
        _forget(params, x),
        _times(x, params.b_proj),
        params.A_log,
        params.dt_bias,
        cache.state,
        slots,
        use_qk_l2norm_in_kernel=True,
        lower_bound=config.lower_bound,
        allow_neg_eigval=config.allow_neg_eigval,
        implementation=choice.name,
    )
    return _output(params, x, out[:, 0], live, config)[:B], KDACache(window, state)


def kda_prefill(
    params: KDAParams,
    x: Array,
    cache: KDACache,
    slots: Array,
    cu_seqlens: Array,
    *,
    config: KDAConfig,
    fresh: Array | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, KDACache]:
    """All tokens of sequences that lie end to end through the layer.

    Each sequence continues what its slot holds.

    Args:
      params: `KDAParams`.
      x: `[T, D]` float; the normed inputs of all sequences.
      cache: `KDACache`, whose pools may be `jax.Ref`s.
      slots: `[N]` integer; the slot of each sequence. Outside `[0, S)`: a padded one, whose output
        is zero.
      cu_seqlens: `[N+1]` int32 or int64; sequence n is tokens `cu_seqlens[n]` to
        `cu_seqlens[n+1] - 1`.
      config: `KDAConfig`, static.
      fresh: None, or `[N]` bool: whether a sequence starts from nothing, whatever its slot holds.
      implementation: of the recurrence, as in `chunk_kda`.

    Returns:
      `(y, cache)`: `[T, D]` in x's dtype, and the cache, advanced by all tokens.

    Effects:
      As `kda_decode`. It differentiates.

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
    require_containers(LAYER_PREFILL.name, params, cache, config)
    operands = dict(x=x, slots=slots, cu_seqlens=cu_seqlens, fresh=fresh) | _arrays(params, cache)
    sizes = _judge(LAYER_PREFILL, params, config, operands)
    choice = dispatch.choose(LAYER_PREFILL, implementation, sizes, operands)
    if call.is_cut(operands):
        options = dict(config=config, implementation=choice.name)
        return _in_auto_axes(kda_prefill, LAYER_PREFILL, operands, **options)
    tokens, slots, cu_seqlens = x.shape[0], pools.as_int32(slots), pools.as_int32(cu_seqlens)
    sources = None if fresh is None else jnp.where(fresh, -1, slots)
    if choice.tokens > 1:
        # Padded here, where it costs least: chunk_kda would pad five wider operands.
        cu_seqlens = jnp.clip(cu_seqlens, 0, tokens)  # no sequence reaches into the padding
        x = jnp.pad(x, ((0, -tokens % choice.tokens), (0, 0)))
    T, H, HV, K, V = x.shape[0], sizes.H, sizes.HV, sizes.K, sizes.V
    live = jnp.append(pools.inside(slots, sizes.S), False)[owners(cu_seqlens, T)]
    x = _masked(x, live)
    mixed, window = conv.all_tokens(
        _project(params, x),
        _kernels(params),
        cache.conv,
        slots,
        cu_seqlens,
        sources,
        _biases(params),
    )
    q, k, v = jnp.split(mixed, [H * K, 2 * H * K], axis=1)
    maths = Maths(1.0, True, config.lower_bound, allow_neg_eigval=config.allow_neg_eigval)
    f32 = jnp.float32
    log_decay, beta = gates.decay_and_beta(
        _forget(params, x).astype(f32).reshape(1, T, HV, K),
        _times(x, params.b_proj).astype(f32)[None],
        params.A_log.astype(f32).reshape(1, 1, HV, 1),
        params.dt_bias.astype(f32).reshape(1, 1, HV, K),
        maths,
        differentiable=True,
    )
    out, state = chunk_kda(
        q.reshape(1, T, H, K),
        k.reshape(1, T, H, K),
        v.reshape(1, T, HV, V),
        log_decay,
        beta,
        cache.state,
        slots,
        sources=sources,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=True,
        implementation=choice.name,
    )
    return _output(params, x, out[0], live, config)[:tokens], KDACache(window, state)


def _judge(contract, params, config, operands):
    """The sizes of a step, or a ContractError. A gate's two weights are judged together, and the
    convolution's biases.
    """
    local = letters(config, params)
    statics = dict(lower_bound=config.lower_bound, norm_eps=config.norm_eps)
    sizes = check(contract, local, **operands, **statics)
    gates_of = (
        ("f", params.f_down, params.f_up, "R", "HV*K", local["HV"] * local["K"]),
        ("g", params.g_down, params.g_up, "V", "HV*V", local["HV"] * local["V"]),
    )
    for name, down, up, rank, axis, columns in gates_of:
        rows, letter = (config.D, "D") if down is None else (down.shape[1], rank)
        if up.shape[0] != rows:
            beside = "without" if down is None else "beside"
            raise ContractError(
                f"{contract.name}: `{name}_up` must be [{letter}, {axis}] = ({rows}, {columns}) "
                f"{beside} a `{name}_down` (got {up.shape})"
            )
    for name in CONV_BIASES:
        if (getattr(params, name) is None) == config.conv_bias:
            wanted = "an array, as" if config.conv_bias else "None, as"
            raise ContractError(
                f"{contract.name}: `{name}` must be {wanted} config.conv_bias is "
                f"{config.conv_bias} (got {'None' if config.conv_bias else 'an array'})"
            )
    return sizes


def _arrays(params, cache):
    """The weights and pools by name, without those that are None."""
    arrays = {name: getattr(params, name) for name in WEIGHTS}
    return {name: x for name, x in arrays.items() if x is not None} | dict(
        conv=cache.conv, state=cache.state
    )


def _in_auto_axes(step, contract, operands, **options):
    """A step whose operands are cut by Explicit mesh axes."""

    def again(conv, state, **arrays):
        weights = {name: arrays.pop(name) for name in WEIGHTS if name in arrays}
        y, cache = step(KDAParams(**weights), cache=KDACache(conv, state), **arrays, **options)
        return y, cache.conv, cache.state

    specs = call.result_cuts(contract, operands)
    y, *cache = call.in_auto_axes(again, contract.name, operands, specs)
    return y, KDACache(*cache)


def _masked(x, live):
    """x with zeros where a token is not live: it may hold anything, and contributes nothing to
    gradients.
    """
    return jnp.where(live[:, None], x, jnp.zeros((), x.dtype))


def _times(x, weight):
    """x @ weight in x's dtype; float32 in full, where a GPU would round it to TF32."""
    return jnp.matmul(
        x, weight.astype(x.dtype), precision="highest" if x.dtype == jnp.float32 else "default"
    )


def _project(params, x):
    """`[..., 2*H*K+HV*V]`: the channels of the short convolution."""
    return jnp.concatenate(
        [_times(x, w) for w in (params.q_proj, params.k_proj, params.v_proj)], axis=-1
    )


def _kernels(params):
    return jnp.concatenate(
        [w.astype(jnp.float32) for w in (params.q_conv, params.k_conv, params.v_conv)]
    )


def _biases(params):
    """`[2*H*K+HV*V]`: the bias of the convolution, or None."""
    biases = [getattr(params, name) for name in CONV_BIASES]
    return None if biases[0] is None else jnp.concatenate([x.astype(jnp.float32) for x in biases])


def _forget(params, x):
    """`[..., HV*K]`: the raw input of the forget gate."""
    return _times(x if params.f_down is None else _times(x, params.f_down), params.f_up)


def _output(params, x, out, live, config):
    """The gated norm and the output projection of `[tokens, HV, V]`; zeros where none is live."""
    gate = _times(x if params.g_down is None else _times(x, params.g_down), params.g_up)
    if params.g_bias is not None:
        gate = gate + params.g_bias.astype(gate.dtype)[None]
    normed = norm.gated(out, gate.reshape(out.shape), params.norm, config.norm_eps)
    y = _times(normed.reshape(-1, params.o_proj.shape[0]), params.o_proj)
    return _masked(y, live)
