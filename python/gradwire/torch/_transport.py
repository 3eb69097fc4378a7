# SPDX-License-Identifier: Apache-2.0
"""How encoded buckets travel between ranks: as uint8 tensors, over torch.distributed process groups of our own.

All ranks must start the same operations on a process group in the same order. DDP hands over its buckets in the same
order on every rank, so each phase of an all-reduce has one thread and one process group, and every thread takes the
buckets in the order in which they were submitted:

    thread "up"      encodes a bucket and starts the all-to-all on the group `up`
    thread "down"    waits for it, reduces, encodes the result and starts the second exchange on the group `down`
    thread "end"     waits for it, decodes, and completes the bucket's future; on the group `end` it also gathers the
                     statistics of codecs that learn, when the last bucket of a step is complete

If the second exchange were started from a completion callback instead, its order would differ between ranks, and they
would deadlock. For the same reason all hooks on one process group share one transport, and exchanges that follow from
the results of others, and so are submitted by the thread "end", have a transport of their own (`purpose`). With NCCL no
thread is needed: all work is enqueued on CUDA streams, on one group, in the order of the calls. Only a codec that
learns has a thread there, because learning waits for the GPU, and a group on Gloo, because NCCL's must not be used by
two threads at once. A hook that sends its gradients over other groups, as that of FSDP2 does, has a transport for what
codecs learn (_lessons.py), with one thread and one group on Gloo.

A failure on one rank stays with its transport: every later bucket fails at once with the same message. The other ranks
learn of it from the process group, when its time-out has passed or when the connection is closed.
"""

from __future__ import annotations

import atexit
import ctypes
import queue
import sys
import threading
import time
import types
import uuid
import weakref
from datetime import timedelta
from typing import Any, Callable, ContextManager, Optional, Protocol

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from .._errors import EngineError
from ._agree import timeout_of_group
from ._nodes import Layout
from ._recordings import RecordedTask, Recorder, Recordings


class BucketTask(Protocol):
    """One all-reduce under way. The transport calls the phases in this order, each with what the previous exchange
    received."""

    @property
    def recordings(self) -> "Recordings | None": ...  # if it is a RecordedTask
    def on_stream(self) -> ContextManager[object]: ...
    def start(self) -> "Exchange | None": ...  # None: there is no exchange at all, and `finish` is next
    def reduce(self, received: torch.Tensor) -> "Exchange | None": ...  # None: there is no second exchange
    def finish(self, received: torch.Tensor | None) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def waited(self, phase: str, seconds: float) -> None: ...


class Exchange:
    """The buffers of one collective: what is sent, with a slot for every rank, and room for what is received. If there
    is only one slot to send, every rank receives it (an all-gather); otherwise slot p goes to rank p (an
    all-to-all)."""

    def __init__(self, send: torch.Tensor, send_slots: list[int], recv: torch.Tensor, recv_slots: list[int]) -> None:
        self.send, self.send_slots, self.recv, self.recv_slots = send, send_slots, recv, recv_slots

    def begin(self, group: Any) -> "dist.Work":
        if len(self.send_slots) < len(self.recv_slots):
            return group._allgather_base(self.recv, self.send)  # type: ignore[no-any-return]
        return group.alltoall_base(  # type: ignore[no-any-return]
            self.recv, self.send, self.recv_slots, self.send_slots
        )


LESSONS = "lessons"  # the purpose of a transport on which nothing but `in_turn` is called
_Queue = queue.SimpleQueue[Optional[Callable[[], None]]]  # evaluated, and Python 3.9 has no `|` for types


def runs_on_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """NCCL moves GPU memory itself. Every other backend moves host memory."""
    return device.type == "cuda" and "nccl" in dist.get_backend(group)


