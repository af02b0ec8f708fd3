"""The installer on file systems that refuse: full, read-only, noexec; and under its own preload file."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from libsync_node import ROOT, UIDS, Node

pytestmark = pytest.mark.root
UNSHARE = ["unshare", "--mount", "--propagation", "private"]


@cache
def _why_not() -> str:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return "needs root and unshare"
    command = [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    if _why_not():
        pytest.skip(_why_not())
    node = Node(tmp_path)
    node.mount.mkdir()
    return node


def _inside(node: Node, *steps: str) -> subprocess.CompletedProcess[str]:
    """Runs shell text in a mount namespace; `$isolator` is one pass of this node's installer."""
    installer = shlex.join(node.command("--once"))
    text = f'cd {ROOT}; vgpu={node.mount}; isolator() {{ {installer} "$@"; }}\n' + "\n".join(steps)
    return subprocess.run([*UNSHARE, "sh", "-c", text], capture_output=True, text=True, timeout=60)


def test_a_read_only_mount_is_told_with_the_value_to_set(node: Node) -> None:
    """B113: also where the whole installation is already there, as on a card that was cloned."""
    for first in ("", "isolator 2>/dev/null"):
        done = _inside(
            node,
            first,
            "mount --bind $vgpu $vgpu; mount -o remount,bind,ro $vgpu",
            "isolator --log-level error",
        )
        assert done.returncode == 1
        assert f"{node.mount} is on a read-only file system: set paths.containerVgpuMount" in done.stderr
        assert "/home/kubernetes/bin/nvidia/vgpu" in done.stderr and done.stderr.count("\n") == 1


def test_a_read_only_parent_is_told_with_the_value_to_set(node: Node) -> None:
    """COS: /usr/local itself cannot be written."""
    node.mount.rmdir()
    done = _inside(
        node,
        f"mount --bind {node.folder} {node.folder}; mount -o remount,bind,ro {node.folder}",
        "isolator --log-level error",
    )
    assert done.returncode == 1 and "read-only file system: set paths.containerVgpuMount" in done.stderr


def test_a_noexec_mount_is_told_though_every_byte_is_right(node: Node) -> None:
    """The loader would skip the library in every container: not ready."""
    done = _inside(
        node,
        "mount -t tmpfs -o noexec none $vgpu",
        "isolator --log-level error; echo $?",
        "cat $vgpu/libsync.json; sha256sum $vgpu/libvgpu.so >&2",
    )
    assert done.stdout.startswith("1\n") and '"ready": false' in done.stdout
    assert "is mounted noexec, so no container can load the library" in done.stdout
    assert "set paths.containerVgpuMount" in done.stderr and "libvgpu.so" in done.stderr


