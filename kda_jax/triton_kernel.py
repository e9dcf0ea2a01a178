"""The Triton kernel of triton_gpu.py, in a file of its own: it needs Triton alone, and so compiles without a GPU.

One program owns a tile of V rows of one (row, value head). K and V are padded to powers of two and masked; every offset
into the pool is 64 bits wide. The maths is that of gates.py and reference.py, written once more in Triton's language.
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
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def packed_decode_step(
    mixed_qkv_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    slots_ptr,
    sources_ptr,
    pool_ptr,
    out_ptr,
    S: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    scale: tl.constexpr,
    lower_bound: tl.constexpr,
    use_qk_l2norm: tl.constexpr,
    has_sources: tl.constexpr,
    largest: tl.constexpr,
    epsilon: tl.constexpr,
):
    tiles: tl.constexpr = (V + BV - 1) // BV
    width: tl.constexpr = 2 * H * K + HV * V
    block = tl.program_id(0)  # tiles fastest, then heads, then rows: consecutive blocks walk a slot in order
    tile = block % tiles
    head = (block // tiles) % HV
    row = (block // (tiles * HV)).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    v_index = tile * BV + tl.arange(0, BV)
    v_inside = v_index < V
    out_ptrs = out_ptr + (row * HV + head) * V + v_index
    if (slot < 0) | (slot >= S):
        tl.store(out_ptrs, tl.zeros((BV,), out_ptr.dtype.element_ty), mask=v_inside)
        return

    k_index = tl.arange(0, BK)
    k_inside = k_index < K
    inside = v_inside[:, None] & k_inside[None, :]
    in_slot = head * V * K + v_index[:, None] * K + k_index[None, :]
    source = slot
    if has_sources:
        source = tl.load(sources_ptr + row).to(tl.int64)
        inside = inside & (source >= 0) & (source < S)  # outside the pool: a zero state
    state = tl.load(pool_ptr + source * (HV * V * K) + in_slot, mask=inside, other=0.0).to(tl.float32)

    qkv_ptr = mixed_qkv_ptr + row * width
    group = head // (HV // H)
    q = tl.load(qkv_ptr + group * K + k_index, mask=k_inside, other=0.0).to(tl.float32)
    k = tl.load(qkv_ptr + (H + group) * K + k_index, mask=k_inside, other=0.0).to(tl.float32)
    v = tl.load(qkv_ptr + 2 * H * K + head * V + v_index, mask=v_inside, other=0.0).to(tl.float32)
    if use_qk_l2norm:
        q = q * tl.rsqrt(tl.sum(q * q, 0) + epsilon)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + epsilon)
    q = q * scale
    x = tl.load(a_ptr + (row * HV + head) * K + k_index, mask=k_inside, other=0.0).to(tl.float32)
    x = x + tl.load(dt_bias_ptr + head * K + k_index, mask=k_inside, other=0.0).to(tl.float32)
    x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))  # finite inputs never give NaN
    rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    rate = tl.where(rate > largest, largest, rate)
    if lower_bound is None:
        decay = tl.exp(-rate * _softplus(x))
    else:
        decay = tl.exp(lower_bound * _sigmoid(rate * x))
    beta = _sigmoid(tl.load(b_ptr + row * HV + head).to(tl.float32))

    state = state * decay[None, :]
    state_k = tl.sum(state * k[None, :], 1)
    state_q = tl.sum(state * q[None, :], 1)
    u = (v - state_k) * beta
    state = state + u[:, None] * k[None, :]
    out = state_q + u * tl.sum(k * q, 0)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=v_inside)
    written = v_inside[:, None] & k_inside[None, :]
    tl.store(pool_ptr + slot * (HV * V * K) + in_slot, state.to(pool_ptr.dtype.element_ty), mask=written)


@triton.jit
def kda_packed_decode(
    mixed_qkv, a, b, A_log, dt_bias, slots, sources, pool, out,
    S: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, scale: tl.constexpr, lower_bound: tl.constexpr, use_qk_l2norm: tl.constexpr,
    has_sources: tl.constexpr, largest: tl.constexpr, epsilon: tl.constexpr,
):  # fmt: skip
    """jax-triton 0.4: the pool is a Ref, then comes the output."""
    packed_decode_step(
        mixed_qkv, a, b, A_log, dt_bias, slots, sources, pool, out,
        S, H, HV, K, V, BK, BV, scale, lower_bound, use_qk_l2norm, has_sources, largest, epsilon,
    )  # fmt: skip


@triton.jit
def kda_packed_decode_aliased(
    mixed_qkv, a, b, A_log, dt_bias, slots, sources, pool, out, same_pool,
    S: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, scale: tl.constexpr, lower_bound: tl.constexpr, use_qk_l2norm: tl.constexpr,
    has_sources: tl.constexpr, largest: tl.constexpr, epsilon: tl.constexpr,
):  # fmt: skip
    """jax-triton 0.3: the pool comes once more, behind the output, as the output that aliases it."""
    packed_decode_step(
        mixed_qkv, a, b, A_log, dt_bias, slots, sources, same_pool, out,
        S, H, HV, K, V, BK, BV, scale, lower_bound, use_qk_l2norm, has_sources, largest, epsilon,
    )  # fmt: skip
