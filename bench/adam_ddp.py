#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Transformers with AdamW under DistributedDataParallel: gradwire's hook beside torch's own hooks and 1-bit Adam.

    python3 bench/adam_ddp.py --text TEXT --out DIR [--device cuda] [--size small|middle] [--seeds 3] [--jobs 1]

TEXT is any UTF-8 file. `middle` is a GPT of 10.7 million parameters, for a GPU that all ranks share (Gloo); `small` has
0.8 million. The model and the way it is trained are those of examples/ddp_gpt.py: 4 ranks, AdamW, one cycle of the
learning rate, gradients clipped at 1. Every row is trained with the same batches; a finished run in DIR is not
repeated. With --optimizer sgd it is SGD with momentum 0.9, for the rows whose gradients are exchanged. A row has the
validation loss (mean over seeds), its ratio to that of plain DDP paired by seed, with the standard error, and the bits
per element of both ways together with everything counted: warm-up, pooled moments, fp32 parameters. "Exact first" is a
tenth of the steps. The rivals:

    fp16        torch's fp16_compress_hook
    powersgd    torch's powerSGD_hook of rank 4, with error feedback and warm start, after a tenth of the steps
    1-bit adam  exact Adam for 15 % of the steps, then second moments that are frozen, and momentum in one bit with error
                feedback both ways, as DeepSpeed does it. The bias of the second moments is corrected as of the freeze
"""

import argparse
import contextlib
import json
import math
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH), str(BENCH.parent / "examples")]
from ddp_gpt import GPT, held_out_loss, loss_of, sequences  # noqa: E402
from ddp_worker import powersgd_bits  # noqa: E402
from rows import Rows  # noqa: E402

WORLD = 4
SIZES = {
    "small": {"layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 4},
    "middle": {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 16},
}
MOMENTUM = {"optimizer": True}
EXACT_FIRST = {"warmup": 0.1}  # of the steps, as PowerSGD has it
ROWS = {  # label: what it is, options of compress
    "plain DDP": None,
    "fp16": None,
    "powersgd rank 4": None,
    "1-bit adam": None,
    **{f"{codec} momentum": (codec, MOMENTUM) for codec in (
        "casq:bits=2", "fft:theta=0.85", "onebit", "topk:ratio=0.03", "optquant:bits=2,mode=biased", "optquant:bits=3",
        "dqsgd:budget=3", "optquant:bits=2", "qsgd:bits=3", "topk:ratio=0.03,bits=2")},
    "lowrank:rank=4 momentum": ("lowrank:rank=4", {**MOMENTUM, "feedback": True}),
    **{f"{codec} gradients": (codec, {}) for codec in (
        "qsgd:bits=3", "optquant:bits=3", "dqsgd:budget=3", "optquant:bits=2", "onebit", "topk:ratio=0.03")},
    **{f"{codec} gradients, exact first": (codec, EXACT_FIRST) for codec in (
        "lowrank:rank=4", "lowrank:rank=8,alternate=on", "topk:ratio=0.03,bits=2")},
}  # fmt: skip
TARGETS = {
    "casq:bits=2 momentum": 1.005, "optquant:bits=3 momentum": 1.005, "dqsgd:budget=3 momentum": 1.005,
    "optquant:bits=2 momentum": 1.01, "qsgd:bits=3 momentum": 1.005,
    "fft:theta=0.85 momentum": 1.01, "onebit momentum": 1.02, "topk:ratio=0.03 momentum": 1.02,
}  # fmt: skip


RATES = {"adamw": 1e-3, "sgd": 0.1}


class OneBitAdam(torch.optim.Optimizer):
    """The schedule of 1-bit Adam. After the freeze p.grad is the momentum that the ranks have averaged."""

    def __init__(self, parameters, lr, weight_decay, freeze, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self.taken, self.freeze, self.betas, self.eps = 0, freeze, betas, eps
        for p in self.parameters():
            self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            p.register_hook(lambda gradient, p=p: self.momentum(p, gradient))

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def momentum(self, p, gradient):
        """Before DDP sees the gradient."""
        return gradient if self.taken < self.freeze else self.state[p]["m"].lerp(gradient, 1 - self.betas[0])

    @torch.no_grad()
    def step(self, closure=None):
        beta1, beta2 = self.betas
        rate, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        for p in self.parameters():
            m, v = self.state[p]["m"], self.state[p]["v"]
            if self.taken < self.freeze:
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            else:
                m.copy_(p.grad)
            seen = min(self.taken + 1, self.freeze)
            den = (v / (1 - beta2**seen)).sqrt_().add_(self.eps)
            p.mul_(1 - rate * decay).addcdiv_(m, den, value=-rate / (1 - beta1 ** (self.taken + 1)))
        self.taken += 1


def attach(label, ddp, optimizer, options):
    """The communication hook of a row. Returns gradwire's, or the bits per element of another one."""
    if label == "plain DDP":
        return 32.0
    if label == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return 16.0
    if label == "powersgd rank 4":
        start = options.steps // 10
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=max(start, 2))
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        exact, bits = start / options.steps, powersgd_bits(ddp.module, 4)
        return 32 * exact + (1 - exact) * bits
    import gradwire.torch as gw
    if label == "1-bit adam":
        return gw.compress(ddp, "onebit", warmup=optimizer.freeze, seed=options.seed)
    codec, given = ROWS[label]
    given = {**given, "optimizer": optimizer} if "optimizer" in given else dict(given)
    if "warmup" in given:
        given["warmup"] = max(2, int(options.steps * given["warmup"]))
    return gw.compress(ddp, codec, steps=options.steps, seed=options.seed, **given)


