# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with replicas on a GPU: the bits of the CPU, through NCCL (one rank) and through Gloo (four ranks that share a
GPU), and a step with an Inf changes nothing.
"""

from __future__ import annotations

from typing import Any, Iterator

import pytest
import torch
from ranks import Rank, Ranks
from torch import nn

import gradwire
import gradwire.torch as gw

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gradwire._core.cuda_devices() == 0, reason="no GPU that torch and gradwire can use"
)

SHAPES = [(300, 250), (77,), (64, 65)]


class Given(nn.Module):
    """A model whose gradients are given: the same on every device."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return x + (self.weight * gradient).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Given(shape) for shape in SHAPES)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        x = torch.zeros((), device=gradients[0].device)
        for part, gradient in zip(self.parts, gradients):
            x = part(x, gradient)
        return x


def given(rank: Rank, step: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank.rank)
    gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if step == 3 and rank.rank == 0:
        gradients[2][1, 2] = float("inf")
    return [gradient.to(device) for gradient in gradients]


def reduced(rank: Rank, device: str, shape: tuple[int, ...], codec: str, options: dict[str, Any]) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[: len(shape)])
    wrap = fully_shard if len(shape) > 1 else replicate
    model = Model().to(device)
    for part in model.parts:
        wrap(part, mesh=mesh)
    hook = gw.compress(wrap(model, mesh=mesh), codec, feedback=True, min_elements=0, **options)
    results = []
    for step in range(6):
        model.zero_grad()
        model(given(rank, step, device)).backward()
        results.append([p.grad.to_local().cpu() for p in model.parameters()])
    return results, hook.residual_hash(), hook.stats()["skipped"]


def pool_of(world: int, backend: str) -> Iterator[Ranks]:
    pool = Ranks(world, backend=backend)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    yield from pool_of(1, "nccl")


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    yield from pool_of(1, "gloo")


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    yield from pool_of(4, "gloo")


def same(cpu: Any, gpu: Any) -> bool:
    bits = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for x, y in zip(cpu[0], gpu[0]) for a, b in zip(x, y))
    return bits and cpu[1:] == gpu[1:] and cpu[2] == 1


@pytest.mark.parametrize("codec", ["qsgd:bits=4", "optquant:bits=4", "topk:ratio=0.1"])
@pytest.mark.parametrize("shape", [(1, 1), (1,)])
def test_nccl_alone_gives_the_bits_of_the_cpu(alone: Ranks, nccl: Ranks, shape: tuple[int, ...], codec: str) -> None:
    cpu = alone.run(1, reduced, "cpu", shape, codec, {})[0]
    gpu = nccl.run(1, reduced, "cuda", shape, codec, {})[0]
    assert same(cpu, gpu)


@pytest.mark.parametrize("codec", ["qsgd:bits=4", "onebit"])
@pytest.mark.parametrize("shape", [(2, 2), (4,)])
def test_ranks_that_share_a_gpu_have_the_bits_of_the_cpu(four: Ranks, shape: tuple[int, ...], codec: str) -> None:
    # The collectives of the shard dimension are ours too: Gloo has not all of them for GPUs.
    options = {"gradients": "qsgd:bits=8", "weights": "unigrid:bits=8"} if len(shape) > 1 else {}
    cpu = four.run(4, reduced, "cpu", shape, codec, options)
    gpu = four.run(4, reduced, "cuda", shape, codec, options)
    assert all(same(a, b) for a, b in zip(cpu, gpu))


def adam(rank: Rank, device: str) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = init_device_mesh(device, (4,), mesh_dim_names=("replicate",))
    model = Model().to(device)
    for part in model.parts:
        replicate(part, mesh=mesh)
    replicate(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook = gw.compress(model, "onebit", optimizer=optimizer, warmup=2, min_elements=0)
    for step in range(9):
        optimizer.zero_grad()
        model([torch.nan_to_num(one, posinf=1.0) for one in given(rank, step, device)]).backward()
        optimizer.step()
    return [p.detach().to_local().cpu() for p in model.parameters()], hook.stats()["optimizer"]["phase"]


def test_momentum_between_replicas_on_a_gpu(four: Ranks) -> None:
    cpu, gpu = (four.run(4, adam, device) for device in ("cpu", "cuda"))
    assert all(phase == "compressed" for _, phase in gpu)
    for weights, _ in gpu[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, gpu[0][0]))
    # The rule has the same bits on both, and torch's optimizer has not.
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(cpu[0][0], gpu[0][0]))
