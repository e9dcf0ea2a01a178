"""Several tokens a sequence: the operator with its gates, and the recurrence without them."""

import jax
from jax.typing import DTypeLike

from kda_contracts import KDA_UPDATE, RECURRENT_KDA
from kda_jax import update_call
from kda_jax.call import Array, Implementation, Pool


def fused_sigmoid_gating_kda_update(
    A_log: Array | None,
    dt_bias: Array | None,
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    initial_state_source: Pool,
    initial_state_indices: Array,
    *,
    source_indices: Array | None = None,
    cu_seqlens: Array | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    lower_bound: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    allow_neg_eigval: bool = False,
    update_state: bool = True,
    intermediate_states: bool | Array = False,
    num_accepted_tokens: Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, ...]:
    """Kimi Delta Attention with its gates: one or several tokens of each sequence, in a pool.

    The recurrence, the gates and the rules of slots are those of `packed_decode`, token after
    token. The state is read once, kept in float32, rounded to the pool's dtype after every token,
    and written once, so that T tokens in one call are T calls of one token.

    Dense: B = N sequences of T tokens. With `cu_seqlens` (varlen): B = 1, and N sequences of
    unequal length lie end to end along T. An empty sequence reads and writes nothing. A padded
    sequence's `out` is zero, like that of a token behind the last sequence. In `a` and
    `b` an axis B or T of length 1 may be left out.

    Args:
      A_log: `[HV]` float, in any shape of HV elements; natural log of the decay rate. None,
        only with a `lower_bound`, is a rate of 1.
      dt_bias: `[HV*K]` float, in any shape of HV*K elements; added to `a`. None is 0.
      q: `[B, T, H, K]` float; queries.
      k: `[B, T, H, K]` float; keys.
      v: `[B, T, HV, V]` float; values.
      a: `[B, T, HV*K]` float, or `[B, T, HV, K]`; raw forget-gate input.
      b: `[B, T, HV]` float; raw beta logits.
      initial_state_source: `[S, HV, V, K]` float, an array or a `jax.Ref`; or flat, an array
        of S*HV*V*K elements. The whole pool.
      initial_state_indices: `[N]` integer; the slot of each sequence. Outside `[0, S)`: a padded
        one.
      source_indices: None, or `[N]` integer; the slots that the sequences start from. Outside
        `[0, S)`: a zero state. A slot that one sequence reads and another writes is the caller's
        mistake (`validate_slots` finds it).
      cu_seqlens: None, or `[N+1]` int32 or int64, from 0 on: sequence n is tokens `cu_seqlens[n]`
        to `cu_seqlens[n+1] - 1` (`validate_cu_seqlens` checks the values on the host).
      scale: factor on q, a static finite number > 0; None is `K**-0.5`.
      use_qk_l2norm_in_kernel: whether q and k are divided by `sqrt(sum(x*x) + 1e-6)` over K first.
      lower_bound: None for the softplus gate, or a static finite number < 0 for the safe gate.
      softplus_beta, softplus_threshold: the softplus is `log(1 + exp(beta * x)) / beta`, and x
        where `beta * x` is above the threshold. The softplus gate only.
      allow_neg_eigval: whether beta is doubled, to `(0, 2)`.
      update_state: whether the slot takes the state after the last token. False leaves it alone: a
        draft is verified.
      intermediate_states: False; or True, to return the state after every token; or slots of the
        pool that take it, integers: a table `[N, L]`, whose column t is that of each sequence's
        token t, with L >= T unless there is `cu_seqlens`; or `[B, T]`, one for each token. Outside
        `[0, S)`: not kept. They must differ from each other and from all other sequences' slots.
      num_accepted_tokens: None, or `[N]` integer, with slots in `intermediate_states`: how many
        tokens of the last call were accepted. Sequence n starts from the state that the last call
        left in column `num_accepted_tokens[n] - 1` of its row (a zero state if that was not kept),
        however many tokens this call has, so that a rejected token costs nothing. Where it is 0,
        or more than there are columns, it starts from its source or its own slot: right only if no
        token was accepted since that slot was written. A target model that adds a token of its own
        always accepts one. Where none may be accepted, use `commit`. Slots `[1, T]` beside
        `cu_seqlens` have no columns: there token `num_accepted_tokens[n] - 1` of the sequence
        counts as this call cuts it.
      out_dtype: dtype of `out`; None is that of `v`.
      implementation: "auto", "mosaic_gpu", "triton" or "xla", as in `packed_decode`.

    Returns:
      out: `[B, T, HV, V]`.
      state: the updated pool, shaped as it came; None if a Ref came in.
      intermediate: `[B, T, HV, V, K]` in the pool's dtype, zeros for padded sequences; only if
        `intermediate_states` is True.

    Effects:
      As `packed_decode`: the pool is updated in place where it is donated inside `jit`, or a Ref.

    Raises:
      ContractError, TypeError, NotImplementedError: as `packed_decode`.

    Source: SGLang's `cutedsl_fused_sigmoid_gating_kda_update`; what goes past it follows FLA's
    recurrent KDA.

    >>> import jax, jax.numpy as jnp
    >>> q, k = jnp.array([[[[3.0, 4.0]]]]), jnp.array([[[[0.0, 2.0]]]])
    >>> v, zero = jnp.array([[[[1.0, -1.0]]]]), jnp.zeros((1, 1, 1, 2))
    >>> pool = jnp.zeros((3, 1, 2, 2)).at[2, 0].set(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    >>> gates, slots = (jnp.zeros(1), None), jnp.array([2])
    >>> out, state = fused_sigmoid_gating_kda_update(
    ...     *gates, q, k, v, zero, zero[..., 0], pool, slots, scale=1.0,
    ...     use_qk_l2norm_in_kernel=False)
    >>> out.ravel().tolist(), state[2, 0].tolist()
    ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]])
    """
    operands = dict(
        A_log=A_log,
        dt_bias=dt_bias,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        initial_state_source=initial_state_source,
    )
    operands |= dict(
        initial_state_indices=initial_state_indices,
        source_indices=source_indices,
        cu_seqlens=cu_seqlens,
    )
    gate = dict(
        lower_bound=lower_bound, softplus_beta=softplus_beta, softplus_threshold=softplus_threshold
    )
    return update_call.run(
        fused_sigmoid_gating_kda_update,
        KDA_UPDATE,
        operands,
        dict(intermediate_states=intermediate_states, num_accepted_tokens=num_accepted_tokens),
        dict(
            scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, update_state=update_state
        ),
        gate | dict(allow_neg_eigval=allow_neg_eigval),
        out_dtype=out_dtype,
        implementation=implementation,
    )


