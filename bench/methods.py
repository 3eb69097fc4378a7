#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The methods on real gradients: size, error, and how far the fitted levels are from the best there are. One JSON row a gradient.

    python3 bench/real_gradients.py /tmp/gradients
    python3 bench/methods.py /tmp/gradients/step30.npy

relative_error is |x - decoded|^2 / |x|^2 of the whole gradient. Every bit of a message counts. Codecs that learn are fitted to the gradient, as
`gradwire encode` does.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CODECS = {
    "qsgd3": "qsgd:bits=3",
    "terngrad": "terngrad",
    "casq2": "casq:bits=2",
    "casq2_paper": "casq:bits=2,mode=paper,budget=0.03125",
    "optquant3": "optquant:bits=3",
    "optquant3_biased": "optquant:bits=3,mode=biased",
    "loggrid2": "loggrid:k=2",
    "rangefloat8": "rangefloat:bits=8",
    "fft85": "fft:theta=0.85",
    "fft85_4096": "fft:theta=0.85,chunk=4096",
}


def run(program, *arguments):
    return subprocess.run([program, *arguments], stdout=subprocess.PIPE, check=True, text=True).stdout


def measure(program, codec, path, x):
    with tempfile.TemporaryDirectory() as folder:
        frame, back = f"{folder}/x.gw", f"{folder}/x.npy"
        run(program, "encode", "--codec", codec, "--seed", "1", path, frame)
        run(program, "decode", frame, back)
        y = np.load(back).astype(np.float64).ravel()
        head = json.loads(run(program, "inspect", "--json", frame))
        return (
            8 * Path(frame).stat().st_size / x.size,
            float(np.sum((x - y) ** 2) / np.sum(x**2)),
            head["tensors"][0]["table"],
        )


def unbiased_error(levels, t, weight):
    """Exactly what random rounding between neighbouring levels costs, for values t in [-1, 1]."""
    levels = np.asarray(levels, dtype=np.float64)
    high = np.clip(np.searchsorted(levels, t, side="left"), 1, len(levels) - 1)
    return float(np.sum(weight * (levels[high] - t) * (t - levels[high - 1])))


def best_unbiased(t, weight, most_bits):
    """The least cost of any 2^bits levels from -1 to 1, for every width up to most_bits. Levels may be taken from the values (a cost is linear between
    them), so this is a dynamic programme over the sorted values; its cost is Monge, hence divide and conquer."""
    x, where = np.unique(np.concatenate([[-1.0, 1.0], t]), return_inverse=True)
    w = np.bincount(where, weights=np.concatenate([[0.0, 0.0], weight]))
    s0, s1, s2 = np.cumsum(w), np.cumsum(w * x), np.cumsum(w * x * x)
    n = len(x)

    def cell(i, j):  # i may be an array
        a, b, c = s0[j] - s0[i], s1[j] - s1[i], s2[j] - s2[i]
        return (x[i] + x[j]) * b - x[i] * x[j] * a - c

    def layer(before):
        after = np.full(n, np.inf)
        stack = [(0, n - 1, 0, n - 1)]
        while stack:
            low, high, first, last = stack.pop()
            if low > high:
                continue
            middle = (low + high) // 2
            i = np.arange(first, min(middle, last) + 1)
            costs = before[i] + cell(i, middle)
            at = int(np.argmin(costs))
            after[middle] = costs[at]
            stack += [(low, middle - 1, first, i[at]), (middle + 1, high, i[at], last)]
        return after

    cost = np.full(n, np.inf)
    cost[0] = 0
    best = {}
    for cells in range(1, 2**most_bits):
        cost = layer(cost)
        if (cells + 1) & cells == 0:
            best[(cells + 1).bit_length() - 1] = cost[-1]
    return best


def main():
    parser = argparse.ArgumentParser(description="Errors and sizes of the methods on a gradient.")
    parser.add_argument("gradient", nargs="+")
    parser.add_argument("--gradwire", default=str(Path(__file__).resolve().parent.parent / "build/bin/gradwire"))
    parser.add_argument("--points", type=int, default=40960, help="values whose best levels are searched exactly")
    arguments = parser.parse_args()
    for path in arguments.gradient:
        try:
            x = np.load(path).astype(np.float64).ravel()
        except (OSError, ValueError) as error:
            sys.exit(f"methods.py: {path}: {error}")
        row = {"gradient": Path(path).name, "elements": x.size}
        for name, codec in CODECS.items():
            row[f"{name}_bits"], row[f"{name}_error"], _ = measure(arguments.gradwire, codec, path, x)
        for name, codec in ("fft85", "fft85"), ("fft85_4096", "fft85_4096"):
            ratio = row[f"{codec}_bits"] / 48  # a kept element of topk takes 48 bits
            bits, error, _ = measure(arguments.gradwire, f"topk:ratio={ratio:.6f}", path, x)
            row[f"topk_at_{name}_bits"], row[f"topk_at_{name}_error"] = bits, error
        # The fitted levels against the best for the same buckets.
        count = min(arguments.points, x.size) // 1024 * 1024
        with tempfile.TemporaryDirectory() as folder:
            part = f"{folder}/part.npy"
            np.save(part, x[-count:].astype(np.float32))
            buckets = x[-count:].astype(np.float32).astype(np.float64).reshape(-1, 1024)
            top = np.abs(buckets).max(axis=1, keepdims=True)
            keep = top[:, 0] > 0
            t = (buckets[keep] / top[keep]).ravel()
            weight = np.broadcast_to(top[keep] ** 2, buckets[keep].shape).ravel()
            best = best_unbiased(t, weight, 4)
            for bits in 2, 3, 4:
                table = measure(arguments.gradwire, f"optquant:bits={bits}", part, x[-count:])[2]
                levels = np.array(table, dtype=np.uint32).view(np.float32)
                row[f"optquant{bits}_over_best"] = unbiased_error(levels, t, weight) / best[bits]
        print(json.dumps(row))


if __name__ == "__main__":
    main()
