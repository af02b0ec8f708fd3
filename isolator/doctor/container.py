"""What of ours a container carries: found once, judged by the pod's probes."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from isolator import names
from isolator.doctor.inside import PROC, Inside, environment_of

_HOST_PIDS = 0xEFFFFFFC
"""Inode of the kernel's first PID namespace."""
_NO = ("", "0", "no", "false", "off", "none")
"""Words with which ISOLATOR_ENFORCE enforces nothing; the library's own list."""


def listed(text: str) -> list[str]:
    """The libraries of a preload file, as the loader splits it."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [word for line in lines for word in re.split(r"[\s:]+", line) if word]


def ours(paths: list[str]) -> str | None:
    """The one of these that is our library by name."""
    return next((path for path in paths if PurePosixPath(path).name == names.LIBRARY_FILE), None)


@dataclass(frozen=True)
class Carried:
    """`mount` is the folder of the library; `preload` None: no such file; `environment` None: not readable.

    `limit_mount`: a limit file on a read-only mount of its own; `limit_there`: such a file, however mounted;
    `containers_mount`: the cache folder is a mount of its own.
    """

    inside: Inside
    mount: str
    preload: str | None
    environment: dict[str, str] | None
    first: dict[str, str] | None
    limit_mount: bool
    limit_there: bool
    containers_mount: bool
    library_mount: bool

    def value(self, name: str) -> str | None:
        """A variable of the container, that of PID 1 where the process has none."""
        for variables in (self.environment, self.first):
            if variables and variables.get(name):
                return variables[name]
        return None

    @property
    def shares(self) -> bool:
        """Whether KAI gave the container a share, injected or not."""
        return any(self.value(name) is not None for name in (names.ENV_MEMORY_LIMIT, names.ENV_GPU_PORTION))

    @property
    def library(self) -> str:
        """Where the library should be."""
        return f"{self.mount}/{names.LIBRARY_FILE}"

    @property
    def by_environment(self) -> str | None:
        """Our library, where LD_PRELOAD names it."""
        return ours(re.split(r"[\s:]+", (self.environment or {}).get("LD_PRELOAD", "")))

    @property
    def mounted(self) -> bool:
        """Whether the webhook's mounts are here."""
        return self.limit_mount or self.containers_mount or self.library_mount

    @property
    def injected(self) -> bool:
        """Whether the webhook was here: its mounts, or its variable."""
        return self.mounted or names.ENV_ISOLATOR_POD_UID in (self.environment or {})

    @property
    def required(self) -> bool:
        """Whether a missing limit refuses CUDA."""
        enforce = (self.environment or {}).get(names.ENV_ENFORCE, "")
        return self.limit_mount or self.containers_mount or enforce.lower() not in _NO

    @property
    def carries(self) -> bool:
        """Whether anything of ours is meant to act in here."""
        preloaded = ours(listed(self.preload or "")) or self.by_environment
        return bool(self.injected or preloaded or self.inside.stat(self.library))


def _mount(inside: Inside, preload: str | None, given: str | None) -> str:
    """<mount>, by the mounts that the webhook makes, else by what is preloaded."""
    if given is not None:
        return given
    points = [mount.point for mount in inside.mounts]
    for ending in (f"/{names.LIMIT_FILE}", f"/{names.LIBRARY_FILE}"):
        for point in points:
            if point.endswith(ending):
                return point.removesuffix(ending) or "/"
    preloaded = ours(listed(preload or ""))
    if preloaded is None:
        with contextlib.suppress(OSError):
            preloaded = ours(re.split(r"[\s:]+", inside.environment.get("LD_PRELOAD", "")))
    return str(PurePosixPath(preloaded).parent) if preloaded else names.DEFAULT_VGPU_MOUNT


def look(inside: Inside, given: str | None = None) -> Carried:
    """Raises OSError where the container's root or mounts may not be looked at."""
    os.stat(inside.root)
    try:
        preload = inside.read(names.PRELOAD_FILE).decode("utf-8", "replace")
    except PermissionError:
        raise
    except OSError:  # none, or no file: nothing for the loader either
        preload = None
    environment = first = None
    with contextlib.suppress(OSError):
        environment = inside.environment
    with contextlib.suppress(OSError):
        first = first_environment(inside)
    mount = _mount(inside, preload, given)
    limit = f"{mount}/{names.LIMIT_FILE}"
    places = (limit, f"{mount}/{names.LIMIT_DIRECTORY}")
    own = [found for place in places if (found := inside.mount_at(place)) is not None]
    return Carried(
        inside=inside,
        mount=mount,
        preload=preload,
        environment=environment,
        first=first,
        limit_mount=any("ro" in found.options for found in own),
        limit_there=inside.stat(limit) is not None,
        containers_mount=inside.mount_at(f"{mount}/{names.CONTAINERS_DIRECTORY}") is not None,
        library_mount=inside.mount_at(f"{mount}/{names.LIBRARY_FILE}") is not None,
    )


def first_environment(inside: Inside) -> dict[str, str] | None:
    """Variables of the container's PID 1: of the lowest process of its mount namespace."""
    first = next(inside.neighbours(), None)
    return None if first is None else environment_of(PROC / str(first))


def target(proc: Path = PROC) -> int | None:
    """The process to look at where our own container carries nothing: PID 1 of another one, None without.

    One that may not be looked at is meant too, outside the host's own PID namespace.
    """
    try:
        return 1 if os.readlink(proc / "1/ns/mnt") != os.readlink(proc / "self/ns/mnt") else None
    except PermissionError:
        return 1 if os.stat(proc / "self/ns/pid").st_ino != _HOST_PIDS else None
    except OSError:
        return None
