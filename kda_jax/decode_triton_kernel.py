"""The Triton kernel of decode_triton.py: it needs Triton alone, and so compiles without a GPU.

One program owns a tile of V rows of one (row, value head), over all its tokens. K and V are padded
to powers of two and masked; every offset into the pool is 64 bits wide. The maths is that of
gates.py and decode_xla.py, written once more in Triton's language.
"""

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    w = z * z
    series = 2.0 / 13.0
    series = series * w + 2.0 / 11.0
    series = series * w + 2.0 / 9.0
    series = series * w + 2.0 / 7.0
    series = series * w + 2.0 / 5.0
    series = series * w + 2.0 / 3.0
    series = series * w + 2.0
    return tl.where(x > 0.0, x, 0.0) + z * series


@triton.jit
def _sharpened(x, beta: tl.constexpr, threshold: tl.constexpr, largest: tl.constexpr):
    value = _softplus(x)
    if beta != 1.0:
        value = _softplus(tl.where(x * beta > largest, largest, x * beta)) / beta
        value = tl.where(value > largest, largest, value)
    if threshold < 20.0:
        value = tl.where(x * beta > threshold, x, value)
    return value


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _update(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, slots_ptr, sources_ptr,
    cu_seqlens_ptr, writes_ptr, pool_ptr, out_ptr, states_ptr, S: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, q_stride: tl.constexpr, v_stride: tl.constexpr,
    k_start: tl.constexpr, v_start: tl.constexpr, scale: tl.constexpr, lower_bound: tl.constexpr,
    softplus_beta: tl.constexpr, softplus_threshold: tl.constexpr, allow_neg_eigval: tl.constexpr,
    activated: tl.constexpr, use_qk_l2norm: tl.constexpr, has_sources: tl.constexpr,
    varlen: tl.constexpr, has_writes: tl.constexpr, update_state: tl.constexpr,
    intermediate: tl.constexpr, largest: tl.constexpr, epsilon: tl.constexpr,
):  # fmt: skip
    """One program. Over 60 lines, since its parts would pass twenty values to each other."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    # Tiles fastest, then heads, then rows: consecutive blocks walk a slot in order.
    block = tl.program_id(0)
    tile = block % tiles
    head = (block // tiles) % HV
    row = (block // (tiles * HV)).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    live = (slot >= 0) & (slot < S)
    v_index = tile * BV + tl.arange(0, BV)
    k_index = tl.arange(0, BK)
    v_inside = v_index < V
    k_inside = k_index < K
    inside = v_inside[:, None] & k_inside[None, :]
    in_slot = head * V * K + v_index[:, None] * K + k_index[None, :]
    first = row * T
    count = T
    last = first + T
    cleared_last = last
    if varlen:
        # Clipped, so that no cu_seqlens makes the kernel read or write outside its arrays.
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + row).to(tl.int64), 0), T)
        last = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + row + 1).to(tl.int64), first), T)
        cleared_last = tl.where(row == N - 1, T, last)
        count = (last - first).to(tl.int32)

    cleared_first = tl.where(live, last, first)
    for token in range(cleared_first, cleared_last):
        out_at = out_ptr + (token * HV + head) * V + v_index
        tl.store(out_at, tl.zeros((BV,), out_ptr.dtype.element_ty), mask=v_inside)
        if intermediate:
            states_at = states_ptr + token * (HV * V * K) + in_slot
            tl.store(states_at, tl.zeros((BV, BK), states_ptr.dtype.element_ty), mask=inside)
    if (not live) | (first >= last):
        return

    source = slot
    read = inside
    if has_sources:
        source = tl.load(sources_ptr + row).to(tl.int64)
        read = inside & (source >= 0) & (source < S)  # outside the pool: a zero state
    state = tl.load(pool_ptr + source * (HV * V * K) + in_slot, mask=read, other=0.0)
    group = head // (HV // H)
    rate = 1.0
    bias = tl.zeros((BK,), tl.float32)
    if not activated:
        bias += tl.load(dt_bias_ptr + head * K + k_index, mask=k_inside, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
        rate = tl.where(rate > largest, largest, rate)

    for step in range(0, count):  # a loop of one constant step is no loop
        token = first + step
        q_at = q_ptr + token * q_stride + group * K + k_index
        k_at = k_ptr + token * q_stride + k_start + group * K + k_index
        v_at = v_ptr + token * v_stride + v_start + head * V + v_index
        q = tl.load(q_at, mask=k_inside, other=0.0).to(tl.float32)
        k = tl.load(k_at, mask=k_inside, other=0.0).to(tl.float32)
        v = tl.load(v_at, mask=v_inside, other=0.0).to(tl.float32)
        if use_qk_l2norm:
            q = q * tl.rsqrt(tl.sum(q * q, 0) + epsilon)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + epsilon)
        q = q * scale
        x = tl.load(a_ptr + (token * HV + head) * K + k_index, mask=k_inside, other=0.0).to(
            tl.float32
        )
        beta = tl.load(b_ptr + token * HV + head).to(tl.float32)
        if activated:
            decay = tl.exp(x)
        else:
            x = x + bias
            x = tl.where(
                x > largest, largest, tl.where(x < -largest, -largest, x)
            )  # finite inputs never give NaN
            if lower_bound is None:
                decay = tl.exp(-rate * _sharpened(x, softplus_beta, softplus_threshold, largest))
            else:
                decay = tl.exp(lower_bound * _sigmoid(rate * x))
            beta = _sigmoid(beta)
            if allow_neg_eigval:
                beta = 2.0 * beta

        decayed = state.to(tl.float32) * decay[None, :]
        state_k = tl.sum(decayed * k[None, :], 1)
        state_q = tl.sum(decayed * q[None, :], 1)
        u = (v - state_k) * beta
        state = (decayed + u[:, None] * k[None, :]).to(pool_ptr.dtype.element_ty)
        out = state_q + u * tl.sum(k * q, 0)
        out_at = out_ptr + (token * HV + head) * V + v_index
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=v_inside)
        if intermediate:
            tl.store(states_ptr + token * (HV * V * K) + in_slot, state, mask=inside)
        if has_writes:
            written = tl.load(writes_ptr + token).to(tl.int64)
            kept = inside & (written >= 0) & (written < S)
            tl.store(pool_ptr + written * (HV * V * K) + in_slot, state, mask=kept)

    if update_state:
        tl.store(pool_ptr + slot * (HV * V * K) + in_slot, state, mask=inside)


@triton.jit
def kda_update(
    q, k, v, a, b, A_log, dt_bias, slots, sources, cu_seqlens, writes, pool, out, states,
    S: tl.constexpr, N: tl.constexpr, T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, q_stride: tl.constexpr,
    v_stride: tl.constexpr, k_start: tl.constexpr, v_start: tl.constexpr, scale: tl.constexpr,
    lower_bound: tl.constexpr, softplus_beta: tl.constexpr, softplus_threshold: tl.constexpr,
    allow_neg_eigval: tl.constexpr, activated: tl.constexpr, use_qk_l2norm: tl.constexpr,
    has_sources: tl.constexpr, varlen: tl.constexpr, has_writes: tl.constexpr,
    update_state: tl.constexpr, intermediate: tl.constexpr, largest: tl.constexpr,
    epsilon: tl.constexpr,
):  # fmt: skip
    """jax-triton 0.4, and any pool that is only read: the pool, a Ref if written, then outputs."""
    _update(
        q, k, v, a, b, A_log, dt_bias, slots, sources, cu_seqlens, writes, pool, out, states,
        S, N, T, H, HV, K, V, BK, BV, q_stride, v_stride, k_start, v_start, scale, lower_bound,
        softplus_beta, softplus_threshold, allow_neg_eigval, activated, use_qk_l2norm, has_sources,
        varlen, has_writes, update_state, intermediate, largest, epsilon,
    )  # fmt: skip


@triton.jit
def kda_update_aliased(
    q, k, v, a, b, A_log, dt_bias, slots, sources, cu_seqlens, writes, pool, out, states, same_pool,
    S: tl.constexpr, N: tl.constexpr, T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, q_stride: tl.constexpr,
    v_stride: tl.constexpr, k_start: tl.constexpr, v_start: tl.constexpr, scale: tl.constexpr,
    lower_bound: tl.constexpr, softplus_beta: tl.constexpr, softplus_threshold: tl.constexpr,
    allow_neg_eigval: tl.constexpr, activated: tl.constexpr, use_qk_l2norm: tl.constexpr,
    has_sources: tl.constexpr, varlen: tl.constexpr, has_writes: tl.constexpr,
    update_state: tl.constexpr, intermediate: tl.constexpr, largest: tl.constexpr,
    epsilon: tl.constexpr,
):  # fmt: skip
    """jax-triton 0.3: the pool comes once more, as the last output, which aliases it."""
    _update(
        q, k, v, a, b, A_log, dt_bias, slots, sources, cu_seqlens, writes, same_pool, out, states,
        S, N, T, H, HV, K, V, BK, BV, q_stride, v_stride, k_start, v_start, scale, lower_bound,
        softplus_beta, softplus_threshold, allow_neg_eigval, activated, use_qk_l2norm, has_sources,
        varlen, has_writes, update_state, intermediate, largest, epsilon,
    )  # fmt: skip
