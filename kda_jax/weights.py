"""What a KDA layer consists of: its static numbers, its weights, its cache of slots."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_contracts import KDA_CONFIG, ContractError, check, layer_numbers, split_heads


def _shown(self):
    """The fields with shapes and dtypes in place of values: a layer has millions of those."""
    fields = [f"{name}={_form(x)}" for name, x in vars(self).items()]
    return f"{type(self).__name__}({', '.join(fields)})"


def _form(x):
    """An array as in `float32[4, 64]`; what stands for one, such as a PartitionSpec, as it is."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return f"{x!r:.60}"


LOW_RANK: Any = "K"  # of a forget gate whose rank is not given: the released models' own


@dataclass(frozen=True)
class KDAConfig:
    """The static numbers of a KDA layer, by the letters of the legend, judged when it is made.

    `lower_bound`: None for the softplus gate, else that of the safe gate. `allow_neg_eigval`:
    whether beta is doubled, to (0, 2). `conv_bias`: whether the convolution has a bias.
    `gate_rank`: V for an output gate of low rank, None for a full one. `forget_rank`: the same for
    the forget gate; left out, it is K. A wrong number is a ContractError.
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
    forget_rank: int | None = LOW_RANK
    allow_neg_eigval: bool = False
    conv_bias: bool = False

    def __post_init__(self):
        left_out = self.forget_rank == LOW_RANK
        check(KDA_CONFIG, **vars(self) | (dict(forget_rank=None) if left_out else {}))
        if left_out:
            object.__setattr__(self, "forget_rank", self.K)

    @property
    def channels(self):
        """Channels of the short convolution: q of all H heads, k of all H, v of all HV."""
        return 2 * self.H * self.K + self.HV * self.V


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class KDAParams:
    """The weights of one layer, as `x @ w` takes them, of any float dtype.

    `A_log` and `dt_bias` are best in float32.

    `g_down` is None for an output gate of full rank, whose weight is `g_up`; so are `f_down` and
    `f_up` of the forget gate. `g_bias` may be None: FLA's own layer has it, and the released models
    do not. The convolution's three biases are all there or all None.
    """

    q_proj: jax.Array  # [D, H*K]
    k_proj: jax.Array  # [D, H*K]
    v_proj: jax.Array  # [D, HV*V]
    q_conv: jax.Array  # [H*K, W]
    k_conv: jax.Array  # [H*K, W]
    v_conv: jax.Array  # [HV*V, W]
    # R is V in FLA's layer, and K in the released ones, which have K = V.
    f_down: jax.Array | None  # [D, R]
    f_up: jax.Array  # [R, HV*K], or [D, HV*K] for a full rank
    b_proj: jax.Array  # [D, HV]
    A_log: jax.Array  # [HV]
    dt_bias: jax.Array  # [HV*K]
    g_up: jax.Array  # [V, HV*V], or [D, HV*V] for a full rank
    norm: jax.Array  # [V]
    o_proj: jax.Array  # [HV*V, D]
    g_down: jax.Array | None = None  # [D, V]
    g_bias: jax.Array | None = None  # [HV*V]
    q_conv_bias: jax.Array | None = None  # [H*K]
    k_conv_bias: jax.Array | None = None  # [H*K]
    v_conv_bias: jax.Array | None = None  # [HV*V]

    __repr__ = _shown


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class KDACache:
    """What one layer keeps for its requests: one slot each, in two pools, arrays or `jax.Ref`s.

    A step that was given a Ref returns None in its place.
    """

    conv: jax.Array  # [S, 2*H*K+HV*V, W-1], the last inputs of the short convolution, oldest first
    state: jax.Array  # [S, HV, V, K]

    __repr__ = _shown


def require_containers(name, **arguments):
    """Refuses what is not a layer's own dataclass, such as a dict of the same arrays."""
    kinds = dict(params=KDAParams, cache=KDACache, config=KDAConfig)
    for argument, x in arguments.items():
        require_container(name, argument, x, kinds[argument])


def require_container(name, argument, x, kind):
    """Refuses what is not of this dataclass."""
    if isinstance(x, kind):
        return
    message = f"{name}: `{argument}` must be a {kind.__name__} (got {type(x).__name__})"
    if not dataclasses.is_dataclass(x):  # another container's fields are not of this one
        message += f"; from a dict x of its fields it is {kind.__name__}(**x)"
    raise ContractError(message)


