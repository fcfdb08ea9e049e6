"""The conformance kit: a float64 oracle, generated attention cases, and the checks of backends and runners built on both.

``check_backend`` and ``check_runner`` return a report; ``python -m specops.testing`` prints one; the pytest plugin fails a
test with one. The kit may import every other part of specops and is imported by none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specops.testing.cases import AttentionCase, make_mha_case, make_mla_case
    from specops.testing.check import check_backend, replay
    from specops.testing.grids import MHA_GRID, MLA_GRID, grid
    from specops.testing.oracle import assert_close_to_oracle, oracle_mha, oracle_mla
    from specops.testing.report import Finding, NotConforming, Report
    from specops.testing.runner_check import check_runner, replay_runner

__all__ = [
    "MHA_GRID",
    "MLA_GRID",
    "AttentionCase",
    "Finding",
    "NotConforming",
    "Report",
    "assert_close_to_oracle",
    "check_backend",
    "check_runner",
    "grid",
    "make_mha_case",
    "make_mla_case",
    "oracle_mha",
    "oracle_mla",
    "replay",
    "replay_runner",
]

# Imported at first use: pytest imports this package at its start, for the plugin.
_AT_FIRST_USE = {
    **dict.fromkeys(("AttentionCase", "make_mha_case", "make_mla_case"), "cases"),
    **dict.fromkeys(("check_backend", "replay"), "check"),
    **dict.fromkeys(("MHA_GRID", "MLA_GRID", "grid"), "grids"),
    **dict.fromkeys(("assert_close_to_oracle", "oracle_mha", "oracle_mla"), "oracle"),
    **dict.fromkeys(("Finding", "NotConforming", "Report"), "report"),
    **dict.fromkeys(("check_runner", "replay_runner"), "runner_check"),
}


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module 'specops.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"specops.testing.{_AT_FIRST_USE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
