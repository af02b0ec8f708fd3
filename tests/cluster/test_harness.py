"""The cluster itself: what the other tests of this folder rely on."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from baseimages import BUSYBOX
from doubles import admission
from harness import Cluster, ClusterError, wait_for


def pod(name: str, *command: str, node: str = "", **spec: Any) -> dict[str, Any]:
    """A busybox pod that is never restarted."""
    container = {"name": "main", "image": BUSYBOX, "imagePullPolicy": "Never", "command": list(command)}
    full: dict[str, Any] = {"containers": [container], "restartPolicy": "Never", **spec}
    if node:
        full["nodeName"] = node
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": full}


def test_server_and_nodes_report_the_release(cluster: Cluster) -> None:
    """The API server and both kubelets say a 1.35 release, no development version; the nodes are Ready."""
    server = kubernetes.client.VersionApi(cluster.client()).get_code()
    nodes = {
        item["metadata"]["name"]: item["status"]["nodeInfo"]["kubeletVersion"]
        for item in cluster.get("nodes")["items"]
    }

    assert (server.major, server.minor) == ("1", "35")
    assert server.git_version.startswith("v1.35.")
    assert nodes == {"n1": server.git_version, "n2": server.git_version}
    cluster.wait_nodes()


def test_gpu_labels(cluster: Cluster) -> None:
    """Every node gets the labels of GPU feature discovery on demand, and loses them again."""

    def labels() -> list[tuple[str | None, str | None]]:
        found = [item["metadata"]["labels"] for item in cluster.get("nodes")["items"]]
        return [(each.get("nvidia.com/gpu.memory"), each.get("nvidia.com/gpu.present")) for each in found]

    cluster.label_gpu(81559)
    assert labels() == [("81559", "true")] * 2
    cluster.label_gpu(None)
    assert labels() == [(None, None)] * 2


def test_default_admission_plugins_are_on(cluster: Cluster, namespace: str) -> None:
    """Pod security of a namespace is enforced, and a validating policy in CEL refuses what it should."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline")
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        cluster.apply([pod("host", "true", hostNetwork=True)], namespace)
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": namespace},
        "spec": {
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": "object.metadata.name != 'refused'", "message": "not this name"}],
        },
    }
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": namespace},
        "spec": {
            "policyName": namespace,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": selector},
        },
    }
    cluster.apply([policy, binding])

    def refused() -> bool:
        try:
            cluster.kubectl("create", "configmap", "refused", f"--namespace={namespace}", "--dry-run=server")
        except ClusterError as error:
            return "not this name" in str(error)
        return False

    try:
        wait_for(refused, 30, "the policy to be in force", every=0.3)
        cluster.kubectl("create", "configmap", "other", f"--namespace={namespace}")
    finally:
        cluster.delete("validatingadmissionpolicybinding", namespace)
        cluster.delete("validatingadmissionpolicy", namespace)


def test_pod_runs_on_each_node(cluster: Cluster, namespace: str) -> None:
    """A pod runs on each node with the limits it asked for; its log and a command in it are read back."""
    for name in cluster.nodes:
        made = pod(name, "sh", "-c", "echo from $(hostname); sleep 600", node=name)
        made["spec"]["containers"][0]["resources"] = {"limits": {"memory": "32Mi", "cpu": "100m"}}
        cluster.apply(made, namespace)
    for name in cluster.nodes:
        assert cluster.wait_pod(name, namespace=namespace)["spec"]["nodeName"] == name
        assert cluster.logs(name, namespace=namespace) == f"from {name}\n"
        assert cluster.exec_(name, ["sh", "-c", "echo $((6 * 7))"], namespace=namespace) == "42\n"
        with pytest.raises(ClusterError, match="exit code 3"):
            cluster.exec_(name, ["sh", "-c", "exit 3"], namespace=namespace)


def test_scheduler_places_and_limit_kills(cluster: Cluster, namespace: str) -> None:
    """A pod without a node is scheduled, and one that takes more memory than its limit is killed for it."""
    hog = pod("hog", "sh", "-c", "tail /dev/zero")
    hog["spec"]["containers"][0]["resources"] = {"limits": {"memory": "24Mi"}}
    cluster.apply(hog, namespace)

    ended = cluster.wait_pod("hog", "Failed", namespace=namespace)

    assert ended["spec"]["nodeName"] in cluster.nodes
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"


