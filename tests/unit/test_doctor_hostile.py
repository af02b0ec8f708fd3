"""The doctor in front of files and processes that somebody made to trip it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from libsync_node import Node

from isolator.doctor import node, pod
from isolator.doctor.report import Report

NAMES = ("libvgpu.so", "ld.so.preload", "libsync.json")
CAUSES = {"node_library_missing", "node_preload_wrong", "libsync_absent"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node that libsync has installed, without a monitor."""
    made = Node(tmp_path)
    made.agent().run_once()
    monkeypatch.setenv("ISOLATOR_MONITOR_LISTEN", "127.0.0.1:1")
    return made


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()


def _ids(report: Report) -> set[str]:
    return {finding.cause.id for finding in report.findings}


@pytest.mark.parametrize("make", [_fifo, _device, _loop, _folder])
def test_what_is_no_file_is_a_fault_and_blocks_nobody(place: Node, make: Callable[[Path], None]) -> None:
    """A FIFO, a device without end, a link to itself, a folder: each is named, the rest looked at."""
    for name in NAMES:
        (place.mount / name).unlink()
        make(place.mount / name)
    report = node.examine(place.mount, patience=20)
    assert _ids(report) >= CAUSES
    assert "folder of the caches" in report.checks and report.seconds < 10


@pytest.mark.parametrize("text", ["[" * 200_000, json.dumps({"schema": 1}) * 2, "\x1b[31m", "\0" * 100])
def test_a_report_that_nobody_can_read_is_no_health(place: Node, text: str) -> None:
    """Nesting without end among it: the library is judged all the same."""
    (place.mount / "libsync.json").write_text(text)
    report = node.examine(place.mount, patience=20)
    assert "libsync_absent" in _ids(report)
    assert "library" in report.checks and not any(what == "mount" for what, _ in report.unchecked)


HANGING = """
import os, sys, time
mount = sys.argv[1]
def hangs(real):
    def late(path, *words, **more):
        if mount in str(path):
            time.sleep(60)
        return real(path, *words, **more)
    return late
os.stat, os.lstat, os.open = map(hangs, (os.stat, os.lstat, os.open))
from isolator import names
names.DEFAULT_VGPU_MOUNT, names.PRELOAD_FILE = mount, mount + "/preload"
from isolator.cli import main
main(["doctor", *sys.argv[2:], "--patience", "0.5"])
"""


@pytest.mark.parametrize("words", [("auto",), ("pod",), ("node",), ("node", "--mount", "M")])
def test_a_file_system_that_hangs_is_said_in_time(words: tuple[str, ...], tmp_path: Path) -> None:
    """Already where it finds out what to look at; and nothing that was looked at is no health."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ISOLATOR_", "KUBE"))}
    asked = [str(tmp_path) if word == "M" else word for word in words]
    command = [sys.executable, "-c", HANGING, str(tmp_path), *asked]
    began = time.monotonic()
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=50)
    assert time.monotonic() - began < 15
    assert done.returncode == 1, done
    assert "no answer within 0.5 s: a file system or the driver hangs" in done.stdout


@pytest.fixture
def ended() -> Iterator[int]:
    """A process that has ended and that nobody has waited for yet."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


def test_a_process_that_has_ended_is_named(ended: int) -> None:
    """Not yet reaped, it still has a folder below /proc, and no root."""
    assert Path(f"/proc/{ended}").exists()
    report = pod.examine(ended)
    assert (_ids(report), report.exit_status, report.unchecked) == ({"no_such_process"}, 11, [])
