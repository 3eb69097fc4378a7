# SPDX-License-Identifier: Apache-2.0
"""python -m gradwire, in a process of its own; and the examples of the docstrings."""

import doctest
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from ranks import PATIENCE

import gradwire
from gradwire.__main__ import main


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd="/",
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def diagnosis():
    return json.loads(run("doctor", "--json").stdout)


def test_doctor_says_what_is_there(diagnosis):
    done = run("doctor")
    assert done.returncode == 0 and done.stderr == ""
    for word in ("gradwire", gradwire.__version__, "SIMD", "CUDA", "NumPy", "torch"):
        assert word in done.stdout
    found = diagnosis
    assert found["version"] == gradwire.__version__ and found["simd_targets"] == gradwire._core.simd_targets()
    assert found["cuda_built"] == gradwire._core.cuda_built() and isinstance(found["missing"], list)


def test_doctor_sees_what_of_torch_can_be_used(torch, diagnosis):
    found = diagnosis["torch"]
    assert found["version"] == torch.__version__ and found["cuda"] == torch.cuda.is_available()
    assert ("gloo" in found["backends"]) == (torch.distributed.is_available() and torch.distributed.is_gloo_available())


def test_codecs_are_listed_with_their_parameters():
    done = run("codecs")
    rows = [json.loads(line) for line in run("codecs", "--json").stdout.splitlines()]
    assert done.returncode == 0 and [row["codec"] for row in rows] == [info["codec"] for info in gradwire.codecs()]
    for row in rows:
        assert (
            f"\n{row['codec']}: {row['summary']}" in done.stdout
            and row["example"] in done.stdout
            and row["bits_per_element"] > 0
        )
        assert all(f"{p['name']}={p['default']}" in done.stdout for p in row["parameters"])


def test_codecs_says_which_have_error_feedback_with_adams_momentum_only():
    pages = {page.partition(":")[0]: page for page in run("codecs").stdout.split("\n\n")}
    only = {"qsgd": "bits=3", "nuqsgd": "bits=3", "optquant": "bits=2 and bits=3", "dqsgd": "budget=3"}
    for info in gradwire.codecs():
        words = pages[info["codec"]].splitlines()[1]
        assert ("error feedback on by default" in words) == info["feedback"]
        with_momentum = words.partition("off by default (on with Adam's momentum for ")[2].partition(")")[0]
        expected = only.get(info["codec"], "")
        assert with_momentum == expected, words
        for spec in [f"{info['codec']}:{value}" for value in expected.split(" and ") if value]:
            assert gradwire.Codec(spec).momentum and not gradwire.Codec(spec).feedback


