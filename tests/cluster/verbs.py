"""What a test does with a cluster: kubectl, Helm, the client, and waiting for what it should see."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes
import yaml
from boxes import ClusterError, wait_for
from controlplane import ControlPlane
from nodes import Node

PROGRAMS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kai-resource-isolator/bin"
Objects = str | Mapping[str, Any] | Iterable[Mapping[str, Any]]
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Verbs:
    """The part of a `Cluster` that tests use once it is up."""

    root: Path
    logs_folder: Path
    kubeconfig: Path
    control: ControlPlane
    nodes: dict[str, Node]

    def node(self, number: int) -> Node:
        """Node `n<number>`."""
        return self.nodes[f"n{number}"]

    def environment(self) -> dict[str, str]:
        """Environment of kubectl and Helm: this cluster, no proxy, no files of the user."""
        kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        home = self.root / "home"
        helm = {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        return {**kept, **helm, "KUBECONFIG": str(self.kubeconfig), "HOME": str(home)}

    def _tool(self, argv: Sequence[str | Path], input: str | None, timeout: float) -> str:
        done = subprocess.run(
            [str(word) for word in argv],
            env=self.environment(),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            shown = " ".join(str(word) for word in argv[1:])[:300]
            raise ClusterError(f"{Path(argv[0]).name} {shown}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def kubectl(self, *words: str | Path, input: str | None = None, timeout: float = 120) -> str:
        """Standard output of kubectl as the cluster's administrator; a failure raises with its message."""
        return self._tool([PROGRAMS / "kubectl", *words], input, timeout)

    def helm(
        self, *words: str | Path, version: int = 4, input: str | None = None, timeout: float = 600
    ) -> str:
        """Standard output of Helm 3 or 4; a failure raises with its message."""
        return self._tool([PROGRAMS / f"helm{version}", *words], input, timeout)

    def client(self) -> kubernetes.client.ApiClient:
        """The official client, as administrator."""
        configuration = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(str(self.kubeconfig), client_configuration=configuration)
        configuration.proxy = None
        return kubernetes.client.ApiClient(configuration)

    def load_image(self, archive: Path) -> None:
        """Imports an archive (`docker save` or OCI layout as tar) on every node."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.load_image(archive), self.nodes.values()))

    def restart_apiserver(self) -> None:
        """Stops the API server, starts it again and waits until it is ready."""
        self.control.restart_apiserver()

    def apply(self, objects: Objects, namespace: str = "default") -> str:
        """Creates or changes objects, given as YAML text, one object or several; kubectl's answer."""
        if isinstance(objects, str):
            parsed = [each for each in yaml.safe_load_all(objects) if each]
        else:
            parsed = [objects] if isinstance(objects, Mapping) else list(objects)  # type: ignore[list-item]
        listed = {"apiVersion": "v1", "kind": "List", "items": parsed}
        return self.kubectl("apply", f"--namespace={namespace}", "-f", "-", input=json.dumps(listed))

    def get(self, *words: str, namespace: str = "default") -> Any:
        """The object, or the list, that `kubectl get` shows, as parsed JSON."""
        return json.loads(self.kubectl("get", f"--namespace={namespace}", "-o=json", *words))

    def delete(self, *words: str, namespace: str = "default", wait: bool = True, timeout: float = 60) -> None:
        """Deletes objects at once (no grace for pods); those that are gone are fine."""
        options = ["--ignore-not-found", "--now", f"--wait={str(wait).lower()}"]
        self.kubectl("delete", f"--namespace={namespace}", *options, *words, timeout=timeout)

    def logs(self, pod: str, *words: str, namespace: str = "default") -> str:
        """A pod's log; `words` go to `kubectl logs` (`--container=c`, `--previous`)."""
        return self.kubectl("logs", f"--namespace={namespace}", pod, *words)

    def wait_account(self, namespace: str = "default", timeout: float = 30) -> None:
        """Waits for the default service account of a namespace, without which no pod can be made there."""
        ask = ["get", f"--namespace={namespace}", "serviceaccount/default", "--ignore-not-found", "-o=name"]
        wait_for(lambda: self.kubectl(*ask), timeout, f"the service account of {namespace}")

    @contextmanager
    def space(self, name: str) -> Iterator[str]:
        """A new namespace that pods can be made in; goes away afterwards."""
        self.kubectl("create", "namespace", name)
        try:
            self.wait_account(name)
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")

    def exec_(
        self, pod: str, command: Sequence[str], *, container: str = "", namespace: str = "default"
    ) -> str:
        """Standard output of a command in a running container; a failing one raises with what it said."""
        chosen = [f"--container={container}"] if container else []
        return self.kubectl("exec", f"--namespace={namespace}", pod, *chosen, "--", *command)

    def wait_exec(self, pod: str, *, namespace: str = "default", timeout: float = 30) -> None:
        """Waits until a running pod takes commands; a kubelet just started learns of its pods anew."""

        def taken() -> bool:
            try:
                return "ok" in self.exec_(pod, ["echo", "ok"], namespace=namespace)
            except ClusterError:
                return False

        wait_for(taken, timeout, f"pod {namespace}/{pod} to take commands", every=0.3)

    def wait_pod(
        self, pod: str, phase: str = "Ready", *, namespace: str = "default", timeout: float = 60
    ) -> dict[str, Any]:
        """The pod once it is Ready, or in a phase (`Succeeded`, `Failed`, …); says where it got stuck."""
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.clear()
            seen.update(self.get("pod", pod, namespace=namespace))
            status = seen.get("status", {})
            conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
            return conditions.get("Ready") == "True" if phase == "Ready" else status.get("phase") == phase

        try:
            wait_for(there, timeout, f"pod {namespace}/{pod} to be {phase}", every=0.3)
        except ClusterError as error:
            events = [
                f"{each['reason']}: {each['message']}" for each in self.events(pod, namespace=namespace)
            ]
            status = json.dumps(seen.get("status", {}).get("containerStatuses"))
            raise ClusterError(f"{error}; containers {status}; events {events[-5:]}") from error
        return seen

    def events(self, name: str, *, namespace: str = "default") -> list[dict[str, Any]]:
        """The events about objects of a name, oldest first."""
        found = self.get("events", f"--field-selector=involvedObject.name={name}", namespace=namespace)
        return sorted(found["items"], key=lambda each: each["metadata"]["creationTimestamp"])

    def wait_rollout(self, what: str, *, namespace: str = "default", timeout: float = 120) -> None:
        """Waits until `deployment/x` or `daemonset/x` is rolled out."""
        words = [f"--namespace={namespace}", f"--timeout={timeout:.0f}s", what]
        self.kubectl("rollout", "status", *words, timeout=timeout + 10)

    def wait_nodes(self, ready: bool = True, names: Sequence[str] = (), timeout: float = 60) -> None:
        """Waits until the nodes (all of them, else those named) are Ready, or are not."""
        wanted = set(names or self.nodes)

        def there() -> bool:
            for node in self.nodes.values():
                for program in (node.containerd, node.kubelet):
                    if program and program.parent.returncode is None:
                        program.check()
            found = {
                item["metadata"]["name"]: any(
                    each["type"] == "Ready" and each["status"] == "True"
                    for each in item["status"].get("conditions", [])
                )
                for item in self.get("nodes")["items"]
            }
            return wanted <= found.keys() and all(found[name] == ready for name in wanted)

        wait_for(there, timeout, f"{sorted(wanted)} to be {'Ready' if ready else 'not Ready'}", every=0.3)

    def label_gpu(self, memory: int | str | None = 15360) -> None:
        """Labels every node as GPU feature discovery would, memory in MiB; None takes the labels away."""
        labels = {"nvidia.com/gpu.memory": memory, "nvidia.com/gpu.present": "true"}
        words = [f"{key}-" if memory is None else f"{key}={value}" for key, value in labels.items()]
        self.kubectl("label", "node", "--all", "--overwrite", *words)

    def metrics(self, name: str, /, **labels: str) -> float:
        """The sum of an API server metric over the series that have these labels."""
        total = 0.0
        for found, series, value in _SAMPLE.findall(self.kubectl("get", "--raw=/metrics")):
            if found == name and labels.items() <= dict(_LABEL.findall(series)).items():
                total += float(value)
        return total

    def webhook_calls(self, webhook: str, /, **labels: str) -> int:
        """How often the API server called a webhook (its name within the configuration) since its start.

        `labels` narrow it: `rejected="true"`, `operation="CREATE"`, `code="200"`.
        """
        return int(self.metrics("apiserver_admission_webhook_request_total", name=webhook, **labels))

    def audit(self, **wanted: str) -> list[dict[str, Any]]:
        """Audit events so far; `verb="create"`, `resource="pods"`, `namespace=…`, `name=…` narrow them."""
        found = []
        for event in self.control.audit():
            about = {**event.get("objectRef", {}), "verb": event["verb"]}
            if wanted.items() <= about.items():
                found.append(event)
        return found

    def collect_logs(self, folder: Path) -> None:
        """Copies every component's log, the audit log and the pods' logs into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.logs_folder.is_dir():
            shutil.copytree(self.logs_folder, folder, dirs_exist_ok=True)
        if hasattr(self, "control") and self.control.audit_log.exists():
            shutil.copy(self.control.audit_log, folder)
        for node in self.nodes.values():
            pods = node.path("/var/log/pods")
            if pods.is_dir():
                shutil.copytree(pods, folder / f"{node.name}-pods", dirs_exist_ok=True)
