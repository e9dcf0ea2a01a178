"""The base call of the real faults, and inputs that make one inner quantity visible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import IMPLEMENTATIONS, assert_near, assert_same_bits, decode, on_device

import kda_jax
from kda_contracts import Sizes
from kda_jax.tools import oracle
from kda_jax.tools.synthetic import random_operands

BASE = Sizes(B=3, H=2, HV=4, K=64, V=32, S=6)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def base(slots=(4, -1, 0), *, dtype="bfloat16", seed=0, **sizes):
    """The operands of the base call: a pool of 0.1 * N(0, 1), never zeros."""
    sizes = Sizes(**vars(BASE) | {"B": len(slots)} | sizes)
    x = random_operands(sizes, seed=seed, dtype=dtype)
    x["initial_state"] *= np.float32(0.1)
    x["ssm_state_indices"] = np.array(slots, np.int32)
    return x


def untouched(before, after, slots):
    """Slots that no row names keep their bits."""
    others = np.setdiff1d(np.arange(len(before)), slots)
    assert_same_bits(np.asarray(after)[others], np.asarray(before)[others])


def one_row(k=(0, 2), v=(1, -1), q=(3, 4), pool=((1, 2), (3, 4)), *, slots=3, slot=2, K=32, V=16):
    """A call worked out by hand, K = V = 2 and H = HV = 1, in the corner of a larger head."""

    def corner(values, length):
        return np.pad(np.array(values, np.float32), (0, length - len(values)))

    state = np.zeros((slots, 1, V, K), np.float32)
    state[slot, 0, :2, :2] = pool
    return {
        "mixed_qkv": np.concatenate([corner(q, K), corner(k, K), corner(v, V)])[None],
        "a": np.zeros((1, K), np.float32),
        "b": np.zeros((1, 1), np.float32),
        "A_log": np.zeros(1, np.float32),
        "dt_bias": np.zeros(K, np.float32),
        "initial_state": state,
        "ssm_state_indices": np.array([slot], np.int32),
    }


def assert_epsilon_is_on_the_sum(implementation):
    # k of norm 1e-3, so that k/sqrt(1e-6 + 1e-6) is 1/sqrt(2) in norm. The mean form gives 0.087.
    x = one_row(k=(1e-3, 0), v=(1, 1), q=(1, 0), pool=((0, 0), (0, 0)))
    x["b"][:] = 50
    _, state = decode(x, implementation, use_qk_l2norm_in_kernel=True)
    assert np.asarray(state)[2, 0, 0, 0] == pytest.approx(0.70710678, rel=1e-6)


def assert_steps_follow_changed_indices(implementation):
    """One compiled step over 16 layers, with other slots in every call."""
    x = on_device(base((4, -1, 0), H=4, HV=4, K=128, V=128, S=6, dtype="float32"))
    pools = [x["initial_state"] * (i + 1) for i in range(16)]
    rest = {name: y for name, y in x.items() if name not in ("initial_state", "ssm_state_indices")}

    @jax.jit
    def step(pools, slots):
        return [
            kda_jax.packed_decode(
                **rest, initial_state=p, ssm_state_indices=slots, implementation=implementation
            )
            for p in pools
        ]

    for slots in ((4, -1, 0), (1, 2, 3), (-1, -1, 5), (0, 7, -3)):
        slots = jnp.array(slots, jnp.int32)
        for pool, (out, state) in zip(pools, step(pools, slots), strict=True):
            expected = oracle.packed_decode(
                **{n: np.asarray(y) for n, y in rest.items()},
                initial_state=np.asarray(pool),
                ssm_state_indices=np.asarray(slots),
            )
            assert_near(out, expected[0], 2e-6)
            assert_near(state, expected[1], 2e-6)


def gate_rows(a, dt_bias, A_log, implementation, lower_bound=None, **more):
    """exp(log_decay), [HV, K]: with q = k = v = 0 a pool of ones becomes the decay."""
    HV, K = np.shape(a)
    x = {
        "mixed_qkv": np.zeros((1, HV * (2 * K + 16)), np.float32),
        "a": np.asarray(a, np.float32).reshape(1, -1),
        "b": np.zeros((1, HV), np.float32),
        "A_log": np.asarray(A_log, np.float32),
        "dt_bias": np.asarray(dt_bias, np.float32).reshape(-1),
        "initial_state": np.ones((1, HV, 16, K), np.float32),
        "ssm_state_indices": np.zeros(1, np.int32),
    }
    _, state = decode(x, implementation, lower_bound=lower_bound, **more)
    state = np.asarray(state)[0]
    assert (state == state[:, :1]).all()
    return state[:, 0]
