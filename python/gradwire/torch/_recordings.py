# SPDX-License-Identifier: Apache-2.0
"""What the all-reduce of a bucket enqueues on a GPU, recorded as a CUDA graph and run again with one call: kernels and
exchanges of NCCL alike. A training that waits for its host pays for every launch, and a bucket has some twenty.

A recording holds addresses and arguments. The step, which changes every time, stands in the GPU's memory, where
kernels read it (_core.Device's clock). Everything else that could change is the key of a recording: which codecs with
which tables, which of its two residual buffers is the current one, the loss scale, the buffers of messages. So a bucket
usually has two recordings, which take turns.

NCCL wants all ranks to record an exchange, or none, so the decision follows from nothing that one rank alone knows: a
key that comes for the second time is recorded, and keys come in the same order on all ranks. A step that teaches
something, or is measured, does more than other steps, and is run as it is.

torch's watchdog does not see exchanges in a recording; _watch.py looks after them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Protocol

from .. import _core

if TYPE_CHECKING:
    from ._task import Times

KEPT = 8  # recordings of a bucket, the oldest goes; and keys that came once


class Recordable(Protocol):
    """A task whose work can run again."""

    sent: int  # bytes to other ranks, in this step
    times: "Times"

    def key(self) -> "tuple[int, ...] | None": ...  # of what it would enqueue now; None: not to be recorded
    def poll(self) -> None: ...  # raises what is known of damaged messages


class _Recorded(NamedTuple):
    recording: _core.Recording
    sent: int


class Recordings:
    """Those of one bucket, while its gradients keep their addresses."""

    def __init__(self, device: _core.Device) -> None:
        self._device = device
        self._recorded: "OrderedDict[tuple[int, ...], _Recorded]" = OrderedDict()
        self._seen: "OrderedDict[tuple[int, ...], None]" = OrderedDict()
        self.is_used = True

    def run(self, task: Recordable, work: Callable[[], None]) -> bool:
        """Does the work on the task's stream. Returns whether it was run from a recording."""
        key = task.key()
        if key is None:
            work()
            return False
        known = self._recorded.get(key)
        if known is not None:
            began = time.perf_counter()
            task.poll()
            known.recording.run()
            task.sent += known.sent
            task.times.add("encode", "up", time.perf_counter() - began)
            return True
        if key not in self._seen:
            self._seen[key] = None
            _shorten(self._seen)
            work()
            return False
        recording = _core.Recording(self._device)
        before = task.sent
        recording.begin()
        try:
            work()
            recording.end()
        except BaseException:
            recording.forget()
            raise
        self._recorded[key] = _Recorded(recording, task.sent - before)
        _shorten(self._recorded)
        recording.run()
        return True

    def forget(self) -> None:
        """For good."""
        self.is_used = False
        for one in self._recorded.values():
            one.recording.forget()
        self._recorded.clear()
        self._seen.clear()


def _shorten(kept: "OrderedDict[tuple[int, ...], Any]") -> None:
    while len(kept) > KEPT:
        _, oldest = kept.popitem(last=False)
        if isinstance(oldest, _Recorded):
            oldest.recording.forget()
