"""Which folder may be <mount>: none of the system's, nor one with somebody else's cache folders.

Rules are asked and copies in a temporary folder are used; nothing here names a real folder to the installer.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from libsync_node import UIDS, Node

from isolator import mountpath
from isolator.errors import IsolatorError, UsageError
from isolator.libsync import __main__, mount
from isolator.monitor import settings as monitor
from isolator.webhook import settings as webhook

OWN = "/usr/local/vgpu"
GOOD = (
    OWN,
    "/home/kubernetes/bin/nvidia/vgpu",
    "/var/lib/vgpu",
    "/opt/vgpu",
    "/tmp/a",
    "/vgpu",
    "/etcetera/a",
)
BAD = (*mountpath.SYSTEM_FOLDERS, *mountpath.SYSTEM_TREES, *(f"{t}/a/b" for t in mountpath.SYSTEM_TREES))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("path", GOOD)
def test_a_folder_of_its_own_is_accepted(path: str) -> None:
    """Below a system folder is where such folders are, save below the trees that are no place for one."""
    assert mountpath.fault(path) is None and mountpath.check(path) == path
    assert __main__.parser().parse_args(["--mount", path]).mount == Path(path)


@pytest.mark.parametrize("path", BAD)
def test_system_folders_are_refused_everywhere(path: str) -> None:
    """Installer, webhook and monitor give the same line, which says what to write."""
    line = mountpath.fault(path)
    assert line is not None and f"'{path}' is" in line and line.endswith("like /usr/local/vgpu")
    with pytest.raises(UsageError) as ended:
        __main__.parser().parse_args(["--mount", path])
    assert str(ended.value) == f"--mount: {line}"
    for part, more in ((webhook, {"namespace": "n"}), (monitor, {"node_name": "n"})):
        with pytest.raises(UsageError) as refused:
            part.load(mount=path, **more)
        assert str(refused.value) == f"{part.PREFIX}MOUNT: {line}"


def test_etc_is_refused_with_its_reason() -> None:
    """The preload file of that folder is the node's own."""
    assert mountpath.fault("/etc") == (
        "'/etc' is a system folder: its ld.so.preload would act on every program of this node;"
        " give a folder of its own, like /usr/local/vgpu"
    )


def test_a_link_into_a_system_folder_is_refused(tmp_path: Path) -> None:
    """Judged by where it leads; the installer's first step, asked alone."""
    (tmp_path / "on").symlink_to("/etc")
    for path in (tmp_path / "on", tmp_path / "on" / "vgpu"):
        with pytest.raises(IsolatorError, match="system folder"):
            mount.check_place(path)
    mount.check_place(tmp_path / "vgpu")


@pytest.mark.parametrize(("name", "child"), [("containers", "registries.d"), ("versions", "current")])
def test_a_folder_of_somebody_else_is_left_as_it_is(node: Node, name: str, child: str) -> None:
    """A mount with such a folder is refused before anything is written: no mode changes, no file comes."""
    (node.mount / name / child).mkdir(parents=True, mode=0o755)
    node.mount.chmod(0o755)
    before = node.modes()
    agent = node.agent(group=0)
    assert not agent.run_once()
    line = agent.ready()[1]
    assert "\n" not in line and f"{node.mount / name} is somebody else's folder" in line and child in line
    assert node.modes() == before and stat.S_IMODE(node.mount.stat().st_mode) == 0o755


def test_what_release_1_1_left_is_taken_over(node: Node) -> None:
    """Its files and folders are known, whatever the mode of its caches' folder."""
    for folder in (f"containers/{UIDS[0]}_main", "license", "vgpuvalidator", "vgpu"):
        (node.mount / folder).mkdir(parents=True)
    node.library.write_bytes(b"old")
    node.preload.write_text(f"{node.library}\n")
    assert node.agent().run_once()
    assert node.modes()["containers"] == "1777"


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_containers_of_ours_keep_strangers(node: Node, mode: int) -> None:
    """After a report of ours, or with the mode that releases before gave it, a stray file refuses nothing."""
    if mode == 0o755:
        assert node.agent().run_once()
    (node.containers / "stray").mkdir(parents=True)
    node.containers.chmod(mode)
    assert node.agent().run_once() and node.modes()["containers"] == "1777"


def test_a_mount_that_cannot_be_made_says_so_once(node: Node) -> None:
    """The path is named once, with what to do."""
    node.mount.write_text("")
    agent = node.agent()
    assert not agent.run_once()
    line = agent.ready()[1]
    assert line.startswith(f"cannot make the mount folder {node.mount}: File exists; ")
    assert line.count(str(node.mount)) == 1 and "paths.containerVgpuMount" in line


def test_a_first_installation_tells_what_it_created(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was missing before there was anything."""
    caplog.set_level("INFO")
    assert node.agent().run_once()
    first = next(record.message for record in caplog.records if "libvgpu.so" in record.message)
    assert first.startswith("created: containers, versions, ") and "missing" not in caplog.text
