"""Random schedules of a server, each request against one float64 run over all its tokens.

CI takes 60 of 500 seeds. All of them, two minutes on one core:

    pytest -n 1 -m "" tests/layer/test_schedules.py
"""

import functools
from collections import Counter

import jax.numpy as jnp
import pytest
import schedules

import kda_jax

SEEDS, BATCH = 500, 10  # each test runs a batch of them
GPU_SEEDS = 100


@functools.cache
def layer():
    """One for all seeds, since it holds the compiled steps."""
    config = kda_jax.KDAConfig(D=16, H=1, HV=2, K=16, V=8, gate_rank=8, conv_bias=True)
    return schedules.Layer(config, dtype=jnp.float32, implementation="xla", limit=1e-5)


@functools.cache
def layer_in_kernels():
    config = kda_jax.KDAConfig(D=64, H=1, HV=2, K=64, V=64, gate_rank=64)
    return schedules.Layer(config, dtype=jnp.bfloat16, implementation="mosaic_gpu", limit=2e-2)


def run_batch(layer, first):
    """How often each event happened in a batch. A failure names its seed."""
    events = Counter()
    for seed in range(first, first + BATCH):
        try:
            events += schedules.run(layer, seed)
        except Exception as error:
            error.add_note(f"in the schedule of seed {seed}")
            raise
    return events


@pytest.mark.slow
@pytest.mark.sampled(9)
@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_requests_of_a_random_schedule_meet_their_float64_runs(first):
    events = run_batch(layer(), first)
    # Else the schedules would show less than they promise.
    assert not [event for event in schedules.EVENTS if not events[event]], events


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, GPU_SEEDS, BATCH))
def test_requests_of_a_random_schedule_in_kernels_meet_their_float64_runs(first):
    run_batch(layer_in_kernels(), first)
