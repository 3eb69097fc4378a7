#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of the five papers, each with one command, with baselines of equal size in the same table.

    python3 bench/papers.py TABLE --out DIR [--seeds 3] [--jobs 1] [options of gradwire compare ...] [--dry-run]

bench/paper_tables.py has the tables. Options that this script does not know are passed on to `gradwire compare`, after
the table's own, for example --data DIR --device cuda --epochs 2. Finished runs in DIR are not repeated, so a table can
be made in several sittings. DIR/report.html shows the trainings of the table.

A row has the mean and the standard deviation over seeds after the last epoch, the difference from the reference paired
by seed with its standard error, the bits per element with every byte counted, and what the paper says. A difference of
less than two standard errors shows nothing.
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
from paper_server import train_over_server  # noqa: E402
from paper_tables import TABLES  # noqa: E402
from rows import PROGRAM, Rows, spread  # noqa: E402

SAMPLES = {"cifar10": 50000, "fashion-mnist": 60000}


def merged(*lists):
    """One list of options in which each stands once, with the value that it was given last."""
    options = {}
    for word in (word for words in lists for word in words):
        if word.startswith("--"):
            name, given, value = word.partition("=")
            options[name] = [value] if given else []
        else:
            options[name].append(word)
    return [word for name, values in options.items() for word in (name, *values)]


