"""Dry-run creations of pods at a fixed rate, whatever the answers take; each is counted, late ones too.

    with OpenLoop(cluster, [release.pod("a")], rate=100) as load:
        ...
    print(load.summary()); assert not load.failed()

Requests have their times from the start on: one that had to wait for a free connection is late, and its time
counts from when it was due.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import ssl
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from harness import Cluster

from isolator import names

LATE = 0.1
"""Seconds after its time from which the start of a request counts as late."""
PATH = "/api/v1/namespaces/default/pods?dryRun=All&fieldManager=openloop"


@dataclass(frozen=True)
class Done:
    """One request: which pod, when it was due, began and ended (monotonic s), and what became of it."""

    kind: int
    due: float
    began: float
    ended: float
    outcome: str


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values are; not a number without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def connector(cluster: Cluster) -> tuple[str, ssl.SSLContext]:
    """Address of the API server, and the administrator's TLS context."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    server, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    decoded = {key: base64.b64decode(text) for key, text in user.items()}
    context = ssl.create_default_context(
        cadata=base64.b64decode(server["certificate-authority-data"]).decode()
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(decoded["client-certificate-data"] + decoded["client-key-data"])
        file.flush()
        context.load_cert_chain(file.name)
    return urllib.parse.urlsplit(server["server"]).netloc, context


class OpenLoop:
    """`rate` creations a second of the pods in turn, by `workers` kept connections."""

    def __init__(
        self, cluster: Cluster, pods: Sequence[Mapping[str, Any]], rate: float = 100, workers: int = 48
    ) -> None:
        self.bodies = [json.dumps(pod).encode() for pod in pods]
        self.rate, self.done = rate, list[Done]()
        self.host, self.context = connector(cluster)
        self._numbers, self._taking = itertools.count(), threading.Lock()
        self._end = float("inf")
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(workers)]

    def __enter__(self) -> OpenLoop:
        self.start = time.monotonic() + 0.2
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """No request is due after now; waits for those that are under way."""
        self._end = min(self._end, time.monotonic())
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        connection = http.client.HTTPSConnection(self.host, timeout=40, context=self.context)
        with contextlib.closing(connection):
            self._work(connection)

    def _work(self, connection: http.client.HTTPSConnection) -> None:
        while True:
            with self._taking:
                number = next(self._numbers)
            due = self.start + number / self.rate
            while (left := due - time.monotonic()) > 0:
                if due >= self._end:
                    return
                time.sleep(min(left, 0.5))
            if due >= self._end:
                return
            kind, began = number % len(self.bodies), time.monotonic()
            outcome = self._ask(connection, self.bodies[kind])
            self.done.append(Done(kind, due, began, time.monotonic(), outcome))

    @staticmethod
    def _ask(connection: http.client.HTTPSConnection, body: bytes) -> str:
        try:
            connection.request("POST", PATH, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            read = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            return f"{type(error).__name__}: {error}"
        if answer.status != 201:
            return f"{answer.status} {read.get('message', '')}"[:300]
        notes = read["metadata"].get("annotations") or {}
        return str(notes.get(names.ANNOTATION_STATUS, "created"))

    def failed(self, wanted: Sequence[str] = ("injected",)) -> list[Done]:
        """Those that ended otherwise than the pod of their turn should."""
        return [each for each in self.done if each.outcome != wanted[each.kind % len(wanted)]]

    def milliseconds(self, kind: int, since: float = 0, until: float = float("inf")) -> list[float]:
        """From due to answered, of the requests of a pod that were due in a span of monotonic seconds."""
        return [
            1000 * (each.ended - each.due)
            for each in self.done
            if each.kind == kind and since <= each.due < until
        ]

    def summary(self) -> str:
        """The figures in one line."""
        took = [1000 * (each.ended - each.due) for each in self.done]
        late = sum(each.began - each.due > LATE for each in self.done)
        span = max((each.ended for each in self.done), default=self.start) - self.start
        return (
            f"{len(self.done)} creations in {span:.0f} s ({len(self.done) / max(span, 0.001):.1f}/s of"
            f" {self.rate:g}/s asked), {late} begun over {LATE * 1000:.0f} ms late,"
            f" p50 {percentile(took, 0.5):.1f} ms, p99 {percentile(took, 0.99):.1f} ms"
        )


def kept(path: Path, line: str) -> None:
    """Adds a line to a file of figures, and shows it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{line}\n")
    print(line)
