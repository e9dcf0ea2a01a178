"""Several tokens a sequence: the operator with its gates, and the recurrence without them.

Over 350 lines, since half of them are the docstrings of four public operators.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_contracts import COMMIT, KDA_UPDATE, RECURRENT_KDA, RECURRENT_VERIFY, ContractError
from kda_jax import call, dispatch, pools
from kda_jax.call import Array, Implementation, Pool
from kda_jax.sequences import owners, positions


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
    return _run(
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
    return _run(
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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "log_decay", "beta"],
    meta_fields=["use_qk_l2norm_in_kernel"],
)
@dataclass(frozen=True)
class Drafts:
    """What `recurrent_verify` keeps of its tokens, so that `commit` runs some of them again.

    A pytree; k, v, log_decay and beta as they came, and whether k is yet to be normalized. With
    K = V = 128, bfloat16 and float32 decays it is 1 kB a token and head, where a state is 64 kB.
    """

    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    log_decay: Any  # [B, T, HV, K]
    beta: Any  # [B, T, HV]
    use_qk_l2norm_in_kernel: bool = False


def recurrent_verify(
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
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, Drafts]:
    """The read-outs of drafted tokens. The pool is read and not written; `commit` advances it.

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
      out_dtype, implementation: likewise.

    Returns:
      out: `[B, T, HV, V]`, as `recurrent_kda` gives it.
      drafts: `Drafts`, what `commit` takes.

    Effects:
      None.

    Raises:
      ContractError, TypeError, NotImplementedError: as `packed_decode`.

    >>> import jax.numpy as jnp
    >>> q, k, v = jnp.ones((3, 1, 2, 1, 1))
    >>> no_decay, beta = jnp.zeros((1, 2, 1, 1)), jnp.full((1, 2, 1), 0.5)
    >>> pool = jnp.zeros((2, 1, 1, 1))
    >>> out, drafts = recurrent_verify(q, k, v, no_decay, beta, pool, jnp.array([1]))
    >>> out.ravel().tolist(), commit(pool, drafts, jnp.array([1]), jnp.array([1])).ravel().tolist()
    ([0.5, 0.75], [0.0, 0.5])
    """
    operands = dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta, pool=pool, slots=slots)
    out, _ = _run(
        RECURRENT_VERIFY,
        operands | dict(sources=sources, cu_seqlens=cu_seqlens),
        {},
        dict(scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel),
        {},
        out_dtype=out_dtype,
        implementation=implementation,
    )
    k, v, log_decay, beta = map(jnp.asarray, (k, v, log_decay, beta))
    return out, Drafts(k, v, log_decay, beta, use_qk_l2norm_in_kernel)


def commit(
    pool: Pool,
    intermediate: Array | Drafts,
    slots: Array,
    num_accepted: Array,
    *,
    sources: Array | None = None,
    cu_seqlens: Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Advances the pool by the accepted tokens of a verified draft, and by no others.

    Args:
      pool: `[S, HV, V, K]` float, an array or a `jax.Ref`.
      intermediate: `Drafts`, as `recurrent_verify` returns them, whose accepted tokens are run
        again: the state of one call of `recurrent_kda` over them, in a kernel bit for bit. Or
        `[B, T, HV, V, K]` float: the states after every token, as `intermediate_states=True`
        returns them; rounded to the pool's dtype.
      slots: `[N]` integer; the slot of each sequence. Outside `[0, S)`: passed over.
      num_accepted: `[N]` integer, 0 to the sequence's length. 0, or more than that, leaves the slot
        as it is.
      sources: with `Drafts`, as in the call that made them.
      cu_seqlens: as it was in the call that made the drafts or states.
      implementation: with `Drafts`, as in `recurrent_kda`; states are XLA's.

    Returns:
      The pool; None for a Ref.

    Effects:
      As `packed_decode`: in place where the pool is donated inside `jit`, or a Ref.

    Raises:
      ContractError: a shape or dtype does not fit. NotImplementedError: as `packed_decode`.

    >>> import jax.numpy as jnp
    >>> # Two sequences of three drafted tokens.
    >>> states, pool = jnp.arange(1.0, 7.0).reshape(2, 3, 1, 1, 1), jnp.zeros((4, 1, 1, 1))
    >>> commit(pool, states, jnp.array([3, 0]), jnp.array([2, 0])).ravel().tolist()
    [0.0, 0.0, 0.0, 2.0]
    """
    drafted = isinstance(intermediate, Drafts)
    indices = dict(slots=slots, num_accepted=num_accepted, sources=sources, cu_seqlens=cu_seqlens)
    tensors = dict(intermediate=intermediate)
    if drafted:
        tensors = {name: getattr(intermediate, name) for name in ("k", "v", "log_decay", "beta")}
    elif sources is not None:
        raise ContractError(
            f"{COMMIT.name}: `sources` go with Drafts: states were made from their own already"
        )
    arrays, sizes = call.taken(COMMIT, dict(pool=pool) | tensors | indices)
    choice = None
    if drafted:
        choice = dispatch.choose(COMMIT, implementation, sizes, arrays).name
    if call.is_cut(arrays):
        specs = call.result_cuts(COMMIT, arrays)
        again = functools.partial(_commit_again, intermediate if drafted else None, choice)
        return call.in_auto_axes(again, COMMIT.name, arrays, specs)
    if drafted and 0 in (sizes.B, sizes.T, sizes.N, sizes.S, sizes.V):
        return pools.unchanged(arrays["pool"])
    narrow = {name: pools.as_int32(arrays[name]) for name in indices}
    if not drafted:
        del narrow["sources"]
        return _commit(arrays["pool"], arrays["intermediate"], **narrow)
    return _run_again(arrays, sizes, intermediate.use_qk_l2norm_in_kernel, choice, **narrow)


