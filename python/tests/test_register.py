# SPDX-License-Identifier: Apache-2.0
"""Codecs in Python: their values, residuals, bytes and state, and what is refused."""

import math
import textwrap
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import gradwire  # noqa: E402
import gradwire.torch as gw  # noqa: E402
from gradwire.torch import _register  # noqa: E402


def sign(x):
    return x.abs().mean() * x.sign(), x.numel() + 32


def largest(x):
    """The largest tenth, as values and indices."""
    count = max(1, x.numel() // 10)
    kept = x.abs().flatten().topk(count).indices
    y = torch.zeros_like(x).flatten()
    y[kept] = x.flatten()[kept]
    return y.view_as(x), 64 * count


def register_once():
    for name, function in (("py-sign", sign), ("py_largest", largest)):
        if _register.found(name) is None:
            gw.register(name, function)


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def batches(rank, steps):
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(4, 20, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(steps)]


def wrapped(rank, **options):
    return torch.nn.parallel.DistributedDataParallel(model(), process_group=rank.group, **options)


def as_written(rank, codec, feedback, decay, steps):
    """The hook against the formulas in its docstring, with plain torch; and bytes as declared."""
    register_once()
    function = {"py-sign": sign, "py_largest": largest}[codec]
    ddp, alone = wrapped(rank), model()
    hook = gw.compress(ddp, codec, feedback=feedback, min_elements=100, **({"decay": decay} if decay != 1 else {}))
    kept = {}
    for x, y in batches(rank.rank, steps):
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        torch.nn.functional.mse_loss(alone(x), y).backward()
        for (name, p), q in zip(ddp.module.named_parameters(), alone.parameters()):
            value = q.grad.clone()
            if p.dim() > 1 and p.numel() >= 100:
                value += decay * kept.get(name, torch.zeros_like(value))
                sent, _ = function(value.clone())
                if feedback:
                    kept[name] = value - sent
                value = sent
            value /= rank.world
            torch.distributed.all_reduce(value, group=rank.group)
            assert torch.allclose(p.grad, value, rtol=1e-5, atol=1e-7), name
        with torch.no_grad():
            for p, q in zip(ddp.module.parameters(), alone.parameters()):
                p -= 0.1 * p.grad
                q.copy_(p)
                p.grad = q.grad = None
    stats = hook.stats()
    declared = {"py-sign": [800 + 32, 120 + 32], "py_largest": [80 * 64, 12 * 64]}[codec]
    sent = sum((rank.world - 1) * math.ceil(bits / 8) for bits in declared)
    sent += sum(8 * count * (rank.world - 1) // rank.world for count in (40, 3))
    assert stats["last_step"]["bytes"] == sent and stats["all_steps"]["bytes"] == steps * sent
    assert stats["parameters"]["0.weight"] == {
        "codec": codec, "elements": 800, "bits": declared[0] / 800, "error": None,
    }  # fmt: skip
    assert stats["parameters"]["0.bias"]["codec"] == "fp32"
    assert stats["residual_bytes"] == (4 * 920 if feedback else 0)
    assert stats["steps"] == steps and "slow" in repr(hook) and codec in repr(hook)
    return [p.detach().clone() for p in ddp.module.parameters()]


@pytest.mark.parametrize(
    "codec,feedback,decay", [("py-sign", True, 1.0), ("py_largest", True, 0.5), ("py-sign", False, 1.0)]
)
def test_values_residuals_and_bytes(ranks, codec, feedback, decay):
    found = ranks.run(2, as_written, codec, feedback, decay, 6)
    assert all(torch.equal(a, b) for a, b in zip(*found))


def long_run(rank):
    """A quadratic whose minimum is where the mean of the ranks' targets is. Returns how far from it the hook with
    feedback has come, and how far its rival has that sends the same messages without."""
    register_once()
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 8, bias=False)
    target = torch.randn(8, 16, generator=torch.Generator().manual_seed(1 + rank.rank))
    ddp = torch.nn.parallel.DistributedDataParallel(layer, process_group=rank.group)
    gw.compress(ddp, "py_largest", feedback=True, min_elements=0)
    rival, mean = layer.weight.detach().clone(), target / rank.world
    torch.distributed.all_reduce(mean, group=rank.group)
    for _ in range(1000):
        (ddp(torch.eye(16)).T - target).square().sum().backward()
        with torch.no_grad():
            layer.weight -= 0.003 * layer.weight.grad
            layer.weight.grad = None
            sent = largest(2 * (rival - target))[0] / rank.world
            torch.distributed.all_reduce(sent, group=rank.group)
            rival -= 0.003 * sent
    return [float((weight.detach() - mean).norm() / mean.norm()) for weight in (layer.weight, rival)]


def test_feedback_reaches_the_minimum_and_its_absence_does_not(ranks):
    """Ranks disagree about the target, so the largest entries of each rank's gradient stay large at the minimum.
    Without feedback the others are never sent."""
    with_feedback, without = ranks.run(2, long_run)[0]
    assert with_feedback < 0.03 and without > 0.5


def broken_off(rank):
    register_once()
    data = batches(rank.rank, 8)

    def train(hook, ddp, some):
        for x, y in some:
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            with torch.no_grad():
                for p in ddp.module.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None

    ddp = wrapped(rank)
    hook = gw.compress(ddp, "py-sign", feedback=True, min_elements=100)
    train(hook, ddp, data[:4])
    state, kept = hook.state_dict(), [p.detach().clone() for p in ddp.module.parameters()]
    gathered = hook.state_dict(gather="all")
    assert sorted(gathered.get("ranks", {})) == (["0", "1"] if rank.rank == 0 else [])
    train(hook, ddp, data[4:])
    again = wrapped(rank)
    with torch.no_grad():
        for p, q in zip(again.module.parameters(), kept):
            p.copy_(q)
    resumed = gw.compress(again, "py-sign", feedback=True, min_elements=100)
    resumed.load_state_dict(state)
    train(resumed, again, data[4:])
    assert resumed.step == hook.step == 8 and resumed.residual_hash() == hook.residual_hash() != 0
    assert all(torch.equal(p, q) for p, q in zip(ddp.parameters(), again.parameters()))
    # A NaN on one rank changes no residual on any.
    before = resumed.residual_hash()
    x, y = data[0]
    torch.nn.functional.mse_loss(again(x * (math.nan if rank.rank == 0 else 1)), y).backward()
    assert resumed.residual_hash() == before and resumed.stats()["skipped"] == 1
    assert not bool(torch.isfinite(again.module[0].weight.grad).all())
    # On another number of ranks every rank gets the mean.
    if rank.rank == 0:
        parts = [gathered["ranks"][one]["up"]["0.weight"] for one in ("0", "1")]
        return gathered, torch.stack([one.double() for one in parts]).mean(0).float()
    return None


def on_one(rank, state, mean):
    register_once()
    hook = gw.compress(wrapped(rank), "py-sign", feedback=True, min_elements=100)
    hook.load_state_dict(state)
    assert torch.equal(hook.state_dict()["ranks"]["0"]["up"]["0.weight"], mean)
    damaged = {**state, "ranks": {key: {"up": {"0.weight": torch.zeros(3)}} for key in state["ranks"]}}
    with pytest.raises(gradwire.UsageError, match="0.weight"):
        hook.load_state_dict(damaged)


def test_state(ranks):
    gathered, mean = ranks.run(2, broken_off)[0]
    ranks.run(1, on_one, gathered, mean)


def options(rank):
    register_once()
    ddp = wrapped(rank, find_unused_parameters=True)
    hook = gw.compress(
        ddp, "py-sign", feedback=True, measure_every=1, warmup=1, residual=torch.bfloat16, min_elements=100
    )
    x, y = batches(rank.rank, 1)[0]
    for step in range(3):
        torch.nn.functional.mse_loss(ddp(x), y).backward()
        error = hook.stats()["parameters"]["0.weight"]["error"]
        assert (error is None) == (step == 0) and (step == 0 or 0 < error < 1)
    assert hook.stats()["residual_bytes"] == 2 * 920
    adam = torch.optim.Adam(ddp.parameters())
    with pytest.raises(gradwire.UnsupportedError, match="Adam's momentum cannot be exchanged"):
        gw.compress(ddp, "py-sign", feedback=True, optimizer=adam)
    hook = gw.compress(ddp, "py-sign", optimizer=adam)  # without feedback the optimizer is left alone
    assert hook.stats()["optimizer"] == {"exchange": "gradients"}
    for name, value in {"down": "fp16", "method": "gather", "guard": 0.5, "owner_feedback": True}.items():
        with pytest.raises(gradwire.UnsupportedError, match=f"has no option {name}"):
            gw.compress(ddp, "py-sign", **{name: value})
    with pytest.raises(gradwire.UnsupportedError, match="buckets cannot be recorded"):
        gw.compress(ddp, "py-sign", cuda_graphs=True)
    hook = gw.compress(ddp, "py-sign", cuda_graphs=False)
    for rules in ("1d=fp32;*=py-sign", "py-sign:bits=4", "0.*=py-sign;*=qsgd:bits=4"):
        with pytest.raises(gradwire.UnsupportedError, match="stands alone and without parameters"):
            gw.compress(ddp, rules)
    with pytest.raises(gradwire.UnsupportedError, match="stands alone"):
        gw.compress(ddp, "qsgd:bits=4", down="py-sign")
    with pytest.raises(gradwire.UnsupportedError, match="call compress again"):
        hook.set_codec("qsgd:bits=4")
    hook = gw.compress(ddp, "qsgd:bits=4")  # in the place of the other
    with pytest.raises(gradwire.UnsupportedError, match="stands alone"):
        hook.set_codec("py-sign")
    hook = gw.compress(ddp, "py_largest", feedback=True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.nn.functional.mse_loss(ddp(x), y).backward()
        adam.step()
    assert any("Adam steps on gradients" in str(one.message) for one in heard) == (rank.rank == 0)  # it tells for all
    for returned, words in (
        (lambda x: x, "py-wrong' for parameter '[02].weight' has returned a Tensor; expected is .tensor, bits."),
        (lambda x: (x.flatten(), 1), "float32 and shape .(120|800),. on cpu; expected are floating-point"),
        (lambda x: (x.long(), 1), "numbers of type int64"),
        (lambda x: (3, 1), "has returned a int; expected are floating-point numbers"),
        (lambda x: (x, -1), "declared -1 bits; expected is a number, 0 or more"),
        (lambda x: (x, math.nan), "declared nan bits"),
        (lambda x: (x, None), "declared None bits"),
    ):
        _register._CODECS["py-wrong"] = _register.PythonCodec("py-wrong", returned, False)
        gw.compress(ddp, "py-wrong", min_elements=100)
        with pytest.raises(Exception, match=words):
            torch.nn.functional.mse_loss(ddp(x), y).backward()
        ddp = wrapped(rank)  # the reducer is in the middle of a backward pass


def test_options_and_refusals(ranks):
    ranks.run(2, options)


def elsewhere(rank):
    """A codec in Python is for DDP alone, and for all ranks alike."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    register_once()
    sharded = model()
    fully_shard(sharded, mesh=DeviceMesh.from_group(rank.group, "cpu"))
    with pytest.raises(gradwire.UnsupportedError, match="'py-sign' is a codec in Python.*nor be given.*for FSDP2"):
        gw.compress(sharded, "py-sign")
    with pytest.raises(gradwire.UnsupportedError, match="is a codec in Python"):
        gw.compress(sharded, "qsgd:bits=4", weights="py-sign")
    with pytest.raises(gradwire.UnsupportedError, match="is a codec in Python"):
        gw.QAdam(model().named_parameters(), codec="py-sign", group=rank.group)
    _register._CODECS["py-other"] = _register.PythonCodec("py-other", (sign, largest)[rank.rank], False)
    with pytest.raises(gradwire.MismatchError, match="disagree about codec: rank 0 has 'py-other, in Python: sign'"):
        gw.compress(wrapped(rank), "py-other")
    # Residuals of a momentum say nothing to it.
    ddp = wrapped(rank)
    momentum = gw.compress(ddp, "topk:ratio=0.1", optimizer=torch.optim.Adam(ddp.parameters()), min_elements=100)
    hook = gw.compress(wrapped(rank), "py-sign", feedback=True, min_elements=100)
    with pytest.raises(gradwire.UsageError, match="exchanges Adam's momentum"):
        hook.load_state_dict(momentum.state_dict())


def hybrid(_):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    register_once()
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(gradwire.UnsupportedError, match="'py-sign' is a codec in Python.*nor be given.*for FSDP2"):
        gw.compress(sharded, "py-sign")


def test_other_models_and_other_ranks_are_refused_by_name(ranks):
    ranks.run(2, elsewhere)
    ranks.run(6, hybrid)  # a mesh is made by all ranks of the pool


def unused(rank):
    """DDP throws the result of a parameter away that no rank has used: its residual must stay."""
    register_once()

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x, both):
            return self.b(self.a(x)) if both else self.a(x)

    ddp = torch.nn.parallel.DistributedDataParallel(Two(), process_group=rank.group, find_unused_parameters=True)
    hook = gw.compress(ddp, "py_largest", feedback=True, min_elements=0)
    kept = []
    for both in (True, False):
        ddp.zero_grad()
        ddp(torch.ones(1, 8) * (rank.rank + 1), both).square().sum().backward()
        kept.append(hook.state_dict()["ranks"][str(rank.rank)]["up"])
    assert torch.equal(kept[0]["b.weight"], kept[1]["b.weight"]) and bool(kept[0]["b.weight"].any())
    assert not torch.equal(kept[0]["a.weight"], kept[1]["a.weight"])


def test_unused_parameters_keep_their_residual(ranks):
    ranks.run(2, unused)


def page(rank):
    """The lines of the documentation."""
    text = (Path(__file__).resolve().parents[2] / "docs/python-codecs.md").read_text()
    lines = text.partition("<!-- run -->")[2].splitlines()
    last = next(n for n, line in enumerate(lines) if line and not line.startswith("    "))
    try:
        exec(compile(textwrap.dedent("\n".join(lines[:last])), "docs/python-codecs.md", "exec"), {})
        hook = gw.compress(wrapped(rank), "mine", feedback=True)
    finally:
        _register._CODECS.pop("mine", None)
    assert "(slow)" in str(hook) and "mine" in str(hook)


def test_the_lines_of_the_page(ranks):
    ranks.run(1, page)


def test_names_that_exist_are_refused():
    for name, words in {"qsgd": "is a codec of gradwire", "a b": "are letters", "a=b": "letters", 3: "is 3"}.items():
        with pytest.raises(gradwire.UsageError, match=words):
            gw.register(name, sign)
    register_once()
    with pytest.raises(gradwire.UsageError, match="registered already"):
        gw.register("py-sign", sign)
    with pytest.raises(gradwire.UsageError, match="expected is a function"):
        gw.register("py-none", None)
