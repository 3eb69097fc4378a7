# SPDX-License-Identifier: Apache-2.0
"""Records of runs that never were, for tests of the report: a plausible comparison, made from a formula and a seed."""

import json
import math
import random

TENSORS = [
    ("conv1.weight", 800),
    ("conv1.bias", 32),
    ("conv2.weight", 51200),
    ("conv2.bias", 64),
    ("fc1.weight", 401408),
    ("fc1.bias", 128),
    ("fc2.weight", 1280),
    ("fc2.bias", 10),
]
PARAMETERS = sum(count for _, count in TENSORS)
# codec: canonical, bits, error, loss of accuracy
CODECS = {
    "fp32": ("fp32", 32.0, 1e-15, 0.0),
    "qsgd:bits=4": ("qsgd:bits=4,bucket=1024,seed=0", 4.06, 0.11, 0.0011),
    "optquant:bits=3": ("optquant:bits=3,bucket=1024,every=100", 3.04, 0.062, 0.0016),
    "dqsgd:budget=4.5": ("dqsgd:budget=4.5,min=2,max=8", 4.5, 0.09, 0.0009),
    "casq:bits=2": ("casq:bits=2,clusters=4,feedback=f32", 2.08, 0.31, 0.0032),
    "fft:theta=0.85": ("fft:theta=0.85,chunk=1024,format=rangefloat:bits=10", 2.9, 0.2, 0.0024),
}


def record(codec="qsgd:bits=4", seed=1, epochs=5, finished=True, noise=0.0012, **changes):
    canonical, bits, error, loss = CODECS.get(codec, (codec, 4.0, 0.1, 0.001))
    draw = random.Random(f"{codec} {seed}")
    steps, workers = 234, 4
    rows, over_time, layers, tables = [], [], [], []
    sent, share = 0, PARAMETERS / 8 * (workers - 1)
    for epoch in range(1, epochs + 1):
        now = bits
        if codec.startswith("dqsgd"):
            now = 6.2 - 3.4 * (epoch - 1) / max(1, epochs - 1)
            over_time += [
                [steps * (epoch - 1) + k * 26, round(now - 0.02 * k + draw.uniform(-0.1, 0.1), 4)] for k in range(9)
            ]
        else:
            over_time += [[steps * (epoch - 1) + k * 78, bits] for k in range(3)]
        sent += now * share * steps
        accuracy = 0.914 - loss - 0.16 * math.exp(-0.9 * epoch) + draw.uniform(-noise, noise)
        seconds = {
            "wall": 21.4 * epoch + draw.uniform(0, 0.5),
            "compute": 8.1 * epoch + draw.uniform(0, 0.2),
            "encode": (0 if codec == "fp32" else 0.31) * epoch,
            "wait": 1.3 * epoch,
            "decode": (0.02 if codec == "fp32" else 0.24) * epoch,
        }
        rows.append(
            {
                "epoch": epoch,
                "step": steps * epoch,
                "rate": 0.05 * (1 + math.cos(math.pi * epoch / epochs)) / 2,
                "train_loss": 0.55 * math.exp(-0.25 * epoch),
                "train_accuracy": min(1, accuracy + 0.01),
                "test_loss": 0.6 * math.exp(-0.2 * epoch),
                "test_accuracy": accuracy,
                "bytes_sent": int(sent),
                "bits": now,
                "seconds": seconds,
            }
        )
        layers.append(
            {
                "step": steps * epoch,
                "tensors": [
                    {
                        "name": name,
                        "elements": count,
                        "error": error * (1 + 0.8 * math.sin(i)) * draw.uniform(0.9, 1.1),
                        "cosine": 1 / math.sqrt(1 + error),
                    }
                    for i, (name, count) in enumerate(TENSORS)
                ],
            }
        )
        names = [name for name, _ in TENSORS]
        if codec.startswith("optquant"):
            inner = [round(x ** (1 + 0.12 * epoch), 4) for x in (0.25, 0.6, 1)]
            levels = [-x for x in reversed(inner)] + [0] + inner
            tables.append(
                {
                    "step": steps * epoch,
                    "side": "up",
                    "codec": canonical,
                    "tensors": names,
                    "lines": ["levels " + " ".join(map(str, levels))],
                    "levels": levels,
                }
            )
        elif codec.startswith("casq"):
            tables.append(
                {
                    "step": steps * epoch,
                    "side": "up",
                    "codec": canonical,
                    "tensors": names,
                    "lines": ["4 clusters with 5, 3, 2, 2 buckets", "bounds -0.8 -0.1 0.1 0.9"],
                }
            )
        elif codec.startswith("fft"):
            tables.append(
                {
                    "step": steps * epoch,
                    "side": "up",
                    "codec": canonical,
                    "tensors": names,
                    "lines": [f"theta {.85 - .01 * epoch:.2f}", "mantissa 4 bits"],
                }
            )
    made = {
        "version": 1,
        "codec": codec,
        "canonical": canonical,
        "seed": seed,
        "task": "fashion-mnist",
        "model": "cnn",
        "workers": workers,
        "collective": "gather",
        "device": "cpu",
        "machine": "2 cores, x86-64 with AVX2",
        "engine": "loopback",
        "batch": 64,
        "optimizer": "sgd",
        "rate": 0.05,
        "schedule": "cosine",
        "parameters": PARAMETERS,
        "finished": finished,
        "weights": f"{draw.getrandbits(64):016x}",
        "skipped_steps": 0,
        "metric": "accuracy",
        "epochs": rows,
        "bits_over_time": over_time,
        "layers": layers,
        "tables": tables,
        "memory": {"peak": 812_000_000, "gradients": 4 * PARAMETERS, "residuals": 4 * PARAMETERS, "messages": 210_000},
    }
    made.update(changes)
    return made


COMMAND = (
    "gradwire compare --task fashion-mnist --model cnn --workers 4 --epochs 5 --seeds 3 "
    + " ".join(f"--codec {codec}" for codec in CODECS)
    + " --out comparison/"
)


def comparison():
    """Six codecs, three seeds, a codec with a second collective and an unfinished run."""
    runs = [record(codec, seed, command=COMMAND) for codec in CODECS for seed in (1, 2, 3)]
    runs += [record("optquant:bits=3", seed, collective="scatter", command=COMMAND) for seed in (1, 2, 3)]
    runs[-1]["epochs"] = runs[-1]["epochs"][:2]
    runs[-1]["finished"] = False
    return runs


def save(folder, runs):
    """Writes records as a comparison leaves them; a text is written as it is."""
    for number, run in enumerate(runs):
        path = folder / "runs" / f"{number:03}" / "run.json"
        path.parent.mkdir(parents=True)
        path.write_text(run if isinstance(run, str) else json.dumps(run))
    return folder
