#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results.csv for FSDP2 whose replicas are in different boxes, with the all-reduce between them
compressed and with torch's own; docs/measuring.md says what each one means.

    python3 bench/hsdp.py links --boxes 2 --codec qsgd:bits=4 --codec optquant:bits=4
    python3 bench/hsdp.py error                                           4 bits against those of ZeRO++
    python3 bench/hsdp.py loss --text FILE                                a GPT, beside torch's own all-reduce

`links`: seconds per training step of 2 or 4 boxes with 2 ranks each. A box is a network namespace; what leaves it is
shaped by `tc ... tbf` at both ends of its link, and nothing within it is (root, ip and tc are needed). Ranks of a box
share a model by `fully_shard`, and boxes are its replicas. Collectives within a box take no time, as on NVLink, because
the cores of one machine that move all of those bytes through sockets would hide what the link costs (--inside gloo
keeps them). All variants live in the same processes and take turns:
"none" (reduced within boxes only), "bf16" and "fp32" (torch's own, with this reduce_dtype), and one per --codec. At
each rate the step has next to no compute; at the rates of --compute-rates it is measured again with --compute-ms of
waiting a rank, as a host does while an accelerator computes.

Share hidden: 1 - (t_with - t_none) / t_alone, as in bench/ddp.py.

`error`: the squared relative error of the mean gradient of a small GPT, in one step. "qgz" is the rule of ZeRO++ again:
4 bits in blocks with a scale each, all ranks of a box to each other, summed, 4 bits again, all boxes to each other.

`loss`: the losses of a small GPT after equally many steps (hsdp_loss.py).
"""

import argparse
import importlib
import signal
import statistics
import sys
from pathlib import Path

from netns import Network, refuse_without_means
from rows import BENCH, Rows, load_note
from turns import Ranks, Turns, burst_of, made_by, variant_of

SHARDS = 2  # ranks of a box
RIVALS = [{"name": "none", "kind": "none"}, {"name": "bf16", "kind": "bf16"}, {"name": "fp32", "kind": "fp32"}]
STEP = {"1gbit": (">= 2.2", ">= 4"), "100mbit": (">= 3.3", ">= 6.5")}  # over bf16, over fp32


def show(turns, title):
    print(f"\n{title}; {load_note()}")
    print(
        f"{'variant':<24} {'s/step':>8} {'least':>8} {'most':>8} {'bf16/it':>8} {'fp32/it':>8} {'MB a box':>9} "
        f"{'turns':>5}"
    )
    for name, seconds in turns.seconds.items():
        print(
            f"{name:<24} {turns.median(name):>8.4f} {min(seconds.values()):>8.4f} {max(seconds.values()):>8.4f} "
            f"{turns.ratio('bf16', name):>8.2f} {turns.ratio('fp32', name):>8.2f} "
            f"{statistics.median(turns.sent[name]) / 1e6:>9.2f} {len(seconds):>5}",
            flush=True,
        )


def link_rows(rows, rate, turns, codecs, command, compute, note):
    suffix = "_compute" if compute else ""
    sent = {name: statistics.median(values) for name, values in turns.sent.items()}
    for name, seconds in turns.seconds.items():
        of = made_by("hsdp.py", command, name, codecs)
        spread = f"median of {len(seconds)} blocks, {min(seconds.values()):.3f} to {max(seconds.values()):.3f}; {note}"
        rows.add(of, f"step_s{suffix}", turns.median(name), "s", note=spread)
        if compute or name == "none":
            continue
        added = turns.median(name) - turns.median("none")
        rows.add(of, "communication_s", added, "s", note="the step less that of a step without an all-reduce")
        what = "left the interface of a box in a step, heads and acknowledgements included"
        rows.add(of, "sent_bytes", sent[name], "B", note=what)
        if name not in codecs:
            continue
        over_bf16, over_fp32 = STEP.get(rate, ("", ""))
        rows.add(of, "bytes_of_bf16", sent[name] / sent["bf16"], "1", f"<= {1 / 3.8:.4f}", "what leaves a box")
        rows.add(of, "bytes_of_fp32", sent[name] / sent["fp32"], "1", f"<= {1 / 7.5:.4f}", "what leaves a box")
        median = "median of the ratios to neighbouring blocks"
        rows.add(of, "speedup_over_bf16", turns.ratio("bf16", name), "1", over_bf16, median)
        rows.add(of, "speedup_over_fp32", turns.ratio("fp32", name), "1", over_fp32, median)


def hidden_rows(rows, rate, alone, together, codecs, command, note):
    for name in alone.seconds:
        if name == "none":
            continue
        cost = alone.median(name) - alone.median("none")
        left = together.median(name) - together.median("none")
        rows.add(
            made_by("hsdp.py", command, name, codecs),
            "hidden",
            1 - left / cost,
            "1",
            ">= 0.6" if name in codecs else "",
            f"{left:.3f} s left of {cost:.3f} s beside {together.median('none'):.3f} s without an all-reduce; {note}",
        )


def links(options):
    refuse_without_means("hsdp.py")
    rows = Rows()
    codecs = [variant_of(text) for text in options.codec]
    labels = [variant["name"] for variant in codecs]
    names = [variant["name"] for variant in RIVALS + codecs]
    world = SHARDS * options.boxes
    with (
        Network(options.boxes) as network,
        Ranks(
            "hsdp_worker.py", world, lambda rank: network.where(rank // SHARDS), "eth0", network.address(0), options
        ) as ranks,
    ):
        made = ranks.ask({"make": RIVALS + codecs, "inside": options.inside}, options.timeout + 120)[0]
        print(f"{made['parameters']} parameters, {options.boxes} boxes of {SHARDS}; {load_note()}", file=sys.stderr)
        for rate in options.rates:
            network.shape(None if rate == "none" else rate, burst_of(rate))
            command = f"links --boxes {options.boxes} --rates {rate}"
            command += "" if options.inside == "instant" else f" --inside {options.inside}"
            alone = Turns().take(ranks, names, False, options)
            note = f"{alone.rounds} rounds; {load_note()}"
            show(alone, f"{options.boxes} boxes, {rate}, no compute, {alone.rounds} rounds")
            link_rows(rows, rate, alone, labels, command, False, note)
            if rate in options.compute_rates:
                together = Turns().take(ranks, names, True, options)
                show(together, f"{options.boxes} boxes, {rate}, {options.compute_ms:g} ms of waiting")
                command += f" --compute-rates {rate} --compute-ms {options.compute_ms:g}"
                link_rows(rows, rate, together, labels, command, True, note)
                hidden_rows(rows, rate, alone, together, labels, command, note)
        if options.memory:
            memory = ranks.ask({"memory": options.memory}, options.timeout + 60)[0]
            rows.add(
                f"python3 bench/hsdp.py links --boxes {options.boxes} --memory {options.memory}",
                "residual_of_whole",
                memory["sharded"] / memory["whole"],
                "1",
                f"<= {1 / SHARDS:g}",
                f"{memory['sharded']} bytes of residuals on a rank, {memory['whole']} without shards",
            )
    rows.append(options.dry_run)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["links", "error", "loss"])
    parser.add_argument("--dry-run", action="store_true", help="show the rows and append nothing")
    parser.add_argument("--boxes", type=int, default=2)
    group = parser.add_argument_group("links")
    group.add_argument("--codec", action="append", default=[], help="a codec, and arguments of compress")
    group.add_argument(
        "--inside",
        choices=["instant", "gloo"],
        default="instant",
        help="collectives within a box: stand-ins that take no time, or Gloo's, which take most of two cores",
    )
    group.add_argument("--timeout", type=float, default=120, help="seconds that a collective may take")
    group.add_argument("--rates", type=lambda text: text.split(","), default=["1gbit", "100mbit"])
    group.add_argument("--rounds", type=int, default=7, help="turns of every variant")
    group.add_argument("--steps", type=int, default=2, help="steps of a block; one where a step is slow")
    group.add_argument("--seconds", type=float, default=40, help="no new round after this long, once five are done")
    group.add_argument("--patience", type=float, default=1.5, help="a slower variant gets every third turn")
    group.add_argument("--compute-ms", type=float, default=200)
    group.add_argument("--compute-kind", choices=["wait"], default="wait", help="it takes no core")
    group.add_argument("--compute-rates", type=lambda text: text.split(",") if text else [], default=["1gbit"])
    group.add_argument("--memory", default="topk:ratio=0.03", help="a codec whose residuals are counted; '': none")
    group = parser.add_argument_group("error and loss")
    group.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    group.add_argument("--text", metavar="FILE", help="what the GPT of `loss` reads: any file of UTF-8")
    group.add_argument("--train-steps", dest="train_steps", type=int, default=600, help="of a training of `loss`")
    options = parser.parse_args()

    def stop(number, _):
        raise KeyboardInterrupt(signal.Signals(number).name)  # so that namespaces and processes are cleaned up

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    try:
        if options.what == "links":
            links(options)
        else:
            sys.path.insert(0, str(Path(__file__).resolve().parent))
            importlib.import_module(f"hsdp_{options.what}").main(options)
    except KeyboardInterrupt:
        sys.exit("hsdp.py: stopped; processes and namespaces are gone, no rows were appended")
    if not options.dry_run:
        print(f"appended to {BENCH / 'results.csv'}", file=sys.stderr)


if __name__ == "__main__":
    main()
