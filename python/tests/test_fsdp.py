# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with gradients and weights compressed, on Gloo and the CPU: what is left to torch has torch's bits, ranks
compute with the same weights, residuals follow the steps that count, and what cannot be done is refused by name.
"""

import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not dist.is_gloo_available() or not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter"):
    pytest.skip("this torch has no Gloo or no set_custom_reduce_scatter", allow_module_level=True)

import gradwire
import gradwire.torch as gw
from gradwire.torch import _fsdp, _fsdp_doors
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard


class Seen(nn.Linear):
    """Remembers the weights that it was computed with."""

    def forward(self, x):
        x = x.clone() if x.requires_grad else x.clone().requires_grad_(torch.is_grad_enabled() and not x.is_inference())
        self.in_forward = self.weight.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda gradient: setattr(self, "in_backward", self.weight.detach().clone()))
        return super().forward(x)


class Net(nn.Module):
    """Sizes that no world divides."""

    def __init__(self, width=67):
        super().__init__()
        self.blocks = nn.ModuleList([Seen(33, width), Seen(width, width), Seen(width, width)])
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def sharded(rank, *, mesh=None, model=None, **options):
    torch.manual_seed(3)
    model = model or Net()
    mesh = mesh or DeviceMesh.from_group(rank.group, "cpu")
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, **options)
    return fsdp.fully_shard(model, mesh=mesh, **options)


def batch(rank, step):
    draw = torch.Generator().manual_seed(1000 * step + rank.rank)
    x = torch.randn(16, 33, generator=draw)
    return x, x[:, :5]


def train(rank, model, steps=4, first=0, lr=0.5, after=None):
    """Losses, mean of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(first, first + steps):
        x, y = batch(rank, step)
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        if after is not None:
            after(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=rank.group)
    return (mean / rank.world).tolist()


def parameters(model):
    """As they are gathered exactly, whatever carries them in a step."""
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def alike(rank, tensors):
    """Whether all ranks have the same bits."""
    flat = torch.cat([t.detach().float().flatten() for t in tensors])
    every = [torch.empty_like(flat) for _ in range(rank.world)]
    dist.all_gather(every, flat, group=rank.group)
    return all(torch.equal(one, flat) for one in every)


def refusal(ranks, world, function, *arguments):
    """{kind: the words of rank 0, up to a colon or so}: all ranks must refuse."""
    from ranks import RankError

    with pytest.raises(RankError) as caught:
        ranks.run(world, function, *arguments)
    assert set(caught.value.errors) == set(range(world))
    kind, words = caught.value.errors[0]
    for cut in (": residuals", " of this model"):
        words = words.partition(cut)[0]
    return {kind: words}


# What is left to torch.


def same_as_plain(rank, gradients, weights):
    plain, model = sharded(rank), sharded(rank)
    gw.compress(model, gradients, weights=weights)
    return train(rank, plain) == train(rank, model) and equal(parameters(plain), parameters(model))


@pytest.mark.parametrize("gradients, weights", [("fp32", "fp32"), (None, None), ("fp32", None)])
def test_fp32_and_none_are_plain_fsdp_bit_for_bit(ranks, gradients, weights):
    assert all(ranks.run(3, same_as_plain, gradients, weights))


def close_to_plain(rank, change):
    """Through the whole path: unigrid:bits=16 leaves 2^-15 of a bucket's largest magnitude, at most, in a gradient."""
    plain, model = sharded(rank), sharded(rank)
    hook = gw.compress(model, "unigrid:bits=16", weights=None, min_elements=0)
    for one in plain, model:
        change(one) if callable(change) else None
    x, y = batch(rank, 0)
    for one in plain, model:
        (one(x) - y).square().mean().backward()
    worst = 0.0
    for (name, a), b in zip(plain.named_parameters(), model.parameters()):
        a, b = a.grad.full_tensor(), b.grad.full_tensor()
        worst = max(worst, ((a - b).abs().max() / a.abs().max()).item())
    return worst, hook.stats()["gradients"]["bits"]


def close_with_sums(rank):
    def force(model):
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    return close_to_plain(rank, force)


