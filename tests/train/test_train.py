# SPDX-License-Identifier: Apache-2.0
"""`gradwire train` as a user meets it: it learns what a PyTorch script learns, all workers agree, what it shows can be
read by people and by machines, and what cannot be is refused with words."""

import fcntl
import json
import os
import pty
import shutil
import stat
import struct
import subprocess
import termios

import numpy as np
import pytest
import torch

import train_fixture as fixture
import train_reference as reference
from train_fixture import BAD_INPUT, FAILED, IO, UNSUPPORTED, USAGE, refuse, train

MLP = ["--model", "mlp:width=16,depth=1"]
torch.set_num_threads(1)  # sums in another order would be other sums


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    fixture.make_idx(folder / "idx")
    fixture.make_idx(folder / "zipped", train=64, test=16, zipped=True)
    fixture.make_cifar(folder / "cifar10")
    fixture.make_cifar(folder / "cifar100", classes=100)
    fixture.make_ag_news(folder / "ag-news")
    fixture.make_text(folder / "text.txt")
    return folder


@pytest.fixture
def small(data):
    """Arguments of a run of 16 steps that takes a moment."""
    return ["--data", data / "idx", *MLP, "--workers", 2, "--batch", 16, "--epochs", 2]


# The loss trace -----------------------------------------------------------------------------------------------------


def idx_data(limit):
    pixels, labels = fixture.images(256, (28, 28), 10, 1)
    test_pixels, test_labels = fixture.images(64, (28, 28), 10, 2)
    cut = slice(limit)
    return reference.Data(pixels[cut, None], labels[cut], test_pixels[cut, None], test_labels[cut], [0.286], [0.353])


def cifar_data():
    parts = [fixture.images(16, (3, 32, 32), 10, batch) for batch in range(1, 6)]
    pixels, labels = (np.concatenate(part) for part in zip(*parts))
    return reference.Data(pixels, labels, *fixture.images(20, (3, 32, 32), 10, 9), [0.4914, 0.4822, 0.4465],
                          [0.2470, 0.2435, 0.2616], augment=True)