def _commit_again(drafts, choice, /, **arrays):
    """`commit` of its operands by name; `drafts`: None, or what those of a draft come from."""
    if drafts is not None:
        names = ("k", "v", "log_decay", "beta")
        fields: dict[str, Any] = {name: arrays.pop(name) for name in names}
        arrays["intermediate"] = dataclasses.replace(drafts, **fields)
        arrays["implementation"] = choice
    return commit(**arrays)


def _run_again(arrays, sizes, l2norm, name, *, slots, num_accepted, sources, cu_seqlens):
    """The pool behind the accepted tokens of drafts."""
    k, v = arrays["k"], arrays["v"]
    static = call.Static(
        op="kda_update",
        sizes=sizes,
        maths=call.maths_of(sizes.K, activated=True, scale=1.0, use_qk_l2norm_in_kernel=l2norm),
        out_dtype=jnp.dtype(v.dtype),
    )
    _, within = _last_accepted(num_accepted, v.shape[:2], cu_seqlens)
    operands = call.Operands(
        q=k,  # nobody reads what comes out
        k=k,
        v=v,
        a=arrays["log_decay"],
        b=arrays["beta"],
        pool=arrays["pool"],
        slots=slots,
        sources=sources,
        cu_seqlens=cu_seqlens,
        lengths=jnp.where(within, num_accepted, 0),
    )
    return dispatch.run(name, operands, static)[1]


@jax.jit
def _commit(pool, intermediate, slots, num_accepted, cu_seqlens):
    state, slots = pools.opened(pool, slots, intermediate, num_accepted, cu_seqlens)
    S, (B, T) = state.shape[0], intermediate.shape[:2]
    if 0 not in (B, T, S):
        last, within = _last_accepted(num_accepted, (B, T), cu_seqlens)
        states = intermediate.reshape(B * T, *state.shape[1:])[last].astype(state.dtype)
        state = pools.write(state, slots, states, where=within)
    return pools.closed(pool, state)


