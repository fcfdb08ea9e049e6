"""The testing kit: a float64 oracle, generated attention cases, and what checks a backend against both.

It may import every other part of specops and is imported by none.
"""

from specops.testing.cases import AttentionCase, make_mha_case, make_mla_case
from specops.testing.grid import MHA_GRID, MLA_GRID, grid
from specops.testing.oracle import assert_close_to_oracle, oracle_mha, oracle_mla

__all__ = [
    "MHA_GRID",
    "MLA_GRID",
    "AttentionCase",
    "assert_close_to_oracle",
    "grid",
    "make_mha_case",
    "make_mla_case",
    "oracle_mha",
    "oracle_mla",
]
