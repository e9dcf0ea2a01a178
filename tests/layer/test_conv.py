"""The short convolution and the gated norm against NumPy: widths, short sequences, slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_near, assert_rounded, assert_same_bits

from kda_jax.conv import conv_decode, conv_prefill
from kda_jax.norm import gated_rms_norm

C, S = 5, 6


def make(W, T, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    return normal(T, C), normal(C, W), normal(S, C, W - 1)


def by_hand(x, weight, past, bias=0.0):
    """One sequence: [T, C] after SiLU, and the last W-1 inputs, in float64."""
    seen = np.concatenate([past.T, x]).astype(np.float64)
    W = weight.shape[1]
    y = (
        np.stack([(seen[t : t + W] * weight.T).sum(0) for t in range(len(x))])
        if len(x)
        else np.zeros((0, C))
    )
    y = y + bias
    return y / (1 + np.exp(-y)), seen[len(seen) - (W - 1) :].T


@pytest.mark.parametrize("W", [1, 2, 3, 4, 7])
def test_sequences_of_any_length(W):
    lengths, slots = (0, 1, 2, 3, 9), np.array([5, 0, 3, -1, 2], np.int32)
    bounds = np.cumsum((0, *lengths))
    x, weight, pool = make(W, bounds[-1] + 2)  # two tokens of no sequence
    y, after = conv_prefill(*map(jnp.asarray, (x, weight, pool)), slots, jnp.asarray(bounds))
    wanted = pool.copy()
    for n, slot in enumerate(slots):
        part = slice(bounds[n], bounds[n + 1])
        if slot < 0:
            assert not np.asarray(y)[part].any()
            continue
        expected, wanted[slot] = by_hand(x[part], weight, pool[slot])
        assert_near(y[part], expected, 1e-6)
    assert_same_bits(after, wanted)
    assert not np.asarray(y)[bounds[-1] :].any()


@pytest.mark.parametrize("W", [1, 2, 4])
def test_decode_is_prefill_of_one_token(W):
    x, weight, pool = map(jnp.asarray, make(W, 4))
    x = x.at[2].set(jnp.nan)
    slots = jnp.array([3, 0, S, 5], jnp.int8)
    y, after = conv_decode(x, weight, pool, slots)
    expected, wanted = conv_prefill(x, weight, pool, slots, jnp.arange(5))
    assert_near(y, expected, 1e-6)
    assert_same_bits(after, wanted)
    assert not np.asarray(y)[2].any()


def test_a_bias_is_added_before_silu():
    lengths, slots = (2, 0, 3, 1), np.array([5, 0, -1, 2], np.int32)
    bounds = np.cumsum((0, *lengths))
    x, weight, pool = make(4, bounds[-1] + 1)
    bias = np.random.default_rng(5).standard_normal(C).astype(np.float32)
    held = map(jnp.asarray, (x, weight, pool))
    y, after = conv_prefill(*held, slots, jnp.asarray(bounds), bias=jnp.asarray(bias))
    wanted = pool.copy()
    for n in (0, 3):
        part = slice(bounds[n], bounds[n + 1])
        expected, wanted[slots[n]] = by_hand(x[part], weight, pool[slots[n]], bias)
        assert_near(y[part], expected, 1e-6)
    assert_same_bits(after, wanted)
    assert not np.asarray(y)[2:5].any() and not np.asarray(y)[-1:].any()  # padded, and of none

    rows = jnp.asarray(x[:4]).at[2].set(jnp.nan)
    y, after = conv_decode(rows, jnp.asarray(weight), jnp.asarray(pool), slots, bias=bias)
    for n in (0, 1, 3):
        expected, window = by_hand(x[n : n + 1], weight, pool[slots[n]], bias)
        assert_near(y[n : n + 1], expected, 1e-6)
        assert_same_bits(after[slots[n]], window.astype(np.float32))
    assert not np.asarray(y)[2].any()


def test_boundaries_behind_the_tokens_are_clipped():
    x, weight, pool = map(jnp.asarray, make(4, 8))
    slots = jnp.array([3, 1])
    got = conv_prefill(x, weight, pool, slots, jnp.array([0, 4, 20]))
    wanted = conv_prefill(x, weight, pool, slots, jnp.array([0, 4, 8]))
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)


def test_an_empty_sequence_writes_no_window():
    x, weight, pool = map(jnp.asarray, make(4, 4))
    slots, sources = jnp.array([2, 0]), jnp.array([2, -1])
    _, after = conv_prefill(x, weight, pool, slots, jnp.array([0, 4, 4]), sources=sources)
    assert_same_bits(after[0], pool[0])
    assert (np.asarray(after)[2] != np.asarray(pool)[2]).any()


def test_sources_and_refs():
    x, weight, pool = map(jnp.asarray, make(4, 3))
    slots, bounds = jnp.array([1, 2]), jnp.array([0, 2, 3])
    y, after = conv_prefill(x, weight, pool, slots, bounds, sources=jnp.array([-1, 4]))
    empty, moved = pool.at[1].set(0.0), pool.at[2].set(pool[4])
    assert_near(y[:2], conv_prefill(x[:2], weight, empty, slots[:1], bounds[:2])[0], 1e-6)
    assert_near(y[2:], conv_prefill(x[2:], weight, moved, slots[1:], jnp.array([0, 1]))[0], 1e-6)
    ref = jax.new_ref(pool)
    assert conv_prefill(x, weight, ref, slots, bounds, sources=jnp.array([-1, 4]))[1] is None
    assert_same_bits(ref[...], after)
    _, stepped = conv_decode(x, weight, after, jnp.array([0, 1, -1]))
    assert conv_decode(x, weight, ref, jnp.array([0, 1, -1]))[1] is None
    assert_same_bits(ref[...], stepped)


def test_the_norm_rounds_once():
    rng = np.random.default_rng(0)
    x, gate = (rng.standard_normal((64, 128)).astype(jnp.bfloat16) for _ in range(2))
    weight = rng.standard_normal(128, dtype=np.float32)
    wide = x.astype(np.float64)
    wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    wanted = wide * weight / (1 + np.exp(-gate.astype(np.float64)))
    # A second rounding, before the gate, would leave a quarter of the elements off the nearest.
    assert_rounded(gated_rms_norm(*map(jnp.asarray, (x, gate, weight))), wanted, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_is_a_gated_rms_norm(dtype):
    rng = np.random.default_rng(0)
    x, gate = (
        rng.standard_normal((3, 4, 8), dtype=np.float32).astype(jnp.dtype(dtype)) for _ in range(2)
    )
    weight = rng.standard_normal(8, dtype=np.float32)
    wide = x.astype(np.float64)
    wanted = (
        wide
        / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
        * weight
        / (1 + np.exp(-gate.astype(np.float64)))
    )
    y = gated_rms_norm(jnp.asarray(x), jnp.asarray(gate), jnp.asarray(weight), eps=1e-3)
    assert y.dtype == jnp.dtype(dtype)
    assert_near(y, wanted, 1e-6 if dtype == "float32" else 4e-3)
