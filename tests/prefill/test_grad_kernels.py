"""The derivative of the prefill kernels: against float64, under JAX's transformations, mutated.

On a CPU the kernels run in Pallas's interpreter, with their products in XLA (`chunks.py`).
"""

import functools
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import GRADIENT_CASES, gradient_case, kernels_here, operands
from support import ON_GPU, assert_near, lowered_text

import kda_jax
from kda_contracts import Sizes
from kda_jax import call, prefill_grad_mosaic_gpu, prefill_mosaic_gpu
from kda_jax.tools import oracle

LIMIT = 8e-3  # relative: bfloat16 products
LIMITS = {
    # The inverse of equal keys' system takes differences: 2e-2 to 3e-2, and 8e-3 of the keys'.
    "equal keys": dict(v=4e-2, beta=4e-2, k=1.2e-2),
    # 3.1e-3 of SMALL where u is made of 8 bits of the inverse times beta; now 2.6e-3.
    "random keys": dict(beta=2.86e-3),
}
SMALL = dict(H=1, HV=2, K=64, V=64)
SIZES = [dict(H=2, HV=4, K=128, V=128), dict(H=3, HV=3, K=64, V=64), dict(H=1, HV=2, K=128, V=192)]
KERNELS = ("kda_prefill_grad_states", "kda_prefill_grad_pairs", "kda_prefill_grad_keys")


def gradients(x, options, d_out, d_state, implementation="mosaic_gpu"):
    slots = {n: options[n] for n in ("cu_seqlens", "sources") if options[n] is not None}
    slots |= dict(slots=x["slots"])
    tensors = {name: jnp.asarray(y) for name, y in x.items() if name != "slots"}

    def results(tensors):
        return kda_jax.chunk_kda(
            **tensors,
            **slots,
            use_qk_l2norm_in_kernel=options["l2norm"],
            out_dtype="float32",
            implementation=implementation,
        )

    with kernels_here():
        step = jax.jit(lambda tensors, cotangents: jax.vjp(results, tensors)[1](cotangents)[0])
        return jax.block_until_ready(step(tensors, (jnp.asarray(d_out), jnp.asarray(d_state))))


def check(case, T, **sizes):
    x, options, d_out, d_state = gradient_case(case, T=T, dtype="bfloat16", **sizes)
    d_out = np.asarray(d_out.astype(jnp.bfloat16), np.float32)
    expected = oracle.update_gradients(*x.values(), d_out, d_state, **options)
    if options["cu_seqlens"] is None:  # a padded row may hold anything
        for name in ("q", "k", "v", "log_decay", "beta"):
            x[name][1] = np.nan
        d_out[1] = np.nan
    got = gradients(x, options, d_out, d_state)
    limits = LIMITS.get(case, {})
    for name in got:
        assert_near(got[name], expected[name], limits.get(name, LIMIT))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_the_kernels_gradients_meet_float64(case, sizes):
    check(case, 203, **sizes)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="runs them themselves")
@pytest.mark.parametrize("case", ["packed borders", "saturated gates", "random keys"])
def test_in_the_interpreter_they_meet_float64(case):
    check(case, 132, **SMALL)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("of_vmap", [False, True])
