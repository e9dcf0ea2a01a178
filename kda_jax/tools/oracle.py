"""The recurrence in float64 NumPy, from its definition: what judges every implementation.

It shares no line with gates.py or decode_xla.py, so a mistake there cannot hide here.
"""

import dataclasses

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
    allow_neg_eigval=False,
):
    """One decode step, row after row.

    Args: as `kda_jax.packed_decode`, any float dtype; they are widened to float64, never rounded.

    Returns:
      `(out, state)`, float64 NumPy `[B, 1, HV, V]` and `[S, HV, V, K]`; no argument is changed.

    >>> q, k, v = [3, 4], [0, 2], [1, -1]
    >>> pool = np.zeros((3, 1, 2, 2)); pool[2, 0] = [[1, 2], [3, 4]]
    >>> zero = np.zeros((1, 2)), np.zeros((1, 1)), np.zeros(1), np.zeros(2)
    >>> out, state = packed_decode(np.array([q + k + v]), *zero, pool, np.array([2]), scale=1.0)
    >>> out.ravel().tolist(), state[2, 0].tolist()
    ([1.5, -7.5], [[0.5, 0.0], [1.5, -3.0]])
    """
    _, HV, V, K = np.shape(initial_state)
    B, width = np.shape(mixed_qkv)
    H = (width - HV * V) // (2 * K)
    q, k, v = np.split(np.asarray(mixed_qkv, np.float64), [H * K, 2 * H * K], axis=1)
    decay, beta = gates(
        np.reshape(a, (B, 1, HV, K)),
        np.reshape(b, (B, 1, HV)),
        A_log,
        dt_bias,
        lower_bound,
        neg_eigval=allow_neg_eigval,
    )
    return update(
        q.reshape(B, 1, H, K),
        k.reshape(B, 1, H, K),
        v.reshape(B, 1, HV, V),
        decay,
        beta,
        initial_state,
        ssm_state_indices,
        sources=source_indices,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )[:2]


