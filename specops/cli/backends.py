"""What this machine can run, and the reason where it can't."""

from __future__ import annotations

import argparse
import json

from specops.cli.common import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=None, help="cuda or cpu (default: a GPU where there is one)")


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from specops.ops.inventory import inventory

    found = inventory(args.device)
    if args.json:
        print(json.dumps([asdict(info) for info in found]))
        return 0
    print_table(
        [("backend", "family", "available", "auto", "kernels", "why not")]
        + [(info.name, info.family, _yes(info.available), _yes(info.auto), info.source, info.reason or "") for info in found]
    )
    return 0


def _yes(value: bool) -> str:
    return "yes" if value else "no"
