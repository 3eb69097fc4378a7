# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of lowrank: a resumed training is bit for bit the one that was never stopped, another number of ranks
keeps the residuals, and a state that does not belong is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Rank, RankError, Ranks
from test_lowrank import drawn, made, mean, residuals, results

import gradwire
import gradwire.torch as gw

RULES = "b=topk:ratio=0.1;2d=lowrank:rank=2,bits=8,alternate={};*=fp32"


def resumed(rank: Rank, way: str, saved_after: int, folder: str) -> list[bool]:
    """Trainings that were stopped and saved in four ways, beside one that was not."""
    ddp, hook = made(rank, RULES.format(way))
    for step in range(saved_after):
        results(ddp, drawn(rank, step))
    mine, every = hook.state_dict(), hook.state_dict(gather="all")
    dcp.save({"gradwire": mine}, checkpoint_id=folder, process_group=rank.group)
    shared: list[Any] = [every]
    torch.distributed.broadcast_object_list(shared, src=0, group=rank.group)
    wanted = [results(ddp, drawn(rank, step)) for step in range(saved_after, saved_after + 3)]
    found = []
    for state in (mine, shared[0], gw.read_checkpoint(folder)):
        other, again = made(rank, RULES.format(way))
        results(other, drawn(rank, 77))  # a hook that has a state of its own
        again.load_state_dict(state)
        got = [results(other, drawn(rank, step)) for step in range(saved_after, saved_after + 3)]
        found.append(all(torch.equal(a, b) for x, y in zip(got, wanted) for a, b in zip(x, y)))
        found.append(again.residual_hash() == hook.residual_hash())
    return found


@pytest.mark.parametrize("way", ["on", "off"])
@pytest.mark.parametrize("saved_after", [2, 3])
def test_a_resumed_training_has_the_same_bits(ranks: Ranks, way: str, saved_after: int, tmp_path: Path) -> None:
    for outcome in ranks.run(3, resumed, way, saved_after, str(tmp_path)):
        assert all(outcome), outcome


def saved(rank: Rank, gather: str) -> Any:
    ddp, hook = made(rank, RULES.format("on"))
    for step in range(3):
        results(ddp, drawn(rank, step))
    kept = {name: mean(rank, values) for name, values in residuals(hook).items()}
    return hook.state_dict(gather=gather), kept, hook.state_dict()["lowrank"]


def loaded(rank: Rank, state: Any) -> Any:
    ddp, hook = made(rank, RULES.format("on"))
    hook.load_state_dict(state)
    kept = {name: mean(rank, values) for name, values in residuals(hook).items()}
    factors = hook.state_dict()["lowrank"]
    finite = all(bool(one.isfinite().all()) for one in results(ddp, drawn(rank, 3)))
    return kept, factors, hook.step, finite


@pytest.mark.parametrize("gather", ["all", "merged"])
@pytest.mark.parametrize("world", [2, 4])
def test_another_number_of_ranks_keeps_the_residuals(ranks: Ranks, gather: str, world: int) -> None:
    state, before, factors = ranks.run(3, saved, gather)[0]
    for after, others, step, finite in ranks.run(world, loaded, state):
        assert finite and step == 4
        for name in ("a", "conv"):
            assert torch.allclose(before[name], after[name], rtol=1e-5, atol=1e-6)
            for kind in ("p", "q"):
                assert torch.equal(factors[kind][name], others[kind][name])


def refused(rank: Rank, what: str) -> None:
    ddp, hook = made(rank, "lowrank:rank=2")
    results(ddp, drawn(rank, 0))
    state = hook.state_dict()
    codec = "lowrank:rank=2"
    if what == "rank":
        codec = "lowrank:rank=3"
    elif what == "missing":
        del state["lowrank"]["q"]["conv"]
    elif what == "nan":
        state["lowrank"]["q"]["a"][1, 2] = float("nan")
    elif what == "differs" and rank.rank == 1:
        state["lowrank"]["q"]["a"] = -state["lowrank"]["q"]["a"]
    elif what == "foreign":
        state["lowrank"]["q"]["zip"] = torch.ones(2, 2)
    elif what == "text":
        state["lowrank"] = "q"
    elif what == "residual":
        del state["ranks"][str(rank.rank)]["up"]["b"]
    elif what == "size":
        state["ranks"][str(rank.rank)]["up"]["b"] = torch.zeros(7)
    elif what == "topk":
        state = made(rank, "topk:ratio=0.1")[1].state_dict()
    other, again = made(rank, codec)
    before = again.residual_hash()
    try:
        again.load_state_dict(state)
    finally:
        assert again.residual_hash() == before and again.step == 0, "a state that is refused changes nothing"


@pytest.mark.parametrize(
    "what, words",
    [
        ("rank", "q of parameter 'a' has the shape (2, 40)"),
        ("missing", "q of parameter 'conv' is not a dense tensor"),
        ("nan", "not finite"),
        ("differs", "ranks disagree about factors"),
        ("foreign", "factors of parameter 'zip'"),
        ("text", "'lowrank' is not a dict"),
        ("residual", "no up residual of parameter 'b'"),
        ("size", "parameter 'b' has 960 elements"),
        ("topk", "saved by a hook without lowrank"),
    ],
)
def test_a_state_that_does_not_belong_is_refused_on_all_ranks(ranks: Ranks, what: str, words: str) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(2, refused, what)
    assert len(error.value.errors) == 2
    for kind, told in error.value.errors.values():
        assert words in told and kind in ("UsageError", "MismatchError"), (kind, told)


def plain(rank: Rank) -> bool:
    """The residuals of matrices are in the units and the order of any other codec's."""
    _, hook = made(rank, "lowrank:rank=2")
    ddp, other = made(rank, "topk:ratio=0.1")
    results(ddp, drawn(rank, 0))
    with pytest.raises(gradwire.UsageError, match="without lowrank"):
        hook.load_state_dict(other.state_dict())
    ddp, hook = made(rank, "lowrank:rank=2")
    results(ddp, drawn(rank, 0))
    ddp, other = made(rank, "topk:ratio=0.1,bits=32")
    state = hook.state_dict()
    state["ranks"][str(rank.rank)]["down"] = other.state_dict()["ranks"][str(rank.rank)]["down"]
    other.load_state_dict(state)
    return torch.equal(residuals(other)["a"], state["ranks"][str(rank.rank)]["up"]["a"])


def test_residuals_go_over_to_another_codec(ranks: Ranks) -> None:
    assert all(ranks.run(2, plain))
