"""Tensors that come as views into larger ones reach the vendor kernels, which get bare pointers, as dense copies.

OMP_NUM_THREADS=1 pytest tests/ops/test_vendor_views.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specops import QueryLayout
from specops.ops import tokenspeed_mla, trtllm_mha, trtllm_mla
from specops.testing.cases import AttentionCase, make_mha_case, make_mla_case

# Scratch and results hold nothing yet. The kernels are told the strides of caches.
UNWRITTEN, STRIDED = ("workspace_buffer", "out"), ("kv_cache",)

Built = tuple[Callable[..., dict[str, Any]], AttentionCase, dict[str, Any]]


def spread(tensor: Tensor) -> Tensor:
    """Equal values at every second place along each dim of a tensor whose other places hold ones."""
    places = tuple(slice(None, None, 2) for _ in tensor.shape)
    wide = torch.ones([2 * size for size in tensor.shape], dtype=tensor.dtype)
    wide[places] = tensor
    return wide[places]


def viewed(case: AttentionCase) -> AttentionCase:
    """The case with every tensor but queries and caches as such a view."""
    small = ("page_table", "seq_lens")
    tensors = {name: spread(tensor) if name in small else tensor for name, tensor in case.tensors.items()}
    options = {name: spread(value) if isinstance(value, Tensor) else value for name, value in case.options.items()}
    layout, starts = case.layout, case.layout.query_start
    if starts is not None:
        layout = QueryLayout.packed(spread(starts), layout.max_query_len)
    return AttentionCase(case.family, tensors, layout, case.scale, options)


def mha(**options: Any) -> AttentionCase:
    return make_mha_case(**{"page_size": 16, "dtype": torch.bfloat16, "query_lens": 4, "seq_lens": (20, 9, 40), **options})


def mla(**options: Any) -> AttentionCase:
    sizes = {"latent_dim": 512, "rope_dim": 64, "page_size": 32, "dtype": torch.bfloat16, "seq_lens": (20, 9, 40)}
    return make_mla_case(**{**sizes, **options})


def calls() -> Iterator[Built]:
    for options in (
        {},
        {"sinks": True},
        {"query_lens": 1, "sinks": True},
        {"query_lens": 11, "seq_lens": (20, 11), "num_heads": 6, "sinks": True},
        {"window": 5, "sinks": True},
        {"tree_width": 4},
        {"fp8": True},
    ):
        yield trtllm_mha.xqa_arguments, mha(**options), {}
    for options in ({}, {"sinks": True}, {"window": 5, "sinks": True}, {"fp8": True}):
        yield trtllm_mha.gen_decode_arguments, mha(**options), {}
        yield trtllm_mha.gen_context_arguments, mha(**{**options, "query_lens": (3, 1, 7)}), {}
    for xqa, rows, sinks in ((True, 1, False), (True, 3, False), (False, 3, False), (False, 3, True)):
        yield trtllm_mla.decode_arguments, mla(query_lens=rows, sinks=sinks), {"xqa": xqa}
    for rows in (1, 4):
        yield tokenspeed_mla.decode_arguments, mla(query_lens=rows), {}


def pointers(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among the arguments, those in lists too."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        for place, item in enumerate(value if isinstance(value, (list, tuple)) else (value,)):
            if isinstance(item, Tensor) and name not in STRIDED:
                found[f"{name}.{place}"] = item
    return found


@pytest.mark.parametrize("number", range(21))
def test_views_become_dense_copies_of_equal_values(number: int) -> None:
    build, case, more = list(calls())[number]
    other = viewed(case)
    changed = [*other.tensors.values(), *other.options.values()]
    assert sum(isinstance(tensor, Tensor) and not tensor.is_contiguous() for tensor in changed) >= 2
    dense, given = (pointers(build(*one.args(), **one.kwargs(), **more)) for one in (case, other))
    assert dense.keys() == given.keys()
    for name, tensor in given.items():
        assert tensor.is_contiguous(), name
        assert tensor.shape == dense[name].shape, name
        if name.split(".")[0] not in UNWRITTEN:
            assert torch.equal(tensor, dense[name]), name


def test_every_call_is_among_them() -> None:
    assert len(list(calls())) == 21
