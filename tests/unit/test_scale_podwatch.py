"""What the monitors of 5,000 nodes ask of an API server: from its cache alone, and not all at one moment."""

from __future__ import annotations

import random

import monitor_pods as made
import pytest
from monitor_apiserver import NODE, ApiServer

from isolator import kube
from isolator.monitor import podwatch
from isolator.monitor.podwatch import PodWatch


class _Clock:
    """The time that podwatch sees."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(podwatch, "time", clock)
    return clock


def _watch(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> tuple[PodWatch, list[int]]:
    """A watch whose thread does not run, and how long each of its watches was to be."""
    watch, followed = PodWatch(kube.Api(api.configuration()), NODE, made.MOUNT, resync=300), []
    monkeypatch.setattr(watch, "_follow", followed.append)
    monkeypatch.setattr(watch._stop, "wait", lambda _: True)
    return watch, followed


def test_monitors_that_start_together_part(monkeypatch: pytest.MonkeyPatch, clock: _Clock) -> None:
    """The second lists of many that listed at one moment are spread over the interval; later ones stay so."""
    monkeypatch.setattr(podwatch.random, "uniform", random.Random(5).uniform)
    with ApiServer() as api:
        watch, followed = _watch(api, monkeypatch)
        seconds = []
        for _ in range(200):
            clock.now, watch._next_list = 1000.0, 0.0
            watch._step()
            seconds.append(watch._next_list - 1000)
        assert min(seconds) >= 60 and max(seconds) <= 300
        # Of ten equal parts of the time between, none has more than twice its share.
        parts = [sum(60 + 24 * i <= s < 84 + 24 * i for s in seconds) for i in range(10)]
        assert max(parts) <= 40 and min(parts) >= 5
        clock.now = watch._next_list
        watch._step()
        assert watch._next_list == clock.now + 300
        assert followed[-1] == 300


def test_no_list_and_no_node_comes_from_the_store(monkeypatch: pytest.MonkeyPatch, clock: _Clock) -> None:
    """Each list names a version, so that the API server's cache answers; after a failure any version."""
    with ApiServer() as api:
        watch, _ = _watch(api, monkeypatch)
        for fails in (None, None, 503, None, 429, None):
            api.fail, watch._next_list = fails, 0.0
            try:
                watch._step()
            except kube.ApiError as error:
                assert error.status == fails
        lists = [query["resourceVersion"] for _, path, query in api.requests if path == "/api/v1/pods"]
        assert lists == ["0", str(api.version), str(api.version), "0", str(api.version), "0"]
        nodes = [query for _, path, query in api.requests if path.startswith("/api/v1/nodes/")]
        assert nodes == [{"resourceVersion": "0"}] * 4


def test_monitors_that_were_cut_off_together_come_back_apart() -> None:
    """The first attempts are spread over five seconds, later ones over 30, and nobody waits for longer."""
    chance = random.Random(3)
    first = [podwatch.pause(1, chance=chance) for _ in range(2000)]
    parts = [sum(part / 2 <= wait < (part + 1) / 2 for wait in first) for part in range(10)]
    assert max(parts) <= 300 and sum(parts) == 2000
    for failures in range(1, 40):
        assert 0.25 <= podwatch.pause(failures, chance=chance) <= 30
    assert max(podwatch.pause(9, chance=chance) for _ in range(100)) > 20
