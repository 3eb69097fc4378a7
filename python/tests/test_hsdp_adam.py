# SPDX-License-Identifier: Apache-2.0
"""Adam's momentum between the replicas of FSDP2: the rule is that of DDP with shards as tensors, replicas hold the same
bits, what is not sent is owed, and what a loop does with its optimizer keeps its meaning. States are in
test_hsdp_adam_state.py, and a training in test_hsdp_adam_loop.py.
"""

import warnings

import pytest

torch = pytest.importorskip("torch")
test_hsdp = pytest.importorskip("test_hsdp")  # skips where torch has no such replicas

import gradwire.torch as gw
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from gradwire.torch._limits import GradientLimits
from gradwire.torch._shards import ShardSums
from ranks import Rank
from test_ddp_faults import said
from test_hsdp import _MESHES, Net, Poisoned, batch, made, meshes, run, units  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EXACT = dict(codec="topk:ratio=1", down="fp32")  # all values, and error feedback that has nothing to do


def loss_of(model, rank, step):
    x, y = batch(rank, step)
    return (model(x).float() - y).square().mean()


def adam(rank, shape, codec="topk:ratio=0.05", kind="AdamW", **options):
    model = made(rank, shape)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=2e-3, weight_decay=0.02)
    hook = gw.compress(model, codec, optimizer=optimizer, **{"warmup": 3, "min_elements": 64, **options})
    return model, optimizer, hook


def train(rank, model, optimizer, steps, clip=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def own(hook):
    """What this rank has of its own."""
    part = next(iter(hook.state_dict()["ranks"].values()))
    return [values for kind in ("up", "down", "q", "s", "levels") for values in part[kind].values()]


def shared(model, optimizer):
    """What replicas have in common, of this rank's shards."""
    found = []
    with torch.no_grad():
        for p in model.parameters():
            state = optimizer.state.get(p, {})
            moments = [state[name].to_local() for name in ("exp_avg", "exp_avg_sq") if name in state]
            found += [one.clone() for one in (p.to_local(), *moments)]
    return found


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def replicas_agree(shape, model, optimizer):
    flat = torch.cat([values.flatten() for values in shared(model, optimizer)])
    group = _MESHES[shape].get_group(0)
    every = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(every, flat, group=group)
    return all(torch.equal(one, flat) for one in every)


# The rule.


def beside_ddp(rank, shape, how):
    """The largest difference between HSDP and DDP, of the way that weights have gone. A rank of DDP has all the data of
    a replica, so that both have the same gradients up to rounding."""
    shards = shape[1] if len(shape) > 1 else 1
    row = [Rank(rank.rank // shards * shards + shard, rank.world, None) for shard in range(shards)]
    torch.manual_seed(3)
    twin = DDP(Net(), process_group=_MESHES[shape].get_group(0), find_unused_parameters=True)
    wrap = {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)} if how == "bf16" else {}
    model = made(rank, shape, **wrap)
    for unit in units(model):
        if how == "sums":
            unit.set_force_sum_reduction_for_comms(True)
        elif how == "divisor":
            unit.set_gradient_divide_factor(float(shards))
    start = {name: p.detach().clone() for name, p in twin.module.named_parameters()}
    ends = []
    for one in (model, twin):
        decayed = [p for p in one.parameters() if p.dim() > 1]
        others = [p for p in one.parameters() if p.dim() < 2]
        groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, betas=(0.8, 0.99), eps=1e-6)]
        kind = torch.optim.Adam if how == "coupled" else torch.optim.AdamW
        optimizer = kind(groups, lr=2e-3, foreach=how != "sums", weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how == "scaler")
        gw.compress(one, optimizer=optimizer, warmup=0, scaler=scaler, **EXACT)
        replicas = shape[0]
        for step in range(16):
            optimizer.zero_grad(set_to_none=how != "zeros")
            if how == "divisor" and one is twin:  # divides by the shards only: gradients are sums over the replicas
                loss = replicas * sum(loss_of(one, each, step) for each in row) / shards
                scaler.scale(loss).backward()
            elif one is twin:
                parts = range(3) if how == "micro-batches" else [0]
                loss = sum(loss_of(one, each, 10 * step + part) for each in row for part in parts) / shards
                scaler.scale(loss).backward()
            elif how == "micro-batches":
                for part in range(3):
                    model.set_requires_gradient_sync(part != 1)
                    model.set_requires_all_reduce(part == 2)
                    loss_of(one, rank, 10 * step + part).backward()
            else:
                scaler.scale(loss_of(one, rank, step if how == "divisor" else 10 * step)).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        plain = one.module if one is twin else one
        ends.append({name: p.detach() for name, p in plain.named_parameters()})
    moved = max((ends[1][name] - start[name]).abs().max().item() for name in start)
    worst = max((ends[0][name].full_tensor() - ends[1][name]).abs().max().item() for name in start)
    return worst / moved, moved, replicas_agree(shape, model, torch.optim.AdamW(model.parameters()))


