# SPDX-License-Identifier: Apache-2.0
"""The DDP hook, on Gloo and the CPU: the same values on all ranks, plain DDP's bits where nothing is compressed,
nothing lost when buckets are rebuilt, and everything else that a training script does with DDP.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from ranks import Rank, RankError, Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.torch as gw


def network(seed: int = 0, width: int = 96) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def batch(rank: Rank, step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank.rank)
    x = torch.randn(size, 64, generator=generator)
    return x, (x[:, :10] + 0.5 * x[:, 10:20]).argmax(1)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(rank: Rank, ddp: DDP, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def prepared(
    rank: Rank, codec: str | None, bucket_mb: float = 0.02, **options: Any
) -> tuple[DDP, torch.optim.Optimizer, Any]:
    ddp_options = {
        k: options.pop(k) for k in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view") if k in options
    }
    ddp = DDP(network(), process_group=rank.group, bucket_cap_mb=bucket_mb, **ddp_options)
    hook = gw.compress(ddp, codec, **options) if codec else None
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), hook


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run_codec(rank: Rank, codec: str | None, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    ddp, optimizer, hook = prepared(rank, codec, **options)
    losses = train(rank, ddp, optimizer, range(steps))
    return {
        "losses": losses,
        "weights": weights(ddp),
        "stats": hook.stats() if hook else None,
        "hash": hook.residual_hash() if hook else None,
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_fp32_has_the_bits_of_plain_ddp(ranks: Ranks, world: int) -> None:
    plain = ranks.run(world, run_codec, None, 5, {})
    ours = ranks.run(world, run_codec, "fp32", 5, {})
    for a, b in zip(plain, ours):
        assert equal(a["weights"], b["weights"])


# The registry's examples. A share of one per cent leaves these small layers a handful of values.
CODECS = [info["example"].replace("ratio=0.01", "ratio=0.05") for info in gradwire.codecs() if not info["lossless"]]
CODECS.append("topk:ratio=0.05,bits=2")  # its values and places are packed by code of its own


@pytest.mark.parametrize("method", ["scatter", "gather"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_trains_and_ranks_agree(ranks: Ranks, codec: str, method: str) -> None:
    steps = 30  # enough for a codec that sends a hundredth of the gradient
    results = ranks.run(3, run_codec, codec, steps, {"method": method})
    for other in results[1:]:
        assert equal(results[0]["weights"], other["weights"])
    mean = [sum(r["losses"][i] for r in results) / 3 for i in range(steps)]
    assert mean[-1] < mean[0] - 0.05, mean
    stats = results[0]["stats"]
    assert stats["steps"] == steps and stats["skipped"] == 0
    if method == "scatter":
        assert stats["ratio"] > 1, "fp32 bytes / bytes sent"
    assert stats["parameters"]["0.bias"]["codec"] == "fp32", "parameters with one dimension are not compressed"
    assert 0 < stats["last_step"]["bytes"] and stats["all_steps"]["seconds"]["encode"] > 0


def bucket_sizes(rank: Rank, sizes: list[float]) -> list[Any]:
    results = []
    for size in sizes:
        ddp, optimizer, hook = prepared(rank, "*=optquant:bits=3", bucket_mb=size)
        train(rank, ddp, optimizer, range(6))
        results.append((weights(ddp), hook.residual_hash()))
    return results


def test_buckets_change_nothing(ranks: Ranks) -> None:
    for results in ranks.run(3, bucket_sizes, [0.001, 0.03, 25.0]):
        for other, hash_ in results[1:]:
            assert equal(results[0][0], other)
            assert hash_ == results[0][1]


def accumulate(rank: Rank) -> Any:
    """Two backward passes without communication, then one with: the hook sees the sum."""
    results = []
    for codec in (None, "fp16"):
        ddp, optimizer, hook = prepared(rank, codec)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(3):
                x, y = batch(rank, 10 * step + part)
                with ddp.no_sync() if part < 2 else contextlib.nullcontext():
                    nn.functional.cross_entropy(ddp(x), y).backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
        results.append(weights(ddp))
        if hook:
            assert hook.step == 3
    return results


def test_no_sync_accumulation_and_clipping(ranks: Ranks) -> None:
    for plain, ours in ranks.run(2, accumulate):
        for a, b in zip(plain, ours):
            assert torch.allclose(a, b, atol=2e-3)


def amp(rank: Rank, spoil: int) -> Any:
    ddp, optimizer, _ = prepared(rank, None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    hook = gw.compress(ddp, "qsgd:bits=2", scaler=scaler, feedback=True)
    log = []
    for step in range(8):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(ddp(x).float(), y)
        if step in (3, 5) and rank.rank == spoil:
            loss = loss * float("inf")
        before = (hook.residual_hash(), [w.sum().item() for w in weights(ddp)], scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log.append((before, (hook.residual_hash(), [w.sum().item() for w in weights(ddp)], scaler.get_scale())))
    return log, hook.stats()["skipped"]


def test_an_inf_on_one_rank_skips_the_step_on_all(ranks: Ranks) -> None:
    for log, skipped in ranks.run(3, amp, 1):
        assert skipped == 2
        scales = set()
        for step, (before, after) in enumerate(log):
            scales.add(after[2])
            if step in (3, 5):
                assert before[:2] == after[:2], "neither residual nor weight may change"
                assert after[2] == before[2] / 2
            else:
                assert before[0] != after[0] and before[1] != after[1]
        assert len(scales) >= 3


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.use_b = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.head(h + self.b(x) if self.use_b else h)


def unused(rank: Rank) -> Any:
    ddp = DDP(Branches(), process_group=rank.group, find_unused_parameters=True, bucket_cap_mb=0.02)
    hook = gw.compress(ddp, "qsgd:bits=2", feedback=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    residuals = []
    for step in range(6):
        ddp.module.use_b = step not in (2, 3) or (step == 3 and rank.rank == 0)
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        grad_b = ddp.module.b.weight.grad
        residuals.append(
            (
                hook.state_dict()["ranks"][str(rank.rank)]["up"]["b.weight"].clone(),
                None if grad_b is None else grad_b.clone(),
            )
        )
        optimizer.step()
    return residuals


def test_parameters_that_no_rank_used_keep_their_residual(ranks: Ranks) -> None:
    results = ranks.run(2, unused)
    for residuals in results:
        assert torch.equal(residuals[2][0], residuals[1][0]), "no rank used b in step 2: its residual does not change"
        assert residuals[2][1] is None or not residuals[2][1].any()
        assert not torch.equal(residuals[3][0], residuals[2][0]), "one rank used b in step 3"
    assert torch.equal(results[0][3][1], results[1][3][1])


def variants(rank: Rank) -> Any:
    reference = None
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        ddp, optimizer, _ = prepared(rank, "qsgd:bits=4", **options)
        train(rank, ddp, optimizer, range(4))
        reference = reference or weights(ddp)
        assert equal(reference, weights(ddp)), options
    compiled = DDP(torch.compile(network(), backend="aot_eager"), process_group=rank.group)
    hook = gw.compress(compiled, "qsgd:bits=4")
    train(rank, compiled, torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9), range(4))
    assert all("_orig_mod" not in name for name in hook.stats()["parameters"])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(reference, weights(compiled)))
    return True


def test_static_graph_bucket_views_and_compile(ranks: Ranks) -> None:
    assert all(ranks.run(2, variants))


def learning(rank: Rank, places: list[int]) -> Any:
    """Models that learn in every step, with their backward passes one into the other."""
    models = [DDP(network(place), process_group=rank.group, bucket_cap_mb=0.02) for place in range(2)]
    models = [models[place] for place in places]
    hooks = [gw.compress(ddp, "dqsgd:budget=3", min_elements=0, measure_every=3) for ddp in models]
    for step in range(12):
        x, y = batch(rank, step)
        for ddp in models:
            ddp.zero_grad()
        torch.stack([nn.functional.cross_entropy(ddp(x), y) for ddp in models]).sum().backward()
    return [([p.grad.clone() for p in ddp.parameters()], hook.residual_hash()) for ddp, hook in zip(models, hooks)]


def test_models_that_learn_at_the_same_time_learn_what_they_learn_alone(ranks: Ranks) -> None:
    alone = [ranks.run(3, learning, [place]) for place in range(2)]
    for rank, both in enumerate(ranks.run(3, learning, [0, 1])):
        for place, (gradients, kept) in enumerate(both):
            assert equal(gradients, alone[place][rank][0][0]) and kept == alone[place][rank][0][1]


def two_models(rank: Rank) -> Any:
    a, optimizer_a, hook_a = prepared(rank, "qsgd:bits=4")
    b, optimizer_b, hook_b = prepared(rank, "onebit")
    for step in range(4):
        x, y = batch(rank, step)
        optimizer_a.zero_grad(), optimizer_b.zero_grad()
        (nn.functional.cross_entropy(a(x), y) + nn.functional.cross_entropy(b(x), y)).backward()
        optimizer_a.step(), optimizer_b.step()
    return weights(a), weights(b), hook_a.step, hook_b.step


def test_several_models_in_one_backward(ranks: Ranks) -> None:
    results = ranks.run(3, two_models)
    for other in results[1:]:
        assert equal(results[0][0], other[0]) and equal(results[0][1], other[1])
        assert other[2:] == (4, 4)


def warm(rank: Rank) -> Any:
    ddp, optimizer, hook = prepared(rank, "onebit", warmup=3)
    plain, plain_optimizer, _ = prepared(rank, None)
    for step in range(4):
        train(rank, ddp, optimizer, range(step, step + 1))
        train(rank, plain, plain_optimizer, range(step, step + 1))
        close = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(ddp), weights(plain)))
        assert close == (step < 3), step
    return True


def test_warm_up_steps_are_exact(ranks: Ranks) -> None:
    assert all(ranks.run(2, warm))


def many_buckets(rank: Rank) -> Any:
    """Twenty buckets, delays at random on every rank, in backward and in every phase of a bucket's way."""
    import random
    import time

    from gradwire.torch import _task

    chance = random.Random(rank.rank)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(20)]
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: time.sleep(chance.random() * 0.01))
    ddp = DDP(nn.Sequential(*layers), process_group=rank.group, bucket_cap_mb=0.015)
    hook = gw.compress(ddp, "qsgd:bits=4")
    true_up, true_down = _task.CodingTask.encode_up, _task.CodingTask.encode_down
    sleepy = lambda true: lambda self, x: (time.sleep(chance.random() * 0.01), true(self, x))[1]
    _task.CodingTask.encode_up, _task.CodingTask.encode_down = sleepy(true_up), sleepy(true_down)
    try:
        for step in range(6):
            ddp(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    finally:
        _task.CodingTask.encode_up, _task.CodingTask.encode_down = true_up, true_down
    return len(hook._chunks), [p.grad.clone() for p in ddp.parameters()]


def test_twenty_buckets_and_random_delays_do_not_deadlock(ranks: Ranks) -> None:
    results = ranks.run(4, many_buckets)
    assert results[0][0] >= 20
    for other in results[1:]:
        assert equal(results[0][1], other[1])
