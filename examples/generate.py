"""A small server: a language model of KDA layers that generates for many requests at once.

    python examples/generate.py [--requests 16] [--rows 4] [--slots 8] [--new-tokens 96]
    [--speculate 4] [--temperature 0.8] [--weights FILE] [--save FILE]

Every step is one compiled program over a pool of slots:

- **mixed**: pieces of prompts, and the next token of every request that generates already, in one
  call of `kda_prefill`. On the way states are kept at each 64th token of a prompt.
- **verify and commit**, where no prompt waits: some tokens of each request are guessed from its own
  text, checked at once, and kept as far as they were right.
- **decode**: the same with one token a request, with `--speculate 0`.

Kept states are a prefix cache: a request whose prompt begins as an earlier one goes on from there,
without a copy. The least recently used ones make room for others.

It prints what the prefix cache and the guesses saved, and shows that every request's tokens are
those that it gets alone, one after the other by `kda_decode`, its prompt's too. Weights are random,
or those of a file that --save wrote. The random embedding is scaled, so that the text repeats
itself, as learned text does, and guesses are often right.

Over 350 lines, since the model, the steps and the scheduler are read as one.
"""

import argparse
import dataclasses
import functools
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax

CONFIG = kda_jax.KDAConfig(D=128, H=2, HV=4, K=32, V=32, gate_rank=32)
LAYERS, VOCABULARY, HIDDEN = 3, 64, 256
EVERY = 64  # tokens from one kept state to the next
BUDGET = 128  # tokens of a mixed step


@dataclass
class Request:
    """A prompt, what was generated from it, and where it stands."""

    number: int
    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    source: int = -1  # the slot that its next tokens go on from
    done: int = 0  # how many of its tokens the state of its source has seen

    @property
    def text(self):
        return self.prompt + self.tokens

    @property
    def generates(self):
        return self.done >= len(self.prompt)


