"""Small random models for the loop's tests: a transformers model as the judge, a target with its weights, and drafts."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from specops.models.eagle import EagleConfig, EagleHead
from specops.models.loading import load_target


def small_llama(**options: Any) -> transformers.PreTrainedModel:
    """A random Llama whose greedy text varies: wide weights, no end token."""
    torch.manual_seed(options.pop("seed", 0))
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    kind = options.pop("kind", "Llama")
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return model


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy continuation."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def target_of(model: transformers.PreTrainedModel, backend: str = "auto") -> Any:
    return load_target(model, backend=backend)


def untrained_head(target: Any, **options: Any) -> EagleHead:
    """An EAGLE head with random weights: hardly ever right."""
    torch.manual_seed(1)
    head = EagleHead(EagleConfig.for_target(target.config, **options), target.embed_tokens, target.lm_head.weight)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return head.eval().requires_grad_(False)


class Shadow(nn.Module):
    """The target as its own draft, a token short of context: right most of the time, at every depth."""

    def __init__(self, target: Any, noise: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = copy.deepcopy(target)
        for parameter in self.model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * noise)
        config = target.config
        self.config = SimpleNamespace(
            draft_vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            hidden_width=config.hidden_size,
            max_position_embeddings=config.max_position_embeddings,
            aux_layers=(),
        )

    def allocate_caches(self, *args: Any, **options: Any) -> Any:
        return self.model.allocate_caches(*args, **options)

    @property
    def caches(self) -> Any:
        return self.model.caches

    def forward(self, input_ids: Tensor, hidden_states: Tensor, meta: Any) -> Tensor:
        return self.model(input_ids, meta)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids
