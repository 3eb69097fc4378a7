#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packed topk against topk with f32 values and raw indices, on one CPU thread: size, error and processor time.

    python3 bench/topk_packed.py [--ratio R ...] [--bits B ...] [--turns 5] [--dry-run]

A round of `gradwire bench codec` encodes, encodes with error feedback, decodes and copies a tensor once. Its processor
time is what 20 rounds more take a run, so that starting and checking count for nothing, and other work on the machine
for little. The two take turns. A row holds the median over the turns of raw over packed; 1 means equally fast.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rows import PROGRAM, Rows, load_note  # noqa: E402

ROUNDS = 20


def run(codec, pairs):
    """The figures of a run, and the processor seconds that it took."""
    command = [PROGRAM, "bench", "codec", "--codec", codec, "--elements", "4194304", "--pairs", str(pairs), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(done.stdout.splitlines()[0]), after.ru_utime - before.ru_utime


def round_seconds(codec):
    return (run(codec, 5 + ROUNDS)[1] - run(codec, 5)[1]) / ROUNDS


def main():
    parser = argparse.ArgumentParser(description="Packed topk against topk as it was.")
    parser.add_argument("--ratio", action="append")
    parser.add_argument("--bits", action="append")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    rows = Rows()
    for ratio in arguments.ratio or ["0.01", "0.015625", "0.03"]:
        for bits in arguments.bits or ["2"]:
            raw, packed = f"topk:ratio={ratio}", f"topk:ratio={ratio},bits={bits}"
            command = f"python3 bench/topk_packed.py --ratio {ratio} --bits {bits}"
            ratios = sorted(round_seconds(raw) / round_seconds(packed) for _ in range(arguments.turns))
            note = f"{len(ratios)} turns, {ratios[0]:.3f} to {ratios[-1]:.3f}; {load_note()}"
            rows.add(command, "round_speed_packed_over_raw", statistics.median(ratios), "1", ">= 0.8", note)
            for name, codec in ("raw", raw), ("packed", packed):
                record, _ = run(codec, 1)
                target = "<= 0.16" if (name, ratio, bits) == ("packed", "0.015625", "2") else ""
                rows.add(command, f"bits_per_element_{name}", record["bits_per_element"], "bit", target)
                rows.add(command, f"error_{name}", record["error"], "1")
    rows.append(arguments.dry_run)


if __name__ == "__main__":
    main()
