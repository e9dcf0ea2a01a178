"""What lies around a layer's recurrence: projections in front of it, norm and projection behind.

In x `[..., D]` any axes may stand before D.
"""

import jax.numpy as jnp

from kda_jax import gates, norm
from kda_jax.call import Maths
from kda_jax.transforms import unfused

CONV_BIASES = ("q_conv_bias", "k_conv_bias", "v_conv_bias")


def masked(x, live):
    """x with zeros where a token is not live: it may hold anything, and contributes nothing to
    gradients. All of x where `live` is None.
    """
    return x if live is None else jnp.where(live[..., None], x, jnp.zeros((), x.dtype))


def times(x, weight):
    """x @ weight in x's dtype; float32 in full, where a GPU would round it to TF32."""
    return jnp.matmul(
        x, weight.astype(x.dtype), precision="highest" if x.dtype == jnp.float32 else "default"
    )


def channels(params, x):
    """`[..., 2*H*K+HV*V]`: what the short convolution takes."""
    return jnp.concatenate(
        [times(x, w) for w in (params.q_proj, params.k_proj, params.v_proj)], axis=-1
    )


def channels_apart(params, x):
    """`channels` as three arrays, of three products.

    XLA would make one of two of them, from a copy of both weights, and then a copy of each half.
    """
    parts = []
    for weight in (params.q_proj, params.k_proj, params.v_proj):
        (x,) = unfused((x,))
        parts.append(times(x, weight))
    return tuple(parts)


def conv_kernels(params):
    """`[H*K, W]`, `[H*K, W]` and `[HV*V, W]`: the taps of the convolution."""
    return params.q_conv, params.k_conv, params.v_conv


def conv_biases(params):
    """`[H*K]`, `[H*K]` and `[HV*V]`: the biases of the convolution, or None."""
    biases = tuple(getattr(params, name) for name in CONV_BIASES)
    return None if biases[0] is None else biases


def forget(params, x):
    """`[..., HV*K]`: the raw input of the forget gate."""
    return times(x if params.f_down is None else times(x, params.f_down), params.f_up)


def in_heads(params, x, mixed, config, sizes, rows):
    """q, k, v, log decay and beta of chunk_kda, with `rows = (B, T)` in front.

    mixed: q, k and v, as the convolution made them of x's channels.
    """
    H, HV, K, V = sizes.H, sizes.HV, sizes.K, sizes.V
    q, k, v = mixed
    maths = Maths(1.0, True, config.lower_bound, allow_neg_eigval=config.allow_neg_eigval)
    f32 = jnp.float32
    log_decay, beta = gates.decay_and_beta(
        forget(params, x).astype(f32).reshape(*rows, HV, K),
        times(x, params.b_proj).astype(f32).reshape(*rows, HV),
        params.A_log.astype(f32).reshape(1, 1, HV, 1),
        params.dt_bias.astype(f32).reshape(1, 1, HV, K),
        maths,
        differentiable=True,
    )
    return (
        q.reshape(*rows, H, K),
        k.reshape(*rows, H, K),
        v.reshape(*rows, HV, V),
        log_decay,
        beta,
    )


def output(params, x, out, live, config):
    """The gated norm and the output projection of `[..., HV, V]`; zeros where none is live."""
    gate = times(x if params.g_down is None else times(x, params.g_down), params.g_up)
    if params.g_bias is not None:
        bias = params.g_bias.astype(gate.dtype)
        gate = gate + bias.reshape((1,) * (gate.ndim - 1) + bias.shape)
    normed = norm.gated(out, gate.reshape(out.shape), params.norm, config.norm_eps)
    y = times(normed.reshape(*out.shape[:-2], params.o_proj.shape[0]), params.o_proj)
    return masked(y, live)
