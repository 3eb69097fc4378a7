# SPDX-License-Identifier: Apache-2.0
"""golden_messages.py FOLDER: encodes every golden message of tests/wire/golden again with the installed package, which
must give the same bytes, and decodes it, which must give the same values. It needs numpy and no pytest, so that it runs
on an emulated processor in little time. Messages with bf16 tensors need the package ml_dtypes, and are left out without
it.
"""

import json
import platform
import sys
from pathlib import Path

import numpy as np

import gradwire

DTYPES = {"f32": np.float32, "f16": np.float16}
try:
    from ml_dtypes import bfloat16

    DTYPES["bf16"] = bfloat16
except ImportError:
    pass


def made(tensor):
    """The input of a large message, of which there is no file: the rule of tests/wire/golden.h."""
    state, values = tensor["input_seed"], np.empty(tensor["count"], np.float32)
    for i in range(len(values)):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        values[i] = (state >> 40) - 2**23
    values *= np.float32(2.0**-23)
    return values * values * values * np.float32(tensor["input_scale"])


def check(frame, folder):
    """What is wrong with a message, or nothing."""
    expected = (folder / f"{frame['name']}.gw").read_bytes()
    rows = []
    for tensor, told in zip(frame["tensors"], gradwire.inspect(expected)["tensors"]):
        codec = gradwire.Codec(tensor["spec"])
        if told["table"]:
            codec = codec.with_table(told["table"])
        rows.append((tensor["name"], tensor["count"], tensor["dtype"], codec, tensor["first"], tensor.get("shape", ())))
    recorded = folder / f"{frame['name']}.in.f32"
    if recorded.exists():
        parts = np.split(np.fromfile(recorded, "<f4"), np.cumsum([row[1] for row in rows])[:-1])
    else:
        parts = [made(tensor) for tensor in frame["tensors"]]
    arrays = [part.astype(DTYPES[row[2]]) for part, row in zip(parts, rows)]
    stamp = {key: frame[key] for key in ("seed", "step", "stage", "rank", "world")}
    if gradwire.Plan(rows).encode(arrays, **stamp) != expected:
        return "encodes to other bytes"
    as_f32 = gradwire.Plan([(name, count, "float32", *rest) for name, count, _dtype, *rest in rows])
    decoded = np.concatenate(as_f32.decode(expected) or [np.empty(0, np.float32)])
    if recorded.exists() and decoded.tobytes() != (folder / f"{frame['name']}.f32").read_bytes():
        return "decodes to other values"
    return ""


def main(folder):
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    frames = manifest["frames"] + manifest["large"]
    usable = [frame for frame in frames if all(tensor["dtype"] in DTYPES for tensor in frame["tensors"])]
    wrong = [f"{frame['name']} {words}" for frame in usable if (words := check(frame, folder))]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    simd = (gradwire._core.simd_targets() or ["scalar"])[0]
    print(
        f"{platform.machine()}, {simd}: {len(usable)} golden messages, {len(wrong)} with other bytes or values, "
        f"{len(frames) - len(usable)} left out for want of ml_dtypes"
    )
    return 1 if wrong or not usable else 0


sys.exit(main(Path(sys.argv[1])))
