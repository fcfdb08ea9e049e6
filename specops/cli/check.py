"""Run the conformance kit: backends and runners against the float64 oracle.

Without ``--backend`` or ``--runner`` it checks every backend that this machine can run. Other options are passed on as
they are, so that this is ``python -m specops.testing`` under another name.
"""

from __future__ import annotations

import argparse
import importlib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Further options are those of python -m specops.testing, such as --backend NAME, --runner MODE and --device "
        "DEVICE. Without a backend or a runner, every backend that this machine can run is checked."
    )
    parser.set_defaults(takes_more=True)


def run(args: argparse.Namespace) -> int:
    # The kit has a command line of its own; importing it brings all of its cases, so it waits until it is asked for.
    kit = importlib.import_module("specops.testing.__main__")
    given: list[str] = args.more
    if not any(word.split("=")[0] in ("--backend", "--runner", "-h", "--help") for word in given):
        from specops.ops.inventory import inventory

        names = dict.fromkeys(info.name for info in inventory(_device(given)) if info.available)
        given = [*given, *(word for name in names for word in ("--backend", name))]
    result: int | None = kit.main([*(["--json"] if args.json else []), *given])
    return result or 0


def _device(given: list[str]) -> str | None:
    """The value of ``--device`` among the options for the kit."""
    for place, word in enumerate(given):
        if word.startswith("--device="):
            return word.partition("=")[2]
        if word == "--device" and place + 1 < len(given):
            return given[place + 1]
    return None
