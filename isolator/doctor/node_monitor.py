"""What the node's monitor knows, or, without it, what lies in the cache folders."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isolator import names
from isolator.doctor.report import Report
from isolator.errors import UsageError
from isolator.monitor import discovery, enforcement, grants
from isolator.monitor.model import Cache, Container, PodView, Skip, State

_MOST = 16 << 20


def check(url: str) -> None:
    """Raises UsageError for what is no URL."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--monitor {url}: give a URL like http://127.0.0.1:{names.MONITOR_PORT}")


def ask(url: str, patience: float) -> dict[str, Any]:
    """The monitor's status document. Raises OSError or ValueError."""
    address = url.rstrip("/")
    address = address if address.endswith(names.STATUS_PATH) else address + names.STATUS_PATH
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=patience) as answer:
        found = json.loads(answer.read(_MOST))
    if not isinstance(found, dict) or found.get("schema") != 1:
        raise ValueError("its answer is no status document of schema 1")
    return found


def judge(report: Report, url: str, expected: bool, patience: float) -> Mapping[str, Any] | None:
    """Judges the node by its monitor's answer; None without one. `expected`: it must be there."""
    try:
        found = ask(url, patience)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        if expected:
            report.check("monitor")
            report.find("monitor_down", url, str(why))
        else:
            report.skip("monitor", f"{url}: {why} (its pod has an address of its own: --monitor URL)")
        return None
    report.check("monitor")
    node = _map(found, "node")
    if node.get("nvml_up") is False:
        report.find("nvml_down", url, "NVML does not answer it")
    _sources(report, url, node)
    for tenant in found.get("tenants") or ():
        if isinstance(tenant, dict):
            _tenant(report, tenant)
    report.check("tenants")
    return node


def _sources(report: Report, url: str, node: Mapping[str, Any]) -> None:
    if node.get("pod_watch_up") is False:
        report.find(
            "monitor_down", url, "the API server does not answer it: the tenants' names are not known"
        )
    elif node.get("named") is False:
        report.find("monitor_down", url, "it cannot scan the cache folders, or knows no pods")
    for why, number in _map(node, "skipped").items():
        if why in _UNREADABLE and isinstance(number, int) and number > 0:
            seen = f"{number} files or folders: {why}"
            report.find("cache_unreadable", names.CONTAINERS_DIRECTORY, seen, file=names.CONTAINERS_DIRECTORY)


def _map(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name)
    return value if isinstance(value, dict) else {}


_UNREADABLE = frozenset(Skip) - {
    *(Skip.NO_POD, Skip.NOT_RUNNING, Skip.NO_FILE, Skip.EMPTY, Skip.UNFINISHED, Skip.EXTRA_FILE),
    *(Skip.CHANGING, Skip.UUID),
}


def _tenant(report: Report, tenant: Mapping[str, Any]) -> None:
    parts = [tenant.get("namespace"), tenant.get("pod") or tenant.get("uid"), tenant.get("container")]
    subject, flags = "/".join(str(part) for part in parts if part), _map(tenant, "flags")
    _verdict(report, subject, str(tenant.get("state")), str(tenant.get("reason") or ""), flags)


def _verdict(report: Report, subject: str, state: str, reason: str, flags: Mapping[str, Any]) -> None:
    if state == State.UNCAPPED or flags.get("bypass"):
        report.find("tenant_uncapped", subject, reason or "a process uses the GPU past the library")
    if state in (State.REFUSED, State.UNREADABLE):
        report.find("tenant_wrong", subject, f"{state}: {reason}")
    for name, seen in (
        ("mismatch", "its limit is above what KAI grants"),
        ("tampered", "somebody wrote into its cache file; the limit holds"),
    ):
        if flags.get(name):
            report.find("tenant_wrong", subject, seen)


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
    _verdict(report, subject, found.state, found.reason, {"tampered": found.tampered})


def label(report: Report, node: str, text: str | None) -> None:
    """Judges the node's memory label; `text` None: it has none."""
    report.check("memory label")
    if text is None or text == "":
        report.find("label_missing", node, f"no {names.NODE_LABEL_GPU_MEMORY}", node=node)
    elif grants.card_mib(text) is None:
        report.find("label_bytes", node, f"it says {text!r}, which is no number", node=node)
    elif grants.in_bytes(text):
        report.find("label_bytes", node, f"it says {text}: bytes, and MiB are meant", node=node)
