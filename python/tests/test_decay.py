# SPDX-License-Identifier: Apache-2.0
"""Residuals that decay, under DDP: the closed loop with a constant gradient, both ways compressed, and what is refused.
tests/feedback/decay_test.cc has the loops of single codecs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from test_ddp import equal, network, prepared, train, weights
from test_ddp_faults import said
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.torch as gw


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def constant(rank: Rank, decay: float | None) -> list[float]:
    """The largest residual of an element on the way up and on the way back, in units of its gradient, of 300 steps."""
    ddp = DDP(Given(), process_group=rank.group)
    hook = gw.compress(ddp, "topk:ratio=0.01", decay=decay)
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    found = [0.0, 0.0]
    for step in range(300):
        ddp.zero_grad()
        ddp(gradient).backward()
        if step % 20 == 19:
            part = hook.state_dict()["ranks"][str(rank.rank)]
            for i, way in enumerate(("up", "down")):
                for name, values in part[way].items():
                    first = int(name.partition("@")[2] or 0)
                    own = gradient.view(-1)[first : first + values.numel()].abs()
                    found[i] = max(found[i], float((values.view(-1).abs() / own).max()))
    return found


def test_a_constant_gradient_leaves_at_most_a_geometric_sum(ranks: Ranks) -> None:
    decaying, whole = ranks.run(2, constant, 0.5), ranks.run(2, constant, None)
    # On the way back an input is a mean of what was sent: up to 2 gradients, in the step in which they are sent.
    assert all(up <= 2.0001 and down <= 4.0001 for up, down in decaying), decaying
    assert all(up > 20 for up, _ in whole), whole


def same(rank: Rank, options: dict[str, Any]) -> Any:
    ddp, optimizer, hook = prepared(rank, "topk:ratio=0.05", **options)
    train(rank, ddp, optimizer, range(4))
    return weights(ddp), hook.residual_hash()


def test_a_decay_of_one_changes_no_bit_and_any_other_does(ranks: Ranks) -> None:
    plain, one, less = (ranks.run(2, same, options)[0] for options in ({}, dict(decay=1), dict(decay=0.9)))
    assert equal(plain[0], one[0]) and plain[1] == one[1]
    assert not equal(plain[0], less[0])


def refused(rank: Rank, codec: str, options: dict[str, Any], differ: bool = False) -> str:
    ddp = DDP(network(), process_group=rank.group)
    options = dict(decay=0.5 + 0.1 * rank.rank) if differ else options
    return said(lambda: gw.compress(ddp, codec, **options))


@pytest.mark.parametrize(
    "codec, options, words",
    [
        ("onebit", dict(decay=0), "decay is 0; allowed is a number above 0, to 1"),
        ("onebit", dict(decay=1.5), "decay is 1.5; allowed"),
        ("onebit", dict(decay="half"), "decay is 'half'; allowed"),
        ("qsgd:bits=4", dict(decay=0.9), "has no codec with error feedback"),
        ("onebit", dict(decay=0.9, feedback=False), "has no codec with error feedback"),
    ],
)
def test_a_decay_without_a_meaning_is_refused(ranks: Ranks, codec: str, options: dict[str, Any], words: str) -> None:
    assert all(words in one and one.startswith("UsageError") for one in ranks.run(2, refused, codec, options))


def test_ranks_compare_their_decay(ranks: Ranks) -> None:
    assert all("decay 0.6" in one and "Mismatch" in one for one in ranks.run(2, refused, "onebit", {}, True))
