# SPDX-License-Identifier: Apache-2.0
"""A training that goes on from a checkpoint of torch.distributed.checkpoint is the one that was never stopped, for
every kind of model, also where a rank has no residuals or what ranks have learned differs; and no wrapper of a model
changes the names that rules and states have.
"""

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("test_hsdp", reason="this torch has no Gloo or no set_custom_reduce_scatter")
checkpoint_wrapper = pytest.importorskip(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
).checkpoint_wrapper

import gradwire.torch as gw
import torch.distributed.checkpoint as dcp
from test_ddp import network, prepared
from test_fsdp import sharded
from test_hsdp import made
from test_lessons import KINDS, OFTEN, Net, run, step, weights
from torch.nn.parallel import DistributedDataParallel as DDP


def model_of(rank, kind, codec, options):
    torch.manual_seed(3)
    if kind == "ddp":
        model = DDP(Net(), process_group=rank.group)
    else:
        model = sharded(rank) if kind == "shards" else made(rank, KINDS[kind], Net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, gw.compress(model, codec, min_elements=0, **options)


def local(model):
    return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


def stopped(rank, kind, codec, options, folder):
    model, hook = model_of(rank, kind, codec, options)
    for number in range(6):
        step(rank, model, number)
        with torch.no_grad():
            for p in local(model):
                if p.grad is not None:
                    p -= 0.1 * p.grad
        model.zero_grad()
    half = [p.detach().clone() for p in local(model)]
    dcp.save({"gradwire": hook.state_dict()}, checkpoint_id=folder, process_group=rank.group)

    def rest(model):
        for number in range(6, 13):
            step(rank, model, number)
            with torch.no_grad():
                for p, g in zip(local(model), [p.grad for p in model.parameters()]):
                    p -= 0.1 * (g.to_local() if hasattr(g, "to_local") else g)
            model.zero_grad()
        return [w.numpy().tobytes() for w in weights(model)]

    whole = rest(model)
    other, again = model_of(rank, kind, codec, options)
    with torch.no_grad():
        for p, value in zip(local(other), half):
            p.copy_(value)
    again.load_state_dict(gw.read_checkpoint(folder))
    return whole == rest(other), again.residual_hash() == hook.residual_hash()


@pytest.mark.parametrize(
    "kind, codec, options",
    [
        ("ddp", "fp32", {}),
        ("ddp", "qsgd:bits=4", {"owner_feedback": False}),
        ("ddp", OFTEN, {}),
        ("shards", "qsgd:bits=4", {}),
        ("shards", OFTEN, {}),
        ("shards", "onebit", {"feedback": True}),
        ("replicas", "fp32", {}),
        ("mesh", "qsgd:bits=4", {"gradients": "qsgd:bits=8"}),
        ("mesh", OFTEN, {"gradients": OFTEN, "weights": "unigrid:bits=8"}),
        ("mesh", None, {"gradients": OFTEN, "feedback": True}),
    ],
)
def test_a_training_goes_on_from_a_checkpoint(ranks, tmp_path, kind, codec, options):
    assert all(found == (True, True) for found in run(ranks, kind, stopped, codec, options, str(tmp_path)))


def wrapped(rank):
    """A state from before activation checkpointing was turned on, and a rule by the name of a parameter."""
    codec = "0.weight=fp32;*=onebit"
    _, _, hook = prepared(rank, codec)
    inner = network()
    inner[0], inner[2] = checkpoint_wrapper(inner[0]), checkpoint_wrapper(inner[2])
    ddp = DDP(inner, process_group=rank.group)
    again = gw.compress(ddp, codec)
    again.load_state_dict(hook.state_dict())
    ddp(torch.ones(2, 64)).sum().backward()
    return [name for name in again.stats()["parameters"]], again.step


def test_activation_checkpointing_changes_no_names(ranks):
    for names, steps in ranks.run(2, wrapped):
        assert names == [name for name, _ in network().named_parameters()] and steps == 1
