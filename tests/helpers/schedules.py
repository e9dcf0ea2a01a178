"""Random schedules of a server with one layer, driven on the host; each request has its truth.

Requests come with their tokens, which are input vectors, known in advance. A schedule cuts them
into steps of every kind, and hands slots round in a pool that is too small for all of them.

Over 350 lines, since each step has its plan, its call and its check, and shares the server's state.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from support import assert_same_bits

import kda_jax
from kda_jax.tools import oracle

S = 6  # slots, for twice as many requests and the prefixes that are kept
EVERY = 64
PREFILL = dict(T=160, N=5, M=2)
DECODE = 5  # rows
VERIFY = dict(N=4, T=4)
REQUESTS = 14
FORKS = 4  # of running requests, on top of these
MOST_STEPS = 1000
# What must happen somewhere in a batch of schedules, or they show less than they promise.
EVENTS = (
    "decode",
    "fork from a prefix",
    "fork from a request",
    "no token accepted",
    "nothing accepted of a fork",
    "some tokens accepted",
    "right tokens refused",
    "all tokens accepted",
    "first column kept",
    "second column kept",
    "column not reached",
    "empty sequence",
    "padded row",
    "prefix overwritten",
    "prefix evicted",
    "preempted",
    "slot used again from nothing",
    "more than 64 tokens at once",
    "more than 128 tokens at once",
    "prompt pieces beside single tokens",
)


class Layer:
    """A layer's weights and its steps, compiled once, for all schedules."""

    def __init__(self, config, *, dtype, implementation, limit):
        self.config, self.dtype, self.limit = config, jnp.dtype(dtype), limit
        params = kda_jax.init_params(config, jax.random.key(4), dtype=dtype)
        # Of the usual decays little is left after a few tokens, and with it of a wrong state.
        self.params = dataclasses.replace(params, dt_bias=params.dt_bias - 2)
        options = dict(config=config, implementation=implementation)

        def verify(params, x, cache, slots, *, sources):
            # Through Refs: were they written to, the cache that comes back would show it.
            refs = kda_jax.KDACache(jax.new_ref(cache.conv), jax.new_ref(cache.state))
            y, drafts = kda_jax.kda_verify(params, x, refs, slots, sources=sources, **options)
            return y, drafts, kda_jax.KDACache(refs.conv[...], refs.state[...])

        def step(function, **options):
            return jax.jit(functools.partial(function, **options), donate_argnames="cache")

        self.prefill = step(kda_jax.kda_prefill, **options, checkpoint_every=EVERY)
        self.decode = step(kda_jax.kda_decode, **options)
        self.verify = step(verify)
        self.commit = step(kda_jax.kda_commit, implementation=implementation)
        x = np.random.default_rng(0).standard_normal((64, config.D))
        self.usual = np.median(np.linalg.norm(self.truth(x)[0], axis=1))  # a token's output

    def poisoned_cache(self):
        cache = kda_jax.init_cache(self.config, S, params=self.params)
        return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), cache)

    def truth(self, x):
        """`(y, conv, state)` of one sequence from nothing, in float64."""
        c = self.config
        conv, state = np.zeros((c.channels, c.W - 1)), np.zeros((c.HV, c.V, c.K))
        return oracle.layer(self.params, x, conv, state, c)


@dataclasses.dataclass(eq=False)
class Request:
    """`done` tokens of `x` are in its slot; or, until it was written, in the slot `source`."""

    x: np.ndarray  # [L, D]
    done: int = 0
    slot: int = -1
    source: int | None = -1
    outputs: list = dataclasses.field(default_factory=list)  # (number of the token, its y)

    @property
    def reads(self):
        return self.slot if self.source is None else self.source

    @property
    def left(self):
        return len(self.x) - self.done


def run(layer, seed):
    """Runs the schedule of a seed to its end, and compares; how often each of EVENTS happened."""
    server = Server(layer, seed)
    for _ in range(MOST_STEPS):
        if not server.waiting and not server.live:
            return server.events
        server.admit()
        server.fork()
        server.preempt()
        server.step()
        server.retire()
    raise AssertionError("the schedule does not end")


