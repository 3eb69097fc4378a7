# SPDX-License-Identifier: Apache-2.0
"""README.md's examples are run, as they stand.

A fenced block runs when the line `<!-- run -->` is right above its fence; with `<!-- run: program -->` it runs only
where the build has that program. Marked blocks run in the order of the page and in one scratch folder, so a later one
may use the files of an earlier one. The folder has a link `build`, `gradwire` is on the path, and python3 has numpy.

  ```cpp       one whole program: built against the installed package as main.cc, then run in the scratch folder
  ```cmake     the CMakeLists.txt of every ```cpp block; without one, that of tests/install/consumer is taken
  ```sh        bash -e
  ```console   lines that begin with `$ ` are run, the lines below each are its output; `...` stands for any text,
               also of several lines; spaces at the ends of lines do not count

Every block must end with exit code 0. A page without any marked block fails: then nothing would be tested.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
README = Path(os.environ.get("GRADWIRE_README", TESTS.parent / "README.md"))
BUILD = Path(os.environ.get("GRADWIRE_BUILD", TESTS.parent / "build")).resolve()
KINDS = ("cpp", "cmake", "sh", "console")

BLOCK = re.compile(r"^<!-- run(?:: ([\w-]+))? -->\n```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def marked_blocks():
    text = README.read_text()
    marks = len(re.findall("^<!-- run", text, re.MULTILINE))
    assert marks == len(BLOCK.findall(text)), "a `<!-- run -->` has no fence below it"
    return [(text.count("\n", 0, m.start()) + 3, m[2], m[3]) for m in BLOCK.finditer(text)
            if not m[1] or (BUILD / "bin" / m[1]).exists()]


BLOCKS = marked_blocks()


def run(command, cwd):
    # The interpreter's folder as it is called, not resolved: a virtual environment's python3 is a link.
    path = os.pathsep.join([str(BUILD / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(command, cwd=cwd, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == 0, f"exit code {done.returncode} of {command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    (folder / "build").symlink_to(BUILD)
    return folder


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix")
    run(["cmake", "--install", BUILD, "--prefix", folder], folder)
    return folder


def run_cpp(program, cwd, prefix, folder):
    consumer = TESTS / "install/consumer/CMakeLists.txt"
    project = [body for _, kind, body in BLOCKS if kind == "cmake"] or [consumer.read_text()]
    (folder / "main.cc").write_text(program)
    (folder / "CMakeLists.txt").write_text(project[0])
    target = re.search(r"add_executable\((\w+)", project[0])[1]
    run(["cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"], cwd)
    run(["cmake", "--build", folder / "build"], cwd)
    run([folder / "build" / target], cwd)


def run_console(session, cwd):
    # [text before the first command, command, output, command, output, ...]
    parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n", session, flags=re.MULTILINE)
    assert len(parts) > 1 and not parts[0].strip(), "a console block begins with a line that begins with `$ `"
    for command, expected in zip(parts[1::2], parts[2::2]):
        printed = run(["bash", "-ec", command], cwd)
        plain = lambda text: "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))
        pattern = ".*".join(re.escape(piece) for piece in plain(expected).split("..."))
        assert re.fullmatch(pattern, plain(printed), re.DOTALL), f"$ {command}\nprinted\n{printed}\nnot\n{expected}"


def test_something_is_marked():
    assert BLOCKS


@pytest.mark.parametrize("line, kind, body", BLOCKS, ids=[f"line{line}-{kind}" for line, kind, _ in BLOCKS])
def test_block_runs(line, kind, body, scratch, request, tmp_path):
    assert kind in KINDS, f"README.md:{line}: a marked block is one of {', '.join(KINDS)}, not {kind!r}"
    if kind == "cpp":
        run_cpp(body, scratch, request.getfixturevalue("prefix"), tmp_path)
    elif kind == "sh":
        run(["bash", "-ec", body], scratch)
    elif kind == "console":
        run_console(body, scratch)
    else:
        assert any(other == "cpp" for _, other, _ in BLOCKS), "a cmake block needs a cpp block to build"