@pytest.mark.parametrize("how", ["blocks", "inodes"])
def test_a_full_disk_keeps_the_old_library_and_heals_when_there_is_room(node: Node, how: str) -> None:
    """The upgrade fails in one line, the old file stays whole, the next pass with room installs."""
    new = node.build(300_000)
    size = "size=800k" if how == "blocks" else "size=8m,nr_inodes=9"
    fill = {
        "blocks": ["dd if=/dev/zero of=$vgpu/fill bs=4k 2>/dev/null", "rm $vgpu/fill"],
        "inodes": ["i=0; while touch $vgpu/f$i 2>/dev/null; do i=$((i+1)); done", "rm $vgpu/f*"],
    }[how]
    done = _inside(
        node,
        f"mount -t tmpfs -o {size} none $vgpu",
        "isolator --log-level error || exit 9",
        "old=$(sha256sum < $vgpu/libvgpu.so)",
        fill[0],
        f"isolator --log-level error --library {new} && exit 8",
        '[ "$old" = "$(sha256sum < $vgpu/libvgpu.so)" ] || exit 7',
        "[ -z \"$(find $vgpu -name '.libsync-*')\" ] || exit 6",
        fill[1],
        "rm -rf $vgpu/versions" if how == "blocks" else "mount -o remount,nr_inodes=30 $vgpu",
        f"isolator --log-level error --library {new} || exit 5",
        f"cmp $vgpu/libvgpu.so {new} || exit 4",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert "no space left at" in lines[0] and "what is installed stays" in lines[0]


def test_a_full_disk_does_not_unready_what_is_verified(node: Node) -> None:
    """Only the status file cannot be written, and that is said."""
    done = _inside(
        node,
        "mount -t tmpfs -o size=600k none $vgpu",
        "isolator --log-level error || exit 9",
        "dd if=/dev/zero of=$vgpu/fill bs=4k 2>/dev/null",
        "isolator",
    )
    assert done.returncode == 0 and "status not written: no space left" in done.stderr


def test_it_replaces_the_library_that_it_runs_under(node: Node) -> None:
    """B109: its own ld.so.preload names the file; the tool that copies is not hurt and nothing runs bare."""
    builds = [node.build(number) for number in (0, 1, 2)]
    done = _inside(
        node,
        "set -e",
        f"isolator --log-level error --library {builds[0]}",
        # A copy of /etc: the machine's own must not get such a file.
        f"cp -a /etc {node.folder}/etc && touch {node.folder}/etc/ld.so.preload",
        f"mount --bind {node.folder}/etc /etc && mount --bind $vgpu/ld.so.preload /etc/ld.so.preload",
        f'{sys.executable} -c \'print("libvgpu.so" in open("/proc/self/maps").read())\'',
        *(f"isolator --log-level error --library {build}" for build in (*builds, *builds)),
        f'{sys.executable} -c \'print("libvgpu.so" in open("/proc/self/maps").read())\'',
        f"cmp $vgpu/libvgpu.so {builds[2]}",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")


def test_a_mount_below_a_cache_folder_is_not_entered(node: Node) -> None:
    """Of the same file system too: what is mounted there is not the tenant's."""
    inner = node.containers / f"{UIDS[0]}_main" / "inner"
    inner.mkdir(parents=True)
    (node.folder / "data").mkdir()
    (node.folder / "data" / "keep").write_text("theirs")
    done = _inside(
        node,
        f"mount --bind {node.folder}/data {inner}",
        f"dd if=/dev/zero of={inner.parent}/fill bs=1M count=20 2>/dev/null",
        "isolator --log-level error || exit 9",
        f"ls {inner.parent}",
    )
    assert (done.returncode, done.stdout) == (0, "inner\n"), done.stderr
    assert (node.folder / "data" / "keep").read_text() == "theirs"


@pytest.mark.parametrize("uid", [UIDS[0], UIDS[1]], ids=["live", "gone"])
def test_a_mount_in_place_of_a_cache_folder_is_left_alone(node: Node, uid: str) -> None:
    """Whatever its size, and whether or not its pod is gone: what is mounted there is not the tenant's."""
    place, data = node.containers / f"{uid}_main", node.folder / "data"
    place.mkdir(parents=True)
    data.mkdir()
    (data / "fill").write_bytes(b"x" * (20 << 20))
    done = _inside(node, f"mount --bind {data} {place}", "isolator", "isolator --remove; true")
    assert (done.returncode, os.listdir(data)) == (0, ["fill"]), done.stderr


def test_the_chart_capabilities_are_enough(node: Node) -> None:
    """Root without all but CHOWN, DAC_OVERRIDE and FOWNER: installs, repairs, and cleans up after any uid."""
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    folder = node.containers / f"{UIDS[1]}_main"
    (folder / "private").mkdir(parents=True)
    (folder / "private" / "file").write_text("x")
    for path in (folder / "private" / "file", folder / "private", folder):
        os.chown(path, 1000, 1000)
        path.chmod(0o700)
    os.chown(node.mount, 0, 0)
    keep = "-all,+chown,+dac_override,+fowner"
    drop = f"setpriv --bounding-set={keep} --inh-caps=-all --no-new-privs"
    installer = shlex.join(node.command("--once", "--remove", "--log-level", "error"))
    install = shlex.join(node.command("--once", "--log-level", "error"))
    done = _inside(
        node,
        f"{drop} {install} || exit 9",
        "chown 1000:1000 $vgpu/libvgpu.so $vgpu/containers",
        f"{drop} {install} || exit 8",
        "stat -c %u $vgpu/libvgpu.so $vgpu/containers",
        f"{drop} {installer} || exit 7",
    )
    assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr
    assert list(node.mount.iterdir()) == []
