"""What the doctor reads of a container: its root from outside, its mounts, programs, driver and variables."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE

from isolator.doctor import container, pod, pod_driver, program
from isolator.doctor.inside import Identity, Inside, parse_mounts
from isolator.doctor.pod_limit import Limit, parse
from isolator.doctor.report import Report

MIB = 1 << 20


@pytest.fixture
def inside(tmp_path: Path) -> Inside:
    """Process 7 of a process table in a folder, with an empty root and this process's identity."""
    place = tmp_path / "7"
    (place / "root").mkdir(parents=True)
    (place / "mountinfo").write_text("1 0 8:1 / / rw - ext4 /dev/a rw\n")
    (place / "status").write_text("Uid:\t1000\t1000\nGid:\t1000\t1000\nGroups:\t44 \n")
    (place / "environ").write_bytes(b"A=1\0A=2\0B=x=y\0junk\0")
    return Inside(7, tmp_path)


def test_links_are_followed_within_the_containers_root(inside: Inside, tmp_path: Path) -> None:
    """Absolute links, climbing ones and links in the middle stay inside; a circle is an error."""
    root = inside.root
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("theirs")
    (root / "link").symlink_to("/etc/passwd")
    (root / "climb").symlink_to("../../../../../../etc/passwd")
    (root / "folder").symlink_to("/etc")
    (root / "circle").symlink_to("/circle")
    for name in ("/link", "/climb", "/folder/passwd", "/etc/../link"):
        assert inside.at(name) == root / "etc/passwd"
        assert inside.read(name) == b"theirs"
    with pytest.raises(OSError, match="Too many levels"):
        inside.at("/circle")
    assert inside.stat("/none/such") is None
    assert inside.shown(inside.at("/link")) == "/etc/passwd"


def test_what_is_no_file_is_not_waited_for(inside: Inside) -> None:
    """A FIFO or a folder of the tenant's in a file's place is an error at once."""
    os.mkfifo(inside.root / "fifo")
    (inside.root / "folder").mkdir()
    for name in ("/fifo", "/folder"):
        with pytest.raises(OSError):
            inside.read(name)


def test_rights_are_those_of_the_process(inside: Inside) -> None:
    """Owner, group and others by mode bits, closed folders on the way, root may all."""
    path = inside.root / "a/file"
    path.parent.mkdir()
    path.touch(0o640)
    assert inside.identity == Identity(1000, frozenset({1000, 44}))
    assert "mode 640 of uid 0 keeps uid 1000 out" in (inside.closed_to("/a/file", 4) or "")
    os.chown(path, 0, 44)
    assert inside.closed_to("/a/file", 4) is None
    assert inside.closed_to("/a/file", 6) is not None
    path.parent.chmod(0o700)
    assert inside.closed_to("/a/file", 4) == "folder /a is closed to uid 1000"
    assert Identity(0, frozenset()).may(path.stat(), 7)


def test_mounts_and_variables_are_parsed(inside: Inside) -> None:
    """Blanks in mount points, optional fields, and the first of two variables of a name."""
    text = "36 35 98:0 / /a\\040b rw,noexec shared:1 - tmpfs none ro,size=1\nshort line\n"
    (mount,) = parse_mounts(text)
    assert (mount.point, mount.options, mount.super_options) == (
        "/a b",
        {"rw", "noexec"},
        {"ro", "size=1"},
    )
    assert inside.environment == {"A": "1", "B": "x=y"}


def test_a_program_is_known_by_its_header() -> None:
    """This interpreter is dynamic and of 64 bits; our own library names no loader; a damaged one is none."""
    raw = Path(sys.executable).resolve().read_bytes()[: 1 << 16]
    found = program.parse(raw)
    assert found is not None and (found.bits, found.is_musl) == (64, False)
    assert found.machine == os.uname().machine and str(found.loader).startswith("/lib")
    rand = random.Random(7)
    for _ in range(2000):
        damaged = bytearray(raw[: rand.choice((10, 64, 200, 4096))])
        for _ in range(rand.randrange(1, 9)):
            damaged[rand.randrange(len(damaged))] = rand.randrange(256)
        program.parse(bytes(damaged))  # whatever it says, it says without an error
    assert program.parse(b"#!/bin/sh\n" * 20) is None


def test_this_process_is_seen() -> None:
    """Its parent, its C library and its version; it has neither our library nor a device."""
    found = program.look(os.getpid())
    assert (found.parent, found.library, found.uses_gpu) == (os.getppid(), None, False)
    assert found.libc is not None
    assert (program.glibc_version(Path(found.libc).read_bytes()) or (0, 0)) >= (2, 17)


def _carried(inside: Inside, **variables: str) -> container.Carried:
    (inside.place / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in variables.items()))
    return container.look(Inside(7, inside.place.parent))


