"""How the sizes of a call are read from its shapes, and what overrules the pool."""

import math
from dataclasses import dataclass

from kda_contracts import remedy
from kda_contracts.arrays import known, shape_text
from kda_contracts.axes import AXES

POOL = "initial_state"  # of the packed contract
WITNESSES = (
    "a",
    "b",
    "A_log",
    "dt_bias",
)  # agreeing with each other on HV and K, they overrule the pool


@dataclass(frozen=True)
class Bound:
    """The letters' values, where they were read ("HV=4, K=64 from ..."), and whether the pool was overruled."""

    sizes: dict
    sources: tuple[str, ...]
    pool_overruled: bool


def bind(contract, arrays, known_sizes):
    """The letters of a call: each from the first operand of `contract.sizes_from` that has it as an axis of its own."""
    if contract.sizes_from:
        return _bind_in_order(contract, arrays, known_sizes)
    return _bind_packed(arrays)


def _bind_in_order(contract, arrays, known_sizes):
    sizes, sources = dict(known_sizes), []
    if sizes:
        sources.append(
            f"{', '.join(f'{letter}={n}' for letter, n in sizes.items())} from the config"
        )
    for name in contract.sizes_from:
        axes = contract.by_name[name].axes.split()
        if name not in arrays or arrays[name].ndim != len(axes):
            continue
        new = {
            axis: n
            for axis, n in zip(axes, arrays[name].shape, strict=True)
            if axis in AXES and axis not in sizes
        }
        if new:
            sizes |= new
            letters = ", ".join(f"{letter}={n}" for letter, n in new.items())
            sources.append(f"{letters} from `{name}` {shape_text(arrays[name].shape)}")
    pool = arrays.get(contract.pool)
    if (
        pool is not None
        and pool.ndim == 1
        and all(known(sizes.get(x)) and sizes[x] for x in ("HV", "V", "K"))
    ):
        slot = math.prod(sizes[x] for x in ("HV", "V", "K"))
        sizes["S"] = None if pool.size % slot else pool.size // slot
    return Bound(sizes, tuple(sources), False)


def _bind_packed(arrays):
    """Reads S, HV, V, K from the pool, B and H from the packed row; agreeing witnesses overrule a pool."""
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
    return Bound(sizes, tuple(sources), overruled)


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


def differ(got, wanted):
    return known(got) and known(wanted) and got != wanted
