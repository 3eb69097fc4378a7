#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results.csv for qadam and the parameter server; docs/measuring.md says what each one means.

    python3 bench/server.py accuracy        qadam at 3 bits up / 8 down against Adam in full precision, Fashion-MNIST cnn
    python3 bench/server.py causes          of that difference: no quantisation at all, another rate (after `accuracy`, whose rows it reads)
    python3 bench/server.py floor           the floor that quantised weights leave, in numpy (needs it), against the theory
    python3 bench/server.py loopback        what the server's threads spend on a step, against the same codecs in `bench codec`
    python3 bench/server.py link            steps/s over a link of 100 Mb/s, against what bytes and compute allow (needs root, ip, tc)

Each appends its rows when it is done; with --dry-run they are only shown. GRADWIRE_BIN names the program.
"""

import argparse
import csv
import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from netns import Network, refuse_without_means
from rows import BENCH, PROGRAM, Rows, load_note
from serving import listening, stop


# Accuracy.

TRAIN = "train --task fashion-mnist --model cnn --workers 4 --epochs 5 --rate 0.001 --schedule cosine --weight-decay 0"
ADAM = "--optimizer adam --codec fp32"


def trained(options, seed, train=TRAIN):
    done = subprocess.run(
        [PROGRAM, *train.split(), *options.split(), "--seed", str(seed), "--json"],
        check=True,
        stdout=subprocess.PIPE,
        timeout=1800,
    )
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["finished"] and record["skipped_steps"] == 0, record
    last = record["epochs"][-1]
    return 100 * last["test_accuracy"], last["step"]


def accuracy(options):
    rows = Rows()
    adam, steps = {}, set()
    for seed in options.seeds:
        adam[seed], count = trained(ADAM, seed)
        steps.add(count)
        rows.add(f"gradwire {TRAIN} {ADAM} --seed {seed}", "test_accuracy", adam[seed], "%", note="full-precision Adam")
    for bits in (8, 6, 4):
        qadam = f"--optimizer qadam --up loggrid:k=2 --down unigrid:bits={bits}"
        seeds = options.seeds if bits == 8 else options.seeds[:1]
        differences = []
        for seed in seeds:
            points, count = trained(qadam, seed)
            steps.add(count)
            assert len(steps) == 1, steps
            differences.append(points - adam[seed])
            command = f"gradwire {TRAIN} {qadam} --seed {seed}"
            rows.add(command, "test_accuracy", points, "%", note=f"qadam, {count} steps, as many as Adam's")
            rows.add(
                command,
                "accuracy_minus_adam",
                differences[-1],
                "points",
                note="of the same seed" + ("" if bits == 8 else "; for the record: fewer bits down, higher floor"),
            )
        if bits == 8:
            spread = f"; from {min(differences):.2f} to {max(differences):.2f}"
            rows.add(
                f"gradwire {TRAIN} {qadam}",
                "mean_accuracy_minus_adam",
                statistics.mean(differences),
                "points",
                ">= -0.5",
                f"mean over seeds {', '.join(map(str, seeds))}" + spread,
            )
    rows.append(options.dry_run)


def recorded(command, metric):
    """What an earlier row says; the latest, if there are several."""
    with open(BENCH / "results.csv", newline="") as file:
        found = [row for row in csv.DictReader(file) if row["command"] == command and row["metric"] == metric]
    return float(found[-1]["value"])


def causes(options):
    """Where the difference comes from: qadam without any quantisation, and both optimisers at twice the rate. No target: these were chosen after `accuracy` had been seen."""
    rows = Rows()
    coded, twice = (
        "--optimizer qadam --up loggrid:k=2 --down unigrid:bits=8",
        TRAIN.replace("--rate 0.001", "--rate 0.002"),
    )
    for seed in options.seeds:
        adam = recorded(f"gradwire {TRAIN} {ADAM} --seed {seed}", "test_accuracy")
        for name, train, how in (
            ("qadam without quantisation", TRAIN, "--optimizer qadam --up fp32 --down fp32"),
            ("qadam at twice the rate", twice, coded),
            ("Adam at twice the rate", twice, ADAM),
        ):
            points, count = trained(how, seed, train)
            rows.add(
                f"gradwire {train} {how} --seed {seed}", "test_accuracy", points, "%", note=f"{name}, {count} steps"
            )
            rows.add(
                f"gradwire {train} {how} --seed {seed}",
                "accuracy_minus_adam",
                points - adam,
                "points",
                note=f"{name}, from Adam of the same seed at rate 0.001",
            )
    rows.append(options.dry_run)


def rates(options):
    """Each optimiser at its own best rate: four and eight times 0.001 beside what `accuracy` and `causes` have recorded. Both rates are chosen on the test accuracy, alike for both."""
    rows = Rows()
    coded = "--optimizer qadam --up loggrid:k=2 --down unigrid:bits=8"
    means = {ADAM: {}, coded: {}}
    for rate in ("0.001", "0.002", "0.004", "0.008"):
        train = TRAIN.replace("--rate 0.001", f"--rate {rate}")
        for how in (ADAM, coded):
            points = []
            for seed in options.seeds:
                command = f"gradwire {train} {how} --seed {seed}"
                if rate in ("0.001", "0.002"):
                    points.append(recorded(command, "test_accuracy"))
                else:
                    points.append(trained(how, seed, train)[0])
                    rows.add(command, "test_accuracy", points[-1], "%", note=f"rate {rate}")
            means[how][rate] = statistics.mean(points)
            rows.add(
                f"gradwire {train} {how}",
                "mean_test_accuracy",
                means[how][rate],
                "%",
                note=f"mean over seeds {', '.join(map(str, options.seeds))}",
            )
    best = {how: max(list_, key=list_.get) for how, list_ in means.items()}
    rows.add(
        f"gradwire {TRAIN.replace('--rate 0.001', '--rate ' + best[coded])} {coded}",
        "best_accuracy_minus_best_adam",
        means[coded][best[coded]] - means[ADAM][best[ADAM]],
        "points",
        ">= -0.5",
        f"each at its own best of four rates (qadam {best[coded]}, Adam {best[ADAM]}), chosen on test accuracy for both; mean over seeds {', '.join(map(str, options.seeds))}",
    )
    rows.append(options.dry_run)


# The floor of quantised weights.


def floor(options):
    """Quadratic of 2048 coordinates with curvatures 0.5 to 2 whose best places are anywhere; the weights live on a grid of
    steps Delta, alpha = 0.05 / sqrt t, theta_t = 1 - theta / t. Nothing of gradwire runs here: what qadam_test holds its own codecs to."""
    import numpy

    rows, before = Rows(), None
    for power in range(3, 9):
        delta, count, steps = 2.0**-power, 2048, 20000
        random = numpy.random.default_rng(power)
        best, curve = random.uniform(-1, 1, count), random.uniform(0.5, 2, count)
        x, m, v, loss = numpy.zeros(count), numpy.zeros(count), numpy.full(count, 1e-5), 0.0
        for t in range(steps):
            away = numpy.round(x / delta) * delta - best
            gradient = curve * away
            if t >= steps // 2:
                loss += (curve * away * away).sum() / 2
            theta = 1 - 0.999 / (t + 1)
            v = theta * v + (1 - theta) * gradient * gradient
            m = 0.9 * m + 0.1 * gradient
            x -= 0.05 / numpy.sqrt(t + 1) * m / numpy.sqrt(v + 1e-5)
        loss /= steps - steps // 2
        command = f"python3 bench/server.py floor, Delta = 2^-{power}"
        note = "numpy, the published rule; gradwire's own is held to 0.9 to 1.1 by qadam_test"
        rows.add(command, "floor_over_theory", loss / (curve.sum() * delta**2 / 12), "1", note=note)
        if before is not None:
            rows.add(command, "floor_fall_per_bit", before / (loss / curve.sum()), "1", note="4 by the theory")
        before = loss / curve.sum()
    rows.append(options.dry_run)


# The server's processor time, on loopback.

UP, DOWN, ELEMENTS = "loggrid:k=2", "unigrid:bits=8", 25_000_000


def codec_seconds(codec):
    """(encode, feedback, decode) of the whole tensor by one thread, and the share of the time that it had a processor.

    `bench codec` reads a wall clock, and the server's threads are measured in processor time: on a busy machine only a bench that goes first can be compared."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [
            "nice",
            "-n",
            "-19",
            PROGRAM,
            "bench",
            "codec",
            "--codec",
            codec,
            "--elements",
            str(ELEMENTS),
            "--threads",
            "1",
            "--pairs",
            "15",
            "--json",
        ],
        check=True,
        stdout=subprocess.PIPE,
        timeout=600,
    )
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    row = json.loads(done.stdout)
    share = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / wall
    return (*(4 * ELEMENTS / 1e9 / row[name] for name in ("encode_GBps", "feedback_encode_GBps", "decode_GBps")), share)


