"""``check_backend``: everything a backend owes, checked against the float64 oracle, and failures made small.

Cases come from the grid, from variations of it, and from a seeded generator of mixed features. Each runs within a time
limit; a crash, a hang, a wrong form or a written-to argument is a finding like a wrong number. The first failure of each
check is reduced to the smallest input that still fails.
"""

from __future__ import annotations

import inspect
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from specops.ops.backends import _BACKENDS, FEATURES, Backend, Capabilities, Family, backends, get_backend, register_backend
from specops.testing.backend_checks import JUDGES, Judge
from specops.testing.cases import make_mha_case, make_mla_case
from specops.testing.gpu_checks import GPU_JUDGES
from specops.testing.grids import grid
from specops.testing.report import Finding, Report, called, code, one_line
from specops.testing.shrink import shrink, simpler_arguments
from specops.testing.subject import Subject
from specops.testing.timed import Hung, run_within

Progress = Callable[[str, int, int], None]
Case = tuple[str, str, dict[str, Any]]

_HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
_names = itertools.count(1)

# Beyond the grid: what only shows at more requests, more keys, larger scores.
EXTRA: dict[str, dict[str, Any]] = {
    "nine-requests": {"seq_lens": tuple(range(3, 30, 3)), "query_lens": 2},
    "one-request": {"seq_lens": (21,), "query_lens": 4},
    "large-scores": {"gain": 30.0, "query_lens": 3},
    "other-scale": {"scale": 0.7, "query_lens": 2},
    "page-of-128": {"page_size": 128, "seq_lens": (130, 257, 5), "query_lens": 2},
    "a-thousand-keys": {"seq_lens": (1000, 1500), "query_lens": 4, "page_size": 16, "dtype": torch.bfloat16},
}
DTYPE_CASES = ("verify-block", "packed", "tree", "sinks-window-softcap", "uneven-lengths", "last-partial-page")
SEQUENCES: dict[str, dict[str, Any]] = {
    "uniform": {"seq_lens": (9, 13, 20), "query_lens": 3},
    "packed": {"seq_lens": (9, 13, 25), "query_lens": (1, 6, 3)},
    "window": {"seq_lens": (19, 8), "query_lens": 2, "window": 5},
    "tree": {"seq_lens": (12, 16), "query_lens": 6, "tree_width": 6},
}
POISONED: dict[str, dict[str, Any]] = {
    "uniform": {"seq_lens": (5, 0, 9, 0), "query_lens": 3},
    "packed": {"seq_lens": (5, 13, 9), "query_lens": (1, 4, 2)},
    "tree": {"seq_lens": (9, 0, 13), "query_lens": 6, "tree_width": 6},
    "window": {"seq_lens": (21, 13), "query_lens": 2, "window": 4},
    "fp8": {"seq_lens": (5, 0, 9), "query_lens": 2, "fp8": True},
}
VIEWED: dict[str, dict[str, Any]] = {
    "uniform": {"query_lens": 3},
    "packed": {"query_lens": (1, 4)},
    "sinks": {"query_lens": 2, "sinks": True},
    "tree": {"query_lens": 6, "tree_width": 6, "strided_q": True},
}
SHARED: dict[str, dict[str, Any]] = {
    "uniform": {"seq_lens": (21, 17, 30), "query_lens": 3},
    "twins": {"seq_lens": (21, 21), "query_lens": 4},
}
# Each optional argument alone and all that go together; small, since each case is traced.
TRACED: dict[str, dict[str, Any]] = {
    "uniform": {"query_lens": 3},
    "packed": {"query_lens": (3, 2)},
    "window": {"query_lens": 2, "window": 3},
    "softcap": {"query_lens": (1, 2), "softcap": 2.0},
    "sinks": {"query_lens": 2, "sinks": True},
    "tree": {"query_lens": 3, "tree_width": 3},
    "fp8": {"query_lens": 2, "fp8": True},
    "sinks-window-softcap": {"query_lens": 2, "window": 6, "softcap": 3.0, "sinks": True, "strided_q": True},
    "wide-tree-window": {"query_lens": 2, "tree_width": 4, "window": 6, "strided_q": True},
}
COMPILED = ("uniform", "wide-tree-window")


