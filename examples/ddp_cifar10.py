#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 with PyTorch's DistributedDataParallel, gradients compressed by gradwire.

    torchrun --nproc-per-node 4 examples/ddp_cifar10.py --synthetic --codec optquant:bits=4
    torchrun --nproc-per-node 4 examples/ddp_cifar10.py --data cifar-10-binary.tar.gz --model resnet18 --device cuda
    --amp bf16 --codec optquant:bits=4 torchrun --nproc-per-node 4 examples/ddp_cifar10.py --data cifar-10-batches-py
    --codec none          plain DDP, to compare with

The one place that differs from an ordinary DDP training is `gw.compress(...)` in `train`. In addition the state of the
hook (residuals, fitted levels) is saved and loaded beside the model, so that a resumed training continues as if it had
not stopped.

--data is the data set as its author publishes it (https://www.cs.toronto.edu/~kriz/cifar.html): the binary or the
Python version, a .tar.gz or the folder in it. --synthetic makes images instead: ten noisy patterns that are moved
about. A training on them shows that everything works, and nothing about accuracy.
"""

import argparse
import contextlib
import gc
import io
import json
import math
import os
import pickle
import tarfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


# The data: uint8 images of 3 x 32 x 32 and their labels, held whole on the device.


class ArraysOnly(pickle.Unpickler):
    """A pickle can run code when it is read; this one may only make numpy arrays."""

    def find_class(self, module, name):
        if (module.replace("_core", "core"), name) not in {
            ("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")
        }:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in CIFAR-10")
        return super().find_class(module, name)


def read_batch(name, data):
    if name.endswith(".bin"):  # rows of a label and 3072 pixels
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()
    batch = ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    return torch.from_numpy(batch[b"data"]).reshape(-1, 3, 32, 32), torch.tensor(batch[b"labels"])


def cifar10(path):
    """(images, labels) to train and to test with, of either version, packed or not."""
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    wanted = {name + suffix for name in names for suffix in ("", ".bin")}
    found = {}
    if Path(path).is_dir():
        found = {file.name: file.read_bytes() for file in Path(path).rglob("*") if file.name in wanted}
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and Path(member.name).name in wanted:
                    found[Path(member.name).name] = archive.extractfile(member).read()
    for suffix in ".bin", "":
        if all(name + suffix in found for name in names):
            *train, test = (read_batch(name + suffix, found[name + suffix]) for name in names)
            return tuple(torch.cat(parts) for parts in zip(*train)), test
    raise SystemExit(
        f"--data {path}: data_batch_1 to _5 and test_batch expected, with .bin or without; found "
        f"{sorted(found) or 'none of them'}"
    )


def synthetic(train=4096, test=1024):
    """Ten smooth patterns, each image one of them moved, darkened and covered with noise."""
    draw = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(10, 3, 8, 8, generator=draw), size=32, mode="bilinear") * 40
    labels = torch.randint(10, (train + test,), generator=draw)
    moves = torch.randint(-4, 5, (len(labels), 2), generator=draw).tolist()
    images = torch.stack([patterns[label].roll(move, (1, 2)) for label, move in zip(labels.tolist(), moves)])
    images = images * torch.rand(len(labels), 1, 1, 1, generator=draw)
    images = images + torch.randn(images.shape, generator=draw) * 50 + 128
    images = images.clamp(0, 255).to(torch.uint8)
    return (images[:train], labels[:train]), (images[train:], labels[train:])


def prepare(images, dtype):
    mean, deviation = (
        torch.tensor(values, device=images.device).view(1, 3, 1, 1)
        for values in ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7))
    )
    return ((images - mean) / deviation).to(dtype, memory_format=torch.channels_last)


def augmented(images, draw):
    """Each image mirrored or not, and moved by up to 4 pixels."""
    count, device = len(images), images.device
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    down, right = (
        torch.randint(9, (count, 1), device=device, generator=draw) + torch.arange(32, device=device) for _ in range(2)
    )
    mirrored = torch.rand(count, 1, device=device, generator=draw) < 0.5
    right = torch.where(mirrored, right.flip(1), right)
    picked = padded[torch.arange(count, device=device).view(-1, 1, 1), :, down.unsqueeze(2), right.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2)


# The model: residual networks for small images.


class Block(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Identity()
        if stride > 1 or width != out:
            self.short = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


def resnet(widths, blocks):
    layers, width = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()], widths[0]
    for stage, out in enumerate(widths):
        for block in range(blocks):
            layers.append(Block(width, out, 2 if stage and block == 0 else 1))
            width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


MODELS = {
    "small": lambda: resnet((16, 32, 64), 1),  # 78 thousand parameters, for a few processor cores
    "resnet20": lambda: resnet((16, 32, 64), 3),  # 0.27 million
    "resnet18": lambda: resnet((64, 128, 256, 512), 2),  # 11.2 million
}


# The training.


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", help="CIFAR-10: a .tar.gz or a folder, binary or Python version")
    source.add_argument("--synthetic", action="store_true", help="made-up images; nothing is downloaded")
    parser.add_argument(
        "--codec",
        default="optquant:bits=4",
        help="a codec or rules (python -m gradwire codecs lists the codecs), or none: plain DDP",
    )
    parser.add_argument("--warmup", type=int, default=0, help="steps that are sent uncompressed at first")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--amp", choices=["none", "bf16", "fp16"], default="none", help="fp16 scales the loss")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="samples per step, on all ranks together")
    parser.add_argument(
        "--lr", type=float, default=0.2, help="the highest rate; up to it for a fifth of the steps, then down to zero"
    )
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="end every epoch after so many, to try things out")
    parser.add_argument(
        "--until", type=int, default=0, help="stop after this epoch, as if interrupted; --epochs still shapes the rates"
    )
    parser.add_argument("--save", metavar="FILE", help="a checkpoint after every epoch; each rank adds FILE.rankN")
    parser.add_argument("--resume", metavar="FILE", help="go on from such a checkpoint; the number of ranks may differ")
    parser.add_argument("--json", action="store_true", help="a last line for programs")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start it with torchrun, which gives every rank its number: torchrun --nproc-per-node 4 "
            "examples/ddp_cifar10.py ..."
        )
    return options


def device_and_backend(wanted):
    """Every rank its own GPU: NCCL. Several ranks on one GPU, or none: Gloo, because NCCL refuses to share."""
    if wanted == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
        return torch.device("cpu"), "gloo"
    if torch.cuda.device_count() == 0:
        raise SystemExit("--device cuda: torch finds no GPU")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    return device, "nccl" if int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count() else "gloo"


def main():
    options = arguments()
    device, backend = device_and_backend(options.device)
    dist.init_process_group(backend)
    try:
        train(options, device)
    finally:
        # A DDP that is still referenced keeps threads of Gloo alive, and Python 3.11 may abort if one of them outlives
        # it.
        gc.collect()
        dist.destroy_process_group()


def train(options, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % world:
        raise SystemExit(f"--batch {options.batch}: a multiple of the number of ranks expected, which is {world}")

    (images, labels), test = synthetic() if options.synthetic else cifar10(options.data)
    images, labels, test = images.to(device), labels.to(device), [part[rank::world].to(device) for part in test]
    steps = min(len(labels) // options.batch, options.steps or len(labels))

    torch.manual_seed(options.seed)
    model = MODELS[options.model]().to(device, memory_format=torch.channels_last)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(
        ddp.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=options.weight_decay
    )
    total = steps * options.epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, total // 5), (total - step) / (total - total // 5))
    )
    amp = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[options.amp]
    scaler = torch.amp.GradScaler(device.type, enabled=amp == torch.float16)

    hook = None
    if options.codec != "none":
        import gradwire.torch as gw
        # This line is all that compression takes. A GradScaler, if there is one, is passed, so that a step it skips
        # changes no residual.
        hook = gw.compress(
            ddp, options.codec, warmup=options.warmup, seed=options.seed, scaler=scaler if scaler.is_enabled() else None
        )

    first = load(options.resume, ddp, optimizer, schedule, scaler, hook, device) if options.resume else 0
    last = options.until or options.epochs
    if first >= last:
        raise SystemExit(f"--resume {options.resume}: it has {first} epochs behind it, and {last} are asked for")
    for epoch in range(first, last):
        began = time.perf_counter()
        # All ranks draw the same order and each takes its own part; what an epoch draws depends on its number only.
        draw_order = torch.Generator().manual_seed(1000 * options.seed + epoch)
        order = torch.randperm(len(labels), generator=draw_order).to(device)
        draw = torch.Generator(device).manual_seed((1000 * options.seed + epoch) * 1000 + rank)
        ddp.train()
        losses = torch.zeros((), device=device)
        for step in range(steps):
            some = order[step * options.batch:(step + 1) * options.batch][rank::world]
            x = augmented(prepare(images[some], torch.float32), draw)
            with torch.autocast(device.type, amp) if amp else contextlib.nullcontext():
                loss = F.cross_entropy(ddp(x), labels[some])
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses += loss.detach()
        mean_loss, accuracy = pooled(losses / steps, *evaluate(model, *test, amp))
        report = {
            "epoch": epoch + 1,
            "loss": mean_loss,
            "test_accuracy": accuracy,
            **sent(hook, ddp, world),
            "seconds": time.perf_counter() - began,
        }
        if rank == 0:
            print("epoch {epoch:3d}   loss {loss:.4f}   test accuracy {test_accuracy:.2f} %   {bits:.2f} bits per "
                  "element, {bytes:.0f} bytes per step   {seconds:.1f} s".format(**report), flush=True)
        if options.save:
            save(options.save, epoch + 1, ddp, optimizer, schedule, scaler, hook)
    if options.json and rank == 0:
        weights = sum(weight.detach().double().sum().item() for weight in model.parameters())
        print(
            json.dumps(
                {**vars(options), "world": world, "backend": dist.get_backend(), "weights_sum": weights, **report}
            ),
            flush=True,
        )


def evaluate(model, images, labels, amp):
    """How many of this rank's test images are recognised, and how many there are."""
    for buffer in model.buffers():  # each rank has seen other images: rank 0's statistics are the model's
        dist.broadcast(buffer, 0)
    model.eval()
    right = torch.zeros((), device=labels.device)
    with torch.no_grad(), torch.autocast(labels.device.type, amp) if amp else contextlib.nullcontext():
        for x, y in zip(images.split(1000), labels.split(1000)):
            right += (model(prepare(x, torch.float32)).argmax(1) == y).sum()
    return right, len(labels)


def pooled(loss, right, count):
    """The mean loss and the accuracy over all ranks."""
    sums = torch.stack([loss, right, torch.tensor(float(count), device=loss.device)])
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return loss / dist.get_world_size(), 100 * right / count


def sent(hook, ddp, world):
    """Bits per element and bytes that a rank sends in a step; for plain DDP as a ring of all ranks would."""
    if hook:
        stats = hook.stats()
        return {"bits": stats["bits"], "bytes": stats["last_step"]["bytes"]}
    return {"bits": 32.0, "bytes": 2 * (world - 1) / world * 4 * sum(weight.numel() for weight in ddp.parameters())}


def save(path, epoch, ddp, optimizer, schedule, scaler, hook):
    """Rank 0 writes what all ranks share; each rank writes its own hook's state, because residuals differ."""
    def write(state, path):
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)  # a checkpoint is there as a whole or not at all

    if hook:
        write(hook.state_dict(), f"{path}.rank{dist.get_rank()}")
    dist.barrier()
    if dist.get_rank() == 0:
        write({"epoch": epoch, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(),
               "schedule": schedule.state_dict(), "scaler": scaler.state_dict(), "world": dist.get_world_size()}, path)
    dist.barrier()


def load(path, ddp, optimizer, schedule, scaler, hook, device):
    state = torch.load(path, map_location=device, weights_only=True)
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    scaler.load_state_dict(state["scaler"])
    if hook:  # on as many ranks as before each rank loads its own state; otherwise all residuals are redistributed
        ranks = [dist.get_rank()] if state["world"] == dist.get_world_size() else range(state["world"])
        hook.load_state_dict(
            [torch.load(f"{path}.rank{rank}", map_location=device, weights_only=True) for rank in ranks]
        )
    return state["epoch"]


if __name__ == "__main__":
    main()
