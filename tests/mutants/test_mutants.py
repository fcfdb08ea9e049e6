"""The kit's own test: a right backend passes, and every wrong one is caught.

OMP_NUM_THREADS=1 pytest -k mutants
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specops.testing import check_backend, check_runner
from tests.mutants import backends, runners
from tests.mutants.plain_attention import PlainAttention, PlainLatentAttention

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"
# Mutant to (faults, check) as the documentation has it.
TABLE = {
    section: {
        name: (faults.replace(",", ""), check)
        for name, faults, check in re.findall(r"^\| (\w+) \| ([^|]+) \| ([\w-]+) \|$", text, re.MULTILINE)
    }
    for section, text in re.findall(r"^### (Backends|Runners)\n(.*?)(?=^##)", DOCS.read_text(), re.MULTILINE | re.DOTALL)
}


def test_the_documentation_lists_every_mutant() -> None:
    for section, mutants in (("Backends", backends.MUTANTS), ("Runners", runners.MUTANTS)):
        documented = {name: faults for name, (faults, _) in TABLE[section].items()}
        assert documented == {name: faults for name, (faults, _, _) in mutants.items()}


def test_the_mutants_stand_for_enough_kinds_of_fault() -> None:
    every = {**backends.MUTANTS, **runners.MUTANTS}
    kinds = {kind for faults, _, _ in every.values() for kind in faults.split()}
    assert len(backends.MUTANTS) + len(runners.MUTANTS) >= 80
    assert {"S1", "S2", "S3", "S4", "S5"} <= kinds
    assert len({kind for kind in kinds if kind.startswith("F")}) >= 38


@pytest.mark.parametrize("right", [PlainAttention, PlainLatentAttention])
def test_the_stock_of_the_mutants_is_right(right: type) -> None:
    family = "mla" if right is PlainLatentAttention else "mha"
    report = check_backend(right(), family=family, large_pool=True)
    assert report.ok, str(report)


@pytest.mark.parametrize("right", [runners.HandRunner, pytest.param(runners.CompiledHandRunner, marks=pytest.mark.slow)])
def test_the_hand_written_runners_are_right(right: type) -> None:
    report = check_runner(right)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", backends.MUTANTS)
def test_every_wrong_backend_is_caught(name: str) -> None:
    _, kind, options = backends.MUTANTS[name]
    report = check_backend(kind(), first_only=True, shrink_seconds=0, **options)
    assert report.failed == 1, f"{name} passed:\n{report}"
    assert report.findings[0].check == TABLE["Backends"][name][1]


@pytest.mark.parametrize("name", runners.MUTANTS)
def test_every_wrong_runner_is_caught(name: str) -> None:
    _, kind, options = runners.MUTANTS[name]
    report = check_runner(kind, first_only=True, shrink_seconds=0, **options)
    assert report.failed == 1, f"{name} passed:\n{report}"
    assert report.findings[0].check == TABLE["Runners"][name][1]
