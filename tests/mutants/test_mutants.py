"""The kit's own test: a right backend passes, and every wrong one is caught.

OMP_NUM_THREADS=1 pytest -k mutants
"""

from __future__ import annotations

import pytest

from specops.testing import check_backend, check_runner
from tests.mutants import backends, runners
from tests.mutants.plain_attention import PlainAttention, PlainLatentAttention


@pytest.mark.parametrize("right", [PlainAttention, PlainLatentAttention])
def test_the_stock_of_the_mutants_is_right(right: type) -> None:
    family = "mla" if right is PlainLatentAttention else "mha"
    report = check_backend(right(), family=family, large_pool=True)
    assert report.ok, str(report)


@pytest.mark.parametrize("right", [runners.HandRunner, runners.CompiledHandRunner])
def test_the_hand_written_runners_are_right(right: type) -> None:
    report = check_runner(right)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", backends.MUTANTS)
def test_every_wrong_backend_is_caught(name: str) -> None:
    _, kind, options = backends.MUTANTS[name]
    report = check_backend(kind(), first_only=True, shrink_seconds=0, **options)
    assert report.failed == 1, f"{name} passed:\n{report}"


@pytest.mark.parametrize("name", runners.MUTANTS)
def test_every_wrong_runner_is_caught(name: str) -> None:
    _, kind, options = runners.MUTANTS[name]
    report = check_runner(kind, first_only=True, shrink_seconds=0, **options)
    assert report.failed == 1, f"{name} passed:\n{report}"
