"""Runs the monitor: settings, threads, HTTP; ends at once on SIGTERM."""

from __future__ import annotations

import gc
import logging
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Final

from prometheus_client import CollectorRegistry

from isolator import __version__, kube, logs, serving
from isolator.address import listen
from isolator.monitor import settings
from isolator.monitor.app import create_app
from isolator.monitor.background import Background
from isolator.monitor.collector import MonitorCollector
from isolator.monitor.events import Reporter
from isolator.monitor.nvml import Nvml
from isolator.monitor.podwatch import PodWatch
from isolator.monitor.settings import Settings
from isolator.monitor.snapshot import Composer
from isolator.settings import warn

log = logging.getLogger(__name__)

_GRACE_S: Final = 2
_YOUNG: Final = 20_000
"""New objects between two collections; Python's own 700 means dozens of them in a scrape."""
_NVML_MIN_S: Final = 5.0
"""NVML is asked no more often than this: on an idle node each question wakes the driver."""


class Connection(serving.Connection):
    """A few scrapers and the kubelet; each place may hold an answer of several hundred KiB."""

    most = 64


def _say(given: Settings, port: int) -> None:
    on = {"legacy metrics": given.legacy_metrics, "host PIDs": given.host_pid, "events": given.events}
    log.info(
        "monitor %s of node %s: listen=%s (port %d) mount=%s update=%gs resync=%gs schedulers=%s; %s",
        __version__,
        given.node_name,
        given.listen,
        port,
        given.mount,
        given.update_interval,
        given.resync_interval,
        ",".join(given.schedulers) or "any",
        ", ".join(f"{name} {'on' if value else 'off'}" for name, value in on.items()),
    )


def _serve(listener: socket.socket, collector: MonitorCollector) -> int:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    app = create_app(registry, collector.scan)
    config = serving.config(app, Connection, timeout_graceful_shutdown=_GRACE_S)
    serving.Server(config).run(sockets=[listener])
    return 0


def _calm_collector() -> None:
    """A scrape makes some ten thousand short-lived objects: what start-up made is left out."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)


def _end(number: int, frame: FrameType | None) -> None:
    """uvicorn raises the signal again when it has ended; the exit status of a wanted end is 0."""
    raise SystemExit(0)


def run() -> int:
    """Serves until SIGTERM or SIGINT; exit status.

    Raises UsageError for settings that cannot be used, a port that is taken among them, UnavailableError
    without a Kubernetes API.
    """
    given = settings.load()
    logs.setup(given.log_level, given.log_json)
    warn(Settings)
    api = kube.Api()
    watch = PodWatch(api, given.node_name, given.mount, given.resync_interval)
    nvml = Nvml(max(_NVML_MIN_S, given.update_interval))
    composer = Composer(
        given.node_name, Path(given.mount), watch, nvml, given.schedulers, host_pid=given.host_pid
    )
    reporter = Reporter(api, given.node_name) if given.events else None
    background = Background(composer.snapshot, watch, reporter)
    collector = MonitorCollector(composer.snapshot, given.update_interval, given.legacy_metrics)
    listener = listen(given.listen, f"{settings.PREFIX}LISTEN")
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    _say(given, listener.getsockname()[1])
    workers = (watch, nvml, background)
    try:
        for worker in workers:
            worker.start()
        _calm_collector()
        return _serve(listener, collector)
    finally:
        listener.close()
        for worker in workers:
            worker.stop()
