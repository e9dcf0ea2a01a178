"""Whether a layer's heads split over the ranks of tensor parallelism."""

import math
import operator

from kda_contracts.judge import ContractError
from kda_contracts.options import shown_value

MOST_RANKS = 1024  # of those that an error names


def split_heads(H, HV, ranks) -> tuple[int, int]:
    """(H, HV) of one of `ranks` ranks.

    Args:
      H, HV: query/key heads and value heads of the whole layer.
      ranks: ranks that the heads are split over, a whole number above 0.

    Returns:
      `(H, HV)` of each rank.

    Raises:
      ContractError: `ranks` does not divide H and HV; the second line names up to 1024 that do.

    >>> split_heads(16, 32, 8)
    (2, 4)
    >>> split_heads(16, 32, 3)
    Traceback (most recent call last):
    ...
    kda_contracts.judge.ContractError: 16 key and 32 value heads cannot be split over 3 ranks
      it can be 1, 2, 4, 8, 16
    """
    if isinstance(ranks, bool) or not hasattr(ranks, "__index__"):
        raise ContractError(f"`ranks` must be a whole number above 0 (got {shown_value(ranks)})")
    ranks = operator.index(ranks)
    if ranks > 0 and H % ranks == HV % ranks == 0:
        return H // ranks, HV // ranks
    heads = f"{HV} heads" if H == HV else f"{H} key and {HV} value heads"
    common = math.gcd(H, HV)
    ways = [str(n) for n in range(1, min(common, MOST_RANKS) + 1) if common % n == 0]
    shown = ranks if ranks.bit_length() < 128 else shown_value(ranks)
    raise ContractError(
        f"{heads} cannot be split over {shown} ranks\n  it can be {', '.join(ways)}"
    )
