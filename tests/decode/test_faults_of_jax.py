"""Real faults of kernels of this kind, each reduced to a small input and its answer.

Here: heads, sizes, transformations.
Each runs on every implementation that it can reach. Those that need a GPU, or a pool of many
gigabytes, carry the marker `gpu`.
"""

import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import chex
import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SHAPES, make_call
from faults import (
    assert_steps_follow_changed_indices,
    base,
    each_implementation,
    untouched,
)
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import (
    IMPLEMENTATIONS,
    ON_GPU,
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
from kda_contracts import PACKED_DECODE, ContractError, Sizes, check
from kda_jax.tools import oracle
from kda_jax.tools.synthetic import random_operands

# Heads, packing, sharding


@each_implementation
def test_value_heads_divide_by_the_group(implementation):
    H, HV, K, V = 2, 4, 32, 16
    keys = np.eye(H, K, dtype=np.float32).ravel()
    x = {
        "mixed_qkv": np.concatenate([keys, keys, np.arange(1, HV * V + 1, dtype=np.float32)])[None],
        "a": np.zeros((1, HV * K), np.float32),
        "b": np.full((1, HV), 50, np.float32),
        "A_log": np.zeros(HV, np.float32),
        "dt_bias": np.zeros(HV * K, np.float32),
        "initial_state": np.zeros((1, HV, V, K), np.float32),
        "ssm_state_indices": np.zeros(1, np.int32),
    }
    _, state = decode(x, implementation)
    assert np.asarray(state)[0, :, 0].astype(bool).argmax(-1).tolist() == [0, 0, 1, 1]


@each_implementation
@pytest.mark.parametrize(
    ("width", "message"),
    [
        (512, "H=3, HV=4"),
        (128, "last dim=128 for HV=4, V=32"),
        (129, "last dim=129"),
        (320, "Invalid packed Q size 96: must be divisible by K=64"),
        (1152, "H=8, HV=4"),
    ],
)
def test_a_width_that_gives_no_heads_is_refused(implementation, width, message):
    with pytest.raises(ContractError, match=message):
        decode(base() | {"mixed_qkv": np.zeros((3, width), np.float32)}, implementation)


def test_an_interleaved_row_is_flattened_or_refused():
    flat = np.arange(1, 13, dtype=np.float32)[None]  # q 1..4, k 5..8, v 9..12, two heads of two
    q, k, v = (flat[:, i : i + 4].reshape(1, 2, 2) for i in (0, 4, 8))
    assert_same_bits(kda_jax.pack_qkv(q, k, v), flat)
    interleaved = np.array([[1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12]], np.float32)
    assert_same_bits(kda_jax.pack_qkv(interleaved, H=2, K=2, V=2), flat)
    grouped = np.array(
        [[1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12]], np.float32
    )  # one v of 1 element for each of 4 heads
    assert_same_bits(kda_jax.pack_qkv(grouped, H=2, K=2, V=1), flat)
    for wrong in (dict(H=5, K=2, V=2), dict(H=2, K=3, V=2), dict(H=2, K=2), dict(H=2, K=1, V=3)):
        with pytest.raises(ContractError, match="an interleaved row"):
            kda_jax.pack_qkv(interleaved, **wrong)
    for wrong in ((q, k[:, :1], v), (q, k, v[:, :1]), (q, k, None), (q[0], k[0], v[0])):
        with pytest.raises(ContractError, match=r"kda_jax\.pack_qkv"):
            kda_jax.pack_qkv(*wrong)


def reordered_for_ranks(row, ranks, H, HV, K, V):
    """[q0 k0 v0 | q1 k1 v1]: a contiguous cut gives each rank the flat row of its own heads."""
    q, k, v = jnp.split(row, [H * K, 2 * H * K], axis=1)
    return jnp.concatenate([x.reshape(len(row), ranks, -1) for x in (q, k, v)], axis=2).reshape(
        len(row), -1
    )


HEADS_SPECS = dict(
    mixed_qkv=P(None, "tp"), a=P(None, "tp"), b=P(None, "tp"), A_log=P("tp"), dt_bias=P("tp"),
    initial_state=P(None, "tp"), ssm_state_indices=P(),
)  # fmt: skip


def mesh_of(count, name):
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    return Mesh(np.array(jax.devices()[:count]), (name,))


def sharded_over_heads(implementation, check_vma, mesh):
    def local(x):
        return kda_jax.packed_decode(**x, implementation=implementation)

    out_specs = (P(None, None, "tp"), P(None, "tp"))
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(HEADS_SPECS,), out_specs=out_specs, check_vma=check_vma
        )
    )


