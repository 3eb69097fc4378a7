# SPDX-License-Identifier: Apache-2.0
"""`python -m gradwire COMMAND`, or `gradwire COMMAND` where pip has put its script on the PATH. The exit codes are
those of the C++ program gradwire: 0 done, 1 internal error or failed verification, 2 wrong usage, 3 a damaged frame, 4
a file, 5 this build or machine cannot do it, 6 ranks, 7 a GPU call. The commands that only the program has are refused
with the way to get it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import Any, List, NoReturn

from . import _core, _files
from ._bench import bench
from ._doctor import doctor
from ._errors import Error, UnsupportedError, UsageError
from ._frames import MAX_ELEMENTS

_TYPICAL = 1 << 20  # elements of the tensor that "bits per element" is quoted for
_PROGRAM = ("demo", "train", "compare", "serve", "status", "load")  # what only the C++ program can do
_EXIT = {"usage": 2, "frame": 3, "io": 4, "unsupported": 5, "mismatch": 6, "engine": 6, "device": 7}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"gradwire: {message}; see {self.prog} -h", file=sys.stderr)
        sys.exit(2)


def codecs(as_json: bool) -> None:
    rows = [
        {**info, "bits_per_element": 8.0 * _core.Codec(info["codec"]).frame_bytes(_TYPICAL) / _TYPICAL}
        for info in _core.codecs()
    ]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    width = max(len(f"{p['name']}={p['default']}") for row in rows for p in row["parameters"])
    print(
        "A codec is written NAME or NAME:parameter=value,parameter=value. Parameters that are not given have their "
        "default."
    )
    for row in rows:
        kind = "lossless" if row["lossless"] else "unbiased" if row["unbiased"] else "biased"
        unit = (
            ", one unit per tensor"
            if row["unit"] == 0
            else f", units of {row['unit']} elements"
            if row["unit"] > 1
            else ""
        )
        print(f"\n{row['codec']}: {row['summary']}")
        print(
            f"    {row['bits_per_element']:.3f} bits per element; {kind}, {_feedback_of(row)}"
            f"{unit}{', learns' if row['learns'] else ''}"
        )
        for parameter in row["parameters"]:
            value = f"{parameter['name']}={parameter['default']}"
            print(f"    {value:<{width}}  {parameter['meaning']}")
            print(f"    {'':<{width}}  allowed: {parameter['allowed']}")
        print(f"    example: {row['example']}")
    print("\nBits per element are for one tensor of 1,048,576 elements and count every byte of its frame.")


def _feedback_of(row: "dict[str, Any]") -> str:
    """When the codec has error feedback, unless one says otherwise. With Adam's momentum that may depend on how many
    bits it sends."""
    if row["feedback"]:
        return "error feedback on by default"
    few = [f"{name}={value}" for name, value in itertools.product(("bits", "budget"), range(1, 9))]
    found = [text for text in few if _has_momentum_feedback(f"{row['codec']}:{text}")]
    return "error feedback off by default" + (
        f" (on with Adam's momentum for {' and '.join(found)})" if found else ""
    )


def _has_momentum_feedback(spec: str) -> bool:
    try:
        return bool(_core.Codec(spec).momentum)
    except UsageError:
        return False  # the codec has no such parameter, or not with this value


def _name() -> str:
    """How this was called: the script that pip installs, or the module."""
    return "gradwire" if sys.argv and sys.argv[0].endswith("gradwire") else "python -m gradwire"


def _bench_options(options: _Parser) -> None:
    options.add_argument(
        "--codec",
        action="append",
        default=[],
        metavar="CODEC",
        help="a codec such as qsgd:bits=4, or all; may be given several times [all]",
    )
    options.add_argument("--elements", type=int, default=1 << 24, metavar="N", help="elements of the tensor [16777216]")
    options.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where; auto: the CPU, and CUDA where there is one [auto]",
    )
    options.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads [1]")
    options.add_argument("--rounds", type=int, default=15, metavar="N", help="timed rounds; one more runs first [15]")
    options.add_argument("--world", type=int, default=4, metavar="N", help="ranks, for the break-even link speed [4]")


def _encode_options(options: _Parser) -> None:
    options.add_argument(
        "source", metavar="IN", help="a .npy file (float32 or float16), raw floats with --dtype, or - for stdin"
    )
    options.add_argument("target", metavar="OUT", help="the frame to write (usually .gw), or - for stdout")
    options.add_argument("--codec", required=True, metavar="CODEC", help="codec and parameters, e.g. qsgd:bits=4")
    options.add_argument("--dtype", choices=_files.DTYPES, default="", help="type of raw floats in IN (little-endian)")
    options.add_argument("--name", default="", help="tensor name; its hash is in the frame and keys the random bits")
    options.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random bits [0]")
    options.add_argument("--step", type=int, default=0, metavar="N", help="step number written into the frame [0]")
    options.add_argument(
        "--no-fit", action="store_true", help="use the codec's defaults; otherwise one that learns is fitted to IN"
    )
    options.add_argument("-f", "--force", action="store_true", help="replace OUT if it exists")


def _decode_options(options: _Parser) -> None:
    options.add_argument("source", metavar="IN", help="the frame, or - for stdin")
    options.add_argument(
        "target", metavar="OUT", help="a .npy file to write; any other name (or - for stdout) gets raw floats"
    )
    options.add_argument(
        "--dtype", choices=_files.DTYPES, default="", help="type to write; as the frame says if left out"
    )
    options.add_argument(
        "--tensor", type=int, metavar="N", help="which tensor of a message that holds several, from 0 on"
    )
    options.add_argument("-f", "--force", action="store_true", help="replace OUT if it exists")


def _parser() -> _Parser:
    parser = _Parser(
        prog=_name(),
        description="gradwire compresses what distributed training sends: gradients up, weights down.",
        epilog=f"The C++ program of the same name has these and more: {', '.join(_PROGRAM)}. `make build` in a "
        "checkout makes it: build/bin/gradwire.",
    )
    parser.add_argument("--version", action="version", version=f"gradwire {_core.version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    about = {
        "doctor": "Show what this build, this machine and this torch can do, and what is missing",
        "codecs": "List every codec with its parameters, defaults and allowed values",
        "bench": "Measure codecs next to a plain copy; verifies before it times",
        "encode": "Compress a file of floats into a frame",
        "decode": "Turn a frame back into floats",
        "inspect": "Show every field of a frame and check its checksums",
        "report": "Write results.csv, report.html and plots for the runs of comparisons",
    }
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in about.items()}
    for name in ("doctor", "codecs", "bench", "inspect"):
        made[name].add_argument("--json", action="store_true", help="print JSON: one object, or one per line")
    made["inspect"].add_argument("source", metavar="FILE", help="the frame, or - for stdin")
    for name, limit in (("inspect", 2**40), ("decode", MAX_ELEMENTS)):
        made[name].add_argument(
            "--max-elements",
            type=int,
            default=limit,
            metavar="N",
            help=f"refuse frames that claim more elements [{limit}]",
        )
    _bench_options(made["bench"])
    _encode_options(made["encode"])
    _decode_options(made["decode"])
    made["report"].add_argument(
        "places", metavar="DIR", nargs="+", help="folders of comparisons, with files runs/NAME/run.json, or of runs"
    )
    made["report"].add_argument(
        "--out", default="", metavar="DIR", help="folder for the report [the comparison if one is given, else .]"
    )
    made["report"].add_argument("--plot", choices=("png",), help="draw plots for papers too (needs gnuplot)")
    return parser


def report(places: List[str], out: str, plots: bool) -> None:
    if not hasattr(_core, "report"):
        raise UnsupportedError(
            "this build of the package has no report, because nlohmann-json was not found: sudo apt install "
            "nlohmann-json3-dev, and install the package again",
            field="report",
        )
    table, files, has_charts = _core.report(places, out, plots)
    print(table)
    for path in files:
        print(f"wrote {path}")
    if not has_charts:
        print("report.html has tables only: Chart.js was not found when the package was built")


def _run(given: Any) -> None:
    if given.command == "doctor":
        doctor(given.json)
    elif given.command == "codecs":
        codecs(given.json)
    elif given.command == "bench":
        bench(given.codec, given.elements, given.device, given.threads, given.rounds, given.json, given.world)
    elif given.command == "encode":
        _files.encode(
            given.source,
            given.target,
            given.codec,
            dtype=given.dtype,
            name=given.name,
            seed=given.seed,
            step=given.step,
            fit=not given.no_fit,
            force=given.force,
        )
    elif given.command == "decode":
        _files.decode(
            given.source,
            given.target,
            dtype=given.dtype,
            tensor=given.tensor,
            max_elements=given.max_elements,
            force=given.force,
        )
    elif given.command == "report":
        report(given.places, given.out, given.plot == "png")
    else:
        _files.inspect(given.source, given.max_elements, given.json)


def main(arguments: List[str] | None = None) -> int:
    parser = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in _PROGRAM:
        print(
            f"gradwire: {words[0]} is a command of the C++ program, which the Python package does not contain: "
            f"run `make build` in a checkout, then build/bin/gradwire {words[0]}",
            file=sys.stderr,
        )
        return _EXIT["unsupported"]
    given = parser.parse_args(words)
    if given.command is None:
        parser.print_help()
        return 2
    try:
        _run(given)
        sys.stdout.flush()
    except Error as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return _EXIT.get(error.kind, 1)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0
    except (RuntimeError, MemoryError) as error:
        print(f"gradwire: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
