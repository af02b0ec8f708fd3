"""Cache folders of a node: names, depths, several files, what counts when there is a choice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from region_files import HAMI_SIZE, MIB, UID, RegionFile, Slot, Spec, folder

from isolator.monitor import discovery
from isolator.monitor.model import Cache, Skip
from isolator.region import Why


def _one(mount: Path) -> Cache:
    (cache,) = discovery.scan(mount).caches
    return cache


def _data(cache: Cache) -> int:
    assert cache.region is not None, cache.skipped
    return cache.region.devices[0].data // MIB


def _file(path: Path, data: int, ours: bool = True, modified: float | None = None) -> None:
    """A region whose one HAMi process holds `data` MiB; of ours only the limit is left when it is closed."""
    RegionFile(path, Spec(ours=ours, slots=[Slot(data=data * MIB)])).close()
    if modified is not None:
        os.utime(path, (modified, modified))


def test_every_reason_of_the_reader_is_a_reason_of_the_monitor() -> None:
    """No file can be refused for a reason that has no label value."""
    assert {why.value for why in Why} <= {skip.value for skip in Skip}


def test_no_directory_yet_is_no_container(tmp_path: Path) -> None:
    """A mount without containers/ is empty, not broken; no mount at all is no answer."""
    assert discovery.scan(tmp_path).caches == ()
    with pytest.raises(FileNotFoundError, match="libsync has not made it yet"):
        discovery.scan(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    """A file in the place of containers/ is not taken for an empty node."""
    (tmp_path / "containers").write_text("")
    with pytest.raises(NotADirectoryError):
        discovery.scan(tmp_path)


def test_folders_are_split_at_the_first_underscore(tmp_path: Path) -> None:
    """The folder's name is the pod's UID, then the container's name."""
    for container in ("main", "init-0"):
        with RegionFile(folder(tmp_path, UID, container) / "usage.cache"):
            pass
    found = {(c.pod_uid, c.container, c.path.parent.name) for c in discovery.scan(tmp_path).caches}
    assert found == {(UID, "main", f"{UID}_main"), (UID, "init-0", f"{UID}_init-0")}


@pytest.mark.parametrize(
    "name",
    ["lost+found", "_main", f"{UID}_", f"{UID}_Main", f"{UID}_a_b", f'{UID}_"x', "ü_main", "x" * 65 + "_a"],
)
def test_other_names_are_counted_and_left_alone(tmp_path: Path, name: str) -> None:
    """A folder that is not <podUID>_<container> makes no container."""
    (tmp_path / "containers" / name).mkdir(parents=True)
    scan = discovery.scan(tmp_path)
    assert (scan.caches, scan.skipped) == ((), {Skip.NAME: 1})


def test_an_empty_folder_has_no_file(tmp_path: Path) -> None:
    """Where CUDA was not started yet there is a folder and no region."""
    folder(tmp_path)
    assert (_one(tmp_path).region, _one(tmp_path).skipped) == (None, Skip.NO_FILE)


def test_reads_hamis_own_file_name(tmp_path: Path) -> None:
    """HAMi names its file by a random UUID."""
    _file(folder(tmp_path) / "7c8ef8a2-9d5f.cache", 5, ours=False)
    assert _data(_one(tmp_path)) == 5


def test_reads_one_level_below(tmp_path: Path) -> None:
    """A library that derives the path itself nests <uid>_<container> in its container's folder."""
    place = folder(tmp_path)
    _file(place / place.name / "usage.cache", 6, ours=False)
    cache = _one(tmp_path)
    assert (_data(cache), cache.path) == (6, place / place.name / "usage.cache")


def test_reads_one_level_below_beside_a_broken_file(tmp_path: Path) -> None:
    """What is unreadable at the first level is counted, not preferred."""
    place = folder(tmp_path)
    (place / "usage.cache").write_bytes(b"junk" * 10)
    _file(place / place.name / "usage.cache", 6, ours=False)
    cache = _one(tmp_path)
    assert (_data(cache), cache.extra) == (6, {Skip.NOT_REGION: 1})


def test_usage_cache_comes_before_newer_files(tmp_path: Path) -> None:
    """B159: the known name wins, and the others are counted."""
    _file(folder(tmp_path) / "usage.cache", 1, ours=False, modified=1000)
    _file(folder(tmp_path) / "other.cache", 2, ours=False, modified=2000)
    (folder(tmp_path) / "notes.txt").write_text("")
    cache = _one(tmp_path)
    assert (_data(cache), cache.extra, cache.modified) == (1, {Skip.EXTRA_FILE: 1}, 1000)


def test_the_newest_valid_file_counts_where_usage_cache_is_none(tmp_path: Path) -> None:
    """B159: of several HAMi files the newest region counts; a broken newer one does not."""
    place = folder(tmp_path)
    (place / "usage.cache").write_bytes(b"")
    _file(place / "a.cache", 1, ours=False, modified=1000)
    _file(place / "b.cache", 2, ours=False, modified=2000)
    (place / "c.cache").write_bytes(b"\0" * HAMI_SIZE)
    cache = _one(tmp_path)
    assert _data(cache) == 2
    assert cache.extra == {Skip.EMPTY: 1, Skip.EXTRA_FILE: 1, Skip.UNFINISHED: 1}


def test_odd_files_of_one_container_do_not_hide_another(tmp_path: Path) -> None:
    """B159, B160: each folder stands for itself."""
    good, bad = folder(tmp_path, UID, "good"), folder(tmp_path, UID, "bad")
    _file(good / "usage.cache", 3, ours=False)
    (bad / "usage.cache").write_bytes(b"no region, and short")
    found = {c.container: c for c in discovery.scan(tmp_path).caches}
    assert _data(found["good"]) == 3
    assert found["bad"].skipped == Skip.NOT_REGION


def test_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """A scan of good, broken and odd folders gives all its descriptors back."""
    _file(folder(tmp_path, UID, "good") / "usage.cache", 3)
    (folder(tmp_path, UID, "bad") / "usage.cache").write_bytes(b"short")
    os.mkfifo(folder(tmp_path, UID, "pipe") / "usage.cache")
    (tmp_path / "containers" / f"{UID}_file").write_text("")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        discovery.scan(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
