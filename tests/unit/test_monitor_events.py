"""Events on pods: one a pod and reason, renewed rarely, bounded, and never an exception."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from monitor_apiserver import NODE, ApiServer

from isolator import kube
from isolator.monitor import events
from isolator.monitor.enforcement import NO_LIMIT
from isolator.monitor.events import Reporter
from isolator.monitor.model import PodView, Snapshot, State, Uncapped, Verdict


class Clock:
    """Seconds that only pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reporter(api: ApiServer, clock: Clock) -> Reporter:
    return Reporter(kube.Api(api.configuration()), NODE, clock)


def _verdict(pod: str = "p", state: State = State.UNCAPPED, **given: Any) -> Verdict:
    uncapped = Uncapped.NOT_INJECTED if state is State.UNCAPPED else None
    return Verdict("team", pod, given.pop("container", "main"), state, uncapped, "why", **given)


def _snapshot(*verdicts: Verdict) -> Snapshot:
    pods = {f"uid-{v.pod}": PodView("team", v.pod, f"uid-{v.pod}") for v in verdicts}
    return Snapshot(NODE, 0.0, pods=pods, verdicts=verdicts)


def test_uncapped_pod_gets_a_warning_that_says_why(api: ApiServer, reporter: Reporter) -> None:
    """The Event is on the pod, of type Warning, with the container, the reason and what to do."""
    assert reporter.report(_snapshot(_verdict())) == 1

    (event,) = api.events.values()
    assert (event["type"], event["reason"]) == ("Warning", "GPUMemoryUncapped")
    about = event["involvedObject"]
    assert (about["kind"], about["namespace"], about["name"], about["uid"]) == ("Pod", "team", "p", "uid-p")
    assert "Container main" in event["message"]
    assert "(why)" in event["message"]
    assert "recreate the pod" in event["message"]
    assert event["source"]["component"] == "kai-resource-isolator-monitor"
    assert event["count"] == 1
    assert event["firstTimestamp"]


@pytest.mark.parametrize("kind", list(Uncapped))
def test_each_kind_of_uncapped_says_what_to_do(kind: Uncapped) -> None:
    """No kind is without its sentence."""
    (finding,) = events.findings(_snapshot(Verdict("team", "p", "main", State.UNCAPPED, kind, "why")))

    assert finding.message.endswith(".")


def test_mismatch_and_tampering_are_reasons_of_their_own(api: ApiServer, reporter: Reporter) -> None:
    """One pod may have several findings, each an Event."""
    reporter.report(_snapshot(_verdict(state=State.ENFORCED, mismatch=True, tampered=True, expected_limit=5)))

    reasons = {event["reason"] for event in api.events.values()}
    assert reasons == {"GPUMemoryLimitMismatch", "GPUMemoryTampered"}


def test_capped_pods_get_no_event(api: ApiServer, reporter: Reporter) -> None:
    """Enforced and idle containers without a finding are silent."""
    quiet = [_verdict(s, State(s), mismatch=False, tampered=False) for s in ("enforced", "idle")]

    assert reporter.report(_snapshot(*quiet)) == 0
    assert not api.requests


@pytest.mark.parametrize(
    ("reason", "advice"), [(NO_LIMIT, "HAMi-core mode"), ("a start of CUDA was refused", "standard error")]
)
def test_refused_pod_is_told_why(reason: str, advice: str) -> None:
    """A container in which CUDA does not start has an Event with the cause and what to do."""
    (finding,) = events.findings(_snapshot(Verdict("team", "p", "main", State.REFUSED, None, reason)))

    assert finding.reason == "GPUMemoryRefused"
    assert f"({reason})" in finding.message
    assert advice in finding.message


def test_two_containers_of_a_pod_make_one_event(api: ApiServer, reporter: Reporter) -> None:
    """A pod's Event of a reason stands for all its containers."""
    reporter.report(_snapshot(_verdict(container="a"), _verdict(container="b")))

    assert len(api.events) == 1


