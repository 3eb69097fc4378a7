# SPDX-License-Identifier: Apache-2.0
"""Two ranks, three compressed steps of DDP over Gloo: what a new user runs first. Both ranks must end with the same
weights, other ones than they began with. The last lines say how long the first step took from the start of Python.
"""

import os
import sys
import tempfile
import time

begin = time.time()  # what follows is imported on the way to the first step

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import gradwire.torch as gw


def rank_main(rank, folder, begin):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 100))
    before = [value.detach().clone() for value in model.parameters()]
    hook = gw.compress(model, "optquant:bits=4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(16, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step == 0:
            print(f"the first step has ended {time.time() - begin:.1f} s after the start", flush=True)
    for value, old in zip(model.parameters(), before):
        others = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(others, value.detach())
        assert torch.equal(others[0], others[1]) and not torch.equal(value, old)
    if rank == 0:
        print(f"three steps of two ranks with {hook}: the same weights on both")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (folder, begin), nprocs=2)
    sys.exit(0)
