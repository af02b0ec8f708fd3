"""How long the monitor's scrape takes: scan of the region files, join with pods, exposition text.

    python bench/monitor.py [--rounds 200]

Trees are made in a temporary folder by the tests' own writer.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from region_files import RegionFile, Slot, Spec, folder, pod, uuid  # noqa: E402

from isolator.monitor.collector import MonitorCollector  # noqa: E402
from isolator.monitor.model import NvmlDevice, NvmlView, PodView  # noqa: E402
from isolator.monitor.snapshot import Composer  # noqa: E402

# containers, devices, processes a container, target of the 99th percentile in ms
CASES = ((110, 1, 1, 50), (110, 8, 1, 250), (1000, 1, 1, 250), (110, 1, 64, 0))


class Pods:
    """A node's pods, as the watch would have them."""

    listed, up, label = True, True, "15360"

    def __init__(self) -> None:
        self.table: dict[str, PodView] = {}

    def pods(self) -> dict[str, PodView]:
        """Pods by UID."""
        return self.table


class Nvml:
    """Eight cards."""

    def view(self) -> NvmlView:
        """The same answer each time."""
        cards = (NvmlDevice(i, uuid(i), "Tesla T4", 15360 << 20, 5 << 30, 50.0, 10.0) for i in range(8))
        return NvmlView(True, time.time(), tuple(cards))


def tree(mount: Path, containers: int, devices: int, slots: int) -> tuple[Composer, list[RegionFile]]:
    """A node's caches with `slots` live processes each, and what makes snapshots of the node."""
    files, pods = [], Pods()
    for number in range(containers):
        uid = f"{number:08x}-1111-2222-3333-444455556666"
        found = pod(uid, name=f"training-job-{number}")
        inside = tuple(replace(c, injected=True) for c in found.containers)
        pods.table[uid] = replace(found, containers=inside, annotations={"gpu-memory": "4096"})
        spec = Spec(uuids=[uuid(i) for i in range(devices)], refused=3, refused_ns=time.time_ns())
        spec.slots = [Slot(pid=1 + i) for i in range(slots)]
        files.append(RegionFile(folder(mount, uid) / "usage.cache", spec))
    return Composer("node", mount, pods, Nvml()), files


def resident_mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def measure(composer: Composer, rounds: int) -> tuple[list[float], list[float], float, int]:
    """Wall and CPU times of whole scrapes in ms (sorted), the scan's median in ms, bytes of the answer."""
    registry = CollectorRegistry()
    registry.register(MonitorCollector(composer.snapshot, update_interval=0))
    walls, cpus, text = [], [], b""
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        text = generate_latest(registry)
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    scans = [composer.snapshot().duration * 1e3 for _ in range(min(rounds, 20))]
    return sorted(walls), sorted(cpus), statistics.median(scans), len(text)


def at(times: list[float], share: float) -> float:
    """The value that `share` of the sorted times do not exceed."""
    return times[min(len(times) - 1, int(len(times) * share))]


def main() -> int:
    """Prints a line a case; 1 where a target is missed."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--rounds", type=int, default=200)
    rounds = asked.parse_args().rounds
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    missed = False
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, {rounds} scrapes each")
    for containers, devices, slots, target in CASES:
        with tempfile.TemporaryDirectory() as place:
            composer, files = tree(Path(place), containers, devices, slots)
            walls, cpus, scan, size = measure(composer, rounds)
            for file in files:
                file.close()
        missed |= bool(target) and at(walls, 0.99) > target
        print(
            f"{containers:5} containers x {devices} devices x {slots:2} processes: "
            f"p50 {at(walls, 0.5):6.1f} ms, p99 {at(walls, 0.99):6.1f} ms (target {target or '-'}), "
            f"CPU p50 {at(cpus, 0.5):6.1f} ms, p99 {at(cpus, 0.99):6.1f} ms; "
            f"scan {scan:5.1f} ms; {size >> 10} KiB; RSS {resident_mib():.0f} MiB"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
