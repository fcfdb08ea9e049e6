"""The decode loop: requests join, are prefilled, and advance together a round at a time until each is finished.

One round of speculative decoding is three steps:

    draft  (tree from the last draft-extend)  ->  verify (target over the tree, accept, compact)  ->  draft-extend

Together they are one step behind one runner, over state that stays on the device: a round is one replay of one CUDA graph
and one small copy to the host. With ``split=True`` (and for the packed draft-extend V1) each is a step of its own behind
a runner of its own, which tells their times apart. Without a draft model the round is one step of plain decoding. All
requests of a batch share the round; rows of finished requests are free for waiting ones before the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specops.batch import DraftExtendBatch
from specops.compile.draft_extend import DraftExtendRunner, DraftExtendStep, draft_extend_packed
from specops.compile.report import RunnerReport
from specops.compile.step_runner import Mode, Progress, StepRunner
from specops.kv_cache import PageAllocator, PageTable
from specops.spec.config import SpecConfig
from specops.spec.draft import DraftStep, draft_fields
from specops.spec.prefill import prefill
from specops.spec.request import Request
from specops.spec.round import DecodeRound, RoundState, RoundStep, pack, round_fields, unpack
from specops.spec.verify import DecodeStep, VerifyStep, verify_fields

DEFAULT_CONTEXT = 2048
OnTokens = Callable[[Request, list[int]], None]


@dataclass
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        rounds: rounds of every request, summed: a batch of 3 adds 3.
        emitted: tokens those rounds accepted, bonus tokens included, before stopping cut them.
        steps: batches run.
        seconds: host time by phase. With ``split=True`` the device is waited for, so that it is the phase's own.
    """

    rounds: int = 0
    emitted: int = 0
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def accepted_per_round(self) -> float:
        """Tokens a round emits on average, the bonus token included."""
        return self.emitted / self.rounds if self.rounds else 0.0


