"""Curves of the two DaemonSets: the monitor by containers, devices and scrapers; the installer by caches."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import child
import libsync
import monitor

from bench.scaling.curves import Curve, at

CONTAINERS = (1, 10, 30, 110, 300, 1000)
DEVICES = (1, 2, 4, 8)
CACHES = (1, 10, 30, 110, 300, 1000)
PASS_S = 30
"""The chart's interval between two passes of the installer."""


def _scrapes(running: monitor.Monitor, rounds: int) -> dict[str, float]:
    pid, walls = running.process.pid, []
    text = running.scrape()
    spent = child.processor(pid)
    for _ in range(rounds):
        began = time.perf_counter()
        text = running.scrape()
        walls.append((time.perf_counter() - began) * 1e3)
    cost = (child.processor(pid) - spent) / rounds * 1e3
    return {
        "processor_ms": cost,
        "wall_p50__ms": at(walls, 0.5),
        "wall_p99__ms": at(walls, 0.99),
        "series": sum(1 for line in text.splitlines() if not line.startswith(b"#")),
        "answer__KiB": len(text) / 1024,
        "resident_at_most__MiB": child.mib(pid, "VmHWM"),
    }


def by_containers(rounds: int, sizes: tuple[int, ...] = CONTAINERS) -> Curve:
    """A scrape, each a new scan, by containers of one device."""
    curve = Curve("monitor, containers", "a scrape over HTTP, each a new scan", "containers", "processor ms")
    for containers in sizes:
        with monitor.running(containers, 1) as running:
            curve.add(containers=containers, **_scrapes(running, rounds))
    return curve


def by_devices(rounds: int, containers: int = 110, devices: tuple[int, ...] = DEVICES) -> Curve:
    """The same by devices of each container."""
    curve = Curve("monitor, devices", f"the same, {containers} containers", "devices", "processor ms")
    for number in devices:
        with monitor.running(containers, number) as running:
            curve.add(devices=number, **_scrapes(running, rounds))
    return curve


def memory(scrapes: int, containers: int = 110, devices: int = 1) -> Curve:
    """Resident memory along many scrapes, each a new scan."""
    curve = Curve("monitor, memory", f"{containers} x {devices}", "scrapes", "resident MiB")
    with monitor.running(containers, devices) as running:
        done = 0
        for part in (0.02, 0.1, 0.25, 0.5, 0.75, 1.0):
            while done < scrapes * part:
                running.scrape()
                done += 1
            curve.add(scrapes=done, resident_MiB=child.mib(running.process.pid, "VmRSS"))
    return curve


def _unread(url: str, stop: threading.Event) -> None:
    """Asks, and reads nothing of the answer."""
    place = urlsplit(url)
    while not stop.is_set():
        with socket.create_connection((place.hostname, place.port), 10) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            stop.wait(25)


def crowd(waves: int, scrapers: int = 20, containers: int = 110, devices: int = 8) -> Curve:
    """A scrape while nobody else asks, while twenty ask at once, and beside twenty that do not read."""
    curve = Curve("monitor, crowd", f"{containers} x {devices}", "scrapers", "processor ms a wave")
    with monitor.running(containers, devices) as running, ThreadPoolExecutor(scrapers) as pool:
        pid, stop = running.process.pid, threading.Event()

        def once(_: int) -> float:
            began = time.perf_counter()
            assert running.scrape().endswith(b"# EOF\n")
            return (time.perf_counter() - began) * 1e3

        def wave(number: int, readers: int) -> None:
            spent, walls = child.processor(pid), []
            for _ in range(waves):
                walls += pool.map(once, range(number))
            curve.add(
                scrapers=number,
                of_them_not_reading=readers,
                processor_ms_a_wave=(child.processor(pid) - spent) / waves * 1e3,
                wall_p50__ms=at(walls, 0.5),
                wall_p99__ms=at(walls, 0.99),
                resident_at_most__MiB=child.mib(pid, "VmHWM"),
            )

        wave(1, 0)
        wave(scrapers, 0)
        idle = [threading.Thread(target=_unread, args=(running.url, stop)) for _ in range(scrapers)]
        try:
            for thread in idle:
                thread.start()
            time.sleep(2)
            wave(1, scrapers)
        finally:
            stop.set()
            for thread in idle:
                thread.join()
    return curve


def installer(passes: int, sizes: tuple[int, ...] = CACHES) -> Curve:
    """A pass of the installer by caches of live pods, and what that makes at one in 30 s."""
    curve = Curve("libsync, caches", "a pass of the installer", "caches", "processor ms a pass")
    every = 0.2
    for caches in sizes:
        with TemporaryDirectory(prefix="isolator-bench-") as place:
            node = libsync.Node(Path(place), caches)
            installer = node.start("--interval", str(every))
            try:
                time.sleep(1.5)
                spent, began = child.processor(installer.pid), time.monotonic()
                time.sleep(passes * every)
                spent, took = child.processor(installer.pid) - spent, time.monotonic() - began
                cost = spent / (took / every) * 1e3
                curve.add(
                    caches=caches,
                    processor_ms_a_pass=cost,
                    thousandths_at_30_s=cost / PASS_S,
                    resident_at_most__MiB=child.mib(installer.pid, "VmHWM"),
                )
            finally:
                installer.kill()
                installer.wait()
    return curve
