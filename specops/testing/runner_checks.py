"""The checks of a runner: sequences of batches, and what a sequence can't show.

Every check gets a :class:`RunnerSubject`, makes what it needs, and says in words what is wrong, or None.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specops.compile.report import compiled_graphs
from specops.testing.backend_checks import live_tensors
from specops.testing.runner_check import BUCKETS, MAX_REQUESTS, WIDTH, RunnerSubject, close, in_eager_mode, outputs, step
from specops.testing.shrink import Batches
from specops.testing.toy_draft import HIDDEN, VOCAB, expected_step, fill_history

# (seq_len, accept_len) of each request, seq_len with all rows. Widths are 6 while num_steps + 1 would be 4.
SEQUENCES: dict[str, Batches] = {
    "one-request": (((9, 1),), ((13, 6),)),
    "accept-lengths": (((14, 1), (20, 6), (9, 3)), ((14, 6), (20, 1), (9, 5), (30, 2))),
    "shrinking-batch": (
        ((63, 3), (63, 6), (63, 1), (63, 2)),
        ((30, 2), (12, 6), (41, 1)),
        ((25, 4), (50, 5)),
        ((9, 3),),
        ((7, 6), (8, 1)),
        ((33, 2), (6, 6), (60, 4)),
        ((64, 1), (10, 2), (20, 3), (31, 4)),
    ),
    "longer-than-at-first": (((6, 1), (6, 1)), ((17, 3), (40, 6)), ((95, 6), (7, 2))),
    "context-end": (((96, 6), (95, 2)),),
}


def small_pool(subject: RunnerSubject) -> str | None:
    """One live request and three padded ones over a pool that the request fills: padding needs no page and writes none."""
    draft = subject.draft(num_pages=5)
    runner = subject.make(draft, buckets=(4,))
    return step(draft, runner, subject.batch(((16, 3),), num_pages=5))


def idle(subject: RunnerSubject) -> str | None:
    """Warm-up and a batch of no request change no page; the empty batch has empty results; a request may join after."""
    draft = subject.draft()
    batch = subject.batch(((14, 2), (20, 5)))
    fill_history(draft, batch)
    before = [pages.clone() for pages in draft.pools()]
    runner = subject.make(draft)
    if not _same(before, draft.pools()):
        return "warm-up wrote to a page"
    logits, hidden = outputs(runner(subject.batch(())))
    if logits.shape != (0, VOCAB) or hidden.shape != (0, HIDDEN):
        return f"an empty batch gave shapes {tuple(logits.shape)} and {tuple(hidden.shape)}"
    if not _same(before, draft.pools()):
        return "an empty batch wrote to a page"
    return step(draft, runner, batch)


def every_size(subject: RunnerSubject) -> str | None:
    """Batches of 1 to the largest bucket: no warning, two compiled graphs at most, nothing run as Python code."""
    draft = subject.draft()
    graphs = compiled_graphs()
    runner = subject.make(draft)
    before = draft.eager_calls
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (2, 4, 1, 3, 2, 1, 4):
            problem = step(draft, runner, subject.batch(tuple((10 + 3 * i, 1 + i) for i in range(size)), seed=size))
            if problem is not None:
                return f"{size} requests: {problem}"
    if caught:
        return f"a batch within the buckets warned: {str(caught[0].message).splitlines()[0]}"
    if not in_eager_mode(runner) and draft.eager_calls > before:
        return f"{draft.eager_calls - before} of 7 batches within the buckets ran eagerly, and nothing said so"
    if compiled_graphs() - graphs > 2:
        return f"{compiled_graphs() - graphs} graphs were compiled for batches of 1 to {MAX_REQUESTS}; two serve them all"
    return None


def over_bucket(subject: RunnerSubject) -> str | None:
    """A batch above the largest bucket is an error, or runs with a warning and the right results."""
    draft = subject.draft()
    runner = subject.make(draft)
    batch = subject.batch(((12, 1), (20, 2), (30, 3), (9, 4), (15, 5)))
    fill_history(draft, batch)
    expected = expected_step(draft, batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            logits, hidden = outputs(runner(batch))
        except (ValueError, RuntimeError):
            return None
    if logits.shape != expected.logits.shape or not close(logits, expected.logits) or not close(hidden, expected.hidden):
        return f"5 requests over a largest bucket of {BUCKETS[-1]} gave wrong results"
    return (
        None
        if caught or in_eager_mode(runner)
        else f"5 requests over a largest bucket of {BUCKETS[-1]} lost the graph, and nothing said so"
    )


def widest(subject: RunnerSubject) -> str | None:
    """Buckets count requests: the largest one holds max_requests times the width in tokens, for a wide tree too."""
    wide = replace(subject, width=16)
    draft = wide.draft()
    runner = wide.make(draft)
    return step(draft, runner, wide.batch(tuple((20 + i, 16 - i) for i in range(MAX_REQUESTS))))


def results_survive(subject: RunnerSubject) -> str | None:
    """Results of a call are the same after later calls, in the same bucket and in another."""
    draft = subject.draft()
    runner = subject.make(draft)
    batch = subject.batch(((14, 1), (20, 6)))
    fill_history(draft, batch)
    first = outputs(runner(batch))
    kept = [tensor.clone() for tensor in first]
    for seed, requests in ((5, ((15, 2), (9, 2))), (6, ((15, 2), (9, 2), (8, 1)))):
        later = subject.batch(requests, seed=seed)
        fill_history(draft, later)
        runner(later)
        if not all(torch.equal(a, b) for a, b in zip(first, kept, strict=True)):
            return f"a later call of {len(requests)} requests changed the result of an earlier one"
    return None


def two_runners(subject: RunnerSubject) -> str | None:
    """Two runners, the first one called again after the second was captured and called."""
    one, other = subject.draft(seed=1), subject.draft(seed=2)
    first, second = subject.make(one), subject.make(other)
    for draft, runner, requests in (
        (one, first, ((14, 1), (20, 6), (9, 3))),
        (other, second, ((30, 2), (40, 2))),
        (one, first, ((17, 4), (6, 5), (31, 2))),
    ):
        problem = step(draft, runner, subject.batch(requests, seed=len(requests)))
        if problem is not None:
            return f"with a second runner in the process: {problem}"
    return None


def moved_cache(subject: RunnerSubject) -> str | None:
    """Caches at new addresses: the runner records again or raises, and never uses the old memory."""
    draft = subject.draft()
    runner = subject.make(draft)
    problem = step(draft, runner, subject.batch(((14, 2), (20, 5))))
    if problem is not None:
        return problem
    draft.allocate(130)
    batch = subject.batch(((14, 2), (20, 5)), seed=4)
    problem = step(draft, runner, batch)
    if problem is not None and problem.startswith("the call raised"):
        return None
    return None if problem is None else f"after the caches moved: {problem}"


def moved_weight(subject: RunnerSubject) -> str | None:
    """A weight changed in place is seen by the next call."""
    draft = subject.draft()
    runner = subject.make(draft)
    problem = step(draft, runner, subject.batch(((14, 2), (20, 5))))
    draft.mix.mul_(-0.5)
    return problem or step(draft, runner, subject.batch(((14, 2), (20, 5))))


def uniform_layout(subject: RunnerSubject) -> str | None:
    """Draft-extend V2 asks for a uniform layout of the full width, so that the decode kernel serves it."""
    draft = subject.draft()
    seen: set[tuple[str, int]] = set()
    forward = draft.forward

    def noted(input_ids: Tensor, hidden_states: Tensor, meta: object) -> Tensor:
        seen.add((meta.layout.kind, int(meta.layout.max_query_len)))  # type: ignore[attr-defined]
        return forward(input_ids, hidden_states, meta)  # type: ignore[arg-type]

    draft.forward = noted  # type: ignore[method-assign, assignment]
    problem = step(draft, subject.make(draft), subject.batch(((14, 2), (20, 5))))
    wrong = sorted(seen - {("uniform", WIDTH)})
    if wrong:
        return f"the draft was called with a {wrong[0][0]} layout of width {wrong[0][1]}, V2 is uniform of width {WIDTH}"
    return problem


def nothing_else_computed(subject: RunnerSubject) -> str | None:
    """The step computes no softmax, top-k or sort: those belong to the worker, on the selected rows."""
    draft = subject.draft(backend="reference")
    runner = subject.make(draft)
    batch = subject.batch(((14, 2), (20, 5)))
    fill_history(draft, batch)
    called: set[str] = set()

    def note(frame: object, event: str, function: Any) -> None:
        if event == "c_call":
            called.add(function.__name__)

    # The interpreter's own hook: unlike torch's profiler and modes it leaves compiled code as it is.
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        runner(batch)
    finally:
        sys.setprofile(before)
    extra = sorted(called & {"topk", "softmax", "log_softmax", "sort", "argsort", "argmax", "multinomial"})
    return f"the step ran {', '.join(extra)}; logits and hidden states are all it owes" if extra else None


def width_of_zero(subject: RunnerSubject) -> str | None:
    """A width that is not known yet is refused, not captured."""
    draft = subject.draft()
    try:
        subject.make(draft, tokens_per_request=0)
    except Exception as error:
        return None if isinstance(error, (ValueError, TypeError)) else f"a width of 0 raised {type(error).__name__}: {error}"
    return "tokens_per_request=0 was accepted"


def wrong_batches(subject: RunnerSubject) -> str | None:
    """Batches that do not fit are refused with ValueError or TypeError, before anything runs."""
    draft = subject.draft()
    runner = subject.make(draft)
    good = subject.batch(((14, 2), (20, 5)))
    for what, change in {
        "rows of another width": {"input_ids": good.input_ids[:, :4]},
        "a page table of int64": {"page_table": good.page_table.long()},
        "seq_lens of one request more": {"seq_lens": torch.cat((good.seq_lens, good.seq_lens[:1]))},
        "hidden states of another width": {"hidden_states": good.hidden_states[..., :8]},
    }.items():
        fill_history(draft, good)
        before = [pages.clone() for pages in draft.pools()]
        try:
            runner(replace(good, **change))
        except (ValueError, TypeError):
            pass
        except Exception as error:
            return f"{what} raised {type(error).__name__}, which tells the caller nothing"
        else:
            return f"{what} were accepted"
        if not _same(before, draft.pools()):
            return f"{what} were refused after pages had been written"
    return None


def nothing_left_behind(subject: RunnerSubject) -> str | None:
    """Repeated calls leave no tensor behind."""
    draft = subject.draft()
    runner = subject.make(draft)
    batch, calls = subject.batch(((14, 2), (20, 5))), 8
    fill_history(draft, batch)
    for _ in range(3):
        runner(batch)
    before = live_tensors()
    for _ in range(calls):
        runner(batch)
    grown = live_tensors() - before
    return f"{calls} equal calls left {grown} tensors behind" if grown >= calls else None


CHECKS: dict[str, Callable[[RunnerSubject], str | None]] = {
    "small-pool": small_pool,
    "idle": idle,
    "every-size": every_size,
    "over-bucket": over_bucket,
    "widest": widest,
    "results-survive": results_survive,
    "two-runners": two_runners,
    "moved-cache": moved_cache,
    "changed-weight": moved_weight,
    "uniform-layout": uniform_layout,
    "nothing-else": nothing_else_computed,
    "width-of-zero": width_of_zero,
    "wrong-batches": wrong_batches,
    "leak": nothing_left_behind,
}


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, after, strict=True))
