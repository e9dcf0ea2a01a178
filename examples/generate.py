"""A small language model of KDA layers that generates: continuous batching over a pool of slots.

    python examples/generate.py [--requests 12] [--slots 4] [--new-tokens 24] [--temperature 0.8]
    [--weights FILE]

Requests of unequal length join as slots come free, are prefilled together, decode one token a step
in one compiled batch, and leave; a slot is used again by the next. It prints tokens per second, and
shows that a request's tokens are the same in the batch and alone. Weights are random, or those of a
file that --save wrote.
"""

import argparse
import functools
import time
from collections import deque
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax

CONFIG = kda_jax.KDAConfig(D=128, H=2, HV=4, K=32, V=32, gate_rank=32)
LAYERS, VOCABULARY, HIDDEN = 3, 256, 256


@dataclass
class Request:
    """A prompt, what was generated from it, and the key its tokens are drawn with."""

    number: int
    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)


def init_model(key, config=CONFIG):
    """The weights of a model: a dict of arrays and KDAParams."""
    keys = jax.random.split(key, 3 * LAYERS + 1)
    scale = config.D**-0.5
    layers = [
        dict(
            kda=kda_jax.init_params(config, keys[3 * i], dtype=jnp.float32),
            norm=jnp.ones(config.D),
            mlp_norm=jnp.ones(config.D),
            up=jax.random.normal(keys[3 * i + 1], (config.D, HIDDEN)) * scale,
            down=jax.random.normal(keys[3 * i + 2], (HIDDEN, config.D)) * HIDDEN**-0.5,
        )
        for i in range(LAYERS)
    ]
    words = jax.random.normal(keys[-1], (2, VOCABULARY, config.D))
    return dict(
        embedding=words[0], head=words[1] * 4 * scale, norm=jnp.ones(config.D), layers=layers
    )


def rms_norm(x, weight):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight[None]


def forward(model, tokens, caches, mix):
    """Logits of tokens; `mix(layer's weights, x, cache)` is the KDA layer.

    It runs over one token a row or over sequences.
    """
    x, advanced = model["embedding"][tokens], []
    for layer, cache in zip(model["layers"], caches, strict=True):
        y, cache = mix(layer["kda"], rms_norm(x, layer["norm"]), cache)
        x = x + y
        x = x + jax.nn.silu(rms_norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]
        advanced.append(cache)
    return rms_norm(x, model["norm"]) @ model["head"].T, advanced


@functools.partial(jax.jit, donate_argnums=2)
def prefill(model, tokens, caches, slots, cu_seqlens):
    """Logits `[N, vocabulary]` behind each prompt; its slot starts from nothing."""

    def mix(params, x, cache):
        return kda_jax.kda_prefill(
            params, x, cache, slots, cu_seqlens, config=CONFIG, sources=jnp.full_like(slots, -1)
        )

    logits, caches = forward(model, tokens, caches, mix)
    return logits[jnp.maximum(cu_seqlens[1:] - 1, 0)], caches


@functools.partial(jax.jit, donate_argnums=2)
def decode(model, tokens, caches, slots):
    """Logits `[B, vocabulary]` behind one token a row."""
    return forward(
        model,
        tokens,
        caches,
        lambda params, x, cache: kda_jax.kda_decode(params, x, cache, slots, config=CONFIG),
    )


@functools.partial(jax.jit, static_argnames="temperature")
def choose(logits, numbers, steps, temperature):
    """The next token of each row: the likeliest, or drawn with the request's own key."""
    if temperature == 0:
        return logits.argmax(-1)

    def draw(logits, number, step):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), step)
        return jax.random.categorical(key, logits / temperature)

    return jax.vmap(draw)(logits, numbers, steps)


def generate(model, requests, *, slots, temperature, prompt_tokens=256):
    """Runs all requests over `slots` slots: {number: tokens}, the seconds, the decoded tokens.

    One batch of `slots` rows is compiled for decoding, one of `prompt_tokens` tokens for prefill.
    """
    longest = max(len(request.prompt) for request in requests)
    if longest > prompt_tokens:
        raise ValueError(
            f"a prompt of {longest} tokens does not fit into a prefill of {prompt_tokens}"
        )
    caches = [kda_jax.init_cache(CONFIG, slots) for _ in model["layers"]]
    waiting, running, done, decoded = deque(requests), {}, {}, 0
    start = time.perf_counter()
    while waiting or running:
        joining, used = [], 0
        free = [slot for slot in range(slots) if slot not in running]
        while (
            waiting and len(joining) < len(free) and used + len(waiting[0].prompt) <= prompt_tokens
        ):
            joining.append(waiting.popleft())
            used += len(joining[-1].prompt)
        if joining:
            tokens = np.zeros(prompt_tokens, np.int32)
            tokens[:used] = np.concatenate([request.prompt for request in joining])
            bounds = np.cumsum([0, *(len(request.prompt) for request in joining)])
            bounds = np.append(bounds, np.full(slots - len(joining), used)).astype(np.int32)
            taken = kda_jax.pad_slots(free[: len(joining)], slots)
            logits, caches = prefill(model, tokens, caches, taken, bounds)
            append(joining, choose(logits, *numbers_of(joining, slots), temperature))
            running |= dict(zip(free, joining, strict=False))
        for slot in [
            slot for slot, request in running.items() if len(request.tokens) >= request.new_tokens
        ]:
            request = running.pop(slot)
            done[request.number] = request.tokens
        if running:
            batch = list(running.values())
            tokens = np.array(
                [request.tokens[-1] for request in batch] + [0] * (slots - len(batch)), np.int32
            )
            logits, caches = decode(model, tokens, caches, kda_jax.pad_slots(list(running), slots))
            append(batch, choose(logits, *numbers_of(batch, slots), temperature))
            decoded += len(batch)
    return done, time.perf_counter() - start, decoded


def numbers_of(requests, rows):
    """Numbers and steps of the requests, filled up to the compiled batch."""
    rest = [0] * (rows - len(requests))
    numbers = (
        [request.number for request in requests],
        [len(request.tokens) for request in requests],
    )
    return tuple(np.array([*x, *rest], np.int32) for x in numbers)


def append(requests, tokens):
    for request, token in zip(requests, np.asarray(tokens).tolist(), strict=False):
        request.tokens.append(token)


def make_requests(count, new_tokens, seed=0):
    rng = np.random.default_rng(seed)
    lengths = (
        rng.integers(3, 40, count),
        rng.integers(max(1, new_tokens // 2), new_tokens + 1, count),
    )
    return [
        Request(number, rng.integers(0, VOCABULARY, length).tolist(), int(new))
        for number, (length, new) in enumerate(zip(*lengths, strict=True))
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
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24)
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

    def run(requests, slots):
        return generate(model, requests, slots=slots, temperature=options.temperature)

    run(make_requests(2, 4), options.slots)  # compiles
    requests = make_requests(options.requests, options.new_tokens)
    done, seconds, decoded = run(requests, options.slots)
    total = sum(len(tokens) for tokens in done.values())
    rate = f"{total} tokens in {seconds:.2f} s, {total / seconds:.0f} tokens/s"
    print(f"{len(done)} requests over {options.slots} slots: {rate}")
    print(f"{decoded} of them decoded; request 0: {done[0]}")
    same = 0
    for request in make_requests(options.requests, options.new_tokens):
        alone, _, _ = run([request], options.slots)
        same += alone[request.number] == done[request.number]
    print(f"{same} of {len(done)} requests have the same tokens alone")
    return 0 if same == len(done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
