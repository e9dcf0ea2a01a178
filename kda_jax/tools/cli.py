"""The command line: `kda-jax demo`, `explain`, `check`, `bench` (also `python -m kda_jax`)."""

import argparse
import inspect
import json
import sys

import jax

import kda_jax
from kda_contracts import (
    PACKED_DECODE,
    BadFileError,
    add_check,
    parse_command,
    positive_number,
    unbroken,
)
from kda_jax import dispatch
from kda_jax.tools import bench, demo
from kda_jax.tools.synthetic import MODELS, model_sizes


def main(arguments=None):
    """Runs one command and returns its exit code: 0, or 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="kda-jax", description="Kimi Delta Attention for JAX.")
    parser.add_argument("--version", action="version", version=f"kda-jax {kda_jax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_explain(commands)
    add_check(commands, by_values=_by_values)
    parser_of_bench = commands.add_parser(
        "bench", help="time the kernels on a GPU against an in-place multiply"
    )
    bench.add_arguments(parser_of_bench)
    parser_of_bench.set_defaults(run=bench.run)
    with unbroken():
        options = parse_command(parser, commands, arguments)
        try:
            return options.run(options)
        except (ValueError, NotImplementedError, ImportError, BadFileError) as error:
            parser.exit(2, f"{parser.prog} {options.command}: {error}\n")


def _add_demo(commands):
    parser = commands.add_parser(
        "demo", help="decode a batch on a real model's shapes, check it and time it"
    )
    _add_model(parser)
    parser.add_argument(
        "--checkpoint", help="take the weights and the gate from this checkpoint's first KDA layer"
    )
    parser.add_argument(
        "--steps", type=positive_number, default=16, help="tokens to decode (default: 16)"
    )
    parser.add_argument(
        "--implementation", default="auto", choices=("auto", *dispatch.IMPLEMENTATIONS)
    )
    parser.add_argument(
        "--json", action="store_true", help="print one flat JSON object instead of the table"
    )
    parser.set_defaults(run=_demo)


def _add_explain(commands):
    parser = commands.add_parser(
        "explain", help="tell which implementation would run a shape, and why not the others"
    )
    _add_model(parser)
    for letter in ("H", "HV", "K", "V", "S"):
        parser.add_argument(
            f"--{letter}", type=positive_number, help=f"{letter} in place of the model's"
        )
    parser.add_argument("--op", default="packed_decode", choices=tuple(dispatch.CONTRACTS))
    parser.add_argument(
        "--tokens",
        type=positive_number,
        default=64,
        help="T of an op that has tokens (default: 64)",
    )
    parser.add_argument(
        "--pool-dtype", default="float32", choices=PACKED_DECODE.by_name["initial_state"].dtypes
    )
    parser.set_defaults(run=_explain)


def _add_model(parser):
    parser.add_argument("--model", default="kimi-linear-48b", choices=tuple(MODELS))
    parser.add_argument(
        "--tp",
        type=positive_number,
        default=1,
        help="tensor-parallel ranks; one of them runs (default: 1)",
    )
    parser.add_argument(
        "--batch", type=positive_number, default=8, help="rows, the last one padded (default: 8)"
    )


def _demo(options):
    result = demo.run(
        model=options.model,
        checkpoint=options.checkpoint,
        tp=options.tp,
        batch=options.batch,
        steps=options.steps,
        implementation=options.implementation,
    )
    print(json.dumps(result) if options.json else demo.report(result))
    return 0 if demo.passed(result) else 1


def _explain(options):
    sizes = model_sizes(
        options.model, tp=options.tp, batch=options.batch, slots=2 * options.batch + 1
    )
    letters = {x: getattr(options, x, None) or size for x, size in vars(sizes).items() if size}
    letters |= {"D": MODELS[options.model].hidden_size, "T": options.tokens, "N": options.batch}
    letters |= {
        "W": 4,
        "...": (options.batch, letters["HV"]),
        "R": letters["K"],
        "C": 2 * letters["H"] * letters["K"] + letters["HV"] * letters["V"],
    }
    op = getattr(kda_jax, options.op)
    arguments = _shapes(op, dispatch.CONTRACTS[options.op], letters, options.pool_dtype)
    print(dispatch.explain(op, **arguments))
    return 0


def _shapes(op, contract, letters, pool_dtype):
    """The required arguments of an operator or a step of the layer, by name, without values."""
    shapes, parameters = {}, inspect.signature(op).parameters
    for operand in contract.operands:
        parameter = parameters.get(operand.name)
        if operand.required or (parameter and parameter.default is parameter.empty):
            dtype = "int32" if "int32" in operand.dtypes else "bfloat16"
            dtype = pool_dtype if operand.name == contract.pool else dtype
            shapes[operand.name] = jax.ShapeDtypeStruct(operand.shape(letters), dtype)
    if "q_proj" not in shapes:
        return shapes
    config = kda_jax.KDAConfig(**{x: letters[x] for x in ("D", "H", "HV", "K", "V", "W")})
    return {
        "params": jax.eval_shape(lambda: kda_jax.init_params(config, jax.random.key(0))),
        "cache": kda_jax.KDACache(conv=shapes["conv"], state=shapes["state"]),
        "config": config,
    } | {name: shapes[name] for name in ("x", "slots", "cu_seqlens") if name in shapes}


def _by_values(options):
    return kda_jax.check_values(options.checkpoint, tp=options.tp, every=True)


if __name__ == "__main__":
    sys.exit(main())
