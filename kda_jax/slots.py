"""Slots of the state pool: checked, padded, cleared, narrowed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_contracts import ContractError
from kda_jax import call, pools
from kda_jax.call import Array, Pool


def validate_slots(
    slots: Array | Sequence[int],
    num_slots: int,
    sources: Array | Sequence[int] | None = None,
) -> None:
    """Checks a batch's slots on the host, before a step.

    The op itself checks no value, so that nothing synchronizes.

    Args:
      slots: `[B]` integers, a NumPy or JAX array or a list (a JAX array is fetched from its
        device). -1 is a padded row; every other value must be in `[0, num_slots)` and occur once.
      num_slots: S, the slots of the pool.
      sources: None, or `[B]` integers: the slots that the live rows read. -1 starts a row from a
        zero state; every other value must be in `[0, num_slots)`, and no row may read a slot
        that another row writes.

    Raises:
      ContractError: names the first rows and values that are out of range, repeated, or read while
        written.
      TypeError: the slots are traced, or not integers.

    >>> validate_slots([4, -1, 0, -1], 6)
    >>> validate_slots([4, 6, 4], 6)
    Traceback (most recent call last):
    ...
    kda_contracts.judge.ContractError: kda_jax.validate_slots: 2 rows break the contract
      row 1 has slot 6: it must be -1 (a padded row) or in [0, 6)
      row 2 has slot 4, as row 0 has: two rows of one step may not share a slot
    """
    slots = _integers(slots)
    faults, first_row = [], {}
    for row, slot in enumerate(slots):
        if slot == -1:
            continue
        if not 0 <= slot < num_slots:
            faults.append(
                f"row {row} has slot {slot}: it must be -1 (a padded row) or in [0, {num_slots})"
            )
        elif first_row.setdefault(slot, row) != row:
            faults.append(
                f"row {row} has slot {slot}, as row {first_row[slot]} has: "
                "two rows of one step may not share a slot"
            )
    sources = [-1] * len(slots) if sources is None else _integers(sources)
    if len(sources) != len(slots):
        raise ContractError(f"kda_jax.validate_slots: {len(sources)} sources for {len(slots)} rows")
    for row, source in enumerate(sources):
        if slots[row] == -1 or source == -1:
            continue
        if not 0 <= source < num_slots:
            faults.append(
                f"row {row} has source {source}: "
                f"it must be -1 (a zero state) or in [0, {num_slots})"
            )
        elif first_row.get(source, row) != row:
            faults.append(
                f"row {row} reads slot {source}, "
                f"which row {first_row[source]} writes in the same step"
            )
    if faults:
        shown = faults[:10] + ([f"and {len(faults) - 10} more"] if len(faults) > 10 else [])
        rows = "1 row breaks" if len(faults) == 1 else f"{len(faults)} rows break"
        raise ContractError("\n  ".join([f"kda_jax.validate_slots: {rows} the contract", *shown]))


def pad_slots(slots: Array | Sequence[int], B: int) -> Array:
    """A batch's slots padded with -1 to B rows, for a step that was compiled for B.

    No stale index stays behind.

    Args:
      slots: `[n]` integers with n <= B, a NumPy or JAX array (or a tracer) or a list.
      B: rows of the step.

    Returns:
      `[B]`, of the same library and dtype (int32 for a list).

    Raises:
      ContractError: there are more than B rows, or the slots are not `[n]` signed integers.

    >>> pad_slots([4, 2, 0], 5)
    array([ 4,  2,  0, -1, -1], dtype=int32)
    """
    given = _signed("pad_slots", slots)
    if given.shape[0] > B:
        raise ContractError(
            f"kda_jax.pad_slots: slots must be [n] with n <= B={B} (got {given.shape})"
        )
    library = jnp if isinstance(given, jax.Array) else np
    return library.pad(given, (0, B - given.shape[0]), constant_values=-1)


def clear_slots(pool: Pool, slots: Array | Sequence[int]) -> jax.Array:
    """Zeroes the state of some slots, as a new request wants it.

    A freed slot keeps its last tenant's state.

    Args:
      pool: `[S, HV, V, K]` (or any array led by S), an array or a `jax.Ref`; any dtype.
      slots: `[n]` integer; values outside `[0, S)` are passed over, repeated ones do no harm.

    Returns:
      The pool with zeros there; None for a Ref.

    Effects:
      As `packed_decode`: in place when donated inside `jit` or passed as a Ref, else on a copy.

    Raises:
      ContractError: the slots are not `[n]` signed integers, or the pool is not one array.

    >>> import jax.numpy as jnp
    >>> clear_slots(jnp.ones((3, 2)), jnp.array([1, -1])).tolist()
    [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """
    if not getattr(pool, "shape", ()) or not hasattr(pool, "dtype"):
        raise ContractError(
            "kda_jax.clear_slots: the pool must be one array led by S "
            f"(got {type(pool).__name__}); "
            "layers' pools in a list are cleared one by one"
        )
    slots = _signed("clear_slots", slots)
    arrays = dict(pool=pool, slots=slots)
    if call.is_cut(arrays):
        specs = (call.explicit_cut(pool),)
        return call.in_auto_axes(clear_slots, "kda_jax.clear_slots", arrays, specs)
    return _clear(pool, pools.as_int32(slots))


@jax.jit
def _clear(pool, slots):
    state, slots = pools.opened(pool, slots)
    return pools.closed(pool, pools.write(state, slots, jnp.zeros((), state.dtype)))


def _signed(name, slots) -> Any:
    """`[n]` signed integers as an array, or a ContractError.

    A list becomes int32, or int64 where it must.
    """
    if not hasattr(slots, "dtype"):
        listed = np.asarray(slots)
        narrow = listed.size == 0 or (listed.dtype.kind == "i" and np.abs(listed).max() < 2**31)
        slots = listed.astype(np.int32) if narrow else listed
    if slots.ndim != 1 or np.dtype(slots.dtype).kind != "i":
        raise ContractError(
            f"kda_jax.{name}: slots must be [n] signed integers (got {slots.shape} {slots.dtype})"
        )
    return slots


def _integers(slots):
    if isinstance(slots, jax.core.Tracer):
        raise TypeError(
            "kda_jax.validate_slots reads values, and a traced array has none: call it outside jit"
        )
    slots = np.asarray(slots)
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and slots.size):
        raise TypeError(
            f"kda_jax.validate_slots takes [B] integers (got {slots.shape} {slots.dtype})"
        )
    return slots.tolist()
