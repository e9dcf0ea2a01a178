"""What the operators over several tokens share: contract, choice, call, tables of slots."""

import functools

import jax.numpy as jnp

from kda_contracts import KDA_UPDATE, RECURRENT_VERIFY, ContractError
from kda_jax import call, dispatch, pools
from kda_jax.sequences import bounded, owners, positions


def run(op, contract, operands, draft, options, gate, *, out_dtype, implementation):
    """Contract, choice and call of an operator, `op`.

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
        return _in_auto_axes(op, contract, arrays, statics, returned)
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
    cu_seqlens = None if cu_seqlens is None else bounded(cu_seqlens, sizes.T)
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


def _in_auto_axes(op, contract, arrays, statics, returned):
    """The call again, where Explicit mesh axes cut an operand."""
    further = ()
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
    owner = owners(cu_seqlens, T)
    row, column = jnp.minimum(owner, table.shape[0] - 1), positions(cu_seqlens, owner)
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
    last, within = last_accepted(accepted, table.shape, None if by_column else cu_seqlens)
    return jnp.where(within, table.reshape(-1)[last], own)


def last_accepted(accepted, shape, cu_seqlens):
    """`[N]` twice: where each sequence's last accepted token is among all B*T, and whether it is
    the sequence's own.
    """
    B, T = shape
    first = jnp.arange(B, dtype=jnp.int32) * T if cu_seqlens is None else cu_seqlens[:-1]
    lengths = T if cu_seqlens is None else cu_seqlens[1:] - first
    return jnp.clip(first + accepted - 1, 0, B * T - 1), (accepted > 0) & (accepted <= lengths)