@each_implementation
def test_heads_over_two_ranks_equal_one(implementation):
    mesh = mesh_of(2, "tp")
    x = on_device(base(dtype="float32"))
    expected = decode(x, implementation)
    ranks = x | {"mixed_qkv": reordered_for_ranks(x["mixed_qkv"], 2, 2, 4, 64, 32)}
    with running(implementation):
        got = sharded_over_heads(implementation, False, mesh)(ranks)
        naive = sharded_over_heads(implementation, False, mesh)(x)
    assert_near(got[0], expected[0], 1e-6)
    assert_near(got[1], expected[1], 1e-6)
    # A contiguous cut of the packed row passes every shape check, and is wrong.
    assert np.abs(np.asarray(naive[1]) - np.asarray(expected[1])).max() > 1e-2


@each_implementation
def test_operands_that_are_slices_and_transposes_inside_jit(implementation):
    x = on_device(base(dtype="float32"))
    expected = decode(x, implementation)
    fused = jnp.pad(jnp.concatenate([x["mixed_qkv"], x["a"]], 1), ((0, 0), (8, 5)))
    layers = jnp.moveaxis(jnp.stack([x["initial_state"] * 0, x["initial_state"]]), 0, 1)

    @jax.jit
    def step(fused, across, layers, rest):
        operands = {
            "mixed_qkv": fused[:, 8 : 8 + 384],
            "a": fused[:, 392 : 392 + 256],
            "b": across.T,
        }
        return kda_jax.packed_decode(
            **rest | operands, initial_state=layers[:, 1], implementation=implementation
        )

    rest = {name: x[name] for name in ("A_log", "dt_bias", "ssm_state_indices")}
    with running(implementation):
        got = step(fused, x["b"].T, layers, rest)
    assert_near(got[0], expected[0], 1e-6 if implementation == "xla" else 0.0)
    assert_near(got[1], expected[1], 1e-6 if implementation == "xla" else 0.0)


@each_implementation
def test_a_stacked_pool_is_right_and_a_list_is_in_place(implementation):
    L, x = 3, on_device(base(dtype="float32"))
    pool = x.pop("initial_state")
    expected = [decode(x | {"initial_state": pool * (i + 1)}, implementation)[1] for i in range(L)]

    def layer(pool):
        return kda_jax.packed_decode(**x, initial_state=pool, implementation=implementation)[1]

    def stacked(states):
        return jax.lax.fori_loop(0, L, lambda i, states: states.at[i].set(layer(states[i])), states)

    def unrolled(states):
        for i in range(L):
            states = states.at[i].set(layer(states[i]))
        return states

    def through_refs(states):
        for i in range(L):
            ref = jax.new_ref(states[i])
            layer(ref)
            states = states.at[i].set(jax.freeze(ref))
        return states

    for steps in (stacked, unrolled, through_refs):
        with running(implementation):
            got = jax.jit(steps, donate_argnums=0)(jnp.stack([pool * (i + 1) for i in range(L)]))
        for i in range(L):
            assert_near(got[i], expected[i], 1e-6)

    def listed(pools):
        return [layer(pool) for pool in pools]

    if implementation == "xla" or ON_GPU:
        shapes = [jax.ShapeDtypeStruct((600, 4, 32, 64), jnp.float32)] * L
        memory = jax.jit(listed, donate_argnums=0).lower(shapes).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 600 * 4 * 32 * 64 * 4 / 20


# Sizes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("K", [1, 2, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256])
def test_every_K_is_right_or_refused(K):
    for V in (1, 16, 24, 48, 100):
        sizes = Sizes(B=2, H=1, HV=2, K=K, V=V, S=3)
        for implementation in IMPLEMENTATIONS if V in (16, 48, 24) else ("xla",):
            call = make_call(sizes, dtype="float32", seed=V)
            options = dict(use_qk_l2norm_in_kernel=True)
            try:
                got = decode(call.operands, implementation, **options)
            except NotImplementedError as error:
                assert implementation == "mosaic_gpu" and (K % 32 or V % 16)
                assert "is not a multiple of" in str(error)
            else:
                assert_meets_oracle(call, *got, **options)


