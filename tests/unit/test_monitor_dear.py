"""What hostile folders can take of the monitor's time: a bounded part of each scan, however many they are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from region_files import UID, RegionFile, Slot, Spec, folder

from isolator import region
from isolator.monitor import discovery
from isolator.monitor.model import Skip

VICTIM = "11111111-1111-2222-3333-444455556666"


def _burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reading a file whose name is not usage.cache takes all the time that it is given; the names read."""
    real, read = region.read_descriptor, []

    def slow(descriptor: int, budget: float = 0.02) -> region.Region:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        read.append(path)
        if not path.endswith("usage.cache"):
            _burn(min(budget, 0.02))
            raise region.RegionError(region.Why.SLOW, "its slots take too much processor time")
        return real(descriptor, budget)

    monkeypatch.setattr(region, "read_descriptor", slow)
    return read


def _hostile(mount: Path, number: int) -> None:
    name = f"{number:08x}-0000-0000-0000-000000000000"
    outer = folder(mount, name)
    for place in (outer, outer / outer.name):
        place.mkdir(exist_ok=True)
        for index in range(discovery.MOST_FILES):
            (place / f"{index}.cache").write_bytes(b"x")


def test_a_folder_has_one_budget_for_all_its_files(tmp_path: Path, heavy: list[str]) -> None:
    """Sixteen heavy files in each depth cost what one folder may cost, and are its skip."""
    _hostile(tmp_path, 1)
    began = time.thread_time()
    (cache,) = discovery.scan(tmp_path).caches

    assert time.thread_time() - began < discovery.FOLDER_S + 0.02
    assert cache.skipped == Skip.SLOW
    assert len(heavy) == 2


def test_many_hostile_folders_make_no_scan_slow_for_good(tmp_path: Path, heavy: list[str]) -> None:
    """After the first scan a few of them are read each time, in turn; neighbours are read always."""
    for number in range(30):
        _hostile(tmp_path, number)
    scanner = discovery.Scanner(tmp_path)
    with RegionFile(folder(tmp_path, VICTIM) / "usage.cache"):
        scanner.scan()
        heavy.clear()
        for _ in range(16):
            began = time.thread_time()
            found = {cache.pod_uid: cache for cache in scanner.scan().caches}
            assert time.thread_time() - began < discovery.DEAR_S + discovery.FOLDER_S + 0.03
            assert found[VICTIM].region is not None
            assert [c.skipped for uid, c in found.items() if uid != VICTIM] == [Skip.SLOW] * 30
    assert len({Path(path).parts[-2] for path in heavy}) == 31, "each had its turn"


def test_folder_that_is_dear_no_more_is_read_always(
    tmp_path: Path, heavy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder whose cause is gone is back with its next turn."""
    _hostile(tmp_path, 1)
    scanner = discovery.Scanner(tmp_path)
    scanner.scan()
    (tmp_path / "containers" / "00000001-0000-0000-0000-000000000000_main" / "0.cache").unlink()
    place = folder(tmp_path, "00000001-0000-0000-0000-000000000000")
    with RegionFile(place / "usage.cache"):
        (cache,) = scanner.scan().caches
    assert cache.region is not None
    assert scanner._dear == {}


def test_flood_of_new_folders_is_read_over_several_scans(
    tmp_path: Path, heavy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first scan has no time for is said to be slow, and is first in the next one."""
    monkeypatch.setattr(discovery, "NEW_S", 0.05)
    for number in range(6):
        _hostile(tmp_path, number)
    scanner = discovery.Scanner(tmp_path)
    assert [cache.skipped for cache in scanner.scan().caches] == [Skip.SLOW] * 6
    first = {Path(path).parts[-2] for path in heavy}
    heavy.clear()
    scanner.scan()
    assert 0 < len(first) < 6
    assert first.isdisjoint(Path(path).parts[-2] for path in heavy)


def test_real_region_of_many_processes_stays_within_the_budget(tmp_path: Path) -> None:
    """A full region of 1,024 live slots costs at most a folder's time."""
    spec = Spec(slots=[Slot(pid=index + 1) for index in range(1024)])
    with RegionFile(folder(tmp_path, UID) / "usage.cache", spec):
        began = time.thread_time()
        discovery.scan(tmp_path)
        assert time.thread_time() - began < discovery.FOLDER_S + 0.03
