"""The norm in front of a KDA layer's output projection."""

import functools

import jax
import jax.numpy as jnp

from kda_contracts import GATED_RMS_NORM
from kda_jax import call, gates
from kda_jax.call import Array


def gated_rms_norm(x: Array, gate: Array, weight: Array, *, eps: float = 1e-5) -> jax.Array:
    """RMSNorm over V, times the sigmoid of the output gate, in float32. It differentiates.

    Args:
      x: `[..., V]` float; the read-out of the recurrence.
      gate: `[..., V]` float, in x's shape; raw, before the sigmoid.
      weight: `[V]` float.
      eps: added to the mean of the squares, a static finite number, 0 or above.

    Returns:
      `[..., V]`, x's dtype.

    Raises:
      ContractError: a ValueError, at trace time, that lists every argument that breaks the
        contract.
      TypeError: `eps` is traced.

    Source: the gated norm of the Kimi Linear paper, as FLA has it with `activation="sigmoid"`.

    >>> x = jnp.array([3.0, 4.0])
    >>> [round(float(y), 4) for y in gated_rms_norm(x, jnp.zeros(2), jnp.ones(2), eps=0.0)]
    [0.4243, 0.5657]
    """
    arrays, _ = call.taken(GATED_RMS_NORM, dict(x=x, gate=gate, weight=weight), eps=eps)
    if call.is_cut(arrays):
        again = functools.partial(gated_rms_norm, eps=eps)
        specs = (call.explicit_cut(arrays["x"]),)
        return call.in_auto_axes(again, GATED_RMS_NORM.name, arrays, specs)
    x, gate, weight = (jnp.asarray(arrays[name]) for name in ("x", "gate", "weight"))
    return gated(x, gate, weight, float(eps))


def gated(x, gate, weight, eps):
    """What `gated_rms_norm` does, after its contract."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + jnp.float32(eps))
    shape = (1,) * (x.ndim - 1) + weight.shape
    y = (
        y
        * weight.astype(jnp.float32).reshape(shape)
        * gates.differentiable_sigmoid(gate.astype(jnp.float32))
    )
    return y.astype(x.dtype)
