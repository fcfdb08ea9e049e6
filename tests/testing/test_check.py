"""``check_backend``: what counts as a finding, how small it becomes, and that only what is declared is asked.

OMP_NUM_THREADS=1 pytest tests/testing/test_check.py
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from specops.ops import reference
from specops.ops.backends import _BACKENDS, Capabilities, get_backend
from specops.testing import NotConforming, check_backend, make_mha_case, replay
from specops.testing.backend_checks import resident_cases
from specops.testing.check import EXTRA, SEQUENCES, random_arguments
from specops.testing.shrink import shrink, simpler_arguments, simpler_batches
from specops.testing.subject import MHA_SIZES, SHORT_REQUESTS, Subject
from specops.testing.timed import Hung, run_within


def right(*args: Any, **options: Any) -> Tensor:
    return reference.mha(*args, **options)


def without_last_key(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Tensor:
    """Wrong from five keys on."""
    return reference.mha(q, k, v, table, torch.where(lens >= 5, lens - 1, lens), **options)


def test_a_right_function_passes_and_leaves_no_trace_in_the_table() -> None:
    before = dict(_BACKENDS)
    report = check_backend(right, only=("values", "stale", "fuzz"), examples=10)
    assert report.ok
    assert report.checks["values"] > 60
    assert before == _BACKENDS


def test_a_failure_is_reduced_to_the_smallest_that_fails() -> None:
    report = check_backend(without_last_key, only=("values",))
    assert not report.ok
    assert_expected_inline(
        report.findings[0].snippet,
        """\
from specops.testing import replay
replay(without_last_key, "mha", "values", seq_lens=(5,), page_size=1, num_heads=1, num_kv_heads=1, head_dim=8)""",
    )
    assert report.failed == 1 + len(report.findings[0].also)


def test_the_snippet_shows_the_problem_when_it_runs() -> None:
    report = check_backend(without_last_key, only=("stale",))
    with pytest.raises(AssertionError, match=r"call .* over the same buffers"):
        exec(report.findings[0].snippet, {"without_last_key": without_last_key})
    replay(right, "mha", "values", seq_lens=(5,))


def test_the_report_reads_like_this() -> None:
    def zeros(q: Tensor, *args: Any, **options: Any) -> Tensor:
        return torch.zeros_like(q)

    report = check_backend(zeros, only=("leak", "shared-pages"), features=("window",))
    report.seconds, report.findings[0].problem = 1.0, "all are zero"
    assert_expected_inline(
        str(report),
        """\
zeros on cpu: 3 checks, 2 failed, 1.0 s
  shared-pages        2 cases  2 FAILED
  leak                1 cases  ok

