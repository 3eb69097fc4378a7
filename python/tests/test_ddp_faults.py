# SPDX-License-Identifier: Apache-2.0
"""Bad input is one clear exception each, and the process group stays usable where torch allows it; a rank that dies or
stalls is an error on the others, within the time-out.
"""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, Ranks, eventually
from test_ddp import equal, network, prepared, train, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.torch as gw


def said(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: Rank, how: str) -> str:
    codec: Any = "qsgd:bits=4"
    options: dict[str, Any] = {}
    model: nn.Module = network()
    if how == "codecs differ":
        codec = f"qsgd:bits={4 + rank.rank}"
    elif how == "one bad codec":
        codec = "qsgd:bits=99" if rank.rank == 1 else codec
    elif how == "unknown codec":
        codec = "zip"
    elif how == "no string":
        codec = 4
    elif how == "seeds differ":
        options["seed"] = rank.rank
    elif how == "float64":
        model = model.double()
    elif how == "method":
        options["method"] = "ring"
    elif how == "residual":
        options["residual"] = torch.float16
    elif how == "paper":
        codec = "dqsgd:mode=paper"
    elif how == "warmup":
        options["warmup"] = -1
    words = said(lambda: gw.compress(model, codec)) if how == "no ddp" else said(
        lambda: gw.compress(DDP(model, process_group=rank.group), codec, **options)
    )
    ddp, optimizer, _ = prepared(rank, "qsgd:bits=4")  # on the same process group
    train(rank, ddp, optimizer, range(1))
    return words


@pytest.mark.parametrize(
    "how, words",
    [
        ("codecs differ", ["MismatchError: ranks disagree about up"] * 2),
        ("one bad codec", ["MismatchError: rank 1 cannot take part: bits is '99'", "UsageError: bits is '99'"]),
        ("unknown codec", ["UsageError: codec is 'zip'"] * 2),
        ("no string", ["UsageError: codec is of type int"] * 2),
        ("seeds differ", ["MismatchError: ranks disagree about seed: rank 0 has '0', rank 1 has '1'"] * 2),
        (
            "float64",
            ["UnsupportedError: parameter '0.weight' is float64; allowed are float32, float16 and bfloat16"] * 2,
        ),
        ("method", ["UsageError: method is 'ring'; allowed are scatter, gather"] * 2),
        ("residual", ["UsageError: residual is torch.float16"] * 2),
        ("paper", ["UnsupportedError: a codec with mode=paper must see"] * 2),
        ("warmup", ["UsageError: warmup"] * 2),
        ("no ddp", ["UsageError: model is a Sequential that is not distributed"] * 2),
    ],
)
def test_what_cannot_work_is_refused_and_the_group_goes_on(ranks: Ranks, how: str, words: list[str]) -> None:
    for got, wanted in zip(ranks.run(2, refusals, how), words):
        assert wanted in got, got


def sparse(rank: Rank) -> str:
    ddp = DDP(nn.Sequential(nn.Embedding(50, 64, sparse=True), nn.Linear(64, 8)), process_group=rank.group)
    gw.compress(ddp, "qsgd:bits=4")
    return said(lambda: ddp(torch.arange(8)).sum().backward())


def test_sparse_gradients_are_refused(ranks: Ranks) -> None:
    for words in ranks.run(2, sparse):
        assert "sparse gradients cannot be compressed" in words


def half_precision(rank: Rank, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
    ddp = DDP(model, process_group=rank.group)
    hook = gw.compress(ddp, "qsgd:bits=8")
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.ones(4, 64, dtype=dtype) * (rank.rank + 1)).float().square().mean().backward()
    return [p.grad for p in ddp.parameters()], hook.stats()["skipped"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters(ranks: Ranks, dtype: torch.dtype) -> None:
    results = ranks.run(2, half_precision, dtype)
    assert equal(results[0][0], results[1][0]) and results[0][1] == 0
    assert all(g.dtype == dtype and g.any() for g in results[0][0])


def channels_last(rank: Rank) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Conv2d(64, 64, 3)).to(memory_format=torch.channels_last)
    ddp = DDP(model, process_group=rank.group)
    gw.compress(ddp, "fp16")
    plain = DDP(nn.Sequential(nn.Conv2d(8, 64, 3), nn.Conv2d(64, 64, 3)), process_group=rank.group)
    plain.module.load_state_dict(model.state_dict())
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(rank.rank))
    ddp(x).square().mean().backward()
    plain(x).square().mean().backward()
    return all(
        torch.allclose(a.grad, b.grad, rtol=3e-3, atol=1e-4) for a, b in zip(ddp.parameters(), plain.parameters())
    )


