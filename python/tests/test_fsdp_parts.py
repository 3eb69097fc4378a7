# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a unit of FSDP2 are in a buffer, and what becomes of them: those that are frozen, unfrozen,
empty, without a gradient in a step, or inside of what wraps a module; and what a state must have of each of them.
"""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("test_fsdp", reason="this torch has no Gloo or no set_custom_reduce_scatter")

import gradwire
import gradwire.torch as gw
from gradwire.torch import _units
from test_fsdp import Net, batch, equal, parameters, sharded, train
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh


def partly_frozen(dimensions=2):
    """Parameters with so many dimensions are frozen."""
    torch.manual_seed(3)
    model = Net()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() != dimensions)
    return model


def pairs(one, other):
    """Parameters that have a gradient."""
    both = zip(one.named_parameters(), other.parameters())
    return [(name, a, b) for (name, a), b in both if a.grad is not None]


def refused(function, *arguments):
    try:
        function(*arguments)
    except gradwire.Error as error:
        return f"{type(error).__name__}: {error}"
    return None


# Frozen and unfrozen.


def vectors_alone(rank, dtype, policy):
    """All matrices have a codec and are frozen, so all that is sent is fp32."""
    options = dict(mp_policy=fsdp.MixedPrecisionPolicy(**policy)) if policy else {}
    plain, model = (sharded(rank, model=partly_frozen().to(dtype), **options) for _ in range(2))
    hook = gw.compress(model, "qsgd:bits=4", min_elements=0)
    x, y = (part.to(dtype) for part in batch(rank, 0))
    for one in plain, model:
        (one(x) - y).square().mean().backward()
    same = all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for _, a, b in pairs(plain, model))
    return same, hook.stats()["gradients"]["last_step"]["bytes"]


@pytest.mark.parametrize(
    "dtype, policy, size",
    [(torch.float32, {}, 4), (torch.float32, dict(param_dtype=torch.bfloat16), 2), (torch.float64, {}, 8)],
)
def test_where_only_vectors_are_trained_torch_sends_them(ranks, dtype, policy, size):
    shards = 3 * 23 + 2  # of the biases, with padding
    for same, sent in ranks.run(3, vectors_alone, dtype, policy):
        assert same and sent == 2 * shards * size


def unfrozen(rank, codec, feedback):
    """The matrices of one module are trained from the second step on, and then those of another."""
    plain, model = (sharded(rank, model=partly_frozen()) for _ in range(2))
    model.blocks[0].weight.requires_grad_(True)
    plain.blocks[0].weight.requires_grad_(True)
    hook = gw.compress(model, codec, feedback=feedback, min_elements=0)
    bits, words = [], []
    for block in 0, 1, 2:
        for one in plain, model:
            one.blocks[block].weight.requires_grad_(True)
            one.zero_grad()
        x, y = batch(rank, block)
        (plain(x) - y).square().mean().backward()
        words.append(refused(lambda: (model(x) - y).square().mean().backward()))
        if words[-1]:
            break
        bits.append(hook.stats()["gradients"]["bits"])
    if words[-1]:
        return words, bits, {}
    grads = {name: (a.grad.full_tensor(), b.grad.full_tensor()) for name, a, b in pairs(plain, model)}
    return words, bits, {name: ((a - b).abs().max() / a.abs().max()).item() for name, (a, b) in grads.items()}


def test_without_feedback_a_parameter_can_be_trained_later_and_is_compressed(ranks):
    for words, bits, errors in ranks.run(2, unfrozen, "unigrid:bits=16", False):
        assert words == [None] * 3 and bits[0] > bits[1] > bits[2] > 16
        assert all(0 < errors[f"blocks.{i}.weight"] < 1e-3 for i in range(3))


@pytest.mark.parametrize(
    "codec, feedback", [("qsgd:bits=4", True), ("optquant:bits=4", False), ("*.bias=fp32;*=dqsgd:budget=4", False)]
)
def test_where_something_is_kept_a_parameter_that_is_trained_later_is_refused(ranks, codec, feedback):
    """Also in a unit that had nothing to compress before."""
    for words, bits, _ in ranks.run(2, unfrozen, codec, feedback):
        assert len(words) == 2 and words[0] is None and len(bits) == 1
        assert words[1] == (
            "UsageError: parameter 'blocks.1.weight' requires a gradient, and did not when compress was called; call "
            "compress again"
        )


def exact_later(rank):
    """What has no codec has nothing that is kept."""
    model = sharded(rank, model=partly_frozen(dimensions=1))
    hook = gw.compress(model, "qsgd:bits=4", feedback=True)
    train(rank, model, 1)
    model.blocks[1].bias.requires_grad_(True)
    train(rank, model, 1, first=1)
    return hook.step


def test_a_vector_can_be_trained_later(ranks):
    assert ranks.run(2, exact_later) == [2, 2]


# Without elements.


def with_an_empty_one(rank):
    """Frozen, because torch refuses to reduce-scatter it."""
    model = Net()
    model.empty = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
    model = sharded(rank, model=model)
    hook = gw.compress(model, "qsgd:bits=4", weights="unigrid:bits=8", feedback=True, min_elements=0)
    losses = train(rank, model, 20)
    hook.load_state_dict(hook.state_dict())
    train(rank, model, 1)
    return losses[-1] < losses[0]


def test_a_parameter_without_elements_is_left_out(ranks):
    assert all(ranks.run(3, with_an_empty_one))


# Without a gradient.


class Layers(nn.Module):
    """One unit, of which a step uses some layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20) for _ in range(6)])
        self.used = set()

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) if number in self.used else x
        return x


