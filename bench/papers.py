#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of the five papers, each with one command, and the baselines at equal size in the same table.

    python3 bench/papers.py PAPER --out DIR [--seeds 3] [options of gradwire compare ...] [--dry-run]

PAPER is one of those below. Everything that this script does not know is passed on to `gradwire compare`, for example
--task cifar10 --data DIR --model resnet20 --workers 8 --device cuda --epochs 40. Runs that are finished in DIR are not
repeated, so a table can be made in several sittings, and DIR holds the report page of the same trainings.

A row of the table has the mean and the standard deviation over seeds after the last epoch, the difference from fp32
paired by seed with its standard error, the bits per element with every byte counted, and what the paper says. A
difference of less than two standard errors shows nothing.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rows import PROGRAM, Rows  # noqa: E402

FIXED = [f"qsgd:bits={bits}" for bits in (2, 3, 4)]
# Codecs, and what the paper itself reports for them (test accuracy minus that of its own uncompressed training).
PAPERS = {
    "dqsgd": {
        **dict.fromkeys(["fp32", "bf16", *FIXED, "qsgd:bits=5", "qsgd:bits=6", "dqsgd:budget=3", "dqsgd:budget=4.5",
                         "dqsgd:budget=3,mode=paper", "dqsgd:budget=4.5,mode=paper"]),
        "qsgd:bits=4": "-2.70 (CIFAR-10), -1.22 (AG-News)",
        "qsgd:bits=6": "-0.12 (CIFAR-10), -0.10 (AG-News)",
        "dqsgd:budget=4.5": "-0.22 at 4.50 bits (CIFAR-10), -0.19 at 4.70 bits (AG-News)",
    },
    "fft": {
        **dict.fromkeys(["fp32", "bf16", *FIXED, "fft:theta=0.85", "fft:theta=0.9,schedule=step,until={72%}",
                         "fft:theta=0.9,schedule=rate,smooth=10", "topk:ratio=0.05"]),
        "fft:theta=0.85": "-0.12 (CIFAR-10, ResNet-32), without feedback",
        "qsgd:bits=3": "-3.45 (CIFAR-10, ResNet-32)",
    },
    "casq": dict.fromkeys(["fp32", "bf16", *FIXED, "onebit", "casq:bits=1", "casq:bits=2", "casq:bits=2,mode=paper",
                           "optquant:bits=3,mode=biased"]),
    "optquant": dict.fromkeys(["fp32", "bf16", *FIXED, "optquant:bits=2", "optquant:bits=2,mode=biased",
                               "optquant:bits=3", "optquant:bits=3,mode=biased"]),
}


def compare(codecs, seeds, out, passed, jobs):
    """Trains what is not yet trained. Each codec is a command of its own, so that several can run side by side."""
    waiting = [[PROGRAM, "compare", *passed, "--seeds", str(seeds), "--out", str(out / folder), "--codec", codec]
               for folder, codec in codecs.items()]
    running = []
    while waiting or running:
        while waiting and len(running) < jobs:
            command = waiting.pop(0)
            print(" ".join(command), file=sys.stderr, flush=True)
            running.append((command, subprocess.Popen(command, stdout=subprocess.DEVNULL)))
        for command, process in list(running):
            try:
                code = process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            running.remove((command, process))
            if code not in (0, 8):  # 8: a training failed, which is a result
                sys.exit(f"{' '.join(command)} ended with {code}")


def runs_in(out):
    found = {}
    for path in sorted(out.glob("*/runs/*/run.json")):
        record = json.loads(path.read_text())
        if record["finished"]:
            found.setdefault(record["codec"], {})[record["seed"]] = record
    return found


def accuracy(record):
    return 100 * record["epochs"][-1]["test_accuracy"]


def bits(record):
    """Of the messages with a worker's own gradients, mean over the steps."""
    return statistics.fmean(epoch["bits"] for epoch in record["epochs"])


def told(passed):
    """The options as a row shows them: where the data lie is nobody else's business."""
    return ["DIR" if before == "--data" else word for before, word in zip(["", *passed], passed)]


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else math.nan


def table(paper, spoken, found, rows, passed):
    reference = found["fp32"]
    print("| codec | test accuracy | minus fp32, paired | bits per element | training loss | the paper |\n"
          "|---|---|---|---|---|---|")
    for codec, runs in sorted(found.items(), key=lambda item: -bits(next(iter(item[1].values())))):
        values = [accuracy(run) for run in runs.values()]
        paired = [accuracy(run) - accuracy(reference[seed]) for seed, run in runs.items() if seed in reference]
        error = spread(paired) / math.sqrt(len(paired)) if len(paired) > 1 else math.nan
        losses = [run["epochs"][-1]["train_loss"] for run in runs.values()]
        failed = sum(run.get("failed", False) for run in runs.values())
        size = statistics.fmean(map(bits, runs.values()))
        loss = "not finite" if None in losses else f"{statistics.fmean(losses):.4f}"
        difference = "" if codec == "fp32" else f"{statistics.fmean(paired):+.2f} +- {error:.2f}"
        print(f"| `{codec}` | {statistics.fmean(values):.2f} +- {spread(values):.2f} %"
              f"{f' ({failed} of {len(runs)} failed)' if failed else ''} | {difference} | {size:.2f} | {loss} | "
              f"{spoken.get(codec) or ''} |")
        command = f"python3 bench/papers.py {paper} {' '.join(told(passed))}"
        note = f"{codec}; {len(runs)} seeds, standard deviation {spread(values):.2f}; {size:.3f} bits per element"
        rows.add(command, "test_accuracy", statistics.fmean(values), "%", note=note)
        if codec != "fp32":
            rows.add(command, "accuracy_minus_fp32", statistics.fmean(paired), "points",
                     note=f"{codec}; standard error {error:.2f}; training loss {loss}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=sorted(PAPERS))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings that run side by side")
    parser.add_argument("--steps-in-all", type=int, default=0, help="of a run, for schedules that change at 72 % of it")
    parser.add_argument("--machine")
    parser.add_argument("--dry-run", action="store_true", help="show the rows, do not append them to results.csv")
    arguments, passed = parser.parse_known_args()
    codecs = {}
    for codec in PAPERS[arguments.paper]:
        if "{72%}" in codec:
            if not arguments.steps_in_all:
                print(f"{codec} is left out: it needs --steps-in-all", file=sys.stderr)
                continue
            codec = codec.replace("{72%}", str(round(0.72 * arguments.steps_in_all)))
        codecs["".join(letter if letter.isalnum() else "-" for letter in codec)] = codec
    compare(codecs, arguments.seeds, arguments.out, passed, arguments.jobs)
    rows = Rows("cuda" if "cuda" in passed else "cpu", arguments.machine)
    found = {codec: runs for codec, runs in runs_in(arguments.out).items() if codec in codecs.values()}
    table(arguments.paper, PAPERS[arguments.paper], found, rows, passed)
    rows.append(arguments.dry_run)


if __name__ == "__main__":
    main()
