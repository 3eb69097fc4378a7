# SPDX-License-Identifier: Apache-2.0
"""Clipping where Adam's momentum is exchanged: limits by shares, the clip of the user's loop, and a training whose
gradients have spikes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from test_adam import adam, own, train
from test_ddp import batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.torch as gw
from gradwire.torch._limits import GradientLimits

SIZES = torch.tensor([1.0, 0.3, 0.02, 0.5])  # norms of the parameters, relative to each other


def gradients(norm: float) -> list[torch.Tensor]:
    noise = torch.randn(4, 64)
    return list(noise / noise.norm(dim=1, keepdim=True) * (norm * SIZES * (0.8 + 0.4 * torch.rand(4))).unsqueeze(1))


def whole(values: list[torch.Tensor]) -> float:
    return float(torch.stack(values).norm())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_norm_stays_below_the_clip_in_a_long_run(seed: int) -> None:
    """The typical norm changes by a factor of 100, with spikes of 50 times a gradient, in one parameter or in all."""
    torch.manual_seed(seed)
    limits, alone, ordinary = GradientLimits(4, torch.device("cpu"), 1.0), 0, 0
    for step in range(1000):
        typical = 0.5 if step < 300 else 5.0 if step < 600 else 0.05
        values, spike = gradients(typical), step % 37 == 5
        for one in values[: 1 if step % 2 else 4]:
            one.mul_(50 if spike else 1)
        before = whole(values)
        limits.apply([2, 3], values[2:])  # as a backward pass does: the last parameters first
        limits.apply([0, 1], values[:2])
        limits.commit(step + 1)
        after = whole(values)
        assert after <= 1 + 1e-6 and after <= before * (1 + 1e-6), step
        if not spike and step % 300 > 60:
            ordinary += typical < 1
            alone += typical < 1 and after > 0.99 * before
            assert typical < 1 or after > 0.75, step
    assert alone > 0.9 * ordinary


def test_a_parameter_that_wakes_up_is_not_held_at_zero() -> None:
    limits = GradientLimits(4, torch.device("cpu"), 1.0)
    for step in range(60):
        values = gradients(0.3)
        if step < 10 or 20 < step < 40:
            values[3].zero_()
        before = float(values[3].norm())
        limits.apply([0, 1, 2, 3], values)
        limits.commit(step + 1)
        assert float(values[3].norm()) >= 0.99 * before, step


def clips(rank: Rank, loop: float | str | None, told: float | None, scale: float) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1 else None
    ddp, optimizer, hook = adam(rank, clip=told, scaler=scaler)
    for step in range(4):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = 500 * nn.functional.cross_entropy(ddp(x), y)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        if loop == "divides":
            torch._foreach_div_([p.grad for p in ddp.parameters()], 3.0)
        elif loop is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), loop)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return hook.stats()["optimizer"]["clip"]


@pytest.mark.parametrize(
    "loop, told, scale, expected",
    [(0.7, None, 1, 0.7), (None, None, 1, 0.0), (1e9, None, 1, 0.0), (None, 0.5, 1, 0.5), (0.7, None, 1024.0, 0.7),
     ("divides", None, 1, 0.0)],
)
def test_the_clip_is_that_of_the_loop(
    ranks: Ranks, loop: float | str | None, told: float | None, scale: float, expected: float
) -> None:
    assert ranks.run(2, clips, loop, told, scale) == [pytest.approx(expected, rel=1e-4)] * 2


def shows_late(rank: Rank) -> Any:
    """The first gradient is smaller than the clip, and the second is larger."""
    ddp, optimizer, hook = adam(rank, warmup=0)
    limits = hook._momentum.limits
    seen = []
    for step in range(3):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        ((500 if step else 0.9) * nn.functional.cross_entropy(ddp(x), y)).backward()
        seen.append(float(torch.stack([own.norm() for own in hook._momentum._own]).norm()))
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.7)
        optimizer.step()
        if step == 1:
            seen.append(float(limits.levels.norm()) / seen[1])
    return seen


def test_a_clip_that_shows_in_the_second_step_holds_in_the_third(ranks: Ranks) -> None:
    for _, second, levels, third in ranks.run(1, shows_late):
        assert second > 10 and levels == pytest.approx(1) and third < 0.71


def resumed(rank: Rank) -> Any:
    ddp, optimizer, hook = adam(rank)
    train(rank, ddp, optimizer, range(4), clip=0.01)
    state, weights = hook.state_dict(), {name: p.clone() for name, p in ddp.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict())
    train(rank, ddp, optimizer, range(4, 7), clip=0.01)
    again, other, following = adam(rank)
    again.load_state_dict(weights)
    other.load_state_dict(moments)
    following.load_state_dict(state)
    train(rank, again, other, range(4, 7), clip=0.01)
    same = all(torch.equal(a, b) for a, b in zip(own(hook, rank), own(following, rank)))
    return same, hook.state_dict()["adam"]["clip"], following.state_dict()["adam"]["clip"]


def test_levels_and_the_clip_are_part_of_the_state(ranks: Ranks) -> None:
    for same, clip, again in ranks.run(2, resumed):
        assert same and clip == again == pytest.approx(0.01, rel=1e-3)


class Spikes(nn.Module):
    """A noisy quadratic function for each codec. Every 20th gradient is 300 times as large, in a random direction."""

    def __init__(self, codecs: dict[str, str]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(32, 32)) for name in codecs})
        self.curvature, self.best = 10 ** (-2 * torch.rand(32, 32)), torch.randn(32, 32).sign()

    def forward(self, step: int) -> torch.Tensor:
        noise = 300 * torch.randn(32, 32) if step % 20 == 19 else torch.randn(32, 32)
        return sum(
            ((w * self.curvature * (w.detach() - self.best + noise)).sum() for w in self.weights.values()),
            torch.zeros(()),
        )

    def left(self) -> dict[str, float]:
        return {name: float((w.detach() - self.best).square().mean()) for name, w in self.weights.items()}


def spiky(rank: Rank, clip: float | None, seed: int) -> Any:
    codecs = {"exact": "topk:ratio=1", "onebit": "onebit", "topk": "topk:ratio=0.05"}
    torch.manual_seed(seed)
    ddp = DDP(Spikes(codecs), process_group=rank.group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.0)
    rules = ";".join(f"weights.{name}={codec}" for name, codec in codecs.items()) + ";*=fp32"
    hook = gw.compress(ddp, rules, optimizer=optimizer, steps=1000, down="fp32", **({"clip": clip} if clip else {}))
    if clip is None:
        hook._momentum.limits.learn = lambda *_: None  # the rival clips the averaged momentum only
    for step in range(1000):
        optimizer.zero_grad()
        ddp(step).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 20.0)
        optimizer.step()
    return ddp.module.left()


def test_gradients_with_spikes_are_learned_from(ranks: Ranks) -> None:
    for seed in (1, 2):
        # Without limits of its own the rival ends where it has begun, or farther away.
        ours, rival = ranks.run(1, spiky, 20.0, seed)[0], ranks.run(1, spiky, None, seed)[0]
        for name in ours:
            assert ours[name] < 0.3 * rival[name], (seed, ours, rival)
