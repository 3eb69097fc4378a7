#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Did a change make codecs slower? Two programs, one from before and one from after, time every codec in turns.

    python3 bench/before_after.py OLD NEW [--device cuda] [--rounds 5] [--codec SPEC ...] [--dry-run]

The rate of encoding, of encoding with feedback and of decoding is taken relative to the copy that each program times beside
it, so that a machine whose speed drifts changes both alike. A row holds the ratio of the medians, new over old; 1 means
equally fast. With --records FILE, rounds that another machine has run are read instead: lines of 'base|new ROUND CODEC JSON'.
"""

import argparse
import collections
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rows import Rows, load_note  # noqa: E402

METRICS = ["encode_of_copy", "feedback_of_copy", "decode_of_copy"]
CODECS = ["fp16", "qsgd:bits=4", "terngrad", "onebit", "topk:ratio=0.01", "optquant:bits=3", "dqsgd", "rangefloat:bits=8",
          "loggrid", "unigrid:bits=8", "casq:bits=2", "fft"]


def measure(program, codec, device):
    command = [program, "bench", "codec", "--codec", codec, "--device", device, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[0])


def rounds(arguments):
    """Yields (which program, codec, record)."""
    if arguments.records:
        for line in Path(arguments.records).read_text().splitlines():
            which, _, codec, record = line.split(" ", 3)
            yield which, codec, json.loads(record)
        return
    for codec in arguments.codec or CODECS:
        for _ in range(arguments.rounds):
            for which, program in ("base", arguments.old), ("new", arguments.new):
                yield which, codec, measure(program, codec, arguments.device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", action="append")
    parser.add_argument("--records")
    parser.add_argument("--machine")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if not arguments.records and not (arguments.old and arguments.new):
        parser.error("name two programs, or --records")
    values = collections.defaultdict(list)
    for which, codec, record in rounds(arguments):
        for metric in METRICS:
            values[codec, metric, which].append(record[metric])
    rows = Rows(arguments.device, arguments.machine)
    for codec in dict.fromkeys(codec for codec, _, _ in values):
        for metric in METRICS:
            old, new = values[codec, metric, "base"], values[codec, metric, "new"]
            spread = f"each program's rounds: {min(old):.4g} to {max(old):.4g} and {min(new):.4g} to {max(new):.4g}"
            rows.add(f"python3 bench/before_after.py OLD NEW --device {arguments.device} --codec {codec}",
                     f"{metric}_new_over_old", statistics.median(new) / statistics.median(old), "1", ">= 0.97",
                     spread + ("" if arguments.records else "; " + load_note()))
    rows.append(arguments.dry_run)


if __name__ == "__main__":
    main()
