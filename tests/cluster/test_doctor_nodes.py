"""`isolator doctor cluster` on a real cluster: faults of nodes, of KAI and of tenants, one after another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import product as given
import pytest
from baseimages import BUSYBOX
from doctorrun import SLOW, Doctor, finding, note
from harness import Cluster, wait_for
from kai import Kai
from product import Product, tenant, wait_running

from isolator import names

HOOKS = "admissionregistration.k8s.io/v1"
NOBODY = {"matchLabels": {"nobody": "here"}}


@pytest.fixture(scope="module")
def doctor(cluster: Cluster, product: Product, kai: Kai) -> Doctor:
    """The doctor of the session's cluster, healthy and with KAI."""
    return Doctor(cluster)


@pytest.fixture(scope="module")
def room(cluster: Cluster, doctor: Doctor, kai: Kai) -> Iterator[str]:
    """A namespace with one running tenant, `a`, on n1."""
    with cluster.space("doctor") as place:
        cluster.apply(tenant("a", nodeSelector={"kubernetes.io/hostname": "n1"}), place)
        wait_running(cluster, "a", namespace=place, kai=kai)
        yield place
        cluster.delete("pod", "--all", namespace=place)


@contextmanager
def there(cluster: Cluster, place: str, *objects: dict[str, Any]) -> Iterator[None]:
    """Objects that are there meanwhile."""
    cluster.apply(list(objects), place)
    try:
        yield
    finally:
        for each in objects:
            words = [each["kind"], each["metadata"]["name"]]
            cluster.delete(*words, namespace=each["metadata"].get("namespace", place))


@contextmanager
def labelled(cluster: Cluster, what: str, key: str, value: str | None, back: str | None) -> Iterator[None]:
    """A label of an object (kind/name) is another one meanwhile; None: it is not there."""

    def put(text: str | None) -> None:
        cluster.kubectl("label", "--overwrite", what, f"{key}-" if text is None else f"{key}={text}")

    put(value)
    try:
        yield
    finally:
        put(back)


# ---- health and access ---------------------------------------------------------------------------------


def test_a_healthy_cluster_is_silent(doctor: Doctor, room: str) -> None:
    """Nothing is found, nothing is left unchecked, nothing is left behind; a sharing pod alone likewise."""
    doctor.says("sound, one tenant", 0)
    found = doctor.look()
    assert found["healthy"] and found["unchecked"] == [] and len(found["checks"]) >= 15
    one = doctor.look("--pod", f"{room}/a")
    assert one["findings"] == [] and {"limit", "log"} <= set(one["checks"])
    assert [each["what"] for each in one["unchecked"]] == ["devices"]
    text = doctor.run().stdout
    assert text.startswith("cluster https://") and "no fault found" in text
    pods = doctor.cluster.get("pods", "--all-namespaces")["items"]
    assert not [pod for pod in pods if pod["metadata"]["name"].startswith("isolator-doctor-")]


def configured(cluster: Cluster, path: Path, user: dict[str, Any], **changes: str) -> Path:
    """A kubeconfig for another user, or of another server, at `path`."""
    found = json.loads(cluster.kubeconfig.read_text())
    found["users"][0]["user"] = user
    found["clusters"][0]["cluster"].update(changes)
    path.write_text(json.dumps(found))
    return path


def test_a_kubeconfig_that_leads_nowhere_is_one_line(
    cluster: Cluster, doctor: Doctor, tmp_path: Path
) -> None:
    """No YAML, nothing in it, no server, credentials that are refused, no such context or file: status 1."""
    user = json.loads(cluster.kubeconfig.read_text())["users"][0]["user"]
    broken, empty = tmp_path / "broken", tmp_path / "empty"
    broken.write_text("][")
    empty.write_text("")
    gone = configured(cluster, tmp_path / "gone", user, server="https://127.0.0.1:9")
    stranger = configured(cluster, tmp_path / "stranger", {"token": "nobody's"})
    cases = [
        (["--kubeconfig", str(broken)], "--kubeconfig"),
        (["--kubeconfig", str(empty)], "--kubeconfig"),
        (["--kubeconfig", str(gone)], "does not answer"),
        (["--kubeconfig", str(stranger)], "refuses these credentials (HTTP 401)"),
        (["--kubeconfig", str(tmp_path / "missing")], "no file"),
        (["--context", "nowhere"], "--context"),
    ]
    for words, says in cases:
        done = doctor.run(*words)
        told = (done.returncode, done.stdout, len(done.stderr.splitlines()), says in done.stderr)
        assert told == (1, "", 1, True), (words, done.stderr)
        assert done.stderr.startswith("isolator: ")


