"""Containers as the webhook makes them, with one thing broken, for `isolator doctor`.

A room is a mount and PID namespace: an /etc with the preload file, a /dev with device files, the library, the
limit and the cache folder as mounts of their own. Its PID 1 is a shell that starts a program, breaks what is
to be broken late, and lets the doctor look from where the scene says.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from container import LIMIT_NAME, UNSHARE

# Other tests may keep this machine busy: what is asserted is processor time.
DOCTOR = [sys.executable, "-m", "isolator.cli", "doctor", "--patience", "20"]
RO = "mount -o remount,bind,ro"

# $W: folder of the room; $M: <mount>; $C: the cache folder behind <mount>/containers.
PARTS: dict[str, str] = {
    "etc": "mkdir $W/etc; mount --bind /etc $W/etc; mount -t tmpfs none /etc; ln -s $W/etc/* /etc/",
    "dev": "mkdir $W/dev; mount -t tmpfs none $W/dev; mkdir $W/dev/shm;"
    " for n in null zero urandom; do touch $W/dev/$n; mount --bind /dev/$n $W/dev/$n; done;"
    " ln -s /proc/self/fd $W/dev/fd",
    "cards": "mknod $W/dev/nvidia0 c 195 0; mknod $W/dev/nvidiactl c 195 255",
    "show": "mount --bind $W/dev /dev",
    "library": f"touch $M/libvgpu.so; mount --bind $W/libvgpu.so $M/libvgpu.so; {RO} $M/libvgpu.so",
    "limit": f"touch $M/limit/{LIMIT_NAME}; mount --bind $W/limit $M/limit/{LIMIT_NAME};"
    f" {RO} $M/limit/{LIMIT_NAME}",
    "containers": "mount --bind $C $M/containers",
    "preload": "printf '%s\\n' $M/libvgpu.so >/etc/ld.so.preload",
}
BARE = {"library": "", "limit": "", "containers": "", "preload": ""}

HOLD = """
from simclient import *
import os, sys, time
init(0)
held = [ok(alloc({size}))]
{more}
open(os.environ["READY"], "w").close()
time.sleep(60)
"""


def hold(mib: int, more: str = "") -> list[str]:
    """A program that holds so many MiB, does `more`, and waits."""
    return [sys.executable, "-c", HOLD.format(size=f"{mib} << 20", more=more)]


WAIT = ["sleep", "60"]


@dataclass(frozen=True)
class Scene:
    """One set-up. `fault` is what was broken, `expect` the id of the cause, empty where it is healthy.

    `parts` replaces PARTS, `before` are steps on the files before any mount, `late` after the program has
    started; `rights` is a command that takes some of the doctor's. `where`: inside (a process of the
    container), program (the same, with --pid), outside (of the namespaces, with --pid), debug (another
    container in its PID namespace). `also` are ids that follow, `notice` says that the status stays 0.
    """

    fault: str
    expect: str = ""
    limit: str = "4g\n"
    parts: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    late: str = ""
    program: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    where: str = "inside"
    user: int = 0
    rights: str = ""
    arguments: tuple[str, ...] = ()
    also: frozenset[str] = frozenset()
    notice: bool = False


@dataclass(frozen=True)
class Seen:
    """What the doctor said: its status, its document, its wall time and the text of an error."""

    status: int
    document: dict[str, Any]
    wall: float
    error: str

    @property
    def ids(self) -> list[str]:
        """The causes, faults and notices, in their order."""
        return [finding["id"] for finding in self.document.get("findings", [])]


class Room:
    """One scene in `folder`; `env` is the container's environment."""

    def __init__(self, folder: Path, library: Path, env: Mapping[str, str], scene: Scene) -> None:
        self.folder, self.scene = folder, scene
        for name in ("vgpu/limit", "vgpu/containers", "cache"):
            (folder / name).mkdir(parents=True)
        (folder / "cache").chmod(0o1777)
        folder.chmod(0o755)
        (folder / "libvgpu.so").write_bytes(library.read_bytes())
        (folder / "libvgpu.so").chmod(0o755)
        (folder / "limit").write_text(scene.limit)
        places = {
            "W": folder,
            "M": folder / "vgpu",
            "SIM": Path(env["LD_LIBRARY_PATH"]),
            "C": folder / "cache",
            "READY": folder / "ready",
        }
        given = {name: value.replace("$W", str(folder)) for name, value in scene.env.items()}
        self.env = {**env, **{name: str(path) for name, path in places.items()}, **given}
        os.mkfifo(folder / "end")

    def script(self) -> str:
        """What PID 1 does."""
        scene = self.scene
        steps = ["set -e; mount --make-rprivate /", scene.before, *(PARTS | dict(scene.parts)).values()]
        if scene.program:
            who = f"setpriv --reuid={scene.user} --regid={scene.user} --clear-groups" if scene.user else ""
            steps += [
                f"{who} {shlex.join(scene.program)} >$W/out 2>&1 & pid=$!",
                self._started(),
                'echo "$pid" >$W/pid',
            ]
        steps += [scene.late]
        if scene.where == "outside":
            steps += ["echo >$W/there", "read -r line <$W/end"]
        else:
            steps += [f"exec sh -c {shlex.quote(self._ask())}"]  # anew, as a container's PID 1 starts
        return "\n".join(step for step in steps if step)

    def _started(self) -> str:
        """Waits for the program: for its word where it uses the GPU, else until it is itself."""
        if sys.executable in self.scene.program:
            return "while [ ! -e $READY ] && kill -0 $pid; do sleep 0.01; done"
        return 'while [ "$(readlink /proc/$pid/exe)" = "$(readlink /proc/$$/exe)" ]; do sleep 0.01; done'

    def _ask(self) -> str:
        scene = self.scene
        pid = ["--pid", "$(cat $W/pid)"] if scene.where == "program" else []
        words = " ".join([scene.rights, shlex.join(DOCTOR), "--json", *pid, *scene.arguments])
        if scene.where == "debug":
            hide = "umount -l $M/libvgpu.so $M/containers $M/limit/*; umount -l /etc"
            words = f"unshare -m sh -c {shlex.quote(f'{hide}; exec {words}')}"
        return f"{words} >$W/said 2>$W/error; echo $? >$W/status"

    def look(self) -> Seen:
        """Builds the room, lets the doctor look, and takes everything down."""
        command = [*UNSHARE, "sh", "-c", self.script()]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, env=self.env, **pipe) as room:  # type: ignore[call-overload]
            try:
                if self.scene.where == "outside":
                    return self._from_outside(room)
                began = time.monotonic()
                said, _ = room.communicate(timeout=60)
                wall = time.monotonic() - began
            finally:
                room.kill()
        status = self.folder / "status"
        assert status.exists(), said
        return self._seen(int(status.read_text()), (self.folder / "said").read_text(), wall)

    def _from_outside(self, room: subprocess.Popen[str]) -> Seen:
        until = time.monotonic() + 30
        while not (self.folder / "there").exists():
            assert room.poll() is None and time.monotonic() < until, room.stdout and room.stdout.read()
            time.sleep(0.01)
        inner = int((self.folder / "pid").read_text())
        command = [*DOCTOR, "--json", "--pid", str(host_pid(room.pid, inner)), *self.scene.arguments]
        began = time.monotonic()
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30)
        (self.folder / "error").write_text(done.stderr)
        return self._seen(done.returncode, done.stdout, time.monotonic() - began)

    def _seen(self, status: int, said: str, wall: float) -> Seen:
        error = (self.folder / "error").read_text()
        return Seen(status, json.loads(said) if said else {}, wall, error)


def host_pid(unshare: int, inner: int) -> int:
    """Our number of the process that is `inner` in the PID namespace below process `unshare`."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            status = (place / "status").read_text()
            parents = _parents(int(place.name))
        except (OSError, ValueError):
            continue
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
        if len(numbers) > 1 and int(numbers[-1]) == inner and unshare in parents:
            return int(place.name)
    raise AssertionError(f"no process {inner} below {unshare}")


def _parents(pid: int) -> set[int]:
    line: set[int] = set()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        line.add(pid)
    return line
