#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A parameter server and three workers on this machine: one is killed, one joins, and the loss goes on falling.

    tools/demo_server.py build/bin/gradwire [--steps 300]

Ends with the server's status and the loss curve. While it runs, the page that it names shows the same, live."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

TIMEOUT = 240  # seconds, for all of it


def curve(points, width=72, height=14):
    """Loss over steps, in characters."""
    if len(points) < 2:
        return "(no curve: too few steps)"
    first, last = points[0][0], points[-1][0]
    columns = [[] for _ in range(width)]
    for step, loss in points:
        columns[min(width - 1, (step - first) * width // max(1, last - first))].append(loss)
    values = [sum(c) / len(c) if c else None for c in columns]
    top, low = max(v for v in values if v is not None), min(v for v in values if v is not None)
    rows = [[" "] * width for _ in range(height)]
    for x, value in enumerate(values):
        if value is not None:
            rows[round((top - value) / max(1e-9, top - low) * (height - 1))][x] = "*"
    lines = [f"{top - (top - low) * y / (height - 1):7.3f} |{''.join(row)}" for y, row in enumerate(rows)]
    return "\n".join(
        ["   loss"]
        + lines
        + ["        +" + "-" * width, f"         step {first}{str(last).rjust(width - 5 - len(str(first)))}"]
    )


class Demo:
    def __init__(self, program, steps, folder):
        self.program, self.steps, self.folder = program, steps, folder
        self.processes, self.events, self.page, self.address = [], [], None, None

    def start(self, *arguments, log=None):
        out = open(os.path.join(self.folder, log), "w") if log else subprocess.PIPE
        process = subprocess.Popen([self.program, *arguments], stdout=out, stderr=subprocess.STDOUT, text=True)
        self.processes.append(process)
        return process

    def serve(self):
        server = self.start(
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--watch",
            "127.0.0.1:0",
            "--min-workers",
            "2",
            "--rejoin",
            "3",
            "--deadline",
            "5",
            "--json",
            "--save-every",
            "25",
            "--checkpoint",
            os.path.join(self.folder, "ps.gwc"),
        )
        ready = threading.Event()

        def read():
            for line in server.stdout:
                event = json.loads(line)
                self.events.append(event)
                kind = event["event"]
                if kind == "watch":
                    self.page = event["page"]
                elif kind == "listening":
                    self.address = event["address"]
                    ready.set()
                else:
                    print(f"  server: {kind} {event.get('name', '')}".rstrip(), flush=True)

        threading.Thread(target=read, daemon=True).start()
        if not ready.wait(20):
            raise SystemExit(f"demo: the server did not start: {self.events}")
        return server

    def work(self, name):
        return self.start(
            "train",
            "--server",
            self.address,
            "--task",
            "fashion-mnist",
            "--model",
            "cnn",
            "--workers",
            "3",
            "--batch",
            "32",
            "--rate",
            "0.002",
            "--steps",
            str(self.steps),
            "--epochs",
            "100",
            "--name",
            name,
            log=f"{name}.log",
        )

    def status(self):
        with urllib.request.urlopen(self.page + "status.json", timeout=10) as answer:
            return json.load(answer)

    def wait_for_step(self, step, deadline):
        while (status := self.status())["step"] < step:
            if time.monotonic() > deadline:
                raise SystemExit(f"demo: step {step} was not reached in time; {status['state']}")
            time.sleep(0.1)
        return status

    def run(self):
        deadline = time.monotonic() + TIMEOUT
        self.serve()
        print(f"server on {self.address}; live page: {self.page}")
        print(
            "three workers: ada, bob and cyd train a small network on Fashion-MNIST by quantised Adam, "
            "3 bits up, 8 bits down",
            flush=True,
        )
        workers = {name: self.work(name) for name in ("ada", "bob", "cyd")}
        self.wait_for_step(self.steps // 3, deadline)
        print(f"step {self.steps // 3}: kill -9 bob", flush=True)
        workers.pop("bob").kill()
        self.wait_for_step(self.steps // 2, deadline)
        print(f"step {self.steps // 2}: dan joins, and is given the current weights", flush=True)
        workers["dan"] = self.work("dan")
        status = self.wait_for_step(self.steps - 5, deadline)
        for name, worker in workers.items():
            if worker.wait(max(1, deadline - time.monotonic())) != 0:
                raise SystemExit(f"demo: {name} failed: {open(os.path.join(self.folder, name + '.log')).read()[-500:]}")
        final = self.status()
        print("\n" + curve(status["losses"]) + "\n")
        print(
            subprocess.run(
                [self.program, "status", "--server", self.address], capture_output=True, text=True, timeout=30
            ).stdout
        )
        if final["ledger"]["relative"] > 1e-6:
            raise SystemExit(f"demo: the ledger is off: {final['ledger']}")
        print("what was computed = what was applied + what the killed worker took with it (lost): the ledger holds")

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(options.program, options.steps, folder)
        try:
            demo.run()
        finally:
            demo.end()


if __name__ == "__main__":
    sys.exit(main())