def follow(folder, arguments, model, data, settings):
    """Trains with the program and with the script from the same weights; compares all that both know."""
    arguments = [*arguments, "--workers", 1, "--threads", 1, "--codec", "fp32"]
    first, last = folder / "first.pt", folder / "last.pt"
    train(*arguments, "--batch", settings.batch, "--seed", settings.seed, "--steps", 1, "--rate", 0, "--weight-decay",
          0, "--export", first)
    model.load_state_dict(torch.load(first), strict=True)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()  # which that one step has moved
    ours = train(*arguments, *settings.arguments(), "--export", last)
    losses, tests = reference.train(model, data, settings)
    traced = [step["step_loss"] for step in ours.of("step")]
    assert len(traced) == settings.steps >= 10
    assert traced == pytest.approx(losses, rel=1e-4)
    assert max(losses) > 1.05 * min(losses), "something is learned, so that a wrong step would show"
    epochs = ours.of("epoch")
    assert [epoch["test_loss"] for epoch in epochs] == pytest.approx([loss for loss, _ in tests], rel=1e-3)
    assert [epoch["test_accuracy"] for epoch in epochs] == pytest.approx([right for _, right in tests])
    for name, expected in model.state_dict().items():
        assert torch.allclose(torch.load(last)[name], expected, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("settings", [
    dict(optimizer="sgd", rate=0.05, weight_decay=0.01, clip=0.7, warmup=1.25),
    dict(optimizer="sgd", rate=0.1, momentum=0, weight_decay=0, schedule="constant", seed=7),
    dict(optimizer="sgd", schedule="step", drop_at=[1, 2]),
    dict(optimizer="adam", rate=0.003, weight_decay=0.1),
    dict(optimizer="adamw", rate=0.003, weight_decay=1, warmup=1),
    dict(optimizer="sgd", accumulate=2, batch=8, clip=1),
], ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_cnn_follows_pytorch(tmp_path, data, settings):
    settings = reference.Settings(**{**dict(steps=10, epochs=3, batch=16), **settings})  # 4 steps an epoch
    arguments = ["--data", data / "idx", "--model", "cnn:width=4", "--limit", 70]
    follow(tmp_path, arguments, reference.Cnn(4), idx_data(70), settings)


def test_the_mlp_follows_pytorch(tmp_path, data):
    arguments = ["--data", data / "idx", "--model", "mlp:width=24,depth=3"]
    follow(tmp_path, arguments, reference.Mlp(784, 24, 3), idx_data(256), reference.Settings(20, 2, 16))


def test_a_residual_network_follows_pytorch_with_batch_statistics_crops_and_mirrors(tmp_path, data):
    arguments = ["--task", "cifar10", "--data", data / "cifar10"]
    # At larger rates PyTorch does not follow itself either: in another memory layout losses differ by 1e-3 after ten
    # steps, because differences in the last place grow through batch statistics.
    settings = reference.Settings(steps=10, epochs=2, batch=16, rate=0.003)
    follow(tmp_path, arguments, reference.Resnet20(), cifar_data(), settings)


# All workers agree --------------------------------------------------------------------------------------------------


def registered():
    out, _ = fixture.call("codecs", "--json")
    return [json.loads(line)["codec"] for line in out.splitlines()]


CODECS = [*registered(), "optquant:bits=3,mode=biased,refit=2", "casq:bits=1", "dqsgd:budget=3,mode=paper",
          "fft:theta=0.85", "topk:ratio=0.02,mode=paper", "lowrank:rank=4"]


@pytest.mark.parametrize("collective", ["gather", "scatter"])
@pytest.mark.parametrize("codec", CODECS)
def test_workers_hold_the_same_weights_at_every_step(data, codec, collective):
    run = train("--data", data / "idx", "--model", "mlp:width=70,depth=1", "--workers", 3, "--batch", 8, "--codec",
                codec, "--collective", collective, "--check", "--steps", 6, "--meter-every", 3)
    assert len(run.of("step")) == 6 and run.end["finished"] and run.end["skipped_steps"] == 0
    for measured in run.of("layers"):
        for tensor in measured["tensors"]:
            assert codec != "fp32" or tensor["error"] < 1e-12
            assert tensor["elements"] < 10000 or tensor["cosine"] > 0.1, f"{tensor} is not a gradient any more"


@pytest.mark.parametrize("collective", ["gather", "scatter"])
@pytest.mark.parametrize("codec", ["qsgd:bits=4", "topk:ratio=0.05", "lowrank:rank=2"])
def test_buckets_do_not_change_the_weights(small, codec, collective):
    runs = [train(*small, "--codec", codec, "--collective", collective, "--bucket-mb", size) for size in (0.001, 25)]
    assert runs[0].of("start")[0]["buckets"] > 1 == runs[1].of("start")[0]["buckets"]
    assert runs[0].weights == runs[1].weights
    assert [step["step_loss"] for step in runs[0].of("step")] == [step["step_loss"] for step in runs[1].of("step")]


MOMENTA = {"adamw": ["--optimizer", "adamw", "--clip", 0.5, "--codec", "topk:ratio=0.05"],
           "adam": ["--optimizer", "adam", "--codec", "casq:bits=2"],
           "sgd": ["--exchange", "momenta", "--codec", "onebit"]}


@pytest.mark.parametrize("collective", ["gather", "scatter"])
@pytest.mark.parametrize("optimizer", MOMENTA)
def test_workers_that_exchange_momenta_agree_however_they_are_sent_and_watched(small, optimizer, collective):
    arguments = [*small, *MOMENTA[optimizer], "--collective", collective, "--first-steps", 4]
    runs = [train(*arguments, "--bucket-mb", 0.001, "--check"), train(*arguments, "--meter-every", 1)]
    assert runs[0].of("start")[0]["buckets"] > 1 == runs[1].of("start")[0]["buckets"]
    assert runs[0].of("start")[0]["exchange"] == "momenta"
    assert runs[0].weights == runs[1].weights and runs[0].end["skipped_steps"] == 0
    for measured in runs[1].of("layers")[4:]:
        for tensor in measured["tensors"]:
            assert tensor["elements"] < 10000 or tensor["cosine"] > 0.1, f"{tensor} is not a momentum any more"


def test_what_is_exchanged_follows_from_the_optimizer_and_the_codec(small):
    def exchanged(*arguments):
        return train(*small, "--steps", 1, *arguments).of("start")[0]["exchange"]

    assert exchanged("--optimizer", "adamw", "--codec", "onebit") == "momenta"
    assert exchanged("--optimizer", "adamw", "--codec", "onebit", "--feedback", "off") == "gradients"
    assert exchanged("--optimizer", "adamw", "--codec", "onebit", "--exchange", "gradients") == "gradients"
    assert exchanged("--optimizer", "adamw", "--codec", "qsgd:bits=4") == "gradients"
    assert exchanged("--optimizer", "adamw", "--codec", "lowrank") == "gradients"
    assert exchanged("--optimizer", "sgd", "--codec", "onebit") == "gradients"


@pytest.mark.parametrize("codec", ["onebit", "topk:ratio=0.05"])
def test_sgd_trains_by_gradients_whatever_adam_exchanges(small, codec):
    arguments = [*small, "--optimizer", "sgd", "--codec", codec]
    default, gradients, momenta = (train(*arguments, *more).weights
                                   for more in ([], ["--exchange", "gradients"], ["--exchange", "momenta"]))
    assert default == gradients != momenta


def test_the_first_steps_have_a_codec_of_their_own_and_adams_first_step_is_exact(small):
    run = train(*small, "--optimizer", "adam", "--codec", "onebit", "--first-steps", 6)
    bits = [step["bits"] for step in run.of("step")]
    for steps in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15):  # after which second moments are pooled, in bf16
        bits[steps - 1] -= 16
    assert bits[0] == 32 and all(4 < bit < 5.5 for bit in bits[1:6]) and all(1 < bit < 2.5 for bit in bits[6:])


def test_residuals_decay_only_where_that_is_asked_for(small):
    topk = ["--codec", "topk:ratio=0.05"]
    runs = [train(*small, *topk, *more) for more in ([], ["--decay", 1], ["--decay", 0.5])]
    assert runs[0].weights == runs[1].weights and runs[0].weights != runs[2].weights
    both = train(*small, *MOMENTA["adamw"], "--first-steps", 4, "--decay", 0.9, "--residual", "bf16", "--check")
    assert both.end["skipped_steps"] == 0


def test_the_same_command_gives_the_same_weights_and_another_seed_others(small):
    runs = [train(*small, "--codec", "optquant:bits=3,refit=3", "--seed", seed) for seed in (1, 1, 2)]
    assert runs[0].learned == runs[1].learned
    assert runs[0].weights != runs[2].weights


def test_measuring_and_checking_change_nothing(small):
    plain = train(*small)
    watched = train(*small, "--check", "--meter-every", 1)
    assert watched.weights == plain.weights and len(watched.of("layers")) == 16
    assert watched.end["epochs"][-1]["bytes_sent"] == plain.end["epochs"][-1]["bytes_sent"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.parametrize("codec", ["qsgd:bits=4", "casq:bits=2"])
def test_processes_train_like_threads(small, codec):
    if not json.loads(fixture.call("doctor", "--json")[0].splitlines()[0])["mpi_built"]:
        pytest.skip("this build has no MPI")
    arguments = [*small, "--threads", 1, "--codec", codec, "--check"]
    threads = train(*arguments)
    processes = train(*arguments, "--engine", "mpi", launcher=["mpirun", "-n", "2"],
                      environment=fixture.MPI_ENVIRONMENT)
    assert threads.learned == processes.learned
    assert (threads.end["engine"], processes.end["engine"]) == ("loopback", "mpi")


def test_an_error_of_mpi_processes_is_said_once_and_ends_all(small):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    command = ["mpirun", "-n", "2", fixture.PROGRAM, "train", *fixture.words(small), "--engine", "mpi", "--limit", "9"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **fixture.MPI_ENVIRONMENT}, timeout=fixture.SECONDS)
    assert done.returncode in (USAGE, UNSUPPORTED) and done.stderr.count("gradwire: error:") == 1


def test_more_workers_than_the_launcher_started_are_refused(small):
    if not json.loads(fixture.call("doctor", "--json")[0].splitlines()[0])["mpi_built"]:
        pytest.skip("this build has no MPI")
    assert small[small.index("--workers") + 1] == 2
    _, errors = fixture.call("train", *small, "--engine", "mpi", code=USAGE, environment=fixture.MPI_ENVIRONMENT)
    assert "workers is 2" in errors and "1 process" in errors and "mpirun -n 2" in errors, errors


def test_evaluations_within_an_epoch_change_nothing_but_the_curve(small):
    arguments = [*small, "--codec", "qsgd:bits=4"]
    plain, often = train(*arguments), train(*arguments, "--evaluate-every", 3)
    assert plain.learned == often.learned and plain.end["points"] == []
    points, ends = often.end["points"], {epoch["step"] for epoch in often.end["epochs"]}
    last = often.end["epochs"][-1]["step"]
    assert [point["step"] for point in points] == [step for step in range(3, last, 3) if step not in ends]
    per_epoch = often.of("start")[0]["steps_per_epoch"]
    for point in points:
        assert point["epoch"] == point["step"] / per_epoch and 0 <= point["test_accuracy"] <= 1
    sent = [point["bytes_sent"] for point in points]
    assert sent == sorted(sent) and sent[-1] <= often.end["epochs"][-1]["bytes_sent"]
    assert often.of("evaluated") == [{**point, "event": "evaluated"} for point in points]


# Tasks and models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task, place, model", [
    ("fashion-mnist", "idx", "mlp"), ("mnist", "zipped", "cnn"), ("mnist", "idx", "resnet20"),
    ("cifar10", "cifar10", "resnet20"), ("cifar10", "cifar10", "resnet32"), ("cifar10", "cifar10", "resnet18"),
    ("cifar10", "cifar10", "resnet34"), ("cifar10", "cifar10", "vgg11"), ("cifar10", "cifar10", "vgg16"),
    ("cifar100", "cifar100", "cnn"), ("ag-news", "ag-news", "bilstm"), ("text", "text.txt", "gpt"),
])
def test_every_model_does_two_steps(tmp_path, data, task, place, model):
    run = train("--task", task, "--data", data / place, "--model", model, "--workers", 2, "--batch", 2, "--limit", 8,
                "--steps", 2, "--codec", "qsgd:bits=4", "--check", "--export", tmp_path / "weights.pt")
    assert [step["step"] for step in run.of("step")] == [1, 2]
    assert all(np.isfinite(step["step_loss"]) for step in run.of("step")) and run.end["skipped_steps"] == 0
    weights = torch.load(tmp_path / "weights.pt")
    parameters = [value for name, value in weights.items() if not name.endswith(("running_mean", "running_var",
                                                                                "num_batches_tracked"))]
    assert sum(value.numel() for value in parameters) == run.of("start")[0]["parameters"] == run.end["parameters"]
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize("arguments, reached", [
    (["--data", "idx", "--model", "cnn", "--rate", 0.02, "--epochs", 4], 0.9),
    (["--task", "ag-news", "--data", "ag-news", "--model", "bilstm:embedding=16,hidden=16", "--rate", 0.02,
      "--length", 12, "--epochs", 4, "--dropout", 0.1], 0.9),
    (["--task", "text", "--data", "text.txt", "--model", "gpt:layers=1,width=32,heads=2", "--length", 16, "--rate",
      0.01, "--epochs", 4, "--dropout", 0.1], 0.5),
    (["--task", "text", "--words", "--data", "text.txt", "--model", "gpt:layers=1,width=16,heads=2", "--length", 8,
      "--rate", 0.01, "--epochs", 2], 0.08),
], ids=["images", "sentences", "characters", "words"])
def test_what_can_be_learned_is_learned(data, arguments, reached):
    arguments = [data / word if word in ("idx", "ag-news", "text.txt") and before == "--data" else word
                 for before, word in zip(["", *arguments], arguments)]
    run = train(*arguments, "--workers", 2, "--batch", 8, "--codec", "qsgd:bits=4")
    epochs = run.of("epoch")
    assert epochs[-1]["test_accuracy"] >= reached
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]


