"""`python -m kda_contracts check CHECKPOINT`: the command, and its parser for other commands."""

import argparse
import dataclasses
import json
import sys

from kda_contracts.checkpoint import check_checkpoint
from kda_contracts.safetensors_header import BadFileError


def main(arguments=None):
    """Runs the command, and returns its exit code.

    It is 0, or 1 if a checkpoint breaks the contract, or 2 if it cannot be judged.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kda_contracts", description="The contract of Kimi Delta Attention."
    )
    add_check(parser.add_subparsers(dest="command", required=True))
    options = parser.parse_args(arguments)
    return options.run(options)


def add_check(commands, judge=None):
    """Adds the `check` command to a parser's commands, and returns its parser.

    `judge(options)` gives the `CheckpointReport`; None judges by headers alone.
    """
    parser = commands.add_parser(
        "check", help="judge a checkpoint's KDA layers by its headers, before it is loaded"
    )
    parser.add_argument(
        "checkpoint", help="a safetensors file, or a folder of them, with its config.json"
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        help="tensor-parallel ranks to split the heads over (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_check, judge=judge or _by_headers)
    return parser


def _by_headers(options):
    return check_checkpoint(options.checkpoint, tp=options.tp)


def _check(options):
    try:
        report = options.judge(options)
    except BadFileError as error:
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        else:
            print(f"cannot be judged: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dataclasses.asdict(report) | {"ok": report.ok}) if options.json else report)
    return 0 if report.ok else 1
