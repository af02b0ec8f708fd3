"""The doctor's table, report and choice of what to look at."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
import threading
import time
from pathlib import Path

import doctordoc
import pytest
from conftest import ROOT

from isolator.doctor import Scope, bounded, causes, scope
from isolator.doctor.report import Report
from isolator.doctor.scope import Options
from isolator.errors import UsageError


def _clean() -> dict[str, str]:
    """This environment without what names a node, a pod or a cluster."""
    names = ("ISOLATOR_", "CUDA_", "NODE_NAME", "KUBECONFIG", "LD_", "POD_UID", "GPU_PORTION")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "isolator.cli", "doctor", "--patience", "20", *arguments]
    return subprocess.run(
        command, env=_clean() | variables, cwd=ROOT, capture_output=True, text=True, timeout=30
    )


# ---- the table ------------------------------------------------------------------------------------


def test_codes_are_unique_and_none_means_something_else() -> None:
    """Ids and exit statuses name one cause each; 0, 1 and 2 are health, a failing doctor and wrong usage."""
    ids = [cause.id for cause in causes.TABLE]
    codes = [cause.code for cause in causes.TABLE]
    assert len(set(ids)) == len(ids) and len(set(codes)) == len(codes)
    assert min(codes) == causes.FIRST_CODE == 10 and max(codes) <= causes.LAST_CODE == 99
    ranges = {"any": (10, 10), "pod": (11, 39), "node": (40, 59), "cluster": (60, 99)}
    assert all(ranges[cause.scope][0] <= cause.code <= ranges[cause.scope][1] for cause in causes.TABLE)


def test_each_fix_is_one_line_that_can_be_filled_in() -> None:
    """A fix fits a line, ends without a full stop, and its fields are plain names."""
    for cause in causes.TABLE:
        fields = [name for _, name, _, _ in string.Formatter().parse(cause.fix) if name is not None]
        assert all(name.isidentifier() for name in fields), cause.id
        assert cause.fix and len(cause.fix) < 140 and "\n" not in cause.fix + cause.title, cause.id
        assert not cause.fix.endswith("."), cause.id


def test_the_page_has_the_table() -> None:
    """docs/doctor.md lists every cause with exit status and fix, as the code has them."""
    lines = ["| cause | exit status | what holds | fix |", "|---|---|---|---|"]
    for cause in causes.TABLE:
        fix = cause.fix.replace("{", "<").replace("}", ">").replace("|", "\\|")
        code = "0 (notice)" if cause.notice else str(cause.code)
        lines.append(f"| `{cause.id}` | {code} | {cause.title} | {fix.replace('<', '&lt;')} |")
    text = "\n".join(lines) + "\n"
    if doctordoc.WANTED:
        doctordoc.put("causes", text)
    assert doctordoc.part("causes") == text


# ---- the report -----------------------------------------------------------------------------------


def test_the_first_fault_of_the_table_decides() -> None:
    """Findings come in the table's order, and the first that is no notice gives the exit status."""
    report = Report("pod", "PID 7")
    report.check("limit")
    report.find("near_limit", "device 0", "98 %")
    assert (report.done().exit_status, report.faults) == (0, [])
    report.find("no_devices", "/dev", "none")
    report.find("limit_zero", "$X", "0m")
    report.find("limit_zero", "$X", "0m")
    found = report.done().document()
    assert [finding["id"] for finding in found["findings"]] == ["limit_zero", "no_devices", "near_limit"]
    assert (found["exit_status"], found["healthy"]) == (26, False)
    lines = list(report.lines())
    assert lines[0] == "limit_zero (26) $X: 0m" and lines[1].startswith("  fix: correct gpu-fraction")
    assert lines[4] == "near_limit (notice) device 0: 98 %"
    assert lines[-1].startswith("pod PID 7: 2 faults found: 1 check in 0.")


def test_nothing_looked_at_is_not_health() -> None:
    """Where every check was impossible the status is 1, and the reasons are shown."""
    report = Report("pod", "PID 7")
    report.skip("container", "Permission denied: run as root")
    assert report.done().exit_status == 1 and not report.document()["healthy"]
    assert list(report.lines()) == [
        "unchecked: container: Permission denied: run as root",
        "pod PID 7: nothing could be looked at",
    ]