def test_text_has_the_models_defaults(data):
    start, = train("--task", "text", "--data", data / "text.txt", "--limit", 4, "--batch", 1, "--workers", 1,
                   "--steps", 1).of("start")
    assert (start["model"], start["optimizer"], start["rate"], start["clip"]) == ("gpt", "adamw", 1e-3, 1)


# Memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["gather", "scatter"])
@pytest.mark.parametrize("codec", ["fp32", "qsgd:bits=4", "topk"])
def test_memory_beyond_the_gradients_is_bounded(data, codec, collective):
    run = train("--data", data / "idx", "--model", "mlp:width=400,depth=1", "--workers", 4, "--batch", 4, "--steps", 3,
                "--codec", codec, "--collective", collective)
    memory = run.end["memory"]
    gradients, residuals = memory["gradients"], memory["residuals"]
    assert gradients == 4 * run.end["parameters"]
    assert memory["sums"] <= gradients / 2 and (memory["sums"] > 0) == (collective == "scatter")
    if codec == "fp32":
        assert residuals == 0, "nothing is owed by a codec without errors"
    else:
        assert memory["messages"] <= gradients
    # A step's residuals are kept beside those before it: two copies of a worker's own, where the codec wants feedback,
    # and by scatter two of the part of the means that it owns, about a quarter.
    if codec == "topk":
        assert 2 * gradients <= residuals <= (2 if collective == "gather" else 2.7) * gradients
    if codec == "qsgd:bits=4":
        assert residuals <= (0 if collective == "gather" else 0.7 * gradients)


