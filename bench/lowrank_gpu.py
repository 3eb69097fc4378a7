#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What low-rank compression itself takes on a GPU: gradwire's lowrank beside torch's PowerSGD, on the parameters of
GPT-2 small. docs/measuring.md says what each metric means.

    python3 bench/lowrank_gpu.py

One rank, NCCL, the whole way: what would be sent goes through a process group of one. The backward pass hands over
gradients that are there already. A step is timed from its beginning until the GPU has ended it, for plain DDP, for
PowerSGD and for each codec in turn; what plain DDP takes is subtracted.
"""

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from rows import Rows
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire.torch as gw

WIDTH, LAYERS = 768, 12
SHAPES = [(50257, WIDTH), (1024, WIDTH)]
for _ in range(LAYERS):
    SHAPES += [(WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,)]
    SHAPES += [(4 * WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,)]
SHAPES += [(WIDTH,), (WIDTH,)]


class Hands(torch.autograd.Function):
    """Its gradient is given."""

    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.save_for_backward(gradient)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients):
        return sum(Hands.apply(weight, gradient) for weight, gradient in zip(self.weights, gradients))


class Variant:
    def __init__(self, name):
        self.ddp = DDP(Model().cuda())
        if name == "powersgd4":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name != "none":
            self.hook = gw.compress(self.ddp, name)

    def step(self, gradients):
        for parameter in self.ddp.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.ddp(gradients).backward()
        torch.cuda.synchronize()
        return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", action="append")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dry-run", action="store_true", help="show the rows and append nothing")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    codecs = options.codec or ["lowrank:rank=4", "lowrank:rank=4,alternate=on"]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        torch.manual_seed(1)
        gradients = [torch.randn(shape, device="cuda") * 1e-3 for shape in SHAPES]
        variants = {name: Variant(name) for name in ("none", "powersgd4", *codecs)}
        for variant in variants.values():
            for _ in range(8):
                variant.step(gradients)
        seconds = {name: [] for name in variants}
        for _ in range(options.rounds):
            for name, variant in variants.items():
                seconds[name].append(variant.step(gradients))
        record = Rows("cuda", f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        note = f"GPT-2 small; median of {options.rounds}; less a step of plain DDP in the same turn; NCCL, one rank"
        added = {
            name: [one - plain for one, plain in zip(values, seconds["none"])] for name, values in seconds.items()
        }
        for name in ("powersgd4", *codecs):
            milliseconds = 1e3 * statistics.median(added[name])
            record.add("python3 bench/lowrank_gpu.py", "added_ms", milliseconds, "ms", note=f"{name}; {note}")
        for name in codecs:
            ratio = statistics.median(added[name]) / statistics.median(added["powersgd4"])
            record.add("python3 bench/lowrank_gpu.py", "of_powersgd4", ratio, "1", "<= 0.5", note=f"{name}; {note}")
        record.append(options.dry_run)
        variants.clear()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
