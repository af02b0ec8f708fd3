"""docs/reports.md and the tests it names: neither without the other."""

from __future__ import annotations

import re

from conftest import ROOT

ROW = re.compile(r"^\| (B\d{3}) \| .+ \| .+ \| (.+) \|$", re.MULTILINE)

COMPUTE = {"B183", "B185", "B187"}
"""Reports of compute limits, which are not enforced."""


def _docstrings() -> dict[str, str]:
    """Each test's name and docstring, of every kind of test."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, text in re.findall(r'def (test_\w+)\(.*?\n    """(.*?)"""', path.read_text(), re.DOTALL):
            found[name] = found.get(name, "") + text
    return found


def _rows() -> list[tuple[str, str]]:
    return ROW.findall((ROOT / "docs" / "reports.md").read_text())


def test_each_listed_report_names_tests_that_name_it() -> None:
    """A row's tests exist and carry the row's id; a row without a test says why."""
    docstrings = _docstrings()
    wrong = [
        (report, cell)
        for report, cell in _rows()
        if not cell.startswith("later: ")
        and [
            name
            for name in re.findall(r"`(test_\w+)`", cell) or [""]
            if report not in docstrings.get(name, "")
        ]
    ]
    assert wrong == []


def test_each_report_is_listed_once_and_few_without_a_test() -> None:
    """All 124 reports of these kinds are there, at most one in ten of them without a test."""
    reports = [report for report, _ in _rows()]
    assert len(reports) == len(set(reports)) == 124
    assert len([cell for _, cell in _rows() if cell.startswith("later: ")]) <= 12


def test_each_id_in_a_docstring_is_listed() -> None:
    """A test does not name a report that the list does not have."""
    named = {report for text in _docstrings().values() for report in re.findall(r"\bB\d{3}\b", text)}
    assert named - {report for report, _ in _rows()} - COMPUTE == set()
