"""Prefill, the public op over long sequences: its contract, the choice, the pool, the chunks."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from kda_contracts import CHUNK_KDA
from kda_jax import call, decode_xla, dispatch, pools, prefill_xla
from kda_jax.call import Array, Implementation, Pool
from kda_jax.transforms import with_transforms_of

# Up to so many tokens a CPU takes them one by one. Two cores, 32 tokens, ms forward / gradient, one
# by one and in a chunk: 6 / 56 and 17 / 141 (B 64, H 2, K 32); 9 / 159 and 21 / 153 (1, 32, 128).
SHORT = 32
STATES = ("states", "changes", "changes_low")  # of what the kernels keep: "kda_states"


def chunk_kda(
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
) -> tuple[jax.Array, jax.Array]:
    """The recurrence of `recurrent_kda` over long sequences, in chunks. It differentiates.

    In XLA in every mode; the kernels in reverse mode, by kernels too.

    Dense: B = N sequences of T tokens. With `cu_seqlens`: B = 1, and N sequences of unequal length
    lie end to end along T; none is padded to the longest. An empty sequence reads and writes
    nothing.

    Args:
      q: `[B, T, H, K]` float; queries.
      k: `[B, T, H, K]` float; keys.
      v: `[B, T, HV, V]` float; values.
      log_decay: `[B, T, HV, K]` float; natural log of the decay per key channel, <= 0, -inf
        included.
      beta: `[B, T, HV]` float; update strength, after the sigmoid.
      pool: `[S, HV, V, K]` float, an array or a `jax.Ref`; the whole pool.
      slots: `[N]` integer; the slot of each sequence, which takes its last state. Outside `[0, S)`:
        a padded one, whose `out` is zero.
      sources: `[N]` integer; None starts each sequence from its own slot. Otherwise from
        this one, and from a zero state where it lies outside `[0, S)`.
      cu_seqlens: None, or `[N+1]` int32 or int64 (`validate_cu_seqlens` checks the values on the
        host).
      scale: factor on q, a static finite number > 0; None is `K**-0.5`.
      use_qk_l2norm_in_kernel: whether q and k are divided by `sqrt(sum(x*x) + 1e-6)` over K first.
      out_dtype: dtype of `out`; None is that of `v`.
      implementation: "auto", "mosaic_gpu" or "xla". "auto" takes the kernels on a GPU of compute
        capability 9.0 where q, k and v are bfloat16, K is 64 or 128, and V a multiple of 64 up to
        256; else XLA. What `vmap` maps is XLA's in any case, but for a derivative under it: a loop
        of kernels. Name "xla" for forward mode (`jax.jvp`) and derivatives of derivatives, which
        the kernels do not have, and where no kernel can be: in a program for several platforms or
        for a CPU beside that GPU, and in one that the partitioner cuts (inside `jax.shard_map` the
        kernels run). Where the default backend is a CPU, XLA takes up to 32 tokens one by one, as
        `recurrent_kda` does.

    Returns:
      out: `[B, T, HV, V]`.
      state: `[S, HV, V, K]`, the updated pool, rounded once, after the last token; None if a Ref
        came in.

    Effects:
      As `packed_decode`: the pool is updated in place where it is donated inside `jit`, or a Ref.
      Memory is linear in T. A value that is not finite poisons its chunk of 64 tokens, those before
      it too. float32 operands are multiplied in full float32; narrower ones with a GPU's default
      for float32 (TF32). The kernels multiply bfloat16, sum in float32, hold the state in float32,
      and round log decays to float16 (weaker than 2e-8 a token: to 0). Their derivative keeps
      what `jax.checkpoint` may recompute, 1 kB for a token and head with K = V = 128 under each of
      the names "kda_chunks" and "kda_states" (`jax.ad_checkpoint.checkpoint_name`). A beta of 0
      has its derivative to within 2**-100.

    Raises:
      ContractError, TypeError, NotImplementedError: as `packed_decode`. TypeError: JAX's own, of a
      `custom_vjp`, for the kernels in forward mode.

    Source: the chunked form of the Kimi Linear paper; FLA's `chunk_kda`, with V before K in the
    state.

    >>> import jax.numpy as jnp
    >>> q, k = jnp.array([[[[3.0, 4.0]]]]), jnp.array([[[[0.0, 2.0]]]])
    >>> v, log_decay = jnp.array([[[[1.0, -1.0]]]]), jnp.full((1, 1, 1, 2), -jnp.log(2.0))
    >>> pool = jnp.array([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> beta, slots = jnp.full((1, 1, 1), 0.5), jnp.array([0])
    >>> out, state = chunk_kda(q, k, v, log_decay, beta, pool, slots, scale=1.0)
    >>> out.ravel().round(4).tolist(), state[0, 0].round(4).tolist()
    ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]])
    """
    arrays = dict(
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        pool=pool,
        slots=slots,
        sources=sources,
        cu_seqlens=cu_seqlens,
    )
    options = dict(scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    arrays, sizes = call.taken(CHUNK_KDA, arrays, **options, out_dtype=out_dtype)
    choice = dispatch.choose(CHUNK_KDA, implementation, sizes, arrays)
    if call.is_cut(arrays):
        again = functools.partial(
            chunk_kda, **options, out_dtype=out_dtype, implementation=choice.name
        )
        specs = call.result_cuts(CHUNK_KDA, arrays)
        return call.in_auto_axes(again, CHUNK_KDA.name, arrays, specs)
    pool = arrays["pool"]
    static = call.Static(
        op="kda_chunk",
        sizes=sizes,
        maths=call.maths_of(sizes.K, activated=True, **options),
        out_dtype=jnp.dtype(arrays["v"].dtype if out_dtype is None else out_dtype),
    )
    if static.empty:
        return call.nothing(static, pool)
    operands = call.Operands(
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        a=arrays["log_decay"],
        b=arrays["beta"],
        pool=pool,
        slots=pools.as_int32(arrays["slots"]),
        sources=pools.as_int32(arrays["sources"]),
        cu_seqlens=pools.as_int32(arrays["cu_seqlens"]),
    )
    run = kda_tokens_xla if _is_short(sizes.T) else kda_chunk_xla
    run = kda_chunk_mosaic_gpu if choice.name == "mosaic_gpu" else run
    return run(operands, static=static)


def _is_short(T):
    """Whether XLA takes the tokens one by one: as far as JAX shows it, the program is for a CPU."""
    return isinstance(T, int) and T <= SHORT and jax.default_backend() == "cpu"


def _in_xla(operands, *, static):
    return _over_pool(operands, static, prefill_xla.chunks_and_states)


def _token_by_token(operands, *, static):
    return _over_pool(operands, static, decode_xla.tokens_and_states)


def _in_kernels(operands, *, static):
    # A second to load.
    from kda_jax import prefill_grad_mosaic_gpu, prefill_mosaic_gpu

    plain, kernels, keeping = (
        functools.partial(function, static=static)
        for function in (
            prefill_xla.chunks_and_states,
            prefill_mosaic_gpu.chunks_and_states,
            prefill_mosaic_gpu.with_residuals,
        )
    )
    gradients = functools.partial(prefill_grad_mosaic_gpu.gradients, static=static)

    def forward(*x):
        results, kept = keeping(*x)
        *tensors, _, live, cu_seqlens = x
        return results, (tensors, live, cu_seqlens, kept)

    def backward(saved, cotangents):
        return *gradients(*saved, *cotangents), None, None  # live and cu_seqlens have none

    def named(saved):
        *others, kept = saved
        kept = {
            name: checkpoint_name(y, "kda_states" if name in STATES else "kda_chunks")
            for name, y in kept._asdict().items()
        }
        return *others, prefill_mosaic_gpu.Kept(**kept)

    run = with_transforms_of(plain, kernels, forward, backward, named)
    return _over_pool(operands, static, lambda *x, static: run(*x))


def _over_pool(operands, static, chunks_and_states):
    """`(out, pool)`, with None for a Ref, which is updated in place."""
    x, S, T = operands, static.sizes.S, static.sizes.T
    tensors = (x.q, x.k, x.v, x.a, x.b)
    state, slots = pools.opened(x.pool, x.slots, *tensors, x.sources, x.cu_seqlens)
    live = pools.inside(slots, S)
    start = pools.read(state, slots, x.sources).astype(jnp.float32)
    out, after = chunks_and_states(*tensors, start, live, x.cu_seqlens, static=static)
    holds_tokens = True
    if x.cu_seqlens is not None:
        bounds = jnp.clip(x.cu_seqlens, 0, T)
        holds_tokens = bounds[1:] > bounds[:-1]
    state = pools.write(state, slots, after.astype(state.dtype), where=holds_tokens)
    return out, pools.closed(x.pool, state)


kda_chunk_xla = call.implementation(_in_xla, "kda_chunk_xla")
kda_tokens_xla = call.implementation(_token_by_token, "kda_tokens_xla")
kda_chunk_mosaic_gpu = call.implementation(_in_kernels, "kda_chunk_mosaic_gpu")
