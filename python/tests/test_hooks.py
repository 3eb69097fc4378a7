# SPDX-License-Identifier: Apache-2.0
"""A hook is a good guest in a training script: `compress` recognises the model, refuses what makes no sense by name and
on all ranks, and a hook can be printed, replaced and removed; a model can be copied; what a hook has taken is given
back when it is gone.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from ranks import LARGEST, Rank, Ranks, eventually
from test_ddp import batch, equal, network, prepared, train, weights
from test_ddp_faults import said
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.torch as gw
from gradwire.torch._transport import Transport


def shard(rank: Rank) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    mesh = DeviceMesh.from_group(rank.group, "cpu")
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


needs_fsdp = pytest.mark.skipif(
    not hasattr(getattr(torch.distributed.fsdp, "FSDPModule", None), "set_custom_reduce_scatter"),
    reason="this torch has no set_custom_reduce_scatter",
)


# Which model it is.


def wrapped(rank: Rank, kind: str) -> Any:
    inner = DDP(network(), process_group=rank.group) if kind == "ddp" else shard(rank)
    outer = nn.ModuleDict({"trainer": nn.ModuleDict({"model": inner})})
    hook = gw.compress(outer, "qsgd:bits=8")
    x, y = batch(rank, 0)
    nn.functional.cross_entropy(inner(x), y).backward()
    return type(hook).__name__, isinstance(hook, gw.Hook), hook.step, repr(hook)


@needs_fsdp
@pytest.mark.parametrize("kind, name", [("ddp", "DdpHook"), ("fsdp", "FsdpHook")])
def test_a_module_that_contains_the_model_is_enough_and_hooks_can_be_printed(
    ranks: Ranks, kind: str, name: str
) -> None:
    for found, is_hook, step, text in ranks.run(2, wrapped, kind):
        assert found == name and is_hook and step == 1
        assert text.startswith(f"<{name} '") and "qsgd:bits=8" in text and "on 2 ranks, at step 1" in text


def unsuitable(rank: Rank) -> list[str]:
    ddp = DDP(network(), process_group=rank.group)
    taken = DDP(network(), process_group=rank.group)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    taken.register_comm_hook(None, fp16_compress_hook)
    several = nn.ModuleList([ddp, DDP(network(), process_group=rank.group)])
    return [said(lambda: gw.compress(model, "qsgd:bits=4")) for model in (network(), 4, several, taken)]


def test_other_models_are_refused_with_what_was_found(ranks: Ranks) -> None:
    for plain, number, several, taken in ranks.run(2, unsuitable):
        assert "UsageError: model is a Sequential that is not distributed" in plain
        assert "UsageError: model is of type int" in number
        assert "contains 2 DistributedDataParallel modules ('0', '1')" in several
        assert "has the communication hook 'fp16_compress_hook' already" in taken


# Options.

BAD = [
    ("ddp", dict(guard=-1.0), "guard is -1.0; allowed is a positive number"),
    ("ddp", dict(guard=float("nan")), "guard is nan; allowed is a positive number"),
    ("ddp", dict(guard="0.5"), "guard is '0.5'; allowed is a positive number"),
    ("ddp", dict(timeout=0), "timeout is 0; allowed is a positive number"),
    ("ddp", dict(timeout=timedelta(seconds=-3)), "timeout is -3.0; allowed is a positive number"),
    ("ddp", dict(threads=0), "threads is 0; allowed is an integer from 1 to 1024"),
    ("ddp", dict(measure_every=-2), "measure_every is -2; it is a number of steps"),
    ("ddp", dict(warmup=1.5), "warmup is 1.5; it is a number of steps"),
    ("ddp", dict(seed=-1), "seed is -1"),
    ("ddp", dict(feedback="off"), "feedback is 'off'; allowed are True, False and None"),
    ("ddp", dict(owner_feedback=0), "owner_feedback is 0; allowed are True, False and None"),
    ("ddp", dict(scaler=128.0), "scaler is of type float; allowed is a torch.amp.GradScaler"),
    ("fsdp", dict(feedback="yes"), "feedback is 'yes'; allowed are True, False and None"),
    ("ddp", dict(min_elements=-1), "min_elements is -1"),
    ("ddp", dict(weights="unigrid:bits=8"), "weights is an option for FSDP2 and HSDP models; this model uses DDP"),
    ("ddp", dict(codec=None), "codec is of type NoneType"),
    (
        "ddp",
        dict(codec="haed.*=fp32;*=qsgd"),
        "the rule 'haed.*=fp32' matches no parameter of this model; they are '0.weight', '0.bias'",
    ),
    ("ddp", dict(down="5.weight=fp32;*=qsgd"), "the rule '5.weight=fp32' matches no parameter"),
    ("fsdp", dict(threads="two"), "threads is 'two'; allowed is an integer from 1 to 1024"),
    (
        "fsdp",
        dict(codec="1=fp32;*=qsgd"),
        "the rule '1=fp32' matches no sharded parameter of this model; they are '2.weight', '2.bias', ",
    ),
]  # fmt: skip
DDP_ONLY = dict(down="qsgd", method="gather", owner_feedback=False, warmup=3, measure_every=5, guard=0.5, timeout=5)
for _name, _value in DDP_ONLY.items():
    _also = "" if _name in ("measure_every", "guard") else " and HSDP"
    BAD.append(("fsdp", {_name: _value}, f"{_name} is an option for DDP{_also} models; this model uses FSDP2"))


def refused(rank: Rank, kind: str, options: dict[str, Any], on_one: bool) -> str:
    model = DDP(network(), process_group=rank.group) if kind == "ddp" else shard(rank)
    options = {"codec": "qsgd:bits=4"} if on_one and rank.rank == 0 else {"codec": "qsgd:bits=4", **options}
    words = said(lambda: gw.compress(model, **options))
    gw.compress(model, "qsgd:bits=4")  # and the process group goes on
    return words


@needs_fsdp
@pytest.mark.parametrize("kind, options, words", BAD, ids=[f"{kind} {next(iter(options))}" for kind, options, _ in BAD])
def test_options_that_make_no_sense_are_refused_by_name(
    ranks: Ranks, kind: str, options: dict[str, Any], words: str
) -> None:
    for got in ranks.run(2, refused, kind, options, False):
        assert words in got and "UsageError" in got, got


@pytest.mark.parametrize("kind, options, words", BAD[:1] + BAD[3:4] + BAD[5:6])
def test_an_option_that_one_rank_has_wrong_is_an_error_on_all(
    ranks: Ranks, kind: str, options: dict[str, Any], words: str
) -> None:
    right, wrong = ranks.run(2, refused, kind, options, True)
    assert f"MismatchError: rank 1 cannot take part: {words}" in right and f"UsageError: {words}" in wrong


def set_later(rank: Rank) -> Any:
    hook = gw.compress(DDP(network(), process_group=rank.group), "qsgd:bits=4")
    hook.set_rate(0), hook.set_loss_scale(1024), hook.set_loss_scale(None)
    return [said(lambda: hook.set_rate(rate)) for rate in (-1, float("nan"), "0.1")] + [
        said(lambda: hook.set_loss_scale(scale)) for scale in (0, float("inf"), -2)
    ]


def test_numbers_that_are_set_later_are_checked_too(ranks: Ranks) -> None:
    words = ranks.run(1, set_later)[0]
    assert all(one.startswith("UsageError: rate is ") for one in words[:3]), words
    assert all(one.startswith("UsageError: scale is ") for one in words[3:]), words


def objects(rank: Rank) -> Any:
    """A codec and rules as strings and as objects."""
    results = []
    for codec in (
        "qsgd:bits=4",
        gradwire.Codec("qsgd:bits=4"),
        "2.weight=onebit;*=fp16",
        gradwire.Rules("2.weight=onebit;*=fp16"),
        "*=fp16",
        gradwire.Rules("fp16"),
    ):
        ddp = DDP(network(), process_group=rank.group)
        hook = gw.compress(ddp, codec)
        results.append({name: one["codec"].partition(":")[0] for name, one in hook.stats()["parameters"].items()})
    return results


def test_a_codec_or_rules_as_strings_and_as_objects(ranks: Ranks) -> None:
    a, b, c, d, e, f = ranks.run(1, objects)[0]
    assert a == b and a["2.weight"] == "qsgd" and a["2.bias"] == "fp32"
    assert c == d and c["2.weight"] == "onebit" and c["2.bias"] == "fp16"
    assert e == f and set(e.values()) == {"fp16"}


# Numbers.


def measured(rank: Rank) -> Any:
    """Alone, and without a way back: what comes out of the hook is what its messages decode to."""
    ddp = DDP(nn.Linear(64, 64, bias=False), process_group=rank.group)
    x = batch(rank, 0)[0]
    ddp(x).square().mean().backward()
    exact = ddp.module.weight.grad.double().clone()
    hook = gw.compress(ddp, "topk:ratio=0.05", method="gather", feedback=False, measure_every=1)
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    error = (exact - ddp.module.weight.grad.double()).square().sum() / exact.square().sum()
    return error.item(), hook.stats()["parameters"]["weight"]["error"]


def test_the_error_is_squared_and_relative(ranks: Ranks) -> None:
    expected, found = ranks.run(1, measured)[0]
    assert 0.1 < expected < 1 and found == pytest.approx(expected, rel=1e-4)


def logged(rank: Rank) -> Any:
    class Writer(dict):  # type: ignore[type-arg]
        def add_scalar(self, name: str, value: float, step: int) -> None:
            self[name] = (value, step)

    model = shard(rank)
    hook = gw.compress(model, "qsgd:bits=4", weights="unigrid:bits=8", min_elements=0)
    fsdp_step(rank, model, 0)
    hook.log(writer := Writer(), prefix="sent")
    return dict(writer), hook.stats()


@needs_fsdp
def test_both_kinds_of_hook_write_their_numbers_to_a_writer(ranks: Ranks) -> None:
    for written, stats in ranks.run(2, logged):
        for name in ("gradients", "weights"):
            assert written[f"sent/{name}/ratio"] == (stats[name]["ratio"], 1) and 3 < stats[name]["ratio"] < 8
        assert written["sent/all_steps/seconds/encode"][0] > 0 and all(name.startswith("sent/") for name in written)


def ratio(rank: Rank) -> Any:
    ddp = DDP(nn.Linear(512, 512, bias=False), process_group=rank.group)
    hook = gw.compress(ddp, "qsgd:bits=4")
    ddp(torch.randn(4, 512)).square().mean().backward()
    return hook.stats()


def test_the_ratio_is_fp32_bytes_over_bytes_sent(ranks: Ranks) -> None:
    for stats in ranks.run(4, ratio):
        assert stats["ratio"] == pytest.approx(2 * 3 / 4 * 4 * 512 * 512 / stats["last_step"]["bytes"])
        assert 7 < stats["ratio"] < 8


# Removing and replacing.


def removed(rank: Rank) -> Any:
    plain, plain_optimizer, _ = prepared(rank, None)
    ddp, optimizer, first = prepared(rank, "onebit", scaler=torch.amp.GradScaler("cpu"))
    first.remove()
    train(rank, ddp, optimizer, range(3))
    train(rank, plain, plain_optimizer, range(3))
    same = equal(weights(ddp), weights(plain)) and first.step == 0 and "removed" in repr(first)
    second = gw.compress(ddp, "onebit")
    third = gw.compress(ddp, "qsgd:bits=2")
    train(rank, ddp, optimizer, range(3, 6))
    replaced = (second.step, third.step) == (0, 3) and "removed" in repr(second) and "removed" not in repr(third)
    third.state_dict(), third.stats()
    third.remove(), third.remove()
    train(rank, ddp, optimizer, range(6, 7))
    return same, replaced, third.step, len(ddp._forward_pre_hooks), third.stats()["steps"]


def test_a_hook_can_be_removed_and_replaced(ranks: Ranks) -> None:
    assert ranks.run(2, removed) == [(True, True, 3, 0, 3)] * 2


def fsdp_step(rank: Rank, model: nn.Module, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    x, y = batch(rank, step)
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad.to_local().clone() for p in model.parameters()]


def removed_fsdp(rank: Rank) -> Any:
    model, plain = shard(rank), shard(rank)
    hook = gw.compress(model, "qsgd:bits=2", weights="unigrid:bits=4", min_elements=0)
    other = not equal(fsdp_step(rank, model, 0), fsdp_step(rank, plain, 0))
    again = gw.compress(model, "qsgd:bits=4", min_elements=0)
    fsdp_step(rank, model, 1)
    steps = hook.step, again.step
    again.remove(), again.remove()
    same = equal(fsdp_step(rank, model, 2), fsdp_step(rank, plain, 2))
    return other, steps, same, "removed" in repr(hook) and "removed" in repr(again)


@needs_fsdp
def test_a_hook_of_fsdp_can_be_removed_and_replaced(ranks: Ranks) -> None:
    assert ranks.run(2, removed_fsdp) == [(True, (1, 1), True, True)] * 2


# Copies.


def copied(rank: Rank) -> Any:
    """torch copies only models on the default process group."""
    ddp = DDP(network())
    scaler = torch.amp.GradScaler("cpu")
    hook = gw.compress(ddp, "onebit", scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(rank, ddp, optimizer, range(1))
    average = torch.optim.swa_utils.AveragedModel(ddp)
    average.update_parameters(ddp)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    results = [equal(weights(average), weights(ddp))]
    for other in (copy.deepcopy(ddp), loaded):
        other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        results.append(equal(weights(other), weights(ddp)))
        train(rank, other, other_optimizer, range(1, 2))  # uncompressed
        mine = gw.compress(other, "qsgd:bits=4")
        train(rank, other, other_optimizer, range(2, 3))
        results.append(mine.step == 1 and hook.step == 1)
    train(rank, ddp, optimizer, range(1, 2))
    return all(results) and hook.step == 2


def test_a_compressed_model_can_be_copied_averaged_and_pickled(ranks: Ranks) -> None:
    assert ranks.run(LARGEST, copied) == [True] * LARGEST


# What is given back.


def ours() -> int:
    return sum(thread.name.startswith("gradwire ") for thread in threading.enumerate())


def many_hooks(rank: Rank) -> Any:
    def one(**options: Any) -> None:
        ddp, optimizer, hook = prepared(rank, "qsgd:bits=4", **options)
        train(rank, ddp, optimizer, range(1))

    def freed(threads: int, files: int) -> bool:
        gc.collect()
        return ours() <= threads and len(os.listdir("/proc/self/fd")) <= files

    def are_left() -> bool:
        gc.collect()
        return any(transport.group is rank.group for transport in Transport._shared)

    rank.let_go()
    assert eventually(lambda: not are_left()), "earlier tests have left hooks on this group"
    one()
    before = ours(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one(timeout=30.0)
    return eventually(lambda: freed(*before)), before, ours()


def test_threads_and_connections_end_with_the_last_hook_that_uses_them(ranks: Ranks) -> None:
    for given_back, before, after in ranks.run(2, many_hooks):
        assert given_back, (before, after)


def shared(rank: Rank) -> Any:
    rank.let_go()
    first, optimizer, hook = prepared(rank, "qsgd:bits=4")
    second, other_optimizer, other = prepared(rank, "onebit")
    same = hook._transport is other._transport
    hook.remove()
    train(rank, second, other_optimizer, range(2))  # the transport is still there
    if rank.rank == 0:  # as if garbage were collected earlier on one rank: it has nothing to share any more
        other._transport.close()
    third, third_optimizer, last = prepared(rank, "qsgd:bits=4")
    train(rank, third, third_optimizer, range(2))
    return same, last._transport is not other._transport, last.step


def test_hooks_share_a_transport_only_where_all_ranks_have_it(ranks: Ranks) -> None:
    assert ranks.run(2, shared) == [(True, True, 2)] * 2


def destroyed(rank: Rank) -> Any:
    """As if the user had destroyed the process group of a hook: an error, and not a backward pass that never ends."""
    ddp, optimizer, hook = prepared(rank, "qsgd:bits=4", timeout=60.0)
    hook._transport.close()
    return said(lambda: train(rank, ddp, optimizer, range(1)))


def test_a_hook_whose_process_group_was_destroyed_says_so(ranks: Ranks) -> None:
    for words in ranks.run(2, destroyed):
        assert "EngineError: the process group of this hook was destroyed" in words, words
