"""Keeps the table of this node's pods: list, then watch, then list again; and reads the node's label.

The raw JSON lines are read instead of the client's models: a node's pods then cost one small PodView each.
While the API server is away the last table stays, `up` is false, and the wait between attempts grows.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import urllib3

from isolator import kube, names
from isolator.monitor import grants, pods
from isolator.monitor.liststream import ListStream
from isolator.monitor.model import PodView
from isolator.monitor.worker import Worker

log = logging.getLogger(__name__)

_PODS: Final = "/api/v1/pods"
_UNFINISHED: Final = f"status.phase!={',status.phase!='.join(pods.ENDED)}"
"""Finished pods stay in the API in any number and of any size; one that ends is told as deleted."""
_SILENCE: Final = 90.0
"""Seconds without a line after which a watch is opened anew; bookmarks come every minute."""
_WATCH: Final = 300
_WAIT_MIN: Final = 0.5
_WAIT_MAX: Final = 30.0
_LINE: Final = 32 << 20
_PIECE: Final = 1 << 16
_GONE: Final = 410
"""HTTP status of a version whose later changes the server no longer has: list again."""
_ANY: Final = "0"
"""The version that stands for whatever the API server's cache has."""
_SOONEST: Final = 0.2
"""Share of the resync interval that lies between a list that came unplanned and the next, at least."""
_METADATA: Final = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io,application/json"
"""A node's status lists its images, some 8 KiB of which nothing is read here."""
_NODE_EVERY: Final = 30.0
_LABEL: Final = 63


def pause(failures: int, least: float = _WAIT_MIN, chance: Any = random) -> float:
    """Seconds before the attempt that follows so many failures.

    Anywhere in a range that grows: monitors that were cut off together do not come back together.
    """
    return float(chance.uniform(least / 2, min(_WAIT_MAX, 10 * least * 2 ** min(failures - 1, 10))))


