"""States kept on the way: those of the tokens before them, and what goes on from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import kernels_here, operands, wanted
from support import ON_GPU, assert_near, assert_same_bits

import kda_jax

LENGTHS = (3, 64, 0, 131, 200, 192, 129)
S = 20
NARROW = 8e-3  # of the kernels' products


def call(lengths=LENGTHS, *, M=3, every=64, seed=0, dense=None, **sizes):
    """`(x, options)`: end to end, or `dense` rows of so many tokens; the fourth is padded."""
    N, T = (len(lengths), sum(lengths)) if dense is None else (dense, lengths)
    x = operands(*((1, T) if dense is None else (N, T)), N=N, seed=seed, **sizes)
    rng = np.random.default_rng(seed)
    x["pool"] = rng.standard_normal((S + N * M, *x["pool"].shape[1:]), dtype=np.float32)
    x["slots"] = rng.permutation(S)[:N].astype(np.int32)
    if N > 3:
        x["slots"][3] = -1
    table = S + rng.permutation(N * M).reshape(N, M).astype(np.int32)
    table[0, 0] = table[-1, -1] = -1  # not kept
    options = dict(checkpoints=table, checkpoint_every=every)
    if dense is None:
        options["cu_seqlens"] = np.cumsum((0, *lengths)).astype(np.int32)
    return x, options


def rows(x, options):
    """`(n, first, last)`: each sequence and where its tokens lie."""
    bounds = options.get("cu_seqlens")
    N, T = len(x["slots"]), x["q"].shape[1]
    return [
        (n, *((n, 0, T) if bounds is None else (0, bounds[n], bounds[n + 1]))) for n in range(N)
    ]


def assert_kept(x, options, state, limit):
    """Each kept state is that of the tokens before it; all other slots have their bits."""
    before, every = np.array(x["pool"]), options["checkpoint_every"]
    touched = set()
    for n, row, first, last in rows(x, options):
        if not (0 <= x["slots"][n] < len(before)) or last == first:
            continue
        touched.add(x["slots"][n])
        for m, slot in enumerate(options["checkpoints"][n]):
            end = first + (m + 1) * every
            if end > last or slot < 0:
                continue
            touched.add(slot)
            part = {
                name: y[row : row + 1, first:end]
                for name, y in x.items()
                if name not in ("pool", "slots")
            }
            own = x["slots"][n : n + 1]
            _, expected = wanted(part | dict(pool=x["pool"], slots=own))
            assert_near(state[slot], expected[own[0]], limit)
    rest = np.setdiff1d(np.arange(len(before)), sorted(touched))
    assert_same_bits(np.asarray(state)[rest], before[rest])


@pytest.mark.parametrize(
    "every", [64, *(pytest.param(every, marks=pytest.mark.long) for every in (128, 320))]
)
def test_end_to_end(every):
    x, options = call(every=every)
    out, state = kda_jax.chunk_kda(**x, **options)
    assert_kept(x, options, state, 1e-5)
    plain, after = kda_jax.chunk_kda(**x, cu_seqlens=options["cu_seqlens"])
    assert_near(out, plain, 1e-5)
    slots = x["slots"][x["slots"] >= 0]
    assert_near(state[slots], after[slots], 1e-5)


@pytest.mark.parametrize(
    ("T", "every"), [(20, 64), (150, 64), pytest.param(600, 128, marks=pytest.mark.long)]
)
def test_rows(T, every):
    x, options = call(T, dense=2, every=every)
    _, state = kda_jax.chunk_kda(**x, **options)
    assert_kept(x, options, state, 1e-5)


@pytest.mark.optimized
def test_going_on_from_one_has_the_bits_of_the_unbroken_run():
    """In XLA on a CPU, where more than 64 tokens are left."""
    x, options = call((330, 40), M=5)
    table, tokens = options["checkpoints"], ("q", "k", "v", "log_decay", "beta")
    table[:] = np.arange(S, S + 10).reshape(2, 5)
    out, state = kda_jax.chunk_kda(**x, **options)
    for m in range(4):
        first = (m + 1) * 64
        rest = {name: x[name][:, first:330] for name in tokens}
        again, after = kda_jax.chunk_kda(
            **rest,
            pool=state,
            slots=x["slots"][:1],
            sources=table[:1, m],
            cu_seqlens=jnp.array([0, 330 - first]),
        )
        if not ON_GPU:
            assert_same_bits(np.asarray(again), np.asarray(out)[:, first:330])
            assert_same_bits(np.asarray(after)[x["slots"][0]], np.asarray(state)[x["slots"][0]])
        assert_near(again, out[:, first:330], 1e-5)


@pytest.mark.slow
def test_a_narrow_pool_a_ref_and_donation():
    x, options = call()
    pool = jnp.asarray(x.pop("pool"), jnp.bfloat16)
    step = jax.jit(
        lambda pool, x, table: kda_jax.chunk_kda(
            **x, pool=pool, **(options | dict(checkpoints=table))
        ),
        donate_argnums=0,
    )
    expected_out, expected = step(jnp.array(pool), x, options["checkpoints"])
    memory = step.lower(pool, x, options["checkpoints"]).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    ref = jax.new_ref(pool)
    out = jax.jit(lambda ref: kda_jax.chunk_kda(**x, pool=ref, **options)[0])(ref)
    assert_near(out, expected_out, 1e-6)
    assert_near(ref[...].astype(jnp.float32), expected.astype(jnp.float32), 4e-3)


@pytest.mark.slow
def test_they_differentiate():
    """The cotangent of a kept state reaches the tokens before it, and no others."""
    x, options = call((150,), M=2, seed=1)
    options["checkpoints"][:] = [[S, S + 1]]

    def kept(v, m):
        return kda_jax.chunk_kda(**x | dict(v=v), **options)[1][S + m].sum()

    for m in range(2):
        gradient = np.asarray(jax.grad(kept)(jnp.asarray(x["v"]), m))
        assert gradient[:, : (m + 1) * 64].any(axis=(0, 2, 3)).all()
        assert not gradient[:, (m + 1) * 64 :].any()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("end to end", marks=pytest.mark.gpu if ON_GPU else pytest.mark.long),
        pytest.param("rows", marks=pytest.mark.gpu if ON_GPU else pytest.mark.long),
    ],
)
def test_the_kernels_keep_them(form):
    """On a CPU in the interpreter. Sequences begin anywhere, also between multiples of 8."""
    sizes = dict(H=1, HV=1, K=64, V=64, dtype="bfloat16")
    x, options = (
        call((3, 131, 69), M=2, **sizes)
        if form == "end to end"
        else call(130, dense=2, M=2, **sizes)
    )
    wide = {name: np.asarray(y, np.float32) if name in "qkv" else y for name, y in x.items()}
    with kernels_here():
        step = jax.jit(
            lambda x, table: kda_jax.chunk_kda(
                **x, **(options | dict(checkpoints=table)), implementation="mosaic_gpu"
            )
        )
        _, state = jax.block_until_ready(step(x, options["checkpoints"]))
    assert_kept(wide, options, np.asarray(state), NARROW)


@pytest.mark.gpu if ON_GPU else pytest.mark.long
def test_in_the_kernels_what_goes_on_from_one_has_the_bits_of_the_unbroken_run():
    """More than 16 tokens are left, and both runs begin at a multiple of 8 tokens and 3."""
    sizes = dict(H=1, HV=1, K=64, V=64, dtype="bfloat16")
    x, options = call((3, 150), M=2, **sizes)
    options["checkpoints"][:] = [[-1, -1], [S, S + 1]]
    tokens = {name: x[name] for name in ("q", "k", "v", "log_decay", "beta")}
    with kernels_here():
        step = jax.jit(
            lambda x, table: kda_jax.chunk_kda(
                **x, **(options | dict(checkpoints=table)), implementation="mosaic_gpu"
            )
        )
        out, state = jax.block_until_ready(step(x, options["checkpoints"]))
        x_slots = x["slots"]
        # The three tokens of another sequence in front, as before.
        rest = {n: np.concatenate([y[:, :3], y[:, 3 + 128 :]], 1) for n, y in tokens.items()}
        go_on = jax.jit(
            lambda x, pool: kda_jax.chunk_kda(
                **x,
                pool=pool,
                slots=x_slots,
                sources=jnp.array([-1, S + 1]),
                cu_seqlens=jnp.array([0, 3, 3 + 22]),
                implementation="mosaic_gpu",
            )
        )
        again, after = jax.block_until_ready(go_on(rest, state))
    assert_same_bits(np.asarray(again)[:, 3:], np.asarray(out)[:, 3 + 128 :])
    slot = x["slots"][1]
    assert_same_bits(np.asarray(after)[slot], np.asarray(state)[slot])
