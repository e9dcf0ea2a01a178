"""What a wrong shape looks like, and its cure: the last lines of an error.

Over 350 lines, since whoever adds one reads here which cures there are.
"""

import math

from kda_contracts.arrays import differ, known, longer_axes

LAYOUT = "copy it first: x.contiguous() in torch, np.ascontiguousarray(x) in NumPy"
NEEDED = "without a `lower_bound`, pass A_log; None means zeros only for the safe gate"
ALONE = "pass one of them; the segments of several rows are `segment_ids`"
BESIDE = "column m of `checkpoints` takes the state after (m + 1) * checkpoint_every tokens"
SLOTS = (
    "_indices",
    "slots",
    "sources",
    "destinations",
    "accepted",
    "accepted_tokens",
    "intermediate_states",
    "checkpoints",
)
POOLS = ("initial_state", "initial_state_source", "pool", "state")
NO_RANK = "None is an output gate of full rank"


def for_shape(argument, operand, arrays, sizes, pool=None):
    """One line for a wrong shape, or None if only the expected shape can be said."""
    array, wanted = arrays[argument], operand.shape(sizes)
    if not all(map(known, array.shape)):
        return None
    cures = {
        "q": _sequences,
        "a": _gate,
        "b": _beta,
        "A_log": _rate,
        "dt_bias": _bias,
        "mixed_qkv": _packed,
    }
    if argument == "x" and (cure := _tokens(operand, array)):
        return cure
    if argument in cures and (cure := cures[argument](array, arrays, sizes)):
        return cure
    if (
        argument == pool
        and array.ndim == 4
        and (cure := for_pool(array, sizes.get("HV"), sizes.get("K"), pool))
    ):
        straight = array.shape[3] == sizes.get("V") or not _transposed(
            array.shape, sizes.get("HV"), sizes.get("K")
        )
        return cure[0] if straight else None
    if (
        argument == pool
        and array.ndim == 1
        and None not in (slot := [sizes.get(x) for x in ("HV", "V", "K")])
    ):
        return f"a flat pool holds whole slots of HV*V*K = {math.prod(slot)} elements"
    if None not in wanted and array.ndim == 2 and array.shape == wanted[::-1] != wanted:
        return f"transposed: {argument}.T"
    swapped = (*array.shape[:-2], *array.shape[:-3:-1])
    if array.ndim == len(wanted) == 3 and not any(map(differ, swapped, wanted)):
        return f"transposed: {array.library}.swapaxes({argument}, 1, 2)"
    if None not in wanted and array.ndim != len(wanted) and array.size == math.prod(wanted):
        arguments = ", ".join(map(str, wanted))
        return f"the same elements in another shape: {argument}.reshape({arguments})"
    if argument == pool and array.ndim == len(wanted) + 1:
        return (
            "this looks like the pools of all layers: pass one layer's, "
            "and keep the layers' pools in a list"
        )
    return None


def for_normalizer(name, array, sizes):
    """One line for an A_log, dt_bias or a that no normalizer knows, or None."""
    cure = {"a": _gate, "A_log": _rate, "dt_bias": _bias}[name]
    return cure(array, {}, sizes) if all(map(known, array.shape)) else None


def for_none(argument, given, arrays, sizes):
    """One line for an A_log or dt_bias of None that other operators take, or None."""
    elements = {"A_log": ("HV",), "dt_bias": ("HV", "K")}.get(argument, ())
    numbers = [sizes.get(letter) for letter in elements]
    if given[argument] is not None or not numbers or not all(map(known, numbers)):
        return None
    library = next(iter(arrays.values())).library
    return f"None does not mean zeros here: pass {library}.zeros({math.prod(numbers)})"


def for_dtype(argument, array):
    """One line for a wrong dtype, or None."""
    if argument.endswith(SLOTS):
        if array.dtype.startswith("uint"):
            return f"-1 marks a padded row, so slots are signed: {_cast(argument, array, 'int32')}"
        return f"slots are integers: {_cast(argument, array, 'int32')}, with -1 for a padded row"
    if argument == "segment_ids":
        return f"ids are integers, 0 for padding: {_cast(argument, array, 'int32')}"
    if array.dtype == "float64":
        return f"round it first: {_cast(argument, array, 'float32')}"
    if argument in POOLS:
        return "an 8-bit or integer pool has to be expanded first; bytes are never reinterpreted"
    return None


def _cast(name, array, dtype):
    return f"{name}.to(torch.{dtype})" if array.library == "torch" else f"{name}.astype('{dtype}')"


def _repeat(name, array, times):
    function = "repeat_interleave" if array.library == "torch" else "repeat"
    return f"{array.library}.{function}({name}, {times})"


def _tile(name, array, times):
    return f"{array.library}.tile({name}, {f'({times},)' if array.library == 'torch' else times})"


def for_option(name, number):
    """Lines for a number out of range."""
    if name == "lower_bound" and number >= 0:
        return (
            "it bounds the log decay from below, so it is negative (-5.0 in Kimi-K3); "
            "None is the softplus gate",
        )
    if name == "scale":
        return ("None is K**-0.5",)
    return ()


