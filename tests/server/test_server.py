# SPDX-License-Identifier: Apache-2.0
"""The parameter server as a user meets it, in processes of their own: `gradwire serve`, workers by
`gradwire train --server`, and `gradwire status`. It does what the same run in one process does, also when a worker or
the server is killed, or the network fails and heals; and what is not possible is refused with one line. No process
outlives its test."""

import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time

import numpy as np
import pytest

import train_fixture as lab
from relay_fixture import Wires
from train_fixture import BAD_INPUT, FAILED, IO, PROGRAM, USAGE, refuse, train

PEER = 6  # exit code: a peer has failed
SECONDS = 300  # after which a test gives up waiting; none depends on how many pass
LONG = ["--epochs", 60]  # 960 steps, some seconds
BASE = ["--optimizer", "qadam", "--model", "mlp:width=32,depth=1", "--workers", 2, "--threads", 1, "--batch", 16]


class Program:
    """A running program with --json; its lines are read as they come, by a thread, so that it never waits for us."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([PROGRAM, *lab.words(arguments), "--json"], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        self.events, self.news, self.open = [], threading.Condition(), True
        self.watchdog = threading.Timer(SECONDS, self.process.kill)
        self.watchdog.start()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            event = json.loads(line, parse_constant=lab.refuse_constant)
            with self.news:
                self.events.append(event)
                self.news.notify_all()
        with self.news:
            self.open = False
            self.news.notify_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.watchdog.cancel()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def until(self, found):
        """The first event that satisfies `found`, which has come or will come."""
        at, deadline = 0, time.monotonic() + SECONDS
        with self.news:
            while True:
                for event in self.events[at:]:
                    if found(event):
                        return event
                at = len(self.events)
                assert self.open, f"it has ended before: {self.events[-1:]} {self.process.stderr.read()}"
                assert self.news.wait_for(lambda: len(self.events) > at or not self.open, deadline - time.monotonic())

    def until_step(self, step):
        return self.until(lambda event: event["event"] == "step" and event["step"] >= step)

    def of(self, kind):
        return [event for event in self.events if event["event"] == kind]

    def signal(self, number):
        self.process.send_signal(number)

    def end(self, code=0):
        """Waits; the last event."""
        self.process.wait(SECONDS)
        self.reader.join()
        errors = self.process.stderr.read()
        assert self.process.returncode == code and (code != 0 or errors == ""), (self.process.returncode, errors)
        return self.events[-1]


def serve(*arguments, listen="127.0.0.1:0"):
    server = Program("serve", "--listen", listen, "--threads", 1, *arguments)
    server.address = server.until(lambda event: event["event"] == "listening")["address"]
    return server


def work(server, *arguments):
    return Program("train", *arguments, "--server", getattr(server, "address", server))


def status(server, *arguments):
    return json.loads(lab.call("status", "--server", server.address, *arguments, "--json")[0])


def kept(server):
    """The ledger holds."""
    now = status(server)
    assert now["ledger"]["magnitude"] > 0 and now["ledger"]["relative"] < 1e-6, now["ledger"]
    return now


def taken(end):
    """How many updates a worker has sent. On a busy machine the server may close a step before one of them comes."""
    return end["server"]["applied"] + end["server"]["late"]


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return ["--data", lab.make_idx(tmp_path_factory.mktemp("data") / "idx", train=512, test=128), *BASE]


@pytest.fixture(scope="session")
def undisturbed(base):
    """The weights after LONG in one process."""
    return train(*base, *LONG).weights


# It is the same run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [
    [],
    ["--send", "updates"],
    ["--send", "updates", "--up", "qsgd:bits=3", "--down", "loggrid:k=6"],
    ["--send", "updates", "--feedback", "off"],
    ["--moments", "shared", "--share-every", 4],
], ids=["weights", "updates", "unbiased updates", "updates without feedback", "shared"])
def test_workers_end_with_the_weights_of_one_process(tmp_path, base, way):
    arguments = [*base, "--epochs", 4, *way]
    alone = train(*arguments)
    checkpoint = tmp_path / "ps.gwc"
    with serve("--min-workers", 2, "--checkpoint", checkpoint, "--exit-when-done") as server:
        with work(server, *arguments, "--name", "first") as one, work(server, *arguments) as two:
            ends = [one.end(), two.end()]
        assert server.end()["event"] == "stopped"
    for end in ends:
        assert end["finished"] and end["weights"] == alone.weights
        assert end["server"]["confirmed"] and end["server"]["late"] == end["server"]["reconnects"] == 0
        assert end["epochs"][-1]["train_loss"] < 0.7 * end["epochs"][0]["train_loss"]
    accuracies = [end["epochs"][-1]["test_accuracy"] for end in ends]
    assert alone.end["epochs"][-1]["test_accuracy"] in accuracies
    assert [event["name"] for event in server.of("joined") if event["name"] == "first"] == ["first"]
    assert len(server.of("joined")) == len(server.of("left")) == 2 and all("time" in event for event in server.events)


def test_an_unbiased_codec_of_updates_comes_down_rounded_to_nearest(base):
    """Its own error is larger than a change, and the server has feedback: that would not train."""
    arguments = [*base, "--epochs", 8, "--send", "updates", "--up", "qsgd:bits=2"]
    alone = train(*arguments).end
    with serve("--min-workers", 2) as server, work(server, *arguments) as one, work(server, *arguments) as two:
        one.until_step(1)
        assert "rounding=nearest" in status(server)["down"]
        ends = [one.end(), two.end()]
    assert ends[0]["weights"] == ends[1]["weights"]
    assert ends[0]["epochs"][-1]["train_loss"] < 1.1 * alone["epochs"][-1]["train_loss"]


@pytest.mark.parametrize("way", [
    ["--optimizer", "qadam", "--up", "casq:bits=2,refit=5", "--down", "optquant:bits=6,refit=7"],
    ["--optimizer", "sgd", "--momentum", 0.9, "--up", "fp32"],
    ["--optimizer", "sgd", "--momentum", 0.9, "--up", "casq:bits=2,refit=5"],
    ["--optimizer", "sgd", "--momentum", 0.9, "--up", "dqsgd:budget=4.5"],
    ["--optimizer", "sgd", "--momentum", 0.9, "--up", "qsgd:bits=3", "--feedback", "on"],
], ids=["learned both ways", "sgd", "sgd and learned", "sgd and planned", "sgd and feedback"])
def test_what_is_learned_and_the_momentum_survive_the_server(tmp_path, base, way):
    """Also when the server is killed in the middle, the weights are those of one process, bit for bit."""
    arguments = [word for word in base if word not in ("--optimizer", "qadam")] + ["--epochs", 6, *way]
    like_a_server = ["--collective", "gather", "--bucket-mb", 1000] if "sgd" in way else []
    alone = train(*arguments, *like_a_server)
    checkpoint = tmp_path / "ps.gwc"
    with serve("--min-workers", 2, "--checkpoint", checkpoint, "--save-every", 10) as server:
        with work(server, *arguments) as one, work(server, *arguments) as two:
            two.until_step(35)
            server.signal(signal.SIGKILL)
            server.end(-signal.SIGKILL)
            with serve("--min-workers", 2, "--checkpoint", checkpoint, listen=server.address) as again:
                ends = [one.end(), two.end()]
                kept(again)
    for end in ends:
        assert end["weights"] == alone.weights and end["server"]["confirmed"]


MOMENTA = ["--optimizer", "adamw", "--up", "topk:ratio=0.05"]


@pytest.fixture(scope="session")
def of_adam(base):
    """Arguments of workers that send momenta, and the last loss of AdamW without compression, in one process."""
    plain = [word for word in base if word not in ("--optimizer", "qadam")] + ["--epochs", 40]  # 640 steps
    exact = train(*plain, "--optimizer", "adamw", "--codec", "fp32")
    return [*plain, *MOMENTA], exact.end["epochs"][-1]["train_loss"]


def test_momenta_train_over_a_server_that_is_killed_as_adam_does(tmp_path, of_adam):
    arguments, exact = of_adam
    weights = []
    for killed in False, True:
        checkpoint = tmp_path / f"{killed}.gwc"
        kind = ["--min-workers", 2, "--checkpoint", checkpoint, "--save-every", 40]
        with serve(*kind) as server, work(server, *arguments) as one, work(server, *arguments) as two:
            if killed:
                two.until_step(150)
                server.signal(signal.SIGKILL)
                server.end(-signal.SIGKILL)
                with serve(*kind, listen=server.address) as again:
                    ends = [one.end(), two.end()]
                    kept(again)
            else:
                ends = [one.end(), two.end()]
                kept(server)
        assert ends[0]["weights"] == ends[1]["weights"] and ends[0]["server"]["confirmed"]
        assert ends[0]["epochs"][-1]["train_loss"] < 1.15 * exact + 0.01
        weights.append(ends[0]["weights"])
    assert weights[0] == weights[1]


def test_a_worker_that_joins_has_the_second_moments_at_once(of_adam):
    arguments, exact = of_adam
    with serve("--min-workers", 2) as server, work(server, *arguments) as one, work(server, *arguments) as two:
        one.until_step(60)
        with work(server, *arguments) as late:
            ends = [one.end(), two.end(), late.end()]
        assert late.of("step")[0]["step"] > 60
        assert taken(ends[2]) == len(late.of("step")), "it sends in its first step"
        assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]
        assert ends[0]["epochs"][-1]["train_loss"] < 1.2 * exact + 0.01
        kept(server)
        # A worker that runs another optimizer is not let in.
        other = [*arguments[:-len(MOMENTA)], "--optimizer", "qadam", "--send", "updates", "--moments", "shared"]
        refuse(PEER, ["trains something else", "buffer"], *other, "--up", "topk:ratio=0.05", "--server", server.address)


def read_safetensors(path):
    content = path.read_bytes()
    size, = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + size])
    meta = header.pop("__metadata__")
    data = content[8 + size:]
    tensors = {name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
               for name, entry in header.items() if entry["dtype"] == "F32"}
    return meta, tensors


def test_a_checkpoint_is_a_safetensors_file_and_another_server_begins_with_it(tmp_path, base):
    checkpoint = tmp_path / "ps.gwc"
    with serve("--checkpoint", checkpoint, "--exit-when-done") as server, work(server, *base, "--epochs", 4) as worker:
        first = worker.until_step(1)
        worker.end()
        server.end()
    meta, tensors = read_safetensors(checkpoint)
    assert meta["step"] == "64"
    shapes = sorted(value.shape for name, value in tensors.items() if not name.startswith("gradwire."))
    assert shapes == [(10,), (10, 32), (32,), (32, 784)]
    assert all(np.isfinite(value).all() and np.abs(value).max() > 0 for value in tensors.values())
    with serve("--init", checkpoint) as server, work(server, *base, "--epochs", 1) as worker:
        assert worker.until_step(1)["step_loss"] < 0.5 * first["step_loss"]
        worker.end()
        assert status(server)["durable_step"] is None
    with serve("--init", checkpoint) as server:
        refuse(PEER, "shape", *base[:-8], "--model", "mlp:width=16,depth=1", "--server", server.address)


def test_status_is_for_people_and_for_machines(base):
    with serve("--min-workers", 2) as server:
        assert status(server)["state"] == "waiting for the first worker"
        with work(server, *base, *LONG, "--name", "anna") as one, work(server, *base, *LONG) as two:
            one.until_step(50)
            now, text = status(server), lab.call("status", "--server", server.address)[0]
            one.end(), two.end()
        assert now["state"] == "training" and now["workers"]["present"] == 2 and now["step"] >= 50
        assert now["steps_per_s"] > 0 and 0 < now["loss"] < 3 and 0 < now["bytes"]["up"] < 0.2 * now["bytes"]["fp32_up"]
        assert "anna" in text and "training" in text and "\nledger      ok" in text
        assert now["skipped_steps"] == 0 and now["failed"] is False and "skipped" not in text
        after = kept(server)
        assert after["step"] == 960 and after["ledger"]["held"] == after["ledger"]["lost"] == 0
        assert after["workers"]["present"] == 0


# What fails ---------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_reported_as_lost_and_the_others_go_on(base):
    with serve("--rejoin", 0.3) as server, work(server, *base, *LONG) as one, work(server, *base, *LONG) as two:
        two.until_step(50)
        two.signal(signal.SIGKILL)
        server.until(lambda event: event["event"] == "lost")
        end = one.end()
        assert end["finished"] and end["server"]["confirmed"]
        now = kept(server)
        assert now["ledger"]["lost"] != 0 and now["ledger"]["held"] == 0
        assert sorted(one["state"] for one in now["workers"]["list"]) == ["left", "lost"]


@pytest.mark.parametrize("done", [True, False], ids=["when done", "term"])
def test_a_training_that_goes_astray_fails_at_the_workers_and_at_the_server(tmp_path, base, done):
    arguments = ["mlp:width=8,depth=9" if word == "mlp:width=32,depth=1" else word for word in base]
    arguments += ["--rate", 1e6, "--epochs", 2]
    checkpoint = tmp_path / "ps.gwc"
    with serve("--min-workers", 2, "--checkpoint", checkpoint, *(["--exit-when-done"] if done else [])) as server:
        with work(server, *arguments) as one, work(server, *arguments) as two:
            ends = [one.end(FAILED), two.end(FAILED)]
        if not done:
            now, text = status(server), lab.call("status", "--server", server.address)[0]
            assert now["failed"] and 16 < now["skipped_steps"] <= now["step"] == 32
            assert f"{now['skipped_steps']} steps, not finite: more than half, so the training has FAILED" in text
            server.signal(signal.SIGTERM)
        assert server.end(FAILED)["event"] == "stopped"
    assert all(end["failed"] and end["skipped_steps"] > 16 for end in ends)
    assert len(server.of("skipped")) >= 8 and "of 32 steps were left out" in server.of("failed")[0]["note"]
    # It is the checkpoint of a failed training, and says so again. Nobody trains any more, so nothing changes that.
    with serve("--checkpoint", checkpoint) as server:
        assert status(server)["failed"]
        server.signal(signal.SIGTERM)
        server.end(FAILED)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_workers_go_on_by_themselves_when_the_server_is_back_and_nothing_is_lost(tmp_path, base, undisturbed, number):
    checkpoint = tmp_path / "ps.gwc"
    kind = ["--min-workers", 2, "--checkpoint", checkpoint, "--save-every", 40]
    with serve(*kind) as server, work(server, *base, *LONG) as one, work(server, *base, *LONG) as two:
        one.until_step(150)
        server.signal(number)
        server.end(0 if number == signal.SIGTERM else -number)
        saved = int(read_safetensors(checkpoint)[0]["step"])
        assert 100 <= saved < 960
        assert number == signal.SIGKILL or saved >= 150, "it saves what it has before it goes"
        with serve(*kind, "--exit-when-done", listen=server.address) as second:
            ends = [one.end(), two.end()]
            assert len(second.of("back")) == 2
            second.end()
    for end in ends:
        assert end["weights"] == undisturbed and end["server"]["reconnects"] >= 1 and end["server"]["confirmed"]


def test_a_network_that_is_cut_and_heals_changes_nothing(base, undisturbed):
    with serve("--min-workers", 2) as server, Wires() as wires:
        wires.target = server.address
        wire = wires.make()
        with work(server, *base, *LONG) as one, work(wire, *base, *LONG) as two:
            two.until_step(100)
            wire.cut()
            stuck = status(server)["step"]
            time.sleep(1)  # time enough for many steps, if there were any
            assert status(server)["step"] <= stuck + 1 < 960, "no worker goes on without the other"
            wire.heal(reset=True)
            ends = [one.end(), two.end()]
        assert [end["weights"] for end in ends] == [undisturbed, undisturbed]
        assert ends[1]["server"]["reconnects"] >= 1 and ends[0]["server"]["reconnects"] == 0
        assert len(server.of("vanished")) >= 1
        kept(server)


def test_a_worker_that_stands_still_is_not_waited_for_and_then_goes_on(base):
    with serve("--deadline", 0.3) as server, work(server, *base, *LONG) as one, \
            work(server, *base, *LONG, "--name", "still") as two:
        two.until_step(50)
        two.signal(signal.SIGSTOP)
        stalled = ("late", "still")
        late = server.until(lambda event: (event["event"], event.get("name")) == stalled and event["step"] >= 50)
        one.until_step(late["step"] + 100)
        states = {one["name"]: one["state"] for one in status(server)["workers"]["list"]}
        assert states["still"] == "lagging" and len(states) == 2
        two.signal(signal.SIGCONT)
        ends = [one.end(), two.end()]
        assert all(end["finished"] and end["server"]["confirmed"] for end in ends)
        assert ends[1]["server"]["reconnects"] == 0 and len(two.of("step")) < 960 - 90
        now = kept(server)
        assert now["ledger"]["held"] == now["ledger"]["lost"] == 0


def test_a_worker_joins_in_the_middle_and_agrees_with_the_others(base):
    with serve("--min-workers", 2) as server, work(server, *base, *LONG) as one, work(server, *base, *LONG) as two:
        one.until_step(20)
        with work(server, *base, *LONG, "--warm-steps", 5) as late:
            ends = [one.end(), two.end(), late.end()]
        assert late.of("step")[0]["step"] > 20
        assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]
        assert taken(ends[2]) == len(late.of("step")) - 5
        kept(server)


# What cannot be -----------------------------------------------------------------------------------------------------


def test_who_is_not_let_in_is_told_why(tmp_path, base):
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("correct-horse\n")
    other.write_text("wrong-horse\n")
    with serve("--token-file", token, "--max-workers", 1) as server, \
            work(server, *base, "--epochs", 10000, "--token-file", token) as worker:
        worker.until_step(1)
        for given in [], ["--token-file", other]:
            refuse(PEER, "token", *base, "--server", server.address, *given)
            refuse(PEER, "token", "--server", server.address, *given, command="status")
        known = ["--server", server.address, "--token-file", token]
        refuse(PEER, ["trains something else", "up"], *base, *known, "--up", "qsgd:bits=4")
        refuse(PEER, ["full", "1 workers", "--max-workers"], *base, *known)
        refused = status(server, "--token-file", token)["refused"]
        assert (refused["token"], refused["signature"], refused["full"]) == (4, 1, 1)
        refuse(IO, ["listen", server.address], "--listen", server.address, command="serve")
        worker.signal(signal.SIGINT)
        assert not worker.end(lab.INTERRUPTED)["finished"]


@pytest.mark.parametrize("command", ["serve", "train", "status"])
@pytest.mark.parametrize("given, code, words", [
    ("localhost", USAGE, "HOST:PORT"),
    ("localhost:99999", USAGE, "65535"),
    ("192.0.2.1:7070", USAGE, "--insecure"),
    ("127.0.0.1:0 --tls-cert none.pem --tls-key none.key", IO, "none."),
    ("127.0.0.1:0 --tls-cert none.pem", USAGE, "tls-key"),
    ("127.0.0.1:0 --token-file none", IO, "none"),
], ids=lambda value: str(value).replace("--", ""))
def test_addresses_and_secrets_of_no_use_are_refused_by_name(base, command, given, code, words):
    more = base if command == "train" else []
    refuse(code, words, "--listen" if command == "serve" else "--server", *given.split(), *more, command=command)


def test_no_server_is_said_when_patience_ends(base):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    refuse(PEER, "cannot be reached", *base, "--server", address, "--patience", 1)
    refuse(PEER, [address, "does not answer"], "--server", address, "--timeout", 1, command="status")


def test_files_that_cannot_be_used_are_refused_before_anybody_comes(tmp_path):
    (tmp_path / "torn").write_bytes(os.urandom(1000))
    refuse(IO, ["init", "none"], "--listen", "127.0.0.1:0", "--init", tmp_path / "none", command="serve")
    refuse(IO, "checkpoint", "--listen", "127.0.0.1:0", "--checkpoint", tmp_path / "no/such/file", command="serve")
    refuse(BAD_INPUT, "torn", "--listen", "127.0.0.1:0", "--checkpoint", tmp_path / "torn", command="serve")
