# SPDX-License-Identifier: Apache-2.0
"""Adam that exchanges its momentum: the rule against a reference in double precision, the same bits on all ranks, and
everything that a training script does with its optimizer. Whether it trains is in test_adam_loop.py.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Rank, RankError, Ranks
from test_ddp import Branches, batch, equal, network
from test_ddp_faults import said
from test_hooks import needs_fsdp, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.torch as gw

FEEDBACK = [info["example"].replace("ratio=0.01", "ratio=0.05") for info in gradwire.codecs() if info["feedback"]]
EXACT = dict(codec="topk:ratio=1", down="fp32")  # all values, and error feedback that has nothing to do


def adam(
    rank: Rank, codec: str = "topk:ratio=0.05", kind: Any = torch.optim.AdamW, bucket_mb: float = 0.02, **options: Any
) -> tuple[DDP, Any, Any]:
    settings = dict(lr=2e-3, weight_decay=0.02) | options.pop("settings", {})
    options = {"warmup": 3} | options
    ddp = DDP(network(), process_group=rank.group, bucket_cap_mb=bucket_mb)
    optimizer = kind(ddp.parameters(), **settings)
    return ddp, optimizer, gw.compress(ddp, codec, optimizer=optimizer, **options)


def train(rank: Rank, ddp: DDP, optimizer: Any, steps: range, clip: float | None = None) -> None:
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()


def everything(ddp: DDP, optimizer: Any) -> list[torch.Tensor]:
    """What must be the same on all ranks."""
    found = [p.detach().clone() for p in ddp.parameters()]
    for p in ddp.parameters():
        found += [optimizer.state[p][name].clone() for name in ("exp_avg", "exp_avg_sq", "step")]
    return found


def own(hook: Any, rank: Rank) -> list[torch.Tensor]:
    part = hook.state_dict()["ranks"][str(rank.rank)]
    return [values for kind in ("up", "down", "q", "s") for values in part[kind].values()]


# The rule.


class Reference:
    """The rule of one element, in float64, for all ranks at once."""

    def __init__(self, world: int, beta1: float, beta2: float, eps: float) -> None:
        self.world, self.beta1, self.beta2, self.eps = world, beta1, beta2, eps
        self.rho = (world - 1) / (world + 1)
        self.k = self.kp = self.next = 0

    def start(self, w: list[np.ndarray]) -> None:
        self.w = w
        self.m, self.v = [np.zeros_like(x) for x in w], [np.zeros_like(x) for x in w]
        self.q = [[np.zeros_like(x) for x in w] for _ in range(self.world)]
        self.s = [[np.zeros_like(x) for x in w] for _ in range(self.world)]

    def step(self, gradients: list[list[np.ndarray]], rate: float, decay: float, decoupled: bool, clip: float) -> None:
        b1, b2, k = self.beta1, self.beta2, self.k
        own = [[g if decoupled else g + decay * w for g, w in zip(one, self.w)] for one in gradients]
        if k == 0:
            mean = [sum(one[i] for one in gradients) / self.world for i in range(len(self.w))]
            mean = self.clipped(mean, clip)
            mean = mean if decoupled else [g + decay * w for g, w in zip(mean, self.w)]
            self.m = [(1 - b1) * g for g in mean]
            den = [np.sqrt((1 - b2) * g * g) / np.sqrt(1 - b2) + self.eps for g in mean]
        else:
            den = [np.sqrt(v) / np.sqrt(1 - b2**self.kp) + self.eps for v in self.v]
            new = []
            for i, (m, d) in enumerate(zip(self.m, den)):
                u = [np.clip((b1 * m + (1 - b1) * one[i]) / d, -10, 10) for one in own]
                new.append(sum(u) / self.world * d)
            self.m = self.clipped(new, clip)
        for i, (m, d) in enumerate(zip(self.m, den)):
            kept = self.w[i] * (1 - rate * decay) if decoupled else self.w[i]
            self.w[i] = kept - rate / (1 - b1 ** (k + 1)) * m / d
        for rank in range(self.world):
            for i, g in enumerate(own[rank]):
                self.q[rank][i] = self.rho * self.q[rank][i] + (1 - self.rho) * g
                corrected = self.q[rank][i] / (1 - self.rho ** (k + 1))
                self.s[rank][i] = b2 * self.s[rank][i] + (1 - b2) * corrected**2
        if k == self.next:
            for i in range(len(self.w)):
                v = sum(s[i] for s in self.s) / self.world
                self.v[i] = np.maximum(v, (0.01 * np.sqrt(np.mean(np.sqrt(v) ** 2))) ** 2)
            self.kp, self.next = k + 1, max(k + 1, min(k + 128, int(np.floor(1.5 * (k + 1)))))
        self.k += 1

    @staticmethod
    def clipped(values: list[np.ndarray], clip: float) -> list[np.ndarray]:
        norm = np.sqrt(sum((v * v).sum() for v in values))
        return [v * min(1.0, clip / (norm + 1e-6)) for v in values]


def twin(rank: Rank, kind: str, clip: float, steps: int) -> Any:
    """The real thing and the reference on gradients that do not depend on the weights: rounding differences then stay
    what they are, and do not grow with the training."""
    generator = np.random.default_rng(5)
    shapes = [(40, 50), (30,), (7, 9)]
    start = [generator.standard_normal(shape) for shape in shapes]
    scales = [10.0 ** generator.uniform(-4, 0, shape) for shape in shapes]
    model = nn.ParameterList([nn.Parameter(torch.tensor(w, dtype=torch.float32)) for w in start])

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = model

        def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
            return sum(((p * g).sum() for p, g in zip(self.p, gradients)), torch.zeros(()))

    ddp = DDP(Given(), process_group=rank.group)
    settings = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    optimizer = getattr(torch.optim, kind)(ddp.parameters(), **settings)
    hook = gw.compress(ddp, optimizer=optimizer, warmup=0, **EXACT)
    hook._momentum.pool_dtype = torch.float32  # the reference does not round
    reference = Reference(rank.world, 0.9, 0.99, 1e-8)
    reference.start(list(start))
    for step in range(steps):
        every = [
            [
                np.random.default_rng(1000 * step + 10 * r + i).standard_normal(shape) * scale
                + 0.3 * scale * np.sin(step / 9)
                for i, (shape, scale) in enumerate(zip(shapes, scales))
            ]
            for r in range(rank.world)
        ]
        every = [[np.where(np.arange(g.size).reshape(g.shape) % 11 == 3, 0.0, g) for g in one] for one in every]
        optimizer.zero_grad()
        ddp([torch.tensor(g, dtype=torch.float32) for g in every[rank.rank]]).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()
        reference.step(every, 1e-3, 0.1, kind == "AdamW", clip)
    errors = []
    for i, p in enumerate(ddp.module.p):
        state = optimizer.state[p]
        errors.append(np.abs(p.detach().double().numpy() - reference.w[i]).max())
        for name, expected in (("exp_avg", reference.m[i]), ("exp_avg_sq", reference.v[i])):
            errors.append(np.abs(state[name].double().numpy() - expected).max() / np.abs(expected).max())
    moved = max(np.abs(p.detach().double().numpy() - w).max() for p, w in zip(ddp.module.p, start))
    return max(errors), moved, hook._momentum.pools, reference.k, int(state["step"])


@pytest.mark.parametrize("world, kind, clip", [(1, "AdamW", 1e9), (2, "AdamW", 1e9), (3, "Adam", 1e9), (2, "AdamW", 0.3)])
def test_the_rule_is_that_of_a_reference_in_double_precision(
    ranks: Ranks, world: int, kind: str, clip: float
) -> None:
    for error, moved, pools, steps, counted in ranks.run(world, twin, kind, clip, 60):
        assert error < 1e-5 and moved > 0.01, (error, moved)
        assert pools == 8 and steps == counted == 60  # after the steps 0, 1, 3, 6, 10, 16, 25 and 39


def test_when_second_moments_are_pooled() -> None:
    from gradwire.torch._adam import next_pooling

    after = [0]
    while after[-1] < 1000:
        after.append(next_pooling(after[-1]))
    assert after[:10] == [0, 1, 3, 6, 10, 16, 25, 39, 60, 91]
    assert max(b - a for a, b in zip(after, after[1:])) == 128


def every_codec(rank: Rank, codec: str, options: dict[str, Any]) -> Any:
    ddp, optimizer, hook = adam(rank, codec, **options)
    seen = []
    for step in range(12):
        train(rank, ddp, optimizer, range(step, step + 1), clip=1.0)
        seen.append(everything(ddp, optimizer))
    return seen, hook.stats()


@pytest.mark.parametrize("method", ["scatter", "gather"])
@pytest.mark.parametrize("codec", [*FEEDBACK, "*=qsgd:bits=2"])
def test_ranks_hold_the_same_bits_after_every_step(ranks: Ranks, codec: str, method: str) -> None:
    options = dict(method=method) | (dict(feedback=True) if "qsgd" in codec else {})
    results = ranks.run(3, every_codec, codec, options)
    for other, _ in results[1:]:
        assert all(equal(a, b) for a, b in zip(results[0][0], other))
    stats = results[0][1]
    assert stats["optimizer"]["exchange"] == "momentum" and stats["optimizer"]["phase"] == "compressed"
    assert stats["optimizer"]["steps"] == 12 and stats["optimizer"]["pools"] == 5
    if codec.startswith("*="):
        assert stats["parameters"]["2.weight"]["codec"].startswith("qsgd:bits=2")
