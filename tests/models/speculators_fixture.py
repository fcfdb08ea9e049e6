"""EAGLE-3 heads as the ``speculators`` package itself writes them, with the logits its own module gives over draft steps.

    python tests/models/speculators_fixture.py          # writes tests/models/data/speculators_*/, needs speculators

The folders are committed, so that tests compare with the package's figures where it is not installed. Written with
speculators 0.9.0 under transformers 5.17.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"
ROWS, STEPS, VOCAB, DRAFT, HIDDEN = 9, 3, 64, 16, 16
LAYER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
# name: options of the head, type and options of its layers, size of the draft vocabulary
HEADS: dict[str, tuple[dict[str, Any], str, dict[str, Any], int]] = {
    "plain": ({}, "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, DRAFT),
    "residual": ({"norm_before_residual": True, "norm_before_fc": True}, "llama", {"attention_bias": True}, VOCAB),
    "carried": (
        {"norm_output": True, "fc_norm": True, "norm_before_residual": True},
        "qwen3",
        {"num_hidden_layers": 2},
        DRAFT,
    ),
    # Its later steps are not comparable: training leaves the window where step 0 had it, decoding moves it on.
    "window": (
        {},
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"]},
        DRAFT,
    ),
}
COMPARABLE_STEPS = {"window": 1}
AUX = [2, 4, 5]


def kept_tokens(draft: int) -> Tensor:
    """Target ids of the draft vocabulary: every fourth, from 1."""
    return torch.arange(1, VOCAB, VOCAB // draft) if draft < VOCAB else torch.arange(VOCAB)


def write_head(name: str, directory: Path, seed: int = 0) -> dict[str, Tensor]:
    """Save one of ``HEADS`` with random weights, and what the package's module answers.

    Returns:
        input_ids ``[ROWS]``, hidden_states ``[ROWS, 3 * HIDDEN]``, and logits ``[STEPS, ROWS, draft]``: step ``j`` of row
        ``i`` reads token ``i + j`` and the state that step ``j - 1`` left at row ``i``.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    options, model_type, layer_options, draft = HEADS[name]
    torch.manual_seed(seed)
    layer = AutoConfig.for_model(model_type, **{**LAYER, **layer_options})
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft,
        eagle_aux_hidden_state_layer_ids=AUX,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    model = Eagle3DraftModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        fresh = torch.rand_like(parameter) + 0.5 if parameter.dim() == 1 else torch.randn_like(parameter) * 0.3
        parameter.copy_(fresh)
    if draft < VOCAB:
        kept = kept_tokens(draft)
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[kept] = True
        model.load_vocab_mappings(mask, kept - torch.arange(draft))
    model.save_pretrained(directory)
    (directory / "config.py").unlink(missing_ok=True)  # The package's own source, which it saves along.

    ids, hidden = torch.randint(VOCAB, (ROWS,)), torch.randn(ROWS, 3 * HIDDEN)
    steps: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: steps.append(output[0].detach().clone()))
    with torch.no_grad():
        model(hidden[None], ids[None], torch.zeros(1, ROWS, dtype=torch.long), ttt_steps=STEPS)
    return {"input_ids": ids, "hidden_states": hidden, "logits": torch.stack(steps)}


def main() -> None:
    from safetensors.torch import save_file

    for name in HEADS:
        directory = DATA / f"speculators_{name}"
        answers = write_head(name, directory)
        save_file(answers, DATA / f"speculators_{name}.safetensors")
        print(f"{directory}: logits {tuple(answers['logits'].shape)}")


if __name__ == "__main__":
    sys.exit(main())
