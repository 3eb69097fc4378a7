# SPDX-License-Identifier: Apache-2.0
"""A training of bench/papers.py over `gradwire serve`, with one process for each worker.

Its record is that of the worker that evaluates the model; the bytes are those that one worker sends.
"""

import contextlib
import json
import os
import subprocess
import tempfile

from rows import PROGRAM
from serving import listening, stop


def train_over_server(options, codec, seed, path):
    """Trains once and writes the record where `gradwire compare` would. Returns the first exit code that is not 0."""
    workers = int(options[options.index("--workers") + 1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server, address = listening(["--listen", "127.0.0.1:0", "--min-workers", str(workers), "--exit-when-done"])
    running = []
    command = [PROGRAM, "train", *options, "--codec", codec, "--seed", str(seed), "--server", address, "--threads", "1",
               "--json"]
    with contextlib.ExitStack() as stack:
        # Files, because a worker that waits for somebody to read a pipe would keep all others waiting.
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(workers)]
        try:
            for i, output in enumerate(outputs):
                running.append(subprocess.Popen([*command, "--name", f"worker{i}"], stdout=output, env=environment))
            for process in [*running, server]:
                process.wait(timeout=1800)
        finally:
            for process in [server, *running]:
                stop(process)
        records = []
        for output in outputs:
            output.seek(0)
            records.append(json.loads(output.readlines()[-1]))
    evaluated = [record for record in records if record["epochs"][-1]["test_accuracy"] is not None]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**evaluated[0], "seed": seed}, indent=1))
    return next((process.returncode for process in [server, *running] if process.returncode), 0)
