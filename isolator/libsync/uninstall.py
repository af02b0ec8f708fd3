"""The hook of librarySync.removeOnUninstall: every node's installer takes its files off before Helm goes on.

Runs in the cluster with a service account that may get and patch the one DaemonSet (apps) and, to tell each
node's outcome, list pods of the namespace. Idempotent; bounded in time.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from isolator import logs
from isolator.errors import IsolatorError, UnavailableError
from isolator.libsync.arguments import Parser, add_logging
from isolator.names import LIBSYNC_PORT, READY_PATH

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REMOVE: Final = "--remove"
STRATEGIC: Final = "application/strategic-merge-patch+json"
POLL: Final = 1.0
LARGEST: Final = 8 << 20
TELLING: Final = 20.0
"""Seconds in all for asking the installers; who did not answer by then has a log."""
NO_PROXY: Final = urllib.request.ProxyHandler({})

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Api:
    """The API server as a pod reaches it; the token is read anew each time, because it is renewed."""

    base: str
    account: Path = ACCOUNT

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The decoded answer, None for 404. A body is a patch. Raises UnavailableError with the reason."""
        request = urllib.request.Request(self.base + path, method=method)
        token = self.account / "token"
        if token.is_file():
            request.add_header("Authorization", f"Bearer {token.read_text().strip()}")
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            request.add_header("Content-Type", STRATEGIC)
        authority = self.account / "ca.crt"
        trust = ssl.create_default_context(cafile=str(authority) if authority.is_file() else None)
        try:
            opener = urllib.request.build_opener(NO_PROXY, urllib.request.HTTPSHandler(context=trust))
            with opener.open(request, data, timeout=10) as answer:
                return json.loads(answer.read(LARGEST))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise UnavailableError(f"{method} {path}: {error.code} {_reason(error)}") from error
        except (OSError, ValueError) as error:
            raise UnavailableError(f"{method} {path}: {getattr(error, 'reason', error)}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(LARGEST))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason


def api_of(environment: Mapping[str, str]) -> Api:
    """The API server that the kubelet tells every pod. Raises UnavailableError outside of a pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise UnavailableError("KUBERNETES_SERVICE_HOST is not set: this hook runs in a pod of the cluster")
    return Api(f"https://{f'[{host}]' if ':' in host else host}:{port}")


def patch_of(daemonset: dict[str, Any]) -> dict[str, Any] | None:
    """Strategic merge patch that has the installer remove, on all nodes at once; None where it already does.

    Lists of arguments are replaced as a whole by such a patch, so the found one is sent back with one more.
    """
    for container in daemonset["spec"]["template"]["spec"]["containers"]:
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        if not {"libsync", "isolator.libsync"} & set(words):
            continue
        if REMOVE in words:
            return None
        key = "args" if container.get("args") else "command"
        changed = {"name": container["name"], key: [*container[key], REMOVE]}
        # Nothing of these pods could become unavailable, so all nodes may go at once.
        strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%", "maxSurge": 0}}
        spec: dict[str, Any] = {"containers": [changed]}
        # A removal needs no library, and must not wait for the image of one.
        if daemonset["spec"]["template"]["spec"].get("initContainers"):
            spec["initContainers"] = None
        return {"spec": {"updateStrategy": strategy, "template": {"spec": spec}}}
    raise UnavailableError("the DaemonSet has no container that runs isolator libsync")


def progress(daemonset: dict[str, Any]) -> tuple[int, int]:
    """Nodes with their outcome, and nodes in all; (0, -1) until the controller has seen the patch."""
    state = daemonset.get("status", {})
    if state.get("observedGeneration", 0) < daemonset["metadata"].get("generation", 0):
        return 0, -1
    done = min(state.get("updatedNumberScheduled", 0), state.get("numberReady", 0))
    return done, state.get("desiredNumberScheduled", 0)


def run(api: Api, namespace: str, name: str, seconds: float) -> int:
    """Patches, waits, tells; answers 0 when every node has its outcome and 1 when time ran out."""
    path = f"/apis/apps/v1/namespaces/{urllib.parse.quote(namespace)}/daemonsets/{urllib.parse.quote(name)}"
    until = time.monotonic() + seconds
    found = api.call("GET", path)
    if found is None:
        log.info("no DaemonSet %s/%s: nothing to remove", namespace, name)
        return 0
    patch = patch_of(found)
    if patch is not None:
        found = api.call("PATCH", path, patch) or found
    trouble = ""
    done, wanted = progress(found)
    while done != wanted and time.monotonic() < until:
        time.sleep(POLL)
        try:
            found = api.call("GET", path)
        except UnavailableError as error:
            trouble = f" ({error})"  # an API server that restarts is no reason to give up
            continue
        if found is None:
            log.info("DaemonSet %s/%s is gone meanwhile", namespace, name)
            return 0
        trouble = ""
        done, wanted = progress(found)
    tell(api, namespace, found)
    if done == wanted:
        log.info("all %d node(s) have their outcome", wanted)
        return 0
    log.error(
        "%d of %s node(s) have their outcome after %g s%s: the others keep the library, remove it by hand",
        done,
        wanted if wanted >= 0 else "all",
        seconds,
        trouble,
    )
    return 1


def tell(api: Api, namespace: str, daemonset: dict[str, Any]) -> None:
    """One line a node: what its installer answers; without the right to list pods, one line that says so."""
    labels = daemonset["spec"]["selector"].get("matchLabels", {})
    selector = urllib.parse.quote(",".join(f"{key}={value}" for key, value in labels.items()))
    try:
        pods = api.call(
            "GET", f"/api/v1/namespaces/{urllib.parse.quote(namespace)}/pods?labelSelector={selector}"
        )
    except UnavailableError as error:
        log.info("outcome of each node: see the installers' logs (%s)", error)
        return
    until = time.monotonic() + TELLING
    for pod in (pods or {}).get("items", []):
        if time.monotonic() >= until:
            log.info("outcome of the other nodes: see the installers' logs")
            return
        address = pod.get("status", {}).get("podIP")
        node = pod.get("spec", {}).get("nodeName", "?")
        log.info("node %s: %s", node, _ask(address, _port(pod)) if address else "no installer runs there")


def _port(pod: dict[str, Any]) -> int:
    """Where the installer of that pod answers: librarySync.port, which the chart names `health`."""
    for container in pod.get("spec", {}).get("containers", []):
        for port in container.get("ports") or []:
            if port.get("name") == "health":
                return int(port["containerPort"])
    return LIBSYNC_PORT


def _ask(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    try:
        opener = urllib.request.build_opener(NO_PROXY)
        with opener.open(f"http://{host}:{port}{READY_PATH}", timeout=2) as answer:
            return str(answer.read(2000).decode("utf-8", "replace")).strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.read(2000).decode("utf-8", "replace").strip()
    except OSError as error:
        return f"no answer from its installer ({getattr(error, 'reason', error)})"


def main(arguments: list[str]) -> int:
    """The verb of the hook; an error is one line and exit status 1."""
    parser = Parser(
        prog="isolator libsync uninstall",
        description="Take the installation off every node where no injected pod is left, and wait for it.",
    )
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--daemonset", required=True, help="name of libsync's DaemonSet")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait (%(default)s)")
    parser.add_argument("--api", help="URL of the API server (the one every pod is told)")
    parser.add_argument("--account", type=Path, default=ACCOUNT, help="folder of token and ca.crt")
    add_logging(parser)
    asked = parser.parse_args(arguments)
    logs.setup(asked.log_level, asked.log_json)
    try:
        api = Api(asked.api.rstrip("/") if asked.api else api_of(os.environ).base, asked.account)
        return run(api, asked.namespace, asked.daemonset, asked.timeout)
    except IsolatorError as error:
        print(f"isolator libsync uninstall: {error}", file=sys.stderr)
        return 1
