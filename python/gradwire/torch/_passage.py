# SPDX-License-Identifier: Apache-2.0
"""A bucket's way: a Relay, its buffers, and on a GPU its stream.

On the CPU, and on a GPU with NCCL, messages are written where the process group finds them. On a GPU with any other group
they pass through page-locked memory of the host, in the carrier's threads. Buffers grow and are kept: steps follow
each other, so a bucket's buffers are free when it comes again.
"""

import contextlib
import time
from typing import ContextManager, Iterator

import torch

from .. import _core
from ._carrier import Carrier, Parcel


class Times:
    """Seconds by kind, each written by one thread only: encode by `up` and `down`, decode by `down` and `end`."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], float] = {}

    @contextlib.contextmanager
    def spell(self, kind: str, phase: str, wall: bool) -> Iterator[None]:
        clock = time.perf_counter if wall else time.thread_time
        begin = clock()
        yield
        self.add(kind, phase, clock() - begin)

    def add(self, kind: str, phase: str, seconds: float) -> None:
        self.spent[kind, phase] = self.spent.get((kind, phase), 0.0) + seconds

    def total(self, kind: str) -> float:
        return sum(seconds for (name, _), seconds in list(self.spent.items()) if name == kind)


class Buffers:
    """uint8 tensors by name, as large as was ever asked for."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, torch.device, bool], torch.Tensor] = {}

    def room(self, name: str, size: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
        key = (name, device, pinned)
        if key not in self._rooms or self._rooms[key].numel() < size:
            self._rooms[key] = torch.empty(max(size, 16), dtype=torch.uint8, device=device, pin_memory=pinned)
        return self._rooms[key][:size]

    def bytes(self) -> int:
        return sum(room.numel() for room in self._rooms.values())


def core_device(device: torch.device, stream: "torch.cuda.Stream | None", threads: int) -> "_core.Device":
    if device.type == "cpu":
        return _core.Device("cpu", threads=threads)
    assert stream is not None
    return _core.Device("cuda", index=device.index or 0, stream=stream.cuda_stream)


class Relayed:
    """What DDP's buckets and FSDP's units share: relay, stream, buffers, and the steps between them and the carrier."""

    def __init__(self, model: "_core.RelayModel", tensors: list[int], carrier: Carrier, device: torch.device, threads: int, times: Times, part: int = 0, parts: int = 1) -> None:
        self.carrier, self.device, self.times = carrier, device, times
        self.tensors = tensors
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._make = lambda: _core.Relay(model, tensors, core_device(device, self.stream, threads), part, parts)
        self._relay: "_core.Relay | None" = None
        self.buffers = Buffers()
        self.staged = device.type == "cuda" and not carrier.on_streams
        self.sent = 0  # bytes to other ranks, in the last step

    @property
    def relay(self) -> "_core.Relay":
        """Made when it is first begun, in the thread that begins steps: it reads the codecs of the model's step."""
        if self._relay is None:
            self._relay = self._make()
        return self._relay

    def on_stream(self) -> ContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def come_after(self, stream: "torch.cuda.Stream | None") -> None:
        if self.stream is not None and stream is not None:
            self.stream.wait_stream(stream)

    def precede(self, stream: "torch.cuda.Stream") -> None:
        if self.stream is not None:
            stream.wait_stream(self.stream)

    def spell(self, kind: str, phase: str) -> ContextManager[None]:
        return self.times.spell(kind, phase, wall=self.device.type == "cuda")

    def waited(self, phase: str, seconds: float) -> None:
        self.times.add("wait", phase, seconds)

    def parcel(self, name: str, send: torch.Tensor, send_slots: list[int], recv_slots: list[int]) -> Parcel:
        """`send` on its way out, and room for the answer, both where the carrier wants them."""
        if self.staged:
            host = self.buffers.room(name + " out", send.numel(), torch.device("cpu"), pinned=True)
            host.copy_(send, non_blocking=True)
            self._settle()
            send = host
        recv = self.buffers.room(name + " in", sum(recv_slots), self.carrier.device, pinned=self.staged)
        copies = self.carrier.world - 1 if len(send_slots) == 1 else 1
        self.sent += copies * send.numel() - (send_slots[self.carrier.rank] if len(send_slots) > 1 else 0)
        return Parcel(send, send_slots, recv, recv_slots)

    def arrived(self, name: str, received: torch.Tensor) -> torch.Tensor:
        if not self.staged:
            return received
        here = self.buffers.room(name + " here", received.numel(), self.device)
        here.copy_(received, non_blocking=True)
        return here

    def _settle(self) -> None:
        """Until the stream is done: gloo reads memory of the host at once. It is a carrier's thread that waits."""
        assert self.stream is not None
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        event.synchronize()

    # The moves, with the buffers they need.

    def encode_up(self, tensors: list[int]) -> tuple[torch.Tensor, list[int], list[int]]:
        slots = self.relay.up_send
        send = self.buffers.room("up", sum(slots), self.device)
        self.relay.encode_up(tensors, send.data_ptr(), send.numel())
        return send, slots, self.relay.up_recv

    def encode_down(self, values: list[int]) -> tuple[torch.Tensor, list[int], list[int]]:
        """One's own message; where messages differ much in size once for every rank, because all-gathers do not have that."""
        world, rank = self.carrier.world, self.carrier.rank
        slots = self.relay.down_recv
        if len(set(slots)) == 1:
            send = self.buffers.room("down", slots[rank], self.device)
            self.relay.encode_down(send.data_ptr(), send.numel(), values)
            return send, slots[rank : rank + 1], slots
        send = self.buffers.room("down", world * slots[rank], self.device)
        rows = send.view(world, slots[rank])
        self.relay.encode_down(rows[rank].data_ptr(), slots[rank], values)
        if slots[rank]:
            rows[:rank].copy_(rows[rank].expand(rank, -1))
            rows[rank + 1 :].copy_(rows[rank].expand(world - rank - 1, -1))
        return send, [slots[rank]] * world, slots
