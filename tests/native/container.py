"""A container as the webhook makes one: mount and PID namespaces, the library beside its limit and its cache.

    box = Container(tmp_path, libvgpu, limit="4g\\n")
    done = box.run(["python3", "-c", code], env)

Needs root (or user namespaces that may mount); `why_not()` says what is missing.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

LIMIT_NAME = "CUDA_DEVICE_MEMORY_LIMIT"
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


@cache
def why_not() -> str:
    """Empty where containers can be made, else the reason for a skip."""
    if not shutil.which("unshare"):
        return "needs unshare"
    done = subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    return done.stderr.strip().replace("\n", " ") or "needs mounts" if done.returncode else ""


class Container:
    """The files and mounts of one container; each run is a PID namespace of its own."""

    def __init__(
        self,
        folder: Path,
        library: Path,
        *,
        limit: str | None = None,
        limit_mount: str = "ro",
        containers: bool = True,
        cache_mount: str = "rw",
    ) -> None:
        self.mount = folder / "vgpu"
        self.cache = folder / "cache"
        self.library = self.mount / "libvgpu.so"
        (self.mount / "limit").mkdir(parents=True)
        (self.mount / "containers").mkdir()
        self.cache.mkdir()
        self.cache.chmod(0o1777)
        shutil.copy(library, self.library)
        steps = []
        if limit is not None:
            self.limit_source = folder / "limit"
            self.limit_source.write_text(limit)
            steps += self._limit(self.mount / "limit" / LIMIT_NAME, limit_mount)
        if containers:
            steps += self._bind(self.cache, self.mount / "containers", cache_mount)
        self.setup = "; ".join(["set -e", "mount --make-rprivate /", *steps])

    def _limit(self, target: Path, how: str) -> list[str]:
        if not how:
            shutil.copy(self.limit_source, target)
            return []
        target.touch()
        return self._bind(self.limit_source, target, how)

    @staticmethod
    def _bind(source: Path, target: Path, how: str) -> list[str]:
        steps = [shlex.join(["mount", "--bind", str(source), str(target)])]
        if how == "ro":
            steps.append(shlex.join(["mount", "-o", "remount,bind,ro", str(target)]))
        return steps

    @property
    def region(self) -> Path:
        """The region file of a container with a cache mount, seen from outside."""
        return self.cache / "usage.cache"

    def run(
        self, command: Sequence[str], env: Mapping[str, str], *, first: str = 'exec "$@"', timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs `command` as PID 1; `first` is the shell text that PID 1 runs with it as "$@"."""
        words, kept = self._words(command, env, first)
        return subprocess.run(words, env=kept, capture_output=True, text=True, timeout=timeout)

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """The same, while it runs: to talk to by pipes."""
        words, kept = self._words(command, env, 'exec "$@"')
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=kept, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def _words(
        self, command: Sequence[str], env: Mapping[str, str], first: str
    ) -> tuple[list[str], dict[str, str]]:
        kept = {name: value for name, value in env.items() if name != "LD_PRELOAD"}
        text = f"{self.setup}; export LD_PRELOAD={shlex.quote(str(self.library))}; {first}"
        return [*UNSHARE, "sh", "-c", text, "sh", *command], kept