class Engine:
    """Batched greedy decoding of a target model, speculative when given a draft model.

    Args:
        target: a target model (:func:`specops.models.load_target`), or a module with the same methods. The engine
            allocates its caches.
        draft: an EAGLE head that fits the target, or None for plain decoding.
        config: shape of a round.
        max_requests: requests decoded together; more wait.
        max_context: most tokens of a request, prompt included; by default the target's own limit, at most 2048.
        page_size: tokens per cache page.
        num_pages: pages of the pool; by default enough for ``max_requests`` full contexts.
        mode: a runner mode, or ``"auto"``: ``"direct"`` on a GPU, ``"eager"`` elsewhere.
        buckets: batch sizes to capture.
        strict: raise where a graph is lost.
        prefill_tokens: most rows of one prefill forward.
        split: run draft, verify and draft-extend behind a runner each, and wait for the device after each, so that
            ``stats.seconds`` tells them apart.

    Raises:
        ValueError: a draft that does not fit the target, a context beyond either model's, or a pool too small for one
            request.
    """

    def __init__(
        self,
        target: nn.Module,
        draft: nn.Module | None = None,
        config: SpecConfig | None = None,
        *,
        max_requests: int = 8,
        max_context: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        mode: Mode | Literal["auto"] = "auto",
        buckets: Iterable[int] | None = None,
        strict: bool = False,
        prefill_tokens: int = 2048,
        split: bool = False,
    ) -> None:
        weight = next(target.parameters())
        self.target, self.draft = target.eval(), draft.eval() if draft is not None else None
        self.device, self.dtype = weight.device, weight.dtype
        self.config = config or SpecConfig()
        self.page_size = page_size
        self.max_requests = max_requests
        self.max_context = _context(target, draft, max_context)
        self.prefill_tokens = prefill_tokens
        self.split = split or self.config.draft_extend == "v1"
        self.stats = EngineStats()
        self._aux_layers: tuple[int, ...] = draft.config.aux_layers if draft is not None else ()  # type: ignore
        scratch = self.config.scratch_tokens if draft is not None else 1
        self._row_tokens = self.max_context + scratch
        per_row = -(-self._row_tokens // page_size)
        self.allocator = PageAllocator(num_pages or max_requests * per_row + 1, page_size)
        # One row more than requests: the spare one that padding points at.
        self.pages = PageTable(self.allocator, max_requests + 1, self._row_tokens, self.device)
        for model in (self.target, self.draft):
            if model is not None:
                model.allocate_caches(self.allocator.num_pages, page_size)  # type: ignore[operator]
        self.mode: Mode = mode if mode != "auto" else ("direct" if self.device.type == "cuda" else "eager")
        self._waiting: deque[Request] = deque()
        self._active: dict[int, Request] = {}
        self._rows: tuple[list[int], Tensor] | None = None
        draft_sizes = (None, None) if draft is None else (draft.config.draft_vocab_size, draft.config.hidden_size)  # type: ignore
        self.state = RoundState(self.pages.tensor(), *draft_sizes, self.dtype)
        self._build_runners(buckets, strict)

    def add(self, prompt: Sequence[int], *, max_new_tokens: int = 128, stop_token_ids: Iterable[int] = ()) -> Request:
        """Queue a request; it joins the batch at the next step that has a free row and enough pages.

        Raises:
            ValueError: an empty prompt, one that leaves no room in the context, a token outside the vocabulary, or a
                request that the whole pool could not hold. Nothing is queued then.
        """
        request = Request(list(prompt), max_new_tokens, frozenset(stop_token_ids))
        vocab = self.target.config.vocab_size  # type: ignore[union-attr]
        if not request.prompt:
            raise ValueError("the prompt is empty; it needs at least one token (a BOS token will do)")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
        if len(request.prompt) >= self.max_context:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens and the context {self.max_context}; shorten it, or raise "
                "max_context"
            )
        bad = [token for token in request.prompt if not 0 <= token < vocab]
        if bad:
            raise ValueError(f"prompt token {bad[0]} is outside the vocabulary of {vocab}")
        needed, pool = self._pages_needed(request), self.allocator.num_pages - 1
        if needed > pool:
            raise ValueError(f"the request may need {needed} pages and the pool has {pool}; raise num_pages")
        self._waiting.append(request)
        return request

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    def step(self, on_tokens: OnTokens | None = None) -> list[Request]:
        """Admit waiting requests, run one round, and return the requests that finished.

        Args:
            on_tokens: called with a request and its new tokens, in order.
        """
        tell = on_tokens or _ignore
        finished = self._admit(tell)
        if self._active:
            finished += self._round(tell)
        return finished

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        stop_token_ids: Iterable[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> list[Request]:
        """Decode prompts to their end, batched as rows and pages allow.

        Returns:
            One finished request per prompt, in order.
        """
        stops = frozenset(stop_token_ids)
        requests = [self.add(prompt, max_new_tokens=max_new_tokens, stop_token_ids=stops) for prompt in prompts]
        while any(not request.finished for request in requests):
            self.step(on_tokens)
        return requests

    def warm_up(self, progress: Progress | None = None) -> dict[str, RunnerReport]:
        """Compile and capture every runner's buckets."""
        for runner in self.runners.values():
            runner.warm_up(progress)
        return self.explain()

    def explain(self) -> dict[str, RunnerReport]:
        """Each runner's report: captured or why not."""
        return {name: runner.explain() for name, runner in self.runners.items()}

    def cancel(self, request: Request) -> None:
        """Drop a waiting or running request; its pages are free at once."""
        if request in self._waiting:
            self._waiting.remove(request)
        for row, active in list(self._active.items()):
            if active is request:
                self._release(row)
        request.finish_reason = request.finish_reason or "cancelled"

    def _build_runners(self, buckets: Iterable[int] | None, strict: bool) -> None:
        common: dict[str, Any] = {
            "device": self.device,
            "max_requests": self.max_requests,
            "buckets": buckets,
            "mode": self.mode,
            "strict": strict,
        }
        max_pages, size = self.pages.max_pages, self.page_size
        table = round_fields(self.state.spare_row)
        self.runners: dict[str, StepRunner] = {}
        if self.draft is None:
            step = DecodeRound(DecodeStep(self.target, size), self.state)
            self.runners["decode"] = StepRunner(step, table, name="decode", **common)
            return
        draft: Any = self.draft
        drafting = DraftStep(draft, size, self.config)
        verify = VerifyStep(self.target, size, self.config, self._aux_layers)
        if not self.split:
            extend = DraftExtendStep(draft, size, self.config.width)
            step = RoundStep(drafting, verify, extend, self.state)
            self.runners["round"] = StepRunner(step, table, name="round", **common)
            return
        table = draft_fields(draft.config.draft_vocab_size, draft.config.hidden_size, max_pages, self.dtype)
        self.runners["draft"] = StepRunner(drafting, table, name="draft", **common)
        self.runners["verify"] = StepRunner(verify, verify_fields(self.config, max_pages), name="verify", **common)
        if self.config.draft_extend == "v2":
            del common["device"]
            extend_runner = DraftExtendRunner(
                draft, draft.caches, tokens_per_request=self.config.width, max_pages=max_pages, dtype=self.dtype, **common
            )
            self.runners["draft_extend"] = extend_runner.runner

    def _pages_needed(self, request: Request) -> int:
        """Pages of the whole request, taken when it joins: once running, it can't run out."""
        longest = min(len(request.prompt) + request.max_new_tokens, self.max_context)
        return self.allocator.pages_for(longest + self._row_tokens - self.max_context)

    def _admit(self, tell: OnTokens) -> list[Request]:
        free_rows = [row for row in range(self.max_requests) if row not in self._active]
        joined: list[int] = []
        while self._waiting and free_rows and self._pages_needed(self._waiting[0]) <= self.allocator.num_free:
            row, request = free_rows.pop(0), self._waiting.popleft()
            self.pages.reserve(row, self._pages_needed(request) * self.page_size)
            self._active[row] = request
            joined.append(row)
        if not joined:
            return []
        started = time.perf_counter()
        index = torch.tensor(joined, device=self.device)
        prompts = [self._active[row].prompt for row in joined]
        table = self.pages.tensor()[index]
        out = prefill(self.target, self.draft, prompts, table, self.page_size, self.prefill_tokens, self._aux_layers)
        lens = torch.tensor([len(p) for p in prompts], dtype=torch.int32, device=self.device)
        self.state.join(index, lens, out.next_tokens, out.next_token_logits, out.hidden_states)
        tokens, margins = out.next_tokens.tolist(), out.margins.tolist()
        self._clock("prefill", started)
        return self._hand_out(joined, [[t] for t in tokens], [[m] for m in margins], tell)

    def _round(self, tell: OnTokens) -> list[Request]:
        rows, index = self._row_index()
        lens, emitted, margins = self._split_round(index) if "draft" in self.runners else self._one_round(index)
        self.stats.steps += 1
        self.stats.rounds += len(rows)
        self.stats.emitted += sum(lens)
        for row, count in zip(rows, lens, strict=True):
            self._active[row].accept_lens.append(count)
        return self._hand_out(
            rows,
            [tokens[:count] for tokens, count in zip(emitted, lens, strict=True)],
            [gaps[:count] for gaps, count in zip(margins, lens, strict=True)],
            tell,
        )

    def _row_index(self) -> tuple[list[int], Tensor]:
        """Active rows, on the host and on the device; made anew only when the batch has changed."""
        rows = list(self._active)
        if self._rows is None or self._rows[0] != rows:
            self.pages.tensor()
            self._rows = rows, torch.tensor(rows, device=self.device)
        return self._rows

    def _one_round(self, index: Tensor) -> tuple[list[int], list[list[int]], list[list[float]]]:
        started = time.perf_counter()
        ((name, runner),) = self.runners.items()
        result = unpack(runner({"rows": index})[0])
        self._clock(name, started)
        return result

    def _split_round(self, index: Tensor) -> tuple[list[int], list[list[int]], list[list[float]]]:
        state, width = self.state, self.config.width
        table, committed = state.page_table[index], state.seq_lens[index]
        started = self._clock("", time.perf_counter())
        tokens, parents, depths, mask = self.runners["draft"](
            {
                "root_tokens": state.root_tokens[index],
                "next_token_logits": state.next_token_logits[index],
                "hidden_states": state.hidden_states[index],
                "seq_lens": committed,
                "page_table": table,
            }
        )
        started = self._clock("draft", started)
        accept_lens, accept_tokens, hidden, gaps = self.runners["verify"](
            {
                "tokens": tokens,
                "parents": parents,
                "depths": depths,
                "tree_mask": mask,
                "seq_lens": committed + width,
                "page_table": table,
            }
        )
        started = self._clock("verify", started)
        logits, carried = self._extend(accept_lens, accept_tokens, hidden, committed, table)
        roots = accept_tokens.gather(1, accept_lens.long()[:, None] - 1)[:, 0]
        state.join(index, committed + accept_lens, roots, logits, carried)
        started = self._clock("draft_extend", started)
        result = unpack(pack(accept_lens, accept_tokens, gaps))
        self._clock("read_back", started)
        return result

    def _extend(
        self, accept_lens: Tensor, accept_tokens: Tensor, hidden: Tensor, committed: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        width = self.config.width
        if self.config.draft_extend == "v2":
            batch = DraftExtendBatch(accept_tokens, hidden, committed + width, accept_lens, table)
            logits, carried = self.runners["draft_extend"](batch.as_dict())
            return logits, carried
        real = (torch.arange(width, device=self.device) < accept_lens[:, None]).reshape(-1)
        assert self.draft is not None
        return draft_extend_packed(
            self.draft,
            self.page_size,
            accept_tokens.reshape(-1)[real],
            hidden[real],
            committed + accept_lens,
            accept_lens,
            table,
            max_accept_len=self.config.max_accept_len,
        )

    def _hand_out(
        self, rows: list[int], tokens: list[list[int]], margins: list[list[float]], tell: OnTokens
    ) -> list[Request]:
        """Append what a step emitted, tell the caller, and release the rows of requests that end."""
        finished = []
        for row, new, gaps in zip(rows, tokens, margins, strict=True):
            request = self._active[row]
            taken = request.emit(new, gaps, self.max_context)
            if request.finished:
                self._release(row)
                finished.append(request)
            tell(request, taken)
        return finished

    def _release(self, row: int) -> None:
        del self._active[row]
        self.pages.release(row)
        self.state.seq_lens[row] = 0
        # The table's mirror must be current before the row is used again.
        self._rows = None

    def _clock(self, phase: str, started: float) -> float:
        """Add the time since ``started`` to a phase; the time now."""
        if self.split and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if phase:
            self.stats.seconds[phase] = self.stats.seconds.get(phase, 0.0) + now - started
        return now


def _context(target: Any, draft: Any, asked: int | None) -> int:
    """The context length both models can serve.

    Raises:
        ValueError: naming both numbers, when the request or the draft's limit does not fit.
    """
    limit = target.config.max_position_embeddings
    context = asked if asked is not None else min(limit, DEFAULT_CONTEXT)
    if context < 2:
        raise ValueError(f"max_context must be >= 2, got {context}")
    if context > limit:
        raise ValueError(f"max_context {context} is beyond the target's {limit} positions")
    if draft is None:
        return context
    if draft.config.target_hidden_size != target.config.hidden_size:
        raise ValueError(
            f"the draft was made for hidden states of {draft.config.target_hidden_size}, the target's have "
            f"{target.config.hidden_size}; use a head that was trained for this target"
        )
    if context > draft.config.max_position_embeddings:
        raise ValueError(
            f"max_context {context} is beyond the draft's {draft.config.max_position_embeddings} positions "
            f"(the target has {limit}); pass max_context={draft.config.max_position_embeddings} or less"
        )
    return context


def _ignore(request: Request, tokens: list[int]) -> None:
    """The callback of who wants none."""