class Server:
    """The cache, and what a host knows of its slots: each is free, a request's, or a prefix."""

    def __init__(self, layer, seed):
        self.layer, self.rng, self.events = layer, np.random.default_rng(seed), Counter()
        self.cache = layer.poisoned_cache()
        self.free = self.rng.permutation(S).tolist()
        self.used, self.dirty = set(), []  # slots that had a tenant; those that are to be poisoned
        self.prefixes = {}  # slot: the tokens whose state it keeps
        shared = [self.tokens(self.rng.integers(70, 200)) for _ in range(2)]
        self.waiting = [Request(self.prompt(shared)) for _ in range(REQUESTS)]
        self.live, self.forks = [], FORKS

    def happens(self, probability):
        return self.rng.random() < probability

    def picked(self, items):
        return items[self.rng.integers(len(items))]

    def tokens(self, count):
        drawn = self.rng.standard_normal((count, self.layer.config.D), np.float32)
        return drawn.astype(self.layer.dtype)

    def prompt(self, shared):
        own = self.tokens(self.rng.integers(1, self.picked([5, 40, 150])))
        if self.happens(0.2):
            return own
        first = self.picked(shared)
        return np.concatenate([first[: self.picked([len(first), len(first), 64, 100])], own])

    def pinned(self):
        """Slots that a request has yet to start from: nobody may write them."""
        return {request.source for request in self.live if request.source is not None}

    # Between steps: who holds which slot.

    def evictable(self):
        return sorted(self.prefixes.keys() - self.pinned())

    def freed(self, slot):
        self.free.insert(self.rng.integers(len(self.free) + 1), slot)
        self.dirty.append(slot)

    def begin(self, request, slot, source):
        request.slot, request.source = slot, source
        self.live.append(request)
        self.events["slot used again from nothing"] += source == -1 and slot in self.used
        self.used.add(slot)

    def admit(self):
        """Requests begin, from the state of a prefix that is kept, or from nothing."""
        while self.waiting and self.happens(0.5):
            if not self.free and self.evictable() and self.happens(0.5):
                slot = self.picked(self.evictable())
                del self.prefixes[slot]
                self.freed(slot)
                self.events["prefix evicted"] += 1
            if not self.free:
                return
            request, source = self.waiting.pop(0), -1
            kept = [slot for slot, tokens in self.prefixes.items() if begins(request.x, tokens)]
            if kept and self.happens(0.9):
                source = self.picked(kept)
                request.done = len(self.prefixes[source])
                self.events["fork from a prefix"] += 1
            self.begin(request, self.free.pop(), source)

    def fork(self):
        """A request goes on in another way from where a running, or an ended, one is."""
        parents = [request for request in self.live if request.source is None]
        if parents and self.free and self.forks and self.happens(0.2):
            parent = self.picked(parents)
            own = self.tokens(self.rng.integers(1, 40))
            x = np.concatenate([parent.x[: parent.done], own])
            self.begin(Request(x, done=parent.done), self.free.pop(), parent.slot)
            self.forks -= 1
            self.events["fork from a request"] += 1

    def preempt(self):
        """A running request loses its slot and all that was computed for it."""
        pinned = self.pinned()
        running = [request for request in self.live if request.left and request.slot not in pinned]
        if running and self.happens(0.04):
            request = self.picked(running)
            self.live.remove(request)
            self.freed(request.slot)
            request.done = 0
            self.waiting.append(request)
            self.events["preempted"] += 1

    def retire(self):
        """Ended requests meet their truth. Some stay, and others may still be forked from them."""
        pinned, conv, state = self.pinned(), *self.host()
        for request in [request for request in self.live if not request.left]:
            if request.slot not in pinned and self.happens(0.5):
                y, last_inputs, after = self.layer.truth(request.x)
                numbers, outputs = zip(*request.outputs, strict=True)
                self.assert_outputs_near(np.stack(outputs), y[list(numbers)])
                self.assert_kept_near(conv[request.slot], last_inputs)
                self.assert_kept_near(state[request.slot], after)
                self.live.remove(request)
                self.freed(request.slot)

    def assert_outputs_near(self, got, wanted):
        """Each token's; in a narrow dtype those of the request together.

        What a key and a query that are nearly orthogonal leave has no digits of its own: it is
        held to what a token usually gives.
        """
        errors = np.linalg.norm(np.asarray(got, np.float64) - wanted, axis=1)
        norms = np.maximum(np.linalg.norm(wanted, axis=1), self.layer.usual)
        if self.layer.dtype == jnp.float32:
            error = (errors / norms).max()
        else:
            error = np.linalg.norm(errors) / np.linalg.norm(norms)
        assert error <= self.layer.limit, f"{error:.2e} > {self.layer.limit:.0e}"

    def assert_kept_near(self, got, wanted):
        error = np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)
        assert error <= self.layer.limit, f"{error:.2e} > {self.layer.limit:.0e}"

    # Steps.

    def host(self):
        return [np.array(pool) for pool in (self.cache.conv, self.cache.state)]

    def step(self):
        pinned = self.pinned()
        able = [request for request in self.live if request.left and request.slot not in pinned]
        if not able:
            return
        before = self.host()
        if self.dirty:
            for pool in before:
                pool[self.dirty] = np.nan
            self.cache = kda_jax.KDACache(*map(jnp.array, before))
            self.dirty = []
        steps = [self.prefill, self.prefill, self.decode, self.verify, self.verify]
        written = self.picked(steps)(able)
        rest = np.setdiff1d(np.arange(S), sorted(written))
        for was, now in zip(before, self.host(), strict=True):
            assert_same_bits(now[rest], was[rest])

    def rows(self, able, count):
        """`(rows, slots, sources)`: some requests in any order, and None for padded rows."""
        most = min(len(able), count if self.happens(0.1) else count - 1)
        chosen = self.rng.permutation(len(able))[: self.rng.integers(1, most + 1)]
        rows = [able[i] for i in chosen] + [None] * (count - len(chosen))
        rows = [rows[i] for i in self.rng.permutation(count)]
        self.events["padded row"] += None in rows
        slots = np.array([-1 if row is None else row.slot for row in rows], np.int32)
        # Of a padded row the source may be anything.
        sources = [self.rng.integers(-1, S) if row is None else row.reads for row in rows]
        return rows, slots, np.array(sources, np.int32)

    def advanced(self, request, count, y=()):
        """Some tokens of a request are in its slot now; `y` may hold what more were right."""
        request.outputs += [(request.done + i, each) for i, each in enumerate(y)]
        request.done += count
        if count:
            request.source = None

    def decode(self, able):
        rows, slots, sources = self.rows(able, DECODE)
        x = self.poison(DECODE)
        for n, row in enumerate(rows):
            if row:
                x[n] = row.x[row.done]
        kda_jax.validate_slots(slots, S, sources)
        layer = self.layer
        y, self.cache = layer.decode(layer.params, x, self.cache, slots, sources=sources)
        y = np.asarray(y)
        for n, row in enumerate(rows):
            if row:
                self.advanced(row, 1, y[n : n + 1])
            else:
                assert not y[n].any()
        self.events["decode"] += 1
        return {row.slot for row in rows if row}

    def prefill(self, able):
        rows, slots, sources = self.rows(able, PREFILL["N"])
        lengths, room = [], PREFILL["T"]
        for row in rows:
            length = self.piece(row.left) if row else self.rng.integers(0, 6)
            lengths.append(min(length, room))
            room -= lengths[-1]
        bounds = np.cumsum([0, *lengths], dtype=np.int32)
        x, held = self.poison(PREFILL["T"]), np.zeros(PREFILL["T"], bool)
        for row, first, length in zip(rows, bounds, lengths, strict=False):
            if row:
                x[first : first + length] = row.x[row.done : row.done + length]
                held[first : first + length] = True
        table, kept = self.checkpoints(rows, lengths)
        kda_jax.validate_slots(slots, S, sources, checkpoints=table)
        kda_jax.validate_cu_seqlens(bounds, PREFILL["T"])
        layer = self.layer
        y, self.cache = layer.prefill(
            layer.params, x, self.cache, slots, bounds, sources=sources, checkpoints=table
        )
        y = np.asarray(y)
        assert not y[~held].any()
        for row, first, length in zip(rows, bounds, lengths, strict=False):
            if row:
                self.advanced(row, length, y[first : first + length])
        self.keep(kept)
        own = [length for row, length in zip(rows, lengths, strict=True) if row]
        self.events["empty sequence"] += 0 in own
        self.events["more than 64 tokens at once"] += max(own) > 64
        self.events["more than 128 tokens at once"] += max(own) > 128
        self.events["prompt pieces beside single tokens"] += 1 in own and max(own) > 1
        written = [row.slot for row, length in zip(rows, lengths, strict=True) if row and length]
        return {*written, *kept}

    def piece(self, left):
        return min(left, self.picked([1, self.rng.integers(0, 25), 64, 2 * EVERY, left, left]))

    def checkpoints(self, rows, lengths):
        """`(table, kept)`: slots for states on the way; `kept`: the tokens of those that are."""
        table, kept = np.full((PREFILL["N"], PREFILL["M"]), -1, np.int32), {}
        places = self.rng.permutation([*self.free, *self.evictable()]).tolist()
        for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            for m in range(PREFILL["M"]):
                count = (m + 1) * EVERY
                reached = row is not None and count <= length
                if places and self.happens(0.7 if reached else 0.1):
                    table[n, m] = places.pop()
                    if reached:
                        kept[table[n, m].item()] = row.x[: row.done + count]
                        self.events[("first", "second")[m] + " column kept"] += 1
                    else:
                        self.events["column not reached"] += 1
        return table, kept

    def keep(self, kept):
        self.events["prefix overwritten"] += len(kept.keys() & self.prefixes.keys())
        self.prefixes |= kept
        self.used |= kept.keys()
        self.free = [slot for slot in self.free if slot not in kept]

    def verify(self, able):
        """The first tokens of each draft are right, the others not; of those some are accepted."""
        (N, T), layer = VERIFY.values(), self.layer
        rows, slots, sources = self.rows(able, N)
        x, right = self.poison(N, T), np.zeros(N, np.int32)
        accepted = self.rng.integers(0, T + 1, N, np.int32)  # of a padded row anything
        for n, row in enumerate(rows):
            if row:
                right[n] = self.rng.integers(0, min(T, row.left) + 1) if self.happens(0.7) else 0
                x[n] = self.tokens(T)
                x[n, : right[n]] = row.x[row.done : row.done + right[n]]
                accepted[n] = right[n] if self.happens(0.8) else self.rng.integers(0, right[n] + 1)
        kda_jax.validate_slots(slots, S, sources)
        y, drafts, self.cache = layer.verify(layer.params, x, self.cache, slots, sources=sources)
        self.cache = layer.commit(self.cache, drafts, slots, accepted, sources=sources)
        y, written = np.asarray(y), set()
        for n, row in enumerate(rows):
            if row is None:
                assert not y[n].any()
                continue
            if accepted[n]:
                written.add(row.slot)
            self.events["no token accepted"] += accepted[n] == 0
            self.events["nothing accepted of a fork"] += accepted[n] == 0 <= row.reads != row.slot
            self.events["some tokens accepted"] += 0 < accepted[n] < T
            self.events["all tokens accepted"] += accepted[n] == T
            self.events["right tokens refused"] += accepted[n] < right[n]
            self.advanced(row, accepted[n].item(), y[n, : right[n]])
        return written

    def poison(self, *shape):
        return np.full((*shape, self.layer.config.D), np.nan, self.layer.dtype)


def begins(x, tokens):
    """Whether a sequence goes on after these tokens."""
    return len(tokens) < len(x) and np.array_equal(x[: len(tokens)], tokens)
