# SPDX-License-Identifier: Apache-2.0
"""Notices that a rank is gone while a GPU runs recorded exchanges (_recordings.py), which torch's watchdog does not
see.

At the end of a step with recorded exchanges an event is recorded behind them. A thread looks at these events once a
second. If one has not passed within the time-out of the process group, the group is aborted: NCCL's kernels end, so
that nobody waits for the GPU any longer, and the next step raises an error.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
import weakref
from typing import Any, Callable

import torch

from .._errors import EngineError

_log = logging.getLogger("gradwire")


class Watch:
    """Of one process group."""

    def __init__(self, group: Any, seconds: float, rank: int, on_failure: Callable[[EngineError], None]) -> None:
        """on_failure: a bound method, which is called in the thread; its object is not kept alive."""
        self._group, self._seconds, self._rank = group, seconds, rank
        self._on_failure = weakref.WeakMethod(on_failure)
        self._under_way: "collections.deque[tuple[float, torch.cuda.Event]]" = collections.deque()
        self._spare: list[torch.cuda.Event] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._aborting: threading.Thread | None = None

    def step(self, stream: "torch.cuda.Stream | None") -> None:
        """After the last exchange of a step was enqueued."""
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record(stream)
        self._under_way.append((time.monotonic(), event))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="gradwire watch", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(min(1.0, self._seconds / 8)):
            while self._under_way and self._under_way[0][1].query():
                self._spare.append(self._under_way.popleft()[1])
            if self._under_way and time.monotonic() - self._under_way[0][0] > self._seconds:
                return self._end()

    def _end(self) -> None:
        words = f"rank {self._rank}: the exchanges of a step have not ended in {self._seconds:g} s, so a rank is gone"
        _log.error("gradwire: %s", words)
        on_failure = self._on_failure()
        if on_failure is not None:
            on_failure(EngineError(words, field="timeout"))
        # It ends the kernels at once, and returns when all graphs that hold exchanges of the group are freed.
        self._aborting = threading.Thread(target=self._group.abort, name="gradwire abort", daemon=True)
        self._aborting.start()

    def close(self) -> None:
        self._over.set()
        if self._aborting is not None:
            self._aborting.join(10)