HOWS = ["plain", "coupled", "micro-batches", "scaler", "zeros", "sums", "divisor", "bf16"]


@pytest.mark.parametrize("shape, how", [((2, 2), how) for how in HOWS] + [((2, 3), "plain"), ((2,), "plain")])
def test_shards_follow_the_rule_of_ddp(meshes, shape, how):
    # Second moments are pooled in bfloat16: where a sum is rounded otherwise an element's step differs by 2^-9. With a
    # gradient that is reduced in bfloat16 so does the momentum.
    bound = 0.1 if how == "bf16" else 0.01
    for difference, moved, alike in run(meshes, shape, beside_ddp, how):
        assert difference < bound and moved > 0.01 and alike, (difference, moved)


def every_step(rank, shape, codec, options):
    model, optimizer, hook = adam(rank, shape, codec, **options)
    agreed = []
    for step in range(8):
        train(rank, model, optimizer, range(step, step + 1), clip=0.05)
        agreed.append(replicas_agree(shape, model, optimizer))
    return all(agreed), hook.stats()


@pytest.mark.parametrize(
    "shape, codec, options",
    [
        ((2, 3), "onebit", {}),
        ((3, 2), "casq:bits=2", dict(residual=torch.bfloat16)),
        ((3, 2), "topk:ratio=0.05", dict(method="gather")),
        ((4,), "qsgd:bits=2", dict(feedback=True, down="qsgd:bits=8")),
        ((1, 2), "onebit", {}),
        ((2, 3), "onebit", dict(gradients="qsgd:bits=8", weights="unigrid:bits=8")),
    ],
)
def test_replicas_hold_the_same_bits_after_every_step(meshes, shape, codec, options):
    answers = run(meshes, shape, every_step, codec, options)
    clips = {stats["optimizer"]["clip"] for _, stats in answers}
    assert len(clips) == 1 and clips.pop() == pytest.approx(0.05, rel=1e-3)
    for agreed, stats in answers:
        assert agreed and stats["optimizer"]["exchange"] == "momentum" and stats["optimizer"]["phase"] == "compressed"
        assert stats["optimizer"]["steps"] == stats["optimizer"]["pools"] == 8


def owes(rank, shape, codec):
    """The largest error of: mean of u + what was owed = what was applied + what is owed, of the largest u."""
    model, optimizer, hook = adam(rank, shape, codec, warmup=0)
    group, momentum = _MESHES[shape].get_group(0), hook._momentum
    worst = 0.0

    def debt():
        part = next(iter(hook.state_dict()["ranks"].values()))
        owed = {}
        for name, mine in zip(momentum.names, momentum.s):
            flat = torch.zeros(mine.numel(), dtype=torch.float64)
            if name in part["up"]:
                flat += part["up"][name].double() / group.size()
            for key, values in part["down"].items():
                if key.rpartition("@")[0] == name:
                    first = int(key.rpartition("@")[2])
                    flat[first : first + values.numel()] += values.double()
            dist.all_reduce(flat, group=group)
            owed[name] = flat.view(mine.shape)
        return owed

    train(rank, model, optimizer, range(1))
    for step in range(1, 12):  # with poolings after all of the first 8, and after two of the others
        before = debt()
        dens = [den.clone() for den in momentum._den]
        moments = [momentum._moment(i).clone() for i in range(len(dens))]
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        after = debt()
        for i, name in enumerate(momentum.names):
            p = momentum.parameters[i]
            if p.grad is None or not dens[i].numel():
                continue
            limit = 10 * (1 - 0.9 ** (momentum.counts[i][0] + 1))
            u = ((0.9 * moments[i] + 0.1 * momentum._own[i]) / dens[i]).double().clamp(-limit, limit)
            dist.all_reduce(u, group=group)
            u /= group.size()
            applied = (p.grad.to_local() / dens[i]).double()
            worst = max(worst, ((u + before[name] - applied - after[name]).abs().max() / u.abs().max()).item())
        optimizer.step()
    return worst, max(one.abs().max().item() for one in debt().values() if one.numel())


