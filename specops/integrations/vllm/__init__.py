"""specops as an attention backend of vLLM. Importing this package imports nothing of vLLM's.

    llm = vllm.LLM(model, attention_backend="CUSTOM")            # vllm serve MODEL --attention-backend CUSTOM

How it is found: vLLM calls :func:`register`, the entry point ``specops`` of the group ``vllm.general_plugins``, in each of
its processes. That names specops as vLLM's ``CUSTOM`` backend, and changes nothing for an engine that does not ask for
``CUSTOM``, on any device.

How data flows. vLLM writes a step's offsets, lengths and block table into its buffers;
:class:`~specops.integrations.vllm.backend.SpecopsMetadataBuilder` takes them as they are and only adds the layout. In each
layer :class:`~specops.integrations.vllm.backend.SpecopsImpl` views the layer's cache as pages, stores the new keys and
values with :func:`specops.ops.store_kv`, and attends with :func:`specops.ops.mha`; on CPUs it calls the kernels of these two
ops straight (:mod:`specops.ops.prepared`).

* :mod:`~specops.integrations.vllm.mapping`: views, layouts and refusals; needs no vLLM.
* :mod:`~specops.integrations.vllm.backend`: the three classes that vLLM asks for.
* :mod:`~specops.integrations.vllm.cpu`: how ``CUSTOM`` reaches vLLM's CPU platform, which knows its own kernel only.
* :mod:`~specops.integrations.vllm.worker`: calls counted, to ask a running engine for.
* :mod:`~specops.integrations.vllm.checkpoints`: SmolLM2 and specops' draft heads as folders that vLLM loads.
"""

from __future__ import annotations

import logging
import re

BACKEND = "specops.integrations.vllm.backend.SpecopsBackend"
CPU = "specops.integrations.vllm.cpu"
# First version that was run, and the first that was not.
TESTED = ("0.32.0", "0.33.0")

__all__ = ["register"]

_logger = logging.getLogger("vllm.specops")


def register() -> None:
    """Name specops as vLLM's ``CUSTOM`` attention backend. vLLM calls it; calling it again changes nothing.

    Where another plug-in has taken ``CUSTOM`` already, or this vLLM has no registry of attention backends, nothing is
    registered and a warning says so.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        _logger.warning("specops is not registered with vLLM %s (tested: %s): %s", vllm_version(), tested(), error)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        _logger.warning("specops is not registered: vLLM's CUSTOM attention backend is %s already", custom.get_path())
        return
    register_backend(custom, BACKEND)
    for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        member = AttentionBackendEnum.__members__.get(name)
        if member is not None and not member.is_overridden():
            register_backend(member, f"{CPU}.{name}")


def vllm_version() -> str:
    """The version of the vLLM that is running."""
    import vllm

    return str(vllm.__version__)


def tested() -> str:
    """The range of tested versions, in words."""
    return f"{TESTED[0]} up to, not including, {TESTED[1]}"


def version_warning(version: str) -> str | None:
    """What to say about a vLLM version outside of the tested range; None inside."""
    first, end = map(_numbers, TESTED)
    if first <= _numbers(version) < end:
        return None
    return f"specops' vLLM plug-in was tested with vLLM {tested()}; this is vLLM {version}, which may call it in other ways"


def _numbers(version: str) -> tuple[int, ...]:
    """``(0, 32, 1)`` of ``"0.32.1rc2+cpu"``."""
    return tuple(int(number) for number in re.findall(r"(?:^|\.)(\d+)", version.split("+")[0])[:3])
