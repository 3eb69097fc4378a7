# SPDX-License-Identifier: Apache-2.0
"""lowrank in a closed loop: a thousand steps of SGD, three seeds, with gradients that differ between ranks.

- On quadratics whose gradients are mostly noise. Beside it stand the exact mean, topk with as many bits, and lowrank
  with the residual as PowerSGD defines it, in which the noise of a rank piles up.
- On four profiles of gradients as trainings have them. Beside it stand the exact mean, PowerSGD's residual, and no
  residual at all.
"""

from __future__ import annotations

import math
from typing import Any, Iterator

import pytest
import torch
from ranks import Rank, Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.torch as gw
from gradwire.torch._lowrank import FactorGroup
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


# Profiles. Weights W have 24 x 32 elements and a loss of 1/2 |W - target|^2, so that the gradient of a rank is
# W - target + noise. A rate of 0.02 lets the distance of the exact mean fall by e^-20 in 1000 steps.

SEEDS, ROWS, COLUMNS, SLOW_RATE = 3, 24, 32, 0.02
PROFILES = {
    "decaying": "targets and noise have the singular values 1/i and 1/sqrt(i) of the largest",
    "turning": "the target's left singular vectors turn by a right angle in the course of the training",
    "rare rows": "a row has a gradient in one of (i + 2) / 2 steps, as words have, with noise of heavy tails",
    "dominated": "a matrix of rank one, of either sign, is 90 times the noise, and 30 times less in the second half",
}
# "forgetful" keeps no residual; "powersgd" has the residual M - result.
VARIANTS = {"exact": 32, "ours4": 4, "ours8": 8, "forgetful4": 4, "powersgd4": 4}


