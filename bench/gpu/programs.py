"""What whole PyTorch programs lose (O7)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .arms import Arm, environments, interleave, live
from .report import Context, Row, compared

CLIENT = Path(__file__).with_name("torch_client.py")
LIMIT = "40g"
BURST = 0.12  # seconds

# name, work, rounds
WORK = (
    ("32 linear layers of 256, batch 64, training", "linear", 120),
    ("transformer, training", "transformer", 40),
    ("ResNet-50, training", "resnet", 30),
    ("decoding, eager", "decode", 40),
    ("decoding, graph replayed", "graphed", 40),
)


def _burst(arm: Arm, work: str) -> int:
    arm.ask(f"burst {work} 5")
    return max(5, int(BURST * 1e9 / arm.ask(f"burst {work} 10")[0]))


def _measure(context: Context, arms: dict[str, Arm], row: Row, work: str, rounds: int, allowed: float) -> Row:
    for arm in reversed(arms.values()):
        count = _burst(arm, work)
    values = interleave(arms, f"burst {work} {count}", 3 if context.quick else rounds)
    # A step takes time; the goal is a share of the bare program's speed.
    row = compared(row, values, 1 / allowed)
    if row.spread:
        row.note = f"speed {row.bare / row.shim:.4f} of bare" if row.bare and row.shim else ""
    return row


def rows(context: Context) -> Iterator[Row]:
    """A row for each program; one that says why where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        yield Row("O7", "PyTorch programs", "ns a step", "0.995 of bare", note="not measured: no torch here")
        return
    cores = set(sorted(os.sched_getaffinity(0))[-4:])
    command = [sys.executable, str(CLIENT)]
    with live(command, environments(context, LIMIT), cores) as arms:
        for name, work, rounds in WORK:
            row = Row("O7", name, "ns a step", "0.995 of bare")
            yield _measure(context, arms, row, work, rounds, 0.995)
    uncached = {
        arm: env | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        for arm, env in environments(context, LIMIT).items()
    }
    with live(command, uncached, cores) as arms:
        row = Row("O7", "32 linear layers, no caching allocator", "ns a step", "0.98 of bare")
        yield _measure(context, arms, row, "linear", 40, 0.98)