def test_a_tiny_head_works_by_default():
    call = make_call(Sizes(B=1, H=1, HV=1, K=16, V=8, S=2), dtype="float32")
    assert_meets_oracle(call, *kda_jax.packed_decode(**on_device(call.operands)))
    assert (
        "K=16 is not a multiple of 32"
        in kda_jax.explain(kda_jax.packed_decode, **call.operands).reasons["mosaic_gpu"]
    )


# JAX and Pallas


def test_no_deprecation_warning_from_our_code():
    program = """
import jax, jax.numpy as jnp, kda_jax
x = dict(a=jnp.zeros((1, 32)), b=jnp.zeros((1, 1)), A_log=jnp.zeros(1), dt_bias=jnp.zeros(32))
f = lambda pool: kda_jax.packed_decode(jnp.ones((1, 80)), **x, initial_state=pool,
    ssm_state_indices=jnp.array([0]), implementation="mosaic_gpu")
jax.jit(f).trace(jnp.zeros((2, 1, 16, 32))).lower(lowering_platforms=("cuda",))
"""
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", program], check=True)


@each_implementation
def test_a_thousand_slots_stay(implementation):
    x = base(S=1000)
    before = jnp.asarray(x["initial_state"])
    _, state = decode(x | {"initial_state": before}, implementation)
    untouched(x["initial_state"], state, [4, 0])
    assert_same_bits(before, x["initial_state"])


@each_implementation
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_donation_is_used_and_the_old_pool_is_gone(implementation, pool_dtype):
    x = on_device(base())
    pool = x.pop("initial_state").astype(pool_dtype)
    step = jax.jit(
        lambda pool: kda_jax.packed_decode(**x, initial_state=pool, implementation=implementation),
        donate_argnums=0,
    )
    with warnings.catch_warnings(), running(implementation):
        warnings.simplefilter("error")
        out, new = step(pool)
    assert pool.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="deleted"), running(implementation):
        step(pool)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert new.shape == (6, 4, 32, 64)


@each_implementation
def test_the_first_call_steps_once_and_nothing_retraces(implementation):
    call, traces = make_call(SHAPES["k32_v16"], dtype="float32"), []

    @jax.jit
    def step(x, scale_is=None):
        traces.append(1)
        return kda_jax.packed_decode(**x, implementation=implementation)

    with running(implementation):
        # The first call of a process under Pallas's interpreter changes what JAX traces by.
        kda_jax.packed_decode(**on_device(call.operands), implementation=implementation)
        assert_meets_oracle(call, *step(on_device(call.operands)))
        for seed in range(3 if implementation != "xla" and not ON_GPU else 100):
            x = make_call(SHAPES["k32_v16"], seed=seed, dtype="float32")
            got = step(on_device(x.operands))
    assert_meets_oracle(x, *got)
    assert len(traces) == 1


@each_implementation
def test_vmap_equals_a_loop(implementation):
    calls = [make_call(SHAPES["k32_v16"], seed=seed, dtype="float32") for seed in range(3)]
    stacked = {
        name: jnp.stack([call.operands[name] for call in calls]) for name in calls[0].operands
    }

    def step(x):
        return kda_jax.packed_decode(**x, implementation=implementation)

    with running(implementation):
        out, state = jax.vmap(step)(stacked)
    for i, call in enumerate(calls):
        assert_meets_oracle(call, out[i], state[i])
    shared = stacked | {"initial_state": jnp.ones_like(stacked["initial_state"][0])}
    axes = {name: None if name == "initial_state" else 0 for name in stacked}
    with running(implementation):
        out, state = jax.vmap(step, in_axes=(axes,))(shared)
        moved = stacked | {"initial_state": jnp.moveaxis(stacked["initial_state"], 0, 2)}
        by_axis_2 = jax.vmap(
            step, in_axes=({name: 2 if name == "initial_state" else 0 for name in stacked},)
        )(moved)
    assert state.shape == (3, *shared["initial_state"].shape)
    for i, call in enumerate(calls):
        one = {name: x if axes[name] is None else x[i] for name, x in shared.items()}
        expected = decode(one, implementation)
        assert_near(out[i], expected[0], 1e-6)
        assert_near(state[i], expected[1], 1e-6)
        assert_meets_oracle(call, by_axis_2[0][i], by_axis_2[1][i])


@each_implementation
def test_an_unmapped_ref_under_vmap_is_refused(implementation):
    x = on_device(base())
    ref = jax.new_ref(x.pop("initial_state"))

    def step(slots):
        return kda_jax.packed_decode(
            **x | {"ssm_state_indices": slots}, initial_state=ref, implementation=implementation
        )[0]

    with pytest.raises(NotImplementedError, match="under vmap"), running(implementation):
        jax.vmap(step)(jnp.array([[0, 1, 2], [3, 4, 5]]))


