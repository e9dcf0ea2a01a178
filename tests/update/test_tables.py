"""Tables of slots, and how many tokens of the last call were accepted, as other suites grid them.

The shapes, counts and layouts of indices are those of three public suites, typed anew:

- vLLM (vllm-project/vllm): its fused sigmoid gating reads states from some indices and writes them
  to others, of one token or in a table each;
- FlashInfer (flashinfer-ai/flashinfer): its recurrent KDA and its varlen state update, with
  `num_accepted_tokens`, padded rows and indices of -1;
- FLA (fla-org/flash-linear-attention): its recurrent KDA, whose table has a stride of its own, so
  that it may be wider than a call has tokens.

Their heads are those of one rank of eight. A row's own slot is its first column with FLA and
FlashInfer, and there more accepted tokens than columns are the caller's mistake, or are cut off;
here they mean the row's own slot. What judges is a walk over the tokens, one call of the float64
oracle for each.
"""

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from cases import rounding
from support import IMPLEMENTATIONS, ON_GPU, STATE_LIMIT, assert_near, assert_same_bits, running

import kda_jax
from kda_contracts import ContractError
from kda_jax.tools import oracle


@dataclass(frozen=True)
class Grid:
    """One call. `own`: whether a row's slot is its first column, or apart from the table."""

    lengths: tuple  # tokens of each sequence in this call
    columns: int
    accepted: tuple | None = None
    heads: tuple = (1, 1, 64, 64)  # H, HV, K, V
    padded: tuple = ()  # rows
    missing: tuple = ()  # places of the table that are -1
    own: bool = True
    read: str | None = None  # where it starts otherwise: "table", another one; "sources"
    dense: bool = False
    strided: bool = False
    update_state: bool = False
    l2norm: bool = True
    lower_bound: float | None = None
    dtype: str = "bfloat16"
    pool_dtype: str = "float32"
    index_dtype: str = "int32"


