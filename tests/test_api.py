"""``specops.generate`` and ``stream`` on a tiny model, against transformers' greedy answers; what importing costs.

Run alone: pytest tests/test_api.py
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import specops
from specops.api import Models
from specops.ops.contracts import constant_when_compiled
from tests.tiny_models import TinyModels, save_tiny_models

PROMPTS = ["w1 w2 w3", "w9", "w7 w7 w7 w7 w7"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return save_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(tiny: TinyModels) -> Models:
    return specops.load_models(tiny.model, tiny.draft, device="cpu")


def test_answers_from_directories_are_those_of_transformers(tiny: TinyModels) -> None:
    for draft in (tiny.draft, None, "auto"):
        answers = specops.generate(PROMPTS, model=tiny.model, draft=draft, device="cpu", max_new_tokens=6)
        assert [str(answer) for answer in answers] == [tiny.answer(prompt, 6) for prompt in PROMPTS]
        assert {(a.finish_reason, a.seed, a.logprobs) for a in answers} == {("length", None, None)}


def test_a_prompt_is_text_token_ids_or_messages(tiny: TinyModels, loaded: Models) -> None:
    ids = tiny.tokenizer(PROMPTS[0])["input_ids"]
    for prompts in (PROMPTS[0], [PROMPTS[0]], ids, [ids]):
        (answer,) = specops.generate(prompts, model=loaded, max_new_tokens=5)
        assert answer.text == tiny.answer(PROMPTS[0], 5)
        assert answer.prompt_tokens == 3
    with pytest.raises(ValueError, match="this tokenizer has no chat template for messages"):
        specops.generate([{"role": "user", "content": "w1"}], model=loaded)


def test_messages_go_through_the_chat_template(tiny: TinyModels, loaded: Models) -> None:
    loaded.tokenizer.chat_template = "w60 {% for m in messages %}{{ m.content }} {% endfor %}w61"
    try:
        expected = tiny.answer("w60 w1 w2 w61", 5)
        one = specops.generate("w1 w2", model=loaded, max_new_tokens=5)
        several = specops.generate(
            [[{"role": "user", "content": "w1"}, {"role": "user", "content": "w2"}]], model=loaded, max_new_tokens=5
        )
        raw = specops.generate("w1 w2", model=loaded, max_new_tokens=5, chat=False)
    finally:
        loaded.tokenizer.chat_template = None
    assert (one[0].text, several[0].text, raw[0].text) == (expected, expected, tiny.answer("w1 w2", 5))


def test_a_stream_gives_the_same_text_in_pieces(loaded: Models) -> None:
    options: dict[str, Any] = {"model": loaded, "max_new_tokens": 9, "temperature": 0.8, "seed": 4, "logprobs": True}
    whole = specops.generate(PROMPTS, **options)
    pieces = list(specops.stream(PROMPTS, **options, max_requests=2))
    for index, answer in enumerate(whole):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == answer.text
        assert [token for piece in own for token in piece.tokens] == answer.tokens
        assert [piece.answer for piece in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].answer is not None
        assert own[-1].answer.tokens == answer.tokens
        assert (answer.seed, len(answer.logprobs or [])) == (4 + index, 9)


def test_stop_strings_may_be_one_or_several(tiny: TinyModels, loaded: Models) -> None:
    words = tiny.answer(PROMPTS[2], 9).split()
    for stop in (words[3], [words[5], words[3]]):
        (answer,) = specops.generate(PROMPTS[2], model=loaded, stop=stop, max_new_tokens=9)
        place = next(i for i, word in enumerate(words) if words[3] in word)
        assert answer.text.split() == words[:place]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", words[3])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temprature": 1.0}, TypeError, "unknown option temprature"),
        ({"temperature": -1.0}, ValueError, "temperature must be a number >= 0"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be >= 1"),
        ({"stop": ""}, ValueError, "a stop string is empty"),
    ],
)
def test_bad_options_are_told_of_before_the_first_token(
    loaded: Models, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        specops.stream("w1", model=loaded, **options)


def test_f50_importing_specops_loads_no_optional_package_and_no_decoding() -> None:
    code = (
        "import sys, specops\n"
        "late = ('transformers', 'flashinfer', 'safetensors', 'matplotlib', 'specops.spec', 'specops.models')\n"
        "print([name for name in late if name in sys.modules])\n"
        "print(specops.Engine.__name__, specops.SamplingParams.__name__, 'generate' in dir(specops))\n"
        "print([name for name in ('transformers', 'flashinfer', 'matplotlib') if name in sys.modules])\n"
        "specops.nothing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "Engine SamplingParams True", "[]"]
    assert done.stderr.endswith("AttributeError: module 'specops' has no attribute 'nothing'\n")


def test_importing_specops_and_its_pytest_plugin_leaves_compiler_and_triton_alone() -> None:
    """pytest imports the plugin before a conftest can choose Triton's interpreter, and in projects that never use it."""
    code = (
        "import sys, specops, specops.testing.plugin\n"
        "print([name for name in ('triton', 'torch._dynamo', 'torch._inductor') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_constants_are_marked_as_torch_marks_them() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    constant_when_compiled(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


def test_every_public_name_is_there() -> None:
    assert all(hasattr(specops, name) for name in specops.__all__)