class Given(torch.autograd.Function):
    """A loss that has these gradients."""

    @staticmethod
    def forward(context: Any, gradients: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        context.gradients = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> Any:
        return (None, *context.gradients)


class Profiles(nn.Module):
    """Weights for every variant, profile and seed. The gradients of a profile have the same noise in all variants."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shape = len(VARIANTS), len(PROFILES), SEEDS
        names = [f"{variant} {at}" for variant in VARIANTS for at in range(len(PROFILES) * SEEDS)]
        self.weights = nn.ParameterDict([(name, nn.Parameter(torch.zeros(ROWS, COLUMNS))) for name in names])
        self.alike, self.own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(50 + rank)
        draw = [torch.randn(SEEDS, n, n, generator=self.alike) for n in (ROWS, COLUMNS)]
        self.left, self.right = (torch.linalg.qr(one)[0] for one in draw)
        self.place = 1 / torch.arange(1, ROWS + 1)
        self.strongest = self.left[:, :, :1] @ self.right[:, :, :1].mT
        self.still = self.target(self.left)

    def target(self, left: torch.Tensor) -> torch.Tensor:
        return (left * (8 * self.place)) @ self.right[:, :, :ROWS].mT

    def targets(self, step: int) -> torch.Tensor:
        angle, (a, b) = math.pi / 2 * step / STEPS, self.left.chunk(2, 2)
        turned = torch.cat([math.cos(angle) * a + math.sin(angle) * b, math.cos(angle) * b - math.sin(angle) * a], 2)
        return torch.stack([self.still, self.target(turned), self.still, self.still])

    def noise(self, step: int) -> torch.Tensor:
        normal = torch.randn(len(PROFILES), SEEDS, ROWS, COLUMNS, generator=self.own)
        normal[0] = 0.3 * (self.left * self.place.sqrt()) @ normal[0]
        normal[1] *= 0.1
        tails = torch.randn(3, SEEDS, ROWS, 1, generator=self.own)  # Student's t with three degrees of freedom
        normal[2] *= 0.3 / tails.square().mean(0).sqrt()
        wild = torch.randn(SEEDS, 1, 1, generator=self.alike)  # this part is common to the ranks
        normal[3] = 0.1 * normal[3] + (30 if step < STEPS // 2 else 1) * wild * self.strongest
        return normal

    def gradients(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(those of this rank, excess) for each variant, profile and seed."""
        here = torch.stack([one.detach() for one in self.weights.values()]).view(*self.shape, ROWS, COLUMNS)
        away = here - self.targets(step)
        given = away + self.noise(step)
        given[:, 2] *= torch.rand(SEEDS, ROWS, 1, generator=self.own) < (2 / torch.arange(2, ROWS + 2)).unsqueeze(1)
        return given, away.square().sum((3, 4)) / 2

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return Given.apply(list(gradients.flatten(0, 2)), *self.weights.values())  # type: ignore[no-any-return]


def train_profiles(rank: Rank, alternate: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(excess over that of the exact mean, |residual| / |gradient| of this rank), in the last tenth of the steps, for
    each variant, profile and seed."""
    model = Profiles(rank.rank)
    ddp = DDP(model, process_group=rank.group)
    rules = "".join(f"weights.*{bits} *=lowrank:rank=2,bits={bits},alternate={alternate};" for bits in (4, 8))
    hook = gw.compress(ddp, rules + "*=fp32", min_elements=0)
    names = list(model.weights)
    ruled = {
        (group, rule): torch.tensor([names[one].startswith(rule) for one in group.parameters])
        for group in hook._groups for rule in ("forgetful", "powersgd")
    }  # fmt: skip
    commit, add_lost = FactorGroup.commit, FactorTask.add_lost

    def forget(group: FactorGroup, *given: Any) -> None:
        commit(group, *given)
        group.residual[ruled[group, "forgetful"]] = 0

    def as_powersgd(task: FactorTask) -> None:
        add_lost(task)
        for run, p in zip(task.runs, task.is_p):
            which = run.cut(ruled[run.group, "powersgd"])
            task._own(run, p)[which] = task._x(run, p)[which]

    optimizer = torch.optim.SGD(ddp.parameters(), lr=SLOW_RATE)
    excess, gradients, residuals = (torch.zeros(model.shape) for _ in range(3))
    FactorGroup.commit, FactorTask.add_lost = forget, as_powersgd  # type: ignore[method-assign]
    try:
        for step in range(STEPS):
            given, above = model.gradients(step)
            optimizer.zero_grad()
            ddp(given).backward()
            optimizer.step()
            if step < STEPS * 9 // 10:
                continue
            kept = torch.zeros(len(names))
            for group in hook._groups:
                kept[group.parameters] = group.residual.square().sum((1, 2))
            excess += above
            gradients += given.square().sum((3, 4))
            residuals += kept.view(model.shape)
    finally:
        FactorGroup.commit, FactorTask.add_lost = commit, add_lost  # type: ignore[method-assign]
    hook.remove()
    return excess / excess[0], (residuals / gradients).sqrt()


@pytest.fixture(scope="module", params=["off", "on"])
def profiles(request: Any, ranks: Ranks) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    excess, residual = ranks.run(2, train_profiles, request.param)[0]
    yield dict(zip(VARIANTS, excess)), dict(zip(VARIANTS, residual))


# Each power iteration sends the two strongest of 24 directions, so a direction waits for about twelve steps. That is a
# quarter of the fifty steps that the weights take to follow, and costs little loss: at most 1.26 of the exact mean's
# was measured. Without a residual a direction that is not among the strongest is learned at a twelfth of the rate and
# is not there after 1000 steps: at least 5.5 was measured.
def test_every_profile_trains_nearly_like_the_exact_mean_which_needs_the_residual(profiles: Any) -> None:
    excess, _ = profiles
    for name in ("ours4", "ours8"):
        assert bool((excess[name] < 1.35).all()), (name, excess[name])
    assert bool((excess["forgetful4"] > 4).all()), excess["forgetful4"]


# Noise that waits for twelve steps adds up to sqrt(12) = 3.5 times that of a step; 1.9 to 4.1 was measured. By
# PowerSGD's rule what a rank's own noise differs from the mean, half of its square with two ranks, adds up for the
# whole training, to sqrt(1000 / 2) = 22 times; 19.9 to 24.6 was measured. At 4 bits so large a message has a coarse
# grid: where all singular directions have noise, ours had 0.83 to 0.87 of its loss.
def test_no_profile_piles_up_a_residual(profiles: Any) -> None:
    excess, residual = profiles
    for name in ("ours4", "ours8"):
        assert bool((residual[name] < 6).all()), (name, residual[name])
    assert bool((residual["powersgd4"] > 12).all()), residual["powersgd4"]
    assert bool((excess["ours4"][0] < 0.95 * excess["powersgd4"][0]).all()), (excess["ours4"], excess["powersgd4"])
