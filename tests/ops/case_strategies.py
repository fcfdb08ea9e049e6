"""Hypothesis strategies for attention cases: shapes, page layouts and any mix of features."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


@st.composite
def shared_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that :func:`make_mha_case` and :func:`make_mla_case` share."""
    batch = draw(st.integers(1, 4))
    seq_lens = draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))
    arguments: dict[str, Any] = {
        "seq_lens": seq_lens,
        "page_size": draw(st.sampled_from((1, 2, 4, 16, 32))),
        "seed": draw(st.integers(0, 1000)),
        "window": draw(st.none() | st.integers(1, 45)),
        "softcap": draw(st.none() | st.floats(0.5, 30.0)),
        "sinks": draw(st.booleans()),
        "fp8": draw(st.booleans()),
        "strided_q": draw(st.booleans()),
        "table_columns": draw(st.none() | st.integers(1, 6)),
        "slack": draw(st.integers(0, 2)),
    }
    if draw(st.booleans()):
        arguments["query_lens"] = draw(st.integers(1, 9))
        if draw(st.booleans()):
            arguments["tree_width"] = arguments["query_lens"] + draw(st.integers(0, 5))
    else:
        arguments["query_lens"] = draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    return arguments


@st.composite
def mha_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of :func:`make_mha_case`."""
    num_kv_heads = draw(st.integers(1, 3))
    return {
        **draw(shared_arguments()),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * draw(st.integers(1, 7)),
        "head_dim": draw(st.sampled_from((8, 16, 24))),
        "value_dim": draw(st.none() | st.sampled_from((8, 40))),
        "hnd": draw(st.booleans()),
        "shared_storage": draw(st.sampled_from((None, "rows"))),
    }


@st.composite
def mla_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of :func:`make_mla_case`."""
    return {
        **draw(shared_arguments()),
        "num_heads": draw(st.integers(1, 5)),
        "latent_dim": draw(st.sampled_from((16, 32))),
        "rope_dim": draw(st.sampled_from((8, 16))),
        "padded_rows": draw(st.booleans()),
    }
