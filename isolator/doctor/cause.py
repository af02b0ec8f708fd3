"""One cause of trouble: its name, its exit status, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_CODE = 10
LAST_CODE = 99


@dataclass(frozen=True)
class Cause:
    """A row of the table. `code` is the exit status, `fix` one line with str.format fields.

    A notice tells what is worth knowing and is no fault: it leaves the exit status at 0.
    """

    id: str
    code: int
    title: str
    fix: str
    scope: str
    notice: bool = False