def test_the_kernels_gradients_under_vmap_and_of_vmap(of_vmap):
    x = {n: jnp.asarray(y) for n, y in operands(1, 20, dtype="bfloat16", **SMALL).items()}
    slots = x.pop("slots")

    def loss(x, implementation):
        out, state = kda_jax.chunk_kda(**x, slots=slots, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum() + state.sum()

    def step(several, implementation):
        one = functools.partial(loss, implementation=implementation)
        if of_vmap:
            return jax.grad(lambda several: jax.vmap(one)(several).sum())(several)
        return jax.vmap(jax.grad(one))(several)

    several = {name: jnp.stack([y, 0.5 * y]) for name, y in x.items()}
    with kernels_here():
        got = jax.jit(functools.partial(step, implementation="mosaic_gpu"))(several)
        got = jax.block_until_ready(got)
    expected = jax.jit(functools.partial(step, implementation="xla"))(several)
    for name in x:
        assert_near(got[name], expected[name], LIMIT)


def lowered(transform, **sizes):
    x = {n: jax.ShapeDtypeStruct(y.shape, y.dtype) for n, y in narrow(100, **sizes).items()}

    def loss(x):
        out, _ = kda_jax.chunk_kda(**x, implementation="mosaic_gpu")
        return out.astype(jnp.float32).sum()

    return lowered_text(transform(loss), x)


def narrow(T, **sizes):
    return operands(2, T, dtype="bfloat16", **sizes)


def gradient(loss):
    def of(x):
        tensors = {name: y for name, y in x.items() if name != "slots"}
        return jax.grad(lambda tensors: loss(tensors | dict(slots=x["slots"])))(tensors)

    return of


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_derivatives_kernels_lower_for_cuda(sizes):
    text = lowered(gradient, **sizes)
    for name in (*KERNELS, "kda_prefill_chunks", "kda_prefill_states"):
        assert name in text


def test_policies_choose_what_is_kept(capsys):
    x = {n: jnp.asarray(y) for n, y in narrow(100, **SMALL).items()}

    def loss(q):
        out, _ = kda_jax.chunk_kda(**x | dict(q=q), implementation="mosaic_gpu")
        return out.astype(jnp.float32).sum()

    def saved(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=policy), x["q"])
        return capsys.readouterr().out.count("output of jitted function 'kda_chunk_mosaic_gpu'")

    assert saved("another") == 0
    assert saved("kda_states") == 3
    assert saved("kda_chunks") == 6


def test_forward_mode_is_refused():
    x = {n: jnp.asarray(y) for n, y in narrow(20, **SMALL).items()}

    def out(q):
        return kda_jax.chunk_kda(**x | dict(q=q), implementation="mosaic_gpu")[0]

    with pytest.raises(TypeError, match="forward-mode"):
        lowered_text(lambda q: jax.jvp(out, (q,), (q,))[1], x["q"])