def test_bench_verifies_and_measures():
    options = ["--device", "cpu", "--elements", "20000", "--rounds", "2"]
    rows = [
        json.loads(line)
        for line in run("bench", "--json", "--codec", "fp32", "--codec", "qsgd:bits=4", *options).stdout.splitlines()
    ]
    assert [row["codec"] for row in rows] == ["fp32", "qsgd:bits=4"]
    assert rows[0]["error"] == 0 and 0 < rows[1]["error"] < 0.25  # squared
    assert all(row["ratio"] == pytest.approx(32 / row["bits_per_element"]) for row in rows)
    assert 32 < rows[0]["bits_per_element"] < 33 and 4 < rows[1]["bits_per_element"] < 4.5
    assert all(
        row[name] > 0
        for row in rows
        for name in ("encode_GBps", "decode_GBps", "copy_GBps", "encode_of_copy", "decode_of_copy")
    )
    assert rows[0]["break_even_Gbps"] == 0 and rows[0]["world"] == 4
    gigabytes, codec = 4e-9 * 20000, rows[1]
    seconds = gigabytes * (1.25 / codec["encode_GBps"] + 2 / codec["decode_GBps"])
    saved = 1.5 * 8 * (gigabytes - codec["bits_per_element"] * 20000 / 8e9)
    assert codec["break_even_Gbps"] == pytest.approx(saved / seconds)
    every = run("bench", *options)
    assert every.returncode == 0 and all(info["codec"] in every.stdout for info in gradwire.codecs())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nothing"], "nothing"),
        (["doctor", "--nothing"], "--nothing"),
        (["bench", "--codec", "nothing"], "nothing"),
        (["bench", "--elements", "x"], "--elements"),
        (["bench", "--elements", "0"], "elements is 0"),
        (["bench", "--world", "1"], "world is 1"),
        (["bench", "--device", "tpu"], "tpu"),
        (["bench", "--codec", "qsgd:bits=9"], "from 2 to 8"),
        (["encode", "a.npy", "b.gw"], "--codec"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == "" and words in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("gradwire: ")


@pytest.mark.parametrize("spec", ["fp32", "qsgd:bits=4", "optquant:bits=3"])
def test_a_file_becomes_a_frame_and_a_file_again(tmp_path, gradient, spec, capsys):
    at = str(tmp_path) + "/"
    numpy.save(at + "g.npy", gradient[:6000].reshape(60, 100))
    gradient[:6000].tofile(at + "g.raw")
    assert main(["encode", "--codec", spec, "--seed", "3", "--name", "w", at + "g.npy", at + "g.gw"]) == 0
    frame = gradwire.encode(gradient[:6000].reshape(60, 100), spec, seed=3, name="w")
    assert frame == Path(at + "g.gw").read_bytes()
    assert main(["decode", at + "g.gw", at + "back.npy"]) == 0 == main(["decode", at + "g.gw", at + "back.raw"])
    expected = gradwire.decode(frame)
    assert numpy.array_equal(numpy.load(at + "back.npy"), expected)
    assert Path(at + "back.raw").read_bytes() == expected.tobytes()
    assert main(["decode", "--dtype", "f16", at + "g.gw", at + "half.npy"]) == 0
    assert numpy.array_equal(numpy.load(at + "half.npy"), expected.astype("f2"))
    assert main(["encode", "--codec", spec, "--dtype", "f32", at + "g.raw", at + "raw.gw"]) == 0
    assert gradwire.decode(Path(at + "raw.gw").read_bytes()).shape == (6000,)
    capsys.readouterr()
    assert main(["inspect", "--json", at + "g.gw"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {key: told[key] for key in gradwire.inspect(frame)} == gradwire.inspect(frame)
    assert main(["inspect", at + "g.gw"]) == 0 and told["tensors"][0]["codec"] in capsys.readouterr().out


def test_files_that_cannot_be_used_are_refused(tmp_path, capsys):
    at = str(tmp_path) + "/"
    numpy.save(at + "g.npy", numpy.ones(100, "f4"))
    numpy.save(at + "wide.npy", numpy.ones(100, "f8"))
    Path(at + "packed.gw").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    Path(at + "odd.raw").write_bytes(bytes(7))
    assert main(["encode", "--codec", "fp32", at + "g.npy", at + "g.gw"]) == 0
    altered = bytearray(Path(at + "g.gw").read_bytes())
    altered[-1] ^= 1
    Path(at + "altered.gw").write_bytes(altered)
    encode = ["encode", "--codec", "fp32"]
    for code, words, arguments in (
        (2, "exists already", [*encode, at + "g.npy", at + "g.gw"]),
        (2, "the same file", [*encode, at + "g.npy", at + "g.npy"]),
        (2, "say --dtype", [*encode, at + "odd.raw", at + "x"]),
        (2, "only for raw floats", [*encode, "--dtype", "f32", at + "g.npy", at + "x"]),
        (2, "--tensor 1", ["decode", "--tensor", "1", at + "g.gw", at + "x"]),
        (3, "whole number", [*encode, "--dtype", "f32", at + "odd.raw", at + "x"]),
        (3, "float64", [*encode, at + "wide.npy", at + "x"]),
        (3, "body", ["decode", at + "altered.gw", at + "x"]),
        (3, "body", ["inspect", at + "altered.gw"]),
        (3, "the limit", ["decode", "--max-elements", "99", at + "g.gw", at + "x"]),
        (4, "cannot be read", [*encode, at + "none.npy", at + "x"]),
        (4, "cannot be written", [*encode, at + "g.npy", at + "none/x"]),
        (5, "Zstandard", ["decode", at + "packed.gw", at + "x"]),
        (5, "make build", ["train", "--codec", "fp32"]),
    ):
        assert main(arguments) == code, arguments
        assert words in capsys.readouterr().err, arguments
    assert not Path(at + "x").exists() and numpy.load(at + "g.npy").size == 100


def test_help_everywhere():
    for arguments in (["-h"], ["doctor", "-h"], ["bench", "-h"], ["codecs", "-h"], ["encode", "-h"]):
        done = run(*arguments)
        assert done.returncode == 0 and "usage: python -m gradwire" in done.stdout
    assert run().returncode == 2 and gradwire.__version__ in run("--version").stdout


def test_cuda_is_refused_where_there_is_none():
    if gradwire._core.cuda_devices():
        pytest.skip("there is one")
    done = run("bench", "--device", "cuda", "--elements", "1000")
    assert done.returncode == 5 and "device is cuda" in done.stderr and done.stderr.count("\n") == 1


def test_the_program_says_the_same(tmp_path, gradient):
    program = os.environ.get("GRADWIRE_PROGRAM")
    if not program:
        pytest.skip("GRADWIRE_PROGRAM does not name the program of the same build")
    gradient.tofile(tmp_path / "g.raw")
    for spec in ("qsgd:bits=4", "optquant:bits=3", "dqsgd", "fft", "casq"):
        subprocess.run(
            [
                program,
                "encode",
                "--force",
                "--codec",
                spec,
                "--dtype",
                "f32",
                "--name",
                "w",
                "--seed",
                "3",
                "--step",
                "5",
                tmp_path / "g.raw",
                tmp_path / "g.gw",
            ],
            check=True,
            timeout=PATIENCE,
        )
        frame = gradwire.encode(gradient, spec, name="w", seed=3, step=5)
        assert frame == (tmp_path / "g.gw").read_bytes(), spec
        told = json.loads(
            subprocess.run(
                [program, "inspect", "--json", tmp_path / "g.gw"], check=True, timeout=PATIENCE, capture_output=True
            ).stdout
        )
        info = gradwire.inspect(frame)
        assert {key: told[key] for key in info} == info  # the program tells of the file too


def modules():
    names = [name for _, name, _ in pkgutil.iter_modules(gradwire.__path__) if name not in ("__main__", "torch")]
    return [gradwire] + [importlib.import_module(f"gradwire.{name}") for name in names]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_the_examples_of_the_docstrings_run(module):
    failed, tried = doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0
    if module in (
        gradwire,
        gradwire._core,
        gradwire._plan,
        gradwire._frames,
        gradwire._feedback,
        gradwire._frame_calls,
    ):
        assert tried > 0


def test_the_package_is_typed():
    package = Path(gradwire.__file__).parent
    assert (package / "py.typed").exists() and (package / "_core.pyi").exists()
    declared = (package / "_core.pyi").read_text(encoding="utf-8")
    for name, thing in vars(gradwire._core).items():
        if name.startswith("_"):
            continue
        assert f"class {name}:" in declared or f"def {name}(" in declared or f"\n{name}: " in declared, name
        if isinstance(thing, type):
            missing = [
                member for member in vars(thing) if not member.startswith("_") and f"def {member}(" not in declared
            ]
            assert not missing, (name, missing)
