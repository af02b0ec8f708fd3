"""What the parts of the monitor hand to each other: plain data, no cluster, no file, no NVML.

A value that is not known is None, never zero; bytes and seconds since the epoch throughout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from isolator.region import Region


class Skip(StrEnum):
    """Why a cache folder or file gives no series; label value, so the set is closed."""

    NO_POD = "no_pod"  # no unfinished pod of this node has the folder's UID, or it has no such container
    NOT_RUNNING = "not_running"  # its container does not run
    NAME = "name"  # not <podUID>_<container>
    NOT_DIRECTORY = "not_directory"  # a file, link, FIFO, ... where a container's folder belongs
    NO_FILE = "no_file"  # a folder without any *.cache: CUDA was not started in it yet
    CROWDED = "crowded"  # more entries than are looked at; what was found before counts
    EXTRA_FILE = "extra_file"  # a second region file of one container
    LINK = "link"  # a symbolic link in the file's place: never followed
    NOT_REGULAR = "not_regular"  # a directory, FIFO, socket or device in the file's place
    PERMISSION = "permission"  # EACCES or EPERM
    UNREADABLE = "unreadable"  # any other error of the file system
    EMPTY = "empty"  # 0 bytes
    TRUNCATED = "truncated"  # shorter than its layout
    TOO_BIG = "too_big"  # far larger than any layout
    NOT_REGION = "not_region"  # no magic
    OLD_LAYOUT = "old_layout"  # HAMi-core before version words (2024)
    TRANSITIONAL = "transitional"  # HAMi-core of March 2026: says 1.1, other offsets
    VERSION = "version"  # a version this package does not know
    UNFINISHED = "unfinished"  # of our size, but its maker has not finished it
    BAD_COUNT = "bad_count"  # impossible number of devices or slots
    SLOW = "slow"  # it takes too long to look at
    CHANGING = "changing"  # a writer was active at every attempt, or the file was cut while read
    UUID = "uuid"  # a device without a valid UUID (counted by device)
    IMPLAUSIBLE = "implausible"  # a device with words that no card can hold (counted by device)


class State(StrEnum):
    """Enforcement of one container; label value of kai_isolator_container_state."""

    ENFORCED = "enforced"
    UNSETTLED = "unsettled"
    IDLE = "idle"
    REFUSED = "refused"
    UNCAPPED = "uncapped"
    UNREADABLE = "unreadable"


class Uncapped(StrEnum):
    """Why a container runs without a limit; label value of kai_isolator_uncapped_containers."""

    NOT_INJECTED = "not_injected"  # a fraction pod that the webhook never saw
    OPTED_OUT = "opted_out"  # annotation, label or CUDA_DISABLE_CONTROL
    SKIPPED = "skipped"  # the webhook left it out for another reason (sandbox class, released, ...)
    NO_LIMIT = "no_limit"  # injected, and its region records no limit
    BYPASS = "bypass"  # NVML lists memory of a container that has no live region


@dataclass(frozen=True)
class Cache:
    """One container's folder: `region` or the reason (a Skip) why there is none.

    `extra` counts what was passed over beside it, by Skip. `modified` is the file's mtime, 0 without a file.
    """

    pod_uid: str
    container: str
    path: Path
    region: Region | None = None
    skipped: str | None = None
    modified: float = 0.0
    extra: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Container:
    """One container of a pod of this node, from its spec and status. `uid` is the pod's."""

    namespace: str
    pod: str
    uid: str
    name: str
    init: bool = False
    injected: bool = False
    running: bool = False
    started: float | None = None
    container_id: str = ""
    fraction: bool = False
    """Whether this is the container that KAI gives the GPU to."""
    limit_configmap: str | None = None
    limit_withheld: bool = False
    """Whether the webhook put text that can be no limit in the limit's place: KAI named none."""


@dataclass(frozen=True)
class PodView:
    """What is kept of one pod of this node. `live` is false for Succeeded and Failed."""

    namespace: str
    name: str
    uid: str = ""
    containers: tuple[Container, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    live: bool = True


@dataclass(frozen=True)
class NvmlProcess:
    """One process on one device: its PID as NVML gives it (the host's), bytes (None: not available)."""

    pid: int
    used: int | None


@dataclass(frozen=True)
class NvmlDevice:
    """One device of the node. Utilisation in percent."""

    index: int
    uuid: str
    name: str
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: float | None = None
    memory_utilization: float | None = None
    temperature: float | None = None
    power_watts: float | None = None
    processes: tuple[NvmlProcess, ...] = ()


@dataclass(frozen=True)
class NvmlView:
    """The last answer of NVML; `up` is false where it is old, `devices` then are the last known."""

    up: bool
    time: float
    devices: tuple[NvmlDevice, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What is concluded of one container that should be capped. None is "not known": no series.

    `nvml_bytes` (by device UUID) and `bypass` need the host's PIDs.
    """

    namespace: str
    pod: str
    container: str
    state: State
    uncapped: Uncapped | None = None
    reason: str = ""
    expected_limit: int | None = None
    mismatch: bool | None = None
    tampered: bool | None = None
    sm_unenforced: bool | None = None
    nvml_bytes: Mapping[str, int] | None = None
    bypass: bool | None = None


@dataclass(frozen=True)
class Snapshot:
    """All that one scrape shows. A source that failed is named in `failed` and its field left empty.

    `time` and `duration` (seconds) are of the scan. `verdicts` are None where the pods were never listed.
    `libsync` is the decoded <mount>/libsync.json. `skipped` counts, by Skip, what the *composer* passed
    over; what `caches` say of themselves is counted from them.
    """

    node: str
    time: float
    duration: float = 0.0
    caches: tuple[Cache, ...] = ()
    pods: Mapping[str, PodView] = field(default_factory=dict)
    """By pod UID."""
    pod_watch_up: bool = False
    node_gpu_memory_mib: int | None = None
    libsync: Mapping[str, Any] | None = None
    nvml: NvmlView | None = None
    verdicts: tuple[Verdict, ...] | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    failed: frozenset[str] = frozenset()
    """Names of sources: caches, pods, nvml, libsync, verdicts, host_pid."""
    listed: bool = True
    """Whether the pods were listed once; before that no cache has an owner."""
    node_label: str | None = None
    """Raw text of the node's memory label; None where it is absent or was never read."""
