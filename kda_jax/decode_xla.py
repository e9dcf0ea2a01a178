"""The op in plain JAX: what it means, and what runs where no kernel can."""

import jax
import jax.numpy as jnp

from kda_jax import gates, pools
from kda_jax.call import Operands, Static, implementation
from kda_jax.sequences import owners, positions
from kda_jax.transforms import varying_as


def recurrence(state, q, k, v, log_decay, beta):
    """One token of the gated delta rule, in float32 sums over K that no matrix unit rounds.

        S'  = S * exp(log_decay)          along K
        u   = (v - S' k) * beta
        S   = S' + u k^T
        out = S q

    Args:
      state: `[..., V, K]`. q, k, log_decay: `[..., K]`, with q scaled. v: `[..., V]`. beta:
        `[...]`. All float32.

    Returns:
      `(out, state)`: `[..., V]` and `[..., V, K]`.
    """
    state = state * jnp.exp(log_decay)[..., None, :]
    u = (v - (state * k[..., None, :]).sum(-1)) * beta[..., None]
    state = state + u[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(-1), state


def _update(operands: Operands, *, static: Static):
    """`(out [B, T, HV, V], pool, intermediate [B, T, HV, V, K] or None)`; None for a Ref.

    Over 60 lines, since rows, sequences end to end and tokens that are not run meet here.
    """
    f32, T = jnp.float32, static.sizes.T
    pool, slots, sources = operands.pool, operands.slots, operands.sources
    cu_seqlens, writes, lengths = operands.cu_seqlens, operands.writes, operands.lengths
    tokens = (*_separate(operands, static), operands.a, operands.b)
    A_log, dt_bias = operands.A_log, operands.dt_bias
    changed = static.update_state or writes is not None
    others = (*tokens, A_log, dt_bias, sources, cu_seqlens, writes, lengths)
    state, slots = pools.opened(pool, slots, *others, written=changed)
    # Tokens of padded sequences may hold anything: as zeros they disturb no derivative either.
    owner, live_tokens = _live_tokens(pools.inside(slots, static.sizes.S), lengths, cu_seqlens, T)
    tokens = [jnp.where(_spread(live_tokens, x), x.astype(f32), 0) for x in tokens]
    tokens = _gated(tokens, A_log, dt_bias, static)
    before = varying_as(pools.read(state, slots, sources).astype(f32), *tokens, owner)

    def step(states, token, counted=None):
        out, after = recurrence(states, *token)
        # Rounded after every token, as in that many one-token calls.
        after = _rounded(after, state.dtype)
        kept = after.astype(state.dtype) if static.intermediate or writes is not None else None
        if counted is not None:
            after = jnp.where(_spread(counted, after), after, states)
        return after, (out, kept)

    def step_of_row(states, token):
        *token, counted = token
        return step(states, token, counted)

    def step_of_owner(states, token):
        row, token = token[0], token[1:]
        after, seen = step(states.at[row].get(mode="fill", fill_value=0), token)
        return states.at[row].set(after, mode="drop"), seen

    token_major = [jnp.moveaxis(x, 1, 0) for x in tokens]
    if owner is not None:
        after, (out, seen) = jax.lax.scan(
            step_of_owner, before, (owner, *(x[:, 0] for x in token_major))
        )
        out, seen = jax.tree.map(lambda x: x[None], (out, seen))
    elif lengths is not None:
        counted = jnp.moveaxis(live_tokens, 1, 0)
        after, (out, seen) = jax.lax.scan(step_of_row, before, (*token_major, counted))
        out, seen = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), (out, seen))
    elif T == 1:
        after, seen = step(before, [x[0] for x in token_major])
        out, seen = jax.tree.map(lambda x: x[:, None], seen)
    else:
        after, seen = jax.lax.scan(step, before, token_major)
        out, seen = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), seen)
    out = jnp.where(_spread(live_tokens, out), out, 0).astype(static.out_dtype)
    if seen is not None:
        seen = jnp.where(_spread(live_tokens, seen), seen, jnp.zeros((), seen.dtype))
    if writes is not None:
        state = pools.write(state, writes, seen, where=live_tokens)
    if static.update_state:
        holds_tokens = True if cu_seqlens is None else cu_seqlens[1:] > cu_seqlens[:-1]
        if lengths is not None:
            holds_tokens &= lengths > 0
        state = pools.write(state, slots, after.astype(state.dtype), where=holds_tokens)
    return out, pools.closed(pool, state, written=changed), seen if static.intermediate else None


def _live_tokens(live, lengths, cu_seqlens, T):
    """`(owner [T], live [B, T])`: each token's sequence, N for none; which are run. No owner: None.

    lengths: None, or how many tokens of each sequence are.
    """
    if cu_seqlens is None:
        counted = jnp.ones((1, T), bool)
        if lengths is not None:
            counted = jnp.arange(T, dtype=jnp.int32)[None] < lengths[:, None]
        return None, live[:, None] & counted
    owner = owners(cu_seqlens, T)
    if lengths is not None:
        counted = positions(cu_seqlens, owner) < jnp.append(lengths, 0)[owner]
        owner = jnp.where(counted, owner, lengths.shape[0])
    return owner, jnp.append(live, False)[owner][None]


