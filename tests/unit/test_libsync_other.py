"""A library that is not this image's: --library with --version-file, as librarySync.libraryTag asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from libsync_node import Node

from isolator.libpath import library
from isolator.libsync.agent import Agent


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _other(node: Node, data: bytes | None = None, version: str | None = "1.1.9\n") -> Agent:
    """An installer that is given a library of its own, and a version."""
    folder = node.folder / "library"
    folder.mkdir(exist_ok=True)
    if data is not None:
        (folder / "libvgpu.so").write_bytes(data)
    if version is not None:
        (folder / "version").write_text(version)
    return node.agent(folder / "libvgpu.so", version_file=folder / "version")


def _status(node: Node) -> dict[str, object]:
    return dict(json.loads((node.mount / "libsync.json").read_text()))


def test_it_is_installed_under_its_own_version(node: Node) -> None:
    """Back by one value and forward again: file, folder and status say which one is there."""
    node.agent().run_once()
    before = (node.mount / "libvgpu.so").stat().st_ino
    old = library().read_bytes() + b"\0"
    assert _other(node, old).run_once()
    assert node.library.read_bytes() == old and node.library.stat().st_ino != before
    assert (_status(node)["library_version"], _status(node)["repairs"]) == ("1.1.9", 0)
    assert [path.name for path in (node.mount / "versions").glob("1.1.9-*")]
    assert node.agent().run_once()
    assert node.library.stat().st_ino == before, "the version that was kept is linked again"
    assert _status(node)["library_version"] != "1.1.9"


@pytest.mark.parametrize("version", ["", "1.2 0", "../x", "a/b", "-1", "x" * 65, "1.2.0\n1.3.0", None])
def test_a_version_that_cannot_name_a_folder_is_refused(node: Node, version: str | None) -> None:
    """One line that names the value; the node keeps what it has, and the status says what that is."""
    node.agent().run_once()
    before = _status(node)
    agent = _other(node, library().read_bytes() + b"\0", version)
    assert not agent.run_once()
    said = agent.ready()[1]
    assert "librarySync.libraryTag has no version" in said and "choose another tag" in said
    assert "\n" not in said
    assert node.library.read_bytes() == library().read_bytes()
    same = ("library_version", "library_sha256", "installed_at")
    assert [_status(node)[name] for name in same] == [before[name] for name in same]


@pytest.mark.parametrize("size", [0, 100, 9000])
def test_a_library_that_cannot_be_loaded_is_refused(node: Node, size: int) -> None:
    """L2: nothing on the node changes, the status names the file's fault and the version still installed."""
    node.agent().run_once()
    before = {path: path.lstat().st_ino for path in node.mount.rglob("*") if path.name != "libsync.json"}
    agent = _other(node, library().read_bytes()[:size])
    assert not agent.run_once()
    assert "the library of librarySync.libraryTag" in agent.ready()[1]
    assert "choose another tag" in agent.ready()[1]
    after = {path: path.lstat().st_ino for path in node.mount.rglob("*") if path.name != "libsync.json"}
    assert before == after
    assert _status(node)["library_sha256"] and _status(node)["ready"] is False


def test_the_status_names_no_version_of_a_file_that_is_another(node: Node) -> None:
    """With a bad library in the image and a changed one on the node, nobody can say which it is."""
    node.agent().run_once()
    node.library.unlink()
    node.library.write_bytes(b"somebody's")
    assert not _other(node, b"bad").run_once()
    assert _status(node)["library_version"] is None and _status(node)["library_sha256"] is None