def thread_seconds(process):
    """Processor time of the threads that bear the program's name: those that decode and encode, and some that sleep. Those of gRPC have names of their own.

    With and without what they spend in the kernel: they hand messages to sockets, too, which is no decoding and no encoding."""
    own, own_user, all_threads = 0.0, 0.0, 0.0
    main = Path(f"/proc/{process.pid}/comm").read_text()
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            all_threads += seconds
            if (task / "comm").read_text() == main:
                own += seconds
                own_user += int((task / "stat").read_text().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")
        except OSError:  # it has just ended
            pass
    return own, all_threads, own_user


def loopback(options):
    rows = Rows()
    reference, spent, everything, user, shares = [], [], [], [], []
    for _ in range(options.turns):
        before = load_note()
        up, down = codec_seconds(UP), codec_seconds(DOWN)
        reference.append(4 * up[2] + down[0])
        shares.append(min(up[3], down[3]))
        server, address = listening(["--bench", "--listen", "127.0.0.1:0", "--min-workers", "4", "--threads", "1"])
        try:
            marks = []
            for steps in (2, 2, 22):  # joining and leaving cost the same in the second and the third
                subprocess.run(
                    [
                        PROGRAM,
                        "load",
                        "--server",
                        address,
                        "--workers",
                        "4",
                        "--elements",
                        str(ELEMENTS),
                        "--steps",
                        str(steps),
                        "--up",
                        UP,
                        "--down",
                        DOWN,
                        "--json",
                    ],
                    check=True,
                    stdout=subprocess.DEVNULL,
                    timeout=300,
                )
                marks.append(thread_seconds(server))
        finally:
            stop(server)
        per_step = [((marks[2][i] - marks[1][i]) - (marks[1][i] - marks[0][i])) / 20 for i in (0, 1, 2)]
        spent.append(per_step[0])
        everything.append(per_step[1])
        user.append(per_step[2])
        print(
            f"  turn: codecs {reference[-1]:.4f} s, server {user[-1]:.4f} s, with the kernel {spent[-1]:.4f} s, with gRPC {everything[-1]:.4f} s; {before}",
            file=sys.stderr,
        )
    command = f"gradwire serve --bench --threads 1; gradwire load --workers 4 --elements {ELEMENTS} --up {UP} --down {DOWN}"
    note = f"median of {options.turns} turns; {load_note()}; bench codec had a processor for at least {100 * min(shares):.0f} % of its time"
    rows.add(
        command,
        "codec_s",
        statistics.median(reference),
        "s",
        note=f"4 decodings of {UP} and 1 encoding of {DOWN}, bench codec --threads 1; {note}",
    )
    rows.add(
        command,
        "server_s",
        statistics.median(spent),
        "s",
        note=f"processor time of the threads that decode, add and encode, a step, sending and checks included; {note}",
    )
    rows.add(
        command,
        "server_user_s",
        statistics.median(user),
        "s",
        note=f"the same without the kernel's part, which is the sending; {note}",
    )
    rows.add(
        command,
        "server_all_s",
        statistics.median(everything),
        "s",
        note=f"of the whole server, gRPC's threads too; {note}",
    )
    rows.add(
        command,
        "server_with_sending_of_codec",
        statistics.median(r / s for r, s in zip(reference, spent)),
        "1",
        note=f"codec_s over server_s, {note}",
    )
    rows.add(
        command,
        "server_of_codec",
        statistics.median(r / s for r, s in zip(reference, user)),
        "1",
        ">= 0.5",
        f"codec_s over server_user_s, {note}{'; ' + options.note if options.note else ''}",
    )
    rows.append(options.dry_run)


# A link of 100 Mb/s.

PORT, WATCH, PLAIN = 7070, 7071, 7072
SERVER = "10.77.0.1"


def helper(network, node, *words):
    return subprocess.Popen([*network.where(node), sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)


def inside_plain(direction, megabytes):
    """The server's end of a plain transfer with four peers at once: prints bytes per second, from the first byte to the last."""
    with socket.create_server((SERVER, PLAIN)) as door:
        print("ready", flush=True)
        peers = [door.accept()[0] for _ in range(4)]
    if direction == "down":
        threads = [
            threading.Thread(
                target=lambda peer=peer: (peer.sendall(bytes(megabytes * 1_000_000)), peer.shutdown(socket.SHUT_WR))
            )
            for peer in peers
        ]
        for thread in threads:
            thread.start()
        return  # the peers clock it
    clock_arrival(peers)


def inside_peer(direction, megabytes):
    with socket.create_connection((SERVER, PLAIN), timeout=60) as link:
        if direction == "up":
            link.sendall(bytes(megabytes * 1_000_000))
            link.shutdown(socket.SHUT_WR)
        else:
            clock_arrival([link])


def clock_arrival(links):
    """Bytes that come over all links, when the first came and when the last."""
    count, first = 0, None
    while links:
        for link in select.select(links, [], [])[0]:
            data = link.recv(1 << 20)
            first = first or time.monotonic()
            count += len(data)
            if not data:
                links.remove(link)
    print(json.dumps({"bytes": count, "first": first, "last": time.monotonic()}), flush=True)


def inside_watch():
    """Until told to stop: the step, and bytes of the TCP streams (payload) and of the link, of the server."""
    while True:
        try:
            page = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{WATCH}/status.json", timeout=10).read())
        except OSError:
            return
        tcp = subprocess.run(
            ["ss", "-tinH", "state", "established", f"( sport = :{PORT} )"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        total = lambda name: sum(int(word.split(":")[1]) for word in tcp.split() if word.startswith(name + ":"))
        statistic = lambda name: int(Path(f"/sys/class/net/eth0/statistics/{name}").read_text())
        print(
            json.dumps(
                {
                    "time": time.monotonic(),
                    "step": page["step"],
                    "up": total("bytes_received"),
                    "down": total("bytes_acked"),
                    "link_up": statistic("rx_bytes"),
                    "link_down": statistic("tx_bytes"),
                }
            ),
            flush=True,
        )
        time.sleep(0.2)


def plain_rate(network, direction, megabytes=20):
    """Bytes per second that four plain TCP streams together get over the server's link."""
    server = helper(network, 0, "inside-plain", "--direction", direction, "--megabytes", str(megabytes))
    peers = []
    try:
        server.stdout.readline()
        peers = [
            helper(network, i, "inside-peer", "--direction", direction, "--megabytes", str(megabytes))
            for i in range(1, 5)
        ]
        for peer in [server, *peers]:
            peer.wait(120)
        clocks = [json.loads(end.stdout.read()) for end in ([server] if direction == "up" else peers)]
        return sum(clock["bytes"] for clock in clocks) / (
            max(clock["last"] for clock in clocks) - min(clock["first"] for clock in clocks)
        )
    finally:
        for process in [server, *peers]:
            stop(process)


def over_link(network, elements, steps, up, down, send, pause=0.0):
    """One run: what the workers say, and what was watched at the server."""
    processes = []
    try:
        server, _ = listening(
            [
                "--bench",
                "--listen",
                f"{SERVER}:{PORT}",
                "--watch",
                f"127.0.0.1:{WATCH}",
                "--min-workers",
                "4",
                "--deadline",
                "600",
                "--insecure",
            ],
            network.where(0),
        )
        processes.append(server)
        watch = helper(network, 0, "inside-watch")
        processes.append(watch)
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(json.loads(line) for line in watch.stdout), daemon=True)
        reader.start()
        workers = [
            subprocess.Popen(
                [
                    *network.where(i),
                    PROGRAM,
                    "load",
                    "--server",
                    f"{SERVER}:{PORT}",
                    "--workers",
                    "1",
                    "--elements",
                    str(elements),
                    "--steps",
                    str(steps),
                    "--compute",
                    str(pause),
                    "--up",
                    up,
                    "--down",
                    down,
                    "--send",
                    send,
                    "--insecure",
                    "--json",
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(1, 5)
        ]
        processes += workers
        reports = [json.loads(worker.communicate(timeout=600)[0]) for worker in workers]
        assert all(
            report["late"] == 0 and report["reconnects"] == 0 and report["steps"] == steps for report in reports
        ), reports
        stop(server)
        reader.join(30)
        return reports, lines
    finally:
        for process in reversed(processes):
            stop(process)


def step_seconds(lines, steps):
    """From the end of the first step to the end of the last: joining and leaving are left out."""
    ends = {}
    for line in lines:
        ends.setdefault(line["step"], line["time"])
    return (ends[steps] - ends[1]) / (steps - 1)


def mean(reports, name):
    return statistics.mean(report[name] for report in reports)


def socket_rows(rows, network):
    """Bytes between the first and the last moment of rest; workers pause between steps, so that there are such moments."""
    elements, steps = 5_000_000, 5
    reports, lines = over_link(network, elements, steps, UP, DOWN, "weights", pause=2)
    rest = {}
    for before, after in zip(lines, lines[1:]):
        if (
            before["step"] == after["step"]
            and all(before[name] == after[name] for name in ("up", "down"))
            and 1 <= after["step"] < steps
        ):
            rest[after["step"]] = after
    first, last = rest[min(rest)], rest[max(rest)]
    count = 4 * (last["step"] - first["step"])
    command = f"gradwire load --workers 1 --elements {elements} --steps {steps} --compute 2 --up {UP} --down {DOWN}, four of them on a shaped link"
    for way in "up", "down":
        messages = count * mean(reports, f"{way}_bytes")
        rows.add(
            command,
            f"socket_over_messages_{way}",
            (last[way] - first[way]) / messages,
            "1",
            "<= 1.02",
            "TCP payload, all frames and acknowledgements of the protocol counted",
        )
        rows.add(
            command,
            f"link_over_messages_{way}",
            (last[f"link_{way}"] - first[f"link_{way}"]) / messages,
            "1",
            note="with Ethernet, IP and TCP heads and TCP's acknowledgements of the other way",
        )


def link(options):
    rows = Rows()
    refuse_without_means("server.py")
    with Network(5, options.rate) as network:  # the server is node 0
        plain = {}
        for way in "up", "down":
            plain[way] = plain_rate(network, way)
            rows.add(
                f"four plain TCP streams, tc tbf rate {options.rate}",
                f"plain_rate_{way}",
                8 * plain[way] / 1e6,
                "Mb/s",
                note="payload, the server's link",
            )
        socket_rows(rows, network)
        pace = {}
        for name, up, down, send, steps in (
            ("3_8", UP, DOWN, "weights", 6),
            ("fp32", "fp32", "fp32", "weights", 3),
            ("delta", UP, "qsgd:bits=4,rounding=nearest", "updates", 6),
        ):
            began = load_note()
            reports, lines = over_link(network, ELEMENTS, steps, up, down, send)
            seconds = step_seconds(lines, steps)
            pace[name] = 1 / seconds
            traffic = {way: 4 * mean(reports, f"{way}_bytes") / plain[way] for way in ("up", "down")}
            compute = mean(reports, "encode_s") + mean(reports, "decode_s")
            floor_s = max(traffic.values())
            command = f"gradwire load --workers 1 --elements {ELEMENTS} --up {up} --down {down} --send {send}, four of them, tc tbf rate {options.rate}"
            note = f"{began}, {load_note()} after"
            rows.add(
                command,
                "steps_per_s",
                pace[name],
                "1/s",
                note=f"{steps - 1} steps of {seconds:.3f} s after the first; {note}",
            )
            rows.add(
                command,
                "link_s",
                floor_s,
                "s",
                note=f"the greater of 4 messages up ({traffic['up']:.3f} s) and down ({traffic['down']:.3f} s) at the plain rate",
            )
            rows.add(
                command,
                "compute_s",
                compute,
                "s",
                note=f"a worker's encoding ({mean(reports, 'encode_s'):.3f} s) and decoding in a step, clocked in the same run",
            )
            rows.add(
                command,
                "of_link_and_compute",
                (floor_s + compute) / seconds,
                "1",
                ">= 0.85" if name == "3_8" else "",
                "(link_s + compute_s) x steps_per_s",
            )
            rows.add(
                command,
                "of_link_alone",
                floor_s / seconds,
                "1",
                note="link_s x steps_per_s: as if all computing were hidden",
            )
            if name == "3_8":
                for way, bound in ("up", 0.10), ("down", 0.26):
                    rows.add(
                        command,
                        f"{way}_of_fp32",
                        mean(reports, f"{way}_of_fp32"),
                        "1",
                        f"<= {bound}",
                        "bytes of messages",
                    )
            if name == "fp32":
                fp32_limit = floor_s + compute
            if name == "delta":
                rows.add(command, "speedup_over_fp32", pace[name] / pace["fp32"], "1", ">= 5")
                rows.add(
                    command,
                    "speedup_over_fp32_limit",
                    pace[name] * fp32_limit,
                    "1",
                    note="over an fp32 that takes no longer than its own link_s + compute_s",
                )
        rows.add(
            f"gradwire load --up {UP} --down {DOWN}, tc tbf rate {options.rate}",
            "speedup_over_fp32",
            pace["3_8"] / pace["fp32"],
            "1",
        )
        rows.add(
            f"gradwire load --up {UP} --down {DOWN}, tc tbf rate {options.rate}",
            "speedup_over_fp32_limit",
            pace["3_8"] * fp32_limit,
            "1",
        )
    rows.append(options.dry_run)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work = {"accuracy": accuracy, "causes": causes, "rates": rates, "floor": floor, "loopback": loopback, "link": link}
    parser.add_argument(
        "what",
        choices=[*work, "inside-plain", "inside-peer", "inside-watch"],
        help="inside-*: what link runs within its namespaces",
    )
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[1, 2, 3],
        help="accuracy, causes: as in 1,2,3",
    )
    parser.add_argument("--turns", type=int, default=3, help="loopback: how often")
    parser.add_argument("--rate", default="100mbit", help="link: as tc writes it")
    parser.add_argument("--note", default="", help="loopback: words for the note of the ratio")
    parser.add_argument("--dry-run", action="store_true", help="show the rows and append nothing")
    parser.add_argument("--direction", choices=["up", "down"], default="up", help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, default=20, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "inside-plain":
        inside_plain(options.direction, options.megabytes)
    elif options.what == "inside-peer":
        inside_peer(options.direction, options.megabytes)
    elif options.what == "inside-watch":
        inside_watch()
    else:
        work[options.what](options)


if __name__ == "__main__":
    main()