def tokens_and_states(q, k, v, log_decay, beta, start, live, *, static):
    """What `chunks_and_states` of `prefill_xla.py` returns of rows, token after token.

    The state is rounded nowhere in between.
    """
    live_tokens = live[:, None]
    q, k, *others = (
        jnp.where(_spread(live_tokens, x), x.astype(jnp.float32), 0)
        for x in (q, k, v, log_decay, beta)
    )
    tokens = [jnp.moveaxis(x, 1, 0) for x in (*_of_value_heads(q, k, static), *others)]
    start = varying_as(start, *tokens, live)

    def step(states, token):
        out, states = recurrence(states, *token)
        return states, out

    after, out = jax.lax.scan(step, start, tokens)
    out = jnp.moveaxis(out, 0, 1)
    return jnp.where(_spread(live_tokens, out), out, 0).astype(static.out_dtype), after


def few_tokens(tensors, state, slots, sources, begins, lengths, *, static, rows):
    """`(out [1, T, HV, V], pool)` of sequences of few tokens among T, token after token.

    Some `rows` of them at a time, as long as the longest has tokens: the cost is that of the tokens
    that are there. Both loops end where there are no more, so that nothing differentiates through
    them.

    Args:
      tensors: q, k, v, log_decay and beta, `[1, T, ...]`.
      state: the pool, `[S, HV, V, K]`. slots, sources: `[N]`, the slot of each sequence, and the
        one that it starts from.
      begins, lengths: `[N]`; a sequence of no tokens touches nothing.
    """
    N, T, f32 = begins.shape[0], static.sizes.T, jnp.float32
    operands = (*tensors, slots, sources, begins, lengths)
    out = jnp.zeros((T, static.sizes.HV, static.sizes.V), static.out_dtype)
    state, out = (varying_as(x, *operands, state) for x in (state, out))
    tensors = [x[0] for x in tensors]
    # Those with tokens first: whole groups of others are not looked at.
    order = jnp.sort(jnp.where(lengths > 0, jnp.arange(N, dtype=jnp.int32), N))
    order = jnp.pad(order, (0, rows), constant_values=N)
    used = (lengths > 0).sum(dtype=jnp.int32)

    def group(number, carry):
        state, out = carry
        taken = jax.lax.dynamic_slice_in_dim(order, number * rows, rows)
        slot, source, begin, length = (
            jnp.append(x, fill)[taken]
            for x, fill in ((slots, -1), (sources, -1), (begins, 0), (lengths, 0))
        )
        before = pools.read(state, slot, source).astype(f32)
        before = varying_as(before, *operands, state)

        def token(number, carry):
            states, out = carry
            counted = number < length
            at = jnp.where(counted, begin + number, T + jnp.arange(rows, dtype=jnp.int32))
            q, k, *others = (
                x.at[at].get(mode="fill", fill_value=0, unique_indices=True)[:, None].astype(f32)
                for x in tensors
            )
            token = [x[:, 0] for x in (*_of_value_heads(q, k, static), *others)]
            read, after = recurrence(states, *token)
            states = jnp.where(_spread(counted, after), after, states)
            out = out.at[at].set(read.astype(out.dtype), mode="drop", unique_indices=True)
            return states, out

        after, out = jax.lax.fori_loop(0, length.max(), token, (before, out))
        return pools.write(state, slot, after.astype(state.dtype), where=length > 0), out

    state, out = jax.lax.fori_loop(0, -(-used // rows), group, (state, out))
    return out[None], state


def _rounded(x, dtype):
    """float32 x as a pool of this dtype holds it.

    XLA for GPUs leaves out a cast down and up again. float16 below 2**-14 has fewer bits than
    reduce_precision knows of.
    """
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    if dtype == jnp.float16:
        return jax.lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)
    return x


def _spread(mask, x):
    """A mask of leading axes, with axes of length 1 behind."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def _gated(tokens, A_log, dt_bias, static):
    """`(q, k, v, log_decay, beta)` of float32 tokens: q scaled, q and k of each value head."""
    f32, HV, maths = jnp.float32, static.sizes.HV, static.maths
    q, k, v, a, b = tokens
    q, k = _of_value_heads(q, k, static)
    A_log, dt_bias = A_log.astype(f32).reshape(HV, 1), dt_bias.astype(f32).reshape(HV, -1)
    rates, biases = A_log[None, None], dt_bias[None, None]
    return q, k, v, *gates.decay_and_beta(a, b, rates, biases, maths, differentiable=True)


def _of_value_heads(q, k, static):
    HV, maths = static.sizes.HV, static.maths
    if maths.use_qk_l2norm:
        q, k = (x * gates.inverse_norm((x * x).sum(-1, keepdims=True)) for x in (q, k))
    return (jnp.repeat(x, HV // x.shape[2], axis=2) for x in (q * jnp.float32(maths.scale), k))


def _separate(operands, static):
    """q, k and v of a packed row, or as they came."""
    if not static.packed:
        return operands.q, operands.k, operands.v
    B, H, HV, K, V = (getattr(static.sizes, letter) for letter in ("B", "H", "HV", "K", "V"))
    qk, v = jnp.split(operands.q[:, 0], [2 * H * K], axis=1)
    q, k = jnp.moveaxis(qk.reshape(B, 2, 1, H, K), 1, 0)
    return q, k, v.reshape(B, 1, HV, V)


kda_packed_decode_xla = implementation(_update, "kda_packed_decode_xla")
kda_update_xla = implementation(_update, "kda_update_xla")
