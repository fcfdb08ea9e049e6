"""Every kind of fault F01 to F62 has a test that bears its id; what is only reachable on a GPU is marked so.

OMP_NUM_THREADS=1 pytest -k faults
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KINDS = [f"f{number:02}" for number in range(1, 63)]
NAMED = re.compile(r"(?<=_)f\d\d(?=_|$)")


def found_by_kind(skip_gpu: bool) -> dict[str, list[str]]:
    """Kind to the tests named after it, ``path::function``."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if skip_gpu and path.parent.name == "gpu":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for kind in NAMED.findall(node.name):
                    found.setdefault(kind, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


BY_KIND = found_by_kind(skip_gpu=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_has_a_test_that_runs_without_a_gpu(kind: str) -> None:
    assert BY_KIND.get(kind), f"no test is named after {kind.upper()}"


def test_no_test_names_a_kind_that_does_not_exist() -> None:
    assert set(found_by_kind(skip_gpu=False)) <= set(KINDS)
