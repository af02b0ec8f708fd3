"""README, CHANGELOG and docs/: their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _anchors(page: Path) -> set[str]:
    """The names that a page's headings are reached by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Each link to a file of this repository finds it, and its heading where it names one."""
    broken = []
    for place, anchor in LINK.findall(page.read_text()):
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(f"{place}#{anchor}")
    assert broken == []


def test_paths_of_the_readme_exist() -> None:
    """What "Where things live" names is there."""
    table = (ROOT / "README.md").read_text().split("## Where things live")[1]
    named = re.findall(r"`((?:native|isolator|tests|bench|charts)/[\w./*-]*)`", table)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []
