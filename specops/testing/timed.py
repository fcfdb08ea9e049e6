"""Calls with a time limit: whatever hangs becomes an exception here instead of hanging the caller.

The call runs in a thread of its own. Past the limit it is told to stop, which ends loops in Python; a call that is stuck in
native code is left behind, and the caller learns that too.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from specops.compile.bare_call import own_graph_trees

Result = TypeVar("Result")
# How long a thread that was told to stop may take to do so.
GRACE_SECONDS = 1.0


class Hung(Exception):
    """A call took longer than its limit."""


class _Stop(BaseException):
    """Raised inside a thread that is over its limit."""


def run_within(seconds: float, call: Callable[[], Result]) -> Result:
    """The result of ``call()``.

    Raises:
        Hung: after ``seconds``; says whether the call could be stopped.
        Exception: whatever the call raised.
    """
    result: list[Result] = []
    raised: list[BaseException] = []
    context = contextvars.copy_context()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    if device is not None:
        # What is imported with them is better imported by a thread that stays.
        own_graph_trees()

    def work() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
                own_graph_trees()
            result.append(context.run(call))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _stop(thread)
        thread.join(GRACE_SECONDS)
        left = " and could not be stopped" if thread.is_alive() else ""
        raise Hung(f"still running after {seconds:g} s{left}")
    if raised:
        raise raised[0]
    return result[0]


def _stop(thread: threading.Thread) -> None:
    set_exception: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_exception(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop))
