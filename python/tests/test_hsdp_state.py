# SPDX-License-Identifier: Apache-2.0
"""The state of the hook for FSDP2's replicas: on the same mesh a resumed training is the one that was never stopped,
bit for bit; on another mesh the sum of the residuals, in units of the mean gradient, is kept.
"""

import copy

import pytest

torch = pytest.importorskip("torch")
test_hsdp = pytest.importorskip("test_hsdp")  # skips where torch has no such replicas

import gradwire
import gradwire.torch as gw
import torch.distributed.checkpoint as dcp
from test_hsdp import equal, local, made, meshes, replicas_alike, run, train  # noqa: F401

CODEC = "blocks.*=topk:ratio=0.1;spare=fp32;head.weight=optquant:bits=4;*=fp32"


def compressed(rank, shape, codec=CODEC, **options):
    model = made(rank, shape)
    return model, gw.compress(model, codec, **{"feedback": True, **options})


def saves(rank, shape, folder, options, steps=3):
    """Trains, saves, and trains on. Returns what the resumed training must arrive at."""
    model, hook = compressed(rank, shape, **options)
    train(rank, model, steps)
    torch.save({"model": local(model), "gradwire": hook.state_dict()}, f"{folder}/{rank.rank}.pt")
    dcp.save({"gradwire": hook.state_dict()}, checkpoint_id=f"{folder}/dcp", process_group=rank.group)
    train(rank, model, 2, first=steps)
    torch.save({"model": local(model), "hash": hook.residual_hash()}, f"{folder}/{rank.rank}.end.pt")


def resumes(rank, shape, folder, options, reader):
    model, hook = compressed(rank, shape, **options)
    saved = torch.load(f"{folder}/{rank.rank}.pt")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local().copy_(saved["model"][name])
    hook.load_state_dict(saved["gradwire"] if reader == "torch" else gw.read_checkpoint(f"{folder}/dcp"))
    steps = hook.step
    train(rank, model, 2, first=3)
    end = torch.load(f"{folder}/{rank.rank}.end.pt")
    return steps, equal(end["model"], local(model)), end["hash"] == hook.residual_hash()


@pytest.mark.parametrize("shape, options", [((2, 2), {}), ((2,), {"residual": torch.bfloat16})])
def test_a_resumed_training_is_the_one_that_was_never_stopped(meshes, tmp_path, shape, options):
    run(meshes, shape, saves, str(tmp_path), options)
    for reader in ("torch", "dcp"):
        for steps, same, residuals in run(meshes, shape, resumes, str(tmp_path), options, reader):
            assert steps == 3 and same and residuals


def debt(states, shapes):
    """The sum of the residuals in units of the mean gradient, by parameter."""
    replicas, shards = (int(number) for number in states[0]["mesh"].split(" x "))
    ranks = {key: part for state in states for key, part in state["ranks"].items()}
    total = {}
    for name, shape in shapes.items():
        pieces = []
        for shard, like in enumerate(torch.chunk(torch.zeros(shape), shards)):
            flat = torch.zeros(like.numel(), dtype=torch.float64)
            for replica in range(replicas):
                part = ranks[str(replica * shards + shard)]
                if name in part["up"]:
                    flat += part["up"][name].double() / replicas
                for key, values in part["down"].items():
                    if key.rpartition("@")[0] == name:
                        first = int(key.rpartition("@")[2])
                        flat[first : first + values.numel()] += values.double()
            pieces.append(flat.view(like.shape))
        total[name] = torch.cat(pieces)
    return total


def moves(rank, shape, folder, old):
    model, hook = compressed(rank, shape)
    count = torch.Size(old).numel()
    states = [torch.load(f"{folder}/{number}.pt")["gradwire"] for number in range(count)]
    hook.load_state_dict(states)
    state = hook.state_dict()
    train(rank, model, 2, first=3)
    return state, hook.step, replicas_alike(rank, model)


@pytest.mark.parametrize("old, new", [((2, 3), (3, 2)), ((2, 2), (2,)), ((2,), (2, 3))])
def test_on_another_mesh_the_sum_of_residuals_is_kept(meshes, tmp_path, old, new):
    run(meshes, old, saves, str(tmp_path), {})
    before = [torch.load(f"{tmp_path}/{number}.pt")["gradwire"] for number in range(torch.Size(old).numel())]
    answers = run(meshes, new, moves, str(tmp_path), old)
    shapes = {name: tuple(p.shape) for name, p in test_hsdp.Net().named_parameters()}
    then, now = debt(before, shapes), debt([state for state, _, _ in answers], shapes)
    assert then["blocks.1.weight"].abs().max() > 0
    for name in shapes:
        assert torch.allclose(then[name], now[name], atol=1e-6 * max(1e-3, then[name].abs().max().item())), name
    assert all(step == 5 and same for _, step, same in answers)
    assert {state["step"] for state, _, _ in answers} == {3}


def refuses(rank, shape):
    """{kind: (what was said, whether nothing has changed)}: the state is wrong on one rank only."""
    model, hook = compressed(rank, shape)
    train(rank, model, 2)
    before, answers = hook.residual_hash(), {}
    for kind in REFUSED:
        state = copy.deepcopy(hook.state_dict())
        if rank.rank == 1:
            mine = state["ranks"]["1"]
            if kind == "nan":
                mine["up"]["blocks.1.weight"][3] = float("nan")
            elif kind == "size":
                mine["up"]["blocks.1.weight"] = mine["up"]["blocks.1.weight"][1:]
            elif kind == "missing":
                del mine["up"]["blocks.2.weight"]
            elif kind == "shape":
                state["shapes"]["head.weight"] = torch.tensor([0, 5, 66])
            elif kind == "mesh":
                state["mesh"] = "4 x 1"
            elif kind == "rank":
                state["ranks"] = {"0": mine}
            elif kind == "other kind":
                del state["mesh"]
            else:
                state["step"] = 7
        with pytest.raises(gradwire.Error) as caught:
            hook.load_state_dict(state)
        answers[kind] = str(caught.value), hook.residual_hash() == before and hook.step == 2
    return answers


REFUSED = {
    "nan": "parameter 'blocks.1.weight' of rank 1 is not finite",
    "size": "'blocks.1.weight' has",
    "missing": "no up residual of parameter 'blocks.2.weight'",
    "shape": "parameter 'head.weight' has the shape [5, 67]",
    "mesh": "the states of all ranks are needed",
    "rank": "the state belongs to rank 0 of the mesh; this is rank 1",
    "other kind": "has no mesh of replicas and shards",
    "step": "ranks disagree about step",
}


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(meshes):
    for answers in run(meshes, (2, 2), refuses):
        for kind, (words, unchanged) in answers.items():
            assert REFUSED[kind] in words and unchanged, (kind, words)
