"""The norm in front of a KDA layer's output projection."""

import functools

import jax
import jax.numpy as jnp

from kda_jax import call, gates


def gated_rms_norm(x, gate, weight, eps=1e-5):
    """RMSNorm over V, times the sigmoid of the output gate, in float32.

    Args:
      x: `[..., V]` float32, bfloat16 or float16; the read-out of the recurrence.
      gate: `[..., V]` of any float dtype; raw, before the sigmoid.
      weight: `[V]` of any float dtype.
      eps: added to the mean of the squares, a static number.

    Returns:
      `[..., V]`, x's dtype.

    Source: the gated norm of the Kimi Linear paper, as FLA has it with `activation="sigmoid"`.

    >>> x = jnp.array([3.0, 4.0])
    >>> [round(float(y), 4) for y in gated_rms_norm(x, jnp.zeros(2), jnp.ones(2), eps=0.0)]
    [0.4243, 0.5657]
    """
    arrays = dict(x=x, gate=gate, weight=weight)
    if call.is_cut(arrays):
        again = functools.partial(gated_rms_norm, eps=eps)
        specs = (call.explicit_cut(x),)
        return call.in_auto_axes(again, "kda_jax.gated_rms_norm", arrays, specs)
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + jnp.float32(eps))
    shape = (1,) * (x.ndim - 1) + weight.shape
    y = (
        y
        * weight.astype(jnp.float32).reshape(shape)
        * gates.differentiable_sigmoid(gate.astype(jnp.float32))
    )
    return y.astype(x.dtype)