def for_pool(pool, HV, K, name="initial_state"):
    """Lines for a pool whose HV and K are not those that the other operands agree on."""
    shape, swapaxes = pool.shape, f"{pool.library}.swapaxes"
    if not all(map(known, (*shape, HV, K))):
        return ()
    if _transposed(shape, HV, K):
        return (
            "this looks like [..., K, V]: transpose the last two axes, "
            f"e.g. {swapaxes}({name}, -1, -2)",
        )
    if shape[2] == HV and shape[3] == K:
        return (f"this looks like [S, V, HV, K]: swap axes 1 and 2, e.g. {swapaxes}({name}, 1, 2)",)
    if shape[0] == HV and shape[3] == K:
        return (f"this looks like [HV, S, V, K]: swap axes 0 and 1, e.g. {swapaxes}({name}, 0, 1)",)
    if shape[3] == K and HV and shape[1] > HV and shape[1] % HV == 0:
        return (
            f"it holds {shape[1]} heads, {shape[1] // HV} times as many: "
            f"slice this rank's {HV} heads on axis 1",
        )
    return ()


def value_width(shape, HV, K):
    """V of a wrong pool where its shape still tells it, else None."""
    if _transposed(shape, HV, K):
        return shape[3]
    if shape[3] == K:
        return shape[1] if shape[2] == HV != shape[1] else shape[2]
    return None


def _transposed(shape, HV, K):
    return shape[1] == HV and shape[2] == K != shape[3]


def end_to_end(array):
    """One line for several rows beside `cu_seqlens`."""
    if not all(map(known, array.shape)):
        return None
    B, T, D = array.shape
    return (
        f"lay the rows end to end, x.reshape(1, {B * T}, {D}); or tell the segments of each row "
        "by `segment_ids`"
    )


def _tokens(operand, array):
    """Of a layer's input over several tokens: rows where one is taken, or one without its axis."""
    axes = operand.axes.split()
    if axes == ["T", "D"] and array.ndim == 3:
        B, T, D = array.shape
        return (
            "rows of tokens are for kda_apply, without cache and slots; or lay them end to end: "
            f"x.reshape({B * T}, {D}) with cu_seqlens = {array.library}.arange({B + 1}) * {T}"
        )
    if axes == ["B", "D"] and array.ndim == 3:
        return "several tokens a row: kda_verify takes drafts, and kda_prefill prompts"
    if axes == ["N", "T", "D"] and array.ndim == 2:
        return "one token of each sequence: x[:, None]"
    if axes == ["B", "T", "D"] and array.ndim == 2:
        return "one row, or sequences that lie end to end: x[None]"
    return None


def _bias(array, arrays, sizes):
    HV, K = sizes.get("HV"), sizes.get("K")
    if not (known(HV) and known(K)):
        return None
    if array.size == HV * K:
        return (
            f"the same elements in another shape: dt_bias.reshape({HV * K}), "
            "or kda_contracts.normalize_dt_bias"
        )
    if _swapped_weights(arrays, HV, K):
        return "this looks like `A_log` and `dt_bias` swapped"
    if array.size == HV:
        return (
            f"{HV} is HV: this looks like one bias per head; repeat each K={K} times, "
            f"e.g. {_repeat('dt_bias', array, K)}"
        )
    if array.size == K:
        return (
            f"{K} is K: this looks like one bias for all heads; repeat it, "
            f"e.g. {_tile('dt_bias', array, HV)}"
        )
    return _unsharded("dt_bias", array.size, HV * K)


def _rate(array, arrays, sizes):
    HV, K = sizes.get("HV"), sizes.get("K")
    if not known(HV):
        return None
    if array.size == HV:
        return (
            f"the same elements in another shape: A_log.reshape({HV}), "
            "or kda_contracts.normalize_A_log"
        )
    if _swapped_weights(arrays, HV, K):
        return "this looks like `A_log` and `dt_bias` swapped"
    if known(K) and array.size == HV * K:
        return (
            f"{HV * K} is HV*K: this looks like one rate per channel; A_log has one per value head"
        )
    if array.ndim == 1 and array.size > HV:
        return (
            f"a padded A_log: kda_contracts.normalize_A_log(A_log, {HV}) checks that its tail is "
            "zero and drops it"
        )
    return None


def _swapped_weights(arrays, HV, K):
    if not known(K) or K == 1 or not {"A_log", "dt_bias"} <= arrays.keys():
        return False
    return arrays["A_log"].size == HV * K and arrays["dt_bias"].size == HV


def _gate(array, arrays, sizes):
    HV, K, leading = sizes.get("HV"), sizes.get("K"), _leading(sizes)
    if leading is None or not (known(HV) and known(K)):
        return None
    tokens = math.prod(leading)
    if (
        K > 1
        and array.size == tokens * HV
        and "b" in arrays
        and arrays["b"].size == tokens * HV * K
    ):
        return "this looks like `a` and `b` swapped"
    if array.size == tokens * HV * K:
        other = ", or kda_contracts.normalize_a" if len(leading) == 1 else ""
        shape = ", ".join(map(str, (*leading, HV * K)))
        return f"the same elements in another shape: a.reshape({shape}){other}"
    if array.size == tokens * HV:
        return f"one gate per head is GDN's; KDA has one per (head, channel), HV*K={HV * K} a row"
    return None


