"""The tables of the recurrence's operators: their shapes are written here, and nowhere else.

Over 350 lines, since a table is read as one: the operators over several tokens share their rules.
"""

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

PACKED_DECODE = Contract(
    name="kda_jax.packed_decode",
    operands=(
        Operand(
            "mixed_qkv",
            "B 2*H*K+HV*V",
            FLOATS,
            "after conv and SiLU: q of all H heads, k of all H, v of all HV",
        ),
        Operand("a", "B HV*K", FLOATS, "raw forget-gate input"),
        Operand("b", "B HV", FLOATS, "raw beta logits, before the sigmoid"),
        Operand("A_log", "HV", FLOATS, "natural log of the decay rate per value head"),
        Operand("dt_bias", "HV*K", FLOATS, "bias of the forget gate per (value head, key channel)"),
        Operand("initial_state", "S HV V K", FLOATS, "the whole state pool"),
        Operand(
            "ssm_state_indices", "B", INDICES, "slot of each row; outside [0, S): a padded row"
        ),
        Operand(
            "source_indices",
            "B",
            INDICES,
            "slot that a row's state is read from; outside [0, S): a zero state",
            required=False,
        ),
        Operand(
            "out", "B 1 HV V", FLOATS, "where the caller brings its own output", required=False
        ),
    ),
    results=(
        Operand("out", "B 1 HV V", FLOATS, "the read-out"),
        Operand("state", "S HV V K", FLOATS, "the updated pool"),
    ),
    options=(
        Option("scale", "positive", "factor on q"),
        Option("use_qk_l2norm_in_kernel", "flag", "whether q and k are l2-normalized first"),
        Option("lower_bound", "negative", "lower bound of the log decay (safe gate)"),
        Option("allow_neg_eigval", "flag", "whether beta is doubled, to (0, 2)"),
        Option("out_dtype", "dtype", "dtype of out", FLOATS),
    ),
    # The first lines are SGLang's own if it has the check, so that a search for one ends here.
    rules=(
        Rule("rank", "mixed_qkv", "`mixed_qkv` must be a 2D tensor (got ndim={mixed_qkv.ndim})."),
        Rule("last_axis", "mixed_qkv", "`mixed_qkv` must be contiguous in the last dim."),
        Rule(
            "rank", "a b", "`a` and `b` must be 2D tensors (got a.ndim={a.ndim}, b.ndim={b.ndim})."
        ),
        Rule("last_axis", "a b", "`a`/`b` must be contiguous in the last dim."),
        Rule("rank", "A_log dt_bias", "`A_log`/`dt_bias` must be 1D tensors."),
        Rule("contiguous", "A_log dt_bias", "`A_log`/`dt_bias` must be contiguous."),
        Rule(
            "rank",
            "ssm_state_indices source_indices",
            "`{argument}` must be 1D for packed decode (got ndim={array.ndim}).",
        ),
        Rule("contiguous", "out", "`out` must be contiguous."),
        Rule(
            "device",
            "a b A_log dt_bias initial_state out ssm_state_indices source_indices",
            "All inputs must be on the same device.",
        ),
        Rule(
            "batch",
            "a b",
            "Mismatched batch sizes: mixed_qkv.shape[0]={B}, a.shape[0]={a.rows}, "
            "b.shape[0]={b.rows}.",
        ),
        Rule(
            "shape",
            "ssm_state_indices source_indices",
            "`{argument}` must have shape [B] (got {array.shape}; expected ({B},)).",
        ),
        Rule(
            "rank",
            "initial_state",
            "`initial_state` must be a 4D tensor (got ndim={initial_state.ndim}).",
        ),
        Rule("last_axis", "initial_state", "`initial_state` must be contiguous in the last dim."),
        Rule(
            "shape",
            "a",
            "`a` must have shape [B, HV*K] with HV={HV}, K={K} (got a.shape={a.shape}).",
        ),
        Rule("shape", "b", "`b` must have shape [B, HV] with HV={HV} (got b.shape={b.shape})."),
        Rule("shape", "A_log", "`A_log` must have {HV} elements (got {A_log.size})."),
        Rule("shape", "dt_bias", "`dt_bias` must have {elements} elements (got {dt_bias.size})."),
        Rule("shape", "out", "`out` must have shape {wanted} (got out.shape={out.shape})."),
        Rule(
            "packed_width",
            "mixed_qkv",
            "Invalid packed `mixed_qkv` last dim={width} for HV={HV}, V={V}.",
        ),
        Rule(
            "packed_keys",
            "mixed_qkv",
            "Invalid packed Q size {q_size}: must be divisible by K={K}.",
        ),
        Rule(
            "packed_heads",
            "mixed_qkv",
            "Invalid head config inferred from mixed_qkv: H={H}, HV={HV}.",
        ),
        Rule(
            "dtype",
            "mixed_qkv a b A_log dt_bias initial_state ssm_state_indices source_indices out "
            "out_dtype",
            "`{argument}` must be {allowed} (got {got}).",
        ),
        Rule(
            "option",
            "scale lower_bound use_qk_l2norm_in_kernel allow_neg_eigval",
            "`{argument}` must be {allowed} (got {got}).",
        ),
        Rule(
            "compact",
            "initial_state",
            "`initial_state` must hold each slot's [HV, V, K] block compactly.",
        ),
    ),
    pool="initial_state",
    anchor="mixed_qkv",
)