@pytest.mark.parametrize("codec", ["onebit", "topk:ratio=0.05"])
def test_what_is_not_sent_is_owed_in_units_of_the_update(meshes, codec):
    for worst, owed in run(meshes, (2, 3), owes, codec):
        assert worst < 1e-5 and owed > 0.01, (worst, owed)  # some roundings of float32


# Clipping.


def long_run(rank, shape, seed, combined):
    """The largest norm of a replica's clipped gradient. Rank 1 has the larger shards, and spikes of its own."""
    group = _MESHES[shape].get_group(1)
    limits = GradientLimits(3, torch.device("cpu"), 1.0, ShardSums(group) if combined else None)
    draw = torch.Generator().manual_seed(100 * seed + rank.rank)
    largest, ordinary = 0.0, []
    for step in range(300):
        typical = 5.0 if 100 <= step < 200 else 0.5
        spike = 50 if step % 37 == 5 and (rank.rank == 1 or step % 2) else 1
        values = [typical * (0.3 + 0.4 * rank.rank) * spike * torch.randn(64, generator=draw) / 8 for _ in range(3)]
        before = torch.stack([one.norm() for one in values]).square().sum().double()
        limits.apply([0, 1, 2], values, together=step == 0)
        limits.commit(step + 1)
        after = torch.stack([one.norm() for one in values]).square().sum().double()
        both = torch.stack([before, after])
        dist.all_reduce(both, group=group)
        largest = max(largest, both[1].sqrt().item())
        if step % 100 > 60 and step % 37 != 5 and typical > 1:
            ordinary.append(both[1].sqrt().item())
    return largest, min(ordinary)


def test_the_norm_of_a_whole_replica_stays_below_the_clip(meshes):
    for seed in (1, 2, 3):
        ours, rival = run(meshes, (1, 2), long_run, seed, True), run(meshes, (1, 2), long_run, seed, False)
        for largest, ordinary in ours:
            assert largest < 1 + 1e-6 and ordinary > 0.8, (seed, largest, ordinary)
        assert all(largest > 1.3 for largest, _ in rival), rival  # that clips the shards of each rank by themselves


def clips(rank, shape, loop, told):
    model, optimizer, hook = adam(rank, shape, clip=told)
    for step in range(5):
        optimizer.zero_grad()
        ((500 if step else 1e-3) * loss_of(model, rank, step)).backward()
        if loop is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop)
        optimizer.step()
    squares = hook._momentum.limits.levels.square().sum() + hook._momentum.limits._elsewhere
    return hook.stats()["optimizer"]["clip"], squares.item()


def test_the_clip_is_found_over_all_shards(meshes):
    """The first gradient is smaller than the clip, so a later step shows it."""
    for loop, told, expected in ((0.7, None, 0.7), (None, None, 0.0), (None, 0.5, 0.5)):
        answers = run(meshes, (2, 3), clips, loop, told)
        assert [clip for clip, _ in answers] == [pytest.approx(expected, rel=1e-4)] * 6
        for row in (answers[:3], answers[3:]):  # a replica knows one norm of its whole gradient
            assert [squares for _, squares in row] == [pytest.approx(row[0][1], rel=1e-9)] * 3


# What a loop does.


