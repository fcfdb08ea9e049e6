"""The checks of a backend: each judges one set of case arguments and says in words what is wrong, or None.

A check derives whatever it needs (a poisoned copy, a sequence of calls, a compiled step) from the same arguments, so that a
failure of any check can be made smaller in the same way. Every expected value is the float64 oracle's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.backends import FP8
from specops.testing import poisons
from specops.testing.cases import AttentionCase
from specops.testing.report import one_line
from specops.testing.subject import Subject

Judge = Callable[[Subject, Mapping[str, Any]], "str | None"]


def values(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """One call: its form, its side effects, its values, NaN in all memory that nobody owns.

    A backend that plans on the host sees there that a page table is too short, and may refuse it.
    """
    case = subject.make(arguments)
    problem = _judged(subject, case)
    if problem is not None and subject.backend.plan is not None and "table_columns" in arguments:
        table, page_size = case.tensors["page_table"], _cache(case).shape[1]
        too_short = int(case.tensors["seq_lens"].max()) > table.shape[1] * page_size
        if too_short and problem.startswith("the call raised ValueError"):
            return None
    return problem


def poison(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """The same call with other poisons, padded query rows of NaN and page ids that no pool has."""
    for name, fill in poisons.FILLS.items():
        case = subject.make(arguments)
        if name == "inf" and any(tensor.dtype == FP8 for tensor in case.args()):
            continue
        poisons.poison_caches(case, fill)
        poisons.poison_padded_queries(case)
        problem = _judged(subject, case)
        if problem is not None:
            return f"with {name} in memory of nobody: {problem}"
    for name, page in poisons.SENTINELS.items():
        case = subject.make(arguments)
        poisons.poison_table(case, page)
        problem = _judged(subject, case)
        if problem is not None:
            return f"with page id {name} behind the live pages: {problem}"
    return None


def views(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """Index tensors, mask and sinks as views into larger ones."""
    case = subject.make(arguments)
    table = case.tensors["page_table"]
    wide = torch.full((table.shape[0], table.shape[1] + 5), -1, dtype=table.dtype, device=table.device)
    wide[:, : table.shape[1]] = table
    case.tensors["page_table"] = wide[:, : table.shape[1]]
    case.tensors["seq_lens"] = _every_second(case.tensors["seq_lens"], 99)
    for name in ("sinks", "tree_mask"):
        if name in case.options:
            case.options[name] = _every_second(case.options[name], 1)
    return _judged(subject, case)


def shared_pages(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """Requests that share the pages of a common prefix, as a prefix cache makes them."""
    case = subject.make(arguments)
    table, lens = case.tensors["page_table"], case.tensors["seq_lens"].tolist()
    page_size = _cache(case).shape[1]
    whole = (min(lens) - 1) // page_size
    table[:, :whole] = table[:1, :whole].clone()
    return _judged(subject, case)


def stale(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """Calls over the same buffers, whose contents change in between: lengths go down, then up, pages move.

    This is what the replays of a captured graph see. Whatever a backend keeps from an earlier call is stale.
    """
    buffers, cases = resident(subject, arguments)
    before: list[tuple[Tensor, Tensor]] = []
    for step, case in enumerate(cases):
        overwrite(buffers, case)
        out, problem = subject.observe(buffers)
        if problem is None:
            assert out is not None
            problem = subject.compare(out, case.oracle())
        if problem is not None:
            return f"call {step + 1} over the same buffers, seq_lens {case.tensors['seq_lens'].tolist()}: {problem}"
        assert out is not None
        for earlier, copy in before:
            if not torch.equal(earlier.nan_to_num(), copy.nan_to_num()):
                return f"call {step + 1} changed the result of an earlier call"
        before.append((out, out.clone()))
    return None


def leak(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """Repeated calls leave no tensor behind."""
    case, calls = subject.make(arguments), 8
    for _ in range(3):
        case.run(subject.name)
    before, held = live_tensors(), _allocated(subject)
    for _ in range(calls):
        case.run(subject.name)
    after = live_tensors()
    if after - before >= calls:
        return f"{calls} equal calls left {after - before} tensors behind"
    if subject.device.type == "cuda" and _allocated(subject) - held >= calls * 512:
        return f"{calls} equal calls left {_allocated(subject) - held} bytes of device memory behind"
    return None


def compiled(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """One compiled graph with a dynamic batch serves a growing and a shrinking batch; on a GPU as CUDA graphs."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    cuda = subject.device.type == "cuda" and subject.backend.capabilities.graph_safe
    cuda = cuda and not subject.backend.capabilities.needs_plan
    options: dict[str, Any] = {"mode": "reduce-overhead"} if cuda else {"backend": "aot_eager"}
    lens = tuple(arguments["seq_lens"])
    first = subject.make({**arguments, "seq_lens": lens})

    def step(tensors: list[Tensor], given: dict[str, Any]) -> Tensor:
        case = AttentionCase(first.family, dict(zip(first.tensors, tensors, strict=True)), first.layout, first.scale, given)
        return case.run(subject.name)

    call = torch.compile(step, fullgraph=True, dynamic=None if cuda else True, **options)
    batches = (lens,) * 3 if cuda else (lens, (*lens, *lens), lens)
    for number, batch in enumerate(batches):
        case = subject.make({**arguments, "seq_lens": batch, "seed": number})
        try:
            with torch.no_grad():
                out = call(list(case.args()), case.options)
        except Exception as error:
            return f"under torch.compile(fullgraph=True): {one_line(error)}"
        problem = subject.compare(out, case.oracle())
        if problem is not None:
            return f"under torch.compile, batch {number + 1}: {problem}"
    if counters["inductor"]["cudagraph_skips"]:
        return f"{counters['inductor']['cudagraph_skips']} CUDA graphs were skipped under reduce-overhead"
    return None


