"""The Triton kernel without a GPU: it compiles to machine code for capabilities 9.0 and 8.0."""

import subprocess
import sys

import pytest
from cases import SHAPES, make_call
from support import WITH_TRITON

import kda_jax

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kda_jax import decode_triton_kernel

capability, K, V, T, pool, lower_bound = eval(sys.argv[1])
pointers = ["*bf16"] * 5 + ["*fp32"] * 2 + ["*i32"] * 4 + ["*" + pool, "*bf16", "*" + pool]
names = "q k v a b A_log dt_bias slots sources cu_seqlens writes pool out states".split()
constants = dict(
    S=9, N=5, T=T, H=1, HV=3, K=K, V=V, BK=triton.next_power_of_2(K), BV=4,
    q_stride=K, v_stride=3 * V, k_start=0, v_start=0, scale=0.5, lower_bound=lower_bound,
    softplus_beta=1.0 if T == 1 else 0.5, softplus_threshold=20.0 if T == 1 else 10.0,
    allow_neg_eigval=T > 1, activated=T == 2, use_qk_l2norm=True, has_sources=True, varlen=T == 9,
    has_writes=T > 1, update_state=True, intermediate=T > 2, largest=3.4e38, epsilon=1e-6,
)
kernels = decode_triton_kernel.kda_update, decode_triton_kernel.kda_update_aliased
for kernel, extra in zip(kernels, ([], ["same_pool"])):
    signature = dict(zip(names + extra, pointers + ["*" + pool] * len(extra)))
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 1})
    assert compiled.asm["cubin"], "no machine code"
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    # Offsets into the pool are 64 bits wide: the slot is widened before it is multiplied.
    assert "mul.lo.s64" in compiled.asm["ptx"] or "mad.lo.s64" in compiled.asm["ptx"]
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (90, 128, 128, 1, "fp32", None),
        (90, 60, 24, 4, "bf16", -5.0),
        (80, 128, 128, 2, "fp32", -5.0),
        (80, 7, 100, 9, "fp16", None),
    ],
    ids=str,
)
def test_compiles_without_a_gpu(case, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr(case)], capture_output=True, text=True
    )
    assert run.stdout.strip() == "compiled", run.stderr[-2000:]


@pytest.mark.parametrize("is_set", [False, True])
def test_importing_it_leaves_the_cache_of_other_triton_kernels_alone(is_set, monkeypatch, tmp_path):
    pytest.importorskip("jax_triton")
    kept = tmp_path if is_set else None
    if is_set:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(kept))
    else:
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    program = "import os, kda_jax.decode_triton; print(os.environ.get('TRITON_CACHE_DIR'))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == str(kept), run.stderr[-2000:]


@pytest.mark.skipif(WITH_TRITON, reason="asks what is said without jax-triton or a GPU")
def test_without_jax_triton_the_reason_is_given():
    explained = kda_jax.explain(kda_jax.packed_decode, **make_call(SHAPES["k60_v24"]).operands)
    assert "jax-triton" in explained.reasons["triton"]
    with pytest.raises(NotImplementedError, match="jax-triton"):
        kda_jax.packed_decode(**make_call(SHAPES["k60_v24"]).operands, implementation="triton")


@pytest.mark.skipif(not WITH_TRITON, reason="needs a GPU and jax-triton")
def test_auto_takes_triton_where_mosaic_cannot_run():
    assert (
        kda_jax.explain(
            kda_jax.packed_decode, **make_call(SHAPES["k60_v24"]).operands
        ).implementation
        == "triton"
    )
    assert (
        kda_jax.explain(
            kda_jax.packed_decode, **make_call(SHAPES["k64_v32"]).operands
        ).implementation
        == "mosaic_gpu"
    )
