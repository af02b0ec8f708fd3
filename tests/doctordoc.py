"""docs/doctor.md: its generated parts, written by the tests when UPDATE_DOCS=1 asks for it."""

from __future__ import annotations

import os
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"
WANTED = os.environ.get("UPDATE_DOCS") == "1"

Row = tuple[str, str, int, float]
"""What was broken, the ids it named in their order, the exit status, seconds of the examination."""


def part(name: str) -> str:
    """The text between the page's marks of this name."""
    found = re.search(rf"<!-- {name} -->\n\n(.*?)\n<!-- /{name} -->", PAGE.read_text(), re.DOTALL)
    assert found, f"docs/doctor.md has no part {name}"
    return found[1]


def put(name: str, text: str) -> None:
    """Replaces that text."""
    old = PAGE.read_text()
    marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    new = re.sub(marks, lambda found: f"{found[1]}\n{text}\n{found[2]}", old, flags=re.DOTALL)
    if new != old:
        PAGE.write_text(new)


def rows(found: list[Row]) -> str:
    """The table of scenes."""
    lines = ["| set-up | it said | exit status | ms |", "|---|---|---|---|"]
    for fault, said, status, seconds in found:
        lines.append(f"| {fault} | {said or 'no fault'} | {status} | {seconds * 1000:.0f} |")
    return "\n".join(lines) + "\n"
