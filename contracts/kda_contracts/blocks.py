"""The tables of the layer's parts that are functions of their own: convolution, norm, gates."""

from dataclasses import replace

from kda_contracts.spec import (
    CHECKPOINT_EVERY,
    CHECKPOINTS,
    CU_SEQLENS,
    FLOATS,
    INDICES,
    SOURCES,
    TOGETHER,
    Contract,
    Operand,
    Option,
    Rule,
)

_RANK = "`{argument}` must be {expected} (got ndim={array.ndim})."
_SHAPE = "`{argument}` must have shape {wanted} (got {array.shape})."
_DTYPE = "`{argument}` must be {allowed} (got {got})."
_DEVICE = "All inputs must be on the same device."


def _rules(ranked, shaped):
    """The rules of operands that have one shape each: those of a rank, those of a whole shape."""
    names = " ".join(dict.fromkeys((*ranked.split(), *shaped.split())))
    return (
        Rule("rank", ranked, _RANK),
        Rule("device", names.partition(" ")[2], _DEVICE),
        Rule("shape", shaped, _SHAPE),
        Rule("dtype", names, _DTYPE),
    )


_WEIGHT = Operand("weight", "C W", FLOATS, "the taps; the last column meets the newest input")
_POOL = Operand("pool", "S C W-1", FLOATS, "the last inputs of each slot, oldest first")
_BIAS = Operand("bias", "C", FLOATS, "added before SiLU", required=False)

CONV_DECODE = Contract(
    name="kda_jax.conv_decode",
    operands=(
        Operand("x", "B C", FLOATS, "the projected channels, one token a row"),
        _WEIGHT,
        _POOL,
        Operand("slots", "B", INDICES, "slot of each row; outside [0, S): a padded row"),
        replace(SOURCES, axes="B"),
        _BIAS,
    ),
    results=(
        Operand("y", "B C", FLOATS, "the convolved channels, after SiLU"),
        replace(_POOL, meaning="the updated pool"),
    ),
    options=(),
    rules=_rules("x weight pool slots sources bias", "weight pool slots sources bias"),
    pool="pool",
    anchor="x",
    sizes_from=("x", "weight", "pool"),
)

CONV_PREFILL = Contract(
    name="kda_jax.conv_prefill",
    operands=(
        Operand("x", "T C", FLOATS, "the projected channels of all sequences, end to end"),
        _WEIGHT,
        _POOL,
        Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): a padded one"),
        replace(CU_SEQLENS, required=True),
        SOURCES,
        CHECKPOINTS,
        _BIAS,
    ),
    results=(
        Operand("y", "T C", FLOATS, "the convolved channels, after SiLU"),
        replace(_POOL, meaning="the updated pool"),
    ),
    options=(CHECKPOINT_EVERY,),
    rules=(
        *_rules(
            "x weight pool slots cu_seqlens sources checkpoints bias",
            "weight pool cu_seqlens sources checkpoints bias",
        ),
        *TOGETHER,
        Rule("option", "checkpoint_every", _DTYPE),
    ),
    pool="pool",
    anchor="x",
    sizes_from=("x", "weight", "pool", "slots", "checkpoints"),
)

GATED_RMS_NORM = Contract(
    name="kda_jax.gated_rms_norm",
    operands=(
        Operand("x", "... V", FLOATS, "the read-out of the recurrence"),
        Operand("gate", "... V", FLOATS, "the output gate, before the sigmoid"),
        Operand("weight", "V", FLOATS, "the norm's weight"),
    ),
    results=(Operand("y", "... V", FLOATS, "the gated norm of x"),),
    options=(Option("eps", "nonnegative", "added to the mean of the squares", required=True),),
    rules=(*_rules("x gate weight", "gate weight"), Rule("option", "eps", _DTYPE)),
    anchor="x",
    sizes_from=("x",),
)

LOG_DECAY = Contract(
    name="kda_jax.kda_log_decay",
    operands=(
        Operand("a", "B T HV*K", FLOATS, "raw forget-gate input", also=("B T HV K",)),
        Operand(
            "A_log", "HV", FLOATS, "natural log of the decay rate per value head", required=False
        ),
        Operand(
            "dt_bias",
            "HV*K",
            FLOATS,
            "bias of the forget gate per (value head, key channel)",
            required=False,
        ),
    ),
    results=(Operand("log_decay", "B T HV K", ("float32",), "natural log of the decay, <= 0"),),
    options=(
        Option("lower_bound", "negative", "lower bound of the log decay (safe gate)"),
        Option("softplus_beta", "positive", "sharpness of the softplus", required=True),
        Option(
            "softplus_threshold",
            "number",
            "above it, times the sharpness, the softplus is the identity",
            required=True,
        ),
    ),
    rules=(
        Rule("layout", "a", "`a` must be [B, T, HV*K] or [B, T, HV, K] (got {array.shape})."),
        Rule(
            "counted",
            "a",
            "`a` must be [B, T, HV, K], or [B, T, HV*K] of the heads that `A_log` has "
            "(got {array.shape}).",
        ),
        Rule("device", "A_log dt_bias", _DEVICE),
        Rule(
            "needed",
            "A_log",
            "`A_log` may be None only with a `lower_bound`.",
            beside="lower_bound",
        ),
        Rule("numel", "A_log", "Unexpected A_log shape: {array.shape}; expected numel={HV}"),
        Rule(
            "numel", "dt_bias", "Unexpected dt_bias shape: {array.shape}; expected numel={elements}"
        ),
        Rule("dtype", "a A_log dt_bias", _DTYPE),
        Rule("option", "lower_bound softplus_beta softplus_threshold", _DTYPE),
    ),
    anchor="a",
    sizes_from=("a", "A_log", "dt_bias"),
)

BETA = Contract(
    name="kda_jax.kda_beta",
    operands=(Operand("b", "B T HV", FLOATS, "raw beta logits, before the sigmoid"),),
    results=(Operand("beta", "B T HV", ("float32",), "update strength"),),
    options=(
        Option("allow_neg_eigval", "flag", "whether the sigmoid of b is doubled", required=True),
    ),
    rules=(
        Rule("rank", "b", _RANK),
        Rule("dtype", "b", _DTYPE),
        Rule("option", "allow_neg_eigval", _DTYPE),
    ),
    anchor="b",
    sizes_from=("b",),
)
