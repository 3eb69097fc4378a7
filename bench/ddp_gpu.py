#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results.csv for the DDP hook on one GPU; docs/measuring.md says what each one means.

    python3 bench/ddp_gpu.py --codec qsgd:bits=4 --codec optquant:bits=4

One rank on NCCL, the whole way forced: a bucket of --mebibytes is encoded with feedback, sent to itself, decoded,
encoded again with the owner's feedback, gathered, decoded, and checked for values that are not finite. The time is the
GPU's, from the moment when the bucket is complete to the moment when DDP may go on. `kernels` is the same coding alone,
each kernel by itself on one stream: encode with feedback and decode, up and down. The two take turns; the ratio is the
median of those of neighbouring turns.
"""

import argparse
import os
import statistics
import sys

from rows import Rows

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire.torch as gw


def timed(work):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, parameters, gradients, buffer):
        self._parameters, self._gradients, self._buffer = parameters, gradients, buffer

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters

    def gradients(self):
        return self._gradients

    def index(self):
        return 0

    def is_last(self):
        return True


def measure(codec, elements, rounds):
    rows = 1 << 12
    model = torch.nn.ParameterDict(
        {f"w{i}": torch.nn.Parameter(torch.zeros(elements // 8 // rows, rows, device="cuda")) for i in range(8)}
    )
    ddp = DistributedDataParallel(model)
    hook = gw.compress(ddp, codec, feedback=True)
    names = list(dict(ddp.module.named_parameters()))
    buffer = torch.randn(elements, device="cuda") * 1e-3
    gradients = [chunk.view(elements // 8 // rows, rows) for chunk in buffer.chunk(8)]
    bucket = Bucket(list(ddp.module.parameters()), gradients, buffer)

    plan = gradwire.Plan([(name, elements // 8, "float32", codec) for name in names])
    feedback = [gradwire.ErrorFeedback(device="cuda"), gradwire.ErrorFeedback(device="cuda")]
    for one in feedback:
        one.add_plan(plan)
    message = torch.empty(plan.nbytes, dtype=torch.uint8, device="cuda")
    step = 0

    def kernels():
        nonlocal step
        for one in feedback:
            with one.step(step):
                frame = plan.encode(gradients, step=step, feedback=one, out=message)
            plan.decode(frame, out=gradients, wait=False)
        step += 1

    ours, alone, ratios = [], [], []
    for turn in range(rounds + 3):
        a = timed(lambda: hook._comm_hook(bucket).wait())
        b = timed(kernels)
        if turn >= 3:  # tables and residuals are made in the first ones
            ours.append(a), alone.append(b), ratios.append(a / b)
    return statistics.median(ours), statistics.median(alone), statistics.median(ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", action="append")
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--dry-run", action="store_true", help="show the rows and append nothing")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/ddp_gpu.py: no GPU that torch can use")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    table = Rows(device="cuda", machine_name=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for codec in options.codec or ["qsgd:bits=4", "optquant:bits=4"]:
        ours, alone, ratio = measure(codec, options.mebibytes << 18, options.rounds)
        command = f"python3 bench/ddp_gpu.py --mebibytes {options.mebibytes} --codec {codec}"
        table.add(command, "hook_s", ours, "s", note=f"median of {options.rounds}; NCCL with one rank, the whole way")
        table.add(command, "kernels_s", alone, "s", note="encode with feedback and decode, twice")
        table.add(command, "hook_of_kernels", ratio, "1", "<= 1.25", "median of the ratios of neighbouring turns")
    table.append(options.dry_run)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
