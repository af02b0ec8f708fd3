"""The product on a test's cluster: the chart installed, a simulated GPU on each node, tenants, metrics.

    product.install(merged(product.values, {"webhook": {"onNoLimit": "deny"}}))
    cluster.apply(tenant("a", {"gpu-memory": "4096"}), namespace)
    wait_running(cluster, "a", namespace=namespace)
    value(metrics(cluster, "n1"), "hami_vgpu_memory_limit_bytes", pod="a")

Pods of one node that `tenant` made share its card: its state lies on the node at STATE.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import images
from harness import Cluster, ClusterError, wait_for
from images_base import ROOT
from kai import Kai
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from isolator import names
from isolator.libpath import simulator

NAMESPACE = names.RELEASE
CHART = ROOT / "charts/kai-resource-isolator"
STATE = "/var/lib/simgpu"
"""Folder of a node (and of each tenant) that holds its card's state."""
DRIVER = "/opt/simgpu/lib64"
"""Folder of a node with the simulated driver, for the monitor."""
MODEL = "T4"
WORKLOADS = (
    f"deployment/{names.RELEASE}-webhook",
    f"daemonset/{names.RELEASE}-libsync",
    f"daemonset/{names.RELEASE}-monitor",
)
QUICK: dict[str, Any] = {"librarySync": {"interval": 5}, "monitor": {"updateInterval": "1s"}}
"""The shared release looks more often than the default, so that tests wait less."""
SCRAPED: dict[str, Any] = {"monitor": {"podAnnotations": {"prometheus.io/scrape": "true"}}}
"""For a Prometheus without its operator, as docs/metrics.md says."""
PASS = "PASS: in-quota allocation succeeded and over-quota allocation failed"
"""What a tenant's `memory-limit` ends with where it is held to its limit."""
QUERY = "nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits".split()
"""Tells a tenant its limit in MiB."""


# ---- images and nodes -------------------------------------------------------------------------------


@functools.cache
def built() -> tuple[tuple[Path, str], tuple[Path, str]]:
    """Archive and name of our image and of the tenants', once a session: the checkout may change under it."""
    return images.build_isolator_image(), images.build_tenant_image()


def isolator_image() -> str:
    """Name of our image, as the nodes have it."""
    return built()[0][1]


def tenant_image() -> str:
    """Name of the tenants' image, as the nodes have it."""
    return built()[1][1]


def image_values() -> dict[str, Any]:
    """Values of the chart that name our image as the nodes have it."""
    repository, _, tag = isolator_image().rpartition(":")
    return {"image": {"repository": repository, "tag": tag, "pullPolicy": "Never"}}


def driver_values() -> dict[str, Any]:
    """Values of the chart that give the monitor the simulated NVML of its node."""
    volume = {"name": "simgpu", "hostPath": {"path": STATE}}
    env = {"SIMGPU_MODEL": MODEL, "SIMGPU_STATE": f"{STATE}/state"}
    return {
        "monitor": {
            "driverPath": DRIVER,
            "extraVolumes": [volume],
            "extraVolumeMounts": [{"name": "simgpu", "mountPath": STATE}],
            "extraEnv": [{"name": name, "value": text} for name, text in env.items()],
        }
    }


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, later ones over earlier ones, as Helm lays them over each other."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, given in part.items():
            if isinstance(given, Mapping) and isinstance(result.get(key), Mapping):
                result[key] = merged(result[key], given)
            else:
                result[key] = copy.deepcopy(given)
    return result


def prepare_nodes(cluster: Cluster) -> None:
    """Both images, the driver's and the card's folder and the labels of a T4 on every node."""
    for archive, _ in built():
        cluster.load_image(archive)
    for node in cluster.nodes.values():
        state, driver = node.path(STATE), node.path(DRIVER)
        state.mkdir(parents=True, exist_ok=True)
        state.chmod(0o1777)
        driver.mkdir(parents=True, exist_ok=True)
        for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
            shutil.copy(simulator() / library, driver / library)
    cluster.label_gpu(15360)


# ---- the release ------------------------------------------------------------------------------------


@dataclass
class Product:
    """The shared release `kai-resource-isolator` in the namespace of that name."""

    cluster: Cluster
    values: dict[str, Any] = field(default_factory=dict)
    """What the release is installed with when no test changes it."""

    def install(self, values: Mapping[str, Any], *flags: str, version: int = 4) -> None:
        """Installs or upgrades with exactly these values and waits until everything is ready and pods with
        other values are gone: a draining webhook still answers on the API server's open connections."""
        words = ["upgrade", "--install", names.RELEASE, str(CHART), f"--namespace={NAMESPACE}"]
        words += ["--create-namespace", "--reset-values", "--wait", "--timeout=5m", "--values=-", *flags]
        self.cluster.helm(*words, version=version, input=json.dumps(values))
        for workload in WORKLOADS:
            self.cluster.wait_rollout(workload, namespace=NAMESPACE, timeout=180)
        wait_for(lambda: not leaving_pods(self.cluster), 60, "the pods of the release before to go")


def component_pods(cluster: Cluster, component: str, node: str = "") -> list[dict[str, Any]]:
    """The running pods of a component (names.COMPONENT_*), on one node or all; those going away left out."""
    chosen = ["--selector", f"{names.COMPONENT_LABEL}={component}"]
    found = cluster.get("pods", *chosen, namespace=NAMESPACE)["items"]
    return [
        pod
        for pod in found
        if pod["status"].get("phase") == "Running"
        and "deletionTimestamp" not in pod["metadata"]
        and node in ("", pod["spec"].get("nodeName"))
    ]


def cache_folder(cluster: Cluster, pod: Mapping[str, Any]) -> Path:
    """The cache folder of a tenant's container, on its node, as seen from here."""
    where = f"{names.DEFAULT_VGPU_MOUNT}/{names.CONTAINERS_DIRECTORY}/{pod['metadata']['uid']}_main"
    return cluster.nodes[pod["spec"]["nodeName"]].path(where)


def leaving_pods(cluster: Cluster) -> list[str]:
    """Names of the pods of the shared release that are going away."""
    found = cluster.get("pods", namespace=NAMESPACE)["items"]
    return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" in pod["metadata"]]


@contextmanager
def webhook_away(cluster: Cluster) -> Iterator[None]:
    """No replica of the shared release's webhook, which the chart cannot ask for; all are back afterwards."""
    webhook = WORKLOADS[0]
    scale = ["scale", webhook, f"--namespace={NAMESPACE}"]
    replicas = cluster.get(webhook, namespace=NAMESPACE)["spec"]["replicas"]
    cluster.kubectl(*scale, "--replicas=0")
    try:
        wait_for(lambda: not component_pods(cluster, names.COMPONENT_WEBHOOK), 60, "no webhook", every=0.5)
        yield
    finally:
        cluster.kubectl(*scale, f"--replicas={replicas}")
        cluster.wait_rollout(webhook, namespace=NAMESPACE, timeout=180)


def make_product(cluster: Cluster) -> Product:
    """The nodes prepared and the shared release installed, monitor on."""
    prepare_nodes(cluster)
    on = {"monitor": {"enabled": True}}
    made = Product(cluster, merged(image_values(), driver_values(), QUICK, SCRAPED, on))
    made.install(made.values)
    return made


# ---- tenants ----------------------------------------------------------------------------------------


def tenant(
    name: str,
    annotations: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    container: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod of KAI's scheduler in the tenants' image, on the card of its node.

    `annotations`: 4096 MiB where none are given, {} for a plain pod. `command`: sleeps without one; text for
    a shell is ["sh", "-c", ...]. `container` has further keys of the container `main`, `spec` those of the
    pod's spec: volumes and mounts are added, `containers` are put after `main`, the rest replaces.
    """
    more, extra = dict(container or {}), dict(spec)
    main = {
        "name": "main",
        "image": tenant_image(),
        "imagePullPolicy": "Never",
        "command": list(command or ["sleep", "infinity"]),
        "volumeMounts": [{"name": "simgpu", "mountPath": STATE}, *more.pop("volumeMounts", [])],
        **more,
    }
    volume = {"name": "simgpu", "hostPath": {"path": STATE}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"kai.scheduler/queue": "default-queue", **(labels or {})},
            "annotations": {"gpu-memory": "4096"} if annotations is None else dict(annotations),
        },
        "spec": {
            "schedulerName": "kai-scheduler",
            "terminationGracePeriodSeconds": 0,
            "volumes": [volume, *extra.pop("volumes", [])],
            "containers": [main, *extra.pop("containers", [])],
            **extra,
        },
    }


def wait_running(
    cluster: Cluster, *pods: str, namespace: str = "default", timeout: float = 120, kai: Kai | None = None
) -> list[dict[str, Any]]:
    """The pods once they are Ready; where one is not in time the error says why, KAI's reason included."""
    try:
        return [cluster.wait_pod(pod, namespace=namespace, timeout=timeout) for pod in pods]
    except Exception as error:
        if kai is not None and kai.failures:
            error.add_note(f"KAI: {kai.failures}")
        raise


# ---- metrics ----------------------------------------------------------------------------------------


def metrics_text(cluster: Cluster, node: str = "", component: str = names.COMPONENT_MONITOR) -> str:
    """What a node's monitor, or a pod of another component, serves at /metrics, by the API server's proxy."""
    running = component_pods(cluster, component, node)
    if not running:
        raise ClusterError(f"no {component} runs on {node or 'any node'}")
    return scraped(cluster, component, running[0])


def scraped(cluster: Cluster, component: str, pod: Mapping[str, Any]) -> str:
    """What a pod of a component serves at /metrics, by the API server's proxy."""
    scheme, port = ("", names.MONITOR_PORT)
    if component == names.COMPONENT_WEBHOOK:
        scheme, port = ("https:", names.WEBHOOK_PORT)
    place = f"{scheme}{pod['metadata']['name']}:{port}"
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{place}/proxy{names.METRICS_PATH}"
    return cluster.kubectl("get", f"--raw={path}")


def samples(text: str) -> list[Sample]:
    """The samples of a text in Prometheus's format: each has `name`, `labels` and `value`."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def metrics(cluster: Cluster, node: str) -> list[Sample]:
    """The samples of a node's monitor."""
    return samples(metrics_text(cluster, node))


def series(told: Sequence[Sample], name: str, **labels: str) -> list[Sample]:
    """The samples of a name that have these labels."""
    return [each for each in told if each.name == name and labels.items() <= each.labels.items()]


def value(told: Sequence[Sample], name: str, **labels: str) -> float | None:
    """The value of the one sample of a name with these labels; None where there is none."""
    found = series(told, name, **labels)
    assert len(found) <= 1, found
    return float(found[0].value) if found else None


# ---- fixtures' bodies -------------------------------------------------------------------------------


@contextmanager
def make_kai(cluster: Cluster) -> Iterator[Kai]:
    """KAI's double in hamicore mode, on nodes that are labelled as T4s; no runtime class is set."""
    cluster.label_gpu(15360)
    with Kai(cluster, runtime_class="") as made:
        yield made