@pytest.mark.parametrize("function", ["mean", "sum"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_fine_grid_gives_the_gradients_of_plain_fsdp(ranks, world, function):
    outcomes = ranks.run(world, close_to_plain, None) if function == "mean" else ranks.run(world, close_with_sums)
    for worst, bits in outcomes:
        assert 0 < worst < 1e-3  # a bucket holds several parameters, and the largest of them sets the grid
        assert 16 < bits < 20


def divided(rank):
    """A divisor of one's own, which Gloo does not support and the coder does."""
    model, usual = sharded(rank), sharded(rank)
    for one in model, usual:
        gw.compress(one, "unigrid:bits=16", weights=None, min_elements=0)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(8.0 * rank.world)
    x, y = batch(rank, 0)
    for one in model, usual:
        (one(x) - y).square().mean().backward()
    return all(
        torch.equal(8 * a.grad.to_local(), b.grad.to_local()) for a, b in zip(model.parameters(), usual.parameters())
    )


def test_a_gradient_divide_factor_is_kept(ranks):
    assert all(ranks.run(2, divided))


# Training.


def trains(rank, gradients, weights, options, steps=40):
    model = sharded(rank, **options)
    hook = gw.compress(model, gradients, weights=weights, min_elements=64)
    losses = train(rank, model, steps)
    same = alike(rank, [seen for block in model.blocks for seen in (block.in_forward, block.in_backward)])
    both = all(torch.equal(block.in_forward, block.in_backward) for block in model.blocks)
    return losses[0], losses[-1], same, both, hook.stats()


def on_the_grid(rank):
    """In the first step, before the optimizer: what modules see against what is sharded."""
    model = sharded(rank)
    gw.compress(model, None, weights="unigrid:bits=4", min_elements=0)
    exact = parameters(model)["blocks.1.weight"]
    model(batch(rank, 0)[0])
    seen = model.blocks[1].in_forward
    model.reshard()
    again = parameters(model)["blocks.1.weight"]
    return torch.equal(exact, again), (seen - exact).abs().max().item(), exact.abs().max().item() / 7, len(
        seen.unique()
    )


def test_modules_see_weights_on_the_grid_and_the_shards_stay_exact(ranks):
    for exact, error, grid, values in ranks.run(2, on_the_grid):
        assert exact
        assert 0 < error <= 1.01 * grid / 2  # to nearest, but for what the codec rounds its threshold to
        assert values < 15 * 8  # fifteen values a bucket of 1024, a few buckets


@pytest.mark.parametrize(
    "gradients, weights", [
        ("qsgd:bits=4", "unigrid:bits=8"),
        ("optquant:bits=4", "bf16"),
        ("dqsgd:budget=4", "qsgd:bits=8"),
        ("fft:theta=0.5", None),
    ]
)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_compute_with_the_same_weights_and_learn(ranks, world, gradients, weights):
    for first, last, same, both, stats in ranks.run(world, trains, gradients, weights, {}):
        assert same and both
        assert last < 0.6 * first
        assert stats["steps"] == 40 and stats["skipped"] == 0
        assert stats["gradients"]["bits"] < 25 and stats["gradients"]["ratio"] == 32 / stats["gradients"]["bits"]
        if weights is not None:
            assert 0 < stats["weights"]["bits"] < 20 and stats["weights"]["last_step"]["bytes"] > 0


@pytest.mark.parametrize("reshard", [True, False])
def test_weights_are_gathered_once_or_twice_a_step(ranks, reshard):
    for *_, same, both, stats in ranks.run(
        2, trains, "qsgd:bits=4", "unigrid:bits=8", {"reshard_after_forward": reshard}, 3
    ):
        assert same and both
        shards = 34 * 33 + 34 + 2 * (34 * 67 + 34)  # of the blocks, for the other rank
        head = 3 * 67 + 3  # the root's: it stays gathered after forward unless told otherwise
        gathers = shards + head if not reshard else 2 * (shards + head)
        sent = stats["weights"]["last_step"]["bytes"] * 8 / stats["weights"]["bits"]
        assert round(sent) == gathers


def mixed(rank):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trains(rank, "qsgd:bits=4", "unigrid:bits=8", {"mp_policy": policy})


def mixed_all_bf16(rank):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return trains(rank, "qsgd:bits=8", "unigrid:bits=8", {"mp_policy": policy})


@pytest.mark.parametrize("function", [mixed, mixed_all_bf16])
def test_mixed_precision(ranks, function):
    for first, last, same, both, _ in ranks.run(3, function):
        assert same and both and last < 0.6 * first


def accumulates(rank):
    model = sharded(rank)
    hook = gw.compress(model, "qsgd:bits=8", weights="unigrid:bits=8")
    steps = []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        x, y = batch(rank, step)
        (model(x) - y).square().mean().backward()
        steps.append(hook.step)
    plain = sharded(rank)
    for step in range(4):
        x, y = batch(rank, step)
        (plain(x) - y).square().mean().backward()
    # Eight bits of weights and of gradients are close to the exact thing, and no microbatch is missing.
    a, b = (torch.cat([p.grad.full_tensor().flatten() for p in one.parameters()]) for one in (model, plain))
    return steps, ((a - b).norm() / b.norm()).item()


def test_gradient_accumulation_sends_once(ranks):
    for steps, error in ranks.run(2, accumulates):
        assert steps == [0, 1, 1, 2]
        assert error < 0.05


def evaluates(rank):
    model = sharded(rank)
    gw.compress(model, "qsgd:bits=4", weights="unigrid:bits=8")
    x = batch(rank, 0)[0]
    with torch.no_grad():
        before = model(x)
    losses = train(rank, model, 3)
    with torch.inference_mode():
        between = model(x)
    losses += train(rank, model, 3)
    with torch.no_grad():
        after = model(x)
    return losses, not torch.equal(before, between) and not torch.equal(between, after)


def test_evaluation_before_between_and_after_training(ranks):
    for losses, changed in ranks.run(2, evaluates):
        assert losses[-1] < losses[0] and changed


def only_weights(rank):
    model = sharded(rank)
    hook = gw.compress(model, None, weights="unigrid:bits=8")
    losses = train(rank, model, 20)
    return losses, hook.stats()


def test_weights_alone(ranks):
    for losses, stats in ranks.run(2, only_weights):
        assert losses[-1] < losses[0] and 8 < stats["weights"]["bits"] < 10
        assert stats["gradients"]["all_steps"]["bytes"] == 0


def uses_a_module_twice(rank):
    class Twice(Net):
        def forward(self, x):
            return super().forward(x) + super().forward(-x)

    model = sharded(rank, model=Twice())
    hook = gw.compress(model, "qsgd:bits=4", weights="unigrid:bits=8", feedback=True)
    losses = train(rank, model, 30)
    return losses, alike(rank, parameters(model).values()), hook.stats()


def test_a_module_that_is_used_twice_sends_once_and_trains(ranks):
    for losses, same, stats in ranks.run(2, uses_a_module_twice):
        assert losses[-1] < losses[0] and same
        assert stats["steps"] == 30 and stats["skipped"] == 0


def hybrid(rank):
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    model = sharded(rank, mesh=mesh)
    hook = gw.compress(model, None, gradients="optquant:bits=4", weights="unigrid:bits=8", feedback=True)
    losses = train(rank, model, 20)
    return losses, alike(rank, parameters(model).values()), hook.stats()


def test_a_hybrid_mesh_can_compress_its_shard_dimension_only(ranks):
    for losses, same, stats in ranks.run(6, hybrid):
        assert losses[-1] < losses[0] and same and stats["gradients"]["bits"] < 16


# Refusals.


def compresses(rank, keywords):
    gw.compress(sharded(rank), **{"codec": "qsgd:bits=4", **keywords})


@pytest.mark.parametrize(
    "keywords, kind, words",
    [
        (dict(codec="qsgd:bits=99"), "UsageError", "bits"),
        (dict(weights="nonsense"), "UsageError", "nonsense"),
        (dict(weights="optquant:bits=4"), "UnsupportedError", "a codec that learns"),
        (dict(codec=4), "UsageError", "codec is of type int"),
        (dict(residual=torch.float64), "UsageError", "residual is torch.float64"),
    ],
)
def test_bad_options_are_refused(ranks, keywords, kind, words):
    ((found, text),) = refusal(ranks, 2, compresses, keywords).items()
    assert found == kind and words in text


def not_sharded(rank):
    gw.compress(Net(), "qsgd:bits=4")


def sharded_by_fsdp1(rank):
    gw.compress(
        fsdp.FullyShardedDataParallel(Net(), process_group=rank.group, device_id=torch.device("cpu")), "qsgd:bits=4"
    )


def disagrees(rank):
    gw.compress(sharded(rank), f"qsgd:bits={4 + rank.rank}")


def several_types(rank):
    model = Net()
    model.register_parameter("frozen", nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False))
    model = sharded(rank, model=model)
    gw.compress(model, None, weights="unigrid:bits=8", min_elements=0)
    model(batch(rank, 0)[0])


def part_of_the_world(rank):
    # All ranks make its groups.
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    if rank.rank >= 4:
        return "not in it"
    with pytest.raises(gradwire.UnsupportedError) as caught:
        gw.compress(sharded(rank, mesh=mesh), None, gradients="qsgd:bits=4")
    return str(caught.value)


def test_the_shard_dimension_of_a_hybrid_mesh_of_some_ranks_is_refused(ranks):
    words = ranks.run(6, part_of_the_world)
    assert all("it must have all ranks" in one for one in words[:4])


@pytest.mark.parametrize(
    "function, kind, words",
    [
        (not_sharded, "UsageError", "call torch.distributed.fsdp.fully_shard on it, first"),
        (sharded_by_fsdp1, "UnsupportedError", "fully_shard"),
        (disagrees, "MismatchError", "ranks disagree about codec"),
        (several_types, "UnsupportedError", "module '(root)' sends uint8"),
    ],
)
def test_models_and_ranks_that_do_not_fit_are_refused(ranks, function, kind, words):
    ((found, text),) = refusal(ranks, 2, function).items()
    assert found == kind and words in text


class Sometimes(Net):
    """Without its last block and its head it has no use for them; `extra` is of the same unit as the head."""

    all_of_it = True

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(5, 1))

    def forward(self, x):
        for block in self.blocks if self.all_of_it else self.blocks[:2]:
            x = torch.tanh(block(x))
        return x[:, :5] + (self.head(x) if self.all_of_it else 0) + x[:, 5:10] * self.extra[:, 0]


