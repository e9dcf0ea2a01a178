"""Calls of several tokens, poisoned where nothing may be read, and what the oracle says of them."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from support import assert_rounded, assert_same_bits, running

import kda_jax
from kda_contracts import Sizes
from kda_jax.tools import oracle

FORMS = {
    "one_token": Sizes(B=5, T=1, N=5, H=1, HV=2, K=32, V=16, S=7),
    "dense": Sizes(B=4, T=3, N=4, H=2, HV=4, K=64, V=32, S=6),
    "odd": Sizes(B=3, T=2, N=3, H=1, HV=3, K=40, V=24, S=4),  # no tile of the Mosaic kernel fits
    "varlen": (4, 0, 1, 3, 2),
    "varlen_one_each": (1, 1, 1, 1),
    "varlen_one_sequence": (5,),
}
VARLEN = dict(B=1, H=1, HV=2, K=64, V=32)


@dataclass(frozen=True)
class Update:
    """One call; `live`: which sequences are not padded; `tokens`: which tokens they hold."""

    sizes: Sizes
    operands: dict
    live: np.ndarray  # [N] bool
    tokens: np.ndarray  # [B, T] bool

    @property
    def slots(self):
        return self.operands["initial_state_indices"]


def make_update(form, *, seed=0, dtype="bfloat16", pool_dtype="float32", padded=True):
    """A call of a form: sizes for a dense one, lengths for varlen; padded where enough."""
    rng = np.random.default_rng(seed)
    lengths = form if isinstance(form, tuple) else (form.T,) * form.N
    if varlen := isinstance(form, tuple):
        form = Sizes(**VARLEN, N=len(lengths), T=sum(lengths), S=len(lengths) + 2)
    B, T, N, H, HV, K, V, S = (
        getattr(form, letter) for letter in ("B", "T", "N", "H", "HV", "K", "V", "S")
    )

    def normal(*shape, dtype=dtype):
        return rng.standard_normal(shape, dtype=np.float32).astype(jnp.dtype(dtype))

    slots = np.full(N, -1, np.int32)
    slots[: min(N, S)] = rng.permutation(S)[:N]
    if padded and N >= 3:
        slots[2] = S if N >= 4 else -1
    live = (slots >= 0) & (slots < S)
    tokens = np.repeat(live, lengths).reshape(B, T)
    operands = dict(
        A_log=np.log(rng.uniform(1, 16, HV)).astype(np.float32),
        dt_bias=normal(HV * K, dtype="float32") - np.float32(2),
        q=normal(B, T, H, K),
        k=normal(B, T, H, K),
        v=normal(B, T, HV, V),
        a=normal(B, T, HV * K),
        b=normal(B, T, HV),
        initial_state_source=normal(S, HV, V, K, dtype=pool_dtype),
        initial_state_indices=slots,
    )
    for name, poison in (("q", np.nan), ("v", np.inf), ("a", np.inf), ("b", np.nan)):
        operands[name][~tokens] = poison
    operands["initial_state_source"][np.setdiff1d(np.arange(S), slots[live])] = np.nan
    if varlen:
        operands["cu_seqlens"] = np.cumsum((0, *lengths)).astype(np.int32)
    return Update(form, operands, live, tokens)


def run(call, implementation, **options):
    """The op on a call, where the implementation runs here."""
    operands = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x
        for name, x in (call.operands | options).items()
    }
    with running(implementation):
        return kda_jax.fused_sigmoid_gating_kda_update(**operands, implementation=implementation)


def expected(call, *, write=None, sources=None, update_state=True, **options):
    """(out, state, intermediate) of the oracle."""
    x = call.operands
    gate = dict(
        lower_bound=options.get("lower_bound"), softplus_beta=options.get("softplus_beta", 1.0)
    )
    gate |= dict(softplus_threshold=options.get("softplus_threshold", np.inf))
    gate |= dict(neg_eigval=options.get("allow_neg_eigval", False))
    a = x["a"].reshape(*x["v"].shape[:3], -1)
    decay, beta = oracle.gates(a, x["b"].reshape(a.shape[:3]), x["A_log"], x["dt_bias"], **gate)
    return oracle.update(
        *(x[name] for name in ("q", "k", "v")),
        decay,
        beta,
        x["initial_state_source"],
        x["initial_state_indices"],
        sources=sources,
        cu_seqlens=x.get("cu_seqlens"),
        scale=options.get("scale"),
        l2norm=options.get("use_qk_l2norm_in_kernel", True),
        write=write,
        update_state=update_state,
    )


def assert_meets_oracle(call, out, state, limit, **options):
    """Live tokens and slots near the oracle, all others zero or bit for bit as they were."""
    wanted_out, wanted, _ = expected(call, **options)
    out, state = np.asarray(out), np.asarray(state)
    assert_rounded(out[call.tokens], wanted_out[call.tokens], limit)
    assert_same_bits(out[~call.tokens], np.zeros_like(out[~call.tokens]))
    before = call.operands["initial_state_source"]
    touched = np.unique(
        call.slots[
            call.live
            & (np.diff(call.operands.get("cu_seqlens", np.arange(len(call.live) + 1))) > 0)
        ]
    )
    assert_rounded(state[touched], wanted[touched], limit)
    rest = np.setdiff1d(np.arange(len(before)), touched)
    assert_same_bits(state[rest], before[rest])
