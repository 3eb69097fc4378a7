#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results.csv for PyTorch's DistributedDataParallel with gradwire's hook and with torch's own;
docs/measuring.md says what each one means.

    python3 bench/ddp.py links --codec optquant:bits=4 --codec optquant:bits=2 --codec onebit
    python3 bench/ddp.py loss  --codec onebit --codec topk:ratio=0.025 --codec fft:theta=0.9,bits=9
    python3 bench/ddp.py links --codec lowrank:rank=4                     beside torch's PowerSGD of rank 4
    python3 bench/ddp.py links --boxes 2 --codec qsgd:bits=4 --codec "qsgd:bits=4 nodes=2"
    python3 bench/ddp.py links --rates none --rounds 3 --dry-run          torch's own hooks only, nothing appended

`links`: seconds per training step of 4 ranks, each in a network namespace of its own, joined by a bridge and shaped by
`tc ... tbf` at both ends of every link (root, ip and tc are needed). With --boxes 2 there are two namespaces with two
ranks each, and what ranks of one namespace send to each other is not shaped. All variants live in the same four processes and
take turns: "none" (no communication), "fp32" (plain DDP), "fp16" (torch's hook), "powersgd4" (torch's, rank 4, one
bucket), and one per --codec. Ratios are taken to the neighbouring block of the other variant, and their median is
reported. At each rate the step has next to no compute; at the rates of --compute-rates it is measured again with
--compute-ms of compute a rank. A variant whose step takes longer than --patience seconds gets every third turn only.

Overlap of a variant with what is computed: 1 - (t_with - t_none) / t_alone. t_with is its step with compute, t_none the
step with compute and no communication, t_alone the same difference without compute. 1: communication cost no time; 0:
all of it was waited for.

`loss`: a real training (Fashion-MNIST, small convolutional network, 4 ranks over loopback, no shaping), the same steps
for all: "fp32", "fp16", "powersgd4", and one per --codec.

