#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Transformers with AdamW under compression: the validation loss of a small GPT, over that of fp32.

    python3 bench/adam.py --data TEXT --out DIR [--size small|middle] [--seeds 3] [options of gradwire compare]

TEXT is any UTF-8 file. `small` has 0.8 million parameters, for a CPU; `middle` has 10.7 million, for a GPU. Both ways
are compressed (--collective scatter). Options that this script does not know are passed on to `gradwire compare`.
Finished runs in DIR are not repeated, and DIR/report.html shows the loss curves.

A row has the mean over seeds of the last validation loss, its ratio to that of fp32 paired by seed with the standard
error, the bits per element that a worker sends up with everything counted (the exact first step, the steps of the
warm-up, pooled moments), and the megabytes that one worker sends.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from paper_tables import Row  # noqa: E402
from papers import bits, merged, report, runs_of, train, without_places  # noqa: E402
from rows import PROGRAM, Rows, spread  # noqa: E402

COMMON = "--task text --optimizer adamw --workers 4 --rate 0.001 --clip 1 --collective scatter --epochs 1"
SIZES = {
    "small": "--model gpt:layers=4,width=128,heads=4 --length 64 --batch 4 --steps 600 --warmup 0.02",
    "middle": "--model gpt:layers=6,width=384,heads=6 --length 256 --batch 32 --steps 600 --warmup 2 --epochs 100 "
    "--device cuda",
}
GRADIENTS = ("--exchange", "gradients")
TARGETS = {"optquant:bits=3": 1.005, "casq:bits=2": 1.005, "dqsgd:budget=3": 1.005, "optquant:bits=2": 1.01,
           "fft:theta=0.85": 1.01, "onebit": 1.02, "topk:ratio=0.03": 1.02}  # of the loss over that of fp32
ROWS = [
    Row("fp32"),
    Row("bf16"),
    Row("optquant:bits=3"),
    Row("casq:bits=2"),
    Row("dqsgd:budget=3"),
    Row("optquant:bits=2"),
    Row("optquant:bits=2,mode=biased"),
    Row("fft:theta=0.85"),
    Row("onebit"),
    Row("topk:ratio=0.03"),
    Row("qsgd:bits=3"),
    *(Row(codec, options=GRADIENTS) for codec in (
        "optquant:bits=3", "casq:bits=2", "dqsgd:budget=3", "optquant:bits=2", "fft:theta=0.85", "onebit",
        "topk:ratio=0.03", "qsgd:bits=3")),
]  # fmt: skip


def loss(run):
    return run["epochs"][-1]["test_loss"]


def show(found, record, command):
    print("| codec | exchanges | bits up | validation loss | over fp32 | MB sent by one worker |")
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        runs = found[row.label]
        if not runs:
            continue
        one = next(iter(runs.values()))
        what = "momenta" if ", momenta" in one["codec"] else "gradients"
        losses = [loss(run) for run in runs.values()]
        size = statistics.fmean(map(bits, runs.values()))
        sent = statistics.fmean(run["epochs"][-1]["bytes_sent"] for run in runs.values()) / 1e6
        ratios = [loss(run) / loss(found["fp32"][seed]) for seed, run in runs.items() if seed in found["fp32"]]
        error = spread(ratios) / math.sqrt(len(ratios))
        note = (f"{row.codec}; exchanges {what}; {len(runs)} seeds; standard deviation {spread(losses):.4f}; "
                f"{size:.3f} bits per element")
        record.add(command, "validation_loss", statistics.fmean(losses), "1", note=note)
        ratio = ""
        if row.label != "fp32":
            ratio = f"{statistics.fmean(ratios):.4f} +- {error:.4f}"
            target = f"<= {TARGETS[row.label]}" if row.label in TARGETS else ""
            record.add(command, "validation_loss_over_fp32", statistics.fmean(ratios), "1", target,
                       note=f"{row.codec}; exchanges {what}; paired; standard error {error:.4f}")
        print(f"| `{row.codec}` | {what} | {size:.2f} | {statistics.fmean(losses):.4f} | {ratio} | {sent:.0f} |")


def measure_times(options, record, command):
    """The wall time of a step with momenta over one with gradients: whole runs in turns, median of the quotients."""
    for codec in ("onebit", "topk:ratio=0.03"):
        quotients = []
        for _ in range(3):
            walls = []
            for exchange in ("momenta", "gradients"):
                words = [*merged(options, ["--steps", "150", "--rules", "1d=fp32;<1024=fp32"]), "--exchange", exchange]
                words += ["--first-steps", "0"] if exchange == "momenta" else []
                words = [PROGRAM, "train", *words, "--codec", codec, "--json"]
                done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
                walls.append(json.loads(done.stdout.splitlines()[-1])["epochs"][-1]["seconds"]["wall"])
            quotients.append(walls[0] / walls[1])
        note = f"{codec}; 150 steps, 3 pairs, from {min(quotients):.3f} to {max(quotients):.3f}"
        record.add(command, "step_time_over_gradients", statistics.median(quotients), "1", "<= 1.1", note)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings that run side by side")
    parser.add_argument("--machine", help="its name in results.csv, if it is not this one")
    parser.add_argument("--show", action="store_true", help="train nothing: make the table of the runs that are there")
    parser.add_argument("--times", action="store_true", help="measure only how long a step takes")
    parser.add_argument("--dry-run", action="store_true", help="show the rows, do not append them to results.csv")
    arguments, passed = parser.parse_known_args()
    options = merged(shlex.split(COMMON), shlex.split(SIZES[arguments.size]), passed)
    record = Rows("cuda" if "cuda" in options else "cpu", arguments.machine)
    words = ["--times"] * arguments.times + ["--size", arguments.size, "--out", "DIR", *without_places(passed)]
    command = shlex.join(["python3", "bench/adam.py", *words])
    if arguments.times:
        measure_times(options, record, command)
    else:
        if not arguments.show:
            train(ROWS, options, arguments.seeds, arguments.out, arguments.jobs)
        report(ROWS, arguments.out)
        show(runs_of(ROWS, arguments.out), record, command)
    record.append(arguments.dry_run)


if __name__ == "__main__":
    main()
