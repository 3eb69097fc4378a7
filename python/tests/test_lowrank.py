# SPDX-License-Identifier: Apache-2.0
"""lowrank in the hook of DDP: torch's PowerSGD where both do the same, nothing lost, the same bits on all ranks, and
what is refused. test_lowrank_state.py has checkpoints.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, RankError, Ranks, eventually
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.torch as gw
from gradwire.torch import _lowrank
from gradwire.torch._lowrank import FactorGroup, orthonormal
from gradwire.torch._lowrank_spec import LowRank, MatrixShape

VARIANTS = [f"lowrank:rank=2,bits={bits},alternate={way}" for bits in (4, 8, 16, 32) for way in ("on", "off")]


class Given(nn.Module):
    """A model whose gradients a test gives: two matrices of one shape, a convolution's and a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(24, 40, dtype=dtype)) for _ in range(2))
        self.conv = nn.Parameter(torch.zeros(16, 8, 3, 3, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(24, dtype=dtype))

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients))  # type: ignore[return-value]


def drawn(rank: Rank, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Gradients of which half is common to all ranks, and of a few directions."""
    common, own = torch.Generator().manual_seed(step), torch.Generator().manual_seed(100 * step + rank.rank + 7)
    drawn = []
    for p in Given().parameters():
        n, m = p.shape[0], p[0].numel()
        low = torch.randn(n, 3, generator=common) @ torch.randn(3, m, generator=common)
        drawn.append((low + torch.randn(n, m, generator=own)).view(p.shape).to(dtype))
    return drawn


def made(rank: Rank, codec: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[DDP, Any]:
    given = {name: options.pop(name) for name in ("find_unused_parameters",) if name in options}
    ddp = DDP(Given(dtype), process_group=rank.group, bucket_cap_mb=0.006, **given)
    return ddp, gw.compress(ddp, codec, min_elements=0, **options)


def results(ddp: DDP, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(*gradients).backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def residuals(hook: Any) -> dict[str, torch.Tensor]:
    (part,) = hook.state_dict()["ranks"].values()
    return part["up"]  # type: ignore[no-any-return]


def mean(rank: Rank, values: torch.Tensor) -> torch.Tensor:
    values = values.double().clone()
    dist.all_reduce(values, group=rank.group)
    return values / rank.world


def agree(rank: Rank, values: list[torch.Tensor]) -> bool:
    every: list[Any] = [None] * rank.world
    dist.all_gather_object(every, [one.clone() for one in values], group=rank.group)
    return all(torch.equal(a, b) for other in every for a, b in zip(other, values))


# What is exchanged.


def nothing_is_lost(rank: Rank, codec: str) -> tuple[bool, float, int]:
    """Whether ranks agree; what result + new residual differs from gradient + old residual, of means over the ranks."""
    ddp, hook = made(rank, codec)
    same, worst = True, 0.0
    for step in range(6):
        before, gradients = residuals(hook), drawn(rank, step)
        got = results(ddp, gradients)
        same = same and agree(rank, got)
        after = residuals(hook)
        for (name, _), gradient, result in zip(ddp.module.named_parameters(), gradients, got):
            lost = mean(rank, gradient.flatten()) - result.flatten().double()
            if name in after:
                lost += mean(rank, before[name]) - mean(rank, after[name])
            worst = max(worst, float(lost.norm() / gradient.norm()))
    return same, worst, len(after)


@pytest.mark.parametrize("codec", VARIANTS)
def test_result_and_residual_are_gradient_and_residual(ranks: Ranks, codec: str) -> None:
    for same, worst, kept in ranks.run(3, nothing_is_lost, codec):
        assert same and kept == 3
        assert worst < 3e-6, "float32 rounds sums of a few terms; a share of the rounding of 4 bits would be 1e-2"


def with_products_of_torch(rank: Rank, codec: str, dtype: torch.dtype) -> list[float]:
    """By how much results and residuals differ where torch computes the products, as it does on a GPU; and what is lost
    then."""
    every: list[list[torch.Tensor]] = []
    lost = 0.0
    for core in (True, False):
        on_core = _lowrank.on_core
        _lowrank.on_core = lambda device, core=core: core  # type: ignore[assignment, misc]
        try:
            ddp, hook = made(rank, codec, dtype)
            seen = [one for step in range(5) for one in results(ddp, drawn(rank, step, dtype))]
            every.append(seen + list(residuals(hook).values()))
            if not core and dtype == torch.float32:
                lost = nothing_is_lost(rank, codec)[1]
        finally:
            _lowrank.on_core = on_core
    return [float((a.double() - b.double()).norm() / a.double().norm()) for a, b in zip(*every)] + [lost]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["on", "off"])
def test_products_of_torch_are_those_of_the_core(ranks: Ranks, way: str, dtype: torch.dtype) -> None:
    """Factors of 32 bits, since a rounding to few bits may go either way."""
    rounding = 1e-4 if dtype == torch.float32 else 2e-2
    for differences in ranks.run(2, with_products_of_torch, f"lowrank:rank=2,bits=32,alternate={way}", dtype):
        assert max(differences) < rounding


def beside_powersgd(rank: Rank) -> list[tuple[float, float]]:
    """Steps of torch's PowerSGD and of ours from the same state: (difference, how much PowerSGD has left out)."""
    theirs = DDP(Given(), process_group=rank.group, bucket_cap_mb=100)
    state = PowerSGDState(rank.group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    order: list[int] = []  # of parameters in torch's one bucket

    def recorded(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        order[:] = [id(p) for p in bucket.parameters()]
        return powerSGD_hook(state, bucket)  # type: ignore[no-any-return, arg-type]

    recorded.__annotations__.update(
        {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    )
    theirs.register_comm_hook(state, recorded)
    ours, hook = made(rank, "lowrank:rank=2,bits=32,alternate=off")
    for step in range(4):
        results(theirs, drawn(rank, step))
    taken = hook.state_dict()
    named = {id(p): (name, p) for name, p in theirs.module.named_parameters()}
    (bases,), (errors,) = state.q_memory_dict.values(), state.error_dict.values()
    for name, p in (named[one] for one in order):
        error, errors = errors[: p.numel()], errors[p.numel() :]
        if p.dim() > 1:
            columns = MatrixShape(p).columns
            taken["lowrank"]["q"][name] = bases[: 2 * columns].view(columns, 2).t().contiguous()
            taken["ranks"][str(rank.rank)]["up"][name] = error.clone()
            bases = bases[2 * columns :]
    hook.load_state_dict(taken)
    found = []
    for step in range(4, 9):
        gradients = drawn(rank, step)
        a, b = results(theirs, gradients), results(ours, gradients)
        apart = max(float((x - y).norm() / x.norm()) for x, y in zip(a[:3], b[:3]))
        exact = mean(rank, gradients[0])
        found.append((apart, float((a[0] - exact).norm() / exact.norm())))
    return found


def test_two_exchanges_of_fp32_are_torchs_powersgd(ranks: Ranks) -> None:
    for steps in ranks.run(2, beside_powersgd):
        for apart, left_out in steps:
            assert apart < 1e-4 and left_out > 0.3, steps


def sent(rank: Rank, codec: str) -> tuple[dict[str, Any], int]:
    ddp, hook = made(rank, codec)
    for step in range(2):
        results(ddp, drawn(rank, step))
    return hook.stats()["parameters"], hook.stats()["last_step"]["bytes"]


def test_what_does_not_fit_is_sent_exactly(ranks: Ranks) -> None:
    for codec, kinds in (
        ("lowrank:rank=20,bits=4", ["lowrank", "lowrank", "fp32"]),  # the convolution has 16 rows
        ("lowrank:rank=13,bits=32", ["lowrank", "lowrank", "lowrank"]),
        ("lowrank:rank=16,bits=32", ["fp32", "fp32", "fp32"]),  # 16 * (24 + 40) >= 24 * 40; 16 * (16 + 72) >= 16 * 72
        ("lowrank:rank=64,bits=4", ["fp32", "fp32", "fp32"]),
        ("b=fp32;2d=lowrank:rank=2;1d=fp32;*=fp16", ["lowrank", "fp32", "lowrank"]),
    ):
        for parameters, _ in ranks.run(2, sent, codec):
            assert [parameters[name]["codec"].partition(":")[0] for name in ("a", "b", "conv")] == kinds
            assert parameters["bias"]["codec"] == "fp32"


def test_bytes_fall_with_bits_and_with_one_exchange(ranks: Ranks) -> None:
    sizes = [ranks.run(2, sent, codec)[0][1] for codec in VARIANTS]
    for on, off in zip(sizes[::2], sizes[1::2]):
        assert on < off
    assert sizes[1] < sizes[3] < sizes[5] < sizes[7]


def mixed(rank: Rank) -> list[Any]:
    ddp, hook = made(rank, "b=topk:ratio=0.1;conv=qsgd:bits=8;2d=lowrank:rank=2,bits=8;*=fp32")
    same = True
    for step in range(5):
        same = agree(rank, results(ddp, drawn(rank, step))) and same
    codecs = {name: one["codec"].partition(":")[0] for name, one in hook.stats()["parameters"].items()}
    return [same, sorted(residuals(hook)), codecs]


def test_rules_with_other_codecs(ranks: Ranks) -> None:
    for same, kept, codecs in ranks.run(3, mixed):
        assert same and kept == ["a", "b"]
        assert codecs == {"a": "lowrank", "b": "topk", "conv": "qsgd", "bias": "fp32"}


# Steps of another kind.


def with_nan(rank: Rank, codec: str, where: int) -> list[Any]:
    ddp, hook = made(rank, codec)
    for step in range(2):
        results(ddp, drawn(rank, step))
    before, factors = hook.residual_hash(), hook.state_dict()["lowrank"]
    gradients = drawn(rank, 2)
    if rank.rank == 1:
        gradients[where].view(-1)[5] = float("nan" if where else "inf")
    got = results(ddp, gradients)
    kept = hook.residual_hash() == before and torch.equal(factors["q"]["a"], hook.state_dict()["lowrank"]["q"]["a"])
    later = results(ddp, drawn(rank, 3))
    return [
        [bool(one.isnan().any()) for one in got],
        kept,
        hook.stats()["skipped"],
        all(bool(one.isfinite().all()) for one in later) and agree(rank, later),
    ]


@pytest.mark.parametrize("codec", VARIANTS[2:4] + VARIANTS[6:])
@pytest.mark.parametrize("where", [0, 2, 3])
def test_a_nan_on_one_rank_reaches_all_and_changes_nothing(ranks: Ranks, codec: str, where: int) -> None:
    for nans, kept, skipped, later in ranks.run(3, with_nan, codec, where):
        assert nans[where] and sum(nans) == 1, "only the tensor that has one"
        assert kept and skipped == 1 and later


def zeros(rank: Rank, codec: str) -> list[Any]:
    ddp, hook = made(rank, codec)
    got = [results(ddp, [torch.zeros_like(p) for p in ddp.parameters()]) for _ in range(3)]
    still = all(not bool(one.any()) for step in got for one in step)
    summed = sum(results(ddp, drawn(rank, 1))[0].double() for _ in range(40))
    exact = 40 * mean(rank, drawn(rank, 1)[0])
    return [still, float((summed - exact).norm() / exact.norm()), hook.stats()["skipped"]]


@pytest.mark.parametrize("codec", ["lowrank:rank=4,bits=8,alternate=on", "lowrank:rank=4,bits=32,alternate=off"])
def test_zero_gradients_leave_nothing_dead(ranks: Ranks, codec: str) -> None:
    for still, apart, skipped in ranks.run(2, zeros, codec):
        assert still and skipped == 0
        assert apart < 0.1, "a constant gradient arrives in the end; with bases of zeros nothing would"


def halves(rank: Rank, dtype: torch.dtype, codec: str) -> list[Any]:
    ddp, hook = made(rank, codec, dtype)
    total = [torch.zeros(p.shape, dtype=torch.float64) for p in ddp.parameters()]
    same = True
    for step in range(6):
        got = results(ddp, drawn(rank, step, dtype))
        same = same and agree(rank, got) and all(one.dtype == dtype for one in got)
        for sums, one in zip(total, got):
            sums += one
    wanted = sum(mean(rank, drawn(rank, step, dtype)[0]) for step in range(6))
    kept = mean(rank, residuals(hook)["a"]).view(24, 40)
    return [same, float((total[0] + kept - wanted).norm() / wanted.norm())]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients(ranks: Ranks, dtype: torch.dtype) -> None:
    # Results are rounded to the type of the gradients, which is not fed back, as with every codec.
    for same, lost in ranks.run(2, halves, dtype, "lowrank:rank=2,bits=8"):
        assert same and lost < (2e-3 if dtype == torch.float16 else 1e-2)


def two_models(rank: Rank, way: str) -> list[bool]:
    """Two models in one backward pass have the results that each has alone. It begins with that of the second model,
    and on rank 1 it goes on only when both exchanges of that are over; the other ranks hand over buckets meanwhile."""
    codec = f"lowrank:rank=2,alternate={way}"
    alone, (one, _), (other, hook) = [made(rank, codec)[0] for _ in range(2)], made(rank, codec), made(rank, codec)
    same = []
    for step in range(5):
        wanted = [results(ddp, drawn(rank, step + 50 * at)) for at, ddp in enumerate(alone)]
        one.zero_grad()
        other.zero_grad()
        first = one(*drawn(rank, step))
        if rank.rank == 1:
            first.register_hook(lambda _, step=step: None if eventually(lambda: hook.step > step) else 1 / 0)
        (first + other(*drawn(rank, step + 50))).backward()
        for ddp, expected in zip((one, other), wanted):
            same += [torch.equal(p.grad, e) for p, e in zip(ddp.parameters(), expected) if p.grad is not None]
    return same


@pytest.mark.parametrize("way", ["on", "off"])
def test_two_models_in_one_backward_pass(ranks: Ranks, way: str) -> None:
    for same in ranks.run(3, two_models, way):
        assert len(same) == 40 and all(same)


def accumulated(rank: Rank) -> bool:
    first, second = drawn(rank, 0), drawn(rank, 1)
    ddp, _ = made(rank, "lowrank:rank=2")
    with ddp.no_sync():
        ddp(*first).backward()
    ddp(*second).backward()
    whole, _ = made(rank, "lowrank:rank=2")
    together = results(whole, [a + b for a, b in zip(first, second)])
    return all(torch.equal(p.grad, one) for p, one in zip(ddp.parameters(), together) if p.grad is not None)


def test_accumulation_with_no_sync(ranks: Ranks) -> None:
    assert all(ranks.run(2, accumulated))


def some_unused(rank: Rank, way: str) -> list[Any]:
    ddp, hook = made(rank, f"lowrank:rank=2,alternate={way}", find_unused_parameters=True)
    for step in range(3):
        results(ddp, drawn(rank, step))
    before = hook.state_dict()
    ddp.zero_grad()
    gradients = drawn(rank, 3)
    a, conv, bias = ddp.module.a, ddp.module.conv, ddp.module.bias
    ddp.module.forward = lambda: (a * gradients[0]).sum() + (conv * gradients[2]).sum() + bias.sum()  # b is not used
    ddp().backward()
    after = hook.state_dict()
    old, new = (state["ranks"][str(rank.rank)]["up"] for state in (before, after))
    factors = [(before["lowrank"][kind]["b"], after["lowrank"][kind]["b"]) for kind in before["lowrank"]]
    return [
        torch.equal(old["b"], new["b"]) and all(torch.equal(*pair) for pair in factors),
        not torch.equal(old["a"], new["a"]),
        ddp.module.b.grad is None or not bool(ddp.module.b.grad.any()),
    ]


@pytest.mark.parametrize("way", ["on", "off"])
def test_a_parameter_that_no_rank_has_used_keeps_its_residual(ranks: Ranks, way: str) -> None:
    for outcome in ranks.run(2, some_unused, way):
        assert all(outcome), outcome


def warmed(rank: Rank) -> list[bool]:
    ddp, hook = made(rank, "lowrank:rank=2", warmup=2, measure_every=1)
    exact = []
    for step in range(4):
        gradients = drawn(rank, step)
        got = results(ddp, gradients)
        exact.append(bool(torch.allclose(got[0].double(), mean(rank, gradients[0]), rtol=1e-5, atol=1e-6)))
    error = hook.stats()["parameters"]["a"]["error"]
    return [*exact, 0.05 < error < 1]


def test_warmup_is_exact_and_errors_are_measured(ranks: Ranks) -> None:
    for outcome in ranks.run(2, warmed):
        assert outcome == [True, True, False, False, True]


def scaled(rank: Rank) -> bool:
    """A loss scale changes results by its factor, and residuals not at all."""
    found = []
    for scale in (1.0, 1024.0):
        ddp, hook = made(rank, "lowrank:rank=2")
        hook.set_loss_scale(scale)
        for step in range(3):
            got = results(ddp, [scale * one for one in drawn(rank, step)])
        found.append([one / scale for one in got] + list(residuals(hook).values()))
    return all(torch.equal(a, b) for a, b in zip(*found))


def test_a_loss_scale_is_no_part_of_residuals(ranks: Ranks) -> None:
    assert all(ranks.run(2, scaled))


def channels_last(rank: Rank) -> list[float]:
    net = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ddp = DDP(net, process_group=rank.group)
    hook = gw.compress(ddp, "lowrank:rank=2,bits=32", min_elements=0)
    found = []
    for step in range(3):
        before = residuals(hook)["weight"]
        x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(step + 10 * rank.rank))
        gradient = torch.autograd.grad(net(x).square().sum(), net.weight)[0]
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        assert net.weight.grad is not None
        flat = lambda one: one.permute(0, 2, 3, 1).flatten()  # the order of memory
        both = mean(rank, flat(gradient) + before)
        apart = both - flat(net.weight.grad).double() - mean(rank, residuals(hook)["weight"])
        found.append(float(apart.norm() / both.norm()))
    return found


def test_another_memory_format(ranks: Ranks) -> None:
    for found in ranks.run(2, channels_last):
        assert max(found) < 1e-5


def adam(rank: Rank, codec: str) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4))
    ddp = DDP(net, process_group=rank.group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    hook = gw.compress(ddp, codec, optimizer=optimizer, warmup=10)
    assert hook.stats()["optimizer"] == {"exchange": "gradients"}  # few directions describe them better
    hook = gw.compress(ddp, codec, optimizer=optimizer, feedback=True, warmup=10)
    losses = []
    for step in range(60):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(97 * step + rank.rank))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    agreed = agree(rank, [p.detach() for p in ddp.parameters()])
    return [agreed, sum(losses[:5]) / 5, sum(losses[-5:]) / 5, hook.stats()["optimizer"]["phase"], hook.stats()["bits"]]


def test_adams_momentum(ranks: Ranks) -> None:
    for agreed, first, last, phase, bits in ranks.run(2, adam, "lowrank:rank=4"):
        assert agreed and phase == "compressed" and bits < 8
        assert last < 0.6 * first


# What is refused.


def refusals(rank: Rank, codec: str, options: dict[str, Any]) -> None:
    made(rank, codec, **options)


@pytest.mark.parametrize(
    "codec, options, words",
    [
        ("lowrank:rank=0", {}, "rank is '0'; allowed is an integer from 1 to 64"),
        ("lowrank:rank=65", {}, "rank is '65'"),
        ("lowrank:rank=x", {}, "rank is 'x'"),
        ("lowrank:bits=3", {}, "bits is '3'; allowed is one of 4, 8, 16, 32"),
        ("lowrank:alternate=yes", {}, "alternate is 'yes'; allowed is one of on, off"),
        ("lowrank:refresh=3", {}, "lowrank has no parameter 'refresh=3'"),
        ("lowrank:rank=1,rank=2", {}, "rank is given twice"),
        ("zip=fp32;*=lowrank", {}, "the rule 'zip=fp32' matches no parameter"),
        ("2d=lowrank", {}, "the last rule must be"),
        ("lowrank", {"nodes": 1}, "nodes is given, and lowrank has no such option"),
        ("lowrank", {"down": "fp16"}, "down is given"),
        ("lowrank", {"method": "gather"}, "method is given"),
        ("lowrank", {"guard": 0.5}, "guard is given"),
        ("lowrank", {"feedback": False}, "feedback is False"),
        ("lowrank", {"residual": torch.bfloat16}, "residual is torch.bfloat16"),
        ("qsgd:bits=4", {"down": "lowrank"}, "lowrank is no codec of messages"),
    ],
)
def test_refused_by_name_on_all_ranks(ranks: Ranks, codec: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(2, refusals, codec, options)
    assert len(error.value.errors) == 2 and all(words in told for _, told in error.value.errors.values())


def sharded(rank: Rank) -> None:
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    gw.compress(fully_shard(nn.Linear(64, 64), mesh=mesh), "lowrank:rank=2")


def optimized(rank: Rank) -> None:
    gw.QAdam(nn.Linear(64, 64).named_parameters(), codec="lowrank", group=rank.group)


@pytest.mark.parametrize("where", [sharded, optimized])
def test_fsdp_and_other_hooks_refuse_it_by_name(ranks: Ranks, where: Any) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(2, where)
    for kind, told in error.value.errors.values():
        assert kind == "UnsupportedError" and "no codec of messages" in told


def disagree(rank: Rank, what: str) -> None:
    # DDP compares shapes too, where it can; a matrix of as many elements passes there if it is replaced later.
    ddp = DDP(Given(), process_group=rank.group)
    if what == "shape" and rank.rank == 1:
        ddp.module.a.data = torch.zeros(40, 24)
    gw.compress(ddp, "lowrank:rank=3" if what == "rank" and rank.rank == 1 else "lowrank:rank=2")


@pytest.mark.parametrize("what, words", [("shape", "ranks disagree about"), ("rank", "ranks disagree about")])
def test_ranks_that_differ(ranks: Ranks, what: str, words: str) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(2, disagree, what)
    assert len(error.value.errors) == 2 and all(words in told for _, told in error.value.errors.values())


def changed(rank: Rank) -> list[str]:
    told = []
    for codec, other in (("lowrank:rank=2", "qsgd:bits=4"), ("qsgd:bits=4", "lowrank:rank=2")):
        _, hook = made(rank, codec)
        try:
            hook.set_codec(other)
        except gradwire.UnsupportedError as error:
            told.append(str(error))
    return told


def test_set_codec_is_refused(ranks: Ranks) -> None:
    for told in ranks.run(2, changed):
        assert len(told) == 2 and all("call compress again" in one for one in told)


def test_other_users_of_codecs_refuse_it_by_name() -> None:
    for call in (
        lambda: gradwire.Codec("lowrank:rank=4"),
        lambda: gradwire.Rules("2d=lowrank:rank=4;*=fp32"),
        lambda: gradwire.encode(torch.ones(8, 8).numpy(), "lowrank"),
    ):
        with pytest.raises(gradwire.Error, match="lowrank is no codec of messages"):
            call()


def test_rules_by_dimension() -> None:
    rules = gradwire.Rules("2d=qsgd:bits=4;*=fp32")
    assert [str(rules.codec_for("w", d, 5000)).partition(":")[0] for d in (0, 1, 2, 4)] == ["fp32"] * 2 + ["qsgd"] * 2


# Bases.


def test_orthonormal_rows_of_anything() -> None:
    torch.manual_seed(0)
    x, start = torch.randn(6, 4, 30), torch.linalg.qr(torch.randn(6, 30, 4))[0].mT.contiguous()
    x[1] = 0
    x[2, 3] = 2 * x[2, 0] - x[2, 1]
    x[3] *= 1e-30
    x[4] *= torch.tensor([1e9, 1.0, 1e-6, 1e-12]).unsqueeze(1)
    x[5, 2] = x[5, 0] + 1e-3 * x[5, 2]
    (made,) = orthonormal([x], [start])
    gram = torch.bmm(made.double(), made.double().mT)
    assert float((gram - torch.eye(4)).abs().max()) < 1e-6
    assert torch.allclose(made[1].abs(), start[1].abs(), atol=1e-6), "a factor of zeros gives the start"
    for i in (0, 3, 4, 5):  # what the rows span stays
        left = x[i].double() / x[i].double().norm(dim=1, keepdim=True)
        left -= left @ made[i].double().mT @ made[i].double()
        assert float(left.norm()) < 1e-4, i
    again = orthonormal([x[:3], x[3:]], [start[:3], start[3:]])
    assert torch.equal(torch.cat(again), made), "how matrices are stacked changes no bit"
    x[0, 0, 0] = float("nan")
    assert torch.equal(orthonormal([x], [start])[0][1:], made[1:])


def test_a_start_depends_on_names_only() -> None:
    shape = MatrixShape(torch.zeros(8, 12))
    one = FactorGroup(LowRank(2), shape, [1], ["x", "y"], torch.device("cpu"))
    other = FactorGroup(LowRank(2), shape, [0, 1], ["z", "y"], torch.device("cpu"))
    assert torch.equal(one.p[0], other.p[1]) and torch.equal(one.q[0], other.q[1])
    assert not torch.equal(other.q[0], other.q[1])
