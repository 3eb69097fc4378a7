# SPDX-License-Identifier: Apache-2.0
"""The DDP hook on a GPU: the bits of the CPU, through NCCL (one rank) and through Gloo (several ranks on one GPU); a
step with an Inf changes nothing, though the host does not wait for the GPU to find out; and in steady state the host
waits for nothing.
"""

from __future__ import annotations

import warnings
from typing import Any, Iterator

import pytest
import torch
from ranks import Rank, Ranks
from test_ddp import equal, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.torch as gw

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gradwire._core.cuda_devices() == 0, reason="no GPU that torch and gradwire can use"
)

CODECS = [info["example"] for info in gradwire.codecs() if not info["lossless"]]


class Given(nn.Module):
    """A model whose gradients are given: the same on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300, 250))
        self.bias = nn.Parameter(torch.zeros(77))
        self.head = nn.Parameter(torch.zeros(64, 65))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients))  # type: ignore[return-value]


def given(rank: Rank, step: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank.rank)
    return [torch.randn(shape, generator=generator).to(device) for shape in ((300, 250), (77,), (64, 65))]


def reduced(rank: Rank, device: str, codec: str, method: str) -> Any:
    ddp = DDP(Given().to(device), process_group=rank.group, bucket_cap_mb=0.1)
    hook = gw.compress(ddp, codec, feedback=True, method=method)
    results = []
    for step in range(4):
        ddp.zero_grad()
        ddp(given(rank, step, device)).backward()
        results.append([p.grad.cpu() for p in ddp.parameters()])
    return results, hook.residual_hash(), hook.stats()["skipped"]


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    pool = Ranks(1, backend="nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("method", ["scatter", "gather"])
@pytest.mark.parametrize("codec", CODECS)
def test_nccl_alone_gives_the_bits_of_the_cpu(ranks: Ranks, nccl: Ranks, codec: str, method: str) -> None:
    cpu = ranks.run(1, reduced, "cpu", codec, method)[0]
    gpu = nccl.run(1, reduced, "cuda:0", codec, method)[0]
    assert all(equal(a, b) for a, b in zip(cpu[0], gpu[0])) and cpu[1:] == gpu[1:]


@pytest.mark.parametrize("codec", CODECS)
def test_gloo_with_several_ranks_on_a_gpu_gives_the_bits_of_the_cpu(ranks: Ranks, codec: str) -> None:
    cpu = ranks.run(3, reduced, "cpu", codec, "scatter")
    gpu = ranks.run(3, reduced, "cuda:0", codec, "scatter")
    for a, b in zip(cpu, gpu):
        assert all(equal(x, y) for x, y in zip(a[0], b[0])) and a[1:] == b[1:]


def low_rank(rank: Rank, device: str, codec: str) -> Any:
    ddp = DDP(Given().to(device), process_group=rank.group, bucket_cap_mb=0.1)
    hook = gw.compress(ddp, codec)
    results = []
    for step in range(5):
        gradients = given(rank, step, device)
        if step == 3 and rank.rank == 0:
            gradients[0][5, 7] = float("inf")
        ddp.zero_grad()
        ddp(gradients).backward()
        results.append([p.grad.cpu() for p in ddp.parameters()])
    return results, hook.stats()["skipped"]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("codec", [f"lowrank:bits={bits},alternate={way}" for bits in (8, 32) for way in ("on", "off")])
def test_low_rank_on_a_gpu_is_nearly_that_of_a_cpu(ranks: Ranks, nccl: Ranks, backend: str, codec: str) -> None:
    pool, world = (ranks, 3) if backend == "gloo" else (nccl, 1)
    cpu, gpu = ranks.run(world, low_rank, "cpu", codec), pool.run(world, low_rank, "cuda:0", codec)
    for (results, skipped), (others, also) in zip(cpu, gpu):
        assert skipped == also == 1
        for step, (a, b) in enumerate(zip(results, others)):
            if step == 3:
                assert bool(a[0].isnan().any()) and bool(b[0].isnan().any())
            else:  # products are torch's; a number of a factor may be rounded to another of 8 bits
                assert all(float((x - y).norm() / x.norm()) < 0.05 for x, y in zip(a, b))
        assert all(torch.equal(a, b) for x, y in zip(others[:3], gpu[0][0]) for a, b in zip(x, y)), "ranks agree"


def with_adam(rank: Rank, device: str, codec: str, down: str, fused: bool) -> Any:
    ddp = DDP(Given().to(device), process_group=rank.group, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=fused)
    hook = gw.compress(ddp, codec, optimizer=optimizer, warmup=2, down=down)
    for step in range(8):
        optimizer.zero_grad()
        ddp(given(rank, step, device)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 10.0)
        optimizer.step()
    moments = [optimizer.state[p][name].cpu() for p in ddp.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return [p.detach().cpu() for p in ddp.parameters()], moments, hook.stats()["optimizer"]["phase"]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("fused", [False, True])
def test_adams_momentum_is_exchanged_on_a_gpu_as_on_a_cpu(ranks: Ranks, nccl: Ranks, backend: str, fused: bool) -> None:
    pool, world = (ranks, 3) if backend == "gloo" else (nccl, 1)
    cpu = ranks.run(world, with_adam, "cpu", "topk:ratio=1", "fp32", fused)
    gpu = pool.run(world, with_adam, "cuda:0", "topk:ratio=1", "fp32", fused)
    for (weights, _, phase), (others, _, _) in zip(cpu, gpu):
        # Second moments may be pooled in another type, and a GPU rounds a quotient differently.
        assert phase == "compressed" and all(torch.allclose(a, b, atol=1e-4) for a, b in zip(weights, others))
    lossy = pool.run(world, with_adam, "cuda:0", "onebit", "optquant:bits=4", fused)
    for weights, moments, _ in lossy:
        assert equal(weights, lossy[0][0]) and equal(moments, lossy[0][1])


def skipping(rank: Rank) -> Any:
    ddp = DDP(network().cuda(), process_group=rank.group)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
    hook = gw.compress(ddp, "qsgd:bits=2", feedback=True, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    log = []
    for step in range(7):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank.rank)).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ddp(x).float().square().mean()
        if step in (3, 4) and rank.rank == 0:
            loss = loss * float("inf")
        before = hook.residual_hash(), scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log.append((before, (hook.residual_hash(), scaler.get_scale())))
    return log, hook.stats()["skipped"]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_an_inf_on_one_rank_skips_the_step(ranks: Ranks, nccl: Ranks, backend: str) -> None:
    pool, world = (ranks, 2) if backend == "gloo" else (nccl, 1)
    for log, skipped in pool.run(world, skipping):
        assert skipped == 2
        for step, (before, after) in enumerate(log):
            assert (before[0] == after[0]) == (step in (3, 4)), step
            assert after[1] == before[1] / 2 if step in (3, 4) else after[1] >= before[1]


def profiled(rank: Rank, codec: str | None) -> dict[str, int]:
    """How often each call of the CUDA runtime was made in four steps."""
    ddp = DDP(network(width=1024).cuda(), process_group=rank.group)
    if codec:
        gw.compress(ddp, codec, feedback=True)
    x = torch.randn(64, 64, device="cuda")

    def step() -> None:
        for p in ddp.parameters():
            p.grad = None
        ddp(x).square().mean().backward()

    for _ in range(25):  # DDP measures itself in some of the first twenty
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # what torch itself would wait for
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(4):
            step()
    torch.cuda.set_sync_debug_mode("default")
    calls: dict[str, int] = {}
    for event in profile.events():
        if event.name.startswith("cuda"):
            calls[event.name] = calls.get(event.name, 0) + 1
    return calls


def test_the_host_does_not_wait_in_steady_state(nccl: Ranks) -> None:
    plain, ours = nccl.run(1, profiled, None)[0], nccl.run(1, profiled, "qsgd:bits=4")[0]
    assert ours["cudaLaunchKernel"] > plain["cudaLaunchKernel"]
    for name in ours:
        if "Synchronize" in name or "Malloc" in name or "Free" in name or name == "cudaMemcpy":
            assert ours[name] <= plain.get(name, 0), (name, plain, ours)  # the profiler itself waits once at its end


def saved(rank: Rank) -> Any:
    ddp = DDP(Given().cuda(), process_group=rank.group)
    hook = gw.compress(ddp, "optquant:bits=2", feedback=True)
    other = DDP(Given().cuda(), process_group=rank.group)
    again = gw.compress(other, "optquant:bits=2", feedback=True)
    for step in range(3):
        ddp(given(rank, step, "cuda")).backward()
    again.load_state_dict(hook.state_dict())
    assert again.residual_hash() == hook.residual_hash() and again.step == 3
    results = []
    for one in (ddp, other):
        one.zero_grad()
        one(given(rank, 3, "cuda")).backward()
        results.append([p.grad.clone() for p in one.parameters()])
    return equal(*results) and again.residual_hash() == hook.residual_hash()


def test_the_state_survives(nccl: Ranks) -> None:
    assert nccl.run(1, saved) == [True]


def judged(rank: Rank) -> Any:
    ddp = DDP(network().cuda(), process_group=rank.group, bucket_cap_mb=0.02)
    hook = gw.compress(ddp, "qsgd:bits=4")
    x = torch.randn(16, 64, device="cuda")
    words = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(55):
            ddp.zero_grad()
            ddp(x).square().mean().backward()
        words = [str(one.message) for one in found if "does not pay" in str(one.message)]
    return hook.stats()["judged"], words, hook.stats()["all_steps"]["seconds"]["exposed"]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_a_step_waits_for_is_compared_with_torchs_all_reduce(ranks: Ranks, backend: str) -> None:
    pool = ranks if backend == "gloo" else Ranks(2, backend="nccl")
    every = pool.run(2, judged)
    for found, words, exposed in every:
        assert found == every[0][0] and 0 < found["plain"] and 0 < found["exposed"] and exposed > 0
    assert len(every[0][1]) == (found["exposed"] > 1.1 * found["plain"]) and not every[1][1]
    if pool is not ranks:
        pool.close()
