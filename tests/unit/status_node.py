"""A node with a tenant of each kind, in real region files, for tests of the status document and its views."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import monitor_pods
import uvicorn
from isolator._core import lib
from prometheus_client import CollectorRegistry
from region_files import EXT, MIB, RegionFile, Slot, Spec, folder, uuid

from isolator import names
from isolator.monitor import pods
from isolator.monitor.app import create_app
from isolator.monitor.collector import MonitorCollector
from isolator.monitor.model import NvmlDevice, NvmlView, PodView, Snapshot
from isolator.monitor.snapshot import Composer

NODE = "gpu-node-1"
CARDS = (
    NvmlDevice(0, uuid(0), "Tesla T4", 15360 * MIB, 9800 * MIB, 87.0, 41.0, 66.0, 68.4),
    NvmlDevice(1, uuid(1), "Tesla T4", 15360 * MIB, 3300 * MIB, 0.0, 0.0, 38.0, 12.1),
)


class Pods:
    """The node's pods, as podwatch.PodWatch has them."""

    def __init__(self, *found: PodView, label: str | None = "15360", up: bool = True) -> None:
        self.listed, self.up, self.label = True, up, label
        self._found = {pod.uid: pod for pod in found}

    def pods(self) -> dict[str, PodView]:
        return self._found


class Cards:
    """NVML's last answer."""

    def __init__(self, *devices: NvmlDevice, up: bool = True) -> None:
        self._view = NvmlView(up, time.time(), devices)

    def view(self) -> NvmlView:
        return self._view


def pod(number: int, name: str = "", namespace: str = "team-a", **given: object) -> PodView:
    """A running pod of 4096 MiB, as the monitor keeps it; given as in monitor_pods.pod."""
    made = monitor_pods.pod(number, **given)  # type: ignore[arg-type]
    made["metadata"].update(namespace=namespace, name=name or f"pod-{number}")
    return pods.view(made, monitor_pods.MOUNT)


def put(mount: Path, number: int, spec: Spec, container: str = "main") -> RegionFile:
    """The region of pod `number`."""
    return RegionFile(folder(mount, monitor_pods.uid(number), container) / names.CACHE_FILE, spec)


def report(mount: Path, **told: object) -> None:
    """libsync's report, ready unless told otherwise."""
    known = {
        "library_version": "1.2.0",
        "library_sha256": "3f" * 32,
        "ready": True,
        "problem": None,
        "verified_at": time.time() - 12,
        "oversized_caches": 0,
    }
    (mount / names.LIBSYNC_STATUS).write_text(json.dumps(known | told))


def compose(mount: Path, found: Pods, cards: Cards | None = None) -> Snapshot:
    """One scan."""
    return Composer(NODE, mount, found, cards or Cards(*CARDS)).snapshot()


def slot(mib: int, **more: int) -> Slot:
    """A live process that is charged so much."""
    return Slot(context=102 * MIB, data=(mib - 102) * MIB, **more)  # type: ignore[arg-type]


@contextmanager
def healthy(mount: Path) -> Iterator[Snapshot]:
    """One tenant that holds 3174 of 4147 MiB, and nothing to complain about."""
    report(mount)
    with put(mount, 1, Spec(slots=[slot(3174)], peak=3300 * MIB)):
        yield compose(mount, Pods(pod(1, "train")))


@contextmanager
def busy(mount: Path) -> Iterator[Snapshot]:
    """A tenant of each kind on two cards."""
    report(mount)
    ago = int((time.time() - 42) * 1e9)
    two = [uuid(0), uuid(1)]
    full = Spec(slots=[slot(3000), slot(1100)], refused=17, refused_ns=ago, refused_bytes=2048 * MIB)
    specs = {
        1: replace(full, peak=4147 * MIB),
        2: Spec(slots=[slot(1500)], uuids=two, peak=2000 * MIB),
        3: Spec(slots=[], state=lib.VGPU_STATE_REFUSED),
        4: Spec(slots=[slot(900)], flags=lib.VGPU_FLAG_TAMPERED, limit=8192 * MIB, peak=900 * MIB),
        5: Spec(ours=False, slots=[slot(700)]),
    }
    found = [pod(1, "llm-serving-7d9f8b6c5d-x2x4q"), pod(2, "train-0"), pod(3, "notebook"), pod(4, "batch")]
    found += [pod(5, "old-library", "team-b"), pod(6, "waiting", "team-b")]
    found += [pod(7, "stray", "team-b", injected=False, annotations={"gpu-memory": "4096"})]
    with ExitStack() as files:
        for number, spec in specs.items():
            made = files.enter_context(put(mount, number, spec))
            if spec.state == lib.VGPU_STATE_REFUSED:
                made.put(EXT + 68, "I", errno.ENOSPC)
        yield compose(mount, Pods(*found))


@contextmanager
def serve(snapshot: Callable[[], Snapshot]) -> Iterator[str]:
    """The monitor's HTTP in front of such scans: its base URL."""
    collector = MonitorCollector(snapshot, update_interval=0)
    registry = CollectorRegistry()
    registry.register(collector)
    config = uvicorn.Config(
        create_app(registry, collector.scan), port=0, log_config=None, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