VLLM = dict(heads=(2, 4, 128, 128), read="table")
WIDE = (2, 2, 128, 128)
APART = dict(own=False, dense=True)
GRIDS = {
    # vLLM: separate indices to read from and to write to.
    "vllm, 1 of one token": Grid((1,), 1, **VLLM, dtype="float32"),
    "vllm, 2 of one token": Grid((1,) * 2, 1, **VLLM),
    "vllm, 4 of one token": Grid((1,) * 4, 1, **VLLM, pool_dtype="bfloat16"),
    "vllm, in place": Grid((1,) * 2, 1, heads=(2, 4, 128, 128)),
    "vllm, tables of 2": Grid((2, 2), 2, (2, 1), **VLLM),
    "vllm, tables of 4": Grid((4, 4), 4, (3, 1), **VLLM, dtype="float32"),
    "vllm, strided tables": Grid((4, 4), 4, (4, 2), **VLLM, strided=True),
    # FlashInfer: from the first column, or from the last accepted one.
    "flashinfer, 1 drafted": Grid((2,) * 4, 2, pool_dtype="bfloat16"),
    "flashinfer, 3 drafted": Grid((4,) * 4, 4, l2norm=False),
    "flashinfer, 2 of wide heads": Grid((3,) * 8, 3, heads=WIDE),
    "flashinfer, 4 of wide heads": Grid((5,) * 8, 5, heads=WIDE, dense=True),
    "flashinfer, grouped heads": Grid((3,) * 4, 3, heads=(1, 2, 64, 64)),
    "flashinfer, 3 padded of 7": Grid((3,) * 7, 3, padded=(4, 5, 6)),
    "flashinfer, all padded": Grid((3,) * 4, 3, padded=(0, 1, 2, 3)),
    "flashinfer, -1 before a row": Grid((1,) * 2, 1, padded=(0,), dense=True),
    "flashinfer, -1 between rows": Grid((1,) * 4, 1, padded=(0, 2), dense=True),
    "flashinfer, 1 accepted": Grid((3,) * 4, 3, (1,) * 4),
    "flashinfer, all accepted": Grid((3,) * 4, 3, (3,) * 4),
    "flashinfer, too many accepted": Grid((3,) * 4, 3, (5,) * 4),
    "flashinfer, 1 to 4 accepted": Grid((4,) * 6, 4, (1, 2, 3, 4, 1, 2)),
    "flashinfer, 1 to 4 of wide heads": Grid((4,) * 6, 4, (1, 2, 3, 4, 1, 2), heads=WIDE),
    "flashinfer, accepted and padded": Grid((3,) * 5, 3, (1, 2, 3, 1, 1), padded=(3, 4)),
    "flashinfer, safe gate": Grid((3,) * 4, 3, (2,) * 4, lower_bound=-5.0),
    "flashinfer, a table to read, int64": Grid(
        (4,) * 4, 4, (2, 4, 1, 3), read="table", index_dtype="int64"
    ),
    "flashinfer, unequal lengths": Grid(
        (3, 1, 4, 2, 4, 1, 2, 3), 4, (1, 1, 4, 2, 3, 1, 2, 1), missing=((0, 3), (1, 1), (6, 3))
    ),
    # FLA: a table that is wider than a call has tokens.
    "fla, 7 of 21 slots": Grid((1,) * 7, 1, heads=(1, 4, 128, 128), pool_dtype="bfloat16"),
    **{
        f"fla, {T} of 4 columns": Grid(
            (T,) * 5, 4, (0, 1, 4, 3, 2), **APART, index_dtype="int64" if T == 2 else "int32"
        )
        for T in (1, 2, 3, 4)
    },
    "fla, no tokens and some": Grid((2, 0, 1, 4), 4, (4, 2, 0, 3), own=False),
    "fla, padded between rows": Grid((2, 3, 1), 3, (3, 1, 2), padded=(1,), own=False),
    # On from there: what is not kept, sources, the slot's own state.
    "fewer columns than tokens": Grid((5, 2, 4), 3, (3, 2, 0), own=False),
    "an accepted state that was not kept": Grid(
        (2, 2, 2), 3, (2, 3, 1), **APART, missing=((0, 1), (1, 1), (2, 2))
    ),
    "sources where none was accepted": Grid((3,) * 5, 3, (0, 2, 0, 1, 3), **APART, read="sources"),
    "sources end to end": Grid((2, 3, 1, 2), 3, (0, 0, 3, 0), own=False, read="sources"),
    "the slot's own state too": Grid((3,) * 4, 4, (0, 4, 2, 1), **APART, update_state=True),
    "the slot's own state, end to end": Grid(
        (1, 4, 2), 4, (4, 0, 3), own=False, update_state=True, pool_dtype="bfloat16"
    ),
}


@dataclass
class Call:
    tokens: dict  # by name, [tokens, ...]
    bounds: np.ndarray
    pool: np.ndarray
    table: np.ndarray
    slots: np.ndarray
    sources: np.ndarray | None
    accepted: np.ndarray | None
    starts: list  # of each row the slot, or -1 for a zero state