A --codec is a codec, which may be followed by arguments of gradwire.torch.compress, and by bucket_cap_mb of DDP:
--codec "onebit down=qsgd:bits=4 bucket_cap_mb=4". Run it with the Python that has torch. GRADWIRE_BIN names the
program, which is asked for the machine's name only.
"""

import argparse
import json
import shlex
import signal
import statistics
import sys
from pathlib import Path

from netns import Network, refuse_without_means
from rows import BENCH, Rows, load_note, paired
from turns import Ranks, Turns, burst_of, made_by, variant_of

WORLD = 4
RIVALS = [
    {"name": "none", "kind": "none"},
    {"name": "fp32", "kind": "fp32"},
    {"name": "fp16", "kind": "fp16"},
    {"name": "powersgd4", "kind": "powersgd", "rank": 4},
]


# Links.


def show(turns, title):
    print(f"\n{title}; {load_note()}")
    print(
        f"{'variant':<36} {'s/step':>8} {'least':>8} {'most':>8} {'of fp32':>8} {'fp32/it':>8} {'MB sent':>8} "
        f"{'bits':>6} {'encode':>7} {'wait':>7} {'decode':>7} {'turns':>5}"
    )
    for name, seconds in turns.seconds.items():
        ratio = turns.ratio(name, "fp32")
        last = turns.last[name]
        bits = f"{last['bits']:.2f}" if "bits" in last else ""
        split = " " * 24
        if "split" in last:
            split = "".join(f" {last['split'][part]:>7.3f}" for part in ("encode", "wait", "decode"))
        print(
            f"{name:<36} {turns.median(name):>8.4f} {min(seconds.values()):>8.4f} {max(seconds.values()):>8.4f} "
            f"{ratio:>8.3f} {1 / ratio:>8.2f} "
            f"{statistics.median(turns.sent[name]) / 1e6:>8.2f} {bits:>6}{split} {len(seconds):>5}",
            flush=True,
        )


def wanted_speedup(rate, bits):
    """The bound on fp32's time over this one's, for the number of bits."""
    if bits is None:
        return ""
    if 3.5 < bits < 5:
        return {"1gbit": ">= 3.5", "100mbit": ">= 7", "none": ">= 1"}.get(rate, "")
    if 1.6 < bits < 3:
        return {"100mbit": ">= 12"}.get(rate, "")
    return ""


def wanted_step(rate, name):
    """The bound on the seconds of a step with lowrank."""
    return {"100mbit": "<= 0.2", "1gbit": "<= 0.14"}.get(rate, "") if name.startswith("lowrank") else ""


def link_rows(rows, rate, turns, codecs, command, compute, note, boxes):
    of_whom = "rank" if boxes == WORLD else "box"
    note = f"{turns.rounds} rounds; {note}"
    suffix = "_compute" if compute else ""
    for name, seconds in turns.seconds.items():
        bits = turns.bits(name)
        of = made_by("ddp.py", command, name, codecs)
        rows.add(
            of,
            f"step_s{suffix}",
            turns.median(name),
            "s",
            "" if compute or boxes < WORLD else wanted_step(rate, name),
            note=f"median of {len(seconds)} blocks, {min(seconds.values()):.3f} to {max(seconds.values()):.3f}; {note}",
        )
        if compute or name in ("none", "fp32"):
            continue
        rows.add(
            of,
            "speedup_over_fp32",
            1 / turns.ratio(name, "fp32"),
            "1",
            wanted_speedup(rate, bits) if boxes == WORLD else "",
            "median of the ratios to neighbouring blocks",
        )
        rows.add(
            of,
            "sent_bytes",
            statistics.median(turns.sent[name]),
            "B",
            note=f"left the interface of a {of_whom} in a step, heads and acknowledgements included; mean over all",
        )
        if name in codecs:
            rows.add(of, "bits_per_element", bits, "bit", note="sent up, as the hook counts")
            bound, meaning = "", ""
            if boxes < WORLD:
                pass  # the targets are for ranks that share no box
            elif rate == "1gbit" and 3.5 < bits < 5:
                bound, meaning = "<= 0.8", "; 'well below' is taken as 0.8"
            elif rate == "100mbit" and bits <= 1.5:
                bound = "<= 1"
                meaning = "; wanted of one codec of at most 1.5 bits, whose loss must be equal too (`loss`)"
            rows.add(
                of,
                "of_powersgd4",
                turns.ratio(name, "powersgd4"),
                "1",
                bound,
                "step over that of PowerSGD rank 4" + meaning,
            )


def overlap_rows(rows, rate, alone, together, codecs, command, note, boxes):
    print()
    for name in alone.seconds:
        if name == "none":
            continue
        cost = alone.median(name) - alone.median("none")
        left = together.median(name) - together.median("none")
        bits = alone.bits(name)
        bound = ">= 0.6" if rate == "1gbit" and boxes == WORLD and name in codecs and 3.5 < bits < 5 else ""
        rows.add(
            made_by("ddp.py", command, name, codecs),
            "overlap",
            1 - left / cost,
            "1",
            bound,
            f"{left:.3f} s left of {cost:.3f} s beside {together.median('none'):.3f} s of compute; {note}",
        )


def plain_rate(ranks, rate, boxes):
    """From the first rank of another box."""
    size = {"1gbit": 40_000_000, "100mbit": 6_000_000}.get(rate, 200_000_000)
    return ranks.ask({"plain": size, "from": WORLD // boxes if boxes > 1 else 1})[0]["rate"]


def links(options):
    refuse_without_means("ddp.py")
    rows = Rows()
    codecs = [variant_of(text) for text in options.codec]
    names = [variant["name"] for variant in RIVALS + codecs]
    boxes = options.boxes
    with (
        Network(boxes) as network,
        Ranks(
            "ddp_worker.py",
            WORLD,
            lambda rank: network.where(rank * boxes // WORLD),
            "eth0",
            network.address(0),
            options,
        ) as ranks,
    ):
        made = ranks.ask({"make": RIVALS + codecs}, options.timeout + 60)[0]
        print(f"{made['parameters']} parameters, {WORLD} ranks; {load_note()}", file=sys.stderr)
        for rate in options.rates:
            network.shape(None if rate == "none" else rate, burst_of(rate))
            plain = plain_rate(ranks, rate, boxes)
            shaping = "no shaping" if rate == "none" else f"tc tbf rate {rate}"
            note = f"a plain TCP stream gets {8 * plain / 1e6:.0f} Mb/s; {load_note()}"
            command = f"links --rates {rate}" + ("" if boxes == WORLD else f" --boxes {boxes}")
            alone = Turns().take(ranks, names, False, options)
            show(alone, f"{shaping}, plain TCP {8 * plain / 1e6:.0f} Mb/s, no compute, {alone.rounds} rounds")
            link_rows(rows, rate, alone, [variant["name"] for variant in codecs], command, False, note, boxes)
            if rate in options.compute_rates:
                together = Turns().take(ranks, names, True, options)
                what = f"{options.compute_ms:g} ms of {options.compute_kind} a rank"
                show(together, f"{shaping}, {what}, {together.rounds} rounds")
                command += f" --compute-rates {rate} --compute-ms {options.compute_ms:g}"
                command += f" --compute-kind {options.compute_kind}"
                link_rows(rows, rate, together, [variant["name"] for variant in codecs], command, True, note, boxes)
                overlap_rows(rows, rate, alone, together, [variant["name"] for variant in codecs], command, note, boxes)
    rows.append(options.dry_run)


# Loss.


def wanted_loss(name, bits):
    """The bound on the training loss over PowerSGD's, and what it is for."""
    if name == "topk:ratio=0.03,bits=2":
        return "<= 1", "wanted of at most 0.35 bits up"
    if bits < 1 and name.startswith(("lowrank", "topk")):
        return "<= 1.01", "wanted of lowrank and topk below one bit"
    if bits <= 1.5:
        return "<= 1.02", "wanted of one codec that is faster at 100 Mb/s too (of_powersgd4 in `links`)"
    return "", ""


