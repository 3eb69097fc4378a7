# SPDX-License-Identifier: Apache-2.0
"""Codecs that plan ahead under FSDP2: they are told the length of the run, spend their budget over all of it, and say
what they plan with."""

import re

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not dist.is_gloo_available() or not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter"):
    pytest.skip("this torch has no Gloo or no set_custom_reduce_scatter", allow_module_level=True)

import gradwire.torch as gw
from test_fsdp import batch, refusal, sharded

STEPS, BUDGET = 60, 4.5
BURST = range(20, 30)
UNITS = ["(root)", "blocks.0", "blocks.1", "blocks.2"]


def bursts(rank, steps):
    """Some gradients are ten times as large as the others. The mean width of each unit after each step."""
    model = sharded(rank)
    hook = gw.compress(model, f"dqsgd:budget={BUDGET}", steps=steps, min_elements=0)
    before = hook.stats()["plan"]
    means = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = (model(x) - y).square().mean() * (10 if step in BURST else 1)
        loss.backward()
        model.zero_grad()  # the weights stay, so that norms are what they are meant to be
        lines = hook.stats()["plan"]
        assert sorted(line.partition(":")[0] for line in lines) == UNITS
        length = f"{steps} steps" if steps else "a run of unknown length"
        assert all(f"{BUDGET} bits per element on average over {length}; " in line for line in lines), lines
        means.append([float(re.search(r"; ([\d.]+) so far", line)[1]) for line in lines])
    return before, means


def test_a_run_of_known_length_spends_its_budget_over_the_run(ranks):
    for before, means in ranks.run(2, bursts, STEPS):
        assert before == []  # FSDP has not said yet how large the units are
        assert all(0.985 * BUDGET <= mean <= BUDGET for mean in means[-1])
        assert all(mean > BUDGET + 0.05 for mean in means[BURST[-1]])  # what the burst has taken is saved later
    for _, means in ranks.run(2, bursts, None):
        assert all(mean <= BUDGET for step in means[2:] for mean in step)  # any step may be the last


def other_codecs(rank):
    hook = gw.compress(model := sharded(rank), "dqsgd:budget=3", steps=20, min_elements=0)

    def step(number):
        x, y = batch(rank, number)
        (model(x) - y).square().mean().backward()
        model.zero_grad()

    step(0)
    state = hook.state_dict()
    hook.set_codec("dqsgd:budget=5")
    step(1)
    changed = hook.stats()["plan"]
    hook.set_codec("qsgd:bits=4")
    none = hook.stats()["plan"]
    hook.set_codec("dqsgd:budget=3")
    hook.load_state_dict(state)
    return changed, none, hook.stats()["plan"]


def test_the_length_stays_when_the_codec_changes_or_a_state_is_loaded(ranks):
    for changed, none, loaded in ranks.run(2, other_codecs):
        assert len(changed) == len(loaded) == len(UNITS) and none == []
        assert all("5 bits per element on average over 20 steps" in line for line in changed)
        assert all("3 bits per element on average over 20 steps; 3 so far" in line for line in loaded)


def disagree(rank):
    gw.compress(sharded(rank), "dqsgd:budget=3", steps=10 + rank.rank)


def wrong(rank, steps):
    gw.compress(sharded(rank), "dqsgd:budget=3", steps=steps)


def test_lengths_that_differ_or_are_none_are_refused(ranks):
    ((_, words),) = refusal(ranks, 2, disagree).items()
    assert "steps" in words
    for steps in (-1, 10**9 + 1, 1.5, "all"):
        assert all(kind == "UsageError" and "steps" in words for kind, words in refusal(ranks, 2, wrong, steps).items())
