"""What a tenant may place in its own folder: never blocks, kills or misleads a scan."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from region_files import MIB, OUR_SIZE, UID, RegionFile, Slot, Spec, folder, pod
from region_files import uuid as gpu

from isolator.monitor import discovery
from isolator.monitor.collector import MonitorCollector
from isolator.monitor.model import Cache, Skip, Snapshot
from isolator.region import RegionError

VICTIM = "11111111-1111-2222-3333-444455556666"


def _scan(mount: Path) -> dict[str, Cache]:
    """Caches by pod UID, and a good neighbour among them, without being held up."""
    with RegionFile(folder(mount, VICTIM) / "usage.cache"):
        start = time.monotonic()
        found = {cache.pod_uid: cache for cache in discovery.scan(mount).caches}
        assert time.monotonic() - start < 5
    victim = found[VICTIM].region
    assert victim is not None
    assert victim.devices[0].data == 1024 * MIB
    return found


def _link_outside(place: Path) -> None:
    RegionFile(place.parent.parent / "secret.cache").close()
    (place / "usage.cache").symlink_to(place.parent.parent / "secret.cache")


def _link_neighbour(place: Path) -> None:
    (place / "usage.cache").symlink_to(f"../{VICTIM}_main/usage.cache")


def _fifo(place: Path) -> None:
    os.mkfifo(place / "usage.cache")


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        made.bind(f"/proc/self/fd/{here}/usage.cache")
        os.close(here)


def _directory(place: Path) -> None:
    (place / "usage.cache").mkdir()


def _sparse(place: Path) -> None:
    RegionFile(place / "usage.cache").close()
    os.truncate(place / "usage.cache", 1 << 40)


def _many_slots(place: Path) -> None:
    RegionFile(place / "usage.cache", Spec(slots=[Slot(pid=i + 1) for i in range(1024)])).close()
    with open(place / "usage.cache", "r+b") as file:
        file.truncate(OUR_SIZE // 2)


@pytest.mark.parametrize(
    ("make", "skip"),
    [
        (_link_outside, Skip.LINK),
        (_link_neighbour, Skip.LINK),
        (_fifo, Skip.NOT_REGULAR),
        (_socket, Skip.NOT_REGULAR),
        (_directory, Skip.NOT_REGULAR),
        (_sparse, Skip.TOO_BIG),
        (_many_slots, Skip.TRUNCATED),
    ],
)
def test_what_lies_in_the_files_place_is_skipped_by_reason(
    tmp_path: Path, make: Callable[[Path], None], skip: Skip
) -> None:
    """A link, FIFO, socket, folder or huge file in the region's place is that container's skip alone."""
    make(folder(tmp_path))
    assert _scan(tmp_path)[UID].skipped == skip


def test_a_device_in_the_files_place_is_not_opened(tmp_path: Path) -> None:
    """A device node is recognised without opening it."""
    try:
        os.mknod(folder(tmp_path) / "usage.cache", 0o20666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no right to make device nodes")
    assert _scan(tmp_path)[UID].skipped == Skip.NOT_REGULAR


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_a_folder_that_is_none_is_skipped(tmp_path: Path, kind: str) -> None:
    """What stands in a container folder's place, a link to a neighbour among it, is not entered."""
    place = tmp_path / "containers" / f"{UID}_main"
    place.parent.mkdir()
    if kind == "file":
        place.write_text("")
    elif kind == "link":
        place.symlink_to(f"{VICTIM}_main")
    else:
        os.mkfifo(place)
    assert _scan(tmp_path)[UID].skipped in (Skip.NOT_DIRECTORY, Skip.LINK)


def test_a_link_in_the_nested_folders_place_is_not_entered(tmp_path: Path) -> None:
    """The second level is opened as carefully as the first."""
    place = folder(tmp_path)
    (place / place.name).symlink_to(f"../{VICTIM}_main")
    assert _scan(tmp_path)[UID].skipped == Skip.NO_FILE


