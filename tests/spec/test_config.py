"""Shapes of a round: what is refused, and the sizes that follow.

Run alone: pytest tests/spec/test_config.py
"""

from __future__ import annotations

import pytest

from specops.spec import SpecConfig


@pytest.mark.parametrize(
    ("options", "width", "candidates", "scratch", "longest"),
    [
        ({"num_steps": 3}, 4, 3, 4, 4),
        ({"num_steps": 1}, 2, 1, 2, 2),
        ({"num_steps": 1, "topk": 2, "num_draft_tokens": 3}, 3, 2, 3, 2),
        ({"num_steps": 3, "topk": 2, "num_draft_tokens": 6}, 6, 10, 6, 4),
        ({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}, 8, 68, 16, 6),
        ({"num_steps": 4, "topk": 8}, 16, 200, 24, 5),
        ({"num_steps": 5, "topk": 2, "num_draft_tokens": 3}, 3, 18, 8, 3),
    ],
)
def test_sizes_follow_from_steps_topk_and_nodes(
    options: dict[str, int], width: int, candidates: int, scratch: int, longest: int
) -> None:
    config = SpecConfig(**options)
    assert (config.width, config.num_candidates, config.scratch_tokens, config.max_accept_len) == (
        width,
        candidates,
        scratch,
        longest,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps and topk must be >= 1, got 0 and 1"),
        ({"topk": 0}, "num_steps and topk must be >= 1, got 3 and 0"),
        ({"num_steps": 3, "topk": 2, "num_draft_tokens": 12}, "give 10 candidates, so it is 2 to 11"),
        ({"num_steps": 3, "num_draft_tokens": 3}, r"a chain \(topk=1\) of 3 steps has 4 nodes, got num_draft_tokens=3"),
        ({"num_draft_tokens": 1}, "so it is 2 to 4"),
        ({"draft_extend": "v3"}, "draft_extend must be 'v1' or 'v2', got 'v3'"),
    ],
)
def test_impossible_rounds_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecConfig(**options)