def check_backend(
    backend: str | Callable[..., Tensor],
    *,
    family: Family | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    examples: int = 40,
    time_limit: float = 60.0,
    only: Iterable[str] | None = None,
    large_pool: bool | None = None,
    first_only: bool = False,
    shrink_seconds: float = 10.0,
    progress: Progress | None = None,
    **capabilities: Any,
) -> Report:
    """Check an attention backend against its contract (docs/conformance.md).

    Args:
        backend: name of a registered backend, or a function with a backend's signature.
        family: ``"mha"`` or ``"mla"``; by default that of the name, MHA where both exist or for a function.
        device: where to check; by default the first device type the backend declares that is here.
        seed: of the generated mixes of features.
        examples: how many of those.
        time_limit: seconds one case may take; the first call of a kernel may include its compilation.
        only: names of the checks to run, all by default.
        large_pool: also check a pool of more than 2^31 elements; by default on a GPU only. On a CPU its memory is
            reserved and not touched, unless the backend touches it.
        first_only: stop at the first failure.
        shrink_seconds: how long a failure may be made smaller; 0 leaves it as it is.
        progress: called with (check, done, total) after each case.
        **capabilities: for a function, what it declares: fields of :class:`specops.ops.Capabilities`, as for
            :func:`specops.ops.register_backend`. Default: every feature, every size, on the CPU or ``device``.

    Returns:
        The report; ``raise_if_failed()`` turns it into an exception.

    Raises:
        ValueError: no such backend, an unknown check, or a device that is not here.
    """
    subject, origin, forget = _subject(backend, family, device, capabilities)
    report = Report(subject.backend.op_name if isinstance(backend, str) else origin, str(subject.device))
    judges: dict[str, Judge] = {**JUDGES, **GPU_JUDGES}
    wanted = set(judges) if only is None else set(only)
    if wanted - set(judges):
        raise ValueError(f"unknown checks {sorted(wanted - set(judges))}; there are {', '.join(judges)}")
    large_pool = subject.device.type == "cuda" if large_pool is None else large_pool
    cases = [case for case in _cases(subject, seed, examples, large_pool) if case[0] in wanted]
    started = time.monotonic()
    seen: set[str] = set()
    try:
        for done, (check, name, arguments) in enumerate(cases, 1):
            fitted, reasons = subject.fit(arguments)
            key = f"{check} {fitted}"
            if fitted is None:
                for reason in reasons:
                    report.skip(reason)
            elif key not in seen:
                seen.add(key)
                _run(report, subject, judges[check], (check, name, fitted), time_limit, shrink_seconds, origin)
            if progress is not None:
                progress(check, done, len(cases))
            if report.stopped is not None or (first_only and report.failed):
                break
    finally:
        forget()
    report.seconds = time.monotonic() - started
    return report


def replay(backend: str | Callable[..., Tensor], family: Family, check: str, **arguments: Any) -> None:
    """Run one case of one check again, as a finding's snippet does.

    Raises:
        AssertionError: the problem, if there is one still.
    """
    device = arguments.pop("device", None)
    subject, _, forget = _subject(backend, family, device, {})
    try:
        fitted, reasons = subject.fit(arguments)
        if fitted is None:
            raise ValueError(f"{subject.backend.op_name} does not take this: {', '.join(reasons)}")
        problem = {**JUDGES, **GPU_JUDGES}[check](subject, fitted)
    finally:
        forget()
    if problem is not None:
        raise AssertionError(f"{check}: {problem}")


def _run(
    report: Report, subject: Subject, judge: Judge, case: Case, limit: float, shrink_seconds: float, origin: str
) -> None:
    """Judge one case and enter what comes of it."""
    check, name, arguments = case
    report.checks[check] = report.checks.get(check, 0) + 1
    problem, fatal = _judge(subject, judge, arguments, limit)
    if problem is None:
        return
    report.failed += 1
    known = report.finding(check)
    if fatal:
        report.stopped = problem
    if known is not None:
        known.also.append(name)
        return
    if shrink_seconds and not fatal:
        arguments = _smallest(subject, judge, arguments, limit, shrink_seconds)
        problem = _judge(subject, judge, arguments, limit)[0] or problem
    report.findings.append(Finding(check, problem, name, _snippet(subject, check, arguments, origin)))


def _judge(subject: Subject, judge: Judge, arguments: dict[str, Any], limit: float) -> tuple[str | None, bool]:
    """The problem, if any, and whether nothing can be checked after it."""
    try:
        return run_within(limit, lambda: judge(subject, arguments)), False
    except Hung as hung:
        return f"the call hangs: {hung}", True
    except torch.OutOfMemoryError as error:
        return f"out of device memory: {one_line(error)}", False
    except Exception as error:
        return one_line(error), "CUDA error" in str(error)


def _smallest(subject: Subject, judge: Judge, arguments: dict[str, Any], limit: float, seconds: float) -> dict[str, Any]:
    def fails(candidate: dict[str, Any]) -> bool:
        # A candidate must be declared as it stands, and be a case at all.
        if subject.fit(candidate)[0] != candidate:
            return False
        try:
            subject.make(candidate)
        except Exception:
            return False
        return _judge(subject, judge, candidate, limit)[0] is not None

    return shrink(arguments, simpler_arguments, fails, seconds)


def _snippet(subject: Subject, check: str, arguments: dict[str, Any], origin: str) -> str:
    make = make_mha_case if subject.family == "mha" else make_mla_case
    defaults = {name: parameter.default for name, parameter in inspect.signature(make).parameters.items()}
    shown = {name: value for name, value in arguments.items() if value != defaults[name]}
    if subject.device.type != "cpu":
        shown["device"] = str(subject.device)
    given = "".join(f", {name}={code(value)}" for name, value in shown.items())
    lines = ["import torch"] if "torch." in given else []
    lines.append("from specops.testing import replay")
    lines.append(f'replay({origin}, "{subject.family}", "{check}"{given})')
    return "\n".join(lines)


