# SPDX-License-Identifier: Apache-2.0
"""Who carries the messages: torch.distributed, as uint8 tensors, on groups of our own.

All ranks must start the same operations on a group in the same order. DDP's buckets come in the same order everywhere, so
each phase of a bucket's way has one thread and one group, and every thread takes the buckets in their order:

    thread up      encode; start the all-to-all on group `up`
    thread down    wait for it; add up; encode; start the second all-to-all on group `down`
    thread end     wait for it; decode; the future is done. What a step has taught goes over group `end`

A second phase started from completion callbacks would come in another order on every rank, and deadlock. All hooks on one
process group share a carrier, for the same reason. On NCCL nothing needs a thread: everything is enqueued on streams, on
one group, in the order of the calls.

What fails on one rank stays with the carrier: every later bucket fails at once with the same words. The others learn of it
from the process group, when its time-out has passed or the connection is gone.
"""

import atexit
import queue
import threading
import time
import uuid
from datetime import timedelta
from typing import Any, Callable, ContextManager, Protocol

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from .._errors import EngineError


class Passage(Protocol):
    """A bucket on its way; the phases are called in this order, each with what the one before brought."""

    def on_stream(self) -> ContextManager[object]: ...
    def start(self) -> "Parcel": ...
    def middle(self, received: torch.Tensor) -> "Parcel | None": ...  # None: no second phase
    def finish(self, received: torch.Tensor | None) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def waited(self, phase: str, seconds: float) -> None: ...


class Parcel:
    """What one phase sends: a buffer with a slot for every rank, and room for what comes. Without slots for every rank the
    one that there is goes to everybody."""

    def __init__(self, send: torch.Tensor, send_slots: list[int], recv: torch.Tensor, recv_slots: list[int]) -> None:
        self.send, self.send_slots, self.recv, self.recv_slots = send, send_slots, recv, recv_slots

    def leave(self, group: Any) -> "dist.Work":
        if len(self.send_slots) < len(self.recv_slots):
            return group._allgather_base(self.recv, self.send)  # type: ignore[no-any-return]
        return group.alltoall_base(self.recv, self.send, self.recv_slots, self.send_slots)  # type: ignore[no-any-return]


_Queue = queue.SimpleQueue[Callable[[], None] | None]


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """That of the user's own group; None (torch's default) where torch does not tell."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None


class Carrier:
    """One for each process group and kind of device; `Carrier.of` finds or makes it, and is collective."""

    _all: list["Carrier"] = []

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        # NCCL moves memory of the GPU itself; everybody else moves memory of the host.
        self.on_streams = device.type == "cuda" and "nccl" in dist.get_backend(group)
        self.device = device if self.on_streams else torch.device("cpu")
        self.failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        timeout = timeout or _timeout_of(group, self.device)
        name = [uuid.uuid4().hex if self.rank == 0 else ""]
        dist.broadcast_object_list(name, src=dist.get_global_rank(group, 0), group=group)
        groups = [self._own_group(f"gradwire/{name[0]}/{what}", timeout or default_pg_timeout) for what in (["up"] if self.on_streams else ["up", "down", "end"])]
        self.up, self.down, self.end = groups[0], groups[-1 if self.on_streams else 1], groups[-1]
        if not self.on_streams:
            self._queues: list[_Queue] = [queue.SimpleQueue() for _ in range(3)]
            for phase, tasks in zip(("up", "down", "end"), self._queues):
                thread = threading.Thread(target=self._work, args=(tasks,), name=f"gradwire {phase}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _own_group(self, name: str, timeout: timedelta) -> Any:
        """A backend by itself, which torch's list of groups does not hold: making a listed one would involve ranks that are
        not in the user's group."""
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        if not self.on_streams:
            return dist.ProcessGroupGloo(store, self.rank, self.world, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, self.rank, self.world, options)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> "Carrier":
        alive = [c for c in cls._all if c.failure is None and _exists(c.group)]
        cls._all[:] = alive
        for carrier in alive:
            if carrier.group is group and timeout is None and carrier.on_streams == (device.type == "cuda" and "nccl" in dist.get_backend(group)):
                return carrier
        cls._all.append(cls(group, device, timeout))
        return cls._all[-1]

    @staticmethod
    def _work(tasks: "_Queue") -> None:
        while (task := tasks.get()) is not None:
            task()
            del task  # it would keep the last passage, and a whole model with it, until the next one comes

    @classmethod
    def close_all(cls) -> None:
        """Before the interpreter ends: threads of ours, and Gloo's behind them, must not outlive it."""
        for carrier in cls._all:
            for tasks in carrier._queues if carrier._threads else []:
                tasks.put(None)
            for thread in carrier._threads:
                thread.join(1.0)
        cls._all.clear()

    def carry(self, passage: Passage) -> None:
        """Returns at once on a host; on streams, when everything is enqueued. The passage tells how it ended."""
        if self.on_streams:
            self._enqueue(passage)
        else:
            self._queues[0].put(lambda: self._up(passage))

    def _enqueue(self, passage: Passage) -> None:
        try:
            self.check()
            with passage.on_stream():  # which NCCL comes after, and which waits for NCCL; the host waits for nobody
                parcel = passage.start()
                parcel.leave(self.up).wait()
                second = passage.middle(parcel.recv)
                if second is not None:
                    second.leave(self.down).wait()
                passage.finish(second.recv if second is not None else None)
        except BaseException as error:
            self._fail(passage, error)

    def _up(self, passage: Passage) -> None:
        try:
            self.check()
            parcel = passage.start()
            work = parcel.leave(self.up)
        except BaseException as error:
            self._fail(passage, error)
        else:
            self._queues[1].put(lambda: self._down(passage, parcel, work))

    def _down(self, passage: Passage, parcel: Parcel, work: "dist.Work") -> None:
        try:
            self.check()
            self._wait(work, passage, "down")
            second = passage.middle(parcel.recv)
            work = second.leave(self.down) if second is not None else work
        except BaseException as error:
            self._fail(passage, error)
        else:
            self._queues[2].put(lambda: self._end(passage, second, work))

    def _end(self, passage: Passage, parcel: Parcel | None, work: "dist.Work") -> None:
        try:
            self.check()
            if parcel is not None:
                self._wait(work, passage, "end")
            passage.finish(parcel.recv if parcel is not None else None)
        except BaseException as error:
            self._fail(passage, error)

    @staticmethod
    def _wait(work: "dist.Work", passage: Passage, phase: str) -> None:
        begin = time.perf_counter()
        work.wait()
        passage.waited(phase, time.perf_counter() - begin)

    def _fail(self, passage: Passage, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        passage.fail(error)

    def check(self) -> None:
        if self.failure is not None:
            raise EngineError(f"an earlier bucket failed, and this process group with it: {self.failure}", field="carrier")

    def gather(self, mine: bytes) -> bytes:
        """The bytes of all ranks, as many each. Only from `finish`: it uses the group `end`."""
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        every = torch.empty(self.world * own.numel(), dtype=torch.uint8, device=self.device)
        self.end._allgather_base(every, own).wait()
        return bytes(every.cpu().numpy())

    def any(self, flags: torch.Tensor) -> list[int]:
        """uint8 flags, 1 where any rank has 1. Only from `start`: it uses the group `up`."""
        flags = flags.to(self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self.up.allreduce([flags], options).wait()
        return [int(flag) for flag in flags.tolist()]


atexit.register(Carrier.close_all)


def _exists(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group: a user may destroy all groups and begin anew."""
    try:
        return dist.is_initialized() and dist.get_world_size(group) > 0
    except (ValueError, RuntimeError, KeyError):
        return False
