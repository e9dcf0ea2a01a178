"""Slots of the state pool: checked, padded, cleared, copied."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_contracts import ContractError
from kda_jax import call, pools
from kda_jax.call import Array


def validate_slots(
    slots: Array | Sequence[int],
    num_slots: int,
    sources: Array | Sequence[int] | None = None,
    *,
    intermediate_states: Array | Sequence[Sequence[int]] | None = None,
    num_accepted_tokens: Array | Sequence[int] | None = None,
    checkpoints: Array | Sequence[Sequence[int]] | None = None,
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
      intermediate_states: None, or a table `[B, L]` of slots, a column for each token. -1 is not
        kept; every other value must be in `[0, num_slots)` and occur once in the tables and slots
        of all live rows, but a row may name its own slot once. Of a table `[1, T]` of a varlen call
        it is not known whose row an entry is: one may be any row's slot.
      num_accepted_tokens: None, or `[B]` integers from 0 to L: from which column a row starts.
      checkpoints: None, or `[B, M]` slots. -1 is not kept; every other value must be in
        `[0, num_slots)`, occur once, and be no row's slot or source.

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
    read = {source: row for row, source in enumerate(sources) if slots[row] != -1 and source != -1}
    faults += _drafted(intermediate_states, num_accepted_tokens, slots, num_slots, first_row, read)
    if checkpoints is not None:
        table = _table("checkpoints", checkpoints, len(slots))
        faults += _kept("checkpoint", table, slots, num_slots, first_row | read, None)
    if faults:
        shown = faults[:10] + ([f"and {len(faults) - 10} more"] if len(faults) > 10 else [])
        wrong = {fault.split()[1] for fault in faults}  # "row 3 has .."
        rows = "1 row breaks" if len(wrong) == 1 else f"{len(wrong)} rows break"
        raise ContractError("\n  ".join([f"kda_jax.validate_slots: {rows} the contract", *shown]))


def _drafted(table, accepted, slots, num_slots, first_row, read):
    """What is wrong with the slots of a draft's tokens, and with how many of them were accepted."""
    if table is None:
        if accepted is not None:
            raise ContractError(
                "kda_jax.validate_slots: `num_accepted_tokens` picks from the slots in "
                "`intermediate_states`: pass them too"
            )
        return []
    table = _table("intermediate_states", table, len(slots))
    one_row = len(table) == 1 != len(slots)
    taken, owner = (read, None) if one_row else (read | first_row, dict(enumerate(slots)))
    faults = _kept("draft slot", table, [0] if one_row else slots, num_slots, taken, owner)
    if accepted is None:
        return faults
    accepted, columns = _integers(accepted), len(table[0]) if table else 0
    if len(accepted) != len(slots):
        raise ContractError(
            f"kda_jax.validate_slots: {len(accepted)} numbers of accepted tokens for "
            f"{len(slots)} rows"
        )
    for row, count in enumerate(accepted):
        if slots[row] != -1 and not 0 <= count <= columns:
            faults.append(
                f"row {row} has {count} accepted tokens: it must be in [0, {columns}], "
                "the columns of `intermediate_states`"
            )
    return faults


def _kept(what, table, slots, num_slots, taken, owner):
    """What is wrong with a table of slots that take states on the way. `taken`: slots that they
    must not be, with a row that has each; `owner`: the slot that a row may name all the same.
    """
    faults, seen = [], {}
    for row, entries in enumerate(table):
        for column, slot in enumerate(entries):
            if slot == -1 or slots[row] == -1:
                continue
            place = f"row {row} has {what} {slot} in column {column}"
            if not 0 <= slot < num_slots:
                faults.append(f"{place}: it must be -1 (not kept) or in [0, {num_slots})")
            elif slot in seen:
                faults.append(f"{place}, as row {seen[slot]} has: no two states may share a slot")
            elif slot in taken and not (owner and owner[row] == slot and taken[slot] == row):
                faults.append(f"{place}, which row {taken[slot]} reads or writes in the same step")
            seen.setdefault(slot, row)
    return faults


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


