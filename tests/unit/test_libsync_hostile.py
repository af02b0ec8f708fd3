"""A tenant that does what it likes in its cache folder while the installer looks."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

import pytest
from libsync_node import UIDS, Node

from isolator.libsync import cache, files, tree

MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, used=True)


@pytest.fixture
def tenant(node: Node) -> Path:
    """The cache folder of the live pod, with a region of the right size."""
    path = node.containers / f"{UIDS[0]}_main"
    path.mkdir()
    _write(path / "usage.cache", cache.REGION_BYTES)
    return path


def _write(path: Path, size: int) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _sweep(node: Node, caches: cache.Caches | None = None) -> cache.Report:
    with files.folder(node.containers) as fd:
        return (caches or cache.Caches(node.pods)).sweep(fd)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_ordinary_folder_is_not_touched(node: Node, tenant: Path) -> None:
    """Below the bound even foreign files stay: they harm nobody."""
    _write(tenant / "notes.txt", 12 * MIB)
    assert (_sweep(node).oversized, _sweep(node).foreign) == (0, 0)
    assert _names(tenant) == ["notes.txt", "usage.cache"]


def test_a_filled_folder_loses_all_but_its_regions(node: Node, tenant: Path) -> None:
    """B147: the disk is freed; the region and HAMi's differently named one stay."""
    _write(tenant / "fill", 20 * MIB)
    _write(tenant / "5e0c.cache", 2_008_952)
    (tenant / "deep" / "er").mkdir(parents=True)
    _write(tenant / "deep" / "er" / "fill", MIB)
    report = _sweep(node)
    assert (report.oversized, report.foreign) == (1, 4)
    assert _names(tenant) == ["5e0c.cache", "usage.cache"]
    assert _sweep(node).oversized == 0


def test_a_nested_region_of_hami_stays(node: Node, tenant: Path) -> None:
    """Its library makes a folder of the same name once more."""
    nested = tenant / tenant.name
    nested.mkdir()
    _write(nested / "usage.cache", 2_008_952)
    _write(nested / "fill", 20 * MIB)
    _sweep(node)
    assert [tenant.name, "usage.cache"] == _names(tenant)
    assert _names(nested) == ["usage.cache"]


def test_many_region_files_are_not_a_way_around_the_bound(node: Node, tenant: Path) -> None:
    """usage.cache always stays, and two more."""
    for number in range(20):
        _write(tenant / f"{number}.cache", cache.REGION_BYTES)
    _sweep(node)
    assert "usage.cache" in _names(tenant) and len(_names(tenant)) == 3


def test_a_region_that_grew_goes_and_gives_its_blocks_back(node: Node, tenant: Path) -> None:
    """Also while the tenant keeps it open: the blocks of a file without a name would stay taken."""
    with (tenant / "usage.cache").open("r+b") as held:
        os.posix_fallocate(held.fileno(), 0, 20 * MIB)
        _sweep(node)
        assert _names(tenant) == []
        assert os.fstat(held.fileno()).st_blocks == 0


def test_a_sparse_file_is_measured_by_its_blocks(node: Node, tenant: Path) -> None:
    """1 TiB of nothing takes no disk: the folder is not oversized."""
    os.truncate(tenant / "usage.cache", 1 << 40)
    assert _sweep(node).oversized == 0
    assert _names(tenant) == ["usage.cache"]


def test_nothing_outside_is_reached_through_a_link(node: Node, tenant: Path) -> None:
    """Symbolic links, hard links, FIFOs and sockets are names: they go, what they lead to stays."""
    outside = node.folder / "outside"
    outside.mkdir()
    (outside / "data").write_text("theirs")
    other = node.containers / f"{UIDS[0]}_other"
    other.mkdir()
    _write(other / "usage.cache", 2 * MIB)
    (tenant / "dir").symlink_to(outside)
    (tenant / "file").symlink_to(outside / "data")
    (tenant / "loop").symlink_to("loop")
    (tenant / "up.cache").symlink_to(other / "usage.cache")
    os.link(other / "usage.cache", tenant / "hard")
    os.mkfifo(tenant / "fifo.cache")
    _write(tenant / "fill", 20 * MIB)
    assert _sweep(node).oversized == 1
    assert _names(tenant) == ["usage.cache"]
    assert (outside / "data").read_text() == "theirs"
    assert (other / "usage.cache").stat().st_size == 2 * MIB, "a file with two names is not emptied"


