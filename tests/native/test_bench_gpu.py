"""The benchmark for a real GPU, run for a moment on the simulated one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from conftest import SimEnv

from bench.gpu.report import PAIRS, Row, compared, verdict

ROOT = Path(__file__).resolve().parents[2]


def run(
    sim_env: SimEnv, sim_dir: Path, out: Path, only: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """The benchmark over some ids."""
    command = [sys.executable, "-m", "bench.gpu", "--driver", str(sim_dir), "--out", str(out), *options]
    return subprocess.run(
        [*command, "--only", only],
        env=sim_env(SIMGPU_MODEL="H200") | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def measure(
    sim_env: SimEnv, sim_dir: Path, out: Path, only: str, *options: str
) -> dict[str, dict[str, object]]:
    """The rows by name."""
    done = run(sim_env, sim_dir, out, only, *(options or ("--quick",)))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads((out / "gpu.json").read_text())
    assert report["about"]["state"] == "complete"
    rows = report["rows"]
    assert len((out / "gpu.md").read_text().splitlines()) == len(rows) + 6
    return {row["name"]: row for row in rows}


def noisy(middle: float, noise: float, seed: int) -> list[float]:
    """Forty values around one."""
    chance = Random(seed)
    return [middle + chance.uniform(-noise, noise) for _ in range(40)]


def test_calls_are_compared_and_controlled(sim_env: SimEnv, sim_dir: Path, tmp_path: Path) -> None:
    """Each call has a figure in three arms, a ratio and an added amount within their intervals."""
    rows = measure(sim_env, sim_dir, tmp_path, "O2,O3,O4")
    assert {row["id"] for row in rows.values()} == {"O2", "O3", "O4", ""} and len(rows) == 11
    measured = [row for row in rows.values() if row["bare"] is not None]
    assert len(measured) >= 10
    for row in measured:
        for value, interval in (("ratio", "spread"), ("added", "added_spread")):
            low, high = row[interval]
            assert low <= row[value] <= high
    pair = rows["cuMemAlloc + cuMemFree, 1 KiB, in a block with others"]
    assert min(pair["bare"], pair["empty"], pair["shim"]) > 0 and pair["spread"][0] > 1


def test_starts_threads_and_footprint_have_rows(sim_env: SimEnv, sim_dir: Path, tmp_path: Path) -> None:
    """Rounds can be chosen, and too few of them are told and judge nothing."""
    rows = measure(sim_env, sim_dir, tmp_path, "O5,O6,O8", "--quick", "--rounds", "30")
    start = rows["process start to current context"]
    assert start["met"] is None and "2 rounds are too few" in start["note"]
    assert sum(row["id"] == "O6" for row in rows.values()) == 4
    assert rows["threads"]["met"] is True
    assert rows["resident memory of a process with a context: added"]["met"] is True


def test_the_quota_is_judged(sim_env: SimEnv, sim_dir: Path, tmp_path: Path) -> None:
    """Fit, refusals, race and broken set-ups meet their goals on the simulated GPU."""
    rows = measure(sim_env, sim_dir, tmp_path, "Q1,Q4,Q9")
    assert {name for name, row in rows.items() if row["met"] is not True} == set()
    assert len(rows) == 6


def test_an_arm_that_does_not_intercept_counts_for_nothing(
    sim_env: SimEnv, sim_dir: Path, tmp_path: Path
) -> None:
    """A library that refuses nothing in the library's place ends the run with status 2 and no verdict."""
    other = ("--quick", "--lib", str(sim_dir / "libnvidia-ml.so.1"))
    done = run(sim_env, sim_dir, tmp_path, "O4", *other)
    assert done.returncode == 2 and "interception control failed" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    ("interval", "allowed", "width", "expected"),
    [
        ((0.99, 1.004), 1.005, None, True),
        ((1.006, 1.010), 1.005, None, False),
        ((0.97, 1.04), 1.005, None, None),
        ((0.97, 1.001), 1.005, 0.005, None),
        ((0.999, 1.001), 1.005, 0.005, True),
        ((1.02, 1.04), 1.005, 0.005, False),
        ((0.97, 1.04), None, None, None),
    ],
)
def test_a_goal_is_judged_by_the_whole_interval(
    interval: tuple[float, float], allowed: float | None, width: float | None, expected: bool | None
) -> None:
    """Reached or missed only where an interval is on one side of the goal, and narrow if that is asked."""
    assert verdict([(interval, allowed)], width) is expected


def test_processor_time_decides_where_wall_time_cannot() -> None:
    """The verdict comes from processor time, and the row says so, only where wall time leaves it open."""
    wall = {"bare": noisy(100, 40, 1), "empty": noisy(100, 40, 2), "shim": noisy(100, 40, 3)}
    worked = {"bare": noisy(50, 0.01, 4), "empty": noisy(50, 0.01, 5), "shim": noisy(53, 0.01, 6)}
    open_row = compared(Row("O2", "launch", "ns", "+2 ns"), wall, added=2)
    assert open_row.met is None and open_row.unresolved and "not resolved" in open_row.cells()
    judged = compared(Row("O2", "launch", "ns", "+2 ns"), wall, added=2, processor=worked)
    assert judged.met is False and "judged by processor time" in judged.note
    clear = compared(Row("O2", "launch", "ns", "+2 ns"), worked, added=4, processor=wall)
    assert clear.met is True and "processor" not in clear.note


def test_few_rounds_judge_nothing() -> None:
    """Below six pairs no interval spans 95 % of chance, so there is no verdict."""
    few = {
        arm: values[: PAIRS - 1]
        for arm, values in dict.fromkeys(("bare", "empty", "shim"), [1.0] * 9).items()
    }
    row = compared(Row("O5", "start", "ms", "1.01"), few, ratio=1.01)
    assert row.met is None and "too few" in row.note
