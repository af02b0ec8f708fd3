"""A sound cluster as an API server told it, for the doctor's judgements, and a small API server."""

from __future__ import annotations

import base64
import copy
import datetime as dt
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from isolator import names
from isolator.doctor import cluster
from isolator.doctor.cluster_facts import Admission, Facts
from isolator.doctor.report import Report
from isolator.webhook import certs

RECORDED = Path(__file__).parent / "recorded" / "doctor_cluster.json"
Change = Callable[[Facts], object]


@functools.cache
def _recorded() -> dict[str, Any]:
    return dict(json.loads(RECORDED.read_text()))


def sound() -> Facts:
    """Two nodes, the release, KAI and one running tenant team-a/t1, recorded from a real API server."""
    told = copy.deepcopy(_recorded())
    now = dt.datetime.fromisoformat(told.pop("now"))
    secret = {key: text.encode() for key, text in told.pop("secret").items()}
    return Facts(now=now, secret=secret, admission=Admission(**told.pop("admission")), **told)


def judged(*changes: Change) -> Report:
    """What the doctor says of the sound cluster after these changes."""
    facts = sound()
    for change in changes:
        change(facts)
    report = Report("cluster", "https://api")
    cluster.judge(report, facts)
    return report.done()


def ids(report: Report) -> list[str]:
    """The causes, each once, in the table's order."""
    return list(dict.fromkeys(finding.cause.id for finding in report.findings))


# ---- changes ------------------------------------------------------------------------------------------

FAILED = (
    'Internal error occurred: failed calling webhook "{}": failed to call webhook: Post '
    '"https://w.n.svc:443/mutate?timeout=5s": {}'
)


def put(where: str, value: Any) -> Change:
    """Sets what lies at a path like `nodes.0.metadata.labels.x`; a part may be (quoted by /) with dots."""

    def change(facts: Facts) -> None:
        first, *rest = [part.replace("|", ".") for part in where.split(".")]
        if not rest:
            setattr(facts, first, value)
            return
        holder: Any = getattr(facts, first)
        for part in rest[:-1]:
            holder = holder[int(part)] if isinstance(holder, list) else holder.setdefault(part, {})
        last = int(rest[-1]) if isinstance(holder, list) else rest[-1]
        if value is None and isinstance(holder, dict):
            holder.pop(last, None)
        else:
            holder[last] = value

    return change


def refused(text: str) -> Change:
    """The API server's answer to a sharing pod."""
    return put("admission", Admission("default", refused=text))


def hook_failed(why: str, hook: str = names.WEBHOOK_NAME) -> Change:
    """It gets no answer from a webhook."""
    return refused(FAILED.format(hook, why))


def bundle(text: str) -> Change:
    """caBundle of both entries."""

    def change(facts: Facts) -> None:
        for entry in (facts.configuration or {})["webhooks"]:
            entry["clientConfig"]["caBundle"] = text

    return change


def secret(host: str = "", life: dt.timedelta = dt.timedelta(days=300), ago: int = 0) -> Change:
    """A Secret and caBundle of one CA, for the webhook's Service unless `host` is another."""

    def change(facts: Facts) -> None:
        assert facts.service
        made = facts.now - dt.timedelta(days=ago)
        ca = certs.issue_ca(made)
        own = f"{facts.service[1]}.{facts.service[0]}.svc"
        leaf = certs.issue_leaf(ca, [host or own], made, life)
        facts.secret = {"tls.crt": leaf.certificate_pem(), "ca.crt": ca.certificate_pem()}
        bundle(base64.b64encode(ca.certificate_pem()).decode())(facts)

    return change


def own_pod(component: str, index: int = 0, **status: Any) -> Change:
    """A pod of ours that is not ready, with this status; `told`: its /readyz."""
    told = status.pop("told", None)

    def change(facts: Facts) -> None:
        pod: Any = list(facts.pods_of(component))[index]
        pod["status"] = {"phase": "Running", "conditions": [], **status}
        if told:
            facts.told[pod["metadata"]["name"]] = told

    return change


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    """Status of a pod whose container waits."""
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}, **more}]}


def event(reason: str, message: str, kind: str, name: str) -> Change:
    """A warning in the release's namespace."""

    def change(facts: Facts) -> None:
        about = {"kind": kind, "name": name, "namespace": facts.namespace}
        assert facts.events is not None
        facts.events.append(
            {"reason": reason, "message": message, "involvedObject": about, "lastTimestamp": "2026-01-01"}
        )

    return change


def short(workload: int, said: str) -> list[Change]:
    """A DaemonSet that lacks a pod, for that reason."""
    name = sound().daemonsets[workload]["metadata"]["name"]  # type: ignore[index]
    return [
        put(f"daemonsets.{workload}.status.currentNumberScheduled", 1),
        event("FailedCreate", f"Error creating: {said}", "DaemonSet", name),
    ]


def monitor(where: str, value: Any) -> Change:
    """Something in n1's status document."""
    return put(f"monitors.n1.{where}", value)


def tenant(state: str, **more: Any) -> Change:
    """What n1's monitor says of a tenant."""
    entry = {"namespace": "x", "pod": "y", "container": "main", "state": state, **more}
    return monitor("tenants", [entry])


def dead(facts: Facts) -> None:
    """KAI's scheduler without a ready replica."""
    assert facts.kai is not None
    facts.kai.append({"metadata": {"name": "scheduler"}, "spec": {"replicas": 1}, "status": {}})


def kai_gone(facts: Facts) -> None:
    """Nothing of KAI's."""
    facts.kai, facts.validating = [], []
    facts.mutating = [
        item for item in facts.mutating or () if "kai-admission" not in item["metadata"]["name"]
    ]


# ---- a server ----------------------------------------------------------------------------------------


@contextmanager
def server(answers: dict[str, Any], status: int = 404, slow: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """(URL, paths that were asked for) of a server with JSON answers by path; `status` for every other path,
    after `slow` seconds. An answer (int, object) is a refusal."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(self.path)
            if path not in answers:
                time.sleep(slow)
            found = answers.get(path, (status, {"message": "no such thing"}))
            code, body = found if isinstance(found, tuple) else (200, found)
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        made.server_close()
        thread.join()
