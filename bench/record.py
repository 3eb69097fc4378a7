#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the standard measurements of docs/measuring.md and appends their rows to bench/results.csv.

Each entry of `standard_set` is a command of the program and what to take from the JSON it prints: a metric, its unit
and, where the project promises something, the bound that must be met. A row says when, on which machine and by which
command a number was made, so that it can be made again.

    python3 bench/record.py                     all rows that this machine can make
    python3 bench/record.py --only threads      commands that contain a word
    python3 bench/record.py --dry-run           print the rows, append nothing
    python3 bench/record.py --list              print the commands, run nothing
"""

import argparse
import csv
import datetime
import json
import operator
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent
COLUMNS = ["date", "machine", "device", "command", "metric", "value", "unit", "target", "met", "note"]
COMPARE = {">=": operator.ge, "<=": operator.le}


class Metric:
    """One number of a JSON row: its name there, its unit, and a target such as '>= 0.65' (or none)."""

    def __init__(self, name, unit, target="", note=""):
        self.name, self.unit, self.target, self.note = name, unit, target, note

    def met(self, value):
        if not self.target:
            return ""
        relation, bound = self.target.split()
        return "yes" if COMPARE[relation](value, float(bound)) else "no"


def overview():
    return [
        Metric("encode_GBps", "GB/s"),
        Metric("feedback_encode_GBps", "GB/s"),
        Metric("decode_GBps", "GB/s"),
        Metric("copy_GBps", "GB/s", note="read + written"),
        Metric("bits_per_element", "bit"),
        Metric("ratio", "1"),
        Metric("error", "1"),
    ]


# What is promised of single codecs. Every codec of the registry is measured; one without a promise as its example says.
CPU_TARGETS = {
    "qsgd:bits=4": {"encode_of_copy": ">= 1.0", "feedback_of_copy": ">= 0.5", "decode_of_copy": ">= 1.4"},
    "optquant:bits=3": {"encode_of_copy": ">= 0.4", "decode_of_copy": ">= 0.7"},
    "loggrid:k=2": {"encode_of_copy": ">= 0.55", "decode_of_copy": ">= 0.7"},
    "unigrid:bits=8": {"encode_of_copy": ">= 0.55", "decode_of_copy": ">= 0.7"},
    "rangefloat:bits=8": {"encode_of_copy": ">= 0.55", "decode_of_copy": ">= 0.7"},
    "casq:bits=2": {"encode_of_copy": ">= 0.12", "decode_of_copy": ">= 0.25"},
    "fft:theta=0.85": {"encode_of_copy": ">= 0.2", "decode_of_copy": ">= 0.2"},
}
CUDA_TARGETS = {
    **{
        f"qsgd:bits={bits}": {
            "limit_fraction_encode": ">= 0.88",
            "limit_fraction_feedback": ">= 0.85",
            "limit_fraction_decode": ">= 0.88" if bits == 4 else ">= 0.85",
        }
        for bits in (4, 2, 8)
    },
    "topk:ratio=0.01": {"encode_GBps": ">= 1000"},
    **{
        f"optquant:bits={bits}": {"encode_GBps": ">= 2800", "feedback_encode_GBps": ">= 1050"}
        for bits in (3, 4)
    },
    "loggrid": {"limit_fraction_encode": ">= 0.8"},
    "unigrid": {"limit_fraction_encode": ">= 0.8"},
    "rangefloat": {"limit_fraction_encode": ">= 0.8"},
    "onebit": {"limit_fraction_encode": ">= 0.7"},
    "terngrad": {"limit_fraction_encode": ">= 0.7"},
    "casq:bits=2": {"encode_GBps": ">= 1300", "feedback_encode_GBps": ">= 600"},
    "fft:theta=0.85": {"encode_GBps": ">= 1300", "feedback_encode_GBps": ">= 600", "decode_GBps": ">= 1200"},
}


def codec_rows(device, options, codecs, targets, metrics):
    """`bench codec` for each codec of the registry, with its targets."""
    unknown = {spec for spec in targets if spec.partition(":")[0] not in {codec["codec"] for codec in codecs}}
    if unknown:
        sys.exit(f"record.py: targets name codecs that the program does not have: {', '.join(sorted(unknown))}")
    for codec in codecs:
        specs = [spec for spec in targets if spec.partition(":")[0] == codec["codec"]] or [codec["example"]]
        for spec in specs:
            wanted = targets.get(spec, {})
            yield (
                device,
                f"bench codec --codec {spec} {options}",
                [Metric(one.name, one.unit, wanted.get(one.name, ""), one.note) for one in metrics],
            )


def standard_set(cores, simd_targets, gpu, codecs):
    """(device, command, metrics) of every measurement; commands are arguments of the program."""
    ways = ("encode", "feedback", "decode")
    against_memcpy = [Metric(f"{way}_of_copy", "1", note="of the tensor's memcpy") for way in ways]
    # The target this processor would choose, and AVX2, for which the bounds were set.
    for simd in [""] + [" --simd AVX2"] * ("AVX2" in simd_targets[1:]):
        options = f"--elements 16777216 --threads 1{simd}"
        yield from codec_rows("cpu", options, codecs, CPU_TARGETS, [*against_memcpy, *overview()])
    for threads in sorted({2, cores} - {1}):
        if threads <= cores:
            yield (
                "cpu",
                f"bench threads --codec qsgd:bits=4 --elements 16777216 --threads {threads}",
                [
                    Metric("scaling_encode", "1", ">= 0.9", "gain over the compute loop's gain"),
                    Metric("scaling_decode", "1", ">= 0.9", "gain over the compute loop's gain"),
                    Metric("scaling_feedback", "1", note="gain over the compute loop's gain"),
                    Metric("compute_scaling", "1"),
                    Metric("gain_copy", "1"),
                ],
            )
    yield (
        "cpu",
        "bench collective --codec qsgd:bits=4 --engine loopback --world 4 --elements 16777216",
        [
            Metric("ratio", "1", ">= 7", "fp32 bytes / bytes sent"),
            Metric("error", "1"),
            Metric("time_s", "s"),
            Metric("fp32_time_s", "s"),
        ],
    )
    yield (
        "cpu",
        "bench codec --codec qsgd:bits=4 --list resnet50 --threads 1",
        [Metric("encode_list_over_single", "1"), Metric("decode_list_over_single", "1")],
    )
    yield "cpu", "bench codec --codec all --elements 16777216 --threads 1", overview()
    if not gpu:
        return
    shares = [Metric(f"limit_fraction_{way}", "1") for way in ways]
    yield from codec_rows(
        "cuda", "--elements 268435456 --device cuda", codecs, CUDA_TARGETS, [*shares, *overview()]
    )
    yield (
        "cuda",
        "bench codec --codec qsgd:bits=4 --list resnet50 --device cuda",
        [
            Metric("encode_list_over_single", "1", ">= 0.85"),
            Metric("feedback_list_over_single", "1", ">= 0.85"),
            Metric("decode_list_over_single", "1", ">= 0.85"),
        ],
    )
    yield "cuda", "bench codec --codec all --elements 268435456 --device cuda", overview()


def run_json(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"record.py: {' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows_of(device, shown_command, metrics, results, machine):
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")
    for result in results:
        several = f"codec {result['codec']}" if len(results) > 1 else ""
        for metric in metrics:
            value = float(result[metric.name])
            note = "; ".join(filter(None, [several, metric.note]))
            yield [
                date,
                machine,
                device,
                shown_command,
                metric.name,
                f"{value:.6g}",
                metric.unit,
                metric.target,
                metric.met(value),
                note,
            ]


def topk_rows(program, machine):
    """topk against torch.topk, where a Python with torch is at hand (this one, or the one in $TORCH_PYTHON)."""
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode != 0:
        print(
            "record.py: no torch in this Python (set TORCH_PYTHON to one that has it): topk_vs_torch is left out",
            file=sys.stderr,
        )
        return []
    result = run_json([python, BENCH / "topk_vs_torch.py", "--gradwire", program])
    metrics = [
        Metric("speedup", "1", ">= 15", f"torch {result[0]['torch']}, one thread"),
        Metric("torch_GBps", "GB/s"),
        Metric("gradwire_GBps", "GB/s"),
    ]
    return list(rows_of("cpu", "python3 bench/topk_vs_torch.py", metrics, result, machine))


def methods_rows(program, machine):
    """The methods on real gradients, where a Python with torch is at hand."""
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch, numpy"], stderr=subprocess.DEVNULL).returncode != 0:
        print(
            "record.py: no torch in this Python (set TORCH_PYTHON to one that has it): "
            "the methods on real gradients are left out",
            file=sys.stderr,
        )
        return []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, BENCH / "real_gradients.py", folder], check=True, stdout=subprocess.DEVNULL)
        gradients = sorted(str(path) for path in Path(folder).glob("*.npy"))
        results = run_json([python, BENCH / "methods.py", "--gradwire", program, *gradients])
    rows = []
    for result in results:
        best = min(result["qsgd3_error"], result["terngrad_error"])
        bound = "of |x|^2; the bound is the lesser of qsgd:bits=3 and terngrad"
        metrics = [Metric("casq2_bits", "bit", "<= 3.03"), Metric("casq2_error", "1", f"<= {best:.6g}", bound)]
        metrics += [
            Metric(f"optquant{bits}_over_best", "1", "<= 1.005", "best levels of any shape for the raw values")
            for bits in (2, 3, 4)
        ]
        taken = {metric.name for metric in metrics}
        metrics += [
            Metric(name, "bit" if name.endswith("_bits") else "1")
            for name in result
            if name.endswith(("_bits", "_error")) and name not in taken
        ]
        command = "python3 bench/real_gradients.py G && python3 bench/methods.py G/" + result["gradient"]
        for row in rows_of("cpu", command, metrics, [result], machine):
            rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description="Run the standard measurements and append their rows to a CSV file.")
    parser.add_argument("--gradwire", type=Path, default=BENCH.parent / "build/bin/gradwire", help="the program")
    parser.add_argument("--out", type=Path, default=BENCH / "results.csv", help="the file to append to")
    parser.add_argument("--only", default="", metavar="WORD", help="only commands that contain this")
    parser.add_argument("--dry-run", action="store_true", help="print the rows and append nothing")
    parser.add_argument("--list", action="store_true", help="print the commands and their targets, and run nothing")
    arguments = parser.parse_args()

    doctor = run_json([arguments.gradwire, "doctor", "--json"])[0]
    gpu = doctor["cuda_devices"] > 0
    host = f"{doctor['cpu']}, {doctor['cores']} cores, {doctor['simd_chosen']}"
    if not gpu:
        print("record.py: no usable GPU here: the CUDA rows are left out", file=sys.stderr)
    rows = []

    def keep(new):
        rows.extend(new)
        for row in new:
            print("  {:<24} {:>10} {:<5} {:<11} {:<4} {}".format(*row[4:9], row[9]), flush=True)

    codecs = run_json([arguments.gradwire, "codecs", "--json"])
    for device, command, metrics in standard_set(doctor["cores"], doctor["simd_targets"], gpu, codecs):
        if arguments.list and arguments.only in command:
            targets = (f"{metric.name} {metric.target}" for metric in metrics if metric.target)
            print("; ".join([f"gradwire {command}", *targets]))
        elif arguments.only in command:
            print(f"gradwire {command}", flush=True)
            machine = doctor["cuda"] if device == "cuda" else host
            results = run_json([arguments.gradwire, *command.split(), "--json"])
            keep(list(rows_of(device, f"gradwire {command}", metrics, results, machine)))
    if arguments.list:
        return
    if arguments.only in "topk_vs_torch":
        keep(topk_rows(arguments.gradwire, host))
    if arguments.only in "methods.py":
        keep(methods_rows(arguments.gradwire, host))

    if not arguments.dry_run:
        fresh = not arguments.out.exists()
        with open(arguments.out, "a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if fresh:
                writer.writerow(COLUMNS)
            writer.writerows(rows)
    missed = [row for row in rows if row[8] == "no"]
    print(f"{len(rows)} rows, {sum(row[8] == 'yes' for row in rows)} targets met, {len(missed)} missed")
    for row in missed:
        print(f"  missed: {row[4]} {row[5]}, wanted {row[7]}: {row[3]}")


if __name__ == "__main__":
    main()