def test_shard_map_with_its_check_on():
    mesh = mesh_of(2, "tp")
    x = on_device(base(dtype="float32"))
    ranks = x | {"mixed_qkv": reordered_for_ranks(x["mixed_qkv"], 2, 2, 4, 64, 32)}
    got = sharded_over_heads("xla", True, mesh)(ranks)
    assert_near(got[1], decode(x, "xla")[1], 1e-6)
    for name in set(IMPLEMENTATIONS) - {"xla"}:
        with pytest.raises(NotImplementedError, match="pass check_vma=False"), running(name):
            sharded_over_heads(name, True, mesh)(ranks)


def test_a_sharded_pool_without_shard_map_inside_jit_is_refused():
    # With Explicit axes, make_mesh's default, the type of a traced pool tells.
    mesh_of(2, "tp")
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    x = on_device(base(dtype="float32"))
    pool = jax.device_put(x.pop("initial_state"), NamedSharding(mesh, P(None, "tp")))
    for name in set(IMPLEMENTATIONS) - {"xla"}:
        step = jax.jit(
            lambda pool, name=name: kda_jax.packed_decode(
                **x, initial_state=pool, implementation=name
            )
        )
        with pytest.raises(NotImplementedError, match="`initial_state` is cut by Explicit mesh"):
            step(pool)


def test_a_sharded_pool_without_shard_map_is_refused_by_kernels():
    mesh = mesh_of(2, "tp")
    x = on_device(base(dtype="float32"))
    pool = jax.device_put(x.pop("initial_state"), NamedSharding(mesh, P(None, "tp")))
    for name in set(IMPLEMENTATIONS) - {"xla"}:
        with pytest.raises(
            NotImplementedError, match="sharded over several devices outside shard_map"
        ):
            decode(x | {"initial_state": pool}, name)
    assert_near(
        decode(x | {"initial_state": pool}, "xla")[1],
        decode(x | {"initial_state": np.asarray(pool)}, "xla")[1],
        1e-6,
    )


