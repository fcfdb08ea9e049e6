"""The pytest plugin: a backend or a runner is checked by one line of a test.

    def test_my_backend(conforms):
        conforms("mine", family="mha")

    @pytest.mark.conformance(backend="mine")
    def test_mine(conformance_report):
        assert conformance_report.checks["values"] > 30

A failed check fails the test with the report, smallest input included. pytest loads this file whenever specops is
installed, before any ``conftest.py``; the kit, and the compiler and Triton behind it, are imported when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from specops.testing.report import Report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "conformance(backend=..., runner=..., **options): what the conformance_report fixture checks; options are those of "
        "specops.check_backend or check_runner",
    )


@pytest.fixture
def conforms() -> Callable[..., Report]:
    """``conforms("name", **options)`` or ``conforms(runner="direct", **options)`` fails the test on findings."""

    def check(backend: Any = None, *, runner: Any = None, **options: Any) -> Report:
        from specops.testing import check_backend, check_runner

        if (backend is None) == (runner is None):
            raise ValueError("name one thing to check: a backend, or runner=")
        report = check_backend(backend, **options) if runner is None else check_runner(runner, **options)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return check


@pytest.fixture
def conformance_report(request: pytest.FixtureRequest, conforms: Callable[..., Report]) -> Report:
    """The report of what the test's ``conformance`` mark names."""
    mark = request.node.get_closest_marker("conformance")
    if mark is None:
        raise ValueError("conformance_report needs @pytest.mark.conformance(backend=...) or (runner=...) on the test")
    return conforms(*mark.args, **mark.kwargs)
