"""TokenSpeed MLA: the arguments its kernel would get. Runs without a GPU; the kernel needs a card of 10.x.

OMP_NUM_THREADS=1 pytest tests/ops/test_tokenspeed_mla.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vendor_fakes

from specops.ops import tokenspeed_mla
from specops.testing.cases import make_mla_case
from specops.testing.oracle import assert_close_to_oracle


def fake_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    out: torch.Tensor,
    local_visible_lens: torch.Tensor,
    **others: Any,
) -> torch.Tensor:
    """MLA where row ``i`` of request ``b`` sees the first ``local_visible_lens[b, i]`` keys."""
    assert workspace_buffer.dtype == torch.int8
    assert local_visible_lens.dtype == torch.int32
    assert local_visible_lens.is_contiguous()
    for request in range(query.shape[0]):
        count = int(seq_lens[request])
        keys = vendor_fakes.gathered(kv_cache.unsqueeze(2), block_tables[request], count)
        seen = torch.arange(count)[None, :] < local_visible_lens[request][:, None]
        result = vendor_fakes.attend(query[request], keys, keys[..., :kv_lora_rank], seen, softmax_scale, 0.0, None)
        out[request] = result.to(out.dtype)
    return out


@pytest.mark.parametrize("options", [{"query_lens": 1}, {"query_lens": 3, "seq_lens": (40, 3, 0, 2)}])
def test_what_the_kernel_is_told_is_the_oracle(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenspeed_mla, "_decode", lambda: fake_decode)
    case = make_mla_case(page_size=32, dtype=torch.bfloat16, **options)
    out = tokenspeed_mla.mla(*case.args(), **case.kwargs())
    assert out.is_contiguous()
    assert_close_to_oracle(out, case.oracle())


def test_missing_package_names_the_extra() -> None:
    case = make_mla_case(dtype=torch.bfloat16)
    tokenspeed_mla._decode.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'specops\[tokenspeed\]'"):
        tokenspeed_mla.mla(*case.args(), **case.kwargs())
