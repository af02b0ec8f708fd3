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
# Fewer pairs span less than 95 % of chance, however they are resampled: 1 - 2 / 2**6 = 0.97.
PAIRS = 6
Interval = tuple[float, float]
Values = dict[str, list[float]]  # by arm, a value for each round


class BenchError(Exception):
    """The measurement cannot be made or does not count; says why."""


@dataclass
class Row:
    """One figure: what each arm gave, and the library against the bare arm.

    `ratio` is that of the medians, `spread` its 95 % bootstrap interval, `added` the difference in `unit`
    with the interval `added_spread`. `control` is the interval of the empty preload's ratio to the bare arm:
    what noise alone gives. `met` is None where there is no goal, or an interval on both sides of it.
    """

    id: str
    name: str
    unit: str
    target: str
    bare: float | None = None
    empty: float | None = None
    shim: float | None = None
    ratio: float | None = None
    spread: Interval | None = None
    added: float | None = None
    met: bool | None = None
    note: str = ""
    added_spread: Interval | None = None
    control: Interval | None = None

    @property
    def unresolved(self) -> bool:
        """Measured, and yet the figures do not tell whether the goal is reached."""
        return bool(self.target) and self.met is None and self.shim is not None

    def cells(self) -> list[str]:
        """The row as text."""
        spread, control = _range(self.spread), _range(self.control)
        met = {True: "yes", False: "**no**", None: "not resolved" if self.unresolved else ""}[self.met]
        figures = [_text(value) for value in (self.bare, self.empty, self.shim)]
        ratio = "" if self.ratio is None else f"{self.ratio:.4f}"
        added = "" if self.added is None else f"{self.added:+,.4g}"
        if self.added_spread:
            added += " ({:+,.4g} to {:+,.4g})".format(*self.added_spread)
        start = [self.id, self.name, self.unit, self.target, *figures]
        return [*start, ratio, spread, control, added, met, self.note]


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
    "that of the empty preload",
    "added",
    "met",
    "note",
]


def _range(interval: Interval | None) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


DRIVER_FOLDERS = (
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
)


def driver_folder() -> Path | None:
    """The folder of the driver's libraries on this machine; None where there are none."""
    return next((Path(each) for each in DRIVER_FOLDERS if (Path(each) / "libcuda.so.1").exists()), None)


@dataclass
class Context:
    """Where things are: the library, the folder of the driver's libraries, one for scratch files."""

    lib: Path
    driver: Path
    folder: Path
    quick: bool = False
    empty: Path | None = None  # the empty library, once it is built
    rounds: int = 0  # of a call, where told; the other repeats follow in proportion

    def times(self, full: int, quick: int, calls: int = 150) -> int:
        """How often to repeat what is repeated `full` times where a call is measured in `calls` rounds."""
        if self.rounds:
            return max(2, full * self.rounds // calls)
        return quick if self.quick else full

    def environment(self, arm: str, limit: str, cache: str) -> dict[str, str]:
        """The environment of an arm; the arms differ in LD_PRELOAD alone. `cache` names its region file."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(self.driver), env.get("LD_LIBRARY_PATH")]))
        env["CUDA_DEVICE_MEMORY_LIMIT"] = limit
        env["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = str(self.folder / cache)
        if arm != "bare":
            env["LD_PRELOAD"] = str(self.empty if arm == "empty" else self.lib)
        return env


def intervals(values: Sequence[float], bare: Sequence[float]) -> tuple[Interval, Interval]:
    """95 % intervals of the ratio and the difference of medians of paired values, by resampling pairs."""
    chance, pairs = Random(1), list(zip(values, bare, strict=True))
    ratios, differences = [], []
    for _ in range(RESAMPLES):
        some = chance.choices(pairs, k=len(pairs))
        one, other = statistics.median(v for v, _ in some), statistics.median(v for _, v in some)
        ratios.append(one / other if other else float("inf"))
        differences.append(one - other)
    cut = RESAMPLES // 40
    low_to_high = [(found[cut], found[-1 - cut]) for found in (sorted(ratios), sorted(differences))]
    return low_to_high[0], low_to_high[1]


def verdict(goals: Sequence[tuple[Interval, float | None]], width: float | None = None) -> bool | None:
    """Whether one of the goals is reached, each an interval and the most that is allowed (None: no goal).

    Reached or missed only where the whole interval is, None where it lies on both sides: a lucky median is no
    more a result than an unlucky one. To be reached it must be narrower than `width` as well.
    """
    asked = [(low, high, allowed) for (low, high), allowed in goals if allowed is not None]
    if any(high <= allowed and (width is None or high - low < width) for low, high, allowed in asked):
        return True
    return False if asked and all(low > allowed for low, _, allowed in asked) else None


def compared(
    row: Row,
    values: Values,
    ratio: float | None = None,
    added: float | None = None,
    processor: Values | None = None,
    width: float | None = None,
) -> Row:
    """Fills a row from paired rounds of wall time, and judges it by the ratio or the added amount allowed.

    Where wall time does not resolve the goal, `processor` (the same rounds in processor time) does if it can.
    `width`: see `verdict`; it is asked of the interval of the ratio.
    """
    row.bare, row.empty, row.shim = (statistics.median(values[arm]) for arm in ARMS)
    row.spread, row.added_spread = intervals(values["shim"], values["bare"])
    row.control = intervals(values["empty"], values["bare"])[0]
    row.ratio, row.added = row.shim / row.bare if row.bare else None, row.shim - row.bare
    # Noise only ever adds: the quickest rounds say more where the interval is wide.
    quick = {arm: sorted(values[arm])[len(values[arm]) // 10] for arm in ("bare", "shim")}
    notes = [f"quickest tenth: {quick['shim'] / quick['bare']:.4f}"] if quick["bare"] else []
    if ratio is not None or added is not None:
        enough = len(values["bare"]) >= PAIRS
        if enough:
            row.met = verdict([(row.spread, ratio), (row.added_spread, added)], width)
        else:
            notes.append(f"{len(values['bare'])} rounds are too few to judge")
        if enough and row.met is None and processor and all(map(min, processor.values())):
            spread, more = intervals(processor["shim"], processor["bare"])
            row.met = verdict([(spread, ratio), (more, added)], width)
            told = "judged by" if row.met is not None else "nor is it by"
            notes.append(
                f"not resolved by wall time, {told} processor time: "
                f"{_range(spread)}, {more[0]:+,.4g} to {more[1]:+,.4g} {row.unit}"
            )
    row.note = "; ".join(notes)
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
