# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results.csv, for the scripts that make several: shown as they come, appended at the end.

A row says when, on which machine and by which command a number was made. A target such as '>= 3.5' makes it say whether
the number met it; a target that was missed is a row like any other. docs/measuring.md says what each metric means.
"""

import csv
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
PROGRAM = os.environ.get("GRADWIRE_BIN", str(BENCH.parent / "build/bin/gradwire"))


def load_note():
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else math.nan


def paired(rows, command, metric, values, bound="", note=""):
    """The mean over seeds; with several, its standard error and range in the note."""
    if len(values) > 1:
        error = spread(values) / math.sqrt(len(values))
        seen = f"paired by seed; standard error {error:.4f}; {min(values):.4f} to {max(values):.4f}"
    else:
        seen = "paired by seed; one seed"
    rows.add(command, metric, statistics.mean(values), "%" if "accuracy" in metric else "1", bound,
             "; ".join(part for part in (seen, note) if part))  # fmt: skip


def machine():
    """The processor in the program's words, or in the kernel's where there is no program."""
    try:
        doctor = json.loads(subprocess.run([PROGRAM, "doctor", "--json"], stdout=subprocess.PIPE, check=True).stdout)
        return f"{doctor['cpu']}, {doctor['cores']} cores, {doctor['simd_chosen']}"
    except FileNotFoundError:
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


class Rows:
    def __init__(self, device="cpu", machine_name=None):
        self.machine = machine_name or machine()
        self.device = device
        self.rows = []

    def add(self, command, metric, value, unit, target="", note=""):
        met = ""
        if target:
            relation, bound = target.split()
            met = "yes" if (value >= float(bound) if relation == ">=" else value <= float(bound)) else "no"
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")
        self.rows.append([date, self.machine, self.device, command, metric, f"{value:.6g}", unit, target, met, note])
        print("  {:<32} {:>12} {:<8} {:<10} {:<4} {}".format(*self.rows[-1][4:]), file=sys.stderr, flush=True)

    def append(self, dry):
        with sys.stdout if dry else open(BENCH / "results.csv", "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(self.rows)
