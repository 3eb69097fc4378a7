# SPDX-License-Identifier: Apache-2.0
"""The `loss` of bench/hsdp.py: what a small GPT learns if the all-reduce between its replicas is compressed.

2 boxes of 2 ranks, as processes over Gloo: FSDP2 shards the GPT of examples/ddp_gpt.py in a box, and boxes are its
replicas. It has 0.8 million parameters and is trained as there: AdamW, one cycle of the learning rate, gradients
clipped at 1. All variants see the same batches. "fp32" and "bf16" are torch's own all-reduce with this reduce_dtype,
the others are codecs; "momentum=true" exchanges Adam's momentum. Quotients are paired by seed. `seed_noise` is the
standard deviation of torch's bf16 over seeds, relative to its mean: what another seed changes.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.multiprocessing as mp
from gpt_example import example
from rows import Rows, load_note, paired, spread
from torch.distributed.device_mesh import init_device_mesh
from turns import variant_of

BOXES, SHARDS = 2, 2
LAYERS, WIDTH, HEADS, CONTEXT, BATCH, RATE = 4, 128, 4, 64, 4, 1e-3  # BATCH: sequences of a rank
NATIVE = {"fp32": None, "bf16": torch.bfloat16}  # reduce_dtype
CODECS = [
    "qsgd:bits=4",
    "optquant:bits=4",
    "dqsgd:budget=4",
    "optquant:bits=4,bucket=128",
    "optquant:bits=4,bucket=128,mode=biased feedback=false owner_feedback=false",
]


def sharded(model, variant, mesh):
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=NATIVE.get(variant))
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    return fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)


def train(rank, variant, seed, options, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=BOXES * SHARDS)
    gpt = example()
    learn, held_out = gpt.text_of(argparse.Namespace(text=options.text, context=CONTEXT), "cpu")
    torch.manual_seed(seed)
    model = gpt.GPT(LAYERS, WIDTH, HEADS, CONTEXT)
    mesh = init_device_mesh("cpu", (BOXES, SHARDS), mesh_dim_names=("replicate", "shard"))
    model = sharded(model, variant, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    hook = None
    if variant not in NATIVE:
        import gradwire.torch as gw

        chosen = variant_of(variant)
        given = chosen["options"]
        if given.pop("momentum", False):
            given["optimizer"] = optimizer
        hook = gw.compress(model, chosen["codec"], steps=options.train_steps, seed=seed, **given)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=options.train_steps, pct_start=0.1, cycle_momentum=False
    )
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    last = []  # losses of the last tenth of the steps
    for step in range(options.train_steps):
        starts = torch.randint(len(learn) - CONTEXT, (BATCH,), generator=draw)
        optimizer.zero_grad(set_to_none=True)
        loss = gpt.loss_of(model, *gpt.sequences(learn, starts, CONTEXT))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step >= options.train_steps * 9 // 10:
            last.append(loss.detach())
    mean = torch.stack(last).mean()
    dist.all_reduce(mean)
    found = {
        "variant": variant,
        "seed": seed,
        "held_out_loss": gpt.held_out_loss(model, held_out, CONTEXT, rank, BOXES * SHARDS),
        "train_loss": mean.item() / (BOXES * SHARDS),
        "bits": {"fp32": 32.0, "bf16": 16.0}.get(variant) or bits_of(hook.stats()),
    }
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    del model, optimizer, hook
    dist.destroy_process_group()


def bits_of(stats):
    """Of an element, the mean of both ways and of all steps, parameters that are sent as fp32 included."""
    return 32 * stats["all_steps"]["bytes"] / stats["all_steps"]["fp32_bytes"]


def trained(variants, options):
    """{variant: {seed: what a training has found}}"""
    runs = {variant: {} for variant in variants}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for variant in variants:
                store, out = Path(folder, "store"), Path(folder, "found.json")
                given = (variant, seed, options, store, out)
                mp.start_processes(train, given, BOXES * SHARDS, start_method="fork")
                runs[variant][seed] = found = json.loads(out.read_text())
                store.unlink(missing_ok=True)
                print(f"seed {seed}, {variant}: held out {found['held_out_loss']:.4f}", file=sys.stderr, flush=True)
    return runs


def add_quotients(rows, of, runs, variant, reference, noise, metric):
    quotients = [run[metric] / runs[reference][seed][metric] for seed, run in runs[variant].items()]
    target = f"<= {1 + noise:.4f}" if variant not in NATIVE and reference == "bf16" and noise == noise else ""
    paired(rows, of, f"{metric}_over_{reference}", quotients, target)


def main(options):
    if not options.text:
        sys.exit("hsdp.py loss: --text FILE expected")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    codecs = options.codec or CODECS
    runs = trained([*NATIVE, *codecs], options)
    rows = Rows()
    seeds = ",".join(map(str, options.seeds))
    command = f"python3 bench/hsdp.py loss --text FILE --train-steps {options.train_steps} --seeds {seeds}"
    for metric in ("held_out_loss", "train_loss"):
        native = [run[metric] for run in runs["bf16"].values()]
        noise = spread(native) / statistics.fmean(native)
        rows.add(f"{command} [bf16]", f"seed_noise_of_{metric}", noise, "1", note=f"{len(native)} seeds; {load_note()}")
        for variant, found in runs.items():
            of = f"{command} [{variant}]" if variant in NATIVE else f"{command} --codec {shlex.quote(variant)}"
            values = [run[metric] for run in found.values()]
            rows.add(of, metric, statistics.fmean(values), "1", note=f"standard deviation {spread(values):.4f}")
            for reference in NATIVE:
                if variant != reference:
                    add_quotients(rows, of, runs, variant, reference, noise, metric)
            if metric == "held_out_loss" and variant not in NATIVE:
                rows.add(of, "bits_of_run", statistics.fmean(run["bits"] for run in found.values()), "bit",
                         note="mean of both ways and of all steps, fp32 parameters included")  # fmt: skip
    rows.append(options.dry_run)
