"""NCCL under quotas: one rank on one card, two ranks on two cards with a quota each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "clients" / "programs" / "nccl_ranks.py"


def cards() -> int:
    """Cards of this machine."""
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return done.stdout.count("GPU ")


@pytest.mark.parametrize("ranks", [1, 2])
def test_nccl(env, ranks, tmp_path):
    """Collectives and a data-parallel step give the bare result; each rank is held to its card's quota."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch on this machine")
    if cards() < ranks:
        pytest.skip(f"{ranks} cards are needed")
    out = []
    for limit in ("12g", None):
        more = {"CUDA_DEVICE_MEMORY_LIMIT_1": "10g"} if limit else {}
        command = [sys.executable, str(PROGRAM), str(ranks), str(tmp_path / f"meet-{limit}")]
        done = subprocess.run(
            command, env=env(limit=limit, **more), capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "isolator" not in done.stderr
        out.append(done.stdout.splitlines())
    held, bare = out
    same = [line for line in held if line.startswith("result ")]
    assert same == [line for line in bare if line.startswith("result ")] and len(same) == 2
    totals = sorted(line for line in held if line.startswith("total "))
    assert totals == [f"total {rank} {(12, 10)[rank] << 30}" for rank in range(ranks)]
    assert sum(line.startswith("refused ") for line in held) == ranks
