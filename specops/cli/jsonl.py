"""Prompts from a JSONL file and answers to another, so that nothing is lost and nothing is done twice.

A line of the prompts is ``{"prompt": "..."}``, ``{"messages": [...]}`` or ``{"tokens": [...]}``, with an ``"id"`` (the line
number when there is none) and any of ``OPTIONS``, which overrule the command line for that line. Other keys are left alone.

An answer is one line, written whole and brought to the disk before the next. What a crash cut off in the middle is
removed when the file is opened again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from specops.cli.common import SAMPLING_OPTIONS

_INTEGERS = ("top_k", "seed", "max_new_tokens")
OPTIONS = (*SAMPLING_OPTIONS, "max_new_tokens", "stop")


@dataclass(frozen=True)
class Line:
    """One prompt of the file: text, messages or token ids, and its own options."""

    number: int
    id: str | int
    prompt: Any
    options: dict[str, Any]


class BadLine(ValueError):
    """A line that can't be answered; the message says why, without the line's number."""


def parse_line(number: int, raw: bytes) -> Line:
    """
    Raises:
        BadLine: no JSON object, no prompt or more than one, or a value of a wrong kind.
    """
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadLine(f'a JSON object is needed, such as {{"prompt": "..."}}; this is {_kind(record)}')
    given = [name for name in ("prompt", "messages", "tokens") if name in record]
    if len(given) != 1:
        raise BadLine(f"one of prompt, messages and tokens is needed; this has {' and '.join(given) or 'none'}")
    prompt = record[given[0]]
    if not _fits(given[0], prompt):
        wanted = {"prompt": "text", "messages": "a list of objects", "tokens": "a list of integers"}[given[0]]
        raise BadLine(f"{given[0]} must be {wanted}, and not empty")
    identifier = record.get("id", number)
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)):
        raise BadLine(f"id must be text or an integer; this is {_kind(identifier)}")
    options = {name: record[name] for name in OPTIONS if record.get(name) is not None}
    for name, value in options.items():
        if not _is_option(name, value):
            wanted = "text or a list of it" if name == "stop" else "an integer" if name in _INTEGERS else "a number"
            raise BadLine(f"{name} must be {wanted}; this is {_kind(value)}")
    return Line(number, identifier, prompt, options)


def read_lines(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines, without the blank ones."""
    for number, raw in enumerate(source, 1):
        if raw.strip():
            yield number, raw


class AnswerFile:
    """Answers, one JSON line each, appended to a file.

    Args:
        path: created when it is not there.

    Attributes:
        done: keys (:func:`key_of`) of the answers that are there.

    Raises:
        ValueError: another process writes to it, or it holds lines that are no answers.
        OSError: it can't be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writing = False
        self._file = path.open("a+b", buffering=0)
        try:
            _lock(self._file, path)
            self.done = self._repair()
        except BaseException:
            self._file.close()
            raise

    def append(self, answer: dict[str, Any]) -> None:
        """Write one answer and wait until it is on the disk."""
        line = (json.dumps(answer, ensure_ascii=False) + "\n").encode("utf-8", errors="surrogatepass")
        self.writing = True
        try:
            while line:
                line = line[os.write(self._file.fileno(), line) :]
            # A pipe or a terminal has nothing to bring to a disk.
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
            self.done.add(key_of(answer["id"]))
        finally:
            self.writing = False

    def close(self) -> None:
        self._file.close()

    def _repair(self) -> set[str]:
        """Keys of the whole lines; an unfinished last line is cut off."""
        if not self._file.seekable():
            return set()
        self._file.seek(0)
        done, end = set(), 0
        for number, raw in enumerate(self._file, 1):
            whole = raw.endswith(b"\n")
            try:
                identifier = json.loads(raw)["id"] if raw.strip() else None
            except (ValueError, KeyError, TypeError):
                if whole:
                    raise ValueError(f"{self.path} line {number} is no answer of specops; give another --out") from None
                break
            if not whole:
                # Cut right before its end, or written by hand: whole but for the line's end.
                os.write(self._file.fileno(), b"\n")
            if identifier is not None:
                done.add(key_of(identifier))
            end += len(raw) + (not whole)
        self._file.truncate(end)
        return done


def key_of(identifier: str | int) -> str:
    """The id as JSON, so that 1 and "1" stay apart."""
    return json.dumps(identifier)


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # No such locks on this system; two runs at once are then up to the user.
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is writing to {path}; wait for it, or give another --out") from None
    except OSError:  # A file system without locks.
        return


def _fits(name: str, prompt: Any) -> bool:
    if name == "prompt":
        return isinstance(prompt, str) and bool(prompt)
    kind = dict if name == "messages" else int
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(p, kind) and not isinstance(p, bool) for p in prompt)


def _is_option(name: str, value: Any) -> bool:
    if name == "stop":
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(entry, str) for entry in value))
    kinds = int if name in _INTEGERS else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false"}
    return names.get(type(value), "null")
