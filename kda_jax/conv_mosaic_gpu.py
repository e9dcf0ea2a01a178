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

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kda_jax.mosaic import divide, to_memory
from kda_jax.transforms import unfused
from kda_jax.wgmma import launch, load

THREADS = 128  # of a warpgroup: so many channels a block
CHANNELS = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
MOST_TAPS = 8  # a program for each
BLOCKS = 2112  # 16 for each multiprocessor of an H200: from there on blocks take more tokens
NOBODY, NOTHING = -2, -1  # instead of a slot: a token that gives zero; a sequence from nothing
F32 = jnp.float32


def unsupported(widths, taps) -> str | None:
    """Why these kernels cannot run parts of so many channels, or None."""
    if any(width % THREADS for width in widths):
        return f"channels of {widths} are not multiples of {THREADS}"
    if not 1 < taps <= MOST_TAPS:
        return f"{taps} taps are not 2 to {MOST_TAPS}"
    return None


def convolved(parts, weights, biases, state, position, source):
    """`[T, C_i]` of each part: convolved, biased and SiLU.

    Args:
      parts: `[T, C_i]` each, together the channels of the pool; or one of all of them.
      weights: `[C_i, W]` each. biases: None, or `[C_i]` each.
      state: the pool, `[S, C, W-1]`, which is read alone.
      position: `[T]` int32, the number of each token in its sequence. source: `[T]` int32, the slot
        that its sequence goes on from, NOTHING or NOBODY.
    """
    T, blocks_of_channels = parts[0].shape[0], state.shape[1] // THREADS
    rows = 4
    while rows < 64 and T * blocks_of_channels >= 2 * rows * BLOCKS:
        rows *= 2
    operands = dict(pool=state, position=position, source=source)
    operands |= {f"x{i}": x for i, x in enumerate(parts)}
    operands |= {f"weight{i}": x for i, x in enumerate(weights)}
    operands |= {f"bias{i}": x for i, x in enumerate(biases or ())}
    results = {
        f"y{i}": jax.ShapeDtypeStruct((T, weight.shape[0]), parts[0].dtype)
        for i, weight in enumerate(weights)
    }

    def body(**refs):
        block_of_tokens, channels = divide(lax.axis_index("block"), blocks_of_channels)
        first = block_of_tokens * rows

        def run(i, column):
            _convolve(refs, i, column, channels * THREADS, first, rows)

        _in_its_part(channels, [x.shape[0] for x in weights], run)

    blocks = -(-T // rows) * blocks_of_channels
    y = launch(body, unfused(operands), results, {}, blocks=blocks, name="kda_conv")
    return unfused(tuple(y))


def moved_on(parts, state, slots, sources, begins, counts):
    """The pool, with the last inputs behind some tokens of some sequences; updated in place.

    slots, sources, begins, counts: `[R]` int32: a slot takes what lies behind `counts` tokens of
    the parts `[T, C_i]` from `begins` on, or before them in the slot `sources`; -1 for none.
    """
    T, blocks_of_channels = parts[0].shape[0], state.shape[1] // THREADS
    operands = dict(slots=slots, sources=sources, begins=begins, counts=counts)
    operands |= {f"x{i}": x for i, x in enumerate(parts)}
    ref = jax.new_ref(unfused(state))

    def body(**refs):
        row, channels = divide(lax.axis_index("block"), blocks_of_channels)
        slot = refs["slots"][row]

        def run(i, column):
            pl.when(slot >= 0)(lambda: _move_on(refs, i, column, channels * THREADS, row, slot, T))

        _in_its_part(channels, [x.shape[1] for x in parts], run)

    blocks = slots.shape[0] * blocks_of_channels
    launch(body, unfused(operands) | dict(pool=ref), {}, {}, blocks=blocks, name="kda_conv_pool")
    return unfused(jax.freeze(ref))


def _in_its_part(channels, widths, run):
    """`run(i, column)` for the part that has these channels, and where they begin in it."""
    begin = 0
    for i, width in enumerate(widths):
        end = begin + width // THREADS
        column = (channels - begin) * THREADS
        pl.when((channels >= begin) & (channels < end))(functools.partial(run, i, column))
        begin = end


def _load(ref, *index):
    return load(ref.at[index], CHANNELS)


def _nothing():
    return plgpu.layout_cast(jnp.zeros(THREADS, F32), CHANNELS)


def _convolve(refs, i, column, channel, first, rows):
    x, y = refs[f"x{i}" if "x1" in refs else "x0"], refs[f"y{i}"]
    (T, _), pool, here = x.shape, refs["pool"], pl.ds(column, THREADS)
    in_x = here if "x1" in refs else pl.ds(channel, THREADS)
    width = pool.shape[2]
    weights = [_load(refs[f"weight{i}"], here, tap).astype(F32) for tap in range(width + 1)]
    bias = _load(refs[f"bias{i}"], here).astype(F32) if f"bias{i}" in refs else None

    def of_slot(slot):
        def taps():
            at = pl.ds(channel, THREADS)
            return tuple(_load(pool, slot, at, tap).astype(F32) for tap in range(width))

        return lax.cond(slot >= 0, taps, lambda: (_nothing(),) * width)

    def loaded(token):
        token = jnp.clip(token, 0, T - 1)
        return _load(x, token, in_x).astype(F32), refs["position"][token], refs["source"][token]

    def window_of(window, position, source):
        return lax.cond(position == 0, lambda: of_slot(source), lambda: window)

    def warm():  # the inputs before the first token, as far as they are of its sequence
        window = (_nothing(),) * width
        for back in range(width, 0, -1):
            value, position, source = loaded(first - back)
            window = (*window_of(window, position, source)[1:], value)
        return window

    group = 4  # tokens that are loaded at once

    def next_group(number, window):
        begin = first + number * group
        for at, (value, position, source) in enumerate([loaded(begin + z) for z in range(group)]):
            window = window_of(window, position, source)
            taps = (*window, value)
            total = sum(tap * weight for tap, weight in zip(taps, weights, strict=True))
            if bias is not None:
                total = total + bias
            total = total / (1 + jnp.exp(-total))
            total = lax.cond(source == NOBODY, _nothing, lambda total=total: total)
            pl.when(begin + at < T)(
                lambda at=at, total=total: to_memory(y.at[begin + at, here], total.astype(y.dtype))
            )
            window = taps[1:]
        return window

    begins = refs["position"][jnp.minimum(first, T - 1)] == 0
    window = lax.cond(begins, lambda: (_nothing(),) * width, warm)
    lax.fori_loop(0, rows // group, next_group, window)


def _move_on(refs, i, column, channel, row, slot, T):
    x, pool = refs[f"x{i}"], refs["pool"]
    width, at = pool.shape[2], pl.ds(channel, THREADS)
    source, begin, count = (refs[name][row] for name in ("sources", "begins", "counts"))

    def newest(tap):
        token = count - width + tap  # negative: in the slot

        def of_slot():
            before = jnp.clip(count + tap, 0, width - 1)
            return _load(pool, source, at, before).astype(F32)

        def of_x():
            here = jnp.clip(begin + token, 0, T - 1)
            return _load(x, here, pl.ds(column, THREADS)).astype(F32)

        return lax.cond(token >= 0, of_x, lambda: lax.cond(source >= 0, of_slot, _nothing))

    for tap, value in enumerate([newest(tap) for tap in range(width)]):
        to_memory(pool.at[slot, at, tap], value.astype(pool.dtype))
