# SPDX-License-Identifier: Apache-2.0
"""A coder for some tensors of the model, with its buffers and, on a GPU, its stream: what a BucketTask needs to encode
and decode.

On the CPU, and on a GPU with NCCL, messages are written where the process group reads them. On a GPU with any other
backend they pass through page-locked host memory, in the threads of the transport. Buffers grow and are kept: steps
follow each other, so the buffers of a bucket are free when the same bucket comes again.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, ContextManager, Iterator

import torch

from .. import _core
from . import _streams
from ._transport import Exchange, Transport

if TYPE_CHECKING:
    from ._recordings import Recordings


class Times:
    """Seconds per activity. Each entry is written by one thread only: encode by `up` and `down`, decode by `down` and
    `end`."""

    KINDS = ("encode", "wait", "decode")

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], float] = {}
        self._before = self.last = dict.fromkeys(self.KINDS, 0.0)

    @contextlib.contextmanager
    def measure(self, kind: str, phase: str, wall: bool) -> Iterator[None]:
        clock = time.perf_counter if wall else time.thread_time
        begin = clock()
        yield
        self.add(kind, phase, clock() - begin)

    def add(self, kind: str, phase: str, seconds: float) -> None:
        self.spent[kind, phase] = self.spent.get((kind, phase), 0.0) + seconds

    def totals(self) -> dict[str, float]:
        """Of all steps; `last` has those of the last step."""
        spent = list(self.spent.items())
        return {kind: sum(seconds for (name, _), seconds in spent if name == kind) for kind in self.KINDS}

    def step_done(self) -> None:
        now = self.totals()
        self.last, self._before = {kind: now[kind] - self._before[kind] for kind in self.KINDS}, now


@contextlib.contextmanager
def between(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Runs on `stream`, after what the current stream of the device has been given and before what it is given next.
    None: not on a GPU."""
    if stream is None:
        yield
        return
    theirs = _streams.current(device)
    stream.wait_stream(theirs)
    with torch.cuda.stream(stream):
        yield
    theirs.wait_stream(stream)


class Buffers:
    """uint8 tensors by name, each as large as the largest request so far."""

    def __init__(self) -> None:
        self.made = 0  # so many times; what is known of addresses holds until this changes
        self._buffers: dict[tuple[str, torch.device, bool], torch.Tensor] = {}
        self._last: dict[tuple[str, torch.device, bool], torch.Tensor] = {}  # given last

    def get(self, name: str, size: int, device: torch.device, pinned: bool = False, room: int = 0) -> torch.Tensor:
        """room: what no rank's request exceeds. With it the buffers of all ranks are made in the same step."""
        key, room = (name, device, pinned), max(size, room)
        last = self._last.get(key)
        if last is not None and last.numel() == size and self._buffers[key].numel() >= room:
            return last
        if key not in self._buffers or self._buffers[key].numel() < room:
            self.made += 1
            self._buffers[key] = torch.empty(max(room, 16), dtype=torch.uint8, device=device, pin_memory=pinned)
        self._last[key] = self._buffers[key][:size]
        return self._last[key]


def core_device(
    device: torch.device, stream: "torch.cuda.Stream | None", threads: int, clock: "torch.Tensor | None" = None
) -> "_core.Device":
    """clock: 8 bytes of the GPU's memory, for work that is recorded."""
    if device.type == "cpu":
        return _core.Device("cpu", threads=threads)
    assert stream is not None
    at = 0 if clock is None else clock.data_ptr()
    return _core.Device("cuda", index=device.index or 0, stream=stream.cuda_stream, clock=at)


