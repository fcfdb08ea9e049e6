"""Shared by all tests: GPU tests are skipped with a reason where there is no GPU, and every test starts from one seed.

Without a GPU, Triton kernels run through Triton's interpreter. Triton reads that choice when a kernel is defined, so it is
made here, before anything imports Triton.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
