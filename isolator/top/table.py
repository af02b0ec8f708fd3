"""The document drawn for a terminal of any width: the node, its devices, its tenants by pressure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from isolator.monitor.document import Device, Document, Node
from isolator.monitor.words import NEAR, UNKNOWN, Row, clock, percent, plain, rows, share, size

_BAR = 12
_GAP = 2
_COLOURS = {"enforced": "green", "unsettled": "yellow", "idle": "dim"}


@dataclass(frozen=True)
class Column:
    """A column of the tenants' table: cells of about `width`. Those of high `drop` go first, 0 stays."""

    title: str
    cell: Callable[[Row], RenderableType]
    width: int
    drop: int = 0
    right: bool = False
    flexible: bool = False


def _size(value: int | None) -> str:
    return size(value).removesuffix(" MiB")


def _used(row: Row) -> str:
    used = _size(row.device.used) if row.device else UNKNOWN
    return f"{used} / {row.limit.removesuffix(' MiB')}"


def _bar(part: float | None) -> RenderableType:
    if part is None:
        return Text()
    colour = "red" if part >= NEAR else "cyan"
    return ProgressBar(
        total=100,
        completed=min(100.0, part * 100),
        width=_BAR,
        complete_style=colour,
        finished_style=colour,
        style="bright_black",
    )


def _state(row: Row) -> Text:
    text = Text(plain(row.state), "bold red" if row.grave else _COLOURS.get(row.tenant.state, "yellow"))
    if row.reason:
        text.append(f"  {plain(row.reason)}", "dim")
    return text


def _processes(row: Row) -> str:
    return UNKNOWN if row.tenant.processes is None else str(row.tenant.processes)


COLUMNS = (
    Column("TENANT", lambda row: Text(plain(row.tenant.title)), 18, flexible=True),
    Column("GPU", lambda row: str(row.device.index) if row.device else UNKNOWN, 3, drop=1, right=True),
    Column("USED / LIMIT MiB", _used, 16, right=True),
    Column("", lambda row: _bar(row.share), _BAR, drop=4),
    Column("%", lambda row: percent(row.share).removesuffix(" %"), 4, drop=2, right=True),
    Column("PEAK", lambda row: _size(row.device.peak) if row.device else UNKNOWN, 6, drop=5, right=True),
    Column("REFUSED", lambda row: row.refused, 15, drop=3),
    Column("STATE", _state, 10, flexible=True),
    Column("PROC", _processes, 4, drop=6, right=True),
)


def fitting(width: int) -> list[Column]:
    """The columns that a terminal of so many characters has room for."""
    chosen = list(COLUMNS)
    while sum(column.width + _GAP for column in chosen) > width and any(column.drop for column in chosen):
        chosen.remove(max(chosen, key=lambda column: column.drop))
    return chosen


def _table(columns: Sequence[Column], one_line: bool) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", expand=False)
    for column in columns:
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=one_line or not column.flexible,
            overflow="ellipsis" if one_line else "fold",
            min_width=None if column.flexible else len(column.title),
        )
    return made


def _heading(node: Node) -> Iterator[Text]:
    line = Text(plain(node.name) or "this node", "bold")
    library = node.library
    line.append(f"  {clock(node.time)}", "not bold")
    if library.version or library.ready is not None:
        line.append(f"  library {plain(library.version or '')} ", "not bold")
        line.append("ready" if library.ready else "not ready", "green" if library.ready else "red")
    yield line
    for problem in node.problems:
        yield Text(f"! {plain(problem)}", "red")
    yield Text()


def _figure(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def _device_rows(devices: Sequence[Device], width: int) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    wide = width >= 100
    made.add_column("GPU", no_wrap=True)
    made.add_column("USED (NVML) / TOTAL MiB" if wide else "NVML / TOTAL", justify="right", no_wrap=True)
    if wide:
        made.add_column("")
    made.add_column("CHARGED", justify="right", no_wrap=True)
    made.add_column("LIMITS", justify="right", no_wrap=True)
    if wide:
        for title in ("BUSY", "TEMP", "POWER"):
            made.add_column(title, justify="right", no_wrap=True)
    for device in devices:
        index = UNKNOWN if device.index is None else str(device.index)
        name = device.name or device.uuid
        cells: list[RenderableType] = [
            Text(f"{index} {plain(name)}" if wide else index),
            f"{_size(device.memory_used)} / {_size(device.memory_total)}",
        ]
        if wide:
            cells.append(_bar(share(device.memory_used, device.memory_total)))
        cells += [_size(device.charged), _size(device.allocated)]
        if wide:
            cells += [
                _figure(device.utilization, "%"),
                _figure(device.temperature, "°C"),
                _figure(device.power, "W"),
            ]
        made.add_row(*cells)
    return made


def draw(document: Document, width: int, height: int | None = None) -> Group:
    """What is printed. With a `height`, in lines, each tenant has one line and the last ones may not fit."""
    parts: list[RenderableType] = list(_heading(document.node))
    if document.devices:
        parts += [_device_rows(document.devices, width), Text()]
    shown = rows(document)
    if not shown:
        return Group(*parts, Text("no tenant on this node"))
    taken = len(parts) + len(document.devices) + 3
    room = len(shown) if height is None or len(shown) <= height - taken else max(1, height - taken - 1)
    columns = fitting(width)
    table = _table(columns, one_line=height is not None)
    for row in shown[:room]:
        table.add_row(*(column.cell(row) for column in columns))
    parts.append(table)
    if room < len(shown):
        parts.append(Text(f"... and {len(shown) - room} more below", "dim"))
    return Group(*parts)
