"""One request served by code that was traced for several: what ops make of a size of one, step by step as eager code has it.

Torch's tracing decides all of this, and inductor only how it is computed; here nothing is generated.
Run alone: pytest tests/compile/test_one_request.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specops.compile.compiled import CompiledStep
from specops.compile.report import compiled_graphs

WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
# Each takes [B, 6].
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze of the batch": lambda x: x.squeeze(0) * 2,
    "squeeze of everything": lambda x: x[:, :1].squeeze(),
    "squeeze behind unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "every row with every row": lambda x: x[:, None] + x[None],
    "one row for all": lambda x: x[:1].expand_as(x) + x,
    "one column for all": lambda x: x[:, :1].expand(-1, 6) + x,
    "constants for all": lambda x: torch.ones(1, 6).expand(x.shape[0], 6) * x,
    "product with the batch": lambda x: x @ x.t(),
    "products of a request": lambda x: torch.bmm(x[:, None].expand(-1, 3, -1), WEIGHT.expand(x.shape[0], 6, 6)),
    "product with a vector": lambda x: x @ WEIGHT[0],
    "spread over the batch": lambda x: x.std(0, correction=0) + x,
    "running sum": lambda x: x.cumsum(0),
    "last row": lambda x: x[-1:] + x[x.shape[0] - 1],
    "rows but the last": lambda x: F.pad(x, (0, 0, 1, 0))[:-1],
    "differences": lambda x: F.pad(x, (0, 0, 1, 0)).diff(dim=0),
    "transposed and flat": lambda x: x.t().reshape(-1),
    "transposed and copied": lambda x: x.t().contiguous().t(),
    "heads apart": lambda x: x.view(-1, 2, 3).transpose(1, 2).reshape(x.shape),
    "strided": lambda x: x.as_strided((x.shape[0], 2), (6, 3)),
    "by its strides": lambda x: x * x.t().contiguous().stride(0),
    "by its contiguity": lambda x: x * 2 if x.t().is_contiguous() else x * 3,
    "by its size": lambda x: x * (x.shape[0] // 2 + 1),
    "written by index": lambda x: x.clone().index_put_((torch.arange(x.shape[0]),), torch.ones(6)),
    "where": lambda x: torch.where(x[:, :1] > 0, x, x[0]),
    "likeliest and sorted": lambda x: x.topk(2, 1)[0] + x.sort(0)[0][:, :2],
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, -1, 6)] * 3, is_causal=True).view(-1, 6),
}


class Step(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.form(x),)


@pytest.mark.parametrize("name", STEPS)
def test_values_and_shapes_are_those_of_eager_code(name: str) -> None:
    step, before = Step(STEPS[name]), compiled_graphs()
    code = CompiledStep(step, "aot_eager")
    for count in (4, 1, 3, 2, 1):
        x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        torch._dynamo.mark_static(x, 1)
        if count > 1:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(code(x=x)[0], step(x)[0])
    assert compiled_graphs() - before <= 2