class Transport:
    """One per process group and kind of device. `acquire` finds or makes it; the last `release` closes it. With a
    layout of nodes its ranks are those with the same place in all nodes, and there are groups for the ranks within a
    node."""

    _shared: list["Transport"] = []  # those that a new hook may share
    _every: "weakref.WeakSet[Transport]" = weakref.WeakSet()  # those that must end before the interpreter does
    _running: list[threading.Thread] = []  # of all transports, gone ones included
    _lock = threading.RLock()  # a hook may be freed, and its transport released, in the middle of anything
    at_exit: list[Callable[[bool], None]] = []  # called last, with whether all backward passes have ended

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None,
        name: str,
        layout: Layout | None = None,
        purpose: str = "",
    ) -> None:
        self.group, self.name, self.layout, self.purpose = group, name, layout, purpose
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.place, path = 0, f"gradwire/{name}"
        if layout is not None:
            node, self.place = layout.places[self.rank]
            self.rank, self.world, path = node, layout.nodes, f"gradwire/{name}/place {self.place}"
        self.on_streams = runs_on_streams(group, device)
        self.device = device if self.on_streams else torch.device("cpu")
        self.failure: BaseException | None = None
        self._users = 0
        self._closed = False
        # Tasks under way. A task that is complete may be submitted again before it is taken off this list.
        self._pending: list[BucketTask] = []
        self._queues: list[_Queue]
        self._due: list[Callable[[], None]] = []  # by the thread "end", when the task that it is at has ended
        self._after: _Queue | None = None  # of the thread that learns, on streams
        self._pool: Any = None  # the group of that thread
        self._lessons = 0  # given to `later` or `in_turn`, and not over
        self._missed: BaseException | None = None  # what has ended one of them early
        # NCCL's communicators wait for the graphs that hold their exchanges, so recordings are forgotten before groups.
        self.recorder = Recorder(self)
        # What was begun on a group, and perhaps never waited for. Each list is changed by one thread only.
        self._begun: dict[str, list["dist.Work"]] = {"up": [], "down": [], "in": [], "out": []}
        timeout = timeout or timeout_of_group(group, self.device) or default_pg_timeout
        self._path, self.time_out = path, timeout
        phases = ["learn"] if purpose == LESSONS else ["up"] if self.on_streams else ["up", "down", "end"]
        groups = [self._own_group(f"{path}/{phase}", self.rank, self.world, timeout) for phase in phases]
        self.up, self.down, self.end = groups[0], groups[len(groups) // 2], groups[-1]
        # Within the node, for the threads "up" and "end".
        self._within: dict[str, Any] = {}
        if layout is not None:
            inside = [
                self._own_group(f"gradwire/{name}/node {self.rank}/{phase}", self.place, layout.per_node, timeout)
                for phase in (["up"] if self.on_streams else ["up", "end"])
            ]
            self._within = {"in": inside[0], "out": inside[-1]}
        self._queues = [] if self.on_streams else [queue.SimpleQueue() for _ in phases]
        for phase, tasks, after in zip(phases, self._queues, [*self._queues[1:], None]):
            self._start_thread(f"gradwire {phase}", tasks, after)
        Transport._every.add(self)

    def _own_group(self, name: str, rank: int, world: int, timeout: timedelta, on_host: bool = False) -> Any:
        """A backend by itself, which torch's list of groups does not contain: making a listed group would involve ranks
        that are not members of the user's group."""
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        if on_host or not self.on_streams:
            return dist.ProcessGroupGloo(store, rank, world, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)

    # The life of a transport.

    @classmethod
    def acquire(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None,
        layout: Layout | None = None,
        purpose: str = "",
    ) -> "Transport":
        """A transport for one more hook. Collective.

        Garbage is collected at other times on other ranks, so one rank may still have a transport that another rank has
        closed. A transport is shared only if all ranks name the same one.
        """
        with cls._lock:
            for stale in [t for t in cls._shared if t.failure is not None or not _exists(t.group)]:
                stale.close()
            on_streams = runs_on_streams(group, device)
            usable = [
                t
                for t in cls._shared
                if t.group is group and t.on_streams == on_streams and (t.layout, t.purpose) == (layout, purpose)
            ]
            mine = usable[-1] if usable and timeout is None else None
            if mine is not None:
                mine._users += 1  # so that it is not closed while the ranks compare
        proposal = uuid.uuid4().hex
        names: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
        dist.all_gather_object(names, (mine.name if mine else "", proposal), group=group)
        if mine is not None and all(name == mine.name for name, _ in names):
            return mine
        if mine is not None:
            mine.release()
        made = cls(group, device, timeout, names[0][1], layout, purpose)
        made._users = 1
        if timeout is None:
            cls._shared.append(made)
        return made

    def release(self) -> None:
        """One hook fewer uses this transport. The last one closes it. Not collective, and allowed in any thread."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self.close()

    def close(self) -> None:
        """Ends the threads, once they have done what was submitted. The process groups are freed with the transport."""
        with self._lock:
            if self in Transport._shared:
                Transport._shared.remove(self)
            if not self._closed and self._queues:
                self._queues[0].put(None)
            if not self._closed and self._after is not None:
                self._after.put(None)
            self._closed = True
            self.recorder.close()

    @classmethod
    def close_all(cls) -> None:
        """Runs before the interpreter ends, because neither our threads nor those of Gloo may outlive it. First every
        backward pass that waits for a bucket gets an error, on all transports, and only then is anything waited for:
        a thread that still waits when the interpreter has ended waits forever, with DDP's locks held."""
        every = [transport for transport in list(cls._every) if not transport._closed or transport._pending]
        under_way = []
        for transport in every:
            transport.close()  # from here on nothing is submitted
            if transport._pending:
                under_way.append(transport)
            transport.failure = transport.failure or EngineError("the interpreter is shutting down", field="transport")
            for task in transport._pending[:]:
                task.fail(transport.failure)
        left = not every or _leave_backward()
        # What is being learned waits for other ranks, which may be late.
        deadline = time.monotonic() + 10
        while any(transport._lessons for transport in list(cls._every)) and time.monotonic() < deadline:
            time.sleep(0.01)
        # Also those of transports that are gone: a thread that is ended inside torch, because the interpreter is gone,
        # ends the process with it.
        for thread in list(cls._running):
            thread.join(1.0)
        for transport in list(cls._every):
            if transport in under_way or transport._is_exchanging():
                never_free(transport)
        for last in cls.at_exit:
            last(left)

    def _is_exchanging(self) -> bool:
        return any(not work.is_completed() for works in self._begun.values() for work in works)

    def lost(self, error: EngineError) -> None:
        self.failure = self.failure or error

    def __del__(self) -> None:
        self.recorder.close()
        if self._is_exchanging():
            for group in (self.up, self.down, self.end, *self._within.values()):
                never_free(group)

    def _start_thread(self, name: str, tasks: "_Queue", after: "_Queue | None") -> None:
        thread = threading.Thread(target=self._work, args=(tasks, after), name=name, daemon=True)
        thread.start()
        with self._lock:
            Transport._running = [one for one in Transport._running if one.is_alive()] + [thread]

    @staticmethod
    def _work(tasks: "_Queue", after: "_Queue | None") -> None:
        while (task := tasks.get()) is not None:
            task()
            del task  # it would keep the last bucket, and a whole model with it, alive until the next one comes
        if after is not None:
            after.put(None)  # behind everything that this thread has put there

    # The way of one bucket.

    def submit(self, task: BucketTask) -> None:
        """Returns at once; with NCCL, when everything is enqueued. The task is told how it ended."""
        with self._lock:
            self._refuse_closed()
            self._pending.append(task)
            if not self.on_streams:
                self._queues[0].put(lambda: self._up(task))
        if self.on_streams:
            self._enqueue(task)

    def _refuse_closed(self) -> None:
        """Behind the end of the queue nobody would take anything."""
        if self._closed:
            raise EngineError(
                "the process group of this hook was destroyed, or the hook was removed", field="transport"
            )

    def _enqueue(self, task: BucketTask) -> None:
        try:
            self.check()
            # NCCL's work is ordered after the task's stream, and that after NCCL's; the host does not wait.
            if task.recordings is not None:
                self.recorder.run(task)  # type: ignore[arg-type]
            else:
                with task.on_stream():
                    task.finish(self.exchanged(task, task.start()))
            self._pending.remove(task)
        except BaseException as error:
            self._fail(task, error)

    def exchanged(self, task: "BucketTask | RecordedTask", first: Exchange | None) -> torch.Tensor | None:
        """On streams: what `finish` is to get, once both exchanges are enqueued."""
        second = None
        if first is not None:
            first.begin(self.up).wait()
            second = task.reduce(first.recv)
        if second is not None:
            second.begin(self.down).wait()
        return second.recv if second is not None else None

    def _up(self, task: BucketTask) -> None:
        try:
            self.check()
            first = task.start()
            work = self._begin(first, self.up, "up") if first is not None else None
        except BaseException as error:
            self._fail(task, error)
        else:
            self._queues[1].put(lambda: self._down(task, first, work))

    def _down(self, task: BucketTask, first: Exchange | None, work: "dist.Work | None") -> None:
        try:
            self.check()
            second = None
            if first is not None and work is not None:
                self._wait(work, task, "down")
                second = task.reduce(first.recv)
            work = self._begin(second, self.down, "down") if second is not None else None
        except BaseException as error:
            self._fail(task, error)
        else:
            self._queues[2].put(lambda: self._end(task, second, work))

    def _end(self, task: BucketTask, second: Exchange | None, work: "dist.Work | None") -> None:
        try:
            self.check()
            if work is not None:
                self._wait(work, task, "end")
            task.finish(second.recv if second is not None else None)
            self._pending.remove(task)
        except BaseException as error:
            self._fail(task, error)
        while self._due:
            self._due.pop(0)()

    def _begin(self, exchange: Exchange, group: Any, phase: str) -> "dist.Work":
        work = exchange.begin(group)
        self._begun[phase] = [one for one in self._begun[phase] if not one.is_completed()] + [work]
        return work

    @staticmethod
    def _wait(work: "dist.Work", task: BucketTask, phase: str) -> None:
        begin = time.perf_counter()
        try:
            work.wait()
        except RuntimeError as error:
            raise EngineError(
                f"the exchange with the other ranks has failed: one of them has ended, or has not answered within the "
                f"time-out ({error})",
                field="transport",
            ) from error
        task.waited(phase, time.perf_counter() - begin)

    def _fail(self, task: BucketTask, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._pending.remove(task)
        task.fail(error)
        self.recorder.close()

    # When a step is complete. What fails here fails the transport.

    def later(self, work: Callable[[], None]) -> None:
        """Does something when the last bucket of a step is complete, while the training goes on. Only `finish` may call
        this."""
        with self._lock:
            self._lessons += 1
        if self.on_streams:
            self._do_after(work)
        else:
            # At once when the task that calls has ended: the order of what uses the group `end` is that of the tasks.
            self._due.append(lambda: self._guarded(work))

    def in_turn(self, work: Callable[[], None]) -> None:
        """The same for the thread that submits: behind everything that it has submitted."""
        with self._lock:
            self._refuse_closed()
            self._lessons += 1
            if self.on_streams:
                self._do_after(work)
            else:
                self._pass_on(work, self._queues)

    def _pass_on(self, work: Callable[[], None], queues: "list[_Queue]") -> None:
        """Through all threads, because a thread has other work before this one's turn."""
        if queues:
            queues[0].put(lambda: self._pass_on(work, queues[1:]))
        else:
            self._guarded(work)

    def _do_after(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._after is None:
                self._after = queue.SimpleQueue()
                self._start_thread("gradwire learn", self._after, None)
            self._after.put(lambda: self._guarded(work))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = self._missed = self.failure or error
        finally:
            with self._lock:
                self._lessons -= 1

    def prepare_lessons(self) -> None:
        """Before the first lesson of a hook whose codec learns. Collective, in the thread that trains: ranks make a
        group by waiting for each other at torch's store, and while one thread waits there, no other thread of the
        process gets through."""
        if self.on_streams and self._pool is None:
            self._pool = self._own_group(f"{self._path}/learn", self.rank, self.world, self.time_out, on_host=True)

    def pool_bytes(self, mine: bytes) -> bytes:
        """As gather_bytes, for what was given to `later` or `in_turn`."""
        if self._missed is not None:  # other ranks may be waiting in what this one has not done
            raise EngineError(f"learning has failed on this rank before: {self._missed}", field="transport")
        if not self.on_streams:
            return self.gather_bytes(mine)
        assert self._pool is not None, "prepare_lessons comes first"
        return self._gathered(mine, self._pool, self.world, torch.device("cpu"))

    def check(self) -> None:
        if self.failure is not None:
            raise EngineError(
                f"an earlier bucket failed, and this process group with it: {self.failure}", field="transport"
            )

    # Within a node.

    def within(self, exchange: Exchange, way: str, task: BucketTask) -> None:
        """An exchange between the ranks of a node, to its end; on streams, until it is enqueued. way: "in" for `start`,
        "out" for `finish`, because these have a group each."""
        work = self._begin(exchange, self._within[way], way)
        if self.on_streams:
            work.wait()
        else:
            self._wait(work, task, way)

    # Small collectives of a hook.

    def gather_bytes(self, mine: bytes) -> bytes:
        """The bytes of all ranks, one after the other; all ranks give equally many. Only `finish` may call this,
        because it uses the group `end`."""
        return self._gathered(mine, self.end, self.world)

    def gather_everywhere(self, mine: bytes) -> bytes:
        """The same for the ranks of all nodes, in an order that is not said."""
        every = self.gather_bytes(mine)
        if self.layout is not None:
            every = self._gathered(every, self._within["out"], self.layout.per_node)
        return every

    def _gathered(self, mine: bytes, group: Any, world: int, device: torch.device | None = None) -> bytes:
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device or self.device)
        every = torch.empty(world * own.numel(), dtype=torch.uint8, device=own.device)
        group._allgather_base(every, own).wait()
        return bytes(every.cpu().numpy())

    def any_rank(self, flags: torch.Tensor) -> list[int]:
        """uint8 flags: 1 where any rank, of any node, has 1. Only `start` may call this, because it uses the group
        `up`."""
        flags = flags.to(self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        if self._within:
            self._within["in"].allreduce([flags], options).wait()
        self.up.allreduce([flags], options).wait()
        return [int(flag) for flag in flags.tolist()]


atexit.register(Transport.close_all)


def _leave_backward() -> bool:
    """Waits, for at most ten seconds, until no other thread is in a backward pass, and returns whether that is so. A
    thread that needs the interpreter after it has ended would hang with DDP's locks held, and the destructor of DDP
    with it."""

    def is_in_backward(frame: types.FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_name != "_engine_run_backward":
            frame = frame.f_back
        return frame is not None

    deadline = time.monotonic() + 10
    mine = threading.get_ident()
    while any(is_in_backward(frame) for thread, frame in sys._current_frames().items() if thread != mine):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def never_free(kept: object) -> None:
    """Takes a reference that is not given back. The destructor of a Gloo process group waits for every exchange that
    was begun on it, up to the time-out, and all of Python waits with it; the destructor of a DDP waits for its backward
    pass. What a failure has left behind is better kept than waited for."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _exists(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group: a user may destroy all groups and initialize them again."""
    try:
        return dist.is_initialized() and dist.get_world_size(group) > 0
    except (ValueError, RuntimeError, KeyError):
        return False
