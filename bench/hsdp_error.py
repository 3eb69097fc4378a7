# SPDX-License-Identifier: Apache-2.0
"""The `error` of bench/hsdp.py: what 4 bits leave of the mean gradient of a small GPT, in one step.

    qgz          ZeRO++: every rank sends 4 bits within its box; the sums of the boxes are sent in 4 bits between them.
                 DeepSpeed's rule: groups of numel / max(rows, columns, ranks) elements, each with the scale 2 max / 16
    a codec      gradients are summed exactly within a box, and sent compressed between boxes. `error_of_qgz`: as the
                 owners of shards see the mean, which is all that qgz computes. `both_ways_of_qgz`: as all boxes see it,
                 after the mean was sent back compressed. qgz has no error feedback; a codec has what it has by default,
                 unless its text ends in feedback=false owner_feedback=false
    ideal        as a codec, with the best 16 levels for every 128 elements, in tables that nobody sends. A box that
                 rounds its elements to the nearest level by itself can have no smaller error with 4 bits
"""

import math
import shlex
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from rows import Rows
from turns import variant_of

SHARDS = 2
LENGTH = 64


def four_bits(values, group):
    rows = values.reshape(-1, group)
    step = (2 * rows.abs().amax(1, keepdim=True) / 16).clamp_min(1e-30)
    return ((rows / step).round().clamp(-8, 7) * step).reshape(values.shape)


def group_of(values, ranks):
    groups = math.gcd(values.numel(), max(*values.shape, ranks))
    return values.numel() // groups


def qgz(gradients, boxes):
    """gradients[rank]: one parameter. The mean as every owner has it."""
    group = group_of(gradients[0], len(gradients))
    sums = [sum(four_bits(gradients[SHARDS * box + i], group) for i in range(SHARDS)) for box in range(boxes)]
    return sum(four_bits(one, group) for one in sums) / len(gradients)


def ideal(values, group=128, levels=16):
    """Every value at the mean of those that share its level. k-means of each group, exactly: least[j] is the least sum
    of squared distances of its first j values in order, with one level more in every round."""
    flat = F.pad(values.flatten(), (0, -values.numel() % group)).reshape(-1, group).double()
    found = torch.empty_like(flat)
    count = torch.arange(group + 1).double()
    width = (count - count[:, None]).clamp_min(1)  # of the cell from i to j
    for rows, into in zip(flat.split(128), found.split(128)):
        ordered, order = rows.sort(1)
        sums = F.pad(ordered.cumsum(1), (1, 0))
        squares = F.pad(ordered.square().cumsum(1), (1, 0))
        cost = squares[:, None] - squares[:, :, None] - (sums[:, None] - sums[:, :, None]).square() / width
        cost.masked_fill_(count <= count[:, None], math.inf)
        cost.diagonal(dim1=1, dim2=2).zero_()  # a level that is not used
        least, begins = cost[:, 0], []
        for _ in range(levels - 1):
            least, begin = (least[:, :, None] + cost).min(1)
            begins.append(begin)
        end = torch.full((len(rows), 1), group)
        means = torch.zeros_like(rows)
        for begin in [*reversed(begins), torch.zeros_like(order[:, :1]).expand(-1, group + 1)]:
            first = begin.gather(1, end)
            mean = (sums.gather(1, end) - sums.gather(1, first)) / (end - first).clamp_min(1)
            place = torch.arange(group)
            means = torch.where((place >= first) & (place < end), mean, means)
            end = first
        into.scatter_(1, order, means)
    return found.flatten()[: values.numel()].reshape(values.shape)


class Replicas:
    """The exchange of a codec between boxes, in one process. With "gather" there is no way back: the result is what
    owners have with "scatter", before they send it."""

    def __init__(self, text, shapes, boxes, method):
        from gradwire import _core

        codec, switches = variant_of(text)["codec"], variant_of(text)["options"]
        switches = {name: "on" if value else "off" for name, value in switches.items()}
        tensors = [(name, math.prod(shape), "f32", len(shape)) for name, shape in shapes.items()]
        self.models = [
            _core.ModelCoder(tensors, up=f"*={codec}", method=method, rank=box, world=boxes, **switches)
            for box in range(boxes)
        ]
        self.coders = [_core.BucketCoder(model, list(range(len(tensors))), _core.Device()) for model in self.models]
        self.step = 0

    def mean(self, means):
        """means[box][parameter]: the mean of each parameter over the boxes."""
        sent = []
        for model, coder, box in zip(self.models, self.coders, means):
            model.begin(self.step)
            coder.begin()
            buffer = torch.empty(sum(coder.up_send), dtype=torch.uint8)
            coder.encode_up([one.data_ptr() for one in box], buffer.data_ptr(), buffer.numel())
            sent.append(buffer.split(coder.up_send))
        results = [[torch.empty_like(one) for one in box] for box in means]
        places = [[one.data_ptr() for one in result] for result in results]
        down = []
        for box, coder in enumerate(self.coders):
            received = torch.cat([one[box] for one in sent])
            coder.decode_up(received.data_ptr(), received.numel(), [] if coder.down_recv else places[box])
            if coder.down_recv:
                down.append(torch.empty(coder.down_recv[box], dtype=torch.uint8))
                coder.encode_down(down[-1].data_ptr(), down[-1].numel())
        for box, coder in enumerate(self.coders) if down else ():
            every = torch.cat(down)
            coder.decode_down(every.data_ptr(), every.numel(), places[box])
        for model in self.models:
            model.end()
        stats = [model.stats() for model in self.models]
        for model in self.models if stats[0] is not None else ():
            model.learn(b"".join(stats))
        self.step += 1
        return results[0]


