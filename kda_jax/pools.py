"""A pool of slots as XLA reads and writes it: which slot is live, and what may not wrap.

The kernels have their own guards, each with a test.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.transforms import ref_must_be_mapped


def is_ref(x):
    """Whether the pool came as a `jax.Ref` (to be mutated) and not as an array."""
    return isinstance(x, jax.Ref)


def as_int32(indices) -> Any:
    """Indices as int32, judged before they are narrowed.

    What int32 cannot hold becomes a padded row, never slot 0. None stays None.
    """
    if indices is None:
        return None
    if isinstance(indices, np.ndarray):
        return np.clip(indices.astype(np.int64), -1, np.iinfo(np.int32).max).astype(np.int32)
    if indices.dtype.itemsize > 4:
        indices = jnp.clip(indices, -1, np.iinfo(np.int32).max)
    return indices.astype(jnp.int32)


def padded(more, *indices) -> Any:
    """Indices with so many padded rows behind them; None among them stays None."""
    return [None if x is None else jnp.pad(x, (0, more), constant_values=-1) for x in indices]


def inside(slots, S):
    """Whether each slot is one of the pool's S slots. All others mark padded rows."""
    return (slots >= 0) & (slots < S)


def opened(pool, slots, *others, written=True):
    """`(state, slots)`: the values of a pool, and its slots unchanged.

    A Ref that is to be written may not be shared by the elements of a vmap: then this raises.
    `others` are the further operands, None among them, that a vmap may map.
    """
    if not is_ref(pool):
        return jnp.asarray(pool), slots
    if written:
        slots = ref_must_be_mapped(pool, slots, *(x for x in others if x is not None))
    return pool[...], slots  # the Ref's own buffer: nothing is copied inside jit


def closed(pool, state, *, written=True) -> Any:
    """What an op returns for its pool: the updated state, or None for a Ref, which takes it."""
    if not is_ref(pool):
        return state
    if written:
        pool[...] = state
    return None


def unchanged(pool) -> Any:
    """What an op returns for a pool that it does not touch: its values, or None for a Ref."""
    return None if is_ref(pool) else jnp.asarray(pool)


def sources_of(slots, sources, S):
    """`[N]`: the slot that each row goes on from, its own where `sources` is None; S for none.

    None, outside the pool, is brought to the high side: a negative index would wrap.
    """
    sources = slots if sources is None else sources
    return jnp.where(inside(slots, S) & inside(sources, S), sources, S)


def read(state, slots, sources=None):
    """`[N, ...]`: what each row's slot or source holds; zeros outside the pool and if padded."""
    sources = sources_of(slots, sources, state.shape[0])
    return state.at[sources].get(mode="fill", fill_value=0)


def write(state, slots, values, where=True):
    """The state with `values[n]` in slot n, where that is inside the pool and `where` holds."""
    S = state.shape[0]
    slots = jnp.where(inside(slots, S) & where, slots, S)
    return state.at[slots].set(values, mode="drop")


def apart(slots, S):
    """The slots, with an index of its own behind the pool for each padded row.

    Rows of one step have different slots, so that all indices are distinct: then XLA scatters
    without atomics.
    """
    return jnp.where(inside(slots, S), slots, S + jnp.arange(slots.shape[0], dtype=slots.dtype))