def optimizer_of(label, model, options):
    if label == "1-bit adam":
        return OneBitAdam(model.parameters(), 1e-3, 0.1, freeze=max(1, round(0.15 * options.steps)))
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=RATES["sgd"], momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=RATES["adamw"], weight_decay=0.1)


def train(rank, label, options, store, out):
    if options.device == "cuda":
        torch.cuda.set_device(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    size = SIZES[options.size]
    data = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8).to(options.device)
    cut = len(data) * 9 // 10
    learn, held_out = data[:cut], data[cut:]
    torch.manual_seed(options.seed)
    model = GPT(size["layers"], size["width"], size["heads"], size["context"]).to(options.device)
    # PowerSGD issues its second collective in a callback. With several buckets their order differs between ranks, and
    # Gloo fails.
    ddp = DDP(model, bucket_cap_mb=1 << 14) if label == "powersgd rank 4" else DDP(model)
    optimizer = optimizer_of(label, ddp, options)
    hook = attach(label, ddp, optimizer, options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATES[options.optimizer], total_steps=options.steps, pct_start=0.1, cycle_momentum=False
    )
    draw = torch.Generator().manual_seed(1000 * options.seed + rank)
    began = time.perf_counter()
    for step in range(options.steps):
        starts = torch.randint(len(learn) - size["context"], (size["batch"],), generator=draw)
        text, following = sequences(learn, starts, size["context"])
        cuda = options.device == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext():
            loss = loss_of(ddp, text, following)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    validation = held_out_loss(ddp, held_out, size["context"], rank, WORLD)
    seconds = time.perf_counter() - began
    bits = hook if isinstance(hook, float) else bits_of(hook.stats())
    if rank == 0:
        found = {"label": label, "seed": options.seed, "loss": validation, "train_loss": loss.item(), "bits": bits,
                 "seconds": seconds / options.steps}
        Path(out).write_text(json.dumps(found))
    del ddp, hook
    dist.destroy_process_group()


def bits_of(stats):
    sent = stats["all_steps"]["bytes"] + stats.get("optimizer", {}).get("pool_bytes", 0)
    return 32 * sent / stats["all_steps"]["fp32_bytes"]


