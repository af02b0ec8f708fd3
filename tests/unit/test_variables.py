"""docs/settings.md: each variable of ours with its default, and none that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from isolator.monitor import settings as monitor
from isolator.webhook import settings as webhook

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text()
ROWS = re.findall(r"^\| `(ISOLATOR_\w+)` \| (.+?) \|", PAGE, re.MULTILINE)
NAME = re.compile(r"\bISOLATOR_[A-Z][A-Z_]*[A-Z]\b")
FOLDERS = ("native", "isolator", "charts", "tests")
SUFFIXES = {".c", ".h", ".py", ".yaml"}
BUILD = {"ISOLATOR_VERSION"}
"""Names of the build, not of the environment."""


def _shown(value: Any) -> str:
    """A default as the page writes it."""
    if value == "":
        return "none"
    listed = isinstance(value, tuple | list | bool)
    return f"`{json.dumps(value) if listed else value}`"


@pytest.mark.parametrize("part", [webhook, monitor], ids=["webhook", "monitor"])
def test_each_setting_is_listed_with_its_default(part: Any) -> None:
    """The table of a part is its settings class: the same variables, the same defaults."""
    listed = {name: default for name, default in ROWS if name.startswith(part.PREFIX)}
    fields = part.Settings.model_fields.items()
    expected = {part.PREFIX + field.upper(): _shown(info.default) for field, info in fields}
    seconds = {"5s": "5.0", "5m": "300.0"}
    for name in listed:
        if name.endswith("_INTERVAL"):
            listed[name] = f"`{seconds[listed[name].strip('`')]}`"
    assert listed == expected


def test_no_other_variable_is_read() -> None:
    """Every ISOLATOR_ name in sources, chart and tests is on the page; what is on it alone is a setting."""
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    found = {name for path in files for name in NAME.findall(path.read_text())} - BUILD
    listed = {name for name, _ in ROWS}
    assert found - listed == set()
    assert not [n for n in listed - found if not n.startswith((webhook.PREFIX, monitor.PREFIX))]