def test_a_user_who_may_read_little_is_told_what_was_forbidden(
    cluster: Cluster, doctor: Doctor, namespace: str, tmp_path: Path
) -> None:
    """What may not be read is unchecked, and nothing is made up: of one namespace that is no health, of the
    whole cluster without its nodes and webhooks it is. The token comes from a program, as in clouds."""
    where, bind = (
        f"--namespace={namespace}",
        ["--serviceaccount", f"{namespace}:reader", "--clusterrole=view"],
    )
    cluster.kubectl("create", "serviceaccount", "reader", where)
    cluster.kubectl("create", "rolebinding", "reader", where, *bind)
    token = cluster.kubectl("create", "token", "reader", where).strip()
    kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    (tmp_path / "credential").write_text(json.dumps({**kind, "status": {"token": token}}))
    program = {"command": "cat", "args": [str(tmp_path / "credential")], "interactiveMode": "Never"}
    path = configured(cluster, tmp_path / "reader", {"exec": {**program, "apiVersion": kind["apiVersion"]}})
    found = doctor.look(kubeconfig=path)
    assert (found["exit_status"], found["findings"], found["checks"]) == (1, [], [])
    cluster.kubectl("create", "clusterrolebinding", "reader", *bind)
    try:
        wait_for(lambda: doctor.look(kubeconfig=path)["exit_status"] == 0, 30, "the right to read")
        found = doctor.look(kubeconfig=path)
    finally:
        cluster.kubectl("delete", "clusterrolebinding", "reader")
    forbidden = {each["what"]: each["why"] for each in found["unchecked"]}
    assert {"GPU nodes", "MutatingWebhookConfigurations"} <= forbidden.keys()
    assert "forbidden" in forbidden["GPU nodes"] and "reader" in forbidden["GPU nodes"]
    assert found["findings"] == [] and {"sharing pods", "libsync DaemonSet"} <= set(found["checks"])


# ---- nodes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "text", "status", "cause"),
    [
        ("no memory label on a node", None, 52, "label_missing"),
        ("a memory label in bytes", "16106127360", 53, "label_bytes"),
        ("a memory label that is no number", "15GiB", 53, "label_bytes"),
    ],
)
def test_a_wrong_memory_label(
    cluster: Cluster, doctor: Doctor, room: str, fault: str, text: str | None, status: int, cause: str
) -> None:
    """The node is named, and the command that corrects it."""
    with labelled(cluster, "node/n2", names.NODE_LABEL_GPU_MEMORY, text, "15360"):
        found = doctor.says(fault, status, cause)
        assert finding(found, cause)["subject"] == "n2"
        assert "kubectl label node n2" in finding(found, cause)["fix"]


def test_a_gpu_node_without_its_label_and_one_without_a_monitor(
    cluster: Cluster, doctor: Doctor, room: str
) -> None:
    """Lab: the monitor look-up returns no pod. The node that lacks the monitor's label is named."""
    with labelled(cluster, "node/n2", names.NODE_LABEL_GPU, None, "true"):
        found = doctor.says("a GPU node without nvidia.com/gpu.present", 81, "gpu_unlabelled")
        assert finding(found, "gpu_unlabelled")["subject"] == "n2"
    doctor.says("the label is back", 0)


# ---- KAI -----------------------------------------------------------------------------------------------


def test_kai_without_hamicore(cluster: Cluster, doctor: Doctor, kai: Kai, room: str) -> None:
    """Its admission gives no limit, or its binder runs without the plugin: either is enough."""
    with kai.as_mode(hamicore=False):
        doctor.says("KAI's admission without hamicore", 74, "kai_hamicore_off")
    binder = ["deployment/binder", f"--namespace={names.KAI_NAMESPACE}"]
    place = "/spec/template/spec/containers/0/args/1"
    before = cluster.get("deployment/binder", namespace=names.KAI_NAMESPACE)["spec"]["template"]["spec"]
    args = before["containers"][0]["args"]

    def plugins(text: str) -> None:
        patch = json.dumps([{"op": "replace", "path": place, "value": text}])
        cluster.kubectl("patch", *binder, "--type=json", f"--patch={patch}")

    plugins(json.dumps({"gpusharing": {"enabled": True}}))
    try:
        doctor.says("KAI's binder without hamicore", 74, "kai_hamicore_off")
    finally:
        plugins(args[1])


