#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What do ranks gain that round against each other? The squared error of the mean of what W ranks send, over that of
the same ranks with a seed each, which round independently. The gradients are those of the small GPT of
examples/ddp_gpt.py on the project's own pages, at the beginning, early in a training and later, every rank with a batch
of its own.

    python3 bench/rounding.py [--steps 0 30 300] [--dry]
    python3 bench/rounding.py --rivals [--dry]            # other ways to correlate ranks, simulated on Laplace values

It needs the package gradwire. `--dry` prints the rows in place of appending them to bench/results.csv.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

import gradwire

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpt_example import example  # noqa: E402
from rows import Rows  # noqa: E402

CODECS = ["qsgd:bits=2", "qsgd:bits=3", "qsgd:bits=4", "qsgd:bits=8", "optquant:bits=2", "optquant:bits=3", "optquant:bits=4"]
WORLDS = [2, 3, 4, 8]
REPEATS = 3
SHAPE = argparse.Namespace(text=None, layers=2, width=64, heads=4, context=64)
RANK_BATCH = 8


class Training:
    def __init__(self):
        torch.manual_seed(1)
        self.gpt = example()
        self.text, _ = self.gpt.text_of(SHAPE, "cpu")
        self.model = self.gpt.GPT(SHAPE.layers, SHAPE.width, SHAPE.heads, SHAPE.context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.draw = torch.Generator().manual_seed(1)
        self.taken = 0

    def gradient(self):
        """Of one batch, the matrices alone: what `compress` compresses."""
        starts = torch.randint(len(self.text) - SHAPE.context, (RANK_BATCH,), generator=self.draw)
        self.optimizer.zero_grad()
        self.gpt.loss_of(self.model, *self.gpt.sequences(self.text, starts, SHAPE.context)).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.dim() > 1])

    def advance(self, step):
        while self.taken < step:
            self.gradient()
            self.optimizer.step()
            self.taken += 1


def error_of_mean(gradients, codec, stamp_of):
    error = 0.0
    for step in range(REPEATS):
        off = torch.zeros_like(gradients[0], dtype=torch.float64)
        for rank, gradient in enumerate(gradients):
            off += gradwire.decode(gradwire.encode(gradient, codec, step=step, fit=False, **stamp_of(rank))) - gradient
        error += float(off.square().sum())
    return error


def draws(way, world, count, random):
    """16 bits for each rank and element, as integers."""
    shared, own = random.integers(0, 65536, count), random.integers(0, 65536, (world, count))
    if way == "pairs":  # as ours
        return [65535 - own[rank - 1] if rank % 2 else own[rank] for rank in range(world)]
    if way == "shifts":  # a shared draw, and an even part of the range for each rank
        return [(shared + rank * 65536 // world) % 65536 for rank in range(world)]
    if way == "permutations":  # Suresh et al., 2022: every rank draws in a part of the range, which change at random
        return (np.argsort(random.random((world, count)), axis=0) * 65536 + own) // world
    return own


def rivals(rows):
    """QSGD in buckets of 1000 elements, with the largest magnitude as the norm."""
    buckets, repeats = 40, 6
    for world, signs, bits in ((2, 1, 4), (3, 1, 4), (4, 1, 4), (8, 1, 4), (4, 1, 2), (16, -1, 2)):
        levels, errors = 2 ** (bits - 1) - 1, dict.fromkeys(("independent", "pairs", "shifts", "permutations"), 0.0)
        random = np.random.default_rng(1)
        for _ in range(repeats):
            common = random.laplace(size=(buckets, 1000)) * (0.9 if signs < 0 else 0)
            values = [signs**rank * (common + random.laplace(size=common.shape)) for rank in range(world)]
            for way in errors:
                off = np.zeros_like(common)
                for x, draw in zip(values, draws(way, world, common.size, random)):
                    step = np.abs(x).max(axis=1, keepdims=True) / levels
                    off += np.floor(x / step + (draw.reshape(x.shape) + 0.5) / 65536) * step - x
                errors[way] += np.square(off).sum()
        kind = "opposite signs" if signs < 0 else "unrelated values"
        for way in ("pairs", "shifts", "permutations"):
            rows.add("python3 bench/rounding.py --rivals", f"{way}_{world}_ranks_{bits}_bits",
                     errors[way] / errors["independent"], "1", "", f"error of the mean over independent draws; {kind}")


def main():
    parser = argparse.ArgumentParser(description="The gain of ranks that round against each other.")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 30, 300])
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    rows = Rows()
    if options.rivals:
        rivals(rows)
        return rows.append(options.dry)
    training = Training()
    errors = {}
    for step in sorted(options.steps):
        training.advance(step)
        for world in WORLDS:
            gradients = [training.gradient() for _ in range(world)]
            for spec in CODECS:
                codec = gradwire.fit(spec, gradients[0])
                together = error_of_mean(gradients, codec, lambda rank: dict(seed=1, rank=rank, world=world))
                alone = error_of_mean(gradients, codec, lambda rank: dict(seed=1001 + rank))
                errors.setdefault((spec, world), []).append(together / alone)
    for (spec, world), ratios in errors.items():
        each = ", ".join(f"step {step}: {ratio:.3f}" for step, ratio in zip(sorted(options.steps), ratios))
        rows.add(f"python3 bench/rounding.py --steps {' '.join(map(str, options.steps))}",
                 f"error_of_mean_{spec}_{world}_ranks", max(ratios), "1", "<= 1.0",
                 f"over independent rounding, the largest of the steps; {each}")
    rows.append(options.dry)


if __name__ == "__main__":
    main()
