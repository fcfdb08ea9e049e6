"""``python -m specops.testing``: check backends and runners, print a report, and exit with 1 if anything failed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specops.ops.backends import backends
from specops.testing.check import check_backend
from specops.testing.isolated import Job, run_jobs
from specops.testing.report import Report
from specops.testing.runner_check import check_runner


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all checks passed, 1 if one failed, 2 for bad input, told in one line on standard error."""
    args = _parser().parse_args(argv)
    try:
        for module in args.imports:
            _import(module)
        reports = run_jobs(_jobs(args), None if args.quiet else _Watch(), 2 * args.time_limit + 60)
    except (ValueError, ImportError) as error:
        print(f"specops.testing: {error}", file=sys.stderr)
        return 2
    failed = sum(report.failed for report in reports)
    if args.json:
        print(json.dumps(_totals(reports)))
    else:
        print("\n\n".join(map(str, reports)))
    return 0 if all(report.ok for report in reports) and not failed else 1


def _totals(reports: list[Report]) -> dict[str, Any]:
    plain = [report.as_dict() for report in reports]
    return {
        "checks": sum(report["checks"] for report in plain),
        "failed": sum(report["failed"] for report in plain),
        "ok": all(report.ok for report in reports),
        "seconds": round(sum(report["seconds"] for report in plain), 2),
        "subjects": plain,
    }


def _jobs(args: argparse.Namespace) -> list[Job]:
    only = args.only.split(",") if args.only else None
    common: dict[str, Any] = {"device": args.device, "time_limit": args.time_limit, "only": only}
    jobs: list[Job] = []
    for name in args.backend:
        families = [b.family for b in backends() if b.name == name and args.family in (None, b.family)]
        if not families:
            known = ", ".join(dict.fromkeys(b.name for b in backends()))
            raise ValueError(f"no {args.family or ''} backend is called {name!r}; there are {known}".replace("  ", " "))
        for family in families:
            options = {"family": family, "seed": args.seed, "examples": args.examples, "large_pool": args.large_pool}
            jobs.append((f"{name}_{family}", partial(_backend, name, {**common, **options})))
    for name in args.runner:
        runner = name
        if ":" in name:
            module, function = name.split(":")
            runner = getattr(importlib.import_module(module), function)
        jobs.append((f"runner {name}", partial(_runner, runner, common)))
    if not jobs:
        raise ValueError("nothing to check: pass --backend NAME or --runner MODE")
    return jobs


def _backend(name: str, options: dict[str, Any], progress: Any) -> Report:
    torch.set_num_threads(1)
    return check_backend(name, progress=progress, **options)


def _runner(runner: Any, options: dict[str, Any], progress: Any) -> Report:
    torch.set_num_threads(1)
    return check_runner(runner, progress=progress, **options)


class _Watch:
    """Progress on standard error: a line whenever a new check begins, and every ten seconds."""

    def __init__(self) -> None:
        self.last = ("", "", 0.0)

    def __call__(self, subject: str, check: str, done: int, total: int) -> None:
        now = time.monotonic()
        if (subject, check) != self.last[:2] or now - self.last[2] > 10:
            self.last = (subject, check, now)
            print(f"  {subject}: {check} ({done}/{total})", file=sys.stderr, flush=True)


def _import(module: str) -> None:
    """Import a module by name, or a file by its path, so that it registers its backend."""
    if not module.endswith(".py"):
        importlib.import_module(module)
        return
    path = Path(module)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"there is no file {module}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specops.testing", description=__doc__)
    parser.add_argument("--backend", action="append", default=[], help="a registered attention backend; may be repeated")
    parser.add_argument("--runner", action="append", default=[], help="a mode of DraftExtendRunner, or module:factory")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], help="module or file that registers a backend"
    )
    parser.add_argument("--family", choices=("mha", "mla"), help="check this family only")
    parser.add_argument("--device", help="cpu or cuda (default: what the backend declares and is here)")
    parser.add_argument("--only", help="checks to run, separated by commas (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the generated cases (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=40, help="generated cases (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds one case may take (default: %(default)s)")
    parser.add_argument(
        "--large-pool", action=argparse.BooleanOptionalAction, help="check a pool beyond 2^31 elements (default: on GPUs)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
