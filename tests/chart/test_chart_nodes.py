"""libsync and the monitor: one path, least privilege, where they run, what is scraped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from charting import RELEASE, Object, env_of

from isolator import __version__, names
from isolator.libsync.uninstall import patch_of
from isolator.monitor.settings import Settings

LIBSYNC, MONITOR = f"{RELEASE}-libsync", f"{RELEASE}-monitor"
ROOT_USER = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
NON_ROOT = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532}
SECCOMP = {"seccompProfile": {"type": "RuntimeDefault"}}
CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
INSTALLER = {
    **CONFINED,
    "privileged": False,
    "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]},
}


def by_name(items: list[Object]) -> dict[str, Object]:
    return {item["name"]: item for item in items}


@pytest.mark.parametrize(
    ("kind", "name", "user", "container", "token"),
    [
        ("Deployment", f"{RELEASE}-webhook", NON_ROOT, CONFINED, True),
        ("DaemonSet", LIBSYNC, ROOT_USER, INSTALLER, False),
        ("DaemonSet", MONITOR, NON_ROOT, CONFINED, True),
        ("Job", f"{RELEASE}-uninstall", NON_ROOT, CONFINED, True),
        ("Pod", f"{RELEASE}-test", NON_ROOT, CONFINED, False),
    ],
)
def test_security_context(
    render: Any, kind: str, name: str, user: Object, container: Object, token: bool
) -> None:
    """No workload is privileged, only the installer is root, and a token is where the API is used."""
    rendered = render("monitor.enabled=true", "librarySync.removeOnUninstall=true")
    pod = rendered.one("Pod", name)["spec"] if kind == "Pod" else rendered.pod(kind, name)
    assert pod["securityContext"] == {**user, **SECCOMP}
    (only,) = pod["containers"]
    assert only["securityContext"] == container
    assert pod["automountServiceAccountToken"] is token
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert only["resources"]["limits"]["memory"]


def test_one_path_everywhere(render: Any) -> None:
    """Another path moves the installer, the preload file, webhook and monitor together (B111, B114)."""
    rendered = render('paths.containerVgpuMount="/var/lib/x/vgpu"', "monitor.enabled=true")
    assert names.DEFAULT_VGPU_MOUNT not in json.dumps(rendered.objects)
    assert rendered.one("ConfigMap", f"{RELEASE}-ldpreload")["data"] == {
        names.PRELOAD_KEY: f"/var/lib/x/vgpu/{names.LIBRARY_FILE}\n"
    }
    for name in (LIBSYNC, MONITOR):
        pod = rendered.pod("DaemonSet", name)
        assert by_name(pod["volumes"])["vgpu"]["hostPath"] == {
            "path": "/var/lib/x/vgpu",
            "type": "DirectoryOrCreate",
        }
        assert by_name(pod["containers"][0]["volumeMounts"])["vgpu"]["mountPath"] == "/var/lib/x/vgpu"
    assert "--mount=/var/lib/x/vgpu" in rendered.pod("DaemonSet", LIBSYNC)["containers"][0]["command"]
    monitor = env_of(rendered.pod("DaemonSet", MONITOR)["containers"][0])
    assert monitor["ISOLATOR_MONITOR_MOUNT"] == "/var/lib/x/vgpu"


def test_default_path_is_the_contract_s(render: Any) -> None:
    """The default path, the ports and the labels are those of names.py (C4)."""
    rendered = render("monitor.enabled=true")
    assert by_name(rendered.pod("DaemonSet", LIBSYNC)["volumes"])["vgpu"]["hostPath"]["path"] == (
        names.DEFAULT_VGPU_MOUNT
    )
    for kind, name, component, port in (
        ("Deployment", f"{RELEASE}-webhook", names.COMPONENT_WEBHOOK, names.WEBHOOK_PORT),
        ("DaemonSet", LIBSYNC, names.COMPONENT_LIBSYNC, names.LIBSYNC_PORT),
        ("DaemonSet", MONITOR, names.COMPONENT_MONITOR, names.MONITOR_PORT),
    ):
        template = rendered.one(kind, name)["spec"]["template"]
        assert template["metadata"]["labels"][names.COMPONENT_LABEL] == component
        assert template["metadata"]["labels"][names.LABEL_WEBHOOK] == names.LABEL_WEBHOOK_IGNORE
        (container,) = template["spec"]["containers"]
        assert [item["containerPort"] for item in container["ports"]] == [port]
        assert container["image"] == f"{names.RELEASE}:{__version__}"


def test_user_labels_never_replace_ours(render: Any) -> None:
    """A pod label that the selector or the opt-out needs cannot be set away."""
    wanted = {names.COMPONENT_LABEL: "x", names.LABEL_WEBHOOK: "x", "a": "b"}
    template = render(f"librarySync.podLabels={json.dumps(wanted)}").one("DaemonSet")["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert labels[names.COMPONENT_LABEL] == names.COMPONENT_LIBSYNC
    assert labels[names.LABEL_WEBHOOK] == names.LABEL_WEBHOOK_IGNORE
    assert labels["a"] == "b"


def test_libsync_sees_two_host_folders(render: Any) -> None:
    """Its own folder to write; the kubelet's to read, without a type: a missing one holds nothing up."""
    pod = render().pod("DaemonSet", LIBSYNC)
    (container,) = pod["containers"]
    hosts = {name: item["hostPath"] for name, item in by_name(pod["volumes"]).items() if "hostPath" in item}
    assert hosts["pods"] == {"path": names.PODS_DIRECTORY}
    assert set(hosts) == {"vgpu", "pods"}
    mounts = by_name(container["volumeMounts"])
    assert mounts["pods"]["readOnly"] is True
    assert "readOnly" not in mounts["vgpu"]
    assert container["command"] == [
        "isolator",
        "libsync",
        f"--mount={names.DEFAULT_VGPU_MOUNT}",
        f"--preload={mounts['preload']['mountPath']}/{names.PRELOAD_KEY}",
        "--library=auto",
        f"--pods={mounts['pods']['mountPath']}",
        "--group=65532",
        "--interval=30",
        f"--listen=0.0.0.0:{names.LIBSYNC_PORT}",
        "--log-level=info",
    ]
    assert container["readinessProbe"]["httpGet"] == {"path": names.READY_PATH, "port": "health"}


