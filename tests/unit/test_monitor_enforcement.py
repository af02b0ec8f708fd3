"""The truth table of enforcement, row by row, and the verdict around it."""

from __future__ import annotations

from pathlib import Path

import pytest
from isolator._core import lib

from isolator import names
from isolator.monitor import enforcement
from isolator.monitor.grants import MIB
from isolator.monitor.model import Cache, Container, PodView, Skip, State, Uncapped
from isolator.region import Device, Process, Region

CARD = 15360 * MIB
GRANT = 4147 * MIB
LIVE = (Process(0, 1, (0,)),)


def _device(limit: int = GRANT, damaged: frozenset[str] = frozenset()) -> Device:
    return Device(0, "GPU-" + "0" * 8, limit, 0, 0, 0, 0, damaged=damaged)


def _region(state: int, *devices: Device, ours: bool = True, live: bool = True, flags: int = 0) -> Region:
    return Region(devices, LIVE if live else (), extended=ours, state=state, flags=flags)


def _cache(found: Region | Skip) -> Cache:
    region, skipped = (found, None) if isinstance(found, Region) else (None, found)
    return Cache("u", "main", Path("/x"), region, skipped)


def _pod(status: str | None = "injected", **given: object) -> PodView:
    annotations = {"gpu-memory": "4096"} | ({names.ANNOTATION_STATUS: status} if status else {})
    annotations |= given.get("annotations", {})  # type: ignore[operator]
    labels: dict[str, str] = given.get("labels", {})  # type: ignore[assignment]
    namespace = str(given.get("namespace", "team"))
    return PodView(namespace, "p", "u", annotations=annotations, labels=labels, scheduler="kai-scheduler")


def _container(injected: bool = True, limit: str | None = "cm", **given: object) -> Container:
    known: dict[str, object] = {"running": True, "fraction": True}
    return Container("team", "p", "u", "main", injected=injected, limit_configmap=limit, **(known | given))  # type: ignore[arg-type]


UNKNOWN, ENFORCED = lib.VGPU_STATE_UNKNOWN, lib.VGPU_STATE_ENFORCED
UNSETTLED, REFUSED = lib.VGPU_STATE_UNSETTLED, lib.VGPU_STATE_REFUSED


@pytest.mark.parametrize(
    ("container", "found", "bypass", "state"),
    [
        (_container(), Skip.TRUNCATED, True, State.UNCAPPED),
        (_container(), _region(ENFORCED, _device()), True, State.UNCAPPED),
        (_container(), Skip.TRUNCATED, False, State.UNREADABLE),
        (_container(), Skip.LINK, False, State.UNREADABLE),
        (_container(), _region(UNKNOWN, _device(0), ours=False), False, State.UNCAPPED),
        (_container(), _region(UNKNOWN, _device(), ours=False), False, State.ENFORCED),
        (_container(), _region(UNKNOWN, ours=False), False, State.IDLE),
        (_container(), _region(REFUSED, _device()), False, State.REFUSED),
        (_container(limit=None), _region(ENFORCED, _device()), False, State.ENFORCED),
        (_container(), _region(ENFORCED, _device(0)), False, State.ENFORCED),
        (_container(), _region(UNSETTLED, _device()), False, State.UNSETTLED),
        (_container(), _region(UNKNOWN, _device(0)), False, State.UNCAPPED),
        (_container(), _region(UNKNOWN, _device(0), live=False), False, State.IDLE),
        (_container(), _region(UNKNOWN), False, State.IDLE),
        (_container(limit=None, limit_withheld=True), _region(ENFORCED, _device()), True, State.UNCAPPED),
        (_container(limit=None, limit_withheld=True), _region(ENFORCED, _device()), False, State.REFUSED),
        (_container(limit=None, limit_withheld=True), Skip.TRUNCATED, False, State.REFUSED),
        (_container(limit=None, limit_withheld=True), Skip.NO_FILE, False, State.REFUSED),
        (_container(limit=None, limit_withheld=True), None, False, State.REFUSED),
        (_container(limit=None), None, False, State.IDLE),
        (_container(), Skip.NO_FILE, False, State.IDLE),
        (_container(), None, False, State.IDLE),
    ],
)
def test_state_of_injected_containers(
    container: Container, found: Region | Skip | None, bypass: bool, state: State
) -> None:
    """Each row of the table for injected containers (B093)."""
    cache = _cache(found) if found is not None else None

    assert state == enforcement.state(container, _pod(), cache, bypass)[0]


