"""Prints once, or keeps a terminal up to date."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from rich.console import Console
from rich.live import Live

from isolator import output
from isolator.monitor.client import NothingReachableError
from isolator.monitor.document import Document, dump
from isolator.top.source import Source
from isolator.top.table import draw

INTERVAL_S: Final = 2.0
_PIPE_WIDTH: Final = 140
"""Columns where nobody says how many there are: `kubectl exec` without -t, a file, a pipe."""


def _plain_terminal() -> bool:
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


def _console() -> Console:
    """Escape codes only for a terminal that says what it is."""
    if sys.stdout.isatty():
        return Console(highlight=False, force_terminal=False if _plain_terminal() else None)
    given = os.environ.get("COLUMNS", "")
    width = int(given) if given.isascii() and given.isdigit() and 0 < len(given) < 5 else 0
    return Console(highlight=False, width=max(width, 20) if width else _PIPE_WIDTH)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _print(console: Console, shown: Document) -> None:
    with console.capture() as text:
        console.print(draw(shown, console.width))
    sys.stdout.write(text.get())
    sys.stdout.flush()


def _next(source: Source, last: Document) -> Document:
    """The newest document; where there is none for the moment the last one, which then says so."""
    try:
        return source.read()
    except NothingReachableError as error:
        problem = f"this is the last answer: {error}"
        others = tuple(each for each in last.node.problems if not each.startswith("this is the last answer"))
        return replace(last, node=replace(last.node, problems=(problem, *others)))


def _repeat(source: Source, console: Console, shown: Document, interval: float) -> None:
    """One table after the other, for what is no screen."""
    while True:
        _print(console, shown)
        time.sleep(interval)
        shown = _next(source, shown)
        sys.stdout.write("\n")
        sys.stdout.flush()  # here, where a reader that went away is an end like any other


def _live(source: Source, console: Console, shown: Document, interval: float) -> None:
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(draw(shown, *console.size), refresh=True)
            time.sleep(interval)
            shown = _next(source, shown)


def run(once: bool, json: bool, interval: float | None, url: str | None, mount: Path | None) -> int:
    """Shows the node's tenants; exit status. Without a terminal once, unless an interval is given.

    Raises NothingReachableError and UsageError with one line.
    """
    if sys.stdout.isatty():  # also where a shell's background job, which ignores it, was brought to the front
        signal.signal(signal.SIGINT, signal.default_int_handler)
    source = Source(url, mount)
    with contextlib.suppress(KeyboardInterrupt), output.printing():
        shown = source.read()
        if json:
            sys.stdout.write(output.ascii_json(dump(shown, indent=2).decode()))
            return 0
        console = _console()
        if once or (interval is None and not sys.stdout.isatty()):
            _print(console, shown)
        elif sys.stdout.isatty() and not _plain_terminal():
            _live(source, console, shown, interval or INTERVAL_S)
        else:
            _repeat(source, console, shown, interval or INTERVAL_S)
    return 0