def opcheck(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """torch.library.opcheck of the op: schema, fake kernel, dispatch; and the fake's strides against the real ones."""
    args, options = subject.make({**arguments, "poison": False}).op_args()
    op = getattr(torch.ops.specops, subject.backend.op_name).default
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if all(tensor.dtype != FP8 for tensor in args if isinstance(tensor, Tensor)):
        # The schema test compares arguments by value, which fp8 tensors can't do; observe() covers those.
        tests.append("test_schema")
    try:
        torch.library.opcheck(op, args, options, test_utils=tests)
    except Exception as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        return f"opcheck: {type(error).__name__}: {reason}"
    return None


def large_pool(subject: Subject, arguments: Mapping[str, Any]) -> str | None:
    """Pages behind 2^31 elements. The pool is allocated and never touched, so on a CPU it takes no memory."""
    case = subject.make(arguments)
    for name in ("k_cache", "kv_cache"):
        if name not in case.tensors:
            continue
        small = case.tensors[name]
        num_pages = 2**31 // small[0].numel() + small.shape[0] + 1
        shift = num_pages - small.shape[0]
        pool = torch.empty((num_pages, *small.shape[1:]), dtype=small.dtype, device=subject.device)
        pool[shift:].view(torch.uint8).copy_(small.contiguous().view(torch.uint8))
        pool[0].zero_()
        case.tensors[name] = pool
        if name == "k_cache":
            case.tensors["v_cache"] = pool
        live = case.tensors["page_table"] > 0
        case.tensors["page_table"] = torch.where(live, case.tensors["page_table"] + shift, 0)
    out = case.run(subject.name)
    return subject.compare(out, case.oracle())


JUDGES: dict[str, Judge] = {
    "values": values,
    "fuzz": values,
    "dtypes": values,
    "stale": stale,
    "poison": poison,
    "views": views,
    "shared-pages": shared_pages,
    "leak": leak,
    "opcheck": opcheck,
    "compiled": compiled,
    "large-pool": large_pool,
}


def _judged(subject: Subject, case: AttentionCase) -> str | None:
    out, problem = subject.observe(case)
    if problem is None:
        assert out is not None
        problem = subject.compare(out, case.oracle())
    return problem


def _cache(case: AttentionCase) -> Tensor:
    return next(tensor for name, tensor in case.tensors.items() if name.endswith("cache"))


def _every_second(tensor: Tensor, between: int) -> Tensor:
    """Equal values at every second place of a tensor twice as long."""
    spread = torch.full((2 * tensor.shape[0], *tensor.shape[1:]), between, dtype=tensor.dtype, device=tensor.device)
    spread[::2] = tensor
    return spread[::2]


def resident_cases(subject: Subject, arguments: Mapping[str, Any]) -> list[AttentionCase]:
    """The same batch at lengths that shrink, grow again, and are longer than at first.

    The shortest is one key a request, or one a row where the backend does not declare requests with fewer keys than rows.
    """
    lens, rows = [int(length) for length in arguments["seq_lens"]], arguments["query_lens"]
    steps = ([max(1, n // 2) for n in lens], lens, [1] * len(lens), [2 * n + 3 for n in lens], lens[::-1])
    widths: list[Any] = [rows] * len(steps)
    if not isinstance(rows, int):
        # All rows to one request: a grid or a tile that was sized by the first call is too small for that.
        alone = (*[0] * (len(rows) - 1), sum(rows))
        widths = [tuple(sorted(rows)), rows, rows[::-1], alone, rows]
    asked = (
        {**arguments, "seq_lens": step, "query_lens": width, "seed": seed}
        for seed, (step, width) in enumerate(zip(steps, widths, strict=True))
    )
    return [subject.make({**one, "seq_lens": subject.declared_lens(one)}) for one in asked]


def resident(subject: Subject, arguments: Mapping[str, Any]) -> tuple[AttentionCase, list[AttentionCase]]:
    """One case whose buffers hold any of the cases, and the cases."""
    cases = resident_cases(subject, arguments)
    largest = max(cases, key=lambda case: _cache(case).shape[0])
    widest = max(case.tensors["page_table"].shape[1] for case in cases)
    tensors = {name: tensor.clone() for name, tensor in largest.tensors.items()}
    table = tensors["page_table"]
    tensors["page_table"] = torch.zeros((table.shape[0], widest), dtype=table.dtype, device=table.device)
    layout = largest.layout
    if layout.query_start is not None:
        width = max(case.layout.max_query_len for case in cases)
        layout = QueryLayout.packed(layout.query_start.clone(), width)
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in largest.options.items()}
    return AttentionCase(largest.family, tensors, layout, largest.scale, options), cases


def overwrite(resident: AttentionCase, case: AttentionCase) -> None:
    """Copy a case into the resident buffers; what it does not fill is NaN or page 0."""
    for name, tensor in case.tensors.items():
        buffer = resident.tensors[name]
        if name.endswith("cache"):
            nan = torch.full((1,), float("nan"), device=buffer.device).to(buffer.dtype)
            buffer.view(torch.uint8).copy_(nan.expand(buffer.shape).contiguous().view(torch.uint8))
            buffer[: tensor.shape[0]].copy_(tensor)
        elif name == "page_table":
            buffer.zero_()
            buffer[:, : tensor.shape[1]] = tensor
        else:
            buffer.copy_(tensor)
    for name, option in case.options.items():
        if isinstance(option, Tensor):
            resident.options[name].copy_(option)
    if case.layout.query_start is not None:
        assert resident.layout.query_start is not None
        resident.layout.query_start.copy_(case.layout.query_start)


def live_tensors() -> int:
    """How many tensors this process has."""
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


def _allocated(subject: Subject) -> int:
    return torch.cuda.memory_allocated(subject.device) if subject.device.type == "cuda" else 0
