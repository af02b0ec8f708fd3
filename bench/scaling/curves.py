"""A curve: measured points of one part, as a table and as bars of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Point = dict[str, float]


@dataclass
class Curve:
    """Points along `axis`, each with the same figures; a figure's name ends with its unit."""

    name: str
    what: str
    axis: str
    plotted: str
    """The figure that the bars show."""
    points: list[Point] = field(default_factory=list)

    def add(self, **figures: float) -> None:
        """One more point."""
        self.points.append({name.replace("__", ", ").replace("_", " "): v for name, v in figures.items()})

    def column(self, name: str) -> list[float]:
        """One figure of each point."""
        return [point[name] for point in self.points]

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        found = asdict(self)
        found["points"] = [{k: round(v, 4) for k, v in point.items()} for point in self.points]
        return found


def of_json(found: dict[str, Any]) -> Curve:
    """What `as_json` wrote."""
    return Curve(**found)


def figure(value: float) -> str:
    """Three digits that count."""
    if value != value:
        return "-"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(curve: Curve) -> str:
    """As Markdown."""
    names = list(curve.points[0]) if curve.points else []
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(figure(point[name]) for name in names) + " |" for point in curve.points]
    return "\n".join(lines)


def plot(labels: Sequence[float], values: Sequence[float], width: int = 50) -> str:
    """A bar a value, the longest `width` characters."""
    most = max(values, default=0.0)
    return "\n".join(
        f"{figure(label):>8} |{'#' * max(1, round(value / most * width)) if most > 0 else ''} {figure(value)}"
        for label, value in zip(labels, values, strict=True)
    )


def drawn(curve: Curve) -> str:
    """The curve's bars under its title."""
    return f"{curve.plotted} by {curve.axis}\n" + plot(curve.column(curve.axis), curve.column(curve.plotted))


def at(values: Iterable[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
