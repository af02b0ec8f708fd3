"""How long the monitor's scrape takes: scan of the region files, join with pods, exposition text.

    python bench/monitor.py [--rounds 200]

Trees are made in a temporary folder by the tests' own writer; each container has one live process.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from region_files import RegionFile, Slot, Spec, folder, pod, uuid  # noqa: E402

from isolator.monitor import discovery  # noqa: E402
from isolator.monitor.collector import MonitorCollector  # noqa: E402
from isolator.monitor.model import Snapshot, State, Verdict  # noqa: E402

# (containers, devices, target of the 99th percentile in ms)
CASES = ((110, 1, 50), (110, 8, 250), (1000, 1, 250))


def tree(
    mount: Path, containers: int, devices: int, slots: int = 1
) -> tuple[Callable[[], Snapshot], list[RegionFile]]:
    """A node's caches, and what makes snapshots of them."""
    files, pods, verdicts = [], {}, []
    for number in range(containers):
        uid = f"{number:08x}-1111-2222-3333-444455556666"
        found = pod(uid, name=f"training-job-{number}")
        pods[uid] = found
        spec = Spec(uuids=[uuid(i) for i in range(devices)], refused=3, refused_ns=time.time_ns())
        spec.slots = [Slot(pid=1 + i) for i in range(slots)]
        files.append(RegionFile(folder(mount, uid) / "usage.cache", spec))
        verdicts.append(
            Verdict("team", found.name, "main", State.ENFORCED, expected_limit=spec.limit, mismatch=False)
        )

    def snapshot() -> Snapshot:
        start = time.monotonic()
        scan = discovery.scan(mount)
        return Snapshot(
            node="node",
            time=time.time(),
            duration=time.monotonic() - start,
            caches=scan.caches,
            skipped=scan.skipped,
            pods=pods,
            pod_watch_up=True,
            verdicts=tuple(verdicts),
        )

    return snapshot, files


def resident_mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def measure(snapshot: Callable[[], Snapshot], rounds: int) -> tuple[list[float], float, int]:
    """Times of whole scrapes in ms (sorted), the scan's median in ms, bytes of the answer."""
    registry = CollectorRegistry()
    registry.register(MonitorCollector(snapshot, update_interval=0))
    times, text = [], b""
    for _ in range(rounds):
        start = time.perf_counter()
        text = generate_latest(registry)
        times.append((time.perf_counter() - start) * 1e3)
    scans = [snapshot().duration * 1e3 for _ in range(min(rounds, 20))]
    return sorted(times), statistics.median(scans), len(text)


def main() -> int:
    """Prints a line a case; 1 where a target is missed."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=200)
    rounds = asked.parse_args().rounds
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    missed = False
    cases = [(*case, 1) for case in CASES] + [(110, 1, 0, 64)]
    for containers, devices, target, slots in cases:
        with tempfile.TemporaryDirectory() as place:
            snapshot, files = tree(Path(place), containers, devices, slots)
            times, scan, size = measure(snapshot, rounds)
            for file in files:
                file.close()
        p50, p99 = times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.99))]
        missed |= bool(target) and p99 > target
        print(
            f"{containers:5} containers x {devices} devices x {slots:2} processes: p50 {p50:6.1f} ms, "
            f"p99 {p99:6.1f} ms (target {target or '-'}), scan {scan:6.1f} ms, "
            f"{size / 1024:.0f} KiB, RSS {resident_mib():.0f} MiB"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