def drops_layers(rank, codec, most):
    before, _units._MOST_CODERS = _units._MOST_CODERS, most
    try:
        torch.manual_seed(3)
        model = fsdp.fully_shard(Layers(), mesh=DeviceMesh.from_group(rank.group, "cpu"))
        hook = gw.compress(model, codec, weights="unigrid:bits=8", feedback=True, min_elements=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw, counts, seen = random.Random(5), [], set()
        for step in range(40):
            model.used = {number for number in range(6) if draw.random() < 0.7} or {0}
            seen.add(frozenset(model.used))
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(sum(len(coder._coders) for coder in hook._gradients.coders.values()))
        return parameters(model), hook.residual_hash(), max(counts), len(seen)
    finally:
        _units._MOST_CODERS = before


@pytest.mark.parametrize("codec", ["qsgd:bits=2", "optquant:bits=2,refit=3"])
def test_coders_of_sets_of_parameters_are_bounded_and_change_no_bit(ranks, codec):
    kept, few = ranks.run(2, drops_layers, codec, 10**6), ranks.run(2, drops_layers, codec, _units._MOST_CODERS)
    for (weights, residuals, count, sets), (our_weights, our_residuals, bounded, _) in zip(kept, few):
        assert count == sets > 2 * _units._MOST_CODERS and bounded == _units._MOST_CODERS
        assert equal(weights, our_weights) and residuals == our_residuals


# In a wrapper.


def wrapped(rank):
    """Rules by name, for gradients and for weights, where names have wrappers in them."""
    answers = []
    for gradients, weights in (
        (None, None), ("0.weight=fp32;1.*=unigrid:bits=16;*=unigrid:bits=16", "1.weight=fp32;*=unigrid:bits=16")
    ):
        torch.manual_seed(3)
        model = nn.Sequential(*[checkpoint_wrapper(nn.Linear(40, 40)) for _ in range(3)])
        mesh = DeviceMesh.from_group(rank.group, "cpu")
        for i in range(3):
            model[i] = fsdp.fully_shard(torch.compile(model[i], backend="eager"), mesh=mesh)
        compiled = torch.compile(fsdp.fully_shard(model, mesh=mesh), backend="eager")
        hook = gw.compress(compiled, gradients, weights=weights, min_elements=0) if gradients else None
        for step in range(3):
            draw = torch.Generator().manual_seed(10 * step + rank.rank)
            compiled(torch.randn(4, 40, generator=draw)).square().sum().backward()
        answers.append([p.grad.full_tensor() for p in model.parameters()])
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*answers)), hook._names(), hook.step


def test_rules_by_name_with_compile_and_activation_checkpointing(ranks):
    for worst, names, steps in ranks.run(2, wrapped):
        assert 0 < worst < 1e-2 and steps == 3
        assert names == [f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]


# States.


def saves(rank, codec, feedback, frozen):
    """The state, and weights and residuals after one step more."""
    model = sharded(rank)
    model.blocks[0].weight.requires_grad_(not frozen)
    hook = gw.compress(model, codec, feedback=feedback, min_elements=0)
    train(rank, model, 6)
    return hook.state_dict()


