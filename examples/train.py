"""A small model of KDA layers learns to recall, on a CPU in minutes.

    python examples/train.py [--steps 2500] [--folder recall] [--seed 0] [--pairs 8] [--keys 64]

A sequence is pairs of a key and a value, then the same keys in another order; the model must say
the value of each. Values are drawn anew for each sequence, so that nothing can be learned by heart:
the layer's state must hold the pairs. The program prints the share of values recalled in sequences
that it did not train on, and draws loss and recall into a picture. It saves as it goes, and a run
with the same options goes on from the last checkpoint, to the same result. It needs the dependency
group `train`.
"""

import argparse
import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure
from tqdm import tqdm

import kda_jax

TRAINING, MEASURING, LAST = range(3)  # what sequences are drawn for
UNSEEN = 256  # sequences of one measurement


def make_sequences(rng, rows, *, pairs, keys):
    """`(tokens [rows, 3*pairs], answers [rows, pairs])`; keys are tokens under `keys`

    The last `pairs` tokens ask for the keys, each of them once.
    """

    def shuffled(count):
        return rng.permuted(np.tile(np.arange(count, dtype=np.int32), (rows, 1)), axis=1)

    key, order = shuffled(keys)[:, :pairs], shuffled(pairs)
    value = rng.integers(keys, 2 * keys, (rows, pairs), dtype=np.int32)
    told = np.stack([key, value], axis=-1).reshape(rows, 2 * pairs)
    asked, answers = (np.take_along_axis(x, order, axis=1) for x in (key, value))
    return np.concatenate([told, asked], axis=1), answers


def init_layer(config, key):
    """The weights of a KDA layer that can remember a sequence.

    `init_params` draws channels that forget within a few tokens. Here a token's step is 0.001 to
    0.1, drawn evenly over its logarithm.
    """
    params = kda_jax.init_params(config, key, dtype=jnp.float32)
    step = jnp.exp(
        jax.random.uniform(
            jax.random.fold_in(key, 1),
            params.dt_bias.shape,
            minval=np.log(1e-3),
            maxval=np.log(0.1),
        )
    )
    return dataclasses.replace(params, dt_bias=jnp.log(jnp.expm1(step)))  # softplus gives the step


def init_model(key, config, *, layers, hidden, vocabulary):
    """The weights of a model: a dict of arrays and KDAParams."""
    keys = jax.random.split(key, 3 * layers + 2)
    scale = config.D**-0.5
    blocks = [
        dict(
            kda=init_layer(config, keys[3 * i]),
            norm=jnp.ones(config.D),
            mlp_norm=jnp.ones(config.D),
            up=jax.random.normal(keys[3 * i + 1], (config.D, hidden)) * scale,
            down=jax.random.normal(keys[3 * i + 2], (hidden, config.D)) * hidden**-0.5,
        )
        for i in range(layers)
    ]
    embedding = jax.random.normal(keys[-1], (vocabulary, config.D))
    head = jax.random.normal(keys[-2], (config.D, vocabulary)) * scale
    return dict(embedding=embedding, head=head, norm=jnp.ones(config.D), layers=blocks)


def rms_norm(x, weight):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight[None, None]


def forward(model, tokens, config, asked):
    """Logits `[rows, asked, vocabulary]` at the last `asked` tokens."""
    x = model["embedding"][tokens]
    for layer in model["layers"]:
        x = x + kda_jax.kda_apply(layer["kda"], rms_norm(x, layer["norm"]), config=config)
        x = x + jax.nn.silu(rms_norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]
    return rms_norm(x[:, -asked:], model["norm"]) @ model["head"]


def make_optimizer(options):
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.rate, max(1, options.steps // 10), options.steps
    )

    def matrices(model):
        return jax.tree.map(lambda x: x.ndim > 1, model)

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01, mask=matrices)
    )


def recall(predict, tokens, answers):
    """The share of answers to which `predict(tokens)` gives the highest logit."""
    return float((np.asarray(predict(tokens)).argmax(-1) == answers).mean())


def make_steps(options):
    """`(init, step, predict)`, compiled: a first state, one step of training, the logits."""
    width = options.head_width
    config = kda_jax.KDAConfig(
        D=options.width, H=options.heads, HV=options.heads, K=width, V=width, gate_rank=width
    )
    optimizer = make_optimizer(options)
    logits = functools.partial(forward, config=config, asked=options.pairs)

    @jax.jit
    def init(key):
        sizes = dict(layers=options.layers, hidden=2 * options.width, vocabulary=2 * options.keys)
        model = init_model(key, config, **sizes)
        return dict(model=model, optimizer=optimizer.init(model))

    @jax.jit
    def step(state, tokens, answers):
        def loss_of(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(logits(model, tokens), answers)
            return losses.mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["model"])
        updates, changed = optimizer.update(gradients, state["optimizer"], state["model"])
        return dict(model=optax.apply_updates(state["model"], updates), optimizer=changed), loss

    return init, step, jax.jit(logits)


