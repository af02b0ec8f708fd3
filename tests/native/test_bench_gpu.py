"""The benchmark for a real GPU, run for a moment on the simulated one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import SimEnv

ROOT = Path(__file__).resolve().parents[2]


def measure(sim_env: SimEnv, sim_dir: Path, out: Path, only: str) -> dict[str, dict[str, object]]:
    """The rows by name."""
    command = [sys.executable, "-m", "bench.gpu", "--driver", str(sim_dir), "--out", str(out), "--quick"]
    done = subprocess.run(
        [*command, "--only", only],
        env=sim_env(SIMGPU_MODEL="H200") | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    assert len((out / "gpu.md").read_text().splitlines()) == len(rows) + 6
    return {row["name"]: row for row in rows}


def test_calls_are_compared_and_controlled(sim_env: SimEnv, sim_dir: Path, tmp_path: Path) -> None:
    """Each call has a figure in three arms, a ratio within its interval, and a verdict."""
    rows = measure(sim_env, sim_dir, tmp_path, "O4")
    pair = rows["cuMemAlloc + cuMemFree, 2 MiB"]
    assert pair["bare"] > 0 and pair["empty"] > 0 and pair["shim"] > pair["bare"]
    low, high = pair["spread"]
    assert low <= pair["ratio"] <= high and pair["met"] in (True, False)


def test_the_quota_is_judged(sim_env: SimEnv, sim_dir: Path, tmp_path: Path) -> None:
    """Fit, refusals, race and broken set-ups meet their goals on the simulated GPU."""
    rows = measure(sim_env, sim_dir, tmp_path, "Q1,Q4,Q9")
    assert {name for name, row in rows.items() if row["met"] is not True} == set()
    assert len(rows) == 6
