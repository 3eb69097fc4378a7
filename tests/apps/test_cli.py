# SPDX-License-Identifier: Apache-2.0
"""The program as a user meets it: files in and out, the words of its errors, exit codes, JSON and quiet pipes.

The program is $GRADWIRE_BIN, $GRADWIRE (set by ctest) or build/bin/gradwire.
"""

import contextlib
import json
import math
import os
import pty
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

PROGRAM = (os.environ.get("GRADWIRE_BIN") or os.environ.get("GRADWIRE")
           or str(Path(__file__).resolve().parents[2] / "build/bin/gradwire"))
GOLDEN = Path(__file__).resolve().parents[1] / "wire/golden"
USAGE, BAD_INPUT, IO, UNSUPPORTED = 2, 3, 4, 5


def run(*arguments, code=0, data=None):
    """Runs the program; checks the exit code and that an error is exactly one line on stderr and nothing else."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=120)
    errors = done.stderr.decode()
    assert done.returncode == code, f"{arguments} ended with {done.returncode}\n{errors}"
    if code != 0:
        assert errors.startswith("gradwire: error: ") and errors.count("\n") == 1, errors
    return done.stdout, errors


def refuse(code, words, *arguments, data=None):
    _, errors = run(*arguments, code=code, data=data)
    for word in words:
        assert str(word) in errors, f"{word!r} is not in: {errors}"
    return errors


def rows(*arguments):
    out, errors = run(*arguments, "--json")
    assert errors == "", "a pipe must stay quiet"
    return [json.loads(line) for line in out.decode().splitlines()]


def rerun(command, *arguments, **options):
    """Runs encode or decode where its output may exist from an earlier round."""
    return run(command, "--force", *arguments, **options)


def registered():
    return [row["codec"] for row in rows("codecs")]


CODECS = registered()


def gradient(count, seed=1):
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(count) * generator.choice([1e-3, 1e-2], count)).astype("<f4")


def error_of(exact, approximate):
    exact, approximate = exact.astype("f8").ravel(), approximate.astype("f8").ravel()
    return float(((exact - approximate) ** 2).sum() / (exact ** 2).sum())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def frame(folder):
    """g.npy and its frame g.gw."""
    np.save("g.npy", gradient(5000))
    run("encode", "--codec", "qsgd:bits=4", "--seed", 1, "--step", 7, "--name", "layer.weight", "g.npy", "g.gw")
    return folder


# Round trips through files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_round_trip_of_every_codec_and_npy_type(folder, codec, dtype):
    x = gradient(70001).astype(dtype)
    np.save("g.npy", x)
    run("encode", "--codec", codec, "g.npy", "g.gw")
    run("decode", "g.gw", "back.npy")
    back = np.load("back.npy")
    assert back.dtype == np.dtype(dtype) and back.shape == (70001,)
    # What a step may lose at most on this data: the rest of the energy for selectors, a full step for coarse grids.
    limit = {"fp32": 0, "fp16": 1e-6, "bf16": 1e-5, "qsgd": 0.5, "terngrad": 10, "onebit": 1, "topk": 1}.get(codec, 10)
    assert error_of(x, back) <= limit
    assert sorted(os.listdir()) == ["back.npy", "g.gw", "g.npy"]


def test_same_seed_same_bytes_and_other_key_other_bytes(folder):
    np.save("g.npy", gradient(5000))
    frames = set()
    for key in [("--seed", 1), ("--seed", 2), ("--step", 3), ("--name", "other")]:
        for name in "a.gw", "b.gw":
            rerun("encode", "--codec", "qsgd:bits=4", *key, "g.npy", name)
        assert Path("a.gw").read_bytes() == Path("b.gw").read_bytes()
        frames.add(Path("a.gw").read_bytes()[-2000:])  # the codes alone, not the head that holds step and name
    assert len(frames) == 4


def test_threads_and_simd_do_not_change_the_bytes(folder):
    np.save("g.npy", gradient(300000))
    targets = rows("doctor")[0]["simd_targets"] + ["scalar"]
    for codec in CODECS:
        frames = set()
        for simd in targets:
            rerun("encode", "--codec", codec, "--threads", 3, "--simd", simd, "g.npy", "g.gw")
            frames.add(Path("g.gw").read_bytes())
        assert len(frames) == 1, codec


def test_a_scalar_comes_back_with_one_dimension(folder):
    np.save("scalar.npy", np.float32(1.5))
    run("encode", "--codec", "fp32", "scalar.npy", "g.gw")
    run("decode", "g.gw", "back.npy")
    assert np.load("back.npy").tolist() == [1.5]


def test_npy_of_every_version_is_read(folder):
    x = gradient(10)
    for version in (1, 0), (2, 0), (3, 0):
        with open("g.npy", "wb") as file:
            np.lib.format.write_array(file, x, version=version)
        rerun("encode", "--codec", "fp32", "g.npy", "g.gw")
        rerun("decode", "g.gw", "back.npy")
        assert np.array_equal(np.load("back.npy"), x)


def test_raw_floats_of_every_type(folder):
    x = gradient(1000)
    bf16 = (x.view("<u4") >> 16).astype("<u2")
    for dtype, raw in [("f32", x.tobytes()), ("f16", x.astype("<f2").tobytes()), ("bf16", bf16.tobytes())]:
        Path("g.bin").write_bytes(raw)
        rerun("encode", "--codec", "fp32", "--dtype", dtype, "g.bin", "g.gw")
        rerun("decode", "g.gw", "back.bin")
        assert Path("back.bin").read_bytes() == raw, dtype
    _, note = run("decode", "g.gw", "back.npy")  # bf16, which .npy cannot hold
    assert "written as float32" in note
    assert np.array_equal(np.load("back.npy").view("<u4"), bf16.astype("<u4") << 16)


def test_decode_converts_and_rounds_to_nearest_even(folder):
    x = np.array([1, -2.5, 1 + 2**-11, 1 + 3 * 2**-11, 65504, 65520, 1e-8, 2**-24, 3e-6, 0, -0.0], "<f4")
    np.save("g.npy", x)
    run("encode", "--codec", "fp32", "g.npy", "g.gw")
    _, note = run("decode", "--dtype", "f16", "g.gw", "half.npy")
    assert "1 element is too large for f16" in note
    with np.errstate(over="ignore"):
        assert np.load("half.npy").tobytes() == x.astype("<f2").tobytes()
    run("decode", "--dtype", "bf16", "g.gw", "brain.bin")
    bits = x.view("<u4").astype("u8")
    assert Path("brain.bin").read_bytes() == ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    half = np.load("half.npy")
    np.save("half.npy", half[np.isfinite(half)])
    run("encode", "--codec", "fp32", "half.npy", "half.gw")
    run("decode", "--dtype", "f32", "half.gw", "wide.npy")
    assert np.array_equal(np.load("wide.npy"), half[np.isfinite(half)].astype("<f4"))


def test_a_unit_with_nan_decodes_to_nan_and_the_others_do_not_notice(folder):
    x = gradient(4096)
    x[5] = np.inf
    np.save("g.npy", x)
    run("encode", "--codec", "qsgd:bits=8,bucket=1024", "g.npy", "g.gw")
    run("decode", "g.gw", "back.npy")
    back = np.load("back.npy")
    assert np.isnan(back[:1024]).all() and np.isfinite(back[1024:]).all()


def test_dash_is_standard_input_and_output(folder):
    x = gradient(100)
    np.save("g.npy", x)
    message, _ = run("encode", "--codec", "fp32", "-", "-", data=Path("g.npy").read_bytes())
    raw, _ = run("decode", "-", "-", data=message)
    assert raw == x.tobytes()
    out, _ = run("inspect", "-", data=message)
    assert b"fp32" in out


def test_a_device_as_output_is_written_to_and_not_replaced(folder):
    os.mkfifo("pipe")
    np.save("g.npy", gradient(100))
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE)
    run("encode", "--codec", "fp32", "g.npy", "pipe")
    run("encode", "--codec", "fp32", "g.npy", "g.gw")
    assert reader.communicate(timeout=10)[0] == Path("g.gw").read_bytes()
    assert Path("pipe").is_fifo()


def test_a_link_as_output_stays_and_what_it_leads_to_is_replaced(frame):
    os.mkdir("elsewhere")
    Path("elsewhere/real").write_bytes(b"old")
    os.symlink("elsewhere/real", "link")
    os.symlink("elsewhere/new.npy", "dangling.npy")
    refuse(USAGE, ["link", "exists"], "encode", "--codec", "fp32", "g.npy", "link")
    run("encode", "-f", "--codec", "fp32", "g.npy", "link")
    run("decode", "g.gw", "dangling.npy")
    assert os.readlink("link") == "elsewhere/real" and os.readlink("dangling.npy") == "elsewhere/new.npy"
    assert Path("elsewhere/real").read_bytes()[:4] == b"GWIR" and np.load("elsewhere/new.npy").shape == (5000,)
    os.symlink("/dev/null", "nothing")
    run("encode", "--codec", "fp32", "g.npy", "nothing")
    assert os.readlink("nothing") == "/dev/null" and Path("/dev/null").is_char_device()
    assert sorted(os.listdir("elsewhere")) == ["new.npy", "real"]


def test_an_open_file_named_by_dev_stdout_is_written_to(frame):
    with open("out.gw", "wb") as out:
        done = subprocess.run([PROGRAM, "encode", "-f", "--codec", "fp32", "g.npy", "/dev/stdout"], stdout=out)
    assert done.returncode == 0 and Path("out.gw").read_bytes()[:4] == b"GWIR"
    assert os.path.islink("/dev/stdout")


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec, words", [
    ("qsdg", ["qsdg", "qsgd", "topk"]),
    ("qsgd:bit=4", ["bit", "bits", "bucket"]),
    ("qsgd:bits=9", ["bits", "9", "2", "8"]),
    ("qsgd:bits=four", ["bits", "four"]),
    ("qsgd:bucket=1000", ["bucket", "1000", "power of two"]),
    ("qsgd:norm=l3", ["norm", "l3", "max", "l2"]),
    ("topk:ratio=0", ["ratio", "0"]),
    ("", ["codec"]),
])
def test_a_wrong_codec_is_refused_by_field_value_and_what_is_allowed(folder, spec, words):
    np.save("g.npy", gradient(10))
    for command in [("encode", "--codec", spec, "g.npy", "g.gw"), ("bench", "codec", "--codec", spec),
                    ("bench", "threads", "--codec", spec), ("bench", "collective", "--codec", spec)]:
        refuse(USAGE, words, *command)
    assert os.listdir() == ["g.npy"]


@pytest.mark.parametrize("arguments, words", [
    ([], ["--help"]),
    (["compress"], ["compress", "--help"]),
    (["encode", "g.npy", "g.gw"], ["--codec", "encode --help"]),
    (["encode", "--codec", "fp32", "g.npy"], ["OUT"]),
    (["encode", "--codec", "fp32", "--level", "3", "g.npy", "g.gw"], ["--level"]),
    (["encode", "--codec", "fp32", "--seed", "x", "g.npy", "g.gw"], ["--seed", "x"]),
    (["encode", "--codec", "fp32", "--seed", "-1", "g.npy", "g.gw"], ["--seed", "-1"]),
    (["encode", "--codec", "fp32", "--threads", "0", "g.npy", "g.gw"], ["--threads", "0", "1"]),
    (["encode", "--codec", "fp32", "--simd", "mmx", "g.npy", "g.gw"], ["mmx"]),
    (["encode", "--codec", "fp32", "--device", "tpu", "g.npy", "g.gw"], ["--device", "tpu", "cpu", "cuda"]),
    (["encode", "--codec", "fp32", "--dtype", "f64", "g.bin", "g.gw"], ["--dtype", "f64", "bf16"]),
    (["encode", "--codec", "fp32", "--dtype", "f32", "g.npy", "g.gw"], ["--dtype", "g.npy"]),
    (["encode", "--codec", "fp32", "g.bin", "g.gw"], ["g.bin", "--dtype"]),
    (["bench"], ["bench --help"]),
    (["bench", "codec", "--elements", "0"], ["--elements", "0"]),
    (["bench", "codec", "--pairs", "0"], ["--pairs", "0"]),
    (["bench", "collective", "--world", "0"], ["--world", "0"]),
    (["bench", "collective", "--world", "4", "--nodes", "3", "--elements", "10"], ["nodes", "3", "1, 2, 4"]),
    (["bench", "collective", "--nodes", "some"], ["--nodes", "some", "auto"]),
    (["bench", "collective", "--method", "ring"], ["--method", "ring", "scatter"]),
    (["bench", "collective", "--engine", "nccl"], ["--engine", "nccl", "loopback"]),
    (["demo", "--world", "-2"], ["--world", "-2"]),
])
def test_wrong_usage_is_one_line_that_names_the_option(folder, arguments, words):
    np.save("g.npy", gradient(10))
    Path("g.bin").write_bytes(bytes(40))
    refuse(USAGE, words, *arguments)
    assert sorted(os.listdir()) == ["g.bin", "g.npy"]


def test_files_that_cannot_be_read_or_written(frame):
    refuse(IO, ["absent.npy"], "encode", "--codec", "fp32", "absent.npy", "x.gw")
    refuse(IO, ["absent.gw"], "decode", "absent.gw", "x.npy")
    refuse(IO, ["absent.gw"], "inspect", "absent.gw")
    refuse(IO, ["."], "inspect", ".")
    refuse(IO, ["nowhere/x.gw"], "encode", "--codec", "fp32", "g.npy", "nowhere/x.gw")
    refuse(IO, ["/dev/full"], "decode", "g.gw", "/dev/full")
    assert sorted(os.listdir()) == ["g.gw", "g.npy"]


def test_an_old_output_survives_a_failure(frame):
    Path("back.npy").write_bytes(b"precious")
    Path("bad.gw").write_bytes(Path("g.gw").read_bytes()[:-1])
    refuse(BAD_INPUT, [], "decode", "--force", "bad.gw", "back.npy")
    assert Path("back.npy").read_bytes() == b"precious"


def npy(header, data=b"", version=b"\x01\x00"):
    header = header.encode()
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + data


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"


@pytest.mark.parametrize("content, code, words", [
    (b"", BAD_INPUT, ["magic"]),
    (b"\x93NUMPY\x01", BAD_INPUT, ["header"]),
    (b"\x93NUMPY\x04\x00\x00\x00", BAD_INPUT, ["version", "4"]),
    (b"\x93NUMPY\x01\x00\xff\xff{", BAD_INPUT, ["header", "65535"]),
    (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", BAD_INPUT, ["header"]),
    (npy(GOOD, bytes(7)), BAD_INPUT, ["shape", "7"]),
    (npy(GOOD, bytes(9)), BAD_INPUT, ["shape", "9"]),
    (npy("{"), BAD_INPUT, ["header"]),
    (npy("{'descr': '<f4', 'fortran_order': False}"), BAD_INPUT, ["shape"]),
    (npy("{'descr': '<f4', 'shape': (0,)}"), BAD_INPUT, ["fortran_order"]),
    (npy("{'fortran_order': False, 'shape': (0,)}"), BAD_INPUT, ["descr"]),
    (npy(GOOD.replace("(2,)", "(-2,)"), bytes(8)), BAD_INPUT, ["shape"]),
    (npy(GOOD.replace("(2,)", "(2"), bytes(8)), BAD_INPUT, ["shape"]),
    (npy(GOOD.replace("(2,)", "(99999999999999999999,)"), bytes(8)), BAD_INPUT, ["shape"]),
    (npy(GOOD.replace("(2,)", "(4294967296, 4294967296)"), bytes(8)), BAD_INPUT, ["shape"]),
    (npy(GOOD.replace("(2,)", "(4611686018427387904,)"), b""), BAD_INPUT, ["shape"]),
    (npy(GOOD.replace("False", "Maybe"), bytes(8)), BAD_INPUT, ["fortran_order"]),
    (npy(GOOD.replace("}", "} 1"), bytes(8)), BAD_INPUT, ["header"]),
    (npy(GOOD.replace("<f4", "<f8"), bytes(16)), USAGE, ["descr", "<f8", "<f4", "<f2"]),
    (npy(GOOD.replace("<f4", ">f4"), bytes(8)), USAGE, ["descr", ">f4"]),
    (npy(GOOD.replace("<f4", "<i4"), bytes(8)), USAGE, ["descr", "<i4"]),
    (npy(GOOD.replace("'<f4'", "[('a', '<f4')]"), bytes(8)), USAGE, ["descr"]),
])
def test_a_bad_npy_is_refused_by_field(folder, content, code, words):
    Path("g.npy").write_bytes(content)
    refuse(code, ["g.npy", *words], "encode", "--codec", "fp32", "g.npy", "g.gw")
    assert os.listdir() == ["g.npy"]


def test_raw_input_must_be_whole_elements(folder):
    Path("g.bin").write_bytes(bytes(7))
    refuse(BAD_INPUT, ["g.bin", "7", "f16"], "encode", "--codec", "fp32", "--dtype", "f16", "g.bin", "g.gw")


def test_a_truncated_frame_is_refused_and_leaves_nothing(frame):
    whole = Path("g.gw").read_bytes()
    for length in [0, 1, 7, 20, 40, 60, 100, len(whole) // 2, len(whole) - 1]:
        Path("bad.gw").write_bytes(whole[:length])
        for command in [("decode", "bad.gw", "back.npy"), ("inspect", "bad.gw")]:
            refuse(BAD_INPUT, ["bad.gw"], *command)
    Path("bad.gw").write_bytes(whole + b"\0")
    refuse(BAD_INPUT, [], "decode", "bad.gw", "back.npy")
    assert sorted(os.listdir()) == ["bad.gw", "g.gw", "g.npy"]


def test_an_altered_frame_is_refused_and_leaves_nothing(frame):
    whole = Path("g.gw").read_bytes()
    for place in [0, 4, 9, 16, 33, len(whole) // 2, len(whole) - 1]:
        altered = bytearray(whole)
        altered[place] ^= 0x10
        Path("bad.gw").write_bytes(altered)
        refuse(BAD_INPUT, [], "decode", "bad.gw", "back.npy")
    refuse(BAD_INPUT, ["body_check"], "decode", "bad.gw", "back.npy")
    assert sorted(os.listdir()) == ["bad.gw", "g.gw", "g.npy"]
    # inspect still shows the head of a frame whose body alone is wrong
    done = subprocess.run([PROGRAM, "inspect", "--json", "bad.gw"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == BAD_INPUT
    assert json.loads(done.stdout)["body_check_verdict"] == "wrong"


def test_max_elements_is_checked_before_memory_is_taken(frame):
    refuse(BAD_INPUT, ["5000", "4999"], "decode", "--max-elements", 4999, "g.gw", "back.npy")
    assert not Path("back.npy").exists()
    run("decode", "--max-elements", 5000, "g.gw", "back.npy")


@pytest.mark.parametrize("count", [2**40 + 1, 2**62, 2**64 - 1])
def test_counts_beyond_every_message_are_malformed_whatever_the_limit(folder, monkeypatch, count):
    monkeypatch.syspath_prepend(GOLDEN.parent)
    from malformed_frames import golden, put, reseal

    message = bytearray(golden("fp32_1"))
    put("row", 8, "Q", count)(message)
    Path("bad.gw").write_bytes(reseal(bytes(message)))
    for limit in [], ["--max-elements", 2**64 - 1]:
        refuse(BAD_INPUT, ["tensor[0].count", count], "decode", *limit, "bad.gw", "back.npy")
    assert os.listdir() == ["bad.gw"]


def test_a_frame_that_wants_more_than_the_memory_is_refused_by_default(folder, monkeypatch):
    """Zeros take no bytes with some codecs, so that a small file may ask for any amount of memory."""
    monkeypatch.syspath_prepend(GOLDEN.parent)
    from malformed_frames import put, reseal

    np.save("zeros.npy", np.zeros(1 << 15, "<f4"))
    run("encode", "--codec", "dqsgd", "zeros.npy", "zeros.gw")
    row, = rows("inspect", "zeros.gw")
    message = bytearray(Path("zeros.gw").read_bytes())
    assert row["tensors"][0]["body_bytes"] == 0 and len(message) < 400
    wanted = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 // (1 << 15) * (1 << 15)
    put("row", 8, "Q", wanted)(message)
    Path("bomb.gw").write_bytes(reseal(bytes(message)))
    assert rows("inspect", "bomb.gw")[0]["elements"] == wanted, "it holds together"
    refuse(BAD_INPUT, ["tensor[0].count", wanted, "limit"], "decode", "bomb.gw", "back.npy")
    refuse(BAD_INPUT, ["tensor[0].count", wanted, 1000], "inspect", "--max-elements", 1000, "bomb.gw")
    assert not Path("back.npy").exists()


@pytest.mark.parametrize("name, command", [("x.gw", ["decode", "x.gw", "out"]), ("x.gw", ["inspect", "x.gw"]),
                                           ("x.npy", ["encode", "--codec", "fp32", "x.npy", "out"])])
def test_a_sparse_file_is_refused_by_its_first_bytes(folder, name, command):
    with open(name, "wb") as file:
        file.truncate(8 << 40)
    began = time.monotonic()
    refuse(BAD_INPUT, ["magic"], *command)
    assert time.monotonic() - began < 5
    with open(name, "r+b") as file:  # as large as before, with a first line that is in order
        file.write(golden_message() if name == "x.gw" else b"\x93NUMPY")
    refuse(BAD_INPUT if name == "x.gw" else IO, ["total_bytes" if name == "x.gw" else "memory"], *command)
    assert time.monotonic() - began < 10 and not Path("out").exists()


def golden_message():
    return (GOLDEN / "fp32_1.gw").read_bytes()


def test_cuda_is_refused_clearly_where_there_is_none(frame):
    if rows("doctor")[0]["cuda_devices"] > 0:
        run("encode", "--codec", "qsgd:bits=4", "--seed", 1, "--step", 7, "--name", "layer.weight", "--device", "cuda",
            "g.npy", "c.gw")
        assert Path("c.gw").read_bytes() == Path("g.gw").read_bytes()
    else:
        refuse(UNSUPPORTED, ["cuda"], "encode", "--codec", "fp32", "--device", "cuda", "g.npy", "c.gw")
        assert not Path("c.gw").exists()


def test_a_tensor_of_a_message_with_several_is_chosen(folder):
    message = GOLDEN / "mixed.gw"
    tensors = rows("inspect", message)[0]["tensors"]
    assert len(tensors) > 1
    refuse(USAGE, ["--tensor", len(tensors)], "decode", message, "back.npy")
    refuse(USAGE, ["--tensor", len(tensors)], "decode", "--tensor", len(tensors), message, "back.npy")
    assert os.listdir() == []
    for tensor in tensors:
        run("decode", "-f", "--tensor", tensor["index"], "--dtype", "f32", message, "back.npy")
        assert np.load("back.npy").shape == (tensor["count"],)
    page = run("inspect", message)[0].decode()
    for tensor in tensors:
        assert tensor["name_hash"] in page and tensor["codec"] in page


# Shapes and existing files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(7,), (30, 50), (3, 1, 4, 5), (2,) * 8, (0, 4), (5, 0)])
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_a_shape_comes_back_and_elements_stand_in_their_places(folder, shape, order, dtype):
    x = np.arange(math.prod(shape), dtype=dtype).reshape(shape)
    np.save("g.npy", np.asarray(x, order=order))
    run("encode", "--codec", "fp32", "g.npy", "g.gw")
    tensor, = rows("inspect", "g.gw")[0]["tensors"]
    assert tensor["shape"] == (list(shape) if len(shape) > 1 else [])
    if len(shape) > 1:
        assert str(shape) in run("inspect", "g.gw")[0].decode()
    run("decode", "g.gw", "back.npy")
    back = np.load("back.npy")
    assert back.shape == shape and back.dtype == x.dtype and back.flags.c_contiguous
    np.testing.assert_array_equal(back, x)
    run("decode", "g.gw", "back.raw")
    assert Path("back.raw").read_bytes() == x.tobytes()


def test_more_dimensions_than_a_frame_keeps_are_left_out_aloud(folder):
    np.save("g.npy", np.arange(512, dtype="f4").reshape((2,) * 9))
    _, errors = run("encode", "--codec", "fp32", "g.npy", "g.gw")
    assert "9 dimensions" in errors and errors.count("\n") == 1
    run("decode", "g.gw", "back.npy")
    np.testing.assert_array_equal(np.load("back.npy"), np.arange(512, dtype="f4"))


def test_an_input_is_never_its_own_output(frame):
    os.link("g.npy", "hard.npy")
    os.symlink("g.npy", "soft.npy")
    before = Path("g.npy").read_bytes(), Path("g.gw").read_bytes()
    for out in "g.npy", "./g.npy", "hard.npy", "soft.npy":
        for force in [], ["-f"], ["--force"]:
            refuse(USAGE, ["same file"], "encode", *force, "--codec", "fp32", "g.npy", out)
    refuse(USAGE, ["same file"], "decode", "-f", "g.gw", "g.gw")
    assert (Path("g.npy").read_bytes(), Path("g.gw").read_bytes()) == before


def test_an_existing_output_is_kept_unless_force_is_given(frame):
    Path("old").write_bytes(b"old")
    refuse(USAGE, ["old", "exists", "--force"], "encode", "--codec", "fp32", "g.npy", "old")
    refuse(USAGE, ["old", "exists", "--force"], "decode", "g.gw", "old")
    assert Path("old").read_bytes() == b"old"
    run("encode", "-f", "--codec", "fp32", "g.npy", "old")
    assert Path("old").read_bytes()[:4] == b"GWIR"
    run("decode", "--force", "g.gw", "old")
    assert os.path.getsize("old") == 4 * 5000
    run("decode", "g.gw", "/dev/null")  # no regular file: nothing is replaced
    run("encode", "--codec", "fp32", "g.npy", "/dev/null")


def test_a_frame_of_an_older_version_is_refused_by_its_version(folder):
    for path in sorted((GOLDEN.parent / "version1").glob("*.gw")):
        refuse(BAD_INPUT, ["version is 1", "reads 2"], "decode", path, "back.npy")
        refuse(BAD_INPUT, ["version is 1", "reads 2"], "inspect", path)


# What is shown ------------------------------------------------------------------------------------------------------


def test_inspect_names_every_field(frame):
    row, = rows("inspect", "g.gw")
    assert row["magic"] == "GWIR" and row["flags"] == 0 and row["spec_count"] == row["tensor_count"] == 1
    assert row["version"] == 2 and row["step"] == 7 and row["stage"] == 0 and row["rank"] == 0 and row["world"] == 1
    assert row["total_bytes"] == os.path.getsize("g.gw") and row["elements"] == 5000
    assert row["head_check_verdict"] == "ok" and row["body_check_verdict"] == "ok"
    assert math.isclose(row["bits_per_element"], 8 * row["total_bytes"] / 5000)
    tensor, = row["tensors"]
    assert tensor["count"] == 5000 and tensor["dtype"] == "f32" and tensor["unit"] == 1024 and tensor["first"] == 0
    assert tensor["codec"].startswith("qsgd:bits=4,") and int(tensor["name_hash"], 16) != 0
    page, errors = run("inspect", "g.gw")
    assert errors == ""
    for word in ["version", "step", "stage", "rank", "checksum", "ok", "5,000", "bits per element", tensor["codec"],
                 "1,024 elements", "f32", tensor["name_hash"]]:
        assert word in page.decode(), word


@pytest.fixture
def laplace(folder):
    rng = np.random.default_rng(5)
    path = folder / "laplace.npy"
    np.save(path, (rng.laplace(size=70000) * 0.01).astype("f4"))
    return path


def tables(path):
    return json.loads(run("inspect", "--json", path)[0])["tensors"][0]


def test_encode_fits_codecs_that_learn_and_inspect_shows_it(folder, laplace):
    for codec, word in (("optquant:bits=3", "levels"), ("casq:bits=2", "thresholds"), ("dqsgd:budget=5", "bits"),
                        ("rangefloat:bits=8", "mantissa"),
                        ("fft:theta=0.85", "theta")):
        rerun("encode", "--codec", codec, laplace, folder / "f.gw")
        tensor = tables(folder / "f.gw")
        assert tensor["table"] and word in tensor["fitted"][0], codec
        assert word in run("inspect", folder / "f.gw")[0].decode()
        rerun("encode", "--no-fit", "--codec", codec, laplace, folder / "n.gw")
        assert tables(folder / "n.gw")["table"] == []
        rerun("decode", folder / "f.gw", folder / "b.npy")
        x, y = np.load(laplace), np.load(folder / "b.npy")
        assert np.sum((x - y) ** 2) < (0.7 if codec.startswith("fft") else 0.5) * np.sum(x ** 2), codec


def test_fitted_levels_beat_the_defaults(folder, laplace):
    x = np.load(laplace)
    errors = []
    for option in [], ["--no-fit"]:
        rerun("encode", *option, "--codec", "optquant:bits=2,mode=biased", laplace, folder / "f.gw")
        rerun("decode", folder / "f.gw", folder / "b.npy")
        errors.append(np.sum((x - np.load(folder / "b.npy")) ** 2))
    assert errors[0] < 0.8 * errors[1]


def test_a_gradient_of_zeros_costs_a_header(folder):
    np.save(folder / "zeros.npy", np.zeros(100000, "f4"))
    run("encode", "--codec", "dqsgd", folder / "zeros.npy", folder / "z.gw")
    assert (folder / "z.gw").stat().st_size < 300
    run("decode", folder / "z.gw", folder / "b.npy")
    assert not np.load(folder / "b.npy").any()


def test_packed_files_are_smaller_and_the_same(folder, laplace):
    if b"(Zstandard)" not in run("doctor")[0]:
        pytest.skip("this build has no Zstandard")
    run("encode", "--codec", "casq:bits=2", laplace, folder / "a.gw")
    run("encode", "--pack", "--codec", "casq:bits=2", laplace, folder / "p.gw")
    plain, packed = (folder / "a.gw").read_bytes(), (folder / "p.gw").read_bytes()
    assert len(packed) < 0.95 * len(plain)
    run("decode", folder / "a.gw", folder / "a.npy")
    run("decode", folder / "p.gw", folder / "p.npy")
    assert (folder / "a.npy").read_bytes() == (folder / "p.npy").read_bytes()
    pages = [run("inspect", folder / name)[0].decode().splitlines() for name in ("p.gw", "a.gw")]
    assert pages[0][2:] == pages[1][1:]
    assert pages[0][1].split() == ["packed", f"{len(packed):,}", "bytes", "in", "the", "file,", f"{len(plain):,}",
                                   "unpacked;", "ratio", "of", "the", "file", f"{4 * 70000 / len(packed):.2f}"]
    assert any(line.split()[:2] == ["ratio", f"{4 * 70000 / len(plain):.2f}"] for line in pages[1])
    row, = rows("inspect", folder / "p.gw")
    assert row["packed"] and row["file_bytes"] == len(packed) and row["total_bytes"] == len(plain)
    assert math.isclose(row["packing_ratio"], len(plain) / len(packed))
    assert math.isclose(row["ratio"], 4 * 70000 / len(plain))
    assert math.isclose(row["file_ratio"], 4 * 70000 / len(packed))
    row, = rows("inspect", folder / "a.gw")
    assert not row["packed"] and row["file_bytes"] == len(plain) and row["packing_ratio"] == 1
    changed = packed[:40] + bytes([packed[40] ^ 1]) + packed[41:]
    for name, content in ("cut", packed[:-9]), ("long", packed + b"x"), ("changed", changed):
        (folder / name).write_bytes(content)
        refuse(3, "bad message", "decode", folder / name, folder / "x.npy")
        assert not (folder / "x.npy").exists()
    refuse(3, "limit", "decode", "--max-elements", "100", folder / "p.gw", folder / "x.npy")


def test_a_packed_bomb_is_refused_before_memory_is_taken(folder):
    if b"(Zstandard)" not in run("doctor")[0]:
        pytest.skip("this build has no Zstandard")
    # A frame that claims 2^40 bytes of content and holds none.
    head = bytes.fromhex("28b52ffd") + bytes([0xe0]) + (1 << 40).to_bytes(8, "little")
    (folder / "bomb.gw").write_bytes(head + b"\x01\x00\x00")
    refuse(3, ["packed size", 1 << 40], "decode", folder / "bomb.gw", folder / "x.npy")
    refuse(3, ["packed size", 1 << 40], "inspect", folder / "bomb.gw")


def raw_packed(content, claimed=None):
    """A Zstandard frame of one raw or repeated block: 'content' as it is, behind a header that claims a size."""
    blocks, size = b"", len(content)
    head = bytes.fromhex("28b52ffd") + bytes([0xe0]) + (size if claimed is None else claimed).to_bytes(8, "little")
    for at in range(0, size, 1 << 17):
        piece = content[at:at + (1 << 17)]
        last = at + len(piece) == size
        if len(set(piece)) == 1:
            blocks += ((len(piece) << 3) | 2 | last).to_bytes(3, "little") + piece[:1]
        else:
            blocks += ((len(piece) << 3) | last).to_bytes(3, "little") + piece
    return head + blocks


def test_a_packed_file_is_judged_by_its_header_before_the_rest_is_unpacked(frame):
    if b"(Zstandard)" not in run("doctor")[0]:
        pytest.skip("this build has no Zstandard")
    message = Path("g.gw").read_bytes()
    Path("packed.gw").write_bytes(raw_packed(message))
    assert rows("inspect", "packed.gw")[0]["packed"]
    many = 64 << 20
    bombs = {
        "zeros": (raw_packed(bytes(many)), "magic"),
        "old": (raw_packed(message[:4] + b"\x01\x00" + message[6:] + bytes(many)), "version"),
        "other": (raw_packed(message + bytes(many)), "total_bytes"),
        "short": (raw_packed(message[:40]), "total_bytes"),
    }
    for name, (content, field) in bombs.items():
        Path(name).write_bytes(content)
        for command in ["decode", name, "back.npy"], ["inspect", name]:
            done = subprocess.run(["bash", "-c", 'ulimit -v $((200 << 10)); exec "$@"', "-", PROGRAM, *command],
                                  stderr=subprocess.PIPE, text=True, timeout=60)
            assert done.returncode == BAD_INPUT and field in done.stderr, (name, done.stderr)


def test_decoding_to_another_type_rounds_once(folder):
    x = np.linspace(-1, 1, 3000).astype("f2")
    np.save(folder / "h.npy", x)
    run("encode", "--codec", "unigrid:bits=12", folder / "h.npy", folder / "h.gw")
    run("decode", "--dtype", "f32", folder / "h.gw", folder / "s.npy")
    run("decode", folder / "h.gw", folder / "b.npy")
    single, back = np.load(folder / "s.npy"), np.load(folder / "b.npy")
    assert single.dtype == np.float32 and back.dtype == np.float16
    assert np.any(single != single.astype("f2").astype("f4")), "f32 keeps what f16 cannot hold"
    assert np.array_equal(single.astype("f2"), back)


def test_codecs_lists_the_registry_with_parameters():
    assert {"fp32", "fp16", "bf16", "qsgd", "terngrad", "onebit", "topk"} <= set(CODECS)
    table = run("codecs")[0].decode()
    assert "lowrank:rank=4" in table
    for row in rows("codecs"):
        page = run("codecs", row["codec"])[0].decode()
        assert row["summary"] and row["example"] and row["spec"].startswith(row["codec"])
        assert row["bits_per_element"] > 0
        assert row["summary"] in table and row["summary"] in page and row["example"] in page
        assert rows("codecs", row["example"]) == [row]  # a whole spec names its codec too
        for parameter in row["parameters"]:
            assert parameter["allowed"] and parameter["meaning"] and parameter["default"]
            assert f"{parameter['name']}={parameter['default']}" in page
            assert parameter["allowed"] in page
    momentum = "off by default (on with Adam's momentum for"
    for name, words in {"onebit": "on by default", "qsgd": f"{momentum} bits=3)", "terngrad": "off by default,",
                        "optquant": f"{momentum} bits=2 and bits=3)", "dqsgd": f"{momentum} budget=3)"}.items():
        assert f"error feedback {words}" in run("codecs", name)[0].decode()
    refuse(USAGE, ["qsdg", "did you mean qsgd"], "codecs", "qsdg")


def test_doctor_says_what_there_is():
    row, = rows("doctor")
    assert row["cores"] >= 1 and row["simd_chosen"] in row["simd_targets"] + ["scalar"]
    assert "loopback" in row["engines"] and ("mpi" in row["engines"]) == row["mpi_built"]
    assert row["cuda_built"] or row["cuda_devices"] == 0
    assert row["mpi_thread_level"].startswith("MPI_THREAD_") == row["mpi_built"]
    for item in row["missing"]:
        assert item["what"] and item["line"]
    page = run("doctor")[0].decode()
    for word in ["SIMD", "CUDA", "MPI", "torch", row["simd_chosen"], row["mpi_thread_level"]]:
        assert word in page


@pytest.mark.parametrize("command", [[], ["codecs"], ["encode"], ["inspect"], ["decode"], ["bench"], ["bench", "codec"],
                                     ["bench", "threads"], ["bench", "collective"], ["doctor"], ["demo"]])
def test_help_at_every_level_shows_an_example(command):
    out, errors = run(*command, "--help")
    assert errors == ""
    assert "Example" in out.decode() and " ".join(["gradwire", *command]) in out.decode()


def test_no_notation_of_the_parser_is_in_a_help_page():
    for command in [[], ["codecs"], ["encode"], ["decode"], ["inspect"], ["bench", "codec"], ["bench", "threads"],
                    ["bench", "collective"], ["demo"], ["report"], ["doctor"]]:
        page = run(*command, "--help")[0].decode()
        for leak in ":{", "{false}", "{true}", "FLOAT", "UINT", "TEXT", " in [":
            assert leak not in page, (command, leak)


def test_help_is_a_command_too():
    assert run("help")[0] == run("--help")[0]
    assert run("help", "bench", "codec")[0] == run("bench", "codec", "--help")[0]
    refuse(USAGE, ["encod", "did you mean encode"], "help", "encod")


@pytest.mark.parametrize("arguments, words", [
    (["encod"], ["encod", "did you mean encode"]),
    (["codec"], ["codec", "did you mean codecs"]),
    (["encod", "--help"], ["encod", "did you mean encode"]),
    (["bench", "codecs"], ["codecs", "did you mean codec"]),
    (["bench", "codec", "--elemnts", "600"], ["--elemnts", "did you mean --elements"]),
    (["bench", "codec", "--elemnts=600"], ["--elemnts", "did you mean --elements"]),
    (["bench", "codec", "--codec", "optqant:bits=4"], ["optqant", "did you mean optquant"]),
])
def test_a_misspelt_word_is_answered_with_the_nearest_known_one(arguments, words):
    refuse(USAGE, words, *arguments)


def test_a_word_like_no_other_gets_no_suggestion():
    _, errors = run("xyzzy", code=USAGE)
    assert "xyzzy" in errors and "did you mean" not in errors


def test_version():
    text = run("--version")[0].decode()
    assert re.fullmatch(r"gradwire \d+\.\d+\.\d+( \(commit [0-9a-f]+(-dirty)?\))?\n", text)
    assert run("version")[0].decode() == text


# Measurements -------------------------------------------------------------------------------------------------------

CODEC_FIELDS = ("codec device threads dtype elements bits_per_element ratio error encode_GBps feedback_encode_GBps "
                "decode_GBps copy_GBps limit_fraction_encode limit_fraction_feedback limit_fraction_decode").split()
COLLECTIVE_FIELDS = ("collective codec engine world elements time_s fp32_time_s bytes_sent bytes_sent_fp32 "
                     "ratio error identical").split()


def test_bench_codec_ranges_over_the_registry_with_the_promised_names():
    found = rows("bench", "codec", "--codec", "all", "--elements", 40000, "--pairs", 3)
    assert [row["codec"] for row in found] == CODECS
    for row in found:
        assert list(row)[:len(CODEC_FIELDS)] == CODEC_FIELDS
        assert row["device"] == "cpu" and row["threads"] == 1 and row["dtype"] == "f32" and row["elements"] == 40000
        assert all(row[name] > 0 for name in CODEC_FIELDS[8:])
        assert 0 < row["bits_per_element"] < 33 and 0 <= row["error"] < 10
        assert row["ratio"] == pytest.approx(32 / row["bits_per_element"])
        assert all(row[f"{name}_spread"] >= 0 for name in ("encode", "feedback", "decode"))
        limits = [row[f"limit_fraction_{name}"] for name in ("encode", "feedback", "decode")]
        assert row["plausible"] == (max(limits) <= 1.1)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_bench_codec_takes_other_types_threads_and_targets(dtype):
    row, = rows("bench", "codec", "--codec", "qsgd:bits=8", "--elements", 300007, "--pairs", 2, "--dtype", dtype,
                "--threads", 2, "--simd", "scalar", "--residual", "bf16")
    assert row["dtype"] == dtype and row["threads"] == 2 and 0 < row["error"] < 0.01


@pytest.mark.parametrize("world", [2, 8])
def test_the_break_even_of_a_codec_follows_from_the_rates_of_its_row(world):
    out, _ = run("bench", "codec", "--codec", "fp32", "--codec", "bf16", "--codec", "qsgd:bits=4", "--codec", "onebit",
                 "--elements", "65536", "--pairs", "3", "--world", str(world), "--json")
    rows = {row["codec"]: row for row in map(json.loads, out.splitlines())}
    for codec, row in rows.items():
        first = row["feedback_encode_GBps" if codec == "onebit" else "encode_GBps"]  # onebit has error feedback
        seconds = 4e-9 * 65536 * (1 / first + 1 / world / row["encode_GBps"] + 2 / row["decode_GBps"])
        gigabits = 2 * (world - 1) / world * (32 - row["bits_per_element"]) * 65536 * 1e-9
        expected = max(0, gigabits / seconds)
        assert row["break_even_Gbps"] == pytest.approx(expected, rel=1e-6), codec
    assert rows["fp32"]["break_even_Gbps"] == 0 == rows["bf16"]["break_even_bf16_Gbps"]
    assert rows["onebit"]["break_even_bf16_Gbps"] is None or rows["onebit"]["break_even_bf16_Gbps"] > 0


def test_bench_codec_of_a_list_compares_with_one_tensor():
    row, = rows("bench", "codec", "--codec", "qsgd:bits=4", "--list", "resnet50", "--pairs", 1)
    assert row["elements"] == 25557032 and row["list"] == "resnet50"
    assert row["encode_list_over_single"] > 0 and row["decode_list_over_single"] > 0


def test_bench_codec_may_be_given_several_codecs_and_prints_a_table():
    out, errors = run("bench", "codec", "--codec", "fp16", "--codec", "topk", "--elements", 5000, "--pairs", 1)
    assert errors == "" and b"fp16" in out and b"topk" in out and b"bits/element" in out
    assert out.count(b" +-0%") == 6, "one round has no spread"
    # The last two columns are link speeds.
    shares = [re.findall(r"(\d+\.\d\d)( \(\?\))?", line.rsplit(None, 2)[0])[-3:]
              for line in out.decode().splitlines() if line.startswith(("fp16", "topk"))]
    for share, mark in sum(shares, []):
        assert bool(mark) == (float(share) > 1.1) or share == "1.10", "what cannot be is marked"
    assert ("(?):" in out.decode()) == any(mark for _, mark in sum(shares, []))


def test_bench_threads_reports_scaling_against_a_compute_loop():
    row, = rows("bench", "threads", "--threads", 2, "--elements", 100000, "--pairs", 2)
    for name in "compute_scaling", "scaling_encode", "scaling_decode", "gain_encode":
        assert row[name] > 0


@pytest.mark.parametrize("method", ["gather", "scatter"])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_bench_collective_on_loopback(method, world):
    row, = rows("bench", "collective", "--codec", "qsgd:bits=4", "--engine", "loopback", "--world", world,
                "--elements", 200003, "--method", method, "--steps", 2)
    assert list(row)[:len(COLLECTIVE_FIELDS)] == COLLECTIVE_FIELDS
    assert row["collective"] == method and row["world"] == world and row["elements"] == 200003
    assert row["identical"] is True and row["time_s"] > 0 and row["fp32_time_s"] > 0
    assert 0 < row["error"] < 0.5
    if world == 1:
        assert row["bytes_sent"] == row["bytes_sent_fp32"] == 0 and row["ratio"] == 1
    else:
        ideal = 2 * (world - 1) / world * 4 * 200003
        assert ideal <= row["bytes_sent_fp32"] < 1.1 * ideal + 4096
        assert row["bytes_sent"] < row["bytes_sent_fp32"]
        assert row["ratio"] == pytest.approx(row["bytes_sent_fp32"] / row["bytes_sent"])


def test_bench_collective_on_two_levels_counts_what_leaves_a_node():
    row, = rows("bench", "collective", "--codec", "qsgd:bits=4", "--world", 4, "--nodes", 2, "--elements", 2000000,
                "--steps", 1)
    assert row["identical"] is True and row["nodes"] == 2 and row["one_level_time_s"] > 0
    ideal = 2 * 1 / 2 * 4 * 2000000
    assert ideal <= row["node_bytes_fp32"] < 1.01 * ideal
    assert row["node_bytes"] * 7 <= row["node_bytes_fp32"]
    assert row["node_bytes_one_level"] == pytest.approx(2 * row["node_bytes"], rel=0.01)
    row, = rows("bench", "collective", "--world", 2, "--nodes", "auto", "--elements", 5000, "--steps", 1)
    assert row["nodes"] == 1 and row["node_bytes"] == 0 and row["error"] < 1e-12
    out, _ = run("bench", "collective", "--world", 2, "--nodes", 1, "--elements", 5000, "--steps", 1)
    assert b"left/node" in out and b"1 node;" in out


def test_four_bit_scatter_moves_at_most_a_seventh():
    row, = rows("bench", "collective", "--codec", "qsgd:bits=4", "--world", 4, "--elements", 2000000, "--steps", 1)
    assert row["bytes_sent"] * 7 <= row["bytes_sent_fp32"]


def test_fp32_through_the_collective_is_the_mean():
    row, = rows("bench", "collective", "--codec", "fp32", "--world", 3, "--elements", 10007, "--steps", 1)
    assert row["error"] < 1e-12


def test_bench_collective_on_mpi():
    doctor = rows("doctor")[0]
    command = ["bench", "collective", "--engine", "mpi", "--elements", "50021", "--steps", "2", "--json"]
    if not doctor["mpi_built"]:
        refuse(UNSUPPORTED, ["mpi"], *command)
        return
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
                   "OMPI_MCA_btl": "self,vader", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(["mpirun", "-n", "3", PROGRAM, *command], stdout=subprocess.PIPE, env=environment,
                          timeout=100)
    row = json.loads(done.stdout)
    assert done.returncode == 0 and row["engine"] == "mpi" and row["world"] == 3 and row["identical"] is True
    done = subprocess.run(["mpirun", "-n", "2", PROGRAM, *command, "--world", "3"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=environment, timeout=100)
    assert done.returncode == USAGE and b"--world is 3" in done.stderr and done.stdout == b""


# Terminals and pipes ------------------------------------------------------------------------------------------------


def on_terminal(*arguments, streams=("stdout", "stderr"), code=0):
    """What the program shows on a terminal, which has these streams; the others are pipes that must stay empty."""
    master, slave = pty.openpty()
    places = {name: slave if name in streams else subprocess.PIPE for name in ("stdout", "stderr")}
    process = subprocess.Popen([PROGRAM, *map(str, arguments)], **places)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal says EIO when all is read and the other end is closed
        while piece := os.read(master, 65536):
            shown += piece
    os.close(master)
    rest = process.communicate(timeout=60)
    assert process.returncode == code, shown
    assert not any(rest), rest
    return shown.decode(errors="replace").replace("\r\n", "\n")


def test_binary_data_is_not_poured_over_a_terminal(frame):
    for command in ["decode", "g.gw"], ["encode", "--codec", "fp32", "g.npy"]:
        for out in "-", "/dev/stdout":
            shown = on_terminal(*command, out, code=USAGE)
            assert "terminal" in shown and "--force" in shown and shown.count("\n") == 1, shown
    assert "GWIR" in on_terminal("encode", "-f", "--codec", "fp32", "g.npy", "-", streams=["stdout"])
    on_terminal("encode", "--codec", "fp32", "g.npy", "/dev/null")


def test_encode_and_decode_say_on_a_terminal_what_they_did(frame):
    x, size = np.load("g.npy"), os.path.getsize("g.gw")
    run("decode", "g.gw", "back.npy")
    error = error_of(x, np.load("back.npy"))
    said = on_terminal("encode", "-f", "--codec", "qsgd:bits=4", "--seed", 1, "--step", 7, "--name", "layer.weight",
                       "g.npy", "g.gw", streams=["stderr"])
    assert said == (f"g.npy => g.gw: {os.path.getsize('g.npy'):,} => {size:,} bytes (ratio {20000 / size:.2f}, "
                    f"{8 * size / 5000:.3f} bits per element, error {error:.4f})\n")
    said = on_terminal("decode", "-f", "g.gw", "back.npy", streams=["stderr"])
    assert said == (f"g.gw => back.npy: {size:,} => {os.path.getsize('back.npy'):,} bytes (ratio {20000 / size:.2f}, "
                    f"{8 * size / 5000:.3f} bits per element)\n")
    assert on_terminal("encode", "-fq", "--codec", "fp32", "g.npy", "g.gw") == ""
    assert on_terminal("decode", "-f", "--quiet", "g.gw", "back.npy") == ""
    assert run("decode", "-f", "g.gw", "back.npy") == (b"", ""), "a pipe is quiet"
    _, said = run("encode", "-fv", "--codec", "fp32", "g.npy", "g.gw")
    assert said.count("\n") == 1 and "error 0)" in said
    refuse(USAGE, ["--quiet", "--verbose"], "encode", "-fqv", "--codec", "fp32", "g.npy", "g.gw")


def test_encode_and_decode_say_it_as_json(frame):
    for codec, dtype in ("topk:ratio=0.1", "f4"), ("qsgd:bits=4", "f2"), ("optquant:bits=3", "f4"):
        x = np.load("g.npy").astype(dtype).reshape(50, 100)
        np.save("x.npy", x)
        told, = rows("encode", "-f", "--codec", codec, "x.npy", "x.gw")
        back, = rows("decode", "-f", "--dtype", "f32", "x.gw", "x2.npy")
        assert told["bytes_out"] == back["bytes_in"] == os.path.getsize("x.gw") and told["elements"] == 5000
        assert told["bytes_in"] == os.path.getsize("x.npy") and back["shape"] == [50, 100]
        assert math.isclose(told["ratio"], 20000 / told["bytes_out"])
        assert math.isclose(told["bits_per_element"], 8 * told["bytes_out"] / 5000)
        assert math.isclose(told["error"], error_of(x, np.load("x2.npy")), rel_tol=1e-5)
    np.save("nan.npy", np.full(10, np.nan, "f4"))
    assert rows("encode", "-f", "--codec", "fp32", "nan.npy", "x.gw")[0]["error"] is None
    message, errors = run("encode", "--json", "--codec", "fp32", "g.npy", "-")
    assert message[:4] == b"GWIR" and json.loads(errors)["out"] == "-"


ESCAPES = ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x7f", "\r", "\x08"]


@pytest.mark.parametrize("escape", ESCAPES)
def test_no_escape_sequence_of_a_file_or_a_name_reaches_the_terminal(folder, escape):
    def harmless(text):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text.replace("\r\n", "\n")), repr(text)
        assert "?" in text
        return text

    hostile = f"g{escape}.npy"
    np.save(hostile, gradient(10))
    for bad in [{"descr": f"<f4{escape}"}, {f"descr{escape}": "<f4"}]:
        header = str({"fortran_order": False, "shape": (1,)})[:-1] + "".join(f", '{k}': '{v}'" for k, v in bad.items())
        Path("bad.npy").write_bytes(npy(header + "}", bytes(4)))
        done = subprocess.run([PROGRAM, "encode", "--codec", "fp32", "bad.npy", "x.gw"], stderr=subprocess.PIPE)
        assert done.returncode in (USAGE, BAD_INPUT)
        harmless(done.stderr.decode())
    for command, code in [
        (["encode", "--codec", f"qs{escape}", hostile, "x.gw"], USAGE),
        (["encode", "-fv", "--codec", "fp32", hostile, "x.gw"], 0),
        (["decode", hostile, "y"], BAD_INPUT),
        (["decode", f"no{escape}", "y"], IO),
        ([f"enc{escape}"], USAGE),
        (["encode", f"--{escape}"], USAGE),
        (["inspect", f"x{escape}.gw"], 0),
    ]:
        if command[0] == "inspect":
            run("encode", "--codec", "fp32", hostile, command[1])
        done = subprocess.run([PROGRAM, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert done.returncode == code, done.stderr
        harmless((done.stdout + done.stderr).decode())


def test_text_in_other_languages_is_printed_as_it_is(folder):
    np.save("größe-日本.npy", gradient(10))
    _, said = run("encode", "-v", "--codec", "fp32", "größe-日本.npy", "x.gw")
    assert "größe-日本.npy" in said


def test_progress_is_shown_on_a_terminal_and_cleared():
    master, slave = pty.openpty()
    done = subprocess.run([PROGRAM, "bench", "codec", "--codec", "fp16", "--elements", "1000", "--pairs", "2"],
                          stdout=subprocess.PIPE, stderr=slave, timeout=60)
    # A terminal hands over what was written piece by piece; it says EIO when all is read and the other end is closed.
    os.close(slave)
    shown = ""
    with contextlib.suppress(OSError):
        while piece := os.read(master, 65536):
            shown += piece.decode()
    os.close(master)
    assert done.returncode == 0 and "round 2 of 2" in shown
    assert shown.endswith("\r\033[K"), "the line is gone when the work ends"
    assert b"\r" not in done.stdout


def test_a_closed_output_is_an_error_and_not_a_success():
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "codecs"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == IO and done.stderr.count(b"\n") == 1
