"""What ran, counted in the process that ran it; vLLM's workers are processes of their own.

    llm = vllm.LLM(model, attention_backend="CUSTOM", worker_extension_cls="specops.integrations.vllm.worker.SpecopsWorker")
    llm.collective_rpc("specops_counts")    # one dict a worker

A CUDA graph's replay runs no Python, so it is its capture that is counted.
"""

from __future__ import annotations

# Calls of this process: stores of keys and values, and attention by layout.
COUNTS = {"stored": 0, "uniform": 0, "packed": 0}


class SpecopsWorker:
    """Methods that vLLM adds to its worker when it is named as ``worker_extension_cls``."""

    def specops_counts(self) -> dict[str, int]:
        """Calls since the process started: ``stored``, and attention in ``uniform`` and ``packed`` steps."""
        return dict(COUNTS)
