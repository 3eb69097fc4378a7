# SPDX-License-Identifier: Apache-2.0
"""The state of Adam's momentum exchange between replicas: on the same mesh a resumed training is the one that was never
stopped, bit for bit; on another mesh residuals and second moments are put together and cut again; and the optimizer's
own state is torch's.
"""

import copy

import pytest

torch = pytest.importorskip("torch")
test_hsdp = pytest.importorskip("test_hsdp")  # skips where torch has no such replicas

import gradwire.torch as gw
import torch.distributed.checkpoint as dcp
from test_ddp_faults import said
from test_hsdp import Net, meshes, run  # noqa: F401
from test_hsdp_adam import adam, own, replicas_agree, same, shared, train
from test_hsdp_state import debt

CODEC = "blocks.*=topk:ratio=0.05;head.weight=onebit;1d=fp32;*=optquant:bits=4"


def resumes(rank, shape, folder, half, codec, options):
    """Trained in one go, and stopped and resumed in between, from files."""
    model, optimizer, hook = adam(rank, shape, codec, **options)
    train(rank, model, optimizer, range(half), clip=0.05)
    weights = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    moments = copy.deepcopy(optimizer.state_dict())
    torch.save(hook.state_dict(), f"{folder}/{rank.rank}.pt")
    dcp.save({"gradwire": hook.state_dict()}, checkpoint_id=f"{folder}/dcp", process_group=rank.group)
    train(rank, model, optimizer, range(half, 9), clip=0.05)
    found = []
    for reader in ("torch", "dcp"):
        other, second, again = adam(rank, shape, codec, **options)
        with torch.no_grad():
            for name, p in other.named_parameters():
                p.to_local().copy_(weights[name])
        if reader == "torch":
            second.load_state_dict(copy.deepcopy(moments))
        state = torch.load(f"{folder}/{rank.rank}.pt") if reader == "torch" else gw.read_checkpoint(f"{folder}/dcp")
        again.load_state_dict(state)
        if reader == "dcp":
            second.load_state_dict(copy.deepcopy(moments))
        train(rank, other, second, range(half, 9), clip=0.05)
        found.append(same(shared(model, optimizer) + own(hook), shared(other, second) + own(again)))
        found.append(hook.stats()["optimizer"]["clip"] == again.stats()["optimizer"]["clip"] > 0)
    return found, sorted(moments["state"][0])


@pytest.mark.parametrize(
    "shape, half, codec, options",
    [
        ((2, 3), 6, CODEC, {}), ((2, 2), 2, "onebit", {}), ((2,), 5, "casq:bits=2", {"residual": torch.bfloat16}),
        ((2, 2), 5, "optquant:bits=2,refit=3", {"down": "qsgd:bits=4"}),  # nothing learns in the warm-up
    ],
)  # fmt: skip
def test_a_resumed_training_is_the_one_that_was_never_stopped(meshes, tmp_path, shape, half, codec, options):
    for found, names in run(meshes, shape, resumes, str(tmp_path), half, codec, options):
        assert all(found) and names == ["exp_avg", "exp_avg_sq", "step"]


def whole_state(model, optimizer):
    names = ("exp_avg", "exp_avg_sq")
    return {
        name: (p.detach().full_tensor(), [optimizer.state[p][one].full_tensor() for one in names])
        for name, p in model.named_parameters()
        if p in optimizer.state
    }


def leaves(rank, shape, folder):
    model, optimizer, hook = adam(rank, shape, CODEC, warmup=2)
    train(rank, model, optimizer, range(6), clip=0.05)
    torch.save((hook.state_dict(), whole_state(model, optimizer)), f"{folder}/{rank.rank}.pt")


def arrives(rank, shape, folder, count):
    model, optimizer, hook = adam(rank, shape, CODEC, warmup=2)
    saved = [torch.load(f"{folder}/{number}.pt") for number in range(count)]
    shards, shard = hook._mesh.shards, hook._mesh.shard
    parameters = {one.name: one for one in hook._mesh.parameters}
    state = {}
    for place, (name, p) in enumerate(model.named_parameters()):
        if name not in saved[0][1]:
            continue
        weight, moments = saved[0][1][name]
        cut = [parameters[name].cut(one, shards)[shard] for one in (weight, *moments)]
        with torch.no_grad():
            made = [torch.zeros_like(p.detach()) for _ in moments]
            for target, values in zip((p, *made), cut):
                target.to_local().copy_(values.reshape(target.to_local().shape))
        state[place] = dict(step=torch.tensor(6.0), exp_avg=made[0], exp_avg_sq=made[1])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    hook.load_state_dict([one for one, _ in saved])
    begun = hook.state_dict()
    limits = hook._momentum.limits
    norm = (limits.levels.square().sum() + limits._elsewhere).sqrt().item()
    train(rank, model, optimizer, range(6, 8), clip=0.05)
    return begun, norm, hook.stats()["optimizer"], replicas_agree(shape, model, optimizer)


