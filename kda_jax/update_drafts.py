"""Drafts of the operator: verified without a trace, then committed as far as accepted."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_contracts import COMMIT, RECURRENT_VERIFY, ContractError
from kda_jax import call, dispatch, pools, update_call
from kda_jax.call import Array, Implementation, Pool
from kda_jax.sequences import bounded
from kda_jax.update_call import last_accepted

DRAFTED = ("k", "v", "log_decay", "beta")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=DRAFTED,
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
    out, _ = update_call.run(
        recurrent_verify,
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
        tensors = {name: getattr(intermediate, name) for name in DRAFTED}
    elif sources is not None:
        raise ContractError(
            f"{COMMIT.name}: `sources` go with Drafts: states were made from their own already"
        )
    arrays, sizes = call.taken(COMMIT, dict(pool=pool) | tensors | indices)
    choice = dispatch.choose(COMMIT, implementation, sizes, arrays).name
    if call.is_cut(arrays):
        specs = call.result_cuts(COMMIT, arrays)
        again = functools.partial(_commit_again, intermediate if drafted else None, choice)
        return call.in_auto_axes(again, COMMIT.name, arrays, specs)
    if drafted and 0 in (sizes.B, sizes.T, sizes.N, sizes.S, sizes.V):
        return pools.unchanged(arrays["pool"])
    narrow = {name: pools.as_int32(arrays[name]) for name in indices}
    if narrow["cu_seqlens"] is not None:
        narrow["cu_seqlens"] = bounded(narrow["cu_seqlens"], sizes.T)
    if not drafted:
        del narrow["sources"]
        return _commit(arrays["pool"], arrays["intermediate"], **narrow)
    return _run_again(arrays, sizes, intermediate.use_qk_l2norm_in_kernel, choice, **narrow)


def _commit_again(drafts, choice, /, **arrays):
    """`commit` of its operands by name; `drafts`: None, or what those of a draft come from."""
    if drafts is not None:
        fields: dict[str, Any] = {name: arrays.pop(name) for name in DRAFTED}
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
        clears=False,
        reads=False,
    )
    _, within = last_accepted(num_accepted, v.shape[:2], cu_seqlens)
    operands = call.Operands(
        q=k,  # nobody reads it
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
        last, within = last_accepted(num_accepted, (B, T), cu_seqlens)
        states = intermediate.reshape(B * T, *state.shape[1:])[last].astype(state.dtype)
        state = pools.write(state, slots, states, where=within)
    return pools.closed(pool, state)