def test_pod_reaches_the_api(cluster: Cluster, namespace: str) -> None:
    """From a pod the API server is at its Service address, and the pod's token and CA work there."""
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    # busybox has no TLS that the server takes: the pod carries the bytes, the client is here.
    carry = 'exec nc -ll -p 8443 -e nc "$KUBERNETES_SERVICE_HOST" "$KUBERNETES_SERVICE_PORT"'
    cluster.apply(pod("carrier", "sh", "-c", carry), namespace)
    address = cluster.wait_pod("carrier", namespace=namespace)["status"]["podIP"]
    ca, token = (
        cluster.exec_("carrier", ["cat", f"{account}/{name}"], namespace=namespace)
        for name in ("ca.crt", "token")
    )
    context = ssl.create_default_context(cadata=ca)

    def answer() -> bytes:
        try:
            plain = socket.create_connection((address, 8443), timeout=10)
        except ConnectionRefusedError:
            return b""
        with plain, context.wrap_socket(plain, server_hostname="kubernetes.default.svc") as secure:
            ask = f"GET /apis/authentication.k8s.io/v1 HTTP/1.0\r\nAuthorization: Bearer {token}\r\n\r\n"
            secure.sendall(ask.encode())
            return b"".join(iter(lambda: secure.recv(65536), b""))

    found = wait_for(answer, 10, "the pod to listen")

    assert found.startswith(b"HTTP/1.0 200 OK"), found
    assert b"SelfSubjectReview" in found
    assert (
        cluster.exec_("carrier", ["sh", "-c", "echo $KUBERNETES_SERVICE_HOST"], namespace=namespace)
        == "10.96.0.1\n"
    )


def webhook(name: str, client: dict[str, Any], namespace: str) -> dict[str, Any]:
    """A mutating configuration of one webhook, for the pods of one namespace."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    hook = {
        "name": f"{name}.example.com",
        "clientConfig": client,
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 5,
    }
    kind = "MutatingWebhookConfiguration"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name},
        "webhooks": [hook],
    }


def label(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The patch of the webhooks here."""
    return [{"op": "add", "path": "/metadata/labels/seen", "value": request["operation"].lower()}]


@pytest.mark.parametrize("way", ["service", "url"])
def test_webhook_is_called(cluster: Cluster, namespace: str, way: str) -> None:
    """A mutating webhook is called and its calls counted: by Service (whose pod relays) and by URL."""
    service = f"hook.{namespace}.svc"
    with admission(cluster, label, [service]) as double:
        client: dict[str, Any] = {"caBundle": double.ca_bundle, "url": double.url}
        if way == "service":
            relay = ["nc", "-ll", "-p", "8443", "-e", "nc", double.address, str(double.port)]
            relaying = pod("hook", *relay)
            probe = {"tcpSocket": {"port": 8443}, "periodSeconds": 1}
            relaying["spec"]["containers"][0]["readinessProbe"] = probe
            ports = {"selector": {"app": "hook"}, "ports": [{"port": 443, "targetPort": 8443}]}
            named = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "hook"}, "spec": ports}
            cluster.apply([relaying, named], namespace)
            cluster.wait_pod("hook", namespace=namespace)
            # A pod is ready a moment before it is an endpoint, and until then a call is an error.
            ask = ["get", "endpointslices", f"--namespace={namespace}", "-o=jsonpath={..conditions.ready}"]
            wait_for(lambda: "true" in cluster.kubectl(*ask), 30, "the Service's endpoint")
            there = {"name": "hook", "namespace": namespace, "path": "/"}
            client = {"caBundle": double.ca_bundle, "service": there}
        cluster.apply(webhook(namespace, client, namespace))
        name = f"{namespace}.example.com"

        def changed() -> bool:
            answer = cluster.kubectl(
                "run", "p", f"--image={BUSYBOX}", f"--namespace={namespace}", "--dry-run=server", "-o=yaml"
            )
            return "seen: create" in answer

        try:
            wait_for(changed, 30, "the webhook to be called", every=0.3)
        finally:
            cluster.delete("mutatingwebhookconfiguration", namespace)
        assert double.requests[-1]["namespace"] == namespace
        assert cluster.webhook_calls(name, rejected="false") == len(double.requests)
    events = cluster.audit(verb="create", resource="pods", namespace=namespace, name="p")
    # Numbered by place among all webhooks of the cluster, other tests' among them.
    noted = events[-1]["annotations"].items()
    patches = [text for key, text in noted if key.startswith("patch.webhook.admission.k8s.io/round_0_")]
    assert any(namespace in text for text in patches)