# Several tokens a sequence, dense (B == N) or, with cu_seqlens, end to end (B == 1).
_TOKENS = (
    Operand("q", "B T H K", FLOATS, "queries"),
    Operand("k", "B T H K", FLOATS, "keys"),
    Operand("v", "B T HV V", FLOATS, "values"),
)
_DRAFT = (
    CU_SEQLENS,
    Operand(
        "intermediate_states",
        "B T",
        INDICES,
        "slot that the state after each token is written to; outside [0, S): not written",
        required=False,
        also=("N L",),
    ),
    Operand(
        "num_accepted_tokens",
        "N",
        INDICES,
        "which of those slots a sequence starts from",
        required=False,
    ),
)
# What a draft keeps of its tokens.
_DRAFTED = (
    Operand("k", "B T H K", FLOATS, "keys"),
    Operand("v", "B T HV V", FLOATS, "values"),
    Operand("log_decay", "B T HV K", FLOATS, "natural log of the decay, <= 0"),
    Operand("beta", "B T HV", FLOATS, "update strength, after the sigmoid"),
)
_UPDATE_OPTIONS = (
    Option("scale", "positive", "factor on q"),
    Option("use_qk_l2norm_in_kernel", "flag", "whether q and k are l2-normalized first"),
    Option("update_state", "flag", "whether the pool takes the state after the last token"),
    Option("out_dtype", "dtype", "dtype of out", FLOATS),
)
_UPDATE_RESULTS = (
    Operand("out", "B T HV V", FLOATS, "the read-out"),
    Operand("state", "S HV V K", FLOATS, "the updated pool"),
)


_TABLE = Rule(
    "table",
    "intermediate_states",
    "`{argument}` must have shape {wanted}, or [N, L] with a column for each token "
    "(got {array.shape}).",
)


def _update_rules(pool, slots, gates, options, *own, further, behind=()):
    """The rules of an operator over several tokens.

    `own`, before the pool's: its gates' rules. `further`: names of operands of one shape. `behind`:
    rules of others, whose dtypes are judged too.
    """
    others = " ".join(x for rule in behind if rule.kind == "table" for x in rule.arguments.split())
    operands = f"q k v {gates} {pool} {slots} cu_seqlens {further} {others}".strip()
    return (
        Rule("rank", "q k v", "`{argument}` must be a 4D tensor (got ndim={array.ndim})."),
        Rule("rank", slots, "`{argument}` must be 1D (got ndim={array.ndim})."),
        Rule("device", operands.removeprefix("q "), "All inputs must be on the same device."),
        Rule("shape", "k v", "`{argument}` must have shape {wanted} (got {array.shape})."),
        Rule("heads", "v", "Invalid head config: HV={HV} must be a multiple of H={H}."),
        Rule("channels", "q", "`q` must have at least one key channel (got {array.shape})."),
        Rule(
            "form",
            "q",
            "`q` of a {form} call must have {wanted_rows} (got B={B} for N={N} sequences).",
        ),
        Rule(
            "shape",
            "cu_seqlens",
            "`cu_seqlens` must have shape [N+1] (got {array.shape}; expected {wanted}).",
        ),
        *own,
        Rule("layout", pool, f"Unexpected {pool} shape: {{array.shape}}"),
        Rule(
            "compact",
            pool,
            "KDA decode requires a compact per-slot [HV, V, K] state block; got strides {strides} "
            "for shape {array.shape}",
        ),
        Rule(
            "shape",
            further,
            "`{argument}` must have shape {wanted} (got {array.shape}).",
        ),
        *behind,
        Rule("dtype", f"{operands} out_dtype", "`{argument}` must be {allowed} (got {got})."),
        Rule("option", options, "`{argument}` must be {allowed} (got {got})."),
    )