def clear_slots(pool: Any, slots: Array | Sequence[int]) -> Any:
    """Zeroes the state of some slots, as a new request wants it.

    A freed slot keeps its last tenant's state.

    Args:
      pool: `[S, HV, V, K]` (or any array led by S), an array or a `jax.Ref`; any dtype. Or a cache:
        a pytree of them, such as `KDACache` or a list of layers' caches.
      slots: `[n]` integer; values outside `[0, S)` are passed over, repeated ones do no harm.

    Returns:
      The pool with zeros there, or the pytree of them; None for a Ref.

    Effects:
      As `packed_decode`: in place when donated inside `jit` or passed as a Ref, else on a copy.

    Raises:
      ContractError: the slots are not `[n]` signed integers, or the pool is not led by S.

    >>> import jax.numpy as jnp
    >>> clear_slots(jnp.ones((3, 2)), jnp.array([1, -1])).tolist()
    [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """
    return _each_pool("clear_slots", _clear, pool, slots=slots)


def copy_slots(
    pool: Any, sources: Array | Sequence[int], destinations: Array | Sequence[int]
) -> Any:
    """Copies what some slots hold into others: a prefix that several requests go on from.

    A step reads a slot and writes another without a copy where it takes `sources`.

    Args:
      pool: as `clear_slots`: an array led by S, a `jax.Ref`, or a pytree of them, such as
        `KDACache`.
      sources: `[n]` integer; the slots that are read, all before the first is written. Outside
        `[0, S)`: zeros are copied.
      destinations: `[n]` integer, each at most once inside `[0, S)`; outside, the pair is passed
        over.

    Returns:
      The pool, or the pytree of them; None for a Ref.

    Effects:
      As `clear_slots`.

    Raises:
      ContractError: the slots are not `[n]` signed integers, or not as many, or the pool is not led
        by S.

    >>> import jax.numpy as jnp
    >>> copy_slots(jnp.array([1.0, 2.0, 3.0]), [2, 0, 1], [0, -1, 2]).tolist()
    [3.0, 2.0, 2.0]
    """
    return _each_pool("copy_slots", _copy, pool, sources=sources, destinations=destinations)


def _each_pool(name, function, pool, **slots):
    """`function(pool, *slots)` of a pool, or of each leaf of a pytree."""
    leaves, tree = jax.tree.flatten(pool)
    for leaf in leaves:
        if not getattr(leaf, "shape", ()) or not hasattr(leaf, "dtype"):
            raise ContractError(
                f"kda_jax.{name}: the pool must be an array led by S, a jax.Ref or a cache of them "
                f"(got {type(leaf).__name__}{' of shape ()' if hasattr(leaf, 'dtype') else ''})"
            )
    slots = {argument: _signed(name, x, argument) for argument, x in slots.items()}
    counts = {argument: x.shape[0] for argument, x in slots.items()}
    if len(set(counts.values())) > 1:
        told = " and ".join(f"{count} {argument}" for argument, count in counts.items())
        raise ContractError(f"kda_jax.{name}: each source has its destination (got {told})")
    indices = {argument: pools.as_int32(x) for argument, x in slots.items()}

    def one(leaf):
        arrays = dict(pool=leaf) | indices
        if not call.is_cut(arrays):
            return function(**arrays)
        specs = (call.explicit_cut(leaf),)
        return call.in_auto_axes(function, f"kda_jax.{name}", arrays, specs)

    return jax.tree.unflatten(tree, [one(leaf) for leaf in leaves])


@jax.jit
def _clear(pool, slots):
    state, slots = pools.opened(pool, slots)
    return pools.closed(pool, pools.write(state, slots, jnp.zeros((), state.dtype)))


@jax.jit
def _copy(pool, sources, destinations):
    state, destinations = pools.opened(pool, destinations, sources)
    values = pools.read(state, destinations, sources)
    return pools.closed(pool, pools.write(state, destinations, values))


def _signed(name, slots, argument="slots") -> Any:
    """`[n]` signed integers as an array, or a ContractError.

    A list becomes int32, or int64 where it must.
    """
    if not hasattr(slots, "dtype"):
        listed = np.asarray(slots)
        narrow = listed.size == 0 or (listed.dtype.kind == "i" and np.abs(listed).max() < 2**31)
        slots = listed.astype(np.int32) if narrow else listed
    if slots.ndim != 1 or np.dtype(slots.dtype).kind != "i":
        raise ContractError(
            f"kda_jax.{name}: {argument} must be [n] signed integers "
            f"(got {slots.shape} {slots.dtype})"
        )
    return slots


def _table(name, table, rows):
    """Rows of slots, as lists: one for each row of the batch, or one of a varlen call's tokens."""
    table = [_integers(entries) for entries in (table if isinstance(table, list) else list(table))]
    if len(table) != rows and not (name == "intermediate_states" and len(table) == 1):
        raise ContractError(f"kda_jax.validate_slots: {len(table)} rows of {name} for {rows} rows")
    return table


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