def skipped(rank, shape):
    torch.manual_seed(3)
    model = made(rank, shape, Poisoned())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    hook = gw.compress(model, "onebit", optimizer=optimizer, scaler=scaler, warmup=2, min_elements=64)
    log = []
    for step in range(9):
        optimizer.zero_grad()
        model.poison = step in (0, 2, 6) and rank.rank == 1
        before = shared(model, optimizer) + own(hook)
        before += [torch.tensor(counts) for counts in hook._momentum.counts]
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = shared(model, optimizer) + own(hook)
        after += [torch.tensor(counts) for counts in hook._momentum.counts]
        log.append(same(before, after))
    return log, hook.stats(), replicas_agree(shape, model, optimizer)


@pytest.mark.parametrize("shape", [(2, 3), (2,)])
def test_a_step_that_the_scaler_skips_changes_nothing(meshes, shape):
    for log, stats, agreed in run(meshes, shape, skipped):
        assert [step for step, unchanged in enumerate(log) if unchanged] == [0, 2, 6]
        assert stats["optimizer"]["steps"] == 6 and stats["skipped"] == 3 and agreed


def sometimes_used(rank, shape, to_none):
    """A parameter that FSDP leaves out of a pass: without a gradient it stays as it is, and with a gradient of zeros
    its momentum decays, as with torch's Adam."""
    model, optimizer, hook = adam(rank, shape, warmup=0)
    log = []
    for step in range(6):
        model.uses_spare = step not in (2, 4)
        with torch.no_grad():
            before = shared(nn.ParameterList([model.spare]), optimizer)
            optimizer.zero_grad(set_to_none=to_none)
            with torch.enable_grad():
                loss_of(model, rank, step).backward()
            optimizer.step()
            after = shared(nn.ParameterList([model.spare]), optimizer)
        log.append((torch.equal(before[0], after[0]), step and torch.allclose(after[1], 0.9 * before[1], rtol=1e-6)))
    steps = [int(optimizer.state[p]["step"]) for p in (model.spare, model.head.weight)]
    return log, steps, replicas_agree(shape, model, optimizer)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_that_is_not_always_used(meshes, to_none):
    for log, steps, agreed in run(meshes, (2, 2), sometimes_used, to_none):
        assert [step for step, (stayed, _) in enumerate(log) if stayed] == ([2, 4] if to_none else [])
        if not to_none:
            assert [step for step, (_, decayed) in enumerate(log) if decayed] == [2, 4]
        assert steps == [4 if to_none else 6, 6] and agreed


def misused(rank, shape):
    words = []
    model, optimizer, hook = adam(rank, shape, "onebit")
    train(rank, model, optimizer, range(2))
    words.append(said(optimizer.step))
    optimizer.zero_grad()
    loss_of(model, rank, 2).backward()
    words.append(said(lambda: loss_of(model, rank, 3).backward()))
    optimizer.zero_grad()
    loss_of(model, rank, 4).backward()  # and the loop goes on
    optimizer.step()
    model.uses_spare = True
    words.append(said(lambda: train(rank, model, optimizer, range(5, 6))))
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)
    words.append(said(optimizer.step))
    return words


def test_what_a_loop_must_not_do(meshes):
    for again, added, late, betas in run(meshes, (2, 2), misused):
        assert "UsageError: optimizer.step was called without a backward pass" in again
        assert "p.grad holds the averaged momentum" in added and "set_requires_all_reduce(False)" in added
        assert "UnsupportedError: parameter 'spare' has a gradient for the first time" in late
        assert "UsageError: beta1 of group 0" in betas


