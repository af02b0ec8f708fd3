"""Probes that may hang (a file system, a driver) run side by side; what is late is said, not waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from isolator.doctor.report import Report

_T = TypeVar("_T")
PATIENCE = 0.8
"""Seconds that all probes have together, unless told otherwise."""
PART = 0.6
"""Share of that for one question to the driver, a child or the monitor."""


def run(report: Report, probes: Mapping[str, Callable[[Report], None]], patience: float = PATIENCE) -> None:
    """Runs each probe on a report of its own in a thread, and adds up those that are done in time.

    A probe that fails or does not answer is noted as unchecked, under its name.
    """
    parts: dict[str, Report] = {}
    failed: dict[str, str] = {}
    threads = {}
    for name, probe in probes.items():
        part = parts[name] = Report(report.scope, report.subject)
        threads[name] = threading.Thread(target=_one, args=(name, probe, part, failed), daemon=True)
        threads[name].start()
    until = time.monotonic() + patience
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            report.skip(name, f"no answer within {patience:g} s: a file system or the driver hangs")
            continue
        part = parts[name]
        report.findings += part.findings
        for what in part.checks:
            report.check(what)
        for what, why in part.unchecked:
            report.skip(what, why)
        if name in failed:
            report.skip(name, failed[name])


def ask(report: Report, what: str, question: Callable[[], _T], patience: float = PATIENCE) -> list[_T]:
    """The one answer to a question that may hang; empty where there is none, and the report says why."""
    answers: list[_T] = []
    run(report, {what: lambda _: answers.append(question())}, patience)
    return answers[:1]


def _one(name: str, probe: Callable[[Report], None], part: Report, failed: dict[str, str]) -> None:
    try:
        probe(part)
    except PermissionError as error:
        failed[name] = f"{error.strerror} ({error.filename}): run as root (kubectl debug: docs/doctor.md)"
    except OSError as error:
        failed[name] = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
    except Exception as error:  # one probe's fault must not hide what the others found
        failed[name] = f"{type(error).__name__}: {error}"
