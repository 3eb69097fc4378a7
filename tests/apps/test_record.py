# SPDX-License-Identifier: Apache-2.0
"""bench/record.py: its standard set ranges over the registry, and says what it will run and what is wanted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = os.environ["GRADWIRE"]
BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))


def registry():
    lines = subprocess.run([PROGRAM, "codecs", "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in lines.splitlines()]


def test_every_codec_is_measured_and_promises_come_with_their_bounds():
    done = subprocess.run([sys.executable, BENCH / "record.py", "--list", "--gradwire", PROGRAM], text=True,
                          stdout=subprocess.PIPE, check=True)
    lines = done.stdout.splitlines()
    for codec in registry():
        assert any(line.startswith(f"gradwire bench codec --codec {codec['codec']}") for line in lines), codec["codec"]
    qsgd = next(line for line in lines if "--codec qsgd:bits=4 --elements" in line)
    assert qsgd.split("; ")[1:] == ["encode_of_copy >= 1.0", "feedback_of_copy >= 0.5", "decode_of_copy >= 1.4"]


def test_a_codec_that_was_just_registered_needs_no_edit():
    import record

    codecs = [*registry(), {"codec": "fresh", "example": "fresh:bits=3"}]
    commands = {(device, command) for device, command, _ in record.standard_set(2, ["AVX2"], True, codecs)}
    assert ("cpu", "bench codec --codec fresh:bits=3 --elements 16777216 --threads 1") in commands
    assert ("cuda", "bench codec --codec fresh:bits=3 --elements 268435456 --device cuda") in commands


def test_a_target_of_a_codec_that_is_gone_is_refused():
    import record

    codecs = [codec for codec in registry() if codec["codec"] != "casq"]
    with pytest.raises(SystemExit, match="casq:bits=2"):
        list(record.standard_set(2, ["AVX2"], False, codecs))
