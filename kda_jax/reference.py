"""The op in plain JAX: what it means, and what runs where no kernel can."""

import functools

import jax
import jax.numpy as jnp

from kda_contracts import Sizes
from kda_jax import gates
from kda_jax.invariants import assert_operands
from kda_jax.slots import is_ref
from kda_jax.transforms import ref_must_be_mapped


def recurrence(state, q, k, v, log_decay, beta):
    """One token of the gated delta rule, in float32 sums over K that no matrix unit rounds.

        S'  = S * exp(log_decay)          along K
        u   = (v - S' k) * beta
        S   = S' + u k^T
        out = S q

    Args:
      state: `[..., V, K]`. q, k, log_decay: `[..., K]`, with q scaled. v: `[..., V]`. beta: `[...]`. All float32.

    Returns:
      `(out, state)`: `[..., V]` and `[..., V, K]`.
    """
    state = state * jnp.exp(log_decay)[..., None, :]
    u = (v - (state * k[..., None, :]).sum(-1)) * beta[..., None]
    state = state + u[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(-1), state


@functools.partial(jax.jit, static_argnames=("sizes", "scale", "use_qk_l2norm", "lower_bound", "out_dtype"))
def kda_packed_decode_xla(
    mixed_qkv,  # [B, 2*H*K + HV*V]
    a,  # [B, HV*K]
    b,  # [B, HV]
    A_log,  # [HV]
    dt_bias,  # [HV*K]
    pool,  # [S, HV, V, K], an array or a Ref
    slots,  # [B] int32
    sources=None,  # [B] int32
    *,
    sizes: Sizes,
    scale,
    use_qk_l2norm,
    lower_bound,
    out_dtype,
):
    """`kda_jax.packed_decode` after its contract: `(out, pool)`, with None for a Ref, which is updated in place."""
    B, H, HV, K, V, S = sizes.B, sizes.H, sizes.HV, sizes.K, sizes.V, sizes.S
    assert_operands(sizes, mixed_qkv, a, b, A_log, dt_bias, pool, slots, sources)
    state = pool[...] if is_ref(pool) else pool  # of a Ref, its own buffer: nothing is copied inside jit

    if is_ref(pool):
        slots = ref_must_be_mapped(
            pool, slots, mixed_qkv, a, b, A_log, dt_bias, *(() if sources is None else (sources,))
        )

    # A padded row may hold anything: as zeros it disturbs no derivative either.
    live = (slots >= 0) & (slots < S)
    mixed_qkv, a, b = (jnp.where(live[:, None], x, jnp.zeros((), x.dtype)) for x in (mixed_qkv, a, b))

    f32 = jnp.float32
    qk, v = jnp.split(mixed_qkv.astype(f32), [2 * H * K], axis=1)
    q, k = jnp.moveaxis(qk.reshape(B, 2, H, K), 1, 0)
    if use_qk_l2norm:
        q, k = (x * gates.inverse_norm((x * x).sum(-1, keepdims=True)) for x in (q, k))
    q, k = (jnp.repeat(x, HV // H, axis=1) for x in (q * f32(scale), k))
    x = a.astype(f32).reshape(B, HV, K) + dt_bias.astype(f32).reshape(1, HV, K)
    log_decay = gates.differentiable_log_decay(x, A_log.astype(f32).reshape(1, HV, 1), lower_bound)
    beta = gates.differentiable_sigmoid(b.astype(f32))

    slots = jnp.where(live, slots, S)  # out of range on the high side: a negative index would wrap
    sources = slots if sources is None else jnp.where((sources >= 0) & (sources < S), sources, S)
    before = state.at[sources].get(mode="fill", fill_value=0).astype(f32)  # outside the pool: a zero state
    out, after = recurrence(before, q, k, v.reshape(B, HV, V), log_decay, beta)
    out = jnp.where(live[:, None, None], out, 0).astype(out_dtype).reshape(B, 1, HV, V)
    state = state.at[slots].set(after.astype(state.dtype), mode="drop")
    if is_ref(pool):
        pool[...] = state
        return out, None
    return out, state
