# SPDX-License-Identifier: Apache-2.0
"""A server among strangers, in a process of its own: peers that take all descriptors, begin calls and reset them, claim
a huge model, are of the wrong kind, or hold the port for watching cannot end it, block it or make it take memory. The
workers are those of `gradwire load`, so that nothing here needs torch. All of it is bounded and stays on loopback."""

import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest

PROGRAM = os.environ["GRADWIRE"]
SECONDS = 120  # after which a test gives up waiting; none depends on how many pass
USAGE, BAD_INPUT, IO, PEER = 2, 3, 4, 6


def eventually(found):
    deadline = time.monotonic() + SECONDS
    while True:
        result = found()
        if result:
            return result
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Server:
    """`gradwire serve --json`, whose lines are read as they come. It does not outlive its test."""

    def __init__(self, *arguments, files=None, bench=True):
        def limit():
            if files:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        words = [PROGRAM, "serve", "--json", "--listen", "127.0.0.1:0", "--threads", 1, *arguments]
        self.process = subprocess.Popen([*map(str, words), *(["--bench"] if bench else [])], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, preexec_fn=limit)
        self.events = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        eventually(lambda: self.of("listening") or self.process.poll() is not None)
        assert self.of("listening"), self.process.stderr.read()
        self.address = self.of("listening")[0]["address"]
        self.port = int(self.address.rsplit(":", 1)[1])
        self.page = self.of("watch")[0]["page"] if self.of("watch") else None

    def read(self):
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def of(self, kind):
        return [event for event in list(self.events) if event["event"] == kind]

    def resident(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1)) / 1000

    def get(self, path, host=None):
        request = urllib.request.Request(self.page.rstrip("/") + path, headers={"Host": host} if host else {})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self, *arguments):
        return json.loads(call("status", "--json", "--server", self.address, *arguments))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()


def run(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=SECONDS)


def call(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(code, words, *arguments):
    begin = time.monotonic()
    done = run(*arguments)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    last = done.stderr.strip().splitlines()[-1]
    for word in [words] if isinstance(words, str) else words:
        assert word in last, done.stderr
    return time.monotonic() - begin


def load(server, *arguments, steps=3):
    return ["load", "--server", server.address, "--elements", 20000, "--steps", steps, *arguments]


def test_the_journal_has_one_line_for_an_event_whatever_a_name_has(tmp_path):
    checkpoint = tmp_path / "a\n23:59:59  stopped\x1b[2J\u009b.gwc"
    server = subprocess.Popen([PROGRAM, "serve", "--bench", "--listen", "127.0.0.1:0", "--checkpoint", checkpoint],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        address = re.search(r"address (\S+)", server.stdout.readline()).group(1)
        call("load", "--server", address, "--elements", 20000, "--steps", 3)
        server.terminate()
        rest, errors = server.communicate(timeout=SECONDS)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 0 and errors == "" and "a?23:59:59  stopped?[2J?.gwc" in rest
    assert re.fullmatch(r"(\d\d:\d\d:\d\d  (joined|left|saved|stopped)[^\n]*\n)+", rest), rest
    assert rest.count("  stopped\n") == 1


# Descriptors --------------------------------------------------------------------------------------------------------


def test_a_flood_of_connections_is_survived_and_a_checkpoint_is_saved_meanwhile(tmp_path):
    checkpoint = tmp_path / "ps.gwc"
    with Server("--checkpoint", checkpoint, "--save-every", 1, "--watch", "127.0.0.1:0", files=256) as server:
        worker = subprocess.Popen([PROGRAM, *map(str, load(server, "--compute", 0.05, "--json", steps=60))],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        eventually(lambda: checkpoint.exists())
        flood = []
        try:
            for _ in range(400):
                flood.append(socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS))
            before = json.loads(server.get("/status.json")[1])
            # The flood stays, and the worker makes steps, which are saved.
            eventually(lambda: json.loads(server.get("/status.json")[1])["durable_step"] > before["durable_step"] + 3)
            after = json.loads(server.get("/status.json")[1])
            assert after["checkpoint"]["failed"] == 0 and after["process"]["open_files"] < 256
            assert server.status()["step"] >= after["step"], "another one gets in during the flood"
            assert server.get("/healthz") == (200, "ok\n")
            out, errors = worker.communicate(timeout=SECONDS)
            assert worker.returncode == 0 and json.loads(out)["reconnects"] == 0, errors
        finally:
            worker.kill()
            for one in flood:
                one.close()
        assert server.status()["step"] == 60
        call(*load(server))
        assert "gradwire_sockets_cut_off_total" in server.get("/metrics")[1]


def test_connections_that_come_and_go_leave_no_descriptor_behind():
    with Server("--watch", "127.0.0.1:0", files=256) as server:
        for _ in range(1000):
            socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS).close()
        eventually(lambda: json.loads(server.get("/status.json")[1])["sockets"] == 0)
        assert json.loads(server.get("/status.json")[1])["process"]["open_files"] < 100
        call(*load(server))


def test_a_limit_that_is_too_low_is_an_error_that_names_it():
    done = subprocess.run([PROGRAM, "serve", "--listen", "127.0.0.1:0"], capture_output=True, text=True,
                          timeout=SECONDS, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)))
    assert done.returncode == USAGE and "nofile is 40" in done.stderr, done.stderr


