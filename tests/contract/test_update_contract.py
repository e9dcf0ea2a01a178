"""The contracts of several tokens: each message once, its remedy, and checks of values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from updates import FORMS, make_update

import kda_jax
from kda_contracts import COMMIT, KDA_UPDATE, RECURRENT_KDA, ContractError, check

# B=4, T=3, N=4, H=2, HV=4, K=64, V=32, S=6; and N=5 sequences of 10 tokens, H=1, HV=2
DENSE, VARLEN = make_update(FORMS["dense"]).operands, make_update(FORMS["varlen"]).operands


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def strided_pool():
    return np.zeros((6, 4, 64, 32), np.float32).swapaxes(2, 3)


# what is passed instead -> part of the message
WRONG = [
    (DENSE, {"q": zeros(4, 2, 64)}, "`q` must be a 4D tensor (got ndim=3)."),
    (DENSE, {"v": zeros(4, 3, 128)}, "`v` must be a 4D tensor (got ndim=3)."),
    (
        DENSE,
        {"initial_state_indices": zeros(4, 1, dtype=np.int32)},
        "`initial_state_indices` must be 1D (got ndim=2).",
    ),
    (DENSE, {"k": zeros(4, 3, 4, 64)}, "`k` must have shape (4, 3, 2, 64) (got (4, 3, 4, 64))."),
    (
        DENSE,
        {"q": zeros(4, 3, 3, 64), "k": zeros(4, 3, 3, 64)},
        "Invalid head config: HV=4 must be a multiple of H=3.",
    ),
    (
        VARLEN,
        {"cu_seqlens": None},
        "`q` of a dense call must have N rows (got B=1 for N=5 sequences).\n"
        "      got (1, 10, 1, 64) bfloat16\n"
        "      sequences that lie end to end need cu_seqlens",
    ),
    (
        DENSE,
        {"cu_seqlens": zeros(5, dtype=np.int32)},
        "one row a sequence is the dense form: leave cu_seqlens out",
    ),
    (
        VARLEN,
        {"cu_seqlens": zeros(5, dtype=np.int32)},
        "`cu_seqlens` must have shape [N+1] (got (5,); expected (6,)).",
    ),
    (DENSE, {"A_log": None}, "`A_log` may be None only with a `lower_bound`."),
    (DENSE, {"A_log": zeros(2)}, "Unexpected A_log shape: (2,); expected numel=4"),
    (DENSE, {"dt_bias": zeros(4)}, "Unexpected dt_bias shape: (4,); expected numel=256"),
    (
        DENSE,
        {"dt_bias": zeros(4)},
        "4 is HV: this looks like one bias per head; repeat each K=64 times",
    ),
    (DENSE, {"a": zeros(4, 3, 4)}, "Unexpected a shape for dense: (4, 3, 4)"),
    (
        DENSE,
        {"a": zeros(4, 3, 4)},
        "one gate per head is GDN's; KDA has one per (head, channel), HV*K=256 a row",
    ),
    (VARLEN, {"a": zeros(5, 2, 64)}, "Unexpected a shape for varlen: (5, 2, 64)"),
    (DENSE, {"a": zeros(12, 256)}, "the same elements in another shape: a.reshape(4, 3, 256)"),
    (DENSE, {"b": zeros(4, 3, 2)}, "Unexpected b shape for dense: (4, 3, 2)"),
    (DENSE, {"a": DENSE["b"], "b": DENSE["a"]}, "this looks like `a` and `b` swapped"),
    (
        DENSE,
        {"initial_state_source": zeros(6, 4, 32)},
        "Unexpected initial_state_source shape: (6, 4, 32)",
    ),
    (
        DENSE,
        {"initial_state_source": zeros(4 * 32 * 64 + 1)},
        "Unexpected initial_state_source shape: (8193,)",
    ),
    (
        DENSE,
        {"initial_state_source": zeros(8193)},
        "a flat pool holds whole slots of HV*V*K = 8192 elements",
    ),
    (
        DENSE,
        {"initial_state_source": zeros(6, 4, 64, 32)},
        "Unexpected initial_state_source shape: (6, 4, 64, 32)",
    ),
    (
        DENSE,
        {"initial_state_source": zeros(6, 4, 64, 32)},
        "e.g. np.swapaxes(initial_state_source, -1, -2)",
    ),
    (
        DENSE,
        {"intermediate_states": zeros(4, dtype=np.int32)},
        "`intermediate_states` must have shape (4, 3), or [N, L] with a column for each token "
        "(got (4,)).",
    ),
    (
        DENSE,
        {"num_accepted_tokens": zeros(3, dtype=np.int32)},
        "`num_accepted_tokens` must have shape (4,) (got (3,)).",
    ),
    (
        DENSE,
        {"num_accepted_tokens": zeros(4, dtype=np.int32)},
        "picks from the slots in `intermediate_states`: pass them",
    ),
    (
        DENSE,
        {"v": zeros(4, 3, 4, 32, dtype=np.int32)},
        "`v` must be float32, bfloat16 or float16 (got int32).",
    ),
    (DENSE, {"softplus_beta": 0.0}, "`softplus_beta` must be a finite number above 0 (got 0.0)."),
    (
        DENSE,
        {"softplus_threshold": np.inf},
        "`softplus_threshold` must be a finite number (got inf).",
    ),
    (DENSE, {"update_state": 1}, "`update_state` must be True or False (got int 1)."),
    (DENSE, {"scale": -1.0}, "`scale` must be a finite number above 0 (got -1.0)."),
]


@pytest.mark.parametrize(
    ("operands", "wrong", "message"), WRONG, ids=lambda x: str(x)[:40] if isinstance(x, str) else ""
)
def test_each_message(operands, wrong, message):
    with pytest.raises(ContractError) as error:
        kda_jax.fused_sigmoid_gating_kda_update(**operands | wrong)
    assert message in str(error.value)
    assert str(error.value).startswith("kda_jax.fused_sigmoid_gating_kda_update: ")


def test_what_only_strides_or_devices_show():
    with pytest.raises(
        ContractError,
        match=r"requires a compact per-slot \[HV, V, K\] state block; got strides \(8192, ",
    ):
        check(KDA_UPDATE, **DENSE | {"initial_state_source": strided_pool()})


def test_several_faults_are_one_error():
    with pytest.raises(ContractError) as error:
        kda_jax.fused_sigmoid_gating_kda_update(
            **DENSE | {"dt_bias": zeros(4), "A_log": zeros(3), "scale": 0.0}
        )
    assert {violation.argument for violation in error.value.violations} == {
        "dt_bias",
        "A_log",
        "scale",
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"log_decay": zeros(4, 3, 4)},
            "`log_decay` must have shape (4, 3, 4, 64) (got (4, 3, 4)).",
        ),
        ({"beta": zeros(4, 3, 4, 64)}, "`beta` must have shape (4, 3, 4) (got (4, 3, 4, 64))."),
        ({"slots": zeros(4)}, "`slots` must be int8, int16, int32 or int64 (got float32)."),
        ({"pool": zeros(6, 4, 64, 32)}, "Unexpected pool shape: (6, 4, 64, 32)"),
    ],
    ids=str,
)
def test_messages_of_the_recurrence(wrong, message):
    operands = {name: DENSE[name] for name in ("q", "k", "v")}
    operands |= dict(log_decay=zeros(4, 3, 4, 64), beta=zeros(4, 3, 4), pool=zeros(6, 4, 32, 64))
    with pytest.raises(ContractError) as error:
        kda_jax.recurrent_kda(**operands | {"slots": np.arange(4)} | wrong)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pool": zeros(6, 32, 64)}, "`pool` must be [S, HV, V, K] (got ndim=3)."),
        (
            {"intermediate": zeros(4, 3, 4, 64, 32)},
            "`intermediate` must have shape (4, 3, 4, 32, 64)",
        ),
        (
            {"intermediate": zeros(1, 12, 4, 32, 64)},
            "`intermediate` of a dense call must have N rows (got B=1, N=4).",
        ),
        (
            {"num_accepted": zeros(3, dtype=np.int32)},
            "`num_accepted` must have shape (4,) (got (3,)).",
        ),
        ({"slots": zeros(4)}, "`slots` must be int8, int16, int32 or int64 (got float32)."),
    ],
    ids=str,
)
def test_messages_of_commit(wrong, message):
    operands = dict(
        pool=zeros(6, 4, 32, 64), intermediate=zeros(4, 3, 4, 32, 64), slots=np.arange(4)
    )
    with pytest.raises(ContractError) as error:
        kda_jax.commit(**operands | dict(num_accepted=np.ones(4, np.int32)) | wrong)
    assert message in str(error.value)


def test_a_flat_ref_is_refused():
    ref = jax.new_ref(jnp.zeros(6 * 4 * 32 * 64))
    with pytest.raises(ContractError, match="may be flat as an array only: make the Ref 4-D"):
        kda_jax.fused_sigmoid_gating_kda_update(**DENSE | {"initial_state_source": ref})


def test_traced_options_are_refused():
    with pytest.raises(TypeError, match="`scale` must be static"):
        jax.jit(lambda s: kda_jax.fused_sigmoid_gating_kda_update(**DENSE, scale=s))(1.0)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 3, 10], r"cu_seqlens\[0\] is 1: the first sequence starts at 0"),
        ([0, 5, 3, 10], r"cu_seqlens\[2\] is 3, less than cu_seqlens\[1\], which is 5"),
        ([0, 11], r"cu_seqlens\[1\], the last, is 11: there are 10 tokens"),
    ],
)
def test_wrong_boundaries_are_named(bounds, message):
    for array in (bounds, np.array(bounds), jnp.array(bounds)):
        with pytest.raises(ContractError, match=message):
            kda_jax.validate_cu_seqlens(array, 10)


def test_right_boundaries_pass_and_others_are_no_boundaries():
    assert kda_jax.validate_cu_seqlens([0, 0, 4, 4, 10], 10) is None
    assert kda_jax.validate_cu_seqlens(np.array([0], np.int64), 0) is None
    for wrong in ([0.0, 1.0], [[0, 1]], []):
        with pytest.raises(TypeError, match=r"takes \[N\+1\] integers"):
            kda_jax.validate_cu_seqlens(wrong, 1)
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.jit(lambda x: kda_jax.validate_cu_seqlens(x, 3))(jnp.array([0, 3]))


def test_sizes_of_each_form():
    assert str(check(KDA_UPDATE, **DENSE)) == "Sizes(B=4, H=2, HV=4, K=64, V=32, S=6, T=3, N=4)"
    assert str(check(KDA_UPDATE, **VARLEN)) == "Sizes(B=1, H=1, HV=2, K=64, V=32, S=7, T=10, N=5)"
    for contract in (KDA_UPDATE, RECURRENT_KDA, COMMIT):
        for operand in contract.operands:
            assert operand.meaning
