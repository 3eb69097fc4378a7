# SPDX-License-Identifier: Apache-2.0
"""What the thread level of MPI costs: examples/c/allreduce_mpi.c with MPI_THREAD_SINGLE and with MPI_THREAD_MULTIPLE.

    python3 bench/mpi_levels.py [--codec qsgd:bits=4] [--elements 1000000] [--pairs 15] [--dry]

The two levels take turns, because a machine that others use swings more than they differ. Open MPI reads the level from
its environment. The build needs the targets gradwire_c and gradwire_c_mpi.
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

from rows import BENCH, Rows, load_note

LEVELS = {"MPI_THREAD_SINGLE": "0", "MPI_THREAD_MULTIPLE": "3"}


def milliseconds(program, level, options):
    environment = dict(os.environ, OMPI_MPI_THREAD_LEVEL=LEVELS[level], OMPI_MCA_btl="self,vader")
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(options.ranks)]
    said = subprocess.run(
        [*launcher, program, options.codec, str(options.elements)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    return float(re.search(r"([0-9.e+-]+) ms per step", said)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="qsgd:bits=4")
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--build", default=str(BENCH.parent / "build"))
    parser.add_argument("--dry", action="store_true", help="print the rows, and leave bench/results.csv alone")
    options = parser.parse_args()
    libraries = Path(options.build).resolve() / "src/c"
    times = {level: [] for level in LEVELS}
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        program = f"{folder}/allreduce_mpi"
        source = BENCH.parent / "examples/c/allreduce_mpi.c"
        flags = [f"-I{BENCH.parent / 'include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        subprocess.run(
            ["mpicc", "-O2", source, *flags, "-lgradwire_mpi", "-lgradwire", "-lm", "-o", program], check=True
        )
        for _ in range(options.pairs):
            for level in LEVELS:
                times[level].append(milliseconds(program, level, options))
    rows = Rows()
    command = f"python3 bench/mpi_levels.py --codec {options.codec} --elements {options.elements}"
    for level, values in times.items():
        rows.add(command, "ms_per_step", statistics.median(values), "ms", note=f"{level}; {load_note()}")
    single, multiple = times.values()
    ratio = statistics.median(s / m for s, m in zip(single, multiple))
    rows.add(command, "single_over_multiple", ratio, "1", note=f"median of {options.pairs} pairs; {load_note()}")
    rows.append(options.dry)


if __name__ == "__main__":
    main()
