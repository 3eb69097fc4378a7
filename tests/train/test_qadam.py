# SPDX-License-Identifier: Apache-2.0
"""`gradwire train --optimizer qadam` as a user meets it: it learns with few bits, is torch's Adam where nothing is
compressed, does the same in threads and in processes and after it was killed, and refuses what cannot be together."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch

import train_fixture as fixture
import train_reference as reference
from train_fixture import FAILED, USAGE, Live, refuse, train

QADAM = ["--optimizer", "qadam"]
MLP = ["--model", "mlp:width=32,depth=1"]
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return fixture.make_idx(tmp_path_factory.mktemp("data") / "idx", train=512, test=128)


@pytest.fixture
def small(data):
    """Arguments of a run of 16 steps an epoch that takes a moment."""
    return ["--data", data, *QADAM, *MLP, "--workers", 2, "--threads", 1, "--batch", 16]


# It learns ----------------------------------------------------------------------------------------------------------

WAYS = {
    "as it comes": [],
    "updates down": ["--send", "updates"],
    "shared moments": ["--moments", "shared", "--share-every", 4],
    "theory": ["--schedule", "theory", "--rate", 0.01],
    "as published": ["--no-correction", "--up", "loggrid:k=2,scale=tensor", "--rate", 5e-4],
    "other codecs": ["--up", "topk:ratio=0.1", "--down", "qsgd:bits=8"],
    "tensors that travel otherwise": ["--rules", "1d=fp32", "--down", "1d=fp32;*=unigrid:bits=6"],
}


@pytest.mark.parametrize("way", WAYS)
def test_it_learns_and_workers_agree_at_every_step(small, way):
    run = train(*small, *WAYS[way], "--epochs", 4, "--check")
    first, *_, last = run.end["epochs"]
    assert last["test_accuracy"] > 0.9 and last["train_loss"] < 0.7 * first["train_loss"], (first, last)
    assert run.end["finished"] and run.end["skipped_steps"] == 0 and run.of("layers") == []


def test_few_bits_end_where_full_precision_does(data):
    """Three bits up and eight down, at equal steps."""
    arguments = ["--data", data, *MLP, "--workers", 4, "--batch", 8, "--epochs", 6, "--threads", 1]
    exact = train(*arguments, "--optimizer", "adam", "--codec", "fp32").end["epochs"][-1]
    few = train(*arguments, *QADAM).end["epochs"][-1]
    assert few["bits"] < 3.2 and few["bytes_sent"] < 0.12 * 2 * exact["bytes_sent"]
    assert few["test_accuracy"] >= exact["test_accuracy"] - 0.02


@pytest.mark.parametrize("bits", [8, 3])
def test_weights_are_on_the_grid_that_was_asked_for(tmp_path, small, bits):
    path = tmp_path / "weights.pt"
    train(*small, "--down", f"unigrid:bits={bits},scale=tensor", "--epochs", 1, "--export", path)
    for name, tensor in torch.load(path).items():
        values = tensor.flatten().double().numpy()
        codes = values / np.abs(values).max() * (2 ** (bits - 1) - 1)
        assert np.abs(codes - np.round(codes)).max() < 1e-4, name


# It is Adam ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [dict(), dict(weight_decay=0.01, clip=0.7, warmup=0.25), dict(accumulate=2)],
                         ids=lambda more: "-".join(more) or "plain")
@pytest.mark.parametrize("send", ["weights", "updates"])
def test_one_worker_without_compression_follows_adam(tmp_path, data, more, send):
    settings = reference.Settings(**{**dict(steps=40, epochs=3, batch=16, optimizer="adam", rate=0.003,
                                            weight_decay=0), **more})
    pixels, labels = fixture.images(512, (28, 28), 10, 1)
    tests = fixture.images(128, (28, 28), 10, 2)
    samples = reference.Data(pixels[:, None], labels, tests[0][:, None], tests[1], [0.286], [0.353])
    arguments = ["--data", data, "--model", "mlp:width=24,depth=3", "--workers", 1, "--threads", 1, "--codec", "fp32"]
    path = tmp_path / "first.pt"
    train(*arguments, "--batch", 16, "--steps", 1, "--rate", 0, "--weight-decay", 0, "--export", path)
    model = reference.Mlp(784, 24, 3)
    model.load_state_dict(torch.load(path), strict=True)
    given = settings.arguments()
    for name in "--optimizer", "--momentum":
        at = given.index(name)
        del given[at:at + 2]
    ours = train(*arguments, *QADAM, *given, "--down", "fp32", "--send", send, "--export", path)
    losses, _ = reference.train(model, samples, settings)
    assert [step["step_loss"] for step in ours.of("step")] == pytest.approx(losses, rel=2e-5)
    assert max(losses) > 1.5 * min(losses), "something is learned, so that a wrong step would show"
    for name, expected in model.state_dict().items():
        assert torch.allclose(torch.load(path)[name], expected, rtol=1e-4, atol=1e-5), name


# The same everywhere ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.parametrize("way", ["as it comes", "updates down", "shared moments"])
def test_processes_end_with_the_weights_of_threads(small, way):
    if not json.loads(fixture.call("doctor", "--json")[0].splitlines()[0])["mpi_built"]:
        pytest.skip("built without MPI")
    arguments = [*small, *WAYS[way], "--steps", 20]
    threads = train(*arguments)
    processes = train(*arguments, "--engine", "mpi", launcher=["mpirun", "-n", "2"],
                      environment=fixture.MPI_ENVIRONMENT)
    assert processes.learned == threads.learned and processes.end["engine"] == "mpi"


@pytest.mark.parametrize("way", ["as it comes", "updates down", "shared moments", "theory"])
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, small, way):
    arguments = [*small, *WAYS[way], "--epochs", 20]
    whole = train(*arguments)
    saved = [*arguments, "--checkpoint", tmp_path / "saved", "--save-every", 5, "--resume"]
    with Live(*saved) as live:
        assert live.until_step(60), "ended too early"
        live.kill()
        assert live.process.returncode == -signal.SIGKILL, "the run was over before it was killed"
    resumed = train(*saved)
    assert 0 < resumed.of("start")[0]["first_step"] < 320 and resumed.learned == whole.learned
    refuse(USAGE, ["theta", "0.99"], *saved, "--theta", 0.99)


def test_a_run_that_goes_astray_leaves_steps_out_and_keeps_its_weights_finite(tmp_path, small):
    path = tmp_path / "weights.pt"
    small[small.index("mlp:width=32,depth=1")] = "mlp:width=8,depth=9"
    run = train(*small, "--rate", 1e6, "--epochs", 2, "--check", "--export", path, code=FAILED)
    assert 16 < run.end["skipped_steps"] < 32
    assert all(value.isfinite().all() for value in torch.load(path).values())


# What cannot be -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, expected", [
    (["--send", "weights", "--collective", "scatter"], ["collective", "gather"]),
    (["--send", "updates", "--collective", "gather"], ["collective", "scatter"]),
    (["--send", "gradients"], ["--send", "weights, updates"]),
    (["--share-every", 8], ["share-every", "--moments shared"]),
    (["--beta", 1], ["beta", "0.9999999"]),
    (["--theta", 0], ["theta", "0.9999999"]),
    (["--meter-every", 3], ["meter-every", "qadam"]),
    (["--bucket-mb", 1], ["bucket-mb", "qadam"]),
    (["--momentum", 0.5], ["momentum", "qadam"]),
    (["--down", "unigrid:bits=99"], ["bits", "99"]),
    (["--optimizer", "adam", "--moments", "shared"], ["moments", "only --optimizer qadam"]),
    (["--optimizer", "adam", "--send", "updates"], ["send", "only --optimizer qadam"]),
    (["--optimizer", "adam", "--no-correction"], ["correction", "only --optimizer qadam"]),
    (["--optimizer", "sgd", "--beta", 0.8], ["beta", "only --optimizer qadam"]),
    (["--optimizer", "sgd", "--schedule", "theory"], ["schedule", "only --optimizer qadam"]),
], ids=lambda value: "-".join(map(str, value)).replace("--", ""))
def test_what_cannot_be_is_refused_by_name(data, arguments, expected):
    own = [] if "--optimizer" in arguments else QADAM
    refuse(USAGE, expected, "--data", data, *MLP, *own, *arguments)


def test_people_are_told_both_codecs(small):
    out, _ = fixture.call("train", *small, "--steps", 2)
    assert "qadam with loggrid:k=2 up, unigrid:bits=8 down" in out.splitlines()[0]
