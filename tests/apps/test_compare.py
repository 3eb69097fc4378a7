# SPDX-License-Identifier: Apache-2.0
"""`gradwire compare`: runs are paired, finished ones are not repeated, stopped ones go on, and what is written is the
same however often it was interrupted."""

import csv
import json
import re
import shutil
import signal
import socket
import subprocess
from datetime import datetime, timezone

import pytest

import train_fixture as fixture
from train_fixture import FAILED, INTERRUPTED, IO, USAGE, Live, call, refuse

CODECS = ["--codec", "fp32", "--codec", "topk:ratio=0.05"]
BOTH = ["--collective", "gather", "--collective", "scatter"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return fixture.make_idx(tmp_path_factory.mktemp("data") / "idx")


@pytest.fixture
def small(data):
    return ["--data", data, "--model", "mlp:width=16,depth=1", "--workers", 2, "--threads", 1, "--batch", 16,
            "--epochs", 2]


def records(folder):
    """By codec, collective and seed."""
    found = {}
    for path in (folder / "runs").glob("*/run.json"):
        record = json.loads(path.read_text())
        found[record["codec"], record["collective"], record["seed"]] = record
    return found


def weights(folder):
    return {key: record["weights"] for key, record in records(folder).items()}


def results(folder):
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def compare(folder, *arguments, code=0):
    out, errors = call("compare", *arguments, "--out", folder, code=code)
    assert errors == ""
    return out


def test_codecs_seeds_and_collectives_are_run_paired_and_written_down(tmp_path, small):
    out = compare(tmp_path, *small, *CODECS, *BOTH, "--seeds", 2)
    found = records(tmp_path)
    assert set(found) == {(codec, collective, seed) for codec in ("fp32", "topk:ratio=0.05")
                          for collective in ("gather", "scatter") for seed in (1, 2)}
    assert all(record["finished"] and len(record["epochs"]) == 2 for record in found.values())
    assert len(set(weights(tmp_path).values())) >= 6
    # The same seed means the same weights and samples: without errors both collectives train alike.
    for seed in 1, 2:
        losses = [[epoch["train_loss"] for epoch in found["fp32", collective, seed]["epochs"]]
                  for collective in ("gather", "scatter")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    rows = results(tmp_path)
    assert len(rows) == 16
    for row in rows:
        epoch = found[row["codec"], row["collective"], int(row["seed"])]["epochs"][int(row["epoch"]) - 1]
        assert float(row["test_accuracy"]) == epoch["test_accuracy"]
        assert float(row["bytes_sent"]) == epoch["bytes_sent"]
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert "topk:ratio=0.05" in page and "http://" not in page.split("<script")[0]
    assert out.count("run 8 of 8") == 1 and "written: " in out
    assert list(tmp_path.glob("runs/*/checkpoint")) == [], "what is finished needs no checkpoint"


def test_a_run_of_compare_is_the_run_of_train(tmp_path, small):
    compare(tmp_path, *small, "--codec", "topk:ratio=0.05", "--seed", 5)
    alone = fixture.train(*small, "--codec", "topk:ratio=0.05", "--seed", 5)
    record, = records(tmp_path).values()
    assert record["weights"] == alone.weights
    assert record["epochs"][-1]["test_loss"] == alone.end["epochs"][-1]["test_loss"]


def test_a_record_says_what_made_it_and_so_do_the_table_and_the_page(tmp_path, small):
    began = datetime.now(timezone.utc).replace(microsecond=0)
    compare(tmp_path, *small, *CODECS)
    ended = datetime.now(timezone.utc)
    version = call("version")[0].split()
    for record in records(tmp_path).values():
        assert record["gradwire"] == version[1]
        assert record.get("commit", "") == (version[3].rstrip(")") if len(version) > 2 else "")
        assert began <= datetime.fromisoformat(record["date"].replace("Z", "+00:00")) <= ended
        assert record["host"] == socket.gethostname()
    page = (tmp_path / "report.html").read_text()
    for row in results(tmp_path):
        record = records(tmp_path)[row["codec"], row["collective"], int(row["seed"])]
        for name in "gradwire", "commit", "date", "host":
            assert row[name] == record.get(name, "") and row[name] in page


def test_the_command_of_a_record_repeats_it(tmp_path, small):
    folder = tmp_path / "it's here"
    compare(folder, *small, *CODECS)
    command, = {record["command"] for record in records(folder).values()}
    script = f'gradwire() {{ "{fixture.PROGRAM}" "$@"; }}\n{command}'
    done = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished before" not in done.stdout and done.stdout.count("train loss") == 2
    assert weights(tmp_path / "it's here-again") == weights(folder)


def test_a_damaged_checkpoint_of_a_stopped_run_is_set_aside(tmp_path, small):
    arguments = list(small)
    arguments[arguments.index("--epochs") + 1] = 12
    arguments += ["--codec", "fp32", "--save-every", 7]
    compare(tmp_path / "whole", *arguments)
    where = tmp_path / "parts"
    with Live(*arguments, "--out", where, command="compare") as live:
        assert live.until_step(30), "ended too early"
        live.process.send_signal(signal.SIGKILL)
        live.rest()
    newest = sorted(where.glob("runs/*/checkpoint/step-*"))[-1]
    (newest / "weights.pt").write_bytes(b"")
    out, errors = call("compare", *arguments, "--out", where)
    assert "set aside" in errors and newest.name in errors and "going on from step" in out
    assert weights(where) == weights(tmp_path / "whole")


def test_what_is_finished_is_not_repeated(tmp_path, small):
    compare(tmp_path, *small, *CODECS)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    out = compare(tmp_path, *small, *CODECS)
    assert out.count("finished before") == 2 and "train loss" not in out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    out = compare(tmp_path, *small, *CODECS, "--seeds", 2)
    assert out.count("finished before") == 2 and out.count("train loss") == 2
    assert len(results(tmp_path)) == 8


def test_other_settings_are_other_runs(tmp_path, small):
    compare(tmp_path, *small, *CODECS)
    longer = list(small)
    longer[longer.index("--epochs") + 1] = 3
    out = compare(tmp_path, *longer, *CODECS)
    assert "finished before" not in out and len(list((tmp_path / "runs").iterdir())) == 4
    assert {row["epoch"] for row in results(tmp_path)} == {"1", "2", "3"}
    assert compare(tmp_path, *small, *CODECS).count("finished before") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_comparison_goes_on(tmp_path, small, number):
    arguments = list(small)
    arguments[arguments.index("--epochs") + 1] = 12
    arguments += [*CODECS, "--seeds", 2, "--save-every", 7]
    compare(tmp_path / "whole", *arguments)
    where = tmp_path / "parts"
    places = [(0, 30), (1, 50), (2, 70)]  # in which of the runs that are left, after which step
    for skipped, step in places:
        with Live(*arguments, "--out", where, command="compare") as live:
            for _ in range(skipped):
                live.until(lambda line: '"event":"end"' in line)
            assert live.until_step(step), "ended too early"
            live.process.send_signal(number)
            code, out, errors = live.rest()
        assert errors == "" and code == (INTERRUPTED if number == signal.SIGINT else -number)
        if number == signal.SIGINT:
            assert (where / "report.html").exists() and json.loads(out.splitlines()[-1])["event"] == "end"
        if sum(record["finished"] for record in records(where).values()) >= 2:
            break
    out = compare(where, *arguments)
    assert "finished before" in out and "going on from step" in out
    assert weights(where) == weights(tmp_path / "whole")
    strip = [{key: value for key, value in row.items() if not re.search("seconds|bytes|date", key)}
             for row in results(where)]
    assert strip == [{key: row[key] for key in strip[0]} for row in results(tmp_path / "whole")]


def test_people_are_told_how_to_go_on(tmp_path, small):
    arguments = list(small)
    arguments[arguments.index("--epochs") + 1] = 2000
    with Live(*arguments, "--codec", "fp32", "--out", tmp_path, command="compare", json_lines=False) as live:
        assert live.until(lambda line: line.split()[:1] == ["3"])
        live.interrupt()
        code, out, errors = live.rest()
    assert code == INTERRUPTED and errors == ""
    assert out.splitlines()[-1] == "stopped and saved; the same command goes on"
    assert "(unfinished)" in out and len(results(tmp_path)) >= 3


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"finished": "yes"}', '{"finished": true}', "\xff",
                                     "cut in half", "other settings", "no epochs"])
