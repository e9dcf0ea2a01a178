"""How the sizes of a call are read from its shapes, and what overrules the pool."""

import math
from dataclasses import dataclass

from kda_contracts import remedy
from kda_contracts.arrays import differ, known, shape_text
from kda_contracts.axes import AXES
from kda_contracts.spec import axis_value, parse_axis

POOL = "initial_state"  # of the packed contract
# Where these agree with each other on HV and K, they overrule the pool.
WITNESSES = ("a", "b", "A_log", "dt_bias")


@dataclass(frozen=True)
class Bound:
    """The letters' values, and where they were read.

    `sources` says it in words ("HV=4, K=64 from ..."), `read_from` by letter, and `pool_overruled`
    whether other operands were right against the pool.
    """

    sizes: dict
    sources: tuple[str, ...]
    pool_overruled: bool
    read_from: dict


def bind(contract, arrays, known_sizes):
    """The letters of a call, each from the first operand of `contract.sizes_from` that tells it."""
    if contract.sizes_from:
        return _bind_in_order(contract, arrays, known_sizes)
    return _bind_packed(arrays) if contract.operands else Bound({}, (), False, {})


def _bind_in_order(contract, arrays, known_sizes):
    sizes, sources, read_from = dict(known_sizes), [], {}
    if sizes:
        letters = ", ".join(f"{letter}={n}" for letter, n in sizes.items())
        sources.append(f"{letters} from the config")
    names = [name for name in contract.sizes_from if name in arrays]
    agreeing, found = True, True
    while agreeing or found:
        # A product of letters tells one of them once the others are known, so all are asked again.
        # What disagrees with a letter that is known is read last.
        agreeing, found = agreeing and found, False
        for name in names:
            array = arrays[name]
            if new := _letters(contract, name, array, sizes, agreeing):
                found = True
                sizes |= new
                read_from |= dict.fromkeys(new, name)
                if letters := ", ".join(f"{x}={n}" for x, n in new.items() if x in AXES):
                    sources.append(f"{letters} from `{name}` {shape_text(array.shape)}")
    pool = arrays.get(contract.pool)
    if (
        pool is not None
        and pool.ndim == 1
        and all(known(sizes.get(x)) and sizes[x] for x in ("HV", "V", "K"))
    ):
        slot = math.prod(sizes[x] for x in ("HV", "V", "K"))
        sizes["S"] = None if pool.size % slot else pool.size // slot
    return Bound(sizes, tuple(sources), False, read_from)


def _letters(contract, name, array, sizes, agreeing):
    """{letter: size} that an operand tells, of those that are not known yet."""
    operand = contract.by_name[name]
    by_elements = any(
        rule.kind == "numel" and name in rule.arguments.split() for rule in contract.rules
    )
    shape = (array.size,) if by_elements else array.shape
    new = {}
    axes = operand.axes.split()
    if axes[0] == "..." and len(shape) >= len(axes) - 1:
        split = len(shape) - len(axes) + 1
        new = {"...": shape[:split]} if "..." not in sizes else {}
        axes, shape = axes[1:], shape[split:]
    else:
        forms = [form.split() for form in (operand.axes, *operand.also)]
        axes = next((form for form in forms if len(form) == len(shape)), None)
    if axes is None:
        return {}
    if agreeing and _disagree(axes, shape, sizes):
        # Read as it was meant: transposed, it is one fault and not several.
        shape = (*shape[:-2], *shape[-2:][::-1])
        if _disagree(axes, shape, sizes):
            return {}
    for axis, size in zip(axes, shape, strict=True):
        if found := _letter(axis, size, sizes | new):
            new |= found
    return new


def _disagree(axes, shape, sizes):
    return any(differ(n, axis_value(axis, sizes)) for axis, n in zip(axes, shape, strict=True))