def gpt(seed):
    """A model that was trained for a moment, and a function that gives the gradients of a batch."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from ddp_gpt import GPT

    torch.manual_seed(seed)
    model = GPT(2, 128, 4, LENGTH)
    text = (Path(__file__).parent.parent / "LICENSE").read_bytes()  # one that does not change
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(seed)

    def gradients(sequences=4):
        starts = torch.randint(len(data) - LENGTH - 1, (sequences,), generator=draw).tolist()
        x = torch.stack([data[start : start + LENGTH] for start in starts])
        y = torch.stack([data[start + 1 : start + LENGTH + 1] for start in starts])
        model.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.dim() == 2}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(30):
        gradients()
        optimizer.step()
    return gradients


def relative(found, exact):
    lost = sum((found[name].double() - exact[name].double()).square().sum() for name in exact)
    return float(lost / sum(one.double().square().sum() for one in exact.values()))


def measure(seed, boxes, codecs):
    """{(method, "qgz" or codec): squared relative error}"""
    gradients = gpt(seed)
    shapes = {name: tuple(one.shape) for name, one in gradients().items()}
    coded = {
        (method, codec): Replicas(codec, shapes, boxes, method) for codec in codecs for method in ("gather", "scatter")
    }
    errors = {}
    for _ in range(4):  # codecs learn from the steps before
        ranks = [gradients() for _ in range(SHARDS * boxes)]
        exact = {name: sum(one[name].double() for one in ranks) / len(ranks) for name in shapes}
        means = [
            [(ranks[SHARDS * box][name] + ranks[SHARDS * box + 1][name]) / SHARDS for name in shapes]
            for box in range(boxes)
        ]
        for key, replicas in coded.items():
            errors[key] = relative(dict(zip(shapes, replicas.mean(means))), exact)
        errors["gather", "qgz"] = relative({name: qgz([one[name] for one in ranks], boxes) for name in shapes}, exact)
    best = {name: sum(ideal(box[i]) for box in means) / boxes for i, name in enumerate(shapes)}
    return errors | {("gather", "ideal"): relative(best, exact)}


def add_mean(rows, command, metric, values, target="", note=""):
    """The mean over seeds, with its standard error and the median in the note."""
    spread = f"mean over {len(values)} seeds"
    if len(values) > 1:
        spread += f"; standard error {statistics.stdev(values) / math.sqrt(len(values)):.3g}"
    rows.add(command, metric, statistics.fmean(values), "1", target,
             f"{note}; {spread}; median {statistics.median(values):.4g}")  # fmt: skip


def main(options):
    torch.set_num_threads(1)
    rows = Rows()
    codecs = options.codec or [
        "qsgd:bits=4",
        "optquant:bits=4",
        "optquant:bits=4,bucket=128",
        "optquant:bits=4,bucket=128,mode=biased",
        "optquant:bits=4,bucket=128,mode=biased feedback=false owner_feedback=false",
    ]
    found = [measure(seed, options.boxes, codecs) for seed in options.seeds]
    seeds = ",".join(map(str, options.seeds))
    note = f"of the mean gradient of a small GPT, {options.boxes} boxes of {SHARDS}; seeds {seeds}"
    command = f"python3 bench/hsdp.py error --boxes {options.boxes}"
    command += "" if options.seeds == [1, 2, 3] else f" --seeds {seeds}"
    for name in ["qgz", "ideal", *codecs]:
        of = f"{command} --codec {shlex.quote(name)}" if name in codecs else f"{command} [{name}]"
        add_mean(rows, of, "squared_error", [one["gather", name] for one in found], note=note)
        if name == "qgz":
            continue
        for method, metric in (("gather", "error_of_qgz"), ("scatter", "both_ways_of_qgz")):
            if (method, name) not in found[0]:
                continue
            ratios = [one[method, name] / one["gather", "qgz"] for one in found]
            target = "<= 0.5" if name in codecs else ""
            add_mean(rows, of, metric, ratios, target, "squared error over that of ZeRO++'s 4 bits")
    rows.append(options.dry_run)