def test_hard_links_are_counted_once(node: Node, tenant: Path) -> None:
    """Ten names of one file take one file's blocks."""
    for number in range(10):
        os.link(tenant / "usage.cache", tenant / f"{number}.x")
    assert _sweep(node).oversized == 0


def test_a_deep_tree_neither_stops_nor_bloats_a_pass(node: Node, tenant: Path) -> None:
    """Deeper than paths, descriptors and recursion allow."""
    fd = os.open(tenant, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    descriptors = len(os.listdir("/proc/self/fd"))
    caches = cache.Caches(node.pods)
    for _ in range(5):
        if _sweep(node, caches).oversized == 0:
            break
    assert _names(tenant) == ["usage.cache"]
    assert descriptors == len(os.listdir("/proc/self/fd"))


def test_a_crowded_folder_is_emptied_in_bounded_passes(
    node: Node, tenant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass ends in time and memory, whatever is there; the next goes on, also with a dead pod's."""
    monkeypatch.setattr(cache, "FOLDER_SECONDS", 0.05)
    for number in range(20_000):
        os.close(os.open(tenant / f"file-{number:06}", os.O_CREAT, 0o600))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    caches = cache.Caches(node.pods)
    began = time.monotonic()
    first = _sweep(node, caches)
    assert time.monotonic() - began < 1
    assert first.oversized == 1 and first.foreign > 0
    while _sweep(node, caches).oversized:
        assert time.monotonic() - began < 30
    assert "usage.cache" in _names(tenant) and len(_names(tenant)) <= tree.MOST_ENTRIES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096


def test_one_tenants_mess_leaves_time_for_the_others(
    node: Node, tenant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass begins with another folder, so a pass without time left starves nobody."""
    seen: list[str] = []
    monkeypatch.setattr(
        tree, "measure", lambda fd: seen.append(os.readlink(f"/proc/self/fd/{fd}")) or tree.Size(0, True)
    )
    for uid in UIDS[1:4]:
        (node.containers / f"{uid}_main").mkdir()
        (node.pods / uid).mkdir()
    caches = cache.Caches(node.pods)
    firsts = set()
    for _ in range(4):
        seen.clear()
        _sweep(node, caches)
        assert len(seen) == 4
        firsts.add(seen[0])
    assert len(firsts) == 4


def test_a_tenant_that_renames_while_we_delete_loses_only_its_own(node: Node, tenant: Path) -> None:
    """Folders turn into links to the outside and back, in the middle of passes."""
    outside = node.folder / "outside"
    (outside / "sub").mkdir(parents=True)
    for number in range(50):
        (outside / f"keep-{number}").write_text("theirs")
        (outside / "sub" / f"keep-{number}").write_text("theirs")
    stop = threading.Event()

    def race() -> None:
        while not stop.is_set():
            for step in (
                lambda: (tenant / "d" / "sub").mkdir(parents=True),
                lambda: (tenant / "d" / "sub" / "x").write_text("x"),
                lambda: (tenant / "d").rename(tenant / "aside"),
                lambda: (tenant / "d").symlink_to(outside),
                lambda: (tenant / "aside").rename(tenant / "e"),
                lambda: (tenant / "d").rename(tenant / "e2"),
                lambda: (tenant / "e2").unlink(),
            ):
                try:
                    step()
                except OSError:
                    continue

    removed = 0
    racer = threading.Thread(target=race)
    racer.start()
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            with files.folder(tenant) as fd:
                tree.measure(fd)
                removed += tree.clear(fd, time.monotonic() + 1, tree.nothing)
    finally:
        stop.set()
        racer.join()
    assert removed > 0, "nothing was there to delete: the test shows nothing"
    # Through the link the racer writes sub/x itself, as no tenant can; what was there counts.
    assert [len(list(folder.glob("keep-*"))) for folder in (outside, outside / "sub")] == [50, 50]
