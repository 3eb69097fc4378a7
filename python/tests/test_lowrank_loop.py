# SPDX-License-Identifier: Apache-2.0
"""lowrank in a closed loop: a thousand steps of SGD on three quadratics (three seeds), with gradients that are mostly
noise and differ between ranks. Beside it stand the exact mean, topk with as many bits, and lowrank with the residual as
PowerSGD defines it, in which the noise of a rank piles up.
"""

from __future__ import annotations

import torch
from ranks import Rank, Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.torch as gw
from gradwire.torch._lowrank_task import FactorTask

STEPS, RATE, NOISE = 1000, 0.1, 0.3


class Quadratics(nn.Module):
    """For each seed (1 / 2) ||W - W*||^2 with curvatures from 0.1 to 1, of 24 x 32 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(24, 32) for _ in range(3))
        draws = [torch.Generator().manual_seed(seed) for seed in range(3)]
        self.targets = [torch.randn(24, 32, generator=draw) for draw in draws]
        self.curvature = torch.logspace(-1, 0, 32)

    def excess(self) -> torch.Tensor:
        apart = torch.stack([w.detach() for w in self.weights]) - torch.stack(self.targets)
        return (self.curvature * apart.square()).sum((1, 2)) / 2

    def forward(self, noise: list[torch.Tensor]) -> torch.Tensor:
        terms = (
            (self.curvature * (w - t).square()).sum() / 2 + (w * one).sum()
            for w, t, one in zip(self.weights, self.targets, noise)
        )
        return sum(terms)  # type: ignore[return-value]


def noise(draw: torch.Generator) -> list[torch.Tensor]:
    return [NOISE * torch.randn(24, 32, generator=draw) for _ in range(3)]


def drawer(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(50 + rank)


def exact(world: int) -> torch.Tensor:
    """The excess of each seed in the last tenth, if nothing is compressed."""
    model, draws, total = Quadratics(), [drawer(rank) for rank in range(world)], torch.zeros(3)
    w, targets = torch.zeros(3, 24, 32), torch.stack(model.targets)
    for step in range(STEPS):
        drawn = torch.stack([torch.stack(noise(draw)) for draw in draws]).mean(0)
        w -= RATE * (model.curvature * (w - targets) + drawn)
        if step >= STEPS * 9 // 10:
            total += (model.curvature * (w - targets).square()).sum((1, 2)) / 2
    return total / (STEPS / 10)


def descend(rank: Rank, codec: str, rule: str = "") -> tuple[torch.Tensor, float]:
    """(excess of each seed in the last tenth, norm of this rank's residuals)."""
    ddp = DDP(Quadratics(), process_group=rank.group)
    hook = gw.compress(ddp, codec, min_elements=0)
    kept = FactorTask.add_lost
    if rule == "PowerSGD":  # residual = M - result
        FactorTask.add_lost = _as_powersgd  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    draw, total = drawer(rank.rank), torch.zeros(3)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(noise(draw)).backward()
            optimizer.step()
            if step >= STEPS * 9 // 10:
                total += ddp.module.excess()
    finally:
        FactorTask.add_lost = kept  # type: ignore[method-assign]
    (part,) = hook.state_dict()["ranks"].values()
    return total / (STEPS / 10), float(torch.cat([one.flatten() for one in part["up"].values()]).norm())


def _as_powersgd(task: FactorTask) -> None:
    for run, p in zip(task.runs, task.is_p):
        task._own(run, p).copy_(task._x(run, p))


def test_trains_nearly_like_the_exact_mean(ranks: Ranks) -> None:
    plain = exact(2)
    ours, small = ranks.run(2, descend, "lowrank:rank=2,bits=4")[0]
    theirs, large = ranks.run(2, descend, "lowrank:rank=2,bits=4", "PowerSGD")[0]
    # 0.58 bits each: 2 rows of 24 + 32 numbers of 4 bits for 24 x 32 elements, and 1.2 % of values of 48 bits.
    strongest, _ = ranks.run(2, descend, "topk:ratio=0.012")[0]
    # Measured: 1.29 of the exact mean; 1.65 with PowerSGD's residual, which is 8 times as large.
    assert bool((ours < 1.45 * plain).all()), (ours, plain)
    assert bool((ours < 0.9 * theirs).all()) and small < 0.4 * large, (ours, theirs, small, large)
    assert bool((ours < 0.9 * strongest).all()), (ours, strongest)
