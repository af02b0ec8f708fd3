"""`isolator doctor node` on a node with one thing broken: it names that thing, and nothing else."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doctordoc
import pytest
from conftest import ROOT
from libsync_node import UIDS, Node
from region_files import RegionFile, Slot, Spec, folder

from isolator.doctor import causes, node
from isolator.libpath import library

MIB = 1 << 20
Break = Callable[[Node], None]


def _status(place: Node, **changes: object) -> None:
    path = place.mount / "libsync.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _replace(place: Node, data: bytes, told: bool = False) -> None:
    """Another library; `told`: the installer's report names it."""
    place.library.unlink()
    place.library.write_bytes(data)
    place.library.chmod(0o755)
    if told:
        _status(place, library_sha256=hashlib.sha256(data).hexdigest())


def _of_another_system() -> bytes:
    """A library that a reader takes for whole and the loader does not: its header names another system."""
    raw = bytearray(library().read_bytes())
    raw[7] = 9
    return bytes(raw)


def _region(place: Node, spec: Spec, number: int = 0) -> RegionFile:
    return RegionFile(folder(place.mount, UIDS[number]) / "usage.cache", spec)


def _garbage(place: Node) -> None:
    (folder(place.mount, UIDS[1]) / "usage.cache").write_text("no region at all" * 99)


def _unlink(name: str) -> Break:
    return lambda place: (place.mount / name).unlink()


def _text(name: str, text: str) -> Break:
    return lambda place: (place.mount / name).write_text(text) and None


def _folder(place: Node) -> None:
    place.library.unlink()
    place.library.mkdir()


def _foreign(place: Node) -> None:
    _replace(place, library("aarch64" if os.uname().machine == "x86_64" else "x86_64").read_bytes())


def _refused(place: Node) -> None:
    _region(place, Spec(state=3, slots=[Slot(alive=False)])).close()


