"""Mounts of a tenant that would hide the library from the loader, and those that merely come close.

What the webhook injects is mounted on top of everything at a shallower path. Thus a mount of the tenant can
get between the loader and the library only at the same paths or below them, and those are denied. So are `/`
and `/etc`: the preload entry would then be a file inside the tenant's volume, and where another container
removes that file the kernel takes our mount away with it, without a word (seen on Linux 6.18). A parent of
<mount> allows the same for the library, but there the loader complains in every program, and honest pods do
mount at such places: that is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from isolator import mountpath, names
from isolator.webhook.items import is_ours
from isolator.webhook.pod import Container, Pod, as_objects, as_text, quote


def _places(container: Container) -> Iterator[tuple[str, str]]:
    """(volume or other source, path) of everything of the tenant that is mounted into the container."""
    for mount in container.mounts:
        if not is_ours(mount):
            yield mount["name"], mount["mountPath"]
    devices = as_objects(container.raw.get("volumeDevices"), f"{container.where}.volumeDevices", "devicePath")
    for device in devices:
        yield "volumeDevices", device["devicePath"]
    # The kubelet mounts a writable file of the host there, after every other mount.
    message = as_text(
        container.raw.get("terminationMessagePath"), f"{container.where}.terminationMessagePath"
    )
    if message:
        yield "terminationMessagePath", message


def denied_mount(container: Container, mount: str) -> str | None:
    """One line that names the tenant's mount that would cover the library or the preload file, if any."""
    for what, path in _places(container):
        if mountpath.hides(path, mount):
            return (
                f"container {quote(container.name)}: mount of {quote(what)} at {quote(path, 80)}"
                " would hide the GPU memory limit:"
                f" mount it neither at /, /etc, {names.PRELOAD_FILE} nor at {mount} or below"
            )
    return None


def parent_mounts(container: Container, mount: str) -> list[str]:
    """A warning for each mount of the tenant that our folder would lie in."""
    return [
        f"mount of {quote(what)} at {quote(path)} holds {mount}:"
        " whoever writes there can break this pod's GPU memory limit"
        for what, path in _places(container)
        if mountpath.is_within(mount, mountpath.clean(path))
    ]


def brings_lock(container: Container) -> bool:
    """Whether the tenant mounts a lock folder of its own: two mounts at one path make the pod invalid."""
    return any(
        not is_ours(mount) and mountpath.clean(mount["mountPath"]) == names.VGPULOCK_DIRECTORY
        for mount in container.mounts
    )


def foreign_users(pod: Pod, target: Container | None) -> list[str]:
    """Names of the containers other than the target that mount a volume of ours."""
    return [c.name for c in pod.containers if c is not target and any(map(is_ours, c.mounts))]


def ephemeral_user(containers: list[Container]) -> str | None:
    """Name of the first of some debug containers that mounts a volume of ours, if any does."""
    return next((c.name for c in containers if any(map(is_ours, c.mounts))), None)
