"""A_log, dt_bias and a, from the layouts that checkpoints and callers really have, to ours.

Each takes an array of any library (or a shape without values, such as a ShapeDtypeStruct) and
returns the same kind, contiguous.
"""

from kda_contracts import remedy
from kda_contracts.arrays import compact, facts, is_array, known, shape_text
from kda_contracts.judge import ContractError


def normalize_A_log(A_log, HV):
    """A_log as `[HV]`.

    Args:
      A_log: `[HV]`, `[1, 1, HV, 1]` (Kimi-Linear) or anything else with HV elements, or `[n]` with
        n > HV and zeros after the first HV (Kimi-K3); any float dtype; natural log of the decay
        rate.
      HV: value heads, an int.

    Returns:
      `[HV]`, same dtype. A view or a copy, as the library has it.

    Raises:
      ContractError: another number of elements, or a tail that is not zero.
      TypeError: a padded A_log without values to judge (a tracer, or a torch tensor on "meta").

    >>> import numpy as np
    >>> normalize_A_log(np.array([1.0, 2.0, 0.0, 0.0]), 2)
    array([1., 2.])
    """
    array = _facts("A_log", A_log, HV=HV)
    if array.size == HV:
        return _reshape(A_log, (HV,))
    if not padded(array, HV):
        raise _unexpected("A_log", array, f"; expected numel={HV}", {"HV": HV})
    if not hasattr(A_log, "reshape"):
        return _reshape(A_log, (HV,))
    try:
        live = [i for i in range(HV, array.size) if A_log[i] != 0]
    except (TypeError, RuntimeError) as error:  # of JAX and of torch
        raise TypeError(
            f"`A_log` has {array.size} elements for HV={HV} and no values yet "
            f"(got {type(A_log).__name__}): whether its tail is zero can't be judged while "
            "tracing; call normalize_A_log before jit"
        ) from error
    if live:
        raise ContractError(
            f"`A_log` has {array.size} elements for HV={HV}, and its tail is not zero: "
            f"A_log[{live[0]}] is {float(A_log[live[0]])}. This is no padding: is HV right, "
            "or is this a whole model's A_log to be sliced?"
        )
    return _contiguous(A_log[:HV])


def normalize_dt_bias(dt_bias, HV, K):
    """dt_bias as `[HV*K]`.

    Args:
      dt_bias: `[HV*K]`, `[HV, K]` or anything else with HV*K elements in that order; any float dtype.
      HV: value heads. K: key channels of a head.

    Returns:
      `[HV*K]`, same dtype.

    Raises:
      ContractError: another number of elements ("Unexpected dt_bias shape: ...; expected numel=...").

    >>> import numpy as np
    >>> normalize_dt_bias(np.zeros((4, 64)), 4, 64).shape
    (256,)
    """
    array = _facts("dt_bias", dt_bias, HV=HV, K=K)
    if array.size != HV * K:
        raise _unexpected("dt_bias", array, f"; expected numel={HV * K}", {"HV": HV, "K": K})
    return _reshape(dt_bias, (HV * K,))


def normalize_a(a, N, HV, K, varlen=False):
    """The raw forget-gate input as `[N, HV*K]`, one row for each of N one-token sequences.

    Args:
      a: `[N, HV*K]` or `[N, HV, K]`; also `[N, 1, HV, K]`, or `[1, N, HV, K]` where `varlen`; any
        float dtype.
      N: sequences. HV: value heads. K: key channels of a head.
      varlen: whether the sequences are packed along the second axis of a 4-D `a`.

    Returns:
      `[N, HV*K]`, same dtype.

    Raises:
      ContractError: any other shape ("Unexpected a shape for dense: ..." or "... for varlen: ...").

    >>> import numpy as np
    >>> normalize_a(np.zeros((3, 1, 4, 64)), 3, 4, 64).shape
    (3, 256)
    """
    array = _facts("a", a, HV=HV, K=K)
    leading = (1, N) if varlen else (N, 1)
    if array.shape not in ((N, HV * K), (N, HV, K), (*leading, HV, K)):
        form = "varlen" if varlen else "dense"
        shapes = [shape_text(x) for x in ((N, HV * K), (N, HV, K), (*leading, HV, K))]
        expectation = f"; expected {shapes[0]}, {shapes[1]} or {shapes[2]}"
        other = (not varlen and array.shape == (1, N, HV, K)) or (
            varlen and array.shape == (N, 1, HV, K)
        )
        cure = f"this is the other form: pass varlen={not varlen}" if other else None
        raise _unexpected(
            "a", array, expectation, {"B": N, "HV": HV, "K": K}, form=f" for {form}", cure=cure
        )
    return _reshape(a, (N, HV * K))


def padded(array, HV):
    """Whether an A_log of this shape can be a padded one."""
    return array.ndim == 1 and known(array.size) and array.size > HV


def _facts(name, x, **sizes):
    """ArrayFacts of an argument, after a look at what no normalizer can work with."""
    for letter, size in sizes.items():
        if known(size) and size < 1:
            raise ContractError(f"{letter} must be positive (got {size})")
    if not is_array(x):
        raise ContractError(f"`{name}` must be an array (got {type(x).__name__})")
    return facts(x)


def _reshape(x, shape):
    return _contiguous(x.reshape(shape)) if hasattr(x, "reshape") else x.update(shape=shape)


def _contiguous(x):
    """x itself, or a copy where it is a view with gaps."""
    array = facts(x)
    if compact(array, array.ndim):
        return x
    return x.contiguous() if array.library == "torch" else x.copy()


def _unexpected(name, array, expectation, sizes, form="", cure=None):
    cure = cure or remedy.for_normalizer(name, array, sizes)
    message = f"Unexpected {name} shape{form}: {shape_text(array.shape)}{expectation}"
    return ContractError(f"{message}\n  {cure}" if cure else message)
