# SPDX-License-Identifier: Apache-2.0
"""States that are wrong in ways nobody thought of: hundreds of mutations of a valid state, from a seed, on one rank or
on all of them. Whatever a state holds, `load_state_dict` either takes it or raises an error of the package, on all
ranks alike; what it refuses changes nothing, and the hook works as before.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from test_ddp import equal, prepared, train, weights
from test_hooks import fsdp_step, needs_fsdp, shard

import gradwire
import gradwire.torch as gw

MUTATIONS = 150  # of each kind of hook, and the same number on one rank only


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a state."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            found += places(inner, (*path, i))
    return found


def wrong_tensor(draw: random.Random, tensor: torch.Tensor) -> Any:
    some = tensor.clone()
    kind = draw.randrange(14)
    if kind == 0 and some.is_floating_point() and some.numel():
        some.view(-1)[draw.randrange(some.numel())] = draw.choice([float("nan"), float("inf"), -float("inf")])
        return some
    if kind == 1:
        return some.reshape(-1)[: draw.randrange(some.numel() + 1)]
    if kind == 2:
        return torch.cat([some.reshape(-1), some.reshape(-1)])
    if kind == 3:
        return some.to(draw.choice([torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64]))
    if kind == 4:
        return torch.zeros(tuple(some.shape), device="meta")
    if kind == 5:
        return some.float().to_sparse()
    if kind == 6:
        return some.tolist()[:5]
    if kind == 7:
        return some.reshape(1, -1)
    if kind == 8:
        return torch.empty(0)
    if kind == 9:
        return torch.nn.Parameter(some.float())
    if kind == 10:
        return some.float().expand(2, *some.shape)[0] if some.dim() else some
    if kind == 11 and some.dtype == torch.uint8 and some.numel():
        some[draw.randrange(some.numel())] ^= draw.randrange(1, 256)
        return some
    if kind == 12:
        return torch.tensor(0.0)
    return some.numpy()


def wrong_value(draw: random.Random, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and draw.random() < 0.8:
        return wrong_tensor(draw, value)
    return draw.choice(
        [None, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.5, float("nan"), True, "", "x", "0", "\x1b[2J", b"bytes", [],
         {}, [value], {"x": value}, (value,), object, torch.zeros(3), {1: 2}, [[[]]], "é" * 3]
    )  # fmt: skip


def mutated(draw: random.Random, state: Any) -> Any:
    """A copy of the state with one to three things wrong."""
    state = copy.deepcopy(state)
    for _ in range(draw.randrange(1, 4)):
        path = draw.choice(places(state))
        if not path:
            if draw.random() < 0.2:
                return wrong_value(draw, state)
            continue
        parent = state
        for step in path[:-1]:
            parent = parent[step]
        value, kind = parent[path[-1]], draw.randrange(4)
        if kind == 0:
            del parent[path[-1]]
        elif kind == 1 and isinstance(parent, dict):
            key = draw.choice(["x", "", 0, None, "2.weight@", "@0", f"{path[-1]}@7", "0/9", "\n", 3.5])
            parent[key] = value
        elif kind == 2 and isinstance(parent, dict):
            parent[draw.choice(["y", 1, f"{path[-1]} "])] = parent.pop(path[-1])
        else:
            parent[path[-1]] = wrong_value(draw, value)
    return state


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal in every bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def loaded(hook: gw.Hook, state: Any) -> str:
    """The name of the error, or "" if the state was taken."""
    try:
        hook.load_state_dict(state)
    except gradwire.Error as error:
        assert str(error), "an error says what is wrong"
        return type(error).__name__
    return ""


def tried(rank: Rank, kind: str, seed: int, everywhere: bool) -> Any:
    if kind == "ddp":
        ddp, optimizer, hook = prepared(rank, "0.weight=optquant:bits=3;*=qsgd:bits=2", feedback=True)
        train(rank, ddp, optimizer, range(3))
    else:
        model = shard(rank)
        hook = gw.compress(model, "optquant:bits=3", feedback=True, min_elements=0)
        for step in range(3):
            fsdp_step(rank, model, step)
    valid = hook.state_dict()
    outcomes = []
    for mutation in range(MUTATIONS):
        draw = random.Random(f"{seed} {mutation}")
        wrong = mutated(draw, valid)
        if not everywhere and rank.rank != mutation % rank.world:
            wrong = valid
        outcome = loaded(hook, wrong)
        if outcome:
            assert same(hook.state_dict(), valid), f"mutation {mutation} was refused ({outcome}) and changed something"
        else:
            hook.load_state_dict(valid)
        outcomes.append(outcome)
    assert same(hook.state_dict(), valid)
    if kind == "ddp":
        train(rank, ddp, optimizer, range(3, 5))
        return outcomes, hook.step, weights(ddp)
    for step in range(3, 5):
        fsdp_step(rank, model, step)
    return outcomes, hook.step, []


@needs_fsdp
@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_whatever_a_state_holds_all_ranks_take_it_or_refuse_it(ranks: Ranks, kind: str, everywhere: bool) -> None:
    first, second = ranks.run(2, tried, kind, 7, everywhere)
    for mutation, (here, there) in enumerate(zip(first[0], second[0])):
        assert bool(here) == bool(there), f"mutation {mutation}: {here or 'taken'} on rank 0, {there or 'taken'} on 1"
        assert {here, there} <= {"", "UsageError", "MismatchError", "FrameError"}
    assert sum(map(bool, first[0])) > MUTATIONS / 3 and not all(first[0])
    assert first[1] == second[1] == 5 and equal(first[2], second[2])
