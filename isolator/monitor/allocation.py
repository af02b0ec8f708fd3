"""What HAMi's scheduler says of grants, as far as a node's regions and NVML tell it.

KAI grants memory alone. The only share of compute there is, is the SM limit that a region records; none
counts as 0, as HAMi counts a container that asked for no cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from isolator.monitor.readings import Read, allocated, shared
from isolator.monitor.view import ZONE, DeviceRow, Labels, View

LABELS: Final = ("node", "namespace", "pod", "container_index", "device_uuid")
LEGACY_LABELS: Final = ("nodename", "podnamespace", "podname", "containeridx", "deviceuuid")
WHOLE: Final = 100
"""Compute of a device, in percent."""


def _sm_limit(row: DeviceRow) -> int:
    """Percent; what is out of range is no limit, as for the library."""
    return row.device.sm_limit if 0 < row.device.sm_limit < WHOLE else 0


def cores(labels: str) -> Read:
    """Percent of compute that each device of the node has."""
    return lambda view: ((getattr(row, labels), WHOLE) for row in view.hosts)


def cores_allocated(labels: str) -> Read:
    """Sum of the SM limits on each device, in percent."""
    return lambda view: shared(view, ((r.own["device_uuid"], _sm_limit(r)) for r in view.devices), labels)


def share_allocated(labels: str) -> Read:
    """Sum of the limits on each device over its memory; above 1 where that was given out twice."""

    def read(view: View) -> Iterator[tuple[Labels, float]]:
        for host, (names, limits) in zip(view.hosts, allocated(labels)(view), strict=False):
            if host.device.memory_total:
                yield names, limits / host.device.memory_total

    return read


def memory(names: tuple[str, ...]) -> Read:
    """Limit of each device of each container, in bytes, where one is recorded."""
    return _each(names, lambda row, _: row.device.limit or None)


def memory_share(names: tuple[str, ...]) -> Read:
    """That limit over the device's memory."""
    return _each(names, lambda row, total: row.device.limit / total if total and row.device.limit else None)


def core(names: tuple[str, ...], of: int = 1) -> Read:
    """SM limit of each device of each container, in percent over `of`."""
    return _each(names, lambda row, _: _sm_limit(row) / of)


def _each(names: tuple[str, ...], value: Callable[[DeviceRow, int | None], float | None]) -> Read:
    """A figure of each device of each container; `value` also gets the device's memory, where known."""

    def read(view: View) -> Iterator[tuple[Labels, float]]:
        totals = {host.hami["device_uuid"]: host.device.memory_total for host in view.hosts}
        places = dict(_places(view))
        for row in view.devices:
            namespace, pod, container, _, uuid = row.own.values()
            found = value(row, totals.get(uuid))
            if found is not None and "limit" not in row.device.damaged:
                place = str(places[namespace, pod, container])
                whose = (view.snapshot.node, namespace, pod, place, uuid)
                yield dict(zip(names, whose, strict=True)) | ZONE, found

    return read


def _places(view: View) -> Iterator[tuple[tuple[str, str, str], int]]:
    """Each container's place among those of its kind in the pod's spec, as HAMi counts."""
    for pod in view.snapshot.pods.values():
        for init in (True, False):
            alike = [c.name for c in pod.containers if c.init is init]
            yield from (((pod.namespace, pod.name, name), place) for place, name in enumerate(alike))