def test_libsync_goes_where_tenants_go(render: Any) -> None:
    """All Linux nodes by default, whatever their taints; a changed preload file restarts it."""
    pod = render().pod("DaemonSet", LIBSYNC)
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert pod["tolerations"] == [
        {"operator": "Exists", "effect": "NoSchedule"},
        {"operator": "Exists", "effect": "NoExecute"},
    ]
    update = render().one("DaemonSet")["spec"]["updateStrategy"]
    assert update == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%"}}
    sums = {
        json.dumps(item.one("DaemonSet")["spec"]["template"]["metadata"]["annotations"])
        for item in (render(), render('paths.containerVgpuMount="/var/lib/vgpu"'))
    }
    assert len(sums) == 2


def test_uninstall_hook(render: Any) -> None:
    """Only where asked for: one Job before deletion, which may patch the one DaemonSet."""
    assert render().all("Job") == []
    rendered = render("librarySync.removeOnUninstall=true", "librarySync.removeTimeoutSeconds=90")
    job = rendered.one("Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    assert job["spec"]["activeDeadlineSeconds"] == 150
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [
        *("isolator", "libsync", "uninstall"),
        f"--namespace={RELEASE}",
        f"--daemonset={LIBSYNC}",
        "--timeout=90",
    ]
    assert rendered.one("Role", f"{RELEASE}-uninstall")["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["daemonsets"],
            "resourceNames": [LIBSYNC],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    patch = patch_of(rendered.one("DaemonSet"))
    assert patch is not None
    (changed,) = patch["spec"]["template"]["spec"]["containers"]
    assert changed["command"][:2] == ["isolator", "libsync"]


def test_monitor_is_off_by_default(render: Any) -> None:
    """Nothing of the monitor is rendered until asked for."""
    assert "monitor" not in json.dumps([item["metadata"]["name"] for item in render()])


def test_monitor_settings(render: Any) -> None:
    """Every setting is in its environment; host folders are read-only."""
    pod = render(
        "monitor.enabled=true", "monitor.hostPID=true", 'monitor.driverPath="/opt/lib"',
        'monitor.runtimeClassName="nvidia"',
    ).pod("DaemonSet", MONITOR)  # fmt: skip
    (container,) = pod["containers"]
    assert container["command"] == ["isolator", "monitor"]
    assert pod["hostPID"] is True
    assert pod["runtimeClassName"] == "nvidia"
    assert env_of(container) == {
        "ISOLATOR_MONITOR_LISTEN": f"0.0.0.0:{names.MONITOR_PORT}",
        "ISOLATOR_MONITOR_MOUNT": names.DEFAULT_VGPU_MOUNT,
        "ISOLATOR_MONITOR_UPDATE_INTERVAL": "5s",
        "ISOLATOR_MONITOR_RESYNC_INTERVAL": "5m",
        "ISOLATOR_MONITOR_LEGACY_METRICS": "false",
        "ISOLATOR_MONITOR_HOST_PID": "true",
        "ISOLATOR_MONITOR_EVENTS": "true",
        "ISOLATOR_MONITOR_SCHEDULERS": '["kai-scheduler"]',
        "ISOLATOR_MONITOR_LOG_LEVEL": "info",
        "ISOLATOR_MONITOR_LOG_JSON": "false",
        names.ENV_NVIDIA_VISIBLE_DEVICES: "all",
        "NVIDIA_DRIVER_CAPABILITIES": "utility",
        "LD_LIBRARY_PATH": "/opt/lib",
    }
    prefix = "ISOLATOR_MONITOR_"
    found = {item["name"].removeprefix(prefix) for item in container["env"] if prefix in item["name"]}
    assert found == {name.upper() for name in Settings.model_fields}
    assert container["env"][0] == {
        "name": "ISOLATOR_MONITOR_NODE_NAME",
        "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
    }
    mounts = by_name(container["volumeMounts"])
    assert mounts["vgpu"]["readOnly"] is mounts["driver"]["readOnly"] is True


def test_monitor_runs_on_gpu_nodes(render: Any) -> None:
    """The node label of the contract by default; null takes it out."""
    selector = render("monitor.enabled=true").pod("DaemonSet", MONITOR)["nodeSelector"]
    assert selector == {"kubernetes.io/os": "linux", names.NODE_LABEL_GPU: "true"}
    everywhere = render("monitor.enabled=true", f'monitor.nodeSelector={{"{names.NODE_LABEL_GPU}":null}}')
    assert everywhere.pod("DaemonSet", MONITOR)["nodeSelector"] == {"kubernetes.io/os": "linux"}


def test_the_installer_lets_the_monitors_group_in(render: Any) -> None:
    """It closes the node's folder to others, so both must mean the same group."""

    def group(*values: str) -> list[str]:
        (container,) = render(*values).one("DaemonSet", LIBSYNC)["spec"]["template"]["spec"]["containers"]
        return [word for word in container["command"] if word.startswith("--group")]

    spec = render("monitor.enabled=true").one("DaemonSet", MONITOR)["spec"]["template"]["spec"]
    assert group() == [f"--group={spec['securityContext']['runAsGroup']}"]
    assert group("monitor.podSecurityContext.runAsGroup=7") == ["--group=7"]
    assert group("monitor.podSecurityContext.runAsGroup=7", "monitor.securityContext.runAsGroup=8") == [
        "--group=8"
    ]


@pytest.mark.parametrize("events", [True, False])
def test_monitor_may_read_pods_and_nodes(render: Any, events: bool) -> None:
    """No Secret, no ConfigMap; events only while they are on."""
    rendered = render("monitor.enabled=true", f"monitor.events={json.dumps(events)}")
    rules = rendered.one("ClusterRole", MONITOR)["rules"]
    expected = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
    ]
    assert rules == expected[: 3 if events else 2]


def test_monitor_has_a_headless_service_beside_the_old_one(render: Any) -> None:
    """A virtual address answers for a random node; 1.1's Service cannot lose its own in an upgrade."""
    rendered = render("monitor.enabled=true", "monitor.serviceMonitor.enabled=true")
    old, nodes = rendered.one("Service", MONITOR), rendered.one("Service", f"{MONITOR}-nodes")
    assert "clusterIP" not in old["spec"]
    assert nodes["spec"]["clusterIP"] == "None"
    assert nodes["spec"]["selector"] == old["spec"]["selector"]
    chosen = rendered.one("ServiceMonitor", MONITOR)["spec"]["selector"]["matchLabels"]
    labels = [service["metadata"]["labels"] for service in (old, nodes)]
    assert [chosen.items() <= each.items() for each in labels] == [False, True]
    kept = render("monitor.enabled=true", 'monitor.service.type="NodePort"').one("Service", MONITOR)
    assert kept["spec"]["type"] == "NodePort"


@pytest.mark.parametrize(
    ("value", "kind", "endpoints"),
    [("serviceMonitor", "ServiceMonitor", "endpoints"), ("podMonitor", "PodMonitor", "podMetricsEndpoints")],
)
def test_scrapes_keep_the_tenant_s_labels(render: Any, value: str, kind: str, endpoints: str) -> None:
    """honorLabels, or Prometheus renames namespace, pod and container; nothing of it by default."""
    assert render("monitor.enabled=true").all(kind) == []
    assert render(f"monitor.{value}.enabled=true").all(kind) == []
    spec = render("monitor.enabled=true", f"monitor.{value}.enabled=true").one(kind, MONITOR)["spec"]
    (endpoint,) = spec[endpoints]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", names.METRICS_PATH)
    assert endpoint["honorLabels"] is True
    assert spec["selector"]["matchLabels"][names.COMPONENT_LABEL] == names.COMPONENT_MONITOR


def test_network_policies(render: Any) -> None:
    """Each workload takes its own port; only who calls the API server may go out."""
    rendered = render("networkPolicy.enabled=true", "monitor.enabled=true")
    policies = {item["metadata"]["name"]: item["spec"] for item in rendered.all("NetworkPolicy")}
    ports = {
        name: [port["port"] for rule in spec["ingress"] for port in rule["ports"]]
        for name, spec in policies.items()
    }
    assert ports == {f"{RELEASE}-webhook": [names.WEBHOOK_PORT], LIBSYNC: [], MONITOR: [names.MONITOR_PORT]}
    out = {name: bool(spec["egress"]) for name, spec in policies.items()}
    assert out == {f"{RELEASE}-webhook": True, LIBSYNC: False, MONITOR: True}
    pem = "-----BEGIN CERTIFICATE-----\\nAA==\\n-----END CERTIFICATE-----\\n"
    apart = render("networkPolicy.enabled=true", 'tls.existingSecret="mine"', f'tls.caBundle="{pem}"')
    assert apart.one("NetworkPolicy", f"{RELEASE}-webhook")["spec"]["egress"] == []
