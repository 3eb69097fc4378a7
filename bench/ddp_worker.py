# SPDX-License-Identifier: Apache-2.0
"""One rank of bench/ddp.py: takes orders on standard input, a JSON object a line, and answers each with a line.

    {"make": [variant, ...]}                          one DDP per variant over the same process group, and warm steps
    {"block": variant, "steps": n, "compute": bool}   n steps after a barrier: seconds, bytes sent, what the hook says
    {"plain": bytes, "from": r}                       rank r sends that much to rank 0 over a plain TCP connection
    {"train": variant, "steps": n, "seed": s, ...}    a real training from the start: losses

A variant is {"name": ..., "kind": "none" | "fp32" | "fp16" | "powersgd" | "gradwire", ...}. The model has the parameter
shapes of ResNet-18. Its backward pass hands out a gradient for each in back-propagation order, and with "compute" it
works for it: matrix products, as many for a layer as its share of ResNet-18's multiplications, or (--compute-kind wait)
idle waiting, as a host does while an accelerator computes. The forward pass works a third of the total. A step ends
with plain SGD.
"""

import argparse
import contextlib
import datetime
import gzip
import json
import math
import os
import socket
import struct
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DATA = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
PLAIN_PORT = 7072


def resnet18():
    """(shape, multiplications per weight) of each parameter, in the order of the model; an image has 224 x 224
    pixels."""
    layers = [((64, 3, 7, 7), 112), ((64,), 0), ((64,), 0)]
    width = 64
    for out, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
        for block in range(2):
            layers += [
                ((out, width, 3, 3), side),
                ((out,), 0),
                ((out,), 0),
                ((out, out, 3, 3), side),
                ((out,), 0),
                ((out,), 0),
            ]
            if block == 0 and out != width:
                layers += [((out, width, 1, 1), side), ((out,), 0), ((out,), 0)]
            width = out
    layers += [((1000, 512), 1), ((1000,), 0)]
    return [(shape, side * side) for shape, side in layers]


class Compute:
    """Work in portions: `portion(share)` does that share of a step's compute; what is less than a unit is carried
    over."""

    def __init__(self, milliseconds, kind):
        self.seconds, self.kind, self.on, self.remainder = milliseconds / 1000, kind, False, 0.0
        self.a, self.b, self.out = (torch.rand(192, 192) for _ in range(3))
        costs = []
        for _ in range(30):  # processor time, because ranks share the cores
            began = time.thread_time()
            for _ in range(5):
                torch.mm(self.a, self.b, out=self.out)
            costs.append((time.thread_time() - began) / 5)
        cost = torch.tensor([sorted(costs)[len(costs) // 4]])
        dist.all_reduce(cost)  # the same work on all ranks
        self.unit = cost.item() / dist.get_world_size()

    def portion(self, share):
        if not self.on:
            return
        if self.kind == "wait":
            time.sleep(self.seconds * share)
            return
        self.remainder += self.seconds * share / self.unit
        for _ in range(int(self.remainder)):
            torch.mm(self.a, self.b, out=self.out)
        self.remainder -= int(self.remainder)


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(context, before, parameter, model, index):
        context.model, context.index = model, index
        model.compute.portion(model.shares[index] / 3)
        return before.clone()

    @staticmethod
    def backward(context, gradient):
        model, index = context.model, context.index
        model.compute.portion(model.shares[index] * 2 / 3)
        return gradient, model.noise[index] * model.scale, None, None


class Shapes(torch.nn.Module):
    def __init__(self, noise, shares, compute):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros_like(one) for one in noise)
        self.noise, self.shares, self.compute, self.scale = noise, shares, compute, 1.0

    def forward(self, start):
        for index, weight in enumerate(self.weights):
            start = Layer.apply(start, weight, self, index)
        return start


def gradients(rank):
    """Half of each gradient is common to all ranks, half is the rank's own."""
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(shape, generator=common) + torch.randn(shape, generator=own)) * 0.01 for shape, _ in resnet18()
    ]


