"""Prefill, the public op over long sequences: its contract, the choice, its implementations."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from kda_contracts import CHUNK_KDA
from kda_jax import call, decode_xla, dispatch, pools, prefill_xla
from kda_jax.call import Array, Implementation, Pool
from kda_jax.prefill_pool import ARRAYS, on_arrays, over_pool, put_among, short_and_long
from kda_jax.sequences import bounded, owners
from kda_jax.transforms import (
    in_xla_under_vmap,
    inference_only,
    with_derivative_of,
    with_transforms_of,
)

# Rows of up to so many tokens a CPU takes one by one. Two cores, 32 tokens, ms forward / gradient:
# 6 / 56 and in a chunk 17 / 141 (B 64, H 2, K 32); 9 / 159 and 21 / 153 (B 1, H 32, K 128).
SHORT = 32
# Of sequences that lie end to end, those of up to FEW tokens are taken one by one: on a CPU, and on
# other devices, in the kernels too. XLA takes some ROWS of them at a time: more where a step of the
# loop costs its launches.
FEW = {"cpu": 64, "other": 16}
ROWS = {"cpu": 8, "other": 64}
TENSORS = 6  # q, k, v, log decay, beta and the start or pool: what may have a derivative
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
    checkpoints: Array | None = None,
    checkpoint_every: int | None = None,
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
      checkpoints: None, or `[N, M]` integer; the slot in column m takes the state after
        `(m + 1) * checkpoint_every` tokens of the sequence in this call. Outside `[0, S)`, or where
        the sequence is shorter: not kept. No slot of the call may be among them, as a source
        neither (`validate_slots` finds it).
      checkpoint_every: with `checkpoints`, a static multiple of 64.
      scale: factor on q, a static finite number > 0; None is `K**-0.5`.
      use_qk_l2norm_in_kernel: whether q and k are divided by `sqrt(sum(x*x) + 1e-6)` over K first.
      out_dtype: dtype of `out`; None is that of `v`.
      implementation: "auto", "mosaic_gpu" or "xla". "auto" takes the kernels on a GPU of compute
        capability 9.0 where q, k and v are bfloat16, K is 64 or 128, and V a multiple of 64 up to
        256; else XLA. What `vmap` maps is XLA's in any case, but for a derivative under it: a loop
        of kernels. Name "xla" for forward mode (`jax.jvp`) and derivatives of derivatives, which
        the kernels do not have, and where no kernel can be: in a program for several platforms or
        for a CPU beside that GPU, and in one that the partitioner cuts (inside `jax.shard_map` the
        kernels run). Short sequences are taken one token after the other, as `recurrent_kda` does:
        with `cu_seqlens`, those of up to 16 tokens, in the kernels by that of decode; on a CPU
        those of up to 64, and rows of up to 32. Their derivative is that of the chunks.

    Returns:
      out: `[B, T, HV, V]`.
      state: `[S, HV, V, K]`, the updated pool, rounded once, after the last token (short sequences
        in the kernels: after every token); None if a Ref came in.

    Effects:
      As `packed_decode`: the pool is updated in place where it is donated inside `jit`, or a Ref.
      In a float32 pool a sequence that goes on from a checkpoint has the bits of the unbroken one:
      in XLA on a CPU where what is left has more than 64 tokens; in the kernels where it has more
      than 16, and both begin at the same number of tokens modulo 8. Memory is linear in T, whatever
      N and the pool are, and so is the number of states that are copied: those of the sequences
      that are not short. A value that is not finite poisons its chunk of 64 tokens, those before it
      too. float32 operands are multiplied in full float32; narrower ones with a GPU's default for
      float32 (TF32). The kernels multiply bfloat16, sum in float32, hold the state in float32, and
      round log decays to float16 (weaker than 2e-8 a token: to 0). Their derivative keeps what
      `jax.checkpoint` may recompute, 1 kB for a token and head with K = V = 128 under each of the
      names "kda_chunks" and "kda_states" (`jax.ad_checkpoint.checkpoint_name`), and takes room for
      about 70 tokens more a sequence. A beta of 0 has its derivative to within 2**-100.

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
        checkpoints=checkpoints,
    )
    options = dict(scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    others = dict(out_dtype=out_dtype, checkpoint_every=checkpoint_every)
    arrays, sizes = call.taken(CHUNK_KDA, arrays, **options, **others)
    choice = dispatch.choose(CHUNK_KDA, implementation, sizes, arrays)
    if call.is_cut(arrays):
        again = functools.partial(chunk_kda, **options, **others, implementation=choice.name)
        specs = call.result_cuts(CHUNK_KDA, arrays)
        return call.in_auto_axes(again, CHUNK_KDA.name, arrays, specs)
    pool = arrays["pool"]
    static = call.Static(
        op="kda_chunk",
        sizes=sizes,
        maths=call.maths_of(sizes.K, activated=True, **options),
        out_dtype=jnp.dtype(arrays["v"].dtype if out_dtype is None else out_dtype),
        every=None if checkpoint_every is None else operator.index(checkpoint_every),
    )
    if static.empty:
        return call.nothing(static, pool)
    cu_seqlens = pools.as_int32(arrays["cu_seqlens"])
    if cu_seqlens is not None:
        cu_seqlens = bounded(cu_seqlens, sizes.T)
    operands = call.Operands(
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        a=arrays["log_decay"],
        b=arrays["beta"],
        pool=pool,
        slots=pools.as_int32(arrays["slots"]),
        sources=pools.as_int32(arrays["sources"]),
        cu_seqlens=cu_seqlens,
        checkpoints=pools.as_int32(arrays["checkpoints"]),
    )
    run = kda_chunk_xla
    if choice.name == "mosaic_gpu":
        run = kda_chunk_mosaic_gpu
    elif operands.cu_seqlens is None and operands.checkpoints is None and _is_short(sizes.T):
        run = kda_tokens_xla
    return run(operands, static=static)


def _is_short(T):
    """Whether XLA takes rows token by token: as far as JAX shows it, the program is for a CPU."""
    return isinstance(T, int) and T <= SHORT and jax.default_backend() == "cpu"


def _token_by_token(operands, *, static):
    def rows(*operands, every):
        return *decode_xla.tokens_and_states(*operands[:-1], static=static), None

    return over_pool(operands, static, rows)


def _in_xla(operands, *, static):
    if operands.cu_seqlens is None:
        return over_pool(operands, static, functools.partial(_chunks, static=static))
    return on_arrays(operands, functools.partial(_apart_in_xla, static))


def _chunks(*operands, every, static):
    """`(out, after, kept)` in XLA, with None for what is not kept."""
    results = prefill_xla.chunks_and_states(*operands, static=static, every=every)
    return results if every else (*results, None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apart_in_xla(static, *operands):
    device = "cpu" if jax.default_backend() == "cpu" else "other"
    few_tokens = functools.partial(decode_xla.few_tokens, static=static, rows=ROWS[device])
    many_tokens = functools.partial(
        put_among, static=static, chunks_and_states=functools.partial(_chunks, static=static)
    )
    return short_and_long(
        operands, static, few=FEW[device], few_tokens=few_tokens, many_tokens=many_tokens
    )


@_apart_in_xla.defjvp
def _derivative_of_chunks(static, operands, tangents):
    """That of the chunks, of all sequences: the loops over few tokens have none."""
    floats, rest = operands[:TENSORS], operands[TENSORS:]
    return jax.jvp(
        lambda *floats: _whole_in_xla(static, *floats, *rest), floats, tangents[:TENSORS]
    )


def _whole_in_xla(static, *operands):
    return _whole(static, functools.partial(_chunks, static=static), *operands)


def _whole(static, chunks, *operands):
    """`(out, pool)` of all sequences alike, whether they are short or long."""
    return over_pool(_by_name(operands), static, chunks)


def _by_name(operands):
    return call.Operands(**dict(zip(ARRAYS, operands, strict=True)))


def _in_kernels(operands, *, static):
    in_xla, by_kernels = (
        (_whole_in_xla, _rows_in_kernels)
        if operands.cu_seqlens is None
        else (_apart_in_xla, _apart_in_kernels)
    )
    kernels = in_xla_under_vmap(
        functools.partial(in_xla, static), functools.partial(by_kernels, static)
    )

    def run(*x):
        if static.every is not None:
            return kernels(*map(inference_only, x[:TENSORS]), *x[TENSORS:])
        whole = functools.partial(_whole, static, _differentiable_chunks(static))
        return with_derivative_of(whole, kernels, TENSORS, len(ARRAYS) - TENSORS)(*x)

    return on_arrays(operands, run)


def _differentiable_chunks(static):
    """As `over_pool` takes it, by kernels forwards and back."""
    # A second to load.
    from kda_jax import prefill_grad_mosaic_gpu, prefill_mosaic_gpu

    plain = functools.partial(prefill_xla.chunks_and_states, static=static)
    keeping = functools.partial(prefill_mosaic_gpu.with_residuals, static=static)
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

    run = with_transforms_of(plain, lambda *x: keeping(*x)[0], forward, backward, named)
    return lambda *x, every: (*run(*x), None)


def _rows_in_kernels(static, *operands):
    from kda_jax import prefill_mosaic_gpu

    return prefill_mosaic_gpu.over_pool(_by_name(operands), static=static)


def _apart_in_kernels(static, *operands):
    """`(out, pool)`: sequences of few tokens by the decode kernel, the others by those of chunks.

    Neither looks at the tokens of the other.
    """
    from kda_jax import decode_mosaic_gpu, prefill_mosaic_gpu

    cu_seqlens, T = _by_name(operands).cu_seqlens, static.sizes.T

    def few_tokens(tensors, state, slots, sources, begins, lengths):
        q, k, v, a, b = tensors
        few = call.Operands(
            q=q,
            k=k,
            v=v,
            a=a.astype(jnp.float32),
            b=b,
            pool=state,
            slots=jnp.where(lengths > 0, slots, -1),
            sources=sources,
            cu_seqlens=cu_seqlens,
        )
        own = dataclasses.replace(static, op="kda_update", every=None, clears=False)
        return decode_mosaic_gpu.kda_update_mosaic_gpu(few, static=own)[:2]

    many_tokens = functools.partial(prefill_mosaic_gpu.over_pool, static=static)
    out, state = short_and_long(
        operands,
        static,
        few=FEW["other"],
        few_tokens=few_tokens,
        many_tokens=many_tokens,
        least=2,
    )
    live = pools.inside(_by_name(operands).slots, static.sizes.S)
    held = jnp.append(live, False)[owners(cu_seqlens, T)]
    return jnp.where(held[None, :, None, None], out, jnp.zeros((), out.dtype)), state


kda_chunk_xla = call.implementation(_in_xla, "kda_chunk_xla")
kda_tokens_xla = call.implementation(_token_by_token, "kda_tokens_xla")
kda_chunk_mosaic_gpu = call.implementation(_in_kernels, "kda_chunk_mosaic_gpu")
