"""Other layouts at the edge: separate or interleaved q, k, v, and pools with K before V."""

import jax
import jax.numpy as jnp

from kda_contracts import ContractError
from kda_jax.call import Array


def pack_qkv(
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    H: int | None = None,
    K: int | None = None,
    V: int | None = None,
) -> jax.Array:
    """The flat row of `packed_decode`: q of all heads, k of all heads, v of all value heads.

    Args:
      q: `[B, H, K]`, or the interleaved row `[B, H*(2*K+G*V)]` alone: for each key head its q, its
        k and the v of its G value heads, as Qwen3-Next and attention-gym pack it. No shape tells
        that row from a flat one.
      k: `[B, H, K]`, or None with an interleaved row.
      v: `[B, HV, V]`, or None with an interleaved row.
      H, K, V: key heads and head dimensions; needed for an interleaved row only.

    Returns:
      `[B, 2*H*K+HV*V]`, same dtype.

    Raises:
      ContractError: the shapes or dtypes do not fit together.

    >>> import jax.numpy as jnp
    >>> q, k = jnp.array([[[1, 2], [3, 4]]]), jnp.array([[[5, 6], [7, 8]]])
    >>> v = jnp.array([[[9], [10]]])
    >>> pack_qkv(q, k, v).tolist()
    [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    >>> pack_qkv(jnp.array([[1, 2, 5, 6, 9, 3, 4, 7, 8, 10]]), H=2, K=2, V=1).tolist()
    [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    """
    parts = _deinterleave(q, H, K, V) if k is None and v is None else (q, k, v)
    return _packed(*parts)


def _packed(q, k, v):
    shapes = [tuple(getattr(x, "shape", ())) for x in (q, k, v)]
    q_shape, k_shape, v_shape = shapes
    if len(q_shape) != 3 or k_shape != q_shape or len(v_shape) != 3 or v_shape[0] != q_shape[0]:
        shown = ", ".join(map(str, shapes))
        raise ContractError(
            f"kda_jax.pack_qkv: q and k must be [B, H, K] and v [B, HV, V] (got {shown})"
        )
    if q_shape[1] == 0 or v_shape[1] == 0 or v_shape[1] % q_shape[1]:
        raise ContractError(
            f"kda_jax.pack_qkv: v's {v_shape[1]} heads must be a multiple of "
            f"q's and k's {q_shape[1]}"
        )
    if len({str(x.dtype) for x in (q, k, v)}) > 1:
        raise ContractError(
            f"kda_jax.pack_qkv: q, k and v must share a dtype (got {q.dtype}, {k.dtype}, {v.dtype})"
        )
    return jnp.concatenate(
        [x.reshape(x.shape[0], x.shape[1] * x.shape[2]) for x in (q, k, v)], axis=1
    )


def state_from_kv(pool: Array) -> jax.Array:
    """`[S, HV, V, K]` from `[S, HV, K, V]`, the layout of FLA's default and of attention-gym.

    Args:
      pool: `[..., K, V]`, any dtype.

    Returns:
      `[..., V, K]`, same dtype.

    Raises:
      ContractError: fewer than two axes.

    >>> import jax.numpy as jnp
    >>> state_from_kv(jnp.zeros((6, 4, 64, 32))).shape
    (6, 4, 32, 64)
    """
    return _swapped("state_from_kv", "[..., K, V]", pool)


def state_to_kv(pool: Array) -> jax.Array:
    """`[S, HV, K, V]` from `[S, HV, V, K]`: the inverse of `state_from_kv`.

    Args:
      pool: `[..., V, K]`, any dtype.

    Returns:
      `[..., K, V]`, same dtype.

    Raises:
      ContractError: fewer than two axes.

    >>> import jax.numpy as jnp
    >>> state_to_kv(jnp.zeros((6, 4, 32, 64))).shape
    (6, 4, 64, 32)
    """
    return _swapped("state_to_kv", "[..., V, K]", pool)


def _swapped(name, expected, pool):
    if pool.ndim < 2:
        raise ContractError(f"kda_jax.{name}: the pool must be {expected} (got {pool.shape})")
    return jnp.swapaxes(pool, -1, -2)


def _deinterleave(row, H, K, V):
    if None in (H, K, V):
        raise ContractError(
            "kda_jax.pack_qkv: an interleaved row needs H, K and V: "
            "they cannot be read from its shape"
        )
    shape = getattr(row, "shape", None)
    fits = shape is not None and len(shape) == 2 and min(H, K, V) > 0 and shape[1] % H == 0
    if not fits or shape[1] // H <= 2 * K or (shape[1] // H - 2 * K) % V:
        raise ContractError(
            "kda_jax.pack_qkv: an interleaved row must be [B, H*(2*K+G*V)] with "
            f"H={H}, K={K}, V={V} (got {shape})"
        )
    group = shape[1] // H
    heads = row.reshape(shape[0], H, group)
    v = heads[:, :, 2 * K :].reshape(shape[0], H * (group - 2 * K) // V, V)
    return heads[:, :, :K], heads[:, :, K : 2 * K], v
