"""A whole KDA layer: projections, short convolution, gates, recurrence, gated norm, output projection."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kda_contracts import LAYER_DECODE, LAYER_PREFILL, ContractError, check, layer_numbers
from kda_jax import gates
from kda_jax.chunk import chunk_kda
from kda_jax.conv import conv_decode, conv_prefill
from kda_jax.decode import packed_decode
from kda_jax.norm import gated_rms_norm
from kda_jax.sequences import owners
from kda_jax.slots import as_int32

Leaf = Any  # an array, or what stands for it in a tree of the same form: a shape, a PartitionSpec


@dataclass(frozen=True)
class KDAConfig:
    """The static numbers of a KDA layer, by the letters of the legend.

    `lower_bound`: None for the softplus gate, else that of the safe gate. `gate_rank`: V for an output gate of low
    rank, None for a full one.
    """

    D: int
    H: int
    HV: int
    K: int
    V: int
    W: int = 4
    lower_bound: float | None = None
    norm_eps: float = 1e-5
    gate_rank: int | None = None

    @property
    def channels(self):
        """Channels of the short convolution: q of all H heads, k of all H, v of all HV."""
        return 2 * self.H * self.K + self.HV * self.V


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDAParams:
    """The weights of one layer, as `x @ w` takes them; any float dtype, `A_log` and `dt_bias` best in float32.

    `g_down` is None for an output gate of full rank, whose weight is `g_up`. `g_bias`, which FLA's own layer has and
    the released models have not, may be None.
    """

    q_proj: Leaf  # [D, H*K]
    k_proj: Leaf  # [D, H*K]
    v_proj: Leaf  # [D, HV*V]
    q_conv: Leaf  # [H*K, W]
    k_conv: Leaf  # [H*K, W]
    v_conv: Leaf  # [HV*V, W]
    f_down: Leaf  # [D, V] in FLA's layer, [D, K] in the released ones, which have K = V
    f_up: Leaf  # [., HV*K]
    b_proj: Leaf  # [D, HV]
    A_log: Leaf  # [HV]
    dt_bias: Leaf  # [HV*K]
    g_up: Leaf  # [V, HV*V], or [D, HV*V] for a full rank
    norm: Leaf  # [V]
    o_proj: Leaf  # [HV*V, D]
    g_down: Leaf = None  # [D, V]
    g_bias: Leaf = None  # [HV*V]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDACache:
    """What one layer keeps for its requests: one slot each, in two pools, arrays or `jax.Ref`s.

    A step that was given a Ref returns None in its place.
    """

    conv: Leaf  # [S, 2*H*K+HV*V, W-1], the last inputs of the short convolution, oldest first
    state: Leaf  # [S, HV, V, K]


def config_from_hf(config) -> KDAConfig:
    """The config of a model's KDA layers.

    Args:
      config: what `config.json` holds, a dict: Kimi-Linear, Kimi-K3 or GLM-5.3 (with `linear_attn_config`, also inside
        `text_config`), or FLA's (`model_type` "kda").

    Returns:
      `KDAConfig`.

    Raises:
      BadFileError: it is no KDA model's config, or a number is missing.

    >>> linear = dict(num_heads=32, head_dim=128, short_conv_kernel_size=4, kda_layers=[1, 2, 3])
    >>> config_from_hf(dict(hidden_size=2304, rms_norm_eps=1e-5, linear_attn_config=linear)).channels
    12288
    """
    return KDAConfig(**layer_numbers(config))


def init_cache(config: KDAConfig, num_slots, *, ranks=1, state_dtype=jnp.float32, conv_dtype=jnp.bfloat16) -> KDACache:
    """An empty cache: zeros, which are a fresh request's state.

    Args:
      config: the layer's.
      num_slots: S.
      ranks: of tensor parallelism; the cache is one rank's, with its part of the heads.
      state_dtype: of the recurrent states. conv_dtype: of the convolution's inputs, best the activations' own.

    Returns:
      `KDACache`: `conv` `[S, 2*H*K+HV*V, W-1]`, `state` `[S, HV, V, K]`.

    Raises:
      ContractError: the heads cannot be split over so many ranks.

    >>> cache = init_cache(KDAConfig(D=16, H=1, HV=2, K=8, V=4), 3)
    >>> cache.conv.shape, cache.state.shape
    ((3, 24, 3), (3, 2, 4, 8))
    """
    if ranks < 1 or config.H % ranks or config.HV % ranks:
        raise ContractError(
            f"kda_jax.init_cache: H={config.H} and HV={config.HV} heads cannot be split over {ranks} ranks"
        )
    c = dataclasses.replace(config, H=config.H // ranks, HV=config.HV // ranks)
    return KDACache(
        conv=jnp.zeros((num_slots, c.channels, c.W - 1), conv_dtype),
        state=jnp.zeros((num_slots, c.HV, c.V, c.K), state_dtype),
    )


def init_params(config: KDAConfig, key, *, dtype=jnp.bfloat16) -> KDAParams:
    """Random weights of a layer: normal with the variance of 1 over the inputs; decay rates of 1 to 16.

    Args:
      config: the layer's. key: a JAX random key. dtype: of the weights; A_log and dt_bias stay float32.

    Returns:
      `KDAParams`.

    Raises:
      Nothing of its own.

    >>> params = init_params(KDAConfig(D=16, H=1, HV=2, K=8, V=4), jax.random.key(0))
    >>> params.o_proj.shape, params.A_log.dtype.name
    ((8, 16), 'float32')
    """
    c = config
    keys = iter(jax.random.split(key, 16))

    def normal(rows, *columns):
        return (jax.random.normal(next(keys), (rows, *columns), jnp.float32) * rows**-0.5).astype(dtype)

    def kernel(channels):
        return (jax.random.normal(next(keys), (channels, c.W), jnp.float32) * c.W**-0.5).astype(dtype)

    keys_wide, values_wide = c.H * c.K, c.HV * c.V
    low_rank = c.gate_rank is not None
    return KDAParams(
        q_proj=normal(c.D, keys_wide),
        k_proj=normal(c.D, keys_wide),
        v_proj=normal(c.D, values_wide),
        q_conv=kernel(keys_wide),
        k_conv=kernel(keys_wide),
        v_conv=kernel(values_wide),
        f_down=normal(c.D, c.K),
        f_up=normal(c.K, c.HV * c.K),
        b_proj=normal(c.D, c.HV),
        A_log=jnp.log(jax.random.uniform(next(keys), (c.HV,), jnp.float32, minval=1.0, maxval=16.0)),
        dt_bias=jax.random.normal(next(keys), (c.HV * c.K,), jnp.float32) - 2.0,
        g_down=normal(c.D, c.gate_rank) if low_rank else None,
        g_up=normal(c.gate_rank or c.D, values_wide),
        norm=jnp.ones(c.V, dtype),
        o_proj=normal(values_wide, c.D),
    )


def kda_decode(params: KDAParams, x, cache: KDACache, slots, *, config: KDAConfig, implementation="auto"):
    """One token of each row through the layer.

    Args:
      params: `KDAParams`.
      x: `[B, D]` bfloat16, float16 or float32; the normed input of the layer.
      cache: `KDACache`, whose pools may be `jax.Ref`s.
      slots: `[B]` int8 to int64; outside `[0, S)`: a padded row, whose output is zero and which touches no slot.
      config: `KDAConfig`, static.
      implementation: of the recurrence, as in `packed_decode`.

    Returns:
      `(y, cache)`: `[B, D]` in x's dtype, to be added to the residual stream, and the cache, advanced by one token.

    Effects:
      A cache that is donated to the surrounding `jit` advances in place. Under `shard_map` with the heads sharded, `y`
      is this shard's part of the sum over them (`kda_jax.sharding`).

    Raises:
      ContractError, TypeError, NotImplementedError: as `packed_decode`.

    Source: the layer of the Kimi Linear paper.

    >>> config = KDAConfig(D=16, H=1, HV=2, K=8, V=4, gate_rank=4)
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 3)
    >>> step = jax.jit(lambda cache, x, slots: kda_decode(params, x, cache, slots, config=config), donate_argnums=0)
    >>> y, cache = step(cache, jnp.ones((2, 16), jnp.bfloat16), jnp.array([2, -1]))
    >>> y.shape, bool(y[1].any()), bool(cache.state[2].any())
    ((2, 16), False, True)
    """
    local = _local(config, params)
    sizes = _judge(LAYER_DECODE, params, cache, local, x=x, slots=slots)
    slots = as_int32(slots)
    live = (slots >= 0) & (slots < sizes.S)
    x = _masked(x, live)
    mixed_qkv, conv = conv_decode(_project(params, x), _kernels(params), cache.conv, slots)
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
        implementation=implementation,
    )
    return _output(params, x, out[:, 0], live, local), KDACache(conv, state)


def kda_prefill(params: KDAParams, x, cache: KDACache, slots, cu_seqlens, *, config: KDAConfig, fresh=None):
    """All tokens of sequences that lie end to end through the layer; each continues what its slot holds.

    Args:
      params: `KDAParams`.
      x: `[T, D]` bfloat16, float16 or float32; the normed inputs of all sequences.
      cache: `KDACache`, whose pools may be `jax.Ref`s.
      slots: `[N]` int8 to int64; the slot of each sequence. Outside `[0, S)`: a padded one, whose output is zero.
      cu_seqlens: `[N+1]` int32 or int64; sequence n is tokens `cu_seqlens[n]` to `cu_seqlens[n+1] - 1`.
      config: `KDAConfig`, static.
      fresh: None, or `[N]` bool: whether a sequence starts from nothing, whatever its slot holds.

    Returns:
      `(y, cache)`: `[T, D]` in x's dtype, and the cache, advanced by all tokens.

    Effects:
      As `kda_decode`. It differentiates.

    Raises:
      ContractError, TypeError: as `kda_decode`.

    >>> config = KDAConfig(D=16, H=1, HV=2, K=8, V=4, gate_rank=4)
    >>> params, cache = init_params(config, jax.random.key(0)), init_cache(config, 3)
    >>> x = jnp.ones((5, 16), jnp.bfloat16)
    >>> y, cache = kda_prefill(params, x, cache, jnp.array([2, 0]), jnp.array([0, 3, 5]), config=config)
    >>> y.shape, cache.state.any((1, 2, 3)).tolist()
    ((5, 16), [True, False, True])
    """
    local = _local(config, params)
    operands = dict(x=x, slots=slots, cu_seqlens=cu_seqlens, fresh=fresh)
    sizes = _judge(LAYER_PREFILL, params, cache, local, **operands)
    T, slots, cu_seqlens = x.shape[0], as_int32(slots), as_int32(cu_seqlens)
    sources = None if fresh is None else jnp.where(fresh, -1, slots)
    live = jnp.append((slots >= 0) & (slots < sizes.S), False)[owners(cu_seqlens, T)]
    x = _masked(x, live)
    mixed, conv = conv_prefill(_project(params, x), _kernels(params), cache.conv, slots, cu_seqlens, sources)
    q, k, v = jnp.split(mixed, [local.H * local.K, 2 * local.H * local.K], axis=1)
    maths = gates.Maths(1.0, True, config.lower_bound)
    f32 = jnp.float32
    log_decay, beta = gates.decay_and_beta(
        _forget(params, x).astype(f32).reshape(1, T, local.HV, local.K),
        _times(x, params.b_proj).astype(f32)[None],
        params.A_log.astype(f32).reshape(1, 1, local.HV, 1),
        params.dt_bias.astype(f32).reshape(1, 1, local.HV, local.K),
        maths,
        differentiable=True,
    )
    out, state = chunk_kda(
        q.reshape(1, T, local.H, local.K),
        k.reshape(1, T, local.H, local.K),
        v.reshape(1, T, local.HV, local.V),
        log_decay,
        beta,
        cache.state,
        slots,
        source_indices=sources,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=True,
    )
    return _output(params, x, out[0], live, local), KDACache(conv, state)


def _local(config, params):
    """The config of the heads that are here: all of them, or a shard's."""
    HV = params.A_log.shape[0] if params.A_log.ndim == 1 else config.HV  # another A_log is its own fault
    return dataclasses.replace(config, HV=HV, H=max(1, config.H * HV // config.HV))


def _judge(contract, params, cache, config, **operands):
    """The sizes of a step, or a ContractError; the output gate's two weights are judged together."""
    sizes = check(contract, _letters(config), **operands, **_arrays(params, cache))
    rows, letter = (config.D, "D") if params.g_down is None else (config.V, "V")
    if params.g_up.shape[0] != rows:
        beside = "without" if params.g_down is None else "beside"
        raise ContractError(
            f"{contract.name}: `g_up` must be [{letter}, HV*V] = ({rows}, {config.HV * config.V}) {beside} a `g_down` "
            f"(got {params.g_up.shape})"
        )
    return sizes


def _letters(config):
    return {letter: getattr(config, letter) for letter in ("D", "H", "HV", "K", "V", "W")}


def _arrays(params, cache):
    """The weights and pools by name, without those that are None."""
    arrays = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: x for name, x in arrays.items() if x is not None} | dict(conv=cache.conv, state=cache.state)


def _masked(x, live):
    """x with zeros where a token is not live: what stands there may be anything, and disturbs no derivative."""
    return jnp.where(live[:, None], x, jnp.zeros((), x.dtype))


def _times(x, weight):
    """x @ weight in x's dtype; float32 in full, where a GPU would round it to TF32."""
    return jnp.matmul(x, weight.astype(x.dtype), precision="highest" if x.dtype == jnp.float32 else "default")


def _project(params, x):
    """`[..., 2*H*K+HV*V]`: the channels of the short convolution."""
    return jnp.concatenate([_times(x, w) for w in (params.q_proj, params.k_proj, params.v_proj)], axis=-1)


def _kernels(params):
    return jnp.concatenate([w.astype(jnp.float32) for w in (params.q_conv, params.k_conv, params.v_conv)])


def _forget(params, x):
    """`[..., HV*K]`: the raw input of the forget gate."""
    return _times(_times(x, params.f_down), params.f_up)


def _output(params, x, out, live, config):
    """The gated norm and the output projection of `[tokens, HV, V]`; zeros where a token is not live."""
    gate = _times(x if params.g_down is None else _times(x, params.g_down), params.g_up)
    if params.g_bias is not None:
        gate = gate + params.g_bias.astype(gate.dtype)[None]
    normed = gated_rms_norm(out, gate.reshape(out.shape), params.norm, config.norm_eps)
    y = _times(normed.reshape(-1, config.HV * config.V), params.o_proj)
    return _masked(y, live)
