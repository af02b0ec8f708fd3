"""Standard output of people and programs: closed, full, left by its reader, of few characters."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Final

from isolator.errors import UnavailableError

_UNSAFE: Final = re.compile(r"[^\n\x20-\x7e]")


def prepare() -> None:
    """Makes standard output take every text: one that is closed swallows it, one whose encoding lacks a
    character shows a question mark in its place."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Writes out what is printed inside. `| head` that has seen enough is an end like any other.

    Raises UnavailableError with one line where it cannot be written for another reason.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _drop()
    except OSError as error:
        _drop()
        raise UnavailableError(f"cannot write to standard output: {error.strerror or error}") from error


def _drop() -> None:
    """The interpreter writes out what is left when it ends: to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain(text: str) -> str:
    """One line of printable characters: a tenant's or the cluster's text must not steer a terminal."""
    return "".join(mark if mark.isprintable() else "\ufffd" for mark in text)


def ascii_json(text: str) -> str:
    """The same JSON in ASCII: JSON itself lets control characters of eight bits and marks that turn the
    direction of text through to a terminal."""
    return _UNSAFE.sub(lambda found: json.dumps(found[0])[1:-1], text)
