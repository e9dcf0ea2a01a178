"""The recurrence in float64 NumPy, written from its definition: what every implementation is judged by.

It shares no line with gates.py or reference.py, so a mistake there cannot hide here.
"""

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)


def packed_decode(
    mixed_qkv,
    a,
    b,
    A_log,
    dt_bias,
    initial_state,
    ssm_state_indices,
    *,
    source_indices=None,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    lower_bound=None,
):
    """One decode step, row after row.

    Args: as `kda_jax.packed_decode`, any float dtype; they are widened to float64 and never rounded again.

    Returns:
      `(out, state)`, float64 NumPy `[B, 1, HV, V]` and `[S, HV, V, K]`; no argument is changed.

    >>> q, k, v = [3, 4], [0, 2], [1, -1]
    >>> pool = np.zeros((3, 1, 2, 2)); pool[2, 0] = [[1, 2], [3, 4]]
    >>> zero = np.zeros((1, 2)), np.zeros((1, 1)), np.zeros(1), np.zeros(2)
    >>> out, state = packed_decode(np.array([q + k + v]), *zero, pool, np.array([2]), scale=1.0)
    >>> out.ravel().tolist(), state[2, 0].tolist()
    ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]])
    """
    mixed_qkv, a, b, A_log, dt_bias, state = (
        np.array(x, np.float64) for x in (mixed_qkv, a, b, A_log, dt_bias, initial_state)
    )
    S, HV, V, K = state.shape
    B, width = mixed_qkv.shape
    H = (width - HV * V) // (2 * K)
    rate = np.minimum(np.exp(np.minimum(A_log, 700.0)), FLOAT32_MAX)
    out, before = np.zeros((B, 1, HV, V)), state.copy()
    sources = np.asarray(ssm_state_indices if source_indices is None else source_indices).tolist()
    for row, slot in enumerate(np.asarray(ssm_state_indices).tolist()):
        if not 0 <= slot < S:
            continue
        q, k, v = np.split(mixed_qkv[row], [H * K, 2 * H * K])
        q, k, v = q.reshape(H, K), k.reshape(H, K), v.reshape(HV, V)
        if use_qk_l2norm_in_kernel:
            q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        for head in range(HV):
            key, query = k[head // (HV // H)], q[head // (HV // H)] * (K**-0.5 if scale is None else scale)
            x = a[row].reshape(HV, K)[head] + dt_bias.reshape(HV, K)[head]
            if lower_bound is None:
                log_decay = -rate[head] * np.logaddexp(0.0, x)
            else:
                log_decay = lower_bound * _sigmoid(rate[head] * x)
            read = before[sources[row], head] if 0 <= sources[row] < S else np.zeros((V, K))
            decayed = read * np.exp(log_decay)
            change = (v[head] - decayed @ key) * _sigmoid(b[row, head])
            state[slot, head] = decayed + np.outer(change, key)
            out[row, 0, head] = state[slot, head] @ query
    return out, state


def _sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))
