"""The tables of Kimi Delta Attention: every shape of the project is written here, and nowhere else."""

from kda_contracts.spec import Contract, Layout, Operand, Option, Rule, Tensor

FLOATS = ("float32", "bfloat16", "float16")
INDICES = ("int8", "int16", "int32", "int64")

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
        Option("out_dtype", "dtype", "dtype of out", FLOATS),
    ),
    # The first lines are SGLang's own where it has the check: whoever searches for the message finds it here.
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
            "Mismatched batch sizes: mixed_qkv.shape[0]={B}, a.shape[0]={a.rows}, b.shape[0]={b.rows}.",
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
            "mixed_qkv a b A_log dt_bias initial_state ssm_state_indices source_indices out out_dtype",
            "`{argument}` must be {allowed} (got {got}).",
        ),
        Rule(
            "option",
            "scale lower_bound use_qk_l2norm_in_kernel",
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
    Operand(
        "cu_seqlens",
        "N+1",
        ("int32", "int64"),
        "where each sequence starts, and the last one ends",
        required=False,
    ),
    Operand(
        "intermediate_states",
        "B T",
        INDICES,
        "slot that the state after each token is written to; outside [0, S): not written",
        required=False,
    ),
    Operand(
        "num_accepted_tokens",
        "N",
        INDICES,
        "which of those slots a sequence starts from",
        required=False,
    ),
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


def _update_rules(
    pool, slots, gates, options, *own, draft="intermediate_states num_accepted_tokens"
):
    """The rules of an operator over several tokens; `own` are those of its gates, before the pool's."""
    operands = f"q k v {gates} {pool} {slots} cu_seqlens {draft}"
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
            draft,
            "`{argument}` must have shape {wanted} (got {array.shape}).",
        ),
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
        "scale lower_bound use_qk_l2norm_in_kernel update_state softplus_beta softplus_threshold allow_neg_eigval",
        Rule(
            "needed",
            "A_log",
            "`A_log` may be None only with a `lower_bound`.",
            unless="lower_bound",
        ),
        Rule("numel", "A_log", "Unexpected A_log shape: {array.shape}; expected numel={HV}"),
        Rule(
            "numel", "dt_bias", "Unexpected dt_bias shape: {array.shape}; expected numel={elements}"
        ),
        Rule("layout", "a b", "Unexpected {argument} shape for {form}: {array.shape}"),
    ),
    pool="initial_state_source",
    anchor="q",
    sizes_from=("q", "v", "initial_state_indices", "initial_state_source"),
)

RECURRENT_KDA = Contract(
    name="kda_jax.recurrent_kda",
    operands=(
        *_TOKENS,
        Operand("log_decay", "B T HV K", FLOATS, "natural log of the decay, <= 0"),
        Operand("beta", "B T HV", FLOATS, "update strength, after the sigmoid"),
        Operand("initial_state", "S HV V K", FLOATS, "the whole state pool"),
        Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): a padded one"),
        *_DRAFT,
    ),
    results=_UPDATE_RESULTS,
    options=_UPDATE_OPTIONS,
    rules=_update_rules(
        "initial_state",
        "slots",
        "log_decay beta",
        "scale use_qk_l2norm_in_kernel update_state",
        Rule(
            "shape", "log_decay beta", "`{argument}` must have shape {wanted} (got {array.shape})."
        ),
    ),
    pool="initial_state",
    anchor="q",
    sizes_from=("q", "v", "slots", "initial_state"),
)

CHUNK_KDA = Contract(
    name="kda_jax.chunk_kda",
    operands=(
        *RECURRENT_KDA.operands[:7],
        Operand(
            "source_indices",
            "N",
            INDICES,
            "slot that a sequence starts from; outside [0, S): a zero state",
            required=False,
        ),
        _DRAFT[0],
    ),
    results=_UPDATE_RESULTS,
    options=tuple(option for option in _UPDATE_OPTIONS if option.name != "update_state"),
    rules=_update_rules(
        "initial_state",
        "slots",
        "log_decay beta",
        "scale use_qk_l2norm_in_kernel",
        Rule(
            "shape", "log_decay beta", "`{argument}` must have shape {wanted} (got {array.shape})."
        ),
        draft="source_indices",
    ),
    pool="initial_state",
    anchor="q",
    sizes_from=("q", "v", "slots", "initial_state"),
)

