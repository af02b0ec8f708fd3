"""A real Prometheus scrapes the monitors, by the operator's objects and without the operator."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import product as given
import prometheus_server as server
import pytest
import yaml
from harness import Cluster, wait_for
from images_base import ROOT
from kai import Kai
from product import NAMESPACE, Product
from prometheus_server import Job, Prometheus

from isolator import names

TENANT = "kai-hami-lab12-a"
USED, USED_BYTES = "hami_vgpu_memory_used_bytes", 3.328180224e9
LIMIT, LIMIT_BYTES = "hami_vgpu_memory_limit_bytes", 4.348444672e9
SERVICE_MONITOR = f"ServiceMonitor/{names.RELEASE}-monitor"
POD_MONITOR = f"PodMonitor/{names.RELEASE}-monitor"
WEBHOOK_MONITOR = f"ServiceMonitor/{names.RELEASE}-webhook"
PLAIN = "kai-resource-isolator"
WRONG = "labels-not-honored"
LABELS = {"namespace", "pod", "container", "vdevice_index", "device_uuid"}


def operator_jobs(cluster: Cluster, product: Product) -> list[Job]:
    """What the operator makes of the monitors that the chart renders."""
    on = {"enabled": True}
    values = {"monitor": {"serviceMonitor": on, "podMonitor": on}, "webhook": {"serviceMonitor": on}}
    words = ["template", names.RELEASE, str(given.CHART), f"--namespace={NAMESPACE}", "--values=-"]
    text = cluster.helm(*words, input=yaml.safe_dump(given.merged(product.values, values)))
    rendered = [each for each in yaml.safe_load_all(text) if each]
    return [
        server.operator_job(each) for each in rendered if each["kind"] in ("ServiceMonitor", "PodMonitor")
    ]


def documented() -> tuple[dict[str, Any], Job]:
    """Values of the chart and scrape job that docs/metrics.md gives for use without the operator."""
    text = (ROOT / "docs/metrics.md").read_text().split("## Scraping")[1]
    values, config = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.S))
    (job,) = config["scrape_configs"]
    return values, job


@pytest.fixture(scope="module")
def tenant_namespace(cluster: Cluster, product: Product, kai: Kai) -> Iterator[str]:
    """A namespace with the lab's pod a, which holds 3 GiB."""
    with cluster.space("prometheus-tenants") as name:
        hold = ["sh", "-c", "HOLD_SECONDS=100000 exec memory-limit 3072"]
        cluster.apply(given.tenant(TENANT, command=hold), name)
        given.wait_running(cluster, TENANT, namespace=name, kai=kai)
        yield name
        cluster.delete("pod", TENANT, namespace=name)


@pytest.fixture(scope="module")
def prometheus(
    cluster: Cluster, product: Product, tenant_namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """The server with all jobs, once each of them shows the tenant."""
    reason = server.why_not()
    if reason:
        pytest.skip(reason)
    jobs = [*operator_jobs(cluster, product), documented()[1]]
    wrong = copy.deepcopy(next(job for job in jobs if job["job_name"] == POD_MONITOR))
    jobs.append({**wrong, "job_name": WRONG, "honor_labels": False})
    with server.serve(cluster, jobs, tmp_path_factory.mktemp("prometheus")) as running:

        def seen() -> bool:
            found = running.query(f"{USED} == {USED_BYTES}")
            return {labels["job"] for labels, _ in found} == {SERVICE_MONITOR, POD_MONITOR, PLAIN, WRONG}

        wait_for(seen, 90, "every job to show the tenant", every=0.5)
        yield running


@pytest.mark.parametrize("job", [SERVICE_MONITOR, POD_MONITOR, PLAIN])
def test_pod_label_is_the_tenants(prometheus: Prometheus, tenant_namespace: str, job: str) -> None:
    """B166, B167: the query by the workload's pod and namespace finds it, with no exported_ label."""
    selected = f'{{pod="{TENANT}",namespace="{tenant_namespace}",job="{job}"}}'
    for name, figure in ((USED, USED_BYTES), (LIMIT, LIMIT_BYTES)):
        ((labels, value),) = prometheus.query(name + selected)
        assert value == figure
        assert not [label for label in labels if label.startswith("exported_")]
        assert labels["container"] == "main"
        assert labels.keys() >= LABELS


def test_unhonored_labels_would_be_the_monitors(prometheus: Prometheus) -> None:
    """B166: without honorLabels the tenant's name is hidden in exported_pod; so the test above can fail."""
    assert not prometheus.query(f'{USED}{{pod="{TENANT}",job="{WRONG}"}}')
    assert prometheus.query(f'{USED}{{exported_pod="{TENANT}",job="{WRONG}"}}')


def test_every_node_is_a_target_and_up(cluster: Cluster, prometheus: Prometheus) -> None:
    """B167: monitors and webhooks are scraped; own series keep their labels and tell the nodes apart."""
    wait_for(lambda: len(prometheus.query("up == 1")) == 10, 60, "ten targets to be up")
    counted = {labels["job"]: int(n) for labels, n in prometheus.query("count by (job) (up == 1)")}
    assert counted == dict.fromkeys((SERVICE_MONITOR, POD_MONITOR, PLAIN, WRONG, WEBHOOK_MONITOR), 2)
    for job in (SERVICE_MONITOR, POD_MONITOR, PLAIN):
        own = prometheus.query(f'kai_isolator_up{{job="{job}"}}')
        assert {(labels["node"], value) for labels, value in own} == {(name, 1.0) for name in cluster.nodes}
    assert all(labels.keys() == {"node", "instance", "job"} for labels, _ in own)
    admissions = prometheus.query(f'kai_isolator_admissions_total{{action="inject",job="{WEBHOOK_MONITOR}"}}')
    assert sum(value for _, value in admissions) >= 1


def test_documented_values_are_those_of_the_release(product: Product) -> None:
    """The annotation that the documented job looks for is the one of the documented values."""
    values, job = documented()
    assert given.merged(product.values, values) == product.values
    assert job["job_name"] == PLAIN


def test_promtool_finds_nothing_to_say(cluster: Cluster, tenant_namespace: str) -> None:
    """`promtool check metrics` is content with monitors and webhook; with a series without help it is not."""
    reason = server.why_not()
    if reason:
        pytest.skip(reason)
    texts = {node: given.metrics_text(cluster, node) for node in cluster.nodes}
    texts["webhook"] = given.metrics_text(cluster, component=names.COMPONENT_WEBHOOK)
    assert any(USED in text for text in texts.values())
    for where, text in texts.items():
        assert server.check_metrics(text) == "", where
    assert "no help" in server.check_metrics("bad_total 1\n")


def test_series_of_the_tenant_end_in_prometheus(
    cluster: Cluster, prometheus: Prometheus, tenant_namespace: str
) -> None:
    """B162: once the pod is gone Prometheus marks its series stale with the next scrapes."""
    cluster.delete("pod", TENANT, namespace=tenant_namespace)
    wait_for(lambda: not prometheus.query(f'{USED}{{pod="{TENANT}"}}'), 30, "the series to end", every=0.5)
