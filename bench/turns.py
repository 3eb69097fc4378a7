# SPDX-License-Identifier: Apache-2.0
"""What bench/ddp.py and bench/hsdp.py share: ranks as processes that take orders, and variants that take turns on them.
"""

import json
import os
import selectors
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

from rows import BENCH


def made_by(script, command, name, codecs):
    """The command that makes this variant's row again; rivals are part of every run."""
    return f"python3 bench/{script} {command} " + (f"--codec {shlex.quote(name)}" if name in codecs else f"[{name}]")


def variant_of(text):
    """'CODEC key=value ...' as a variant. Values are parsed as JSON where they can be; otherwise they are strings."""
    codec, *rest = text.split()
    options = {}
    for word in rest:
        key, _, value = word.partition("=")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return {"name": text, "kind": "gradwire", "codec": codec, "options": options}


class Ranks:
    """Processes that run a script of this folder; `ask` gives all of them an order and waits for every answer."""

    def __init__(self, script, world, prefix, interface, first, options):
        self.world = world
        self.folder = tempfile.TemporaryDirectory(prefix="gradwire-bench-")
        environment = dict(os.environ, GLOO_SOCKET_IFNAME=interface, OMP_NUM_THREADS="1")
        self.processes = []
        for rank in range(world):
            command = [
                *prefix(rank),
                sys.executable,
                str(BENCH / script),
                "--rank",
                str(rank),
                "--world",
                str(world),
                "--store",
                f"{self.folder.name}/store",
                "--first",
                first,
                "--compute-ms",
                str(options.compute_ms),
                "--compute-kind",
                options.compute_kind,
                "--timeout",
                str(options.timeout),
            ]
            # A session of their own: Ctrl-C reaches this script, which ends them.
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        self.timeout = options.timeout

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(30)
            process.stdin.close()
            process.stdout.close()
        self.folder.cleanup()

    def ask(self, order, patience=None):
        line = json.dumps(order) + "\n"
        for process in self.processes:
            process.stdin.write(line)
            process.stdin.flush()
        answers, ends = {}, time.monotonic() + (patience or self.timeout + 30)
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.world:
                events = waiting.select(max(0.0, ends - time.monotonic()))
                if not events:
                    silent = sorted(set(range(self.world)) - set(answers))
                    raise SystemExit(f"{sys.argv[0]}: ranks {silent} gave no answer to {line.strip()}")
                for key, _ in events:
                    text = key.fileobj.readline()
                    if not text:
                        code = self.processes[key.data].wait(10)
                        raise SystemExit(f"{sys.argv[0]}: rank {key.data} ended with {code} at {line.strip()}")
                    answers[key.data] = json.loads(text)
                    if "error" in answers[key.data]:
                        raise SystemExit(f"{sys.argv[0]}: {answers[key.data]['error']}")
                    waiting.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.world)]


class Turns:
    """Blocks of steps of all variants, in turns: seconds[name][round], and the last answer of rank 0."""

    def __init__(self):
        self.seconds, self.sent, self.last = {}, {}, {}

    def take(self, ranks, names, compute, options):
        began, round_ = time.monotonic(), 0
        while round_ < options.rounds and (round_ < 5 or time.monotonic() - began < options.seconds):
            for name in names:
                known = self.seconds.get(name, {})
                if known and round_ % 3 and min(known.values()) > options.patience:
                    continue
                slow = known and min(known.values()) > options.patience / 2
                answers = ranks.ask({"block": name, "steps": 1 if slow else options.steps, "compute": compute})
                self.seconds.setdefault(name, {})[round_] = max(answer["step_s"] for answer in answers)
                self.sent.setdefault(name, []).append(statistics.mean(answer["sent"] for answer in answers))
                self.last[name] = answers[0]
            round_ += 1
        self.rounds = round_
        return self

    def median(self, name):
        return statistics.median(self.seconds[name].values())

    def ratio(self, name, other):
        """Median over the blocks of `name` of its time over that of the neighbouring block of `other`."""
        mine, theirs = self.seconds[name], self.seconds[other]
        rounds = mine if len(mine) <= len(theirs) else theirs
        near = lambda found, round_: found[min(found, key=lambda one: (abs(one - round_), -one))]
        return statistics.median(near(mine, round_) / near(theirs, round_) for round_ in rounds)

    def bits(self, name):
        return self.last[name].get("bits")


def burst_of(rate):
    """A millisecond's worth: less is not reached because timers are late, more would let small messages pass
    unshaped."""
    return "128kb" if rate.endswith("gbit") else "32kb"