# What it shows ------------------------------------------------------------------------------------------------------


def test_people_read_a_header_a_row_an_epoch_and_where_time_and_memory_went(small):
    out, errors = fixture.call("train", *small, "--codec", "optquant:bits=3,refit=4")
    assert errors == "" and "\r" not in out and "\033" not in out
    lines = out.splitlines()
    assert lines[0] == ("fashion-mnist, mlp:width=16,depth=1 with 12,730 parameters, 2 workers x 16 samples, cpu, "
                        "optquant:bits=3,refit=4 by scatter")
    assert lines[1].split()[:3] == ["epoch", "train", "loss"]
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"] and lines[4] == ""
    assert all(len(line) == len(lines[1]) for line in lines[2:4]), "columns stand under their names"
    for word in ["tensor", "error", "cosine", "fc1.weight", "12,544", "fc2.bias", "at step 16",
                 "learned (up): levels:", "learned (down): levels:"]:
        assert word in out
    for start, names in [("time of one worker: ", ["compute", "encode", "decode", "waiting", "passed"]),
                         ("memory: ", ["at most", "gradients", "residuals", "messages", "sums"]),
                         ("weights ", ["alike on all workers"])]:
        line, = [line for line in lines if line.startswith(start)]
        assert all(name in line for name in names)


