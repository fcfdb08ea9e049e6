"""specops as an attention backend of SGLang. Importing this package imports nothing of SGLang's.

    python -m sglang.launch_server --model-path MODEL --attention-backend specops

How it is found: SGLang calls :func:`register`, the entry point ``specops`` of the group ``sglang.srt.plugins``, before it
parses its arguments and in its scheduler. That adds the name ``specops`` to the attention backends, for targets and drafts,
and changes nothing for an engine that does not ask for it.

How data flows. SGLang writes a step's lengths and rows of its token table into its buffers;
:class:`~specops.integrations.sglang.backend.SpecopsAttnBackend` computes page table, lengths and layout from those tensors
alone, inside the CUDA graph where there is one, so that capture and replay have nothing to agree on. In each layer the
pool's own method stores the new keys and values, and :func:`specops.ops.mha` attends.

* :mod:`~specops.integrations.sglang.mapping`: views, page tables and layouts; needs no SGLang.
* :mod:`~specops.integrations.sglang.backend`: the classes that SGLang asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

NAME = "specops"
# The one version whose source this was written against.
READ = "0.5.23"
DRAFT_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"

__all__ = ["register"]

_logger = logging.getLogger("sglang.specops")


def register() -> None:
    """Add specops to SGLang's attention backends. SGLang calls it; calling it again changes nothing.

    Where this SGLang has no such registry, nothing is registered and a warning says so.
    """
    try:
        from sglang.srt.arg_groups.choices import (
            ATTENTION_BACKEND_CHOICES,
            DRAFT_ATTENTION_BACKEND_CHOICES,
            add_attention_backend_choices,
            add_draft_attention_backend_choices,
        )
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _logger.warning("specops is not registered with SGLang (written for %s): %s", READ, error)
        return
    for choices, add in (
        (ATTENTION_BACKEND_CHOICES, add_attention_backend_choices),
        (DRAFT_ATTENTION_BACKEND_CHOICES, add_draft_attention_backend_choices),
    ):
        if NAME not in choices:
            add([NAME])
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(create)
        # The map from names to draft backends is a local of this method; a hook adds one entry.
        HookRegistry.register(DRAFT_FACTORY, with_specops, HookType.AROUND)


def create(model_runner: Any) -> Any:
    """The attention backend of one model runner."""
    from sglang.version import __version__

    from specops.integrations.sglang.backend import SpecopsAttnBackend

    if __version__ != READ:
        _logger.warning("specops' SGLang plug-in was written for SGLang %s; this is %s", READ, __version__)
    return SpecopsAttnBackend(model_runner)


def with_specops(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, Any]]],
    *args: Any,
    stamps_children: bool = False,
    **kwargs: Any,
) -> Any:
    """Around SGLang's choice of a draft backend: its map with specops in it.

    Args:
        original: the method; takes all the others.
        factory: SGLang's ``DraftBackendFactory``.
        backend_name, args, kwargs: handed on.
        backend_map: a function for each name, which returns the name and the backend.
        stamps_children: True where the backend of the draft's own decoding steps is wanted, False for draft-extend's.
    """

    def make() -> tuple[str, Any]:
        from specops.integrations.sglang.backend import SpecopsAttnBackend, SpecopsMultiStepBackend

        runner = factory.draft_model_runner
        if not stamps_children:
            return NAME, SpecopsAttnBackend(runner)
        return NAME, SpecopsMultiStepBackend(runner, factory.topk, factory.speculative_num_steps)

    return original(factory, backend_name, {**backend_map, NAME: make}, *args, stamps_children=stamps_children, **kwargs)
