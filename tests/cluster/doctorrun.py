"""`isolator doctor cluster` against a test's cluster, and its table in docs/doctor.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import doctordoc
from harness import Cluster, ClusterError, wait_for
from images_base import ROOT
from verbs import PROGRAMS

SECOND = 1.0
SLOW = 4.0
"""Seconds of one look on a machine that many tests share; the look itself is measured and noted."""


@dataclass
class Doctor:
    """The doctor of one cluster, as an administrator runs it."""

    cluster: Cluster

    def run(
        self, *words: str, kubeconfig: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """One run, with the kubectl of the cluster's version on PATH."""
        environment = {
            **self.cluster.environment(),
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "KUBECONFIG": str(kubeconfig or self.cluster.kubeconfig),
            **variables,
        }
        command = [sys.executable, "-m", "isolator.cli", "doctor", "cluster", *words]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)

    def look(self, *words: str, **options: Any) -> dict[str, Any]:
        """Its JSON; the exit status is the document's."""
        done = self.run("--json", *words, **options)
        assert done.stderr == "", done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == found["exit_status"]
        return found

    def says(
        self,
        fault: str,
        status: int,
        *ids: str,
        words: tuple[str, ...] = (),
        again: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """Waits until it says exactly these causes with that exit status, and notes it as a row.

        `again` is done before each look: for faults that the product repairs by itself.
        """
        seen: list[dict[str, Any]] = []

        def there() -> bool:
            if again is not None:
                again()
            found = self.look(*words)
            seen.append(found)
            said = [each["id"] for each in found["findings"]]
            return (tuple(dict.fromkeys(said)), found["exit_status"]) == (ids, status)

        try:
            wait_for(there, 60, f"{ids} for {fault}", every=0.3)
        except ClusterError as error:
            error.add_note(json.dumps(seen[-1]["findings"] + seen[-1]["unchecked"], indent=1))
            raise
        found = seen[-1]
        assert found["seconds"] < SLOW and found["cpu_seconds"] < SECOND, found
        note((fault, ", ".join(f"`{each}`" for each in ids), status, found["seconds"]))
        return found


def note(row: doctordoc.Row) -> None:
    """Puts a row into the page's table of clusters, where the page is to be written."""
    if not doctordoc.WANTED:
        return
    lines = [line for line in doctordoc.part("cluster").splitlines() if line.startswith("| ")][1:]
    mine = doctordoc.rows([row]).splitlines()
    kept = [line for line in lines if not line.startswith(f"| {row[0]} |")]
    doctordoc.put("cluster", "\n".join([*mine[:2], *kept, mine[2]]) + "\n")


def finding(found: dict[str, Any], cause: str) -> dict[str, Any]:
    """The one finding of a cause."""
    (only,) = [each for each in found["findings"] if each["id"] == cause]
    return dict(only)
