"""Puts one Snapshot together: caches, pods, NVML, the installer's report, and a verdict a container.

Each source fails alone: its name is noted in `failed` and the rest is served.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from isolator import names
from isolator.monitor import discovery, enforcement, grants, hostpid
from isolator.monitor.model import Cache, NvmlView, PodView, Snapshot, Verdict

log = logging.getLogger(__name__)

_LIBSYNC_BYTES: Final = 1 << 16
Key = tuple[str, str]
"""Pod UID and container name."""
_T = TypeVar("_T")


class PodSource(Protocol):
    """What podwatch.PodWatch is to this module."""

    listed: bool
    up: bool
    label: str | None

    def pods(self) -> dict[str, PodView]:
        """Pods of this node by UID."""


class NvmlSource(Protocol):
    """What nvml.Nvml is to this module."""

    def view(self) -> NvmlView:
        """The last answer, without waiting."""


class HostProcesses:
    """NVML's processes by container, and which containers have more of them than their region knows.

    A process that starts or ends between the two readings looks the same for a moment: only what two
    successive answers of NVML show is believed.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._time = 0.0
        self._before: set[Key] = set()
        self._now: set[Key] = set()
        self._lock = threading.Lock()

    def join(
        self, view: NvmlView, pods: Mapping[str, PodView], caches: Mapping[Key, Cache]
    ) -> tuple[dict[Key, dict[str, int]], set[Key]]:
        """Bytes by device UUID of each container, and the containers that go round the library."""
        by_id = {c.container_id: (uid, c.name) for uid, p in pods.items() for c in p.containers}
        used: dict[Key, dict[str, int]] = defaultdict(dict)
        processes: dict[Key, set[int]] = defaultdict(set)
        owners = {process.pid for device in view.devices for process in device.processes}
        found = {pid: hostpid.owner(pid, self._proc) for pid in owners}
        for device in view.devices:
            for process in device.processes:
                owner = found[process.pid]
                key = by_id.get(owner.container_id) if owner is not None else None
                if key is None or (owner and owner.pod_uid not in (None, key[0])):
                    continue
                processes[key].add(process.pid)
                used[key][device.uuid] = used[key].get(device.uuid, 0) + (process.used or 0)
        more = {key for key, pids in processes.items() if len(pids) > _live(caches.get(key))}
        with self._lock:  # scrapes and the background thread come here
            if view.time != self._time:
                self._time, self._before = view.time, self._now
            self._now = more
            return used, more & self._before


def _live(cache: Cache | None) -> int:
    return len(cache.region.processes) if cache is not None and cache.region is not None else 0


class Composer:
    """Makes the snapshots of one node. `mount` is the library's folder, `proc` the host's process table."""

    def __init__(
        self,
        node: str,
        mount: Path,
        pods: PodSource,
        nvml: NvmlSource,
        schedulers: tuple[str, ...] = (),
        host_pid: bool = False,
        proc: Path = Path("/proc"),
    ) -> None:
        self._node, self._mount, self._pods, self._nvml = node, mount, pods, nvml
        self._schedulers = schedulers
        self._scanner = discovery.Scanner(mount)
        self._host = HostProcesses(proc) if host_pid else None
        self._said: set[str] = set()

    def snapshot(self) -> Snapshot:
        """One scan of the node; never raises for what a tenant, a file, the API or NVML does."""
        started, now = time.monotonic(), time.time()
        failed: set[str] = set()
        scan = self._try("caches", failed, self._scanner.scan)
        pods = self._try("pods", failed, self._pods.pods) or {}
        view = self._try("nvml", failed, self._nvml.view)
        libsync = self._try("libsync", failed, self._libsync)
        caches = scan.caches if scan is not None else ()
        verdicts = None
        if self._pods.listed and scan is not None:
            verdicts = self._try("verdicts", failed, lambda: self._judge(pods, caches, view, failed))
        return Snapshot(
            node=self._node,
            time=now,
            duration=time.monotonic() - started,
            caches=caches,
            pods=pods,
            listed=self._pods.listed,
            pod_watch_up=self._pods.up,
            node_gpu_memory_mib=grants.card_mib(self._pods.label),
            node_label=self._pods.label,
            libsync=libsync,
            nvml=view,
            verdicts=verdicts,
            skipped=scan.skipped if scan is not None else Counter(),
            failed=frozenset(failed),
        )

    def _try(self, source: str, failed: set[str], ask: Callable[[], _T]) -> _T | None:
        try:
            answer = ask()
        except Exception as error:  # whatever it is, the other sources are served
            failed.add(source)
            if source not in self._said:
                log.warning("%s cannot be read and is left out: %s: %s", source, type(error).__name__, error)
            self._said.add(source)
            return None
        self._said.discard(source)
        return answer

    def _libsync(self) -> dict[str, Any] | None:
        """The installer's report; None where there is none yet. Only root writes it, but it may be cut."""
        try:
            descriptor = os.open(
                self._mount / names.LIBSYNC_STATUS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
        except FileNotFoundError:
            return None
        try:
            found = json.loads(os.read(descriptor, _LIBSYNC_BYTES))
        finally:
            os.close(descriptor)
        if not isinstance(found, dict):
            raise ValueError(f"{names.LIBSYNC_STATUS} holds no object")
        return found

    def _judge(
        self, pods: Mapping[str, PodView], caches: tuple[Cache, ...], view: NvmlView | None, failed: set[str]
    ) -> tuple[Verdict, ...]:
        by_key = {(cache.pod_uid, cache.container): cache for cache in caches}
        seen = None
        if self._host is not None and view is not None and view.up:
            host = self._host
            seen = self._try("host_pid", failed, lambda: host.join(view, pods, by_key))
        verdicts = []
        for uid, pod in pods.items():
            for container in pod.containers:
                if not enforcement.concerns(container, pod, self._schedulers):
                    continue
                key = (uid, container.name)
                verdicts.append(
                    enforcement.judge(
                        container,
                        pod,
                        by_key.get(key),
                        self._pods.label,
                        None if seen is None else seen[0].get(key, {}),
                        None if seen is None else key in seen[1],
                    )
                )
        return tuple(verdicts)