def test_a_tenants_text_stays_one_plain_line() -> None:
    """Control characters and length of what a tenant wrote do not reach a terminal."""
    report = Report("pod", "PID 7")
    report.find("preload_missing", "f", "it names \x1b[2J\nroot:\u202e" + "x" * 999, file="f\r", library="l")
    (finding,) = report.findings
    assert finding.detail.isprintable() and len(finding.detail) == 400
    assert finding.fix.startswith("f must hold l alone")


def test_a_probe_that_hangs_or_fails_is_said_and_not_waited_for() -> None:
    """The others' findings are kept, and the late probe can add nothing any more."""
    report, hold = Report("pod", "PID 7"), threading.Event()

    def late(part: Report) -> None:
        part.check("late")
        hold.wait(20)
        part.find("tampered", "f", "late", file="f")

    def broken(part: Report) -> None:
        part.check("broken")
        raise PermissionError(13, "Permission denied", "/proc/1/root")

    began = time.monotonic()
    bounded.run(report, {"a": late, "b": broken, "c": lambda part: part.check("fine")}, 0.1)
    assert time.monotonic() - began < 5
    hold.set()
    assert (report.findings, report.checks) == ([], ["broken", "fine"])
    reasons = dict(report.unchecked)
    assert "no answer within 0.1 s" in reasons["a"]
    assert "Permission denied (/proc/1/root): run as root" in reasons["b"]


# ---- the command line -----------------------------------------------------------------------------


def test_a_machine_with_nothing_installed_is_not_healthy() -> None:
    """Neither a container nor a node nor a cluster: status 10, in text and in JSON."""
    if Path("/usr/local/vgpu").exists() or Path("/etc/ld.so.preload").exists():
        pytest.skip("something is installed here")
    done = _run()
    assert (done.returncode, done.stderr) == (10, "")
    assert done.stdout.startswith("not_installed (10) ") and "\n  fix: install the chart" in done.stdout
    found = json.loads(_run("--json").stdout)
    assert (found["scope"], found["exit_status"], found["healthy"]) == ("machine", 10, False)
    assert json.loads(_run("pod", "--json").stdout)["findings"][0]["id"] == "not_installed"
    assert _run("node").returncode == 40


def test_a_pod_of_the_webhook_is_no_place_to_look_from() -> None:
    """It sees no node and no tenant: one line says where to run instead."""
    if Path("/usr/local/vgpu").exists() or Path("/etc/ld.so.preload").exists():
        pytest.skip("something is installed here")
    done = _run(ISOLATOR_WEBHOOK_LISTEN="0.0.0.0:8443")
    assert (done.returncode, "isolator doctor cluster" in done.stderr) == (2, True)


def test_wrong_usage_is_one_line_and_status_2() -> None:
    """Unknown scopes, a PID of 0, an option of another scope, a URL that is none."""
    for arguments in (
        ["everything"],
        ["--pid", "0"],
        ["pod", "--namespace", "x"],
        ["node", "--monitor", "localhost"],
    ):
        done = _run(*arguments)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), arguments
        assert done.stderr.startswith("isolator: ")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names nothing."""
    for name in os.environ.keys() - _clean().keys():
        monkeypatch.delenv(name)


def test_what_to_look_at_is_found_out(bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a cluster, a PID, a node's variables and files, a kubeconfig, in this order."""
    mount = tmp_path / "vgpu"
    assert scope.choose(Options(namespace="x", pid=1)) is Scope.CLUSTER
    assert scope.choose(Options(pid=1, label="15360")) is Scope.POD
    assert scope.choose(Options(label="15360")) is Scope.NODE
    assert scope.choose(Options(mount=mount)) is None
    mount.mkdir()
    assert scope.choose(Options(mount=mount)) is Scope.NODE
    (mount / "libvgpu.so").touch()
    assert scope.choose(Options(mount=mount)) is Scope.POD
    (mount / "libsync.json").touch()
    assert scope.choose(Options(mount=mount)) is Scope.NODE
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    assert scope.choose(Options(mount=tmp_path / "none")) is Scope.CLUSTER
    monkeypatch.setenv("ISOLATOR_MONITOR_NODE_NAME", "n1")
    assert scope.choose(Options(mount=tmp_path / "none")) is Scope.NODE


def test_options_of_a_cluster_go_with_no_other_scope() -> None:
    """The error names them."""
    with pytest.raises(UsageError, match="--kubeconfig, --context"):
        scope.examine(Scope.NODE, Options(context="x"))
