# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a unit of FSDP2 are in a buffer, and what becomes of them: those that are frozen, unfrozen,
empty, without a gradient in a step, or inside of what wraps a module; and what a state must have of each of them.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("test_fsdp", reason="this torch has no Gloo or no set_custom_reduce_scatter")

import gradwire
import gradwire.torch as gw
from test_fsdp import Net, batch, sharded, train
from torch.distributed import fsdp


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
