"""Answer prompts: from the command line to the screen, or from a JSONL file to another.

With ``--file`` and ``--out`` a run can be stopped at any time and started again: answers that are in the file are not made
again. An interrupt (or a request to terminate) ends the run after the current round, with every finished answer on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

from specops.cli import common
from specops.cli.jsonl import AnswerFile, BadLine, Line, key_of, parse_line, read_lines

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument(
        "--prompt", action="append", help="a user turn; may be given several times (default: standard input)"
    )
    parser.add_argument("--file", help="prompts, a JSON object a line; - for standard input")
    parser.add_argument("--out", help="answers to --file, appended; lines whose id is there are skipped")
    parser.add_argument("--plain", action="store_true", help="decode without a draft head")
    parser.add_argument("--raw", action="store_true", help="use the prompt as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--max-requests", type=int, default=8, help="prompts decoded together (default: %(default)s)")
    parser.add_argument("--stop", action="append", default=[], help="text that ends an answer; may be given several times")
    parser.add_argument("--logprobs", action="store_true", help="give each token's log-probability (JSON)")
    common.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.file is None and args.out is not None:
        raise ValueError("--out goes with --file; the answers to --prompt go to standard output")
    if common.world_size() > 1 and (args.file is not None or not args.prompt):
        raise ValueError("under torchrun every process needs the same prompts: give them with --prompt")
    if args.file is None:
        return _answer_prompts(args)
    if args.prompt:
        raise ValueError("give --prompt or --file, not both")
    if args.json and args.out is None:
        raise ValueError("--json prints a summary, and without --out the answers go to standard output; give --out")
    if args.file != "-" and not Path(args.file).is_file():
        raise FileNotFoundError(f"there is no file {args.file}")
    return _FileRun(args).run()


def _answer_prompts(args: argparse.Namespace) -> int:
    from specops.api import Answer

    params = common.sampling(args)
    prompts = args.prompt or [sys.stdin.read()]
    models, engine, _ = _prepare(args, max_requests=min(args.max_requests, len(prompts)))
    ids = [models.encode(text, chat=not args.raw) for text in prompts]
    started, shown = time.perf_counter(), 0
    requests: dict[Any, None] = {}
    each = [_seeded(params, index) for index in range(len(ids))]
    options = {"max_new_tokens": args.max_new_tokens, "stop": args.stop, "logprobs": args.logprobs}
    for request, _ in engine.stream(ids, sampling=each, stop_token_ids=models.target.config.eos_token_ids, **options):
        requests[request] = None
        if len(ids) == 1 and not args.json:
            common.write(request.text[shown:])
            shown = len(request.text)
    seconds = time.perf_counter() - started
    answers = [Answer.of(request) for request in requests]
    if args.json:
        tokens = sum(len(answer.tokens) for answer in answers)
        accepted = round(engine.stats.accepted_per_round, 3)
        records = [{"prompt": prompt, **_record(answer)} for prompt, answer in zip(prompts, answers, strict=True)]
        summary = {"answers": records, "tokens_per_s": round(tokens / seconds, 2), "accepted_per_round": accepted}
        common.write(json.dumps(summary), end="\n")
    else:
        common.write("" if len(ids) == 1 else "\n\n".join(answer.text for answer in answers), end="\n")
    return 0


class _FileRun:
    """One run of ``--file``: lines join as there is room, answers are written as they come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: AnswerFile | None = None
        self.refused: list[dict[str, Any]] = []
        self.answered = self.skipped = self.tokens = self.interrupts = 0
        self.total: int | None = None
        self.pending: dict[Any, Line] = {}
        self.seen: set[str] = set()

    def run(self) -> int:
        args = self.args
        common.sampling(args)
        self.out = AnswerFile(Path(args.out)) if args.out else None
        try:
            if args.file != "-":
                with open(args.file, "rb") as file:
                    self.total = sum(1 for _ in read_lines(file))
            self.models, self.engine, say = _prepare(args, max_requests=args.max_requests)
            source: Any = contextlib.nullcontext(sys.stdin.buffer) if args.file == "-" else open(args.file, "rb")  # noqa: SIM115
            with source as file, self._signals():
                self._loop(file, common.Progress(say))
        finally:
            if self.out is not None:
                self.out.close()
        return self._report(say)

    def _loop(self, file: IO[bytes], progress: common.Progress) -> None:
        lines = self._lines(file)
        started = time.perf_counter()
        exhausted = False
        while not self.interrupts:
            while not exhausted and len(self.pending) < 2 * self.args.max_requests:
                line = next(lines, None)
                exhausted = line is None
                if line is not None:
                    self._add(line)
            if not self.pending:
                break
            for request in self.engine.step():
                self._write(request)
            progress(lambda: self._state(time.perf_counter() - started))
        progress(lambda: self._state(time.perf_counter() - started), last=True)
        self.seconds = time.perf_counter() - started

    def _lines(self, file: IO[bytes]) -> Iterator[Line]:
        """The lines that are to be answered."""
        for number, raw in read_lines(file):
            try:
                line = parse_line(number, raw)
            except BadLine as error:
                self._refuse(number, error)
                continue
            key = key_of(line.id)
            if key in self.seen:
                self._refuse(number, ValueError(f"id {key} stands in an earlier line, too"))
            elif self.out is not None and key in self.out.done:
                self.skipped += 1
                self.seen.add(key)
            else:
                self.seen.add(key)
                yield line

    def _add(self, line: Line) -> None:
        args, options = self.args, line.options
        stop = options.get("stop", args.stop)
        try:
            request = self.engine.add(
                self.models.encode(line.prompt, chat=not args.raw),
                max_new_tokens=options.get("max_new_tokens", args.max_new_tokens),
                stop=[stop] if isinstance(stop, str) else stop,
                stop_token_ids=self.models.target.config.eos_token_ids,
                # A line's own seed stays; the command line's is told apart by line, whatever runs first.
                sampling=_seeded(common.sampling(args, options), 0 if "seed" in options else line.number),
                logprobs=args.logprobs,
            )
        except (ValueError, TypeError) as error:
            self._refuse(line.number, error)
        else:
            self.pending[request] = line

    def _write(self, request: Any) -> None:
        from specops.api import Answer

        line = self.pending.pop(request)
        answer = {"id": line.id, **_record(Answer.of(request))}
        self.answered += 1
        self.tokens += len(request.tokens)
        if self.out is not None:
            self.out.append(answer)
        else:
            print(json.dumps(answer, ensure_ascii=False), flush=True)

    def _refuse(self, number: int, error: Exception) -> None:
        self.refused.append({"line": number, "reason": str(error)})
        print(f"specops: {self.args.file} line {number}: {error}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal ends the loop after its round; the second ends the run at once, but never within a line."""

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupts += 1
            if self.interrupts > 1 and not (self.out is not None and self.out.writing):
                raise KeyboardInterrupt

        numbers = (signal.SIGINT, signal.SIGTERM)
        try:
            before = [signal.signal(number, note) for number in numbers]
        except ValueError:  # Not the main thread: signals are the caller's.
            yield
            return
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _state(self, seconds: float) -> str:
        of = "" if self.total is None else f" of {self.total}"
        done = self.answered + self.skipped + len(self.refused)
        rate = f"{self.tokens / max(seconds, 1e-9):.1f} tokens/s, {self.engine.stats.accepted_per_round:.2f} a round"
        return f"{done}{of} lines: {self.answered} answered, {self.skipped} skipped, {len(self.refused)} refused; {rate}"

    def _report(self, say: common.Say) -> int:
        if self.interrupts:
            where = f"; the same command goes on from {self.args.out}" if self.out is not None else ""
            say(f"interrupted: {self.answered} answers are complete, {len(self.pending)} begun ones are dropped{where}")
        if self.args.json:
            summary = {
                "answered": self.answered,
                "skipped": self.skipped,
                "refused": self.refused,
                "interrupted": bool(self.interrupts),
                "tokens": self.tokens,
                "tokens_per_s": round(self.tokens / max(self.seconds, 1e-9), 2),
                "accepted_per_round": round(self.engine.stats.accepted_per_round, 3),
            }
            print(json.dumps(summary))
        return INTERRUPTED if self.interrupts else int(bool(self.refused))


def _prepare(args: argparse.Namespace, *, max_requests: int) -> tuple[Any, Any, common.Say]:
    from specops.spec import Engine

    say = common.progress_printer()
    models = common.load_models(args, say, plain=args.plain)
    engine = Engine(
        models.target,
        models.head,
        common.config(args),
        max_requests=max_requests,
        max_context=args.max_context,
        mode=args.mode,
        tokenizer=models.tokenizer,
    )
    if engine.mode != "eager":
        told = lambda done, total, what: say(f"{what} ({done}/{total})")  # noqa: E731
        engine.warm_up(told, sampling=[common.sampling(args)], logprobs=args.logprobs)
    return models, engine, say


def _seeded(params: Any, offset: int) -> Any:
    from dataclasses import replace

    return params if params.seed is None else replace(params, seed=params.seed + offset)


def _record(answer: Any) -> dict[str, Any]:
    from dataclasses import asdict

    record = {name: value for name, value in asdict(answer).items() if value is not None}
    record["accepted_per_round"] = round(record["accepted_per_round"], 3)
    return record
