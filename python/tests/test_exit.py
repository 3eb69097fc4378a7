# SPDX-License-Identifier: Apache-2.0
"""A process that leaves while a backward pass is under way in another thread ends, whatever that pass is doing: it gets
an error, and nothing waits for ranks that never come. A hook that has failed can be dropped without waiting for them
either.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import PATIENCE, free_port
from warm_python import Warm

SCRIPT = """
import os, sys, threading, time, torch, torch.distributed as dist
import gradwire.torch as gw
from gradwire.torch._transport import Transport
rank, port, moment = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
hook = gw.compress(ddp, "qsgd:bits=4")
if rank == 1:
    sys.stdin.read()  # never takes part, and lives until it is told to end
    os._exit(0)
transport = hook._transport
inside = threading.Event()

def backward():
    out = ddp(torch.randn(4, 64))
    if moment == "computing":  # no bucket is ready yet, and the hook is called after the interpreter began to end
        out.register_hook(lambda gradient: (inside.set(), wait_for(lambda: transport._closed), None)[-1])
    out.sum().backward()

def wait_for(condition):
    while not condition():
        time.sleep(0.001)

if moment == "forgotten":  # an exchange was begun, and the thread that would wait for it sees the failure first
    down = Transport._down
    Transport._down = lambda self, *given: (wait_for(lambda: self.failure is not None), down(self, *given))
thread = threading.Thread(target=backward, daemon=True)
thread.start()
wait_for({
    "submitted": lambda: transport._pending,
    "exchanging": lambda: transport._begun["up"],
    "forgotten": lambda: transport._begun["up"],
    "computing": inside.is_set,
}[moment])
print("under way" if thread.is_alive() else "over", flush=True)
"""


DROPPED = """
import gc, os, sys, time, weakref, torch, torch.distributed as dist
import gradwire.torch as gw
from gradwire.torch._transport import Transport
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
hook = gw.compress(ddp, "qsgd:bits=4")
if rank == 1:
    sys.stdin.read()
    os._exit(0)
Transport._down = lambda self, task, first, work: self._fail(task, RuntimeError("something on this rank"))
try:
    ddp(torch.randn(4, 64)).sum().backward()
except RuntimeError as error:
    assert "something on this rank" in str(error)
transport = weakref.ref(hook._transport)
hook.remove()
del ddp, hook
while transport() is not None:  # an exchange is under way that will never end
    gc.collect()
print("dropped", flush=True)
"""

LEARNING = """
import os, sys, time, torch, torch.distributed as dist
import gradwire.torch as gw
from gradwire.torch._transport import Transport
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
model = torch.nn.Linear(64, 64)
if sys.argv[3] == "DDP":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    model = torch.distributed.fsdp.fully_shard(model)
hook = gw.compress(model, "dqsgd:budget=3", min_elements=0)
pool = Transport.pool_bytes
Transport.pool_bytes = lambda self, mine: (time.sleep(1.5), pool(self, mine), print("learned", flush=True))[1]
model(torch.randn(4, 64)).sum().backward()
hook.remove()  # the transport is closed, and its last thread is at work
"""


def ended(folder: Path, text: str, *arguments: str) -> bytes:
    """What rank 0 of two says before it ends."""
    script = folder / "ends.py"
    script.write_text(text)
    port = str(free_port())
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    with (
        Warm([str(script), "1", port, *arguments], environment),
        Warm([str(script), "0", port, *arguments], environment) as one,
    ):
        code, out, err = one.communicate(PATIENCE)
        assert code == 0, (code, err.decode())
        return out


@pytest.mark.parametrize("moment", ["submitted", "exchanging", "forgotten", "computing"])
def test_a_process_that_ends_during_a_backward_pass_ends(tmp_path: Path, moment: str) -> None:
    assert ended(tmp_path, SCRIPT, moment) == b"under way\n"


def test_a_hook_that_has_failed_can_be_dropped(tmp_path: Path) -> None:
    assert ended(tmp_path, DROPPED) == b"dropped\n"


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_process_that_ends_while_a_codec_learns_ends_after_it(tmp_path: Path, kind: str) -> None:
    assert ended(tmp_path, LEARNING, kind) == b"learned\n"
