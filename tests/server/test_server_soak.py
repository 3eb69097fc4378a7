# SPDX-License-Identifier: Apache-2.0
"""A parameter server and its workers, in processes of their own, through a long run of failures in random order.

GRADWIRE_SOAK_EVENTS is the number of failures (1000), GRADWIRE_SEED decides their order. Workers are killed, stopped,
cut off and told to leave; the server is killed and stopped. Some failures last while others happen. After each, the
system must be seen to go on. In the end the ledger must be exact, and nothing may be held, left over or have grown.
"""

import collections
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import threading
import time

import pytest
from relay_fixture import Wires

PROGRAM = os.environ["GRADWIRE"]
EVENTS = int(os.environ.get("GRADWIRE_SOAK_EVENTS", "1000"))
SEED = int(os.environ.get("GRADWIRE_SEED", "1"))
SECONDS = 120  # after which it gives up waiting; nothing depends on how many pass
WORKERS = 7
TROUBLED = 3  # at most so many workers are stopped or cut off at the same time
EXACT = 1e-6  # of the ledger; the server itself reports more as wrong

# What may grow. A server keeps a row for every worker that it has known, and allocators keep what they were given.
GROWTH_BYTES = 16 << 20
GROWTH_FILES = WORKERS  # a connection that is being replaced may still be open

WEIGHTS = {"kill": 20, "stop": 16, "cut": 20, "leave": 20, "server kill": 6, "server kill, leave": 4, "server stop": 14}


LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def start(*arguments, **options):
    """The program; it ends with this process, should that be ended from outside."""
    return subprocess.Popen([PROGRAM, *map(str, arguments)], **options,
                            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))  # fmt: skip


def eventually(found, what):
    deadline = time.monotonic() + SECONDS
    while True:
        result = found()
        if result:
            return result
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        time.sleep(0.02)


class Server:
    """One life of the server: from its start to its end."""

    def __init__(self, folder, log):
        self.process = start(
            *("serve", "--bench", "--json", "--listen", "127.0.0.1:0", "--threads", 1, "--deadline", 0.3),
            *("--rejoin", 4, "--return", 2, "--checkpoint", folder / "ps.gwc", "--save-every", 20),
            stdout=subprocess.PIPE, stderr=log, text=True)  # fmt: skip
        self.events, self.resident, self.files = [], [], []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        eventually(lambda: self.of("listening") or self.process.poll() is not None, "the server listens")
        assert self.of("listening"), "the server does not start; its words are in soak.log"
        self.address = self.of("listening")[0]["address"]

    def read(self):
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def of(self, kind):
        return [event for event in list(self.events) if event["event"] == kind]

    def status(self):
        done = subprocess.run([PROGRAM, "status", "--json", "--timeout", str(SECONDS), "--server", self.address],
                              capture_output=True, text=True, timeout=2 * SECONDS)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def end(self, number, code):
        self.process.send_signal(number)
        assert self.process.wait(SECONDS) == code
        self.reader.join()
        self.process.stdout.close()


