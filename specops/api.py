"""Text in, text out: ``generate`` and ``stream`` load a model and a draft head, and decode prompts to their end.

    answers = specops.generate(["Why is the sky blue?"], model="path/to/model", draft="path/to/head", temperature=0.7)
    print(answers[0].text)

Whoever decodes more than once loads once with ``load_models`` and passes the result as ``model``. For requests that come
and go, use :class:`specops.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from specops.models.eagle_checkpoint import load_head, shipped_head
from specops.models.loading import load_target, load_tokenizer
from specops.spec import Engine, Request, SamplingParams, SpecConfig

Say = Callable[[str], None]
Message = dict[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
SMOLLM2_HEAD = "smollm2-135m"


@dataclass
class Models:
    """A target with its tokenizer and, if any, its draft head."""

    target: Any
    tokenizer: Any
    head: Any

    def chat(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of one user turn, or of messages, ready for the answer.

        Without a chat template a single turn is the bare text.

        Raises:
            ValueError: messages for a tokenizer without a chat template.
        """
        if getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not isinstance(prompt, str):
            raise ValueError("this tokenizer has no chat template for messages; give the prompt as text")
        return list(self.tokenizer(prompt)["input_ids"])

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """Token ids of a prompt: text (a user turn if ``chat``), messages, or token ids, which stay as they are."""
        if isinstance(prompt, str):
            return self.chat(prompt) if chat else list(self.tokenizer(prompt)["input_ids"])
        if prompt and all(isinstance(entry, dict) for entry in prompt):
            return self.chat(prompt)  # type: ignore[arg-type]
        return [int(token) for token in prompt]  # type: ignore[arg-type]


def load_models(
    model: Any = "smollm2",
    draft: str | None = SMOLLM2_HEAD,
    *,
    device: str | None = None,
    dtype: str | None = None,
    backend: str = "auto",
    tokenizer: Any = None,
    mesh: DeviceMesh | None = None,
    say: Say = lambda text: None,
) -> Models:
    """Target, tokenizer and head.

    Args:
        model: a Hugging Face directory, a GGUF file, or ``"smollm2"``.
        draft: a head's directory, the name of a head that comes with specops, or None.
        device: ``"cuda"`` where there is a GPU, else ``"cpu"``, when not given.
        dtype: name of a torch dtype; float32 on the CPU and bfloat16 on a GPU when not given.
        backend: attention backend.
        tokenizer: a transformers tokenizer; that of ``model`` when not given.
        mesh: ranks that share the models, each keeping its part (:mod:`specops.parallel`); ``device`` is then the mesh's.
        say: told what is being loaded.

    Raises:
        FileNotFoundError, ValueError, ImportError: what is missing or does not fit, in words.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if mesh is not None:
        device = mesh.device_type
    dtype = dtype or ("float32" if torch.device(device).type == "cpu" else "bfloat16")
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"dtype must be a torch float dtype such as float32 or bfloat16, got {dtype!r}")
    say(f"loading {model} in {dtype} on {device}" + ("" if mesh is None else f", cut for {mesh.size()} ranks"))
    # A model that is to be cut may be larger than one device.
    target = load_target(model, dtype=torch_dtype, device=device if mesh is None else "cpu", backend=backend)
    tokenizer = tokenizer or load_tokenizer(model)
    head = None
    if draft is not None:
        directory = draft if "/" in draft or "\\" in draft or draft.startswith(".") else shipped_head(draft)
        say(f"loading the draft head from {directory}")
        head = load_head(directory, target)
        head.set_backend(backend)
    if mesh is not None:
        from specops.parallel import shard

        shard(target, *([] if head is None else [head]), mesh=mesh)
    return Models(target, tokenizer, head)


@dataclass(frozen=True)
class Answer:
    """One finished answer.

    Attributes:
        text: without special tokens and without the stop string that ended it.
        tokens: all token ids, the stopping ones included.
        prompt_tokens: length of the prompt.
        finish_reason, stop_reason, logprobs: as of :class:`specops.spec.Request`.
        seed: the seed in use; None for a greedy answer.
        accepted_per_round: tokens a round of speculative decoding emitted on average; 1 without a draft.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[float] | None
    seed: int | None
    accepted_per_round: float

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, request: Request) -> Answer:
        """The answer of a finished request."""
        rounds = len(request.accept_lens)
        return cls(
            request.text,
            request.tokens,
            len(request.prompt),
            request.finish_reason or "",
            request.stop_reason,
            request.logprobs,
            request.sampling.seed if request.sampling.temperature > 0 else None,
            sum(request.accept_lens) / rounds if rounds else 1.0,
        )


