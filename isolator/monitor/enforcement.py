"""Is a container held to its limit? One pure function of what pods, caches, KAI's rounding and NVML say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from isolator import fraction, names
from isolator._core import lib
from isolator.monitor import grants
from isolator.monitor.grants import Basis, Grant
from isolator.monitor.model import Cache, Container, PodView, Skip, State, Uncapped, Verdict
from isolator.output import plain
from isolator.region import Region

_REASON: Final = 80
NO_LIMIT: Final = "KAI gave no limit"


def concerns(container: Container, pod: PodView, schedulers: tuple[str, ...]) -> bool:
    """Whether the container should be capped: it runs, and is injected or is KAI's target in a pod of ours.

    A pod with KAI 0.18's annotations alone is NVIDIA's to enforce unless it was injected. No schedulers
    named means any.
    """
    if not (container.running and pod.live):
        return False
    if container.injected:
        return True
    ours = pod.namespace not in names.UNTOUCHED_NAMESPACES and (not schedulers or pod.scheduler in schedulers)
    if fraction.is_bound(pod.annotations) and not fraction.is_fraction(pod.annotations):
        return ours and container.fraction  # its words were taken away after KAI had read them
    return ours and container.fraction and fraction.is_legacy(pod.annotations)


def why_not_injected(pod: PodView) -> tuple[Uncapped, str]:
    """Why a fraction pod runs without the library, from what it and the webhook left on it."""
    out = fraction.opted_out(pod.annotations, pod.labels)
    if out is not None:
        return Uncapped.OPTED_OUT, out
    status = pod.annotations.get(names.ANNOTATION_STATUS, "")
    if status.startswith(names.STATUS_SKIPPED):
        reason = status.removeprefix(names.STATUS_SKIPPED).strip()[:_REASON]
        opted_out = reason.startswith("opt")
        return (Uncapped.OPTED_OUT if opted_out else Uncapped.SKIPPED), f"webhook: {reason}"
    return Uncapped.NOT_INJECTED, "the webhook did not see the pod"


def _of_region(region: Region) -> tuple[State, Uncapped | None, str]:
    """The state that a readable region tells."""
    unlimited = any(device.limit == 0 for device in region.devices)
    if not region.extended:  # HAMi-core keeps no state; what it records a limit for, it limits
        if unlimited:
            return State.UNCAPPED, Uncapped.NO_LIMIT, "HAMi-core recorded no limit"
        return (State.ENFORCED, None, "HAMi-core") if region.devices else (State.IDLE, None, "no device yet")
    if region.state == lib.VGPU_STATE_REFUSED:
        reason = region.refuse_reason
        return State.REFUSED, None, f"a start of CUDA was refused, errno {reason} ({os.strerror(reason)})"
    if region.state == lib.VGPU_STATE_ENFORCED:
        return State.ENFORCED, None, ""
    if region.state == lib.VGPU_STATE_UNSETTLED:
        return State.UNSETTLED, None, "NVML does not list the processes: estimates stay"
    if unlimited and region.processes:
        return State.UNCAPPED, Uncapped.NO_LIMIT, "the region records no limit"
    return State.IDLE, None, "CUDA is not started"


def state(
    container: Container, pod: PodView, cache: Cache | None, bypass: bool = False
) -> tuple[State, Uncapped | None, str]:
    """State, kind of uncapped, and reason in words; the first row that fits decides:

    injected | bypass | cache               | says                              | state
    no       |        |                     | inject: "false", label ignore     | uncapped: opted_out
    no       |        |                     | status "skipped: opt..."          | uncapped: opted_out
    no       |        |                     | status "skipped: ..."             | uncapped: skipped
    no       |        |                     |                                   | uncapped: not_injected
    yes      | yes    |                     |                                   | uncapped: bypass
    yes      | no     |                     | limit file without KAI's limit    | refused
    yes      | no     | skipped, no no_file |                                   | unreadable
    yes      | no     | region of HAMi-core | a device without a limit          | uncapped: no_limit
    yes      | no     | region of HAMi-core | devices                           | enforced
    yes      | no     | region of HAMi-core | no device                         | idle
    yes      | no     | region of ours      | state refused                     | refused
    yes      | no     | region of ours      | state enforced                    | enforced
    yes      | no     | region of ours      | state unsettled                   | unsettled
    yes      | no     | region of ours      | unknown, live, device without one | uncapped: no_limit
    yes      | no     | region of ours      | unknown                           | idle
    yes      | no     | none                |                                   | idle

    Idle may also be a program that the loader cannot preload into (static, musl): only NVML tells it apart.
    """
    if not container.injected:
        kind, why = why_not_injected(pod)
        return State.UNCAPPED, kind, why
    if bypass:
        return State.UNCAPPED, Uncapped.BYPASS, "a process uses the GPU that the library does not hold"
    if container.limit_withheld:  # the file is the authority, whatever a region may say
        return State.REFUSED, None, NO_LIMIT
    if cache is not None and cache.region is not None:
        return _of_region(cache.region)
    if cache is not None and cache.skipped not in (None, Skip.NO_FILE):
        return State.UNREADABLE, None, f"region file: {cache.skipped}"
    return State.IDLE, None, "no region yet"


def _tampered(region: Region) -> bool:
    """A flag of the library's, or a limit that vanished while the library enforces one."""
    holds = region.state in (lib.VGPU_STATE_ENFORCED, lib.VGPU_STATE_UNSETTLED)
    gone = any(device.limit == 0 or "limit" in device.damaged for device in region.devices)
    return region.tampered or (holds and gone)


def judge(
    container: Container,
    pod: PodView,
    cache: Cache | None,
    label: str | None,
    nvml_bytes: Mapping[str, int] | None = None,
    bypass: bool | None = None,
) -> Verdict:
    """All that is concluded of one container that should be capped (see `concerns`).

    `label` is the raw text of the node's memory label. `nvml_bytes` (by device UUID) and `bypass` are None
    where the host's processes cannot be seen.
    """
    found, uncapped, reason = state(container, pod, cache, bool(bypass))
    grant = grants.expected(pod.annotations, label) if container.fraction else Grant(Basis.NO_FRACTION)
    region = cache.region if cache is not None else None
    limits = [device.limit for device in region.devices if device.limit] if region is not None else []
    known = grant.limit is not None and bool(limits)
    ours = region if region is not None and region.extended else None
    return Verdict(
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        state=found,
        uncapped=uncapped,
        reason=plain(reason),  # some of it is the tenant's: Events, page and terminals show it
        expected_limit=grant.limit,
        mismatch=any(grants.exceeds(grant, limit) for limit in limits) if known else None,
        tampered=None if ours is None else _tampered(ours),
        sm_unenforced=None if ours is None else ours.sm_unenforced,
        nvml_bytes=nvml_bytes,
        bypass=bypass,
    )