def attach(ddp, variant, start=2):
    """The communication hook of a variant on its DDP; returns gradwire's hook, where it is gradwire's."""
    if variant["kind"] == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(None, fp16_compress_hook)
    elif variant["kind"] == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        ddp.register_comm_hook(
            PowerSGDState(None, matrix_approximation_rank=variant["rank"], start_powerSGD_iter=max(2, start)),
            powerSGD_hook,
        )
    elif variant["kind"] == "gradwire":
        import gradwire.torch

        return gradwire.torch.compress(ddp, variant["codec"], **variant["options"])
    return None


def parallel(model, variant):
    # PowerSGD's second collective is issued by a completion callback: with several buckets the order differs between
    # ranks, and Gloo hangs.
    if variant["kind"] == "powersgd":
        return DDP(model, bucket_cap_mb=1 << 14)
    return DDP(model, bucket_cap_mb=variant.get("options", {}).pop("bucket_cap_mb", 25))  # 25 is DDP's own


def rival_bits(variant, model):
    """Bits per element that a rank sends up in a step without gradwire, once it compresses."""
    if variant["kind"] == "powersgd":
        return powersgd_bits(model, variant["rank"])
    return {"fp32": 32.0, "fp16": 16.0}[variant["kind"]]


def powersgd_bits(model, rank):
    """fp32 factors where they are at most half as large as the matrix, else fp32, as torch's hook decides."""
    sent = total = 0
    for p in model.parameters():
        n, m = (p.shape[0], p.numel() // p.shape[0]) if p.dim() > 1 else (p.numel(), 1)
        sent += (n + m) * rank if p.dim() > 1 and (n + m) * rank * 2 < n * m else n * m
        total += n * m
    return 32 * sent / total


def told(hook):
    """What the table needs of hook.stats(), as a running sum."""
    if hook is None:
        return {}
    stats = hook.stats()
    return {
        "bits": stats["bits"],
        "bytes": stats["last_step"]["bytes"],
        "seconds": {name: stats["all_steps"]["seconds"][name] for name in ("encode", "wait", "decode")},
    }


class Rank:
    def __init__(self, options):
        self.options = options
        self.compute = Compute(options.compute_ms, options.compute_kind)
        self.variants, self.count = {}, 0

    def make(self, order):
        noise = gradients(self.options.rank)
        work = [math.prod(shape) * area for shape, area in resnet18()]
        shares = [one / sum(work) for one in work]
        for variant in order["make"]:
            ddp = parallel(Shapes(noise, shares, self.compute), variant)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
            self.variants[variant["name"]] = variant, ddp, optimizer, attach(ddp, variant)
            for _ in range(4):  # the first ones rebuild buckets, start PowerSGD and fit tables
                self.step(variant["name"])
        return {"parameters": sum(one.numel() for one in noise)}

    def step(self, name):
        variant, ddp, optimizer, _ = self.variants[name]
        self.count += 1
        ddp.module.scale = 1 + 0.1 * math.sin(self.count)
        ddp.zero_grad(set_to_none=True)
        with ddp.no_sync() if variant["kind"] == "none" else contextlib.nullcontext():
            ddp(torch.zeros(())).backward()
        optimizer.step()

    def sent(self):
        return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())

    def block(self, order):
        self.compute.on = order["compute"]
        hook = self.variants[order["block"]][-1]
        before = told(hook)
        dist.barrier()
        bytes_before, began = self.sent(), time.perf_counter()
        for _ in range(order["steps"]):
            self.step(order["block"])
        seconds, sent = time.perf_counter() - began, self.sent() - bytes_before
        after = told(hook)
        answer = {"step_s": seconds / order["steps"], "sent": sent / order["steps"]}
        if after:
            answer.update(bits=after["bits"], bytes=after["bytes"])
            answer["split"] = {
                name: (after["seconds"][name] - before["seconds"][name]) / order["steps"] for name in after["seconds"]
            }
        return answer

    def plain(self, order):
        """Bytes per second between two ranks, the other two idle; a warm quarter first."""
        size, rank = order["plain"], self.options.rank
        rate = 0.0
        if rank == 0:
            with socket.create_server(("", PLAIN_PORT)) as door:
                dist.barrier()
                with door.accept()[0] as link:
                    got, began, base, last = 0, None, 0, None
                    while data := link.recv(1 << 20):
                        got, last = got + len(data), time.perf_counter()
                        if began is None and got >= size // 4:
                            began, base = last, got
                    rate = (got - base) / (last - began)
        else:
            dist.barrier()
            if rank == order["from"]:
                with socket.create_connection((self.options.first, PLAIN_PORT), timeout=30) as link:
                    link.sendall(bytes(size))
        dist.barrier()
        return {"rate": rate}

    def train(self, order):
        return train(order, self.options.rank, self.options.world)


