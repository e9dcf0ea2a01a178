"""packed_decode against the float64 oracle: every implementation, shape, gate and pool dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GATES, MODEL_SHAPES, MOSAIC_SHAPES, POOL_DTYPES, SHAPES, make_call
from support import (
    IMPLEMENTATIONS,
    ON_GPU,
    WITH_TRITON,
    assert_decodes,
    assert_meets_oracle,
    assert_near,
    assert_near_but_for_nans,
    assert_same_bits,
    decode,
    lowered_text,
    on_device,
    running,
)

import kda_jax

RUNS = [("xla", name) for name in SHAPES] + [("mosaic_gpu", name) for name in MOSAIC_SHAPES]
RUNS += [("triton", name) for name in SHAPES if WITH_TRITON]


@pytest.mark.optimized
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("implementation", "shape"), RUNS)
def test_meets_the_oracle(implementation, shape, gate):
    assert_decodes(implementation, SHAPES[shape], gate, dtype="float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_beta_may_be_doubled(implementation):
    sizes = SHAPES["k64_v32"]
    assert_decodes(implementation, sizes, "safe", allow_neg_eigval=True, dtype="float32")


@pytest.mark.parametrize("pool_dtype", POOL_DTYPES)
@pytest.mark.parametrize("dtype", POOL_DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_dtype_of_rows_and_pool(implementation, dtype, pool_dtype):
    dtypes = dict(dtype=dtype, pool_dtype=pool_dtype, gate_dtype=dtype)
    assert_decodes(implementation, SHAPES["k64_v32"], "softplus", **dtypes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("implementation", "shape"), RUNS)
def test_narrow_pools_of_every_shape(implementation, shape, pool_dtype):
    for gate in GATES if implementation == "xla" or ON_GPU else ("safe",):
        assert_decodes(implementation, SHAPES[shape], gate, pool_dtype=pool_dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mixed_operand_dtypes(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="bfloat16")
    call.operands["a"] = call.operands["a"].astype(np.float32)
    call.operands["b"] = call.operands["b"].astype(np.float16)
    out, state = decode(call.operands, implementation)
    assert out.dtype == jnp.bfloat16
    assert_meets_oracle(call, out, state)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_l2norm_off_and_scale(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    assert_meets_oracle(call, *decode(call.operands, implementation, scale=0.25), scale=0.25)
    one, half = (decode(call.operands, implementation, scale=scale) for scale in (1.0, 0.5))
    if ON_GPU and implementation == "xla":  # its fusions may move last bits
        assert_near(half[0][call.live], one[0][call.live] * np.float32(0.5), 1e-6)
        assert_near(half[1][call.slots], one[1][call.slots], 1e-6)
        return
    assert_same_bits(half[0], one[0] * np.float32(0.5))
    assert_same_bits(half[1], one[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_out_dtype(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="bfloat16")
    out, state = decode(call.operands, implementation, out_dtype=jnp.float32)
    assert out.dtype == jnp.float32
    assert_meets_oracle(call, out, state)
    narrow, same_state = decode(call.operands, implementation, out_dtype="float16")
    assert_same_bits(narrow, np.asarray(out).astype(np.float16))
    assert_same_bits(state, same_state)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_ref_is_updated_in_place(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    operands = on_device(call.operands)
    pool = operands.pop("initial_state")
    before = np.array(pool)
    expected = decode(call.operands, implementation)
    for wrap in (lambda f: f, jax.jit):
        ref = jax.new_ref(pool)

        @wrap
        def step(ref, operands):
            out, state = kda_jax.packed_decode(
                initial_state=ref, **operands, implementation=implementation
            )
            assert state is None
            return out

        with running(implementation):
            out = step(ref, operands)
        assert_same_bits(out, expected[0])
        assert_same_bits(ref[...], expected[1])
    assert_same_bits(pool, before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_donation_the_callers_array_keeps_its_bits(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    operands = on_device(call.operands)
    with running(implementation):
        kda_jax.packed_decode(**operands, implementation=implementation)
    assert_same_bits(operands["initial_state"], call.operands["initial_state"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("B", "S"), [(0, 5), (3, 0)])
def test_nothing_to_do(implementation, B, S):
    sizes = SHAPES["k32_v16"].__class__(**vars(SHAPES["k32_v16"]) | {"B": B, "S": S})
    call = make_call(sizes, dtype="float32")
    step = jax.jit(
        lambda initial_state, rest: kda_jax.packed_decode(
            initial_state=initial_state, **rest, implementation=implementation
        ),
        donate_argnums=0,
    )
    rest = on_device(call.operands)
    pool = rest.pop("initial_state")
    with running(implementation):
        out, state = step(pool, rest)
    assert out.shape == (B, 1, sizes.HV, sizes.V)
    assert not np.asarray(out).any()
    assert_same_bits(state, call.operands["initial_state"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_lowered_program_names_the_implementation(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    text = lowered_text(
        lambda x: kda_jax.packed_decode(**x, implementation=implementation), call.operands
    )
    names = [f"@kda_packed_decode_{name}(" for name in IMPLEMENTATIONS]
    assert [name in text for name in names] == [implementation in name for name in names]
    assert ("mosaic_gpu_v2" in text) == (implementation == "mosaic_gpu")


def test_numpy_operands_of_any_layout():
    call = make_call(SHAPES["k64_v32"], dtype="float32")
    operands = {name: np.asfortranarray(x) for name, x in call.operands.items()}
    assert_meets_oracle(call, *kda_jax.packed_decode(**operands))


def test_one_trace_for_many_calls():
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    traces = []

    @jax.jit
    def step(operands):
        traces.append(1)
        return kda_jax.packed_decode(**operands)

    for _ in range(100):
        step(on_device(call.operands))
    assert len(traces) == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_100_eager_calls_add_no_trace(implementation):
    calls = [make_call(SHAPES["k32_v16"], seed=seed, dtype="float32") for seed in range(2)]
    calls = [on_device(call.operands) for call in calls]
    traces = []

    def listen(event, _, **__):
        if "trace" in event:
            traces.append(event)

    def step(x, **options):
        return kda_jax.packed_decode(**x, implementation=implementation, **options)

    with running(implementation):
        # The first call under Pallas's interpreter changes what JAX traces by: the second is
        # traced too.
        for x in calls:
            step(x)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            # An interpreted kernel takes its time, and four calls show one that retraces.
            for n in range(100 if implementation == "xla" or ON_GPU else 4):
                step(calls[n % 2])
            seen = list(traces)
            step(calls[0], scale=0.3)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert not seen
    assert traces, "another static option must be traced, and this listener must see it"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_in_a_scan_equal_steps_one_by_one(implementation):
    calls = [
        make_call(SHAPES["k32_v16"], seed=seed, dtype="float32", padded=False) for seed in range(3)
    ]
    operands = on_device(calls[0].operands)
    pool, slots = operands.pop("initial_state"), operands.pop("ssm_state_indices")
    tokens = {
        name: jnp.stack([call.operands[name] for call in calls]) for name in ("mixed_qkv", "a", "b")
    }
    gates = {name: operands[name] for name in ("A_log", "dt_bias")}

    def step(pool, token):
        out, pool = kda_jax.packed_decode(
            **token,
            **gates,
            initial_state=pool,
            ssm_state_indices=slots,
            implementation=implementation,
        )
        return pool, out

    with running(implementation):
        scanned_pool, scanned = jax.jit(lambda pool: jax.lax.scan(step, pool, tokens))(pool)
        for t in range(3):
            pool, out = step(pool, {name: x[t] for name, x in tokens.items()})
            assert_near(scanned[t], out, 1e-6)
    assert_near(
        np.asarray(scanned_pool)[np.asarray(slots)], np.asarray(pool)[np.asarray(slots)], 1e-6
    )


@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_a_loop_copies_no_pool(loop):
    x = make_call(SHAPES["k32_v16"], dtype="float32").operands
    shape = jax.ShapeDtypeStruct((3000, 2, 16, 32), jnp.float32)
    rest = on_device({name: x[name] for name in x if name != "initial_state"})

    def step(pool):
        return kda_jax.packed_decode(**rest, initial_state=pool)[1]

    def steps(pool):
        if loop == "scan":
            return jax.lax.scan(lambda pool, _: (step(pool), None), pool, None, length=4)[0]
        return jax.lax.fori_loop(0, 4, lambda _, pool: step(pool), pool)

    memory = jax.jit(steps, donate_argnums=0).lower(shape).compile().memory_analysis()
    pool_bytes = 3000 * 2 * 16 * 32 * 4
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 20


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_ref_closed_over_by_a_scan(implementation):
    calls = [
        make_call(SHAPES["k32_v16"], seed=seed, dtype="float32", padded=False) for seed in range(2)
    ]
    x = on_device(calls[0].operands)
    pool = x.pop("initial_state")
    tokens = jnp.stack([call.operands["mixed_qkv"] for call in calls])
    ref = jax.new_ref(pool)

    def step(_, row):
        return None, kda_jax.packed_decode(
            **x | {"mixed_qkv": row}, initial_state=ref, implementation=implementation
        )[0]

    with running(implementation):
        _, outs = jax.lax.scan(step, None, tokens)
    for row, out in zip(tokens, outs, strict=True):
        expected, pool = decode(x | {"mixed_qkv": row, "initial_state": pool}, implementation)
        assert_near(out, expected, 1e-6)
    assert_near_but_for_nans(ref[...], pool, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_over_two_shards_equal_one_pool(implementation):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    call = make_call(
        SHAPES["k32_v16"].__class__(B=4, H=1, HV=2, K=32, V=16, S=8), dtype="float32", padded=False
    )
    call.operands["ssm_state_indices"][:] = 6, 1, 3, -1
    call.operands["initial_state"][:] = np.random.default_rng(0).standard_normal((8, 2, 16, 32))
    live = call.__class__(call.sizes, call.operands, call.operands["ssm_state_indices"] >= 0)
    x = on_device(call.operands)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("slots",))
    spec = jax.sharding.PartitionSpec

    def local(pool, rest):
        mine = rest["ssm_state_indices"] - 4 * jax.lax.axis_index(
            "slots"
        )  # another shard's rows are padded rows here
        out, pool = kda_jax.packed_decode(
            **rest | {"ssm_state_indices": mine}, initial_state=pool, implementation=implementation
        )
        return jax.lax.psum(out, "slots"), pool

    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec("slots"), spec()),
        out_specs=(spec(), spec("slots")),
        check_vma=False,
    )
    pool = x.pop("initial_state")
    with running(implementation):
        out, state = jax.jit(step, donate_argnums=0)(pool, x)
    assert_meets_oracle(live, out, state)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ahead_of_time(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    x = on_device(call.operands)
    with running(implementation):
        step = jax.jit(lambda x: kda_jax.packed_decode(**x, implementation=implementation))
        assert_meets_oracle(call, *step.lower(x).compile()(x))


def test_implementations_agree():
    call = make_call(SHAPES["k64_v32"], dtype="bfloat16")
    options = dict(use_qk_l2norm_in_kernel=True, out_dtype="float32")
    results = [
        decode(call.operands, implementation, **options) for implementation in IMPLEMENTATIONS
    ]
    assert_near(results[0][0], results[1][0], 4e-6)
    assert_near(np.asarray(results[0][1])[call.slots], np.asarray(results[1][1])[call.slots], 4e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_models_meet_the_oracle(shape, gate):
    call = make_call(MODEL_SHAPES[shape])
    options = dict(use_qk_l2norm_in_kernel=True, lower_bound=GATES[gate], out_dtype="float32")
    for implementation in set(IMPLEMENTATIONS) - {"xla"}:
        assert_meets_oracle(call, *decode(call.operands, implementation, **options), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", POOL_DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_donated_the_pool_keeps_its_buffer(implementation, pool_dtype):
    sizes = MODEL_SHAPES["kimi-linear-48b-tp1-B7"]
    sizes = sizes.__class__(**vars(sizes) | {"S": 400})
    call = make_call(sizes, pool_dtype=pool_dtype)
    operands = on_device(call.operands)
    pool = operands.pop("initial_state")
    step = jax.jit(
        lambda pool, operands: kda_jax.packed_decode(
            initial_state=pool, **operands, implementation=implementation
        ),
        donate_argnums=0,
    )
    memory = step.lower(pool, operands).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    rows_in_float32 = (
        4 * sizes.B * sizes.HV * sizes.V * sizes.K
    )  # what the reference gathers and updates
    assert memory.temp_size_in_bytes < (
        2 * rows_in_float32 if implementation == "xla" else pool.nbytes / 100
    )
    address = pool.unsafe_buffer_pointer()
    out, state = step(pool, operands)
    assert state.unsafe_buffer_pointer() == address
    assert pool.is_deleted()
    assert_meets_oracle(call, out, state)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_ref_is_not_copied(implementation):
    sizes = MODEL_SHAPES["kimi-linear-48b-tp1-B7"]
    x = make_call(sizes).operands
    rest = on_device({name: x[name] for name in x if name != "initial_state"})
    ref = jax.new_ref(jnp.zeros((400, sizes.HV, sizes.V, sizes.K)))
    step = jax.jit(
        lambda ref, x: kda_jax.packed_decode(initial_state=ref, **x, implementation=implementation)[
            0
        ]
    )
    memory = step.lower(ref, rest).compile().memory_analysis()
    pool_bytes = 400 * sizes.HV * sizes.V * sizes.K * 4
    rows_in_float32 = 4 * sizes.B * sizes.HV * sizes.V * sizes.K
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < (
        2 * rows_in_float32 if implementation == "xla" else pool_bytes / 100
    )


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_operands_that_are_slices_of_larger_arrays(implementation, donated):
    """As a model has them that keeps the weights of all layers in one array."""
    x = on_device(make_call(SHAPES["k32_v16"], dtype="float32").operands)
    wanted = decode(x, implementation)
    pool = jnp.array(x.pop("initial_state"), copy=True)
    larger = {
        name: jnp.stack([jnp.ones_like(array), array, jnp.ones_like(array)])
        for name, array in x.items()
    }

    def step(pool, larger):
        layer = {name: array[1] for name, array in larger.items()}
        return kda_jax.packed_decode(**layer, initial_state=pool, implementation=implementation)

    with running(implementation):
        got = jax.jit(step, donate_argnums=0 if donated else ())(pool, larger)
    for one, other in zip(got, wanted, strict=True):
        assert_near_but_for_nans(one, other, 1e-6)  # slots that nobody may read
