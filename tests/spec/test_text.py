"""Text out of tokens: characters and stop strings that tokens cut anywhere, in the stream and in the loop.

Run alone: pytest tests/spec/test_text.py
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.spec import Engine, SpecConfig
from specops.spec.text import TextStream
from tests.spec.toys import Shadow, greedy, small_llama, target_of


def decode_bytes(tokens: list[int]) -> str:
    """One token a byte: any character but ASCII is cut."""
    return bytes(tokens).decode(errors="replace")


PIECES = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(64)]


class Pieces:
    """A tokenizer whose token ``i`` is the piece ``i``."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(PIECES[token] for token in tokens)


@given(st.text(max_size=30))
def test_text_is_that_of_all_tokens_and_never_shows_half_a_character(text: str) -> None:
    stream = TextStream(decode_bytes)
    for token in text.encode():
        stream.push(token)
        assert text.startswith(stream.text)
    stream.finish()
    assert stream.text == text


@given(st.text("ab é", max_size=24), st.lists(st.text("ab é", min_size=1, max_size=3), max_size=3))
def test_an_answer_ends_before_the_first_stop_string_that_is_complete(text: str, stop: list[str]) -> None:
    stream, shown, read = TextStream(decode_bytes, stop), "", []
    for token in text.encode():
        read.append(token)
        stopped = stream.push(token)
        assert stream.settled.startswith(shown), "what was shown is never taken back"
        shown = stream.settled
        if stopped is not None:
            break
    stream.finish()
    # By the definition: the shortest beginning of the text that holds a stop string, cut before the earliest in it.
    ends = [size for size in range(len(text) + 1) if any(s in text[:size] for s in stop)]
    if ends:
        begun = text[: ends[0]]
        assert stream.stopped in stop
        assert stream.text == begun[: min(begun.find(s) for s in stop if s in begun)]
        assert bytes(read).decode() == begun
    else:
        assert (stream.text, stream.stopped) == (text, None)


def test_an_unfinished_character_at_the_end_is_shown_as_one() -> None:
    stream = TextStream(decode_bytes)
    for token in "é".encode()[:1]:
        stream.push(token)
    assert stream.text == ""
    stream.finish()
    assert stream.text == "\ufffd"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        TextStream(decode_bytes, ["x", ""])


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge)
    return {"ids": greedy(judge, [7] * 13, 24), "target": target, "shadow": Shadow(target)}


def engine(world: dict[str, Any]) -> Engine:
    config = SpecConfig(3, 4, 9)
    return Engine(world["target"], world["shadow"], config, max_requests=2, max_context=64, page_size=4, tokenizer=Pieces())


@pytest.mark.parametrize("place", range(8))
def test_a_stop_string_ends_the_answer_in_every_place_of_a_round(world: dict[str, Any], place: int) -> None:
    ids = world["ids"]
    whole = "".join(PIECES[token] for token in ids)
    stop = "".join(PIECES[token] for token in ids[place : place + 2])
    run = engine(world)
    request = run.generate([[7] * 13], max_new_tokens=24, stop=[stop])[0]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert request.text == whole[: whole.find(stop)]
    assert request.tokens == ids[: len(request.tokens)]
    text = "".join(PIECES[token] for token in request.tokens)
    assert stop in text
    assert stop not in text[: -len(PIECES[request.tokens[-1]])]
    assert run.allocator.num_free == run.allocator.num_pages - 1


def test_a_stream_yields_all_tokens_in_order_and_text_that_only_grows(world: dict[str, Any]) -> None:
    run, seen, shown = engine(world), {}, {}
    for request, tokens in run.stream([[7] * 13, [1, 2], [3]], max_new_tokens=10, stop=["zzz"]):
        seen[request] = seen.get(request, []) + tokens
        assert request.text.startswith(shown.get(request, ""))
        shown[request] = request.text
    assert len(seen) == 3
    assert all(tokens == request.tokens and request.finished for request, tokens in seen.items())
    assert next(iter(seen)).tokens == world["ids"][:10]
    assert all(shown[request] == "".join(PIECES[token] for token in request.tokens) for request in seen)


def test_closing_a_stream_early_cancels_its_requests_and_frees_their_pages(world: dict[str, Any]) -> None:
    run = engine(world)
    other = run.add([5, 6], max_new_tokens=12)
    stream = run.stream([[7] * 13, [1, 2]], max_new_tokens=40)
    first, _ = next(stream)
    stream.close()
    assert first.finish_reason == "cancelled"
    assert first.text == "".join(PIECES[token] for token in first.tokens)
    while run.has_work:
        run.step()
    assert (other.finish_reason, len(other.tokens)) == ("length", 12)
    assert run.allocator.num_free == run.allocator.num_pages - 1


def test_text_and_stop_strings_without_a_tokenizer_are_refused(world: dict[str, Any]) -> None:
    run = Engine(world["target"], max_context=32)
    with pytest.raises(ValueError, match="give the engine a tokenizer"):
        run.add([1], stop=["x"])
    request = run.generate([[1]], max_new_tokens=1)[0]
    with pytest.raises(ValueError, match="has no text"):
        _ = request.text


def test_one_bad_prompt_queues_none(world: dict[str, Any]) -> None:
    run = engine(world)
    with pytest.raises(ValueError, match="the prompt is empty"):
        run.stream([[1], []])
    assert not run.has_work