def test_event_is_renewed_once_an_hour_at_most(api: ApiServer, reporter: Reporter, clock: Clock) -> None:
    """Passes within the hour send nothing; after it the same Event's count grows."""
    for _ in range(5):
        reporter.report(_snapshot(_verdict()))
        clock.now += 60
    assert len(api.requests) == 1

    clock.now += events.RENEW
    reporter.report(_snapshot(_verdict()))
    (event,) = api.events.values()
    assert event["count"] == 2


def test_event_that_the_server_forgot_is_made_again(api: ApiServer, reporter: Reporter, clock: Clock) -> None:
    """The API server drops Events after a time; the next renewal makes a new one."""
    reporter.report(_snapshot(_verdict()))
    api.events.clear()
    clock.now += events.RENEW
    reporter.report(_snapshot(_verdict()))

    assert len(api.events) == 1


def test_restarted_monitor_renews_the_event_it_finds(api: ApiServer, reporter: Reporter) -> None:
    """A second reporter makes no second Event of the same finding."""
    reporter.report(_snapshot(_verdict()))
    Reporter(kube.Api(api.configuration()), NODE).report(_snapshot(_verdict()))

    assert len(api.events) == 1
    assert [method for method, _, _ in api.requests] == ["POST", "POST", "PATCH"]


def test_a_node_full_of_findings_is_told_in_portions(
    api: ApiServer, reporter: Reporter, clock: Clock
) -> None:
    """At most three Events a pass; the rest follows in the next ones."""
    snapshot = _snapshot(*(_verdict(f"p{number}") for number in range(8)))

    assert [reporter.report(snapshot) for _ in range(4)] == [3, 3, 2, 0]
    assert len(api.events) == 8


def test_refused_events_are_said_once_and_tried_again(
    api: ApiServer, reporter: Reporter, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the right to make Events there is one line, a rare retry, and no exception."""
    caplog.set_level(logging.WARNING)
    api.fail_events = 403
    for _ in range(20):
        reporter.report(_snapshot(_verdict(), _verdict("q")))
        clock.now += 15
    assert len(caplog.records) == 1
    assert "403" in caplog.text
    assert len(api.requests) <= 2 * 6

    api.fail_events = None
    clock.now += events.RETRY
    assert reporter.report(_snapshot(_verdict())) == 1


def test_findings_of_pods_that_are_gone_are_forgotten(reporter: Reporter, clock: Clock) -> None:
    """What was sent is remembered for an hour after the finding ended, not for ever."""
    reporter.report(_snapshot(_verdict()))
    clock.now += events.RENEW
    reporter.report(_snapshot())

    assert reporter._sent == {}


def test_long_pod_names_make_valid_event_names(api: ApiServer, reporter: Reporter) -> None:
    """A name of 253 characters is cut, and stays one of its own for each pod."""
    names = ["p" * 250 + end for end in ("aaa", "bbb")]
    reporter.report(_snapshot(*(_verdict(name) for name in names)))

    assert len(api.events) == 2
    assert max(map(len, api.events)) <= 253


def test_namespace_that_refuses_keeps_nothing_from_the_others(
    api: ApiServer, reporter: Reporter, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the right in one namespace its Events wait a minute each time, and the others are sent."""
    caplog.set_level(logging.WARNING)
    api.refuse_events = {"team"}
    pods = {"p": "team", "q": "team", "r": "open", "s": "open"}
    views = {f"uid-{name}": PodView(space, name, f"uid-{name}") for name, space in pods.items()}
    verdicts = tuple(
        Verdict(space, name, "main", State.UNCAPPED, Uncapped.NOT_INJECTED, "why")
        for name, space in pods.items()
    )
    snapshot = Snapshot(NODE, 0.0, pods=views, verdicts=verdicts)

    assert reporter.report(snapshot) == 2
    assert {event["metadata"]["namespace"] for event in api.events.values()} == {"open"}
    assert len(api.requests) == 3, "one refusal stands for the namespace"
    for _ in range(8):
        clock.now += 15
        reporter.report(snapshot)
    assert len(api.requests) == 5
    assert len(caplog.records) == 1 and "namespace team" in caplog.text

    api.refuse_events = set()
    clock.now += events.RETRY
    assert reporter.report(snapshot) == 2
