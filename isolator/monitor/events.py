"""Events on pods that run without a limit or are refused CUDA, past their grant, or with an altered region.

One Event a pod and reason: made once, then renewed at most every hour while the finding stands, also after a
restart of the monitor (its name says which it is). Called from the monitor's background thread, never from
a scrape.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from isolator import kube, names
from isolator.monitor.enforcement import NO_LIMIT
from isolator.monitor.model import Snapshot, State, Uncapped, Verdict

log = logging.getLogger(__name__)

RENEW: Final = 3600.0
"""Seconds between two renewals of an Event; the API server forgets one after an hour by default."""
RETRY: Final = 60.0
MOST_AT_ONCE: Final = 3
"""Events of one pass (each 15 s): a fault of a whole large cluster does not flood the API (docs/scale.md)."""
_ANSWER_S: Final = 10.0
_OF_NAMESPACE: Final = (403, 422)
"""Statuses that say nothing of other namespaces: no right in this one, its quota or policy, its end."""
_COMPONENT: Final = f"{names.RELEASE}-monitor"
_NAME: Final = 200


class Reason(StrEnum):
    """Reasons of our Events."""

    REFUSED = "GPUMemoryRefused"
    UNCAPPED = "GPUMemoryUncapped"
    MISMATCH = "GPUMemoryLimitMismatch"
    TAMPERED = "GPUMemoryTampered"


_DO: Final = {
    Uncapped.NOT_INJECTED: "recreate the pod; check that the webhook runs and its namespace is not left out",
    Uncapped.OPTED_OUT: "take the opt-out away and recreate the pod, if it should be limited",
    Uncapped.SKIPPED: "see the pod's status annotation for what has to change",
    Uncapped.NO_LIMIT: f"check the node's label {names.NODE_LABEL_GPU_MEMORY}, then recreate the pod",
    Uncapped.BYPASS: "use a glibc-based image whose programs are not linked statically",
}
_DO_NO_GRANT: Final = "check that KAI's HAMi-core mode is on, then recreate the pod."


@dataclass(frozen=True)
class Finding:
    """Something to tell about one pod."""

    namespace: str
    pod: str
    uid: str
    reason: Reason
    message: str


def findings(snapshot: Snapshot) -> Iterator[Finding]:
    """What this snapshot has to tell, one a pod and reason (its first such container)."""
    uids = {(pod.namespace, pod.name): uid for uid, pod in snapshot.pods.items() if pod.live}
    told: set[tuple[str, Reason]] = set()
    for verdict in snapshot.verdicts or ():
        uid = uids.get((verdict.namespace, verdict.pod))
        if uid is None:
            continue
        for reason, message in _of(verdict):
            if (uid, reason) not in told:
                told.add((uid, reason))
                yield Finding(verdict.namespace, verdict.pod, uid, reason, message)


def _of(verdict: Verdict) -> Iterator[tuple[Reason, str]]:
    where = f"Container {verdict.container}"
    if verdict.state == State.REFUSED:
        yield (
            Reason.REFUSED,
            f"CUDA does not start in container {verdict.container} ({verdict.reason}): "
            + (_DO_NO_GRANT if verdict.reason == NO_LIMIT else "its standard error names the cause."),
        )
    if verdict.state == State.UNCAPPED and verdict.uncapped is not None:
        yield (
            Reason.UNCAPPED,
            f"{where} runs without a GPU-memory limit ({verdict.reason}): {_DO[verdict.uncapped]}.",
        )
    if verdict.mismatch:
        yield (
            Reason.MISMATCH,
            f"{where} records a higher GPU-memory limit than the {verdict.expected_limit} bytes of "
            f"KAI's grant: check the node's label {names.NODE_LABEL_GPU_MEMORY} (MiB) and who edits KAI's "
            "ConfigMap.",
        )
    if verdict.tampered:
        yield (
            Reason.TAMPERED,
            f"{where} altered its GPU-memory region file; the limit it started with stays in force.",
        )


@dataclass
class _Sent:
    """When an Event was last sent or tried (monotonic seconds), and how often it was made."""

    due: float
    count: int = 0


class Reporter:
    """Sends findings as Events."""

    def __init__(self, api: kube.Api, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._node, self._clock = api, node, clock
        self._sent: dict[tuple[str, Reason], _Sent] = {}
        self._said: dict[str, str] = {}

    def report(self, snapshot: Snapshot) -> int:
        """Sends what is due, MOST_AT_ONCE at most; how many were sent. Never raises for the API's sake."""
        current = {(finding.uid, finding.reason): finding for finding in findings(snapshot)}
        now = self._clock()
        for key in [key for key, sent in self._sent.items() if key not in current and sent.due <= now]:
            del self._sent[key]
        due = [key for key in current if key not in self._sent or self._sent[key].due <= now]
        spaces = {finding.namespace for finding in current.values()}
        self._said = {space: said for space, said in self._said.items() if not space or space in spaces}
        refusing: set[str] = set()
        done = asked = 0
        for key in due:
            if asked == MOST_AT_ONCE:
                break
            sent = self._sent.setdefault(key, _Sent(now))
            sent.due = now + RETRY
            if current[key].namespace in refusing:
                continue
            asked += 1
            try:
                self._send(current[key], sent)
            except kube.ApiError as error:
                if error.status in _OF_NAMESPACE:
                    refusing.add(current[key].namespace)
                    self._failed(current[key].namespace, error)
                    continue
                self._failed("", error)
                break
            except kube.FAILURES as error:
                self._failed("", error)
                break  # the next one would meet the same server
            self._said.pop("", None)
            self._said.pop(current[key].namespace, None)
            sent.due = now + RENEW
            done += 1
        return done

    def _failed(self, namespace: str, error: BaseException) -> None:
        """Says once what keeps Events from a namespace, or from all (empty)."""
        said = kube.reason(error)
        if said != self._said.get(namespace):
            where = f" to namespace {namespace}" if namespace else ""
            log.warning("Events cannot be sent%s, tried again every %.0f s: %s", where, RETRY, said)
        self._said[namespace] = said

    def _send(self, finding: Finding, sent: _Sent) -> None:
        """Renews an Event that was made, else makes it. Raises one of kube.FAILURES."""
        try:
            if sent.count == 0 or not self._renew(finding, sent):
                self._make(finding, sent)
        except kube.ApiError as error:
            if error.status != 404:  # the namespace is gone
                raise

    def _make(self, finding: Finding, sent: _Sent) -> None:
        try:
            self._api.ask(_path(finding), method="POST", body=_event(finding, self._node), read=_ANSWER_S)
            sent.count = 1
        except kube.ApiError as error:
            if error.status != 409:
                raise
            self._renew(finding, sent)  # an earlier run of the monitor made it

    def _renew(self, finding: Finding, sent: _Sent) -> bool:
        """Whether there was an Event to renew."""
        change: dict[str, Any] = {"lastTimestamp": _now(), "message": finding.message}
        if sent.count:
            change["count"] = sent.count + 1
        try:
            self._api.ask(
                f"{_path(finding)}/{_name(finding)}",
                method="PATCH",
                body=change,
                content_type="application/merge-patch+json",
                read=_ANSWER_S,
            )
        except kube.ApiError as error:
            if error.status == 404:
                return False
            raise
        sent.count += bool(sent.count)
        return True


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _path(finding: Finding) -> str:
    return f"/api/v1/namespaces/{finding.namespace}/events"


def _name(finding: Finding) -> str:
    digest = hashlib.sha256(f"{finding.uid}/{finding.reason}".encode()).hexdigest()[:16]
    return f"{finding.pod[:_NAME].rstrip('.-')}.{digest}"


def _event(finding: Finding, node: str) -> dict[str, Any]:
    now = _now()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": _name(finding), "namespace": finding.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": finding.namespace,
            "name": finding.pod,
            "uid": finding.uid,
        },
        "type": "Warning",
        "reason": finding.reason.value,
        "message": finding.message,
        "source": {"component": _COMPONENT, "host": node},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
