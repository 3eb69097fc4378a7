#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Branch coverage of the decoders, per source file, from what `llvm-cov export` says.

A decoder is a function that reads what somebody else wrote: its name, less arguments and template arguments, matches
DECODERS. Files hold encoders too, which hostile bytes never reach, so whole files would be the wrong measure. All
instances of a template count as one: a branch was taken when any of them took it. Each branch has two outcomes.

    branch_coverage.py PROGRAM PROFDATA --root SRC --minimum 90
"""

import argparse
import collections
import json
import re
import subprocess
import sys
from pathlib import Path

DECODERS = re.compile(
    r"""::(
    read_head | check_head | check_tensors | same_but_stamp | verify | verify_body   # the head and the checksums
  | \w*decode\w* | check_selected | index_at | scales_valid  | make_params | bad      # bodies
  | ResidualReader::.*                                                               # residual files
  )(::|\s|$)""",
    re.VERBOSE,
)


def plain(name):
    """Drops what stands in <> and (), nested ones too: `f<g(int)>(h<x>)` becomes `f`."""
    depth, kept = 0, ""
    for letter in name.replace("(anonymous namespace)", "anonymous").replace("operator()", "call"):
        if letter in "<(":
            depth += 1
        elif letter in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept += letter
    return kept


def outcomes(program, profile):
    """{file: {(place of a branch, True or False): times taken}} of the decoders."""
    exported = subprocess.run(
        ["llvm-cov", "export", "-skip-expansions", f"-instr-profile={profile}", program],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    functions = json.loads(exported)["data"][0]["functions"]
    mangled = "\n".join(function["name"].rpartition(":")[2] for function in functions)
    names = subprocess.run(
        ["c++filt"], check=True, input=mangled, text=True, stdout=subprocess.PIPE
    ).stdout.splitlines()
    files = collections.defaultdict(collections.Counter)
    for function, name in zip(functions, names):
        if DECODERS.search("::" + plain(name)):
            for *place, taken, not_taken, file, _, _ in function["branches"]:
                counter = files[function["filenames"][file]]
                counter[(*place, True)] += taken
                counter[(*place, False)] += not_taken
    return files


def main():
    parser = argparse.ArgumentParser(description="Branch coverage of the decoders, per source file.")
    parser.add_argument("program")
    parser.add_argument("profile")
    parser.add_argument("--root", type=Path, default=Path("src"), help="count what is below this folder")
    parser.add_argument("--minimum", type=float, default=0, help="fail below this percentage")
    parser.add_argument("--missed", action="store_true", help="name the outcomes that never happened")
    arguments = parser.parse_args()

    total = collections.Counter()
    root = arguments.root.resolve()
    for file, counter in sorted(outcomes(arguments.program, arguments.profile).items()):
        if root not in Path(file).parents:
            continue
        taken = sum(count > 0 for count in counter.values())
        total.update(taken=taken, all=len(counter))
        print(
            f"{100 * taken / len(counter):6.1f} %  {taken:4} of {len(counter):4}  {Path(file).relative_to(root.parent)}"
        )
        if arguments.missed:
            for *place, outcome in sorted(key for key, count in counter.items() if count == 0):
                print(f"          line {place[0]}, column {place[1]}: never {str(outcome).lower()}")
    if not total["all"]:
        sys.exit("no decoder in this program: does it have source coverage?")
    reached = 100 * total["taken"] / total["all"]
    print(f"{reached:6.1f} %  {total['taken']:4} of {total['all']:4}  branches of all decoders")
    if reached < arguments.minimum:
        sys.exit(f"branch coverage of the decoders is {reached:.1f} %, less than {arguments.minimum:g} %")


if __name__ == "__main__":
    main()
