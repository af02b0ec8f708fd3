"""What the installer puts on a node, and what it repairs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from libsync_node import MACHINE, Node

from isolator.libpath import library
from isolator.libsync import files, install


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _version(node: Node) -> Path:
    return next((node.mount / "versions").iterdir())


def test_a_bare_node_gets_everything(node: Node) -> None:
    """Names, modes and contents of the contract; the library is one file under two names."""
    outcome = node.install()
    source = install.load(library(), MACHINE, "1.2.0")
    assert (outcome.verified, outcome.problems) == (True, ())
    assert node.modes() == {
        "containers": "1777",
        "ld.so.preload": "644",
        "libvgpu.so": "755",
        "versions": "755",
        f"versions/{source.folder}": "755",
        f"versions/{source.folder}/libvgpu.so": "755",
    }
    assert node.library.read_bytes() == library().read_bytes()
    assert node.library.samefile(_version(node) / "libvgpu.so")
    assert node.preload.read_text() == f"{node.mount}/libvgpu.so\n"


def test_a_second_run_touches_nothing(node: Node) -> None:
    """B107: same content keeps its inode, times and links."""
    node.install()
    before = [(path, path.stat()) for path in sorted(node.mount.rglob("*"))]
    assert node.install().changes == ()
    assert before == [(path, path.stat()) for path in sorted(node.mount.rglob("*"))]


def test_the_cache_folder_is_there_before_the_library(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that starts with the first byte of the library finds its folder."""
    seen: list[dict[str, str]] = []
    for name in ("write", "link"):
        real = getattr(files, name)
        monkeypatch.setattr(
            files, name, lambda *a, _real=real, **k: (seen.append(node.modes()), _real(*a))[1]
        )
    node.install()
    assert [modes["containers"] for modes in seen] == ["1777"] * 3
    assert "libvgpu.so" not in seen[0]


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent.parent / "outside")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DRIFTS: dict[str, Callable[[Path], None]] = {
    "was missing": lambda path: path.unlink(),
    "had other content": lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
    "had other content ": lambda path: os.truncate(path, 10),
    "had mode 600": lambda path: path.chmod(0o600),
    "was not a regular file": _link,
    "was not a regular file ": lambda path: (path.unlink(), os.mkfifo(path))[0],
    "was a folder": _folder,
}


@pytest.mark.parametrize("name", ["libvgpu.so", "ld.so.preload"])
@pytest.mark.parametrize("fault", DRIFTS)
def test_drift_is_repaired_and_named(node: Node, name: str, fault: str) -> None:
    """B110: also an empty folder in a file's place, and a link is replaced, never written through."""
    outside = node.folder / "outside"
    outside.write_text("theirs")
    node.install()
    DRIFTS[fault](node.mount / name)
    outcome = node.install()
    assert (outcome.verified, outcome.problems) == (True, ())
    assert f"{name} {fault.strip()}" in outcome.changes
    assert node.library.read_bytes() == library().read_bytes()
    assert node.preload.read_text() == f"{node.mount}/libvgpu.so\n"
    assert outside.read_text() == "theirs"
    assert node.install().changes == ()


def test_the_mode_of_the_cache_folder_is_repaired(node: Node) -> None:
    """B143: any uid of a tenant can use its folder."""
    node.install()
    node.containers.chmod(0o755)
    assert node.install().changes == ("containers had mode 755",)
    assert node.modes()["containers"] == "1777"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_foreign_owner_is_repaired(node: Node) -> None:
    """Only root may own what all tenants load; a file gets a new inode, which the old owner cannot open."""
    node.install()
    for path in (node.library, node.preload, node.containers):
        os.chown(path, 1000, 1000)
    inode = node.library.stat().st_ino
    outcome = node.install()
    assert outcome.verified and "libvgpu.so belonged to uid 1000" in outcome.changes
    assert {0} == {path.stat().st_uid for path in (node.library, node.preload, node.containers)}
    assert inode != node.library.stat().st_ino


@pytest.mark.parametrize(("foreign", "mode"), [(None, 0o750), ("somebody-elses", 0o755)])
def test_the_mount_is_closed_to_others_where_it_is_ours_alone(
    node: Node, foreign: str | None, mode: int
) -> None:
    """A tenant's root may leave a setuid program in its cache; a folder shared with others keeps its mode."""
    node.mount.mkdir(mode=0o755)
    if foreign:
        (node.mount / foreign).touch()
    agent = node.agent(group=os.getgid())
    assert agent.run_once()
    assert stat.S_IMODE(node.mount.stat().st_mode) == mode
    node.mount.chmod(0o777)
    assert agent.run_once()
    assert stat.S_IMODE(node.mount.stat().st_mode) == (mode if foreign is None else 0o777)


