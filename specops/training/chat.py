"""A chat template as scripts: the token pieces between what a user says and what the model answers.

A conversation that a model writes with itself alternates between free text and fixed pieces. The pieces are cut from the
tokenizer's own template by rendering it around sentinels, so any template of the alternating kind works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# First words of user turns. They spread the conversations over the kinds of question people ask; a third of the
# conversations gets none and starts wherever the model likes.
OPENERS = (
    "What is",
    "What are",
    "What are the main",
    "What is the difference between",
    "How do I",
    "How does",
    "How can I",
    "How to",
    "Why do",
    "Why is",
    "Who was",
    "When did",
    "Where is",
    "Which",
    "Explain",
    "Explain how",
    "Explain the concept of",
    "Can you explain",
    "Can you help me",
    "Can you write",
    "Could you give me",
    "Describe",
    "Describe the process of",
    "Define",
    "Tell me about",
    "Tell me a story about",
    "Tell me a joke about",
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Write an essay about",
    "Write a Python function that",
    "Write a function to",
    "Write a letter",
    "Write a",
    "Give me",
    "Give an example of",
    "Give three",
    "List",
    "List five",
    "Name three",
    "Summarize",
    "Summarize the following text:",
    "Rewrite the following sentence",
    "Translate",
    "Compare",
    "Compare and contrast",
    "Create a",
    "Create a list of",
    "Design a",
    "Suggest",
    "Recommend",
    "Generate",
    "Make a plan for",
    "Plan a",
    "Solve",
    "Calculate",
    "If I have",
    "A train",
    "Imagine",
    "I want to",
    "I need help with",
    "I am",
    "I have a question about",
    "My",
    "Hi",
    "Hello,",
    "Is it",
    "Do you know",
    "Does",
    "Should I",
    "In what year",
    "In Python,",
    "Using SQL,",
    "The following",
    "What does",
    "What happens when",
    "What would happen if",
    "What do you think about",
    "What's the best way to",
)


@dataclass(frozen=True)
class ChatScript:
    """The fixed pieces of a conversation, in token ids.

    Attributes:
        opening: everything before the first user turn.
        to_answer: from the token that ends a user turn, excluded, to the first token of the answer, excluded.
        to_user: the same from an answer to the next user turn.
        end_of_turn: the token that ends a turn.
        stop: tokens at which an answer ends, ``end_of_turn`` among them.
        banned: tokens a user turn must not contain (the special ones).
        openers: first words of user turns, drawn uniformly; may hold empty ones.
    """

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]
    end_of_turn: int
    stop: tuple[int, ...]
    banned: tuple[int, ...] = ()
    openers: tuple[tuple[int, ...], ...] = ((),)


def chat_script(tokenizer: Any, openers: tuple[str, ...] = OPENERS) -> ChatScript:
    """Cut the scripts from a Hugging Face tokenizer's chat template.

    Raises:
        ValueError: the tokenizer has no chat template, or one in which turns do not end with one special token.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; a conversation can't be laid out without one")
    marks = ("\x01user one\x01", "\x01answer\x01", "\x01user two\x01")
    messages = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), marks, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    opening, rest = text.split(marks[0])
    to_answer, rest = rest.split(marks[1])
    to_user = rest.split(marks[2])[0]

    def encode(piece: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(piece, add_special_tokens=False))

    # Not tokenizer.eos_token_id: GGUF conversions of some transformers releases name another token there.
    pieces = [encode(to_answer), encode(to_user)]
    end = pieces[0][0]
    special = tuple(sorted(set(tokenizer.all_special_ids) | _added_special(tokenizer)))
    if end not in special or pieces[1][0] != end:
        raise ValueError(f"turns of this template do not end with one special token: {to_answer!r}, {to_user!r}")
    first_words = tuple(encode(opener) for opener in openers)
    return ChatScript(
        opening=encode(opening),
        to_answer=pieces[0][1:],
        to_user=pieces[1][1:],
        end_of_turn=end,
        stop=(end,),
        banned=tuple(token for token in special if token != end),
        openers=first_words + ((),) * max(1, len(first_words) // 2),
    )


def chat_prompt(tokenizer: Any, message: str) -> list[int]:
    """Token ids of one user message with the template around it, ready for the answer."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _added_special(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(index) for index, token in added.items() if token.special}