def test_machines_read_json_lines(small):
    run = train(*small)
    kinds = [event["event"] for event in run.events]
    assert kinds == ["start", *["step"] * 7, "layers", "step", "epoch", *["step"] * 7, "layers", "step", "epoch", "end"]
    start, steps, epochs = run.of("start")[0], run.of("step"), run.of("epoch")
    assert (start["total_steps"], start["steps_per_epoch"], start["first_step"]) == (16, 8, 0)
    assert [step["step"] for step in steps] == list(range(1, 17))
    assert [step["epoch"] for step in steps] == [1] * 8 + [2] * 8
    for epoch in 0, 1:
        own = steps[8 * epoch:8 * epoch + 8]
        assert epochs[epoch]["train_loss"] == pytest.approx(np.mean([step["step_loss"] for step in own]))
        assert own[-1]["loss"] == pytest.approx(epochs[epoch]["train_loss"])
    assert steps[-1]["seconds_left"] == 0 and steps[0]["samples_per_second"] > 0
    assert steps[-1]["bytes_sent"] == epochs[-1]["bytes_sent"] > 0
    seconds = epochs[-1]["seconds"]
    assert 0 < seconds["compute"] <= seconds["wall"] and min(seconds.values()) >= 0
    assert run.end["finished"] and run.end["settings"]["codec"] == "qsgd:bits=4"
    assert {tensor["name"] for tensor in run.of("layers")[0]["tensors"]} == {"fc1.weight", "fc1.bias", "fc2.weight",
                                                                           "fc2.bias"}


