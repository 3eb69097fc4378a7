#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""topk:ratio=0.01 against torch.topk on one CPU thread, as one JSON row.

torch does the least that a sparsifier needs: the places and magnitudes of the strongest 1 % of |x|, unsorted. gradwire
does all of it: choose, write values and places, and checksum the frame. Turns alternate between the two on the same
number of elements, and the median of the ratios of neighbouring turns is the speed-up. gradwire chooses among tiles of
32768 elements, its default; --codec topk:ratio=0.01,mode=paper chooses among the whole tensor, as torch does.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path


def gradwire_seconds(program, codec, elements):
    command = [
        program,
        "bench",
        "codec",
        "--codec",
        codec,
        "--elements",
        str(elements),
        "--threads",
        "1",
        "--pairs",
        "3",
        "--json",
    ]
    row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return 4e-9 * elements / row["encode_GBps"]


def main():
    parser = argparse.ArgumentParser(description="Time topk:ratio=0.01 against torch.topk on one CPU thread.")
    parser.add_argument("--gradwire", type=Path, default=Path(__file__).resolve().parent.parent / "build/bin/gradwire")
    parser.add_argument("--codec", default="topk:ratio=0.01")
    parser.add_argument("--elements", type=int, default=16777216)
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("topk_vs_torch.py: skipped: this Python cannot import torch (pip install torch)")

    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(arguments.elements) * torch.rand(arguments.elements).sqrt()
    keep = arguments.elements // 100
    torch.topk(x.abs(), keep, sorted=False)  # warm
    ours, theirs = [], []
    for _ in range(arguments.turns):
        start = time.perf_counter()
        torch.topk(x.abs(), keep, sorted=False)
        theirs.append(time.perf_counter() - start)
        ours.append(gradwire_seconds(arguments.gradwire, arguments.codec, arguments.elements))
    tensor_gigabytes = 4e-9 * arguments.elements
    print(
        json.dumps(
            {
                "codec": arguments.codec,
                "device": "cpu",
                "threads": 1,
                "elements": arguments.elements,
                "torch": torch.__version__,
                "gradwire_GBps": tensor_gigabytes / statistics.median(ours),
                "torch_GBps": tensor_gigabytes / statistics.median(theirs),
                "speedup": statistics.median(t / o for t, o in zip(theirs, ours)),
                "turns": arguments.turns,
            }
        )
    )


if __name__ == "__main__":
    main()
