"""Trains a small model of KDA layers to recall: pairs of a key and a value, then keys alone.

    python examples/train.py [--steps 600] [--folder runs/recall] [--pairs 8] [--keys 64]

A sequence shows each pair once, `k3 v7 k5 v2 ...`, and then asks for all of them in another order:
behind each key the model has to name its value, which only a state that was written can tell. Two
sequences share a row, told apart by segment ids. It prints the loss and the recall on sequences
that it has not seen, draws both into loss.png, and keeps checkpoints in --folder: started again, it
goes on from the last one. Needs the dependency group `train`: optax, orbax-checkpoint, tqdm,
matplotlib.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

import kda_jax

CONFIG = kda_jax.KDAConfig(D=64, H=2, HV=2, K=32, V=32, gate_rank=32)
LAYERS, HIDDEN = 2, 128
PACKED = 2  # sequences that share a row


def make_batch(key, rows, pairs, keys):
    """`(tokens, targets, segment_ids)` `[rows, PACKED * 3 * pairs]`: tokens below `keys` are keys,
    the others values; targets are -1 where nothing is asked.
    """
    n = rows * PACKED
    k, v, order = jax.random.split(key, 3)
    shown = jnp.argsort(jax.random.uniform(k, (n, keys)), axis=1)[:, :pairs]  # no key twice
    values = jax.random.randint(v, (n, pairs), keys, 2 * keys)
    order = jnp.argsort(jax.random.uniform(order, (n, pairs)), axis=1)
    asked, answers = (jnp.take_along_axis(x, order, axis=1) for x in (shown, values))
    tokens = jnp.concatenate([jnp.stack([shown, values], 2).reshape(n, -1), asked], axis=1)
    targets = jnp.concatenate([jnp.full((n, 2 * pairs), -1), answers], axis=1)
    ids = jnp.repeat(jnp.arange(1, PACKED + 1), 3 * pairs)
    rows_of = (tokens.reshape(rows, -1), targets.reshape(rows, -1))
    return *rows_of, jnp.broadcast_to(ids[None], rows_of[0].shape)


def init_model(key, words, config=CONFIG):
    """The weights, float32: a dict of arrays and KDAParams."""
    keys = jax.random.split(key, 3 * LAYERS + 1)
    layers = [
        dict(
            kda=kda_jax.init_params(config, keys[3 * i], dtype=jnp.float32),
            norm=jnp.ones(config.D),
            mlp_norm=jnp.ones(config.D),
            up=jax.random.normal(keys[3 * i + 1], (config.D, HIDDEN)) * config.D**-0.5,
            down=jax.random.normal(keys[3 * i + 2], (HIDDEN, config.D)) * HIDDEN**-0.5,
        )
        for i in range(LAYERS)
    ]
    embedding = jax.random.normal(keys[-1], (words, config.D))
    return dict(
        embedding=embedding,
        head=jnp.zeros((config.D, words)),
        norm=jnp.ones(config.D),
        layers=layers,
    )


def rms_norm(x, weight):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight[None, None]


def forward(model, tokens, segment_ids, config=CONFIG):
    """Logits `[B, T, words]`."""
    x = model["embedding"][tokens]
    for layer in model["layers"]:
        x = x + kda_jax.kda_apply(
            layer["kda"], rms_norm(x, layer["norm"]), config=config, segment_ids=segment_ids
        )
        x = x + jax.nn.silu(rms_norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]
    return rms_norm(x, model["norm"]) @ model["head"]


def loss_of(model, tokens, targets, segment_ids):
    """`(loss, recall)`: the mean cross-entropy where something is asked, and how often it is right."""
    logits = forward(model, tokens, segment_ids)
    asked = targets >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    right = (logits.argmax(-1) == targets) & asked
    return jnp.where(asked, losses, 0).sum() / asked.sum(), right.sum() / asked.sum()


def make_optimizer(steps, learning_rate):
    """AdamW behind a warm-up of a tenth of the steps; gradients are clipped."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, max(1, steps // 10), steps, learning_rate / 100
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def make_step(optimizer, options):
    """`step(state, number) -> (state, loss, recall)`; a step's sequences hang on its number."""

    def step(state, number):
        key = jax.random.fold_in(jax.random.key(options.seed), number)
        batch = make_batch(key, options.batch, options.pairs, options.keys)
        (loss, recall), slopes = jax.value_and_grad(loss_of, has_aux=True)(state["model"], *batch)
        updates, rest = optimizer.update(slopes, state["optimizer"], state["model"])
        return dict(model=optax.apply_updates(state["model"], updates), optimizer=rest), loss, recall

    return jax.jit(step, donate_argnums=0)
