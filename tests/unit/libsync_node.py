"""A node for the installer's tests: its folder, the kubelet's folder of pods, several libraries."""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from isolator.libpath import architecture, library
from isolator.libsync import files, install
from isolator.libsync.agent import Agent, Options

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINE = architecture(platform.machine())
UIDS = [f"{number:08x}-1111-4222-8333-444455556666" for number in range(1, 9)]


class Node:
    """`mount` is <mount>; `pods` holds one live pod (UIDS[0]) of somebody else. With `used`, the folder of
    caches is there."""

    def __init__(self, folder: Path, used: bool = False) -> None:
        self.folder = folder
        self.mount = folder / "vgpu"
        self.pods = folder / "pods"
        (self.pods / UIDS[0]).mkdir(parents=True)
        self.library = self.mount / "libvgpu.so"
        self.preload = self.mount / "ld.so.preload"
        self.containers = self.mount / "containers"
        if used:
            self.containers.mkdir(parents=True)

    def build(self, number: int = 0) -> Path:
        """A library that differs from other numbers' in its bytes and works like each of them."""
        path = self.folder / f"build-{number}.so"
        path.write_bytes(library().read_bytes() + b"\0" * number)
        return path

    def agent(self, build: Path | None = None, **more: object) -> Agent:
        """An installer of this node that has not run yet."""
        options = {
            "mount": self.mount,
            "preload": None,
            "library": str(build) if build else "auto",
            "pods": self.pods,
            "interval": 30.0,
            "node": "n1",
        }
        return Agent(Options(**{**options, **more}))  # type: ignore[arg-type]

    def install(self, build: Path | None = None) -> install.Outcome:
        """One run of the steps, without the agent around them."""
        source = install.load(build or library(), MACHINE, "1.2.0")
        self.mount.mkdir(exist_ok=True)
        with files.folder(self.mount) as fd:
            return install.run(install.Site(self.mount, fd, source))

    def command(self, *arguments: str) -> list[str]:
        """The installer's command line for this node."""
        where = ["--mount", str(self.mount), "--pods", str(self.pods)]
        return [sys.executable, "-m", "isolator.libsync", *where, *arguments]

    def temporaries(self) -> list[str]:
        """Files that a killed run left."""
        return [str(path) for path in self.mount.rglob(".libsync-*")]

    def modes(self) -> dict[str, str]:
        """Mode of everything below the mount, by relative path."""
        found = {}
        for path in sorted(self.mount.rglob("*")):
            found[str(path.relative_to(self.mount))] = f"{stat.S_IMODE(path.lstat().st_mode):o}"
        return found


@contextlib.contextmanager
def running(command: list[str], **more: object) -> Iterator[subprocess.Popen[str]]:
    """A child that is killed at the end, whatever happens."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    with subprocess.Popen(command, env=env, text=True, **pipes) as child:  # type: ignore[call-overload]
        try:
            yield child
        finally:
            child.kill()