def _beta(array, arrays, sizes):
    HV, K, leading = sizes.get("HV"), sizes.get("K"), _leading(sizes)
    if leading is None or not (known(HV) and known(K)) or K == 1 or "a" not in arrays:
        return None
    tokens = math.prod(leading)
    if array.size == tokens * HV * K and arrays["a"].size == tokens * HV:
        return "this looks like `a` and `b` swapped"
    return None


def _sequences(array, arrays, sizes):
    B, T, N = sizes.get("B"), sizes.get("T"), sizes.get("N")
    if array.ndim != 4 or not all(map(known, (B, T, N))):
        return None
    if "cu_seqlens" in arrays and B == N:
        return "one row a sequence is the dense form: leave cu_seqlens out"
    if "cu_seqlens" in arrays:
        return (
            f"sequences lie end to end along axis 1: q.reshape(1, {B * T}, ...), "
            "and k, v, a, b likewise"
        )
    if B == 1 and T == N:
        return (
            "this looks like sequences of one token, end to end: "
            f"pass cu_seqlens={array.library}.arange(N + 1)"
        )
    return "sequences that lie end to end need cu_seqlens" if B == 1 else None


def _leading(sizes):
    """The axes of rows and tokens: (B,) of a packed row, (B, T) of several tokens; or None."""
    leading = tuple(sizes[letter] for letter in ("B", "T") if letter in sizes)
    return leading if leading and all(map(known, leading)) else None


def _packed(array, arrays, sizes):
    if array.ndim == 3 and array.shape[-1] and 1 in array.shape[:2]:
        rows, width = array.size // array.shape[-1], array.shape[-1]
        return f"one token a row: mixed_qkv.reshape({rows}, {width})"
    return (
        "the flat row is q of all H heads, k of all H heads, v of all HV heads: "
        "2*H*K + HV*V elements"
    )


def _unsharded(name, got, wanted):
    if wanted and got > wanted and got % wanted == 0:
        return (
            f"it holds {got // wanted} times as many: an unsharded {name}? "
            f"slice this rank's {wanted} elements"
        )
    return None


def for_tensor(tensor, array, sizes):
    """One line for a checkpoint's tensor of a wrong shape, or None."""
    wanted = tensor.shape(sizes)
    if tensor.name == "dt_bias" and array.size in (sizes["HV"], sizes["K"]):
        return _bias(array, {}, sizes)
    if tensor.name == "dt_bias" and longer_axes(array.shape) == [sizes["K"], sizes["HV"]]:
        return "the key channels come first: transpose it to [HV, K]"
    if tensor.name == "A_log" and array.size > sizes["HV"]:
        return _rate(array, {}, sizes)
    if "conv1d.weight" in tensor.name and array.size == math.prod(wanted):
        if wanted[0] == wanted[2]:
            return "as many taps as channels: only the released shape says which axis is which"
        return "the taps come first: swap the two axes"
    if array.size == math.prod(wanted):
        transposed = array.ndim == 2 and array.shape == wanted[::-1]
        return (
            "transposed: take .T"
            if transposed
            else f"the same elements in another shape: reshape{wanted}"
        )
    wrong = [axis for axis, (x, y) in enumerate(zip(array.shape, wanted, strict=False)) if x != y]
    if array.ndim != len(wanted) or len(wrong) != 1:
        return None
    (axis,) = wrong
    if array.shape[axis] and wanted[axis] % array.shape[axis] == 0:
        parts = wanted[axis] // array.shape[axis]
        if axis == tensor.cut:
            return (
                f"axis {axis} is 1/{parts} of it: one rank's slice of {parts}? "
                "join the ranks' files"
            )
        cut = (
            "this tensor is not cut"
            if tensor.cut is None
            else f"this tensor is cut on axis {tensor.cut}"
        )
        return (
            f"axis {axis} is 1/{parts} of it: a tensor-parallel slice cut on the wrong axis? {cut}"
        )
    return None


def for_tensor_dtype(dtype):
    """One line for a checkpoint's tensor of a wrong dtype, or None."""
    if dtype == "float64":
        return "round it to float32 first"
    return "quantized or integer weights have to be expanded to a float dtype first"


def for_stranger(name):
    """One line for a tensor that no KDA layer has, or None."""
    if name.startswith("conv1d"):
        return "a joined convolution has the rows of q, k and v: 2*H*K + HV*V"
    if name.startswith(("in_proj", "norm.")):
        return "this looks like Gated DeltaNet's layer, whose gate is per head"
    if name.startswith(("q_a_", "q_b_", "kv_a_", "kv_b_", "kv_proj", "indexer")):
        return "this looks like MLA's layer"
    if name.startswith("g_"):
        return "a layer has either a low-rank or a full-rank output gate"
    if any(mark in name for mark in ("scale", "packed", "qweight", "qzeros", "zero_point")):
        return "quantized weights have to be expanded first"
    return None
