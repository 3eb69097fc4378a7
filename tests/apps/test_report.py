# SPDX-License-Identifier: Apache-2.0
"""What `gradwire report` makes of records: the table, the numbers, the plots and what it refuses. How the page looks
and behaves in a browser is in test_report_page.py.

The program is $GRADWIRE_BIN, $GRADWIRE (set by ctest) or build/bin/gradwire.
"""

import csv
import json
import math
import os
import re
import statistics
import struct
import subprocess
from pathlib import Path

import pytest

from report_records import CODECS, comparison, record, save

PROGRAM = (
    os.environ.get("GRADWIRE_BIN")
    or os.environ.get("GRADWIRE")
    or str(Path(__file__).resolve().parents[2] / "build/bin/gradwire")
)
USAGE, BAD_INPUT, IO, UNSUPPORTED = 2, 3, 4, 5
HOSTILE = "</script><img src=x onerror=\"window.harmed=1\">'`touch harmed`' %d @x \\"


def report(folder, *arguments, code=0, **environment):
    done = subprocess.run(
        [PROGRAM, "report", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=120,
        env={**os.environ, **environment},
    )
    errors = done.stderr.decode()
    assert done.returncode == code, errors
    if code:
        assert errors.startswith("gradwire: error: ") and errors.count("\n") == 1, errors
    return done.stdout.decode(), errors


def data_of(folder):
    page = (folder / "report.html").read_text()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))


def series_of(folder, label):
    return next(series for series in data_of(folder)["series"] if series["label"] == label)


# results.csv ---------------------------------------------------------------------------------------------------------


def test_csv_has_a_row_for_every_run_and_epoch_with_the_records_figures(tmp_path):
    runs = comparison()
    report(save(tmp_path, runs))
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == sum(len(run["epochs"]) for run in runs)
    expected = [(run, epoch) for run in runs for epoch in run["epochs"]]
    for row, (run, epoch) in zip(rows, expected):
        for name in "codec", "canonical", "task", "model", "collective", "machine", "weights", "metric":
            assert row[name] == run[name]
        assert row["finished"] == str(run["finished"]).lower()
        for name in "seed", "workers", "batch", "parameters", "skipped_steps":
            assert int(row[name]) == run[name]
        for name in (
            "epoch",
            "step",
            "rate",
            "train_loss",
            "train_accuracy",
            "test_loss",
            "test_accuracy",
            "bytes_sent",
            "bits",
        ):
            assert float(row[name]) == epoch[name]
        for name, seconds in epoch["seconds"].items():
            assert float(row[name + "_seconds"]) == seconds
        for name, size in run["memory"].items():
            assert float(row[name + "_bytes"]) == size


def test_csv_keeps_any_text_and_leaves_what_is_not_a_number_empty(tmp_path):
    run = record(codec='a,"b"\nc', machine=HOSTILE)
    run["epochs"][0]["train_loss"] = None
    report(save(tmp_path, [run]))
    rows = list(csv.DictReader((tmp_path / "results.csv").open(newline="")))
    assert rows[0]["codec"] == 'a,"b"\nc' and rows[0]["machine"] == HOSTILE
    assert rows[0]["train_loss"] == "" and float(rows[1]["train_loss"]) == run["epochs"][1]["train_loss"]


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective, engine, sent_with_fp32", [
    ("gather", "loopback", 3),         # every worker sends its whole gradient to the three others
    ("scatter", "loopback", 2 * 3 / 4),  # a quarter of it to each of the others, twice
    ("scatter", "server", 1),          # all of it to the server
])
def test_ratio_is_what_fp32_would_send_over_what_was_sent(tmp_path, collective, engine, sent_with_fp32):
    run = record("qsgd:bits=4", collective=collective, engine=engine)
    report(save(tmp_path, [run]))
    last = run["epochs"][-1]
    expected = sent_with_fp32 * 4 * run["parameters"] * last["step"] / last["bytes_sent"]
    assert series_of(tmp_path, "qsgd:bits=4")["ratio"] == pytest.approx(expected, rel=1e-12)


