# SPDX-License-Identifier: Apache-2.0
"""Slow links on one machine, for the scripts that measure over them (root, ip and tc are needed).

A `Network` is a number of nodes, each a network namespace of its own with one veth link to a bridge in yet another
namespace. Every link is shaped at both ends by `tc ... tbf`, so a node sends and receives at the given rate at most. Nothing
of it is visible outside its namespaces; their names carry the process id, and all of them are deleted when the `with` ends.
"""

import os
import shutil
import subprocess
import sys


def tool(*words):
    subprocess.run(words, check=True, timeout=30)


def refuse_without_means(script):
    """Ends the script with one line if this process cannot make namespaces."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0:
        sys.exit(f"{script}: network namespaces need root; this process has user id {os.geteuid()}")
    if missing:
        sys.exit(f"{script}: {' and '.join(missing)} not found (Debian package iproute2)")


class Network:
    """Nodes 0 to count - 1 have the addresses 10.77.0.1 and so on, on a device eth0; rate is as tc writes it, or None for links that are not shaped."""

    def __init__(self, count, rate=None, burst="32kb"):
        self.tag = f"gw{os.getpid()}"
        self.names = [f"{self.tag}n{i}" for i in range(count)]
        self.bridge = f"{self.tag}b"
        self.rate, self.burst = rate, burst
        self.shaped = False

    def __enter__(self):
        try:
            for name in [self.bridge, *self.names]:
                tool("ip", "netns", "add", name)
            self.run(self.bridge, "ip", "link", "add", "br0", "type", "bridge")
            self.run(self.bridge, "ip", "link", "set", "br0", "up")
            for i, name in enumerate(self.names):
                self.run(
                    self.bridge, "ip", "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", name
                )
                self.run(self.bridge, "ip", "link", "set", f"p{i}", "master", "br0", "up")
                self.run(name, "ip", "address", "add", f"{self.address(i)}/24", "dev", "eth0")
                for device in "lo", "eth0":
                    self.run(name, "ip", "link", "set", device, "up")
            self.shape(self.rate, self.burst)
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        for name in [*self.names, self.bridge]:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, timeout=30)

    def shape(self, rate, burst="32kb"):
        """Sets the rate of all links, both directions; programs that run may stay."""
        for i, name in enumerate(self.names):
            for where, device in (self.bridge, f"p{i}"), (name, "eth0"):
                if rate:
                    self.run(
                        where,
                        "tc",
                        "qdisc",
                        "replace",
                        "dev",
                        device,
                        "root",
                        "tbf",
                        "rate",
                        rate,
                        "burst",
                        burst,
                        "latency",
                        "50ms",
                    )
                elif self.shaped:
                    self.run(where, "tc", "qdisc", "delete", "dev", device, "root")
        self.shaped = bool(rate)

    @staticmethod
    def address(node):
        return f"10.77.0.{node + 1}"

    def where(self, node):
        return ["ip", "netns", "exec", node if isinstance(node, str) else self.names[node]]

    def run(self, node, *words):
        tool(*self.where(node), *words)