def test_a_full_folder_in_the_librarys_place_is_a_problem(node: Node) -> None:
    """B110: it is somebody's data; the line says to remove it, and the rest is installed."""
    node.install()
    node.library.unlink()
    (node.library / "data").mkdir(parents=True)
    outcome = node.install()
    assert not outcome.verified
    assert f"{node.library} is a folder with something in it" in outcome.problems[0]
    assert (node.library / "data").is_dir() and node.preload.is_file()


@pytest.mark.parametrize("name", ["containers", "versions"])
@pytest.mark.parametrize("what", ["a symbolic link, which is never followed", "not a folder"])
def test_a_folder_that_is_something_else_is_a_problem(node: Node, name: str, what: str) -> None:
    """Nothing is made behind a link, and all other steps still run."""
    elsewhere = node.folder / "elsewhere"
    elsewhere.mkdir()
    node.mount.mkdir()
    if what.startswith("a symbolic"):
        (node.mount / name).symlink_to(elsewhere)
    else:
        (node.mount / name).write_text("")
    outcome = node.install()
    assert not outcome.verified
    assert f"{node.mount / name} is {what}: remove it from the node" in outcome.problems
    assert list(elsewhere.iterdir()) == [] and node.preload.is_file()


def test_a_mount_that_is_a_link_is_not_followed(node: Node) -> None:
    """B111: the path of the preload file must be the path on the node."""
    elsewhere = node.folder / "elsewhere"
    elsewhere.mkdir()
    node.mount.symlink_to(elsewhere)
    assert not node.agent().run_once()
    assert "symbolic link" in node.agent().ready()[1] or list(elsewhere.iterdir()) == []
    assert list(elsewhere.iterdir()) == []


def test_an_upgrade_keeps_three_versions_and_the_current_one(node: Node) -> None:
    """The newest by the time they became current; a roll back makes an old one new."""
    for number in range(5):
        node.install(node.build(number))
        os.utime(_current(node), (number + 1, number + 1))
    kept = {_number(path) for path in (node.mount / "versions").iterdir()}
    assert {2, 3, 4} == kept
    outcome = node.install(node.build(2))
    assert outcome.verified and node.library.samefile(_current(node) / "libvgpu.so")
    node.install(node.build(9))
    assert {2, 4, 9} == {_number(path) for path in (node.mount / "versions").iterdir()}


def _number(version: Path) -> int:
    return (version / "libvgpu.so").stat().st_size - library().stat().st_size


def _current(node: Node) -> Path:
    versions = (node.mount / "versions").iterdir()
    return next(path for path in versions if (path / "libvgpu.so").samefile(node.library))


def test_a_file_system_without_links_gets_a_copy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network and FUSE file systems refuse hard links."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "refused")

    monkeypatch.setattr(os, "link", refuse)
    assert node.install().verified
    assert not node.library.samefile(_version(node) / "libvgpu.so")
    assert node.library.read_bytes() == library().read_bytes()


def test_leftovers_of_killed_runs_go(node: Node) -> None:
    """In every folder we write to; other files stay."""
    node.install()
    for folder in (node.mount, node.mount / "versions", _version(node)):
        (folder / ".libsync-1-abc").write_text("half")
    (node.mount / "README").write_text("theirs")
    node.install()
    assert node.temporaries() == [] and (node.mount / "README").is_file()


@pytest.mark.parametrize(
    "number, words",
    [
        (errno.EROFS, "read-only file system: set paths.containerVgpuMount"),
        (errno.EACCES, "not writable for uid"),
        (errno.EPERM, "set paths.containerVgpuMount"),
        (errno.ENOSPC, "free disk space or inodes"),
        (errno.EDQUOT, "free disk space or inodes"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_every_errno_of_a_write_is_one_line_and_keeps_the_old(
    node: Node, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    """B113, B146: the line names the path and what to set or free; what is installed stays whole."""
    node.install(node.build(0))
    inode = node.library.stat().st_ino

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)
    outcome = node.install(node.build(1))
    assert not outcome.verified and words in outcome.problems[0]
    assert str(node.mount) in outcome.problems[0] and "\n" not in outcome.problems[0]
    assert (inode, []) == (node.library.stat().st_ino, node.temporaries())
