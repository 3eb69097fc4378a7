#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does decay help AdamW on gradients with error feedback? The held-out loss of the small GPT of examples/ddp_gpt.py on
the project's own pages, two ranks, both ways compressed, without optimizer=: residuals kept whole, decaying, and none on
the way up; and, to compare with, momenta (optimizer=).

    python3 bench/decay.py [--steps 240] [--seeds 2] [--dry]

It needs the package gradwire. `--dry` prints the rows in place of appending them to bench/results.csv.
"""

import argparse
import os
import statistics
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpt_example import example  # noqa: E402
from rows import Rows, load_note  # noqa: E402

CODECS = ["topk:ratio=0.03", "fft:theta=0.85", "onebit"]
SETTINGS = [
    ("decay 1", {}),
    ("decay 0.9", {"decay": 0.9}),
    ("decay 0.5", {"decay": 0.5}),
    ("no feedback up", {"feedback": False}),
    ("momenta", None),
]
SHAPE = dict(text=None, layers=2, width=64, heads=4, context=64, batch=16, lr=4e-3)


def train(gpt, options, seed, rank, codec, settings):
    """The held-out loss."""
    import gradwire.torch as gw

    learn, held_out = gpt.text_of(options, "cpu")
    torch.manual_seed(seed)
    model = gpt.DDP(gpt.GPT(options.layers, options.width, options.heads, options.context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    if codec:
        momenta = dict(optimizer=optimizer, steps=options.steps)
        gw.compress(model, codec, **(momenta if settings is None else settings))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.steps, pct_start=0.1, cycle_momentum=False
    )
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(options.steps):
        starts = torch.randint(len(learn) - options.context, (options.batch // 2,), generator=draw)
        optimizer.zero_grad(set_to_none=True)
        gpt.loss_of(model, *gpt.sequences(learn, starts, options.context)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return gpt.held_out_loss(model, held_out, options.context, rank, 2)


def rank_of(rank, options, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=options.port, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # about an Adam that compress was not told of
    dist.init_process_group("gloo", rank=rank, world_size=2)
    gpt = example()
    for codec, name, settings in [(None, "", {})] + [(c, name, s) for c in CODECS for name, s in SETTINGS]:
        losses = [train(gpt, options, seed, rank, codec, settings) for seed in range(1, options.seeds + 1)]
        if rank == 0:
            results.put((codec or "fp32", name, losses))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--port", default="29461")
    parser.add_argument("--dry", action="store_true", help="print the rows, and append nothing")
    options = parser.parse_args()
    for name, value in SHAPE.items():
        setattr(options, name, value)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=rank_of, args=(rank, options, results)) for rank in range(2)]
    for process in processes:
        process.start()
    rows, plain = Rows(), None
    command = f"python3 bench/decay.py --steps {options.steps} --seeds {options.seeds}"
    for _ in range(1 + len(CODECS) * len(SETTINGS)):
        codec, name, losses = results.get()
        plain = plain or losses
        note = "; ".join([codec, *([name] if name else []), f"seeds 1 to {options.seeds}", load_note()])
        rows.add(command, "held_out_loss", statistics.mean(losses), "1", note=note)
        if codec != "fp32":
            ratio = statistics.mean(a / b for a, b in zip(losses, plain))
            rows.add(command, "held_out_loss_over_fp32", ratio, "1", note=note)
    for process in processes:
        process.join()
    rows.append(options.dry)


if __name__ == "__main__":
    main()
