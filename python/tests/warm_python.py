# SPDX-License-Identifier: Apache-2.0
"""Python processes that have imported torch already. Importing it takes three seconds of processor time, and the tests
start dozens of processes. One process imports it and forks the others:

    with Warm([script, *arguments], environment={...}) as process:
        process.out.read(), process.wait()

A child runs its script as `python script arguments` would: as __main__, with its own arguments and environment, and it
ends as an interpreter ends, with everything that happens at exit. Only variables that torch reads while it is imported
come too late; OMP_NUM_THREADS is 1.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from typing import Any


def warm_up() -> None:
    """What torch imports, and what it imports when a training begins."""
    import torch
    import torch.distributed.run  # noqa: F401
    import torch.nn.parallel  # noqa: F401

    import gradwire.torch  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork has one thread, and this process has {len(threads)}"


def _serve(channel: socket.socket) -> None:
    """Forks children until the tests are over. Only children return from here."""
    warm_up()
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not request:
            os._exit(0)
        task = json.loads(request)
        if "wait" in task:
            _, status = os.waitpid(task["wait"], 0)
            channel.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(json.dumps(pid).encode())
            continue
        channel.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(task["environment"])
        os.chdir(task["folder"])
        sys.argv = task["arguments"]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        return


_lock = threading.Lock()
_channel: socket.socket | None = None


def _ask(task: dict[str, Any], descriptors: list[int]) -> Any:
    """Sends a request to the process that forks, which is started with the first one."""
    global _channel
    with _lock:
        if _channel is None:
            _channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            theirs.close()
            atexit.register(lambda mine=_channel: (mine.close(), process.wait()))
        socket.send_fds(_channel, [json.dumps(task).encode()], descriptors)
        answer = _channel.recv(1 << 16)
        assert answer, "the process that forks is gone"
        return json.loads(answer)


class Warm:
    """A process with a pipe to its standard input and pipes from its standard output and error."""

    def __init__(self, arguments: list[str], environment: dict[str, str] | None = None, folder: str = "/") -> None:
        theirs_in, mine_in = os.pipe()
        mine_out, theirs_out = os.pipe()
        mine_err, theirs_err = os.pipe()
        theirs = [theirs_in, theirs_out, theirs_err]
        task = {"arguments": arguments, "environment": {**os.environ, **(environment or {})}, "folder": folder}
        self.pid = _ask(task, theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin, self.out, self.err = os.fdopen(mine_in, "wb"), os.fdopen(mine_out, "rb"), os.fdopen(mine_err, "rb")
        self._code: int | None = None

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()
        for file in self.stdin, self.out, self.err:
            file.close()

    def _reap(self) -> None:
        self._code = _ask({"wait": self.pid}, [])

    def communicate(self, timeout: float) -> tuple[int, bytes, bytes]:
        """To its end, which is forced after `timeout` seconds: (exit code, standard output, standard error)."""
        late = threading.Timer(timeout, lambda: os.kill(self.pid, signal.SIGKILL))
        late.start()
        texts: list[bytes] = []
        errors = threading.Thread(target=lambda: texts.append(self.err.read()))
        errors.start()
        out = self.out.read()
        errors.join()
        self._reap()  # waits where a process has closed its files and goes on
        late.cancel()
        assert self._code is not None
        return self._code, out, texts[0]


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    # A child: the script takes the place of this module, and stays until the interpreter has ended.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    with open(sys.argv[0], "rb") as file:
        code = compile(file.read(), sys.argv[0], "exec")
    exec(code, main.__dict__)
