# SPDX-License-Identifier: Apache-2.0
"""Adam's momentum exchange survives: bit for bit on the same number of ranks, on another number with the mean of the
ranks' second moments; and the optimizer's own state is torch's.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from test_adam import FEEDBACK, adam, everything, own, train
from test_ddp import equal, network
from test_ddp_faults import said
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.torch as gw


def run_all(rank: Rank, codec: str, steps: int, options: dict[str, Any] | None = None) -> Any:
    ddp, optimizer, hook = adam(rank, codec, **(options or {}))
    train(rank, ddp, optimizer, range(steps), 1.0)
    return everything(ddp, optimizer), own(hook, rank)


def save_half(
    rank: Rank, codec: str, steps: int, folder: str, gather: str | None, options: dict[str, Any] | None = None
) -> None:
    ddp, optimizer, hook = adam(rank, codec, **(options or {}))
    train(rank, ddp, optimizer, range(steps), 1.0)
    state = dict(
        model=ddp.module.state_dict(), optimizer=optimizer.state_dict(), gradwire=hook.state_dict(gather=gather)
    )
    if gather is None or rank.rank == 0:
        torch.save(state, Path(folder) / f"rank{rank.rank}.pt")


def resume(
    rank: Rank,
    codec: str,
    steps: range,
    folder: str,
    files: int,
    hook_first: bool,
    options: dict[str, Any] | None = None,
) -> Any:
    ddp, optimizer, hook = adam(rank, codec, **(options or {}))
    states = [torch.load(Path(folder) / f"rank{r}.pt", weights_only=True) for r in range(files)]
    mine = states[rank.rank] if files > rank.rank else states[0]
    ddp.module.load_state_dict(mine["model"])
    if not hook_first:
        optimizer.load_state_dict(mine["optimizer"])
    hook.load_state_dict(mine["gradwire"] if files == rank.world else [state["gradwire"] for state in states])
    if hook_first:
        optimizer.load_state_dict(mine["optimizer"])
    before = own(hook, rank)
    train(rank, ddp, optimizer, steps, 1.0)
    return everything(ddp, optimizer), own(hook, rank), before, hook.state_dict()["adam"]["taken"]


@pytest.mark.parametrize("codec, half", [(codec, 7) for codec in FEEDBACK] + [("onebit", 2), ("onebit", 3)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(ranks: Ranks, tmp_path: Path, codec: str, half: int) -> None:
    whole = ranks.run(2, run_all, codec, 12)
    ranks.run(2, save_half, codec, half, str(tmp_path), None)
    resumed = ranks.run(2, resume, codec, range(half, 12), str(tmp_path), 2, half % 2 == 0)
    for (a, b), (c, d, _, taken) in zip(whole, resumed):
        assert equal(a, c) and equal(b, d) and taken == 12


@pytest.mark.parametrize("options", [{"down": "qsgd:bits=4"}, {"method": "gather"}])
def test_a_run_that_is_resumed_after_its_warm_up_goes_on_learning(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Nothing learns in the warm-up then, in which a new hook begins."""
    codec = "optquant:bits=2,refit=5"
    whole = ranks.run(2, run_all, codec, 24, options)
    ranks.run(2, save_half, codec, 9, str(tmp_path), None, options)
    resumed = ranks.run(2, resume, codec, range(9, 24), str(tmp_path), 2, False, options)
    for (a, b), (c, d, _, _) in zip(whole, resumed):
        assert equal(a, c) and equal(b, d)


@pytest.mark.parametrize("gather, world", [(None, 3), ("all", 1), ("merged", 3)])
def test_another_number_of_ranks(ranks: Ranks, tmp_path: Path, gather: str | None, world: int) -> None:
    before = ranks.run(2, run_all, "onebit", 7)
    ranks.run(2, save_half, "onebit", 7, str(tmp_path), gather)
    results = ranks.run(world, resume, "onebit", range(7, 12), str(tmp_path), 2 if gather is None else 1, False)
    count = len(list(network().parameters()))
    for values, _, start, taken in results:
        assert equal(values, results[0][0]) and taken == 12
        q, s = start[-2 * count : -count], start[-count:]
        assert all(not bool(one.any()) for one in q)
        for mine, a, b in zip(s, before[0][1][-count:], before[1][1][-count:]):
            assert torch.allclose(mine, (a + b) / 2, rtol=1e-6)


