"""What whole PyTorch programs lose (O7)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .arms import Arm, environments, interleave, live
from .report import BenchError, Context, Row, Values, compared

CLIENT = Path(__file__).with_name("torch_client.py")
LIMIT, OVER = "40g", 44  # GiB
BURST = 0.12  # seconds

# name, work, rounds
WORK = (
    ("transformer, training", "transformer", 8),
    ("ResNet-50, training", "resnet", 8),
    ("decoding, eager", "decode", 8),
    ("decoding, graph replayed", "graphed", 12),
)
# The goal of this one is narrow: where a process has its memory, and which kernels it chose, is drawn anew.
LINEAR, GENERATIONS, LINEAR_ROUNDS = "32 linear layers of 256, batch 64, training", 3, 24
WIDTH = 0.005


def _measure(context: Context, arms: dict[str, Arm], work: str, rounds: int) -> list[Values]:
    """Nanoseconds a step, by arm and round: of wall time, and of processor time to issue it."""
    for arm in arms.values():
        arm.ask(f"burst {work} 5")
    count = max(5, int(BURST * 1e9 / arms["bare"].ask(f"burst {work} 10")[0]))
    return interleave(arms, f"burst {work} {count}", context.times(rounds, quick=2))


def _row(name: str, figures: list[Values], allowed: float, width: float | None = None) -> Row:
    """A step takes time; the goal is a share of the bare program's speed."""
    target = f"{allowed} of bare" + (f", interval < {width:.1%}" if width else "")
    row = Row("O7", name, "ns a step", target)
    compared(row, figures[0], 1 / allowed, processor=figures[1], width=width)
    assert row.bare and row.shim and row.spread
    low, high = (1 / edge for edge in reversed(row.spread))
    row.note += f"; speed {row.bare / row.shim:.4f} of bare ({low:.4f} to {high:.4f})"
    return row


def _control(arms: dict[str, Arm]) -> None:
    """The quota must be in force in the library's arm and nowhere else."""
    found = {name: arm.ask(f"control {OVER}") for name, arm in arms.items()}
    if found != {name: [2.0] if name == "shim" else [0.0] for name in arms}:
        raise BenchError(f"interception control failed: {OVER} GiB gave {found}: no figure counts")


def rows(context: Context) -> Iterator[Row]:
    """A row for each program; one that says why where torch is missing."""
    if importlib.util.find_spec("torch") is None:
        yield Row("O7", "PyTorch programs", "ns a step", "0.995 of bare", note="not measured: no torch here")
        return
    cores = set(sorted(os.sched_getaffinity(0))[-4:])
    command, plain = [sys.executable, str(CLIENT)], environments(context, LIMIT)
    linear: list[Values] = [{arm: [] for arm in plain} for _ in range(2)]
    for generation in range(GENERATIONS):
        with live(command, plain, cores) as arms:
            _control(arms)
            for kept, values in zip(linear, _measure(context, arms, "linear", LINEAR_ROUNDS), strict=True):
                for arm in kept:
                    kept[arm] += values[arm]
            if generation:
                continue
            for name, work, rounds in WORK:
                yield _row(name, _measure(context, arms, work, rounds), 0.995)
    yield _row(LINEAR, linear, 0.995, WIDTH)
    uncached = {arm: env | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} for arm, env in plain.items()}
    with live(command, uncached, cores) as arms:
        _control(arms)
        yield _row("32 linear layers, no caching allocator", _measure(context, arms, "linear", 8), 0.98)
