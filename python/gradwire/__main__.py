# SPDX-License-Identifier: Apache-2.0
"""`python -m gradwire doctor | bench | codecs`. The exit codes are those of the program gradwire: 0 done, 1 internal
error or failed verification, 2 wrong usage, 3 a damaged frame, 4 a file, 5 this build or machine cannot do it, 6
ranks, 7 a GPU call.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import List, NoReturn

from . import _core
from ._bench import bench
from ._doctor import doctor
from ._errors import Error

_TYPICAL = 1 << 20  # elements of the tensor that "bits per element" is quoted for
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
            f"    {row['bits_per_element']:.3f} bits per element; {kind}, error feedback "
            f"{'on' if row['feedback'] else 'off'} by default{unit}{', learns' if row['learns'] else ''}"
        )
        for parameter in row["parameters"]:
            value = f"{parameter['name']}={parameter['default']}"
            print(f"    {value:<{width}}  {parameter['meaning']}")
            print(f"    {'':<{width}}  allowed: {parameter['allowed']}")
        print(f"    example: {row['example']}")
    print("\nBits per element are for one tensor of 1,048,576 elements and count every byte of its frame.")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m gradwire",
        description="gradwire compresses what distributed training sends: gradients up, weights down.",
    )
    parser.add_argument("--version", action="version", version=f"gradwire {_core.version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    about = {
        "doctor": "Show what this build, this machine and this torch can do, and what is missing",
        "codecs": "List every codec with its parameters, defaults and allowed values",
        "bench": "Measure codecs next to a plain copy; verifies before it times",
    }
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in about.items()}
    for name in ("doctor", "codecs", "bench"):
        made[name].add_argument("--json", action="store_true", help="print JSON: one object, or one per line")
    options = made["bench"]
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
    return parser


def main(arguments: List[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 2
    try:
        if given.command == "doctor":
            doctor(given.json)
        elif given.command == "codecs":
            codecs(given.json)
        else:
            bench(given.codec, given.elements, given.device, given.threads, given.rounds, given.json, given.world)
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