def open_checkpoints(folder):
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    return ocp.CheckpointManager(Path(folder).resolve() / "checkpoints", options=options)


def restore(checkpoints, state, curves, settings):
    """`(step, state, curves)` of the last checkpoint, or step 0 and what was passed."""
    last = checkpoints.latest_step()
    if last is None:
        return 0, state, curves
    wanted = ocp.args.Composite(settings=ocp.args.JsonRestore())
    then = checkpoints.restore(last, args=wanted).settings
    if then != settings:
        names = [name for name in settings if then.get(name) != settings[name]]
        raise ValueError(
            f"{checkpoints.directory} is of a run with other options ({', '.join(names)}): "
            "pass the same ones, or another --folder"
        )
    wanted = ocp.args.Composite(
        state=ocp.args.StandardRestore(state), curves=ocp.args.StandardRestore(curves)
    )
    kept = checkpoints.restore(last, args=wanted)
    return last, kept.state, kept.curves


def save(checkpoints, step, state, curves, settings):
    """Begins to write a checkpoint; the run goes on meanwhile, and changes the curves."""
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        curves=ocp.args.StandardSave(jax.tree.map(np.copy, curves)),
        settings=ocp.args.JsonSave(settings),
    )
    checkpoints.save(step, args=args)


def train(options):
    """Trains to `options.until` or the end; `(curves, recall of unseen sequences)`.

    `curves` has the loss of each step, and the recall at every `options.every`-th; NaN elsewhere.
    """
    free = ("folder", "until", "every")  # these may differ where a run goes on
    settings = {name: x for name, x in vars(options).items() if name not in free}
    init, step, predict = make_steps(options)

    def sequences(rows, *stream):
        rng = np.random.default_rng([options.seed, *stream])
        return make_sequences(rng, rows, pairs=options.pairs, keys=options.keys)

    def measure(state, *stream):
        return recall(functools.partial(predict, state["model"]), *sequences(UNSEEN, *stream))

    with open_checkpoints(options.folder) as checkpoints:
        curves = {name: np.full(options.steps, np.nan, np.float32) for name in ("loss", "recall")}
        state = init(jax.random.key(options.seed))
        start, state, curves = restore(checkpoints, state, curves, settings)
        end = options.steps if options.until is None else min(options.until, options.steps)
        bar = tqdm(range(start, end), initial=start, total=options.steps, mininterval=1.0)
        for number in bar:
            state, loss = step(state, *sequences(options.batch, TRAINING, number))
            curves["loss"][number] = loss
            if (number + 1) % options.every == 0 or number + 1 == end:
                curves["recall"][number] = measure(state, MEASURING)
                save(checkpoints, number + 1, state, curves, settings)
                bar.set_postfix(loss=float(loss), recall=float(curves["recall"][number]))
    return curves, np.mean([measure(state, LAST, part) for part in range(4)])


def draw(path, curves, options):
    """Loss and recall over the steps, each beside what a guess would give."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, options.steps + 1)
    measured = np.isfinite(curves["recall"])
    left.plot(steps, curves["loss"], linewidth=0.8)
    left.axhline(
        np.log(options.keys), color="gray", linestyle="--", label="a guess among all values"
    )
    left.axhline(np.log(options.pairs), color="gray", linestyle=":", label="among those told")
    left.set(xlabel="step", ylabel="loss, nats an answer", ylim=(0, None))
    left.legend(fontsize=8)
    right.plot(steps[measured], curves["recall"][measured], "o-", markersize=3)
    right.axhline(1 / options.pairs, color="gray", linestyle=":")
    right.set(xlabel="step", ylabel="recall in unseen sequences", ylim=(0, 1.02))
    figure.suptitle(f"{options.pairs} pairs of {options.keys} keys", fontsize=11)
    figure.savefig(path, dpi=120)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--folder", default="recall", help="of the checkpoints and the picture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", type=int, help="stop there, to go on another time")
    parser.add_argument(
        "--every", type=int, default=100, help="steps from one checkpoint to the next"
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-2, help="the highest learning rate")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="D")
    parser.add_argument("--heads", type=int, default=2, help="H = HV")
    parser.add_argument("--head-width", type=int, default=16, help="K = V")
    options = parser.parse_args(arguments)
    if options.pairs > options.keys:
        parser.error(f"--pairs {options.pairs} needs as many keys (--keys {options.keys})")
    start = time.perf_counter()
    curves, reached = train(options)
    seconds, picture = time.perf_counter() - start, Path(options.folder) / "recall.png"
    draw(picture, curves, options)
    print(f"recall {reached:.3f} over {4 * UNSEEN} unseen sequences, {seconds:.0f} s")
    print(f"loss and recall: {picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