def letters(config: KDAConfig, params: KDAParams) -> dict:
    """The sizes of the heads that are here, by letter: all of them, or a shard's."""
    sizes = {letter: getattr(config, letter) for letter in ("D", "H", "HV", "K", "V", "W")}
    shape = params.A_log.shape
    # Where it is not a shard's, A_log itself is at fault.
    if len(shape) == 1 and shape[0] and config.HV % shape[0] == 0:
        sizes |= {"HV": shape[0], "H": max(1, config.H * shape[0] // config.HV)}
    return sizes


def config_from_hf(config: dict[str, Any]) -> KDAConfig:
    """The config of a model's KDA layers.

    Args:
      config: what `config.json` holds, a dict: Kimi-Linear, Kimi-K3 or GLM-5.3 (with
        `linear_attn_config`, or flat as transformers writes them, also inside `text_config`),
        Ling-3.0, or FLA's (`model_type` "kda").

    Returns:
      `KDAConfig`.

    Raises:
      BadFileError: it is no KDA model's config, a number is missing or wrong, or a key asks for a
        layer that is not built here (`use_short_conv` false, say).

    >>> linear = dict(num_heads=32, head_dim=128, short_conv_kernel_size=4, kda_layers=[1, 2, 3])
    >>> model = dict(hidden_size=2304, rms_norm_eps=1e-5, linear_attn_config=linear)
    >>> config_from_hf(model).channels
    12288
    """
    return KDAConfig(**layer_numbers(config))


def init_cache(
    config: KDAConfig,
    num_slots: int,
    *,
    params: KDAParams | None = None,
    ranks: int = 1,
    state_dtype: DTypeLike = jnp.float32,
    conv_dtype: DTypeLike | None = None,
) -> KDACache:
    """An empty cache: zeros, which are a fresh request's state.

    Args:
      config: the layer's.
      num_slots: S.
      params: the layer's weights, arrays or shapes; only their dtype is read.
      ranks: of tensor parallelism; the cache is one rank's, with its part of the heads.
      state_dtype: of the recurrent states.
      conv_dtype: of the convolution's inputs. None is that of the projections in `params`, and
        float32 without them: a cache that is narrower than the activations rounds them, and a
        prefill in pieces differs from one at once (6e-4 of a float32 layer's output in bfloat16).

    Returns:
      `KDACache`: `conv` `[S, 2*H*K+HV*V, W-1]`, `state` `[S, HV, V, K]`.

    Raises:
      ContractError: the heads cannot be split over `ranks` ranks.

    >>> cache = init_cache(KDAConfig(D=16, H=1, HV=2, K=8, V=4), 3)
    >>> cache.conv.shape, cache.state.shape
    ((3, 24, 3), (3, 2, 4, 8))
    """
    H, HV = split_heads(config.H, config.HV, ranks)
    c = dataclasses.replace(config, H=H, HV=HV)
    if conv_dtype is None:
        conv_dtype = jnp.float32 if params is None else params.q_proj.dtype
    return KDACache(
        conv=jnp.zeros((num_slots, c.channels, c.W - 1), conv_dtype),
        state=jnp.zeros((num_slots, c.HV, c.V, c.K), state_dtype),
    )


def init_params(
    config: KDAConfig,
    key: jax.Array,
    *,
    dtype: DTypeLike = jnp.bfloat16,
) -> KDAParams:
    """Random weights of a layer: normal, of variance 1 over the inputs; decay rates of 1 to 16.

    Args:
      config: the layer's. key: a JAX random key.
      dtype: of the weights; A_log and dt_bias stay float32.

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
        return (jax.random.normal(next(keys), (rows, *columns), jnp.float32) * rows**-0.5).astype(
            dtype
        )

    def kernel(channels):
        return (jax.random.normal(next(keys), (channels, c.W), jnp.float32) * c.W**-0.5).astype(
            dtype
        )

    def bias(channels, number):
        if not c.conv_bias:
            return None
        drawn = jax.random.normal(jax.random.fold_in(key, number), (channels,), jnp.float32)
        return (drawn * 0.1).astype(dtype)

    keys_wide, values_wide = c.H * c.K, c.HV * c.V
    low_rank = c.gate_rank is not None
    return KDAParams(
        q_proj=normal(c.D, keys_wide),
        k_proj=normal(c.D, keys_wide),
        v_proj=normal(c.D, values_wide),
        q_conv=kernel(keys_wide),
        k_conv=kernel(keys_wide),
        v_conv=kernel(values_wide),
        f_down=None if c.forget_rank is None else normal(c.D, c.forget_rank),
        f_up=normal(c.forget_rank or c.D, c.HV * c.K),
        b_proj=normal(c.D, c.HV),
        A_log=jnp.log(
            jax.random.uniform(next(keys), (c.HV,), jnp.float32, minval=1.0, maxval=16.0)
        ),
        dt_bias=jax.random.normal(next(keys), (c.HV * c.K,), jnp.float32) - 2.0,
        g_down=normal(c.D, c.gate_rank) if low_rank else None,
        g_up=normal(c.gate_rank or c.D, values_wide),
        norm=jnp.ones(c.V, dtype),
        o_proj=normal(values_wide, c.D),
        q_conv_bias=bias(keys_wide, 0),
        k_conv_bias=bias(keys_wide, 1),
        v_conv_bias=bias(values_wide, 2),
    )
