# SPDX-License-Identifier: Apache-2.0
"""The state of a hook survives: bit for bit on the same number of ranks, with its residuals redistributed on another,
through torch.save and through torch.distributed.checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, RankError, Ranks
from test_ddp import equal, prepared, train, weights

import gradwire
import gradwire.torch as gw

CODECS = ["qsgd:bits=2"] + [info["example"] for info in gradwire.codecs() if info["learns"] or info["feedback"]]


def whole_run(rank: Rank, codec: str, steps: int) -> Any:
    ddp, optimizer, hook = prepared(rank, codec, feedback=True)
    losses = train(rank, ddp, optimizer, range(steps))
    return weights(ddp), hook.residual_hash(), losses


def first_half(rank: Rank, codec: str, steps: int, folder: str, gather: str | None) -> None:
    ddp, optimizer, hook = prepared(rank, codec, feedback=True)
    train(rank, ddp, optimizer, range(steps))
    state = {
        "model": ddp.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "gradwire": hook.state_dict(gather=gather),
    }
    if gather is None or rank.rank == 0:
        torch.save(state, Path(folder) / f"rank{rank.rank}.pt")


def second_half(rank: Rank, codec: str, steps: range, folder: str, files: int) -> Any:
    ddp, optimizer, hook = prepared(rank, codec, feedback=True)
    states = [torch.load(Path(folder) / f"rank{r}.pt", weights_only=True) for r in range(files)]
    own = states[rank.rank] if files > rank.rank else states[0]
    ddp.module.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    hook.load_state_dict(own["gradwire"] if files == rank.world else [state["gradwire"] for state in states])
    assert hook.step == steps.start
    losses = train(rank, ddp, optimizer, steps)
    return weights(ddp), hook.residual_hash(), losses


@pytest.mark.parametrize("codec", CODECS)
def test_a_resumed_run_is_the_run_that_was_never_stopped(ranks: Ranks, tmp_path: Path, codec: str) -> None:
    whole = ranks.run(3, whole_run, codec, 8)
    ranks.run(3, first_half, codec, 4, str(tmp_path), None)
    resumed = ranks.run(3, second_half, codec, range(4, 8), str(tmp_path), 3)
    for a, b in zip(whole, resumed):
        assert equal(a[0], b[0]) and a[1] == b[1] and a[2][4:] == b[2]


def total_residual(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """In units of the mean: (1/W) sum of the workers' residuals + the owners'."""
    total: dict[str, torch.Tensor] = {}
    for part in state["ranks"].values():
        for name, values in part["up"].items():
            total[name] = total.get(name, torch.zeros(values.numel(), dtype=torch.float64)) + values.double() / state[
                "world"
            ]
    for part in state["ranks"].values():
        for key, values in part["down"].items():
            name, _, first = key.rpartition("@")
            total[name][int(first) : int(first) + values.numel()] += values.double()
    return total


def reloaded(rank: Rank, state: Any) -> Any:
    ddp, _, hook = prepared(rank, "qsgd:bits=2", feedback=True)
    hook.load_state_dict(state)
    return hook.state_dict(gather="all")


def trained_state(rank: Rank, gather: str) -> Any:
    ddp, optimizer, hook = prepared(rank, "qsgd:bits=2", feedback=True)
    train(rank, ddp, optimizer, range(5))
    return hook.state_dict(gather=gather)


@pytest.mark.parametrize("gather", ["all", "merged"])
@pytest.mark.parametrize("world", [1, 3, 4, 6])
def test_another_world_keeps_the_sum_of_residuals(ranks: Ranks, world: int, gather: str) -> None:
    exact = ranks.run(4, trained_state, "all")[0]
    saved = ranks.run(4, trained_state, gather)
    assert all(other == {} for other in saved[1:])
    assert saved[0]["world"] == (4 if gather == "all" else 1)
    moved = ranks.run(world, reloaded, saved[0])[0]
    assert moved["world"] == world
    before, after = total_residual(exact), total_residual(moved)
    assert before.keys() == after.keys() and len(before) >= 2
    for name, residual in before.items():
        assert residual.abs().max() > 0
        # Three f32 roundings of numbers up to twice the largest.
        assert (after[name] - residual).abs().max() <= 2 * residual.abs().max() * 2**-22, name


@pytest.mark.parametrize("world", [3, 6])
def test_the_loss_goes_on_without_a_jump(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks.run(4, first_half, "onebit", 30, str(tmp_path), None)
    before = ranks.run(4, whole_run, "onebit", 40)
    after = ranks.run(world, second_half, "onebit", range(30, 40), str(tmp_path), 4)
    expected = sum(sum(r[2][30:]) for r in before) / 40
    seen = sum(sum(r[2]) for r in after) / (10 * world)
    start = sum(r[2][0] for r in before) / 4
    assert abs(seen - expected) < 0.15 * start, (seen, expected, start)


def checkpoint(rank: Rank, folder: str) -> Any:
    import torch.distributed.checkpoint as dcp

    ddp, optimizer, hook = prepared(rank, "optquant:bits=3", feedback=True)
    train(rank, ddp, optimizer, range(4))
    dcp.save(
        {"model": ddp.module.state_dict(), "gradwire": hook.state_dict()},
        checkpoint_id=folder,
        process_group=rank.group,
    )
    return hook.residual_hash()


def from_checkpoint(rank: Rank, folder: str) -> Any:
    ddp, _, hook = prepared(rank, "optquant:bits=3", feedback=True)
    hook.load_state_dict(gw.read_checkpoint(folder))
    assert hook.step == 4
    return hook.residual_hash(), hook.state_dict()


def test_distributed_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(3, checkpoint, str(tmp_path))
    same = ranks.run(3, from_checkpoint, str(tmp_path))
    assert [hash_ for hash_, _ in same] == saved
    other = ranks.run(2, from_checkpoint, str(tmp_path))
    together = {"world": 3, "ranks": {key: part for _, state in same for key, part in state["ranks"].items()}}
    moved = {"world": 2, "ranks": {key: part for _, state in other for key, part in state["ranks"].items()}}
    for name, residual in total_residual(together).items():
        assert (total_residual(moved)[name] - residual).abs().max() <= 2 * residual.abs().max() * 2**-22


def broken(rank: Rank, how: str) -> Any:
    ddp, optimizer, hook = prepared(rank, "qsgd:bits=2", feedback=True)
    train(rank, ddp, optimizer, range(2))
    state = hook.state_dict()
    own = state["ranks"][str(rank.rank)]
    if how == "missing":
        del own["up"]["2.weight"]
    elif how == "unknown":
        own["up"]["9.weight"] = torch.zeros(3)
    elif how == "size":
        own["up"]["2.weight"] = torch.zeros(3)
    elif how == "rank":
        state["ranks"] = {str((rank.rank + 1) % 2): own}
    elif how == "world":
        state["world"] = 5
    elif how == "nonsense":
        state = {"foo": 1}
    elif how == "nan" and rank.rank == 1:
        own["up"]["2.weight"][5] = float("nan")
    elif how == "inf":
        next(iter((own["down"] or own["up"]).values()))[0] = float("inf")
    elif how == "huge step":
        state["step"] = 2**70
    elif how == "negative step":
        state["step"] = -1
    elif how == "huge world":
        state["world"] = 10**9
    elif how == "no world":
        state["world"] = 0
    elif how == "list":
        state["ranks"] = [own]  # type: ignore[assignment]
    elif how == "meta":
        own["up"]["2.weight"] = torch.zeros(9216, device="meta")
    elif how == "text":
        own["up"]["2.weight"] = "zeros"
    elif how == "key":
        own["down"]["2.weight"] = torch.zeros(3)
    elif how == "step" and rank.rank == 1:
        state["step"] = 7
    elif how == "one rank" and rank.rank == 1:
        state = None  # type: ignore[assignment]
    before = hook.residual_hash()
    try:
        hook.load_state_dict(state)
        words = "nothing"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    assert hook.residual_hash() == before
    train(rank, ddp, optimizer, range(2, 3))  # and everything still works
    return words


@pytest.mark.parametrize(
    "how, words",
    [
        ("missing", "the state has no up residual of parameter '2.weight'"),
        ("unknown", "parameter '9.weight', which this model does not have"),
        ("size", "parameter '2.weight' has 9216 elements; its up residual in the state has 3"),
        ("rank", "this is rank"),
        ("world", "the states of all ranks are needed"),
        ("nonsense", "has no 'ranks'"),
        ("step", "MismatchError: ranks disagree about step: rank 0 has '2', rank 1 has '7'"),
        ("nan", "the up residual of parameter '2.weight' of rank 1 is not finite"),
        ("inf", "is not finite: it contains a NaN or an Inf"),
        ("huge step", "UsageError: step is 1180591620717411303424 in the state; allowed is an integer from 0"),
        ("negative step", "UsageError: step is -1 in the state; allowed is an integer from 0"),
        ("huge world", "the state was saved with 1000000000 ranks, and there are 2 now"),
        ("no world", "UsageError: world is 0 in the state; allowed is an integer from 1"),
        ("list", "UsageError: state is not a result of Hook.state_dict()"),
        ("meta", "UsageError: the state is damaged: the up residual of parameter '2.weight' of rank"),
        ("text", "UsageError: the state is damaged: the up residual of parameter '2.weight' of rank"),
        ("key", "UsageError: the state is damaged: '2.weight' is not the name of a down residual"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_name(ranks: Ranks, how: str, words: str) -> None:
    for said in ranks.run(2, broken, how):
        assert words in said, said


def test_a_bad_state_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    said = ranks.run(2, broken, "one rank")
    assert "MismatchError: rank 1 cannot take part" in said[0]
    assert "UsageError" in said[1] or "TypeError" in said[1]
