"""Slots of the state pool: their host-side check, and how indices are narrowed."""

import jax
import jax.numpy as jnp
import numpy as np

from kda_contracts import ContractError


def validate_slots(indices, num_slots):
    """Checks a batch's slots on the host, before a step: the op itself checks no value, so that nothing synchronizes.

    Args:
      indices: `[B]` integers, a NumPy or JAX array or a list (a JAX array is fetched from its device). -1 is a padded
        row; every other value must be in `[0, num_slots)` and stand there once.
      num_slots: S, the slots of the pool.

    Raises:
      ContractError: names the first rows and values that are out of range or repeated.
      TypeError: the indices are traced, or not integers.

    >>> validate_slots([4, -1, 0, -1], 6)
    >>> validate_slots([4, 6, 4], 6)
    Traceback (most recent call last):
    ...
    kda_contracts.judge.ContractError: kda_jax.validate_slots: 2 rows break the contract
      row 1 has slot 6: it must be -1 (a padded row) or in [0, 6)
      row 2 has slot 4, as row 0 has: two rows of one step may not share a slot
    """
    if isinstance(indices, jax.core.Tracer):
        raise TypeError("kda_jax.validate_slots reads values, which a traced array has not: call it outside jit")
    indices = np.asarray(indices)
    if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
        raise TypeError(f"kda_jax.validate_slots takes [B] integers (got {indices.shape} {indices.dtype})")
    faults, first_row = [], {}
    for row, slot in enumerate(indices.tolist()):
        if slot == -1:
            continue
        if not 0 <= slot < num_slots:
            faults.append(f"row {row} has slot {slot}: it must be -1 (a padded row) or in [0, {num_slots})")
        elif first_row.setdefault(slot, row) != row:
            faults.append(
                f"row {row} has slot {slot}, as row {first_row[slot]} has: two rows of one step may not share a slot"
            )
    if faults:
        shown = faults[:10] + ([f"and {len(faults) - 10} more"] if len(faults) > 10 else [])
        rows = "1 row breaks" if len(faults) == 1 else f"{len(faults)} rows break"
        raise ContractError("\n  ".join([f"kda_jax.validate_slots: {rows} the contract", *shown]))


def as_int32(indices):
    """Slots as int32, judged before they are narrowed: what int32 cannot hold becomes a padded row, never slot 0."""
    if isinstance(indices, np.ndarray):
        return np.clip(indices.astype(np.int64), -1, np.iinfo(np.int32).max).astype(np.int32)
    if indices.dtype.itemsize > 4:
        indices = jnp.clip(indices, -1, np.iinfo(np.int32).max)
    return indices.astype(jnp.int32)


def is_ref(x):
    """Whether the pool came as a `jax.Ref` (to be mutated) and not as an array."""
    return isinstance(x, jax.Ref)