KDA_UPDATE = Contract(
    name="kda_jax.fused_sigmoid_gating_kda_update",
    operands=(
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
        *_TOKENS,
        Operand("a", "B T HV*K", FLOATS, "raw forget-gate input", also=("B T HV K",)),
        Operand("b", "B T HV", FLOATS, "raw beta logits, before the sigmoid", also=("B T HV",)),
        Operand(
            "initial_state_source", "S HV V K", FLOATS, "the whole state pool", also=("S*HV*V*K",)
        ),
        Operand(
            "initial_state_indices",
            "N",
            INDICES,
            "slot of each sequence; outside [0, S): a padded one",
        ),
        replace(SOURCES, name="source_indices"),
        *_DRAFT,
    ),
    results=_UPDATE_RESULTS,
    options=(
        *_UPDATE_OPTIONS,
        Option("lower_bound", "negative", "lower bound of the log decay (safe gate)"),
        Option("softplus_beta", "positive", "sharpness of the softplus"),
        Option(
            "softplus_threshold",
            "number",
            "above it, times the sharpness, the softplus is the identity",
        ),
        Option("allow_neg_eigval", "flag", "whether the sigmoid of b is doubled"),
    ),
    # First lines as the operator's own, where it has the check.
    rules=_update_rules(
        "initial_state_source",
        "initial_state_indices",
        "A_log dt_bias a b",
        "scale lower_bound use_qk_l2norm_in_kernel update_state softplus_beta softplus_threshold "
        "allow_neg_eigval",
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
        Rule("layout", "a b", "Unexpected {argument} shape for {form}: {array.shape}"),
        further="source_indices num_accepted_tokens",
        behind=(_TABLE,),
    ),
    pool="initial_state_source",
    anchor="q",
    sizes_from=("q", "v", "initial_state_indices", "initial_state_source"),
)

_GATES = Rule(
    "shape", "log_decay beta", "`{argument}` must have shape {wanted} (got {array.shape})."
)
_OPERANDS = (
    *_TOKENS,
    *_DRAFTED[2:],
    Operand("pool", "S HV V K", FLOATS, "the whole state pool"),
    Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): a padded one"),
    SOURCES,
)
_OF_POOL = ("pool", "slots", "log_decay beta", "scale use_qk_l2norm_in_kernel")

RECURRENT_KDA = Contract(
    name="kda_jax.recurrent_kda",
    operands=(*_OPERANDS, *_DRAFT),
    results=_UPDATE_RESULTS,
    options=_UPDATE_OPTIONS,
    rules=_update_rules(
        *_OF_POOL[:3],
        "scale use_qk_l2norm_in_kernel update_state",
        _GATES,
        further="sources num_accepted_tokens",
        behind=(_TABLE,),
    ),
    pool="pool",
    anchor="q",
    sizes_from=("q", "v", "slots", "pool"),
)

_WITHOUT_UPDATE = tuple(option for option in _UPDATE_OPTIONS if option.name != "update_state")

RECURRENT_VERIFY = Contract(
    name="kda_jax.recurrent_verify",
    operands=(*_OPERANDS, CU_SEQLENS),
    results=(_UPDATE_RESULTS[0], *_DRAFTED),
    options=_WITHOUT_UPDATE,
    rules=_update_rules(*_OF_POOL, _GATES, further="sources"),
    pool="pool",
    anchor="q",
    sizes_from=("q", "v", "slots", "pool"),
)

CHUNK_KDA = Contract(
    name="kda_jax.chunk_kda",
    operands=(*_OPERANDS, CU_SEQLENS, CHECKPOINTS),
    results=_UPDATE_RESULTS,
    options=(*_WITHOUT_UPDATE, CHECKPOINT_EVERY),
    rules=_update_rules(
        *_OF_POOL[:3],
        "scale use_qk_l2norm_in_kernel checkpoint_every",
        _GATES,
        *TOGETHER,
        further="sources checkpoints",
    ),
    pool="pool",
    anchor="q",
    sizes_from=("q", "v", "slots", "pool", "checkpoints"),
)

COMMIT = Contract(
    name="kda_jax.commit",
    operands=(
        Operand("pool", "S HV V K", FLOATS, "the whole state pool"),
        Operand(
            "intermediate",
            "B T HV V K",
            FLOATS,
            "the states after every token",
            required=False,
        ),
        *(replace(operand, required=False) for operand in _DRAFTED),
        Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): passed over"),
        Operand(
            "num_accepted", "N", INDICES, "tokens that were accepted; 0 leaves the slot as it is"
        ),
        SOURCES,
        CU_SEQLENS,
    ),
    results=(Operand("state", "S HV V K", FLOATS, "the updated pool"),),
    options=(),
    rules=(
        Rule(
            "rank",
            "pool intermediate k v slots",
            "`{argument}` must be {expected} (got ndim={array.ndim}).",
        ),
        Rule(
            "device",
            "intermediate k v log_decay beta slots num_accepted sources cu_seqlens",
            "All inputs must be on the same device.",
        ),
        Rule(
            "form",
            "intermediate k",
            "`{argument}` of a {form} call must have {wanted_rows} (got B={B}, N={N}).",
        ),
        Rule(
            "shape",
            "intermediate k v log_decay beta num_accepted sources cu_seqlens",
            "`{argument}` must have shape {wanted} (got {array.shape}).",
        ),
        Rule("heads", "v", "Invalid head config: HV={HV} must be a multiple of H={H}."),
        Rule(
            "dtype",
            "pool intermediate k v log_decay beta slots num_accepted sources cu_seqlens",
            "`{argument}` must be {allowed} (got {got}).",
        ),
    ),
    pool="pool",
    anchor="pool",
    sizes_from=("pool", "intermediate", "k", "v", "slots"),
)