class StagedTask:
    """The part of a BucketTask that knows neither DDP nor codecs: buffers that are sent and received."""

    recordings: "Recordings | None" = None  # of what it enqueues, where that may be recorded

    def __init__(
        self, transport: Transport, device: torch.device, times: Times, stream: "torch.cuda.Stream | None" = None
    ) -> None:
        """stream: that of the task, on a GPU; one of its own unless given."""
        self.transport, self.device, self.times = transport, device, times
        self.stream = (stream or torch.cuda.Stream(device)) if device.type == "cuda" else None
        self._on = _streams.On(self.stream) if self.stream is not None else None
        self._following = _streams.Following()
        self.buffers = Buffers()
        self.through_host = device.type == "cuda" and not transport.on_streams
        self.sent = 0  # bytes to other ranks, in the last step

    def on_stream(self) -> ContextManager[object]:
        return self._on if self._on is not None else contextlib.nullcontext()

    def wait_for(self, stream: "torch.cuda.Stream | None") -> None:
        if self.stream is not None and stream is not None:
            self._following.wait_for(stream, self.stream)

    def precede(self, stream: "torch.cuda.Stream") -> None:
        if self.stream is not None:
            self._following.wait_for(self.stream, stream)

    def measure(self, kind: str, phase: str) -> ContextManager[None]:
        return self.times.measure(kind, phase, wall=self.device.type == "cuda")

    def waited(self, phase: str, seconds: float) -> None:
        self.times.add("wait", phase, seconds)

    def exchange(
        self, name: str, send: torch.Tensor, send_slots: list[int], recv_slots: list[int], rank: int | None = None,
        room: int = 0,
    ) -> Exchange:  # fmt: skip
        """`send` and room for the answer, both in the memory that the transport uses. rank: this one's slot, if the
        exchange is not one between the ranks of the transport. room: as for Buffers.get."""
        if self.through_host:
            host = self.buffers.get(name + " send", send.numel(), torch.device("cpu"), pinned=True)
            host.copy_(send, non_blocking=True)
            self._synchronize()
            send = host
        size, pinned = sum(recv_slots), self.through_host
        recv = self.buffers.get(name + " recv", size, self.transport.device, pinned, room)
        copies = len(recv_slots) - 1 if len(send_slots) == 1 else 1
        own = self.transport.rank if rank is None else rank
        self.sent += copies * send.numel() - (send_slots[own] if len(send_slots) > 1 else 0)
        return Exchange(send, send_slots, recv, recv_slots)

    def to_device(self, name: str, received: torch.Tensor) -> torch.Tensor:
        if not self.through_host:
            return received
        here = self.buffers.get(name + " device", received.numel(), self.device)
        here.copy_(received, non_blocking=True)
        return here

    def _synchronize(self) -> None:
        """Gloo reads host memory at once, so the copy must be complete. It is a thread of the transport that waits."""
        assert self.stream is not None
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        event.synchronize()


class CodingTask(StagedTask):
    """A task with a coder. `chunk` of `chunks` says which part of a single large tensor it codes."""

    def __init__(
        self, model: "_core.ModelCoder", tensors: list[int], transport: Transport, device: torch.device, threads: int,
        times: Times, chunk: int = 0, chunks: int = 1, stream: "torch.cuda.Stream | None" = None,
        clock: "torch.Tensor | None" = None,
    ) -> None:  # fmt: skip
        super().__init__(transport, device, times, stream)
        self.tensors = tensors
        # No reference to the task itself: a coder waits for the GPU when it goes, so it goes when the task is dropped,
        # and not when Python finds a circle some time.
        stream = self.stream
        self._make = lambda: _core.BucketCoder(
            model, tensors, core_device(device, stream, threads, clock), chunk, chunks
        )
        self._coder: "_core.BucketCoder | None" = None
        self.pointers: list[int] = []  # of the tensors, which are encoded and then replaced by the result

    @property
    def coder(self) -> "_core.BucketCoder":
        """It is made when it is first used, in the thread that begins steps, because it reads the codecs of the open
        step."""
        if self._coder is None:
            self._coder = self._make()
        return self._coder

    # Encoding, with the buffers that it needs: (what is sent, its slots, the slots that are received).

    def encode_up(self, tensors: list[int]) -> tuple[torch.Tensor, list[int], list[int]]:
        slots = self.coder.up_send
        send = self.buffers.get("up", sum(slots), self.device)
        self.coder.encode_up(tensors, send.data_ptr(), send.numel())
        return send, slots, self.coder.up_recv

    def encode_down(self, values: list[int]) -> tuple[torch.Tensor, list[int], list[int]]:
        """This rank's message once; where the ranks' messages differ in size, once for every rank, because torch's
        all-gather needs equal sizes and the all-to-all does not."""
        world, rank = self.transport.world, self.transport.rank
        slots = self.coder.down_recv
        if len(set(slots)) == 1:
            send = self.buffers.get("down", slots[rank], self.device)
            self.coder.encode_down(send.data_ptr(), send.numel(), values)
            return send, slots[rank : rank + 1], slots
        send = self.buffers.get("down", world * slots[rank], self.device, room=world * max(slots))
        rows = send.view(world, slots[rank])
        self.coder.encode_down(rows[rank].data_ptr(), slots[rank], values)
        if slots[rank]:
            rows[:rank].copy_(rows[rank].expand(rank, -1))
            rows[rank + 1 :].copy_(rows[rank].expand(world - rank - 1, -1))
        return send, [slots[rank]] * world, slots

    def unload(self) -> None:
        """Lets go of what the step was about, where the next one has other buffers."""

    # The phases of a BucketTask that are the same for all.

    def reduce(self, received: torch.Tensor) -> Exchange | None:
        with self.on_stream():
            with self.measure("decode", "down"):
                here = self.to_device("up", received)
                if not self.coder.down_recv:  # method="gather"
                    self.coder.decode_up(here.data_ptr(), here.numel(), self.pointers)
                    return None
                self.coder.decode_up(here.data_ptr(), here.numel())
            with self.measure("encode", "down"):
                send, slots, answers = self.encode_down([])
            return self.exchange("down", send, slots, answers)

    def decode_answer(self, received: torch.Tensor | None) -> None:
        if received is not None:
            with self.measure("decode", "end"):
                here = self.to_device("down", received)
                self.coder.decode_down(here.data_ptr(), here.numel(), self.pointers)
