"""Checks that need a GPU: captured graphs over changing lengths, two graphs in one memory pool, two streams at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specops.ops.planning import Plan, make_plan
from specops.testing.backend_checks import overwrite, resident
from specops.testing.cases import AttentionCase
from specops.testing.subject import Subject


def graph(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """One captured graph, replayed while lengths shrink and grow, equals the oracle each time."""
    buffers, cases = resident(subject, arguments)
    plan = _planned(subject, buffers)
    overwrite(buffers, cases[0])
    captured, out = _capture(subject, buffers, plan, None)
    for step, case in enumerate((*cases, *cases[::-1])):
        overwrite(buffers, case)
        _update(plan, buffers)
        captured.replay()
        torch.cuda.synchronize(subject.device)
        problem = subject.compare(out, case.oracle())
        if problem is not None:
            return f"replay {step + 1}, seq_lens {case.tensors['seq_lens'].tolist()}: {problem}"
    return None


def two_graphs(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """Two graphs in one memory pool, replayed in turn: neither reads what the other left."""
    pool = torch.cuda.graph_pool_handle()
    made = []
    for seed in (1, 2):
        case = subject.make({**arguments, "seed": seed})
        plan = _planned(subject, case)
        made.append((case, plan, *_capture(subject, case, plan, pool)))
    for case, plan, captured, out in (made[0], made[1], made[0]):
        _update(plan, case)
        captured.replay()
        torch.cuda.synchronize(subject.device)
        problem = subject.compare(out, case.oracle())
        if problem is not None:
            return f"after both were captured: {problem}"
    return None


def streams(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """Calls on two streams at once: scratch memory that they share would mix them up."""
    cases = [subject.make({**arguments, "seed": seed}) for seed in (1, 2)]
    lanes = [torch.cuda.Stream(subject.device) for _ in cases]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(subject.device)
    outs: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for lane, case, out in zip(lanes, cases, outs, strict=True):
            with torch.cuda.stream(lane):
                out.append(case.run(subject.name))
    torch.cuda.synchronize(subject.device)
    for case, out in zip(cases, outs, strict=True):
        expected = case.oracle()
        for result in out:
            problem = subject.compare(result, expected)
            if problem is not None:
                return f"on two streams at once: {problem}"
    return None


GPU_JUDGES = {"graph": graph, "two-graphs": two_graphs, "streams": streams}


def _planned(subject: Subject, case: AttentionCase) -> Plan | None:
    if not subject.backend.capabilities.needs_plan:
        return None
    cache = next(tensor for name, tensor in case.tensors.items() if name.endswith("cache"))
    plan = make_plan(
        subject.name,
        subject.backend.family,
        case.tensors["page_table"],
        case.layout,
        page_size=cache.shape[1],
        num_rows=case.args()[0].shape[0],
    )
    case.options["plan"] = plan.handle
    return plan


def _update(plan: Plan | None, case: AttentionCase) -> None:
    if plan is not None:
        plan.update(case.tensors["page_table"], case.tensors["seq_lens"], case.layout)


def _capture(subject: Subject, case: AttentionCase, plan: Plan | None, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    side = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.cuda.stream(side):
        _update(plan, case)
        for _ in range(2):
            case.run(subject.name)
    torch.cuda.current_stream(subject.device).wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, pool=pool):
        out = case.run(subject.name)
    return captured, out
