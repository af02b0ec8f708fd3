"""What the command lines of both verbs have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn

from isolator.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises UsageError with one line for an argument that cannot be used; no usage before it."""

    def error(self, message: str) -> NoReturn:
        of_one = message.startswith("argument ")
        hint = "" if of_one else f" ({self.prog} --help lists the options)"
        raise UsageError(message.removeprefix("argument ") + hint)


def add_logging(parser: Parser) -> None:
    """The two options of logging."""
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", type=str.lower, choices=levels, default="info")
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line")
