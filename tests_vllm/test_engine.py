"""SmolLM2-135M in vLLM engines with specops' attention: greedy ids are transformers', and it is specops that ran.

make test-vllm, or in its environment: pytest tests_vllm/test_engine.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specops.integrations.vllm.checkpoints import write_smollm2

LAYERS, NEW = 30, 40
PROMPTS = [
    "The capital of France is",
    "def add(a, b):\n    return",
    "Once upon a time, in a village by the sea,",
    "1 2 3 4 5 6 7",
    "Q: What is two plus two? A:",
    # Longer than a page of 128 tokens, and than a step.
    "The rivers of Europe, from the longest to the shortest, are " + ", ".join(f"river number {n}" for n in range(1, 60)),
    "Water boils at",
    "Write a poem about the moon.",
]
WORKER = "specops.integrations.vllm.worker.SpecopsWorker"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """SmolLM2-135M-Instruct in float32, and the draft head that comes with specops."""
    return write_smollm2(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[int]]:
    """transformers' greedy ids, past any end token, one prompt at a time."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
        answers.append(ids[0, inputs.input_ids.shape[1] :].tolist())
    assert [len(answer) for answer in answers] == [NEW] * len(PROMPTS)
    return answers


@contextlib.contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    """An engine in processes of its own, ended afterwards."""
    from vllm import LLM

    given = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        # Below the long prompt: its chunks share steps with the decoding of others.
        "max_num_batched_tokens": 96,
        "enforce_eager": True,
        "worker_extension_cls": WORKER,
        "disable_log_stats": False,
    }
    llm = LLM(str(model), **{**given, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def ids(llm: Any, prompts: list[str]) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False)]


def counts(llm: Any) -> dict[str, int]:
    (worker,) = llm.collective_rpc("specops_counts")
    return worker


def metric(llm: Any, name: str) -> float:
    return sum(found.value for found in llm.get_metrics() if found.name == f"vllm:spec_decode_{name}")


def test_plain_decoding(folders: tuple[Path, Path], expected: list[list[int]]) -> None:
    with engine(folders[0], attention_backend="CUSTOM") as llm:
        assert counts(llm) == {"stored": 0, "uniform": 0, "packed": 0}
        assert ids(llm, PROMPTS[:1]) == expected[:1]
        # One step for the prompt, then one for each token but the last.
        steps = LAYERS * NEW
        assert counts(llm) == {"stored": steps, "uniform": steps, "packed": 0}
        assert ids(llm, PROMPTS) == expected
        after = counts(llm)
        assert after["packed"] >= LAYERS
        assert after["stored"] == after["uniform"] + after["packed"]


def test_decoding_with_an_eagle3_head(folders: tuple[Path, Path], expected: list[list[int]]) -> None:
    draft = {
        "method": "eagle3",
        "model": str(folders[1]),
        "num_speculative_tokens": 3,
        "attention_backend": "CUSTOM",
    }
    with engine(folders[0], attention_backend="CUSTOM", speculative_config=draft) as llm:
        assert ids(llm, PROMPTS[:1]) == expected[:1]
        rounds, accepted = metric(llm, "num_drafts"), metric(llm, "num_accepted_tokens")
        assert accepted >= 5
        assert rounds + accepted <= NEW + 3
        # Each of these rounds ran the target's layers and, three times, the head's one.
        assert counts(llm)["uniform"] >= (LAYERS + 3) * rounds
        assert ids(llm, PROMPTS) == expected


def test_decoding_in_compiled_code(folders: tuple[Path, Path], expected: list[list[int]]) -> None:
    with engine(folders[0], attention_backend="CUSTOM", enforce_eager=False) as llm:
        assert ids(llm, PROMPTS) == expected
        assert counts(llm)["stored"] >= LAYERS * NEW


def test_an_engine_that_does_not_ask_keeps_vllms_attention(folders: tuple[Path, Path], expected: list[list[int]]) -> None:
    with engine(folders[0]) as llm:
        assert ids(llm, PROMPTS[:2]) == expected[:2]
        assert counts(llm) == {"stored": 0, "uniform": 0, "packed": 0}


def test_a_refused_engine_says_why_before_it_loads(folders: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(RuntimeError, match="Engine core initialization failed"),
        engine(folders[0], attention_backend="CUSTOM", kv_cache_dtype="fp8_e5m2"),
    ):
        pass
    said = "".join(capfd.readouterr())
    assert "ValueError: specops' vLLM plug-in cannot serve this model: cache dtype fp8_e5m2 (specops takes auto," in said
    assert "Loading weights took" not in said
