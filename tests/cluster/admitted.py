"""What the API server answers to a pod: the pod and kubectl's warnings, or the refusal; who was asked for it;
and what the monitor tells of it later.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baseimages import BUSYBOX
from harness import Cluster, ClusterError, wait_for
from product import component_pods, metrics, samples, scraped, series, value
from verbs import PROGRAMS

from isolator import names

DRY = "--dry-run=server"
ADMISSIONS = "kai_isolator_admissions_total"


@dataclass(frozen=True)
class Answer:
    """`pod` is empty where it was refused; `said` is what kubectl writes to standard error."""

    said: str
    pod: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str | None:
        """Our annotation on the pod."""
        found: str | None = (self.pod["metadata"].get("annotations") or {}).get(names.ANNOTATION_STATUS)
        return found

    def container(self, name: str = "main") -> dict[str, Any]:
        """One container, of whichever list."""
        spec = self.pod["spec"]
        every = [*spec["containers"], *(spec.get("initContainers") or [])]
        return next(dict(each) for each in every if each["name"] == name)

    def injected(self) -> list[str]:
        """Names of the containers that have the library mounted."""
        spec = self.pod["spec"]
        every = [*(spec.get("initContainers") or []), *spec["containers"]]
        return [c["name"] for c in every if names.PRELOAD_FILE in mount_paths(c)]

    def volume(self, name: str) -> dict[str, Any] | None:
        """One volume of the pod."""
        found = self.pod["spec"].get("volumes") or []
        return next((dict(volume) for volume in found if volume["name"] == name), None)

    def ours(self) -> list[str]:
        """Every name of ours in the pod's spec: volumes, mounts, the variable that only we set."""
        text = json.dumps(self.pod["spec"])
        return [name for name in (*names.VOLUMES, names.ENV_ISOLATOR_POD_UID) if name in text]


def mount_paths(container: Mapping[str, Any]) -> list[str]:
    """Where a container mounts something."""
    return [mount["mountPath"] for mount in container.get("volumeMounts") or []]


def submit(cluster: Cluster, document: Mapping[str, Any], namespace: str, *words: str) -> Answer:
    """`kubectl create` of one object, refused or not; `words` may hold DRY."""
    argv = [str(PROGRAMS / "kubectl"), "create", f"--namespace={namespace}", "-o=json", "-f=-", *words]
    done = subprocess.run(
        argv,
        env=cluster.environment(),
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Answer(done.stderr, json.loads(done.stdout) if done.returncode == 0 else {})


def accepted(cluster: Cluster, document: Mapping[str, Any], namespace: str, *words: str) -> Answer:
    """The same where it must not be refused."""
    answer = submit(cluster, document, namespace, *words)
    if not answer.pod:
        raise ClusterError(answer.said)
    return answer


def attach(cluster: Cluster, pod: str, namespace: str, name: str, **container: Any) -> None:
    """Adds an ephemeral container to a running pod; a refusal raises with its message."""
    command = ["sleep", "infinity"]
    added = {"name": name, "image": BUSYBOX, "imagePullPolicy": "Never", "command": command, **container}
    words = ["patch", "pod", pod, f"--namespace={namespace}", "--subresource=ephemeralcontainers"]
    # By a file, because an error repeats the words: what it says of the container is then the refusal's.
    patch = json.dumps({"spec": {"ephemeralContainers": [added]}})
    cluster.kubectl(*words, "--patch-file=/dev/stdin", input=patch)


def own_counts(cluster: Cluster) -> dict[tuple[str, str], int]:
    """The webhook's own count of its answers by action and reason, summed over the replicas."""
    total: dict[tuple[str, str], int] = {}
    for pod in component_pods(cluster, names.COMPONENT_WEBHOOK):
        for sample in series(samples(scraped(cluster, names.COMPONENT_WEBHOOK, pod)), ADMISSIONS):
            key = sample.labels["action"], sample.labels["reason"]
            total[key] = total.get(key, 0) + int(sample.value)
    return total


class Calls:
    """How often the API server asks our webhook, and what the webhook counts, since the last look."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last = self._now()

    def _now(self) -> tuple[int, dict[tuple[str, str], int]]:
        ours = (names.WEBHOOK_NAME, names.WEBHOOK_EPHEMERAL_NAME)
        return sum(self._cluster.webhook_calls(name) for name in ours), own_counts(self._cluster)

    def look(self) -> tuple[int, dict[tuple[str, str], int]]:
        """(calls of the API server, answers by action and reason that are new)."""
        (before_asked, before), self._last = self._last, self._now()
        asked, answered = self._last
        fresh = {key: count - before.get(key, 0) for key, count in answered.items()}
        return asked - before_asked, {key: count for key, count in fresh.items() if count}


class Watch:
    """What the monitor of its node tells about a running pod."""

    def __init__(self, cluster: Cluster, namespace: str, pod: str) -> None:
        self.cluster, self.namespace, self.pod = cluster, namespace, pod
        self.node = cluster.get("pod", pod, namespace=namespace)["spec"]["nodeName"]

    def states(self) -> set[str]:
        """The states that hold for its containers."""
        found = series(
            metrics(self.cluster, self.node),
            "kai_isolator_container_state",
            namespace=self.namespace,
            pod=self.pod,
        )
        return {each.labels["state"] for each in found if each.value == 1}

    def uncapped(self, reason: str) -> float:
        """Uncapped containers of the node for this reason."""
        found = value(metrics(self.cluster, self.node), "kai_isolator_uncapped_containers", reason=reason)
        assert found is not None
        return found

    def wait_state(self, state: str) -> None:
        """Waits until that is the state of its one container."""
        wait_for(lambda: self.states() == {state}, 30, f"state {state}")

    def wait_event(self, reason: str, text: str, timeout: float = 60) -> None:
        """Waits for a warning Event of ours on the pod."""

        def told() -> bool:
            found = self.cluster.events(self.pod, namespace=self.namespace)
            return any(
                e["reason"] == reason and e["type"] == "Warning" and text in e["message"] for e in found
            )

        wait_for(told, timeout, f"Event {reason} with {text!r}")
