"""The ``specops`` command. Each command is a module of this package with ``add_arguments(parser)`` and ``run(args)``.

The first line of a module's docstring is its help. Results go to standard output (``--json`` for machines), progress and
complaints to standard error. Exit codes: 0 done, 1 done in part or a check failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from specops.cli.common import world_size

COMMANDS = ("demo", "generate", "bench", "trace", "check", "inspect", "backends")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what went wrong is told in one line on standard error."""
    parser = _parser()
    args, more = parser.parse_known_args(argv)
    if more and not args.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    args.more = more
    try:
        if args.name != "generate" and world_size() > 1:
            raise ValueError(f"{args.name} runs in one process; of all commands torchrun starts generate alone")
        result: int = args.run(args)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader has gone; what was still to be printed goes nowhere, without a second complaint at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"specops: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        advice = out_of_memory_advice(error)
        if advice is None:
            raise
        print(f"specops: {advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specops: interrupted", file=sys.stderr)
        return 130
    return result


def out_of_memory_advice(error: BaseException) -> str | None:
    """What to lower when memory has run out; None for any other error."""
    first = (str(error).splitlines() or [""])[0]
    # torch raises OutOfMemoryError on a GPU and a plain RuntimeError from its CPU allocator.
    if type(error).__name__ != "OutOfMemoryError" and not isinstance(error, MemoryError) and "allocate memory" not in first:
        return None
    return (
        "out of memory. The page pool grows with --max-requests times --max-context: lower those first, then "
        "--num-draft-tokens; --dtype bfloat16 halves weights and pages of float32, and a run without a draft (--plain) "
        f"needs least. The allocator said: {first or type(error).__name__}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specops", description="Attention backends for speculative decoding as torch ops.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name in COMMANDS:
        module = importlib.import_module(f"specops.cli.{name}")
        text = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.set_defaults(run=module.run, name=name, takes_more=False)
        module.add_arguments(command)
    return parser
