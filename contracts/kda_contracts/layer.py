"""The tables of a whole layer: its two steps, its checkpoint, its static numbers."""

from dataclasses import replace

from kda_contracts.axes import AXES
from kda_contracts.spec import (
    CHECKPOINT_EVERY,
    CHECKPOINTS,
    CU_SEQLENS,
    FLOATS,
    INDICES,
    SOURCES,
    TOGETHER,
    Contract,
    Layout,
    Operand,
    Option,
    Rule,
)

LOWER_BOUND = Option("lower_bound", "negative", "lower bound of the log decay (safe gate)")
NORM_EPS = Option("norm_eps", "positive", "added to the mean of the squares", required=True)

# A layer's static numbers, before any array is there.
KDA_CONFIG = Contract(
    name="kda_jax.KDAConfig",
    operands=(),
    results=(),
    options=(
        *(Option(letter, "size", AXES[letter], required=True) for letter in "DH"),
        Option("HV", "size", AXES["HV"], required=True),
        *(Option(letter, "size", AXES[letter], required=True) for letter in "KVW"),
        LOWER_BOUND,
        NORM_EPS,
        Option("allow_neg_eigval", "flag", "whether beta is doubled, to (0, 2)", required=True),
        Option("conv_bias", "flag", "whether the convolution has a bias", required=True),
        Option("gate_rank", "size", "rank of the output gate's two projections; None: full rank"),
        Option("forget_rank", "size", "rank of the forget gate's two projections; None: full rank"),
    ),
    rules=(
        Rule(
            "option",
            "D H HV K V W lower_bound norm_eps allow_neg_eigval conv_bias gate_rank forget_rank",
            "`{argument}` must be {allowed} (got {got}).",
        ),
        Rule("multiple", "HV", "`HV` must be a multiple of H={wanted} (got {got}).", beside="H"),
        Rule("equal", "gate_rank", "`gate_rank` must be V={wanted} (got {got}).", beside="V"),
    ),
)


FULL_RANK = ("f_up", "g_up")  # those that are of full rank where their `down` is None

# As `x @ w` takes them.
WEIGHTS = (
    Operand("q_proj", "D H*K", FLOATS, "query projection"),
    Operand("k_proj", "D H*K", FLOATS, "key projection"),
    Operand("v_proj", "D HV*V", FLOATS, "value projection"),
    Operand("q_conv", "H*K W", FLOATS, "short convolution of q, per channel"),
    Operand("k_conv", "H*K W", FLOATS, "short convolution of k, per channel"),
    Operand("v_conv", "HV*V W", FLOATS, "short convolution of v, per channel"),
    Operand("q_conv_bias", "H*K", FLOATS, "added before SiLU", required=False),
    Operand("k_conv_bias", "H*K", FLOATS, "added before SiLU", required=False),
    Operand("v_conv_bias", "HV*V", FLOATS, "added before SiLU", required=False),
    Operand("f_down", "D R", FLOATS, "forget gate, down", required=False),
    Operand("f_up", "R HV*K", FLOATS, "forget gate, of low rank or full", also=("D HV*K",)),
    Operand("b_proj", "D HV", FLOATS, "raw beta logits"),
    Operand("A_log", "HV", FLOATS, "natural log of the decay rate per value head"),
    Operand("dt_bias", "HV*K", FLOATS, "bias of the forget gate per (value head, key channel)"),
    Operand("g_up", "V HV*V", FLOATS, "output gate, of low rank or full", also=("D HV*V",)),
    Operand("norm", "V", FLOATS, "RMSNorm before the output projection"),
    Operand("o_proj", "HV*V D", FLOATS, "output projection"),
    Operand("g_down", "D V", FLOATS, "output gate, down", required=False),
    Operand("g_bias", "HV*V", FLOATS, "bias of the output gate", required=False),
)


POOLS = (
    Operand("conv", "S 2*H*K+HV*V W-1", FLOATS, "the last inputs of the short convolution"),
    Operand("state", "S HV V K", FLOATS, "the recurrent states"),
)


