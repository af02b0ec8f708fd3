"""Targets as kubernetes_sd finds them, with its labels, for a Prometheus that was built without it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness import Cluster

META = "__meta_kubernetes_"
Group = dict[str, Any]


def discover(cluster: Cluster, found: Mapping[str, Any]) -> list[Group]:
    """The target groups of one kubernetes_sd_config, of role `pod` or `endpoints`."""
    groups: list[Group] = []
    for namespace in found["namespaces"]["names"]:
        pods = cluster.get("pods", namespace=namespace)["items"]
        if found["role"] == "pod":
            groups += [group for pod in pods for group in _pod(pod)]
        elif found["role"] == "endpoints":
            services = {
                each["metadata"]["name"]: each
                for each in cluster.get("services", namespace=namespace)["items"]
            }
            by_name = {pod["metadata"]["name"]: pod for pod in pods}
            for each in cluster.get("endpointslices.discovery.k8s.io", namespace=namespace)["items"]:
                groups += _slice(each, services, by_name)
        else:
            raise ValueError(f"role {found['role']}")
    return groups


def _named(prefix: str, values: Mapping[str, str] | None) -> dict[str, str]:
    return {
        f"{META}{prefix}_{re.sub('[^a-zA-Z0-9_]', '_', key)}": text for key, text in (values or {}).items()
    }


def _pod_labels(pod: dict[str, Any]) -> dict[str, str]:
    meta = pod["metadata"]
    return {
        f"{META}namespace": meta["namespace"],
        f"{META}pod_name": meta["name"],
        f"{META}pod_node_name": pod["spec"].get("nodeName", ""),
        f"{META}pod_ip": pod["status"].get("podIP", ""),
        f"{META}pod_phase": pod["status"].get("phase", ""),
        **_named("pod_label", meta.get("labels")),
        **_named("pod_annotation", meta.get("annotations")),
    }


def _pod(pod: dict[str, Any]) -> list[Group]:
    """One target for each port that a container of a running pod declares."""
    if pod["status"].get("phase") != "Running" or "deletionTimestamp" in pod["metadata"]:
        return []
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                **_pod_labels(pod),
                f"{META}pod_container_name": container["name"],
                f"{META}pod_container_port_name": port.get("name", ""),
            },
        }
        for container in pod["spec"]["containers"]
        for port in container.get("ports") or []
    ]


def _slice(found: dict[str, Any], services: dict[str, Any], pods: dict[str, Any]) -> list[Group]:
    """One target for each ready address and port of an EndpointSlice, with its Service's and pod's labels."""
    service = services[found["metadata"]["labels"]["kubernetes.io/service-name"]]
    groups = []
    for endpoint in found["endpoints"] or []:
        pod = pods.get((endpoint.get("targetRef") or {}).get("name", ""))
        if pod is None or not endpoint["conditions"].get("ready"):
            continue
        for port in found["ports"]:
            containers = [
                container["name"]
                for container in pod["spec"]["containers"]
                for each in container.get("ports") or []
                if each["containerPort"] == port["port"]
            ]
            labels = {
                **_pod_labels(pod),
                f"{META}service_name": service["metadata"]["name"],
                f"{META}endpoint_port_name": port["name"],
                f"{META}pod_container_name": containers[0],
                **_named("service_label", service["metadata"].get("labels")),
            }
            groups.append({"targets": [f"{endpoint['addresses'][0]}:{port['port']}"], "labels": labels})
    return groups
