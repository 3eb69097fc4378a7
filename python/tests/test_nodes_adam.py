# SPDX-License-Identifier: Apache-2.0
"""Adam's momentum on two levels: every rank puts its own momentum in the place of its gradients, nodes reduce them, and
what comes out is what one level would give, with what codecs leave out kept between nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from test_adam import adam, every_codec, everything, train, twin, unused
from test_adam_loop import learn
from test_adam_state import resume, run_all, save_half
from test_ddp import equal, network
from test_nodes import held  # noqa: F401
from torch.nn.parallel import DistributedDataParallel as DDP

NODES = {"nodes": 2}


@pytest.mark.parametrize("world, kind, clip", [(4, "AdamW", 1e9), (6, "Adam", 1e9), (4, "AdamW", 0.3)])
def test_the_rule_is_that_of_a_reference_in_double_precision(ranks: Ranks, world: int, kind: str, clip: float) -> None:
    for error, moved, pools, steps, counted in ranks.run(world, twin, kind, clip, 30, NODES):
        assert error < 1e-5 and moved > 0.005, (error, moved)
        assert pools == 14 and steps == counted == 30


@pytest.mark.parametrize("codec, method", [("casq:bits=2", "scatter"), ("topk:ratio=0.05", "gather")])
def test_ranks_hold_the_same_bits_after_every_step(ranks: Ranks, codec: str, method: str) -> None:
    results = ranks.run(4, every_codec, codec, NODES | dict(method=method))
    for other, _ in results[1:]:
        assert all(equal(a, b) for a, b in zip(results[0][0], other))
    assert results[0][1]["optimizer"]["exchange"] == "momentum"
    assert results[0][1]["optimizer"]["phase"] == "compressed"


@pytest.mark.parametrize("to_none", [True, False])
def test_parameters_that_no_rank_has_used(ranks: Ranks, to_none: bool) -> None:
    results = ranks.run(4, unused, to_none, NODES)
    for moved, steps, values in results:
        assert [step for step, (changed, _) in enumerate(moved) if not changed] == ([2, 5] if to_none else [])
        assert steps == (6 if to_none else 8, 8)
        assert equal(values, results[0][2])


def bytes_sent(rank: Rank) -> Any:
    ddp, optimizer, hook = adam(rank, "onebit", warmup=0, nodes=2)
    sent = []
    for step in range(12):
        train(rank, ddp, optimizer, range(step, step + 1))
        sent.append((hook.stats()["last_step"]["bytes"], hook.stats()["last_step"]["node_bytes"]))
    return sent, hook.stats()


def test_of_what_is_pooled_a_ring_brings_half_to_other_nodes(ranks: Ranks) -> None:
    for sent, stats in ranks.run(4, bytes_sent):
        (plain, left), pooled = sent[8], stats["optimizer"]["pool_bytes"] // 10
        assert [step for step, (size, _) in enumerate(sent) if size > plain] == [*range(8), 9, 11]
        assert sent[9] == (plain + pooled, left + pooled // 2)


def on_one_node(rank: Rank) -> Any:
    ddp, optimizer, hook = adam(rank, "onebit", nodes=1)
    train(rank, ddp, optimizer, range(4))
    plain = DDP(network(), process_group=rank.group, bucket_cap_mb=0.02)
    other = torch.optim.AdamW(plain.parameters(), lr=2e-3, weight_decay=0.02)
    train(rank, plain, other, range(4))
    hook.set_codec("topk:ratio=0.1")
    return everything(ddp, optimizer), everything(plain, other), hook.stats()["optimizer"]


def test_on_one_node_gradients_are_exchanged_as_without_a_hook(ranks: Ranks) -> None:
    for here, plain, told in ranks.run(4, on_one_node):
        assert equal(here, plain) and told == {"exchange": "gradients"}


@pytest.mark.parametrize("codec, half", [("onebit", 2), ("onebit", 7), ("casq:bits=2", 7)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(ranks: Ranks, tmp_path: Path, codec: str, half: int) -> None:
    whole = ranks.run(4, run_all, codec, 10, NODES)
    ranks.run(4, save_half, codec, half, str(tmp_path), None, NODES)
    resumed = ranks.run(4, resume, codec, range(half, 10), str(tmp_path), 4, half == 2, NODES)
    for (a, b), (c, d, _, taken) in zip(whole, resumed):
        assert equal(a, c) and equal(b, d) and taken == 10


@pytest.mark.parametrize(
    "world, then, gather, now, nodes",
    [(4, 2, None, 6, 3), (4, 2, "merged", 2, None), (4, 2, "all", 3, None), (2, None, None, 4, 2)],
)
def test_another_layout(
    ranks: Ranks, tmp_path: Path, world: int, then: int | None, gather: str | None, now: int, nodes: int | None
) -> None:
    """Every rank begins with the mean of the ranks' second moments."""
    options, others = ({} if n is None else {"nodes": n} for n in (then, nodes))
    before = ranks.run(world, run_all, "onebit", 7, options)
    ranks.run(world, save_half, "onebit", 7, str(tmp_path), gather, options)
    files = world if gather is None else 1
    results = ranks.run(now, resume, "onebit", range(7, 10), str(tmp_path), files, False, others)
    count = len(list(network().parameters()))
    for values, _, start, taken in results:
        assert equal(values, results[0][0]) and taken == 10
        assert all(not bool(one.any()) for one in start[-2 * count : -count])
        for mine, *theirs in zip(start[-count:], *(own[-count:] for _, own in before)):
            assert torch.allclose(mine, sum(theirs) / world, rtol=1e-5)


def test_momentum_trains_like_fp32_where_gradients_do_not(ranks: Ranks) -> None:
    """Three seeds. When the bounds were chosen fp32 left 0.21, the momentum 0.21, and gradients 0.53 and 0.68."""
    steps = 300
    found, stats, weights = (trained := ranks.run(4, learn, True, NODES, steps))[0]
    rivals = ranks.run(4, learn, False, NODES, steps)[0][0]
    for codec in "casq", "onebit":
        for here, exact, rival in zip(found[codec], found["exact"], rivals[codec]):
            assert here < 1.2 * exact and rival > 2 * here, (codec, here, exact, rival)
    assert all(equal(weights, other) for _, _, other in trained[1:])
    assert stats["optimizer"]["phase"] == "compressed" and stats["optimizer"]["steps"] == steps