@dataclass(frozen=True)
class Piece:
    """New text of one prompt.

    Attributes:
        index: which prompt.
        text, tokens: what is new. A piece may have tokens and no text yet: half a character, or the start of a stop string.
        answer: the whole answer with the last piece, else None.
    """

    index: int
    text: str
    tokens: list[int]
    answer: Answer | None


def generate(prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Answer]:
    """Decode prompts to their end.

    Args:
        prompts: one prompt or several. A prompt is text, a list of chat messages, or a list of token ids.
        **options: as for :func:`stream`.

    Returns:
        One answer per prompt, in order.

    Raises:
        FileNotFoundError, ImportError: a model or a package that is not there.
        ValueError: a head that does not fit, a prompt longer than the context, an option out of range.
        TypeError: an option that does not exist.
    """
    answers = {piece.index: piece.answer for piece in stream(prompts, **options) if piece.answer is not None}
    return [answers[index] for index in sorted(answers)]


def stream(
    prompts: Prompt | Sequence[Prompt],
    *,
    model: Any = "smollm2",
    draft: str | None = "auto",
    config: SpecConfig | None = None,
    max_new_tokens: int = 128,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] | None = None,
    logprobs: bool = False,
    chat: bool = True,
    max_requests: int | None = None,
    max_context: int | None = None,
    mode: str = "auto",
    device: str | None = None,
    dtype: str | None = None,
    backend: str = "auto",
    tokenizer: Any = None,
    mesh: DeviceMesh | None = None,
    **sampling: Any,
) -> Iterator[Piece]:
    """Decode prompts and yield text as it comes.

    Args:
        prompts: as for :func:`generate`.
        model: a Hugging Face directory, a GGUF file, ``"smollm2"``, or the result of :func:`load_models`.
        draft: a head's directory, the name of a head that comes with specops, or None for plain decoding. ``"auto"`` is
            the head that comes with specops for ``"smollm2"``, and None for other models.
        config: shape of a round.
        max_new_tokens: most tokens of an answer.
        stop: strings that end an answer.
        stop_token_ids: tokens that end an answer; the model's own end tokens when not given.
        logprobs: keep log-probabilities.
        chat: wrap text in the tokenizer's chat template, if it has one.
        max_requests: prompts decoded together; all up to 8 when not given.
        max_context, mode: as for :class:`specops.Engine`.
        device, dtype, backend, tokenizer, mesh: as for :func:`load_models`; they mean nothing to models loaded before.
        **sampling: fields of :class:`specops.SamplingParams`. With a seed, prompt ``i`` gets ``seed + i``.

    Yields:
        :class:`Piece`, of all prompts in turn.
    """
    unknown = set(sampling) - {field.name for field in fields(SamplingParams)}
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
    params = SamplingParams(**sampling)
    if isinstance(model, Models):
        models = model
    else:
        if draft == "auto":
            draft = SMOLLM2_HEAD if model == "smollm2" else None
        models = load_models(model, draft, device=device, dtype=dtype, backend=backend, tokenizer=tokenizer, mesh=mesh)
    ids = [models.encode(prompt, chat=chat) for prompt in _several(prompts)]
    engine = Engine(
        models.target,
        models.head,
        config,
        max_requests=max_requests or max(1, min(8, len(ids))),
        max_context=max_context,
        mode=mode,  # type: ignore[arg-type]
        tokenizer=models.tokenizer,
    )
    stops = models.target.config.eos_token_ids if stop_token_ids is None else stop_token_ids
    each = [params if params.seed is None else replace(params, seed=params.seed + index) for index in range(len(ids))]
    events = engine.stream(
        ids,
        sampling=each,
        max_new_tokens=max_new_tokens,
        stop=[stop] if isinstance(stop, str) else list(stop),
        stop_token_ids=stops,
        logprobs=logprobs,
    )
    return _pieces(events)


def _pieces(events: Iterator[tuple[Request, list[int]]]) -> Iterator[Piece]:
    # Requests join in the order of their prompts, so the first event of each comes in that order, too.
    index: dict[Request, int] = {}
    shown: dict[Request, int] = {}
    for request, tokens in events:
        place, text = index.setdefault(request, len(index)), request.text
        new = text[shown.get(request, 0) :]
        shown[request] = len(text)
        yield Piece(place, new, tokens, Answer.of(request) if request.finished else None)


def _several(prompts: Any) -> list[Prompt]:
    """One prompt as a list of one: text, a list of token ids, or a list of messages."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, dict))):
        return [prompts]
    return list(prompts)