def test_parameters_in_any_memory_format(ranks: Ranks) -> None:
    assert all(ranks.run(2, channels_last))


def guarded(rank: Rank) -> Any:
    import warnings

    ddp, optimizer, hook = prepared(rank, "topk:ratio=0.01", guard=0.5, measure_every=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(rank, ddp, optimizer, range(6))
    stats = hook.stats()
    written: list[str] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append(name)

    hook.log(Writer())
    state = hook.state_dict()
    again, _, other = prepared(rank, "topk:ratio=0.01", guard=0.5, measure_every=2)
    other.load_state_dict(state)
    return stats["exempt"], stats["parameters"], [str(w.message) for w in caught], written, other.stats()["exempt"]


def test_the_guard_exempts_what_passes_its_limit(ranks: Ranks) -> None:
    results = ranks.run(2, guarded)
    for rank, (exempt, parameters, warned, written, restored) in enumerate(results):
        assert exempt == results[0][0] and "2.weight" in exempt and exempt == restored
        assert parameters["2.weight"]["codec"] == "fp32" and parameters["2.weight"]["error"] == 0.0
        told = [words for words in warned if "sent uncompressed from now on" in words]
        assert any("'2.weight' (" in words for words in told) if rank == 0 else not told
        assert {"gradwire/bits", "gradwire/last_step/bytes", "gradwire/error/2.weight"} <= set(written)


def endless(rank: Rank, dies: str) -> Any:
    dist.barrier(rank.group)  # a rank may come much later than another, which is no fault
    ddp, optimizer, hook = prepared(rank, "qsgd:bits=4", timeout=6)
    train(rank, ddp, optimizer, range(2))
    store = dist.distributed_c10d._get_default_store()
    if rank.rank == 1:
        if dies == "killed":
            os.kill(os.getpid(), 9)
        return eventually(lambda: store.check(["rank 0 has failed", "rank 2 has failed"]))
    first = said(lambda: train(rank, ddp, optimizer, range(2, 4)))
    store.set(f"rank {rank.rank} has failed", "")
    again = said(lambda: train(rank, ddp, optimizer, range(4, 5)))
    return first, again


@pytest.mark.parametrize("dies", ["killed", "stalls"])
def test_a_rank_that_dies_is_an_error_on_the_others(dies: str) -> None:
    pool = Ranks(3)
    try:
        pool.start(3, endless, dies)
        # Without `timeout` the process group would wait for half an hour, which is longer than these tests wait for a
        # rank.
        outcomes = pool.results(3)
        for rank in (0, 2):
            fine, value = outcomes[rank]
            assert fine, value
            first, again = value
            assert "Error" in first, first
            assert "an earlier bucket failed" in again, again
        assert dies == "killed" or outcomes[1] == (True, True), outcomes[1]
    finally:
        pool.close()


def alone(rank: Rank) -> Any:
    ddp, optimizer, hook = prepared(rank, "qsgd:bits=4")
    train(rank, ddp, optimizer, range(3))
    return hook.stats()["all_steps"]["bytes"], hook.stats()["ratio"], weights(ddp)


def test_a_world_of_one_sends_nothing(ranks: Ranks) -> None:
    assert ranks.run(1, alone)[0][:2] == (0, 1.0)


def test_errors_are_of_the_package() -> None:
    assert issubclass(gradwire.UnsupportedError, gradwire.Error)


def forgotten(rank: Rank) -> Any:
    """The threads that carry messages hold the last bucket until they have returned from it, which may be some time
    after backward() has its result. So one collection of garbage may come too early."""
    ddp, optimizer, hook = prepared(rank, "qsgd:bits=4")
    train(rank, ddp, optimizer, range(2))
    model, kept = weakref.ref(ddp), weakref.ref(hook)
    del ddp, optimizer, hook

    def freed() -> bool:
        gc.collect()
        return model() is None and kept() is None

    return eventually(freed)


def test_a_model_that_is_dropped_is_freed(ranks: Ranks) -> None:
    assert ranks.run(2, forgotten) == [True] * 2