@pytest.mark.parametrize(
    ("pod", "kind"),
    [
        (_pod(None, annotations={names.ANNOTATION_INJECT: "False"}), Uncapped.OPTED_OUT),
        (_pod(None, labels={names.LABEL_WEBHOOK: "ignore"}), Uncapped.OPTED_OUT),
        (_pod("skipped: opted-out-env"), Uncapped.OPTED_OUT),
        (_pod("skipped: sandbox-class"), Uncapped.SKIPPED),
        (_pod("injected"), Uncapped.NOT_INJECTED),
        (_pod(None, annotations={names.ANNOTATION_INJECT: "true"}), Uncapped.NOT_INJECTED),
        (_pod(None, labels={names.LABEL_WEBHOOK: "other"}), Uncapped.NOT_INJECTED),
        (_pod(None), Uncapped.NOT_INJECTED),
    ],
)
def test_containers_without_the_library_are_uncapped_whatever_else_is_there(
    pod: PodView, kind: Uncapped
) -> None:
    """Each row of the table for containers that were not injected; a cache does not excuse them."""
    cache = _cache(_region(ENFORCED, _device()))
    found = enforcement.state(_container(injected=False), pod, cache)

    assert (State.UNCAPPED, kind) == found[:2]
    assert found[2]


@pytest.mark.parametrize(
    ("container", "pod", "schedulers", "concerned"),
    [
        (_container(False), _pod(), ("kai-scheduler",), True),
        (_container(False), _pod(), (), True),
        (_container(False), _pod(), ("other",), False),
        (_container(True), _pod(), ("other",), True),
        (_container(False, running=False), _pod(), (), False),
        (_container(False, fraction=False), _pod(), (), False),
        (_container(True, fraction=False), _pod(), (), True),
        (_container(False), _pod(namespace="kai-resource-reservation"), (), False),
    ],
)
def test_which_containers_are_judged(
    container: Container, pod: PodView, schedulers: tuple[str, ...], concerned: bool
) -> None:
    """Running targets of our schedulers' fraction pods, and whatever was injected; nobody else."""
    assert concerned is enforcement.concerns(container, pod, schedulers)


def test_pods_with_nvidias_annotations_alone_are_not_ours() -> None:
    """A pod that only NVIDIA's enforcement knows is not called uncapped; once injected it is judged."""
    pod = PodView("team", "p", "u", annotations={"nvidia.com/container.main.gpu-memory.request": "4Gi"})

    assert not enforcement.concerns(_container(False), pod, ())
    assert enforcement.concerns(_container(True), pod, ())


@pytest.mark.parametrize(
    ("region", "label", "mismatch"),
    [
        (_region(ENFORCED, _device(GRANT)), "15360", False),
        (_region(ENFORCED, _device(GRANT), _device(CARD)), "15360", True),
        (_region(ENFORCED, _device(GRANT // 2)), "15360", False),
        (_region(ENFORCED, _device(CARD)), str(CARD), True),
        (_region(ENFORCED, _device(GRANT)), None, None),
        (_region(ENFORCED), "15360", None),
        (_region(UNKNOWN, _device(CARD), ours=False), "15360", True),
    ],
)
def test_limit_is_compared_with_kais_grant(region: Region, label: str | None, mismatch: bool | None) -> None:
    """Any device above the grant is a mismatch; without a label or a device nothing is claimed."""
    verdict = enforcement.judge(_container(), _pod(), _cache(region), label)

    assert mismatch is verdict.mismatch
    assert (None if label is None else GRANT) == verdict.expected_limit


@pytest.mark.parametrize(
    ("region", "tampered"),
    [
        (_region(ENFORCED, _device()), False),
        (_region(ENFORCED, _device(), flags=lib.VGPU_FLAG_TAMPERED), True),
        (_region(ENFORCED, _device(0)), True),
        (_region(UNSETTLED, _device(0, frozenset({"limit"}))), True),
        (_region(UNKNOWN, _device(0)), False),
        (_region(UNKNOWN, _device(), ours=False), None),
        (None, None),
    ],
)
def test_altered_regions_are_told(region: Region | None, tampered: bool | None) -> None:
    """The library's flag counts, and a limit that vanished under enforcement; HAMi-core has no flag."""
    cache = _cache(region) if region is not None else None

    assert tampered is enforcement.judge(_container(), _pod(), cache, "15360").tampered


def test_a_reason_is_one_printable_line() -> None:
    """Who may change a pod's annotations writes the webhook's word too, and Events show it in a terminal."""
    pod = _pod("skipped: \x1b[2J\r\nfine\u202e\u009b31m")
    verdict = enforcement.judge(_container(injected=False), pod, None, "15360")
    assert verdict.uncapped is Uncapped.SKIPPED
    assert "fine" in verdict.reason and verdict.reason.isprintable()
