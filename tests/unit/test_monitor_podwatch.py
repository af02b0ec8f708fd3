"""The watch of a node's pods, over real HTTP against a server that misbehaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import monitor_pods as made
import pytest
from monitor_apiserver import NODE, ApiServer

from isolator import kube
from isolator.monitor.podwatch import PodWatch

PATIENCE = 20.0


def until(true: Callable[[], object], what: str) -> None:
    """Waits for something that a thread does."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
        time.sleep(0.01)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


Start = Callable[..., PodWatch]


@pytest.fixture
def start(api: ApiServer) -> Iterator[Start]:
    started: list[PodWatch] = []

    def make(resync: float = 300.0, silence: float = 30.0) -> PodWatch:
        core = kube.Api(api.configuration())
        watch = PodWatch(core, NODE, made.MOUNT, resync, wait_min=0.02, silence=silence)
        watch.start()
        started.append(watch)
        return watch

    yield make
    for watch in started:
        watch.stop()


def _uids(watch: PodWatch) -> set[str]:
    return set(watch.pods())


def test_pods_are_listed_and_followed(api: ApiServer, start: Start) -> None:
    """Listed pods are there; later ones come, change and go by the watch, with one list in all."""
    api.put(made.pod(1))
    watch = start()
    until(lambda: watch.up and api.watching(), "the watch is open")
    assert _uids(watch) == {made.uid(1)}
    assert watch.label == "15360"

    api.put(made.pod(2))
    until(lambda: made.uid(2) in watch.pods(), "an added pod is there")
    api.put(made.pod(2, phase="Succeeded"))
    until(lambda: not watch.pods()[made.uid(2)].live, "a finished pod is not live")
    api.delete(made.uid(2))
    until(lambda: _uids(watch) == {made.uid(1)}, "a deleted pod is gone")
    assert api.count(watch=False) == 1


def test_only_this_node_is_asked_for(api: ApiServer, start: Start) -> None:
    """List and watch name the node and leave finished pods out: those lie about in any number and size."""
    start()
    until(api.watching, "the watch is open")

    asked = [query for _, path, query in api.requests if path == "/api/v1/pods"]
    unfinished = "status.phase!=Succeeded,status.phase!=Failed"
    assert {query["fieldSelector"] for query in asked} == {f"spec.nodeName={NODE},{unfinished}"}


def test_dropped_watch_resumes_from_the_last_version(api: ApiServer, start: Start) -> None:
    """A cut connection costs no list: the next watch starts where the last one, or a bookmark, ended."""
    watch = start()
    until(api.watching, "the watch is open")
    api.bookmark()
    api.put(made.pod(3))
    until(lambda: watch.pods(), "the pod is there")
    version = api.version
    watches = api.count(watch=True)
    api.drop()
    until(lambda: api.count(watch=True) > watches and api.watching(), "the watch is open again")

    last = [query for _, _, query in api.requests if "watch" in query][-1]
    assert last["resourceVersion"] == str(version)
    assert api.count(watch=False) == 1
    until(lambda: watch.up, "the watch is up")


def test_bookmark_moves_the_version(api: ApiServer, start: Start) -> None:
    """After a bookmark alone, the next watch starts from it."""
    start()
    until(api.watching, "the watch is open")
    api.bookmark()
    api.bookmark()
    time.sleep(0.1)
    watches = api.count(watch=True)
    api.drop()
    until(lambda: api.count(watch=True) > watches, "a new watch")

    last = [query for _, _, query in api.requests if "watch" in query][-1]
    assert last["resourceVersion"] == str(api.version)


def test_expired_version_lists_again(api: ApiServer, start: Start) -> None:
    """410 Gone leads to a list, and what happened meanwhile is not lost."""
    api.put(made.pod(1))
    watch = start()
    until(api.watching, "the watch is open")
    with api.lock:
        del api.pods[made.uid(1)]
        api.silently(made.pod(2))
        api.expire()

    until(lambda: _uids(watch) == {made.uid(2)}, "the table is the server's")
    lists = [query for _, path, query in api.requests if path == "/api/v1/pods" and "watch" not in query]
    assert len(lists) == 2 and int(lists[-1]["resourceVersion"]) > 0


