# SPDX-License-Identifier: Apache-2.0
"""Which exchange a hook chooses and in which phase it is, who owns an optimizer, and what is refused by name."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks, eventually
from test_adam import adam, everything, train
from test_ddp import equal, network
from test_ddp_faults import said
from test_hooks import needs_fsdp, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradwire.torch as gw
from gradwire.torch import _optimizers


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
        ("foreign", ["UsageError: group 0 of the optimizer has a parameter of shape (3, 2) that is not reduced"] * 2),
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
        assert "UsageError: optimizer is an option for DDP and HSDP models; this model uses FSDP2, whose" in words


def is_watched(hook: gw.Hook) -> bool:
    return hook._watch in _optimizers.Watch._every


def warned(rank: Rank, codec: str, kind: str) -> Any:
    ddp = DDP(network(), process_group=rank.group)
    optimizer = getattr(torch.optim, kind)(ddp.parameters(), lr=1e-3)
    hook = gw.compress(ddp, codec)
    bystander = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bystander.step()
        train(rank, ddp, optimizer, range(3))
    left = is_watched(hook)
    again = gw.compress(ddp, "onebit")
    watched = is_watched(again)
    again.remove()
    words = [str(one.message) for one in caught]
    return words, [Path(one.filename).name for one in caught], left, watched, is_watched(again), hook.step


@pytest.mark.parametrize(
    "codec, kind, times",
    [
        ("onebit", "AdamW", 1), ("onebit", "Adam", 1), ("onebit", "SGD", 0), ("qsgd", "Adam", 0),
        ("optquant:bits=3", "AdamW", 1), ("optquant:bits=3", "SGD", 0),
    ],
)  # fmt: skip
def test_an_adam_that_nobody_has_named_is_told_once(ranks: Ranks, codec: str, kind: str, times: int) -> None:
    for rank, (caught, files, left, watched, after, steps) in enumerate(ranks.run(2, warned, codec, kind)):
        told = times if rank == 0 else 0
        assert len(caught) == told and all("optimizer=optimizer" in words for words in caught), caught
        assert files == ["test_adam.py"] * told  # where the optimizer's step was called
        assert (left, watched, after, steps) == (False, True, False, 3)


def collected_within_a_step(rank: Rank) -> int:
    """Hooks that watch, and that nobody needs any longer, are collected while torch calls what follows a step."""
    gc.collect()
    gc.disable()
    handle = register_optimizer_step_post_hook(lambda *_: gc.collect() and None)
    try:
        before, circle = len(_optimizers.Watch._every), []
        circle += [circle, *(gw.compress(DDP(network(), process_group=rank.group), "onebit") for _ in range(3))]
        assert len(_optimizers.Watch._every) == before + 3
        del circle
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        for _ in range(3):
            parameter.grad = torch.ones(2)
            optimizer.step()
        return len(_optimizers.Watch._every) - before
    finally:
        gc.enable()
        handle.remove()


def test_a_hook_may_be_collected_within_a_step_of_an_optimizer(ranks: Ranks) -> None:
    assert ranks.run(2, collected_within_a_step) == [0, 0]
