"""Versions of the library beside each other: upgrades in seconds, and regions of another layout."""

from __future__ import annotations

import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import skewbuild
from conftest import ROOT, RunClient, SimEnv
from container import Container, why_not
from corelib import GIB, Core, check, ffi, lib

from isolator import names, region
from isolator.libpath import library
from isolator.libsync.agent import Agent, Options
from isolator.monitor import discovery
from isolator.monitor.model import Skip
from isolator.region import RegionError, Why

needs_mounts = pytest.mark.skipif(bool(why_not()), reason=why_not())
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the variant is built for x86_64")

pytestmark = pytest.mark.timeout(300)  # the variant is compiled once

UPGRADES = 100
SEED = 20260801
CARD = b"GPU-00000000-1111-2222-3333-444444444444"

# What holds 3 GiB and asks on and on; it ends with what went wrong when its input ends.
HOLDER = """
import os, select, sys
from simclient import *
def mapped():
    with open("/proc/self/maps") as lines:
        return sorted({line.split()[4] for line in lines if "libvgpu.so" in line})
init(0)
held, first, rounds, wrong = ok(alloc(3 << 30)), mapped(), 0, []
print("holds", *first, flush=True)
while not select.select([sys.stdin], [], [], 0.002)[0]:
    got = [alloc(128 * MIB), alloc(GIB)[0]]
    if got[0][0] or got[1] != OOM or mapped() != first:
        wrong.append([got, mapped()])
    else:
        ok(free(got[0][1]))
    rounds += 1
print(rounds, len(first), wrong)
"""

# A process that starts now: what fits beside the holder, what does not, and how many libraries it has.
NEWCOMER = """
from simclient import *
with open("/proc/self/maps") as lines:
    libraries = {line.split()[4] for line in lines if "libvgpu.so" in line}
init(0)
print(alloc(100 * MIB)[0], alloc(GIB)[0], len(libraries))
"""

# The installer, killed a moment after its start, or on a disk that takes no more than 64 KiB of a file.
TIGHT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
from isolator.libsync.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


class Node:
    """A node's folder, and builds of the library that differ in their last bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mount, self.pods = folder, folder / "vgpu", folder / "pods"
        (self.pods / "00000001-1111-4222-8333-444455556666").mkdir(parents=True)

    def build(self, number: int) -> Path:
        path = self.folder / f"build-{number % 4}.so"
        path.write_bytes(library().read_bytes() + b"%08d" % number)
        return path

    def install(self, number: int) -> bool:
        options = Options(self.mount, None, str(self.build(number)), self.pods, 30.0, "n1")
        return Agent(options).run_once()

    def child(self, number: int, *code: str) -> subprocess.Popen[bytes]:
        """The installer as a process of its own."""
        where = [f"--mount={self.mount}", f"--pods={self.pods}", f"--library={self.build(number)}", "--once"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *(code or ("-m", "isolator.libsync")), *where]
        return subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)


class Crowd:
    """Processes that start one after the other, two at a time, with the library as it is at that moment."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env, self.stopping = env, threading.Event()
        self.answers: list[str] = []
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]

    def _run(self) -> None:
        while not self.stopping.is_set():
            done = subprocess.run(
                [sys.executable, "-S", "-c", NEWCOMER], env=self.env, capture_output=True, text=True
            )
            self.answers.append(done.stdout.strip() or f"{done.returncode} {done.stderr[-300:]}")

    def __enter__(self) -> Crowd:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(30)


def test_hundred_upgrades_with_installers_killed_and_disks_full(tmp_path: Path, sim_env: SimEnv) -> None:
    """L1: under a holder and new processes all the time, some installers are killed and some find a full
    disk: the library's name always leads to a whole one, nobody crashes, and processes of a hundred versions
    that share one region are held to one limit."""
    node, chance = Node(tmp_path), random.Random(SEED)
    assert node.install(0)
    env = sim_env(preload=True, limit="4g", LD_PRELOAD=str(node.mount / names.LIBRARY_FILE))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin and holder.stdout and holder.stdout.readline().startswith("holds ")
    fates = {"installed": 0, "killed": 0, "full": 0}
    with Crowd(env) as crowd:
        for number in range(1, UPGRADES + 1):
            if number % 4 == 1:
                child = node.child(number)
                time.sleep(chance.uniform(0, 0.25))
                child.kill()
                fates["killed" if child.wait() == -signal.SIGKILL else "installed"] += 1
            elif number % 10 == 0:
                before = (node.mount / names.LIBRARY_FILE).read_bytes()
                assert node.child(number, "-c", TIGHT).wait() == 1
                assert (node.mount / names.LIBRARY_FILE).read_bytes() == before
                fates["full"] += 1
            else:
                assert node.install(number)
                fates["installed"] += 1
    told, _ = holder.communicate("\n", timeout=30)
    rounds, libraries, wrong = told.split(maxsplit=2)
    assert holder.returncode == 0 and (libraries, wrong.strip()) == ("1", "[]") and int(rounds) > UPGRADES
    assert crowd.answers and set(crowd.answers) == {"0 2 1"}, set(crowd.answers)
    assert min(fates.values()) > 0
    assert not list(node.mount.rglob(".libsync-*")) or node.install(UPGRADES + 1)
    assert len(list((node.mount / "versions").iterdir())) == 3


