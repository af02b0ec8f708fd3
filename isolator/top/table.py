"""The document drawn for a terminal of any width: the node, its devices, its tenants by pressure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, OverflowMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from isolator.monitor.document import Device, Document, Node
from isolator.monitor.words import NEAR, UNKNOWN, Row, clock, percent, rows, share, size
from isolator.output import plain

_BAR = 12
_GAP = 2
_NAME = 0.35
"""Part of the width that a tenant's name may take from other columns; _STATE: characters of its state."""
_STATE = 20
_SHORTEST = 10
_STYLES = {"good": "green", "note": "yellow", "dim": "dim", "bad": "bold red"}


@dataclass(frozen=True)
class Column:
    """A column of the tenants' table. Those of high `drop` go first, 0 stays; `width` 0: by its cells."""

    title: str
    cell: Callable[[Row], RenderableType]
    drop: int = 0
    right: bool = False
    width: int = 0


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
    text = Text.assemble((plain(row.state), _STYLES[row.tone]))
    if row.reason:
        text.append(f"  {plain(row.reason)}", "dim")
    return text


def _processes(row: Row) -> str:
    return UNKNOWN if row.tenant.processes is None else str(row.tenant.processes)


COLUMNS = (
    Column("TENANT", lambda row: Text(plain(row.tenant.title))),
    Column("GPU", lambda row: str(row.device.index) if row.device else UNKNOWN, drop=1, right=True),
    Column("USED / LIMIT MiB", _used, right=True),
    Column("", lambda row: _bar(row.share), drop=4, width=_BAR),
    Column("%", lambda row: percent(row.share).removesuffix(" %"), drop=3, right=True),
    Column("PEAK", lambda row: _size(row.device.peak) if row.device else UNKNOWN, drop=5, right=True),
    Column("REFUSED", lambda row: row.refused, drop=2),
    Column("PROC", _processes, drop=6, right=True),
    Column("STATE", _state),
)
"""Name first, state last: these two give way where there is little room."""


def _width(column: Column, cells: Sequence[RenderableType]) -> int:
    """Characters that the column's title and cells need."""
    if column.width:
        return column.width
    return max(cell_len(column.title), *(cell_len(str(cell)) for cell in cells))


def fitting(width: int, needs: Sequence[int]) -> list[tuple[int, int]]:
    """Which columns (by index) a terminal of so many characters has room for, and how much each gets.

    `needs` are what the columns would like. The tenant's name gives way when only what must stay is left,
    it and the state take what remains.
    """
    last = len(COLUMNS) - 1
    wanted = [min(needs[0], max(_SHORTEST, int(width * _NAME))), *needs[1:last], min(needs[last], _STATE)]
    chosen = [index for index, column in enumerate(COLUMNS) if not column.drop]

    def spare() -> int:
        return width - sum(wanted[index] + _GAP for index in chosen) + _GAP

    for index in sorted(set(range(last)) - set(chosen), key=lambda index: COLUMNS[index].drop):
        if wanted[index] + _GAP <= spare():
            chosen.append(index)
    for index in (0, last):
        wanted[index] = max(min(wanted[index], _SHORTEST), wanted[index] + min(0, spare()))
    for index in (0, last):
        wanted[index] += max(0, min(spare(), needs[index] - wanted[index]))
    return [(index, wanted[index]) for index in sorted(chosen)]


def _table(shown: Sequence[Row], width: int, one_line: bool) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    cells = [[column.cell(row) for row in shown] for column in COLUMNS]
    needs = [_width(column, each) for column, each in zip(COLUMNS, cells, strict=True)]
    chosen = fitting(width, needs)
    for index, room in chosen:
        column = COLUMNS[index]
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=one_line or 0 < index < len(COLUMNS) - 1,
            overflow="ellipsis" if one_line else "fold",
            width=room,
        )
    for number in range(len(shown)):
        made.add_row(*(cells[index][number] for index, _ in chosen))
    return made


def _heading(node: Node, one_line: bool) -> Iterator[Text]:
    overflow: OverflowMethod = "ellipsis" if one_line else "fold"
    line = Text(plain(node.name) or "this node", "bold", no_wrap=one_line, overflow=overflow)
    library = node.library
    line.append(f"  {clock(node.time)}", "not bold")
    if library.version or library.ready is not None:
        line.append(f"  library {plain(library.version or '')} ", "not bold")
        line.append("ready" if library.ready else "not ready", "green" if library.ready else "red")
    yield line
    for problem in node.problems:
        yield Text(f"! {plain(problem)}", "red", no_wrap=one_line, overflow=overflow)
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
        index = plain(device.uuid[:12]) if device.index is None else str(device.index)
        cells: list[RenderableType] = [
            Text(f"{index} {plain(device.name)}" if wide and device.name else index),
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
    parts: list[RenderableType] = list(_heading(document.node, one_line=height is not None))
    if document.devices:
        parts += [_device_rows(document.devices, width), Text()]
    shown = rows(document)
    if not shown:
        return Group(*parts, Text("no tenant on this node"))
    taken = len(parts) + len(document.devices) + 1
    room = len(shown) if height is None or len(shown) <= height - taken else max(1, height - taken - 1)
    parts.append(_table(shown[:room], width, one_line=height is not None))
    if room < len(shown):
        parts.append(Text(f"... and {len(shown) - room} more below", "dim"))
    return Group(*parts)
