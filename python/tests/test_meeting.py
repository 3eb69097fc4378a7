# SPDX-License-Identifier: Apache-2.0
"""Calls that all ranks must make: one that stays away is named within the time-out, on the ranks that wait for it, and
the process group goes on.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Rank, Ranks, eventually
from test_ddp import network, prepared, train
from test_ddp_faults import said
from test_hooks import needs_fsdp, shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.torch as gw
from gradwire.torch import _agree


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def alone(rank: Rank, absent: list[int], key: str) -> Any:
    """Some ranks call compress, and others come when those have given up."""
    ddp = DDP(network(), process_group=rank.group)
    callers = [other for other in range(rank.world) if other not in absent]
    if rank.rank in absent:
        assert eventually(lambda: store().check([f"{key}/{other}" for other in callers]))
        words, seconds = "", 0.0
    else:
        begin = time.monotonic()
        words = said(lambda: gw.compress(ddp, "qsgd:bits=4", timeout=2))
        seconds = time.monotonic() - begin
        store().set(f"{key}/{rank.rank}", "has given up")
    hook = gw.compress(ddp, "qsgd:bits=4", timeout=100)  # the absent ones skip what the others have given up
    return words, seconds, hook.step


@pytest.mark.parametrize("absent, who", [([1], "rank 1"), ([0], "rank 0"), ([0, 2], "ranks 0, 2")])
def test_a_rank_that_does_not_call_compress_is_named_within_the_timeout(
    ranks: Ranks, absent: list[int], who: str
) -> None:
    for rank, (words, seconds, step) in enumerate(ranks.run(3, alone, absent, f"alone without {absent}")):
        assert step == 0
        if rank not in absent:
            assert words == f"EngineError: compress is collective; {who} did not call it within 2 s", words
            assert seconds >= 2


def other_calls(rank: Rank) -> Any:
    ddp, optimizer, hook = prepared(rank, "qsgd:bits=4")
    train(rank, ddp, optimizer, range(1))
    state = hook.state_dict()
    calls = [lambda: hook.load_state_dict(state), lambda: hook.set_codec("qsgd:bits=2")]
    words = said(calls[rank.rank])
    train(rank, ddp, optimizer, range(1, 2))
    return words, hook.step


def test_ranks_that_call_different_functions_are_told_so(ranks: Ranks) -> None:
    for words, step in ranks.run(2, other_calls):
        assert words == (
            "MismatchError: ranks disagree about the call: rank 0 has 'load_state_dict', rank 1 has 'set_codec'"
        )
        assert step == 2


def alone_with_shards(rank: Rank) -> str:
    """FSDP2 has no time-out of its own: the one of the process group counts."""
    model = shard(rank)
    before = _agree._patience
    _agree._patience = lambda group: timedelta(seconds=1)
    try:
        words = said(lambda: gw.compress(model, "qsgd:bits=4")) if rank.rank == 0 else ""
    finally:
        _agree._patience = before
    store().set(f"shards/{rank.rank}", "")
    assert eventually(lambda: store().check(["shards/0", "shards/1"]))
    gw.compress(model, "qsgd:bits=4")
    return words


@needs_fsdp
def test_a_rank_that_does_not_call_compress_for_fsdp_is_named(ranks: Ranks) -> None:
    first, _ = ranks.run(2, alone_with_shards)
    assert first == "EngineError: compress is collective; rank 1 did not call it within 1 s"


def met(rank: Rank, times: int) -> Any:
    for _ in range(times):
        _agree.meet(rank.group, "a test")
    kept = dist.PrefixStore(f"gradwire/meet/{rank.group.group_name}", store())
    dist.barrier(group=rank.group)
    count = int(kept.add("calls of 0", 0))
    return _agree._patience(rank.group) >= timedelta(minutes=1), [
        kept.check([f"{meeting}/end"]) for meeting in range(max(1, count - times), count + 1)
    ]


def test_meetings_leave_nothing_behind_but_the_last_one(ranks: Ranks) -> None:
    for long, there in ranks.run(3, met, 5):
        assert long and there[-1] and not any(there[:-1]), there