def make(grid):
    """The call of a grid: every slot that no row starts from is NaN, and so are padded tokens."""
    rng = np.random.default_rng(len(grid.lengths) * 10 + grid.columns)
    N, L, (H, HV, K, V) = len(grid.lengths), grid.columns, grid.heads
    places = rng.permutation(np.arange(1, 2 * N * L + N + 5))  # nobody takes slot 0
    table, other = places[: 2 * N * L].reshape(2, N, L)
    table, slots = table.copy(), (table[:, 0] if grid.own else places[-N:]).copy()
    for place in grid.missing:
        table[place] = -1
    accepted, sources = grid.accepted, None
    starts = slots.tolist()
    if grid.read == "table":
        # Which column to read was known beforehand: a source says it all.
        columns = np.zeros(N, int) if accepted is None else np.subtract(accepted, 1)
        starts, accepted, slots = other[np.arange(N), columns].tolist(), None, other[:, 0].copy()
        sources = np.array(starts)
    elif grid.read == "sources":
        sources = np.where(np.arange(N) % 2, -1, other[0, 0])  # a prefix of several, and none
        starts = sources.tolist()
    if accepted is not None:
        starts = [
            table[n, count - 1].item() if 1 <= count <= L else starts[n]
            for n, count in enumerate(accepted)
        ]
    for n in grid.padded:
        slots[n] = -1
        if grid.own:
            table[n] = -1
    live = slots >= 0
    S = len(places) + 1
    pool = np.full((S, HV, V, K), np.nan, np.float32)
    read = [start for n, start in enumerate(starts) if live[n] and start >= 0]
    pool[read] = rng.standard_normal((len(read), HV, V, K), np.float32)
    bounds = np.cumsum((0, *grid.lengths))
    shapes = dict(q=(H, K), k=(H, K), v=(HV, V), a=(HV, K), b=(HV,))
    tokens = {
        name: rng.standard_normal((bounds[-1], *shape), np.float32).astype(jnp.dtype(grid.dtype))
        for name, shape in shapes.items()
    }
    for x in tokens.values():
        x[~np.repeat(live, grid.lengths)] = np.nan
    index = jnp.dtype(grid.index_dtype)
    table, slots, sources, accepted, bounds = (
        None if x is None else np.asarray(x, index)
        for x in (table, slots, sources, accepted, bounds)
    )
    pool = pool.astype(jnp.dtype(grid.pool_dtype))
    return Call(tokens, bounds, pool, table, slots, sources, accepted, starts)


def gates_of(grid, tokens):
    """`(A_log, dt_bias)`, and what the oracle makes of them: `(log_decay, beta)`."""
    _, HV, K, _ = grid.heads
    rng = np.random.default_rng(1)
    A_log = np.log(rng.uniform(1, 16, HV)).astype(np.float32)
    dt_bias = (rng.standard_normal(HV * K) - 2).astype(np.float32)
    a, b = tokens["a"][None], tokens["b"][None]
    decay, beta = oracle.gates(a, b, A_log, dt_bias, grid.lower_bound)
    return A_log, dt_bias, decay[0], beta[0]


def token_by_token(grid, call, decay, beta):
    """`(out, pool, written)`, float64: each token a call, its state rounded to the pool's dtype."""
    _, HV, K, V = grid.heads
    pool, out, written = np.array(call.pool, np.float64), np.zeros((call.bounds[-1], HV, V)), set()
    for n, slot in enumerate(call.slots.tolist()):
        if slot < 0 or not grid.lengths[n]:
            continue
        start = call.starts[n]
        state = np.array(call.pool[start], np.float64) if start >= 0 else np.zeros((HV, V, K))
        for t, at in enumerate(range(*call.bounds[n : n + 2])):
            x = (*(call.tokens[name][at] for name in ("q", "k", "v")), decay[at], beta[at])
            x = [each[None, None] for each in x]
            read, after, _ = oracle.update(*x, state[None], [0], l2norm=grid.l2norm)
            out[at], state = read[0, 0], after[0].astype(call.pool.dtype).astype(np.float64)
            kept = call.table[n, t].item() if t < grid.columns else -1
            if kept >= 0:
                pool[kept] = state
                written.add(kept)
        if grid.update_state:
            pool[slot] = state
            written.add(slot)
    return out, pool, written


