"""Releases of the chart beside the shared one, and what the tests of its life ask of them.

A small release has a webhook for the pods of one scheduler of its own, and neither installer nor monitor:
it starts in seconds and leaves the shared release alone.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import product as given
from admitted import DRY, accepted
from cryptography import x509
from harness import Cluster, wait_for
from images_base import ROOT
from product import NAMESPACE, Product
from verbs import PROGRAMS

from isolator import names

CHART = ROOT / "charts/kai-resource-isolator"
KINDS = "mutatingwebhookconfigurations"


@functools.cache
def package() -> Path:
    """The chart's archive, as `make chart` makes it."""
    environment = {**os.environ, "HELM": str(PROGRAMS / "helm4")}
    done = subprocess.run([ROOT / ".ci/chart"], env=environment, capture_output=True, text=True, check=True)
    return ROOT / done.stdout.strip().rpartition(": ")[2]


def small(name: str, **webhook: Any) -> dict[str, Any]:
    """Values of a release whose webhook cares for pods of the scheduler `name` alone; one replica."""
    own = {"configurationName": f"{name}-mutating", "schedulerNames": [name], "replicaCount": 1}
    nowhere = {"nodeSelector": {"nowhere": "true"}}
    values = {"webhook": {**own, "drainSeconds": 0, **webhook}, "librarySync": nowhere}
    return given.merged(given.image_values(), values)


class Release:
    """A release `name` in the namespace of that name."""

    def __init__(self, cluster: Cluster, name: str, values: Mapping[str, Any]) -> None:
        self.cluster, self.name, self.values = cluster, name, values
        self.webhook = f"{name}-webhook"
        self.configuration = values["webhook"]["configurationName"]

    def upgrade(
        self, values: Mapping[str, Any] | None = None, *flags: str, wait: str = "3m", version: int = 4
    ) -> str:
        """Installs or upgrades with its own values and `values` over them; what Helm says."""
        words = ["upgrade", "--install", self.name, str(CHART), f"--namespace={self.name}"]
        words += ["--create-namespace", "--reset-values", "--values=-", *flags]
        words += ["--wait", f"--timeout={wait}"] if wait else []
        text = json.dumps(given.merged(self.values, values or {}))
        return self.cluster.helm(*words, input=text, version=version)

    def remove(self) -> None:
        """Takes it away with its namespace, without its hook and without waiting for its pods."""
        words = [f"--namespace={self.name}", "--ignore-not-found", "--no-hooks"]
        self.cluster.helm("uninstall", self.name, *words)
        self.cluster.delete("namespace", self.name, wait=False)

    def bundle(self) -> bytes:
        """caBundle of the configuration, the same in each entry; empty where one has none."""
        entries = self.cluster.get(KINDS, self.configuration)["webhooks"]
        found = {entry["clientConfig"].get("caBundle", "") for entry in entries}
        return base64.b64decode(found.pop()) if len(found) == 1 else b""

    def secret(self, name: str = "") -> dict[str, bytes]:
        """Data of its Secret (the built-in one's); empty where there is none."""
        words = ["secret", name or f"{self.webhook}-tls", "--ignore-not-found"]
        text = self.cluster.kubectl("get", f"--namespace={self.name}", "-o=json", *words)
        data = json.loads(text or "{}").get("data") or {}
        return {key: base64.b64decode(value) for key, value in data.items()}

    def pods(self) -> list[dict[str, Any]]:
        """The webhook's pods that are not going away."""
        selector = f"--selector={names.COMPONENT_LABEL}={names.COMPONENT_WEBHOOK}"
        found = self.cluster.get("pods", selector, namespace=self.name)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def served(self, pod: Mapping[str, Any]) -> x509.Certificate:
        """What a replica serves, to a client that trusts caBundle alone and asks for the Service's name."""
        context = ssl.create_default_context(cadata=self.bundle().decode())
        host = f"{self.webhook}.{self.name}.svc"
        with (
            socket.create_connection((pod["status"]["podIP"], 8443), 10) as raw,
            context.wrap_socket(raw, server_hostname=host) as connection,
        ):
            certificate = connection.getpeercert(binary_form=True)
        assert certificate
        return x509.load_der_x509_certificate(certificate)

    def admit(self) -> str | None:
        """What the API server makes of a sharing pod of its scheduler: the status annotation of a dry run."""
        return accepted(self.cluster, self.pod("asks"), "default", DRY).status

    def wait_admits(self, timeout: float = 60) -> None:
        """Waits until it injects; the API server takes a moment to read a configuration again."""

        def there() -> bool:
            try:
                return self.admit() == "injected"
            except Exception as error:
                if "failed calling webhook" in str(error):
                    return False
                raise

        wait_for(there, timeout, f"{self.name} to admit", every=0.5)

    def pod(self, name: str) -> dict[str, Any]:
        """A sharing pod of its scheduler."""
        return given.tenant(name, schedulerName=self.name)


@contextmanager
def release(cluster: Cluster, name: str, **webhook: Any) -> Iterator[Release]:
    """A small release, not installed yet; goes away afterwards."""
    made = Release(cluster, name, small(name, **webhook))
    try:
        yield made
    finally:
        made.remove()


@contextmanager
def vacated(product: Product) -> Iterator[Cluster]:
    """The cluster without the shared release, which is put back afterwards."""
    cluster = product.cluster
    cluster.helm("uninstall", names.RELEASE, f"--namespace={NAMESPACE}", "--wait")
    try:
        yield cluster
    finally:
        product.install(product.values)
