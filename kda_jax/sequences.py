"""Sequences that lie end to end: their boundaries, and which sequence each token belongs to."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kda_contracts import ContractError
from kda_jax.call import Array


def validate_cu_seqlens(
    cu_seqlens: Array | Sequence[int],
    total: int,
) -> None:
    """Checks where sequences start and end, on the host, before a step: the ops check no value.

    Args:
      cu_seqlens: `[N+1]` integers, a NumPy or JAX array or a list (a JAX array is fetched from its
        device): sequence n is tokens `cu_seqlens[n]` to `cu_seqlens[n+1] - 1`. Equal neighbours are
        an empty sequence.
      total: T, the tokens of the batch. Those behind the last boundary fill it up to a compiled
        size: they belong to no sequence.

    Raises:
      ContractError: they do not start at 0, decrease, or end behind the total.
      TypeError: they are traced, or not integers.

    >>> validate_cu_seqlens([0, 3, 3, 8], 8)
    >>> validate_cu_seqlens([0, 3, 7, 7], 8)
    >>> validate_cu_seqlens([0, 3, 9], 8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    kda_contracts.judge.ContractError: kda_jax.validate_cu_seqlens: the boundaries break ...
      cu_seqlens[2], the last, is 9: there are 8 tokens
    """
    if isinstance(cu_seqlens, jax.core.Tracer):
        raise TypeError(
            "kda_jax.validate_cu_seqlens reads values, and a traced array has none: "
            "call it outside jit"
        )
    bounds = np.asarray(cu_seqlens)
    if bounds.ndim != 1 or bounds.size < 1 or bounds.dtype.kind not in "iu":
        raise TypeError(
            f"kda_jax.validate_cu_seqlens takes [N+1] integers (got {bounds.shape} {bounds.dtype})"
        )
    bounds = bounds.tolist()
    faults = (
        [] if bounds[0] == 0 else [f"cu_seqlens[0] is {bounds[0]}: the first sequence starts at 0"]
    )
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            faults.append(
                f"cu_seqlens[{n + 1}] is {end}, less than cu_seqlens[{n}], which is {start}: "
                "a sequence cannot end before it starts"
            )
    if bounds[-1] > total:
        faults.append(
            f"cu_seqlens[{len(bounds) - 1}], the last, is {bounds[-1]}: there are {total} tokens"
        )
    if faults:
        shown = faults[:10] + ([f"and {len(faults) - 10} more"] if len(faults) > 10 else [])
        raise ContractError(
            "\n  ".join(["kda_jax.validate_cu_seqlens: the boundaries break the contract", *shown])
        )


# On a GPU a search or a scan is a dozen kernels and more, and to compare all with all is one: 160
# and 36 of them in a layer's prefill of 64 rows. Up to so many comparisons.
COMPARED = 2**24


def _all_compared(n, T):
    return isinstance(n, int) and isinstance(T, int) and n * T <= COMPARED


def bounded(cu_seqlens, T):
    """Boundaries as every implementation takes them, whatever they hold: from 0 to T, ascending."""
    bounds, n = jnp.clip(cu_seqlens, 0, T), cu_seqlens.shape[0]
    if not _all_compared(n, n):
        return jax.lax.cummax(bounds)
    number = jnp.arange(n, dtype=jnp.int32)
    return jnp.where(number[None] <= number[:, None], bounds[None], 0).max(1)


def offsets(counts):
    """`[n+1]`: where each of some runs of so many `[n]` int32 starts, and where the last ends."""
    n = counts.shape[0]
    if not _all_compared(n, n):
        return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    number = jnp.arange(n + 1, dtype=jnp.int32)
    before = number[None, :n] < number[:, None]
    return jnp.where(before, counts[None], 0).sum(1, dtype=jnp.int32)


def _begun(begins, T):
    """`[T]` int32: how many of the ascending `begins` `[n]` are at or before each token."""
    token = jnp.arange(T, dtype=begins.dtype)
    if not _all_compared(begins.shape[0], T):
        return jnp.searchsorted(begins, token, side="right").astype(jnp.int32)
    return (begins[None] <= token[:, None]).sum(1, dtype=jnp.int32)


def owners(cu_seqlens, T):
    """`[T]` int32: the sequence that each token belongs to, and N for a token of none."""
    N = cu_seqlens.shape[0] - 1
    owner = _begun(cu_seqlens, T) - 1
    return jnp.where(owner < 0, N, owner)


def holders(begins, ends, T):
    """`[T]` int32: the one of some sequences that holds each token, and their number for none.

    begins, ends: `[n]`, ascending; behind the last sequence they may be T.
    """
    n, token = begins.shape[0], jnp.arange(T, dtype=begins.dtype)
    holder = _begun(begins, T) - 1
    return jnp.where((holder >= 0) & (token < jnp.append(ends, 0)[holder]), holder, n)


def positions(cu_seqlens, owner):
    """`[T]` int32: the number of each token in the sequence that owns it; in T for one of none."""
    token = jnp.arange(owner.shape[0], dtype=jnp.int32)
    return token - jnp.append(cu_seqlens[:-1], 0)[owner]


def places_of_kept(checkpoints, live, counts, total):
    """`[total]`: the slot of each state on the way, of the first sequence, then of the second..

    -1 for one that is not kept. live, counts: `[N]`, whose states are, and how many there are.
    """
    (N, M), first = checkpoints.shape, offsets(counts)
    owner, number = owners(first, total), jnp.arange(total, dtype=jnp.int32)
    sequence = jnp.minimum(owner, N - 1)
    column = number - first[sequence]
    is_kept = (owner < N) & live[sequence] & (column < M)
    return jnp.where(is_kept, checkpoints[sequence, jnp.clip(column, 0, max(M - 1, 0))], -1)


def segments(ids, T):
    """`(live, begins, position)` `[B, T]` of segment ids, behind which there is padding up to T:
    whether a token is none; whether its id is another than the one before; its number since then.
    """
    more = T - ids.shape[1]
    # Compared before they are narrowed: 2**32 is not 0.
    live = jnp.pad(ids != 0, ((0, 0), (0, more)))
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, more)))[:, :T]
    token = jnp.arange(T, dtype=jnp.int32)[None]
    return live, begins, token - jax.lax.cummax(jnp.where(begins, token, 0), axis=1)