def _layer(name, x, *indices, pools=POOLS, sizes_from, own=(), options=(), results=None):
    """The contract of a layer's call: its input, weights as `x @ w` takes them, pools, indices.

    `own`: the rules that no other call of the layer has. `options`: likewise. `results`: those
    behind y, where they are not the pools.
    """
    names = " ".join(weight.name for weight in WEIGHTS if weight.name not in FULL_RANK)
    others = " ".join(operand.name for operand in (*pools, *indices))
    judged = " ".join(option.name for option in (LOWER_BOUND, NORM_EPS, *options))
    by_rank = " ".join(("x", *(pool.name for pool in pools if pool.name == "state")))
    return Contract(
        name=name,
        operands=(x, *WEIGHTS, *pools, *indices),
        results=(
            Operand("y", x.axes, FLOATS, "the layer's output"),
            *(pools if results is None else results),
        ),
        options=(LOWER_BOUND, NORM_EPS, *options),
        rules=(
            Rule("rank", by_rank, "`{argument}` must be {expected} (got ndim={array.ndim})."),
            *own,
            Rule(
                "shape",
                f"x {names} {others}",
                "`{argument}` must have shape {wanted} (got {array.shape}).",
            ),
            Rule(
                "layout",
                "f_up",
                "`f_up` must have shape {wanted}, or (D, HV*K) for a full rank "
                "(got {array.shape}).",
            ),
            Rule(
                "layout",
                "g_up",
                "`g_up` must have shape {wanted}, or (D, HV*V) for a full rank "
                "(got {array.shape}).",
            ),
            Rule(
                "dtype",
                f"x {names} {' '.join(FULL_RANK)} {others}",
                "`{argument}` must be {allowed} (got {got}).",
            ),
            Rule("option", judged, "`{argument}` must be {allowed} (got {got})."),
        ),
        pool="state" if pools else "",
        anchor="x",
        sizes_from=sizes_from,
    )


LAYER_DECODE = _layer(
    "kda_jax.kda_decode",
    Operand("x", "B D", FLOATS, "the normed input, one token a row"),
    Operand("slots", "B", INDICES, "slot of each row; outside [0, S): a padded row"),
    replace(SOURCES, axes="B"),
    sizes_from=("f_down", "state", "x"),
)
LAYER_PREFILL = _layer(
    "kda_jax.kda_prefill",
    Operand("x", "T D", FLOATS, "the normed inputs of all sequences"),
    Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): a padded one"),
    replace(CU_SEQLENS, required=True),
    SOURCES,
    CHECKPOINTS,
    sizes_from=("f_down", "state", "x", "slots", "checkpoints"),
    own=TOGETHER,
    options=(CHECKPOINT_EVERY,),
)
_DRAFTED = (
    Operand("inputs", "N T 2*H*K+HV*V", FLOATS, "inputs of the short convolution"),
    Operand("k", "N T H K", FLOATS, "keys"),
    Operand("v", "N T HV V", FLOATS, "values"),
    Operand("log_decay", "N T HV K", FLOATS, "natural log of the decay, <= 0"),
    Operand("beta", "N T HV", FLOATS, "update strength, after the sigmoid"),
)
LAYER_VERIFY = _layer(
    "kda_jax.kda_verify",
    Operand("x", "N T D", FLOATS, "the normed inputs of each sequence's drafted tokens"),
    Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): a padded one"),
    SOURCES,
    sizes_from=("f_down", "state", "x"),
    results=_DRAFTED,
)
_COMMITTED = (
    *_DRAFTED,
    *POOLS,
    Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): passed over"),
    Operand("num_accepted", "N", INDICES, "tokens that were accepted; 0 leaves the slot as it is"),
    SOURCES,
)
_NAMES = " ".join(operand.name for operand in _COMMITTED)
LAYER_COMMIT = Contract(
    name="kda_jax.kda_commit",
    operands=_COMMITTED,
    results=POOLS,
    options=(),
    rules=(
        Rule("rank", "state k", "`{argument}` must be {expected} (got ndim={array.ndim})."),
        Rule("shape", _NAMES, "`{argument}` must have shape {wanted} (got {array.shape})."),
        Rule("dtype", _NAMES, "`{argument}` must be {allowed} (got {got})."),
    ),
    pool="state",
    anchor="k",
    sizes_from=("v", "conv", "state", "k"),
)
LAYER_APPLY = _layer(
    "kda_jax.kda_apply",
    Operand("x", "B T D", FLOATS, "the normed inputs, each row from nothing"),
    Operand(
        "segment_ids",
        "B T",
        INDICES,
        "where the id changes a segment starts from nothing; 0: padding",
        required=False,
    ),
    CU_SEQLENS,
    pools=(),
    sizes_from=("f_down", "x", "cu_seqlens"),
    own=(
        Rule(
            "alone",
            "segment_ids",
            "`segment_ids` and `cu_seqlens` exclude each other.",
            beside="cu_seqlens",
        ),
        Rule("one_row", "x", "`x` must be [1, T, D] beside `cu_seqlens` (got {array.shape})."),
    ),
)


