"""The tables of Kimi Delta Attention: every shape of the project is written here, and nowhere else."""

from kda_contracts.spec import Contract, Layout, Operand, Option, Rule, Tensor

FLOATS = ("float32", "bfloat16", "float16")
INDICES = ("int8", "int16", "int32", "int64")

PACKED_DECODE = Contract(
    name="kda_jax.packed_decode",
    operands=(
        Operand("mixed_qkv", "B 2*H*K+HV*V", FLOATS, "after conv and SiLU: q of all H heads, k of all H, v of all HV"),
        Operand("a", "B HV*K", FLOATS, "raw forget-gate input"),
        Operand("b", "B HV", FLOATS, "raw beta logits, before the sigmoid"),
        Operand("A_log", "HV", FLOATS, "natural log of the decay rate per value head"),
        Operand("dt_bias", "HV*K", FLOATS, "bias of the forget gate per (value head, key channel)"),
        Operand("initial_state", "S HV V K", FLOATS, "the whole state pool"),
        Operand("ssm_state_indices", "B", INDICES, "slot of each row; outside [0, S): a padded row"),
        Operand(
            "source_indices",
            "B",
            INDICES,
            "slot that a row's state is read from; outside [0, S): a zero state",
            required=False,
        ),
        Operand("out", "B 1 HV V", FLOATS, "where the caller brings its own output", required=False),
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
        Rule("rank", "a b", "`a` and `b` must be 2D tensors (got a.ndim={a.ndim}, b.ndim={b.ndim})."),
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
        Rule("rank", "initial_state", "`initial_state` must be a 4D tensor (got ndim={initial_state.ndim})."),
        Rule("last_axis", "initial_state", "`initial_state` must be contiguous in the last dim."),
        Rule("shape", "a", "`a` must have shape [B, HV*K] with HV={HV}, K={K} (got a.shape={a.shape})."),
        Rule("shape", "b", "`b` must have shape [B, HV] with HV={HV} (got b.shape={b.shape})."),
        Rule("shape", "A_log", "`A_log` must have {HV} elements (got {A_log.size})."),
        Rule("shape", "dt_bias", "`dt_bias` must have {elements} elements (got {dt_bias.size})."),
        Rule("shape", "out", "`out` must have shape {wanted} (got out.shape={out.shape})."),
        Rule("packed_width", "mixed_qkv", "Invalid packed `mixed_qkv` last dim={width} for HV={HV}, V={V}."),
        Rule("packed_keys", "mixed_qkv", "Invalid packed Q size {q_size}: must be divisible by K={K}."),
        Rule("packed_heads", "mixed_qkv", "Invalid head config inferred from mixed_qkv: H={H}, HV={HV}."),
        Rule(
            "dtype",
            "mixed_qkv a b A_log dt_bias initial_state ssm_state_indices source_indices out out_dtype",
            "`{argument}` must be {allowed} (got {got}).",
        ),
        Rule("option", "scale lower_bound use_qk_l2norm_in_kernel", "`{argument}` must be {allowed} (got {got})."),
        Rule("compact", "initial_state", "`initial_state` must hold each slot's [HV, V, K] block compactly."),
    ),
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
    _tensor("A_log", "HV", 0, "natural log of the decay rate; also [1, 1, HV, 1], or padded with zeros"),
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
