"""Tests of the vLLM plug-in against vLLM itself, in an environment of their own: ``make test-vllm``.

vLLM reads these variables when it is imported. Its own values are meant for a whole server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1" if (os.cpu_count() or 1) > 1 else "0")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that spin at every barrier are slow wherever another process wants the core, as in most CI machines.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A Llama of two layers; its weights are never read where no engine starts.
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a config alone."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def custom(tiny: Path) -> Iterator[Any]:
    """The current vLLM config of an engine that asks for ``CUSTOM``."""
    from vllm.config import set_current_vllm_config

    config = engine_config(tiny)
    with set_current_vllm_config(config):
        yield config


def engine_config(folder: Path, **options: Any) -> Any:
    """The config vLLM makes of engine arguments; making it loads the plug-ins."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"attention_backend": "CUSTOM", "dtype": "float32", "skip_tokenizer_init": True, **options}
    return EngineArgs(model=str(folder), **given).create_engine_config()