def _letter(axis, size, sizes):
    """{letter: value} of an axis with one letter that is not known: "N", "W-1" or "HV*K"; or {}."""
    (factor, letters), *rest = parse_axis(axis)
    unknown = [letter for letter in letters if letter not in sizes]
    if len(unknown) != 1 or factor != 1 or any(letters for _, letters in rest):
        return {}
    size = size - sum(number for number, _ in rest)
    others = [sizes[letter] for letter in letters if letter != unknown[0]]
    if not others:
        return {unknown[0]: size}
    other = math.prod(others) if all(map(known, others)) else 0
    whole = known(size) and other and size % other == 0
    return {unknown[0]: size // other} if whole else {}


def odd_ones(contract, argument, arrays, bound):
    """Lines about letters on which this operand and the one they were read from disagree, where no
    third operand says which of the two is right.
    """
    told = {name: _told(contract.by_name[name], array) for name, array in arrays.items()}
    for letter, got in told[argument].items():
        source = bound.read_from.get(letter)
        wanted = bound.sizes.get(letter)
        if source in (None, argument) or not differ(got, wanted):
            continue
        others = (x for name, x in told.items() if name not in (source, argument))
        if not any(x.get(letter) == wanted for x in others):
            shapes = [shape_text(arrays[name].shape) for name in (source, argument)]
            yield (
                f"`{source}` {shapes[0]} has {letter}={wanted} and `{argument}` {shapes[1]} has "
                f"{letter}={got}: one of the two is wrong"
            )


def _told(operand, array):
    """{letter: size} of an operand's axes, each read by itself."""
    axes = operand.axes.removeprefix("... ").split()
    shape = array.shape[-len(axes) :] if "..." in operand.axes else array.shape
    if len(axes) != len(shape):
        return {}
    told = {}
    for axis, size in zip(axes, shape, strict=True):
        told |= _letter(axis, size, {})
    return told


def _bind_packed(arrays):
    """S, HV, V, K from the pool, B and H from the packed row; witnesses that agree overrule a pool."""
    sizes, sources = {}, []
    pool, packed = arrays.get(POOL), arrays.get("mixed_qkv")
    agreed = _agreed(arrays)
    overruled = False
    if pool is not None and pool.ndim == 4:
        sizes = dict(zip(("S", "HV", "V", "K"), pool.shape, strict=True))
        overruled = agreed is not None and any(map(differ, (sizes["HV"], sizes["K"]), agreed))
    if agreed is not None and (overruled or not sizes):
        sizes["HV"], sizes["K"] = agreed
        sizes["V"] = remedy.value_width(pool.shape, *agreed) if overruled else None
        sources.append(f"HV={agreed[0]}, K={agreed[1]} from `a`, `b`, `A_log` and `dt_bias`")
    elif sizes:
        names = ", ".join(f"{letter}={sizes[letter]}" for letter in ("HV", "V", "K"))
        sources.append(f"{names} from `{POOL}` {shape_text(pool.shape)}")
    if packed is not None and packed.ndim == 2:
        sizes["B"] = packed.shape[0]
        width, q_size = packed_sizes(packed, sizes)
        if q_size is not None and packed_fault(sizes, width, q_size) is None:
            sizes["H"] = q_size // sizes["K"]
            sources.append(f"H={sizes['H']} from `mixed_qkv` {shape_text(packed.shape)}")
    return Bound(sizes, tuple(sources), overruled, {})


def _agreed(arrays):
    """(HV, K) where all four witnesses agree, whatever their ranks; else None."""
    if any(name not in arrays for name in WITNESSES):
        return None
    a, b, A_log, dt_bias = (arrays[name] for name in WITNESSES)
    dimensions = (*a.shape, *b.shape, *A_log.shape, *dt_bias.shape)
    if not all(map(known, dimensions)) or not (
        a.shape and b.shape and a.shape[0] == b.shape[0] > 0
    ):
        return None
    HV, HVK = A_log.size, dt_bias.size
    if HV == 0 or HVK == 0 or HVK % HV or b.size != b.shape[0] * HV or a.size != a.shape[0] * HVK:
        return None
    return HV, HVK // HV


def packed_sizes(packed, sizes):
    """(width, elements of q) of a packed row; q is None where HV, V or K is not known."""
    width = packed.shape[1]
    if any(sizes.get(letter) is None for letter in ("HV", "V", "K")):
        return width, None
    return width, (width - sizes["HV"] * sizes["V"]) // 2


def packed_fault(sizes, width, q_size):
    """The kind of the first packed rule that the row breaks, or None. Symbolic widths are not judged."""
    HV, V, K = sizes["HV"], sizes["V"], sizes["K"]
    if not all(map(known, (width, HV, V, K))):
        return None
    if width - HV * V <= 0 or (width - HV * V) % 2:
        return "packed_width"
    if K == 0 or q_size % K:
        return "packed_keys"
    if HV == 0 or HV % (q_size // K):
        return "packed_heads"
    return None