class Worker:
    """`gradwire load` on a wire of its own, by which the server's status tells it from others."""

    def __init__(self, wires, log):
        self.wire = wires.make()
        self.process = start(
            *("load", "--server", self.wire.address, "--elements", 20000, "--steps", 1 << 40, "--compute", 0.03),
            *("--patience", 600), stdout=subprocess.DEVNULL, stderr=log)  # fmt: skip
        self.id, self.trouble = None, None

    def row(self, status):
        """Its row of the status, while it is connected."""
        for row in status["workers"]["list"]:
            if row["peer"] and (self.wire.serves(row["peer"]) if self.id is None else row["id"] == self.id):
                self.id = row["id"]
                return row
        return None

    def halted(self):
        with open(f"/proc/{self.process.pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "T"


class Soak:
    def __init__(self, folder, wires, log):
        self.folder, self.wires, self.log, self.random = folder, wires, log, random.Random(SEED)
        self.processes, self.workers, self.lives = [], [], []
        self.counts, self.relative, self.steps = collections.Counter(), [], 0
        self.notes = collections.Counter()

    def begin(self):
        self.start_server()
        for _ in range(WORKERS):
            self.start_worker()
        self.await_workers()
        self.await_steps(1)

    # What is there --------------------------------------------------------------------------------------------------

    def start_server(self):
        self.server = Server(self.folder, self.log)
        self.processes.append(self.server.process)
        self.lives.append(self.server)
        self.wires.target = self.server.address

    def start_worker(self):
        worker = Worker(self.wires, self.log)
        self.processes.append(worker.process)
        self.workers.append(worker)
        return worker

    def drop(self, worker):
        worker.wire.close()
        self.workers.remove(worker)

    def status(self):
        now = self.server.status()
        self.relative.append(now["ledger"]["relative"])
        assert now["ledger"]["relative"] < EXACT, now["ledger"]
        assert now["checkpoint"]["failed"] == 0 and now["refused"]["corrupt"] == 0, now
        return now

    def fit(self):
        return [worker for worker in self.workers if not worker.trouble]

    # Waiting --------------------------------------------------------------------------------------------------------

    def await_status(self, found, what):
        def look():
            now = self.status()
            return now if found(now) else None

        return eventually(look, what)

    def await_steps(self, count):
        begin = self.status()["step"]
        self.steps += self.await_status(lambda now: now["step"] >= begin + count, "steps go on")["step"] - begin

    def await_workers(self):
        self.await_status(lambda now: all(worker.row(now) for worker in self.fit()), "all workers are connected")

    def await_update(self, worker):
        """It takes part again: the server has applied an update of it that it had not."""
        before = worker.row(self.await_status(worker.row, "the worker is connected"))["updates"]
        self.await_status(lambda now: (worker.row(now) or {"updates": 0})["updates"] > before, "it sends updates")

    # Failures -------------------------------------------------------------------------------------------------------

    def kill(self):
        worker = self.random.choice(self.workers)
        if worker.trouble:
            self.notes["killed while stopped or cut off"] += 1
        worker.process.kill()
        assert worker.process.wait(SECONDS) == -signal.SIGKILL
        self.drop(worker)
        self.await_status(lambda now: not worker.row(now), "the server has noticed")
        self.start_worker()
        self.await_workers()

    def leave(self):
        worker = self.random.choice(self.fit())
        worker.process.terminate()
        self.left(worker)
        self.start_worker()
        self.await_workers()

    def left(self, worker):
        assert worker.process.wait(SECONDS) == 0
        # Its exit code does not say whether the server has taken its residual; the journal does.
        eventually(lambda: any(event["worker"] == worker.id for life in self.lives[-2:] for event in life.of("left")),
                   "the server says that it left")  # fmt: skip
        self.drop(worker)

    def trouble(self, kind):
        """A worker that cannot be heard of for a while: some steps, or some of the next failures."""
        worker = self.random.choice(self.fit())
        if kind == "stop":
            worker.process.send_signal(signal.SIGSTOP)
            eventually(worker.halted, "it stops")
        else:
            worker.wire.cut()
        worker.trouble = [kind, self.random.choice([0, 0, 1, 2, 4])]
        self.await_steps(self.random.randint(1, 6))
        self.relieve()

    def relieve(self, all_of_them=False):
        for worker in [worker for worker in self.workers if worker.trouble]:
            worker.trouble[1] -= 1
            if worker.trouble[1] >= 0 and not all_of_them:
                continue
            if worker.trouble[0] == "stop":
                worker.process.send_signal(signal.SIGCONT)
            else:
                reset = self.random.random() < 0.5
                self.notes["cut, healed by a reset"] += reset
                worker.wire.heal(reset)
            worker.trouble = None
            self.await_update(worker)

    def kill_server(self, leaving):
        reached = self.status()["step"]
        worker = self.random.choice(self.fit()) if leaving else None
        if worker:
            worker.process.terminate()
        self.wires.target = None
        self.server.end(signal.SIGKILL, -signal.SIGKILL)
        self.start_server()
        if worker:
            self.left(worker)
            self.start_worker()
        self.await_workers()
        # Steps since the last checkpoint are made once more; then it must go on from there.
        self.await_status(lambda now: now["step"] > reached, "the new server comes to where the old one was")
        self.steps += 1

    def stop_server(self):
        self.server.process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.random() * 0.5)  # how long it is stopped; nothing is expected of it
        self.server.process.send_signal(signal.SIGCONT)

    def disturb(self):
        kind = self.random.choices(list(WEIGHTS), WEIGHTS.values())[0]
        if kind in ("stop", "cut") and len(self.workers) - len(self.fit()) >= TROUBLED:
            kind = "leave"
        self.counts[kind] += 1
        if kind == "kill":
            self.kill()
        elif kind == "leave":
            self.leave()
        elif kind in ("stop", "cut"):
            self.trouble(kind)
        elif kind == "server stop":
            self.stop_server()
        else:
            self.kill_server("leave" in kind)
        self.await_steps(1)
        if kind not in ("stop", "cut"):
            self.relieve()
        process = self.status()["process"]
        self.server.resident.append(process["resident_bytes"])
        self.server.files.append(process["open_files"])

    # The end --------------------------------------------------------------------------------------------------------

    def finish(self):
        """All workers leave, those that were killed are given up; the ledger at that point."""
        self.relieve(all_of_them=True)
        self.await_workers()
        for worker in self.workers:
            worker.process.terminate()
        for worker in list(self.workers):
            self.left(worker)
        end = self.await_status(lambda now: now["ledger"]["held"] == 0 and now["connections"] == 0, "nothing is held")
        assert not [row for row in end["workers"]["list"] if row["state"] not in ("left", "lost")], end["workers"]
        assert end["workers"]["present"] == 0 and end["ledger"]["magnitude"] > 0
        self.server.end(signal.SIGTERM, 0)
        return end

    def kill_all(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def growth(self, samples):
        """From the first tenth to the last one of the run, and the most within one life of the server: medians."""
        everything = [value for life in self.lives for value in getattr(life, samples)]
        tenth = max(1, len(everything) // 10)
        first, last = statistics.median(everything[:tenth]), statistics.median(everything[-tenth:])
        within = []
        for life in self.lives:
            own = getattr(life, samples)
            if len(own) >= 10:  # the first third has the growth of every process that begins
                third = len(own) // 3
                within.append(statistics.median(own[-third:]) - statistics.median(own[third : 2 * third]))
        return first, last, max(within, default=0)


def test_a_long_run_of_failures_in_random_order(tmp_path, capsys):
    begin = time.monotonic()
    with Wires() as wires, open(tmp_path / "soak.log", "w") as log:
        soak = Soak(tmp_path, wires, log)
        try:
            soak.begin()
            for _ in range(EVENTS):
                soak.disturb()
            end = soak.finish()
        finally:
            soak.kill_all()
    resident, files = soak.growth("resident"), soak.growth("files")
    rows = [(f"events: {kind}", count) for kind, count in sorted(soak.counts.items())]
    rows += [(f"of these: {kind}", count) for kind, count in sorted(soak.notes.items())]
    rows += [
        ("seed, events, minutes", f"{SEED}, {EVENTS}, {(time.monotonic() - begin) / 60:.1f}"),
        ("lives of the server; processes", f"{len(soak.lives)}; {len(soak.processes)}"),
        ("steps of the model", end["step"]),
        ("steps that were waited for", soak.steps),
        ("largest deviation of the ledger", f"{max(soak.relative):.2g} in {len(soak.relative)} statuses"),
        ("deviation of the ledger at the end", f"{end['ledger']['relative']:.2g}"),
        ("memory, MB: first tenth, last tenth, most in a life", "%.1f, %.1f, %+.1f" % tuple(v / 1e6 for v in resident)),
        ("descriptors: first tenth, last tenth, most in a life", "%g, %g, %+g" % files),
    ]
    with capsys.disabled():
        print("\n" + "\n".join(f"{name:<54}{value}" for name, value in rows))
    assert sum(soak.counts.values()) == EVENTS
    assert resident[1] - resident[0] < GROWTH_BYTES and resident[2] < GROWTH_BYTES
    assert files[1] - files[0] <= GROWTH_FILES and files[2] <= GROWTH_FILES
    assert all(process.returncode is not None for process in soak.processes)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # there is no child, running or not
