"""Which folder may be <mount>: one rule for libsync, webhook, monitor and (tested equal) the chart."""

from __future__ import annotations

import posixpath
import re
from typing import Final

from isolator import names

SYSTEM_FOLDERS: Final = (
    *("/bin", "/boot", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/media", "/mnt", "/opt", "/root"),
    *("/sbin", "/srv", "/tmp", "/usr", "/usr/bin", "/usr/include", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib/x86_64-linux-gnu"),
    *("/lib/aarch64-linux-gnu", "/usr/libexec", "/usr/libx32", "/usr/local", "/usr/local/bin"),
    *("/usr/local/etc", "/usr/local/lib", "/usr/local/lib64", "/usr/local/sbin", "/usr/local/share"),
    *("/usr/sbin", "/usr/share", "/var", "/var/cache", "/var/lib", "/var/lib/containerd"),
    *("/var/lib/kubelet", "/var/log", "/var/tmp"),
)
"""Folders of many owners: ours takes a folder's mode and its `containers` for its own. One below may do."""
SYSTEM_TREES: Final = ("/dev", "/etc", "/proc", "/run", "/sys", "/var/run")
"""Folders that hold no place for a library, at no depth."""


def clean(path: str) -> str:
    """The absolute path that the kubelet makes of a mount path: relative ones start at the root."""
    return posixpath.normpath("/" + path.lstrip("/"))


def is_within(path: str, parent: str) -> bool:
    """Whether the clean `path` is `parent` or below it."""
    return path == parent or path.startswith(parent.rstrip("/") + "/")


def hides(path: str, mount: str) -> bool:
    """Whether something of the tenant mounted at `path` lies over the library, the preload file or the limit.

    At / and /etc the preload entry would be a file inside the tenant's volume, which it may take away.
    """
    at = clean(path)
    return at in ("/", "/etc") or is_within(at, names.PRELOAD_FILE) or is_within(at, mount)


def fault(path: str) -> str | None:
    """Why the clean absolute `path` cannot be <mount>, in one line; None where it can.

    In /etc the preload file would be the node's own, in the others modes and folders would be taken over.
    """
    advice = "give a folder of its own, like /usr/local/vgpu"
    if path == "/etc":
        why = "its ld.so.preload would act on every program of this node"
        return f"{path!r} is a system folder: {why}; {advice}"
    if path in SYSTEM_FOLDERS or path in SYSTEM_TREES:
        return f"{path!r} is a system folder: {advice}"
    for tree in SYSTEM_TREES:
        if path.startswith(f"{tree}/"):
            return f"{path!r} is below the system folder {tree}: {advice}"
    return None


def check(path: str) -> str:
    """`path`, where it can be <mount>. Raises ValueError with one line."""
    # The preload file is a list split at white space and colons, a Kubernetes mount path has no colon.
    clean = path.startswith("/") and posixpath.normpath(path) == path and not path.startswith("//")
    if not clean or path == "/" or re.search(r"[\s:$]", path):
        raise ValueError(
            f"{path!r} is not an absolute, clean path below /: write it without '..', '//', a final '/',"
            " white space, ':' and '$', like /usr/local/vgpu"
        )
    why = fault(path)
    if why:
        raise ValueError(why)
    return path
