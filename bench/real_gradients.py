#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small network on Fashion-MNIST with torch and writes the gradients of some steps as .npy files.

    python3 bench/real_gradients.py OUT                          # Debian's dataset-fashion-mnist
    python3 bench/real_gradients.py OUT --data DIR --steps 1 50 400

Each file holds the gradient of all parameters, one after the other, as float32: what a worker would send. The seed is fixed, so the
files are the same from run to run on one machine and version of torch. Nothing of this is kept with the project.
"""

import argparse
import gzip
import sys
from pathlib import Path


def read_idx(path, torch):
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            data = file.read()
    except OSError as error:
        sys.exit(
            f"real_gradients.py: {path}: {error.strerror or error}: install dataset-fashion-mnist, or name a folder with --data"
        )
    if len(data) < 8 or data[:3] != b"\0\0\x08":
        sys.exit(f"real_gradients.py: {path}: not an idx file of bytes")
    dimensions = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
    return torch.frombuffer(bytearray(data[4 + 4 * data[3] :]), dtype=torch.uint8).reshape(dimensions)


def find(folder, name):
    for path in folder / f"{name}.gz", folder / name:
        if path.exists():
            return path
    sys.exit(
        f"real_gradients.py: {folder / name}[.gz] is missing: install dataset-fashion-mnist, or name a folder with --data"
    )


def main():
    parser = argparse.ArgumentParser(description="Write real gradients of a small network as .npy files.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 30, 300])
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    try:
        import numpy
        import torch
    except ImportError as error:
        sys.exit(f"real_gradients.py: skipped: this Python cannot import {error.name} (pip install torch numpy)")
    nn = torch.nn

    torch.manual_seed(1)
    torch.set_num_threads(2)
    images = read_idx(find(arguments.data, "train-images-idx3-ubyte"), torch).float().unsqueeze(1) / 255 - 0.5
    labels = read_idx(find(arguments.data, "train-labels-idx1-ubyte"), torch).long()
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(images))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for step in range(max(arguments.steps) + 1):
        batch = order[torch.arange(step * arguments.batch, (step + 1) * arguments.batch) % len(order)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        if step in arguments.steps:
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()
            path = arguments.out / f"step{step}.npy"
            numpy.save(path, gradient)
            print(f"{path}: {gradient.size} elements, loss {loss.item():.4f}")
        optimizer.step()


if __name__ == "__main__":
    main()