def unused(rank, codec, feedback):
    """Residuals of what has no gradient in a step stay, and all others change."""
    model = sharded(rank, model=Sometimes())
    hook = gw.compress(model, codec, weights=None, feedback=feedback, min_elements=0)
    residuals = lambda: dict(hook.state_dict()["ranks"][str(rank.rank)]["up"])  # noqa: E731
    train(rank, model, 2)
    before, model.all_of_it = residuals(), False
    train(rank, model, 1, first=2)
    between, model.all_of_it = residuals(), True
    train(rank, model, 1, first=3)
    after = residuals()
    idle = {name for name in before if torch.equal(before[name], between[name])}
    return idle, {name for name in after if torch.equal(between[name], after[name])}, sorted(before)


@pytest.mark.parametrize("codec", ["qsgd:bits=2", "optquant:bits=2", "dqsgd:budget=3"])
def test_parameters_without_a_gradient_are_left_out_and_keep_their_residuals(ranks, codec):
    for idle, later, names in ranks.run(2, unused, codec, True):
        assert idle == {f"{name}/{p}" for name in ("blocks.2.weight", "head.weight") for p in range(2)}
        assert not later and len(names) == 2 * 5
    for idle, later, names in ranks.run(2, unused, codec, False):
        assert not names


def gradients_by_name(rank, rules, **options):
    """The worst error of each parameter's gradient, relative to its largest magnitude."""
    plain, model = sharded(rank), sharded(rank)
    gw.compress(model, rules, **options)
    x, y = batch(rank, 0)
    for one in plain, model:
        (one(x) - y).square().mean().backward()
    worst = {}
    for (name, a), b in zip(plain.named_parameters(), model.parameters()):
        a, b = a.grad.full_tensor(), b.grad.full_tensor()
        worst[name] = ((a - b).abs().max() / a.abs().max()).item()
    return worst