def given_back(rank, shape):
    model, optimizer, hook = adam(rank, shape, "onebit")
    train(rank, model, optimizer, range(5))
    phases = [hook.stats()["optimizer"]["phase"]]
    hook.set_codec("topk:ratio=0.1")
    train(rank, model, optimizer, range(5, 6))
    again = gw.compress(model, "onebit", optimizer=optimizer, warmup=0)  # the same optimizer once more
    replaced = "removed" in repr(hook)
    train(rank, model, optimizer, range(6, 8))
    phases.append(again.stats()["optimizer"]["phase"])
    steps = again.stats()["optimizer"]["steps"]
    again.remove()
    train(rank, model, optimizer, range(8, 9))  # with torch's own all-reduce and step
    plain = "step" not in vars(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gw.compress(model, "onebit", min_elements=64)  # and now nobody names it
        train(rank, model, optimizer, range(9, 11))
    told = sum("optimizer=optimizer" in str(one.message) for one in caught)
    return phases, replaced, steps, plain, told, replicas_agree(shape, model, optimizer)


def test_an_optimizer_is_given_back(meshes):
    expected = [(["compressed"] * 2, True, 8, True, int(rank == 0), True) for rank in range(4)]  # one rank warns
    assert run(meshes, (2, 2), given_back) == expected


def left_alone(rank, shape):
    model, optimizer, hook = adam(rank, shape, "optquant:bits=4")
    train(rank, model, optimizer, range(2))
    return hook.stats()["optimizer"], "step" in vars(optimizer), said(lambda: hook.set_codec("onebit"))


def test_codecs_without_feedback_exchange_gradients(meshes):
    for told, replaced, words in run(meshes, (2, 2), left_alone):
        assert told == {"exchange": "gradients"} and not replaced
        assert "UsageError" in words and "call compress again" in words


# Refusals.


def refused(rank, shape, how):
    if how == "offload":
        model = made(rank, shape, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    elif how == "fp16":
        model = made(rank, shape, mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float16))
    elif how in ("one dimension", "shards only"):
        mesh = _MESHES[shape]["shard"] if how == "one dimension" else _MESHES[shape]
        model = fsdp.fully_shard(Net(), mesh=mesh)
    else:
        model = made(rank, shape)
    parameters = list(model.parameters())
    codec = None if how == "shards only" else "onebit"
    optimizer = torch.optim.AdamW(parameters)
    if how == "sgd on one rank" and rank.rank == 3:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
    elif how == "named by one rank":
        optimizer = optimizer if rank.rank == 0 else None
    elif how == "rates":
        optimizer = torch.optim.AdamW(parameters, lr=1e-3 * (1 + (rank.rank == 3)))
    elif how == "moments":
        for p in parameters:
            p.grad = torch.full_like(p, 1.0 + rank.rank // 2)  # the same in a replica
        optimizer.step()
    elif how == "missing":
        optimizer = torch.optim.AdamW(parameters[1:])
    elif how == "foreign":
        optimizer = torch.optim.AdamW([*parameters, nn.Parameter(torch.zeros(3, 2))])
    elif how == "subclass":
        optimizer = type("Other", (torch.optim.AdamW,), {})(parameters)
    return said(lambda: gw.compress(model, codec, optimizer=optimizer))


ONE_DIMENSION = "optimizer is an option for DDP and HSDP models; this model uses FSDP2, whose reduce-scatter leaves"


@pytest.mark.parametrize(
    "how, words",
    [
        ("one dimension", [ONE_DIMENSION]),
        ("shards only", [ONE_DIMENSION]),
        ("offload", ["is offloaded to the CPU; with optimizer= it must be where"]),
        ("fp16", ["is reduced as float16; with optimizer= allowed are float32 and bfloat16"]),
        ("sgd on one rank", ["rank 3 cannot take part: optimizer is SGD", "UnsupportedError: optimizer is SGD"]),
        ("named by one rank", ["ranks disagree about optimizer"]),
        ("rates", ["ranks disagree about group 0 of the optimizer"]),
        ("moments", ["ranks disagree about the state of the optimizer for '"]),
        ("missing", ["' of the model is not one of the optimizer's"]),
        ("foreign", ["has a parameter of shape (3, 2) that is not reduced between ranks here"]),
        ("subclass", ["optimizer is Other, a subclass, whose step may differ"]),
    ],
)
def test_what_cannot_be_done_is_refused_on_all_ranks(meshes, how, words):
    shape = (2, 3) if how == "shards only" else (2, 2)
    for found in run(meshes, shape, refused, how):
        assert any(one in found for one in words), found


