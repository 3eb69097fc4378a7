# SPDX-License-Identifier: Apache-2.0
"""The server's checkpoint is a safetensors file to others too: a reader written here from the format's description
alone reads what the server saved, bit for bit, and the server reads what is written here by hand, in every float type.
"""

import json
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

TOOL = Path(os.environ["GRADWIRE_BUILD"]) / "bin/store_tool"
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}


def read(path):
    """Names to arrays, and the metadata."""
    content = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data, end = content[8 + length :], 0
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        dtype = np.dtype(NUMPY[entry["dtype"]])
        assert first == end and first % dtype.itemsize == 0, name
        tensors[name] = np.frombuffer(data[first:last], dtype).reshape(entry["shape"])
        end = last
    assert end == len(data) and (8 + length) % 8 == 0
    return tensors, metadata


def write(path, tensors, metadata=None, malform=None):
    """tensors: name to (dtype, array); malform changes the header before it is written."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        raw = array.astype(NUMPY[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    if malform:
        malform(header)
    text = json.dumps(header, ensure_ascii=False).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def tool(what, path):
    return subprocess.run([TOOL, what, path], capture_output=True, text=True, timeout=600, check=False)


def show(path):
    run = tool("show", path)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def floats(bits):
    return np.array(bits, "<u4").view("<f4")


def test_another_reader_reads_what_the_server_saved(tmp_path):
    path = tmp_path / "ps.gwc"
    run = tool("save", path)
    assert run.returncode == 0, run.stderr
    tensors, metadata = read(path)
    assert metadata == {"format": "gradwire server state", "version": "1", "step": "123"}
    weight = tensors["conv.weight"]
    assert weight.shape == (2, 3)
    expected = np.array([1.5, -2.25, 2.0**-140, -0.0, np.nan, 3e38], "<f4").view("<u4")
    expected[4] = 0x7FC12345
    assert (weight.ravel().view("<u4") == expected).all()
    assert tensors["größe"].shape == () and tensors["größe"] == np.float32(0.1)
    assert tensors["empty"].shape == (0, 7)
    assert tensors["bn.running_mean"].tolist() == [0, 1, 2]
    assert tensors["gradwire.residual"].tolist() == [-1, np.float32(1e-20)]
    assert list(tensors)[-2:] == ["gradwire.state", "gradwire.check"] and tensors["gradwire.check"].shape == (8,)

    state = json.loads(tensors["gradwire.state"].tobytes())
    assert state["step"] == 123 and state["signature"] == {"model": "cnn", "tensors": 3}
    named = set(state["weights"] + state["buffers"] + state["others"])
    assert named == set(tensors) - {"gradwire.state", "gradwire.check"}
    first = state["workers"][0]
    assert first["sequence"] == [7, 8] and first["left"] is False
    assert [struct.unpack(">d", bytes.fromhex(x))[0] for x in first["computed"]] == [0.1, 1e300]
    assert first["residual"] == ["8000000000000000", "0000000000000001"]


def test_the_server_shows_what_it_saved(tmp_path):
    path = tmp_path / "ps.gwc"
    tool("save", path)
    shown = show(path)
    assert shown["step"] == 123
    assert shown["workers"] == [{"id": "w-1", "sequence": [7, 8]}, {"id": "w-2", "sequence": [1, 2]}]


def test_the_server_reads_a_file_of_others_in_every_float_type(tmp_path):
    path = tmp_path / "init.safetensors"
    halves = np.arange(65536, dtype="<u2")
    wide = np.array([0, -0.0, 1 / 3, 2.0**-149, 2.0**-150, 1.5 * 2.0**-149, 3.4028234e38, np.inf, 1e-300])
    single = np.array([[1, 2, 3], [4, 5, np.nan]], "<f4")
    write(path, {"byte": ("U8", np.arange(3)), "wide": ("F64", wide), "single": ("F32", single),
                 "half": ("F16", halves.view("<f2")), "brain": ("BF16", halves), "ключ": ("F32", np.array(7.0))},
          {"format": "pt"})
    shown = show(path)
    assert shown["metadata"] == {"format": "pt"}
    tensors = shown["tensors"]
    assert list(sorted(tensors)) == sorted(["byte", "wide", "single", "half", "brain", "ключ"])
    assert tensors["byte"] == {"dtype": "U8", "shape": [3]}
    with np.errstate(under="ignore"):
        assert tensors["wide"]["bits"] == wide.astype("<f4").view("<u4").tolist()
    assert tensors["single"]["shape"] == [2, 3] and tensors["single"]["bits"] == single.ravel().view("<u4").tolist()
    half = halves.view("<f2").astype("<f4")
    np.testing.assert_array_equal(floats(tensors["half"]["bits"]), half)  # NaN equals NaN here
    assert (np.signbit(floats(tensors["half"]["bits"])) == np.signbit(half)).all()
    assert tensors["brain"]["bits"] == (halves.astype("<u4") << 16).tolist()
    assert floats(tensors["ключ"]["bits"]).tolist() == [7] and tensors["ключ"]["shape"] == []


def move(header):
    header["a"]["data_offsets"] = [4, 12]


def overlap(header):
    header["b"]["data_offsets"] = [4, 12]


def swell(header):
    header["a"]["shape"] = [2**62, 2]


def unknown(header):
    header["a"]["dtype"] = "F31"


@pytest.mark.parametrize(("malform", "field"), [(move, "data_offsets"), (overlap, "data_offsets"), (swell, "shape"),
                                            (unknown, "dtype")])
def test_a_malformed_header_is_refused_by_field(tmp_path, malform, field):
    path = tmp_path / "malform.safetensors"
    tensors = {"a": ("F32", np.zeros(2)), "b": ("F32", np.ones(2))}
    write(path, tensors)
    show(path)
    write(path, tensors, malform=malform)
    run = tool("show", path)
    assert run.returncode == 1 and run.stderr.startswith(f"1 {field}: {path}: {field}: "), run.stderr
    assert run.stderr.count("\n") == 1
