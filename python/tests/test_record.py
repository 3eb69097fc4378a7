# SPDX-License-Identifier: Apache-2.0
"""The record of a user's own training, as `gradwire report` reads it."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import gradwire  # noqa: E402
import gradwire.torch as gw  # noqa: E402
from gradwire.torch import _register  # noqa: E402

ABOUT = {"task": "lines", "batch": 4, "optimizer": "sgd", "rate": 0.1, "schedule": "constant"}
DOCUMENTED = Path(__file__).resolve().parents[2] / "docs/training.md"


def fields():
    """The fields of the table in the documentation, which Record must write all but those that it cannot know."""
    table = DOCUMENTED.read_text().partition("### The record of a run")[2].partition("\n### ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return set(re.findall("`(\\w+)`", " ".join(rows))) - {"commit", "settings"}


def sign(x):
    return x.abs().mean() * x.sign(), x.numel() + 32


def train(rank, folder, codec, seed, resume=False, epochs=2):
    if codec == "py-sign-recorded" and _register.found(codec) is None:
        gw.register(codec, sign, feedback=True)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=rank.group)
    hook = gw.compress(ddp, codec, min_elements=100) if codec is not None else None
    generator = torch.Generator().manual_seed(10 + rank.rank)
    about = ABOUT | {"seed": seed} | ({} if hook is not None else {"model": ddp, "workers": rank.world})
    losses = []
    with gw.Record(folder, hook, resume=resume, **about) as record:
        for epoch in range(epochs):
            for _ in range(3):
                x = torch.randn(4, 16, generator=generator)
                loss = (ddp(x) - x[:, :4]).square().mean()
                loss.backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
                record.step(loss=loss)
                losses.append(float(loss.detach()))
            record.evaluate(accuracy=torch.tensor(0.5 + epoch / 10), loss=math.inf if epoch == 0 else 0.25)
    with pytest.raises(gradwire.UsageError, match="closed"):
        record.step()
    return losses, hook.stats() if hook is not None else None, sorted(os.listdir(folder)) if rank.rank == 0 else None


def recorded(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_record_has_what_the_hook_counts(ranks, tmp_path):
    folder = tmp_path / "runs/one"
    losses, stats, files = ranks.run(2, train, str(folder), "qsgd:bits=4", 3)[0]
    assert files == ["run.json"]
    record = recorded(folder)
    assert set(record) == fields()
    assert record["codec"] == "qsgd:bits=4" and record["canonical"].startswith("1d=fp32;<100=fp32;*=qsgd:bits=4,")
    assert record["workers"] == 2 and record["parameters"] == 16 * 64 + 64 + 64 * 4 + 4
    assert record["model"] == "Sequential" and record["engine"] == "gloo" and record["collective"] == "scatter"
    assert record["finished"] is True and record["failed"] is False and record["steps"] == 6
    first, last = record["epochs"]
    assert [one["step"] for one in record["epochs"]] == [3, 6] and [one["epoch"] for one in record["epochs"]] == [1, 2]
    assert first["train_loss"] == pytest.approx(sum(losses[:3]) / 3)
    assert first["test_loss"] is None and last["test_loss"] == 0.25 and last["test_accuracy"] == pytest.approx(0.6)
    assert last["bytes_sent"] == stats["all_steps"]["bytes"] == 2 * first["bytes_sent"]
    assert last["bits"] == pytest.approx(stats["bits"])
    seconds = last["seconds"]
    assert seconds["encode"] == pytest.approx(stats["all_steps"]["seconds"]["encode"])
    assert seconds["wall"] >= seconds["compute"] >= 0


@pytest.fixture(scope="module")
def six_runs(ranks, tmp_path_factory):
    """Three codecs and two seeds of a training in torch."""
    folder = tmp_path_factory.mktemp("six") / "runs"
    for seed in (1, 2):
        for name, codec in (("plain", None), ("qsgd", "qsgd:bits=4"), ("mine", "py-sign-recorded")):
            ranks.run(2, train, str(folder / f"{name}-{seed}"), codec, seed)
    return folder


@pytest.mark.parametrize("by", ["package", "program"])
def test_the_report_shows_it(six_runs, tmp_path, by):
    """All of them in one table."""
    command = [sys.executable, "-m", "gradwire"] if by == "package" else [os.environ.get("GRADWIRE")]
    if command[0] is None:
        pytest.skip("GRADWIRE names no program")
    if by == "package" and not hasattr(gradwire._core, "report"):
        pytest.skip("this build has no report")
    shutil.copytree(six_runs, tmp_path / "runs")

    def report(*arguments):
        return subprocess.run([*command, "report", *map(str, arguments)], capture_output=True, text=True, cwd=tmp_path)

    done = report(*sorted((tmp_path / "runs").iterdir()))  # as `gradwire report runs/*`
    assert done.returncode == 0, done.stderr
    table = {line.split()[0]: line.split() for line in done.stdout.splitlines()[2:] if "%" in line}
    assert list(table) == ["fp32", "qsgd:bits=4", "py-sign-recorded"]
    assert all(row[1:3] == ["60.00", "%"] for row in table.values()) and "unfinished" not in done.stdout
    elements, compressed = 16 * 64 + 64 + 64 * 4 + 4, 16 * 64 + 64 * 4
    bits = (compressed + 2 * 32 + 32 * 68) / elements  # as the function has declared them
    assert table["py-sign-recorded"][5] == f"{bits:.2f}" and table["py-sign-recorded"][6] == f"{32 / bits:.1f}x"
    assert "1.0x" in table["fp32"]
    with open(tmp_path / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 2
    plain = [float(row["bytes_sent"]) for row in rows if row["codec"] == "fp32"]
    assert plain == [3 * 4 * elements, 6 * 4 * elements] * 2  # of a ring, 2 ranks
    page = (tmp_path / "report.html").read_text()
    assert report(".").returncode == 0 and (tmp_path / "report.html").read_text() == page  # the folder of them all
    # A field that the program refuses, to see that it looks.
    path = tmp_path / "runs/plain-1/run.json"
    path.write_text(path.read_text().replace('"workers": 2', '"workers": 0'))
    assert "workers is 0" in report("runs/plain-1").stderr


def test_a_stopped_record_goes_on(ranks, tmp_path):
    folder = tmp_path / "runs/one"
    ranks.run(2, train, str(folder), "qsgd:bits=4", 3, False, 1)
    once = recorded(folder)
    with pytest.raises(AssertionError, match="resume=True to go on with it"):
        ranks.run(1, train, str(folder), "qsgd:bits=4", 3)
    with pytest.raises(AssertionError, match="codec is 'qsgd:bits=4'"):
        ranks.run(1, train, str(folder), "fp16", 3, True)
    ranks.run(2, train, str(folder), "qsgd:bits=4", 3, True, 1)
    twice = recorded(folder)
    assert twice["epochs"][0] == once["epochs"][0] and [one["step"] for one in twice["epochs"]] == [3, 6]
    assert twice["epochs"][1]["bytes_sent"] == 2 * once["epochs"][0]["bytes_sent"]
    assert twice["epochs"][1]["seconds"]["wall"] > once["epochs"][0]["seconds"]["wall"]
    # From a checkpoint of step 3, which knows nothing of the second evaluation.
    ranks.run(2, train, str(folder), "qsgd:bits=4", 3, 3, 2)
    again = recorded(folder)
    assert again["epochs"][0] == once["epochs"][0] and [one["step"] for one in again["epochs"]] == [3, 6, 9]
    assert [one["epoch"] for one in again["epochs"]] == [1, 2, 3] and again["steps"] == 9
    assert again["epochs"][2]["bytes_sent"] == 3 * once["epochs"][0]["bytes_sent"]


def test_an_exception_leaves_an_unfinished_record(tmp_path):
    with pytest.raises(ZeroDivisionError), gw.Record(tmp_path / "a", parameters=10, task="t") as record:
        record.step(loss=1.0)
        record.evaluate(loss=2.0)
        raise ZeroDivisionError
    assert recorded(tmp_path / "a")["finished"] is False and recorded(tmp_path / "a")["metric"] == "loss"
    with pytest.warns(UserWarning, match="has no evaluation"), gw.Record(tmp_path / "b", parameters=10) as record:
        record.step()
    assert recorded(tmp_path / "b")["finished"] is False


@pytest.mark.parametrize(
    "about,words",
    [
        ({}, "needs the model"),
        ({"parameters": 3, "batch": 0}, "batch is 0"),
        ({"parameters": 3, "task": ""}, "task is ''"),
        ({"parameters": 3, "colour": "red"}, "no 'colour'; it may have batch"),
        ({"parameters": 3, "metric": "f1"}, "metric is 'f1'"),
        ({"parameters": 3, "rate": math.nan}, "rate is nan"),
        ({"parameters": 3, "seed": 2**64}, "seed is 18446744073709551616"),
        ({"parameters": 3, "resume": -1}, "resume is -1"),
        ({"hook": 3}, "hook is of type int"),
    ],
)
def test_what_is_refused(tmp_path, about, words):
    with pytest.raises(gradwire.UsageError, match=words):
        gw.Record(tmp_path, **about)


def test_evaluations_that_say_nothing_are_refused(tmp_path):
    record = gw.Record(tmp_path, parameters=3)
    with pytest.raises(gradwire.UsageError, match="needs accuracy= or loss="):
        record.evaluate()
    with pytest.raises(gradwire.UsageError, match="from 0 to 1"):
        record.evaluate(accuracy=97.0)
    with pytest.raises(gradwire.UsageError, match="rate is -1"):
        record.evaluate(accuracy=0.9, rate=-1)
    assert not record.path.exists()
    record.step(accuracy=0.25)
    record.step()
    record.evaluate(accuracy=0.9)
    assert recorded(tmp_path)["epochs"][0]["train_accuracy"] == 0.25  # of the steps that have said it
    with pytest.raises(gradwire.UsageError, match="the metric of this record is accuracy"):
        record.evaluate(loss=1.0)
