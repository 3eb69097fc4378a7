#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the hooks add to a step of a training, and what learning adds to that. docs/measuring.md says what each metric
means.

    python3 bench/gpu_steps.py host                      one rank, NCCL, a GPU
    python3 bench/gpu_steps.py learning --device cuda    four ranks that share a GPU, Gloo
    python3 bench/gpu_steps.py learning                  two ranks on the CPU, Gloo
    python3 bench/gpu_steps.py learning --how fsdp       sharded; or replicas, or hsdp (2 x 2 ranks)
    python3 bench/gpu_steps.py momentum                  one rank, NCCL, a GPU

host: a GPT of 10.7 million parameters in bf16 autocast with torch.compile, AdamW, a batch of 16 texts. Plain DDP and
DDP with each codec take turns of a few steps in one process, so that a change of the machine's speed meets them alike.
`host_us_per_bucket` is the time that Python and C++ spend in the communication hook for one bucket.

momentum: AdamW with codecs that send gradients, and with the same codecs that send its momentum (optimizer=).

learning: qsgd, optquant with few and with many fits, and dqsgd, which learns in every step, take turns step by step.
"""

import argparse
import contextlib
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH), str(BENCH.parent / "examples")]
from ddp_gpt import GPT, loss_of  # noqa: E402
from rows import Rows, load_note  # noqa: E402
from turns import variant_of  # noqa: E402

import gradwire.torch as gw  # noqa: E402

SIZES = {  # layers, width, heads, context, batch
    "small": (4, 128, 4, 64, 4),
    "middle": (6, 384, 6, 256, 16),
}


class Training:
    """A model with its codec and options of compress ("CODEC key=value ..."), or with "none". mesh: for FSDP2, which
    shards the model and, with two dimensions or replicas only, reduces it between replicas; the codec is for all that
    is reduced."""

    def __init__(self, codec, size, device, compiled=False, momentum=False, mesh=None, replicas=False):
        torch.manual_seed(1)
        layers, width, heads, context, batch = SIZES[size]
        model = GPT(layers, width, heads, context).to(device)
        if mesh is None:
            self.ddp = DDP(torch.compile(model) if compiled else model)
        else:
            self.ddp = spread(model, mesh, replicas)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4, fused=device == "cuda")
        variant = variant_of(codec)
        codec, given = variant["codec"], variant["options"]
        if momentum:
            given |= {"optimizer": self.optimizer, "warmup": 0}
        if mesh is not None and mesh.ndim == 2:
            given["gradients"] = codec
        self.hook = gw.compress(self.ddp, codec, **given) if codec != "none" else None
        self.text = torch.randint(256, (batch, context), device=device)
        self.following = torch.randint(256, (batch, context), device=device)
        self.device = device
        self.host, self.buckets = 0.0, 0
        if self.hook is not None and mesh is None:
            inner = self.hook._comm_hook

            def timed(bucket):
                began = time.perf_counter()
                result = inner(bucket)
                self.host += time.perf_counter() - began
                self.buckets += 1
                return result

            self.hook._comm_hook = timed

    def step(self):
        autocast = torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()
        with autocast:
            loss = loss_of(self.ddp, self.text, self.following)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def timed_steps(self, count):
        """Seconds a step, of several that follow each other as they do in a training."""
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        synchronize(self.device)
        return (time.perf_counter() - began) / count


def spread(model, mesh, replicas):
    if replicas:
        from torch.distributed._composable.replicate_with_fsdp import replicate as wrap
    else:
        from torch.distributed.fsdp import fully_shard as wrap
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            for block in module:
                wrap(block, mesh=mesh)
    return wrap(model, mesh=mesh)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def host(options, record):
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        torch.set_float32_matmul_precision("high")
        codecs = ["none", *(options.codec or ["qsgd:bits=4", "optquant:bits=4"])]
        trainings = {codec: Training(codec, "middle", "cuda", options.compile) for codec in codecs}
        for training in trainings.values():
            training.timed_steps(20)  # buckets are rebuilt, graphs compiled, the first tables fitted
            training.host, training.buckets = 0.0, 0
        seconds = {codec: [] for codec in codecs}
        for _ in range(options.rounds):
            for codec, training in trainings.items():
                seconds[codec].append(training.timed_steps(10))
        command = shlex.join(["python3", "bench/gpu_steps.py", "host", *(["--no-compile"] * (not options.compile))])
        plain = seconds["none"]
        note = f"median of {options.rounds} turns of 10 steps; NCCL, one rank"
        for codec, values in seconds.items():
            record.add(command, "step_ms", 1e3 * statistics.median(values), "ms", note=f"{codec}; {note}")
            if codec == "none":
                continue
            added = statistics.median(1e3 * (one - base) for one, base in zip(values, plain))
            record.add(command, "added_ms", added, "ms", "<= 0.5", note=f"{codec}; over plain DDP, paired turns")
            training = trainings[codec]
            record.add(command, "host_us_per_bucket", 1e6 * training.host / max(1, training.buckets), "us", "<= 60",
                       note=f"{codec}; in the communication hook; {training.buckets // (10 * options.rounds)} buckets")
        if options.profile:
            profiled(trainings[codecs[-1]])
        for training in trainings.values():
            training.ddp = training.hook = None
        dist.destroy_process_group()


def profiled(training):
    import cProfile
    import pstats
    profile, inner = cProfile.Profile(), training.hook._comm_hook

    def profiled_hook(bucket):
        profile.enable()
        try:
            return inner(bucket)
        finally:
            profile.disable()

    training.hook._comm_hook = profiled_hook
    training.timed_steps(50)
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def momentum(options, record):
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        torch.set_float32_matmul_precision("high")
        for codec in options.codec or ["onebit", "topk:ratio=0.03"]:
            both = [Training(codec, "middle", "cuda", options.compile, one) for one in (True, False)]
            for training in both:
                training.timed_steps(20)
            seconds = [[one.timed_steps(10) for one in both] for _ in range(options.rounds)]
            ratio = statistics.median(ours / theirs for ours, theirs in seconds)
            command = shlex.join(
                ["python3", "bench/gpu_steps.py", "momentum", *(["--no-compile"] * (not options.compile))]
            )
            record.add(command, "momentum_over_gradients", ratio, "1", "<= 1.1",
                       note=f"{codec}; a step of AdamW; median of {options.rounds} turns of 10 steps; NCCL, one rank")
            for training in both:
                training.ddp = training.hook = None
        dist.destroy_process_group()


LEARNING = {  # what is measured: its codec, and what it is compared with
    "qsgd:bits=4": None,
    "dqsgd:budget=4": "qsgd:bits=4",
    "optquant:bits=4,refit=100000": None,
    "optquant:bits=4,refit=4": "optquant:bits=4,refit=100000",
}


def learn(rank, world, options, store, out):
    if options.device == "cuda":
        torch.cuda.set_device(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    size = "middle" if options.device == "cuda" else "small"
    mesh = None
    if options.how != "ddp":
        shape = (2, world // 2) if options.how == "hsdp" else (world,)
        mesh = init_device_mesh(options.device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    replicas = options.how == "replicas"
    trainings = {codec: Training(codec, size, options.device, mesh=mesh, replicas=replicas)
                 for codec in ("none", *LEARNING)}
    for training in trainings.values():
        training.timed_steps(6)
    seconds = {codec: [] for codec in trainings}
    for _ in range(options.rounds):
        for codec, training in trainings.items():
            dist.barrier()
            seconds[codec].append(training.timed_steps(4))
    if rank == 0:
        torch.save(seconds, out)
    for training in trainings.values():
        training.ddp = training.hook = None
    dist.barrier()
    dist.destroy_process_group()


def learning(options, record):
    """Turns of four steps, so that optquant with refit=4 fits once in each."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = options.ranks or (4 if options.device == "cuda" or options.how == "hsdp" else 2)
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/seconds.pt"
        mp.start_processes(learn, (world, options, f"{folder}/store", out), world, start_method="fork")
        seconds = torch.load(out)
    command = ["python3", "bench/gpu_steps.py", "learning", "--device", options.device]
    command = shlex.join(command + (["--how", options.how] if options.how != "ddp" else []))
    note = f"{world} ranks on Gloo; median of {options.rounds} turns of 4 steps"
    for codec, values in seconds.items():
        record.add(command, "step_ms", 1e3 * statistics.median(values), "ms", note=f"{codec}; {note}; {load_note()}")
    for codec, base in LEARNING.items():
        if base is None:
            continue
        ratio = statistics.median(one / other for one, other in zip(seconds[codec], seconds[base]))
        if codec.startswith("optquant"):  # one step in four fits
            ratio = 1 + 4 * (ratio - 1)
        target = "<= 1.05" if codec.startswith("dqsgd") else "<= 1.15"
        name = "learning_over_not" if codec.startswith("dqsgd") else "refit_over_not"
        record.add(command, name, ratio, "1", target,
                   note=f"{codec} over {base}; paired turns; {world} ranks; {load_note()}" + (f"; {options.note}" if options.note else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["host", "momentum", "learning"])
    parser.add_argument("--codec", action="append")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--how", choices=["ddp", "fsdp", "replicas", "hsdp"], default="ddp", help="of `learning`")
    parser.add_argument("--note", help="more for the notes of `learning`")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--profile", action="store_true", help="show where the hook of the last codec spends its time")
    parser.add_argument("--machine", help="its name in results.csv, if it is not this one")
    parser.add_argument("--dry-run", action="store_true", help="show the rows and append nothing")
    options = parser.parse_args()
    device = "cuda" if options.what != "learning" else options.device
    name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if options.what != "learning" else None
    record = Rows(device, options.machine or name)
    {"host": host, "momentum": momentum, "learning": learning}[options.what](options, record)
    record.append(options.dry_run)


if __name__ == "__main__":
    main()
