# SPDX-License-Identifier: Apache-2.0
"""Adam that exchanges its momentum: the rule against a reference in double precision, the same bits on all ranks, and
everything that a training script does with its optimizer. Whether it trains is in test_adam_loop.py.
"""

from __future__ import annotations

import contextlib
import gc
import io
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Rank, Ranks, eventually
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
    """The rule for the parameters of one group, in float64, for all ranks at once."""

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
    # Two groups with numbers of their own. A norm is that of both, and the reference knows only one group.
    parts = [([0, 1, 2], 1e-3, (0.9, 0.99), 1e-8, 0.1)]
    if clip > 1e6:
        parts = [([0, 1], 1e-3, (0.9, 0.99), 1e-8, 0.1), ([2], 3e-3, (0.8, 0.95), 1e-4, 0.0)]
    optimizer = getattr(torch.optim, kind)(
        [
            dict(params=[ddp.module.p[i] for i in which], lr=lr, betas=betas, eps=eps, weight_decay=decay)
            for which, lr, betas, eps, decay in parts
        ]
    )
    hook = gw.compress(ddp, optimizer=optimizer, warmup=0, **EXACT)
    hook._momentum.pool_dtype = torch.float32  # the reference does not round
    references = [Reference(rank.world, *betas, eps) for _, _, betas, eps, _ in parts]
    for reference, (which, *_) in zip(references, parts):
        reference.start([start[i] for i in which])
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
        for reference, (which, lr, _, _, decay) in zip(references, parts):
            reference.step([[one[i] for i in which] for one in every], lr, decay, kind == "AdamW", clip)
    errors = []
    for reference, (which, *_) in zip(references, parts):
        for at, i in enumerate(which):
            state = optimizer.state[ddp.module.p[i]]
            errors.append(np.abs(ddp.module.p[i].detach().double().numpy() - reference.w[at]).max())
            for name, expected in (("exp_avg", reference.m[at]), ("exp_avg_sq", reference.v[at])):
                errors.append(np.abs(state[name].double().numpy() - expected).max() / np.abs(expected).max())
    moved = max(np.abs(p.detach().double().numpy() - w).max() for p, w in zip(ddp.module.p, start))
    return max(errors), moved, hook._momentum.pools, reference.k, int(state["step"])


@pytest.mark.parametrize(
    "world, kind, clip", [(1, "AdamW", 1e9), (2, "AdamW", 1e9), (3, "Adam", 1e9), (2, "AdamW", 0.3)]
)
def test_the_rule_is_that_of_a_reference_in_double_precision(ranks: Ranks, world: int, kind: str, clip: float) -> None:
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


# What a training script does.


def pieces(rank: Rank, bucket_mb: float) -> Any:
    ddp, optimizer, hook = adam(rank, "onebit", bucket_mb=bucket_mb)
    train(rank, ddp, optimizer, range(8))
    return everything(ddp, optimizer), own(hook, rank)


def test_buckets_change_nothing(ranks: Ranks) -> None:
    small, large = (ranks.run(2, pieces, size) for size in (0.001, 25.0))
    for (a, b), (c, d) in zip(small, large):
        assert equal(a, c) and equal(b, d)


def large(rank: Rank) -> Any:
    """A tensor that is sent in several chunks has the values that it has in one."""
    results = []
    for chunk in (1 << 14, 1 << 20):
        torch.manual_seed(2)
        ddp = DDP(nn.Linear(640, 640, bias=False), process_group=rank.group)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        hook = gw.compress(ddp, "onebit", optimizer=optimizer, warmup=2)
        for step in range(6):
            hook._chunk_elements = chunk
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank.rank)
            ddp(torch.randn(8, 640, generator=generator)).square().mean().backward()
            optimizer.step()
        results.append((everything(ddp, optimizer), len(hook._chunks)))
    return results


def test_a_tensor_in_several_chunks(ranks: Ranks) -> None:
    for (fine, many), (whole, one) in ranks.run(2, large):
        assert equal(fine, whole) and many > one == 1


