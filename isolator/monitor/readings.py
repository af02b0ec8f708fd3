"""How the figures of the metric table are read off a View. A figure that is not known gives no point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from isolator import __version__
from isolator.monitor.model import Skip, State, Uncapped
from isolator.monitor.view import CLOCK_SLACK_S, CONTAINER_LABELS, UUID_LABEL_LENGTH, Labels, View
from isolator.region import Region

Points = Iterable[tuple[Labels, float]]
Read = Callable[[View], Points]

SOURCES = ("snapshot", "caches", "pods", "nvml", "libsync", "verdicts", "host_pid")
"""What can fail on its own; label values of kai_isolator_source_errors_total."""

_NONE: Labels = {}


def one(get: Callable[[View], float | None]) -> Read:
    """A figure of the whole node."""

    def read(view: View) -> Iterator[tuple[Labels, float]]:
        value = get(view)
        if value is not None:
            yield _NONE, value

    return read


def scanned(get: Callable[[View], float | None]) -> Read:
    """A figure of the last scan, where that succeeded."""
    return one(lambda view: get(view) if view.up else None)


def device(field: str, labels: str = "hami") -> Read:
    """A field of each device of each container, unless its word is damaged."""

    def read(view: View) -> Iterator[tuple[Labels, float]]:
        for row in view.devices:
            value = getattr(row.device, field)
            if value is not None and field not in row.device.damaged:
                yield getattr(row, labels), value

    return read


def elapsed(labels: str = "hami") -> Read:
    """Seconds since the last kernel of a device's container."""

    def read(view: View) -> Iterator[tuple[Labels, float]]:
        for row in view.devices:
            last = row.region.last_kernel_time
            if last is not None:
                yield getattr(row, labels), max(0.0, view.snapshot.time - last)

    return read


def refusals(view: View) -> Points:
    """HAMi-core counts none, which is not the same as none."""
    for row in view.devices:
        if row.region.extended and "refused" not in row.device.damaged:
            yield row.own, row.device.refused


def last_refusal(view: View) -> Points:
    """A time that a tenant has put into the future is left out."""
    for row in view.devices:
        last = row.device.refused_last
        if last is not None and last <= view.snapshot.time + CLOCK_SLACK_S:
            yield row.own, last


def host(field: str, labels: str = "hami") -> Read:
    """A field of each device of the node."""

    def read(view: View) -> Iterator[tuple[Labels, float]]:
        for row in view.hosts:
            value = getattr(row.device, field)
            if value is not None:
                yield getattr(row, labels), value

    return read


def allocated(labels: str = "hami") -> Read:
    """Sum of the limits on each device of the node."""
    return lambda view: shared(view, ((r.own["device_uuid"], r.device.limit) for r in view.devices), labels)


def sharing(labels: str = "hami") -> Read:
    """Number of containers on each device of the node."""
    return lambda view: shared(view, ((r.own["device_uuid"], 1) for r in view.devices), labels)


def shared(view: View, parts: Iterable[tuple[str, int]], labels: str = "hami") -> Points:
    """Sums by device, of parts (UUID, figure), for each device of the node."""
    sums: Counter[str] = Counter()
    for uuid, part in parts:
        sums[uuid] += part
    if not joined(view):
        return ()
    return ((getattr(row, labels), sums[row.hami["device_uuid"]]) for row in view.hosts)


def ledger(view: View) -> Points:
    """Sum of what is charged by device: those of a container, and those that NVML lists."""
    if not joined(view):
        return ()
    sums: Counter[str] = Counter({row.hami["device_uuid"]: 0 for row in view.hosts})
    for row in view.devices:
        if "used" not in row.device.damaged:
            sums[row.own["device_uuid"]] += row.device.used
    return (({"device_uuid": uuid}, used) for uuid, used in sorted(sums.items()))


def nvml_used(view: View) -> Points:
    """What NVML says is used, by device."""
    for row in view.hosts:
        if row.device.memory_used is not None:
            yield {"device_uuid": row.hami["device_uuid"]}, row.device.memory_used


def nvml_up(view: View) -> float:
    """Whether NVML answers."""
    return view.snapshot.nvml is not None and view.snapshot.nvml.up


def verdict(field: str) -> Read:
    """A field of each container's verdict."""

    def read(view: View) -> Iterator[tuple[Labels, float]]:
        for labels, found in view.verdicts:
            value = getattr(found, field)
            if value is not None:
                yield labels, value

    return read


def flag(field: str) -> Read:
    """A flag of each container: what its region says, unless the verdict knows better."""

    def read(view: View) -> Iterator[tuple[Labels, float]]:
        found = {tuple(labels.values()): _of(r, field) for labels, r in view.containers if r.extended}
        for labels, verdict in view.verdicts:
            known = getattr(verdict, field)
            if known is not None:
                found[tuple(labels.values())] = known
        for key, value in found.items():
            yield dict(zip(CONTAINER_LABELS, key, strict=True)), value

    return read


def _of(region: Region, field: str) -> bool:
    return bool(getattr(region, field))


def states(view: View) -> Points:
    """The state that each container is in."""
    return (({**labels, "state": State(v.state).value}, 1) for labels, v in view.verdicts)


def uncapped(view: View) -> Points:
    """Uncapped containers by reason, zeros too; nothing where the pods were never listed."""
    if view.snapshot.verdicts is None:
        return
    counts = Counter(v.uncapped for _, v in view.verdicts if v.state == State.UNCAPPED)
    for reason in Uncapped:
        yield {"reason": reason.value}, counts[reason]


def uncapped_by(view: View) -> Points:
    """Each container without a limit, with the reason; the others have no point."""
    for labels, found in view.verdicts:
        if found.state == State.UNCAPPED and found.uncapped is not None:
            yield {**labels, "reason": Uncapped(found.uncapped).value}, 1


def nvml_bytes(view: View) -> Points:
    """What NVML says a container's processes use, by device."""
    for labels, found in view.verdicts:
        for uuid, used in (found.nvml_bytes or {}).items():
            yield {**labels, "device_uuid": uuid[:UUID_LABEL_LENGTH]}, used


def up(view: View) -> float:
    """Whether the caches were scanned: without them there is nothing to say of containers."""
    return view.up and "caches" not in view.snapshot.failed


def joined(view: View) -> bool:
    """Whether caches and pods are both known: a sum over containers that are not would say 0."""
    return bool(up(view)) and view.snapshot.listed and "pods" not in view.snapshot.failed


def skipped(view: View) -> Points:
    """What was skipped, by reason, zeros too."""
    return (({"reason": reason.value}, view.skipped[reason]) for reason in Skip) if up(view) else ()


def errors(view: View) -> Points:
    """Failures by source since the start."""
    return (({"source": source}, view.errors.get(source, 0)) for source in SOURCES)


def build(view: View) -> Points:
    """The monitor's own version."""
    return [({"version": __version__}, 1)]


def library(view: View) -> Points:
    """The installed library's version and hash."""
    known = view.snapshot.libsync or {}
    version, digest = known.get("library_version"), known.get("library_sha256")
    if isinstance(version, str) and isinstance(digest, str):
        yield {"version": version, "sha256": digest}, 1


def libsync(key: str) -> Read:
    """A number or truth value of libsync.json; nothing where it is missing or something else."""

    def get(view: View) -> float | None:
        value: Any = (view.snapshot.libsync or {}).get(key)
        return float(value) if isinstance(value, int | float) else None

    return one(get)