# ---- another layout ----------------------------------------------------------------------------------

ASK = "import sys; from simclient import *; r = cu_init(); print(r, 0 if r else init(0) and alloc(GIB)[0])"
PYTHON = [sys.executable, "-c", ASK]


@needs_mounts
@needs_x86
@pytest.mark.root
@pytest.mark.parametrize("later_first", [False, True])
def test_a_region_of_another_layout_is_never_misread(
    tmp_path: Path, libvgpu: Path, sim_env: SimEnv, later_first: bool
) -> None:
    """L4: a container that starts again with a library of another layout, newer or older, makes a region of
    its own. While a program of its last run lives CUDA is refused in one line, and the file is left alone."""
    builds = [libvgpu, skewbuild.library(lib.VGPU_EXT_VERSION + 1)]
    first, second = reversed(builds) if later_first else builds
    box = Container(tmp_path / "box", first, limit="4g")
    env = sim_env()
    with box.start([sys.executable, "-c", ASK + "; sys.stdout.flush(); input()"], env) as holder:
        assert holder.stdout and holder.stdout.readline().split() == ["0", "0"]
        left = box.region.read_bytes()
        box.library.unlink()
        box.library.write_bytes(second.read_bytes())
        done = box.run(PYTHON, env)
        assert done.stdout.split() == ["800", "0"]
        lines = done.stderr.splitlines()
        assert len(lines) == 1 and "another version and is in use" in lines[0], done.stderr
        assert box.region.read_bytes() == left
        holder.communicate("\n", timeout=30)
    for build in (second, first, second):
        box.library.unlink()
        box.library.write_bytes(build.read_bytes())
        done = box.run([sys.executable, "-c", ASK.replace("GIB", "5 * GIB")], env)
        assert (done.stdout.split(), done.stderr) == (["0", "2"], "")
        version = int.from_bytes(box.region.read_bytes()[lib.VGPU_EXT_OFFSET + 4 :][:4], "little")
        assert version == lib.VGPU_EXT_VERSION + (build is not libvgpu)


@needs_x86
def test_the_monitor_counts_a_layout_it_does_not_know(
    tmp_path: Path, sim_env: SimEnv, run_client: RunClient
) -> None:
    """L4: beside a container of a later layout, which is counted by reason and never misread, that of this
    one is read as ever."""
    found = {}
    for number, build in enumerate([library(), skewbuild.library(lib.VGPU_EXT_VERSION + 1)]):
        folder = tmp_path / names.CONTAINERS_DIRECTORY / f"{number:08x}-1111-4222-8333-444455556666_main"
        folder.mkdir(parents=True)
        cache = str(folder / names.CACHE_FILE)
        more = {"LD_PRELOAD": str(build), "CUDA_DEVICE_MEMORY_SHARED_CACHE": cache}
        assert run_client(ASK, sim_env(preload=True, limit="4g", **more)).stdout.split() == ["0", "0"]
        found[folder.name.partition("_")[0]] = folder
    known, later = found
    caches = {each.pod_uid: each for each in discovery.scan(tmp_path).caches}
    read = caches[known].region
    assert read is not None and read.extended and read.devices[0].limit == 4 * GIB
    assert (caches[later].region, caches[later].skipped) == (None, Skip.VERSION)
    with pytest.raises(RegionError, match="an extension of version 2, which is not known here") as told:
        region.read(found[later] / names.CACHE_FILE)
    assert told.value.why is Why.VERSION


def test_words_that_a_later_release_adds_change_nothing_here(tmp_path: Path) -> None:
    """L4: what is only added lies in spare words, under the same version: library and monitor of this release
    go on with such a region as with their own."""
    path = tmp_path / "usage.cache"
    with Core(path, claim=True) as core:
        assert check(lib.vgpu_core_device(core.handle, CARD, 1)) == 0
        core.limit(4 * GIB)
        assert core.charge(GIB)
    plain = region.read(path)
    with path.open("r+b") as file:
        for name in ("spare0", "spare2", "spare3", "spare4"):
            file.seek(lib.VGPU_EXT_OFFSET + ffi.offsetof("struct vgpu_ext", name))
            file.write(b"\xff" * ffi.sizeof(dict(ffi.typeof("struct vgpu_ext").fields)[name].type))
    assert region.read(path) == plain
    with Core(path, claim=True) as core:
        assert not core.creator and core.ext.instance == 1
        assert lib.vgpu_core_limit(core.handle, 0) == 4 * GIB
        assert core.charge(3 * GIB) and not core.charge(2 * GIB)
        (seen,) = region.read(path).devices
        assert (seen.used, seen.limit) == (3 * GIB, 4 * GIB)
