"""A snapshot joined for showing: which containers have series, under which labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from isolator import names
from isolator.monitor.model import Cache, Container, NvmlDevice, PodView, Skip, Snapshot, Verdict
from isolator.region import Device, Region

Labels = dict[str, str]

ZONE = {"zone": "vGPU"}
"""HAMi's monitor puts this label on each of its series, and so do we on those of its names."""
UUID_LABEL_LENGTH = 40
LEGACY_LABELS = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid")
LEGACY_HOST_LABELS = ("nodeid", "deviceidx", "deviceuuid", "devicetype")
CONTAINER_LABELS = names.METRIC_LABELS[:3]
CLOCK_SLACK_S = 86400.0


@dataclass(frozen=True)
class DeviceRow:
    """One device of one exported container; label sets are made once and shared by its series."""

    own: Labels
    hami: Labels
    legacy: Labels
    device: Device
    region: Region


@dataclass(frozen=True)
class HostRow:
    """One device of the node, as NVML shows it."""

    hami: Labels
    legacy: Labels
    device: NvmlDevice


@dataclass(frozen=True)
class View:
    """What one scrape shows. `errors` counts failures by source since the start."""

    snapshot: Snapshot
    devices: tuple[DeviceRow, ...] = ()
    containers: tuple[tuple[Labels, Region], ...] = ()
    verdicts: tuple[tuple[Labels, Verdict], ...] = ()
    hosts: tuple[HostRow, ...] = ()
    skipped: Counter[str] = field(default_factory=Counter)
    errors: Mapping[str, int] = field(default_factory=dict)
    up: bool = True


def make(snapshot: Snapshot, errors: Mapping[str, int]) -> View:
    """Joins caches and pods by UID; what has no place in the view is counted by Skip."""
    skipped = Counter(snapshot.skipped)
    shown: dict[tuple[str, str, str], Region] = {}
    for cache in snapshot.caches:
        skipped.update(cache.extra)
        place = _place(cache, snapshot.pods)
        if isinstance(place, Skip):
            skipped[place] += 1
        elif cache.region is None:
            skipped[cache.skipped or Skip.UNREADABLE] += 1
        else:
            key = (place.namespace, place.pod, place.name)
            # A pod that is made again under its name may for a moment be there twice.
            if key in shown:
                skipped[Skip.NOT_RUNNING] += 1
            if key not in shown or cache.region.processes:
                shown[key] = cache.region
    devices: list[DeviceRow] = []
    for key, region in shown.items():
        skipped[Skip.UUID] += region.invalid_uuids
        skipped[Skip.IMPLAUSIBLE] += sum(bool(device.damaged) for device in region.devices)
        devices += (_device_row(key, device, region) for device in region.devices)
    verdicts = {(v.namespace, v.pod, v.container): v for v in snapshot.verdicts or ()}
    return View(
        snapshot=snapshot,
        devices=tuple(devices),
        containers=tuple((_labels(key), region) for key, region in shown.items()),
        verdicts=tuple((_labels(key), verdict) for key, verdict in verdicts.items()),
        hosts=tuple(_host_rows(snapshot)),
        skipped=skipped,
        errors=errors,
    )


def _place(cache: Cache, pods: Mapping[str, PodView]) -> Container | Skip:
    """The running container that the folder belongs to, or why there is none."""
    pod = pods.get(cache.pod_uid)
    found = [c for c in pod.containers if c.name == cache.container] if pod is not None else []
    if pod is None or not found:
        return Skip.NO_POD
    region = cache.region
    # The status of a container may lag behind a process whose lock is seen; HAMi-core has no lock.
    alive = region is not None and region.extended and bool(region.processes)
    return found[0] if pod.live and (found[0].running or alive) else Skip.NOT_RUNNING


def _labels(key: tuple[str, str, str]) -> Labels:
    return dict(zip(CONTAINER_LABELS, key, strict=True))


def _device_row(key: tuple[str, str, str], device: Device, region: Region) -> DeviceRow:
    values = (*key, str(device.index), device.uuid[:UUID_LABEL_LENGTH])
    own = dict(zip(names.METRIC_LABELS, values, strict=True))
    legacy = dict(zip(LEGACY_LABELS, values, strict=True))
    return DeviceRow(own, own | ZONE, legacy | ZONE, device, region)


def _host_rows(snapshot: Snapshot) -> Iterable[HostRow]:
    """Nothing while NVML does not answer: the last known figures would pass for today's."""
    if snapshot.nvml is None or not snapshot.nvml.up:
        return
    for device in snapshot.nvml.devices:
        index, uuid, kind = str(device.index), device.uuid[:UUID_LABEL_LENGTH], f"NVIDIA-{device.name}"
        hami = {"node": snapshot.node, "device_index": index, "device_uuid": uuid, "device_type": kind}
        legacy = {"nodeid": snapshot.node, "deviceidx": index, "deviceuuid": uuid, "devicetype": kind}
        yield HostRow(hami | ZONE, legacy | ZONE, device)
