"""The testing kit: a float64 oracle, generated attention cases, and what checks a backend against both.

It may import every other part of specops and is imported by none.
"""

from specops.testing.cases import AttentionCase, make_mha_case, make_mla_case
from specops.testing.oracle import assert_close_to_oracle, oracle_mha, oracle_mla

__all__ = [
    "AttentionCase",
    "assert_close_to_oracle",
    "make_mha_case",
    "make_mla_case",
    "oracle_mha",
    "oracle_mla",
]
