# SPDX-License-Identifier: Apache-2.0
"""Buckets that are recorded as CUDA graphs: the bits of buckets that are not, in every kind of step, with NCCL on one
rank and on two ranks that share a GPU; and a rank that is gone is noticed though its exchange was recorded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any, Iterator

import pytest
import torch
from ranks import Rank, Ranks, free_port
from test_ddp import equal, network
from test_ddp_cuda import CODECS, Given, given
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.torch as gw

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gradwire._core.cuda_devices() == 0, reason="no GPU that torch and gradwire can use"
)


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def nccl(request: Any) -> Iterator[Ranks]:
    pool = Ranks(request.param, backend="nccl")
    yield pool
    pool.close()


def world_of(pool: Ranks) -> int:
    return len(pool.processes)


def recorded(hook: Any) -> int:
    """How many recordings the hook has now."""
    kept = [known.chunk.recordings for known in hook._known.values() if known.chunk is not None]
    return sum(len(one._recorded) for one in kept if one is not None)


def steps(rank: Rank, device: str, codec: str, count: int, options: dict[str, Any], inf: int = -1) -> Any:
    ddp = DDP(Given().to(device), process_group=rank.group, bucket_cap_mb=0.1)
    hook = gw.compress(ddp, codec, **{"cuda_graphs": device != "cpu", **options})
    results = []
    for step in range(count):
        gradients = given(rank, step, device)
        if step == inf:
            gradients[0][3, 5] = float("inf")
        ddp.zero_grad()
        ddp(gradients).backward()
        results.append([p.grad.cpu() for p in ddp.parameters()])
    stats = hook.stats()
    found = results, hook.residual_hash(), stats["skipped"], stats["all_steps"]["bytes"]
    return found, recorded(hook)


def compare(ranks: Ranks, pool: Ranks, codec: str, count: int = 10, inf: int = -1, **options: Any) -> list[int]:
    """Results, residuals and bytes are those of the CPU and those without graphs. Returns the numbers of recordings."""
    world = world_of(pool)
    cpu = ranks.run(world, steps, "cpu", codec, count, options, inf)
    plain = pool.run(world, steps, "cuda:0", codec, count, {**options, "cuda_graphs": False}, inf)
    graphs = pool.run(world, steps, "cuda:0", codec, count, options, inf)
    for (a, _), (b, none), (c, _) in zip(cpu, plain, graphs):
        assert none == 0
        for step, (x, y, z) in enumerate(zip(a[0], b[0], c[0])):
            assert equal(x, y) and equal(y, z), step
        assert a[1:] == b[1:] == c[1:]
    return [kept for _, kept in graphs]


@pytest.mark.parametrize("codec", CODECS)
def test_the_bits_are_those_of_the_cpu(ranks: Ranks, nccl: Ranks, codec: str) -> None:
    kept = compare(ranks, nccl, codec, feedback=True)
    # A bucket has two recordings, one for each of its residual buffers. What learns has others with every new table,
    # and dqsgd learns from every step.
    assert all(one >= 2 for one in kept) or gradwire.Codec(codec).learns, kept


@pytest.mark.parametrize("method", ["scatter", "gather"])
@pytest.mark.parametrize("feedback", [True, False])
def test_methods_and_feedback(ranks: Ranks, nccl: Ranks, method: str, feedback: bool) -> None:
    assert all(compare(ranks, nccl, "qsgd:bits=4", method=method, feedback=feedback))


def test_tables_are_learned_between_recorded_steps(ranks: Ranks, nccl: Ranks) -> None:
    assert all(compare(ranks, nccl, "optquant:bits=3,refit=9", count=31))
    compare(ranks, nccl, "optquant:bits=3,refit=2", count=12)


def test_a_step_with_an_inf_changes_nothing(ranks: Ranks, nccl: Ranks) -> None:
    assert all(compare(ranks, nccl, "qsgd:bits=2", count=12, inf=8, feedback=True))


def test_a_warm_up_and_measured_steps_are_not_recorded(ranks: Ranks, nccl: Ranks) -> None:
    assert all(compare(ranks, nccl, "qsgd:bits=4", count=16, warmup=5, measure_every=4))


def changing(rank: Rank, device: str, graphs: bool) -> Any:
    """The codec, the loss scale and the residuals change; gradients are accumulated; a state is loaded."""
    torch.manual_seed(5)
    ddp = DDP(network().to(device), process_group=rank.group, bucket_cap_mb=0.02)
    scaler = torch.amp.GradScaler(device.split(":")[0], init_scale=1024.0, growth_interval=6)
    hook = gw.compress(ddp, "qsgd:bits=2", feedback=True, scaler=scaler, cuda_graphs=graphs)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    hashes, most = [], 0
    for step in range(40):
        if step == 12:
            hook.set_codec("optquant:bits=3")
        if step == 20:
            hook.load_state_dict(hook.state_dict())
        if step == 30:
            hook.remove()
            hook = gw.compress(ddp, "onebit", scaler=scaler, cuda_graphs=graphs)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank.rank)).to(device)
        optimizer.zero_grad()
        if step % 3 == 0:
            with ddp.no_sync():
                scaler.scale(ddp(x).square().mean()).backward()
        scaler.scale(ddp(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        hashes.append(hook.residual_hash())
        most = max(most, recorded(hook))
    return [p.detach().cpu() for p in ddp.parameters()], hashes, most


def test_whatever_changes_between_steps(nccl: Ranks) -> None:
    world = world_of(nccl)
    plain, graphs = nccl.run(world, changing, "cuda:0", False), nccl.run(world, changing, "cuda:0", True)
    for (weights, hashes, none), (others, same, most) in zip(plain, graphs):
        assert equal(weights, others) and hashes == same and none == 0 < most
        assert equal(weights, plain[0][0])


def with_adam(rank: Rank, graphs: bool) -> Any:
    ddp = DDP(Given().to("cuda"), process_group=rank.group, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
    hook = gw.compress(ddp, "onebit", optimizer=optimizer, warmup=2, cuda_graphs=graphs)
    for step in range(12):
        optimizer.zero_grad()
        ddp(given(rank, step, "cuda")).backward()
        optimizer.step()
    return [p.detach().cpu() for p in ddp.parameters()], hook.residual_hash(), recorded(hook)


def test_adams_momentum(nccl: Ranks) -> None:
    world = world_of(nccl)
    for (a, x, none), (b, y, kept) in zip(nccl.run(world, with_adam, False), nccl.run(world, with_adam, True)):
        assert equal(a, b) and x == y and none == 0 < kept


def calls(rank: Rank) -> dict[str, int]:
    """How often each call of the CUDA runtime was made in four steps."""
    ddp = DDP(network(width=1024).cuda(), process_group=rank.group)
    gw.compress(ddp, "qsgd:bits=4", feedback=True, cuda_graphs=True)
    x = torch.randn(64, 64, device="cuda")
    for _ in range(25):
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(4):
            ddp.zero_grad()
            ddp(x).square().mean().backward()
    found: dict[str, int] = {}
    for event in profile.events():
        if event.name.startswith("cuda"):
            found[event.name] = found.get(event.name, 0) + 1
    return found


def test_a_bucket_is_one_launch(nccl: Ranks) -> None:
    for found in nccl.run(world_of(nccl), calls):
        # Four steps of a few buckets; what is left beside them is a step's beginning and end, and the model itself.
        assert found["cudaGraphLaunch"] >= 4, found


GONE = """
    import os, sys, time, torch, torch.distributed as dist, torch.nn as nn
    import gradwire.torch as gw
    from datetime import timedelta
    rank = int(os.environ["RANK"])
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=timedelta(seconds=8))
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda())
    hook = gw.compress(ddp, "qsgd:bits=4", feedback=True, cuda_graphs=True)
    for step in range(40):
        if step == 20 and rank == 1:
            time.sleep(60 if sys.argv[1] == "stops" else 0)
            os._exit(0)
        ddp.zero_grad()
        loss = ddp(torch.randn(8, 256, device="cuda")).square().mean()
        loss.backward()
        if step == 19:
            print("recorded", sum(len(k.chunk.recordings._recorded) for k in hook._known.values()), flush=True)
        ddp.module.weight.grad.sum().item()  # as a loop that looks at its loss
    print("the end was reached")
"""


@pytest.mark.parametrize("how", ["stops", "dies"])
def test_a_rank_that_is_gone_ends_the_job(tmp_path: Any, how: str) -> None:
    """By the time-out of torch's watchdog, as with torch's own collectives."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(GONE))
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), how],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        printed, _ = processes[0].communicate(timeout=100)
    finally:
        for process in processes:
            process.kill()
    assert "recorded 2" in printed and "the end was reached" not in printed, printed
    assert processes[0].returncode != 0, printed
    


def test_a_process_that_keeps_everything_to_the_end_ends(tmp_path: Any) -> None:
    """Nobody removes the hook or destroys a process group; NCCL would wait for graphs that are never freed."""
    script = tmp_path / "train.py"
    lines = textwrap.dedent(GONE).replace("range(40)", "range(15)").replace("step == 19", "step == 14")
    script.write_text(lines)
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ended = subprocess.run(
        [sys.executable, str(script), "ends"], env={**environment, "MASTER_PORT": str(free_port())}, text=True,
        capture_output=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0 and "recorded 2" in ended.stdout and "the end was reached" in ended.stdout, ended
