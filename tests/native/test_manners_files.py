"""The region's file and folder: any user, none there, not writable, gone; the program is told once."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rootfs
from loaderbuild import client
from test_manners_process import Waiting

pytestmark = pytest.mark.root

SimEnv = Callable[..., dict[str, str]]
START = ["init", "context"]
STARTED = ["init 0", "context 0"]


@pytest.fixture
def shared(libvgpu: Path, sim_dir: Path) -> Iterator[Path]:
    """A folder that every user reaches (those of pytest are root's alone), with what a client needs."""
    folder = Path(tempfile.mkdtemp(prefix="manners-"))
    folder.chmod(0o755)
    shutil.copytree(sim_dir, folder / "sim")
    shutil.copy(libvgpu, folder / "libvgpu.so")
    shutil.copy(client("loader_client"), folder / "client")
    (folder / "state").mkdir()
    (folder / "state").chmod(0o777)
    (folder / "containers").mkdir()
    (folder / "containers").chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def _environment(shared: Path, env: dict[str, str], **more: str) -> dict[str, str]:
    """The client's environment with every path in the shared folder."""
    return env | {
        "LD_LIBRARY_PATH": str(shared / "sim"),
        "LD_PRELOAD": str(shared / "libvgpu.so"),
        "SIMGPU_STATE": str(shared / "state/simgpu"),
        "CUDA_DEVICE_MEMORY_LIMIT": "4147m",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(shared / "containers/usage.cache"),
        **more,
    }


def _run(shared: Path, env: dict[str, str], *verbs: str, uid: int = 0) -> tuple[list[str], str, int]:
    done = subprocess.run(
        [str(shared / "client"), *verbs],
        env=env,
        user=uid,
        group=uid,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.stdout.splitlines(), done.stderr, done.returncode


@pytest.fixture(autouse=True)
def _only_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as other users")


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize(("first", "second"), [(0, 1024), (1024, 0), (1024, 1025)])
def test_users_of_a_container_share_one_ledger(
    first: int, second: int, umask: int, shared: Path, sim_env: SimEnv
) -> None:
    """Whoever makes the file, processes of other users are held to what it leaves (B141, B143)."""
    env = _environment(shared, sim_env())
    options = {"user": first, "group": first, "extra_groups": [], "umask": umask}
    with Waiting(env, *START, "alloc:3072", program=shared / "client", **options) as one:
        assert one.lines == [*STARTED, "alloc 3072 0"]
        assert _run(shared, env, *START, "alloc:2048", uid=second) == ([*STARTED, "alloc 2048 2"], "", 0)
    assert _run(shared, env, *START, "alloc:3072", uid=second) == ([*STARTED, "alloc 3072 0"], "", 0)


def _assert_refused_once(answer: tuple[list[str], str, int], path: Path) -> None:
    out, err, status = answer
    assert (out[0], status) == ("init 800", 0)
    assert [line for line in out[1:] if line.endswith(" 0")] == []
    assert len(err.splitlines()) == 1 and str(path) in err


def test_a_missing_folder_is_a_refused_start(shared: Path, sim_env: SimEnv) -> None:
    """Without the folder the start is refused in one line that names it; nothing crashes (B145)."""
    path = shared / "nowhere/usage.cache"
    env = _environment(shared, sim_env(), CUDA_DEVICE_MEMORY_SHARED_CACHE=str(path))
    _assert_refused_once(_run(shared, env, *START, "alloc:3072", "alloc:64"), path)


def test_a_folder_that_vanishes_changes_nothing_for_those_running(shared: Path, sim_env: SimEnv) -> None:
    """A process whose region is deleted stays limited; the next one is refused or finds its bytes (B145)."""
    env = _environment(shared, sim_env())
    verbs = [*START, "alloc:3072"]
    with Waiting(env, *verbs, program=shared / "client", after=["alloc:2048", "alloc:64"]) as one:
        shutil.rmtree(shared / "containers")
        path = shared / "containers/usage.cache"
        _assert_refused_once(_run(shared, env, *START, "alloc:64"), path)
        (shared / "containers").mkdir(mode=0o777)
        # The file is made anew; what the running process holds is charged to it.
        assert _run(shared, env, *START, "alloc:2048") == ([*STARTED, "alloc 2048 2"], "", 0)
    assert one.rest == ["alloc 2048 2", "alloc 64 0"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_file_that_may_not_be_used_is_a_refused_start(what: str, shared: Path, sim_env: SimEnv) -> None:
    """EACCES on the cache file or its folder: no crash, no quota lifted, one line (B146)."""
    path = shared / "containers/usage.cache"
    env = _environment(shared, sim_env())
    if what == "file":
        assert _run(shared, env, *START)[0] == STARTED
        path.chmod(0o600)
    else:
        (shared / "containers").chmod(0o700)
    _assert_refused_once(_run(shared, env, *START, "alloc:64", uid=1024), path)


@pytest.mark.parametrize("kind", ["plain", "read-only", "stale lock"])
def test_tmp_need_not_be_writable(
    kind: str, libvgpu: Path, sim_dir: Path, tmp_path: Path, sim_env: SimEnv
) -> None:
    """With no path given the quota holds within 2 s: no /tmp/vgpulock, /tmp read-only, or a stale lock file
    of a process that is gone in it (B174)."""
    rootfs.get("bookworm")
    temporary, folder = tmp_path / "tmp", tmp_path / "test"
    for made in (temporary, folder):
        made.mkdir(mode=0o777)
    if kind == "stale lock":
        (temporary / "vgpulock").mkdir()
        (temporary / "vgpulock/lock").write_text("999999")
    shutil.copy(client("loader_client"), folder / "client")
    words = rootfs.command(
        "bookworm",
        ["/test/client", *START, "total", "alloc:3072", "alloc:2048"],
        preload=rootfs.LIBRARY,
        binds=[(libvgpu, rootfs.LIBRARY), (sim_dir, "/sim"), (folder, "/test"), (temporary, "/tmp")],
        read_only="/tmp" if kind == "read-only" else "",
        env={
            "LD_LIBRARY_PATH": "/sim",
            "SIMGPU_STATE": "/test/simgpu.state",
            "CUDA_DEVICE_MEMORY_LIMIT": "4147m",
        },
        scratch=tmp_path,
    )
    began = time.monotonic()
    done = rootfs.run(words)
    assert time.monotonic() - began < 2
    assert (done.stdout.splitlines(), done.stderr) == (
        [*STARTED, "total 0 4147", "alloc 3072 0", "alloc 2048 2"],
        "",
    )
