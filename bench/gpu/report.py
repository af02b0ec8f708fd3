"""Rows of figures: how they are judged, printed, and kept."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

ARMS = ("bare", "empty", "shim")
FOREIGN = ("CUDA_DEVICE", "CUDA_DISABLE", "ISOLATOR_", "LIBCUDA_", "LD_PRELOAD", "POD_UID", "CONTAINER_")
RESAMPLES = 1000


class BenchError(Exception):
    """The measurement cannot be made or does not count; says why."""


@dataclass
class Row:
    """One figure: what each arm gave, and the library against the bare arm.

    `ratio` is that of the medians, `spread` its 95 % bootstrap interval, `added` the difference in `unit`.
    """

    id: str
    name: str
    unit: str
    target: str
    bare: float | None = None
    empty: float | None = None
    shim: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    added: float | None = None
    met: bool | None = None
    note: str = ""

    def cells(self) -> list[str]:
        """The row as text."""
        spread = f"{self.spread[0]:.3f} to {self.spread[1]:.3f}" if self.spread else ""
        met = {True: "yes", False: "**no**", None: ""}[self.met]
        figures = [_text(value) for value in (self.bare, self.empty, self.shim)]
        ratio = "" if self.ratio is None else f"{self.ratio:.4f}"
        added = "" if self.added is None else f"{self.added:+,.4g}"
        return [self.id, self.name, self.unit, self.target, *figures, ratio, spread, added, met, self.note]


HEAD = [
    "id",
    "what",
    "unit",
    "target",
    "bare",
    "empty preload",
    "library",
    "ratio",
    "95 % interval",
    "added",
    "met",
    "note",
]


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


@dataclass
class Context:
    """Where things are: the library, the folder of the driver's libraries, one for scratch files."""

    lib: Path
    driver: Path
    folder: Path
    quick: bool = False
    empty: Path | None = None  # the empty library, once it is built

    def environment(self, arm: str, limit: str, cache: str) -> dict[str, str]:
        """The environment of an arm; the arms differ in LD_PRELOAD alone. `cache` names its region file."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(self.driver), env.get("LD_LIBRARY_PATH")]))
        env["CUDA_DEVICE_MEMORY_LIMIT"] = limit
        env["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = str(self.folder / cache)
        if arm != "bare":
            env["LD_PRELOAD"] = str(self.empty if arm == "empty" else self.lib)
        return env


def ratio_interval(shim: Sequence[float], bare: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Ratio of the medians of paired values and its 95 % interval, by resampling the pairs."""
    chance, pairs = Random(1), list(zip(shim, bare, strict=True))
    ratios = []
    for _ in range(RESAMPLES):
        some = chance.choices(pairs, k=len(pairs))
        ratios.append(_median([one for one, _ in some]) / _median([other for _, other in some]))
    ratios.sort()
    low, high = ratios[RESAMPLES // 40], ratios[-1 - RESAMPLES // 40]
    return statistics.median(shim) / statistics.median(bare), (low, high)


def _median(values: list[float]) -> float:
    values.sort()
    return values[len(values) // 2]


def compared(
    row: Row, values: dict[str, list[float]], ratio: float | None = None, added: float | None = None
) -> Row:
    """Fills a row from paired rounds; met when within the ratio or the added amount, whichever is given."""
    row.bare, row.empty, row.shim = (statistics.median(values[arm]) for arm in ARMS)
    row.ratio, row.spread = ratio_interval(values["shim"], values["bare"])
    row.added = row.shim - row.bare
    # Noise only ever adds: the quickest rounds say more where the interval is wide.
    quick = {arm: sorted(values[arm])[len(values[arm]) // 10] for arm in ("bare", "shim")}
    row.note = f"quickest tenth: {quick['shim'] / quick['bare']:.4f}"
    if ratio is not None or added is not None:
        row.met = (ratio is not None and row.ratio <= ratio) or (added is not None and row.added <= added)
    return row


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(rows: list[Row], about: dict[str, str], out: Path) -> None:
    """Writes gpu.json and gpu.md into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    report = {"about": about, "rows": [asdict(row) for row in rows]}
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    head = ", ".join(f"{name} {value}" for name, value in about.items())
    (out / "gpu.md").write_text(
        f"# Figures from a real GPU\n\nMade by `make bench-gpu`: {head}.\n\n{table(rows)}"
    )


def plot(samples: dict[str, dict[str, list[float]]], path: Path) -> str:
    """Draws the distribution of each call's latency by arm; what to say where it cannot be drawn."""
    try:
        from matplotlib import pyplot as plt
        from matplotlib import use
    except ImportError:
        return "no matplotlib: the plot is left out"
    use("svg")
    figure, axes = plt.subplots(1, len(samples), figsize=(5 * len(samples), 3.6), layout="constrained")
    for place, (name, arms) in zip(axes, samples.items(), strict=True):
        for arm, style in zip(ARMS, ("-", ":", "--"), strict=True):
            values = sorted(arms[arm])
            share = [100 * (i + 1) / len(values) for i in range(len(values))]
            place.plot(
                [value / 1000 for value in values], share, style, label={"shim": "library"}.get(arm, arm)
            )
        place.set(title=name, xlabel="microseconds a call", ylabel="percent of calls", xscale="log")
        place.grid(alpha=0.3)
        place.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return ""