def test_bits_of_dqsgd_follow_the_norm_within_the_budget(data):
    run = train("--data", data / "idx", *MLP, "--workers", 2, "--batch", 8, "--epochs", 4, "--codec",
                "dqsgd:budget=4.5,min=2,max=8")
    bits = [step["bits"] for step in run.of("step")]
    assert len(set(bits)) > 1 and 2 <= min(bits) and max(bits) < 8.5
    assert np.mean(bits) == pytest.approx(4.5, abs=0.1)  # scales included
    assert len(run.end["bits_over_time"]) > 2


def terminal(arguments, columns=None):
    """What a terminal of so many columns was shown on stderr."""
    master, slave = pty.openpty()
    if columns:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([fixture.PROGRAM, *fixture.words(arguments)], stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert process.wait(fixture.SECONDS) == 0
    return shown.decode()


def test_a_terminal_has_a_progress_line_that_goes_away(data):
    arguments = ["train", "--data", data / "idx", *MLP, "--workers", 2, "--batch", 16, "--epochs", 30]
    shown = terminal(arguments)
    first = shown.split("\033[K")[0]
    for word in ["epoch 1/30", "loss ", "accuracy ", " %", "bits/element", "sent", "samples/s", "left"]:
        assert word in first, first
    assert shown.endswith("\r\033[K")
    narrow = terminal(arguments, columns=40)
    assert all(len(part.strip("\r")) < 40 for part in narrow.split("\033[K")), "a line that wraps cannot be erased"


def test_an_output_that_is_full_ends_the_run(small):
    for more in [], ["--json"]:
        with open("/dev/full", "w") as full:
            done = subprocess.run([fixture.PROGRAM, "train", *fixture.words(small), *more], stdout=full,
                                  stderr=subprocess.PIPE, text=True, timeout=fixture.SECONDS)
        assert done.returncode == IO and "standard output" in done.stderr and done.stderr.count("\n") == 1


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code, expected, arguments", [
    (USAGE, ["batch 200", "256 training samples"], ["--batch", 200]),
    (USAGE, ["3 passes", "smaller batches"], ["--batch", 50, "--accumulate", 3]),
    (USAGE, ["--task", "'imagenet'", "cifar10"], ["--task", "imagenet"]),
    (USAGE, ["model", "'alexnet'", "resnet20"], ["--model", "alexnet"]),
    (USAGE, ["width", "'0'", "65536"], ["--model", "mlp:width=0"]),
    (USAGE, ["cnn", "depth", "width"], ["--model", "cnn:depth=2"]),
    (USAGE, ["bilstm", "images"], ["--model", "bilstm"]),
    (USAGE, ["codec", "'zip'", "qsgd"], ["--codec", "zip"]),
    (USAGE, ["bits", "99"], ["--codec", "qsgd:bits=99"]),
    (USAGE, ["rule 1", "PATTERN=SPEC"], ["--rules", "fp32"]),
    (USAGE, ["rule 1", "'zip'"], ["--rules", "1d=zip"]),
    (USAGE, ["drop-at", "--schedule step"], ["--drop-at", "1,2"]),
    (USAGE, ["drop-at", "empty"], ["--schedule", "step"]),
    (USAGE, ["drop-at", "nan"], ["--schedule", "step", "--drop-at", "nan"]),
    (USAGE, ["drop-at", "-1"], ["--schedule", "step", "--drop-at", "-1"]),
    (USAGE, ["precision", "bf16", "--device cuda"], ["--precision", "bf16"]),
    (USAGE, ["down", "fp32", "scatter"], ["--collective", "gather", "--down", "fp32"]),
    (USAGE, ["'zip'"], ["--down", "zip"]),
    (USAGE, ["--workers", "'0'"], ["--workers", 0]),
    (USAGE, ["--workers", "'-1'"], ["--workers", -1]),
    (USAGE, ["rate", "nan"], ["--rate", "nan"]),
    (USAGE, ["rate", "inf"], ["--rate", "inf"]),
    (USAGE, ["rate", "-0.1"], ["--rate", -0.1]),
    (USAGE, ["rate", "1e+30"], ["--rate", 1e30]),
    (USAGE, ["momentum", "1.5"], ["--momentum", 1.5]),
    (USAGE, ["weight-decay", "nan"], ["--weight-decay", "nan"]),
    (USAGE, ["warmup", "3"], ["--warmup", 3]),
    (USAGE, ["timeout", "nan"], ["--timeout", "nan"]),
    (USAGE, ["timeout", "0 s"], ["--timeout", 0]),
    (USAGE, ["bucket-mb", "0"], ["--bucket-mb", 0]),
    (USAGE, ["--seed", "'-1'"], ["--seed", -1]),
    (USAGE, ["--epochs", "'0'"], ["--epochs", 0]),
    (USAGE, ["dropout", "cnn"], ["--model", "cnn", "--dropout", 0.5]),
    (USAGE, ["length", "images"], ["--length", 5]),
    (USAGE, ["resume", "--checkpoint"], ["--resume"]),
    (USAGE, ["save-every", "--checkpoint"], ["--save-every", 3]),
    (USAGE, ["exchange", "qadam exchanges updates"], ["--exchange", "momenta", "--optimizer", "qadam"]),
    (USAGE, ["first-steps", "only where momenta"], ["--first-steps", 5]),
    (USAGE, ["exchange"], ["--exchange", "weights"]),
    (USAGE, ["decay", "above 0, to 1"], ["--decay", 0]),
    (USAGE, ["decay", "qsgd:bits=4, which keeps no residuals"], ["--decay", 0.9]),
    (IO, ["cannot be made"], ["--checkpoint", "/dev/null/here"]),
    (IO, ["/nowhere", "train-images", "dataset-fashion-mnist"], ["--data", "/nowhere"]),
    (IO, ["train.csv", "ag_news_csv"], ["--task", "ag-news"]),
])
def test_what_cannot_be_is_refused(data, code, expected, arguments):
    given = {"--data": data / "idx", "--model": "mlp:width=16,depth=1", "--workers": 2, "--batch": 16, "--epochs": 2}
    given.update(dict(zip(arguments[::2], arguments[1::2])) if len(arguments) % 2 == 0 else {})
    words = [word for pair in given.items() for word in pair] + (arguments if len(arguments) % 2 else [])
    out = refuse(code, expected, *words)
    assert out == "", "nothing is trained before a refusal"


