"""The decode loop: requests join, are prefilled, and advance together a round at a time until each is finished.

One round of speculative decoding is three steps:

    draft  (tree from the last draft-extend)  ->  verify (target over the tree, accept, compact)  ->  draft-extend

Together they are one step behind one runner, over state that stays on the device: a round is one replay of one CUDA graph
and one small copy to the host. With ``split=True`` (and for the packed draft-extend V1) each is a step of its own behind
a runner of its own, which tells their times apart. Without a draft model the round is one step of plain decoding. All
requests of a batch share the round; rows of finished requests are free for waiting ones before the next. Greedy and
sampling requests mix; a batch that is greedy alone runs a graph without anything for sampling.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from specops.compile.report import RunnerReport
from specops.compile.step_runner import Mode, Progress, StepRunner
from specops.kv_cache import PageAllocator, PageTable, sendable
from specops.models.packed_linear import pack_linears
from specops.parallel import random_seed
from specops.spec.config import SpecConfig, context_length
from specops.spec.prefill import Choose, Forwards, prefill
from specops.spec.prefill_graphs import Prefilled, PrefillGraphs, PrefillStep, plans_on_host
from specops.spec.request import Request
from specops.spec.round import RoundResult, RoundState, pack, unpack
from specops.spec.runners import VARIANTS, Pending, RoundRunners, Variant, variant_for
from specops.spec.sampling import SamplingParams
from specops.spec.stats import EngineStats
from specops.spec.text import TextStream
from specops.spec.verify import choose_next

OnTokens = Callable[[Request, list[int]], None]


class Launched(NamedTuple):
    """A round under way: rows, whose requests they were at its launch, and what to read it from."""

    rows: list[int]
    requests: list[Request]
    pending: Pending


class Engine:
    """Batched decoding of a target model, speculative when given a draft model.

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
        tokenizer: gives requests their text and finds stop strings; anything with a transformers tokenizer's ``decode``.
        pack_weights: in eager mode on a CPU, run layers and products of few rows on compiled kernels, or without a C
            compiler over a copy of the weights laid out for few rows (:mod:`specops.models.packed_linear`).
        look_ahead: launch a round before the result of the one before is read, so that the device does not wait for the
            host; a request that ends then runs one round in vain. By default on a GPU with graphs. Never with ``split``
            and with backends that plan on the host.

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
        tokenizer: Any = None,
        pack_weights: bool = True,
        look_ahead: bool | None = None,
    ) -> None:
        weight = next(target.parameters())
        self.target, self.draft = target.eval(), draft.eval() if draft is not None else None
        self.device, self.dtype = weight.device, weight.dtype
        self.config = config or SpecConfig()
        self.page_size = page_size
        self.max_requests = max_requests
        self.max_context = context_length(target, draft, max_context)
        self.split = split or self.config.draft_extend == "v1"
        self.stats = EngineStats()
        self.tokenizer = tokenizer
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
        if pack_weights and self.mode == "eager" and self.device.type == "cpu":
            for model in (self.target, self.draft):
                if model is not None:
                    pack_linears(model)
        self._forwards = Forwards(
            self.target,
            self.draft,
            page_size,
            chunk_tokens=prefill_tokens,
            aux_layers=draft.config.aux_layers if draft is not None else (),  # type: ignore[arg-type, union-attr]
            compiled=self.mode != "eager" and self.device.type == "cuda",
        )
        self._waiting: deque[Request] = deque()
        self._active: dict[int, Request] = {}
        self._rows: tuple[list[int], Tensor, Variant] | None = None
        self._ahead: Launched | None = None
        heads: Any = draft.config if draft is not None else None
        vocab, width = (None, None) if heads is None else (heads.draft_vocab_size, heads.hidden_size)
        self.state = RoundState(self.pages.tensor(), vocab, width, self.dtype)
        self.rounds = RoundRunners(
            self.target,
            self.draft,
            self.state,
            self.config,
            page_size=page_size,
            max_pages=self.pages.max_pages,
            split=self.split,
            clock=self._clock,
            device=self.device,
            max_requests=max_requests,
            buckets=buckets,
            mode=self.mode,
            strict=strict,
        )
        self._prefill_graphs: PrefillGraphs | None = None
        if self._forwards.compiled and not plans_on_host((self.target, self.draft)):
            self._prefill_graphs = PrefillGraphs(
                PrefillStep(self.target, self.draft, self.state, lambda: self._forwards),
                self.device,
                max_requests=max_requests,
                max_rows=min(self._forwards.chunk_tokens, max_requests * self.max_context),
                share_pool=self._share_pool,
                mode=self.mode,
                strict=strict,
            )
        if look_ahead is None:
            look_ahead = self.device.type == "cuda" and self.mode != "eager"
        self.look_ahead = look_ahead and self.rounds.can_look_ahead

    @property
    def runners(self) -> dict[str, StepRunner]:
        """Every runner built so far, by name."""
        return self.rounds.runners

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop_token_ids: Iterable[int] = (),
        stop: Sequence[str] = (),
        sampling: SamplingParams | None = None,
        logprobs: bool = False,
    ) -> Request:
        """Queue a request; it joins the batch at the next step that has a free row and enough pages.

        Args:
            prompt: token ids.
            max_new_tokens: most tokens of the answer.
            stop_token_ids: tokens that end the answer; the one that does is its last.
            stop: strings that end the answer; its text ends before them. Needs a tokenizer.
            sampling: how tokens are chosen; greedy when not given.
            logprobs: keep each token's log-probability.

        Raises:
            ValueError: an empty prompt, one that leaves no room in the context, a token outside the vocabulary, a
                request that the whole pool could not hold, or stop strings without a tokenizer. Nothing is queued then.
        """
        sampling = sampling or SamplingParams()
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=random_seed(self.target, self.device))
        if stop and self.tokenizer is None:
            raise ValueError("stop strings need text: give the engine a tokenizer, or use stop_token_ids")
        request = Request(
            list(prompt),
            max_new_tokens,
            frozenset(stop_token_ids),
            sampling,
            TextStream(self._decode, stop) if self.tokenizer is not None else None,
            [] if logprobs else None,
        )
        vocab: int = self.target.config.vocab_size  # type: ignore[union-attr, assignment]
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
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_tokens: OnTokens | None = None,
        **options: Any,
    ) -> list[Request]:
        """Decode prompts to their end, batched as rows and pages allow.

        Args:
            prompts: token ids of each.
            sampling: for all prompts (which then share a seed, if it has one), or one for each.
            on_tokens: as for :meth:`step`.
            **options: as for :meth:`add`.

        Returns:
            One finished request per prompt, in order.
        """
        requests = self._add_all(prompts, sampling, options)
        while any(not request.finished for request in requests):
            self.step(on_tokens)
        return requests

    def stream(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> Iterator[tuple[Request, list[int]]]:
        """Decode prompts and yield each request with its new tokens as they come, the last ones included.

        Arguments are those of :meth:`generate`. Prompts are queued at once; when the iterator is closed early, what is
        unfinished is cancelled.
        """
        # Not a generator itself, so that a bad prompt is told of here and not at the first token.
        return self._stream(self._add_all(prompts, sampling, options))

    def warm_up(
        self,
        progress: Progress | None = None,
        *,
        sampling: Iterable[SamplingParams] = (SamplingParams(),),
        logprobs: bool = False,
    ) -> dict[str, RunnerReport]:
        """Compile and capture the buckets of the runners that requests will need.

        Args:
            progress: as for :meth:`StepRunner.warm_up`.
            sampling: parameters like those of the requests to come; a greedy batch and each kind of sampling has a graph
                of its own. What is left out is captured when a request first needs it.
            logprobs: whether requests will ask for log-probabilities.
        """
        self._forwards.warm_up(self.pages.max_pages, self.max_requests)
        self.rounds.warm_up({variant_for(params, logprobs) for params in sampling}, progress)
        if self._prefill_graphs is not None:
            self._prefill_graphs.warm_up(progress)
        return self.explain()

    def explain(self) -> dict[str, RunnerReport]:
        """Each runner's report: captured or why not; and that of prefill's graphs, where there can be any."""
        reports = {name: runner.explain() for name, runner in self.runners.items()}
        return reports if self._prefill_graphs is None else {**reports, "prefill": self._prefill_graphs.explain()}

    def cancel(self, request: Request) -> None:
        """Drop a waiting or running request; its pages are free at once."""
        if request in self._waiting:
            self._waiting.remove(request)
        for row, active in list(self._active.items()):
            if active is request:
                self._release(row)
        if not request.finished:
            request.finish_reason = "cancelled"
            if request.stream is not None:
                request.stream.finish()

    def _add_all(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: dict[str, Any],
    ) -> list[Request]:
        """Queue all prompts or, when one is refused, none."""
        prompts = list(prompts)
        each = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and sampling parameters for {len(each)}")
        requests: list[Request] = []
        try:
            for prompt, params in zip(prompts, each, strict=True):
                requests.append(self.add(prompt, sampling=params, **options))
        except (ValueError, TypeError):
            for request in requests:
                self.cancel(request)
            raise
        return requests

    def _stream(self, requests: list[Request]) -> Iterator[tuple[Request, list[int]]]:
        events: list[tuple[Request, list[int]]] = []
        own = set(map(id, requests))

        def hear(request: Request, tokens: list[int]) -> None:
            if id(request) in own:
                events.append((request, tokens))

        try:
            while any(not request.finished for request in requests):
                self.step(hear)
                yield from events
                events.clear()
        finally:
            for request in requests:
                if not request.finished:
                    self.cancel(request)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

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
        prefilled = self._launch_prefill(joined)
        if prefilled is None or self._prefill_graphs is None:
            result = self._run_prefill(joined)
        else:
            # The first round is there before the first tokens are read, so that the device does not wait for the host.
            if self.look_ahead and self._ahead is None and any(self._outlives(self._active[row], 1) for row in joined):
                self._ahead = self._launch()
            result = self._prefill_graphs.read(prefilled)
        self._clock("prefill", started)
        return self._hand_out(joined, result.tokens, result.margins, result.logprobs, tell)

    def _launch_prefill(self, joined: list[int]) -> Prefilled | None:
        """First tokens by one replay; None where no graph serves the prompts."""
        if self._prefill_graphs is None or self._variant(joined) != "greedy":
            return None
        self.pages.tensor()
        return self._prefill_graphs.launch(joined, [self._active[row].prompt for row in joined])

    def _outlives(self, request: Request, more: int) -> bool:
        """Whether the request needs a round after ``more`` tokens, if none of them stops it."""
        count = len(request.tokens) + more
        return count < request.max_new_tokens and len(request.prompt) + count < self.max_context

    def _run_prefill(self, joined: list[int]) -> RoundResult:
        """First tokens of any prompts, chosen in any way."""
        index = torch.tensor(joined, device=self.device)
        prompts = [self._active[row].prompt for row in joined]
        out = prefill(
            self.target,
            self.draft,
            prompts,
            self.pages.tensor()[index],
            self.page_size,
            self._forwards,
            self._first_choice(joined, index),
        )
        lens = torch.tensor([len(p) for p in prompts], dtype=torch.int32, device=self.device)
        self.state.join(index, lens, out.next_tokens, out.next_token_logits, out.hidden_states)
        scores = [score[:, None] for score in (out.margins, out.logprobs) if score is not None]
        return unpack(pack(torch.ones_like(lens), out.next_tokens[:, None], *scores), 1)

    def _share_pool(self, own: Any) -> Any:
        """The memory pool of the rounds' graphs, which becomes ``own`` if they have none yet."""
        runner = self.rounds.build("greedy")
        runner.pool = runner.pool or own
        return runner.pool

    def _first_choice(self, joined: list[int], index: Tensor) -> Choose:
        """How prefill chooses the first tokens; puts the parameters of sampling requests where the steps read them."""
        variant = self._variant(joined)
        if variant == "greedy":
            return choose_next
        sampler = self.rounds.ensure_sampler()
        for row in joined:
            request = self._active[row]
            if not request.sampling.greedy:
                sampler.join(row, request.sampling, request.prompt)
        ranks = self.rounds.ranks(variant)
        return lambda logits, lens: choose_next(logits, lens, sampler, index, ranks)

    def _variant(self, rows: Iterable[int]) -> Variant:
        """The simplest variant that serves the requests in ``rows``."""
        needed = {
            variant_for(request.sampling, request.logprobs is not None) for request in (self._active[row] for row in rows)
        }
        return max(needed, key=VARIANTS.index)

    def _round(self, tell: OnTokens) -> list[Request]:
        """Read the round that is under way, or launch one; and launch the next before, so that the device never waits.

        A request that turns out to have ended has then run one round more. It wrote to its own pages, behind its end, and
        whoever gets those pages next writes them later, in stream order.
        """
        started = time.perf_counter()
        launched = self._ahead if self._ahead is not None and self._still_active(self._ahead) else self._launch()
        self._ahead = self._launch() if self.look_ahead and self._goes_on(launched) else None
        result = self.rounds.read(launched.pending)
        if not self.split:
            self._clock("decode" if self.draft is None else "round", started)
        places = self._still_active(launched)
        rows = [launched.rows[place] for place in places]
        lens, emitted, margins, logprobs = result if len(rows) == len(launched.rows) else result.only(places)
        self.stats.steps += 1
        self.stats.rounds += len(rows)
        self.stats.emitted += sum(lens)
        for row, count in zip(rows, lens, strict=True):
            self._active[row].accept_lens.append(count)
        return self._hand_out(rows, _cut(emitted, lens), _cut(margins, lens), logprobs and _cut(logprobs, lens), tell)

    def _launch(self) -> Launched:
        rows, index, variant = self._row_index()
        return Launched(rows, [self._active[row] for row in rows], self.rounds.launch(index, variant))

    def _still_active(self, launched: Launched) -> list[int]:
        """Places of the requests of a launched round that have neither ended nor been cancelled since."""
        return [
            place
            for place, (row, request) in enumerate(zip(launched.rows, launched.requests, strict=True))
            if self._active.get(row) is request
        ]

    def _goes_on(self, launched: Launched) -> bool:
        """Whether some request will likely need a round after ``launched``, which gives each about as many tokens as its
        rounds before. A round in vain takes longer than the device waits for one that is launched late."""
        under_way = set(map(id, launched.requests))
        gives = max(round(self.stats.accepted_per_round), 1)
        return any(id(request) not in under_way or self._outlives(request, gives) for request in self._active.values())

    def _row_index(self) -> tuple[list[int], Tensor, Variant]:
        """Active rows, on the host and on the device, and what serves them; made anew only when the batch has changed."""
        rows = list(self._active)
        if self._rows is None or self._rows[0] != rows:
            # Nobody waits for the copy: a round is under way, and so the device does not wait for the host either.
            index = sendable(rows, self.device, torch.int64).to(self.device, non_blocking=True)
            self._rows = rows, index, self._variant(rows)
        return self._rows

    def _hand_out(
        self,
        rows: list[int],
        tokens: list[list[int]],
        margins: list[list[float]],
        logprobs: list[list[float]] | None,
        tell: OnTokens,
    ) -> list[Request]:
        """Append what a step emitted, tell the caller, and release the rows of requests that end."""
        finished = []
        for place, row in enumerate(rows):
            request = self._active.get(row)
            if request is None:
                continue  # Cancelled by a callback just now.
            scores = None if logprobs is None else logprobs[place]
            taken = request.emit(tokens[place], margins[place], self.max_context, scores)
            if request.finished:
                self._release(row)
                finished.append(request)
            tell(request, taken)
        return finished

    def _release(self, row: int) -> None:
        request = self._active.pop(row)
        if self.rounds.sampler is not None and not request.sampling.greedy:
            self.rounds.sampler.leave(row)
        # Rounds under way may still read the row, whose pages stay readable; who is given it next writes it first.
        self.pages.release(row)
        self._rows = None

    def _clock(self, phase: str, started: float) -> float:
        """Add the time since ``started`` to a phase; the time now."""
        if self.split and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if phase:
            self.stats.seconds[phase] = self.stats.seconds.get(phase, 0.0) + now - started
        return now


def _cut(rows: list[list[Any]], lens: list[int]) -> list[list[Any]]:
    return [row[:count] for row, count in zip(rows, lens, strict=True)]


def _ignore(request: Request, tokens: list[int]) -> None:
    """The callback of who wants none."""