def steps_in_all(options):
    """Of a training with these options, for schedules that change after a share of it."""
    parser = argparse.ArgumentParser(add_help=False)
    for name, default in (("workers", 4), ("batch", 64), ("epochs", 5), ("limit", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--task", default="fashion-mnist")
    known = parser.parse_known_args(options)[0]
    samples = min(known.limit or math.inf, SAMPLES[known.task])
    return known.epochs * (samples // (known.workers * known.batch))


def codec_of(row, options):
    return row.codec.replace("{72%}", str(round(0.72 * steps_in_all(options)))) if "{72%}" in row.codec else row.codec


def folder_of(row):
    return "".join(letter if letter.isalnum() else "-" for letter in row.label)


def train(rows, options, seeds, out, jobs):
    """Trains what is not yet trained. Each row is a command of its own, so that several can run side by side."""
    waiting = [[PROGRAM, "compare", *merged(options, row.options), "--codec", codec_of(row, options),
                "--seeds", str(seeds), "--out", str(out / folder_of(row))] for row in rows]
    running = []
    while waiting or running:
        while waiting and len(running) < jobs:
            command = waiting.pop(0)
            print(shlex.join(command), file=sys.stderr, flush=True)
            running.append((command, subprocess.Popen(command, stdout=subprocess.DEVNULL)))
        for command, process in list(running):
            try:
                code = process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            running.remove((command, process))
            if code not in (0, 8):  # 8: a training failed, which is a result
                sys.exit(f"{shlex.join(command)} ended with {code}")


def train_with_server(rows, options, seeds, out):
    for row in rows:
        for seed in range(1, seeds + 1):
            path = out / folder_of(row) / "runs" / f"seed{seed}" / "run.json"
            if path.exists():
                continue
            print(f"{row.label}, seed {seed}", file=sys.stderr, flush=True)
            code = train_over_server(merged(options, row.options), row.codec, seed, path)
            if code not in (0, 8):
                sys.exit(f"{row.label}, seed {seed} ended with {code}")


def runs_of(rows, out):
    """Of every row, its finished runs by seed."""
    found = {}
    for row in rows:
        records = [json.loads(path.read_text()) for path in sorted((out / folder_of(row)).glob("runs/*/run.json"))]
        found[row.label] = {record["seed"]: record for record in records if record["finished"]}
    return found


def report(rows, out):
    """One page for all rows: it finds the runs of every row in one folder."""
    (out / "runs").mkdir(exist_ok=True)
    for row in rows:
        for path in (out / folder_of(row)).glob("runs/*"):
            link = out / "runs" / f"{folder_of(row)}-{path.name}"
            if not link.exists():
                link.symlink_to(path.resolve())
    subprocess.run([PROGRAM, "report", str(out)], check=True, stdout=subprocess.DEVNULL)


def accuracy(record):
    return 100 * record["epochs"][-1]["test_accuracy"]


def train_loss(record):
    return record["epochs"][-1]["train_loss"]


def bits(record):
    """Of the messages with a worker's own gradients, mean over the steps."""
    return statistics.fmean(epoch["bits"] for epoch in record["epochs"])


def first_at(record, loss):
    """The first evaluation at which the test loss is this small, or None."""
    evaluations = sorted(record["epochs"] + record.get("points", []), key=lambda point: point["step"])
    return next((point for point in evaluations if point["test_loss"] is not None and point["test_loss"] <= loss), None)


def without_places(options):
    """The options as a row shows them: where the data lie is nobody else's business."""
    return ["DIR" if before == "--data" else word for before, word in zip(["", *options], options)]


class Printed:
    def __init__(self, table, found, record, command):
        self.table, self.found, self.record, self.command = table, found, record, command
        self.reference = found[table.reference]
        # What a codec has to reach: 5 % above the loss of the uncompressed training after its last epoch.
        losses = [run["epochs"][-1]["test_loss"] for run in self.reference.values()]
        self.loss = 1.05 * statistics.fmean(losses) if table.steps_to else None

    def show(self):
        more = f" steps to a test loss of {self.loss:.4f} | MB sent until then |" if self.loss else ""
        print(f"\n{self.table.about}\n\n| codec | test accuracy | minus {self.table.reference} | bits per element "
              f"| training loss | minus {self.table.reference} |{more} the paper |\n"
              f"|---|---|---|---|---|---|{'---|---|' if self.loss else ''}---|")
        for row in self.table.rows:
            if self.found[row.label]:
                self.show_row(row, self.found[row.label])
        print()
        for row in self.table.rows:
            if row.rival and self.found[row.label] and self.found[row.rival]:
                print(f"- `{row.label}` minus `{row.rival}`: {self.against(row, accuracy, 'accuracy', 'points', 2)} points of "
                      f"accuracy, {self.against(row, train_loss, 'train_loss', '1', 4)} of training loss")

    def against(self, row, value, metric, unit, digits):
        return self.difference(row, self.found[row.label], value, f"{metric}_minus_rival", unit, digits, row.rival)

    def show_row(self, row, runs):
        values = [accuracy(run) for run in runs.values()]
        size = statistics.fmean(map(bits, runs.values()))
        failed = sum(run.get("failed", False) for run in runs.values())
        cells = [f"`{row.label}`", f"{statistics.fmean(values):.2f} +- {spread(values):.2f} %"
                 + (f" ({failed} of {len(runs)} failed)" if failed else "")]
        note = f"{row.label}; {len(runs)} seeds; standard deviation {spread(values):.2f}; {size:.3f} bits per element"
        self.record.add(self.command, "test_accuracy", statistics.fmean(values), "%", note=note)
        cells += [self.difference(row, runs, accuracy, "accuracy_minus_reference", "points", 2), f"{size:.2f}"]
        losses = [train_loss(run) for run in runs.values()]
        if None in losses:
            cells += ["not finite", ""]
        else:
            cells += [f"{statistics.fmean(losses):.4f}",
                      self.difference(row, runs, train_loss, "train_loss_minus_reference", "1", 4)]
        if self.loss:
            cells += self.way_to_loss(row, runs)
        print("| " + " | ".join([*cells, row.paper]) + " |")

    def difference(self, row, runs, value, metric, unit, digits, other=None):
        """Paired by seed, as a text. `other` is a row's label; without it, it is the reference."""
        other = other or self.table.reference
        paired = [value(run) - value(self.found[other][seed]) for seed, run in runs.items() if seed in self.found[other]]
        if row.label == other or not paired:
            return ""
        error = spread(paired) / math.sqrt(len(paired))
        self.record.add(self.command, metric, statistics.fmean(paired), unit,
                        note=f"{row.label} minus {other}; standard error {error:.{digits}f}")
        return f"{statistics.fmean(paired):+.{digits}f} +- {error:.{digits}f}"

    def way_to_loss(self, row, runs):
        points = [first_at(run, self.loss) for run in runs.values()]
        if None in points:
            return [f"{points.count(None)} of {len(points)} never", ""]
        steps = statistics.fmean(point["step"] for point in points)
        sent = statistics.fmean(point["bytes_sent"] for point in points) / 1e6
        note = f"{row.label}; to a test loss of {self.loss:.4f}"
        self.record.add(self.command, "steps_to_loss", steps, "1", note=note)
        self.record.add(self.command, "megabytes_to_loss", sent, "MB", note=note + "; sent by one worker")
        return [f"{steps:.0f}", f"{sent:.1f}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings that run side by side")
    parser.add_argument("--machine", help="its name in results.csv, if it is not this one")
    parser.add_argument("--show", action="store_true", help="train nothing: make the table of the runs that are there")
    parser.add_argument("--dry-run", action="store_true", help="show the rows, do not append them to results.csv")
    arguments, passed = parser.parse_known_args()
    table = TABLES[arguments.table]
    options = merged(shlex.split(table.settings), passed)
    if not arguments.show and table.server:
        train_with_server(table.rows, options, arguments.seeds, arguments.out)
    elif not arguments.show:
        train(table.rows, options, arguments.seeds, arguments.out, arguments.jobs)
    report(table.rows, arguments.out)
    record = Rows("cuda" if "cuda" in passed else "cpu", arguments.machine)
    command = f"python3 bench/papers.py {arguments.table} --out DIR {shlex.join(without_places(passed))}".rstrip()
    Printed(table, runs_of(table.rows, arguments.out), record, command).show()
    record.append(arguments.dry_run)


if __name__ == "__main__":
    main()
