"""Say what a checkpoint folder holds, and whether it fits a target, without loading it."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="folder of a draft head or a model, a .gguf file, or smollm2")
    parser.add_argument("--target", default=None, help="what it should fit: a model's folder, a .gguf file, or smollm2")


def run(args: argparse.Namespace) -> int:
    from specops.models.inspect import inspect_directory

    report = inspect_directory(args.path, args.target)
    print(json.dumps(report.to_dict()) if args.json else report.text())
    return 0 if report.ok else 1