COMMIT = Contract(
    name="kda_jax.commit",
    operands=(
        Operand("pool", "S HV V K", FLOATS, "the whole state pool"),
        Operand("intermediate", "B T HV V K", FLOATS, "the states after every token"),
        Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): passed over"),
        Operand(
            "num_accepted", "N", INDICES, "tokens that were accepted; 0 leaves the slot as it is"
        ),
        Operand(
            "cu_seqlens",
            "N+1",
            ("int32", "int64"),
            "where each sequence starts, and the last ends",
            required=False,
        ),
    ),
    results=(Operand("state", "S HV V K", FLOATS, "the updated pool"),),
    options=(),
    rules=(
        Rule(
            "rank",
            "pool intermediate slots",
            "`{argument}` must be {expected} (got ndim={array.ndim}).",
        ),
        Rule(
            "device",
            "intermediate slots num_accepted cu_seqlens",
            "All inputs must be on the same device.",
        ),
        Rule(
            "form",
            "intermediate",
            "`intermediate` of a {form} call must have {wanted_rows} (got B={B}, N={N}).",
        ),
        Rule(
            "shape",
            "intermediate num_accepted cu_seqlens",
            "`{argument}` must have shape {wanted} (got {array.shape}).",
        ),
        Rule(
            "dtype",
            "pool intermediate slots num_accepted cu_seqlens",
            "`{argument}` must be {allowed} (got {got}).",
        ),
    ),
    pool="pool",
    anchor="pool",
    sizes_from=("pool", "intermediate", "slots"),
)


def _layer(name, x, *indices):
    """The contract of a layer's step: its input, its weights as `x @ w` takes them, its two pools, its indices."""
    weights = (
        Operand("q_proj", "D H*K", FLOATS, "query projection"),
        Operand("k_proj", "D H*K", FLOATS, "key projection"),
        Operand("v_proj", "D HV*V", FLOATS, "value projection"),
        Operand("q_conv", "H*K W", FLOATS, "short convolution of q, per channel"),
        Operand("k_conv", "H*K W", FLOATS, "short convolution of k, per channel"),
        Operand("v_conv", "HV*V W", FLOATS, "short convolution of v, per channel"),
        Operand("f_down", "D R", FLOATS, "forget gate, down"),
        Operand("f_up", "R HV*K", FLOATS, "forget gate, up"),
        Operand("b_proj", "D HV", FLOATS, "raw beta logits"),
        Operand("A_log", "HV", FLOATS, "natural log of the decay rate per value head"),
        Operand("dt_bias", "HV*K", FLOATS, "bias of the forget gate per (value head, key channel)"),
        Operand("g_up", "V HV*V", FLOATS, "output gate, of low rank or full", also=("D HV*V",)),
        Operand("norm", "V", FLOATS, "RMSNorm before the output projection"),
        Operand("o_proj", "HV*V D", FLOATS, "output projection"),
        Operand("g_down", "D V", FLOATS, "output gate, down", required=False),
        Operand("g_bias", "HV*V", FLOATS, "bias of the output gate", required=False),
    )
    names = " ".join(weight.name for weight in weights if weight.name != "g_up")
    pools = (
        Operand("conv", "S 2*H*K+HV*V W-1", FLOATS, "the last inputs of the short convolution"),
        Operand("state", "S HV V K", FLOATS, "the recurrent states"),
    )
    index_names = " ".join(operand.name for operand in indices)
    return Contract(
        name=name,
        operands=(x, *weights, *pools, *indices),
        results=(Operand("y", x.axes, FLOATS, "the layer's output"), *pools),
        options=(),
        rules=(
            Rule("rank", "x state", "`{argument}` must be {expected} (got ndim={array.ndim})."),
            Rule(
                "shape",
                f"x {names} conv state {index_names}",
                "`{argument}` must have shape {wanted} (got {array.shape}).",
            ),
            Rule(
                "layout",
                "g_up",
                "`g_up` must have shape {wanted}, or (D, HV*V) for a full rank (got {array.shape}).",
            ),
            Rule(
                "dtype",
                f"x {names} g_up conv state {index_names}",
                "`{argument}` must be {allowed} (got {got}).",
            ),
        ),
        pool="state",
        anchor="x",
        sizes_from=("f_down", "state", "x", *(["slots"] if "N" in indices[0].axes else [])),
    )