BROKEN: dict[str, tuple[str, Break, str]] = {
    "sound": ("sound", lambda place: None, ""),
    "sound tenant": ("sound, one tenant", lambda place: _region(place, Spec()).close(), ""),
    "no report": ("no libsync.json", _unlink("libsync.json"), "libsync_absent"),
    "foreign report": ("libsync.json of another form", _text("libsync.json", "[1"), "libsync_absent"),
    "not ready": (
        "the installer is not ready",
        lambda place: _status(place, ready=False, problem="no space left at /usr/local/vgpu"),
        "libsync_not_ready",
    ),
    "stale": (
        "the installer's last look is an hour old",
        lambda place: _status(place, verified_at=time.time() - 3600),
        "libsync_stale",
    ),
    "no library": ("no library", _unlink("libvgpu.so"), "node_library_missing"),
    "folder": ("a folder in the library's place", _folder, "node_library_missing"),
    "truncated": (
        "library cut short",
        lambda place: _replace(place, library().read_bytes()[:30000]),
        "node_library_damaged",
    ),
    "foreign": ("library of another machine", _foreign, "node_library_foreign_arch"),
    "differs": (
        "library that libsync did not install",
        lambda place: _replace(place, library().read_bytes() + b"x"),
        "node_library_differs",
    ),
    "refused": (
        "library that the loader refuses",
        lambda place: _replace(place, _of_another_system(), told=True),
        "node_library_refused",
    ),
    "no preload": ("no preload file", _unlink("ld.so.preload"), "node_preload_wrong"),
    "other preload": (
        "preload file names another path",
        _text("ld.so.preload", "/opt/vgpu/libvgpu.so\n"),
        "node_preload_wrong",
    ),
    "no containers": ("no folder of caches", lambda place: place.containers.rmdir(), "containers_wrong"),
    "closed containers": (
        "folder of caches of mode 0755",
        lambda place: place.containers.chmod(0o755),
        "containers_wrong",
    ),
    "refused tenant": ("a tenant whose CUDA is refused", _refused, "tenant_wrong"),
    "tampered tenant": (
        "a tenant that wrote into its cache file",
        lambda place: _region(place, Spec(flags=1)).close(),
        "tenant_wrong",
    ),
    "garbage": ("a cache file of another kind (notice)", _garbage, "cache_unreadable"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node that libsync has installed."""
    for name in [name for name in os.environ if name.startswith("ISOLATOR_") or name == "NODE_NAME"]:
        monkeypatch.delenv(name)
    made = Node(tmp_path)
    made.agent().run_once()
    return made


def _said(status: int, document: dict[str, Any], expect: str) -> None:
    ids = [finding["id"] for finding in document["findings"]]
    assert ids == ([expect] if expect else []), document
    cause = causes.get(expect) if expect else None
    code = cause.code if cause is not None and not cause.notice else 0
    assert (status, document["exit_status"], document["healthy"]) == (code, code, code == 0)
    assert document["cpu_seconds"] <= 0.5


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, doctordoc.Row]]:
    """Rows of the documentation, written at the end where that is asked for."""
    rows: dict[str, doctordoc.Row] = {}
    yield rows
    names = [*BROKEN, *DOCUMENTS]
    if doctordoc.WANTED and set(names) <= set(rows):
        doctordoc.put("nodes", doctordoc.rows([rows[name] for name in names]))


def _row(table: dict[str, doctordoc.Row], name: str, fault: str, found: dict[str, Any]) -> None:
    said = ", ".join(f"`{finding['id']}`" for finding in found["findings"])
    table[name] = (fault, said, found["exit_status"], found["seconds"])


@pytest.mark.parametrize("name", BROKEN)
def test_the_doctor_names_what_is_wrong_with_a_node(
    name: str, place: Node, table: dict[str, doctordoc.Row]
) -> None:
    """Each broken node ends in its cause's exit status within a second, each sound one in silence."""
    fault, broken, expect = BROKEN[name]
    broken(place)
    command = [sys.executable, "-m", "isolator.cli", "doctor", "node", "--json", "--patience", "20"]
    command += ["--label", "15360", "--mount", str(place.mount)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.stderr == ""
    document = json.loads(done.stdout)
    _said(done.returncode, document, expect)
    assert [entry["what"] for entry in document["unchecked"]] == ["monitor"]
    _row(table, name, fault, document)


def test_a_missing_or_foreign_folder_is_no_node_of_ours(tmp_path: Path) -> None:
    """A mount that is not there, and one with other things in it, are named."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for name, seen in (("none", "no such folder"), ("other", "nothing of ours is in it")):
        found = node.examine(tmp_path / name, None, "15360").document()
        _said(40, found, "mount_missing")
        assert found["findings"][0]["detail"] == seen


# ---- with a monitor -----------------------------------------------------------------------------------


def _tenant(**more: object) -> dict[str, object]:
    plain = {"namespace": "team", "pod": "train", "uid": "1", "container": "main", "state": "enforced"}
    return {**plain, **more}


DOCUMENTS: dict[str, tuple[str, dict[str, Any], list[dict[str, object]], str]] = {
    "monitor": ("sound, by its monitor", {}, [_tenant()], ""),
    "uncapped": (
        "a tenant without a limit",
        {},
        [_tenant(state="uncapped", reason="the webhook did not see the pod")],
        "tenant_uncapped",
    ),
    "bypass": (
        "a tenant that goes past the library",
        {},
        [_tenant(flags={"bypass": True})],
        "tenant_uncapped",
    ),
    "mismatch": ("a limit above KAI's", {}, [_tenant(flags={"mismatch": True})], "tenant_wrong"),
    "unreadable": ("a cache that cannot be read", {}, [_tenant(state="unreadable")], "tenant_wrong"),
    "no label": ("no memory label", {"memory_label": {"text": None}}, [], "label_missing"),
    "bytes": ("a memory label in bytes", {"memory_label": {"text": "16106127360"}}, [], "label_bytes"),
    "no number": ("a memory label that is no number", {"memory_label": {"text": "15Gi"}}, [], "label_bytes"),
    "nvml": ("the monitor gets no NVML", {"nvml_up": False}, [], "nvml_down"),
    "api": ("the monitor gets no API server", {"pod_watch_up": False}, [], "monitor_down"),
}


@pytest.fixture
def monitor() -> Iterator[tuple[str, dict[str, Any]]]:
    """A server of a status document: its URL, and the document to fill."""
    document: dict[str, Any] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/status.json" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", document
        server.shutdown()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_the_monitor_sees_is_judged(
    name: str, place: Node, monitor: tuple[str, dict[str, Any]], table: dict[str, doctordoc.Row]
) -> None:
    """Tenants, label, NVML and the API server, as the monitor's document tells them."""
    fault, changes, tenants, expect = DOCUMENTS[name]
    plain = {"name": "node", "time": 1.0, "version": "1.2.0", "memory_label": {"text": "15360"}}
    plain |= {"nvml_up": True, "pod_watch_up": True, "named": True}
    monitor[1].update(schema=1, node={**plain, "skipped": {"no_pod": 3}, **changes}, tenants=tenants)
    report = node.examine(place.mount, monitor[0], None, 20)
    _said(report.exit_status, report.document(), expect)
    assert report.unchecked == [] or name == "api"
    _row(table, name, fault, report.document())


def test_a_monitor_that_does_not_answer_is_a_fault_where_it_was_named(place: Node) -> None:
    """Refused connections and slow answers cost no more than a second; on a bare node they are unchecked."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        report = node.examine(place.mount, url, "15360")
    _said(report.exit_status, report.document(), "monitor_down")
    report = node.examine(place.mount, "http://127.0.0.1:1", "15360")
    _said(report.exit_status, report.document(), "monitor_down")
    report = node.examine(place.mount, None, "15360")
    assert (report.exit_status, [what for what, _ in report.unchecked]) == (0, ["monitor"])
    assert re.search("--monitor URL", report.unchecked[0][1])