# Rapid resets -------------------------------------------------------------------------------------------------------


def literal(name, value):
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def frame(kind, flags, stream, body=b""):
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


HEADERS = b"\x83\x86" + literal(b":path", b"/gradwire.Server/Work") + literal(b":authority", b"localhost") \
    + literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)


def reset_rapidly(port, count):
    """Begins calls and resets them at once, as fast as the server takes them; the number that it took."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as peer:
        drain = threading.Thread(target=lambda: read_all(peer), daemon=True)
        drain.start()
        sent = 0
        try:
            peer.sendall(PREFACE)
            for first in range(0, count, 50):
                streams = range(2 * first + 1, 2 * (first + 50) + 1, 2)
                peer.sendall(b"".join(frame(1, 4, one, HEADERS) + frame(3, 0, one, struct.pack(">I", 8))
                                      for one in streams))
                sent += 50
        except OSError:
            pass
        return sent


def read_all(peer):
    try:
        while peer.recv(1 << 16):
            pass
    except OSError:
        pass


@pytest.mark.parametrize("token", [False, True], ids=["open", "wrong-token"])
def test_calls_that_are_reset_at_once_cost_little_and_hold_nobody_up(tmp_path, token):
    """40,000 of them took 500 MB where the token was wrong, and all connections where there was none. Now a connection
    that does it is cut off; 64 MB are allowed."""
    secret = tmp_path / "token"
    secret.write_text("correct-horse\n")
    with_token = ["--token-file", secret] if token else []
    with Server(*with_token) as server:
        call(*load(server, *with_token))
        before = most = server.resident()
        for _ in range(4):
            assert reset_rapidly(server.port, 40_000) < 40_000
            most = max(most, server.resident())
            assert server.status(*with_token)["connections"] <= 256, "64 of each connection"
        call(*load(server, *with_token))
        most = max(most, server.resident())
        assert most - before < 64, f"{most - before:.0f} MB"
        assert eventually(lambda: server.status(*with_token)["connections"] == 0)


def test_who_sends_and_begins_no_call_is_cut_off():
    """Frames that mean nothing: without a limit, a peer could send them for ever."""
    with Server() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as peer:
            peer.sendall(PREFACE)
            nothing = frame(2, 0, 1, struct.pack(">IB", 0, 16)) * 200  # priorities of a stream that does not exist
            with pytest.raises(OSError):
                for _ in range(100_000):
                    peer.sendall(nothing)
        call(*load(server))


def send_message(port, size):
    """A call with one message of `size` bytes, as far as the server lets it: HTTP/2 with its windows, by hand."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as peer:
        window = {0: 65535, 1: 65535}
        pending = b""
        initial = 65535
        sent = 0
        try:
            peer.sendall(PREFACE + frame(1, 4, 1, HEADERS))
            body = b"\0" + struct.pack(">I", size)
            while sent < size:
                room = min(window[0], window[1], 16384)
                if room > 0:
                    part = body + bytes(room - len(body))
                    body = b""
                    peer.sendall(frame(0, 0, 1, part))
                    window = {one: left - len(part) for one, left in window.items()}
                    sent += len(part)
                    continue
                content = peer.recv(1 << 16)
                if not content:
                    return sent
                pending += content
                while len(pending) >= 9 and len(pending) >= 9 + int.from_bytes(pending[:3], "big"):
                    length, kind = int.from_bytes(pending[:3], "big"), pending[3]
                    stream, text = int.from_bytes(pending[5:9], "big"), pending[9:9 + length]
                    if kind == 8:
                        window[stream] += int.from_bytes(text, "big")
                    if kind == 4 and not pending[4] & 1:
                        for i in range(0, length, 6):
                            if text[i:i + 2] == b"\0\4":
                                value = int.from_bytes(text[i + 2:i + 6], "big")
                                window[1] += value - initial
                                initial = value
                        peer.sendall(frame(4, 1, 0))
                    if kind == 6 and not pending[4] & 1:
                        peer.sendall(frame(6, 1, 0, text))
                    if kind in (3, 7) or (kind == 1 and stream == 1):
                        return sent
                    pending = pending[9 + length:]
        except OSError:
            pass
        return sent


def test_messages_before_a_hello_are_bounded_all_together():
    """Twelve messages of 60 MB before a hello took 560 MB; a hello has 16 MiB, and all of them together 64."""
    with Server("--watch", "127.0.0.1:0") as server:
        call(*load(server))
        before = most = server.resident()
        sent = []
        one_call = lambda: sent.append(send_message(server.port, 60_000_000))  # noqa: E731
        threads = [threading.Thread(target=one_call) for _ in range(12)]
        for one in threads:
            one.start()
        while any(one.is_alive() for one in threads):
            most = max(most, server.resident())
            time.sleep(0.005)
        assert len(sent) == 12 and max(sent) < 60_000_000, sent
        assert most - before < 250, f"{most - before:.0f} MB"
        call(*load(server))