# A real training: a small convolutional network on Fashion-MNIST.


def fashion(part):
    with gzip.open(DATA / f"{part}-images-idx3-ubyte.gz") as file:
        _, count, rows, columns = struct.unpack(">IIII", file.read(16))
        images = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(count, 1, rows, columns)
    with gzip.open(DATA / f"{part}-labels-idx1-ubyte.gz") as file:
        file.read(8)
        labels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    return (images.float() / 255 - 0.286) / 0.353, labels


def network():
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def train(order, rank, world):
    torch.manual_seed(order["seed"])
    ddp = parallel(network(), order["train"])
    hook = attach(ddp, order["train"], order["start"])
    images, labels = train.data = getattr(train, "data", None) or fashion("train")
    steps, batch = order["steps"], order["batch"]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=order["rate"], momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    draw = torch.Generator().manual_seed(1000 * order["seed"] + rank)
    losses, began = [], time.perf_counter()
    for _ in range(steps):
        some = torch.randint(len(labels), (batch,), generator=draw)
        loss = F.cross_entropy(ddp(images[some]), labels[some])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - began
    # The losses of the whole training set's first 10,000 and of the test set, each rank its share; all ranks hold the
    # same weights.
    test = train.test = getattr(train, "test", None) or fashion("t10k")
    sums = []
    with torch.no_grad():
        for x, y in ((images[:10000], labels[:10000]), test):
            guess = ddp.module(x[rank::world])
            sums += [F.cross_entropy(guess, y[rank::world], reduction="sum"), (guess.argmax(1) == y[rank::world]).sum()]
    sums = torch.tensor([float(one) for one in sums], dtype=torch.float64) / 10000
    dist.all_reduce(sums)
    if hook is None:
        bits = rival_bits(order["train"], ddp.module)
        exact = order["start"] / steps if order["train"]["kind"] == "powersgd" else 0
        sent = {"bits": bits, "bits_of_run": bits + exact * (32 - bits)}
    else:
        every = hook.stats()["all_steps"]
        sent = {**told(hook), "bits_of_run": 32 * every["bytes"] / every["fp32_bytes"]}
    return {
        "train_loss": sums[0].item(),
        "test_loss": sums[2].item(),
        "test_accuracy": 100 * sums[3].item(),
        "step_s": seconds / steps,
        "last_loss": torch.stack(losses[-50:]).mean().item(),
        "parameters": sum(p.numel() for p in ddp.parameters()),
        **sent,
    }


def main(kind=Rank):
    parser = argparse.ArgumentParser(description="One rank of bench/ddp.py or bench/hsdp.py, which start it.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file for the rendezvous")
    parser.add_argument("--first", default="127.0.0.1", help="address of rank 0")
    parser.add_argument("--compute-ms", type=float, default=0)
    parser.add_argument("--compute-kind", choices=["matmul", "wait"], default="matmul")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a collective may take")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print does not mix with the answers
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.store}",
        rank=options.rank,
        world_size=options.world,
        timeout=datetime.timedelta(seconds=options.timeout),
    )
    rank = kind(options)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(rank, next(iter(order)))(order)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"rank {options.rank}: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            break
    os._exit(0)  # a group that a failed rank has left may wait for it in its destructor


if __name__ == "__main__":
    main()
