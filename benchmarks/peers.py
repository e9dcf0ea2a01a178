"""The peers, beside the ceiling, on the same shapes: FLA's recurrent KDA kernel and SGLang's packed one, in PyTorch.

    python benchmarks/peers.py [--shapes ...] [--sglang FOLDER] --output FILE

Each call is captured with its layers in a CUDA graph; a figure is the median replay over the calls in it. FLA comes
from the package fla-core; SGLang's kernel from the folder of its installed package, whose own __init__ (a whole server)
is not run. Pools rotate, slots and operands are random, as in `kda-jax bench`.
"""

import argparse
import datetime
import importlib
import json
import os
import statistics
import sys
import types

import torch

K = V = 128
COLD_BYTES, MAX_LAYERS, REPLAYS = 200e6, 96, 7


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
    setattr(cuda, "covered", lambda *arguments: False)  # noqa: B010, the Triton kernel is what is timed
    sys.modules["sglang.kernels.ops.attention.kda_packed_decode"] = cuda
    setattr(sys.modules["sglang.kernels.ops.attention"], "kda_packed_decode", cuda)  # noqa: B010
    common: types.ModuleType = types.ModuleType("sglang.srt.utils.common")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    setattr(common, "torch_release", release)  # noqa: B010, a module has no such attribute to a type checker
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


def multiply(pool, x):
    pool.mul_(0.999)


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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", required=True, help="BxHV,...")
    parser.add_argument("--sglang", help="the folder of the installed package sglang")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    ops = {"ceiling": multiply}
    for name, make in (("fla", fla_op), ("sglang", lambda: sglang_op(options.sglang))):
        try:
            ops[name] = make()
        except Exception as error:
            print(f"{name} is left out: {error!r}")
    results: dict = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "pool_dtype": "float32",
        "rows": [],
    }
    for shape in options.shapes.split(","):
        B, HV = map(int, shape.split("x"))
        layers = int(min(MAX_LAYERS, max(2, -(-COLD_BYTES // (B * HV * V * K * 4)))))
        inputs = [operands(B, HV, seed) for seed in range(layers)]
        pools = [x.pop("pool") for x in inputs]
        row: dict = {"B": B, "HV": HV, "layers": layers}
        for name, op in ops.items():
            try:
                row[f"{name}_us"] = replay_us(
                    op, [pool[:B] for pool in pools] if name == "ceiling" else pools, inputs
                )
            except Exception as error:
                print(f"{name} at {shape}: {error!r}")
        results["rows"].append(row)
        print(shape, {key: round(value, 2) for key, value in row.items()}, flush=True)
        del inputs, pools
    with open(options.output, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
