"""Host plans in the runner: updated before every run, with the batch as the step sees it, in every mode.

Run alone: pytest tests/compile/test_plans.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specops.batch import Field, FieldTable
from specops.compile import StepRunner
from specops.compile.plans import attention_plan, planned_backend
from specops.layout import QueryLayout
from tests.compile.toys import tiny_draft

MODES = ["eager", "direct", "reduce-overhead"]
TABLE = FieldTable((Field("ids", "token", (), torch.int64, 3), Field("lens", "request", (), torch.int32)), 2)


class Planned(nn.Module):
    """Adds what its plan says to every id; the plan says the sum of the lengths it was updated with."""

    def forward(self, ids: Tensor, lens: Tensor, plan: Tensor) -> tuple[Tensor]:
        return (ids.reshape(-1) + plan + lens.repeat_interleave(2, output_size=2 * lens.shape[0]) * 0,)


class FakePlan:
    def __init__(self, log: list[tuple[int, list[int]]], fields: Mapping[str, Tensor]) -> None:
        self.log, self.size = log, fields["lens"].shape[0]
        self.handle = torch.zeros(1, dtype=torch.int32)
        torch._dynamo.mark_static_address(self.handle)

    def update(self, fields: Mapping[str, Tensor]) -> None:
        assert fields["lens"].shape[0] == self.size
        self.log.append((self.size, fields["lens"].tolist()))
        self.handle.fill_(int(fields["lens"].sum()))


def runner_of(mode: str, **options: Any) -> tuple[StepRunner, list[tuple[int, list[int]]], list[int]]:
    log: list[tuple[int, list[int]]] = []
    made: list[int] = []

    def make(fields: Mapping[str, Tensor]) -> FakePlan:
        made.append(fields["lens"].shape[0])
        return FakePlan(log, fields)

    options = {"max_requests": 4, "buckets": [1, 2, 4], "compiler": "eager", **options}
    return StepRunner(Planned(), TABLE, device="cpu", mode=mode, plan=make, **options), log, made


def batch(*lens: int) -> dict[str, Tensor]:
    count = len(lens)
    return {"ids": torch.arange(2 * count).reshape(count, 2), "lens": torch.tensor(lens, dtype=torch.int32)}


@pytest.mark.parametrize("mode", MODES)
def test_every_run_has_one_update_with_the_padded_batch_and_reads_its_plan(mode: str) -> None:
    runner, log, made = runner_of(mode)
    runner.warm_up()
    assert len(log) == (0 if mode == "eager" else 3), "one for each run of the warm-up"
    log.clear()
    for lens in ([5, 6, 7], [1], [2, 3], [9, 9, 9, 9], [4, 4, 4]):
        (out,) = runner(batch(*lens))
        assert out.tolist() == [i + sum(lens) for i in range(2 * len(lens))]
    padded = [[5, 6, 7, 0], [1], [2, 3], [9, 9, 9, 9], [4, 4, 4, 0]]
    plain = [[5, 6, 7], [1], [2, 3], [9, 9, 9, 9], [4, 4, 4]]
    assert [lens for _, lens in log] == (plain if mode == "eager" else padded)
    assert sorted(made) == sorted(set(made)), "one plan for each size, kept"


def test_handles_of_different_buckets_do_not_recompile() -> None:
    runner, _, made = runner_of("direct", buckets=[1, 2, 3, 4], strict=True)
    report = runner.warm_up()
    for lens in ([5, 6, 7], [1], [2, 3], [9, 9, 9, 9]):
        runner(batch(*lens))
    assert report.compiled_graphs == 1
    assert report.recompiles == []
    assert len(made) == 4


def test_a_batch_over_the_largest_bucket_is_planned_too() -> None:
    runner, log, _ = runner_of("direct")
    runner.warm_up()
    log.clear()
    with pytest.warns(UserWarning, match="Running it eagerly"):
        (out,) = runner(batch(1, 2, 3, 4, 5))
    assert out.tolist() == [i + 15 for i in range(10)]
    assert log == [(5, [1, 2, 3, 4, 5])]


def test_a_drafts_planned_backend_is_found_by_name() -> None:
    draft = tiny_draft()
    assert planned_backend(draft, "mha") is None
    draft.set_backend("reference")
    assert planned_backend(draft, "mha") is None
    draft.set_backend("flashinfer_fa2")
    assert planned_backend(draft, "mha") == "flashinfer_fa2"
    assert planned_backend(nn.Linear(2, 2), "mha") is None
    with pytest.raises(ValueError, match="reference takes no plan"):
        attention_plan("reference", "mha", QueryLayout.uniform(2), 16)


def test_the_draft_extend_runner_plans_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that a runner makes for fa2 is fa2's own, for the bucket's shape; the op itself needs a GPU."""
    from tests.compile.toys import MAX_PAGES, PAGE, WIDTH, runner_for

    draft = tiny_draft()
    draft.set_backend("flashinfer_fa2")
    runner = runner_for(draft, "eager").runner
    assert runner._make_plan is not None
    fields = fields_of(runner, 3)
    plan = runner._make_plan(fields).plan
    assert (plan.backend, plan.family, plan.num_requests) == ("flashinfer_fa2", "mha", 3)
    assert (plan.num_rows, plan.max_pages, plan.page_size) == (3 * WIDTH, MAX_PAGES, PAGE)


def fields_of(runner: StepRunner, size: int) -> dict[str, Tensor]:
    return runner.table.allocate(size, torch.device("cpu"))