class PodWatch(Worker):
    """The pods of one node, kept by a thread of its own. `resync` in seconds; `mount` as in pods.view."""

    def __init__(
        self,
        api: kube.Api,
        node: str,
        mount: str,
        resync: float = 300.0,
        wait_min: float = _WAIT_MIN,
        silence: float = _SILENCE,
    ) -> None:
        super().__init__("pod-watch")
        self._api, self._node, self._mount = api, node, mount
        self._resync, self._wait_min, self._silence = resync, wait_min, silence
        self._selector = f"spec.nodeName={node},{_UNFINISHED}"
        self._table = pods.PodTable()
        self._stream: Any = None
        self._version = _ANY
        self._next_list = 0.0
        self._said = ""
        self._said_node = ""
        self._node_lock = threading.Lock()
        self._node_asked = 0.0
        self._read_label = False
        self.listed = False
        """Whether the pods were listed once: before that nothing can be said of any container."""
        self.up = False
        """Whether the last exchange with the API server succeeded."""
        self.label: str | None = None
        """Raw text of the node's memory label; None where it is absent or was never read."""

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread; an open watch is cut."""
        self._stop.set()
        stream = self._stream
        if stream is not None:
            try:
                stream.shutdown()
            except (AttributeError, OSError, RuntimeError, ValueError):
                log.debug("the open watch could not be cut; it ends with the process")
        super().stop(timeout)

    def pods(self) -> dict[str, PodView]:
        """The last known pods of this node by UID."""
        return self._table.snapshot()

    def refresh_node(self) -> None:
        """Reads the node's label now, at most every 30 seconds; errors keep the last one."""
        with self._node_lock:
            if time.monotonic() - self._node_asked < _NODE_EVERY and self._node_asked:
                return
            self._node_asked = time.monotonic()
        self._read_node()

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._step()
                failures = 0
                continue
            except kube.FAILURES as error:
                failures += 1
                if isinstance(error, kube.ApiError) and error.status == _GONE:
                    self._next_list = 0.0
                    if failures == 1:
                        continue
                self._down(error)
            except Exception:  # the thread must outlive whatever a server may send
                failures += 1
                self._version, self._next_list = _ANY, 0.0
                self._down(RuntimeError("unexpected answer"))
                log.exception("pod watch: unexpected error; listing again")
            self._stop.wait(pause(failures, self._wait_min))

    def _step(self) -> None:
        """One list where it is due, and one watch from the last version on."""
        if time.monotonic() >= self._next_list:
            on_time = self._next_list > 0
            self._list()
            self._read_node()
            # Monitors that an upgrade started together, or a restarted API server sent here, part for good.
            wait = self._resync * (1.0 if on_time else random.uniform(_SOONEST, 1.0))
            self._next_list = time.monotonic() + wait
        began = time.monotonic()
        seconds = max(1, min(_WATCH, round(self._next_list - began)))
        self._follow(seconds)
        if time.monotonic() - began < self._wait_min:
            self._stop.wait(self._wait_min)

    def _down(self, error: BaseException) -> None:
        if self._stop.is_set():
            return
        self.up = False
        said = kube.reason(error)
        if said != self._said:
            log.warning("pod watch of node %s is down, the last known pods stay: %s", self._node, said)
        self._said = said

    def _alive(self) -> None:
        if self._said:
            log.info("pod watch of node %s is up again", self._node)
        self.up, self._said = True, ""

    def _list(self) -> None:
        # From the server's cache, no older than what we have; after any failure, whatever the cache has.
        # Never from the store: up to Kubernetes 1.30 that reads the whole cluster's pods for each node's.
        version, self._version = self._version, _ANY
        answer = self._api.open(_PODS, {"fieldSelector": self._selector, "resourceVersion": version})
        try:
            found = ListStream(answer.stream(_PIECE, decode_content=False))
            views = [view for item in found.items() if (view := self._view(item))]
        finally:
            answer.close()
        self._table.replace(views)
        self._version = found.fields["metadata"]["resourceVersion"]
        if self._table.dropped:
            log.warning("more than %d pods on this node: %d left out", pods.MAX_PODS, self._table.dropped)
        self.listed = True
        self._alive()

    def _view(self, item: Mapping[str, Any]) -> PodView | None:
        try:
            return pods.view(item, self._mount)
        except (AttributeError, KeyError, TypeError) as error:
            log.warning("a pod of this node cannot be read and is left out: %s", kube.reason(error))
            return None

    def _follow(self, seconds: int) -> None:
        """One watch; it ends by the server's clock, by silence, or with an error."""
        query = {
            "fieldSelector": self._selector,
            "resourceVersion": self._version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        self._stream = self._api.open(_PODS, query, read=self._silence)
        self._alive()
        try:
            for line in _lines(self._stream):
                self._take(json.loads(line))
                if self._stop.is_set():
                    return
        except urllib3.exceptions.ReadTimeoutError:
            log.debug("no line from the API server in %.0f s: opening a new watch", self._silence)
        finally:
            stream, self._stream = self._stream, None
            stream.close()

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise kube.ApiError(int(item.get("code") or 0), str(item.get("reason"))[:80])
        meta = item.get("metadata") or {}
        if kind in ("ADDED", "MODIFIED"):
            if view := self._view(item):
                self._table.put(view)
        elif kind == "DELETED":
            self._table.remove(str(meta.get("uid")))
        self._version = meta.get("resourceVersion") or self._version

    def _read_node(self) -> None:
        """The node's label; a refusal is said once and does not end the watch of the pods."""
        try:
            path = f"/api/v1/nodes/{quote(self._node, safe='')}"
            node = self._api.ask(path, {"resourceVersion": _ANY}, accept=_METADATA)
            labels = node["metadata"].get("labels") or {}
        except (*kube.FAILURES, KeyError, AttributeError) as error:
            said = kube.reason(error)
            if said != self._said_node:
                log.warning(
                    "node %s cannot be read, limits are not checked against grants: %s", self._node, said
                )
            self._said_node = said
            return
        self._said_node = ""
        found = labels.get(names.NODE_LABEL_GPU_MEMORY)
        label = None if found is None else str(found)[:_LABEL]
        if label != self.label or not self._read_label:
            _say_label(self._node, label)
        self.label, self._read_label = label, True


def _say_label(node: str, label: str | None) -> None:
    """What KAI makes of the label, where that is not a limit."""
    name = names.NODE_LABEL_GPU_MEMORY
    if label is None:
        log.warning("node %s has no label %s: KAI cannot compute limits, and none is checked", node, name)
    elif grants.card_mib(label) is None:
        log.warning("node %s: label %s=%r is no number of MiB: KAI cannot compute limits", node, name, label)
    elif grants.in_bytes(label):
        log.warning("node %s: label %s=%s is in bytes: KAI's limits hold nothing; set MiB", node, name, label)


def _lines(stream: Any) -> Iterator[bytes]:
    """The lines of a streamed answer; one of more than 32 MiB is an error (as of a list)."""
    rest = bytearray()
    for piece in stream.stream(amt=None, decode_content=False):
        rest += piece
        if len(rest) > _LINE:
            raise ValueError("a line of the watch is longer than 32 MiB")
        *whole, tail = rest.split(b"\n")
        rest = bytearray(tail)
        yield from (bytes(line) for line in whole if line.strip())
