"""The installer as a process: its loop, signals, probes, status file and removal."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from libsync_node import ROOT, UIDS, Node, running

from isolator.errors import UsageError
from isolator.libpath import library
from isolator.libsync import __main__, files, install


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _status(node: Node) -> dict[str, object]:
    return dict(json.loads((node.mount / "libsync.json").read_text()))


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()
    except OSError:
        return 0, ""


def _until(check: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def test_nothing_but_the_standard_library_is_loaded(node: Node) -> None:
    """It idles on every node: no package of ours or others' that costs memory is imported."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import isolator.libsync.__main__, "
        "isolator.libsync.endpoint, isolator.libsync.uninstall; "
        "print(*sorted({n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert {"__main__", "isolator"} >= set(done.stdout.split())


def test_one_pass_writes_the_status_for_the_monitor(node: Node) -> None:
    """Every field of the schema, with the times of this pass."""
    before = time.time()
    assert node.agent().run_once()
    found = _status(node)
    source = install.load(library(), os.uname().machine, "1.2.0")
    assert (1, "n1", source.sha256) == (found["schema"], found["node"], found["library_sha256"])
    assert found["library_version"] and found["ready"] is True and found["problem"] is None
    assert before - 1 <= float(str(found["installed_at"])) <= float(str(found["verified_at"])) <= time.time()
    counts = ("repairs", "caches", "removed_caches", "oversized_caches", "removed_foreign_files")
    assert [found[name] for name in counts] == [0] * 5
    assert node.modes()["libsync.json"] == "644"


def test_repairs_are_counted_and_a_first_installation_or_upgrade_is_none(node: Node) -> None:
    """The count is what somebody else broke, also between two processes."""
    agent = node.agent(node.build(0))
    agent.run_once()
    node.library.unlink()
    node.preload.write_text("/other\n")
    agent.run_once()
    assert _status(node)["repairs"] == 2
    node.preload.unlink()
    second = node.agent(node.build(0))
    second.run_once()
    assert _status(node)["repairs"] == 1
    node.agent(node.build(1)).run_once()
    assert _status(node)["repairs"] == 0


def test_a_broken_status_file_is_replaced(node: Node) -> None:
    """Whatever somebody left there."""
    node.agent().run_once()
    for text in ("", "{", "[]", '{"schema": 99}', '{"schema": 1, "agent_started": "x", "ready": 7}'):
        (node.mount / "libsync.json").write_text(text)
        assert node.agent().run_once() and _status(node)["ready"] is True


def test_a_bad_image_leaves_what_is_installed_and_says_so(node: Node) -> None:
    """Not ready, one line, and the old library stays whole."""
    node.agent().run_once()
    bad = node.folder / "bad.so"
    bad.write_bytes(library().read_bytes()[:9000])
    agent = node.agent(bad)
    assert not agent.run_once()
    assert (agent.ready()[0], "truncated" in agent.ready()[1]) == (False, True)
    assert _status(node)["ready"] is False and "truncated" in str(_status(node)["problem"])
    assert node.library.read_bytes() == library().read_bytes()


def test_a_preload_file_of_another_path_is_refused(node: Node) -> None:
    """B111, B114: a ConfigMap and a mount of two values would load nothing, silently."""
    right, wrong = node.folder / "right", node.folder / "wrong"
    right.write_text(f"{node.mount}/libvgpu.so\n")
    wrong.write_text("/usr/local/vgpu/libvgpu.so\n")
    agent = node.agent(preload=wrong)
    assert not agent.run_once()
    assert "'/usr/local/vgpu/libvgpu.so'" in agent.ready()[1] and "containerVgpuMount" in agent.ready()[1]
    assert node.agent(preload=right).run_once()


def test_the_process_installs_at_once_answers_and_ends_at_once(node: Node) -> None:
    """First copy within a second of its start, probes, SIGHUP for a pass now, SIGTERM."""
    port = _port()
    began = time.monotonic()
    with running(node.command("--interval", "60", "--listen", f"127.0.0.1:{port}")) as child:
        _until(lambda: _ask(port, "/readyz")[0] == 200)
        assert time.monotonic() - began < 3  # a loaded machine; the benchmark has the target of one second
        assert _ask(port, "/healthz") == (200, "ok")
        assert _ask(port, "/metrics")[0] == 404
        node.library.unlink()
        child.send_signal(signal.SIGHUP)
        _until(lambda: _status(node)["repairs"] == 1)  # written after the library
        assert node.library.exists()
        node.library.unlink()
        (node.library / "x").mkdir(parents=True)
        child.send_signal(signal.SIGHUP)
        _until(lambda: _ask(port, "/readyz")[0] == 503)
        assert "is a folder with something in it" in _ask(port, "/readyz")[1]
        began = time.monotonic()
        child.terminate()
        assert child.wait(5) == 0 and time.monotonic() - began < 1


