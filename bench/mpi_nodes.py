# SPDX-License-Identifier: Apache-2.0
"""Two levels over MPI on slow links: boxes that are network namespaces, with several ranks each.

    python3 bench/mpi_nodes.py [--boxes 2] [--per-box 2] [--rate 100mbit] [--elements 4194304] [--steps 15] [--dry]

Root, ip, tc and Open MPI are needed. Ranks of a box talk through shared memory, and boxes through TCP over links that
`tc ... tbf` shapes. `gradwire bench collective --engine mpi --nodes auto` does the rest: MPI finds the boxes, and
the codec on two levels, fp32 on two levels and the codec on one level take turns in the same processes.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from netns import Network, refuse_without_means
from rows import PROGRAM, Rows, load_note

# What Open MPI calls in place of ssh: agent HOST COMMAND...; every box has a host name of its own.
AGENT = """#!/bin/sh
box=$1
shift
exec ip netns exec "{tag}n$((${{box##*.}} - 1))" unshare --uts sh -c "hostname box-$box; $*"
"""


def measure(network, options, agent):
    hosts = ",".join(f"{network.address(box)}:{options.per_box}" for box in range(options.boxes))
    settings = {
        "plm_rsh_agent": agent,
        "btl": "self,vader,tcp",
        "btl_tcp_if_include": "eth0",
        "oob_tcp_if_include": "eth0",
        "hwloc_base_binding_policy": "none",
        "rmaps_base_oversubscribe": "1",
    }
    launcher = ["mpirun", "--allow-run-as-root", "-H", hosts, "-n", str(options.boxes * options.per_box)]
    for name, value in settings.items():
        launcher += ["--mca", name, value]
    command = [PROGRAM, "bench", "collective", "--engine", "mpi", "--nodes", "auto", "--json"]
    for codec in options.codec or ["qsgd:bits=4"]:
        command += ["--codec", codec]
    command += ["--elements", str(options.elements), "--steps", str(options.steps)]
    inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', "box-first", *launcher, *command]
    said = subprocess.run(network.where(0) + inside, stdout=subprocess.PIPE, check=True, text=True, timeout=3600)
    return [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=2)
    parser.add_argument("--per-box", type=int, default=2)
    parser.add_argument("--rate", default="100mbit", help="of every box's link, as tc writes it")
    parser.add_argument("--codec", action="append")
    parser.add_argument("--elements", type=int, default=4194304)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print the rows, and leave bench/results.csv alone")
    options = parser.parse_args()
    refuse_without_means("bench/mpi_nodes.py")
    rows = Rows()
    with Network(options.boxes, options.rate) as network, tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        agent = Path(folder) / "agent"
        agent.write_text(AGENT.format(tag=network.tag))
        os.chmod(agent, 0o755)
        found = measure(network, options, str(agent))
    for row in found:
        command = (
            f"python3 bench/mpi_nodes.py --boxes {options.boxes} --per-box {options.per_box} --rate {options.rate} "
            f"--codec {row['codec']} --elements {options.elements} --steps {options.steps}"
        )
        for metric, unit in (
            ("node_bytes", "B"),
            ("node_bytes_fp32", "B"),
            ("node_bytes_one_level", "B"),
            ("time_s", "s"),
            ("fp32_time_s", "s"),
            ("one_level_time_s", "s"),
            ("time_over_fp32", "1"),
            ("time_over_one_level", "1"),
        ):
            note = "" if unit == "B" else f"{row['nodes']} nodes found; {load_note()}"
            rows.add(command, metric, row[metric], unit, note=note)
    rows.append(options.dry)


if __name__ == "__main__":
    main()