@dataclass
class Prefixes:
    """States of prompts' first tokens, by those tokens: the least recently used comes first."""

    slots: OrderedDict = field(default_factory=OrderedDict)
    hits: int = 0
    saved: int = 0
    evicted: int = 0

    def longest(self, prompt):
        """`(tokens, slot)` of the longest kept beginning that leaves a token to run, or (0, -1)."""
        for end in range((len(prompt) - 1) // EVERY * EVERY, 0, -EVERY):
            if (key := tuple(prompt[:end])) in self.slots:
                self.slots.move_to_end(key)
                self.hits, self.saved = self.hits + 1, self.saved + end
                return end, self.slots[key]
        return 0, -1

    def evict(self, in_use):
        """The slot of the least recently used one that nobody reads in this step, or None."""
        for key, slot in self.slots.items():
            if slot not in in_use:
                self.evicted += 1
                return self.slots.pop(key)
        return None


def init_layer(config, key):
    """The weights of a KDA layer that remembers a prompt: `init_params` draws channels that forget
    within a few tokens, so that nobody would see a wrong state. A step is 0.001 to 0.1 here.
    """
    params = kda_jax.init_params(config, key, dtype=jnp.float32)
    span = dict(minval=np.log(1e-3), maxval=np.log(0.1))
    step = jnp.exp(jax.random.uniform(jax.random.fold_in(key, 1), params.dt_bias.shape, **span))
    return dataclasses.replace(params, dt_bias=jnp.log(jnp.expm1(step)))  # softplus gives the step


def init_model(key, config=CONFIG):
    """The weights of a model: a dict of arrays and KDAParams."""
    keys = jax.random.split(key, 3 * LAYERS + 1)
    scale = config.D**-0.5
    layers = [
        dict(
            kda=init_layer(config, keys[3 * i]),
            norm=jnp.ones(config.D),
            mlp_norm=jnp.ones(config.D),
            up=jax.random.normal(keys[3 * i + 1], (config.D, HIDDEN)) * scale,
            down=jax.random.normal(keys[3 * i + 2], (HIDDEN, config.D)) * HIDDEN**-0.5,
        )
        for i in range(LAYERS)
    ]
    words = jax.random.normal(keys[-1], (2, VOCABULARY, config.D))
    return dict(
        embedding=words[0] * 3, head=words[1] * 4 * scale, norm=jnp.ones(config.D), layers=layers
    )


def rms_norm(x, weight):
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def forward(model, tokens, caches, mix):
    """Logits of tokens, and of each layer what `mix(layer's weights, x, cache)`, the KDA layer,
    returns beside its output: the cache, or a draft.
    """
    x, advanced = model["embedding"][tokens], []
    for layer, cache in zip(model["layers"], caches, strict=True):
        y, cache = mix(layer["kda"], rms_norm(x, layer["norm"]), cache)
        x = x + y
        x = x + jax.nn.silu(rms_norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]
        advanced.append(cache)
    return rms_norm(x, model["norm"]) @ model["head"].T, advanced


def last_of_rows(logits, cu_seqlens):
    return logits[jnp.maximum(cu_seqlens[1:] - 1, 0)]


@functools.partial(jax.jit, donate_argnums=2)
def mixed(model, tokens, caches, slots, cu_seqlens, sources, checkpoints):
    """Logits `[rows, vocabulary]` behind the last token of each row, of whatever length it is."""

    def mix(params, x, cache):
        return kda_jax.kda_prefill(
            params,
            x,
            cache,
            slots,
            cu_seqlens,
            config=CONFIG,
            sources=sources,
            checkpoints=checkpoints,
            checkpoint_every=EVERY,
        )

    logits, caches = forward(model, tokens, caches, mix)
    return last_of_rows(logits, cu_seqlens), caches


@functools.partial(jax.jit, donate_argnums=2)
def decode(model, tokens, caches, slots):
    """Logits `[rows, vocabulary]` behind one token a row."""

    def mix(params, x, cache):
        return kda_jax.kda_decode(params, x, cache, slots, config=CONFIG)

    return forward(model, tokens, caches, mix)


@jax.jit
def verify(model, tokens, caches, slots):
    """Logits `[rows, T, vocabulary]` behind each of some tokens a row, and what commit takes."""

    def mix(params, x, cache):
        return kda_jax.kda_verify(params, x, cache, slots, config=CONFIG)

    return forward(model, tokens, caches, mix)


@functools.partial(jax.jit, donate_argnums=0)
def commit(caches, drafts, slots, accepted):
    """The caches behind the accepted tokens."""
    return [
        kda_jax.kda_commit(cache, draft, slots, accepted)
        for cache, draft in zip(caches, drafts, strict=True)
    ]


@functools.partial(jax.jit, static_argnames="temperature")
def choose(logits, numbers, steps, temperature):
    """The next token of each row: the likeliest, or drawn with the request's own key."""
    if temperature == 0:
        return logits.argmax(-1)

    def draw(logits, number, step):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), step)
        return jax.random.categorical(key, logits / temperature)

    return jax.vmap(draw)(logits, numbers, steps)


