"""Upgrades under readers, beside another installer, and cut off at each of their steps."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from libsync_node import ROOT, Node, running

from isolator.libpath import library
from isolator.libsync import files

# Loads the library through its installed name, then calls into it and reads all of it until told to stop.
TENANT = """
import ctypes, hashlib, mmap, os, sys
path = sys.argv[1]
shim = ctypes.CDLL(path)
with open(path, "rb") as file:
    whole = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
first, inode = hashlib.sha256(whole).hexdigest(), os.stat(path).st_ino
print("mapped", flush=True)
for line in sys.stdin:
    shim.cuInit(0)
    assert first == hashlib.sha256(whole).hexdigest()
    print("same" if inode != os.stat(path).st_ino else "kept", flush=True)
"""

# Ends itself as kill -9 does at the N-th system call that changes a file; the write before is half done.
KILLED = """
import os, signal, sys
from pathlib import Path
left = int(sys.argv.pop(1))
def cut(name):
    real = getattr(os, name)
    def call(*arguments, **named):
        global left
        left -= 1
        if left == 0:
            if name == "write":
                real(arguments[0], bytes(arguments[1])[:1000])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    setattr(os, name, call)
for name in ("write", "fsync", "rename", "link", "unlink", "mkdir", "fchmod", "utime"):
    cut(name)
from isolator.libsync.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_running_process_keeps_its_library_through_upgrades(node: Node) -> None:
    """B107: what is mapped keeps its bytes and its inode; the name leads to the new file."""
    node.install(node.build(0))
    with running([sys.executable, "-c", TENANT, str(node.library)], stdin=subprocess.PIPE) as tenant:
        assert tenant.stdin and tenant.stdout
        assert tenant.stdout.readline() == "mapped\n"
        for number in range(1, 11):
            assert node.install(node.build(number)).verified
            tenant.stdin.write("again\n")
            tenant.stdin.flush()
            assert tenant.stdout.readline() == "same\n"
        tenant.stdin.close()
        assert tenant.wait(10) == 0


def test_a_hundred_upgrades_by_two_installers_never_show_half_a_library(node: Node) -> None:
    """Two installers of two versions at once, as in a rolling update, under a reader that hashes."""
    builds = [node.build(number) for number in range(4)]
    good = {_digest(build) for build in builds}
    node.install(builds[0])
    seen: set[str] = set()
    faults: list[str] = []
    done: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                found = _digest(node.library)
                preload = node.preload.read_text()
            except OSError as error:
                faults.append(str(error))
                continue
            seen.add(found)
            if found not in good or preload != f"{node.mount}/libvgpu.so\n":
                faults.append(found)

    def upgrade(mine: list[Path]) -> None:
        for number in range(50):
            agent = node.agent(mine[number % 2])
            agent.run_once()
            done.append(agent.ready()[1])

    workers = [threading.Thread(target=upgrade, args=(builds[:2],))]
    workers += [threading.Thread(target=upgrade, args=(builds[2:],))]
    reader = threading.Thread(target=read)
    for thread in (reader, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    reader.join()
    assert faults == []
    assert [line for line in done if "in place" not in line and "standing by" not in line] == []
    assert sum("in place" in line for line in done) > 50
    assert len(seen) > 1, "the reader saw no change: the test shows nothing"
    assert node.temporaries() == []


def test_the_older_of_two_installers_stands_by(node: Node) -> None:
    """An old pod that has not ended yet does not put the old version back."""
    old, new = node.agent(node.build(0)), node.agent(node.build(1))
    assert old.run_once() and new.run_once() and old.run_once()
    assert "standing by" in old.ready()[1]
    assert _digest(node.library) == _digest(node.build(1))
    node.library.unlink()
    assert old.run_once() and not node.library.exists(), "the newer one repairs, not both"
    assert new.run_once() and node.library.exists()


def test_an_installer_takes_over_from_one_that_is_gone(node: Node) -> None:
    """Standing by ends when the newer one has not looked for three intervals."""
    old = node.agent(node.build(0), interval=0.1)
    new = node.agent(node.build(1), interval=0.1)
    assert new.run_once()
    threading.Event().wait(0.5)
    assert old.run_once() and _digest(node.library) == _digest(node.build(0))


def test_killed_at_any_step_the_library_is_whole_and_the_next_run_mends(node: Node) -> None:
    """The old or the new file, never half of one; leftovers go at the next run."""
    old, new = node.build(0), node.build(1)
    whole = {_digest(old), _digest(new)}
    for step in range(1, 60):
        node.install(old)
        for version in (node.mount / "versions").iterdir():
            if (version / "libvgpu.so").stat().st_size != old.stat().st_size:
                (version / "libvgpu.so").unlink()
                version.rmdir()
        command = node.command("--library", str(new), "--once")
        child = [sys.executable, "-c", KILLED, str(step), *command[3:]]
        done = subprocess.run(child, cwd=ROOT, capture_output=True, text=True)
        assert _digest(node.library) in whole
        assert node.preload.read_text() == f"{node.mount}/libvgpu.so\n"
        assert node.install(new).verified and _digest(node.library) == _digest(new)
        assert node.temporaries() == []
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
    assert 10 < step < 59, f"{step} steps were cut: the list of calls misses something"


def test_a_stopped_installer_that_holds_the_lock_does_not_stop_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is whole without the lock; leftovers are left to whoever holds it."""
    node.install()
    (node.mount / ".libsync-9-half").write_text("theirs")
    node.library.unlink()
    monkeypatch.setattr(files, "locked", functools.partial(files.locked, patience=0.1))
    held = os.open(node.mount, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert node.agent().run_once()
    finally:
        os.close(held)
    assert _digest(node.library) == _digest(library())
    assert len(node.temporaries()) == 1
