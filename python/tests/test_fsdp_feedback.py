# SPDX-License-Identifier: Apache-2.0
"""Residuals of a sharded model: what they are good for, what they take, which steps change them, and how they are saved
and loaded.
"""

import logging

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("test_fsdp", reason="this torch has no Gloo or no set_custom_reduce_scatter")

import gradwire.torch as gw
from gradwire.torch._units import CompressedReduceScatter
from test_fsdp import batch, equal, parameters, refusal, sharded, train


# Feedback.


def low_bits(rank, feedback):
    model = sharded(rank)
    hook = gw.compress(model, "topk:ratio=0.05", weights=None, feedback=feedback, min_elements=0)
    return train(rank, model, 60)[-1], hook.stats()["residual_bytes"]


def test_feedback_makes_up_for_low_bits(ranks):
    with_feedback, without = ranks.run(2, low_bits, True), ranks.run(2, low_bits, False)
    elements = 2 * (34 * 33 + 2 * 34 * 67 + 3 * 67)  # vectors are sent as they are
    for (loss, held), (loss_without, held_without) in zip(with_feedback, without):
        assert loss < loss_without
        assert held_without == 0 and held == 2 * 4 * elements  # both copies of all matrices, in f32


def announced(rank):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("gradwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = sharded(rank)
    hook = gw.compress(model, "qsgd:bits=4", weights=None, feedback=True)
    train(rank, model, 3)
    logger.removeHandler(handler)
    return lines, hook.stats()["residual_bytes"]


def test_what_feedback_takes_is_logged_once_on_rank_0(ranks):
    (lines, held), (others, _) = ranks.run(2, announced)
    assert len(lines) == 1 and f"{held} bytes" in lines[0] and others == []


def skips(rank):
    """Infs in one row of one module's gradient, on one rank: only the rank that owns the row gets to see them."""
    model = sharded(rank)
    hook = gw.compress(model, "optquant:bits=4", weights="unigrid:bits=8", feedback=True, min_elements=0)
    train(rank, model, 3)
    before = hook.residual_hash()
    bad = torch.ones(67)
    if rank.rank == rank.world - 1:
        bad[0] = torch.inf
    breaking = model.blocks[0].register_forward_hook(
        lambda m, i, out: out.register_hook(lambda gradient: gradient * bad) and None
    )
    x, y = batch(rank, 3)
    (model(x) - y).square().mean().backward()
    breaking.remove()
    finite = {name for name, p in model.named_parameters() if torch.isfinite(p.grad.to_local()).all()}
    skipped = hook.residual_hash() == before
    model.zero_grad()
    x, y = batch(rank, 4)
    (model(x) - y).square().mean().backward()
    return finite, skipped, hook.residual_hash() != before, hook.stats()["skipped"]


def test_a_step_that_is_not_finite_changes_no_residual_on_any_rank(ranks):
    for rank, (finite, kept, later, skipped) in enumerate(ranks.run(3, skips)):
        assert ("blocks.0.weight" in finite) == (rank != 0)
        assert {"blocks.1.weight", "blocks.2.weight", "head.weight"} <= finite
        assert kept and later and skipped == 1


def scaled(rank, scale):
    model = sharded(rank)
    hook = gw.compress(model, "qsgd:bits=4,rounding=nearest", weights=None, feedback=True, min_elements=0)
    for step in range(3):
        power = scale ** (step + 1)
        hook.set_loss_scale(power)
        x, y = batch(rank, step)
        (power * (model(x) - y).square().mean()).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.05 / power * p.grad)
        model.zero_grad()
    return hook.residual_hash()


def test_residuals_do_not_depend_on_the_loss_scale(ranks):
    assert ranks.run(2, scaled, 1.0) == ranks.run(2, scaled, 2.0)


