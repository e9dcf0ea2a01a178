"""packed_decode, the public op: its contract, the choice of an implementation, the call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kda_contracts import PACKED_DECODE
from kda_jax import call, dispatch, pools
from kda_jax.call import Array, Implementation, Pool


def packed_decode(
    mixed_qkv: Array,
    a: Array,
    b: Array,
    A_log: Array,
    dt_bias: Array,
    initial_state: Pool,
    ssm_state_indices: Array,
    *,
    source_indices: Array | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """One token of Kimi Delta Attention for each row of a batch, against a pool of states.

    For row n and value head h, with q and k of key head `h // (HV // H)` and S the state of slot
    `ssm_state_indices[n]`, all in float32:

        log_decay = -exp(A_log) * softplus(a + dt_bias)
                or  lower_bound * sigmoid(exp(A_log) * (a + dt_bias))
        S   <- S * exp(log_decay)                           along K
        u    = (v - S k) * sigmoid(b)
        S   <- S + u k^T
        out  = S (q * scale)

    A row whose index lies outside `[0, S)`, -1 above all, is a padded row: its `out` is zero, no
    slot is read or written for it, and its inputs may hold anything. Slot 0 is an ordinary slot.
    Two live rows may not share a slot (`validate_slots` checks that on the host); nothing here
    looks at a value, so nothing synchronizes.

    Args:
      mixed_qkv: `[B, 2*H*K+HV*V]` float; after convolution and SiLU; a flat row: q of all H
        heads, k of all H heads, v of all HV heads. H follows from the width.
      a: `[B, HV*K]` float; raw forget-gate input per (value head, key channel).
      b: `[B, HV]` float; raw beta logits: the sigmoid is applied here.
      A_log: `[HV]` float; natural log of the decay rate.
      dt_bias: `[HV*K]` float; added to `a`. Per channel, not per head.
      initial_state: `[S, HV, V, K]` float, V before K; the whole pool. With K == V no check
        can see a transposed pool.
      ssm_state_indices: `[B]` integer; the slot of each row. It is judged before it is narrowed to
        int32; but an int64 NumPy array that enters `jax.jit` or `jax.vmap` from outside is narrowed
        by JAX (2**32 becomes 0) before anything here sees it: check it with `validate_slots`, or
        pass int32.
      source_indices: `[B]` integer; None reads each row's state from the slot that it is written
        to. Otherwise a row reads this slot instead (copy on write of a shared prefix), and one
        outside `[0, S)` starts from a zero state (a fresh request, whatever its slot holds). No row
        may read a slot that another row writes.
      scale: factor on q, a static finite number > 0; None is `K**-0.5`.
      use_qk_l2norm_in_kernel: whether q and k are divided by `sqrt(sum(x*x) + 1e-6)` over K first
        (Kimi models: True).
      lower_bound: None for the softplus gate (Kimi-Linear), or a static finite number < 0 for the
        safe gate (-5.0 in Kimi-K3 and GLM-5.3). It belongs to the checkpoint; it is no tuning
        switch.
      allow_neg_eigval: whether beta is doubled, to `(0, 2)`. It belongs to the checkpoint too.
      out_dtype: dtype of `out`; None is that of `mixed_qkv`.
      implementation: "auto", "mosaic_gpu", "triton" or "xla". A named one runs or raises; "auto"
        takes the first that can run on the default backend (`explain` tells which, and why not the
        others).

    Returns:
      out: `[B, 1, HV, V]`, read from the state before it is rounded to the pool's dtype.
      state: `[S, HV, V, K]`, the updated pool in its own dtype, rounded to nearest even; None if a
        Ref came in.

    Effects:
      An array pool has value semantics: donate it to the surrounding `jax.jit` and it is updated in
      place; without donation, eagerly above all, it is copied whole first. A `jax.Ref` pool is
      updated in place. Slots that no row names keep their bits.

    Raises:
      ContractError: a ValueError, at trace time, that lists every argument that breaks the
        contract.
      TypeError: `scale` or `lower_bound` is traced.
      NotImplementedError: the named implementation cannot run this call; the message says why and
        what can.

    Source: SGLang's `fused_recurrent_kda_packed_decode`; the recurrence is that of the Kimi Linear
    paper.

    >>> import functools, jax, jax.numpy as jnp
    >>> # q | k | v, with H = HV = 1 and K = V = 2
    >>> row = jnp.array([[3.0, 4.0, 0.0, 2.0, 1.0, -1.0]])
    >>> pool = jnp.zeros((3, 1, 2, 2)).at[2, 0].set(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    >>> gates = dict(a=jnp.zeros((1, 2)), b=jnp.zeros((1, 1)))
    >>> gates |= dict(A_log=jnp.zeros(1), dt_bias=jnp.zeros(2))
    >>> @functools.partial(jax.jit, donate_argnums=0)
    ... def step(pool, slots):
    ...     x = dict(initial_state=pool, ssm_state_indices=slots)
    ...     return packed_decode(row, **gates, **x, scale=1.0)
    >>> out, pool = step(pool, jnp.array([2]))
    >>> out.ravel().tolist(), pool[2, 0].tolist()
    ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]])
    """
    arrays = dict(
        mixed_qkv=mixed_qkv,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        ssm_state_indices=ssm_state_indices,
        source_indices=source_indices,
    )
    gate = dict(
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        lower_bound=lower_bound,
        allow_neg_eigval=allow_neg_eigval,
    )
    arrays, sizes = call.taken(PACKED_DECODE, arrays, **gate, out_dtype=out_dtype)
    choice = dispatch.choose(PACKED_DECODE, implementation, sizes, arrays)
    if call.is_cut(arrays):
        again = functools.partial(
            packed_decode, **gate, out_dtype=out_dtype, implementation=choice.name
        )
        specs = call.result_cuts(PACKED_DECODE, arrays)
        return call.in_auto_axes(again, PACKED_DECODE.name, arrays, specs)
    row, pool = arrays["mixed_qkv"], arrays["initial_state"]
    static = call.Static(
        op="kda_packed_decode",
        sizes=dataclasses.replace(sizes, T=1, N=sizes.B),
        maths=call.maths_of(sizes.K, **gate),
        out_dtype=jnp.dtype(row.dtype if out_dtype is None else out_dtype),
        packed=True,
    )
    if static.empty:
        return call.nothing(static, pool)
    operands = call.Operands(
        q=row,
        k=row,
        v=row,
        a=arrays["a"],
        b=arrays["b"],
        A_log=arrays["A_log"],
        dt_bias=arrays["dt_bias"],
        pool=pool,
        slots=pools.as_int32(arrays["ssm_state_indices"]),
        sources=pools.as_int32(arrays["source_indices"]),
    )
    out, state, _ = dispatch.run(choice.name, operands, static)
    return out, state