def test_a_ratio_of_a_run_that_sent_nothing_is_left_open(tmp_path):
    run = record("fp32", workers=1)
    for epoch in run["epochs"]:
        epoch["bytes_sent"] = 0
    table, _ = report(save(tmp_path, [run]))
    assert series_of(tmp_path, "fp32")["ratio"] is None and "inf" not in table and "nan" not in table


def test_bits_that_alternate_are_drawn_as_their_mean_over_steps_and_end_without_a_jump(tmp_path):
    run = record("dqsgd:budget=4.5")
    # 451 changes: 4 bits for three steps, then 5 bits for one, and so on.
    run["bits_over_time"] = [[4 * (k // 2) + 3 * (k % 2), 4.0 + k % 2] for k in range(451)]
    report(save(tmp_path, [run]))
    series = series_of(tmp_path, "dqsgd:budget=4.5")
    drawn = [bits for _, bits in series["bits_over_time"]]
    assert len(drawn) == 100 and (series["bits_least"], series["bits_most"]) == (4, 5)
    # A bin has 9 or 10 steps, of which 2 or 3 have 5 bits: between 4 + 2 / 10 and 4 + 3 / 9.
    assert all(4.2 - 1e-9 <= bits <= 4.34 for bits in drawn)


def test_statistics_are_over_seeds_and_differences_paired_by_seed(tmp_path):
    runs = [record(codec, seed) for codec in ("fp32", "casq:bits=2") for seed in (1, 2, 3)] + [record("casq:bits=2", 9)]
    report(save(tmp_path, runs))
    final = {(run["codec"], run["seed"]): run["epochs"][-1]["test_accuracy"] for run in runs}
    casq = series_of(tmp_path, "casq:bits=2")
    values = [final["casq:bits=2", seed] for seed in (1, 2, 3, 9)]
    assert casq["final"]["mean"] == pytest.approx(statistics.mean(values), rel=1e-12)
    assert casq["final"]["deviation"] == pytest.approx(statistics.stdev(values), rel=1e-9)
    assert (casq["final"]["least"], casq["final"]["most"]) == (min(values), max(values))
    pairs = [final["casq:bits=2", seed] - final["fp32", seed] for seed in (1, 2, 3)]  # seed 9 has no partner
    assert casq["difference"]["count"] == 3
    assert casq["difference"]["mean"] == pytest.approx(statistics.mean(pairs), rel=1e-9)
    assert casq["difference"]["deviation"] == pytest.approx(statistics.stdev(pairs), rel=1e-9)
    assert series_of(tmp_path, "fp32")["difference"] is None


def test_projected_time_is_measured_work_plus_bytes_over_bandwidth(tmp_path):
    runs = [record("fp32", 1), record("qsgd:bits=4", 1)]
    report(save(tmp_path, runs))
    compute = statistics.median(run["epochs"][-1]["seconds"]["compute"] / run["epochs"][-1]["step"] for run in runs)
    assert data_of(tmp_path)["links"] == [0.1, 1, 10, 25]
    target = runs[0]["epochs"][-1]["test_accuracy"] - 0.005
    for run in runs:
        series = series_of(tmp_path, run["codec"])
        for epoch, point in zip(run["epochs"], series["curve"]):
            work = compute * epoch["step"] + epoch["seconds"]["encode"] + epoch["seconds"]["decode"]
            for link, seconds in zip((0.1, 1, 10, 25), point["seconds"]):
                assert seconds == pytest.approx(work + epoch["bytes_sent"] * 8 / (link * 1e9), rel=1e-12)
        reached = [i for i, epoch in enumerate(run["epochs"]) if epoch["test_accuracy"] >= target]
        assert series["target"] == (reached[0] if reached else None)


def test_compute_is_one_median_over_all_codecs_and_its_range_is_known(tmp_path):
    runs = [record(codec, seed) for codec in ("fp32", "qsgd:bits=4", "casq:bits=2") for seed in (1, 2)]
    times = [5, 6, 7, 8, 9, 40]  # seconds: one run was disturbed
    for run, seconds in zip(runs, times):
        for epoch in run["epochs"]:
            epoch["seconds"]["compute"] = seconds * epoch["epoch"] / len(run["epochs"])
    other = record("fp32", 1, batch=128)  # computes something else
    report(save(tmp_path, [*runs, other]))
    steps = runs[0]["epochs"][-1]["step"]
    for series in data_of(tmp_path)["series"]:
        if series["settings"]["batch"] == "128":
            assert series["compute"]["runs"] == 1
            continue
        compute = {name: value * steps for name, value in series["compute"].items() if name != "runs"}
        assert compute == pytest.approx({"median": 7.5, "least": 5, "most": 40}) and series["compute"]["runs"] == 6
        codec = series["split"][1] + series["split"][3]
        sent = series["bytes"] * 8 / 1e9
        assert series["curve"][-1]["seconds"][1] == pytest.approx(7.5 + codec + sent, rel=1e-6)


def test_qadam_codecs_are_not_pooled_since_their_weights_are_part_of_compute(tmp_path):
    runs = [record(codec, 1, optimizer="qadam") for codec in ("fp32", "qsgd:bits=4")]
    report(save(tmp_path, runs))
    assert [series["compute"]["runs"] for series in data_of(tmp_path)["series"]] == [1, 1]


def test_evaluations_within_an_epoch_are_points_of_the_curve(tmp_path):
    run = record("fp32", 1, epochs=2)
    first = run["epochs"][0]
    run["points"] = [{"epoch": 0.5, "step": 117, "test_loss": 1.0, "test_accuracy": 0.6, "bytes_sent": 10,
                      "seconds": first["seconds"]}]
    report(save(tmp_path, [run]))
    curve = series_of(tmp_path, "fp32")["curve"]
    assert [point["epoch"] for point in curve] == [0.5, 1, 2] and curve[0]["value"]["mean"] == 0.6
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == 2, "results.csv has the ends of epochs"


def test_a_run_that_ends_within_an_epoch_ends_there_in_the_curve(tmp_path):
    run = record("fp32", 1, epochs=2)
    run["epochs"][1]["step"] = 351  # half of the second epoch
    run["points"] = [{"epoch": 0.5, "step": 117, "test_loss": 1.0, "test_accuracy": 0.6, "bytes_sent": 10,
                      "seconds": run["epochs"][0]["seconds"]}]
    report(save(tmp_path, [run]))
    assert [point["epoch"] for point in series_of(tmp_path, "fp32")["curve"]] == pytest.approx([0.5, 1, 1.5])


def test_what_made_the_runs_is_in_the_table_and_older_records_leave_it_empty(tmp_path):
    made = {"gradwire": "9.8.7", "commit": "abc1234", "date": "2031-02-03T04:05:06Z", "host": "box"}
    report(save(tmp_path, [record("fp32", 1, **made), record("fp32", 2)]))
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert {tuple(row[name] for name in made) for row in rows} == {tuple(made.values()), ("", "", "", "")}


def test_a_colour_is_a_codec_and_dashes_are_a_collective(tmp_path):
    codecs = ["fp32", "qsgd:bits=4", "casq:bits=2"]
    report(save(tmp_path, [record(codec, 1, collective=how) for codec in codecs for how in ("gather", "scatter")]))
    data = data_of(tmp_path)
    looks = {(each["codec"], each["collective"]): (each["colour"], each["variant"]) for each in data["series"]}
    assert len(set(looks.values())) == 6 and data["groups"][0]["variants"] == 2
    for codec in codecs:
        assert looks[codec, "gather"][0] == looks[codec, "scatter"][0]
    for how in "gather", "scatter":
        assert len({looks[codec, how][1] for codec in codecs}) == 1
    assert looks["fp32", "gather"][0] == 0, "black"


def test_a_codec_that_never_gets_there_has_no_time_to_target(tmp_path):
    poor = record("casq:bits=2", 1)
    for epoch in poor["epochs"]:
        epoch["test_accuracy"] = 0.5
    report(save(tmp_path, [record("fp32", 1), poor]))
    assert series_of(tmp_path, "casq:bits=2")["target"] is None


def test_bits_are_weighed_by_steps(tmp_path):
    run = record("dqsgd:budget=4.5", 1, epochs=2)
    run["epochs"][0].update(step=100, bits=6)
    run["epochs"][1].update(step=400, bits=2)
    report(save(tmp_path, [run]))
    assert series_of(tmp_path, "dqsgd:budget=4.5")["bits"] == pytest.approx((100 * 6 + 300 * 2) / 400)


def test_only_what_differs_tells_series_of_one_codec_apart(tmp_path):
    runs = [
        record("fp32", 1),
        record("qsgd:bits=4", 1),
        record("qsgd:bits=4", 1, collective="scatter"),
        record("qsgd:bits=4", 1, collective="scatter", workers=8),
    ]
    out, _ = report(save(tmp_path, runs))
    labels = {series["label"] for series in data_of(tmp_path)["series"]}
    assert labels == {
        "fp32",
        "qsgd:bits=4 \u00b7 4 workers \u00b7 gather",
        "qsgd:bits=4 \u00b7 4 workers \u00b7 scatter",
        "qsgd:bits=4 \u00b7 8 workers \u00b7 scatter",
    }
    assert set(data_of(tmp_path)["varied"]) == {"collective", "workers"}
    # Four and eight workers are different experiments: only the former have their fp32 here.
    references = {series["label"]: series["reference"] for series in data_of(tmp_path)["series"]}
    assert references["qsgd:bits=4 \u00b7 8 workers \u00b7 scatter"] is None
    assert references["qsgd:bits=4 \u00b7 4 workers \u00b7 scatter"] is not None
    assert "scatter" in out


def test_unfinished_runs_stay_out_of_the_means_unless_there_is_nothing_else(tmp_path):
    half = record("qsgd:bits=4", 2, epochs=2, finished=False)
    alone = record("casq:bits=2", 1, epochs=3, finished=False)
    out, _ = report(save(tmp_path, [record("fp32", 1), record("qsgd:bits=4", 1), half, alone]))
    qsgd, casq = series_of(tmp_path, "qsgd:bits=4"), series_of(tmp_path, "casq:bits=2")
    assert (qsgd["runs"], qsgd["counted"], qsgd["partial"]) == (2, 1, False)
    assert qsgd["final"]["mean"] == record("qsgd:bits=4", 1)["epochs"][-1]["test_accuracy"]
    assert casq["partial"] and casq["difference"] is None and len(casq["curve"]) == 3
    assert re.search(r"casq:bits=2 \(unfinished\)", out) and not re.search(r"qsgd:bits=4 \(unfinished\)", out)


def test_the_terminal_gets_a_table_and_the_names_of_the_files(tmp_path):
    out, errors = report(save(tmp_path, comparison()))
    assert errors == ""
    for codec in CODECS:
        assert codec in out
    assert [line for line in out.splitlines() if line.startswith("wrote ")] == [
        f"wrote {tmp_path}/results.csv",
        f"wrote {tmp_path}/report.html",
    ]


def test_the_same_records_give_the_same_bytes(tmp_path):
    first, second = save(tmp_path / "a", comparison()), save(tmp_path / "b", comparison())
    for folder in first, second:
        report(folder, "--plot", "png")
    names = sorted(path.name for path in first.iterdir() if path.is_file())
    assert names == [
        "accuracy-bytes.png",
        "accuracy-epochs.png",
        "accuracy-time-1Gbps.png",
        "error-layers.png",
        "report.html",
        "results.csv",
    ]
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_names_cannot_end_the_script_they_stand_in(tmp_path):
    report(save(tmp_path, [record(HOSTILE, canonical=HOSTILE)]))
    page = (tmp_path / "report.html").read_text()
    assert "<img" not in page and page.count("</script>") == page.count("<script") == 3
    assert data_of(tmp_path)["series"][0]["label"] == HOSTILE


def test_the_page_keeps_the_licence_of_its_charts_and_names_no_other_host(tmp_path):
    report(save(tmp_path, [record()]))
    page = (tmp_path / "report.html").read_text()
    assert "Chart.js v" in page and "Released under the MIT License" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page) and "@import" not in page


# Refusals ------------------------------------------------------------------------------------------------------------


def changed(*path, to=KeyError):
    """A good record with one field set, or taken out."""
    run = record()
    at = run
    for key in path[:-1]:
        at = at[key]
    if to is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return run


DAMAGED = {
    "truncated": (json.dumps(record())[:5000], "not JSON"),
    "empty": ("", "not JSON"),
    "NaN": (json.dumps(changed("rate", to=math.nan)), "not JSON"),
    "too large a number": (json.dumps(record()).replace('"rate": 0.05', '"rate": 1e999', 1), "not JSON"),
    "no object": ([1, 2], "the record"),
    "other version": (changed("version", to=2), "version is 2"),
    "no codec": (changed("codec"), "codec is missing"),
    "codec is a number": (changed("codec", to=3), "codec is 3"),
    "empty task": (changed("task", to=""), "task is"),
    "seed below zero": (changed("seed", to=-1), "seed is -1"),
    "half a worker": (changed("workers", to=1.5), "workers is 1.5"),
    "no worker": (changed("workers", to=0), "workers is 0"),
    "finished is a word": (changed("finished", to="yes"), "finished is"),
    "unknown metric": (changed("metric", to="joy"), "metric is"),
    "no epochs": (changed("epochs"), "epochs is missing"),
    "epochs is an object": (changed("epochs", to={}), "epochs is {}"),
    "finished without an epoch": (changed("epochs", to=[]), "epochs is []"),
    "epochs go back": (changed("epochs", 2, "epoch", to=1), "epochs[2].epoch is 1"),
    "no accuracy": (changed("epochs", 1, "test_accuracy"), "epochs[1].test_accuracy is missing"),
    "accuracy above one": (changed("epochs", 1, "test_accuracy", to=91.2), "epochs[1].test_accuracy is 91.2"),
    "accuracy not a number": (changed("epochs", 1, "test_accuracy", to=None), "epochs[1].test_accuracy is null"),
    "bytes below zero": (changed("epochs", 0, "bytes_sent", to=-5), "epochs[0].bytes_sent is -5"),
    "no time": (changed("epochs", 0, "seconds", "encode"), "epochs[0].seconds.encode is missing"),
    "time is text": (changed("epochs", 0, "seconds", to="long"), "epochs[0].seconds is"),
    "bits not a pair": (changed("bits_over_time", 3, to=[1]), "bits_over_time[3] is [1]"),
    "error below zero": (changed("layers", 0, "tensors", 2, "error", to=-1), "layers[0].tensors[2].error is -1"),
    "tensor without a name": (changed("layers", 0, "tensors", 2, "name"), "layers[0].tensors[2].name is missing"),
    "level is text": (
        changed("tables", to=[{"step": 1, "side": "up", "codec": "c", "tensors": [], "lines": [], "levels": ["a"]}]),
        'tables[0].levels[0] is "a"',
    ),
    "lines missing": (
        changed("tables", to=[{"step": 1, "side": "up", "codec": "c", "tensors": []}]),
        "tables[0].lines is missing",
    ),
    "no peak": (changed("memory", "peak"), "memory.peak is missing"),
    "empty command": (changed("command", to=""), "command is"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_refused_by_file_and_field_and_nothing_is_written(tmp_path, name):
    damaged, words = DAMAGED[name]
    save(tmp_path, [record("fp32"), damaged if isinstance(damaged, str) else json.dumps(damaged)])
    _, errors = report(tmp_path, code=BAD_INPUT)
    assert str(tmp_path / "runs/001/run.json") in errors and words in errors, errors
    assert sorted(os.listdir(tmp_path)) == ["runs"]


def test_one_run_twice_is_refused(tmp_path):
    _, errors = report(save(tmp_path, [record("fp32", 7), record("fp32", 7)]), code=BAD_INPUT)
    assert "seed 7" in errors and "fp32" in errors


@pytest.mark.parametrize(
    "make", [lambda p: None, lambda p: p.mkdir(), lambda p: (p / "runs/started").mkdir(parents=True)]
)
def test_no_runs_is_wrong_usage(tmp_path, make):
    make(tmp_path / "none")
    _, errors = report(tmp_path / "none", code=USAGE)
    assert "no runs" in errors and "run.json" in errors


def test_several_comparisons_and_single_runs_make_one_report(tmp_path, monkeypatch):
    one = save(tmp_path / "one", [record("fp32"), record("qsgd:bits=4")])
    two = save(tmp_path / "two", [record("casq:bits=2")])
    (tmp_path / "two/runs/started").mkdir()
    single, bare = tmp_path / "two/runs/started", sorted((two / "runs").iterdir())[0]
    monkeypatch.chdir(tmp_path)
    out, _ = report(one, str(bare), str(single), "--out", "new/report")
    assert "wrote new/report/report.html" in out
    labels = [series["label"] for series in data_of(tmp_path / "new/report")["series"]]
    assert labels == ["fp32", "qsgd:bits=4", "casq:bits=2"]
    out, _ = report(one, str(bare / "run.json"))  # a record itself, and no folder that the report belongs to
    assert "wrote ./report.html" in out and data_of(tmp_path)["series"] == data_of(tmp_path / "new/report")["series"]
    out, _ = report(bare)
    assert "wrote ./report.html" in out and [each["label"] for each in data_of(tmp_path)["series"]] == ["casq:bits=2"]
    assert sorted(os.listdir(one)) == sorted(os.listdir(two)) == ["runs"]


def test_one_of_several_places_that_does_not_exist_is_wrong_usage(tmp_path):
    save(tmp_path, [record()])
    _, errors = report(tmp_path, str(tmp_path / "none"), code=USAGE)
    assert f"{tmp_path / 'none'}: no runs" in errors
    _, errors = report(tmp_path, "--out", str(tmp_path / "runs/000/run.json/x"), code=IO)
    assert "run.json/x" in errors


def test_a_run_that_has_no_record_yet_is_passed_over(tmp_path):
    (save(tmp_path, [record()]) / "runs" / "started").mkdir()
    report(tmp_path)
    assert len(data_of(tmp_path)["runs"]) == 1


# Plots ---------------------------------------------------------------------------------------------------------------


def png_size(path):
    content = path.read_bytes()
    assert (
        content[:8] == b"\x89PNG\r\n\x1a\n" and content[12:16] == b"IHDR" and content.endswith(b"IEND\xaeB`\x82")
    ), path
    return struct.unpack(">II", content[16:24])


def test_plots_are_pictures_large_enough_to_print(tmp_path):
    report(save(tmp_path, comparison()), "--plot", "png")
    for name in "accuracy-epochs", "accuracy-bytes", "accuracy-time-1Gbps", "error-layers":
        width, height = png_size(tmp_path / f"{name}.png")
        assert width == 1800 and 800 <= height <= 2000, name
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000, name


def test_plots_take_any_name_as_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = record(HOSTILE + "\n!touch harmed\n", canonical="x")
    run["layers"][-1]["tensors"][0]["name"] = "'; system('touch harmed') %s %d \n`touch harmed`"
    report(save(tmp_path, [run]), "--plot", "png")
    png_size(tmp_path / "accuracy-epochs.png"), png_size(tmp_path / "error-layers.png")
    assert not (tmp_path / "harmed").exists()


def test_every_task_and_model_has_plots_of_its_own(tmp_path):
    report(
        save(
            tmp_path, [record(), record(task="cifar/10", model="resnet20"), record(task="cifar_10", model="resnet20")]
        ),
        "--plot",
        "png",
    )
    assert sorted(path.name for path in tmp_path.glob("accuracy-epochs*")) == [
        "accuracy-epochs-cifar_10-resnet20.png",
        "accuracy-epochs-cifar_10-resnet20_.png",
        "accuracy-epochs-fashion-mnist-cnn.png",
    ]


def test_without_gnuplot_the_package_is_named_and_the_rest_is_written(tmp_path):
    _, errors = report(save(tmp_path, [record()]), "--plot", "png", code=UNSUPPORTED, PATH=str(tmp_path))
    assert "gnuplot-nox" in errors
    assert sorted(os.listdir(tmp_path)) == ["report.html", "results.csv", "runs"]


def test_another_kind_of_plot_is_refused(tmp_path):
    _, errors = report(save(tmp_path, [record()]), "--plot", "svg", code=USAGE)
    assert "svg" in errors and "png" in errors


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    save(tmp_path, [record()])
    (tmp_path / "report.html").mkdir()
    _, errors = report(tmp_path, code=IO)
    assert "report.html" in errors