def test_the_preload_file_is_split_as_the_loader_does() -> None:
    """Blanks, colons, lines and comments."""
    assert container.listed("# no\n/a/b.so:/c.so\t/d.so # x\n\n") == ["/a/b.so", "/c.so", "/d.so"]
    assert container.ours(["/a/libvgpu.so.1", "/b/libvgpu.so"]) == "/b/libvgpu.so"


@pytest.mark.parametrize(
    ("word", "cause"),
    [("TRUE", "control_disabled"), ("0", "not_injected"), ("maybe", "not_injected")],
)
def test_an_opt_out_is_one_that_the_webhook_takes(inside: Inside, word: str, cause: str) -> None:
    """Any other word does not keep the webhook away: then it is told that nothing was injected."""
    carried = _carried(inside, CUDA_DISABLE_CONTROL=word, GPU_PORTION="0.5")
    report = Report("pod", "")
    assert not pod._is_there(report, carried)
    assert [finding.cause.id for finding in report.findings] == [cause]


def test_a_driver_where_the_loader_does_not_look_is_named(inside: Inside) -> None:
    """The lab's ERROR_LIBRARY_NOT_FOUND: the driver is in GKE's folder and LD_LIBRARY_PATH lacks it."""
    folder = inside.root / "usr/local/nvidia/lib64"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").write_text("x")
    report = Report("pod", "PID 7")
    assert pod_driver.driver(report, _carried(inside, PATH="/bin")) is None
    (finding,) = report.findings
    assert (finding.cause.id, "/usr/local/nvidia/lib64" in finding.detail) == ("no_driver", True)
    found = _carried(inside, LD_LIBRARY_PATH="/none:/usr/local/nvidia/lib64")
    assert pod_driver.driver(Report("pod", ""), found) == "/usr/local/nvidia/lib64/libcuda.so.1"


def test_the_loaders_cache_is_searched(inside: Inside) -> None:
    """A name in /etc/ld.so.cache counts where its file is there; a link to nothing does not."""
    (inside.root / "etc").mkdir()
    (inside.root / "opt").mkdir()
    (inside.root / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\0..\0/opt/libcuda.so.1\0")
    (inside.root / "opt/libcuda.so.1").symlink_to("libcuda.so.535.1.2")
    report = Report("pod", "")
    assert pod_driver.driver(report, _carried(inside, A="1")) is None and report.findings
    (inside.root / "opt/libcuda.so.535.1.2").write_text("x")
    assert pod_driver.driver(Report("pod", ""), _carried(inside, A="1")) == "/opt/libcuda.so.1"


@pytest.mark.parametrize(
    ("variables", "version", "expect"),
    [
        ({"CUDA_VERSION": "12.4.1"}, "550.90.07", []),
        ({"CUDA_VERSION": "12.9.0"}, "535.183.01", []),  # a minor version is no matter
        ({"CUDA_VERSION": "13.0.0"}, "570.86.15", ["driver_too_old"]),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=12.4 brand=tesla,driver>=470"}, "470.82.01", ["driver_too_old"]),
        ({}, "470.82.01", []),
    ],
)
def test_the_images_cuda_is_held_against_the_driver(
    inside: Inside, variables: dict[str, str], version: str, expect: list[str]
) -> None:
    """By /proc/driver/nvidia/version and the release notes' table of branches."""
    place = inside.root / "proc/driver/nvidia"
    place.mkdir(parents=True)
    text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue\n"
    (place / "version").write_text(text)
    report = Report("pod", "")
    pod_driver.version(report, _carried(inside, PATH="/bin", **variables), "/usr/lib/libcuda.so.1")
    assert [finding.cause.id for finding in report.findings] == expect


def test_limits_are_the_librarys_own() -> None:
    """The C parser's answers; the lowest of file and variable holds for each device."""
    assert parse(b"4147m\n") == (0, 4147 * MIB)
    assert [parse(raw)[0] for raw in (b"", b"abc", b"4147", b"99999999999g")] == [61, 22, 22, 34]
    limit = Limit(4096 * MIB, {-1: 2048 * MIB, 1: 8192 * MIB})
    assert [limit.of(0), limit.of(1)] == [2048 * MIB, 4096 * MIB]
    assert Limit().of(0) is None


def test_no_probe_runs_code_of_the_tenants() -> None:
    """Files of a container are read, never loaded: no module that looks into one can load a library."""
    for name in ("inside", "container", "program", "pod_loading", "pod_limit", "pod_region", "pod_driver"):
        text = (PACKAGE / "doctor" / f"{name}.py").read_text()
        assert not [word for word in ("ctypes", "dlopen", "subprocess", "importlib") if word in text], name
