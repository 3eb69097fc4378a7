# SPDX-License-Identifier: Apache-2.0
"""What codecs learn from a step, learned while the training goes on. When a step is over, a thread waits for its
statistics (on a GPU these are still being counted), gathers those of all ranks, and fits. The next step begins with the
result: it waits for the thread before its first gradient is encoded. So every rank has what was learned from the same
step on, and no bit depends on the thread.

The thread is one of a Transport (_transport.py). All ranks must take their lessons in the same order, and who ends a
step decides what that order is:

    the transport's own thread (DDP)        `later`: the order of the buckets
    the thread that trains (replicas)       `in_turn`: behind the buckets that it has submitted
    the thread that trains, without a       `in_turn` of a transport that has a thread and a process group for lessons
    transport for gradients (FSDP2)         only (LESSONS), in the order of the calls

A lesson that fails, fails its transport: the next step raises the error on the rank that had it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Callable, Sequence

import torch
import torch.distributed as dist

from .. import _core
from ._transport import LESSONS, Transport


class Lessons:
    """Those of some coders of one hook, step after step."""

    def __init__(self) -> None:
        self._transport: Transport | None = None
        self._is_over = threading.Event()  # the last lesson
        self._is_over.set()

    def begin(
        self,
        models: "Sequence[_core.ModelCoder]",
        transport: Transport,
        put: Callable[[Callable[[], None]], None],
    ) -> None:
        """After a step that all of the models have ended. put: the transport's `later` or `in_turn`."""
        is_over = threading.Event()
        put(functools.partial(_learn, models, transport, is_over))
        self._transport, self._is_over = transport, is_over

    def wait(self) -> None:
        """Before anything is done with the models that could see or change what they learn."""
        self._is_over.wait()
        if self._transport is not None:
            self._transport.check()


class OwnLessons(Lessons):
    """With a transport for nothing else, between the ranks of a group. To make them is collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        # On the CPU for a model on a GPU too: statistics are a few kilobytes.
        self._own = Transport.acquire(group, torch.device("cpu"), None, purpose=LESSONS)
        self.release = weakref.finalize(self, self._own.release)  # at most once
        self.release.atexit = False  # type: ignore[misc]  # Transport.close_all does it

    def follow(self, models: "Sequence[_core.ModelCoder]") -> None:
        """In the thread that trains, after a step."""
        self.begin(models, self._own, self._own.in_turn)


def _learn(models: "Sequence[_core.ModelCoder]", transport: Transport, is_over: threading.Event) -> None:
    try:
        taught = [(model, stats) for model in models if (stats := model.stats()) is not None]
        if not taught:
            return
        every = transport.pool_bytes(b"".join(stats for _, stats in taught))
        size, at = len(every) // transport.world, 0
        for model, stats in taught:
            end = at + len(stats)
            model.learn(b"".join(every[first + at : first + end] for first in range(0, len(every), size)))
            at = end
    finally:
        is_over.set()
