"""specops: attention backends for speculative decoding as torch ops.

What decodes whole models is imported at its first use, so that importing specops needs torch alone and stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specops import ops
from specops.kv_cache import OutOfPages, PageAllocator, PagedKVCache, PagedLatentCache, PageTable
from specops.layout import QueryLayout
from specops.metadata import AttentionMetadata, attention_metadata

if TYPE_CHECKING:
    from specops.api import Answer, Models, Piece, generate, load_models, stream
    from specops.compile import DraftExtendRunner
    from specops.models.attention_module import PagedAttention
    from specops.spec import Engine, SamplingParams, SpecConfig

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AttentionMetadata",
    "DraftExtendRunner",
    "Engine",
    "Models",
    "OutOfPages",
    "PageAllocator",
    "PageTable",
    "PagedAttention",
    "PagedKVCache",
    "PagedLatentCache",
    "Piece",
    "QueryLayout",
    "SamplingParams",
    "SpecConfig",
    "attention_metadata",
    "generate",
    "load_models",
    "ops",
    "stream",
]

_AT_FIRST_USE = {
    **dict.fromkeys(("Answer", "Models", "Piece", "generate", "load_models", "stream"), "specops.api"),
    **dict.fromkeys(("Engine", "SamplingParams", "SpecConfig"), "specops.spec"),
    "DraftExtendRunner": "specops.compile",
    "PagedAttention": "specops.models.attention_module",
}


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module 'specops' has no attribute {name!r}")
    value = getattr(importlib.import_module(_AT_FIRST_USE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
