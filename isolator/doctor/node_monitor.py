"""What the node's monitor knows, or, without it, what lies in the cache folders."""

from __future__ import annotations

from pathlib import Path

from isolator import names
from isolator.doctor import tenants
from isolator.doctor.report import Report
from isolator.errors import UnavailableError
from isolator.monitor import client, discovery, enforcement
from isolator.monitor.document import Flags, Node
from isolator.monitor.model import Cache, Container, PodView, Skip


def judge(report: Report, url: str, expected: bool, patience: float) -> Node | None:
    """Judges the node by its monitor's answer; None without one. `expected`: it must be there."""
    try:
        found = client.ask(url, direct=True, timeout=patience)
    except UnavailableError as error:
        if expected:
            report.check("monitor")
            report.find("monitor_down", url, str(error))
        else:
            report.skip("monitor", f"{error} (its pod has an address of its own: --monitor URL)")
        return None
    report.check("monitor")
    if not found.node.nvml_up:
        report.find("nvml_down", url, "NVML does not answer it")
    _sources(report, url, found.node)
    for tenant in found.tenants:
        tenants.verdict(report, tenant.title, tenant.state, tenant.uncapped, tenant.reason, tenant.flags)
    report.check("tenants")
    return found.node


def _sources(report: Report, url: str, node: Node) -> None:
    if not node.pod_watch_up:
        report.find(
            "monitor_down", url, "the API server does not answer it: the tenants' names are not known"
        )
    elif not node.named:
        report.find("monitor_down", url, "it cannot scan the cache folders, or knows no pods")
    for why, number in node.skipped.items():
        if why in _UNREADABLE and number > 0:
            seen = f"{number} files or folders: {why}"
            report.find("cache_unreadable", names.CONTAINERS_DIRECTORY, seen, file=names.CONTAINERS_DIRECTORY)


_UNREADABLE = frozenset(Skip) - {
    *(Skip.NO_POD, Skip.NOT_RUNNING, Skip.NO_FILE, Skip.EMPTY, Skip.UNFINISHED, Skip.EXTRA_FILE),
    *(Skip.CHANGING, Skip.UUID),
}


def scan(report: Report, mount: Path) -> None:
    """Without a monitor: what the cache folders themselves tell. Raises OSError."""
    report.check("cache folders")
    for cache in discovery.scan(mount).caches:
        subject = f"{cache.pod_uid}/{cache.container}"
        if cache.skipped in _UNREADABLE:
            report.find("cache_unreadable", subject, f"{cache.path}: {cache.skipped}", file=cache.path)
        elif cache.region is not None:
            _alone(report, subject, cache)


def _alone(report: Report, subject: str, cache: Cache) -> None:
    container = Container("", "", cache.pod_uid, cache.container, injected=True, running=True)
    found = enforcement.judge(container, PodView("", ""), cache, None)
    flags = Flags(tampered=found.tampered)
    tenants.verdict(report, subject, found.state, found.uncapped, found.reason, flags)


def label(report: Report, node: str, text: str | None) -> None:
    """Judges the node's memory label; `text` None: it has none."""
    report.check("memory label")
    found = tenants.label_fault(text)
    if found:
        report.find(found[0], node, found[1], node=node)