class Server:
    """Requests over a pool of slots: `rows` of them at once, the other slots for prefixes."""

    def __init__(self, model, *, rows, slots, speculate=0, temperature=0.0):
        self.model, self.rows, self.slots = model, rows, slots
        self.speculate, self.temperature = speculate, temperature
        self.caches = [kda_jax.init_cache(CONFIG, slots) for _ in model["layers"]]
        self.free, self.running = list(range(slots)), []
        self.prefixes = Prefixes()
        self.steps = dict(mixed=0, decode=0, verify=0)
        self.guessed = self.right = 0

    def run(self, requests):
        """{number: tokens} of all requests, in the order in which they came."""
        waiting, finished = deque(requests), {}
        while waiting or self.running:
            while waiting and len(self.running) < self.rows and self.join(waiting[0]):
                waiting.popleft()
            if not all(request.generates for request in self.running):
                self.step_mixed()
            elif self.speculate and not self.temperature:
                self.step_verify()
            else:
                self.step_decode()
            for request in [x for x in self.running if len(x.tokens) >= x.new_tokens]:
                self.running.remove(request)
                self.free.append(request.slot)
                finished[request.number] = request.tokens
        return finished

    def take_slot(self, in_use):
        return self.free.pop() if self.free else self.prefixes.evict(in_use)

    def in_use(self):
        return {request.source for request in self.running}

    def join(self, request):
        """Gives the request a slot, and the longest prefix that is kept; False if none is free."""
        slot = self.take_slot(self.in_use())
        if slot is None:
            return False
        request.slot = slot
        request.done, request.source = self.prefixes.longest(request.prompt)
        self.running.append(request)
        return True

    def step_mixed(self):
        """One token of each request that generates, and of prompts what else fits."""
        self.steps["mixed"] += 1
        pieces, left = [], BUDGET
        for request in sorted(self.running, key=lambda x: not x.generates):
            count = min(len(request.text) - request.done, left)
            if request.done + count < len(request.prompt):
                count = count // EVERY * EVERY  # its next piece begins where states are kept
            if count:
                pieces.append((request, count))
                left -= count
        slots = kda_jax.pad_slots([request.slot for request, _ in pieces], self.rows)
        sources = kda_jax.pad_slots([request.source for request, _ in pieces], self.rows)
        bounds = np.cumsum([0, *(count for _, count in pieces)])
        bounds = np.append(bounds, [bounds[-1]] * (self.rows - len(pieces))).astype(np.int32)
        tokens = np.zeros(BUDGET, np.int32)
        tokens[: bounds[-1]] = [
            token
            for request, count in pieces
            for token in request.text[request.done : request.done + count]
        ]
        checkpoints = np.full((self.rows, BUDGET // EVERY), -1, np.int32)
        kept = self.keep(pieces, checkpoints)
        kda_jax.validate_slots(slots, self.slots, sources, checkpoints=checkpoints)
        kda_jax.validate_cu_seqlens(bounds, BUDGET)
        logits, self.caches = mixed(
            self.model, tokens, self.caches, slots, bounds, sources, checkpoints
        )
        self.prefixes.slots |= kept  # only now: nobody could go on from them in this step
        for request, count in pieces:
            request.done, request.source = request.done + count, request.slot
        self.append([request for request, _ in pieces], logits)

    def keep(self, pieces, checkpoints):
        """Finds slots for the states that this step comes by: {tokens: slot}."""
        kept, in_use = {}, self.in_use()
        for row, (request, count) in enumerate(pieces):
            for column in range(count // EVERY):
                end = request.done + (column + 1) * EVERY
                key = tuple(request.prompt[:end])
                if end > len(request.prompt) or key in self.prefixes.slots or key in kept:
                    continue
                slot = self.take_slot(in_use)
                if slot is not None:
                    checkpoints[row, column] = kept[key] = slot
        return kept

    def step_decode(self):
        self.steps["decode"] += 1
        slots = kda_jax.pad_slots([request.slot for request in self.running], self.rows)
        kda_jax.validate_slots(slots, self.slots)
        tokens = np.zeros(self.rows, np.int32)
        tokens[: len(self.running)] = [request.text[request.done] for request in self.running]
        logits, self.caches = decode(self.model, tokens, self.caches, slots)
        for request in self.running:
            request.done += 1
        self.append(self.running, logits)

    def step_verify(self):
        """The last token of each request, and behind it what its text guesses."""
        self.steps["verify"] += 1
        slots = kda_jax.pad_slots([request.slot for request in self.running], self.rows)
        kda_jax.validate_slots(slots, self.slots)
        tokens = np.zeros((self.rows, self.speculate), np.int32)
        guesses = [guess(request.text, self.speculate - 1) for request in self.running]
        for row, (request, guessed) in enumerate(zip(self.running, guesses, strict=True)):
            tokens[row, : 1 + len(guessed)] = [request.text[-1], *guessed]
        logits, drafts = verify(self.model, tokens, self.caches, slots)
        likeliest, accepted = np.asarray(logits.argmax(-1)), np.zeros(self.rows, np.int32)
        for row, (request, guessed) in enumerate(zip(self.running, guesses, strict=True)):
            right = 0
            while right < len(guessed) and guessed[right] == likeliest[row, right]:
                right += 1
            self.guessed, self.right = self.guessed + len(guessed), self.right + right
            accepted[row] = min(1 + right, request.new_tokens - len(request.tokens))
            request.tokens += likeliest[row, : accepted[row]].tolist()
            request.done += int(accepted[row])
        self.caches = commit(self.caches, drafts, slots, accepted)

    def append(self, requests, logits):
        """The next token of each request whose tokens have all been run."""
        rest = [0] * (self.rows - len(requests))
        numbers = np.array([*(request.number for request in requests), *rest], np.int32)
        steps = np.array([*(len(request.tokens) for request in requests), *rest], np.int32)
        chosen = np.asarray(choose(logits, numbers, steps, self.temperature)).tolist()
        for request, token in zip(requests, chosen, strict=False):
            if request.done == len(request.text):
                request.tokens.append(token)


def generate_alone(model, request, *, rows, temperature):
    """The request's tokens by decode steps alone, in a cache of its own."""
    caches = [kda_jax.init_cache(CONFIG, 1) for _ in model["layers"]]
    slots, numbers = kda_jax.pad_slots([0], rows), np.full(rows, request.number, np.int32)
    text, generated = list(request.prompt), []
    for position in range(len(text) + request.new_tokens - 1):
        tokens = np.full(rows, text[position], np.int32)
        logits, caches = decode(model, tokens, caches, slots)
        if position + 1 == len(text):
            steps = np.full(rows, len(generated), np.int32)
            generated.append(int(choose(logits, numbers, steps, temperature)[0]))
            text.append(generated[-1])
    return generated


def guess(text, count):
    """Up to `count` tokens: what followed the last time that the text ended so."""
    for length in (3, 2, 1):
        end = text[-length:]
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == end:
                return text[start + length : start + length + count]
    return []


def make_requests(count, new_tokens, seed=0):
    """Requests that begin with one of three long prompts, in turn, and end each in its own way."""
    rng = np.random.default_rng(seed)
    common = [rng.integers(0, VOCABULARY, length).tolist() for length in (200, 130, 70)]
    return [
        Request(
            number,
            common[number % 3] + rng.integers(0, VOCABULARY, int(rng.integers(3, 40))).tolist(),
            int(rng.integers(max(1, new_tokens // 2), new_tokens + 1)),
        )
        for number in range(count)
    ]


def save(path, model):
    """Writes the weights; every leaf by its place in the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    np.savez(path, **{jax.tree_util.keystr(place): np.asarray(leaf) for place, leaf in leaves})


def load(path):
    """The weights of a file that `save` wrote."""
    stored = np.load(path)

    def leaf(place, _):
        return jnp.asarray(stored[jax.tree_util.keystr(place)])

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(init_model, jax.random.key(0)))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4, help="requests that run at once")
    parser.add_argument("--slots", type=int, default=8, help="of the pool, prefixes included")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--speculate", type=int, default=4, help="tokens a step; 0: no guesses")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: the likeliest token; above: drawn"
    )
    parser.add_argument(
        "--weights", help="an .npz file that --save wrote; random weights otherwise"
    )
    parser.add_argument("--save", help="write the weights there")
    options = parser.parse_args(arguments)
    model = load(options.weights) if options.weights else init_model(jax.random.key(0))
    if options.save:
        save(options.save, model)
    sizes = dict(rows=options.rows, slots=options.slots, temperature=options.temperature)

    Server(model, **sizes, speculate=options.speculate).run(make_requests(2, 4))  # compiles
    serving = Server(model, **sizes, speculate=options.speculate)
    requests = make_requests(options.requests, options.new_tokens)
    start = time.perf_counter()
    finished = serving.run(requests)
    seconds = time.perf_counter() - start
    tokens, prefixes = sum(map(len, finished.values())), serving.prefixes
    steps = ", ".join(f"{count} {name}" for name, count in serving.steps.items() if count)
    print(f"{len(finished)} requests in {options.rows} rows and {options.slots} slots")
    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s; steps: {steps}")
    prompts = sum(len(request.prompt) for request in requests)
    print(
        f"prefixes: {prefixes.hits} hits saved {prefixes.saved} of {prompts} prompt tokens, "
        f"{prefixes.evicted} evicted"
    )
    if serving.guessed:
        share = serving.right / serving.guessed
        print(f"guesses: {serving.right} of {serving.guessed} right, {share:.0%}")
    print(f"request 0: {finished[0]}")
    same = 0
    for request in make_requests(options.requests, options.new_tokens):
        alone = generate_alone(model, request, rows=options.rows, temperature=options.temperature)
        same += alone == finished[request.number]
    print(f"{same} of {len(finished)} requests have the same tokens alone")
    return 0 if same == len(finished) else 1


if __name__ == "__main__":
    raise SystemExit(main())
