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

import pytest
from ranks import PATIENCE

import gradwire


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "gradwire", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd="/",
        env={**os.environ, **environment},
    )


def test_doctor_says_what_is_there():
    done = run("doctor")
    assert done.returncode == 0 and done.stderr == ""
    for word in ("gradwire", gradwire.__version__, "SIMD", "CUDA", "NumPy", "torch"):
        assert word in done.stdout
    found = json.loads(run("doctor", "--json").stdout)
    assert found["version"] == gradwire.__version__ and found["simd_targets"] == gradwire._core.simd_targets()
    assert found["cuda_built"] == gradwire._core.cuda_built() and isinstance(found["missing"], list)


def test_doctor_sees_what_of_torch_can_be_used(torch):
    found = json.loads(run("doctor", "--json").stdout)["torch"]
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
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == "" and words in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("gradwire: ")


def test_help_everywhere():
    for arguments in (["-h"], ["doctor", "-h"], ["bench", "-h"], ["codecs", "-h"]):
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
        assert {
            key: value for key, value in told.items() if key not in ("file", "head_check_verdict", "body_check_verdict")
        } == info


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