def test_drift_is_repaired_within_the_interval(node: Node) -> None:
    """Without any signal."""
    with running(node.command("--interval", "0.2", "--listen", f"127.0.0.1:{_port()}")):
        _until(node.library.exists)
        node.library.write_bytes(b"altered")
        _until(lambda: node.library.read_bytes() == library().read_bytes(), 3)


def test_slow_clients_do_not_keep_the_probes_from_answering(node: Node) -> None:
    """Connections that send nothing are bounded in number and in time."""
    port = _port()
    with running(node.command("--listen", f"127.0.0.1:{port}")) as child:
        _until(lambda: _ask(port, "/readyz")[0] == 200)
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        try:
            slow[0].sendall(b"GET /rea")
            _until(lambda: _ask(port, "/readyz")[0] == 200, 8)
            threads = len(os.listdir(f"/proc/{child.pid}/task"))
            assert threads <= 20
        finally:
            for each in slow:
                each.close()


def test_once_answers_by_its_status_and_bad_options_by_one_line(node: Node) -> None:
    """0 installed, 1 a problem, 2 a mistake on the command line."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(node.command(*words), cwd=ROOT, capture_output=True, text=True)

    assert run("--once").returncode == 0
    failed = run("--once", "--library", "/none.so")
    assert failed.returncode == 1 and "/none.so" in failed.stderr
    bad = run("--listen", "9395", "--once")
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1, bad.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "cannot listen" in done.stderr


@pytest.mark.parametrize("mount", ["", "/", "vgpu", "//vgpu", "/a/../b", "/a/", "/a b", "/a:b", "/a//b"])
def test_a_mount_that_no_preload_file_could_name_is_refused(mount: str) -> None:
    """B111: parsed only; one line says what a path must be."""
    with pytest.raises(UsageError, match=re.escape(f"--mount: {mount!r} is not an absolute, clean path")):
        __main__.parser().parse_args(["--mount", mount])


@pytest.mark.parametrize("words", ["--interval 0", "--interval x", "--listen 9395", "--listen :99999"])
def test_other_bad_options_are_refused(words: str) -> None:
    """Each with its own reason."""
    option, value = words.split()
    with pytest.raises(UsageError, match=f"^{option}: '{value}' is not "):
        __main__.parser().parse_args(words.split())


def test_a_stuck_pass_is_not_ready_and_in_the_end_not_healthy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs is told by the probes, which another thread answers."""
    agent = node.agent(interval=10.0)
    assert agent.run_once() and agent.ready()[0] and agent.healthy()[0]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert (agent.ready()[0], agent.healthy()[0]) == (False, True)
    monkeypatch.setattr(time, "monotonic", lambda: now + 400)
    assert not agent.healthy()[0]


def test_removal_takes_everything_off_and_stays_removed(node: Node) -> None:
    """Dead pods' folders go with it; a second pass finds nothing to do."""
    node.agent().run_once()
    (node.containers / f"{UIDS[1]}_main").mkdir()
    agent = node.agent(remove=True)
    assert agent.run_once() and agent.ready() == (True, "removed")
    assert list(node.mount.iterdir()) == []
    assert agent.run_once() and list(node.mount.iterdir()) == []
    node.mount.rmdir()
    assert node.agent(remove=True).run_once()


def test_removal_waits_for_the_last_injected_pod(node: Node) -> None:
    """A live pod's container restarts with the library, so all of it stays and the status says why."""
    node.agent().run_once()
    sha = _status(node)["library_sha256"]
    folder = node.containers / f"{UIDS[0]}_main"
    folder.mkdir()
    agent = node.agent(remove=True)
    assert agent.run_once()
    assert "kept: 1 injected container(s)" in agent.ready()[1] and folder.name in agent.ready()[1]
    assert node.library.exists() and node.preload.exists() and folder.exists()
    assert sha == _status(node)["library_sha256"] and "kept:" in str(_status(node)["problem"])
    (node.pods / UIDS[0]).rename(node.pods / UIDS[4])
    assert agent.run_once() and agent.ready()[1] == "removed"


def test_removal_keeps_all_where_the_pods_cannot_be_seen(node: Node) -> None:
    """Better left behind than taken from under a pod; without any cache folder there is no doubt."""
    node.agent().run_once()
    folder = node.containers / f"{UIDS[1]}_main"
    folder.mkdir()
    (node.pods / UIDS[0]).rmdir()
    agent = node.agent(remove=True)
    assert agent.run_once() and "may be in use" in agent.ready()[1]
    assert node.library.exists() and folder.exists()
    folder.rmdir()
    assert agent.run_once() and not node.library.exists()


def test_removal_leaves_what_is_not_ours_and_says_so(node: Node) -> None:
    """A foreign file below containers keeps the folder; it is told as a problem."""
    node.agent().run_once()
    (node.containers / "README").write_text("theirs")
    agent = node.agent(remove=True)
    assert not agent.run_once()
    assert "containers is left" in agent.ready()[1] and not node.library.exists()
    assert (node.containers / "README").exists() and not node.temporaries()
    assert files.TEMPORARY not in str(list(node.mount.iterdir()))
