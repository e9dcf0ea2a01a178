"""Every remedy is read: what is passed wrong, and the line that says how to mend it."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest

import kda_contracts
from kda_contracts import (
    CHECKPOINT,
    COMMIT,
    KDA_CONFIG,
    KDA_UPDATE,
    LAYER_APPLY,
    LAYER_DECODE,
    LAYER_PREFILL,
    LAYER_VERIFY,
    LOG_DECAY,
    PACKED_DECODE,
    RECURRENT_KDA,
    ArrayFacts,
    ContractError,
    check,
    normalize_A_log,
    normalize_dt_bias,
    remedy,
)


class Tensor:
    """A torch tensor, as far as the contract looks at one; strides count elements."""

    __module__ = "torch"
    device = "cpu"

    def __init__(self, *shape, dtype="float32", values=None):
        self.shape, self.dtype, self.values = shape, dtype, values

    def stride(self):
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


class JaxArray:
    __module__ = "jax"

    def __init__(self, *shape, dtype="float32"):
        self.shape, self.dtype = shape, dtype


def numpy_array(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


LIBRARIES = {"np": numpy_array, "jnp": JaxArray, "torch": Tensor}
# B=3, H=2, HV=4, K=64, V=32, S=6; and T=5, with N=B
PACKED = dict(mixed_qkv=(3, 384), a=(3, 256), b=(3, 4), A_log=(4,), dt_bias=(256,))
PACKED |= dict(initial_state=(6, 4, 32, 64), ssm_state_indices=(3,))
TOKENS = dict(q=(3, 5, 2, 64), k=(3, 5, 2, 64), v=(3, 5, 4, 32))
UPDATE = TOKENS | dict(A_log=(4,), dt_bias=(256,), a=(3, 5, 256), b=(3, 5, 4))
UPDATE |= dict(initial_state_source=(6, 4, 32, 64), initial_state_indices=(3,))
RECURRENT = TOKENS | dict(log_decay=(3, 5, 4, 64), beta=(3, 5, 4))
RECURRENT |= {RECURRENT_KDA.pool: (6, 4, 32, 64), "slots": (3,)}
STEP = dict(pool=(6, 4, 32, 64), intermediate=(3, 5, 4, 32, 64), slots=(3,), num_accepted=(3,))
CALLS = {PACKED_DECODE: PACKED, KDA_UPDATE: UPDATE, RECURRENT_KDA: RECURRENT, COMMIT: STEP}


def call(contract, library, **wrong):
    """A right call with some operands in another shape, (shape, dtype), None, or options."""
    operands = {}
    for name, x in (CALLS[contract] | wrong).items():
        if not isinstance(x, tuple):
            operands[name] = x
            continue
        index = "int32" in contract.by_name[name].dtypes
        shape, dtype = x if x and isinstance(x[0], tuple) else (x, "int32" if index else "float32")
        operands[name] = library(*shape, dtype=dtype)
    return operands


def details(contract, operands, argument):
    with pytest.raises(ContractError) as caught:
        check(contract, **operands)
    (lines,) = (x.details for x in caught.value.violations if x.argument == argument)
    return lines


ONE_TOKEN = dict(q=(1, 5, 2, 64), k=(1, 5, 2, 64), v=(1, 5, 4, 32))
# (table, what is wrong, argument, its line), with {np} for the library's name
CASES = [
    (PACKED_DECODE, dict(b=(1, 3, 4)), "b", "the same elements in another shape: b.reshape(3, 4)"),
    (
        PACKED_DECODE,
        dict(A_log=(1, 1, 4, 1)),
        "A_log",
        "the same elements in another shape: A_log.reshape(4), or kda_contracts.normalize_A_log",
    ),
    (
        PACKED_DECODE,
        dict(dt_bias=(4, 64)),
        "dt_bias",
        "the same elements in another shape: dt_bias.reshape(256), "
        "or kda_contracts.normalize_dt_bias",
    ),
    (
        PACKED_DECODE,
        dict(a=(3, 4, 64)),
        "a",
        "the same elements in another shape: a.reshape(3, 256), or kda_contracts.normalize_a",
    ),
    (
        PACKED_DECODE,
        dict(A_log=None, lower_bound=-5.0),
        "A_log",
        "None does not mean zeros here: pass {np}.zeros(4)",
    ),
    (
        PACKED_DECODE,
        dict(dt_bias=None),
        "dt_bias",
        "None does not mean zeros here: pass {np}.zeros(256)",
    ),
    (
        PACKED_DECODE,
        dict(dt_bias=(4,)),
        "dt_bias",
        "4 is HV: this looks like one bias per head; repeat each K=64 times, "
        "e.g. {np}.{repeat}(dt_bias, 64)",
    ),
    (
        PACKED_DECODE,
        dict(dt_bias=(64,)),
        "dt_bias",
        "64 is K: this looks like one bias for all heads; repeat it, "
        "e.g. {np}.tile(dt_bias, {four})",
    ),
    (
        PACKED_DECODE,
        dict(dt_bias=(512,)),
        "dt_bias",
        "it holds 2 times as many: an unsharded dt_bias? slice this rank's 256 elements",
    ),
    (
        PACKED_DECODE,
        dict(A_log=(256,), dt_bias=(4,)),
        "A_log",
        "this looks like `A_log` and `dt_bias` swapped",
    ),
    (
        PACKED_DECODE,
        dict(A_log=(256,), dt_bias=(4,)),
        "dt_bias",
        "this looks like `A_log` and `dt_bias` swapped",
    ),
    (
        PACKED_DECODE,
        dict(A_log=(256,)),
        "A_log",
        "256 is HV*K: this looks like one rate per channel; A_log has one per value head",
    ),
    (
        PACKED_DECODE,
        dict(A_log=(128,)),
        "A_log",
        "a padded A_log: kda_contracts.normalize_A_log(A_log, 4) checks that its tail is zero and "
        "drops it",
    ),
    (PACKED_DECODE, dict(a=(3, 4), b=(3, 256)), "a", "this looks like `a` and `b` swapped"),
    (PACKED_DECODE, dict(a=(3, 4), b=(3, 256)), "b", "this looks like `a` and `b` swapped"),
    (
        PACKED_DECODE,
        dict(a=(3, 4)),
        "a",
        "one gate per head is GDN's; KDA has one per (head, channel), HV*K=256 a row",
    ),
    (
        PACKED_DECODE,
        dict(mixed_qkv=(3, 1, 384)),
        "mixed_qkv",
        "one token a row: mixed_qkv.reshape(3, 384)",
    ),
    (
        PACKED_DECODE,
        dict(mixed_qkv=(3, 257)),
        "mixed_qkv",
        "the flat row is q of all H heads, k of all H heads, v of all HV heads: "
        "2*H*K + HV*V elements",
    ),
    (
        PACKED_DECODE,
        dict(initial_state=(6, 4, 64, 32)),
        "initial_state",
        "this looks like [..., K, V]: transpose the last two axes, "
        "e.g. {np}.swapaxes(initial_state, -1, -2)",
    ),
    (
        PACKED_DECODE,
        dict(initial_state=(6, 32, 4, 64)),
        "initial_state",
        "this looks like [S, V, HV, K]: swap axes 1 and 2, e.g. {np}.swapaxes(initial_state, 1, 2)",
    ),
    (
        PACKED_DECODE,
        dict(initial_state=(4, 6, 32, 64)),
        "initial_state",
        "this looks like [HV, S, V, K]: swap axes 0 and 1, e.g. {np}.swapaxes(initial_state, 0, 1)",
    ),
    (
        PACKED_DECODE,
        dict(initial_state=(6, 8, 32, 64)),
        "initial_state",
        "it holds 8 heads, 2 times as many: slice this rank's 4 heads on axis 1",
    ),
    (
        PACKED_DECODE,
        dict(initial_state=(2, 6, 4, 32, 64)),
        "initial_state",
        "this looks like the pools of all layers: pass one layer's, "
        "and keep the layers' pools in a list",
    ),
    (
        PACKED_DECODE,
        dict(ssm_state_indices=((3,), "uint32")),
        "ssm_state_indices",
        "-1 marks a padded row, so slots are signed: ssm_state_indices{int32}",
    ),
    (
        PACKED_DECODE,
        dict(ssm_state_indices=((3,), "float32")),
        "ssm_state_indices",
        "slots are integers: ssm_state_indices{int32}, with -1 for a padded row",
    ),
    (PACKED_DECODE, dict(a=((3, 256), "float64")), "a", "round it first: a{float32}"),
    (
        PACKED_DECODE,
        dict(initial_state=((6, 4, 32, 64), "int8")),
        "initial_state",
        "an 8-bit or integer pool has to be expanded first; bytes are never reinterpreted",
    ),
    (
        PACKED_DECODE,
        dict(lower_bound=0.0),
        "lower_bound",
        "it bounds the log decay from below, so it is negative (-5.0 in Kimi-K3); "
        "None is the softplus gate",
    ),
    (PACKED_DECODE, dict(scale=0.0), "scale", "None is K**-0.5"),
    (
        KDA_UPDATE,
        dict(A_log=None),
        "A_log",
        "without a `lower_bound`, pass A_log; None means zeros only for the safe gate",
    ),
    (
        KDA_UPDATE,
        dict(initial_state_source=(8193,)),
        "initial_state_source",
        "a flat pool holds whole slots of HV*V*K = 8192 elements",
    ),
    (
        KDA_UPDATE,
        dict(cu_seqlens=(4,)),
        "q",
        "one row a sequence is the dense form: leave cu_seqlens out",
    ),
    (
        KDA_UPDATE,
        dict(cu_seqlens=(3,), initial_state_indices=(2,)),
        "q",
        "sequences lie end to end along axis 1: q.reshape(1, 15, ...), and k, v, a, b likewise",
    ),
    (
        RECURRENT_KDA,
        ONE_TOKEN | dict(log_decay=(1, 5, 4, 64), beta=(1, 5, 4), slots=(5,)),
        "q",
        "this looks like sequences of one token, end to end: pass cu_seqlens={np}.arange(N + 1)",
    ),
    (
        RECURRENT_KDA,
        ONE_TOKEN | dict(log_decay=(1, 5, 4, 64), beta=(1, 5, 4), slots=(2,)),
        "q",
        "sequences that lie end to end need cu_seqlens",
    ),
    (
        RECURRENT_KDA,
        ONE_TOKEN | dict(log_decay=(1, 5, 4, 64), beta=(1, 5, 4), slots=(4,), cu_seqlens=(4,)),
        "cu_seqlens",
        "`slots` (4,) has N=4 and `cu_seqlens` (4,) has N=3: one of the two is wrong",
    ),
    (
        COMMIT,
        dict(num_accepted=(4,)),
        "num_accepted",
        "`slots` (3,) has N=3 and `num_accepted` (4,) has N=4: one of the two is wrong",
    ),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("contract", "wrong", "argument", "line"),
    CASES,
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_the_remedy_of_an_operand_is_of_its_own_library(library, contract, wrong, argument, line):
    torch = library == "torch"
    casts = {x: f".to(torch.{x})" if torch else f".astype('{x}')" for x in ("int32", "float32")}
    repeat, four = ("repeat_interleave", "(4,)") if torch else ("repeat", "4")
    lines = details(contract, call(contract, LIBRARIES[library], **wrong), argument)
    assert lines[-1] == line.format(np=library, repeat=repeat, four=four, **casts)


def test_gaps_and_a_rank_have_a_remedy():
    gaps = call(PACKED_DECODE, numpy_array) | dict(A_log=np.zeros(8, "float32")[::2])
    assert details(PACKED_DECODE, gaps, "A_log")[-1] == (
        "copy it first: x.contiguous() in torch, np.ascontiguousarray(x) in NumPy"
    )
    numbers = dict(D=7, H=2, HV=4, K=8, V=16, W=4, norm_eps=1e-5, gate_rank=8)
    assert details(KDA_CONFIG, numbers, "gate_rank") == ("None is an output gate of full rank",)


def test_a_transposed_weight_is_one_fault():
    sizes = dict(D=7, H=2, HV=4, K=8, V=16, W=4)
    more = sizes | dict(R=5, S=6, B=3)
    x = {o.name: np.zeros(o.shape(more), o.dtypes[0]) for o in LAYER_DECODE.operands}
    for name, wrong, line in (
        ("f_down", x["f_down"].T, "transposed: f_down.T"),
        ("conv", x["conv"].swapaxes(1, 2), "transposed: np.swapaxes(conv, 1, 2)"),
    ):
        with pytest.raises(ContractError) as caught:
            check(LAYER_DECODE, sizes, **x | {name: wrong})
        assert [(y.argument, y.details[-1]) for y in caught.value.violations] == [(name, line)]


def test_where_a_third_operand_agrees_the_odd_one_is_named_alone():
    wrong = call(RECURRENT_KDA, numpy_array, v=(3, 6, 4, 32))
    assert details(RECURRENT_KDA, wrong, "v") == (
        "expected [B, T, HV, V] = (3, 5, 4, 32), got (3, 6, 4, 32) float32",
    )


OF_A_LAYERS_TOKENS = [
    (
        LAYER_PREFILL,
        "x",
        np.zeros((2, 3, 7), "f4"),
        "rows of tokens are for kda_apply, without cache and slots; or lay them end to end: "
        "x.reshape(6, 7) with cu_seqlens = np.arange(3) * 3",
    ),
    (
        LAYER_APPLY,
        "x",
        np.zeros((3, 7), "f4"),
        "one row, or sequences that lie end to end: x[None]",
    ),
    (
        LAYER_APPLY,
        "segment_ids",
        np.ones((2, 3), bool),
        "ids are integers, 0 for padding: segment_ids.astype('int32')",
    ),
    (
        LAYER_APPLY,
        "segment_ids",
        np.ones((2, 4), "i4"),
        "`x` (2, 3, 7) has T=3 and `segment_ids` (2, 4) has T=4: one of the two is wrong",
    ),
    (
        LAYER_DECODE,
        "x",
        np.zeros((2, 3, 7), "f4"),
        "several tokens a row: kda_verify takes drafts, and kda_prefill prompts",
    ),
    (
        LAYER_VERIFY,
        "x",
        np.zeros((2, 7), "f4"),
        "one token of each sequence: x[:, None]",
    ),
    (
        LAYER_PREFILL,
        "checkpoints",
        np.zeros((2, 1), "i4"),
        "column m of `checkpoints` takes the state after (m + 1) * checkpoint_every tokens",
    ),
]
OF_A_LAYERS_TOKENS_BESIDE_BOUNDARIES = [
    (
        dict(cu_seqlens=np.zeros(3, "i4")),
        "x",
        "lay the rows end to end, x.reshape(1, 6, 7); or tell the segments of each row by "
        "`segment_ids`",
    ),
    (
        dict(cu_seqlens=np.zeros(3, "i4"), segment_ids=np.ones((1, 3), "i4")),
        "segment_ids",
        "pass one of them; the segments of several rows are `segment_ids`",
    ),
]


def of_a_layers_call(contract, changed):
    """`{argument: its last line}` of the error that a call with this change gives."""
    sizes = dict(D=7, H=2, HV=4, K=8, V=16, W=4)
    more = sizes | dict(R=8, S=5, B=2, T=3, N=2)
    if "segment_ids" in changed and "cu_seqlens" in changed:
        more["B"] = 1
    x = {o.name: np.zeros(o.shape(more), o.dtypes[0]) for o in contract.operands if o.required}
    with pytest.raises(ContractError) as caught:
        check(contract, sizes, **x | changed, norm_eps=1e-5)
    return {y.argument: y.details[-1] for y in caught.value.violations}


@pytest.mark.parametrize(("contract", "argument", "wrong", "line"), OF_A_LAYERS_TOKENS)
def test_the_remedies_of_a_layers_tokens(contract, argument, wrong, line):
    assert of_a_layers_call(contract, {argument: wrong}) == {argument: line}


@pytest.mark.parametrize(("changed", "argument", "line"), OF_A_LAYERS_TOKENS_BESIDE_BOUNDARIES)
def test_the_remedies_of_a_layers_tokens_beside_boundaries(changed, argument, line):
    assert of_a_layers_call(LAYER_APPLY, changed) == {argument: line}


SIZES = dict(H=4, HV=4, K=8, V=8, D=24, W=4)
TENSORS = {tensor.name: tensor for layout in CHECKPOINT for tensor in layout.tensors}
OF_TENSORS = [
    ("q_proj.weight", (24, 32), "transposed: take .T"),
    ("q_conv1d.weight", (4, 32), "the taps come first: swap the two axes"),
    ("dt_bias", (8, 4), "the key channels come first: transpose it to [HV, K]"),
    ("o_norm.weight", (1, 8), "the same elements in another shape: reshape(8,)"),
    ("q_proj.weight", (8, 24), "axis 0 is 1/4 of it: one rank's slice of 4? join the ranks' files"),
    (
        "q_proj.weight",
        (32, 12),
        "axis 1 is 1/2 of it: a tensor-parallel slice cut on the wrong axis? "
        "this tensor is cut on axis 0",
    ),
    (
        "f_a_proj.weight",
        (8, 12),
        "axis 1 is 1/2 of it: a tensor-parallel slice cut on the wrong axis? "
        "this tensor is not cut",
    ),
]
SQUARE = SIZES | dict(H=1, K=4)
OF_NAMES = {
    "conv1d.weight": "a joined convolution has the rows of q, k and v: 2*H*K + HV*V",
    "in_proj_qkvz.weight": "this looks like Gated DeltaNet's layer, whose gate is per head",
    "kv_a_proj_with_mqa.weight": "this looks like MLA's layer",
    "g_b_proj.weight": "a layer has either a low-rank or a full-rank output gate",
    "q_proj.weight_scale": "quantized weights have to be expanded first",
}
OF_DTYPES = {
    "float64": "round it to float32 first",
    "I8": "quantized or integer weights have to be expanded to a float dtype first",
}


def test_the_remedies_of_a_checkpoint():
    square = remedy.for_tensor(TENSORS["q_conv1d.weight"], ArrayFacts((4, 4), "float32"), SQUARE)
    assert square == "as many taps as channels: only the released shape says which axis is which"
    for name, shape, line in OF_TENSORS:
        assert remedy.for_tensor(TENSORS[name], ArrayFacts(shape, "float32"), SIZES) == line
    for name, line in OF_NAMES.items():
        assert remedy.for_stranger(name) == line
    for dtype, line in OF_DTYPES.items():
        assert remedy.for_tensor_dtype(dtype) == line
    assert remedy.for_stranger("other.weight") is None


def texts():
    """The fixed parts of every text of three words or more in remedy.py."""
    tree = ast.parse((Path(kda_contracts.__file__).parent / "remedy.py").read_text())
    skipped = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {x for y in ast.walk(tree) if isinstance(y, ast.JoinedStr) for x in y.values}
    for node in set(ast.walk(tree)) - skipped - inside:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        fixed = [x.value for x in parts if isinstance(getattr(x, "value", None), str)]
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and " " in "".join(fixed).strip():
            yield fixed


def test_every_remedy_is_read_above():
    here = ast.parse(Path(__file__).read_text())
    read = [
        x.value for x in ast.walk(here) if isinstance(x, ast.Constant) and isinstance(x.value, str)
    ]
    # Library names are filled in: only the words around them are compared.
    unread = [
        fixed
        for fixed in texts()
        if not any(all(x.strip("() ,.") in y for x in fixed) for y in read)
    ]
    assert len(list(texts())) > 40
    assert not unread


def test_normalized_weights_are_contiguous():
    operands = call(PACKED_DECODE, numpy_array)
    A_log = normalize_A_log(np.arange(8, dtype="float32")[::2], 4)
    assert A_log.tolist() == [0, 2, 4, 6]
    padded = np.zeros(16, "float32")
    padded[:8] = np.arange(8)
    tailless = normalize_A_log(padded[::2], 4)
    assert tailless.tolist() == [0, 2, 4, 6]
    dt_bias = normalize_dt_bias(np.zeros(512, "float32")[::2], 4, 64)
    for x in (A_log, tailless):
        check(PACKED_DECODE, **operands | dict(A_log=x, dt_bias=dt_bias))


class MetaTensor(Tensor):
    """A tensor without values, as torch has it on the device "meta"."""

    __module__ = "torch"

    def reshape(self, shape):
        return Tensor(*shape)

    def __getitem__(self, index):
        return self

    def __ne__(self, other):
        return self

    def __bool__(self):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    __hash__ = None


def test_a_padded_tensor_without_values_is_a_type_error():
    with pytest.raises(TypeError, match="call normalize_A_log before jit"):
        normalize_A_log(MetaTensor(9), 4)
    assert normalize_A_log(MetaTensor(1, 1, 4, 1), 4).shape == (4,)


def test_a_tensor_with_gaps_is_copied_by_its_own_library():
    class Strided(Tensor):
        __module__ = "torch"

        def stride(self):
            return (2,)

        def reshape(self, shape):
            return self

        def contiguous(self):
            return Tensor(*self.shape)

    assert type(normalize_A_log(Strided(4), 4)) is Tensor


def test_the_other_tables_take_none_as_the_update_does():
    x = call(KDA_UPDATE, numpy_array, A_log=None, dt_bias=None, lower_bound=-5.0)
    assert check(KDA_UPDATE, **x).HV == 4
    gate = dict(a=np.zeros((3, 5, 4, 64), "float32"), A_log=None, dt_bias=None, lower_bound=-5.0)
    assert check(LOG_DECAY, **gate, softplus_beta=1.0, softplus_threshold=20.0).K == 64
