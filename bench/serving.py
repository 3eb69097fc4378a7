# SPDX-License-Identifier: Apache-2.0
"""Servers as processes, for the scripts that measure them or train over them."""

import json
import subprocess
import threading

from rows import PROGRAM


def stop(process):
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listening(arguments, where=()):
    process = subprocess.Popen([*where, PROGRAM, "serve", "--json", *arguments], stdout=subprocess.PIPE, text=True)
    line = json.loads(process.stdout.readline())
    while line["event"] != "listening":
        line = json.loads(process.stdout.readline())
    threading.Thread(target=process.stdout.read, daemon=True).start()  # events that nobody reads must not block it
    return process, line["address"]
