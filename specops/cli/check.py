"""Run the conformance kit: every backend this machine can run, against the float64 oracle."""

from __future__ import annotations

import argparse
import importlib
import importlib.util


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to python -m specops.testing")


def run(args: argparse.Namespace) -> int:
    # The kit has a command line of its own; importing it brings all of its cases, so it waits until it is asked for.
    kit = importlib.import_module("specops.testing.__main__")
    passed_on = [*(["--json"] if args.json else []), *args.arguments]
    result: int | None = kit.main(passed_on)
    return result or 0
