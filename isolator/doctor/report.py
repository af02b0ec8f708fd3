"""What was found, what was looked at and what could not be, as text for people and JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from isolator.doctor import causes
from isolator.doctor.cause import Cause

SCHEMA = 1
_LONGEST = 400


def plain(text: object) -> str:
    """One line of printable characters, at most 400: what is shown may be a tenant's text."""
    shown = "".join(mark if mark.isprintable() else " " for mark in str(text)).strip()
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number < 2 else 's'}"


@dataclass(frozen=True)
class Finding:
    """One cause that holds: of what (`subject`), what was seen (`detail`), what to do (`fix`)."""

    cause: Cause
    subject: str
    detail: str
    fix: str

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "id": self.cause.id,
            "code": self.cause.code,
            "notice": self.cause.notice,
            "title": self.cause.title,
            "subject": self.subject,
            "detail": self.detail,
            "fix": self.fix,
        }


@dataclass
class Report:
    """One examination. `checks` were made; `unchecked` could not be, each with its reason.

    Probes call `find`, `check` and `skip`; several threads may.
    """

    scope: str
    subject: str
    findings: list[Finding] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    unchecked: list[tuple[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    began_cpu: float = field(default_factory=time.process_time)
    cpu_seconds: float = 0.0

    def find(self, identity: str, subject: str, detail: str, **fields: object) -> Finding:
        """Notes that a cause holds; `fields` are those of its fix."""
        cause = causes.get(identity)
        fix = cause.fix.format(**{name: plain(value) for name, value in fields.items()})
        finding = Finding(cause, plain(subject), plain(detail), fix)
        if finding not in self.findings:
            self.findings.append(finding)
        return finding

    def check(self, what: str) -> None:
        """Notes that `what` was looked at, whatever came out."""
        what = plain(what)
        if what not in self.checks:
            self.checks.append(what)

    def skip(self, what: str, why: object) -> None:
        """Notes that `what` could not be looked at."""
        entry = (plain(what), plain(why))
        if entry not in self.unchecked:
            self.unchecked.append(entry)

    def done(self) -> Report:
        """Puts the findings in the table's order and stops the clock."""
        self.findings.sort(key=lambda finding: causes.RANK[finding.cause.id])
        self.seconds = time.monotonic() - self.began
        self.cpu_seconds = time.process_time() - self.began_cpu
        return self

    @property
    def faults(self) -> list[Finding]:
        """The findings that are no notices, those first in the table first."""
        found = [finding for finding in self.findings if not finding.cause.notice]
        return sorted(found, key=lambda finding: causes.RANK[finding.cause.id])

    @property
    def exit_status(self) -> int:
        """Code of the first fault; 0 without one; 1 where nothing at all could be looked at."""
        if self.faults:
            return self.faults[0].cause.code
        return 0 if self.checks else 1

    def document(self) -> dict[str, Any]:
        """For JSON; docs/doctor.md names the fields."""
        return {
            "schema": SCHEMA,
            "scope": self.scope,
            "subject": self.subject,
            "healthy": self.exit_status == 0,
            "exit_status": self.exit_status,
            "seconds": round(self.seconds, 4),
            "cpu_seconds": round(self.cpu_seconds, 4),
            "findings": [finding.document() for finding in self.findings],
            "checks": self.checks,
            "unchecked": [{"what": what, "why": why} for what, why in self.unchecked],
        }

    def json(self) -> str:
        """The document as text."""
        return json.dumps(self.document(), indent=2, ensure_ascii=False)

    def lines(self) -> Iterator[str]:
        """For people: two lines a finding, one for each thing that could not be looked at."""
        for finding in self.findings:
            status = "notice" if finding.cause.notice else str(finding.cause.code)
            yield f"{finding.cause.id} ({status}) {finding.subject}: {finding.detail}"
            yield f"  fix: {finding.fix}"
        for what, why in self.unchecked:
            yield f"unchecked: {what}: {why}"
        where = f"{self.scope} {self.subject}".strip()
        if not self.faults and not self.checks:
            yield f"{where}: nothing could be looked at"
        else:
            many = _count(len(self.faults), "fault")
            blind = f", {len(self.unchecked)} could not be made" if self.unchecked else ""
            checks = f"{_count(len(self.checks), 'check')}{blind}"
            yield f"{where}: {many} found: {checks} in {self.seconds:.2f} s"
