#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the products of lowrank take on one core: the core's loops beside torch's matrix products, for the matrices of
ResNet-18. docs/measuring.md says what each metric means.

    python3 bench/lowrank_cpu.py [--ranks 4,16] [--dry]

Both make the same from the same: with alternate=on one factor, then the residual and the result; with alternate=off
both factors. They take turns, and what counts is the processor time of the thread. Gradients are overwritten by
results, as in DDP's buckets.
"""

import argparse
import statistics
import time

import torch
from rows import Rows, load_note

from gradwire.torch import _lowrank
from gradwire.torch._lowrank_spec import LowRank, MatrixShape

SHAPES = [(64, 147), *[(64, 576)] * 4, (128, 576), *[(128, 1152)] * 3, (128, 64), (256, 1152), *[(256, 2304)] * 3]
SHAPES += [(256, 128), (512, 2304), *[(512, 4608)] * 3, (512, 256), (1000, 512)]


class Products:
    """All products of a step, with the loops of the core or with torch's."""

    def __init__(self, codec, core):
        _lowrank.on_core = lambda device: core
        draw = torch.Generator().manual_seed(1)
        self.runs = []
        for shape in sorted(set(SHAPES)):
            alike = [i for i, one in enumerate(SHAPES) if one == shape]
            names = [f"w{i}" for i in range(len(SHAPES))]
            group = _lowrank.FactorGroup(codec, MatrixShape(torch.empty(shape)), alike, names, torch.device("cpu"))
            (run,) = group.runs(alike)
            self.runs.append((run, [torch.randn(shape, generator=draw) for _ in alike]))

    def step(self, alternate):
        begun = time.thread_time()
        for run, gradients in self.runs:
            group = run.group
            run.load(gradients, 1.0, 1.0)
            run.project_p()
            if not alternate:
                run.project_q()
            own = (group.x_p, group.q) if alternate else (group.p, group.x_q)
            run.split(own, own, gradients, 1.0)
        return time.thread_time() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,16", help="of the factors")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--dry", action="store_true", help="print the rows, and leave bench/results.csv alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows()
    for rank in map(int, options.ranks.split(",")):
        for alternate in (True, False):
            codec = LowRank(rank, 32, alternate)
            both = {name: Products(codec, name == "core") for name in ("core", "torch")}
            taken = {name: [] for name in both}
            for _ in range(options.turns):
                for name, products in both.items():
                    _lowrank.on_core = lambda device, core=name == "core": core
                    taken[name].append(products.step(alternate))
            command = f"python3 bench/lowrank_cpu.py --ranks {rank} ({codec})"
            note = f"{options.turns} turns; {load_note()}"
            for name, seconds in taken.items():
                rows.add(command, f"{name}_ms", 1e3 * statistics.median(seconds), "ms", note="median; " + note)
            quotients = [core / torch_ for core, torch_ in zip(taken["core"], taken["torch"])]
            rows.add(command, "core_over_torch", statistics.median(quotients), "1", note="median of turns; " + note)
    rows.append(options.dry)


if __name__ == "__main__":
    main()