def test_a_damaged_record_is_run_again(tmp_path, small, content):
    compare(tmp_path, *small, *CODECS)
    before = weights(tmp_path)
    path = next(tmp_path.glob("runs/*topk*/run.json"))
    record = json.loads(path.read_text())
    if content == "cut in half":
        content = path.read_text()[:len(path.read_text()) // 2]
    elif content == "other settings":
        content = json.dumps({**record, "settings": {**record["settings"], "rate": 9}})
    elif content == "no epochs":
        content = json.dumps({**record, "epochs": []})
    path.write_bytes(content.encode("latin-1"))
    out = compare(tmp_path, *small, *CODECS)
    assert out.count("finished before") == 1 and out.count("train loss") == 1
    assert weights(tmp_path) == before


def test_plots_for_papers(tmp_path, small):
    if shutil.which("gnuplot") is None:
        pytest.skip("no gnuplot")
    compare(tmp_path, *small, *CODECS, "--plot", "png")
    plots = list(tmp_path.glob("*.png"))
    assert len(plots) >= 3
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 2000 for path in plots)


def test_a_run_that_diverges_is_part_of_the_report(tmp_path, small):
    refuse(FAILED, "2 of 2 trainings failed", *small, *CODECS, "--rate", 1e6, "--out", tmp_path, command="compare")
    rows = results(tmp_path)
    assert len(rows) == 4 and all(int(row["skipped_steps"]) > 0 for row in rows)