def test_cuda_is_refused_where_there_is_none(small):
    if json.loads(fixture.call("doctor", "--json")[0].splitlines()[0]).get("cuda_devices"):
        pytest.skip("there is one")
    refuse(UNSUPPORTED, ["cuda", "doctor"], *small, "--device", "cuda")


@pytest.mark.parametrize("name, change, code, expected", [
    ("train-images-idx3-ubyte", lambda b: b[:-1], BAD_INPUT, "expected"),
    ("train-images-idx3-ubyte", lambda b: b"\0" + b, BAD_INPUT, "magic"),
    ("train-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", BAD_INPUT, "label is 10"),
    ("t10k-labels-idx1-ubyte", lambda b: b"", BAD_INPUT, "size"),
    ("t10k-images-idx3-ubyte", None, IO, "not there"),
])
def test_damaged_data_is_refused_with_the_files_name(tmp_path, name, change, code, expected):
    path = fixture.make_idx(tmp_path / "idx", train=20, test=10) / name
    if change:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    assert refuse(code, [name, expected], "--data", tmp_path / "idx", *MLP, "--batch", 4) == ""


def test_an_export_that_cannot_be_written_is_refused_before_training(tmp_path, small):
    for place in tmp_path / "nowhere" / "weights.pt", tmp_path:
        assert refuse(IO, str(place), *small, "--export", place) == ""
    assert list(tmp_path.iterdir()) == []


