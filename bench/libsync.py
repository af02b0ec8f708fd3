#!/usr/bin/env python3
"""What the installer costs a node: time to the first installation, memory, CPU while nothing happens.

    bench/libsync.py                   110 cache folders, a pass each 30 s, probes as the chart sets them
    bench/libsync.py --seconds 300     a longer look at the idle process

The target is at most 1 s to the first copy, 32 MiB resident and one thousandth of a CPU. Needs Python and a
built library. Prints a table; exit status 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import child

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = 110  # pods on a full node
REGION = 2_183_168
STARTS = 7
READINESS, LIVENESS = 5, 20  # seconds between two probes, as in the chart


class Node:
    """A folder that stands for one node, full of live pods."""

    def __init__(self, folder: Path, folders: int = FOLDERS) -> None:
        self.mount, self.pods = folder / "vgpu", folder / "pods"
        self.containers = self.mount / "containers"
        for number in range(folders):
            uid = f"{number:08x}-1111-4222-8333-444455556666"
            (self.pods / uid).mkdir(parents=True)
            (self.containers / f"{uid}_main").mkdir(parents=True)
            with (self.containers / f"{uid}_main" / "usage.cache").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, REGION)
        self.port = child.free_port()

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """The installer as the DaemonSet runs it, with `more` arguments."""
        words = ["--mount", str(self.mount), "--pods", str(self.pods), "--listen", f"127.0.0.1:{self.port}"]
        command = [sys.executable, "-m", "isolator.libsync", *words, "--log-level", "warning", *more]
        return subprocess.Popen(command, cwd=ROOT)

    def clear(self) -> None:
        """Takes the installation off, not the cache folders."""
        subprocess.run(["rm", "-rf", self.mount / "versions"], check=True)
        for name in ("libvgpu.so", "ld.so.preload", "libsync.json"):
            (self.mount / name).unlink(missing_ok=True)


def first_copy(node: Node) -> float:
    """Seconds from the start of the process to a whole installation."""
    node.clear()
    began = time.perf_counter()
    installer = node.start()
    try:
        while not (node.mount / "libsync.json").exists():
            if installer.poll() is not None or time.perf_counter() - began > 30:
                sys.exit("bench: the installer does not install")
            time.sleep(0.001)
        return time.perf_counter() - began
    finally:
        installer.kill()
        installer.wait()


def idle(node: Node, seconds: float) -> tuple[float, float]:
    """Thousandths of a CPU over `seconds`, and the largest resident MiB, probes included."""
    installer = node.start()
    try:
        time.sleep(1)
        spent, began = child.processor(installer.pid), time.monotonic()
        for second in range(1, int(seconds) + 1):
            time.sleep(max(0.0, began + second - time.monotonic()))
            for every, path in ((READINESS, "readyz"), (LIVENESS, "healthz")):
                if second % every == 0:
                    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/{path}", timeout=5) as answer:
                        answer.read()
        share = (child.processor(installer.pid) - spent) / (time.monotonic() - began) * 1000
        return share, child.mib(installer.pid, "VmHWM")
    finally:
        installer.kill()
        installer.wait()


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=65, help="of idling (default: %(default)s)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isolator-bench-") as folder:
        node = Node(Path(folder))
        starts = [first_copy(node) for _ in range(STARTS)]
        share, memory = idle(node, asked.seconds)
    rows = [
        ("first installation, s (median)", statistics.median(starts), 1.0),
        ("first installation, s (worst)", max(starts), 1.0),
        ("idle CPU, thousandths", share, 1.0),
        ("resident at most, MiB", memory, 32.0),
    ]
    for name, value, target in rows:
        print(f"{name:34}{value:9.3f}   target <= {target:g}{'' if value <= target else '   MISSED'}")
    print(json.dumps({name: round(value, 4) for name, value, _ in rows}))
    return int(any(value > target for _, value, target in rows))


if __name__ == "__main__":
    sys.exit(main())