def test_machines_read_json_lines(tmp_path, small):
    out, errors = call("compare", *small, *CODECS, "--out", tmp_path, "--json")
    events = [json.loads(line, parse_constant=fixture.refuse_constant) for line in out.splitlines()]
    assert errors == ""
    assert [event["codec"] for event in events if event["event"] == "start"] == ["fp32", "topk:ratio=0.05"]
    assert [event["event"] for event in events].count("end") == 2


@pytest.mark.parametrize("code, expected, arguments", [
    (USAGE, ["'zip'", "qsgd"], ["--codec", "fp32", "--codec", "zip"]),
    (USAGE, ["'qsgd'", "'qsgd:bits=4'", "same"], ["--codec", "qsgd", "--codec", "qsgd:bits=4"]),
    (USAGE, ["collective", "twice"], ["--codec", "fp32", "--collective", "gather", "--collective", "gather"]),
    (USAGE, ["--seeds", "'0'"], ["--codec", "fp32", "--seeds", 0]),
    (USAGE, ["--plot", "jpg"], ["--codec", "fp32", "--plot", "jpg"]),
    (USAGE, ["batch", "training samples"], ["--codec", "fp32", "--limit", 8]),
])
def test_what_cannot_be_is_refused_before_anything_is_trained(tmp_path, small, code, expected, arguments):
    out = refuse(code, expected, *small, *arguments, "--out", tmp_path / "out", command="compare")
    assert "train loss" not in out and not list(tmp_path.glob("out/*.csv"))


def test_a_place_that_cannot_be_written_is_refused(small):
    refuse(IO, ["/dev/null/out", "cannot be made"], *small, *CODECS, "--out", "/dev/null/out", command="compare")
    refuse(USAGE, "--out", *small, *CODECS, command="compare")
