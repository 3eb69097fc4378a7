# SPDX-License-Identifier: Apache-2.0
"""What the tests of `gradwire train` and `gradwire compare` share: small data sets that a model can learn, written in
the formats that their publishers use; the program, run, interrupted and killed; its events.

The program is $GRADWIRE_BIN, $GRADWIRE (set by ctest) or build/bin/gradwire.
"""

import fcntl
import gzip
import json
import os
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np

PROGRAM = (os.environ.get("GRADWIRE_BIN") or os.environ.get("GRADWIRE")
           or str(Path(__file__).resolve().parents[2] / "build/bin/gradwire"))
INTERNAL, USAGE, BAD_INPUT, IO, UNSUPPORTED, FAILED, INTERRUPTED = 1, 2, 3, 4, 5, 8, 130
SECONDS = None  # no limit of our own: how fast a machine is decides nothing here, and ctest ends a run that hangs

MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
                   "OMPI_MCA_btl": "self,vader", "ASAN_OPTIONS": "detect_leaks=0"}

# Data ---------------------------------------------------------------------------------------------------------------


def images(count, shape, classes, seed):
    """Bytes and labels: each class has a pattern of its own under noise, the same for every seed."""
    patterns = np.random.default_rng(99).integers(0, 160, (classes, *shape))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    pixels = patterns[labels] + generator.integers(0, 96, (count, *shape))
    return pixels.astype(np.uint8), labels.astype(np.uint8)


def make_idx(folder, train=256, test=64, zipped=False):
    """MNIST's four files, or Fashion-MNIST's: they look the same."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, seed in ("train", train, 1), ("t10k", test, 2):
        pixels, labels = images(count, (28, 28), 10, seed)
        for name, content in [
            ("images-idx3-ubyte", struct.pack(">IIII", 0x803, count, 28, 28) + pixels.tobytes()),
            ("labels-idx1-ubyte", struct.pack(">II", 0x801, count) + labels.tobytes()),
        ]:
            path = folder / f"{part}-{name}"
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(content, 1))
            else:
                path.write_bytes(content)
    return folder


def make_cifar(folder, classes=10, train=80, test=20):
    folder.mkdir(parents=True, exist_ok=True)

    def write(name, count, seed):
        pixels, labels = images(count, (3, 32, 32), classes, seed)
        heads = labels[:, None] if classes == 10 else np.stack([labels // 5, labels], 1)  # CIFAR-100: coarse, fine
        records = np.concatenate([heads, pixels.reshape(count, -1)], 1)
        (folder / name).write_bytes(records.astype(np.uint8).tobytes())

    if classes == 10:
        for batch in range(1, 6):
            write(f"data_batch_{batch}.bin", train // 5, batch)
    else:
        write("train.bin", train, 1)
    write("test_batch.bin" if classes == 10 else "test.bin", test, 9)
    return folder


def make_ag_news(folder, train=64, test=16):
    folder.mkdir(parents=True, exist_ok=True)
    topics = ["war border treaty minister", "goal match coach league", "shares profit bank oil",
              "chip network software"]
    generator = np.random.default_rng(5)
    for name, count in ("train.csv", train), ("test.csv", test):
        rows = []
        for _ in range(count):
            topic = int(generator.integers(4))
            words = " ".join(generator.choice(topics[topic].split(), 9))
            rows.append(f'"{topic + 1}","{words[:20]}","{words}, he said ""so""\\"')
        (folder / name).write_text("\n".join(rows) + "\n")
    return folder


def make_text(path, characters=6000):
    generator = np.random.default_rng(6)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran\n"]
    text = ""
    while len(text) < characters:
        text += words[int(generator.integers(len(words)))] + " "
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# The program --------------------------------------------------------------------------------------------------------


class Run:
    """What a run with --json said."""

    def __init__(self, code, out, errors):
        self.code, self.errors = code, errors
        self.events = [json.loads(line, parse_constant=refuse_constant) for line in out.splitlines()]

    def of(self, kind):
        return [event for event in self.events if event["event"] == kind]

    @property
    def end(self):
        assert self.events[-1]["event"] == "end", self.events[-1]
        return self.events[-1]

    @property
    def weights(self):
        return self.end["weights"]

    @property
    def learned(self):
        """What may not depend on where a run was interrupted: all figures but those of clocks, and of bytes, since
        workers that start again agree again on what they will send."""
        figures = {key: self.end[key] for key in ("weights", "bits_over_time", "layers", "tables", "skipped_steps")}
        figures["epochs"] = [{key: value for key, value in epoch.items() if key not in ("seconds", "bytes_sent")}
                             for epoch in self.end["epochs"]]
        return figures


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def words(arguments):
    return [str(argument) for argument in arguments]


def call(*arguments, code=0, launcher=(), environment=None, **options):
    """The program to its end: (stdout, stderr). An error is one line on stderr."""
    done = subprocess.run([*launcher, PROGRAM, *words(arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=SECONDS, text=True, env={**os.environ, **(environment or {})}, **options)
    assert done.returncode == code, f"{words(arguments)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    if code not in (0, INTERRUPTED) and not launcher:
        assert done.stderr.startswith("gradwire: error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stdout, done.stderr


def train(*arguments, code=0, **options):
    out, errors = call("train", *arguments, "--json", code=code, **options)
    assert code != 0 or errors == "", "a pipe must stay quiet"
    return Run(code, out, errors)


def refuse(code, expected, *arguments, command="train", **options):
    """The program must end with this exit code and with these words in its one line."""
    out, errors = call(command, *arguments, code=code, **options)
    for word in [expected] if isinstance(expected, str) else expected:
        assert str(word) in errors, f"{word!r} is not in: {errors}"
    return out


class Live:
    """A running program whose lines are read as they come.

    Its pipe holds one page and is read byte by byte, so the program is never more than some dozen lines ahead of the
    test: a run that has many more steps to go cannot end while the test is kept from the processor.
    """

    AHEAD = 4096  # bytes that the program may have written and the test has not read

    def __init__(self, *arguments, command="train", json_lines=True):
        more = ["--json"] if json_lines else []
        self.process = subprocess.Popen([PROGRAM, command, *words(arguments), *more], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, bufsize=0)
        fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, self.AHEAD)
        self.lines = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def until(self, found):
        """Reads lines until one satisfies `found`; False if the program ended before."""
        for line in self.process.stdout:
            self.lines.append(line.decode())
            if found(self.lines[-1]):
                return True
        return False

    def until_step(self, step):
        return self.until(lambda line: '"event":"step"' in line and json.loads(line)["step"] >= step)

    def pause(self):
        """Stops the program where it is, until go_on()."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(SECONDS)

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def rest(self):
        """To the end: (exit code, all of stdout, stderr)."""
        out, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, "".join(self.lines) + out.decode(), errors.decode()
