"""The target's forward as one compiled graph, on the CPU through inductor.

Run alone: pytest tests/models/test_llama_compile.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paged_session import TREE, PagedSession, check_against_peer, path_to
from test_llama import make_peer
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from specops import QueryLayout, attention_metadata
from specops.models import CausalLM, load_target

pytest.importorskip("transformers")
PAGE = 4


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block_step(model: CausalLM, width: int, tree: bool) -> Callable[..., Tensor]:
    """``width`` rows a request with all metadata computed inside, as a runner would compile it."""
    mask_rows = [[j in path_to(TREE, i) for j in range(width)] for i in range(width)]
    mask = torch.tensor(mask_rows)
    depths = torch.tensor([sum(row) - 1 for row in mask_rows])

    def step(ids: Tensor, seq_lens: Tensor, page_table: Tensor) -> Tensor:
        batch = seq_lens.shape[0]
        meta = attention_metadata(
            page_table,
            seq_lens,
            QueryLayout.uniform(width),
            PAGE,
            depths=depths.repeat(batch) if tree else None,
            tree_mask=mask.repeat(batch, 1) if tree else None,
        )
        return model.compute_logits(model(ids, meta))  # type: ignore[arg-type]

    return step


@pytest.mark.parametrize(("name", "tree"), [("llama_llama3_rope", False), ("gemma2", True), ("qwen3", True)])
def test_one_graph_serves_batches_of_two_to_eight(name: str, tree: bool) -> None:
    model = load_target(make_peer(name), backend="reference")
    width, pages = len(TREE), 4
    model.allocate_caches(8 * pages + 1, PAGE)
    step = block_step(model, width, tree)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    page_table = (torch.randperm(8 * pages) + 1).to(torch.int32).view(8, pages)
    for batch in (2, 5, 3, 8, 7, 2, 4, 6):
        ids = torch.randint(97, (batch * width,))
        seq_lens = torch.randint(width, pages * PAGE + 1, (batch,), dtype=torch.int32)
        table = page_table[:batch].clone()
        for tensor in (ids, seq_lens, table):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            for cache in model.caches:
                cache.k.normal_()
                cache.v.normal_()
            caches = [cache.k.clone() for cache in model.caches]
            expected = step(ids, seq_lens, table)
            written = [cache.k.clone() for cache in model.caches]
            for cache, old in zip(model.caches, caches, strict=True):
                cache.k.copy_(old)
            torch.testing.assert_close(compiled(ids, seq_lens, table), expected, rtol=1e-4, atol=1e-4)
        for cache, after in zip(model.caches, written, strict=True):
            torch.testing.assert_close(cache.k, after, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_compiled_forward_equals_transformers_through_a_whole_session() -> None:
    peer = make_peer("mistral_window")
    model = load_target(peer, backend="reference")
    check_against_peer(model, peer, forward=torch.compile(model, fullgraph=True))


def test_graph_holds_attention_ops_and_no_python_state() -> None:
    model = load_target(make_peer("llama"), backend="reference")
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    session = PagedSession(model, 1, forward=torch.compile(model, fullgraph=True, backend=keep))
    session.prefill([[1, 2, 3]])
    (graph,) = graphs
    targets = [str(node.target).removesuffix(".default") for node in graph.graph.nodes]
    names = [target for target in targets if target.startswith("specops.")]
    assert names == ["specops.store_kv", "specops.reference_mha"] * len(model.layers)


@pytest.mark.gpu
def test_cuda_graph_of_the_forward_equals_eager() -> None:
    model = load_target(make_peer("llama_wide_head"), device="cuda")
    model.allocate_caches(17, PAGE)
    width = len(TREE)
    step = block_step(model, width, tree=False)
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    table = (torch.randperm(16, device="cuda") + 1).to(torch.int32).view(4, 4)
    for lens in ([6, 9, 13, 16], [16, 7, 6, 10], [6, 6, 6, 6], [12, 13, 14, 15]):
        ids = torch.randint(97, (4 * width,), device="cuda")
        seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        with torch.no_grad():
            expected = step(ids, seq_lens, table)
            torch.testing.assert_close(compiled(ids, seq_lens, table), expected, rtol=1e-3, atol=1e-3)