def _run(contract, operands, draft, options, gate, *, out_dtype, implementation):
    """Contract, choice and call of the operators.

    Over 60 lines, since all of them meet here.
    """
    asked = draft.get("intermediate_states", False)
    returned = asked is True
    if isinstance(asked, bool):
        draft = {name: x for name, x in draft.items() if name != "intermediate_states"}
    elif isinstance(asked, int):
        raise ContractError(
            f"{contract.name}: `intermediate_states` must be True, False or slots [B, T] "
            "(got an int)"
        )
    arrays, sizes = call.taken(contract, operands | draft, **options, **gate, out_dtype=out_dtype)
    writes, accepted = arrays.get("intermediate_states"), arrays.get("num_accepted_tokens")
    if accepted is not None and writes is None:
        raise ContractError(
            f"{contract.name}: `num_accepted_tokens` picks from the slots in "
            "`intermediate_states`: pass them too"
        )
    pool = arrays[contract.pool]
    choice = dispatch.choose(contract, implementation, sizes, arrays)
    activated = contract is not KDA_UPDATE
    if call.is_cut(arrays):
        statics = dict(options, **gate, out_dtype=out_dtype, implementation=choice.name)
        return _in_auto_axes(contract, arrays, statics, returned)
    a, b = ("log_decay", "beta") if activated else ("a", "b")
    v, shape = arrays["v"], pool.shape
    static = call.Static(
        op="kda_update",
        sizes=sizes,
        maths=call.maths_of(sizes.K, activated=activated, **options, **gate),
        out_dtype=jnp.dtype(v.dtype if out_dtype is None else out_dtype),
        update_state=contract is not RECURRENT_VERIFY and bool(options["update_state"]),
        intermediate=returned,
    )
    if pools.is_ref(pool) and len(shape) == 1:
        raise ContractError(
            f"{contract.name}: `{contract.pool}` may be flat as an array only: make the Ref 4-D"
        )
    if static.empty:
        out, state = call.nothing(static, pool)
        states = (jnp.zeros((*out.shape, sizes.K), pool.dtype),) if returned else ()
        return out, state, *states
    names = ("slots", "sources") if activated else ("initial_state_indices", "source_indices")
    slots, sources = (pools.as_int32(arrays[name]) for name in names)
    cu_seqlens, table = map(pools.as_int32, (arrays["cu_seqlens"], writes))
    operands = call.Operands(
        q=arrays["q"],
        k=arrays["k"],
        v=v,
        a=arrays[a],
        b=arrays[b],
        A_log=arrays.get("A_log"),
        dt_bias=arrays.get("dt_bias"),
        pool=pool if len(shape) == 4 else jnp.reshape(pool, (sizes.S, sizes.HV, sizes.V, sizes.K)),
        slots=slots,
        sources=_accepted(pools.as_int32(accepted), slots, sources, table, cu_seqlens),
        cu_seqlens=cu_seqlens,
        writes=_of_tokens(table, cu_seqlens, (sizes.B, sizes.T)),
    )
    out, state, states = dispatch.run(choice.name, operands, static)
    state = state if state is None else state.reshape(shape)
    return (out, state, states) if returned else (out, state)


OPERATORS = {
    KDA_UPDATE.name: fused_sigmoid_gating_kda_update,
    RECURRENT_KDA.name: recurrent_kda,
    RECURRENT_VERIFY.name: recurrent_verify,
}


def _in_auto_axes(contract, arrays, statics, returned):
    """The call again, where Explicit mesh axes cut an operand."""
    op, further = OPERATORS[contract.name], ()
    if returned:
        statics = statics | dict(intermediate_states=True)
        further = ("B T HV V K",)
    specs = call.result_cuts(contract, arrays, *further)
    again = functools.partial(op, **statics)
    if contract is RECURRENT_VERIFY:
        out = call.in_auto_axes(lambda **x: again(**x)[0], contract.name, arrays, specs[:1])
        return out, None
    return call.in_auto_axes(again, contract.name, arrays, specs)


def _of_tokens(table, cu_seqlens, shape):
    """`[B, T]`: the slot of each token, -1 for one that the table has no column for."""
    T = shape[1]
    if table is None or table.shape == shape:
        return table
    if cu_seqlens is None:
        return table[:, :T]
    bounds = jnp.clip(cu_seqlens, 0, T)
    owner = owners(bounds, T)
    row, column = jnp.minimum(owner, table.shape[0] - 1), positions(bounds, owner)
    kept = (owner < table.shape[0]) & (column < table.shape[1])
    slots = table[row, jnp.clip(column, 0, max(table.shape[1] - 1, 0))]
    return jnp.where(kept, slots, -1)[None]


def _accepted(accepted, slots, sources, table, cu_seqlens):
    """`[N]`: the slot that each sequence starts from: that of its last accepted token, or its
    source, or its own. None where nothing was said of either.
    """
    if accepted is None:
        return sources
    own = slots if sources is None else sources
    if 0 in table.shape:
        return own
    # One row of a single sequence is a table too.
    by_column = cu_seqlens is None or table.shape[0] == slots.shape[0]
    last, within = _last_accepted(accepted, table.shape, None if by_column else cu_seqlens)
    return jnp.where(within, table.reshape(-1)[last], own)


def _last_accepted(accepted, shape, cu_seqlens):
    """`[N]` twice: where each sequence's last accepted token is among all B*T, and whether it is
    the sequence's own.
    """
    B, T = shape
    first = jnp.arange(B, dtype=jnp.int32) * T if cu_seqlens is None else cu_seqlens[:-1]
    lengths = T if cu_seqlens is None else cu_seqlens[1:] - first
    return jnp.clip(first + accepted - 1, 0, B * T - 1), (accepted > 0) & (accepted <= lengths)