def near_plain(rank: Rank, kind: str, settings: dict[str, Any], how: str) -> Any:
    """Where all ranks have the same gradients, and these hardly change, the rule is Adam's own."""
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(64, 32), process_group=rank.group, gradient_as_bucket_view=how == "view")
        optimizer = getattr(torch.optim, kind)(ddp.parameters(), lr=1e-3, **settings)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if how == "scheduler before" else None
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=how == "scaler")
        if ours:
            gw.compress(ddp, optimizer=optimizer, warmup=0, scaler=scaler, **EXACT)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if how == "scheduler" else early
        # All coordinates have gradients of about one size: the rule gives the very small ones a larger second moment.
        x = (0.5 + torch.rand(64, generator=torch.Generator().manual_seed(4))).expand(8, 64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(20):
                optimizer.zero_grad(set_to_none=how != "zeros")
                parts = x.chunk(4) if how == "no_sync" else [x]
                for part in parts:
                    with ddp.no_sync() if part is not parts[-1] else contextlib.nullcontext():
                        scaler.scale((ddp(part) * part[:, :32]).mean() / len(parts)).backward()
                if how == "closure":
                    optimizer.step(lambda: torch.tensor(3.0))
                else:
                    scaler.step(optimizer)
                    scaler.update()
                if schedule:
                    schedule.step()
        results.append([p.detach().clone() for p in ddp.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*results)), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "kind, settings, how",
    [
        ("AdamW", {}, "plain"),
        ("AdamW", dict(weight_decay=0.5), "view"),
        ("Adam", dict(weight_decay=0.001), "zeros"),
        ("AdamW", dict(foreach=True), "scheduler"),
        ("AdamW", dict(foreach=False), "scheduler before"),
        ("AdamW", dict(fused=True), "scaler"),
        ("Adam", {}, "scaler"),
        ("AdamW", {}, "no_sync"),
        ("AdamW", {}, "closure"),
    ],
)
def test_a_loop_stays_as_it_is(ranks: Ranks, kind: str, settings: dict[str, Any], how: str) -> None:
    for difference, rate in ranks.run(2, near_plain, kind, settings, how):
        assert difference < 1e-4, difference  # of 20 steps of 1e-3: second moments are pooled as bfloat16
        assert rate == pytest.approx(1e-3 * 0.5**4 if "scheduler" in how else 1e-3)


