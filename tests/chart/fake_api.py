"""An API server that knows a few objects: enough for Helm's discovery and `lookup`, over plain HTTP.

It answers reads alone, so that a server-side dry run of Helm sees the cluster that a test describes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

# group -> kind -> (plural, namespaced); the groups are those that the chart's objects need.
KINDS: dict[str, dict[str, tuple[str, bool]]] = {
    "v1": {
        "Namespace": ("namespaces", False),
        "Node": ("nodes", False),
        "Pod": ("pods", True),
        "Secret": ("secrets", True),
        "Service": ("services", True),
        "ServiceAccount": ("serviceaccounts", True),
        "ConfigMap": ("configmaps", True),
    },
    "apps/v1": {"Deployment": ("deployments", True), "DaemonSet": ("daemonsets", True)},
    "policy/v1": {"PodDisruptionBudget": ("poddisruptionbudgets", True)},
    "rbac.authorization.k8s.io/v1": {
        "Role": ("roles", True),
        "RoleBinding": ("rolebindings", True),
        "ClusterRole": ("clusterroles", False),
        "ClusterRoleBinding": ("clusterrolebindings", False),
    },
    "monitoring.coreos.com/v1": {
        "ServiceMonitor": ("servicemonitors", True),
        "PodMonitor": ("podmonitors", True),
    },
    "admissionregistration.k8s.io/v1": {
        "MutatingWebhookConfiguration": ("mutatingwebhookconfigurations", False),
        "ValidatingAdmissionPolicy": ("validatingadmissionpolicies", False),
        "ValidatingAdmissionPolicyBinding": ("validatingadmissionpolicybindings", False),
    },
}


def _root(group: str) -> str:
    return "/api/v1" if group == "v1" else f"/apis/{group}"


def _answers(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Every path that is answered; others are 404."""
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.4"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = []
    for group, kinds in KINDS.items():
        resources = [
            {
                "name": plural,
                "singularName": kind.lower(),
                "namespaced": inside,
                "kind": kind,
                "verbs": ["get", "list"],
            }
            for kind, (plural, inside) in kinds.items()
        ]
        answers[_root(group)] = {"kind": "APIResourceList", "groupVersion": group, "resources": resources}
        if group != "v1":
            version = {"groupVersion": group, "version": "v1"}
            groups.append({"name": group.split("/")[0], "versions": [version], "preferredVersion": version})
        for kind, (plural, _) in kinds.items():
            items = [item for item in objects if (item["apiVersion"], item["kind"]) == (group, kind)]
            answers[f"{_root(group)}/{plural}"] = {"kind": f"{kind}List", "apiVersion": group, "items": items}
            for item in items:
                space = item["metadata"].get("namespace")
                place = f"namespaces/{space}/{plural}" if space else plural
                answers[f"{_root(group)}/{place}/{item['metadata']['name']}"] = item
    answers["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return answers


@contextmanager
def cluster(objects: list[dict[str, Any]], folder: Path, forbidden: tuple[str, ...] = ()) -> Iterator[Path]:
    """Serves `objects` until the end of the block; yields the path of a kubeconfig.

    Paths that end in one of `forbidden` are answered 403.
    """
    answers = _answers(objects)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else head and body are 40 ms apart

        def do_GET(self) -> None:
            path = self.path.split("?")[0].rstrip("/")
            found = answers.get(path)
            if found is None and "/namespaces/" in path and path.endswith(("/secrets", "/configmaps")):
                found = {"kind": "List", "apiVersion": "v1", "items": []}  # Helm's own records: none
            status = 404 if found is None else 200
            if path.endswith(forbidden):
                status = 403
            wrong = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": "no",
                "code": status,
            }
            body = json.dumps(found if status == 200 else wrong).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Keeps the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        config = folder / "kubeconfig"
        here = {"cluster": "c", "user": "u"}
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
                    ],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": "x", "context": here}],
                    "current-context": "x",
                }
            )
        )
        yield config
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