def finished(options, variant, seed):
    """Where a run is kept."""
    name = "".join(c if c.isalnum() else "-" for c in f"{variant['name']} {options.train_steps} {options.batch}")
    return options.out / f"{name}-{options.rate:g}.{seed}.json" if options.out else None


def run_or_read(ranks, options, variant, seed, start):
    file = finished(options, variant, seed)
    if file and file.exists():
        return json.loads(file.read_text())
    order = {"train": variant, "steps": options.train_steps, "seed": seed, "start": start}
    answers = ranks.ask({**order, "batch": options.batch, "rate": options.rate}, 900)
    assert len({answer["test_loss"] for answer in answers}) == 1, f"ranks hold different weights: {answers}"
    result = answers[0]
    print(
        f"seed {seed}  {variant['name']:<36} train loss {result['train_loss']:.4f}  "
        f"test loss {result['test_loss']:.4f}  accuracy {result['test_accuracy']:.2f} %  "
        f"{result['step_s'] * 1e3:.1f} ms/step  {result['bits']:.2f} bits; {load_note()}",
        flush=True,
    )
    if file:
        file.write_text(json.dumps(result))
    return result


def loss(options):
    if not Path("/usr/share/datasets/fashion-mnist").exists():
        sys.exit("ddp.py: /usr/share/datasets/fashion-mnist not found (Debian package dataset-fashion-mnist)")
    rows = Rows()
    start = max(2, options.train_steps // 20)
    variants = RIVALS[1:] + [variant_of(text) for text in options.codec]
    for variant in variants:
        if variant["kind"] == "gradwire":
            variant["options"].setdefault("warmup", start)  # as many uncompressed steps as PowerSGD gets
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    results = {variant["name"]: [] for variant in variants}
    with Ranks("ddp_worker.py", WORLD, lambda rank: [], "lo", "127.0.0.1", options) as ranks:
        for seed in options.seeds:
            for variant in variants:
                results[variant["name"]].append(run_or_read(ranks, options, variant, seed, start))
    of = lambda name, what: [result[what] for result in results[name]]
    for name, found in results.items():
        command = made_by(
            "ddp.py",
            f"loss --train-steps {options.train_steps} --batch {options.batch} --rate {options.rate:g}",
            name,
            options.codec,
        )
        seeds = ", ".join(map(str, options.seeds))
        exact = f", {start} uncompressed steps first" if name not in ("fp32", "fp16") else ""
        note = f"mean over seeds {seeds}, {found[0]['parameters']} parameters{exact}; {load_note()}"
        for metric, unit in (("train_loss", "1"), ("test_loss", "1"), ("test_accuracy", "%")):
            rows.add(command, metric, statistics.mean(of(name, metric)), unit, note=note)
        bits, ours = statistics.mean(of(name, "bits")), name in options.codec
        counted = "sent up once it compresses, " + ("as the hook counts" if ours else "by the shapes")
        small = "<= 0.35" if name == "topk:ratio=0.03,bits=2" else ""
        rows.add(command, "bits_per_element", bits, "bit", small, counted)
        if ours:
            ring = 2 * (WORLD - 1) / WORLD * found[0]["parameters"]
            both = [8 * sent / ring for sent in of(name, "bytes")]
            note = "bytes of a step over those of an all-reduce at one byte an element, times 8"
            rows.add(command, "bits_both_ways", statistics.mean(both), "bit", note=note)
        note = "mean of both ways and of all steps, the uncompressed ones too"
        rows.add(command, "bits_of_run", statistics.mean(of(name, "bits_of_run")), "bit", note=note)
        for rival in ("fp32", "powersgd4"):
            if name in (rival, "fp32"):
                continue
            losses = [mine / theirs for mine, theirs in zip(of(name, "train_loss"), of(rival, "train_loss"))]
            bound, why = wanted_loss(name, bits) if ours and rival == "powersgd4" else ("", "")
            paired(rows, command, f"train_loss_of_{rival}", losses, bound, why)
            points = [mine - theirs for mine, theirs in zip(of(name, "test_accuracy"), of(rival, "test_accuracy"))]
            paired(rows, command, f"accuracy_minus_{rival}", points, note="points")
    rows.append(options.dry_run)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["links", "loss"])
    parser.add_argument(
        "--codec",
        action="append",
        default=[],
        help="a codec, and arguments of gradwire.torch.compress; may be given several times",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the rows and append nothing")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a collective may take")
    group = parser.add_argument_group("links")
    group.add_argument(
        "--rates",
        type=lambda text: text.split(","),
        default=["1gbit", "100mbit", "none"],
        help="as tc writes them, with commas; none: not shaped",
    )
    group.add_argument(
        "--boxes", type=int, choices=[1, 2, 4], default=WORLD, help="namespaces, each with equally many of the 4 ranks"
    )
    group.add_argument("--rounds", type=int, default=15, help="turns of every variant")
    group.add_argument("--steps", type=int, default=2, help="steps of a block; one where a step is slow")
    group.add_argument(
        "--seconds",
        type=float,
        default=90,
        help="no new round after this long, once five are done; for each rate and with compute again",
    )
    group.add_argument(
        "--patience", type=float, default=2, help="a variant whose step takes longer gets every third turn"
    )
    group.add_argument(
        "--compute-ms", type=float, default=200, help="compute a step, of one rank that has a core to itself"
    )
    group.add_argument(
        "--compute-kind",
        choices=["matmul", "wait"],
        default="matmul",
        help="matmul: takes a core; wait: takes none, as if an accelerator computed",
    )
    group.add_argument(
        "--compute-rates",
        type=lambda text: text.split(",") if text else [],
        default=["1gbit"],
        help="rates that are measured with compute too",
    )
    group = parser.add_argument_group("loss")
    group.add_argument("--train-steps", type=int, default=600)
    group.add_argument("--batch", type=int, default=64, help="samples of a rank")
    group.add_argument("--rate", type=float, default=0.05, help="learning rate, cosine to zero; momentum 0.9")
    group.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    group.add_argument("--out", type=Path, help="a folder that keeps finished runs, which are not repeated")
    options = parser.parse_args()
    if len(set(options.codec)) < len(options.codec):
        parser.error("--codec: the same one twice")

    def stop(number, _):
        raise KeyboardInterrupt(signal.Signals(number).name)  # so that namespaces and processes are cleaned up

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    try:
        {"links": links, "loss": loss}[options.what](options)
    except KeyboardInterrupt:
        sys.exit("ddp.py: stopped; processes and namespaces are gone, no rows were appended")
    if not options.dry_run:
        print(
            f"appended to {BENCH / 'results.csv'} by: python3 bench/ddp.py {shlex.join(sys.argv[1:])}", file=sys.stderr
        )


if __name__ == "__main__":
    main()
