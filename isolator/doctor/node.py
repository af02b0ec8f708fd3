"""`isolator doctor node`: what libsync keeps and the monitor sees, on a node or in a pod of ours on it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from isolator import names
from isolator.doctor import NODE_VARIABLES, bounded, node_files, node_monitor
from isolator.doctor.report import Report
from isolator.monitor import client


def named() -> str:
    """The node's name, as our workloads are told."""
    return next((os.environ[name] for name in NODE_VARIABLES if os.environ.get(name)), os.uname().nodename)


def mount_of(given: Path | None) -> Path:
    """<mount>: as given, as the monitor is told, as the installer of this pod is told, else the default."""
    if given is not None:
        return given
    if os.environ.get(names.ENV_MONITOR_MOUNT):
        return Path(os.environ[names.ENV_MONITOR_MOUNT])
    default = Path(names.DEFAULT_VGPU_MOUNT)
    if not default.exists():
        try:
            words = Path("/proc/1/cmdline").read_bytes().split(b"\0")
        except OSError:
            words = []
        told = [os.fsdecode(word[8:]) for word in words if word.startswith(b"--mount=/")]
        if told:
            return Path(told[0])
    return default


def examine(
    mount: Path | None = None,
    monitor: str | None = None,
    label: str | None = None,
    patience: float = bounded.PATIENCE,
) -> Report:
    """Looks at this node for `patience` seconds. `monitor` is its URL, `label` the memory label's text.

    Raises UsageError for a URL that is none.
    """
    if monitor is not None:
        client.status_url(monitor, "--monitor")
    expected = bool(monitor or os.environ.get(names.ENV_MONITOR_LISTEN))
    url = monitor or client.monitor_url()
    report = Report("node", named())
    found = bounded.ask(report, "mount", lambda: mount_of(mount), patience)
    if not found:
        return report.done()
    path = found[0]
    probes = {
        "mount": partial(_files, path=path, patience=patience),
        "monitor": partial(_seen, path=path, patience=patience, url=url, expected=expected, text=label),
    }
    bounded.run(report, probes, patience)
    return report.done()


def _files(report: Report, path: Path, patience: float) -> None:
    in_pod = any(name in os.environ for name in NODE_VARIABLES)
    if not node_files.mount(report, path, in_pod):
        return
    told = node_files.installer(report, path)
    sound = node_files.library(report, path, told)
    if sound and not os.statvfs(path).f_flag & os.ST_NOEXEC:
        node_files.loads(report, path, bounded.PART * patience)
    node_files.preload(report, path)
    node_files.containers(report, path)


def _seen(report: Report, path: Path, patience: float, url: str, expected: bool, text: str | None) -> None:
    found = node_monitor.judge(report, url, expected, bounded.PART * patience)
    if text is not None:
        node_monitor.label(report, named(), text)
    elif found is None:
        report.skip("memory label", "no monitor tells it: --label TEXT")
    elif found.pod_watch_up:
        node_monitor.label(report, named(), found.memory_label.text)
    if found is None and path.is_dir():
        node_monitor.scan(report, path)
