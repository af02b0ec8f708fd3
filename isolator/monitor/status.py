"""A scan of the node -> its status document: one pure function for /status.json, the page and `top`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from isolator import __version__
from isolator.monitor import enforcement, grants
from isolator.monitor.document import (
    Device,
    Document,
    Flags,
    Library,
    MemoryLabel,
    Node,
    Tenant,
    TenantDevice,
)
from isolator.monitor.model import (
    Cache,
    Container,
    NvmlDevice,
    PodView,
    Skip,
    Snapshot,
    State,
    Uncapped,
    Verdict,
)
from isolator.monitor.readings import joined, nvml_up, up
from isolator.monitor.view import CLOCK_SLACK_S, UUID_LABEL_LENGTH, View
from isolator.monitor.words import LIBRARY_OLD_S
from isolator.output import plain
from isolator.region import Region
from isolator.region_model import Device as RegionDevice

_NAMED: Final = 3
"""Tenants that a problem names; the others are counted."""
_LONGEST: Final = 300

_Key = tuple[str, str, str]
_NOWHERE: Final = Path()


def document(view: View) -> Document:
    """What is known of the node; for a View that is not `up` only that it is not."""
    snapshot = view.snapshot
    named = joined(view)
    tenants = tuple(_tenants(view) if named else _unnamed(snapshot))
    node = Node(
        name=snapshot.node,
        time=snapshot.time,
        version=__version__,
        library=_library(snapshot.libsync),
        memory_label=MemoryLabel(
            text=None if snapshot.node_label is None else plain(snapshot.node_label),
            mib=snapshot.node_gpu_memory_mib,
            in_bytes=None if snapshot.node_label is None else grants.in_bytes(snapshot.node_label),
        ),
        nvml_up=bool(nvml_up(view)),
        pod_watch_up=snapshot.pod_watch_up,
        named=named,
        # Without the pods every folder lacks its own, and is shown all the same.
        skipped={why: n for why, n in sorted(view.skipped.items()) if n and (named or why != Skip.NO_POD)},
        problems=tuple(plain(text)[:_LONGEST] for text in _problems(view, named, tenants)),
    )
    return Document(node, tuple(_devices(view, named, tenants)), tenants)


# ---- tenants ----------------------------------------------------------------------------------------


def _tenants(view: View) -> Iterator[Tenant]:
    """By namespace, pod and container."""
    regions: dict[_Key, Region] = {_key(labels): region for labels, region in view.containers}
    verdicts: dict[_Key, Verdict] = {_key(labels): verdict for labels, verdict in view.verdicts}
    wanted = regions.keys() | verdicts.keys()
    known: dict[_Key, Container] = {}
    for pod in view.snapshot.pods.values():
        for container in pod.containers:
            key = (container.namespace, container.pod, container.name)
            if key in wanted and (key not in known or (pod.live and container.running)):
                known[key] = container
    for key in sorted(wanted):
        region, found = regions.get(key), known.get(key)
        yield _tenant(
            key,
            None if found is None else found.uid,
            None if found is None else found.started,
            region,
            verdicts.get(key) or _verdict(key, region, None),
            view.snapshot.time,
        )


def _unnamed(snapshot: Snapshot) -> Iterator[Tenant]:
    """What lies in the cache folders, by pod UID, where nobody tells whose they are and what runs."""
    for cache in sorted(snapshot.caches, key=lambda cache: (cache.pod_uid, cache.container)):
        verdict = _verdict(("", "", cache.container), cache.region, cache.skipped)
        yield _tenant(
            (None, None, cache.container), cache.pod_uid, None, cache.region, verdict, snapshot.time
        )


def _key(labels: Mapping[str, str]) -> _Key:
    namespace, pod, container = labels.values()
    return namespace, pod, container


def _verdict(key: _Key, region: Region | None, skipped: str | None) -> Verdict:
    """What the region alone tells of a container whose pod says nothing of a limit."""
    namespace, pod, name = key
    container = Container(namespace, pod, "", name, injected=True, running=True)
    cache = Cache("", name, _NOWHERE, region, skipped)
    return enforcement.judge(container, PodView(namespace, pod), cache, None)


def _tenant(
    key: tuple[str | None, str | None, str],
    uid: str | None,
    started: float | None,
    region: Region | None,
    verdict: Verdict,
    now: float,
) -> Tenant:
    namespace, pod, container = key
    return Tenant(
        namespace=namespace,
        pod=pod,
        uid=uid,
        container=container,
        state=State(verdict.state).value,
        uncapped=None if verdict.uncapped is None else Uncapped(verdict.uncapped).value,
        reason=verdict.reason,
        flags=Flags(verdict.mismatch, verdict.tampered, verdict.bypass, verdict.sm_unenforced),
        expected_limit=verdict.expected_limit,
        devices=() if region is None else tuple(_used(d, region.extended, now) for d in region.devices),
        processes=None if region is None else len(region.processes),
        created=None if region is None else region.created,
        started=started,
        layout=None if region is None else region.version,
    )


def _used(device: RegionDevice, extended: bool, now: float) -> TenantDevice:
    """HAMi-core counts no refusals and keeps no peak; a damaged word or a time to come tells nothing."""

    def word(name: str, known: bool = True) -> Any:
        return getattr(device, name) if known and name not in device.damaged else None

    last = device.refused_last
    return TenantDevice(
        index=device.index,
        uuid=device.uuid,
        used=word("used"),
        limit=word("limit"),
        peak=word("peak", extended),
        refused=word("refused", extended),
        refused_last=last if last is not None and last <= now + CLOCK_SLACK_S else None,
        refused_bytes=word("refused_bytes", extended and last is not None),
        sm_limit=word("sm_limit") or None,
    )


# ---- the node ---------------------------------------------------------------------------------------


def _devices(view: View, named: bool, tenants: Iterable[Tenant]) -> Iterator[Device]:
    """Those that NVML lists, by its index, then those that only tenants name."""
    charged: Counter[str] = Counter()
    limits: Counter[str] = Counter()
    for tenant in tenants:
        for device in tenant.devices:
            uuid = device.uuid[:UUID_LABEL_LENGTH]
            charged[uuid] += device.used or 0
            limits[uuid] += device.limit or 0
    scanned = bool(up(view))
    listed = {row.device.uuid[:UUID_LABEL_LENGTH]: row.device for row in view.hosts}
    others = sorted(charged.keys() - listed.keys())
    for uuid in [*listed, *others]:
        host = functools.partial(_field, listed.get(uuid))
        yield Device(
            index=host("index"),
            uuid=uuid,
            name=host("name"),
            memory_total=host("memory_total"),
            memory_used=host("memory_used"),
            charged=charged[uuid] if scanned else None,
            # Without the pods, folders of ended containers would count.
            allocated=limits[uuid] if named else None,
            utilization=host("utilization"),
            temperature=host("temperature"),
            power=host("power_watts"),
        )


def _field(device: NvmlDevice | None, name: str) -> Any:
    return None if device is None else getattr(device, name)


def _library(told: Mapping[str, Any] | None) -> Library:
    """The parts of libsync.json that are what they should be."""

    def part(key: str, *kinds: type) -> Any:
        value = (told or {}).get(key)
        if type(value) not in kinds:
            return None
        return plain(value) if isinstance(value, str) else value

    return Library(
        version=part("library_version", str),
        sha256=part("library_sha256", str),
        ready=part("ready", bool),
        problem=part("problem", str),
        verified_at=part("verified_at", int, float),
    )


def _problems(view: View, named: bool, tenants: tuple[Tenant, ...]) -> Iterator[str]:
    """One line a problem: what keeps from seeing, then the tenants', then the node's."""
    snapshot = view.snapshot
    if not view.up:
        yield "the scan of this node failed: the monitor's log says why"
        return
    if "caches" in snapshot.failed:
        yield "the cache folders cannot be read and no tenant is seen: is paths.containerVgpuMount right?"
    elif not named:
        yield "the pods are not known (no answer of the API server yet): tenants are shown by pod UID"
    elif not snapshot.pod_watch_up:
        yield "the API server does not answer: the pods are the last known ones"
    yield from _of_tenants(tenants)
    yield from _of_library(snapshot)
    if not nvml_up(view):
        yield "NVML does not answer: the devices' own figures are missing"
    yield from _of_label(snapshot)
    for source in sorted(snapshot.failed - {"caches", "pods", "nvml"}):
        yield f"{source} cannot be read: the monitor's log says why"


_WRONG: Final[tuple[tuple[Callable[[Tenant], bool], str], ...]] = (
    (lambda tenant: tenant.state == State.UNCAPPED, "without a limit"),
    (lambda tenant: bool(tenant.flags.mismatch), "with a limit above what KAI grants"),
    (lambda tenant: bool(tenant.flags.tampered), "with an altered limit or quota word"),
    (lambda tenant: bool(tenant.flags.bypass), "with GPU memory that the library does not hold"),
    (lambda tenant: tenant.state == State.UNREADABLE, "with a region file that cannot be read"),
    (lambda tenant: tenant.state == State.REFUSED, "where CUDA is refused a start"),
)


def _of_tenants(tenants: tuple[Tenant, ...]) -> Iterator[str]:
    for holds, what in _WRONG:
        found = [tenant.title for tenant in tenants if holds(tenant)]
        if found:
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            count = f"{len(found)} container{'s' if len(found) > 1 else ''}"
            yield f"{count} {what}: {', '.join(found[:_NAMED])}{more}"


def _of_library(snapshot: Snapshot) -> Iterator[str]:
    if "libsync" in snapshot.failed:
        return  # named with the other sources
    library = _library(snapshot.libsync)
    if snapshot.libsync is None:
        yield "libsync has reported nothing on this node: is its pod running here?"
    elif not library.ready:
        yield f"the library is not ready on this node: {library.problem or 'libsync names no cause'}"
    elif library.verified_at is not None and snapshot.time - library.verified_at > LIBRARY_OLD_S:
        minutes = int((snapshot.time - library.verified_at) / 60)
        yield f"libsync has not looked at the library for {minutes} minutes: is its pod running here?"


def _of_label(snapshot: Snapshot) -> Iterator[str]:
    label = snapshot.node_label
    if not snapshot.pod_watch_up and label is None:
        return  # it was never read
    if label is None:
        yield "no label nvidia.com/gpu.memory was read from the node: without it KAI takes a card for 100 MiB"
    elif snapshot.node_gpu_memory_mib is None:
        yield f"the node's label nvidia.com/gpu.memory is no number: {label}"
    elif grants.in_bytes(label):
        yield f"the node's label nvidia.com/gpu.memory is in bytes ({label}): limits come out far too high"
