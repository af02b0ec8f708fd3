"""The network of a cluster: one bridge in this machine's network namespace, one cable to each box.

Everything is derived from the cluster's index, so that several clusters run side by side.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from boxes import Box, sh

API_SERVICE = "10.96.0.1"
MAX_INDEX = 40


@dataclass(frozen=True)
class Addresses:
    """Names and subnets of cluster `index`; node numbers start at 1."""

    index: int

    @property
    def bridge(self) -> str:
        return f"kri{self.index}"

    @property
    def host(self) -> str:
        return f"10.77.{self.index}.254"

    @property
    def control(self) -> str:
        return f"10.77.{self.index}.250"

    def node(self, number: int) -> str:
        return f"10.77.{self.index}.{number}"

    def pods(self, number: int) -> str:
        return f"10.88.{self.index * 6 + number}.0/24"

    def cable(self, box: str) -> str:
        return f"kri{self.index}-{box}"


def make(at: Addresses) -> None:
    """The bridge, with this machine's address on it."""
    sh("ip", "link", "add", at.bridge, "type", "bridge")
    sh("ip", "addr", "add", f"{at.host}/24", "dev", at.bridge)
    sh("ip", "link", "set", at.bridge, "up")


def plug(at: Addresses, box: Box, address: str) -> None:
    """A cable from the bridge to the box, which gets the address on its `eth0`."""
    cable = at.cable(box.name)
    sh("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(box.pid))
    sh("ip", "link", "set", cable, "master", at.bridge, "up")
    box.run(
        [
            "sh",
            "-ec",
            f"ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up;"
            f" ip route add default via {at.host}; echo 1 >/proc/sys/net/ipv4/ip_forward",
        ]
    )


def switch(at: Addresses, box: str, on: bool) -> None:
    """Connects a box, or cuts it off: its link stays up and nothing passes, as behind a broken switch."""
    sh("ip", "link", "set", at.cable(box), *(("master", at.bridge) if on else ("nomaster",)))


def remove(at: Addresses) -> None:
    """Takes every link of the cluster away; routes through the bridge go with it."""
    links = sh("ip", "-o", "link", "show").splitlines()
    names = [line.split(": ")[1].partition("@")[0] for line in links]
    for name in names:
        if name == at.bridge or name.startswith(f"{at.bridge}-"):
            subprocess.run(["ip", "link", "del", name], capture_output=True)