def test_last_pods_stay_while_the_server_is_away(api: ApiServer, start: Start) -> None:
    """With the API failing the table stays and the watch is down; it comes back by itself."""
    api.put(made.pod(1))
    watch = start()
    until(lambda: api.watching() and watch.up, "the watch is open")
    api.fail = 503
    api.drop()
    until(lambda: not watch.up, "the watch is down")
    assert _uids(watch) == {made.uid(1)}
    assert watch.listed

    api.fail = None
    api.put(made.pod(2))
    until(lambda: watch.up and _uids(watch) == {made.uid(1), made.uid(2)}, "the watch caught up")


def test_nothing_is_known_before_the_first_list(api: ApiServer, start: Start) -> None:
    """A server that refuses from the start leaves "not listed", which is not "no pods"."""
    api.fail = 403
    watch = start()
    until(lambda: api.requests, "the server was asked")

    assert (watch.listed, watch.up, watch.pods()) == (False, False, {})


def test_slow_server_is_waited_for(api: ApiServer, start: Start) -> None:
    """Answers that take a while are answers."""
    api.put(made.pod(1))
    api.slow = 0.5
    watch = start()

    until(lambda: _uids(watch) == {made.uid(1)}, "the pod is there")


def test_silent_watch_is_opened_anew(api: ApiServer, start: Start) -> None:
    """A watch without a line for long is taken for dead; the pods stay and the watch counts as up."""
    watch = start(silence=0.3)
    until(lambda: api.count(watch=True) >= 3, "several watches")

    assert api.count(watch=False) == 1
    assert watch.listed


def test_resync_finds_what_no_event_told(api: ApiServer, start: Start) -> None:
    """After the resync interval the node is listed again, and its label read again."""
    watch = start(resync=1.0)
    until(api.watching, "the watch is open")
    api.silently(made.pod(4))
    api.labels = {}

    until(lambda: made.uid(4) in watch.pods(), "the silent pod is there")
    until(lambda: watch.label is None, "the label is gone")


@pytest.mark.parametrize("line", [b"not json\n", b'{"type": "ADDED", "object": {"metadata": {}}}\n', b"[]\n"])
def test_rubbish_on_the_watch_does_not_end_it(api: ApiServer, start: Start, line: bytes) -> None:
    """A line that is no event, or an event that is no pod, costs at most that watch."""
    watch = start()
    until(api.watching, "the watch is open")
    api.say(line)
    api.put(made.pod(5))

    until(lambda: made.uid(5) in watch.pods(), "the next pod is there")


def test_refused_node_does_not_end_the_watch(api: ApiServer, start: Start) -> None:
    """Without the right to read the node the pods are followed all the same, and no label is known."""
    core = kube.Api(api.configuration())
    watch = PodWatch(core, "other-node", made.MOUNT)
    watch.refresh_node()

    assert watch.label is None
    assert [path for _, path, _ in api.requests] == ["/api/v1/nodes/other-node"]
    watch.refresh_node()
    assert len(api.requests) == 1, "asked again within 30 s"


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({}, "has no label"),
        ({"nvidia.com/gpu.memory": "16Gi"}, "is no number of MiB"),
        ({"nvidia.com/gpu.memory": str(15360 << 20)}, "is in bytes"),
        ({"nvidia.com/gpu.memory": "15360"}, ""),
    ],
)
def test_label_that_gives_no_limit_is_said_once(
    api: ApiServer, labels: dict[str, str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever set up the node learns that KAI's limits do not come right, and is not told every time."""
    api.labels = labels
    watch = PodWatch(kube.Api(api.configuration()), NODE, made.MOUNT)
    for _ in range(3):
        watch._read_node()

    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(says)
    assert all(says in message for message in messages)
