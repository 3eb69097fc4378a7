# SPDX-License-Identifier: Apache-2.0
"""What the hook for replicas reads from torch's own objects: meshes with axes for other kinds of parallelism, as
torchtitan makes them, and the types that gradients are reduced in, which differ between versions of torch.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("test_hsdp", reason="this torch has no Gloo or no set_custom_reduce_scatter")

import gradwire
import gradwire.torch as gw
from gradwire.torch import _replica_group
from test_hsdp import _MESHES, Net, backward, batch, difference, gradients, local, made, run
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate_with_fsdp

# Meshes with more axes than those that FSDP shards and replicates over.


def on_all_axes(rank, shape, **axes):
    """Every parameter is a DTensor on the whole mesh, and FSDP is told its axes. On one axis by replicate()."""
    from torch.distributed.tensor import distribute_module

    mesh = _MESHES[shape]
    torch.manual_seed(3)
    model = distribute_module(Net(), mesh)
    dims = fsdp.DataParallelMeshDims(**axes)
    wrap = fsdp.fully_shard if len(shape) > 1 else replicate_with_fsdp.replicate
    for block in model.blocks:
        wrap(block, mesh=mesh, dp_mesh_dims=dims)
    return wrap(model, mesh=mesh, dp_mesh_dims=dims)


def step_on_all_axes(rank, shape, model, step):
    """Inputs are DTensors too: each rank has its own batch."""
    from torch.distributed.tensor import DTensor, Shard

    x, y = (DTensor.from_local(one, _MESHES[shape], [Shard(0)] * len(shape)) for one in batch(rank, step))
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss.detach()


def beside_plain(rank, shape, axes):
    """Gradients of the first step, and parameters after the last one, beside torch's."""
    found = []
    for codec in (None, "unigrid:bits=16"):
        model = on_all_axes(rank, shape, **axes)
        hook = gw.compress(model, codec, min_elements=0) if codec else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            step_on_all_axes(rank, shape, model, step)
            found += [gradients(model)] if step == 0 else []
            optimizer.step()
            optimizer.zero_grad()
        found.append(local(model))
    first, last, our_first, our_last = found
    return difference(first, our_first), difference(last, our_last), hook.step, hook.stats()


needs_axes = pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="this torch has no dp_mesh_dims for fully_shard"
)


@needs_axes
@pytest.mark.parametrize(
    "shape, axes, mesh",
    [
        ((2, 2, 1), dict(replicate="replicate", shard="shard"), (2, 2)),  # an axis with one rank changes nothing
        ((2, 2), dict(replicate="replicate", shard="shard"), (2, 2)),
        ((4,), dict(replicate="replicate"), (4, 1)),
        # Two axes that are one to FSDP. torch then makes process groups, which all ranks must do.
        ((3, 1, 2), dict(replicate="replicate", shard=("shard", "more")), (3, 2)),
        ((2, 3), dict(replicate=("replicate", "shard")), (6, 1)),
    ],
)
def test_axes_of_fsdp_on_a_mesh_of_all_axes(ranks, shape, axes, mesh):
    names = sorted(name for name, _ in Net().named_parameters())
    for first, last, steps, stats in run(ranks, shape, beside_plain, axes):
        assert 0 < first < 1e-3 and 0 < last < 1e-3 and steps == 4
        assert sorted(stats["parameters"]) == names
        assert stats["mesh"] == dict(zip(("replicas", "shards"), mesh))


