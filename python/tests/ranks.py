# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: processes that stay, because importing torch takes seconds. Six of them, with a Gloo group for every
world from 1 to 6; a test names a function of its own file, and every rank of the world runs it.

    ranks.run(4, some_function, "argument")   -> [result of rank 0, ...]
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable

LARGEST = 6

# Seconds. No test asserts how long something takes: a busy machine may take any time. These limits only end a test that
# hangs.
PATIENCE = 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def eventually(condition: Callable[[], bool]) -> bool:
    """Waits until `condition` holds, and returns whether it does."""
    deadline = time.monotonic() + PATIENCE / 2  # so that the rank still answers
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Rank:
    """What a function on a rank is given."""

    held: dict[int, Any] = {}  # by world; in this process

    def __init__(self, rank: int, world: int, group: Any) -> None:
        self.rank, self.world, self.group = rank, world, group

    def hold_transport(self) -> None:
        """Keeps one transport for the group, which the hooks of all tests share, as those of one training do: to make
        one, and to end it, takes longer than most tests. Collective."""
        import torch
        from gradwire.torch._transport import Transport

        before = self.held.get(self.world)
        self.held[self.world] = Transport.acquire(self.group, torch.device("cpu"), None)
        if before is not None:
            before.release()

    @classmethod
    def let_go(cls) -> None:
        """For a test of what becomes of transports."""
        while cls.held:
            cls.held.popitem()[1].release()


def _serve(pipe: Connection, rank: int, processes: int, port: int, folder: str, backend: str, crash: str) -> None:
    trace = open(crash, "w")
    faulthandler.enable(trace)  # where every thread was, if a signal ends the process
    faulthandler.register(signal.SIGUSR1, trace)  # where they are, if somebody asks
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    # NCCL takes two ranks of one machine on one GPU for a mistake; ranks of two machines it lets be, over sockets.
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
    sys.path.insert(0, folder)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=processes)
    groups = {world: dist.new_group(list(range(world))) for world in range(1, processes + 1)}
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        module, name, world, arguments = task
        try:
            function = getattr(importlib.import_module(module), name)
            this = Rank(rank, world, groups[world])
            if backend == "gloo":
                this.hold_transport()
            pipe.send((True, function(this, *arguments)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class RankError(AssertionError):
    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in errors.items()))
        self.errors = {rank: (kind, words) for rank, (kind, words, _) in errors.items()}


class Ranks:
    def __init__(self, processes: int = LARGEST, backend: str = "gloo") -> None:
        # One process imports torch and what it imports later, when a training begins; the ranks are forks of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "gradwire.torch"])
        port, here_folder = free_port(), os.path.dirname(__file__)
        self._folder = tempfile.TemporaryDirectory()
        self._crashes = [Path(self._folder.name) / f"rank-{rank}" for rank in range(processes)]
        self._last = ""
        self.meshes: set[tuple[int, ...]] = set()  # the shapes of those that tests have made on these ranks
        self.pipes: list[Connection] = []
        self.processes = []
        for rank, crash in enumerate(self._crashes):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, processes, port, here_folder, backend, str(crash)), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, world: int, function: Callable[..., Any], *arguments: Any) -> None:
        dead = [rank for rank, process in enumerate(self.processes[:world]) if process.exitcode is not None]
        if dead:
            raise RuntimeError(f"{self._death(dead[0])} The last function that ranks ran is {self._last}.")
        self._last = f"{function.__module__}.{function.__name__}{arguments}"
        for pipe in self.pipes[:world]:
            pipe.send((function.__module__, function.__name__, world, arguments))

    def _death(self, rank: int) -> str:
        self.processes[rank].join(10)
        trace = self._crashes[rank].read_text()
        return f"The process of rank {rank} is gone, with exit code {self.processes[rank].exitcode}.\n{trace}"

    def _end(self, world: int) -> str:
        """Where every rank hangs. Then all of them are ended, so that the next test fails at once and not as late."""
        for process in self.processes[:world]:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(2)
        traces = [f"\nrank {rank} is here:\n{crash.read_text()}" for rank, crash in enumerate(self._crashes[:world])]
        for process in self.processes:
            process.kill()
            process.join()
        return "".join(traces)

    def results(self, world: int) -> list[tuple[bool, Any]]:
        """(whether it succeeded, result or error) of every rank that still answers."""
        outcomes: list[tuple[bool, Any]] = []
        for rank, pipe in enumerate(self.pipes[:world]):
            try:
                if not pipe.poll(PATIENCE):
                    said = "".join(f"\nrank {one} said: {outcome}" for one, outcome in enumerate(outcomes))
                    raise TimeoutError(f"rank {rank} did not answer in {PATIENCE} s{said}{self._end(world)}")
                outcomes.append(pipe.recv())
            except EOFError:
                outcomes.append((False, ("EOFError", "the process is gone", self._death(rank))))
        return outcomes

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.start(world, function, *arguments)
        outcomes = self.results(world)
        errors = {rank: value for rank, (fine, value) in enumerate(outcomes) if not fine}
        if errors:
            raise RankError(errors)
        return [value for _, value in outcomes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self._folder.cleanup()
