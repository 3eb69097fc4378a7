# SPDX-License-Identifier: Apache-2.0
"""The numbers of a hook: what belongs to the last step and what to all steps is told apart, both kinds of hook have the
same, and a flat dict of floats holds them all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from test_ddp import prepared, train
from test_hooks import fsdp_step, needs_fsdp, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.torch as gw

COST = {"bytes", "fp32_bytes", "bytes_saved", "seconds"}


def checked(last: dict[str, Any], every: dict[str, Any], exposed: bool = False) -> None:
    for cost in (last, every):
        assert cost.keys() == COST
        assert cost["seconds"].keys() == {"encode", "wait", "decode"} | ({"exposed"} if exposed else set())
        assert cost["bytes_saved"] == cost["fp32_bytes"] - cost["bytes"] and min(cost["seconds"].values()) >= 0
    for kind in ("encode", "wait", "decode"):
        assert last["seconds"][kind] <= every["seconds"][kind]


def counted(rank: Rank) -> Any:
    ddp = DDP(nn.Linear(512, 512, bias=False), process_group=rank.group)
    hook = gw.compress(ddp, "qsgd:bits=4")
    found = [hook.stats()]
    for _ in range(3):
        ddp(torch.randn(4, 512)).square().mean().backward()
        found.append(hook.stats())
    return found


def test_the_last_step_and_all_steps_are_told_apart(ranks: Ranks) -> None:
    for found in ranks.run(2, counted):
        for steps, stats in enumerate(found):
            last, every = stats["last_step"], stats["all_steps"]
            checked(last, every, exposed=True)
            assert (last["seconds"]["exposed"] > 0) == (steps > 0) and stats["judged"] == {}
            assert every["fp32_bytes"] == steps * 4 * 512 * 512 and every["bytes"] == steps * last["bytes"]
            assert last["fp32_bytes"] == (4 * 512 * 512 if steps else 0) and stats["steps"] == steps
            if steps:
                assert stats["ratio"] == pytest.approx(last["fp32_bytes"] / last["bytes"])
                assert 0 < last["seconds"]["encode"]
        assert found[3]["last_step"]["seconds"]["encode"] < found[3]["all_steps"]["seconds"]["encode"]


def flat(rank: Rank) -> Any:
    ddp, optimizer, hook = prepared(rank, "qsgd:bits=2", measure_every=1)
    train(rank, ddp, optimizer, range(2))
    return hook.flat_stats(), hook.flat_stats(""), hook.stats()


def test_flat_statistics_are_floats_by_name(ranks: Ranks) -> None:
    for numbers, bare, stats in ranks.run(2, flat):
        assert all(type(value) is float for value in numbers.values())
        assert {f"gradwire/{name}" for name in bare} == numbers.keys()
        assert numbers["gradwire/all_steps/bytes"] == stats["all_steps"]["bytes"] > 0
        assert numbers["gradwire/all_steps/bytes_saved"] == stats["all_steps"]["bytes_saved"] > 0
        assert numbers["gradwire/last_step/seconds/encode"] == stats["last_step"]["seconds"]["encode"]
        assert numbers["gradwire/error/2.weight"] == stats["parameters"]["2.weight"]["error"] > 0
        assert numbers["gradwire/steps"] == 2 and numbers["gradwire/exempt"] == 0
        assert not any("codec" in name or "parameters" in name for name in numbers)


def of_shards(rank: Rank) -> Any:
    model = shard(rank)
    hook = gw.compress(model, "qsgd:bits=4", weights="unigrid:bits=8", min_elements=0)
    for step in range(3):
        fsdp_step(rank, model, step)
    return hook.stats(), hook.flat_stats()


@needs_fsdp
def test_the_hook_of_fsdp_has_the_same_numbers(ranks: Ranks) -> None:
    for stats, numbers in ranks.run(2, of_shards):
        for name in ("gradients", "weights"):
            one = stats[name]
            checked(one["last_step"], one["all_steps"])
            assert one["ratio"] == pytest.approx(one["last_step"]["fp32_bytes"] / one["last_step"]["bytes"])
            assert one["all_steps"]["bytes"] >= 2 * one["last_step"]["bytes"] > 0
            assert numbers[f"gradwire/{name}/all_steps/bytes"] == one["all_steps"]["bytes"]
        checked(stats["last_step"], stats["all_steps"])
        together = stats["gradients"]["all_steps"]["bytes"] + stats["weights"]["all_steps"]["bytes"]
        assert numbers["gradwire/all_steps/bytes"] == stats["all_steps"]["bytes"] == together
        assert all(type(value) is float for value in numbers.values())