def test_cut_node_goes_not_ready_and_heals(cluster: Cluster, namespace: str) -> None:
    """A node that is cut off becomes NotReady while the other stays Ready; it comes back with its pods."""
    cluster.apply(pod("stays", "sleep", "600", node="n2"), namespace)
    cluster.wait_pod("stays", namespace=namespace)
    cluster.node(2).cut()
    try:
        cluster.wait_nodes(False, ["n2"], timeout=60)
        cluster.wait_nodes(True, ["n1"], timeout=1)
    finally:
        cluster.node(2).heal()
    cluster.wait_nodes(True, timeout=60)

    back = cluster.wait_pod("stays", namespace=namespace)

    assert back["status"]["containerStatuses"][0]["restartCount"] == 0


def test_kubelet_and_server_restart(cluster: Cluster, namespace: str) -> None:
    """A pod outlives a restart of its kubelet and one of the API server."""
    cluster.apply(pod("outlives", "sleep", "600", node="n1"), namespace)
    cluster.wait_pod("outlives", namespace=namespace)
    node = cluster.node(1)
    node.stop_kubelet()
    assert "sleep" in node.run("ps -eo comm").stdout
    cluster.restart_apiserver()
    node.start_kubelet()
    cluster.wait_nodes(True, timeout=60)

    kept = cluster.wait_pod("outlives", namespace=namespace)

    assert kept["status"]["containerStatuses"][0]["restartCount"] == 0
    cluster.wait_exec("outlives", namespace=namespace)


def test_host_paths_are_the_nodes_own(cluster: Cluster, namespace: str) -> None:
    """What a pod writes to a host path lies on its node alone: not on the other one, nor on this machine."""
    place = f"/usr/local/{namespace}"
    volume = {"name": "host", "hostPath": {"path": place, "type": "DirectoryOrCreate"}}
    writer = pod("writer", "sh", "-c", "echo text >/host/file", node="n1", volumes=[volume])
    writer["spec"]["containers"][0]["volumeMounts"] = [{"name": "host", "mountPath": "/host"}]
    cluster.apply(writer, namespace)
    cluster.wait_pod("writer", "Succeeded", namespace=namespace)

    assert cluster.node(1).path(f"{place}/file").read_text() == "text\n"
    assert cluster.node(1).run(["cat", f"{place}/file"]).stdout == "text\n"
    assert not cluster.node(2).path(place).exists()
    assert not Path(place).exists()


@pytest.mark.parametrize("version", [3, 4])
def test_helm_installs(cluster: Cluster, namespace: str, tmp_path: Path, version: int) -> None:
    """Both Helms install a chart that asks for a Kubernetes release, wait for it and take it away."""
    chart = {"apiVersion": "v2", "name": "tiny", "version": "0.1.0", "kubeVersion": ">=1.30.0 <1.40.0"}
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("".join(f'{key}: "{value}"\n' for key, value in chart.items()))
    text = f"""
apiVersion: apps/v1
kind: Deployment
metadata: {{name: "{{{{ .Release.Name }}}}"}}
spec:
  selector: {{matchLabels: {{app: tiny}}}}
  template:
    metadata: {{labels: {{app: tiny}}}}
    spec:
      containers: [{{name: c, image: {BUSYBOX}, imagePullPolicy: Never, command: [sleep, "600"]}}]
"""
    (tmp_path / "templates/deployment.yaml").write_text(text)

    assert cluster.helm("version", "--short", version=version).startswith(f"v{version}.")
    words = [f"--namespace={namespace}", "--wait", "--timeout=60s"]
    cluster.helm("install", "tiny", str(tmp_path), *words, version=version)
    assert cluster.get("deployment", "tiny", namespace=namespace)["status"]["readyReplicas"] == 1
    cluster.helm("uninstall", "tiny", *words, version=version)
    assert cluster.get("deployments", namespace=namespace)["items"] == []