def _tensor(name, axes, meaning, required=True):
    return Operand(name, axes, FLOATS, meaning, required)


_PROJECTIONS = (
    _tensor("q_proj.weight", "H*K D", "query projection"),
    _tensor("k_proj.weight", "H*K D", "key projection"),
    _tensor("v_proj.weight", "HV*V D", "value projection"),
    _tensor("q_conv1d.weight", "H*K 1 W", "short convolution of q, per channel"),
    _tensor("k_conv1d.weight", "H*K 1 W", "short convolution of k, per channel"),
    _tensor("v_conv1d.weight", "HV*V 1 W", "short convolution of v, per channel"),
    _tensor("q_conv1d.bias", "H*K", "added before SiLU", required=False),
    _tensor("k_conv1d.bias", "H*K", "added before SiLU", required=False),
    _tensor("v_conv1d.bias", "HV*V", "added before SiLU", required=False),
    _tensor("b_proj.weight", "HV D", "raw beta logits"),
    _tensor(
        "A_log", "HV", "natural log of the decay rate; also [1, 1, HV, 1], or padded with zeros"
    ),
    _tensor("dt_bias", "HV*K", "bias of the forget gate per (value head, key channel)"),
    _tensor("o_norm.weight", "V", "RMSNorm before the output projection"),
    _tensor("o_proj.weight", "D HV*V", "output projection"),
)
_FORGET_GATE = (
    _tensor("f_a_proj.weight", "K D", "forget gate, down"),
    _tensor("f_b_proj.weight", "HV*K K", "forget gate, up"),
)
_FULL_FORGET_GATE = (_tensor("f_proj.weight", "HV*K D", "forget gate"),)
_OUTPUT_GATE = (
    _tensor("g_a_proj.weight", "V D", "output gate, down"),
    _tensor("g_b_proj.weight", "HV*V V", "output gate, up"),
)
_FULL_OUTPUT_GATE = (_tensor("g_proj.weight", "HV*V D", "output gate"),)

# One KDA layer as released, in each layout that is known: the tensors below
# `...layers.<i>.self_attn.` (Ling: `.attention.`, FLA: `.attn.`).
CHECKPOINT = (
    Layout(
        "low-rank output gate (Kimi-Linear, GLM-5.3)",
        ("g_a_proj.weight",),
        (*_PROJECTIONS, *_FORGET_GATE, *_OUTPUT_GATE),
    ),
    Layout(
        "full-rank output gate (Kimi-K3)",
        ("g_proj.weight",),
        (*_PROJECTIONS, *_FORGET_GATE, *_FULL_OUTPUT_GATE),
    ),
    Layout(
        "FLA's own layer",
        ("f_proj.0.weight",),
        (
            *_PROJECTIONS,
            _tensor("f_proj.0.weight", "V D", "forget gate, down"),
            _tensor("f_proj.1.weight", "HV*K V", "forget gate, up"),
            _tensor("g_proj.0.weight", "V D", "output gate, down"),
            _tensor("g_proj.1.weight", "HV*V V", "output gate, up"),
            _tensor("g_proj.1.bias", "HV*V", "output gate, up"),
        ),
    ),
    Layout(
        "full-rank gates (Ling-3.0)",
        ("f_proj.weight", "g_proj.weight"),
        (*_PROJECTIONS, *_FULL_FORGET_GATE, *_FULL_OUTPUT_GATE),
    ),
    Layout(
        "full-rank forget gate",
        ("f_proj.weight", "g_a_proj.weight"),
        (*_PROJECTIONS, *_FULL_FORGET_GATE, *_OUTPUT_GATE),
    ),
)