def test_rules_go_by_the_names_of_parameters(ranks):
    for worst in ranks.run(3, gradients_by_name, "blocks.1.*=unigrid:bits=16;*.bias=fp32;*=qsgd:bits=2"):
        for name, error in worst.items():
            if name.startswith("blocks.1."):
                assert 0 < error < 1e-4, name
            elif name.endswith(".bias"):
                assert error < 1e-6, name
            else:
                assert error > 0.01, name


def test_a_codec_leaves_out_vectors_and_small_parameters(ranks):
    for worst in ranks.run(2, gradients_by_name, "qsgd:bits=2"):
        large = {"blocks.0.weight", "blocks.1.weight", "blocks.2.weight"}  # the head has 335 elements
        assert {name for name, error in worst.items() if error > 1e-6} == large


def test_a_rule_that_matches_no_parameter_is_refused(ranks):
    kinds = refusal(ranks, 2, compresses, dict(codec="blocks.1=fp32;*=qsgd:bits=4"))
    assert kinds == {"UsageError": "the rule 'blocks.1=fp32' matches no sharded parameter"}


def columns(rank):
    """Weights that are sharded by columns, which every world must divide."""
    place = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else Shard(0)  # noqa: E731
    found = []
    for codec in (None, "unigrid:bits=16"):
        torch.manual_seed(3)
        model = sharded(rank, model=Net(66), shard_placement_fn=place)
        if codec:
            gw.compress(model, codec, weights=codec, min_elements=0)
        x, y = batch(rank, 0)
        (model(x) - y).square().mean().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    plain, ours = found
    return max(((a - ours[name]).abs().max() / a.abs().max()).item() for name, a in plain.items())