@np.errstate(invalid="ignore", over="ignore")  # padded rows may hold anything
def gates(
    a,
    b,
    A_log,
    dt_bias,
    lower_bound=None,
    *,
    softplus_beta=1.0,
    softplus_threshold=np.inf,
    neg_eigval=False,
):
    """`(log_decay, beta)` in float64 from `a` `[B, T, HV, K]` and `b` `[B, T, HV]`.

    A_log or dt_bias None are zeros.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    HV, K = a.shape[-2:]
    A_log = np.zeros(HV) if A_log is None else np.asarray(A_log, np.float64).reshape(HV)
    rate = np.minimum(np.exp(np.minimum(A_log, 700.0)), FLOAT32_MAX)[:, None]
    x = a if dt_bias is None else a + np.asarray(dt_bias, np.float64).reshape(HV, K)
    if lower_bound is None:
        soft = np.logaddexp(0.0, softplus_beta * x) / softplus_beta
        log_decay = -rate * np.where(softplus_beta * x > softplus_threshold, x, soft)
    else:
        log_decay = lower_bound * _sigmoid(rate * x)
    return log_decay, _sigmoid(b) * (2.0 if neg_eigval else 1.0)


@np.errstate(invalid="ignore", over="ignore")
def update(
    q,
    k,
    v,
    log_decay,
    beta,
    pool,
    slots,
    *,
    sources=None,
    cu_seqlens=None,
    scale=None,
    l2norm=False,
    write=None,
    update_state=True,
):
    """Every token of every sequence, one after the other.

    Args:
      q, k: `[B, T, H, K]`. v: `[B, T, HV, V]`. log_decay: `[B, T, HV, K]`. beta: `[B, T, HV]`.
      pool: `[S, HV, V, K]`. slots: `[N]`. sources: None or `[N]`, read instead; outside the pool:
        a zero state.
      cu_seqlens: None (B == N), or `[N+1]` (B == 1). write: None or `[B, T]`, slots that take the
        state of each token.

    Returns:
      `(out, state, intermediate)`, float64 `[B, T, HV, V]`, `[S, HV, V, K]`, `[B, T, HV, V, K]`.
    """
    q, k, v, log_decay, beta, before = (
        np.array(x, np.float64) for x in (q, k, v, log_decay, beta, pool)
    )
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    S = before.shape[0]
    scale = K**-0.5 if scale is None else scale
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    state, out, intermediate = before.copy(), np.zeros((B, T, HV, V)), np.zeros((B, T, HV, V, K))
    sources = np.asarray(slots if sources is None else sources).tolist()
    finals = {}
    for n, slot in enumerate(np.asarray(slots).tolist()):
        if not 0 <= slot < S:
            continue
        tokens = (
            [(n, t) for t in range(T)]
            if cu_seqlens is None
            else [(0, t) for t in range(*cu_seqlens[n : n + 2])]
        )
        if not tokens:
            continue
        current = before[sources[n]].copy() if 0 <= sources[n] < S else np.zeros((HV, V, K))
        for at in tokens:
            for head in range(HV):
                key, query = k[at][head // (HV // H)], q[at][head // (HV // H)] * scale
                decayed = current[head] * np.exp(log_decay[at][head])
                change = (v[at][head] - decayed @ key) * beta[at][head]
                current[head] = decayed + np.outer(change, key)
                out[at][head] = current[head] @ query
            intermediate[at] = current
            if write is not None and 0 <= write[at] < S:
                state[write[at]] = current
        if update_state:
            finals[slot] = current
    for slot, current in finals.items():
        state[slot] = current
    return out, state, intermediate


def update_gradients(
    q,
    k,
    v,
    log_decay,
    beta,
    pool,
    slots,
    d_out,
    d_state,
    *,
    sources=None,
    cu_seqlens=None,
    scale=None,
    l2norm=False,
):
    """The gradients of `update`: its recurrence backwards, token after token.

    Args: as `update`; and the cotangents of its results, `d_out` `[B, T, HV, V]` and `d_state`
    `[S, HV, V, K]`. A sequence's states are held, `HV * V * K * 8` bytes a token.

    Returns:
      `{name: gradient}` of q, k, v, log_decay, beta and pool, float64 in their shapes. Tokens of
      padded sequences, or of none, have zeros.
    """
    tensors = dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    pool, d_out, d_state = (np.asarray(x, np.float64) for x in (pool, d_out, d_state))
    S, slots = len(pool), np.asarray(slots).tolist()
    sources = slots if sources is None else np.asarray(sources).tolist()
    scale = np.shape(q)[-1] ** -0.5 if scale is None else scale
    gradients = {name: np.zeros_like(x) for name, x in tensors.items()} | dict(pool=d_state.copy())
    starts = []
    for n, (slot, source) in enumerate(zip(slots, sources, strict=True)):
        row, tokens = (n, slice(None)) if cu_seqlens is None else (0, slice(*cu_seqlens[n : n + 2]))
        if not 0 <= slot < S or not len(d_out[row, tokens]):
            continue
        start = pool[source] if 0 <= source < S else np.zeros_like(pool[0])
        own = {name: x[row, tokens] for name, x in tensors.items()}
        by_token, by_start = _sequence_gradients(
            own, start, d_out[row, tokens], d_state[slot], scale, l2norm
        )
        for name, x in by_token.items():
            gradients[name][row, tokens] = x
        gradients["pool"][slot] = 0.0
        starts.append((source, by_start))
    for source, by_start in starts:
        if 0 <= source < S:
            gradients["pool"][source] += by_start
    return gradients


def _sequence_gradients(x, state, d_out, d_state, scale, l2norm):
    """`(gradients of x, gradient of the start)` of one sequence, all heads at once.

    Args:
      x: the tensors by name, `[T, heads, ...]`. state, d_state: `[HV, V, K]`, before the first
        token and after the last. d_out: `[T, HV, V]`.
    """
    H, HV = x["q"].shape[1], x["v"].shape[1]
    norms = {
        name: np.sqrt((x[name] ** 2).sum(-1, keepdims=True) + 1e-6) if l2norm else 1.0
        for name in "qk"
    }
    q, k = (np.repeat(x[name] / norms[name], HV // H, axis=1) for name in "qk")
    q, v, decay, beta = q * scale, x["v"], np.exp(x["log_decay"]), x["beta"]
    states = [state]
    for t in range(len(v)):
        decayed = states[-1] * decay[t][:, None]
        missing = v[t] - _times(decayed, k[t])
        states.append(decayed + (beta[t][:, None] * missing)[:, :, None] * k[t][:, None])
    d = {name: np.zeros_like(y) for name, y in (x | dict(q=q, k=k)).items()}
    d_state = np.array(d_state)
    for t in reversed(range(len(v))):
        decayed = states[t] * decay[t][:, None]
        missing = v[t] - _times(decayed, k[t])
        change = beta[t][:, None] * missing
        # out = state q
        d["q"][t] = _times(states[t + 1].swapaxes(1, 2), d_out[t])
        d_state += d_out[t][:, :, None] * q[t][:, None]
        # state = decayed + change k^T
        d_change = _times(d_state, k[t])
        d["k"][t] = _times(d_state.swapaxes(1, 2), change)
        # change = beta missing, and missing = v - decayed k
        d["beta"][t] = (d_change * missing).sum(-1)
        d["v"][t] = d_missing = beta[t][:, None] * d_change
        d["k"][t] -= _times(decayed.swapaxes(1, 2), d_missing)
        d_state -= d_missing[:, :, None] * k[t][:, None]
        # decayed = state exp(log_decay)
        d["log_decay"][t] = (d_state * decayed).sum(1)
        d_state *= decay[t][:, None]
    d["q"] *= scale
    for name in "qk":
        of_heads = d[name].reshape(*x[name].shape[:2], HV // H, -1).sum(2)
        unit = x[name] / norms[name]
        along = unit * (unit * of_heads).sum(-1, keepdims=True) if l2norm else 0.0
        d[name] = (of_heads - along) / norms[name]
    return d, d_state


def _times(matrices, vectors):
    return (matrices @ vectors[..., None])[..., 0]


def layer(params, x, conv, state, config):
    """One sequence through the layer: `(y, conv, state)`, the last two of its slot.

    Args:
      params: the weights as fields of a dataclass, those of `kda_jax.KDAParams`; None is left out.
      x: `[T, D]`. conv: `[C, W-1]`. state: `[HV, V, K]`. config: as `kda_jax.KDAConfig`.
    """
    w = {
        f.name: np.asarray(y, np.float64)
        for f in dataclasses.fields(params)
        if (y := getattr(params, f.name)) is not None
    }
    x, H, HV, K, V = np.asarray(x, np.float64), config.H, config.HV, config.K, config.V
    channels = np.concatenate([x @ w["q_proj"], x @ w["k_proj"], x @ w["v_proj"]], 1)
    padded = np.concatenate([np.asarray(conv, np.float64).T, channels])
    kernel = np.concatenate([w["q_conv"], w["k_conv"], w["v_conv"]])
    y = np.stack([(padded[t : t + config.W] * kernel.T).sum(0) for t in range(len(x))])
    if "q_conv_bias" in w:
        y = y + np.concatenate([w["q_conv_bias"], w["k_conv_bias"], w["v_conv_bias"]])
    y = y / (1 + np.exp(-y))
    q, k, v = np.split(y, [H * K, 2 * H * K], axis=1)
    decay, beta = gates(
        ((x @ w["f_down"] if "f_down" in w else x) @ w["f_up"]).reshape(1, -1, HV, K),
        (x @ w["b_proj"])[None],
        w["A_log"],
        w["dt_bias"],
        config.lower_bound,
        neg_eigval=config.allow_neg_eigval,
    )
    shape = (1, len(x))
    out, after, _ = update(
        q.reshape(*shape, H, K), k.reshape(*shape, H, K), v.reshape(*shape, HV, V), decay, beta,
        np.asarray(state, np.float64)[None], [0], l2norm=True,
    )  # fmt: skip
    gate = (x @ w["g_down"] if "g_down" in w else x) @ w["g_up"] + w.get("g_bias", 0.0)
    out = out[0] / np.sqrt((out[0] ** 2).mean(-1, keepdims=True) + config.norm_eps) * w["norm"]
    out = out / (1 + np.exp(-gate.reshape(out.shape)))
    return out.reshape(len(x), -1) @ w["o_proj"], padded[-(config.W - 1) :].T, after[0]


def must_be_near(what, got, wanted, limit):
    """Ends the run unless `got` is within `limit` of `wanted`, relative in the norm.

    What times an operator calls this first: the time of a wrong answer means nothing.
    """
    got = np.asarray(got, np.float64)
    if got.shape != np.shape(wanted):
        raise SystemExit(f"{what}: shape {got.shape}, not {np.shape(wanted)}: nothing is timed")
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    if not error <= limit:
        raise SystemExit(
            f"{what}: wrong answer, relative error {error:.1e} > {limit:.0e}: nothing is timed"
        )


def _sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))