def test_a_runtime_class_that_is_not_there(doctor: Doctor, kai: Kai, room: str) -> None:
    """Lab: RuntimeClass "nvidia" not found. The API server's own answer to a sharing pod tells."""
    with kai.as_mode(runtime_class="nvidia"):
        found = doctor.says("no RuntimeClass nvidia", 76, "runtime_class_missing")
    assert "RuntimeClass nvidia" in finding(found, "runtime_class_missing")["fix"]


def test_a_webhook_of_kais_that_does_not_answer(cluster: Cluster, doctor: Doctor, room: str) -> None:
    """Lab: the Queue object is rejected. The kind that is refused is named."""
    service = {"namespace": names.KAI_NAMESPACE, "name": "queue-controller", "path": "/validate"}
    rule = {
        "apiGroups": ["scheduling.run.ai"],
        "apiVersions": ["*"],
        "operations": ["CREATE"],
        "resources": ["queues"],
    }
    hook = {
        "name": "vqueue.kb.io",
        "clientConfig": {"service": service},
        "rules": [rule],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": HOOKS, "kind": "ValidatingWebhookConfiguration"}
    with there(cluster, "default", {**kind, "metadata": {"name": "kai-queues"}, "webhooks": [hook]}):
        found = doctor.says("KAI's queue webhook without an endpoint", 73, "kai_not_ready")
    assert "queues are refused" in finding(found, "kai_not_ready")["detail"]


def test_the_hami_platform_beside_kai(cluster: Cluster, doctor: Doctor, room: str) -> None:
    """Its webhook is known by its name."""
    hook = {
        "name": "vgpu.hami.io",
        "clientConfig": {"service": {"namespace": "default", "name": "hami", "path": "/"}},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        ],
        "namespaceSelector": NOBODY,
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": HOOKS, "kind": "MutatingWebhookConfiguration"}
    with there(cluster, "default", {**kind, "metadata": {"name": "hami-webhook"}, "webhooks": [hook]}):
        doctor.says("the HAMi platform's webhook", 75, "hami_platform")


def test_a_reservation_pod_that_finds_no_nvml(cluster: Cluster, doctor: Doctor, room: str) -> None:
    """Lab: ERROR_LIBRARY_NOT_FOUND in the reservation pod, read from its log."""
    with suppress(Exception):
        cluster.kubectl("create", "namespace", names.RESERVATION_NAMESPACE)
    cluster.wait_account(names.RESERVATION_NAMESPACE)
    says = "echo 'unable to initialize NVML: ERROR_LIBRARY_NOT_FOUND'; exit 1"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gpu-reservation-n1", "namespace": names.RESERVATION_NAMESPACE},
        "spec": {
            "nodeName": "n1",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "reservation", "image": BUSYBOX, "command": ["sh", "-c", says]}],
        },
    }
    with there(cluster, names.RESERVATION_NAMESPACE, pod):
        found = doctor.says("a reservation pod without NVML", 77, "nvml_not_found")
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in finding(found, "nvml_not_found")["fix"]


# ---- an old kubectl ------------------------------------------------------------------------------------


def test_a_kubectl_that_is_too_old(doctor: Doctor, room: str, tmp_path: Path) -> None:
    """Lab: exec ends with a WebSocket EOF. A notice, because the cluster is sound."""
    told = json.dumps({"clientVersion": {"major": "1", "minor": "28+"}})
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\necho '{told}'\n")
    program.chmod(0o755)
    found = doctor.look(PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (found["exit_status"], [each["id"] for each in found["findings"]]) == (0, ["kubectl_skew"])
    assert found["findings"][0]["detail"].startswith("it is 1.28, the API server 1.")
    assert found["seconds"] < SLOW
    note(("kubectl seven minor versions behind (notice)", "`kubectl_skew`", 0, found["seconds"]))


def test_a_namespace_that_enforces_pod_security(cluster: Cluster, doctor: Doctor, room: str) -> None:
    """A tenant's namespace at level baseline refuses the quota's host folders from then on (B140)."""
    key = "pod-security.kubernetes.io/enforce"
    with labelled(cluster, f"namespace/{room}", key, "baseline", None):
        found = doctor.says("a tenant's namespace at Pod Security baseline", 82, "tenant_pod_security")
        assert finding(found, "tenant_pod_security")["subject"] == f"namespace {room}"
        tried = doctor.look("--namespace", room)
        assert [each["id"] for each in tried["findings"]] == ["tenant_pod_security"] * 2
    wait_for(lambda: doctor.look()["healthy"], 30, "health")
    assert given.component_pods(cluster, names.COMPONENT_WEBHOOK)