def test_parameters_that_are_sharded_by_columns(ranks):
    assert all(0 < worst < 1e-3 for worst in ranks.run(2, columns))


def frozen(rank):
    """A block that is not trained takes no residual; and one that is trained later is told."""
    model = sharded(rank)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    hook = gw.compress(model, "qsgd:bits=4", weights=None, feedback=True, min_elements=0)
    train(rank, model, 2)
    names = sorted(hook.state_dict()["ranks"][str(rank.rank)]["up"])
    model.blocks[1].weight.requires_grad_(True)
    with pytest.raises(gradwire.UsageError) as caught:
        train(rank, model, 1)
    return names, str(caught.value)


def test_what_is_not_trained_takes_no_residual(ranks):
    for names, words in ranks.run(2, frozen):
        assert names == [f"{name}.weight/{p}" for name in ("blocks.0", "blocks.2", "head") for p in range(2)]
        assert "'blocks.1.weight' requires a gradient, and did not when compress was called" in words


def weights_by_name(rank):
    model = sharded(rank)
    gw.compress(model, None, weights="blocks.1.weight=fp32;*.weight=unigrid:bits=4;*=fp32")
    exact = parameters(model)
    model(batch(rank, 0)[0])
    return [torch.equal(model.blocks[i].in_forward, exact[f"blocks.{i}.weight"]) for i in range(3)]


def test_weights_go_by_name_too(ranks):
    assert ranks.run(2, weights_by_name) == [[False, True, False]] * 2


def without_frames(rank):
    model = sharded(rank)
    gw.compress(model, "qsgd:bits=4")
    _fsdp_doors.sys = type("NoFrames", (), {"_getframe": staticmethod(lambda depth: None)})
    try:
        train(rank, model, 1)
    finally:
        _fsdp_doors.sys = sys


def test_a_torch_whose_buffers_are_not_known_is_refused(ranks):
    ((kind, words),) = refusal(ranks, 2, without_frames).items()
    assert kind == "UnsupportedError" and "has no foreach_reduce(fsdp_params, ...)" in words


def test_a_torch_without_custom_collectives_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(fsdp.FSDPModule, "set_custom_all_gather")
    with pytest.raises(gradwire.UnsupportedError, match="FSDPModule.set_custom_all_gather"):
        _fsdp.attach(Net(), "qsgd:bits=4", {})


# On a GPU.


def on_a_gpu(rank, gradients, weights):
    torch.cuda.set_device(0)
    model = sharded(rank, mesh=DeviceMesh.from_group(rank.group, "cuda"), model=Net().cuda())
    hook = gw.compress(model, gradients, weights=weights, feedback=True, min_elements=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(30):
        x, y = batch(rank, step)
        loss = (model(x.cuda()) - y.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    same = alike(rank, [seen.cpu() for block in model.blocks for seen in (block.in_forward, block.in_backward)])
    return losses[0], losses[-1], same, hook.stats()


@pytest.mark.parametrize("gradients, weights", [("qsgd:bits=4", "unigrid:bits=8"), ("optquant:bits=3", "bf16")])
def test_ranks_that_share_a_gpu_learn_over_gloo(ranks, cuda, gradients, weights):
    for first, last, same, stats in ranks.run(2, on_a_gpu, gradients, weights):
        assert same and last < 0.6 * first
        assert stats["skipped"] == 0 and stats["gradients"]["bits"] < 8


def counts_steps(rank):
    model = sharded(rank)
    hook = gw.compress(model, None, weights="unigrid:bits=8")
    for number in range(3):
        x, y = batch(rank, number)
        (model(x) - y).square().mean().backward()
        with torch.no_grad():
            for _ in range(4):
                model(torch.ones(2, 33))
    return hook.step


def test_an_evaluation_is_no_step(ranks):
    assert ranks.run(2, counts_steps) == [3, 3]


def tells(rank, codec, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gw.compress(sharded(rank), codec, **options)
    return [(str(one.message), one.filename.rpartition("/")[2]) for one in caught]


def test_a_codec_that_wants_feedback_says_so_where_there_is_none(ranks):
    for codec, options, told in (
        ("topk:ratio=0.1", {}, True),
        ("topk:ratio=0.1", {"feedback": True}, False),
        ("topk:ratio=0.1", {"feedback": False}, False),
        ("qsgd:bits=4", {}, False),
    ):
        first, second = ranks.run(2, tells, codec, options)
        assert second == [] and len(first) == told
        for words, file in first:
            assert "unless feedback=True" in words and file == "test_fsdp.py"