def with_a_scaler(rank, enabled):
    """Scales that double every second step, and an Inf, which halves them and skips the step."""
    model = sharded(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=enabled)
    hook = gw.compress(
        model, "qsgd:bits=4,rounding=nearest", weights=None, feedback=True, scaler=scaler, min_elements=0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hashes = []
    for step in [0, 1, 2, None, 3, 4, 5]:
        if step is None and not enabled:
            continue
        x, y = batch(rank, step or 0)
        loss = (model(x) - y).square().mean()
        if step is None and rank.rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        hashes.append(hook.residual_hash())
    return hashes, hook.stats()["skipped"], scaler.get_scale()


def test_a_scaler_and_its_skipped_steps_leave_no_trace_in_residuals(ranks):
    plain, scaled = ranks.run(2, with_a_scaler, False), ranks.run(2, with_a_scaler, True)
    for (expected, none, _), (hashes, skipped, scale) in zip(plain, scaled):
        assert none == 0 and skipped == 1 and scale == 512.0
        assert hashes[3] == hashes[2] and hashes[:3] + hashes[4:] == expected and len(set(expected)) == len(expected)


def outside_of_autograd(rank):
    """As a pipeline's schedule does it: gradients are reduced after back-propagation, which has no callback then."""
    model = sharded(rank)
    hook = gw.compress(model, "qsgd:bits=2,rounding=nearest", weights=None, feedback=True)
    parts = hook._parts["blocks.1"]
    scatter = CompressedReduceScatter(hook, hook._gradients, "blocks.1", parts)
    size = sum(part.padded for part in parts.all)
    gradient = torch.randn(rank.world * size, generator=torch.Generator().manual_seed(5))
    sums, steps = torch.zeros(size), []

    def foreach_reduce(fsdp_params):
        result = torch.empty(size)
        scatter(result, gradient, rank.group, torch.distributed.ReduceOp.AVG)
        return result

    for _ in range(50):
        sums += foreach_reduce(model.blocks[1]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params)
        steps.append(hook.step)
    hook.end_step()
    hook.end_step()  # nothing is open
    mine = gradient[rank.rank * size :][:size]
    return steps, hook.step, ((sums / 50 - mine).norm() / mine.norm()).item()


def test_a_step_outside_of_autograd_ends_when_a_unit_comes_again_or_when_told(ranks):
    for steps, end, error in ranks.run(2, outside_of_autograd):
        assert steps == list(range(50)) and end == 50
        assert error < 0.1  # without residuals from call to call it would be that of one call


# State.


def resumes(rank, codec):
    options = dict(feedback=True, min_elements=0)
    whole = sharded(rank)
    gw.compress(whole, codec, weights="unigrid:bits=8", **options)
    train(rank, whole, 6)

    half = sharded(rank)
    hook = gw.compress(half, codec, weights="unigrid:bits=8", **options)
    train(rank, half, 3)
    weights, state = {name: p.detach().clone() for name, p in half.named_parameters()}, hook.state_dict()

    again = sharded(rank)
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.copy_(weights[name])
    hook = gw.compress(again, codec, weights="unigrid:bits=8", **options)
    hook.load_state_dict(state)
    unused = hook.state_dict()  # before any unit has come
    before, after = (one["ranks"][str(rank.rank)]["up"] for one in (state, unused))
    kept = unused["step"] == 3 and all(torch.equal(values, after[name]) for name, values in before.items())
    train(rank, again, 3, first=3)
    resumed = equal(parameters(whole), parameters(again))

    train(rank, half, 3, first=3)  # and back, on a hook that has units
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.copy_(weights[name])
    hook.load_state_dict(state)
    train(rank, again, 3, first=3)
    return kept, resumed, equal(parameters(whole), parameters(again))


@pytest.mark.parametrize("codec", ["qsgd:bits=3", "optquant:bits=2"])
def test_a_resumed_training_is_the_uninterrupted_one(ranks, codec):
    assert ranks.run(3, resumes, codec) == [(True, True, True)] * 3


def saved(rank):
    model = sharded(rank)
    hook = gw.compress(model, "qsgd:bits=3", weights=None, feedback=True)
    train(rank, model, 1)
    return hook.state_dict()


def loads(rank, states):
    hook = gw.compress(sharded(rank), "qsgd:bits=3", weights=None, feedback=True)
    hook.load_state_dict(states[min(rank.rank, len(states) - 1)])


def test_a_state_of_another_world_rank_or_model_is_refused(ranks):
    states = ranks.run(2, saved)
    assert refusal(ranks, 3, loads, states) == {"UsageError": "the state was saved with 2 ranks, and there are 3 now"}
    kinds = refusal(ranks, 2, loads, states[::-1])
    assert kinds == {"UsageError": "the state belongs to rank 1; this is rank 0"}
    for state in states:
        for part in state["ranks"].values():
            part["up"]["tail/0"] = part["up"].pop("blocks.0.weight/0")
    assert refusal(ranks, 2, loads, states) == {
        "UsageError": "the state has a residual of 'tail/0', but no such parameter"
    }