def shard_axis_too(rank, shape):
    """gradients= and weights=, which are for the shard axis; then the momentum of Adam."""
    falls = []
    for codec, options in (
        ("optquant:bits=4", dict(gradients="qsgd:bits=8", weights="unigrid:bits=8")),
        ("onebit", dict(optimizer=True)),
    ):
        model = on_all_axes(rank, shape, replicate="replicate", shard="shard")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if "optimizer" in options:
            options["optimizer"] = optimizer
        hook = gw.compress(model, codec, min_elements=64, **options)
        losses = []
        for step in range(12):
            losses.append(step_on_all_axes(rank, shape, model, 0).full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
        falls.append(losses[-1] / losses[0])
        hook.load_state_dict(hook.state_dict())
    return falls


@needs_axes
def test_all_options_on_a_mesh_of_all_axes(ranks):
    for falls in run(ranks, (2, 3, 1), shard_axis_too):
        assert max(falls) < 0.9


def refused_axis(rank, shape):
    with pytest.raises(gradwire.UnsupportedError) as refused:
        gw.compress(on_all_axes(rank, shape, replicate="replicate", shard="shard"), "qsgd:bits=4")
    return str(refused.value), refused.value.field


@needs_axes
def test_an_axis_with_several_ranks_is_refused_by_name(ranks):
    for words, field in run(ranks, (2, 1, 2), refused_axis):
        assert "on axis 'more' of its mesh, with 2 ranks" in words and field == "mesh"


def test_a_parameter_that_is_distributed_without_a_mesh_for_all_is_refused():
    with pytest.raises(gradwire.UnsupportedError, match="'weight' is distributed by tensor parallelism too"):
        _replica_group._refuse_other_axes("weight", SimpleNamespace())


# The types that gradients are reduced in.


def parameter(reduce=None, compute=None, **kept):
    """As FSDP has it. kept: what p.grad_dtype is, which FSDP goes by since 2.15."""
    policy = SimpleNamespace(reduce_dtype=reduce, param_dtype=compute)
    one = SimpleNamespace(mp_policy=policy, sharded_param=SimpleNamespace(dtype=torch.float32))
    if "kept" in kept:
        one.sharded_grad_dtype = one.sharded_param.grad_dtype = kept["kept"]
    return one


@pytest.mark.parametrize(
    "given, found",
    [
        (dict(), torch.float32),
        (dict(compute=torch.bfloat16), torch.bfloat16),
        (dict(reduce=torch.float16, compute=torch.bfloat16), torch.float16),
        (dict(kept=torch.float32), torch.float32),
        (dict(compute=torch.bfloat16, kept=torch.float32), torch.float32),
        (dict(compute=torch.bfloat16, kept=torch.bfloat16), torch.bfloat16),
        (dict(reduce=torch.bfloat16, kept=None), torch.bfloat16),
    ],
)
def test_the_type_of_a_reduction(given, found):
    assert _replica_group._reduced_as("weight", parameter(**given)) == found


def test_gradients_of_any_type_are_refused():
    with pytest.raises(gradwire.UnsupportedError, match="'weight' may have any type"):
        _replica_group._reduced_as("weight", parameter(kept=None))


@pytest.mark.parametrize(
    "one, group, converted",
    [
        (parameter(), SimpleNamespace(_orig_dtype=torch.float32), False),
        (parameter(), SimpleNamespace(_orig_dtype=torch.bfloat16), True),
        (parameter(), SimpleNamespace(), True),  # a torch that has neither: results count as read at once
        (parameter(kept=torch.float32), SimpleNamespace(), False),
        (parameter(kept=torch.bfloat16), SimpleNamespace(), True),
        (parameter(kept=None), SimpleNamespace(), False),
    ],
)
def test_whether_a_result_is_converted(one, group, converted):
    assert _replica_group._is_converted(group, one, torch.float32) == converted


class Mixed(nn.Module):
    """Gradients of two types, which torch reduces in one buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(33, 20), nn.Linear(20, 5)
        self.blocks = []

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def of_two_types(rank, shape, late):
    found = []
    for codec in (None, "unigrid:bits=16"):
        model = Mixed()
        if not late:
            model.second.weight.grad_dtype = torch.bfloat16
        made(rank, shape, model)
        if late:  # FSDP takes it over in the first forward pass
            model.second.weight.grad_dtype = torch.bfloat16
        for one in model.parameters():
            nn.init.constant_(one, 0.02)
        if codec:
            hook = gw.compress(model, codec, min_elements=0)
        x, y = batch(rank, 0)
        (model(x) - y).square().mean().backward()
        found.append(gradients(model))
    return difference(*found), found[1]["second.weight"].dtype, hook.step


needs_own_types = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15), reason="this torch has one type for all gradients"
)


@needs_own_types
@pytest.mark.parametrize("late", [False, True])
def test_gradients_of_two_types_in_one_buffer(ranks, late):
    for worst, kept, steps in run(ranks, (2, 2), of_two_types, late):
        assert 0 < worst < 0.02 and kept == torch.bfloat16 and steps == 1


def changes_type(rank, shape):
    """The only gradient of type float32 in a buffer is missing, so that torch reduces the others as bfloat16."""
    model = Net()
    for name, one in model.named_parameters():
        if name != "spare":
            one.grad_dtype = torch.bfloat16
    made(rank, shape, model)
    hook = gw.compress(model, "qsgd:bits=4", min_elements=0)
    with pytest.raises(gradwire.UnsupportedError) as refused:
        backward(rank, model, 0)
    return str(refused.value), hook.step


@needs_own_types
def test_another_type_than_compress_saw_is_refused(ranks):
    for words, steps in run(ranks, (2, 2), changes_type):
        assert "is reduced as bfloat16; when compress was called it was to be float32" in words and steps == 0