shared-pages (uniform): all are zero
also in twins
smallest input that fails:
    from specops.testing import replay
    replay(zeros, "mha", "shared-pages", seq_lens=(1,), page_size=1, num_heads=1, num_kv_heads=1, head_dim=8)""",
    )
    with pytest.raises(NotConforming, match="2 failed"):
        report.raise_if_failed()


def mutating(q: Tensor, *args: Any, **options: Any) -> Tensor:
    out = right(q, *args, **options)
    q.zero_()
    return out


def crashing(*args: Any, **options: Any) -> Tensor:
    raise RuntimeError("no kernel image")


def hanging(*args: Any, **options: Any) -> Tensor:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (crashing, "the call raised RuntimeError: no kernel image (test_check.py"),
        (hanging, "the call hangs: still running after 0.5 s"),
        (mutating, "the call wrote to its argument q"),
        (
            lambda q, *args, **options: right(q, *args, **options).double(),
            "has dtype torch.float64, wanted is torch.float32",
        ),
        (lambda q, *args, **options: right(q, *args, **options)[:-1], "the result has shape"),
        (lambda q, *args, **options: q[..., : args[1].shape[3]], "the result shares memory with the argument q"),
        (lambda q, *args, **options: None, "the call returned NoneType, not a tensor"),
        (lambda q, *args, **options: right(q, *args, **options).to("meta"), "the result has device meta"),
        (lambda q, *args, **options: right(q, *args, **options) * float("nan"), "vectors are off by more than"),
    ],
)
def test_misbehaviour_is_a_finding_not_a_traceback(kernel: Any, says: str) -> None:
    report = check_backend(kernel, only=("values",), first_only=True, shrink_seconds=0, time_limit=0.5)
    assert report.failed == 1
    assert says in report.findings[0].problem


def test_a_hang_ends_the_run_and_says_so() -> None:
    report = check_backend(hanging, time_limit=0.3)
    assert report.stopped is not None
    assert not report.ok
    assert sum(report.checks.values()) == 1


def test_only_what_is_declared_is_asked() -> None:
    asked: list[tuple[Any, ...]] = []

    def narrow(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, *, layout: Any, **options: Any) -> Tensor:
        given = set(options) - {"scale"}
        asked.append((q.shape[2], k.shape[1], q.dtype, q.shape[1] // k.shape[2], layout.kind, layout.max_query_len, given))
        return right(q, k, v, table, lens, layout=layout, **options)

    report = check_backend(
        narrow,
        only=("values", "fuzz", "poison"),
        head_dims=(64, 128),
        page_sizes=(16, 32),
        q_dtypes=(torch.bfloat16,),
        group_sizes=(4,),
        layouts=("uniform",),
        max_query_len=8,
        features=("window", "sinks"),
        not_together=(("window", "sinks"),),
    )
    assert report.ok, str(report)
    dims, pages, dtypes, groups, layouts, widths, given = (set(map(repr, column)) for column in zip(*asked, strict=True))
    assert dims <= {"64", "128"}
    assert pages <= {"16", "32"}
    assert dtypes == {"torch.bfloat16"}
    assert groups == {"4"}
    assert layouts == {"'uniform'"}
    assert max(int(width) for width in widths) <= 8
    assert given == {"set()", "{'window'}", "{'sinks'}"}
    assert report.skipped["softcap is not declared"] > 0


def test_a_run_that_checked_nothing_is_not_ok() -> None:
    report = check_backend(right, only=("compiled",), max_query_len=1)
    assert not report.checks
    assert not report.ok
    assert "nothing was checked" in str(report)


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown checks \\['speed'\\]; there are values"):
        check_backend("reference", only=("speed",))
    with pytest.raises(ValueError, match="'reference' has declared its capabilities already; got \\['page_sizes'\\]"):
        check_backend("reference", page_sizes=(16,))
    with pytest.raises(ValueError, match="no mha backend is called 'nobody'"):
        check_backend("nobody")


def test_a_backend_whose_device_is_not_here_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match="the backend runs on cuda, and none of them is here"):
        check_backend("trtllm")


@pytest.mark.parametrize("family", ["mha", "mla"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_backends_of_specops_conform(backend: str, family: Any) -> None:
    assert check_backend(backend, family=family).raise_if_failed().checks["fuzz"] == 40


def test_random_cases_come_from_the_seed() -> None:
    import random

    first, again = (random_arguments(random.Random(5), "mha") for _ in range(2))
    assert first == again
    assert first != random_arguments(random.Random(6), "mha")


def test_every_simpler_case_asks_for_less_and_can_be_made() -> None:
    subject = Subject(get_backend("reference", "mha"), torch.device("cpu"))
    for arguments in (*SEQUENCES.values(), *EXTRA.values(), {"seq_lens": (0, 5, 7), "query_lens": (2, 0, 9), "window": 3}):
        whole = {**MHA_SIZES, **arguments}
        simpler = [candidate for candidate in simpler_arguments(whole) if subject.fit(candidate)[0] == candidate]
        assert simpler
        assert all(candidate != whole for candidate in simpler)
        for candidate in simpler[:12]:
            if "tree_width" not in candidate or candidate["tree_width"] >= candidate["query_lens"]:
                make_mha_case(**candidate)


def test_shrinking_ends_with_what_can_not_be_smaller() -> None:
    batches = (((63, 3), (63, 6)), ((30, 2), (12, 6), (41, 1)), ((25, 4), (50, 5)))
    smallest = shrink(batches, simpler_batches, lambda b: any(accept == 6 for batch in b for _, accept in batch))
    assert smallest == (((6, 6),),)


def test_calls_within_their_time_return_and_raise_as_they_are() -> None:
    assert run_within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_within(5, lambda: 1 // 0)
    with pytest.raises(Hung, match=r"still running after 0.2 s$"):
        run_within(0.2, hanging)


def nan_where_keys_are_fewer_than_rows(*args: Any, layout: Any, **options: Any) -> Tensor:
    """All rows of such a request are NaN; no other row is wrong."""
    out, lens = right(*args, layout=layout, **options), args[4]
    starts = layout.offsets(lens.shape[0], lens.device).tolist()
    for request, length in enumerate(lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if 0 < length < rows.stop - rows.start:
            out[rows] = float("nan")
    return out


SHORT_MATTERS = ("values", "stale", "fuzz")


def test_requests_with_fewer_keys_than_rows_are_asked_of_who_declares_them() -> None:
    report = check_backend(nan_where_keys_are_fewer_than_rows, only=SHORT_MATTERS, shrink_seconds=2)
    assert {finding.check for finding in report.findings} == set(SHORT_MATTERS)
    assert report.finding("values").case == "fewer-keys-than-rows"
    assert "seq_lens=(1,), query_lens=2" in report.finding("values").snippet
    assert not report.skipped


@pytest.mark.parametrize("layouts", [("uniform",), ("uniform", "packed")])
def test_who_does_not_declare_them_gets_other_lengths_and_no_fewer_checks(layouts: tuple[str, ...]) -> None:
    kept = {"only": SHORT_MATTERS, "layouts": layouts}
    report = check_backend(nan_where_keys_are_fewer_than_rows, short_requests=False, **kept)
    assert report.ok, str(report)
    whole = check_backend(right, **kept)
    left_out = report.skipped.pop("requests with fewer keys than rows are not declared")
    # fewer-keys-than-rows, window and sinks-without-keys.
    assert left_out == 3
    assert report.skipped == whole.skipped
    assert report.checks == {**whole.checks, "values": whole.checks["values"] - left_out}


def test_lengths_for_who_does_not_declare_short_requests() -> None:
    """Length 0 stays; packed requests are measured by their own rows; only what the backend says decides."""
    declared = Capabilities(("cpu",), short_requests=False)
    subject = Subject(replace(get_backend("reference", "mha"), capabilities=declared), torch.device("cpu"))
    assert subject.declared_lens({"seq_lens": (0, 1, 3, 9), "query_lens": 3}) == (0, 3, 3, 9)
    assert subject.declared_lens({"seq_lens": (0, 1, 3, 9), "query_lens": (4, 1, 5, 0)}) == (0, 1, 5, 9)
    assert subject.fit({"seq_lens": (0, 3), "query_lens": 3})[1] == []
    assert subject.fit({"seq_lens": (0, 2), "query_lens": 3}) == (None, [SHORT_REQUESTS])
    every = Subject(get_backend("reference", "mha"), torch.device("cpu"))
    assert every.declared_lens({"seq_lens": (0, 1, 3, 9), "query_lens": 3}) == (0, 1, 3, 9)
    lens = [case.tensors["seq_lens"].tolist() for case in resident_cases(subject, {**MHA_SIZES, **SEQUENCES["uniform"]})]
    assert lens == [[4, 6, 10], [9, 13, 20], [3, 3, 3], [21, 29, 43], [20, 13, 9]]


def test_limits_of_a_backend_with_several_kernels_are_alternatives() -> None:
    small = Capabilities(("cpu",), page_sizes=(16,), layouts=("packed",))
    report = check_backend(right, only=("values",), page_sizes=(4,), layouts=("uniform",), features=(), also=(small,))
    assert report.ok, str(report)
    assert report.checks["values"] > 25
