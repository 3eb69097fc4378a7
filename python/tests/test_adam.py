# SPDX-License-Identifier: Apache-2.0
"""Adam that exchanges its momentum: the rule against a reference in double precision, the same bits on all ranks, and
everything that a training script does with its optimizer. Whether it trains is in test_adam_loop.py, what is saved in
test_adam_state.py, and what is refused in test_adam_refusals.py.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Rank, Ranks
from test_ddp import Branches, batch, equal, network
from test_ddp_faults import said
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
        self.levels = np.zeros((self.world, len(w)))

    def limited(self, gradients: list[np.ndarray], levels: np.ndarray, clip: float) -> list[np.ndarray]:
        """A rank's own gradient, clipped by its levels, which follow."""
        norms = np.array([np.linalg.norm(g) for g in gradients])
        known = levels if self.k else norms
        factors = np.minimum(1.0, clip * known / np.linalg.norm(known) / norms)
        counted = np.minimum(norms, 3 * known)
        levels[:] = known + (counted - known) / min(self.k + 1, 20)
        return [g * factor for g, factor in zip(gradients, factors)]

    def step(self, gradients: list[list[np.ndarray]], rate: float, decay: float, decoupled: bool, clip: float) -> None:
        b1, b2, k = self.beta1, self.beta2, self.k
        mine = gradients
        if clip < 1e6:
            mine = [self.limited(one, levels, clip) for one, levels in zip(gradients, self.levels)]
        own = [[g if decoupled else g + decay * w for g, w in zip(one, self.w)] for one in mine]
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
                most = 10 * (1 - b1 ** (k + 1))
                u = [np.clip((b1 * m + (1 - b1) * one[i]) / d, -most, most) for one in own]
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
            self.kp, self.next = k + 1, k + min(max((k + 1) // 4, 1), 64)
        self.k += 1

    @staticmethod
    def clipped(values: list[np.ndarray], clip: float) -> list[np.ndarray]:
        norm = np.sqrt(sum((v * v).sum() for v in values))
        return [v * min(1.0, clip / (norm + 1e-6)) for v in values]


def twin(rank: Rank, kind: str, clip: float, steps: int, options: dict[str, Any] | None = None) -> Any:
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
    hook = gw.compress(ddp, optimizer=optimizer, warmup=0, **EXACT, **(options or {}))
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
        assert pools == 17 and steps == counted == 60  # after the steps 0 to 7, 9, 11, 14, 17, 21, 26, 32, 40 and 50


def test_when_second_moments_are_pooled() -> None:
    after = [0]
    while after[-1] < 2000:
        after.append(gradwire._core.next_pooling(after[-1] + 1) - 1)
        assert after[-1] == after[-2] + min(max((after[-2] + 1) // 4, 1), 64)
    assert after[:17] == [*range(8), 9, 11, 14, 17, 21, 26, 32, 40, 50]
    assert max(b - a for a, b in zip(after, after[1:])) == 64


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
    assert stats["optimizer"]["steps"] == 12 and stats["optimizer"]["pools"] == 10
    if codec.startswith("*="):
        assert stats["parameters"]["2.weight"]["codec"].startswith("qsgd:bits=2")


def chosen(rank: Rank, codec: str, options: dict[str, Any]) -> Any:
    ddp, optimizer, hook = adam(rank, codec, **options)
    train(rank, ddp, optimizer, range(6))
    stats = hook.stats()
    return stats["optimizer"]["exchange"], stats["residual_bytes"] > 0


@pytest.mark.parametrize(
    "codec, options, exchange",
    [
        ("optquant:bits=2", {}, "momentum"), ("dqsgd:budget=3", {}, "momentum"), ("qsgd:bits=3", {}, "momentum"),
        ("qsgd:bits=2", {}, "gradients"), ("qsgd:bits=4", {}, "gradients"), ("optquant:bits=4", {}, "gradients"),
        ("terngrad", {}, "gradients"), ("optquant:bits=2", dict(feedback=False), "gradients"),
    ],
)  # fmt: skip
def test_few_bits_exchange_momentum(
    ranks: Ranks, codec: str, options: dict[str, Any], exchange: str
) -> None:
    assert [found for found, _ in ranks.run(2, chosen, codec, options)] == [exchange] * 2


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
    gw.compress(ddp, "onebit", optimizer=optimizer, warmup=0)
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


def unused(rank: Rank, to_none: bool, options: dict[str, Any] | None = None) -> Any:
    """Parameters that no rank has used in a step: without a gradient they stay as they are, and with a gradient of zero
    their momentum decays, as with torch's Adam."""
    ddp = DDP(Branches(), process_group=rank.group, find_unused_parameters=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2, weight_decay=0.01)
    gw.compress(ddp, "topk:ratio=0.1", optimizer=optimizer, warmup=0, **(options or {}))
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
        plain = sent[8]
        assert [step for step, size in enumerate(sent) if size > plain] == [*range(8), 9, 11]
        pooled = stats["optimizer"]["pool_bytes"]
        assert sent[9] - plain == pooled // 10 and pooled // 10 in (2 * elements, 4 * elements)
        assert stats["all_steps"]["bytes"] == sum(sent)


def convolution(rank: Rank, memory_format: torch.memory_format, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=memory_format)  # type: ignore[call-overload]
    ddp = DDP(net, process_group=rank.group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    gw.compress(ddp, optimizer=optimizer, warmup=0, **EXACT, **options)
    for step in range(6):
        x = torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(10 * step + rank.rank))
        optimizer.zero_grad()
        (ddp(x) * torch.linspace(-1, 1, 16)[:, None, None]).square().sum().backward()
        optimizer.step()
    return net.weight.detach().contiguous()


@pytest.mark.parametrize("world, options", [(2, {}), (4, {"nodes": 2})])
def test_the_memory_format_changes_nothing(ranks: Ranks, world: int, options: dict[str, Any]) -> None:
    plain = ranks.run(world, convolution, torch.contiguous_format, options)
    for a, b in zip(plain, ranks.run(world, convolution, torch.channels_last, options)):
        assert torch.allclose(a, b, atol=1e-5), "Adam's moments belong to the elements of a parameter, not to places"
