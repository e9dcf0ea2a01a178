"""Prefill: the public op over long sequences. Contract, choice, the pool, and the chunks of one implementation."""

import functools

import jax
import jax.numpy as jnp

from kda_contracts import CHUNK_KDA, Sizes, check
from kda_jax import dispatch, pools, prefill_xla
from kda_jax.invariants import assert_operands
from kda_jax.transforms import with_transforms_of


def chunk_kda(
    q,
    k,
    v,
    log_decay,
    beta,
    initial_state,
    slots,
    *,
    source_indices=None,
    cu_seqlens=None,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    out_dtype=None,
    implementation="auto",
):
    """The recurrence of `recurrent_kda` over long sequences: in chunks, in parallel where it can be. Differentiable.

    Dense: B = N sequences of T tokens. With `cu_seqlens`: B = 1, and N sequences of unequal length lie end to end
    along T; none is padded to the longest. An empty sequence reads and writes nothing.

    Args:
      q: `[B, T, H, K]` bfloat16, float16 or float32; queries.
      k: `[B, T, H, K]` bfloat16, float16 or float32; keys.
      v: `[B, T, HV, V]` bfloat16, float16 or float32; values.
      log_decay: `[B, T, HV, K]` float32, bfloat16 or float16; natural log of the decay per key channel, <= 0, -inf
        included.
      beta: `[B, T, HV]` float32, bfloat16 or float16; update strength, after the sigmoid.
      initial_state: `[S, HV, V, K]` float32, bfloat16 or float16, an array or a `jax.Ref`; the whole pool.
      slots: `[N]` int8 to int64; the slot of each sequence, which takes its last state. Outside `[0, S)`: a padded one,
        whose `out` is zero.
      source_indices: `[N]` int8 to int64; None starts each sequence from its own slot. Otherwise from this one, and
        from a zero state where it lies outside `[0, S)`.
      cu_seqlens: None, or `[N+1]` int32 or int64 (`validate_cu_seqlens` checks the values on the host).
      scale: factor on q, a static finite number > 0; None is `K**-0.5`.
      use_qk_l2norm_in_kernel: whether q and k are divided by `sqrt(sum(x*x) + 1e-6)` over K first.
      out_dtype: dtype of `out`; None is that of `v`.
      implementation: "auto", "mosaic_gpu" or "xla". "auto" takes the kernels on a GPU of compute capability 9.0 where
        q, k and v are bfloat16, K is 64 or 128, and V a multiple of 64 up to 256; else XLA. Derivatives, and what
        `vmap` maps, are XLA's in any case. Name "xla" where no kernel can be: in a program for several platforms or
        for a CPU beside that GPU, and in one that the partitioner cuts (inside `jax.shard_map` the kernels run).

    Returns:
      out: `[B, T, HV, V]`.
      state: `[S, HV, V, K]`, the updated pool, rounded once, after the last token; None if a Ref came in.

    Effects:
      As `packed_decode`: the pool is updated in place where it is donated inside `jit`, or a Ref. Memory is linear in
      T. A value that is not finite poisons its chunk of 64 tokens, those before it too. float32 operands are multiplied
      in full float32; narrower ones with a GPU's default for float32 (TF32). The kernels multiply bfloat16, sum in
      float32, hold the state in float32, and round log decays to float16 (weaker than 2e-8 a token: to 0).

    Raises:
      ContractError, TypeError, NotImplementedError: as `packed_decode`.

    Source: the chunked form of the Kimi Linear paper; FLA's `chunk_kda`, with V before K in the state.

    >>> import jax.numpy as jnp
    >>> q, k = jnp.array([[[[3.0, 4.0]]]]), jnp.array([[[[0.0, 2.0]]]])
    >>> v, log_decay = jnp.array([[[[1.0, -1.0]]]]), jnp.full((1, 1, 1, 2), -jnp.log(2.0))
    >>> pool = jnp.array([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> out, state = chunk_kda(q, k, v, log_decay, jnp.full((1, 1, 1), 0.5), pool, jnp.array([0]), scale=1.0)
    >>> out.ravel().round(4).tolist(), state[0, 0].round(4).tolist()
    ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]])
    """
    arrays = dict(
        q=q, k=k, v=v, log_decay=log_decay, beta=beta, initial_state=initial_state, slots=slots
    )
    arrays = dispatch.without_layout(
        arrays | dict(source_indices=source_indices, cu_seqlens=cu_seqlens)
    )
    options = dict(
        scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, out_dtype=out_dtype
    )
    sizes = check(CHUNK_KDA, **arrays, **options)
    dispatch.refuse_what_holds_no_values(CHUNK_KDA, arrays)
    *tensors, pool, slots, sources, cu_seqlens = arrays.values()
    given = {name: x for name, x in arrays.items() if x is not None}
    implementation = dispatch.choose_prefill(
        implementation, sizes, [x.dtype for x in tensors[:3]], given
    )
    out_dtype = jnp.dtype(arrays["v"].dtype if out_dtype is None else out_dtype)
    if 0 in (sizes.B, sizes.T, sizes.N, sizes.S, sizes.V):
        out = jnp.zeros((sizes.B, sizes.T, sizes.HV, sizes.V), out_dtype)
        return out, pools.unchanged(initial_state)
    return kda_chunk(
        *tensors,
        pool,
        pools.as_int32(slots),
        pools.as_int32(sources),
        pools.as_int32(cu_seqlens),
        sizes=sizes,
        scale=float(sizes.K**-0.5 if scale is None else scale),
        use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
        out_dtype=out_dtype,
        implementation=implementation,
    )


@functools.partial(
    jax.jit, static_argnames=("sizes", "scale", "use_qk_l2norm", "out_dtype", "implementation")
)
def kda_chunk(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    log_decay,  # [B, T, HV, K]
    beta,  # [B, T, HV]
    pool,  # [S, HV, V, K], an array or a Ref
    slots,  # [N] int32
    sources=None,  # [N] int32
    cu_seqlens=None,  # [N+1] int32
    *,
    sizes: Sizes,
    scale,
    use_qk_l2norm,
    out_dtype,
    implementation,
):
    """`kda_jax.chunk_kda` after its contract: `(out, pool)`, with None for a Ref, which is updated in place."""
    assert_operands(CHUNK_KDA, sizes, q, k, v, log_decay, beta, pool, slots, sources, cu_seqlens)
    tensors = (q, k, v, log_decay, beta)
    state, slots = pools.opened(pool, slots, *tensors, sources, cu_seqlens)
    live = pools.inside(slots, sizes.S)
    start = pools.read(state, slots, sources).astype(jnp.float32)

    options = dict(sizes=sizes, scale=scale, use_qk_l2norm=use_qk_l2norm, out_dtype=out_dtype)
    chunks_and_states = functools.partial(prefill_xla.chunks_and_states, **options)
    if implementation == "mosaic_gpu":
        from kda_jax import prefill_mosaic_gpu  # a second to load

        kernels = functools.partial(prefill_mosaic_gpu.chunks_and_states, **options)
        chunks_and_states = with_transforms_of(chunks_and_states, kernels)
    out, after = chunks_and_states(*tensors, start, live, cu_seqlens)
    written = True
    if cu_seqlens is not None:
        bounds = jnp.clip(cu_seqlens, 0, sizes.T)
        written = bounds[1:] > bounds[:-1]
    state = pools.write(state, slots, after.astype(state.dtype), where=written)
    return out, pools.closed(pool, state)