@contextmanager
def _as_nobody() -> Iterator[None]:
    """File access of this thread as by a user without rights (root only)."""
    libc = ctypes.CDLL(None)
    libc.setfsuid(65534)
    if libc.setfsuid(-1) != 65534:
        pytest.skip("only root can look as somebody else")
    try:
        yield
    finally:
        libc.setfsuid(0)


def test_a_file_without_rights_is_skipped() -> None:
    """Mode 000 is a skip of its own, for the file and for the folder."""
    with tempfile.TemporaryDirectory() as made:
        mount = Path(made)
        mount.chmod(0o755)
        RegionFile(folder(mount) / "usage.cache").close()
        (folder(mount) / "usage.cache").chmod(0)
        folder(mount, UID, "shut").chmod(0)
        with _as_nobody():
            found = {c.container: c.skipped for c in discovery.scan(mount).caches}
        folder(mount, UID, "shut").chmod(0o755)
    assert found == {"main": Skip.PERMISSION, "shut": Skip.PERMISSION}


def test_a_crowd_of_junk_is_not_listed_to_its_end(tmp_path: Path) -> None:
    """100,000 entries cost a bounded look, and the known file among them still counts."""
    place = folder(tmp_path)
    here = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(100_000):
        if number % 50_000 == 0:
            first = f"{number}.cache"
            os.close(os.open(first, os.O_CREAT | os.O_WRONLY, dir_fd=here))
        else:
            os.link(first, f"{number}.cache", src_dir_fd=here, dst_dir_fd=here)
    os.close(here)
    crowded = _scan(tmp_path)[UID]
    assert crowded.region is None
    assert crowded.extra[Skip.CROWDED] >= 1
    with RegionFile(place / "usage.cache"):
        found = _scan(tmp_path)[UID]
    assert found.region is not None
    assert found.extra[Skip.CROWDED] == 1
    shutil.rmtree(place)


def test_a_file_replaced_and_cut_while_it_is_read(tmp_path: Path) -> None:
    """B160: whatever a tenant does to its file during scans, each ends in a reading or a known reason."""
    path, stop = folder(tmp_path) / "usage.cache", threading.Event()
    good = path.with_name("good")
    RegionFile(good).close()
    content = good.read_bytes()

    def disturb() -> None:
        while not stop.is_set():
            path.with_name("next").write_bytes(content)
            os.replace(path.with_name("next"), path)
            os.truncate(path, 70_000)
            path.unlink()
            os.mkfifo(path)
            path.unlink()

    thread = threading.Thread(target=disturb)
    thread.start()
    seen = set()
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            cache = _scan(tmp_path)[UID]
            seen.add(cache.skipped)
            if cache.region is not None:
                assert [d.uuid for d in cache.region.devices] == [gpu()]
            time.sleep(0)
    finally:
        stop.set()
        thread.join()
    assert seen <= {None, *Skip}
    assert len(seen) > 1


def test_a_reader_that_fails_unexpectedly_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error of one file is that container's skip."""
    with RegionFile(folder(tmp_path) / "usage.cache"):

        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("isolator.region.read_descriptor", fail)
        (cache,) = discovery.scan(tmp_path).caches
    assert cache.skipped == Skip.UNREADABLE
    assert not issubclass(OSError, RegionError)


def test_names_in_a_region_never_reach_the_text(tmp_path: Path) -> None:
    """A UUID made to break the exposition format gives no series at all."""
    evil = 'GPU-1"} 1\nkai_isolator_up 0\nx{a="'
    with RegionFile(folder(tmp_path) / "usage.cache", Spec(uuids=[evil])):
        caches = discovery.scan(tmp_path).caches
    collector = MonitorCollector(lambda: Snapshot("n", time.time(), caches=caches, pods={UID: pod()}))
    samples = [s for family in collector.collect() for s in family.samples]
    assert [s for s in samples if "device_uuid" in s.labels] == []
    assert [s.value for s in samples if s.labels.get("reason") == "uuid"] == [1]
