#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small GPT on the bytes of a text, gradients compressed by gradwire; with --fsdp, weights too.

    torchrun --nproc-per-node 4 examples/ddp_gpt.py --codec optquant:bits=4
    torchrun --nproc-per-node 4 examples/ddp_gpt.py --codec onebit                      one bit per element
    torchrun --nproc-per-node 4 examples/ddp_gpt.py --codec none                        plain DDP, to compare with
    torchrun --nproc-per-node 4 examples/ddp_gpt.py --text book.txt --steps 2000 --layers 6 --width 384 --device cuda \\
        --compile
    torchrun --nproc-per-node 4 examples/ddp_gpt.py --fsdp --codec qsgd:bits=4 --weights unigrid:bits=8

Without --text it reads this project's own pages (README.md and docs/*.md), which are enough to see a loss fall and too
few to learn a language from. The last tenth of the text is held out. Losses are in nats per byte: 5.55 knows nothing,
and a model that has learned English spelling is below 1.6. What differs from an ordinary training is
`gw.compress` in `compressed`.
"""

import argparse
import gc
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


# The model.


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.to_qkv(self.norm1(x)).chunk(3, dim=2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.from_heads(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, for every place the logits of the byte that follows."""

    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.context = context
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.guess = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text):
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.guess(self.norm(x))


# The training.


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", metavar="FILE", help="what to learn; without it, this project's README.md and docs/*.md"
    )
    parser.add_argument(
        "--codec",
        default="optquant:bits=4",
        help="a codec or rules for gradients (python -m gradwire codecs lists the codecs), or none",
    )
    parser.add_argument(
        "--warmup", type=int, help="first steps with more bits (uncompressed, if the codec has no error feedback)"
    )
    parser.add_argument(
        "--fsdp", action="store_true", help="shard the model over the ranks (FSDP2) instead of copying it to each"
    )
    parser.add_argument(
        "--weights",
        default="none",
        help="with --fsdp: a codec or rules for the weights that are gathered, such as unigrid:bits=8, or none",
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, on all ranks together")
    parser.add_argument("--context", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="write N bytes at the end; not with --fsdp")
    parser.add_argument("--json", action="store_true", help="a last line for programs")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start it with torchrun, which gives every rank its number: torchrun --nproc-per-node 4 "
            "examples/ddp_gpt.py ..."
        )
    if options.weights != "none" and not options.fsdp:
        parser.error("--weights: only --fsdp sends weights; DDP holds all of them on every rank")
    if options.fsdp and (options.sample or options.warmup):
        parser.error("--sample and --warmup do not go with --fsdp")
    return options


def text_of(options, device):
    """(to train with, held out), as bytes."""
    project = Path(__file__).resolve().parent.parent
    files = [Path(options.text)] if options.text else [project / "README.md", *sorted((project / "docs").glob("*.md"))]
    data = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).to(device)
    cut = len(data) * 9 // 10
    if len(data) - cut <= options.context:
        raise SystemExit(
            f"--text: {len(data)} bytes are too few for --context {options.context}; more than {10 * options.context} "
            "expected"
        )
    return data[:cut], data[cut:]


def sequences(data, starts, context):
    """Bytes from the starts, and the bytes that follow each."""
    places = starts.to(data.device).unsqueeze(1) + torch.arange(context + 1, device=data.device)
    text = data[places].long()
    return text[:, :-1], text[:, 1:]


