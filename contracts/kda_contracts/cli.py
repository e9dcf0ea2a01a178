"""`python -m kda_contracts check CHECKPOINT`, and the start of `kda-jax`, without JAX.

The command's parser serves other commands too.
"""

import argparse
import contextlib
import json
import os
import re
import sys
from typing import Any

from kda_contracts.checkpoint import check_checkpoint
from kda_contracts.judge import ContractError
from kda_contracts.safetensors_header import BadFileError
from kda_contracts.version import __version__

# In JSON's ASCII: an escaped backslash, a pair of surrogates, or half of one.
PAIRS = re.compile(r"\\\\|\\ud[89ab]..\\ud[c-f]..|\\ud[89a-f]..")


def main(arguments=None):
    """Runs the command, and returns its exit code.

    It is 0, or 1 if a checkpoint breaks the contract, or 2 if it cannot be judged.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kda_contracts", description="The contract of Kimi Delta Attention."
    )
    parser.add_argument("--version", action="version", version=f"kda-contracts {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_check(commands)
    with unbroken():
        options = parse_command(parser, commands, arguments)
        return options.run(options)


def kda_jax(arguments=None):
    """Runs `kda-jax`, and returns its exit code.

    A check by headers is made here: JAX takes seconds to load. The rest is
    kda_jax's, which has to be installed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # "--v" is argparse's own short form of --values, and --help names that option too.
    elsewhere = any(x.startswith(("--v", "-h", "--h")) for x in arguments)
    if arguments[:1] == ["check"] and not elsewhere:
        parser = argparse.ArgumentParser(prog="kda-jax")
        commands = parser.add_subparsers(dest="command", required=True)
        add_check(commands)
        with unbroken():
            options = parse_command(parser, commands, arguments)
            return options.run(options)
    from kda_jax.tools.cli import main

    return main(arguments)


class _Unbroken:
    """A stream whose reader may leave (`| head -1`): what comes after is dropped."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        encoding = self.stream.encoding or "utf-8"
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            written = self.stream.write(shown)
            self.stream.flush()
        except BrokenPipeError:
            # Python flushes it again when it ends, and would complain then.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            return len(text)
        return written


def unbroken():
    """A context in which a command's output need not be read to its end: its exit code stands."""
    stream: Any = _Unbroken(sys.stdout)
    return contextlib.redirect_stdout(stream)


def parse_command(parser, commands, arguments=None):
    """`parser.parse_args`, but what nobody knows ends in the usage of the command that has it."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        shown = " ".join(x[:80] for x in unknown[:10])
        commands.choices[options.command].error(f"unrecognized arguments: {shown}")
    return options


def positive_number(text):
    """An option's whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a positive number")
    return number


def add_check(commands, by_values=None):
    """Adds the `check` command to a parser's commands, and returns its parser.

    `by_values(options)` gives the `CheckpointReport` of `--values`. None leaves that option out.
    """
    parser = commands.add_parser(
        "check", help="judge a checkpoint's KDA layers by its headers, before it is loaded"
    )
    parser.add_argument(
        "checkpoint", help="a safetensors file, or a folder of them, with its config.json"
    )
    parser.add_argument(
        "--tp",
        type=positive_number,
        default=1,
        help="tensor-parallel ranks to split the heads over (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if by_values:
        parser.add_argument(
            "--values",
            action="store_true",
            help="read every weight of those layers: all must be finite",
        )
    parser.set_defaults(run=_check, values=False, by_values=by_values)
    return parser


def _json(table):
    """JSON that every parser takes: half of a pair of surrogates, as a name may have, is none."""

    def mended(match):
        return "\\ufffd" if len(match[0]) == 6 else match[0]

    return PAIRS.sub(mended, json.dumps(table, allow_nan=False, default=vars))


def _by_headers(options):
    return check_checkpoint(options.checkpoint, tp=options.tp)


def _check(options):
    judge = options.by_values if options.values else _by_headers
    try:
        report = judge(options)
    except (BadFileError, ContractError, ImportError) as error:
        if options.json:
            print(_json({"ok": False, "error": str(error)}))
        else:
            print(f"cannot be judged: {error}", file=sys.stderr)
        return 2
    print(_json(vars(report) | {"ok": report.ok}) if options.json else report)
    return 0 if report.ok else 1
