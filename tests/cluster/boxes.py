"""Namespaces that stand in for a machine, and the programs started in them.

A `Box` has its own mounts, processes, network, IPC and host name. Its first process holds all of it: when
that one is killed the kernel ends every process inside and drops every mount, whatever they were doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

T = TypeVar("T")

SPACES = "--mount --net --pid --ipc --uts --cgroup".split()
UNSHARE = ["unshare", *SPACES, *"--fork --kill-child --mount-proc --propagation private".split()]
# Joins the branches of the box: outside it they are its arguments, inside it they are mounted as the roots.
_JOIN = 'for each in $0; do echo 0 >"$each/cgroup.procs" || exit 1; done; exec "$@"'
# With SIGCHLD ignored the kernel reaps orphans (containerd's shims among them) by itself.
_INIT = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execvp("sleep", ["sleep", "infinity"])
"""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message says why."""


def sh(*command: str | Path, check: bool = True, input: str | None = None, timeout: float = 120) -> str:
    """Standard output of a finished command; a failing one raises with what it said."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, input=input, timeout=timeout
    )
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"{' '.join(str(word) for word in command[:6])}: {said[-2000:]}")
    return done.stdout


def wait_for(predicate: Callable[[], T], timeout: float, what: str, every: float = 0.1) -> T:
    """The first true answer of `predicate`; after `timeout` seconds an error that names `what`."""
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout:g} s for {what}")
        time.sleep(every)


def started(pid: int) -> str:
    """When the process was started, in clock ticks; empty where there is none. Tells a reused pid apart."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def child_of(pid: int) -> int:
    """The only child of a process that forks once, waited for briefly."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")

    def look() -> list[str]:
        try:
            return listed.read_text().split()
        except OSError as error:
            raise ClusterError(f"process {pid} ended at once") from error

    return int(wait_for(look, 10, f"the child of process {pid}", every=0.005)[0])


def end(pid: int, sign: int = signal.SIGKILL) -> None:
    """Sends a signal to one process; one that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def hierarchies() -> list[Path]:
    """The cgroup hierarchies where each controller has its own; none where all are in one."""
    return [path for path in sorted(Path("/sys/fs/cgroup").iterdir()) if path.is_mount()]


def branch(hierarchy: Path, name: str) -> Path:
    """A branch `a/b` of a hierarchy; a cpuset takes no process before it has values."""
    made = hierarchy
    for part in name.split("/"):
        parent, made = made, made / part
        made.mkdir(exist_ok=True)
        for key in ("cpuset.cpus", "cpuset.mems"):
            if (parent / key).exists() and (made / key).exists():
                (made / key).write_text((parent / key).read_text())
    return made


class Program:
    """A running program of a box, with its log file."""

    def __init__(self, parent: subprocess.Popen[bytes], name: str, log: Path) -> None:
        self.parent, self.name, self.log = parent, name, log
        self.pid = child_of(parent.pid)

    def running(self) -> bool:
        return self.parent.poll() is None

    def check(self) -> None:
        """Raises with the end of the log where the program has ended."""
        if not self.running():
            tail = self.log.read_text(errors="replace").splitlines()[-8:]
            raise ClusterError(f"{self.name} ended with {self.parent.returncode}:\n" + "\n".join(tail))

    def stop(self, sign: int = signal.SIGTERM, timeout: float = 20) -> None:
        """Ends the program; one that does not heed the signal is killed."""
        if self.running():
            end(self.pid, sign)
            try:
                self.parent.wait(timeout)
            except subprocess.TimeoutExpired:
                end(self.pid)
                self.parent.wait(10)


def _join(branches: str) -> list[str]:
    """The start of a command line that runs in these cgroups."""
    return ["sh", "-c", _JOIN, branches]


class Box:
    """One machine's namespaces. `on_start` is told the pid to kill, before anything else happens.

    Everything inside belongs to the cgroup `<cgroup>/<name>`, which looks like the root from there.
    """

    def __init__(self, name: str, cgroup: str, logs: Path, on_start: Callable[[int], None]) -> None:
        self.name, self.logs = name, logs
        self.programs: list[Program] = []
        branches = {path: branch(path, f"{cgroup}/{name}") for path in hierarchies()}
        self.joined = " ".join(str(path) for path in branches)
        self.holder = subprocess.Popen(
            [*_join(" ".join(map(str, branches.values()))), *UNSHARE, "python3", "-c", _INIT],
            stdin=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        on_start(self.holder.pid)
        self.pid = child_of(self.holder.pid)
        wait_for(self._ready, 10, f"the namespaces of {name}", every=0.005)
        binds = [f"mount --bind {made} {path}" for path, made in branches.items()]
        command = ["sh", "-ec", "\n".join([*binds, f"hostname {name}"])]
        sh("nsenter", "--target", str(self.pid), *SPACES, "--", *command)

    def _ready(self) -> bool:
        """The mounts are made before the first process becomes `sleep`."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(b"sleep")
        except OSError as error:
            raise ClusterError(f"{self.name}: no namespaces here (unshare ended)") from error

    def enter(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs `argv` inside."""
        inside = [*_join(self.joined), *(str(word) for word in argv)]
        return ["nsenter", "--target", str(self.pid), *SPACES, "--", *inside]

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = 60,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside and returns it finished, with its output as text."""
        done = subprocess.run(self.enter(argv), capture_output=True, text=True, stdin=stdin, timeout=timeout)
        if check and done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise ClusterError(f"{self.name}: {' '.join(map(str, argv))[:200]}: {said[-2000:]}")
        return done

    def start(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, name: str = ""
    ) -> Program:
        """Starts a program inside; its output goes to `<logs>/<box>-<name>.log`."""
        name = name or Path(argv[0]).name
        log = self.logs / f"{self.name}-{name}.log"
        with log.open("ab") as out:
            parent = subprocess.Popen(
                self.enter(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.programs.append(Program(parent, f"{self.name} {name}", log))
        return self.programs[-1]

    def path(self, inside: str | Path) -> Path:
        """Where a path of the box is found from outside, through its mounts; valid while the box is up."""
        return Path(f"/proc/{self.pid}/root/{str(inside).lstrip('/')}")

    def close(self) -> None:
        """Ends everything inside."""
        end(self.holder.pid)
        for parent in (self.holder, *(program.parent for program in self.programs)):
            parent.wait(20)
        wait_for(lambda: not started(self.pid), 20, f"the processes of {self.name} to end")