def skipped(rank: Rank, codec: str, fused: bool) -> Any:
    ddp = DDP(network(), process_group=rank.group, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    hook = gw.compress(ddp, codec, optimizer=optimizer, scaler=scaler, warmup=2)
    log = []
    for step in range(12):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        if step in (0, 2, 5, 9) and rank.rank == 1:
            loss = loss * float("inf" if step != 5 else "nan")
        before = everything(ddp, optimizer) if step > 1 else []
        before += own(hook, rank) + [torch.tensor(counts) for counts in hook._momentum.counts]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = everything(ddp, optimizer) if step > 1 else []
        after += own(hook, rank) + [torch.tensor(counts) for counts in hook._momentum.counts]
        log.append(equal(before, after) if len(before) == len(after) else False)
    return log, hook.stats(), everything(ddp, optimizer)


@pytest.mark.parametrize("codec, fused", [("onebit", False), ("topk:ratio=0.05", True)])
def test_a_step_that_the_scaler_skips_changes_nothing(ranks: Ranks, codec: str, fused: bool) -> None:
    results = ranks.run(2, skipped, codec, fused)
    for log, stats, values in results:
        assert [step for step, same in enumerate(log) if same] == [0, 2, 5, 9]
        assert stats["optimizer"]["steps"] == 8 and stats["skipped"] == 4 and stats["steps"] == 12
        assert all(bool(torch.isfinite(v).all()) for v in values)
        assert equal(values, results[0][2])


def unknown_scaler(rank: Rank, told: bool) -> Any:
    ddp = DDP(network(), process_group=rank.group)
    optimizer = torch.optim.AdamW(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu")
    gw.compress(ddp, "onebit", optimizer=optimizer, scaler=scaler if told else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(ddp(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    return ["scaler=scaler" in str(one.message) for one in caught]


def test_a_scaler_that_compress_was_not_told_of(ranks: Ranks) -> None:
    assert ranks.run(2, unknown_scaler, True) == [[]] * 2
    for caught in ranks.run(2, unknown_scaler, False):
        assert caught and all(caught)


def an_inf_of_one_element(rank: Rank) -> Any:
    """The limit of an update must not hide an Inf."""
    ddp = DDP(nn.Linear(64, 64, bias=False), process_group=rank.group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    hook = gw.compress(ddp, "onebit", optimizer=optimizer, warmup=0)
    seen = []
    for value in (1.0, 1.0, float("inf"), -float("inf"), float("nan"), 3e38):
        optimizer.zero_grad()
        x = torch.ones(1, 64)
        gradient = torch.ones(64)
        gradient[7] = value if rank.rank == 1 else 1.0
        (ddp(x) * gradient).sum().backward()
        finite = bool(torch.isfinite(ddp.module.weight.grad).all())
        seen.append(finite)
        if finite:
            optimizer.step()
    return seen, bool(torch.isfinite(ddp.module.weight).all())


def test_an_inf_is_not_clamped(ranks: Ranks) -> None:
    for seen, finite in ranks.run(2, an_inf_of_one_element):
        assert seen == [True, True, False, False, False, True] and finite


def types(rank: Rank) -> Any:
    ddp = DDP(network().bfloat16(), process_group=rank.group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    hook = gw.compress(ddp, "topk:ratio=0.1", optimizer=optimizer, warmup=2)
    losses = []
    for step in range(25):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return everything(ddp, optimizer), losses, hook._momentum.s[0].dtype


def test_bfloat16_parameters(ranks: Ranks) -> None:
    results = ranks.run(2, types)
    assert equal(results[0][0], results[1][0]) and results[0][2] == torch.float32
    for _, losses, _ in results:
        assert sum(losses[-5:]) < sum(losses[:5]) - 1


def unused(rank: Rank, to_none: bool) -> Any:
    """Parameters that no rank has used in a step: without a gradient they stay as they are, and with a gradient of zero
    their momentum decays, as with torch's Adam."""
    ddp = DDP(Branches(), process_group=rank.group, find_unused_parameters=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2, weight_decay=0.01)
    hook = gw.compress(ddp, "topk:ratio=0.1", optimizer=optimizer, warmup=0)
    moved = []
    for step in range(8):
        ddp.module.use_b = step not in (2, 3, 5) or (step == 3 and rank.rank == 0)
        before = [ddp.module.b.weight.detach().clone(), optimizer.state.get(ddp.module.b.weight, {}).get("exp_avg")]
        before[1] = before[1].clone() if before[1] is not None else torch.zeros(64, 64)
        x, y = batch(rank, step)
        optimizer.zero_grad(set_to_none=to_none)
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        momentum = optimizer.state[ddp.module.b.weight]["exp_avg"]
        moved.append(
            (not torch.equal(before[0], ddp.module.b.weight), torch.allclose(momentum, 0.9 * before[1], rtol=1e-6))
        )
    steps = int(optimizer.state[ddp.module.b.weight]["step"]), int(optimizer.state[ddp.module.a.weight]["step"])
    return moved, steps, everything(ddp, optimizer)


@pytest.mark.parametrize("to_none", [True, False])
def test_parameters_that_no_rank_has_used(ranks: Ranks, to_none: bool) -> None:
    results = ranks.run(2, unused, to_none)
    for moved, steps, values in results:
        assert [step for step, (changed, _) in enumerate(moved) if not changed] == ([2, 5] if to_none else [])
        if not to_none:
            assert [step for step, (_, decayed) in enumerate(moved) if decayed] == [2, 5]
        assert steps == (6 if to_none else 8, 8)
        assert equal(values, results[0][2])


def late(rank: Rank) -> Any:
    ddp = DDP(Branches(), process_group=rank.group, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters())
    gw.compress(ddp, "onebit", optimizer=optimizer)
    words = []
    for step in range(3):
        ddp.module.use_b = step == 2
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        words.append(said(optimizer.step))
    return words


def test_a_parameter_that_begins_late_is_refused(ranks: Ranks) -> None:
    for words in ranks.run(2, late):
        assert words[:2] == ["nothing"] * 2
        assert "UnsupportedError: parameter 'b.weight' has a gradient for the first time" in words[2]


def misused(rank: Rank) -> Any:
    ddp, optimizer, hook = adam(rank)
    train(rank, ddp, optimizer, range(3))
    twice = said(optimizer.step)
    x, y = batch(rank, 3)
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(x), y).backward()
    added = said(lambda: nn.functional.cross_entropy(ddp(x), y).backward())
    return twice, added


def test_gradients_are_not_added_to_a_momentum(ranks: Ranks) -> None:
    for twice, added in ranks.run(2, misused):
        assert "UsageError: optimizer.step was called without a backward pass" in twice
        assert "UsageError: a backward pass begins while p.grad holds the averaged momentum" in added


def bytes_sent(rank: Rank) -> Any:
    ddp, optimizer, hook = adam(rank, "onebit", warmup=0)
    sent = []
    for step in range(12):
        train(rank, ddp, optimizer, range(step, step + 1))
        sent.append(hook.stats()["last_step"]["bytes"])
    return sent, hook.stats(), sum(p.numel() for p in ddp.parameters())


def test_pooled_bytes_are_counted(ranks: Ranks) -> None:
    for sent, stats, elements in ranks.run(2, bytes_sent):
        plain = sent[2]
        assert [step for step, size in enumerate(sent) if size > plain] == [0, 1, 3, 6, 10]
        pooled = stats["optimizer"]["pool_bytes"]
        assert sent[10] - plain == pooled // 5 and pooled // 5 in (2 * elements, 4 * elements)
        assert stats["all_steps"]["bytes"] == sum(sent)


# The state.


def run_all(rank: Rank, codec: str, steps: int) -> Any:
    ddp, optimizer, hook = adam(rank, codec)
    train(rank, ddp, optimizer, range(steps), 1.0)
    return everything(ddp, optimizer), own(hook, rank)


def save_half(rank: Rank, codec: str, steps: int, folder: str, gather: str | None) -> None:
    ddp, optimizer, hook = adam(rank, codec)
    train(rank, ddp, optimizer, range(steps), 1.0)
    state = dict(
        model=ddp.module.state_dict(), optimizer=optimizer.state_dict(), gradwire=hook.state_dict(gather=gather)
    )
    if gather is None or rank.rank == 0:
        torch.save(state, Path(folder) / f"rank{rank.rank}.pt")


def resume(rank: Rank, codec: str, steps: range, folder: str, files: int, hook_first: bool) -> Any:
    ddp, optimizer, hook = adam(rank, codec)
    states = [torch.load(Path(folder) / f"rank{r}.pt", weights_only=True) for r in range(files)]
    mine = states[rank.rank] if files > rank.rank else states[0]
    ddp.module.load_state_dict(mine["model"])
    if not hook_first:
        optimizer.load_state_dict(mine["optimizer"])
    hook.load_state_dict(mine["gradwire"] if files == rank.world else [state["gradwire"] for state in states])
    if hook_first:
        optimizer.load_state_dict(mine["optimizer"])
    before = own(hook, rank)
    train(rank, ddp, optimizer, steps, 1.0)
    return everything(ddp, optimizer), own(hook, rank), before, hook.state_dict()["adam"]["taken"]


@pytest.mark.parametrize("codec, half", [(codec, 7) for codec in FEEDBACK] + [("onebit", 2), ("onebit", 3)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(ranks: Ranks, tmp_path: Path, codec: str, half: int) -> None:
    whole = ranks.run(2, run_all, codec, 12)
    ranks.run(2, save_half, codec, half, str(tmp_path), None)
    resumed = ranks.run(2, resume, codec, range(half, 12), str(tmp_path), 2, half % 2 == 0)
    for (a, b), (c, d, _, taken) in zip(whole, resumed):
        assert equal(a, c) and equal(b, d) and taken == 12


@pytest.mark.parametrize("gather, world", [(None, 3), ("all", 1), ("merged", 3)])
def test_another_number_of_ranks(ranks: Ranks, tmp_path: Path, gather: str | None, world: int) -> None:
    before = ranks.run(2, run_all, "onebit", 7)
    ranks.run(2, save_half, "onebit", 7, str(tmp_path), gather)
    results = ranks.run(world, resume, "onebit", range(7, 12), str(tmp_path), 2 if gather is None else 1, False)
    count = len(list(network().parameters()))
    for values, _, start, taken in results:
        assert equal(values, results[0][0]) and taken == 12
        q, s = start[-2 * count : -count], start[-count:]
        assert all(not bool(one.any()) for one in q)
        for mine, a, b in zip(s, before[0][1][-count:], before[1][1][-count:]):
            assert torch.allclose(mine, (a + b) / 2, rtol=1e-6)


def into_plain(rank: Rank) -> Any:
    """The optimizer's state is torch's own: it loads into an AdamW without gradwire, and the other way."""
    ddp, optimizer, hook = adam(rank)
    train(rank, ddp, optimizer, range(10))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = DDP(network(), process_group=rank.group)
    other.module.load_state_dict(ddp.module.state_dict())
    plain = torch.optim.AdamW(other.parameters())
    plain.load_state_dict(torch.load(file, weights_only=True))
    train(rank, other, plain, range(10, 15))
    same = sorted(plain.state_dict()["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]
    # A training that began without gradwire goes on with it: nothing is exact, and nothing jumps.
    before = [p.detach().clone() for p in other.parameters()]
    adopted = gw.compress(other, "onebit", optimizer=plain, warmup=3)
    phases = [adopted.stats()["optimizer"]["phase"]]
    train(rank, other, plain, range(15, 16))
    phases.append(adopted.stats()["optimizer"]["phase"])
    largest = max((a - b.detach()).abs().max().item() for a, b in zip(before, other.parameters()))
    train(rank, other, plain, range(16, 25))
    # And without it again.
    adopted.remove()
    removed = "step" not in vars(plain)
    train(rank, other, plain, range(25, 28))
    return same, phases, largest, removed, everything(other, plain), int(plain.state[next(other.parameters())]["step"])


def test_the_state_of_the_optimizer_is_torchs_own(ranks: Ranks) -> None:
    results = ranks.run(2, into_plain)
    for same, phases, largest, removed, values, steps in results:
        assert same and removed and steps == 28
        assert phases == ["exact", "compressed"] and 0 < largest < 5e-3
        assert equal(values, results[0][4])


def wrong_state(rank: Rank, how: str) -> Any:
    ddp, optimizer, hook = adam(rank)
    train(rank, ddp, optimizer, range(4))
    state = hook.state_dict()
    part = state["ranks"][str(rank.rank)]
    if how == "no s":
        del part["s"]["2.weight"]
    elif how == "shape":
        part["q"]["2.weight"] = torch.zeros(3)
    elif how == "nan":
        part["s"]["2.weight"][1, 1] = float("nan")
    elif how == "counts":
        state["adam"]["counts"]["2.weight"] = torch.zeros(2)
    elif how == "gradients":
        del state["adam"]
    elif how == "taken" and rank.rank == 1:
        state["adam"]["taken"] = 9
    elif how == "none":
        other = gw.compress(DDP(network(), process_group=rank.group), "topk:ratio=0.05")
        return said(lambda: other.load_state_dict(state))
    elif how == "step":
        hook.load_state_dict(state)
        optimizer.load_state_dict(torch.optim.AdamW(ddp.parameters()).state_dict())
        return said(lambda: train(rank, ddp, optimizer, range(4, 5)))
    before = own(hook, rank)
    words = said(lambda: hook.load_state_dict(state))
    assert equal(before, own(hook, rank))
    train(rank, ddp, optimizer, range(4, 6))
    return words


@pytest.mark.parametrize(
    "how, words",
    [
        ("no s", "UsageError: the state has no s of parameter '2.weight'"),
        ("shape", "UsageError: parameter '2.weight' has the shape (96, 96); its q in the state has (3,)"),
        ("nan", "UsageError: s of parameter '2.weight' of rank"),
        ("counts", "UsageError: the state is damaged: the counts of parameter '2.weight' are not 4 numbers"),
        ("gradients", "UsageError: the state was saved by a hook that exchanges gradients"),
        ("taken", "MismatchError: ranks disagree about taken: rank 0 has '4', rank 1 has '9'"),
        ("none", "UsageError: the state was saved by a hook that exchanges Adam's momentum"),
        ("step", "UsageError: the optimizer has taken 0 steps with parameter '0.weight', and the hook 4"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_name(ranks: Ranks, how: str, words: str) -> None:
    for got in ranks.run(2, wrong_state, how):
        assert words in got, got


def distributed_checkpoint(rank: Rank, folder: str, save: bool) -> Any:
    import torch.distributed.checkpoint as dcp

    ddp, optimizer, hook = adam(rank)
    if save:
        train(rank, ddp, optimizer, range(5))
        dcp.save({"gradwire": hook.state_dict()}, checkpoint_id=folder, process_group=rank.group)
    else:
        hook.load_state_dict(gw.read_checkpoint(folder))
    return own(hook, rank), hook.state_dict()["adam"]


def test_distributed_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, distributed_checkpoint, str(tmp_path), True)
    loaded = ranks.run(2, distributed_checkpoint, str(tmp_path), False)
    for (a, b), (c, d) in zip(saved, loaded):
        assert equal(a, c) and b["taken"] == d["taken"] == 5 and b["next_pool"] == d["next_pool"]


# Which path, and what is refused.


def left_alone(rank: Rank) -> Any:
    """A codec without error feedback: what is sent, and all bits, are those without optimizer=."""
    results = []
    for named in (False, True):
        ddp = DDP(network(), process_group=rank.group)
        optimizer = torch.optim.AdamW(ddp.parameters())
        hook = gw.compress(ddp, "qsgd:bits=4", **(dict(optimizer=optimizer) if named else {}))
        untouched = "step" not in vars(optimizer)
        train(rank, ddp, optimizer, range(4))
        results.append(everything(ddp, optimizer))
    change = said(lambda: hook.set_codec("onebit"))
    return equal(*results), untouched, hook.stats()["optimizer"], change


def test_codecs_without_feedback_exchange_gradients(ranks: Ranks) -> None:
    for same, untouched, told, change in ranks.run(2, left_alone):
        assert same and untouched and told == {"exchange": "gradients"}
        assert "UsageError: '1d=fp32;<1024=fp32;*=qsgd:bits=4" in change and "call compress again" in change


def phases(rank: Rank, options: dict[str, Any]) -> Any:
    ddp, optimizer, hook = adam(rank, "2.weight=onebit;4.weight=qsgd:bits=8;1d=fp32;*=topk:ratio=0.05", **options)
    seen = []
    for step in range(5):
        before = hook.stats()["optimizer"]["phase"]
        train(rank, ddp, optimizer, range(step, step + 1))
        one = hook.stats()["parameters"]
        up = [one[name]["codec"].partition(",")[0] for name in ("0.weight", "2.weight", "4.weight", "2.bias")]
        down = [codec.partition(",")[0] for codec, _ in hook._model.codecs("down")]
        seen.append((before, up, [down[0], down[2], down[4], down[3]]))
    return seen


def test_the_phases_and_their_codecs(ranks: Ranks) -> None:
    for seen in ranks.run(2, phases, dict(warmup=3)):
        assert [phase for phase, _, _ in seen] == ["exact", "warm-up", "warm-up", "compressed", "compressed"]
        four = ["optquant:bits=4", "optquant:bits=4", "qsgd:bits=8", "fp32"]
        assert seen[0][1:] == (["fp32"] * 4, ["fp32"] * 4)
        assert seen[1][1:] == (["qsgd:bits=4", "qsgd:bits=4", "qsgd:bits=8", "fp32"], four)
        # What is shown after the third step are the codecs that the fourth will use.
        assert seen[3][1:] == (["topk:ratio=0.05", "onebit:mode=tile", "qsgd:bits=8", "fp32"], four)


def warmups(rank: Rank) -> Any:
    found = []
    for options in (dict(warmup=None), dict(warmup=None, steps=1230), dict(warmup=0), dict(warmup=7, steps=1000)):
        _, _, hook = adam(rank, **options)
        found.append(hook.stats()["optimizer"]["warmup"])
    return found


def test_how_long_the_warm_up_is(ranks: Ranks) -> None:
    assert ranks.run(2, warmups) == [[200, 123, 0, 7]] * 2


def changed(rank: Rank) -> Any:
    """set_codec in the warm-up and after it."""
    ddp, optimizer, hook = adam(rank, "onebit", warmup=3)
    train(rank, ddp, optimizer, range(2))
    hook.set_codec("topk:ratio=0.1")
    shown = [hook.stats()["parameters"]["2.weight"]["codec"].partition(",")[0]]
    train(rank, ddp, optimizer, range(2, 5))
    shown.append(hook.stats()["parameters"]["2.weight"]["codec"].partition(",")[0])
    hook.set_codec("fp32")
    train(rank, ddp, optimizer, range(5, 7))
    hook.set_codec("onebit", down="qsgd:bits=8")
    train(rank, ddp, optimizer, range(7, 9))
    return shown, everything(ddp, optimizer), hook.stats()["optimizer"]["steps"]


def test_the_codec_can_be_changed(ranks: Ranks) -> None:
    results = ranks.run(2, changed)
    for shown, values, steps in results:
        assert shown == ["qsgd:bits=4", "topk:ratio=0.1"] and steps == 9 and equal(values, results[0][1])


def replaced(rank: Rank) -> Any:
    """A second compress takes the model, and gives the first optimizer its step back."""
    ddp, first, hook = adam(rank)
    train(rank, ddp, first, range(4))
    second = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    other = gw.compress(ddp, "onebit", optimizer=second)
    given_back = "step" not in vars(first) and "removed" in repr(hook)
    train(rank, ddp, second, range(4, 6))
    again = gw.compress(ddp, "onebit", optimizer=second, warmup=0)  # the same optimizer once more
    train(rank, ddp, second, range(6, 8))
    again.remove()
    calls: list[int] = []
    second.register_step_post_hook(lambda *_: calls.append(1))
    third = gw.compress(ddp, "onebit", optimizer=second)
    train(rank, ddp, second, range(8, 10))
    return given_back, other.stats()["optimizer"]["steps"], again.stats()["optimizer"]["steps"], len(calls), third.step


def test_an_optimizer_is_given_back(ranks: Ranks) -> None:
    assert ranks.run(2, replaced) == [(True, 2, 4, 2, 2)] * 2


def shared(rank: Rank) -> Any:
    """An optimizer belongs to one hook, as long as that exists."""
    ddp, optimizer, hook = adam(rank)
    other = DDP(ddp.module, process_group=rank.group)
    words = said(lambda: gw.compress(other, "onebit", optimizer=optimizer))
    train(rank, ddp, optimizer, range(2))
    kept = weakref.ref(hook._momentum)
    del ddp, hook
    gone = eventually(lambda: gc.collect() >= 0 and kept() is None)
    train(rank, other, optimizer, range(2, 4))  # uncompressed, with the optimizer's own step
    last = gw.compress(other, "onebit", optimizer=optimizer)
    train(rank, other, optimizer, range(4, 6))
    return words, gone, last.stats()["optimizer"]["steps"], everything(other, optimizer)


def test_an_optimizer_belongs_to_one_hook(ranks: Ranks) -> None:
    results = ranks.run(2, shared)
    for words, gone, steps, values in results:
        assert "UsageError: the optimizer is in use by the hook of another model" in words
        assert gone and steps == 6 and equal(values, results[0][3])


def prepared_by_tools(rank: Rank) -> Any:
    """torch's checkpoint tools take a step with gradients of zero, so that the optimizer has a state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    ddp, optimizer, hook = adam(rank)
    get_optimizer_state_dict(ddp.module, optimizer)
    phase = hook.stats()["optimizer"]["phase"]
    train(rank, ddp, optimizer, range(6))
    report = hook.stats()["optimizer"]
    return phase, report["phase"], report["steps"], everything(ddp, optimizer)


def test_tools_that_make_the_state_of_an_optimizer(ranks: Ranks) -> None:
    results = ranks.run(2, prepared_by_tools)
    for before, after, steps, values in results:
        assert (before, after, steps) == ("exact", "compressed", 6) and equal(values, results[0][3])


class Other(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def refused(rank: Rank, how: str) -> Any:
    ddp = DDP(network(), process_group=rank.group)
    parameters: Any = list(ddp.parameters())
    optimizer: Any
    options: dict[str, Any] = {}
    if how == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=0.1)
    elif how == "sgd on one rank":
        optimizer = torch.optim.AdamW(parameters) if rank.rank == 0 else torch.optim.SGD(parameters, lr=0.1)
    elif how == "on one rank only":
        optimizer = torch.optim.AdamW(parameters) if rank.rank == 0 else None
    elif how == "rates":
        optimizer = torch.optim.AdamW(parameters, lr=1e-3 * (1 + rank.rank))
    elif how == "moments":
        optimizer = torch.optim.AdamW(parameters)
        for p in parameters:
            p.grad = torch.full_like(p, 1.0 + rank.rank)
        optimizer.step()
        ddp.zero_grad()
    elif how == "subclass":
        optimizer = Other(parameters)
    elif how == "no optimizer":
        optimizer = 3
    elif how in ("amsgrad", "maximize", "capturable", "differentiable"):
        optimizer = torch.optim.AdamW(parameters)
        optimizer.param_groups[0][how] = True
    elif how == "missing":
        optimizer = torch.optim.AdamW(parameters[:-1])
    elif how == "foreign":
        optimizer = torch.optim.AdamW([*parameters, nn.Parameter(torch.zeros(3, 2))])
    elif how == "patched":
        optimizer = torch.optim.AdamW(parameters)
        optimizer.step = lambda: None
    elif how == "half":
        ddp = DDP(network().half(), process_group=rank.group)
        optimizer = torch.optim.AdamW(ddp.parameters())
    words = said(lambda: gw.compress(ddp, "onebit", optimizer=optimizer))
    adam(rank)  # and the process group goes on
    return words


@pytest.mark.parametrize(
    "how, words",
    [
        ("sgd", ["UnsupportedError: optimizer is SGD, allowed are torch.optim.Adam and torch.optim.AdamW"] * 2),
        ("sgd on one rank", ["MismatchError: rank 1 cannot take part: optimizer is SGD", "UnsupportedError"]),
        ("on one rank only", ["MismatchError: ranks disagree about"] * 2),
        ("rates", ["MismatchError: ranks disagree about group 0 of the optimizer"] * 2),
        ("moments", ["MismatchError: ranks disagree about the state of the optimizer for '0.weight'"] * 2),
        ("subclass", ["UnsupportedError: optimizer is Other, a subclass, whose step may differ"] * 2),
        ("no optimizer", ["UsageError: optimizer is of type int"] * 2),
        ("amsgrad", ["UnsupportedError: group 0 of the optimizer has amsgrad=True"] * 2),
        ("maximize", ["UnsupportedError: group 0 of the optimizer has maximize=True"] * 2),
        ("capturable", ["UnsupportedError: group 0 of the optimizer has capturable=True"] * 2),
        ("differentiable", ["UnsupportedError: group 0 of the optimizer has differentiable=True"] * 2),
        ("missing", ["UsageError: parameter '4.bias' of the model is not one of the optimizer's"] * 2),
        ("foreign", ["UsageError: group 0 of the optimizer has a parameter of shape (3, 2) that this DDP"] * 2),
        ("patched", ["UnsupportedError: the step of the optimizer was replaced by other code"] * 2),
        ("half", ["UnsupportedError: parameter '0.weight' is float16; with optimizer= allowed are float32"] * 2),
    ],
)
def test_optimizers_that_are_refused_by_name(ranks: Ranks, how: str, words: list[str]) -> None:
    for wanted, got in zip(words, ranks.run(2, refused, how)):
        assert wanted in got, got


def changed_later(rank: Rank, how: str) -> Any:
    ddp, optimizer, _ = adam(rank)
    train(rank, ddp, optimizer, range(2))
    group = optimizer.param_groups[0]
    if how == "betas":
        group["betas"] = (0.8, 0.999)
    elif how == "eps":
        group["eps"] = 1e-3
    elif how == "group":
        optimizer.add_param_group(dict(params=[nn.Parameter(torch.zeros(3))]))
    elif how == "cycle":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    else:
        group["lr"], group["weight_decay"] = 0.5, 0.25
    before = everything(ddp, optimizer)
    words = said(lambda: train(rank, ddp, optimizer, range(2, 3)))
    return words, equal(before, everything(ddp, optimizer))


@pytest.mark.parametrize(
    "how, words",
    [
        ("betas", "UsageError: beta1 of group 0 of the optimizer was 0.9 when compress was called, and is 0.8 now"),
        ("eps", "UsageError: eps of group 0 of the optimizer was 1e-08"),
        ("group", "UsageError: the parameters of the optimizer have changed since compress"),
        ("cycle", "cycle_momentum=False"),
        ("rate", "nothing"),
    ],
)
def test_what_may_change_and_what_may_not(ranks: Ranks, how: str, words: str) -> None:
    for got, same in ranks.run(2, changed_later, how):
        assert words in got and same == (how != "rate"), got


def sharded(rank: Rank) -> str:
    model = shard(rank)
    return said(lambda: gw.compress(model, "onebit", optimizer=torch.optim.AdamW(model.parameters())))


@needs_fsdp
def test_fsdp_has_no_such_option(ranks: Ranks) -> None:
    for words in ranks.run(2, sharded):
        assert "UsageError: optimizer is an option for DDP models; this model uses FSDP2" in words


def warned(rank: Rank, codec: str, kind: str) -> Any:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    before = len(_global_optimizer_post_hooks)
    ddp = DDP(network(), process_group=rank.group)
    optimizer = getattr(torch.optim, kind)(ddp.parameters(), lr=1e-3)
    hook = gw.compress(ddp, codec)
    bystander = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bystander.step()
        train(rank, ddp, optimizer, range(3))
    left = len(_global_optimizer_post_hooks) - before
    again = gw.compress(ddp, "onebit")
    watched = len(_global_optimizer_post_hooks) - before
    again.remove()
    return [str(one.message) for one in caught], left, watched, len(_global_optimizer_post_hooks) - before, hook.step


@pytest.mark.parametrize(
    "codec, kind, times", [("onebit", "AdamW", 1), ("onebit", "Adam", 1), ("onebit", "SGD", 0), ("qsgd", "Adam", 0)]
)
def test_an_adam_that_nobody_has_named_is_told_once(ranks: Ranks, codec: str, kind: str, times: int) -> None:
    for caught, left, watched, after, steps in ranks.run(2, warned, codec, kind):
        assert len(caught) == times and all("optimizer=optimizer" in words for words in caught), caught
        assert (left, watched, after, steps) == (0, 1, 0, 3)