def into_plain(rank: Rank) -> Any:
    """The optimizer's state is torch's own: it loads into an AdamW without gradwire, and the other way."""
    ddp, optimizer, hook = adam(rank)
    train(rank, ddp, optimizer, range(10))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = DDP(network(), process_group=rank.group)
    other.module.load_state_dict(ddp.module.state_dict())
    plain = torch.optim.AdamW(other.parameters())
    plain.load_state_dict(torch.load(file, weights_only=True))
    train(rank, other, plain, range(10, 15))
    same = sorted(plain.state_dict()["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]
    # A training that began without gradwire goes on with it: nothing is exact, and nothing jumps.
    before = [p.detach().clone() for p in other.parameters()]
    adopted = gw.compress(other, "onebit", optimizer=plain, warmup=3)
    phases = [adopted.stats()["optimizer"]["phase"]]
    train(rank, other, plain, range(15, 16))
    phases.append(adopted.stats()["optimizer"]["phase"])
    largest = max((a - b.detach()).abs().max().item() for a, b in zip(before, other.parameters()))
    train(rank, other, plain, range(16, 25))
    # And without it again.
    adopted.remove()
    removed = "step" not in vars(plain)
    train(rank, other, plain, range(25, 28))
    return same, phases, largest, removed, everything(other, plain), int(plain.state[next(other.parameters())]["step"])


def test_the_state_of_the_optimizer_is_torchs_own(ranks: Ranks) -> None:
    results = ranks.run(2, into_plain)
    for same, phases, largest, removed, values, steps in results:
        assert same and removed and steps == 28
        assert phases == ["exact", "compressed"] and 0 < largest < 5e-3
        assert equal(values, results[0][4])


def wrong_state(rank: Rank, how: str) -> Any:
    ddp, optimizer, hook = adam(rank)
    train(rank, ddp, optimizer, range(4))
    state = hook.state_dict()
    part = state["ranks"][str(rank.rank)]
    if how == "no s":
        del part["s"]["2.weight"]
    elif how == "shape":
        part["q"]["2.weight"] = torch.zeros(3)
    elif how == "nan":
        part["s"]["2.weight"][1, 1] = float("nan")
    elif how == "counts":
        state["adam"]["counts"]["2.weight"] = torch.zeros(2)
    elif how == "gradients":
        del state["adam"]
    elif how == "taken" and rank.rank == 1:
        state["adam"]["taken"] = 9
    elif how == "none":
        other = gw.compress(DDP(network(), process_group=rank.group), "topk:ratio=0.05")
        return said(lambda: other.load_state_dict(state))
    elif how == "step":
        hook.load_state_dict(state)
        optimizer.load_state_dict(torch.optim.AdamW(ddp.parameters()).state_dict())
        return said(lambda: train(rank, ddp, optimizer, range(4, 5)))
    before = own(hook, rank)
    words = said(lambda: hook.load_state_dict(state))
    assert equal(before, own(hook, rank))
    train(rank, ddp, optimizer, range(4, 6))
    return words


@pytest.mark.parametrize(
    "how, words",
    [
        ("no s", "UsageError: the state has no s of parameter '2.weight'"),
        ("shape", "UsageError: parameter '2.weight' has the shape (96, 96); its q in the state has (3,)"),
        ("nan", "UsageError: s of parameter '2.weight' of rank"),
        ("counts", "UsageError: the state is damaged: the counts of parameter '2.weight' are not 4 numbers"),
        ("gradients", "UsageError: the state was saved by a hook that exchanges gradients"),
        ("taken", "MismatchError: ranks disagree about taken: rank 0 has '4', rank 1 has '9'"),
        ("none", "UsageError: the state was saved by a hook that exchanges Adam's momentum"),
        ("step", "UsageError: the optimizer has taken 0 steps with parameter '0.weight', and the hook 4"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_name(ranks: Ranks, how: str, words: str) -> None:
    for got in ranks.run(2, wrong_state, how):
        assert words in got, got


def distributed_checkpoint(rank: Rank, folder: str, save: bool) -> Any:
    import torch.distributed.checkpoint as dcp

    ddp, optimizer, hook = adam(rank)
    if save:
        train(rank, ddp, optimizer, range(5))
        dcp.save({"gradwire": hook.state_dict()}, checkpoint_id=folder, process_group=rank.group)
    else:
        hook.load_state_dict(gw.read_checkpoint(folder))
    return own(hook, rank), hook.state_dict()["adam"]


def test_distributed_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, distributed_checkpoint, str(tmp_path), True)
    loaded = ranks.run(2, distributed_checkpoint, str(tmp_path), False)
    for (a, b), (c, d) in zip(saved, loaded):
        assert equal(a, c) and b["taken"] == d["taken"] == 5 and b["next_pool"] == d["next_pool"]