@each_implementation
def test_a_step_is_exported_for_cuda_and_back(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    x = on_device(call.operands)
    step = jax.jit(lambda x: kda_jax.packed_decode(**x, implementation=implementation))
    targets = ("mosaic_gpu_v2", "triton_kernel_call")
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    exported = jax.export.export(step, platforms=("cuda",), disabled_checks=checks)(x)
    back = jax.export.deserialize(exported.serialize())
    assert back.platforms == ("cuda",)
    assert f"kda_packed_decode_{implementation}" in back.mlir_module()
    if ON_GPU:
        assert_meets_oracle(call, *back.call(x))


@each_implementation
def test_three_tiles_and_the_last_slot(implementation):
    call = make_call(Sizes(B=2, H=1, HV=2, K=96, V=112, S=4), dtype="float32", padded=False)
    call.operands["ssm_state_indices"][:] = 3, 0
    call.operands["initial_state"][:] = 0.5
    assert_meets_oracle(call, *decode(call.operands, implementation))


def test_kernels_refuse_differentiation_and_xla_differentiates():
    x = on_device(base((4, 1, 0), dtype="float32"))

    def loss(row, implementation):
        return kda_jax.packed_decode(**x | {"mixed_qkv": row}, implementation=implementation)[
            0
        ].sum()

    for name in set(IMPLEMENTATIONS) - {"xla"}:
        with (
            pytest.raises(NotImplementedError, match="implementation='xla' differentiates"),
            running(name),
        ):
            jax.grad(loss)(x["mixed_qkv"], name)
        with (
            pytest.raises(NotImplementedError, match="implementation='xla' differentiates"),
            running(name),
        ):
            jax.grad(lambda row, name=name: loss(row, name).astype(jnp.float32))(
                x["mixed_qkv"].astype(jnp.bfloat16)
            )
    gradient = jax.grad(loss)(x["mixed_qkv"], "xla")
    direction = np.random.default_rng(0).standard_normal(x["mixed_qkv"].shape)
    ends = [
        oracle.packed_decode(
            **{n: np.asarray(y) for n, y in x.items()}
            | {"mixed_qkv": np.asarray(x["mixed_qkv"]) + h * direction}
        )[0].sum()
        for h in (1e-4, -1e-4)
    ]
    assert float((gradient * direction).sum()) == pytest.approx(
        (ends[0] - ends[1]) / 2e-4, rel=1e-4
    )


@pytest.mark.gpu
@each_implementation
def test_steps_follow_changed_indices(implementation):
    assert_steps_follow_changed_indices(implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_captured_steps_follow_changed_indices(implementation):
    """As above, in a process that says whether the steps ran from a captured command buffer."""
    program = f"""
import glob, sys, tempfile
sys.path.insert(0, {str(Path(faults.__file__).parent)!r})
import faults, jax
faults.assert_steps_follow_changed_indices({implementation!r})
with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
        faults.assert_steps_follow_changed_indices({implementation!r})
    (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
    planes = jax.profiler.ProfileData.from_file(path).planes
    names = {{event.name for plane in planes for line in plane.lines for event in line.events}}
print("captured" if any("GraphLaunch" in name for name in names) else sorted(names)[:200])
"""
    # By itself XLA replays no command buffer while a profiler looks on.
    flags = "--xla_enable_command_buffers_during_profiling=true"
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "captured"


def test_optional_packages_are_not_needed():
    program = """
import sys
OPTIONAL = {"jax_triton", "triton", "torch", "safetensors", "flax", "matplotlib"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import jax.numpy as jnp, kda_jax
x = dict(a=jnp.zeros((1, 2)), b=jnp.zeros((1, 1)), A_log=jnp.zeros(1), dt_bias=jnp.zeros(2))
y = dict(initial_state=jnp.zeros((1, 1, 2, 2)), ssm_state_indices=jnp.array([0]))
print(kda_jax.packed_decode(jnp.ones((1, 6)), **x, **y)[0].shape)
try: kda_jax.packed_decode(jnp.ones((1, 6)), **x, **y, implementation="triton")
except NotImplementedError as error: print("triton" in str(error).lower())
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split("\n")[:2] == ["(1, 1, 1, 2)", "True"]


@each_implementation
@pytest.mark.parametrize("kept", [0, 1], ids=["only-out", "only-pool"])
def test_neither_result_needs_the_other(implementation, kept):
    call = make_call(SHAPES["k32_v16"], dtype="float32")
    expected = decode(call.operands, implementation)
    with running(implementation):
        got = jax.jit(lambda x: kda_jax.packed_decode(**x, implementation=implementation)[kept])(
            on_device(call.operands)
        )
    assert_near_but_for_nans(got, expected[kept], 1e-6)


@each_implementation
def test_a_step_without_a_live_row_keeps_the_pool(implementation):
    x = base((-1, -1, -1))
    _, state = decode(x, implementation)
    assert_same_bits(state, x["initial_state"])
    ref = jax.new_ref(jnp.asarray(x.pop("initial_state")))
    before = np.array(ref[...])
    decode(x | {"initial_state": ref}, implementation)
    assert_same_bits(ref[...], before)


@each_implementation
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
def test_odd_slot_sizes_at_every_slot(implementation, pool_dtype):
    K, V = (40, 24) if implementation == "xla" else (96, 48)
    for slots in ((5, 1, 4), (0, 3, 2)):
        call = make_call(Sizes(B=3, H=1, HV=3, K=K, V=V, S=6), padded=False, pool_dtype=pool_dtype)
        call.operands["ssm_state_indices"][:] = slots
        call.operands["initial_state"][:] = random_operands(
            call.sizes, seed=7, pool_dtype=pool_dtype
        )["initial_state"]
        assert_meets_oracle(call, *decode(call.operands, implementation))


# Contract checks


@each_implementation
def test_checks_under_jit_need_no_values(implementation):
    x = on_device(base((7, -1, 0)))
    with running(implementation):
        out, _ = jax.jit(lambda x: kda_jax.packed_decode(**x, implementation=implementation))(x)
    assert not np.asarray(out)[0].any()
    chex.disable_asserts()
    try:
        with pytest.raises(ContractError):
            decode(x | {"dt_bias": jnp.zeros(4)}, implementation)
    finally:
        chex.enable_asserts()


@each_implementation
def test_checkify_works_around_the_op(implementation):
    call = make_call(SHAPES["k32_v16"], dtype="float32", padded=False)
    call.operands["initial_state"][:] = 0.5

    def step(x):
        checkify.check(x["b"].shape[0] == 4, "four rows")
        return kda_jax.packed_decode(**x, implementation=implementation)

    with running(implementation):
        error, got = checkify.checkify(jax.jit(step), errors=checkify.user_checks)(
            on_device(call.operands)
        )
    error.throw()
    assert_meets_oracle(call, *got)


def test_no_batch_size_is_remembered_between_calls():
    for B in (4, 6, 4):
        assert check(PACKED_DECODE, **base(tuple(range(B)))).B == B


def test_a_jaxtyped_function_may_call_the_op_with_any_batch():
    jaxtyping, beartype = pytest.importorskip("jaxtyping"), pytest.importorskip("beartype")
    of_state, of_a, of_b, of_bias, of_out = (
        jaxtyping.Float[jax.Array, axes]
        for axes in ("S HV V K", "B HV*K", "B HV", "HV*K", "B 1 HV V")
    )
    of_slots = jaxtyping.Int[jax.Array, "B"]

    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    def step(
        initial_state: of_state,
        a: of_a,
        b: of_b,
        dt_bias: of_bias,
        ssm_state_indices: of_slots,
        rest: dict,
    ) -> tuple[of_out, of_state]:
        operands = dict(a=a, b=b, dt_bias=dt_bias, ssm_state_indices=ssm_state_indices)
        return kda_jax.packed_decode(initial_state=initial_state, **operands, **rest)

    for B in (4, 6, 4):
        x = on_device(base(tuple(range(B))))
        rest = {name: x.pop(name) for name in ("mixed_qkv", "A_log")}
        for function in (step, jax.jit(step)):
            out, _ = function(**x, rest=rest)
            assert out.shape[0] == B
    with pytest.raises(jaxtyping.TypeCheckError):
        step(**x | {"b": x["b"][1:]}, rest=rest)


@each_implementation
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_pmap_steps_each_device_and_names_its_own_shapes(implementation, fake):
    calls = [make_call(SHAPES["k32_v16"], seed=seed, dtype="float32") for seed in range(2)]
    stacked = {
        name: jnp.stack([call.operands[name] for call in calls]) for name in calls[0].operands
    }

    def step(x):
        return kda_jax.packed_decode(**x, implementation=implementation)

    if not fake:
        mesh_of(2, "devices")  # or skips
    with chex.fake_pmap() if fake else contextlib.nullcontext(), running(implementation):
        out, state = jax.pmap(step)(stacked)
        assert fake or len(out.sharding.device_set) == 2
        for i, call in enumerate(calls):
            assert_meets_oracle(call, out[i], state[i])
        with pytest.raises(ContractError, match=r"expected \[HV\*K\] = \(64,\), got \(2,\)"):
            jax.pmap(step)(stacked | {"dt_bias": jnp.zeros((2, 2))})


def test_the_truly_wrong_argument_is_blamed():
    x = base()
    swapped = x | {"a": x["b"], "b": x["a"]}
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**swapped)
    assert [violation.argument for violation in caught.value.violations] == ["a", "b"]
    with pytest.raises(ContractError) as caught:
        kda_jax.packed_decode(**x | {"initial_state": x["initial_state"].swapaxes(2, 3)})
    assert [violation.argument for violation in caught.value.violations] == ["initial_state"]


# Questions


@each_implementation
def test_the_first_token_after_a_handed_over_state(implementation):
    tokens = [base((3,), dtype="float32", seed=seed) for seed in range(33)]
    pool = np.zeros((6, 4, 32, 64))
    fixed = {name: tokens[0][name] for name in ("A_log", "dt_bias")}
    for token in tokens[:32]:
        _, pool = oracle.packed_decode(
            **token | fixed | {"initial_state": pool}, use_qk_l2norm_in_kernel=True
        )
    expected_out, expected = oracle.packed_decode(
        **tokens[32] | fixed | {"initial_state": pool}, use_qk_l2norm_in_kernel=True
    )
    handed = tokens[32] | fixed | {"initial_state": pool.astype(np.float32)}
    out, state = decode(handed, implementation, use_qk_l2norm_in_kernel=True)
    assert_near(out, expected_out, 2e-6)
    assert_near(np.asarray(state)[3], expected[3], 2e-6)


@each_implementation
def test_which_implementation_ran_can_be_seen(implementation):
    x = base()
    assert (
        kda_jax.explain(kda_jax.packed_decode, **x, implementation=implementation).implementation
        == implementation
    )
    text = lowered_text(lambda y: kda_jax.packed_decode(**y, implementation=implementation), x)
    assert f"kda_packed_decode_{implementation}" in text
