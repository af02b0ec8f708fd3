"""Which cache folders go, and when: a live pod's never does."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from isolator._core import lib
from libsync_node import UIDS, Node

from isolator.libsync import cache, files


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, used=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The installer's clock; its only entry is the time."""
    now = [1000.0]
    monkeypatch.setattr(cache.time, "monotonic", lambda: now[0])
    return now


def _folder(node: Node, uid: str, container: str = "main") -> Path:
    path = node.containers / f"{uid}_{container}"
    path.mkdir()
    (path / "usage.cache").write_bytes(b"\0" * 4096)
    return path


def _sweep(caches: cache.Caches, node: Node) -> cache.Report:
    with files.folder(node.containers) as fd:
        return caches.sweep(fd)


def test_the_size_of_a_region_is_the_librarys() -> None:
    """The constant here stands for the layout's, which this process must not load."""
    assert cache.REGION_BYTES == lib.VGPU_REGION_SIZE


def test_a_folder_goes_only_after_its_pod_was_gone_for_a_while(node: Node, clock: list[float]) -> None:
    """One pass is never enough; the live pod's folder stays."""
    live, dead = _folder(node, UIDS[0]), _folder(node, UIDS[1], "my-app")
    caches = cache.Caches(node.pods)
    assert (_sweep(caches, node).caches, _sweep(caches, node).removed) == (2, 0)
    clock[0] += 59
    assert _sweep(caches, node).removed == 0 and dead.exists()
    clock[0] += 2
    report = _sweep(caches, node)
    assert (1, 1, [live.name]) == (report.removed, report.caches, report.live)
    assert live.exists() and not dead.exists()


def test_a_pod_that_comes_back_starts_the_while_anew(node: Node, clock: list[float]) -> None:
    """The kubelet may list a pod's folder late; what counts is being gone all the time."""
    folder = _folder(node, UIDS[1])
    caches = cache.Caches(node.pods)
    _sweep(caches, node)
    clock[0] += 50
    (node.pods / UIDS[1]).mkdir()
    _sweep(caches, node)
    (node.pods / UIDS[1]).rmdir()
    clock[0] += 50
    _sweep(caches, node)
    clock[0] += 50
    assert _sweep(caches, node).removed == 0 and folder.exists()
    clock[0] += 11
    assert _sweep(caches, node).removed == 1


@pytest.mark.parametrize("fault", ["missing", "empty", "a file", "without pods", "another kubelet's"])
def test_without_the_kubelets_own_folder_nothing_goes(
    node: Node, clock: list[float], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each doubt about the folder of pods keeps all; it is said once, not at each pass."""
    folder = _folder(node, UIDS[1])
    own = UIDS[5] if fault == "another kubelet's" else None
    if own is None:
        (node.pods / UIDS[0]).rmdir()
        node.pods.rmdir()
    if fault in ("empty", "without pods"):
        node.pods.mkdir()
    if fault == "without pods":
        (node.pods / "lost+found").mkdir()
    if fault == "a file":
        node.pods.write_text("")
    caches = cache.Caches(node.pods, own)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            clock[0] += 100
            report = _sweep(caches, node)
            assert (report.removed, report.caches) == (0, 1) and report.unknown
    assert folder.exists()
    assert len([r for r in caplog.records if "no cache folder is removed" in r.getMessage()]) == 1


def test_the_while_does_not_run_while_the_pods_cannot_be_seen(node: Node, clock: list[float]) -> None:
    """Being gone is counted only in passes that could tell."""
    folder = _folder(node, UIDS[1])
    caches = cache.Caches(node.pods)
    _sweep(caches, node)
    hidden = node.pods.rename(node.folder / "hidden")
    clock[0] += 500
    _sweep(caches, node)
    hidden.rename(node.pods)
    assert _sweep(caches, node).removed == 0 and folder.exists()


@pytest.mark.parametrize(
    "name",
    [
        "README",
        "lost+found",
        f"{UIDS[1]}",
        f"{UIDS[1]}_",
        f"{UIDS[1]}_Main",
        f"{UIDS[1]}_a_b",
        f"x{UIDS[1]}_main",
        f"{UIDS[1].upper()[:-1]}A_main",
        f"{UIDS[1]}_-main",
        f"{UIDS[1]}_{'a' * 64}",
    ],
)
def test_a_name_that_is_no_cache_folder_is_left_alone(node: Node, clock: list[float], name: str) -> None:
    """Whoever made it may need it."""
    (node.containers / name).mkdir()
    caches = cache.Caches(node.pods)
    _sweep(caches, node)
    clock[0] += 100
    assert (_sweep(caches, node).removed, _sweep(caches, node).caches) == (0, 0)
    assert (node.containers / name).is_dir()


def test_static_pods_and_long_names_are_known(node: Node, clock: list[float]) -> None:
    """A static pod's UID is 32 digits; a container's name has up to 63 letters."""
    for name in (f"{'0a' * 16}_main", f"{UIDS[1]}_{'a' * 63}"):
        (node.containers / name).mkdir()
    caches = cache.Caches(node.pods)
    _sweep(caches, node)
    clock[0] += 100
    assert _sweep(caches, node).removed == 2


def test_links_and_files_with_a_folders_name_are_left_alone(node: Node, clock: list[float]) -> None:
    """Nothing behind a link is looked at."""
    outside = node.folder / "outside"
    outside.mkdir()
    (outside / "data").write_text("theirs")
    (node.containers / f"{UIDS[1]}_main").symlink_to(outside)
    (node.containers / f"{UIDS[2]}_main").write_text("")
    caches = cache.Caches(node.pods)
    _sweep(caches, node)
    clock[0] += 100
    assert _sweep(caches, node).removed == 0
    assert (outside / "data").read_text() == "theirs"


def test_a_pod_that_appears_while_we_look_keeps_its_folder(
    node: Node, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are listed before pods: a folder seen belongs to a pod that is listed, if it lives."""
    caches = cache.Caches(node.pods, grace=0)
    real = os.scandir

    def scandir(where: object) -> object:
        if where == node.pods and not (node.pods / UIDS[3]).exists():
            (node.pods / UIDS[3]).mkdir()
            _folder(node, UIDS[3])
        return real(where)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", scandir)
    assert _sweep(caches, node).removed == 0
    assert _sweep(caches, node).removed == 0
    assert (node.containers / f"{UIDS[3]}_main").is_dir()


def test_one_folder_that_cannot_be_read_does_not_stop_the_others(
    node: Node, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is that folder's alone."""
    _folder(node, UIDS[1])
    _folder(node, UIDS[2])
    real = cache.tree.clear

    def clear(top: int, *more: object) -> int:
        if os.readlink(f"/proc/self/fd/{top}").endswith(f"{UIDS[1]}_main"):
            raise OSError(5, "Input/output error")
        return real(top, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(cache.tree, "clear", clear)
    caches = cache.Caches(node.pods, grace=0)
    assert _sweep(caches, node).removed == 1
    assert not (node.containers / f"{UIDS[2]}_main").exists()
