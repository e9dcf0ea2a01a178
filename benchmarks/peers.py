"""The peers on the shapes of `kda-jax bench`, in PyTorch, beside an in-place multiply of their own.

    python benchmarks/peers.py [--shapes ...] [--sglang FOLDER] --output FILE

FLA's recurrent KDA kernel comes from the package fla-core, SGLang's packed one from the folder of
its installed package, whose own __init__ (a whole server) is not run. Each is compared with float64
first. Then a call is captured with its layers in a CUDA graph; a figure is the median replay over
the calls in it, and `ceiling_us` is PyTorch's in-place multiply in such a graph, over the same
bytes. Pools rotate, slots and operands are random. SGLang's CUDA kernel and jax-linear-attention
are not measured.
"""

import argparse
import importlib
import importlib.util
import os
import statistics
import sys
import types

import torch

from kda_jax.tools import oracle, records
from kda_jax.tools.bench import GRID

K = V = 128
COLD_BYTES, MAX_LAYERS, REPLAYS = 200e6, 96, 7
OUT_LIMIT, STATE_LIMIT = 4e-3, 1e-5  # relative; the peers round their sums in their own order


def fla_op():
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    def op(pool, x):
        B, HV = x["b"].shape
        fused_recurrent_kda_fwd(
            q=x["q"],
            k=x["k"],
            v=x["v"],
            g=x["a"].view(1, B, HV, K),
            beta=x["b"].view(1, B, HV),
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
            initial_state=pool,
            inplace_final_state=True,
            state_v_first=True,
            cu_seqlens=x["cu_seqlens"],
            ssm_state_indices=x["slots"],
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            out=x["out"].view(1, B, HV, V),
        )

    return op


def sglang_op(folder):
    """SGLang's Triton kernel, with the modules around it in place of the server's."""
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention"):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split(".")[1:])]
        sys.modules[name] = module
    cuda = types.ModuleType("sglang.kernels.ops.attention.kda_packed_decode")
    # The Triton kernel is what is timed.
    setattr(cuda, "covered", lambda *arguments: False)  # noqa: B010
    sys.modules["sglang.kernels.ops.attention.kda_packed_decode"] = cuda
    setattr(sys.modules["sglang.kernels.ops.attention"], "kda_packed_decode", cuda)  # noqa: B010
    common: types.ModuleType = types.ModuleType("sglang.srt.utils.common")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    # A module has no such attribute to a type checker.
    setattr(common, "torch_release", release)  # noqa: B010
    sys.modules |= {
        "sglang.srt": types.ModuleType("sglang.srt"),
        "sglang.srt.utils": types.ModuleType("sglang.srt.utils"),
    }
    sys.modules["sglang.srt.utils.common"] = common
    kernel = importlib.import_module(
        "sglang.kernels.ops.attention.fla.fused_recurrent"
    ).fused_recurrent_kda_packed_decode

    def op(pool, x):
        names = ("mixed_qkv", "a", "b", "A_log", "dt_bias")
        kernel(
            *(x[name] for name in names),
            K**-0.5,
            pool,
            x["out"],
            x["slots"],
            use_qk_l2norm_in_kernel=True,
        )

    return op


def sglang_folder(given):
    """The folder of the installed package, found without running it, or None."""
    if given:
        return given
    spec = importlib.util.find_spec("sglang")
    return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None


def multiply(pool, x):
    pool.mul_(0.999)


def check(op, name):
    """Ends the run unless the op meets the oracle. FLA takes q, k and v apart from mixed_qkv."""
    B, HV = 5, 3
    x = operands(B, HV, seed=0)
    qkv = x["mixed_qkv"].view(B, 3, HV, K)
    x |= {part: qkv[:, i].contiguous()[None] for i, part in enumerate("qkv")}
    exact = {
        part: x[part].double().cpu().numpy() for part in ("mixed_qkv", "a", "b", "A_log", "dt_bias")
    }
    pool, slots = x.pop("pool"), x["slots"].cpu().numpy()
    wanted, after = oracle.packed_decode(
        **exact,
        initial_state=pool.double().cpu().numpy(),
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )
    op(pool, x)
    torch.cuda.synchronize()
    out = x["out"].double().cpu().numpy()
    oracle.must_be_near(f"{name}, out", out, wanted, OUT_LIMIT)
    state = pool.double().cpu().numpy()
    oracle.must_be_near(f"{name}, pool", state[slots], after[slots], STATE_LIMIT)


def operands(B, HV, seed):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    S = B + max(B // 4, 3)
    return {
        "mixed_qkv": normal(B, 3 * HV * K),
        "a": normal(B, HV * K) * 0.5,
        "b": normal(B, HV),
        "q": normal(1, B, HV, K),
        "k": normal(1, B, HV, K),
        "v": normal(1, B, HV, V),
        "A_log": torch.log(torch.rand(HV, generator=generator, device="cuda") * 15 + 1),
        "dt_bias": normal(HV * K, dtype=torch.float32) - 2,
        "slots": torch.randperm(S, generator=generator, device="cuda")[:B].to(torch.int32),
        "cu_seqlens": torch.arange(B + 1, device="cuda"),
        "out": torch.empty(B, 1, HV, V, dtype=torch.bfloat16, device="cuda"),
        "pool": normal(S, HV, V, K, dtype=torch.float32),
    }


def replay_us(op, pools, inputs):
    """Median microseconds of one call in a captured graph of all layers, three times over."""
    for pool, x in zip(pools, inputs, strict=True):
        op(pool, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            for pool, x in zip(pools, inputs, strict=True):
                op(pool, x)
    times = []
    for _ in range(REPLAYS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (3 * len(pools)))
    return statistics.median(times[1:])


def peers(folder):
    """{name: op} of those that are installed and right; why not, is printed."""
    ops = {}
    for name, make in (("fla", fla_op), ("sglang", lambda: sglang_op(folder))):
        try:
            op = make()
            check(op, name)
            ops[name] = op
        except (Exception, SystemExit) as error:
            print(f"{name} is left out: {error!r}", flush=True)
    return ops


def measure(B, HV, ops):
    layers = int(min(MAX_LAYERS, max(2, -(-COLD_BYTES // (B * HV * V * K * 4)))))
    inputs = [operands(B, HV, seed) for seed in range(layers)]
    pools = [x.pop("pool") for x in inputs]
    row: dict = {"B": B, "HV": HV, "layers": layers}
    row["ceiling_us"] = replay_us(multiply, [pool[:B] for pool in pools], inputs)
    for name, op in ops.items():
        row[f"{name}_us"] = replay_us(op, pools, inputs)
        row[f"{name}_of_ceiling"] = row[f"{name}_us"] / row["ceiling_us"]
    return row


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=GRID, help="BxHV,... (default: the whole grid)")
    parser.add_argument("--sglang", help="the folder of the installed package sglang")
    options = records.parse(parser, arguments)
    if not torch.cuda.is_available():
        parser.error("these times mean something on a GPU only, and PyTorch sees none")
    ops = peers(sglang_folder(options.sglang))
    if not ops:
        raise SystemExit("no peer is here and right: nothing is timed")
    record = records.start(
        options,
        packages=("torch", "triton", "fla-core", "sglang"),
        device=torch.cuda.get_device_name(),
        pool_dtype="float32",
        **dict(K=K, V=V, peers=[*ops]),
    )
    for shape in options.shapes.split(","):
        B, HV = map(int, shape.split("x"))
        record.add("rows", measure(B, HV, ops))
    return record.finish()


if __name__ == "__main__":
    main()