def recurrent_kda(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    pool: Pool,
    slots: Array,
    *,
    sources: Array | None = None,
    cu_seqlens: Array | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    update_state: bool = True,
    intermediate_states: bool | Array = False,
    num_accepted_tokens: Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, ...]:
    """The recurrence of Kimi Delta Attention, for callers that compute the gates themselves.

    Args:
      q: `[B, T, H, K]` float; queries.
      k: `[B, T, H, K]` float; keys.
      v: `[B, T, HV, V]` float; values.
      log_decay: `[B, T, HV, K]` float; natural log of the decay per key channel, <= 0.
      beta: `[B, T, HV]` float; update strength, after the sigmoid.
      pool: `[S, HV, V, K]` float, an array or a `jax.Ref`; the whole pool.
      slots: `[N]` integer; the slot of each sequence. Outside `[0, S)`: a padded one.
      sources: None, or `[N]` integer; the slots that the sequences start from. Outside `[0, S)`: a
        zero state.
      cu_seqlens, scale, use_qk_l2norm_in_kernel: as in `fused_sigmoid_gating_kda_update`.
      update_state, intermediate_states, num_accepted_tokens: likewise.
      out_dtype, implementation: likewise.

    Returns:
      out: `[B, T, HV, V]`.
      state: `[S, HV, V, K]`, the updated pool; None if a Ref came in.
      intermediate: `[B, T, HV, V, K]` in the pool's dtype; only if `intermediate_states` is True.

    Effects:
      As `packed_decode`: the pool is updated in place where it is donated inside `jit`, or a Ref.

    Raises:
      ContractError, TypeError, NotImplementedError: as `packed_decode`.

    Source: FLA's `fused_recurrent_kda`, with V before K in the state.

    >>> import jax.numpy as jnp
    >>> q, k = jnp.array([[[[3.0, 4.0]]]]), jnp.array([[[[0.0, 2.0]]]])
    >>> v, log_decay = jnp.array([[[[1.0, -1.0]]]]), jnp.full((1, 1, 1, 2), -jnp.log(2.0))
    >>> pool = jnp.array([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> beta, slots = jnp.full((1, 1, 1), 0.5), jnp.array([0])
    >>> out, state = recurrent_kda(q, k, v, log_decay, beta, pool, slots, scale=1.0)
    >>> out.ravel().tolist(), state[0, 0].tolist()
    ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]])
    """
    operands = dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta, pool=pool, slots=slots)
    return update_call.run(
        recurrent_kda,
        RECURRENT_KDA,
        operands | dict(sources=sources, cu_seqlens=cu_seqlens),
        dict(intermediate_states=intermediate_states, num_accepted_tokens=num_accepted_tokens),
        dict(
            scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, update_state=update_state
        ),
        {},
        out_dtype=out_dtype,
        implementation=implementation,
    )
