"""Findings by cause and what was seen: a fault of many pods, or of a node each, is one finding."""

from __future__ import annotations

from collections import defaultdict

from isolator.doctor.cluster_facts import Json, at, name, some, space
from isolator.doctor.report import Report


class Groups:
    """Pods of a kind of trouble; the first of a group fills in the fix."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._fields: dict[tuple[str, str], dict[str, str]] = {}

    def add(self, cause: str, pod: Json, subject: str, seen: str) -> None:
        """Notes a pod under a cause. `subject` names it."""
        node = str(at(pod, "spec", "nodeName") or "?")
        self._found[cause, seen].append(subject)
        fields = {"namespace": space(pod), "pod": name(pod), "node": node, "name": "nvidia"}
        self._fields.setdefault((cause, seen), fields)

    def tell(self, report: Report) -> None:
        """One finding a group."""
        for key, which in self._found.items():
            many = f"{len(which)} pods: " if len(which) > 1 else ""
            report.find(key[0], many + some(which), key[1], **self._fields[key])