@pytest.mark.gpu
def test_gradients_of_a_scan_over_layers_under_checkpoint():
    config = kda_jax.KDAConfig(D=64, H=2, HV=4, K=128, V=128, gate_rank=128)
    params = [kda_jax.init_params(config, jax.random.key(n)) for n in range(3)]
    params = jax.tree.map(lambda *x: jnp.stack(x), *params)
    x = jax.random.normal(jax.random.key(9), (150, config.D), jnp.bfloat16)
    cache = kda_jax.init_cache(config, 2)
    slots, bounds = jnp.array([1, 0]), jnp.array([0, 67, 150])

    def loss(params, implementation):
        @jax.checkpoint
        def layer(x, params):
            y, _ = kda_jax.kda_prefill(
                params, x, cache, slots, bounds, config=config, implementation=implementation
            )
            return x + y, None

        return (jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2).mean()

    got, expected = (
        jax.jit(jax.grad(functools.partial(loss, implementation=name)))(params)
        for name in ("auto", "xla")
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_near(a, b, 5e-2)


# An expression of the kernels and what replaces it.
MUTANTS = {
    "decay of the state left out": (
        "state = state * lax.broadcast_in_dim(load(last_s, LAYOUT.reduce(1)), state.shape, (0,))",
        "state = state * 1.0",
    ),
    "the last state's cotangent left out": (
        "d_after = jnp.swapaxes(d_after, 2, 3)",
        "d_after = jnp.swapaxes(0 * d_after, 2, 3)",
    ),
    "scores not transposed": (
        "products((scores_s.transpose((1, 0)), d_out_s, zeros(TILE)))",
        "products((scores_s, d_out_s, zeros(TILE)))",
    ),
    "inverse not transposed": (
        "backwards = inverse_s.transpose((1, 0))",
        "backwards = inverse_s",
    ),
    "changes' derivative of one sign": (
        "(k_s, state_s, rise)",
        "(k_s, state_s, -rise)",
    ),
    "beta's derivative not divided": ("d_beta = -d_beta / beta", "d_beta = -d_beta"),
    "pairs of keys on one side": ("(-jnp.where(row > col, below, above))", "(-below)"),
    "the state's part of the decay left out": (
        "d_decay = along(d_last, CHANNELS, 1)",
        "d_decay = along(0.0 * d_last, CHANNELS, 1)",
    ),
    "a token's own decay left out": (
        "ones(by_col >= by_row, NARROW), one_s",
        "ones(by_col > by_row, NARROW), one_s",
    ),
    "halves exchanged": (
        "second = along(rows & half, CHANNELS, 0) != 0",
        "second = along(rows & half, CHANNELS, 0) == 0",
    ),
    "a level too few": ("lax.fori_loop(0, LEVELS, level", "lax.fori_loop(0, LEVELS - 1, level"),
    "wrong key head": (
        "group, _ = divide(head, HV // sizes.H)",
        "_, group = divide(head, sizes.H)",
    ),
    "the diagonal of the scores left out": (
        "d_q = d_q + same * load(k_s).astype(f32)",
        "d_q = d_q + 0.0 * same",
    ),
}


def mutant(old, new):
    """A copy of the module with one expression changed."""
    path = prefill_grad_mosaic_gpu.__file__
    source = importlib.util.find_spec(prefill_grad_mosaic_gpu.__name__).loader.get_data(path)
    source = source.decode()
    assert source.count(old) == 1, f"{old!r} stands there {source.count(old)} times"
    module = types.ModuleType("mutant")
    exec(compile(source.replace(old, new), path, "exec"), vars(module))
    return module


def error_of(module):
    """The largest error of a gradient, relative, as the module makes it: 128 tokens, two heads."""
    sizes = dict(H=2, HV=4, K=64, V=64)
    x = operands(2, 128, dtype="bfloat16", decay=0.1, **sizes)
    rng = np.random.default_rng(2)
    d_out = np.asarray(rng.standard_normal(x["v"].shape).astype(jnp.bfloat16), np.float32)
    d_state = rng.standard_normal(x["pool"].shape, dtype=np.float32)
    expected = oracle.update_gradients(*x.values(), d_out, d_state)
    slots, pool = x.pop("slots"), x.pop("pool")
    static = call.Static(
        op="kda_chunk",
        sizes=Sizes(B=2, T=128, N=2, S=len(pool), **sizes),
        maths=call.maths_of(64, activated=True, scale=None, use_qk_l2norm_in_kernel=False),
        out_dtype=jnp.dtype("float32"),
    )
    live = jnp.ones(2, bool)

    def both(tensors, start, d_out, d_after):
        _, kept = prefill_mosaic_gpu.with_residuals(*tensors, start, live, None, static=static)
        return module.gradients(tensors, live, None, kept, d_out, d_after, static=static)

    tensors = [jnp.asarray(y) for y in x.values()]
    with kernels_here() as products:
        if products is not None:
            module.products = products
        got = jax.jit(both)(tensors, pool[slots], jnp.asarray(d_out), d_state[slots])
        got = jax.block_until_ready(got)
    expected = [*(expected[name] for name in x), expected["pool"][slots]]
    return max(
        np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for a, b in zip(got, expected, strict=True)
    )


@pytest.mark.sampled(20)
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_derivative_is_caught(name):
    error = error_of(mutant(*MUTANTS[name]))
    assert not error <= 2 * LIMIT


@pytest.mark.long
def test_an_unchanged_derivative_passes():
    assert error_of(mutant("CHANNELS = 64", "CHANNELS = 64")) <= LIMIT