def second_moments(states, name, shape):
    """The mean of s over the replicas, of a whole parameter."""
    replicas, shards = (int(number) for number in states[0]["mesh"].split(" x "))
    ranks = {key: part for state in states for key, part in state["ranks"].items()}
    pieces = [
        torch.stack([ranks[str(replica * shards + shard)]["s"][name] for replica in range(replicas)]).mean(0)
        for shard in range(shards)
    ]
    return torch.cat([piece.reshape(-1) for piece in pieces]).view(shape)


@pytest.mark.parametrize("old, new", [((2, 3), (3, 2)), ((2, 2), (2,)), ((2,), (2, 3))])
def test_on_another_mesh_residuals_and_second_moments_are_kept(meshes, tmp_path, old, new):
    run(meshes, old, leaves, str(tmp_path))
    count = torch.Size(old).numel()
    before = [torch.load(f"{tmp_path}/{number}.pt")[0] for number in range(count)]
    answers = run(meshes, new, arrives, str(tmp_path), count)
    after = [state for state, _, _, _ in answers]
    shapes = {name: tuple(p.shape) for name, p in Net().named_parameters()}
    then, now = debt(before, shapes), debt(after, shapes)
    assert then["blocks.1.weight"].abs().max() > 0
    for name, shape in shapes.items():
        assert torch.allclose(then[name], now[name], atol=1e-6 * max(1e-3, then[name].abs().max().item())), name
        s = second_moments(before, name, shape)
        assert torch.allclose(s, second_moments(after, name, shape), rtol=1e-6), name
    assert all(not values.any() for state in after for part in state["ranks"].values() for values in part["q"].values())
    # The norm that limits are shares of is about that of the replicas before.
    parts = [part["levels"].values() for state in before for part in state["ranks"].values()]
    norm = (sum(float(level) ** 2 for levels in parts for level in levels) / old[0]) ** 0.5
    for _, found, report, agreed in answers:
        assert found == pytest.approx(norm, rel=0.05) and agreed
        assert report["steps"] == 8 and report["phase"] == "compressed" and report["clip"] > 0


def refuses(rank, shape):
    model, optimizer, hook = adam(rank, shape, "onebit")
    train(rank, model, optimizer, range(4))
    before, words = own(hook), {}
    for kind in REFUSED:
        state = copy.deepcopy(hook.state_dict())
        if rank.rank == 1:
            part = state["ranks"]["1"]
            if kind == "no s":
                del part["s"]["blocks.1.weight"]
            elif kind == "shape":
                part["q"]["blocks.1.weight"] = torch.zeros(3)
            elif kind == "gradients":
                del state["adam"]
            elif kind == "taken":
                state["adam"]["taken"] = 9
        words[kind] = said(lambda: hook.load_state_dict(state)), same(before, own(hook))
    state = hook.state_dict()
    plain = gw.compress(test_hsdp.made(rank, shape), "onebit", min_elements=64)
    words["none"] = said(lambda: plain.load_state_dict(state)), True
    optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    words["step"] = said(lambda: train(rank, model, optimizer, range(4, 5))), True
    return words


REFUSED = {
    "no s": "the state has no s of parameter 'blocks.1.weight'",
    "shape": "its q in the state has (3,)",
    "gradients": "the state was saved by a hook that exchanges gradients",
    "taken": "ranks disagree about taken",
}
ALL = REFUSED | {
    "none": "the state was saved by a hook that exchanges Adam's momentum",
    "step": "the optimizer has taken 0 steps with parameter",
}


def test_states_that_do_not_fit_are_refused_on_all_ranks(meshes):
    for words in run(meshes, (2, 2), refuses):
        for kind, (found, unchanged) in words.items():
            assert ALL[kind] in found and unchanged, (kind, found)
