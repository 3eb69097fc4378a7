# SPDX-License-Identifier: Apache-2.0
"""Quantized Adam as an optimizer of torch: the rule against a reference in double precision, closed loops against
rivals without feedback, the same bits on all ranks, states, steps that are skipped, and what is refused.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Rank, Ranks
from test_ddp import batch, equal, network
from test_ddp_faults import said
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.torch as gw

EXACT = dict(codec="fp32", weights="fp32")


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(rank: Rank, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def flat(state: Any) -> list[torch.Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else []
    return [one for value in values for one in flat(value)]


# The rule, for a thousand steps.

SHAPES = [(30, 40), (17,), (5, 6)]


class Reference:
    """Quantized Adam for all ranks at once in float64, with nothing compressed."""

    def __init__(self, start: list[np.ndarray], world: int, settings: list[tuple[float, float, float, float]]) -> None:
        self.x, self.settings, self.k = [w.copy() for w in start], settings, 0
        self.m = [[np.zeros_like(w) for w in start] for _ in range(world)]
        self.v = [[np.zeros_like(w) for w in start] for _ in range(world)]

    def step(self, gradients: list[list[np.ndarray]], factor: float) -> None:
        self.k += 1
        for i, (rate, beta, theta, eps) in enumerate(self.settings):
            updates = []
            for m, v, own in zip(self.m, self.v, gradients):
                m[i] = beta * m[i] + (1 - beta) * own[i]
                v[i] = theta * v[i] + (1 - theta) * own[i] ** 2
                below = np.sqrt(v[i] / (1 - theta**self.k)) + eps
                updates.append(factor * rate / (1 - beta**self.k) * m[i] / below)
            self.x[i] = self.x[i] - np.mean(updates, axis=0)


def twin(rank: Rank, steps: int, options: dict[str, Any]) -> Any:
    """The optimizer and the reference, on gradients that do not depend on the weights: (largest difference of a weight,
    the same without what the residuals owe), in learning rates."""
    random = np.random.default_rng(3)
    start = [random.standard_normal(shape) for shape in SHAPES]
    scales = [10.0 ** random.uniform(-3, 1, shape) for shape in SHAPES]
    parameters = [nn.Parameter(torch.tensor(w, dtype=torch.float32)) for w in start]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4}]
    optimizer = gw.QAdam(groups, lr=1e-3, betas=(0.9, 0.99), group=rank.group, min_elements=0, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * steps))
    settings = [(1e-3, 0.9, 0.99, 1e-8)] * 2 + [(3e-3, 0.8, 0.95, 1e-4)]
    reference = Reference([w.detach().double().numpy() for w in parameters], rank.world, settings)
    for step in range(steps):
        drawn = [
            [np.float32(scale * (random.standard_normal(scale.shape) + 0.3)) for scale in scales]
            for _ in range(rank.world)
        ]
        reference.step([[g.astype(np.float64) for g in one] for one in drawn], 1 - step / (2 * steps))
        for p, g in zip(parameters, drawn[rank.rank]):
            p.grad = torch.from_numpy(g)
        optimizer.step()
        schedule.step()
    gathered: list[Any] = [None] * rank.world
    torch.distributed.all_gather_object(gathered, optimizer.state_dict(), group=rank.group)
    apart, owed = 0.0, 0.0
    for i, (p, x) in enumerate(zip(parameters, reference.x)):
        exact = optimizer.state[p].get("exact", p).detach().double().numpy()
        residuals = [one["gradwire"]["ranks"][str(r)]["up"].get(str(i)) for r, one in enumerate(gathered)]
        late = np.mean([e.double().numpy().reshape(x.shape) if e is not None else 0 * x for e in residuals], axis=0)
        apart = max(apart, float(np.abs(exact - x).max()) / 1e-3)
        owed = max(owed, float(np.abs(exact - late - x).max()) / 1e-3)
    return apart, owed, [p.detach().clone() for p in parameters]


def test_uncompressed_it_is_the_reference_for_a_thousand_steps(ranks: Ranks) -> None:
    results = ranks.run(2, twin, 1000, EXACT)
    assert results[0][0] < 0.02  # float32, in 1,000 subtractions from weights of up to 4
    assert equal(results[0][2], results[1][2])


def test_what_is_not_yet_sent_is_in_the_residuals(ranks: Ranks) -> None:
    codec = "0=loggrid:k=2;1=topk:ratio=0.1;*=casq:bits=2,refit=20"
    results = ranks.run(2, twin, 1000, dict(codec=codec))
    assert results[0][1] < 0.05 and equal(results[0][2], results[1][2])
    rival = ranks.run(2, twin, 200, dict(codec=codec, feedback=False))
    assert rival[0][1] > 2  # and grows


# Closed loops.


def steady(rank: Rank) -> Any:
    """One weight that always moves keeps the scale large, beside many with noise that a coarse grid rounds to nothing.
    Their mean loss at the end for each of three seeds, with feedback and without; at the beginning it is 0.5."""
    found = []
    for feedback, steps in ((None, 1000), (False, 300)):  # without it nothing moves, however long
        parameters = [nn.Parameter(torch.zeros(1, 64)) for _ in range(3)]
        random = [torch.Generator().manual_seed(100 * seed + rank.rank) for seed in range(3)]
        optimizer = gw.QAdam(
            parameters, lr=0.01, betas=(0.99, 0.999), codec="*=loggrid:k=0", feedback=feedback, group=rank.group
        )
        for _ in range(steps):
            for x, generator in zip(parameters, random):
                x.grad = x.detach() - 1 + 10 * torch.randn(1, 64, generator=generator)
                x.grad[0, 0] = -1e4
            optimizer.step()
        found.append([float((x.detach()[0, 1:] - 1).square().mean() / 2) for x in parameters])
    return found


def test_with_feedback_a_coarse_grid_learns_what_it_cannot_learn_without(ranks: Ranks) -> None:
    learned, rival = ranks.run(2, steady)[0]
    assert max(learned) < 0.1 < 0.4 < min(rival), (learned, rival)


def two_workers(rank: Rank, moments: str) -> float:
    """Minima 1 and -1 with curvatures 4 and 1, best together at 0.6, and the noise of the first rank is ten times that
    of the second."""
    random = torch.Generator().manual_seed(rank.rank)
    x = nn.Parameter(torch.zeros(1, 64))
    optimizer = gw.QAdam([x], lr=0.01, group=rank.group, moments=moments, **EXACT)
    for _ in range(800 if moments == "shared" else 400):
        noise = (10.0 if rank.rank == 0 else 1.0) * torch.randn(1, 64, generator=random)
        x.grad = (4 * (x.detach() - 1) if rank.rank == 0 else x.detach() + 1) + noise
        optimizer.step()
    return float(x.mean())


def test_shared_second_moments_end_where_the_sum_of_gradients_vanishes(ranks: Ranks) -> None:
    assert abs(ranks.run(2, two_workers, "shared")[0] - 0.6) < 0.15
    assert ranks.run(2, two_workers, "local")[0] < 0


# The life of an optimizer.

KINDS = [
    dict(codec="loggrid:k=2"),
    dict(codec="casq:bits=2", weights="unigrid:bits=6", moments="shared", share_every=3),
    dict(codec="topk:ratio=0.05", down="optquant:bits=4", residual=torch.bfloat16),
    dict(codec="qsgd:bits=4", weights="fp32", correction=False, eps=1e-6, weight_decay=0.01),
]


def resumed(rank: Rank, options: dict[str, Any]) -> Any:
    whole, other = network(), network(seed=5)
    optimizer = gw.QAdam(whole.named_parameters(), group=rank.group, **options)
    train(rank, whole, optimizer, range(5))
    model, state = {k: v.clone() for k, v in whole.state_dict().items()}, optimizer.state_dict()
    state = torch.load(_saved(state), weights_only=True)
    train(rank, whole, optimizer, range(5, 9))
    again = gw.QAdam(other.named_parameters(), group=rank.group, **options)
    again.load_state_dict(state)
    other.load_state_dict(model)
    train(rank, other, again, range(5, 9))
    assert equal(weights(whole), weights(other)) and optimizer.residual_hash() == again.residual_hash()
    assert equal(flat(optimizer.state_dict()), flat(again.state_dict()))
    return weights(whole), optimizer.stats()


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_resumed_run_is_the_run_that_was_never_stopped(ranks: Ranks, kind: int) -> None:
    results = ranks.run(3, resumed, KINDS[kind])
    assert all(equal(results[0][0], other) for other, _ in results)
    stats = results[0][1]
    assert stats["steps"] == 9 and stats["bits"] < 8 and stats["last_step"]["bytes"] > 0


def states(rank: Rank) -> Any:
    model = network()
    optimizer = gw.QAdam(model.parameters(), group=rank.group)
    train(rank, model, optimizer, range(4))
    return optimizer.state_dict(), model.state_dict()


def continued(rank: Rank, saved: list[Any], model_state: Any) -> Any:
    model = network(seed=7)
    optimizer = gw.QAdam(model.parameters(), group=rank.group)
    missing = said(lambda: optimizer.load_state_dict(saved[0]))
    model.load_state_dict(model_state)
    optimizer.load_state_dict(saved)
    first = copy.deepcopy(optimizer.state_dict())
    train(rank, model, optimizer, range(4, 6))
    return missing, first, weights(model)


def test_another_number_of_ranks_keeps_the_sum_of_residuals(ranks: Ranks) -> None:
    saved = [state for state, _ in ranks.run(3, states)]
    results = ranks.run(2, continued, saved, ranks.run(3, states)[0][1])
    for missing, first, _ in results:
        assert "saved with 3 ranks, and there are 2 now" in missing and "a list of all states" in missing
        assert all(torch.equal(first["state"][i]["exact"], saved[0]["state"][i]["exact"]) for i in (0, 2))
        mean = torch.stack([one["state"][0]["exp_avg_sq"] for one in saved]).mean(0)
        torch.testing.assert_close(first["state"][0]["exp_avg_sq"], mean)
    before = sum(one["gradwire"]["ranks"][str(r)]["up"]["0"] for r, one in enumerate(saved)) / 3
    after = sum(one["gradwire"]["ranks"][str(r)]["up"]["0"] for r, (_, one, _) in enumerate(results)) / 2
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-9)
    assert equal(results[0][2], results[1][2])


def skipped(rank: Rank) -> None:
    model = network()
    optimizer = gw.QAdam(model.parameters(), group=rank.group)
    train(rank, model, optimizer, range(3))
    for bad in (float("nan"), float("inf"), 1e25):
        before, kept = weights(model), [one.clone() for one in flat(optimizer.state_dict())]
        nn.functional.cross_entropy(model(batch(rank, 3)[0]), batch(rank, 3)[1]).backward()
        if rank.rank == 1:
            next(model.parameters()).grad[3, 4] = bad
        optimizer.step()
        assert equal(weights(model), before) and equal(flat(optimizer.state_dict()), kept)
        optimizer.zero_grad()
    optimizer.step()  # without gradients: nothing happens
    assert equal(flat(optimizer.state_dict()), kept)
    assert optimizer.stats()["skipped"] == 3 and optimizer.stats()["steps"] == 3
    train(rank, model, optimizer, range(3, 5))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def scaled(rank: Rank) -> Any:
    """A GradScaler skips a step on one rank; the others must not wait for it."""
    plain, model = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizers = [gw.QAdam(one.parameters(), group=rank.group) for one in (plain, model)]
    train(rank, plain, optimizers[0], range(2))
    for step in range(3):
        x, y = batch(rank, min(step, 1))
        optimizers[1].zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if step == 1 and rank.rank == 0:
            next(model.parameters()).grad[0, 0] = float("inf")
        scaler.step(optimizers[1])
        scaler.update()
    assert optimizers[1].stats()["skipped"] == 1
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(plain.parameters(), model.parameters()))


def edited(rank: Rank) -> None:
    """Other code changes some weights between two steps, and a model of bfloat16 trains with exact weights."""
    model = network().bfloat16()
    optimizer = gw.QAdam(model.parameters(), group=rank.group)
    for step in range(3):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
    p = next(model.parameters())
    exact = optimizer.state[p]["exact"].clone()
    with torch.no_grad():
        p[0].fill_(0.5)
    optimizer._adopt()
    assert bool((optimizer.state[p]["exact"][0] == 0.5).all())
    assert torch.equal(optimizer.state[p]["exact"][1:], exact[1:]) and not torch.equal(exact[1:], p[1:].float())


def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(ranks: Ranks) -> None:
    ranks.run(3, skipped)
    ranks.run(2, scaled)


def test_weights_that_other_code_changes_are_taken_over(ranks: Ranks) -> None:
    ranks.run(2, edited)


# What is refused.


def make(rank: Rank, **options: Any) -> Any:
    model = options.pop("model", None) or network()
    return gw.QAdam(model.named_parameters(), group=rank.group, **options)


REFUSED = {
    "weights and down": (dict(weights="fp32", down="fp32"), "weights and down are both given"),
    "a codec that learns": (dict(weights="optquant:bits=4"), "a codec that learns"),
    "a rule that matches nothing": (dict(codec="nothing.*=fp32;*=qsgd:bits=4"), "matches no parameter"),
    "moments": (dict(moments="global"), "moments is 'global'; allowed are 'local' and 'shared'"),
    "lr": (dict(lr=-1.0), "lr of group 0 is -1; allowed is 0 to 1e+06"),
    "betas": (dict(betas=(0.9, 1.0)), "theta is 1; allowed is above 0 and below 1"),
    "eps": (dict(eps=0.0), "epsilon is 0; allowed is above 0, to 1"),
    "residual": (dict(residual=torch.float16), "residual is torch.float16"),
    "feedback": (dict(feedback=1), "feedback is 1; allowed are True, False and None"),
    "share_every": (dict(moments="shared", share_every=0), "share_every is 0"),
    "float64": (dict(model=network().double()), "is float64; allowed are"),
    "frozen": (dict(model=network().requires_grad_(False)), "no parameter requires a gradient"),
}


def refused(rank: Rank) -> dict[str, str]:
    found = {name: said(lambda: make(rank, **options)) for name, (options, _) in REFUSED.items()}
    found["ranks differ"] = said(lambda: make(rank, seed=rank.rank))
    found["one rank is wrong"] = said(lambda: make(rank, moments="local" if rank.rank else "global"))
    optimizer = make(rank)
    found["more parameters"] = said(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}))
    found["state"] = said(lambda: optimizer.load_state_dict(torch.optim.Adam(network().parameters()).state_dict()))

    ddp = DDP(network(), process_group=rank.group)
    averaged = gw.QAdam(ddp.parameters(), group=rank.group)
    found["ddp"] = said(lambda: train(rank, ddp, averaged, range(1)))
    apart = network(seed=rank.rank)
    found["weights"] = said(lambda: train(rank, apart, gw.QAdam(apart.parameters(), group=rank.group), range(1)))
    model = network()
    other = gw.QAdam(model.named_parameters(), group=rank.group)
    next(model.parameters()).grad = torch.eye(96, 64).to_sparse() if rank.rank == 1 else torch.eye(96, 64)
    found["sparse"] = said(other.step)
    return found


def test_wrong_options_are_refused_by_name_on_all_ranks(ranks: Ranks) -> None:
    results = ranks.run(2, refused)
    for found in results:
        for name, (_, words) in REFUSED.items():
            assert words in found[name], (name, found[name])
        assert "ranks disagree about seed" in found["ranks differ"]
        assert "cannot be added" in found["more parameters"] and "not one of a QAdam" in found["state"]
        assert "all ranks have the same gradients" in found["ddp"]
        assert "parameter '0' differs between rank 0 and rank 1" in found["weights"]
    assert "rank 0 cannot take part" in results[1]["one rank is wrong"]
    assert "parameter '0.weight' is sparse" in results[1]["sparse"] and "another rank" in results[0]["sparse"]


# On a GPU.


def on_device(rank: Rank, device: str, kind: int) -> Any:
    model = network().to(device)
    optimizer = gw.QAdam(model.named_parameters(), group=rank.group, **KINDS[kind])
    generator = torch.Generator().manual_seed(rank.rank)
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()], optimizer.residual_hash()


@pytest.mark.skipif(
    not torch.cuda.is_available() or gradwire._core.cuda_devices() == 0, reason="no GPU that torch and gradwire can use"
)
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_gpu_gives_the_bits_of_the_cpu(ranks: Ranks, kind: int) -> None:
    cpu, gpu = (ranks.run(2, on_device, device, kind) for device in ("cpu", "cuda:0"))
    for a, b in zip(cpu, gpu):
        assert equal(a[0], b[0]) and a[1] == b[1]
