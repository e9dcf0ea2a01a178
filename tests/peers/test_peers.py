"""Against FLA's own recurrent KDA, on a GPU where torch and fla-core are installed."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import GATES
from support import IMPLEMENTATIONS, ON_GPU, assert_near

import kda_jax

pytestmark = [pytest.mark.peer, pytest.mark.gpu]
N, T, H, HV, K, V = 3, 5, 2, 4, 64, 32
LIMIT = 1e-5  # both sides round their float32 sums in their own order


@pytest.fixture
def fla():
    if not ON_GPU:
        pytest.skip("needs a GPU")
    pytest.importorskip("torch")
    return pytest.importorskip("fla.ops.kda")


def operands(varlen):
    rng = np.random.default_rng(7)
    B, length = (1, N * T) if varlen else (N, T)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    x = dict(q=normal(B, length, H, K), k=normal(B, length, H, K), v=normal(B, length, HV, V))
    x |= dict(a=normal(B, length, HV, K), b=normal(B, length, HV), pool=normal(N, HV, V, K))
    return x | dict(
        A_log=np.log(rng.uniform(1, 16, HV)).astype(np.float32),
        dt_bias=normal(HV * K) - np.float32(2),
    )


def torch_of(x):
    import torch

    return {name: torch.from_numpy(array).cuda() for name, array in x.items()}


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_update_equals_flas_fused_recurrent_kda(fla, implementation, gate, varlen):
    import torch

    x, bounds = operands(varlen), np.array([0, 4, 4, N * T]) if varlen else None
    y = torch_of(x)
    wanted, state = fla.fused_recurrent_kda(
        y["q"], y["k"], y["v"], y["a"], y["b"],
        A_log=y["A_log"],
        dt_bias=y["dt_bias"],
        initial_state=y["pool"].mT.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=GATES[gate],
        cu_seqlens=None if bounds is None else torch.from_numpy(bounds).cuda(),
    )  # fmt: skip
    out, pool = kda_jax.fused_sigmoid_gating_kda_update(
        x["A_log"],
        x["dt_bias"],
        *(jnp.asarray(x[name]) for name in ("q", "k", "v", "a", "b", "pool")),
        jnp.arange(N),
        cu_seqlens=None if bounds is None else jnp.asarray(bounds, jnp.int32),
        lower_bound=GATES[gate],
        implementation=implementation,
    )
    assert_near(out, wanted.cpu().numpy(), LIMIT)
    assert_near(pool, state.mT.cpu().numpy(), LIMIT)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_recurrence_equals_flas_naive_one(fla, implementation):
    naive = pytest.importorskip("fla.ops.kda.naive")
    x = operands(varlen=False)
    decay, beta = -np.logaddexp(0, x["a"]), (1 / (1 + np.exp(-x["b"]))).astype(np.float32)
    x |= dict(q=x["q"] / np.linalg.norm(x["q"], axis=-1, keepdims=True))
    x |= dict(k=x["k"] / np.linalg.norm(x["k"], axis=-1, keepdims=True), a=decay, b=beta)
    y = torch_of(x)
    wanted, state = naive.naive_recurrent_kda(
        y["q"], y["k"], y["v"], y["a"], y["b"], initial_state=y["pool"].mT, output_final_state=True
    )
    out, pool = kda_jax.recurrent_kda(
        *(jnp.asarray(x[name]) for name in ("q", "k", "v", "a", "b", "pool")),
        jnp.arange(N),
        implementation=implementation,
    )
    assert_near(out, wanted.cpu().numpy(), LIMIT)
    assert_near(pool, state.mT.cpu().numpy(), LIMIT)