def test_an_export_never_takes_the_place_of_what_is_not_a_file(tmp_path, small):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refuse(IO, [str(pipe), "not a regular file"], *small, "--export", pipe) == ""
    assert refuse(IO, ["/dev/null", "not a regular file"], *small, "--export", "/dev/null") == ""
    assert stat.S_ISFIFO(pipe.stat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_an_export_follows_a_link_and_leaves_it(tmp_path, small):
    (tmp_path / "real.pt").write_bytes(b"old")
    (tmp_path / "link.pt").symlink_to("real.pt")
    train(*small, "--steps", 2, "--export", tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink() and (tmp_path / "real.pt").read_bytes()[:2] == b"PK"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_export_replaces_the_file_only_when_training_has_ended(tmp_path, small):
    path = tmp_path / "weights.pt"
    path.write_text("older")
    refuse(USAGE, "batch", *small, "--accumulate", 100, "--export", path)
    assert path.read_text() == "older"
    run = train(*small, "--export", path)
    model = reference.Mlp(784, 16, 1)
    model.load_state_dict(torch.load(path), strict=True)
    accuracy = reference.test(model, idx_data(256))[1]
    assert accuracy == pytest.approx(run.of("epoch")[-1]["test_accuracy"])
    assert list(tmp_path.iterdir()) == [path]


# Divergence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "qsgd:bits=4", "topk:ratio=0.05", "optquant:bits=3,refit=2", "casq:bits=2",
                                   "dqsgd:budget=4", "fft:theta=0.5"])
def test_a_run_that_diverges_leaves_steps_out_and_ends(tmp_path, small, codec):
    run = train(*small, "--rate", 1e6, "--codec", codec, "--check", "--export", tmp_path / "weights.pt", code=FAILED)
    assert 8 < run.end["skipped_steps"] < 16 and run.end["finished"] and run.end["failed"]
    assert run.of("step")[-1]["step_loss"] is None or run.of("step")[-1]["step_loss"] > 1e10
    assert all(value.isfinite().all() for value in torch.load(tmp_path / "weights.pt").values())
    # People are told in words.
    words = f"{run.end['skipped_steps']} of 16 steps were left out"
    refuse(FAILED, ["the training failed", words], *small, "--rate", 1e6, "--codec", codec)


def test_half_of_the_steps_may_be_left_out(small):
    run = train(*small, "--rate", 3000, "--schedule", "constant")  # goes wrong late
    assert 0 < run.end["skipped_steps"] <= 8 and not run.end["failed"]


def test_a_comparison_with_a_failed_run_writes_its_report_and_says_so(tmp_path, small):
    arguments = [*small, "--rate", 1e6, "--codec", "fp32", "--codec", "qsgd:bits=4", "--out", tmp_path / "out"]
    for _ in range(2):  # the second time nothing is trained, and the answer is the same
        refuse(FAILED, ["2 of 2 trainings failed", "qsgd:bits=4, seed 1"], *arguments, command="compare")
        assert (tmp_path / "out" / "report.html").exists()


# Codecs that plan with the length of the run -------------------------------------------------------------------------


def test_the_width_of_dqsgd_follows_the_norms_within_the_length_of_the_run(data):
    arguments = ["--data", data / "idx", *MLP, "--workers", 2, "--batch", 16, "--epochs", 25, "--rate", 0.1,
                 "--collective", "gather"]
    weights = {codec: train(*arguments, "--codec", codec).end["weights"]
               for codec in ["qsgd:bits=4", "dqsgd:budget=4,fall=30", "dqsgd:budget=4,fall=30,steps=200"]}
    run = train(*arguments, "--codec", "dqsgd:budget=4,fall=30")
    widths = [bits for _, bits in run.end["bits_over_time"]]
    assert max(widths) - min(widths) > 1.5, "the width does not move"
    assert run.end["weights"] == weights["dqsgd:budget=4,fall=30"] != weights["qsgd:bits=4"]
    # 25 epochs are 200 steps: what the run says is what the codec could have been told.
    assert run.end["weights"] == weights["dqsgd:budget=4,fall=30,steps=200"]


def test_the_number_of_buckets_does_not_change_what_dqsgd_decides(data):
    arguments = ["--data", data / "idx", *MLP, "--workers", 2, "--batch", 16, "--epochs", 4, "--rate", 0.1]
    runs = [train(*arguments, "--codec", codec, "--bucket-mb", megabytes)
            for codec in ["dqsgd:budget=4,fall=30", "dqsgd:error=0.05"] for megabytes in [25, 0.001]]
    for one, many in zip(runs[::2], runs[1::2]):
        assert many.end["weights"] == one.end["weights"]