def _subject(
    backend: str | Callable[..., Tensor],
    family: Family | None,
    device: torch.device | str | None,
    capabilities: dict[str, Any],
) -> tuple[Subject, str, Callable[[], None]]:
    """The subject, how a snippet calls it, and what takes a function out of the table again."""
    if isinstance(backend, str):
        if capabilities:
            raise ValueError(f"{backend!r} has declared its capabilities already; got {sorted(capabilities)} here")
        if family is None:
            known = [b.family for b in backends() if b.name == backend]
            family = "mla" if known == ["mla"] else "mha"
        found = get_backend(backend, family)
        return Subject(found, _device(found.capabilities, device)), repr(backend), lambda: None
    family = family or "mha"
    kind = torch.device(device or "cpu").type
    declared = {"device_types": (kind,), "features": FEATURES, "source": "under test", **capabilities}
    name = f"under_test_{next(_names)}"
    register_backend(name, family=family, **declared)(backend)
    found = get_backend(name, family)
    origin = called(backend)
    return Subject(found, _device(found.capabilities, device)), origin, lambda: _forget(found)


def _forget(backend: Backend) -> None:
    _BACKENDS.pop((backend.family, backend.name), None)


def _device(capabilities: Capabilities, asked: torch.device | str | None) -> torch.device:
    if asked is not None:
        return torch.device(asked)
    kinds = {kind for limits in (capabilities, *capabilities.also) for kind in limits.all_device_types}
    if torch.cuda.is_available() and kinds & {"cuda", "hip"}:
        return torch.device("cuda")
    if "cpu" in kinds:
        return torch.device("cpu")
    raise ValueError(f"the backend runs on {', '.join(sorted(kinds))}, and none of them is here")


def _cases(subject: Subject, seed: int, examples: int, large_pool: bool) -> Iterator[Case]:
    """Every case, cheap and telling ones first."""
    family = subject.family
    for name, arguments in (*grid(family), *EXTRA.items()):
        yield "values", name, arguments
    named = dict(grid(family))
    for name in DTYPE_CASES:
        for dtype in _HALF:
            yield "dtypes", f"{name}-{str(dtype).removeprefix('torch.')}", {**named[name], "dtype": dtype}
    for check, arguments_of in (("stale", SEQUENCES), ("poison", POISONED), ("views", VIEWED), ("shared-pages", SHARED)):
        for name, arguments in arguments_of.items():
            yield check, name, arguments
    yield "leak", "uniform", {"query_lens": 2}
    draw = random.Random(seed)
    for number in range(examples):
        yield "fuzz", f"example-{number}", subject.within(random_arguments(draw, family))
    for name, arguments in TRACED.items():
        yield "opcheck", name, arguments
    for name in COMPILED:
        yield "compiled", name, TRACED[name]
    if large_pool:
        fp8 = {"fp8": True} if "fp8_kv" in subject.backend.capabilities.features else {"dtype": torch.bfloat16}
        for name in ("uniform", "packed"):
            yield "large-pool", name, {**TRACED[name], "page_size": 16, "seq_lens": (20, 7), **fp8}
    if subject.device.type == "cuda":
        if subject.backend.capabilities.graph_safe:
            for check in ("graph", "two-graphs"):
                for name, arguments in SEQUENCES.items():
                    yield check, name, arguments
        yield "streams", "uniform", {"seq_lens": (900, 1300), "query_lens": 4, "page_size": 16}


def random_arguments(draw: random.Random, family: str) -> dict[str, Any]:
    """Arguments of a case with any mix of features; small, so that many can run."""
    batch = draw.randint(1, 4)
    arguments: dict[str, Any] = {
        "seq_lens": tuple(draw.choice((0, 1, draw.randint(2, 12), draw.randint(2, 40))) for _ in range(batch)),
        "page_size": draw.choice((1, 2, 4, 16, 32)),
        "seed": draw.randrange(1000),
    }
    if draw.random() < 0.6:
        arguments["query_lens"] = draw.randint(1, 9)
        if draw.random() < 0.4:
            arguments["tree_width"] = arguments["query_lens"] + draw.choice((0, 0, 1, 5))
    else:
        arguments["query_lens"] = tuple(draw.randint(0, 9) for _ in range(batch))
        arguments["slack"] = draw.randint(0, 2)
    for name, value in (("window", draw.randint(1, 45)), ("softcap", draw.uniform(0.5, 30)), ("sinks", True), ("fp8", True)):
        if draw.random() < 0.3:
            arguments[name] = value
    arguments["strided_q"] = draw.random() < 0.5
    if family == "mha":
        kv_heads = draw.randint(1, 3)
        arguments |= {
            "num_kv_heads": kv_heads,
            "num_heads": kv_heads * draw.randint(1, 7),
            "head_dim": draw.choice((16, 32, 64)),
            "hnd": draw.random() < 0.3,
        }
    else:
        arguments |= {"num_heads": draw.randint(1, 5), "latent_dim": draw.choice((16, 32)), "rope_dim": draw.choice((8, 16))}
    return arguments