def parallel(model, options):
    """The model over all ranks."""
    if not options.fsdp:
        return DDP(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compressed(model, optimizer, options):
    """The hook that compresses gradients (and weights), if there is one."""
    codec, weights = (None if given == "none" else given for given in (options.codec, options.weights))
    if codec is None and weights is None:
        return None
    import gradwire.torch as gw
    if options.fsdp:
        return gw.compress(model, codec, weights=weights, seed=options.seed)
    # Codecs with error feedback need to know the Adam; for the others it is left alone.
    return gw.compress(model, codec, optimizer=optimizer, steps=options.steps, warmup=options.warmup, seed=options.seed)


def loss_of(model, text, following):
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


def held_out_loss(model, data, context, rank, world):
    """The mean over up to 64 sequences of the held-out text. Each rank computes a part of them."""
    starts = torch.linspace(0, len(data) - context - 1, 64).long()[rank::world]
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, *sequences(data, some, context)) * len(some) for some in starts.split(16)]
    sums = torch.stack(losses).sum()
    model.train()
    both = torch.stack([sums, torch.tensor(float(len(starts)), device=sums.device)])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def sent(hook, options, count, world):
    """Bits per element and bytes that a rank sends in a step; for plain DDP as a ring of all ranks would. What FSDP
    sends is in hook.stats()."""
    if options.fsdp:
        return {}
    if hook is None:
        return {"bits": 32.0, "bytes": 2 * (world - 1) / world * 4 * count}
    stats = hook.stats()
    return {"bits": stats["bits"], "bytes": stats["last_step"]["bytes"]}


def train(options, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % world:
        raise SystemExit(f"--batch {options.batch}: a multiple of the number of ranks expected, which is {world}")
    learn, held_out = text_of(options, device)
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.context).to(device)
    count = sum(parameter.numel() for parameter in model.parameters())
    model = parallel(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    hook = compressed(model, optimizer, options)
    if options.compile:
        model = torch.compile(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.steps, pct_start=0.1, cycle_momentum=False
    )
    draw = torch.Generator().manual_seed(1000 * options.seed + rank)
    if rank == 0:
        print(f"{count} parameters, {len(learn)} bytes to learn from, {world} ranks, codec {options.codec}", flush=True)
    began, report, losses = time.perf_counter(), {}, []
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(learn) - options.context, (options.batch // world,), generator=draw)
        loss = loss_of(model, *sequences(learn, starts, options.context))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % max(1, options.steps // 10) == 0 or step == options.steps:
            mean = torch.stack(losses).mean()  # of the steps since the last line
            dist.all_reduce(mean)
            losses = []
            report = {"step": step, "loss": mean.item() / world,
                      "held_out_loss": held_out_loss(model, held_out, options.context, rank, world),
                      "seconds": time.perf_counter() - began, **sent(hook, options, count, world)}
            line = "step {step:5d}   loss {loss:.4f}   held out {held_out_loss:.4f}   {seconds:.1f} s"
            if "bits" in report:
                line += "   {bits:.2f} bits per element, {bytes:.0f} bytes per step"
            if rank == 0:
                print(line.format(**report), flush=True)
    if options.json and rank == 0:
        print(
            json.dumps({**vars(options), "world": world, "backend": dist.get_backend(), "parameters": count, **report}),
            flush=True,
        )
    if options.sample and rank == 0:
        print(written(getattr(model, "module", model), held_out[: options.context // 2], options), flush=True)


def written(model, start, options):
    """The start, and what the model thinks comes next."""
    text, draw = start.long().unsqueeze(0), torch.Generator(start.device).manual_seed(options.seed)
    with torch.no_grad():
        for _ in range(options.sample):
            likely = F.softmax(model(text[:, -options.context:])[0, -1] / 0.8, dim=0)
            text = torch.cat([text, torch.multinomial(likely, 1, generator=draw).unsqueeze(0)], dim=1)
    return bytes(text[0].tolist()).decode("utf-8", errors="replace")


def main():
    options = arguments()
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if options.device == "cuda":
        if torch.cuda.device_count() == 0:
            raise SystemExit("--device cuda: torch finds no GPU")
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    # Ranks that share a GPU use Gloo, because NCCL wants one for each.
    dist.init_process_group("nccl" if device.type == "cuda" and here <= torch.cuda.device_count() else "gloo")
    try:
        train(options, device)
    finally:
        # A DDP that is still referenced keeps threads of Gloo alive, and Python 3.11 may abort if one of them outlives
        # it.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
