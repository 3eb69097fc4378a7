#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results.csv from trainings.

    python3 bench/training.py accuracy DIR [--within 0.5]   what `gradwire compare --out DIR` measured
    python3 bench/training.py overhead                      step time of qsgd:bits=4 over that of fp32, in turns

`accuracy` asks the records of DIR for the last epoch of every run; means are over seeds, differences from fp32 are
paired by seed. With --within, each codec's difference is held against that bound, in points.
"""

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

BENCH = Path(__file__).resolve().parent
PROGRAM = os.environ.get("GRADWIRE_BIN", str(BENCH.parent / "build/bin/gradwire"))


def now():
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M")


def append(rows, dry):
    out = csv.writer(sys.stdout if dry else open(BENCH / "results.csv", "a", newline=""), lineterminator="\n")
    out.writerows(rows)


def command_of(settings, default):
    """The options that differ from the program's own, so that the row can be made again."""
    shown = ["task", "model", "workers", "device", "batch", "epochs", "rate", "warmup", "feedback"]
    return " ".join(f"--{name} {settings[name]}" for name in shown if settings[name] != default.get(name))


DEFAULTS = {"device": "cpu", "batch": 64, "rate": 0.05, "warmup": 0.0, "feedback": "codec"}


def accuracy(folder, within, dry):
    series = defaultdict(dict)
    for path in sorted(Path(folder).glob("**/run.json")):
        run = json.loads(path.read_text())
        assert run["finished"], path
        series[run["collective"], run["codec"]][run["seed"]] = run
    rows = []
    for (collective, codec), runs in sorted(series.items()):
        any_run = next(iter(runs.values()))
        command = (
            f"gradwire compare {command_of(any_run['settings'], DEFAULTS)} --collective {collective} "
            f"--codec {any_run['settings']['codec']} --seeds {len(runs)}"
        )
        last = {seed: run["epochs"][-1] for seed, run in runs.items()}
        points = {seed: 100 * epoch["test_accuracy"] for seed, epoch in last.items()}
        spread = "one seed"
        if len(points) > 1:
            spread = f"standard deviation {statistics.stdev(points.values()):.2f} over {len(points)} seeds"
        add = lambda metric, value, unit, target="", met="", note="": rows.append(
            [now(), any_run["machine"], any_run["device"], command, metric, f"{value:.6g}", unit, target, met, note]
        )
        add("test_accuracy", statistics.mean(points.values()), "%", note=spread)
        reference = series.get((collective, "fp32"), {})
        paired = [
            points[seed] - 100 * reference[seed]["epochs"][-1]["test_accuracy"] for seed in points if seed in reference
        ]
        if paired and codec != "fp32":
            difference = statistics.mean(paired)
            target = f">= -{within}" if within else ""
            met = "" if not within else "yes" if difference >= -within else "no"
            add("accuracy_minus_fp32", difference, "points", target, met)
        bits = statistics.mean(sum(e["bits"] for e in run["epochs"]) / len(run["epochs"]) for run in runs.values())
        add("bits_per_element", bits, "bit", note="mean over the training, sent up")
        add("ratio", 32 / bits, "1")
        add("bytes_sent", statistics.mean(epoch["bytes_sent"] for epoch in last.values()), "B", note="by one worker")
    append(rows, dry)


def step_seconds(model, codec, collective, steps):
    done = subprocess.run(
        [
            PROGRAM,
            "train",
            "--task",
            "fashion-mnist",
            "--model",
            model,
            "--workers",
            "4",
            "--codec",
            codec,
            "--collective",
            collective,
            "--steps",
            str(steps),
            "--epochs",
            "5",
            "--limit",
            "20000",
            "--meter-every",
            "1000000",
            "--json",
        ],
        check=True,
        stdout=subprocess.PIPE,
    )
    record = json.loads(done.stdout.splitlines()[-1])
    return record["epochs"][-1]["seconds"]["wall"] / steps, record


def overhead(pairs, dry):
    rows = []
    for model, steps in (("cnn", 150), ("mlp:width=2800,depth=2", 12)):
        for collective in ("scatter", "gather"):
            ratios = []
            for _ in range(pairs):
                plain, _ = step_seconds(model, "fp32", collective, steps)
                coded, record = step_seconds(model, "qsgd:bits=4", collective, steps)
                ratios.append(coded / plain)
            ratio = statistics.median(ratios)
            answer = subprocess.run([PROGRAM, "doctor", "--json"], stdout=subprocess.PIPE, check=True).stdout
            doctor = json.loads(answer)
            rows.append(
                [
                    now(),
                    f"{doctor['cpu']}, {doctor['cores']} cores, torch {doctor['torch']}",
                    "cpu",
                    f"gradwire train --model {model} --workers 4 --collective {collective} "
                    "--codec qsgd:bits=4, and fp32, in turns",
                    "step_time_over_fp32",
                    f"{ratio:.6g}",
                    "1",
                    "<= 1.15",
                    "yes" if ratio <= 1.15 else "no",
                    f"median of {pairs} pairs of {steps} steps, {record['parameters']} parameters",
                ]
            )
    append(rows, dry)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "overhead"])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--within", type=float)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.what == "accuracy":
        accuracy(options.folder, options.within, options.dry_run)
    else:
        overhead(options.pairs, options.dry_run)


if __name__ == "__main__":
    main()
