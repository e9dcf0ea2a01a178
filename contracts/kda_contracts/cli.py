"""`python -m kda_contracts check CHECKPOINT`: the command, and its parser for whoever embeds it."""

import argparse
import dataclasses
import json
import sys

from kda_contracts.arrays import shape_text
from kda_contracts.checkpoint import CheckpointReport, check_checkpoint
from kda_contracts.safetensors_header import BadFileError, printable


def main(arguments=None):
    """Runs the command. The exit code is 0, 1 where a checkpoint breaks the contract, 2 where it cannot be judged."""
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
    print(
        json.dumps(dataclasses.asdict(report) | {"ok": report.ok}) if options.json else text(report)
    )
    return 0 if report.ok else 1


def text(report: CheckpointReport) -> str:
    """The report as the command prints it: a line a layer, then every fault with its remedy, then a rank's share."""
    sizes = ", ".join(
        f"{letter}={report.sizes[letter]}" for letter in ("H", "HV", "K", "V", "D", "W")
    )
    gate = (
        "softplus gate"
        if report.lower_bound is None
        else f"safe gate, lower_bound {report.lower_bound}"
    )
    lines = [
        f"{report.path}: {len(report.layers)} KDA layer{'s' * (len(report.layers) != 1)}, {sizes}, {gate}"
    ]
    for layer in report.layers:
        verdict = "ok" if not layer.faults else f"{len(layer.faults)} wrong"
        lines.append(
            f"  layer {layer.index:<4} {verdict:<8} {'; '.join((layer.layout, *layer.notes))}"
        )
    faults = [*report.faults, *(fault for layer in report.layers for fault in layer.faults)]
    for fault in faults:
        lines.append(f"  {fault.message}.")
        if fault.remedy:
            lines.append(f"      {fault.remedy}")
    if report.rank and not faults:
        lines.append(
            f"  each of {report.tp} ranks holds, a layer:" if report.tp > 1 else "  a layer holds:"
        )
        lines += [f"      {name:<16} {shape_text(shape)}" for name, shape in report.rank.items()]
    return "\n".join(map(printable, lines))
