"""The way to specops on vLLM's CPU platform, which does not know ``CUSTOM`` and takes one of three backends by itself.

Those three are registered to the names of this module. Looking a name up gives specops' class if the engine that is being
set up asks for ``CUSTOM``, and vLLM's own class, untouched, if it does not. Without this step, an engine that asks for
``CUSTOM`` on a CPU would log a line and run vLLM's kernel.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

_logger = init_logger("vllm.specops.cpu")


def __getattr__(name: str) -> Any:
    if name not in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attention = get_current_vllm_config().attention_config
    custom = AttentionBackendEnum.CUSTOM
    if custom in attention.backend_per_kind.values():
        raise ValueError("on a CPU vLLM cannot choose CUSTOM for some kinds of layers; use attention_backend='CUSTOM'")
    if attention.backend is not custom:
        return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    if name != "CPU_ATTN":
        raise ValueError("specops' vLLM plug-in does not serve MLA models; leave attention_backend='CUSTOM' out")
    from specops.integrations.vllm.backend import SpecopsBackend

    _logger.info_once("Attention runs in specops; a line above that CUSTOM cannot be used on CPU means vLLM's own kernels.")
    return SpecopsBackend
