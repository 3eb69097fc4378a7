# SPDX-License-Identifier: Apache-2.0
"""What the all-reduce of a bucket enqueues on a GPU, recorded as a CUDA graph and run again with one call: kernels and
exchanges of NCCL alike. A training that waits for its host pays for every launch, and a bucket has some twenty.

A recording holds addresses and arguments. The step, which changes every time, stands in the GPU's memory, where
kernels read it (_core.Device's clock). Everything else that could change is the key of a recording: which codecs with
which tables, which of its two residual buffers is the current one, the loss scale, the buffers of messages. So a bucket
usually has two recordings, which take turns.

NCCL wants all ranks to record an exchange in the same step, and to run the recordings of that step, or none. A key that
comes for the second time is recorded, so what keys are made of must come again on all ranks or on none: a rank without
residuals in a bucket has keys that take turns like those of the others, and all ranks make their buffers as large as
the largest one needs. A step that teaches something, or is measured, does more than other steps, and is run as it is.

torch's watchdog does not see exchanges in a recording; _watch.py looks after them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterator, NamedTuple, Protocol

import torch

from .. import _core
from ._watch import Watch

if TYPE_CHECKING:
    from ._task import Times
    from ._transport import Exchange, Transport

KEPT = 8  # recordings of a bucket, the oldest goes; and keys that came once


class RecordedTask(Protocol):
    """A BucketTask whose exchanges may be recorded: its `start` and `finish` are in two parts each."""

    last: bool  # of its step
    sent: int  # bytes to other ranks, in this step
    times: "Times"
    stream: "torch.cuda.Stream | None"

    @property
    def recordings(self) -> "Recordings | None": ...
    def on_stream(self) -> ContextManager[object]: ...
    def open(self) -> None: ...  # what is done in every step
    def key(self) -> "tuple[int, ...] | None": ...  # of what it would enqueue now; None: not to be recorded
    def poll(self) -> None: ...  # raises what is known of damaged messages
    def encode(self) -> "Exchange | None": ...
    def reduce(self, received: torch.Tensor) -> "Exchange | None": ...
    def receive(self, received: torch.Tensor | None) -> None: ...
    def close(self) -> None: ...  # what is done in every step


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

    def run(self, task: RecordedTask, work: Callable[[], None]) -> bool:
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
        with _no_collection():
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


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What Python's garbage collector finds may be something that waits for the GPU when it goes, and that ends a
    capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _shorten(kept: "OrderedDict[tuple[int, ...], Any]") -> None:
    while len(kept) > KEPT:
        _, oldest = kept.popitem(last=False)
        if isinstance(oldest, _Recorded):
            oldest.recording.forget()


class Recorder:
    """What a transport on streams does about recordings."""

    def __init__(self, transport: "Transport") -> None:
        self._transport = weakref.proxy(transport)
        self._every: list[Recordings] = []
        self._watch: Watch | None = None
        self._ran = False  # a recorded exchange, in this step

    def works(self) -> bool:
        """Whether the exchanges of all ranks can be recorded: this tries it. Collective."""
        transport = self._transport
        if not transport.on_streams or not hasattr(transport.up, "abort"):
            return False
        if self._watch is not None:
            return True
        stream = torch.cuda.Stream(transport.device)
        with torch.cuda.stream(stream):
            mine, every = (torch.ones(n, dtype=torch.uint8, device=transport.device) for n in (1, transport.world))
            transport.up._allgather_base(every, mine).wait()  # makes the communicator, which cannot be recorded
            stream.synchronize()
            index = transport.device.index or 0
            recording = _core.Recording(_core.Device("cuda", index=index, stream=stream.cuda_stream))
            try:
                works = self._on_all(functools.partial(self._record, recording, every, mine))
                works = works and self._on_all(functools.partial(self._replay, recording, every, mine))
            finally:
                recording.forget()
        if works:
            seconds = transport.time_out.total_seconds()
            self._watch = Watch(transport.up, seconds, transport.rank, transport.lost)
        return works

    def _on_all(self, attempt: Callable[[], bool]) -> bool:
        """Whether it works on all ranks, so that none goes on alone with an exchange."""
        try:
            works = attempt()
        except RuntimeError:
            works = False
        return all(self._transport.gather_bytes(bytes([works])))

    def _record(self, recording: _core.Recording, every: torch.Tensor, mine: torch.Tensor) -> bool:
        recording.begin()
        try:
            self._transport.up._allgather_base(every, mine).wait()
            recording.end()
        except RuntimeError:
            recording.forget()  # before the ranks exchange what they have found
            raise
        return True

    @staticmethod
    def _replay(recording: _core.Recording, every: torch.Tensor, mine: torch.Tensor) -> bool:
        mine.fill_(2)
        recording.run()
        return bool((every == 2).all())

    def recordings(self, device: _core.Device, owner: object) -> Recordings:
        """Of a bucket. They are forgotten with their owner at the latest."""
        made = Recordings(device)
        weakref.finalize(owner, made.forget).atexit = False  # Transport.close_all does it
        self._every = [one for one in self._every if one.is_used] + [made]
        return made

    def run(self, task: RecordedTask) -> None:
        """A task, from its start to its finish."""

        def work() -> None:
            with task.on_stream():
                task.receive(self._transport.exchanged(task, task.encode()))

        assert task.recordings is not None and self._watch is not None
        task.open()
        self._ran |= task.recordings.run(task, work)
        task.close()
        if task.last and self._ran:
            self._watch.step(task.stream)
            self._ran = False

    def close(self) -> None:
        for recordings in self._every:
            recordings.forget()
        self._every.clear()
        if self._watch is not None:
            self._watch.close()