LAYER_DECODE = _layer(
    "kda_jax.kda_decode",
    Operand("x", "B D", FLOATS, "the normed input, one token a row"),
    Operand("slots", "B", INDICES, "slot of each row; outside [0, S): a padded row"),
)
LAYER_PREFILL = _layer(
    "kda_jax.kda_prefill",
    Operand("x", "T D", FLOATS, "the normed inputs of all sequences"),
    Operand("slots", "N", INDICES, "slot of each sequence; outside [0, S): a padded one"),
    Operand(
        "cu_seqlens", "N+1", ("int32", "int64"), "where each sequence starts, and the last one ends"
    ),
    Operand("fresh", "N", ("bool",), "whether a sequence starts from nothing", required=False),
)


def _tensor(name, axes, cut, meaning):
    return Tensor(name, axes, FLOATS, meaning, cut=cut)


_PROJECTIONS = (
    _tensor("q_proj.weight", "H*K D", 0, "query projection"),
    _tensor("k_proj.weight", "H*K D", 0, "key projection"),
    _tensor("v_proj.weight", "HV*V D", 0, "value projection"),
    _tensor("q_conv1d.weight", "H*K 1 W", 0, "short convolution of q, per channel"),
    _tensor("k_conv1d.weight", "H*K 1 W", 0, "short convolution of k, per channel"),
    _tensor("v_conv1d.weight", "HV*V 1 W", 0, "short convolution of v, per channel"),
    _tensor("b_proj.weight", "HV D", 0, "raw beta logits"),
    _tensor(
        "A_log", "HV", 0, "natural log of the decay rate; also [1, 1, HV, 1], or padded with zeros"
    ),
    _tensor("dt_bias", "HV*K", 0, "bias of the forget gate per (value head, key channel)"),
    _tensor("o_norm.weight", "V", None, "RMSNorm before the output projection"),
    _tensor("o_proj.weight", "D HV*V", 1, "output projection"),
)
_FORGET_GATE = (
    _tensor("f_a_proj.weight", "K D", None, "forget gate, down"),
    _tensor("f_b_proj.weight", "HV*K K", 0, "forget gate, up"),
)

# One KDA layer as released, below `...layers.<i>.self_attn.` (FLA: `.attn.`), in each layout that is known.
CHECKPOINT = (
    Layout(
        "low-rank output gate (Kimi-Linear, GLM-5.3)",
        "g_a_proj.weight",
        (
            *_PROJECTIONS,
            *_FORGET_GATE,
            _tensor("g_a_proj.weight", "V D", None, "output gate, down"),
            _tensor("g_b_proj.weight", "HV*V V", 0, "output gate, up"),
        ),
    ),
    Layout(
        "full-rank output gate (Kimi-K3)",
        "g_proj.weight",
        (*_PROJECTIONS, *_FORGET_GATE, _tensor("g_proj.weight", "HV*V D", 0, "output gate")),
    ),
    Layout(
        "FLA's own layer",
        "f_proj.0.weight",
        (
            *_PROJECTIONS,
            _tensor("f_proj.0.weight", "V D", None, "forget gate, down"),
            _tensor("f_proj.1.weight", "HV*K V", 0, "forget gate, up"),
            _tensor("g_proj.0.weight", "V D", None, "output gate, down"),
            _tensor("g_proj.1.weight", "HV*V V", 0, "output gate, up"),
            _tensor("g_proj.1.bias", "HV*V", 0, "output gate, up"),
        ),
    ),
)