def loads(rank, states, codec, feedback, steps):
    """Into a hook that has taken so many steps. What load_state_dict raises, and whether it changed anything."""
    model = sharded(rank)
    hook = gw.compress(model, codec, feedback=feedback, min_elements=0)
    if steps:
        train(rank, model, steps)
    before = hook.step, hook.residual_hash(), sorted(hook.state_dict()["ranks"][str(rank.rank)]["up"])
    words = refused(hook.load_state_dict, states[rank.rank])
    same = before == (hook.step, hook.residual_hash(), sorted(hook.state_dict()["ranks"][str(rank.rank)]["up"]))
    train(rank, model, 2)
    return words, same, hook.step


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("codec", ["qsgd:bits=4", "optquant:bits=3,refit=2"])
def test_a_state_without_the_residual_of_a_parameter_is_refused_when_it_is_loaded(ranks, codec, steps):
    states = ranks.run(2, saves, codec, True, True)
    for words, same, step in ranks.run(2, loads, states, codec, True, steps):
        assert words == "UsageError: the state has no residual of 'blocks.0.weight/0'" and same and step == steps + 2


@pytest.mark.parametrize("steps", [0, 2])
def test_a_residual_of_another_size_is_refused_when_it_is_loaded(ranks, steps):
    states = ranks.run(2, saves, "qsgd:bits=4", True, False)
    states[1]["ranks"]["1"]["up"]["head.weight/1"] = torch.zeros(7)
    words = "'head.weight/1' has 201 elements; its residual in the state has 7"
    for rank, (found, same, step) in enumerate(ranks.run(2, loads, states, "qsgd:bits=4", True, steps)):
        told = "MismatchError: rank 1 cannot take part: " if rank == 0 else "UsageError: "
        assert found == told + words and same and step == steps + 2


@pytest.mark.parametrize("steps", [0, 2])
def test_residuals_of_modules_are_refused_as_older_hooks_saved_them(ranks, steps):
    states = ranks.run(2, saves, "qsgd:bits=4", True, False)
    for rank, state in enumerate(states):
        state["ranks"][str(rank)]["up"] = {f"blocks.{i}/{p}": torch.zeros(9) for i in range(3) for p in range(2)}
    words = "UsageError: the state has a residual of 'blocks.0/0', but no such parameter of this model is sharded"
    for found, same, step in ranks.run(2, loads, states, "qsgd:bits=4", True, steps):
        assert found == words and same and step == steps + 2


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("codec", ["optquant:bits=3,refit=2", "dqsgd:budget=3", "qsgd:bits=4"])
def test_a_state_without_residuals_loads_with_what_was_learned(ranks, codec, feedback, steps):
    states = ranks.run(2, saves, codec, False, False)
    assert all(not state["ranks"][str(rank)]["up"] for rank, state in enumerate(states))
    for words, _, step in ranks.run(2, loads, states, codec, feedback, steps):
        assert words is None and step == 6 + 2


def changes_before_the_first_step(rank, states):
    """A state is for the codecs that it was loaded with: what gets a residual later begins without one."""
    model = sharded(rank)
    hook = gw.compress(model, "blocks.0.weight=fp32;head.*=fp32;1d=fp32;*=qsgd:bits=4", feedback=True)
    hook.load_state_dict(states[rank.rank])
    hook.set_codec("head.bias=qsgd:bits=4;1d=fp32;*=qsgd:bits=4")
    train(rank, model, 1, first=6)
    up = hook.state_dict()["ranks"][str(rank.rank)]["up"]
    return sorted(name for name, values in up.items() if values.abs().max() > 0)


def test_a_codec_may_change_between_a_state_and_the_first_step(ranks):
    states = ranks.run(2, saves, "head.bias=fp32;1d=fp32;*=qsgd:bits=4", True, True)
    matrices = ("blocks.0.weight", "blocks.1.weight", "blocks.2.weight", "head.bias", "head.weight")
    for names in ranks.run(2, changes_before_the_first_step, states):
        assert names == [f"{name}/{p}" for name in matrices for p in range(2)]


def drops_restored(rank, states):
    """Residuals that a new codec drops do not come back from a state that was loaded before."""
    model = sharded(rank)
    hook = gw.compress(model, "qsgd:bits=4", feedback=True, min_elements=0)
    hook.load_state_dict(states[rank.rank])
    train(rank, model, 1)
    found = []
    for codec in "fp32", "qsgd:bits=4":
        hook.set_codec(codec)
        found.append(sorted(hook.state_dict()["ranks"][str(rank.rank)]["up"]))
        train(rank, model, 1)
    return found


def test_residuals_that_are_dropped_stay_dropped_after_a_state_was_loaded(ranks):
    states = ranks.run(2, saves, "qsgd:bits=4", True, False)
    assert ranks.run(2, drops_restored, states) == [[[], []]] * 2
