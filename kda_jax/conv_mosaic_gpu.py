"""The short convolution over many tokens as two Pallas Mosaic GPU kernels.

A thread takes one channel over some tokens in a row, the last inputs in registers: each input is
read once, where XLA reads it for every tap (4096 tokens of 12288 channels on an H200: 264 us, and
64 more to part q, k and v). A token that begins a sequence takes the inputs of its slot instead.
The pool moves on in a kernel of its own: a block that writes a slot may be ahead of one that reads
it.

A channel's inputs lie side by side in the pool, `[S, C, W-1]`, so that its copies are of single
elements.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_jax import pools
from kda_jax.conv_xla import moves, tokens_of
from kda_jax.mosaic import divide, to_memory
from kda_jax.transforms import unfused
from kda_jax.wgmma import launch, load

THREADS = 128  # of a warpgroup: so many channels a thread each
CHANNELS = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
MOST_TAPS = 8  # a program for each
BLOCKS = 2112  # 16 for each multiprocessor of an H200: from there on blocks take more tokens
# Instead of the slot from which a sequence begins with this token: it begins from nothing; it gives
# zero; it is none that begins.
NOTHING, NOBODY, GOES_ON = -1, -2, -3
F32 = jnp.float32


def unsupported(widths, taps) -> str | None:
    """Why these kernels cannot run parts of so many channels, or None."""
    if any(width % THREADS for width in widths):
        return f"channels of {widths} are not multiples of {THREADS}"
    if not 1 < taps <= MOST_TAPS:
        return f"{taps} taps are not 2 to {MOST_TAPS}"
    return None


def all_tokens(parts, weights, biases, state, slots, cu_seqlens, sources, checkpoints, *, every):
    T, S = parts[0].shape[0], state.shape[0]
    held, position, source = tokens_of(slots, sources, cu_seqlens, T, S)
    begins = _begins(source, S, held, position)
    y = convolved(parts, weights, biases, state, begins)
    y, state = jax.lax.optimization_barrier((y, state))  # it has read the pool
    for rows in moves(slots, sources, cu_seqlens, checkpoints, S, every):
        state = move_on(parts, state, rows)
    return y, state


def drafted(x, weights, biases, state, slots, sources):
    (N, T, C), S = x.shape, state.shape[0]
    source = pools.sources_of(slots, sources, S)
    live, position = pools.inside(slots, S)[:, None], jnp.arange(T, dtype=jnp.int32)[None]
    begins = _begins(source[:, None], S, live, position).reshape(-1)
    y = convolved((x.reshape(N * T, C),), weights, biases, state, begins)
    return tuple(part.reshape(N, T, -1) for part in y)


def move_on(parts, state, rows):
    slots, sources, begins, counts = rows
    S = state.shape[0]
    slots = jnp.where(pools.inside(slots, S), slots, -1)
    sources = jnp.where(pools.inside(sources, S), sources, -1)
    return moved_on(parts, state, slots, sources, begins, counts)


def _begins(source, S, held, position):
    """`[T]`: what the kernels are told of each token."""
    begins = jnp.where(source < S, source, NOTHING)
    return jnp.where(held, jnp.where(position == 0, begins, GOES_ON), NOBODY)


def convolved(parts, weights, biases, state, begins):
    """`[T, C_i]` of each part: convolved, biased and SiLU.

    Args:
      parts: `[T, C_i]` each, together the channels of the pool; or one of all of them.
      weights: `[C_i, W]` each. biases: None, or `[C_i]` each.
      state: the pool, `[S, C, W-1]`, which is read alone.
      begins: `[T]` int32, the slot from which a sequence begins with this token, NOTHING, NOBODY or
        GOES_ON.
    """
    T, widths = parts[0].shape[0], [x.shape[0] for x in weights]
    channels, rows = _channels(widths), 4
    columns = state.shape[1] // channels
    while rows < 32 and T * columns >= 2 * rows * BLOCKS:
        rows *= 2
    operands = dict(pool=state, begins=begins)
    operands |= {f"x{i}": x for i, x in enumerate(parts)}
    operands |= {f"weight{i}": x for i, x in enumerate(weights)}
    operands |= {f"bias{i}": x for i, x in enumerate(biases or ())}
    results = {
        f"y{i}": jax.ShapeDtypeStruct((T, width), parts[0].dtype) for i, width in enumerate(widths)
    }

    def body(**refs):
        block_of_tokens, column = divide(lax.axis_index("block"), columns)
        first = block_of_tokens * rows

        def run(i, begin):
            _convolve(refs, i, begin, column * channels, channels, first, rows)

        _in_its_part(column * channels, widths, run)

    y = launch(
        body, unfused(operands), results, {}, blocks=-(-T // rows) * columns, name="kda_conv"
    )
    return unfused(tuple(y))


def moved_on(parts, state, slots, sources, begins, counts):
    """The pool, with the last inputs behind some tokens of some sequences; updated in place.

    slots, sources, begins, counts: `[R]` int32: a slot takes what lies behind `counts` tokens of
    the parts `[T, C_i]` from `begins` on, or before them in the slot `sources`; -1 for none.
    """
    widths = [x.shape[1] for x in parts]
    channels = _channels(widths)
    columns = state.shape[1] // channels
    operands = dict(slots=slots, sources=sources, begins=begins, counts=counts)
    operands |= {f"x{i}": x for i, x in enumerate(parts)}
    ref = jax.new_ref(unfused(state))

    def body(**refs):
        row, column = divide(lax.axis_index("block"), columns)
        slot = refs["slots"][row]

        def run(i, begin):
            pl.when(slot >= 0)(
                lambda: _move_on(refs, i, begin, column * channels, channels, row, slot)
            )

        _in_its_part(column * channels, widths, run)

    operands = unfused(operands) | dict(pool=ref)
    launch(body, operands, {}, {}, blocks=slots.shape[0] * columns, name="kda_conv_pool")
    return unfused(jax.freeze(ref))


def _channels(widths):
    """How many a block takes: what it does for a token, it does once for all of them."""
    return math.gcd(2 * THREADS, *widths)


def _in_its_part(channel, widths, run):
    """`run(i, begin)` for the part that has this channel, and where the part begins."""
    begin = 0
    for i, width in enumerate(widths):
        end = begin + width
        pl.when((channel >= begin) & (channel < end))(functools.partial(run, i, begin))
        begin = end


def _each(channel, channels):
    """The channels of a block, as many at a time as it has threads."""
    return [pl.ds(channel + at, THREADS) for at in range(0, channels, THREADS)]


def _load(ref, *index):
    return load(ref.at[index], CHANNELS)


def _zeros(dtype=F32):
    return plgpu.layout_cast(jnp.zeros(THREADS, dtype), CHANNELS)


def _convolve(refs, i, begin, channel, channels, first, rows):
    x, y = refs[f"x{i}" if "x1" in refs else "x0"], refs[f"y{i}"]
    pool, T = refs["pool"], x.shape[0]
    width, dtype = pool.shape[2], pool.dtype
    here = _each(channel - begin, channels)  # in the part
    in_x = here if "x1" in refs else _each(channel, channels)
    in_pool = _each(channel, channels)
    weights = [
        [_load(refs[f"weight{i}"], at, tap).astype(F32) for tap in range(width + 1)] for at in here
    ]
    biases = (
        [_load(refs[f"bias{i}"], at).astype(F32) for at in here] if f"bias{i}" in refs else None
    )

    def of_slot(slot):
        """Not yet float32: a conversion would wait for each load in its turn."""

        def taps():
            return [[_load(pool, slot, at, tap) for tap in range(width)] for at in in_pool]

        nothing = [[_zeros(dtype)] * width] * len(in_pool)
        return lax.cond(slot >= 0, taps, lambda: nothing)

    def loaded(token):
        token = jnp.clip(token, 0, T - 1)
        slot = refs["begins"][token]
        return slot, of_slot(slot), [_load(x, token, at) for at in in_x]

    def store(token, slot, taps):
        for z, at in enumerate(here):
            total = sum(tap * weight for tap, weight in zip(taps[z], weights[z], strict=True))
            if biases is not None:
                total = total + biases[z]
            total = total / (1 + jnp.exp(-total))
            total = lax.cond(slot == NOBODY, _zeros, lambda total=total: total)
            to_memory(y.at[token, at], total.astype(y.dtype))

    def next_token(token, carry):
        windows, (slot, past, value) = carry
        ahead = loaded(token + 1)  # first: what follows hides its latency
        past = jax.tree.map(lambda tap: tap.astype(F32), past)
        windows = lax.cond(slot >= NOTHING, lambda: past, lambda: windows)
        taps = [[*window, one.astype(F32)] for window, one in zip(windows, value, strict=True)]
        pl.when((token >= first) & (token < T))(lambda: store(token, slot, taps))
        return [each[1:] for each in taps], ahead

    # From the inputs before the first token on, where they may be of its sequence.
    begin = jnp.where(refs["begins"][first] == GOES_ON, first - width, first)
    windows = [[_zeros()] * width for _ in here]
    lax.fori_loop(begin, first + rows, next_token, (windows, loaded(begin)))


def _move_on(refs, i, begin, channel, channels, row, slot):
    x, pool = refs[f"x{i}"], refs["pool"]
    T, width = x.shape[0], pool.shape[2]
    source, start, count = (refs[name][row] for name in ("sources", "begins", "counts"))

    in_pool, here = _each(channel, channels), _each(channel - begin, channels)

    def newest(tap):
        token = count - width + tap  # negative: in the slot
        before = jnp.clip(count + tap, 0, width - 1)

        def of_x():
            row = jnp.clip(start + token, 0, T - 1)
            return [_load(x, row, at).astype(pool.dtype) for at in here]

        def of_slot():
            return lax.cond(
                source >= 0,
                lambda: [_load(pool, source, at, before) for at in in_pool],
                lambda: [_zeros(pool.dtype)] * len(in_pool),
            )

        return lax.cond(token >= 0, of_x, of_slot)

    for tap, values in enumerate([newest(tap) for tap in range(width)]):
        for at, value in zip(in_pool, values, strict=True):
            to_memory(pool.at[slot, at, tap], value)
