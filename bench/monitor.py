"""What the monitor costs a node: the time of a scrape, memory, CPU at a scrape each 15 s.

    python bench/monitor.py [--rounds 200] [--seconds 45]

First whole scrapes in this process (scan of the region files, join with pods, exposition text), then
`isolator monitor` as a process of its own that watches pods and is scraped over HTTP; each scrape is a new
scan. Trees and the API server are the tests' own. Prints a line a case; the exit status is 1 where a target
is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

import child  # noqa: E402
import monitor_pods  # noqa: E402
from monitor_apiserver import NODE, ApiServer  # noqa: E402
from region_files import RegionFile, Slot, Spec, folder, pod, uuid  # noqa: E402

from isolator.monitor import server  # noqa: E402
from isolator.monitor.collector import MonitorCollector  # noqa: E402
from isolator.monitor.exposition import Exposition  # noqa: E402
from isolator.monitor.model import NvmlDevice, NvmlView, PodView  # noqa: E402
from isolator.monitor.snapshot import Composer  # noqa: E402

# containers, devices, processes a container, target of the 99th percentile in ms
CASES = ((110, 1, 1, 50), (110, 8, 1, 250), (1000, 1, 1, 250), (110, 1, 64, 0))
# containers, devices, target of the 99th percentile in ms; for the nodes of 110, MiB and thousandths of a CPU
PROCESSES = ((110, 1, 50), (110, 8, 250), (1000, 1, 250))
MEMORY, SHARE = 96, 10
# As Prometheus 3 asks.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
INTERVAL = 15  # seconds between two scrapes, as Prometheus does it


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
    exposition = Exposition(MonitorCollector(composer.snapshot, update_interval=0))
    walls, cpus, text = [], [], b""
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        text = exposition.answer(ACCEPT)[0]
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    scans = [composer.snapshot().duration * 1e3 for _ in range(min(rounds, 20))]
    return sorted(walls), sorted(cpus), statistics.median(scans), len(text)


class Monitor:
    """`isolator monitor` on a made-up node, from its start to the first scrape that shows a tenant."""

    def __init__(self, mount: Path, api: str) -> None:
        address = f"127.0.0.1:{child.free_port()}"
        self.url = f"http://{address}/metrics"
        environment = child.environment(mount.parent, api) | {"MALLOC_ARENA_MAX": "2"}  # as in the image
        given = {"LISTEN": address, "MOUNT": str(mount), "NODE_NAME": NODE, "UPDATE_INTERVAL": "0s"}
        environment |= {f"ISOLATOR_MONITOR_{name}": value for name, value in given.items()}
        with (mount.parent / "log").open("wb") as log:
            command = [sys.executable, "-m", "isolator.cli", "monitor"]
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)
        began = time.monotonic()
        while b"hami_vgpu_memory_used_bytes{" not in self.scrape():
            if self.process.poll() is not None or time.monotonic() - began > 60:
                child.end(self.process)
                raise SystemExit(f"bench: the monitor shows no tenant:\n{(mount.parent / 'log').read_text()}")
            time.sleep(0.1)

    def scrape(self) -> bytes:
        """The answer; nothing while it does not listen."""
        try:
            asked = urllib.request.Request(self.url, headers={"Accept": ACCEPT})
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return bytes(answer.read())
        except OSError:
            return b""


@contextlib.contextmanager
def running(containers: int, devices: int, processes: int = 1) -> Iterator[Monitor]:
    """A monitor of a node whose containers have `processes` live ones each, on `devices` cards."""
    with tempfile.TemporaryDirectory() as place, ApiServer() as api:
        mount, files = Path(place) / "vgpu", []
        monitor_pods.MOUNT = str(mount)
        mount.mkdir()
        for number in range(containers):
            api.put(monitor_pods.pod(number))
            spec = Spec(uuids=[uuid(i) for i in range(devices)], refused=3, refused_ns=time.time_ns())
            spec.slots = [Slot(pid=1 + i) for i in range(processes)]
            files.append(RegionFile(folder(mount, monitor_pods.uid(number)) / "usage.cache", spec))
        monitor = Monitor(mount, api.configuration().host)
        try:
            yield monitor
        finally:
            child.end(monitor.process)
            for file in files:
                file.close()


def open_many() -> None:
    """Lets this process hold a thousand region files and more."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))


def served(
    containers: int, devices: int, rounds: int, seconds: float
) -> tuple[list[float], float, float, float, float]:
    """Scrapes over HTTP in ms (sorted), processor ms of one, resident MiB after them and at most, thousandths
    of a CPU at one each 15 s."""
    with running(containers, devices) as monitor:
        pid, times = monitor.process.pid, []
        spent = child.processor(pid)
        for _ in range(rounds):
            began = time.perf_counter()
            monitor.scrape()
            times.append((time.perf_counter() - began) * 1e3)
        cost = (child.processor(pid) - spent) / rounds * 1e3
        memory, spent, began = child.mib(pid, "VmRSS"), child.processor(pid), time.monotonic()
        for number in range(int(seconds // INTERVAL)):
            monitor.scrape()
            time.sleep(max(0.0, began + (number + 1) * INTERVAL - time.monotonic()))
        share = (child.processor(pid) - spent) / max(time.monotonic() - began, 1e-3) * 1000
        return sorted(times), cost, memory, child.mib(pid, "VmHWM"), share


def at(times: list[float], share: float) -> float:
    """The value that `share` of the sorted times do not exceed."""
    return times[min(len(times) - 1, int(len(times) * share))]


def said(missed: bool) -> str:
    """The mark of a missed target."""
    return " MISSED" if missed else ""


def main() -> int:
    """Prints a line a case; 1 where a target is missed."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--rounds", type=int, default=200)
    asked.add_argument("--seconds", type=float, default=45, help="of scrapes each 15 s, for the CPU")
    options = asked.parse_args()
    rounds = options.rounds
    open_many()
    server._calm_collector()  # as the product does
    missed = False
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, {rounds} scrapes each")
    for containers, devices, slots, target in CASES:
        with tempfile.TemporaryDirectory() as place:
            composer, files = tree(Path(place), containers, devices, slots)
            walls, cpus, scan, size = measure(composer, rounds)
            for file in files:
                file.close()
        late = bool(target) and at(walls, 0.99) > target
        missed |= late
        print(
            f"{containers:5} containers x {devices} devices x {slots:2} processes: "
            f"p50 {at(walls, 0.5):6.1f} ms, "
            f"p99 {at(walls, 0.99):6.1f} ms (target {target or '-'}){said(late)}, "
            f"CPU p50 {at(cpus, 0.5):6.1f} ms, p99 {at(cpus, 0.99):6.1f} ms; "
            f"scan {scan:5.1f} ms; {size >> 10} KiB; RSS {resident_mib():.0f} MiB"
        )
    for containers, devices, target in PROCESSES:
        walls, cost, memory, most_memory, share = served(containers, devices, rounds, options.seconds)
        usual = containers <= 110
        late, large, busy = at(walls, 0.99) > target, usual and most_memory > MEMORY, usual and share > SHARE
        missed |= late or large or busy
        print(
            f"process, {containers} containers x {devices} devices: "
            f"scrape p50 {at(walls, 0.5):6.1f} ms, "
            f"p99 {at(walls, 0.99):6.1f} ms (target {target}){said(late)}, "
            f"CPU {cost:.1f} ms; RSS {memory:.0f} MiB, "
            f"at most {most_memory:.0f} MiB (target {MEMORY}){said(large)}, "
            f"CPU {share:.1f} thousandths (target {SHARE}){said(busy)}"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
