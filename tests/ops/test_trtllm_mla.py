"""TensorRT-LLM MLA: the arguments each kernel would get. Runs without a GPU; the kernels need cards of 10.x and 12.x.

OMP_NUM_THREADS=1 pytest tests/ops/test_trtllm_mla.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vendor_fakes

from specops.ops import trtllm_mla
from specops.testing.cases import make_mla_case
from specops.testing.oracle import assert_close_to_oracle


def fake_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lora_rank: int,
    bmm1_scale: float,
    bmm2_scale: float,
    sinks: list[torch.Tensor] | None = None,
    **others: Any,
) -> torch.Tensor:
    """Causal MLA of ``[B, q, H, D]`` queries."""
    batch, rows = query.shape[:2]
    out = torch.zeros((*query.shape[:3], kv_lora_rank), dtype=query.dtype)
    for request in range(batch):
        count = int(seq_lens[request])
        keys = vendor_fakes.gathered(kv_cache.unsqueeze(2), block_tables[request], count)
        seen = torch.arange(count)[None, :] <= (count - rows + torch.arange(rows))[:, None]
        sink = None if sinks is None else sinks[0]
        result = vendor_fakes.attend(query[request], keys, keys[..., :kv_lora_rank], seen, bmm1_scale, 0.0, sink)
        out[request] = (result * bmm2_scale).to(out.dtype)
    return out


@pytest.mark.parametrize("xqa", [True, False])
@pytest.mark.parametrize("options", [{"query_lens": 1}, {"query_lens": 3, "seq_lens": (40, 3, 0, 2)}])
def test_what_the_kernels_are_told_is_the_oracle(
    xqa: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtllm_mla, "_decode", lambda: fake_decode)
    monkeypatch.setattr(trtllm_mla, "is_xqa", lambda device: xqa)
    case = make_mla_case(page_size=32, dtype=torch.float16, **options)
    assert_close_to_oracle(trtllm_mla.mla(*case.args(), **case.kwargs()), case.oracle())


def test_sinks_reach_trtllm_gen_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_mla, "_decode", lambda: fake_decode)
    monkeypatch.setattr(trtllm_mla, "is_xqa", lambda device: False)
    case = make_mla_case(page_size=32, dtype=torch.float16, query_lens=2, sinks=True)
    assert_close_to_oracle(trtllm_mla.mla(*case.args(), **case.kwargs()), case.oracle())


@pytest.mark.parametrize(("page_size", "unit"), [(16, 8), (32, 4), (64, 2), (128, 1)])
def test_page_tables_are_padded_to_whole_units_of_128_tokens(page_size: int, unit: int) -> None:
    case = make_mla_case(page_size=page_size, dtype=torch.float16)
    given = trtllm_mla.decode_arguments(*case.args(), **case.kwargs(), xqa=False)
    assert given["block_tables"].shape[1] % unit == 0
    assert given["max_seq_len"] == given["block_tables"].shape[1] * page_size


def test_xqa_gets_one_row_a_request() -> None:
    case = make_mla_case(page_size=32, dtype=torch.float16, query_lens=3, seq_lens=(40, 2))
    given = trtllm_mla.decode_arguments(*case.args(), **case.kwargs(), xqa=True)
    assert given["query"].shape == (6, 1, 4, 80)
    assert given["seq_lens"].tolist() == [38, 39, 40, 0, 1, 2]
    assert torch.equal(given["block_tables"][0], given["block_tables"][2])