# What is claimed ----------------------------------------------------------------------------------------------------


def test_a_model_beyond_the_memory_is_refused_by_default():
    """The claim costs nothing, and a quarter of the memory is the limit."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = int(re.search(r"--max-elements N\D*(\d+)", call("serve", "--help")).group(1))
    assert 0 < limit <= memory // 32


# Of the wrong kind --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "certificates"
    text = call("serve", "--make-certificates", folder, "--names", "localhost,127.0.0.1")
    assert f"--tls-cert {folder}/server.pem" in text and f"--tls-key {folder}/worker.key" in text
    for name in "ca.key", "server.key", "worker.key", "token":
        assert (folder / name).stat().st_mode & 0o777 == 0o600, name
    return folder


def keys(folder, who):
    return ["--tls-ca", folder / "ca.pem", "--tls-cert", folder / f"{who}.pem", "--tls-key", folder / f"{who}.key"]


def test_certificates_that_were_made_work_and_are_not_made_twice(made):
    token = ["--token-file", made / "token"]
    with Server(*keys(made, "server"), *token) as server:
        call(*load(server, *keys(made, "worker"), *token))
        assert server.status(*keys(made, "worker"), *token)["step"] == 3
    refuse(IO, ["exists", "ca.pem"], "serve", "--make-certificates", made)
    refuse(USAGE, ["names", "no name"], "serve", "--make-certificates", made / "more", "--names", "no name")


def test_workers_of_the_wrong_kind_are_told_at_once(tmp_path, made):
    """None of them waits for its patience, which is longer than the test."""
    other = tmp_path / "other"
    call("serve", "--make-certificates", other, "--names", "localhost,127.0.0.1")
    worker = keys(made, "worker")
    foreign = ["--tls-ca", made / "ca.pem", *keys(other, "worker")[2:]]
    with Server(*keys(made, "server")) as server:
        for words, given in [("speaks TLS", []),
                             ("wants a certificate of this worker", worker[:2]),
                             ("does not accept the certificate of this worker", foreign),
                             ("certificate", keys(other, "worker"))]:
            refuse(PEER, words, *load(server, "--patience", 3600, *given))
            refuse(PEER, words, "status", "--server", server.address, "--timeout", 100, *given)
        call(*load(server, *worker))
    with Server() as server:
        refuse(PEER, "TLS", *load(server, "--patience", 3600, *worker))


def test_the_port_of_the_page_is_recognised():
    with Server("--watch", "127.0.0.1:0") as server:
        page = server.page.split("/")[2]
        refuse(PEER, ["watch page", "--listen"], "status", "--server", page)
        refuse(PEER, ["watch page", "--listen"], "load", "--server", page, "--patience", 3600)


def test_a_load_without_a_server_says_that_it_tries():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    done = run("load", "--server", address, "--patience", 0.5)
    assert done.returncode == PEER
    assert f"connecting to {address}, for at most 0.5 s" in done.stderr and "cannot be reached" in done.stderr


# By mistake ---------------------------------------------------------------------------------------------------------


def test_a_load_is_taken_by_a_server_for_it_alone():
    with Server(bench=False) as server:
        refuse(PEER, "--bench", *load(server, "--patience", 3600))
        assert eventually(lambda: [one["reason"] for one in server.of("refused")] == ["bench"])
        assert server.status()["model"]["elements"] == 0, "the model of a load is not kept"


def test_two_servers_do_not_share_a_checkpoint(tmp_path):
    checkpoint = tmp_path / "ps.gwc"
    with Server("--checkpoint", checkpoint) as server:
        refuse(IO, [str(checkpoint), f"another server (pid {server.process.pid})"],
               "serve", "--listen", "127.0.0.1:0", "--checkpoint", checkpoint)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with Server("--checkpoint", checkpoint) as server:  # kill -9 has left the file, but not the lock
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SECONDS) == 0
    assert not (tmp_path / "ps.gwc.lock").exists()


def test_the_page_stays_on_this_machine_and_answers_to_its_names(tmp_path):
    refuse(USAGE, ["watch", "--insecure"], "serve", "--listen", "127.0.0.1:0", "--watch", "0.0.0.0:0")
    with Server("--watch", "127.0.0.1:0", "--watch-host", "status.example.org") as server:
        assert server.get("/status.json")[0] == server.get("/status.json", "status.example.org")[0] == 200
        assert server.get("/status.json", "evil.example")[0] == 421
        text = server.get("/metrics")[1]
        assert re.search(r'gradwire_build_info\{version="[0-9.]+",commit="[^"]*"\} 1', text)
        resident = float(re.search(r"^process_resident_memory_bytes (\S+)$", text, re.M).group(1)) / 1e6
        assert abs(resident - server.resident()) < 0.5 * server.resident()
