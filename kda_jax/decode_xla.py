"""The op in plain JAX: what it means, and what runs where no kernel can."""

import functools

import jax
import jax.numpy as jnp

from kda_contracts import KDA_UPDATE, PACKED_DECODE, Sizes
from kda_jax import gates, pools
from kda_jax.invariants import assert_operands
from kda_jax.sequences import owners


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


STATIC = ("sizes", "maths", "out_dtype", "update_state", "intermediate")


@functools.partial(jax.jit, static_argnames=("sizes", "maths", "out_dtype"))
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
    maths: gates.Maths,
    out_dtype,
):
    """`kda_jax.packed_decode` after its contract: `(out, pool)`, with None for a Ref, which is updated in place."""
    B, H, HV, K, V = sizes.B, sizes.H, sizes.HV, sizes.K, sizes.V
    assert_operands(PACKED_DECODE, sizes, mixed_qkv, a, b, A_log, dt_bias, pool, slots, sources)
    qk, v = jnp.split(mixed_qkv, [2 * H * K], axis=1)
    q, k = jnp.moveaxis(qk.reshape(B, 2, 1, H, K), 1, 0)
    tokens = q, k, v.reshape(B, 1, HV, V), a.reshape(B, 1, HV, K), b.reshape(B, 1, HV)
    out, pool, _ = _update(
        tokens, A_log, dt_bias, pool, slots, sources, maths=maths, out_dtype=out_dtype
    )
    return out, pool


@functools.partial(jax.jit, static_argnames=STATIC)
def kda_update_xla(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    a,  # [B, T, HV*K]
    b,  # [B, T, HV]
    A_log,  # [HV]
    dt_bias,  # [HV*K]
    pool,  # [S, HV, V, K], an array or a Ref
    slots,  # [N] int32
    sources=None,  # [N] int32
    cu_seqlens=None,  # [N+1] int32
    writes=None,  # [B, T] int32
    *,
    sizes: Sizes,
    maths: gates.Maths,
    out_dtype,
    update_state=True,
    intermediate=False,
):
    """`kda_jax.fused_sigmoid_gating_kda_update` after its contract: `(out, pool, intermediate)`, the last or None."""
    assert_operands(
        KDA_UPDATE, sizes, A_log, dt_bias, q, k, v, a, b, pool, slots, cu_seqlens, writes
    )
    return _update(
        (q, k, v, a.reshape(*b.shape, sizes.K), b),
        A_log,
        dt_bias,
        pool,
        slots,
        sources,
        cu_seqlens,
        writes,
        maths=maths,
        out_dtype=out_dtype,
        update_state=update_state,
        intermediate=intermediate,
    )


def _update(
    tokens,  # q, k, v, a, b: [B, T, H, K] twice, [B, T, HV, V], [B, T, HV, K], [B, T, HV]
    A_log,
    dt_bias,
    pool,
    slots,
    sources,
    cu_seqlens=None,
    writes=None,
    *,
    maths,
    out_dtype,
    update_state=True,
    intermediate=False,
):
    f32, (T, HV) = jnp.float32, tokens[4].shape[1:]
    if cu_seqlens is not None:
        # No boundary reaches past the tokens, whatever it is.
        cu_seqlens = jnp.clip(cu_seqlens, 0, T)
    changed = update_state or writes is not None
    others = (*tokens, A_log, dt_bias, sources, cu_seqlens, writes)
    state, slots = pools.opened(pool, slots, *others, written=changed)
    S = state.shape[0]

    # Tokens of padded sequences may hold anything: as zeros they disturb no derivative either.
    live = pools.inside(slots, S)
    # Of each token: its sequence, N for none.
    owner = owners(cu_seqlens, T) if cu_seqlens is not None else None
    live_tokens = live[:, None] if owner is None else jnp.append(live, False)[owner][None]
    tokens = [jnp.where(_spread(live_tokens, x), x.astype(f32), 0) for x in tokens]
    q, k, v, a, b = tokens
    if maths.use_qk_l2norm:
        q, k = (x * gates.inverse_norm((x * x).sum(-1, keepdims=True)) for x in (q, k))
    q, k = (jnp.repeat(x, HV // x.shape[2], axis=2) for x in (q * f32(maths.scale), k))
    A_log, dt_bias = A_log.astype(f32).reshape(HV, 1), dt_bias.astype(f32).reshape(HV, -1)
    log_decay, beta = gates.decay_and_beta(
        a, b, A_log[None, None], dt_bias[None, None], maths, differentiable=True
    )

    before = pools.read(state, slots, sources).astype(f32)

    def step(states, token):
        out, after = recurrence(states, *token)
        # Rounded after every token, as in that many one-token calls.
        after = after.astype(state.dtype)
        return after.astype(f32), (out, after if intermediate or writes is not None else None)

    def step_of_owner(states, token):
        row, token = token[0], token[1:]
        after, seen = step(states.at[row].get(mode="fill", fill_value=0), token)
        return states.at[row].set(after, mode="drop"), seen

    token_major = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta)]
    if owner is not None:
        after, (out, seen) = jax.lax.scan(
            step_of_owner, before, (owner, *(x[:, 0] for x in token_major))
        )
        out, seen = jax.tree.map(lambda x: x[None], (out, seen))
    elif T == 1:
        after, seen = step(before, [x[0] for x in token_major])
        out, seen = jax.tree.map(lambda x: x[:, None], seen)
    else:
        after, seen = jax.lax.scan(step, before, token_major)
        out, seen = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), seen)
    out = jnp.where(_spread(live_tokens, out), out, 0).astype(out_dtype)
    if seen is not None:
        seen = jnp.where(_spread(live_tokens, seen), seen, jnp.zeros((), seen.dtype))
    if writes is not None:
        state = pools.write(state, writes, seen, where=live_tokens)
    if update_state:
        holds_tokens = True if cu_seqlens is None else cu_seqlens[1:] > cu_seqlens[:-1]
        state = pools.write(state, slots, after.astype(state.dtype), where=holds_tokens)
    return out, pools.closed(pool, state, written=changed), seen if intermediate else None


def _spread(mask, x):
    """A mask of leading axes, with axes of length 1 behind."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
