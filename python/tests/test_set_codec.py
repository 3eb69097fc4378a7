# SPDX-License-Identifier: Apache-2.0
"""The codec of a hook can be changed between two steps, on all ranks alike: residuals stay where there is still error
feedback, what was learned stays where the codec is the same, and a change that makes no sense changes nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from test_ddp import equal, prepared, train, weights
from test_ddp_faults import said
from test_hooks import fsdp_step, needs_fsdp, shard

import gradwire.torch as gw


def logged(call: Any) -> list[str]:
    """What `call` writes to the log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradwire")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        call()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def residuals(hook: gw.Hook, rank: Rank) -> dict[str, torch.Tensor]:
    part = hook.state_dict()["ranks"][str(rank.rank)]
    return {f"{direction} {name}": values.clone() for direction in part for name, values in part[direction].items()}


def changed(rank: Rank) -> Any:
    ddp, optimizer, hook = prepared(rank, "onebit")
    train(rank, ddp, optimizer, range(3))
    before = residuals(hook, rank)
    sent = hook.stats()
    lines = logged(lambda: hook.set_codec("topk:ratio=0.1"))
    kept = residuals(hook, rank)
    same = before.keys() == kept.keys() and equal(list(before.values()), list(kept.values())) and not lines
    train(rank, ddp, optimizer, range(3, 6))
    after = hook.stats()
    assert "topk:ratio=0.1" in repr(hook) and "topk:ratio=0.1" in hook.codec and hook.step == 6
    counts = after["parameters"]["2.weight"]["codec"], after["all_steps"]["bytes"] > sent["all_steps"]["bytes"] > 0
    # The rules of one parameter lose error feedback.
    lines = logged(lambda: hook.set_codec("2.weight=fp32;*=topk:ratio=0.1"))
    fewer = residuals(hook, rank)
    train(rank, ddp, optimizer, range(6, 7))
    # And all of them go back to what plain DDP does, and to a codec again.
    hook.set_codec("fp32")
    train(rank, ddp, optimizer, range(7, 8))
    hook.set_codec("onebit")
    train(rank, ddp, optimizer, range(8, 9))
    return same, counts, sorted(kept.keys() - fewer.keys()), lines, hook.step, weights(ddp)


def test_residuals_stay_where_there_is_still_feedback(ranks: Ranks) -> None:
    results = ranks.run(2, changed)
    for same, (codec, grew), dropped, lines, step, _ in results:
        assert same and codec.startswith("topk:ratio=0.1") and grew and step == 9
        assert dropped and all(name.split()[1].startswith("2.weight") for name in dropped)
        assert lines == ["gradwire: the new codec keeps no residual of 2.weight; theirs is dropped"]
    assert equal(results[0][5], results[1][5])


def as_from_the_start(rank: Rank) -> Any:
    """A hook whose codec is set before the first step is one that had it from the start."""
    one, optimizer, hook = prepared(rank, "fp16")
    hook.set_codec("optquant:bits=3", down="qsgd:bits=8")
    other, other_optimizer, other_hook = prepared(rank, "optquant:bits=3", down="qsgd:bits=8")
    train(rank, one, optimizer, range(4))
    train(rank, other, other_optimizer, range(4))
    same = equal(weights(one), weights(other)) and hook.residual_hash() == other_hook.residual_hash()
    learned = hook.state_dict()["learned"]
    hook.set_codec("2.weight=onebit;*=optquant:bits=3")
    kept = hook.state_dict()["learned"]
    return same, any(equal([learned[name]], [kept[name]]) for name in kept if name in learned)


def test_a_codec_that_is_set_is_one_that_was_given(ranks: Ranks) -> None:
    assert ranks.run(2, as_from_the_start) == [(True, True)] * 2


def refused(rank: Rank, codec: Any, on_rank: int | None) -> Any:
    ddp, optimizer, hook = prepared(rank, "onebit")
    train(rank, ddp, optimizer, range(2))
    before = hook.residual_hash(), hook.codec
    given = codec if on_rank in (None, rank.rank) else "qsgd:bits=4"
    words = said(lambda: hook.set_codec(given))
    assert (hook.residual_hash(), hook.codec) == before
    train(rank, ddp, optimizer, range(2, 3))
    hook.remove()
    return words, said(lambda: hook.set_codec("qsgd:bits=4")), hook.step


@pytest.mark.parametrize(
    "codec, on_rank, words",
    [
        ("zip", None, ["UsageError: codec is 'zip'"] * 2),
        (7, None, ["UsageError: codec is of type int"] * 2),
        ("nosuch=fp32;*=qsgd", None, ["UsageError: the rule 'nosuch=fp32' matches no parameter"] * 2),
        ("qsgd:bits=2", 1, ["MismatchError: ranks disagree about up"] * 2),
        ("zip", 1, ["MismatchError: rank 1 cannot take part: codec is 'zip'", "UsageError: codec is 'zip'"]),
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(
    ranks: Ranks, codec: Any, on_rank: int | None, words: list[str]
) -> None:
    for wanted, (got, removed, step) in zip(words, ranks.run(2, refused, codec, on_rank)):
        assert wanted in got and step == 3
        assert removed == "UsageError: the hook was removed; call compress to begin again"


def changed_shards(rank: Rank) -> Any:
    model = shard(rank)
    hook = gw.compress(model, "qsgd:bits=2", weights="unigrid:bits=8", feedback=True, min_elements=0)
    for step in range(2):
        fsdp_step(rank, model, step)
    before, stats = residuals(hook, rank), hook.stats()
    hook.set_codec("onebit", weights="unigrid:bits=4")
    kept = residuals(hook, rank)
    same = before.keys() == kept.keys() and equal(list(before.values()), list(kept.values()))
    fsdp_step(rank, model, 2)
    after = hook.stats()
    bits = stats["gradients"]["bits"], after["gradients"]["bits"], stats["weights"]["bits"], after["weights"]["bits"]
    lines = logged(lambda: hook.set_codec("0.*=fp32;*=onebit"))
    fewer = residuals(hook, rank)
    fsdp_step(rank, model, 3)
    hook.set_codec("qsgd:bits=4")
    fsdp_step(rank, model, 4)
    grew = after["all_steps"]["bytes"] > stats["all_steps"]["bytes"] > 0
    bad = said(lambda: hook.set_codec("nosuch=fp32;*=qsgd")), said(lambda: hook.set_codec(weights="optquant"))
    plain = gw.compress(model, "qsgd:bits=4")
    return same, bits, sorted(kept.keys() - fewer.keys()), lines, grew, bad, said(
        lambda: plain.set_codec(weights="unigrid:bits=8")
    ), hook.step


@needs_fsdp
def test_the_codecs_of_fsdp_can_be_changed(ranks: Ranks) -> None:
    for same, bits, dropped, lines, grew, bad, plain, step in ranks.run(2, changed_shards):
        assert same and grew and step == 5 and bits[1] < bits[0] and bits[3] < bits[2]
        assert dropped == ["up 0.weight/0", "up 0.weight/1"]
        assert len(lines) == 1 and "keeps no residual of 0.weight/0, 0.weight/1" in lines[0]
        assert "the rule 'nosuch=fp32' matches no sharded parameter" in bad[0] and "a codec that learns" in bad[1]
        assert "weights was not given to compress, so weights are left to torch" in plain