def name_of(label, seed):
    return "".join(c if c.isalnum() else "-" for c in label) + f".{seed}.json"


def run_all(options):
    """Forks of this process, which has imported torch and has not touched the GPU."""
    todo = [(label, seed) for label in options.rows for seed in range(1, options.seeds + 1)]
    todo = [job for job in todo if not (options.out / name_of(*job)).exists()]
    running = []
    while todo or running:
        while todo and len(running) < options.jobs:
            label, seed = todo.pop(0)
            given = argparse.Namespace(**{**vars(options), "seed": seed})
            store = tempfile.mktemp(prefix="adam_ddp_")
            ranks = mp.start_processes(
                train, (label, given, store, str(options.out / name_of(label, seed))), WORLD, join=False,
                start_method="fork",
            )  # fmt: skip
            running.append((label, seed, store, ranks))
        for job in list(running):
            label, seed, store, ranks = job
            try:
                if not ranks.join(timeout=0.2):
                    continue
                print(f"{label}, seed {seed}: done", file=sys.stderr, flush=True)
            except Exception as error:  # a row that fails must not take the others along
                print(f"{label}, seed {seed}: {str(error).strip().splitlines()[-1]}", file=sys.stderr, flush=True)
            running.remove(job)
            Path(store).unlink(missing_ok=True)


def show(options, record, command):
    found = {label: {} for label in ROWS}
    for file in sorted(options.out.glob("*.json")):
        run = json.loads(file.read_text())
        found[run["label"]][run["seed"]] = run
    plain = found["plain DDP"]
    print("| what is exchanged | bits | validation loss | over plain DDP | ms a step |")
    print("|---|---|---|---|---|")
    for label, runs in found.items():
        if not runs:
            continue
        losses = [run["loss"] for run in runs.values()]
        mean, bits = statistics.fmean(losses), statistics.fmean(run["bits"] for run in runs.values())
        step = 1e3 * statistics.median(run["seconds"] for run in runs.values())
        spread = statistics.stdev(losses) if len(losses) > 1 else 0
        note = f"{label}; {len(runs)} seeds; standard deviation {spread:.4f}; {bits:.3f} bits per element both ways"
        record.add(command, "validation_loss", mean, "1", note=note)
        ratios, ratio = [run["loss"] / plain[seed]["loss"] for seed, run in runs.items() if seed in plain], ""
        if label != "plain DDP" and ratios:
            error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
            ratio = f"{statistics.fmean(ratios):.4f} +- {error:.4f}"
            target = f"<= {TARGETS[label]}" if label in TARGETS else ""
            record.add(command, "validation_loss_over_fp32", statistics.fmean(ratios), "1", target,
                       note=f"{label}; paired; standard error {error:.4f}")
        print(f"| {label} | {bits:.2f} | {mean:.4f} | {ratio} | {step:.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="FILE")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", choices=RATES, default="adamw", help="sgd: momentum 0.9, for rows of gradients")
    parser.add_argument("--jobs", type=int, default=1, help="trainings that run side by side")
    parser.add_argument("--rows", action="append", choices=ROWS, help="only these (default: all)")
    parser.add_argument("--machine", help="its name in results.csv, if it is not this one")
    parser.add_argument("--show", action="store_true", help="train nothing: make the table of the runs that are there")
    parser.add_argument("--dry-run", action="store_true", help="show the rows, do not append them to results.csv")
    options = parser.parse_args()
    options.rows = options.rows or list(ROWS)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not options.show:
        run_all(options)
    record = Rows(options.device, options.machine)
    words = ["--text", "FILE", "--out", "DIR", "--size", options.size, "--device", options.device]
    words += ["--optimizer", options.optimizer] if options.optimizer != "adamw" else []
    show(options, record, shlex.join(["python3", "bench/adam_ddp.py", *words, "--steps", str(options.steps)]))
    record.append(options.dry_run)


if __name__ == "__main__":
    main()
