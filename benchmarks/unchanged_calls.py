"""The calls that unchanged.py compares: every op in every form that has a program of its own.

A list, and as long as there are forms.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from unchanged_operands import activated, normal, packed, slots_of, unpacked

BOTH = ("mosaic_gpu", "triton")
LENGTHS = (4, 0, 1, 3, 2)


@dataclass(frozen=True)
class Call:
    """`run(implementation, *arrays)` gives a tree of arrays.

    kernels: the implementations besides "xla" that can run it. interpret, lowered: whether these
    parts take it. donate: places of donated arrays. refs: places of arrays that come as a jax.Ref.
    eager: called without jit, on NumPy arrays. x64: in 64-bit mode. xla: False for a form whose XLA
    program takes long to compile, and has its like among the others.
    """

    name: str
    run: Callable
    arrays: tuple
    kernels: tuple = ()
    interpret: bool = False
    lowered: bool = False
    donate: tuple = ()
    refs: tuple = ()
    eager: bool = False
    x64: bool = False
    xla: bool = True


def make_calls(kda):
    """All calls, of these names."""
    calls = [
        *_packed_calls(kda.packed_decode),
        *_update_calls(kda.fused_sigmoid_gating_kda_update),
        *_recurrent_calls(kda.recurrent_kda),
        *_chunk_calls(kda.chunk_kda),
        *_small_calls(kda),
        *_layer_calls(kda),
    ]
    assert len({call.name for call in calls}) == len(calls), "two calls share a name"
    return calls


def _in_jit(op, place):
    """The op, whose pool becomes a jax.Ref inside jit."""

    def run(*args, **options):
        ref = jax.new_ref(args[place])
        return op(*args[:place], ref, *args[place + 1 :], **options), jax.freeze(ref)

    return run


def _packed_calls(op):
    def call(name, arrays=None, op=op, kernels=BOTH, options=None, more=None, **form):
        more = more or {}

        def run(implementation, *arrays):
            rest = dict(zip(more, arrays[7:], strict=True))
            return op(*arrays[:7], **rest, **(options or {}), implementation=implementation)

        arrays = arrays or packed(seed=name)
        return Call(f"packed_decode, {name}", run, (*arrays, *more.values()), kernels, **form)

    l2 = dict(use_qk_l2norm_in_kernel=True)
    safe = l2 | dict(lower_bound=-5.0)
    # An out in bfloat16 hides what was rounded once more on the way.
    exact = l2 | dict(out_dtype="float32")
    sources = np.array([6, 0, -1, 7, 2], np.int32)
    seen = dict(interpret=True, lowered=True)
    yield call("softplus", **seen)
    yield call("l2norm", options=exact, lowered=True)
    yield call("safe gate", options=safe, **seen)
    yield call("sources", options=exact, more=dict(source_indices=sources), **seen)
    yield call("bfloat16 pool", packed(pool="bfloat16"), options=l2, **seen)
    narrow = packed(dtype="float16", pool="float16", gates="bfloat16")
    yield call("float16, narrow gates", narrow, options=safe, **seen)
    wide = packed(dtype="float32", B=3, H=3, HV=3, K=64, V=32, S=5)
    yield call("float32, out in bfloat16", wide, options=l2 | dict(out_dtype="bfloat16"), **seen)
    odd = packed(B=3, H=1, HV=3, K=40, V=24, S=4)
    yield call("K=40, scale", odd, kernels=("triton",), options=exact | dict(scale=0.5))
    yield call("fewer slots than rows", packed(B=6, HV=2, K=64, V=48, S=3), lowered=True)
    yield call("a Ref", refs=(5,), options=l2)
    yield call("a Ref inside jit", op=_in_jit(op, 5), options=l2, interpret=True, lowered=True)
    yield call("donated", donate=(5,), options=safe)
    yield call("int64 NumPy, eager", (*packed()[:6], packed()[6].astype(np.int64)), eager=True)
    too_large = np.array([3, 2**32, 0, -1, 6])
    yield call("int64 in 64-bit mode", (*packed()[:6], too_large), x64=True, options=safe)
    yield call("int8 slots", (*packed()[:6], packed()[6].astype(np.int8)), lowered=True)
    yield call("no rows", packed(B=0), kernels=())

    def mapped(pool_axis):
        def run(*args, **options):
            axes = (0, 0, 0, None, None, pool_axis, 0)
            return jax.vmap(lambda *x: op(*x, **options), in_axes=axes)(*args)

        return run

    twice = [np.stack([x, y]) for x, y in zip(packed(), packed(seed="two"), strict=True)]
    twice[3:5] = packed()[3:5]
    yield call("vmap", tuple(twice), op=mapped(0), lowered=True)
    shared = (*twice[:5], packed()[5], twice[6])
    yield call("vmap, one pool for all", shared, op=mapped(None), lowered=True)

    def steps(*args, **options):
        def step(_, carry):
            out, pool = op(*args[:5], carry[1], args[6], **options)
            return carry[0] + out, pool

        B, HV, V = args[0].shape[0], *args[5].shape[1:3]
        start = jnp.zeros((B, 1, HV, V), args[0].dtype), args[5]
        return jax.lax.fori_loop(0, 3, step, start)

    yield call("a loop of steps", op=steps, donate=(5,), options=safe, lowered=True)
    # As many states as choose each of the kernels' tiles.
    for B, HV in ((3, 4), (8, 12), (16, 12)):
        for pool in ("float32", "bfloat16"):
            arrays = packed(B=B, H=HV, HV=HV, K=128, V=128, S=B + 3, pool=pool)
            name = f"K=V=128, {B} x {HV}, {pool}"
            yield call(name, arrays, options=exact, lowered=True)
    for K, V in ((96, 48), (128, 96), (256, 48)):
        yield call(f"K={K}, V={V}", packed(B=2, HV=2, K=K, V=V, S=4), options=exact, lowered=True)


def _update_calls(op):
    def call(name, operands=None, op=op, kernels=BOTH, options=None, more=None, **form):
        arrays, cu_seqlens = operands or unpacked()
        more = (more or {}) | ({} if cu_seqlens is None else dict(cu_seqlens=cu_seqlens))

        def run(implementation, *arrays):
            rest = dict(zip(more, arrays[9:], strict=True))
            return op(*arrays[:9], **rest, **(options or {}), implementation=implementation)

        return Call(f"update, {name}", run, (*arrays, *more.values()), kernels, **form)

    safe = dict(lower_bound=-5.0)
    varlen = unpacked(lengths=LENGTHS, K=64, V=32)
    seen = dict(interpret=True, lowered=True)
    # Slots of the drafts: three tokens of four sequences, in a pool with room for them; some are
    # not kept. For varlen: eleven tokens.
    drafts = np.arange(7, 19, dtype=np.int32).reshape(4, 3)
    drafts[2, 1], drafts[0, 2] = -1, 99
    accepted = np.array([1, 0, 3, 2], np.int32)
    roomy = unpacked(S=20)
    roomy = ((*roomy[0][:8], np.array([3, -1, 0, 6], np.int32)), None)
    packed_drafts = np.arange(7, 18, dtype=np.int32)[None]
    roomy_varlen = unpacked(lengths=LENGTHS, S=20)
    own = np.array([3, -1, 0, 6, 2], np.int32)
    roomy_varlen = ((*roomy_varlen[0][:8], own), roomy_varlen[1])
    yield call("softplus", **seen)
    yield call("safe gate, no l2norm", options=safe | dict(use_qk_l2norm_in_kernel=False), **seen)
    yield call("varlen", varlen, options=dict(out_dtype="float32"), **seen)
    yield call("varlen, one token each", unpacked(lengths=(1, 1, 1)), lowered=True)
    yield call("one token", unpacked(T=1, HV=2), lowered=True)
    yield call("intermediate states", options=dict(intermediate_states=True), **seen)
    kept = dict(intermediate_states=True, update_state=False)
    yield call("varlen, intermediate, pool left alone", varlen, options=kept, **seen)
    yield call("drafts", roomy, more=dict(intermediate_states=drafts), lowered=True)
    both = dict(intermediate_states=drafts, num_accepted_tokens=accepted)
    yield call("drafts, accepted", roomy, more=both, options=dict(update_state=False), **seen)
    more = dict(intermediate_states=packed_drafts, num_accepted_tokens=own * 0 + 1)
    yield call("varlen, drafts, accepted", roomy_varlen, more=more, options=safe, **seen)
    yield call("pool left alone", options=dict(update_state=False), lowered=True)
    flat = unpacked()[0]
    yield call("flat pool", ((*flat[:7], flat[7].reshape(-1), flat[8]), None), donate=(7,))
    beta = dict(softplus_beta=0.5, softplus_threshold=1.0, allow_neg_eigval=True)
    yield call("softplus_beta, threshold, negative eigenvalues", options=beta, **seen)
    bare = dict(lower_bound=-4.0)
    yield call("no A_log, no dt_bias", ((None, None, *flat[2:]), None), options=bare, lowered=True)
    shaped = (flat[0].reshape(1, 1, 4, 1), flat[1].reshape(4, 32), *flat[2:5])
    shaped = (*shaped, flat[5].reshape(4, 3, 4, 32), *flat[6:])
    yield call("gates in other shapes", (shaped, None), options=dict(scale=0.25))
    narrow = unpacked(dtype="float16", pool="bfloat16", T=2)
    yield call("float16, bfloat16 pool", narrow, options=dict(out_dtype="float32"), **seen)
    odd = unpacked(B=3, T=2, H=1, HV=3, K=40, V=24, S=4, dtype="float32", pool="float16")
    yield call("K=40, float16 pool", odd, kernels=("triton",))
    yield call("a Ref", refs=(7,))
    yield call("a Ref inside jit", op=_in_jit(op, 7), lowered=True)
    yield call("donated, varlen", varlen, donate=(7,), options=safe)
    wide = (*flat[:8], flat[8].astype(np.int64))
    yield call("int64 NumPy, eager", (wide, None), eager=True)
    yield call("int64 in 64-bit mode", (wide, None), x64=True)

    def mapped(*args, **options):
        axes = (None, None, *(0,) * 7)
        return jax.vmap(lambda *x: op(*x, **options), in_axes=axes)(*args)

    twice = (*flat[:2], *(np.stack([x, x[::-1]]) for x in flat[2:]))
    yield call("vmap", (twice, None), op=mapped)
    for pool in ("float32", "bfloat16"):
        whole = unpacked(B=6, T=4, H=4, HV=4, K=128, V=128, S=9, pool=pool)
        yield call(f"K=V=128, T=4, {pool}", whole, options=dict(out_dtype="float32"), lowered=True)
    yield call("K=V=128, varlen", unpacked(lengths=(5, 1, 9), HV=2, K=128, V=128), lowered=True)


def _scores(results):
    """A scalar that every result moves, each element by a weight of its own."""
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(results)]
    return sum((x * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum() for x in leaves)


def _gradient(op, places):
    def run(*args, **options):
        floats = [args[place] for place in places]

        def score(floats):
            given = list(args)
            for place, x in zip(places, floats, strict=True):
                given[place] = x
            return _scores(op(*given, **options))

        return jax.value_and_grad(score)(floats)

    return run


def _activated_call(op_name, default):
    """A maker of calls of recurrent_kda or chunk_kda, which take the same seven operands."""

    def call(name, operands=None, op=default, kernels=(), options=None, more=None, **form):
        arrays, cu_seqlens = operands or activated(T=3 if op_name == "recurrent_kda" else 70)
        more = (more or {}) | ({} if cu_seqlens is None else dict(cu_seqlens=cu_seqlens))

        def run(implementation, *arrays):
            rest = dict(zip(more, arrays[7:], strict=True))
            return op(*arrays[:7], **rest, **(options or {}), implementation=implementation)

        return Call(f"{op_name}, {name}", run, (*arrays, *more.values()), kernels, **form)

    return call


def _recurrent_calls(op):
    call = _activated_call("recurrent_kda", op)
    fits = activated(B=3, T=3, V=16, S=5, dtype="bfloat16")
    varlen = activated(lengths=LENGTHS, K=64, V=32, S=7)
    yield call("dense", fits, kernels=BOTH, interpret=True, lowered=True)
    yield call("varlen", varlen, kernels=BOTH, interpret=True, lowered=True)
    seen = dict(use_qk_l2norm_in_kernel=True, scale=0.3, intermediate_states=True)
    yield call("l2norm, scale, intermediate", options=seen, kernels=("triton",))
    narrow = fits[0]
    narrow = (*narrow[:3], *(x.astype(jnp.dtype("bfloat16")) for x in narrow[3:6]), narrow[6])
    yield call("bfloat16 throughout", (narrow, None), kernels=BOTH, lowered=True)
    yield call("a Ref inside jit", fits, op=_in_jit(op, 5), kernels=BOTH)
    yield call("grad", op=_gradient(op, (0, 1, 2, 3, 4, 5)))
    yield call("grad, varlen", varlen, op=_gradient(op, (0, 1, 2, 3, 4, 5)))


def _chunk_calls(op):
    call = _activated_call("chunk_kda", op)
    varlen = activated(lengths=(70, 0, 1, 130, 20), S=7)
    floats = (0, 1, 2, 3, 4, 5)
    l2 = dict(use_qk_l2norm_in_kernel=True)
    yield call("dense")
    yield call("less than a chunk, l2norm, scale", activated(T=9), options=l2 | dict(scale=0.3))
    yield call("varlen", varlen)
    sources = np.array([2, 0, 1, -1, 6], np.int32)
    yield call("varlen, sources", varlen, more=dict(source_indices=sources), options=l2)
    narrow = activated(B=4, T=130, dtype="bfloat16", pool="float16")
    yield call("bfloat16, float16 pool, padded rows", narrow, options=dict(out_dtype="float32"))
    strong = activated(T=100, decay=1e37)
    yield call("no memory at all", strong)
    yield call("a Ref", refs=(5,))
    yield call("a Ref inside jit", varlen, op=_in_jit(op, 5))
    yield call("donated", varlen, donate=(5,), options=l2)
    plain = activated()[0]
    wide = (*plain[:6], plain[6].astype(np.int64))
    yield call("int64 NumPy, eager", (wide, None), eager=True)
    yield call("int64 in 64-bit mode", (wide, None), x64=True)
    yield call("grad", op=_gradient(op, floats))
    yield call("grad, varlen, l2norm", varlen, op=_gradient(op, floats), options=l2)

    def mapped(*args, **options):
        return jax.vmap(lambda *x: op(*x, **options))(*args)

    yield call("vmap", (tuple(np.stack([x, x[::-1]]) for x in plain), None), op=mapped)
    big = dict(kernels=("mosaic_gpu",), lowered=True, xla=False)
    for K, V in ((128, 128), (64, 192)):
        dense = activated(B=2, T=300, K=K, V=V, dtype="bfloat16")
        ends = activated(lengths=(70, 0, 1, 130), K=K, V=V, dtype="bfloat16")
        yield call(f"K={K}, V={V}", dense, options=l2 | dict(out_dtype="float32"), **big)
        yield call(f"K={K}, V={V}, varlen", ends, more=dict(source_indices=sources[:4]), **big)
    # Derivatives are XLA's: what is lowered for them holds no kernel.
    big["lowered"] = False
    yield call("K=64, V=192, grad", dense, op=_gradient(op, floats), **big)


def _small_calls(kda):
    """commit, the short convolution, the gated norm, slots and layouts."""

    def call(name, op, *arrays, **form):
        return Call(name, lambda _, *arrays: op(*arrays), arrays, **form)

    rng = np.random.default_rng(7)
    pool, states = normal(rng, 6, 2, 5, 8), normal(rng, 3, 4, 2, 5, 8)
    slots, accepted = np.array([4, -1, 0], np.int32), np.array([2, 1, 4], np.int32)
    ends = np.array([0, 5, 5, 12], np.int32)
    kept = normal(rng, 1, 12, 2, 5, 8)

    def commit_varlen(pool, states, slots, accepted, ends):
        return kda.commit(pool, states, slots, accepted, cu_seqlens=ends)

    yield call("commit, dense", kda.commit, pool, states, slots, accepted)
    yield call("commit, varlen", commit_varlen, pool, kept, np.abs(slots), accepted, ends)
    half = pool.astype(jnp.dtype("bfloat16"))
    yield call("commit, bfloat16, donated", kda.commit, half, states, slots, accepted, donate=(0,))
    yield call("commit, a Ref", kda.commit, pool, states, slots, accepted, refs=(0,))

    x, weight, window = normal(rng, 5, 12), normal(rng, 12, 4), normal(rng, 7, 12, 3)
    rows = np.array([3, -1, 0, 7, 6], np.int32)
    x[[1, 3]] = np.nan
    bf16 = jnp.dtype("bfloat16")
    low = x.astype(bf16), weight.astype(bf16), window.astype(bf16)
    yield call("conv_decode, float32", kda.conv_decode, x, weight, window, rows)
    yield call("conv_decode, bfloat16, donated", kda.conv_decode, *low, rows, donate=(2,))
    yield call("conv_decode, a Ref", kda.conv_decode, x, weight, window, rows, refs=(2,))
    eager = x, weight, window, rows.astype(np.int64)
    yield call("conv_decode, int64, eager", kda.conv_decode, *eager, eager=True)
    x = normal(rng, 13, 12)
    ends, own = np.array([0, 2, 2, 9, 12], np.int32), np.array([5, 1, -1, 0], np.int32)
    low, sources = x.astype(bf16), np.array([5, 1, 2, -1], np.int32)
    arrays = x, weight, window, own, ends
    yield call("conv_prefill, varlen", kda.conv_prefill, *arrays)
    arrays = low, weight, window.astype(bf16), own, ends, sources
    yield call("conv_prefill, sources, bfloat16", kda.conv_prefill, *arrays, donate=(2,))
    yield call("conv_prefill, a Ref", kda.conv_prefill, x, weight, window, own, ends, refs=(2,))
    gradient = _gradient(kda.conv_prefill, (0, 1, 2))
    yield call("conv_prefill, grad", gradient, x, weight, window, np.abs(own), ends)

    x, gate, weight = normal(rng, 3, 4, 24), normal(rng, 3, 4, 24), normal(rng, 24)
    yield call("gated_rms_norm, float32", kda.gated_rms_norm, x, gate, weight)
    low = x.astype(bf16), gate.astype(bf16), weight.astype(bf16)
    yield call("gated_rms_norm, bfloat16", lambda *x: kda.gated_rms_norm(*x, 1e-3), *low)
    yield call("gated_rms_norm, grad", _gradient(kda.gated_rms_norm, (0, 1, 2)), x, gate, weight)

    freed = np.array([2, -1, 5, 2, 9], np.int32)
    yield call("clear_slots, donated", kda.clear_slots, pool, freed, donate=(0,))
    yield call("clear_slots, bfloat16", kda.clear_slots, half, freed)
    yield call("clear_slots, a Ref", kda.clear_slots, pool, freed, refs=(0,))
    yield call("state_from_kv", kda.state_from_kv, pool)
    yield call("state_to_kv", kda.state_to_kv, half)


def _layer_calls(kda):
    def layer(dtype="bfloat16", **sizes):
        sizes = dict(D=24, H=2, HV=4, K=32, V=16, gate_rank=16) | sizes
        config = kda.KDAConfig(**sizes)
        rng = np.random.default_rng(11)
        shape = jax.eval_shape(lambda: kda.init_params(config, jax.random.key(0)))
        scale = np.float32(0.2)
        params = jax.tree.map(lambda x: normal(rng, *x.shape, dtype=dtype) * scale, shape)
        cache = jax.eval_shape(lambda: kda.init_cache(config, 7, conv_dtype=jnp.bfloat16))
        cache = jax.tree.map(lambda x: normal(rng, *x.shape).astype(x.dtype), cache)
        return config, params, cache, rng

    def decode(name, B=5, wrap=lambda op: op, dtype="bfloat16", kernels=(), sizes=None, **form):
        config, params, cache, rng = layer(**(sizes or {}))
        x, slots = normal(rng, B, config.D, dtype=dtype), slots_of(rng, B, 7)

        def run(implementation, params, x, cache, slots):
            def op(cache):
                return kda.kda_decode(
                    params, x, cache, slots, config=config, implementation=implementation
                )

            return wrap(op)(cache)

        return Call(f"kda_decode, {name}", run, (params, x, cache, slots), kernels, **form)

    def prefill(name, fresh=None, wrap=lambda op: op, dtype="bfloat16", sizes=None, **form):
        config, params, cache, rng = layer(**(sizes or {}))
        ends = np.array([0, 70, 70, 80, 150], np.int32)
        slots, x = np.array([5, 1, -1, 0], np.int32), normal(rng, 151, config.D, dtype=dtype)

        def run(implementation, params, x, cache, slots, ends, *fresh):
            def op(params, x, cache):
                options = dict(config=config, fresh=fresh[0]) if fresh else dict(config=config)
                return kda.kda_prefill(
                    params, x, cache, slots, ends, implementation=implementation, **options
                )

            return wrap(op)(params, x, cache)

        given = () if fresh is None else (np.array(fresh),)
        return Call(f"kda_prefill, {name}", run, (params, x, cache, slots, ends, *given), **form)

    def with_refs(op):
        def run(cache):
            refs = jax.tree.map(jax.new_ref, cache)
            return op(refs), jax.tree.map(jax.freeze, refs)

        return run

    safe = dict(lower_bound=-5.0, gate_rank=None)
    seen = dict(kernels=BOTH, lowered=True)
    yield decode("softplus", **seen)
    yield decode("safe gate, full output gate, donated", B=9, donate=(2,), sizes=safe, **seen)
    yield decode("float32", dtype="float32", kernels=BOTH, sizes=dict(dtype="float32"))
    yield decode("one row", B=1, **seen)
    yield decode("Refs", wrap=with_refs, kernels=BOTH)
    yield prefill("varlen", kernels=())
    yield prefill("fresh, safe gate, donated", [True, False, False, True], donate=(2,), sizes=safe)
    yield prefill("float32", dtype="float32", sizes=dict(dtype="float32"))
    yield prefill("grad", dtype="float32", wrap=lambda op: _gradient(op, (0, 1, 2)))
    kernel = dict(kernels=("mosaic_gpu",), lowered=True, xla=False)
    yield prefill(
        "K=V=64", [False, False, False, True], sizes=dict(K=64, V=64, gate_rank=64), **kernel
    )
