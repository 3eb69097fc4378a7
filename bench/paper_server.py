# SPDX-License-Identifier: Apache-2.0
"""A training of bench/papers.py over `gradwire serve`, with one process for each worker.

Its record is that of the worker that evaluates the model; the bytes are those that one worker sends.
"""

import json
import os
import subprocess

from rows import PROGRAM


def train_over_server(options, codec, seed, path):
    """Trains once and writes the record where `gradwire compare` would. Returns the first exit code that is not 0."""
    workers = int(options[options.index("--workers") + 1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [PROGRAM, "serve", "--listen", "127.0.0.1:0", "--min-workers", str(workers), "--exit-when-done", "--json"],
        stdout=subprocess.PIPE, text=True)
    running = []
    try:
        address = next(event["address"] for event in map(json.loads, server.stdout) if event["event"] == "listening")
        command = [PROGRAM, "train", *options, "--codec", codec, "--seed", str(seed), "--server", address, "--threads", "1",
                   "--json"]
        running = [subprocess.Popen([*command, "--name", f"worker{i}"], stdout=subprocess.PIPE, text=True,
                                    env=environment) for i in range(workers)]
        records = [json.loads(worker.communicate(timeout=1800)[0].splitlines()[-1]) for worker in running]
        server.communicate(timeout=60)
    finally:
        for process in [server, *running]:
            process.kill()
    evaluated = [record for record in records if record["epochs"][-1]["test_accuracy"] is not None]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**evaluated[0], "seed": seed}, indent=1))
    return next((process.returncode for process in [server, *running] if process.returncode), 0)