def run(operator, implementation, grid, call, gates):
    """`(out [tokens, HV, V], pool)` of an operator."""
    A_log, dt_bias, decay, beta = gates
    x = dict(call.tokens)
    if operator == "recurrent_kda":
        x |= dict(a=decay, b=beta)
    shape = (len(grid.lengths), grid.lengths[0]) if grid.dense else (1, call.bounds[-1])
    x = {name: jnp.asarray(each).reshape(*shape, *each.shape[1:]) for name, each in x.items()}
    ends = {} if grid.dense else dict(cu_seqlens=call.bounds)
    table = call.table
    if grid.strided:
        table = np.ascontiguousarray(table.T).T
        assert table.strides[1] != table.itemsize
    options = dict(
        intermediate_states=table,
        num_accepted_tokens=call.accepted,
        update_state=grid.update_state,
        use_qk_l2norm_in_kernel=grid.l2norm,
        implementation=implementation,
        **ends,
    )
    tensors, pool = (x["q"], x["k"], x["v"], x["a"], x["b"]), jnp.asarray(call.pool)
    with running(implementation):
        if operator == "recurrent_kda":
            out, pool = kda_jax.recurrent_kda(
                *tensors, pool, call.slots, sources=call.sources, **options
            )
        else:
            out, pool = kda_jax.fused_sigmoid_gating_kda_update(
                A_log,
                dt_bias,
                *tensors,
                pool,
                call.slots,
                source_indices=call.sources,
                lower_bound=grid.lower_bound,
                **options,
            )
    return np.asarray(out).reshape(-1, *out.shape[2:]), np.asarray(pool)


OPERATORS = ("recurrent_kda", "fused_sigmoid_gating_kda_update")


def cases():
    """Each grid with either operator in every implementation: on a GPU, and among the long tests.

    CI takes every second grid in XLA, the operators by turns, and a few of the narrow ones in an
    interpreted kernel.
    """
    for number, (name, grid) in enumerate(GRIDS.items()):
        for implementation in IMPLEMENTATIONS:
            for turn, operator in enumerate(OPERATORS):
                marks = ()
                if not ON_GPU and implementation == "xla":
                    marks = pytest.mark.slow if number % 4 == 3 * turn else pytest.mark.long
                elif not ON_GPU:
                    taken = number % 16 == 3 * turn and grid.heads[2] < 128
                    marks = pytest.mark.slow if taken else pytest.mark.long
                yield pytest.param(name, implementation, operator, marks=marks)


@pytest.mark.parametrize(("name", "implementation", "operator"), list(cases()))
def test_a_call_with_a_table_is_its_tokens_one_by_one(name, implementation, operator):
    grid = GRIDS[name]
    call = make(grid)
    *weights, decay, beta = gates_of(grid, call.tokens)
    if operator == "recurrent_kda":
        decay, beta = (np.nan_to_num(gate).astype(np.float32) for gate in (decay, beta))
    too_many = grid.accepted is not None and max(grid.accepted) > grid.columns
    with pytest.raises(ContractError, match="has 5 accepted") if too_many else nullcontext():
        kda_jax.validate_slots(
            call.slots,
            len(call.pool),
            call.sources,
            intermediate_states=call.table,
            num_accepted_tokens=call.accepted,
        )
    out, pool = run(operator, implementation, grid, call, (*weights, decay, beta))
    wanted_out, wanted, written = token_by_token(grid, call, decay, beta)
    live = np.repeat(call.slots >= 0, grid.lengths)
    limit = 2 * STATE_LIMIT + (0 if grid.pool_dtype == "float32" else 2 * rounding(grid.pool_dtype))
    assert_near(out[live], wanted_out[live], limit + 2 * rounding(out.dtype))
    assert not out[~live].any()
    written = sorted(written)
    assert_near(pool[written], wanted[written], limit)
    rest = np.setdiff1d(np.arange(len(pool)), written)
    assert_same_bits(pool[rest], call.pool[rest])


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(name, marks=() if ON_GPU or name == "xla" else pytest.mark.long)
        for name in IMPLEMENTATIONS
    ],
)
def test_one_accepted_token_is_the_first_column_bit_for_bit(implementation, operator):
    """As FlashInfer has it, whose rows start from their first column if nothing is said."""
    said = GRIDS["flashinfer, 1 accepted"]
    unsaid = dataclasses.replace(said, accepted=None)
    call = make(said)
    gates = gates_of(said, call.tokens)
    one = run(operator, implementation, said, call, gates)
    other = run(operator, implementation, unsaid, make(unsaid), gates)
    for x, y in zip(one, other, strict=True):
        assert_same_bits(x, y)
