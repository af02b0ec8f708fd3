"""`isolator doctor node` on mounts that a node may have, and through a monitor's own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from container import UNSHARE, why_not

from isolator.doctor import causes

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.root]

INSTALL = [sys.executable, "-m", "isolator.libsync", "--once"]
DOCTOR = [sys.executable, "-m", "isolator.cli", "doctor", "--json", "--patience", "20", "--label", "15360"]
SHOWN = {"ISOLATOR_MONITOR_NODE_NAME": "n1"}
READ_ONLY = "mount -o remount,bind,ro $M"


def _look(folder: Path, break_it: str, variables: dict[str, str], options: str = "") -> tuple[int, list[str]]:
    """Installs into a tmpfs, breaks it, and lets the doctor look; status and ids."""
    (folder / "vgpu").mkdir()
    (folder / "pods" / "00000001-1111-4222-8333-444455556666").mkdir(parents=True)
    mount, pods = str(folder / "vgpu"), str(folder / "pods")
    script = "\n".join(
        [
            "set -e; mount --make-rprivate /",
            f"mount -t tmpfs {options} none $M",
            shlex.join([*INSTALL, "--mount", mount, "--pods", pods]) + " >&2",
            break_it,
            f"exec env {' '.join(f'{name}={value}' for name, value in variables.items())}"
            f" {shlex.join([*DOCTOR, 'node', '--mount', mount])}",
        ]
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ISOLATOR_")}
    env = {**kept, "M": mount, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*UNSHARE, "sh", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return done.returncode, [finding["id"] for finding in found["findings"]]


@pytest.mark.parametrize(
    ("break_it", "variables", "expect"),
    [
        ("", {}, []),
        (READ_ONLY, {}, ["mount_readonly"]),
        (READ_ONLY, SHOWN, []),  # the monitor's mount is read-only on purpose
        ("mount -o remount,ro $M", SHOWN, ["mount_readonly"]),
        ("mount -o remount,noexec $M", {}, ["mount_noexec"]),
    ],
)
def test_a_mount_that_cannot_serve_is_named(
    tmp_path: Path, break_it: str, variables: dict[str, str], expect: list[str]
) -> None:
    """Read-only and noexec file systems, but not the read-only view that a monitor has of a good one."""
    status, ids = _look(tmp_path, break_it, variables)
    assert ids == expect
    assert status == (causes.get(expect[0]).code if expect else 0)
