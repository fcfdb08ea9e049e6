"""The runners of an engine's rounds: one set for greedy batches and, once needed, one for each kind of sampling.

A batch takes the simplest variant that serves all of its requests:

* ``"greedy"``: every request takes the target's argmax; nothing is computed for sampling.
* ``"sampled"``: some request has a temperature, or wants log-probabilities.
* ``"top_k"``: some request has a repetition penalty or a filter, and every filter by top-k or top-p keeps at most
  ``MAX_TOP_K`` tokens, so that a short list of the likeliest tells where to cut.
* ``"filtered"``: some request has top-p alone or a large top-k, which takes a sort of the vocabulary.

Every variant serves the requests of those before it with the same results. All but the first are built, and captured, when
a request first needs them, or when they are announced to ``warm_up``. All share state, caches and weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from specops.batch import DraftExtendBatch
from specops.compile.draft_extend import DraftExtendRunner, DraftExtendStep, draft_extend_packed
from specops.compile.step_runner import Progress, StepRunner
from specops.spec.config import SpecConfig
from specops.spec.draft import DraftStep, draft_fields
from specops.spec.plans import round_calls, round_plans, tell_of_host_plans
from specops.spec.round import DecodeRound, RoundResult, RoundState, RoundStep, pack, round_fields, unpack
from specops.spec.sampling import Sampler, SamplingParams
from specops.spec.verify import DecodeStep, VerifyStep, verify_fields

Variant = Literal["greedy", "sampled", "top_k", "filtered"]
VARIANTS: tuple[Variant, ...] = ("greedy", "sampled", "top_k", "filtered")
MAX_TOP_K = 256
Clock = Callable[[str, float], float]


def variant_for(sampling: SamplingParams, logprobs: bool = False) -> Variant:
    """The simplest variant that serves a request."""
    if sampling.filtered:
        if sampling.top_k is None:
            # The likeliest token alone tells where min-p cuts.
            return "filtered" if sampling.top_p < 1 else "top_k"
        return "top_k" if sampling.top_k <= MAX_TOP_K else "filtered"
    if sampling.penalised:
        return "top_k"
    return "greedy" if sampling.greedy and not logprobs else "sampled"


class Pending(NamedTuple):
    """A launched round: its result, or what it is read from once ``copied`` has happened."""

    result: RoundResult | None
    packed: Tensor | None
    copied: torch.cuda.Event | None


class RoundRunners:
    """Builds the steps of a round and runs them.

    Args:
        target, draft: the models; caches allocated. Without a draft a round is a step of plain decoding.
        state: the requests' state.
        config, page_size, max_pages: shape of a round and of the page tables.
        split: draft, verify and draft-extend behind a runner each.
        clock: told the name of a phase and when it started; returns the time now.
        **options: of :class:`StepRunner`.

    Attributes:
        runners: every runner built so far, by name. Those of the sampling variants end in the variant's name.
        sampler: the requests' sampling parameters; None until a request samples.
    """

    def __init__(
        self,
        target: nn.Module,
        draft: nn.Module | None,
        state: RoundState,
        config: SpecConfig,
        *,
        page_size: int,
        max_pages: int,
        split: bool,
        clock: Clock,
        **options: Any,
    ) -> None:
        self.target, self.draft, self.state, self.config = target, draft, state, config
        self.page_size, self.max_pages, self.split = page_size, max_pages, split and draft is not None
        self.clock, self.options = clock, options
        self.aux_layers: tuple[int, ...] = draft.config.aux_layers if draft is not None else ()  # type: ignore
        self.sampler: Sampler | None = None
        self.runners: dict[str, StepRunner] = {}
        self._main: dict[Variant, StepRunner] = {}
        self._last: tuple[StepRunner, Tensor] | None = None
        self._host: dict[tuple[int, int], tuple[Tensor, torch.cuda.Event]] = {}
        self._turn = 0
        self._drafting = None if draft is None else DraftStep(draft, page_size, config)
        self._calls = round_calls(target, draft, config)
        tell_of_host_plans(self._calls.all)
        if self.split:
            self._plan = round_plans(self._calls.verifying(), self._verified_state, page_size)
        else:
            self._plan = round_plans(self._calls, self._round_state, page_size)
        if self.split:
            self._build_split()
        self.build("greedy")

    def build(self, variant: Variant) -> StepRunner:
        """The runner that differs between variants: the whole round, plain decoding, or verify of a split round."""
        if variant in self._main:
            return self._main[variant]
        sampler = None if variant == "greedy" else self.ensure_sampler()
        ranks = self.ranks(variant)
        table = round_fields(self.state.spare_row)
        step: nn.Module
        if self.draft is None:
            name, step = "decode", DecodeRound(DecodeStep(self.target, self.page_size, sampler, ranks), self.state)
        else:
            name, step = "verify", VerifyStep(self.target, self.page_size, self.config, self.aux_layers, sampler, ranks)
            if self.split:
                table = verify_fields(self.config, self.max_pages, None if sampler is None else self.state.spare_row)
            else:
                assert self._drafting is not None
                extend = DraftExtendStep(self.draft, self.page_size, self.config.width)
                name, step = "round", RoundStep(self._drafting, step, extend, self.state)
        name = name if variant == "greedy" else f"{name}_{variant}"
        # One memory pool: replays of two variants never overlap. A whole round's output is read by the host at once, so
        # that it need not be copied on the device first; those of a split round wait for the next step.
        pool = self._main["greedy"].pool if self._main else None
        outputs: Literal["copy", "view"] = "copy" if self.split else "view"
        self._main[variant] = self.runners[name] = StepRunner(
            step, table, name=name, pool=pool, plan=self._plan, outputs=outputs, **self.options
        )
        return self._main[variant]

    def warm_up(self, variants: Collection[Variant], progress: Progress | None = None) -> None:
        """Compile and capture the runners of ``variants``, and those that all variants share."""
        needed = [self.build(variant) for variant in VARIANTS if variant in variants]
        shared = [runner for runner in self.runners.values() if runner not in self._main.values()]
        for runner in (*shared, *needed):
            runner.warm_up(progress)

    def ranks(self, variant: Variant) -> int | None:
        """How many of the likeliest tokens a variant ranks; None if it has neither penalties nor filters."""
        vocab: int = self.target.config.vocab_size  # type: ignore[union-attr, assignment]
        return {"filtered": vocab, "top_k": min(MAX_TOP_K, vocab)}.get(variant)

    def ensure_sampler(self) -> Sampler:
        if self.sampler is None:
            state = self.state
            vocab = self.target.config.vocab_size  # type: ignore[union-attr]
            self.sampler = Sampler(state.spare_row + 1, vocab, state.seq_lens.device)  # type: ignore[arg-type]
        return self.sampler

    @property
    def can_look_ahead(self) -> bool:
        """Whether a round may be launched before the one before it is read: all it needs is on the device.

        Not so for split rounds, whose phases are timed, and for planned backends, which read lengths on the host.
        """
        return not self.split and self._plan is None

    def launch(self, rows: Tensor, variant: Variant) -> Pending:
        """Start one round of the requests in ``rows`` ``[B]`` int64; at most two may be pending."""
        runner = self.build(variant)
        if self.split:
            return Pending(self._run_split(rows, runner), None, None)
        # The engine makes a new tensor whenever the batch changes, and never writes into one.
        unchanged = self._last is not None and self._last[0] is runner and self._last[1] is rows
        self._last = runner, rows
        packed = runner.run((rows,), unchanged=unchanged)[0]
        if packed.device.type != "cuda":
            return Pending(None, packed, None)
        # The next round overwrites what this one leaves, so it goes to one of two buffers on the host by then.
        self._turn = 1 - self._turn
        key = self._turn, packed.shape[1]
        if key not in self._host:
            most = self.state.spare_row
            buffer = torch.empty((most, packed.shape[1]), dtype=packed.dtype, pin_memory=True)
            self._host[key] = buffer, torch.cuda.Event()  # type: ignore[no-untyped-call]
        buffer, copied = self._host[key]
        host = buffer[: packed.shape[0]]
        host.copy_(packed, non_blocking=True)
        copied.record(torch.cuda.current_stream(packed.device))
        return Pending(None, host, copied)

    def read(self, pending: Pending) -> RoundResult:
        """Wait for a round and read it."""
        if pending.result is not None:
            return pending.result
        if pending.copied is not None:
            pending.copied.synchronize()
        assert pending.packed is not None
        return unpack(pending.packed, 1 if self.draft is None else self.config.width)

    def _round_state(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Page tables and committed lengths that a round over ``fields`` will read."""
        rows = fields["rows"]
        return self.state.page_table[rows], self.state.seq_lens[rows]

    def _verified_state(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The same of a verify step, whose lengths include the tree's nodes."""
        lens = fields["seq_lens"]
        return fields["page_table"], torch.where(lens > 0, lens - self.config.width, 0)

    def _build_split(self) -> None:
        draft: Any = self.draft
        dtype = self.state.hidden_states.dtype
        table = draft_fields(draft.config.draft_vocab_size, draft.config.hidden_size, self.max_pages, dtype)
        assert self._drafting is not None
        plan = round_plans(self._calls.drafting(), lambda fields: (fields["page_table"], fields["seq_lens"]), self.page_size)
        self.runners["draft"] = StepRunner(self._drafting, table, name="draft", plan=plan, **self.options)
        if self.config.draft_extend == "v2":
            options = {name: value for name, value in self.options.items() if name != "device"}
            self.runners["draft_extend"] = DraftExtendRunner(
                draft,
                draft.caches,
                tokens_per_request=self.config.width,
                max_pages=self.max_pages,
                dtype=dtype,
                **options,
            ).runner

    def _run_split(self, rows: Tensor, verify: StepRunner) -> RoundResult:
        state, width = self.state, self.config.width
        table, committed = state.page_table[rows], state.seq_lens[rows]
        started = self.clock("", time.perf_counter())
        tokens, parents, depths, mask = self.runners["draft"](
            {
                "root_tokens": state.root_tokens[rows],
                "next_token_logits": state.next_token_logits[rows],
                "hidden_states": state.hidden_states[rows],
                "seq_lens": committed,
                "page_table": table,
            }
        )
        started = self.clock("draft", started)
        batch = {
            "tokens": tokens,
            "parents": parents,
            "depths": depths,
            "tree_mask": mask,
            "seq_lens": committed + width,
            "page_table": table,
        }
        if "rows" in verify.table.names:
            batch["rows"] = rows
        accept_lens, accept_tokens, hidden, *scores = verify(batch)
        started = self.clock("verify", started)
        logits, carried = self._extend(accept_lens, accept_tokens, hidden, committed, table)
        roots = accept_tokens.gather(1, accept_lens.long()[:, None] - 1)[:, 0]
        state.join(rows, committed + accept_lens, roots, logits, carried)
        started = self.clock("draft_extend", started)
        result = unpack(pack(accept_lens, accept_tokens, *scores), width)
        self.clock("read_back", started)
        return result

    def _extend(
        self, accept_lens: Tensor, accept_tokens: Tensor, hidden: Tensor, committed: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        width = self.config.width
        if self.config.draft_extend == "v2":
            batch = DraftExtendBatch(accept_tokens, hidden, committed + width, accept_lens, table)
            logits, carried = self.runners["draft_extend"](batch.as_dict())
            return logits, carried
        real = (torch.arange(width, device=accept_lens.device) < accept_lens[:, None]).reshape(-1)
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
