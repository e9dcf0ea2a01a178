"""Every kernel where it could read or write past its operands, under a memory checker, on a GPU.

    python tests/helpers/memcheck.py [--output FILE]

starts itself under compute-sanitizer, with an allocation of its own for each array, and records
what ran and how many errors there were. The pool reaches past 4 GiB; its slots lie around that
edge and outside the pool; boundaries lie past the tokens. `--here` runs without the checker.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the GPU

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_contracts import Sizes
from kda_jax.tools import bench, records
from kda_jax.tools.synthetic import random_operands

TOOL = "compute-sanitizer"
RAN = "ran: "  # begins a line that goes into the record
TOKENS = 20
# Sequences of 0 to 9 tokens, and a boundary past the tokens.
BOUNDS = (0, 9, 9, 10, 16, 16, 17, 18, 30)


def sizes_of(toy):
    """(sizes, first slot beyond the edge): 4 GiB, or a few slots of a toy."""
    edge, HV, width = (5, 1, 32) if toy else (2**32 // (32 * 128 * 128 * 4), 32, 128)
    return Sizes(B=8, H=HV, HV=HV, K=width, V=width, S=edge + 3), edge


def decode(name, sizes, edge):
    """packed_decode from its own slots and from others; then tokens and drafts of the update."""
    x = random_operands(Sizes(**vars(sizes) | {"S": 1}))
    del x["initial_state"]
    x = {key: jnp.asarray(array) for key, array in x.items()}
    slots = (edge - 1, edge, edge + 2, edge + 3, -1, 2**31 - 1, -(2**31), 0)
    x["ssm_state_indices"] = jnp.array(slots, jnp.int32)
    live, whole = [0, 1, 2, 7], (sizes.S, sizes.HV, sizes.V, sizes.K)
    for what, sources in (("no sources", None), ("sources", (2, -1, edge + 1, 0, 1, 2, 3, 2**30))):
        others = {} if sources is None else {"source_indices": jnp.array(sources, jnp.int32)}
        step = jax.jit(
            lambda pool, others: kda_jax.packed_decode(
                **x, **others, initial_state=pool, implementation=name
            ),
            donate_argnums=0,
        )
        out, pool = step(jnp.ones(whole), others)
        assert np.asarray(out).any((1, 2, 3)).nonzero()[0].tolist() == live
        assert bool((pool[1 : edge - 1] == 1).all())
        print(f"{RAN}{name}, {what}", flush=True)
    # Drafts go to slots below those of the sequences, to none, and outside the pool.
    writes = jnp.arange(TOKENS, dtype=jnp.int32) * 2 + edge - 60
    writes = writes.at[:2].set(jnp.array([-1, edge + 5]))[None]
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, a = (
        jax.random.normal(key, (1, TOKENS, sizes.HV, sizes.K), jnp.bfloat16) for key in keys
    )
    verify = jax.jit(
        lambda pool: kda_jax.fused_sigmoid_gating_kda_update(
            *(x["A_log"], x["dt_bias"], q, k, v, a, a[..., 0], pool, x["ssm_state_indices"]),
            cu_seqlens=jnp.array(BOUNDS, jnp.int32),
            intermediate_states=writes,
            implementation=name,
        ),
        donate_argnums=0,
    )
    jax.block_until_ready(verify(jnp.ones(whole)))
    print(f"{RAN}{name}, several tokens", flush=True)


def prefill(name):
    """chunk_kda: dense rows, and sequences end to end with padded, empty and cut ones."""
    H, K, V, S = 2, 128, 64, 6
    for what, B, T, slots, bounds in (
        ("dense", 3, 65, (5, -1, 2), None),
        ("sequences", 1, 203, (4, 0, -1, S, 1), (0, 65, 65, 130, 200, 300)),
    ):
        keys = jax.random.split(jax.random.key(T), 6)
        q, k = (jax.random.normal(key, (B, T, H, K), jnp.bfloat16) for key in keys[:2])
        v = jax.random.normal(keys[2], (B, T, H, V), jnp.bfloat16)
        decay = -jnp.abs(jax.random.normal(keys[3], (B, T, H, K)))
        beta = jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, H)))
        pool = jax.random.normal(keys[5], (S, H, V, K))
        cuts = {} if bounds is None else {"cu_seqlens": jnp.array(bounds, jnp.int32)}
        step = jax.jit(
            lambda pool, slots, cuts, rest: kda_jax.chunk_kda(
                *rest, pool, slots, **cuts, implementation=name
            )
        )
        out, after = step(pool, jnp.array(slots, jnp.int32), cuts, (q, k, v, decay, beta))
        assert bool(jnp.isfinite(out).all())
        assert bool((after[3] == pool[3]).all())  # a slot of no sequence
        print(f"{RAN}{name}, prefill, {what}", flush=True)


def run(toy):
    """Every kernel that can run here."""
    sizes, edge = sizes_of(toy)
    names = [x for x in bench.runnable("mosaic_gpu,triton") if x != "xla" or toy]
    for name in names:
        decode(name, sizes, edge)
    prefill("xla" if toy else "mosaic_gpu")


def counted(text):
    """(what ran, how many errors) of the checker's output; None where it printed no summary."""
    ran = re.findall(rf"^{RAN}(.*)$", text, re.M)
    summary = re.findall(r"ERROR SUMMARY: (\d+) errors?", text)
    return ran, int(summary[-1]) if summary else None


def checker():
    """The command that runs a program under compute-sanitizer."""
    path = shutil.which(TOOL) or shutil.which(TOOL, path="/usr/local/cuda/bin")
    if path is None:
        raise SystemExit(f"{TOOL} is not here: it comes with the CUDA toolkit")
    return [path, "--tool", "memcheck"]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--here", action="store_true", help="in this process, unchecked")
    parser.add_argument("--toy", action="store_true", help="XLA at toy sizes, on any backend")
    options = records.parse(parser, arguments)
    if options.here:
        run(options.toy)
        return None
    bench.need_a_gpu(toy=False)
    command = [*checker(), sys.executable, __file__, "--here"]
    # One pool for all arrays would hide what one of them reads of another.
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    record = records.start(options, packages=("triton", "jax-triton"), tool=f"{TOOL} memcheck")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout[-4000:], flush=True)
    ran, errors = counted(done.stdout)
    record.results |= {"ran": ran, "errors": errors, "exit_code": done.returncode}
    if errors is None or done.returncode:
        raise SystemExit(f"{TOOL} or the program under it failed: nothing is recorded")
    return record.finish()


if __name__ == "__main__":
    main()
