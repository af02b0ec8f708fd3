"""The webhook's objects: who calls it, how it stays up, where its certificate comes from, what it may do."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from charting import RELEASE, Object, Rendered, env_of

from isolator import names
from isolator.webhook.server import GRACE_SECONDS
from isolator.webhook.settings import Settings

WEBHOOK = f"{RELEASE}-webhook"
IGNORED = {"key": names.LABEL_WEBHOOK, "operator": "NotIn", "values": [names.LABEL_WEBHOOK_IGNORE]}


def hook(rendered: Rendered, name: str = names.WEBHOOK_NAME) -> Object:
    entries = rendered.one("MutatingWebhookConfiguration")["webhooks"]
    assert [entry["name"] for entry in entries] == [names.WEBHOOK_NAME, names.WEBHOOK_EPHEMERAL_NAME]
    (found,) = (entry for entry in entries if entry["name"] == name)
    assert isinstance(found, dict)
    return found


def conditions(rendered: Rendered) -> dict[str, str]:
    return {item["name"]: item["expression"] for item in hook(rendered)["matchConditions"]}


def test_configuration_is_what_kai_looks_for(render: Any) -> None:
    """Name and path, creation of pods alone, a second call, fail closed (C1, C13, D10)."""
    rendered = render()
    assert rendered.names("MutatingWebhookConfiguration") == {names.WEBHOOK_CONFIGURATION}
    entry = hook(rendered)
    assert entry["name"] == names.WEBHOOK_NAME
    assert entry["clientConfig"] == {
        "service": {"name": WEBHOOK, "namespace": RELEASE, "path": names.WEBHOOK_PATH, "port": 443}
    }
    assert entry["rules"] == [
        {
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["pods"],
            "scope": "Namespaced",
        }
    ]
    assert (entry["failurePolicy"], entry["reinvocationPolicy"]) == ("Fail", "IfNeeded")
    assert (entry["sideEffects"], entry["admissionReviewVersions"]) == ("None", ["v1"])
    assert entry["timeoutSeconds"] == 5


def test_debug_containers_of_injected_pods_are_asked_about(render: Any) -> None:
    """The second entry sees debug containers of pods with our volume, whatever labels the pod has by now."""
    entry = hook(render(), names.WEBHOOK_EPHEMERAL_NAME)
    assert entry["rules"][0]["operations"] == ["UPDATE"]
    assert entry["rules"][0]["resources"] == ["pods/ephemeralcontainers"]
    assert entry["failurePolicy"] == "Fail"
    assert entry["clientConfig"] == hook(render())["clientConfig"]
    assert "objectSelector" not in entry
    assert "namespaceSelector" not in entry
    (condition,) = entry["matchConditions"]
    assert f"'{names.VOLUME_CONTAINERS}'" in condition["expression"]


def test_another_release_keeps_both_names(render: Any) -> None:
    """KAI's installer waits for <release>-webhook, its suite looks for the fixed configuration (C1, C3)."""
    rendered = render(release="gpu")
    assert rendered.names("Deployment") == {"gpu-webhook"}
    assert rendered.names("MutatingWebhookConfiguration") == {names.WEBHOOK_CONFIGURATION}
    assert hook(rendered)["clientConfig"]["service"]["name"] == "gpu-webhook"
    long = render(release="x" * 53, more=("--set", "librarySync.removeOnUninstall=true"))
    assert all(len(item["metadata"]["name"]) <= 63 for item in long)
    assert long.names("Deployment") == {"x" * 53 + "-webhook"}


def test_only_sharing_pods_of_the_scheduler_match(render: Any) -> None:
    """The conditions name the annotations that make a fraction pod, each access guarded (B072, C5)."""
    found = conditions(render())
    assert list(found) == ["shares-a-gpu", "scheduler"]
    annotations = "object.metadata.annotations"
    keys = " || ".join(f"key == '{name}'" for name in names.TRIGGER_ANNOTATIONS)
    assert found["shares-a-gpu"] == (
        f"has({annotations}) && {annotations}.exists(key, "
        f"{keys} || key.startsWith('{names.NVFRACTIONS_PREFIX}'))"
    )
    scheduler = "object.spec.schedulerName"
    assert found["scheduler"] == f"has({scheduler}) && {scheduler} in ['kai-scheduler']"
    two = conditions(render('webhook.schedulerNames=["a","b"]'))
    assert two["scheduler"].endswith("in ['a', 'b']")
    assert "scheduler" not in conditions(render("webhook.schedulerNames=[]"))
    more = conditions(render('webhook.matchConditions=[{"name":"x","expression":"true"}]'))
    assert more["x"] == "true"


def test_namespaces_of_the_control_plane_are_left_alone(render: Any) -> None:
    """kube-system, KAI's, the reservations' and our namespace never wait for us (B070, B073, C10, C14)."""
    selector = hook(render())["namespaceSelector"]["matchExpressions"]
    excluded = {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": sorted([RELEASE, names.RESERVATION_NAMESPACE, names.KAI_NAMESPACE, "kube-system"]),
    }
    assert selector == [excluded, IGNORED]
    expression = {"key": "a", "operator": "Exists"}
    more = json.dumps({"matchLabels": {"b": "c"}, "matchExpressions": [expression]})
    both = hook(render(f"webhook.namespaceSelector={more}"))["namespaceSelector"]
    assert both == {"matchLabels": {"b": "c"}, "matchExpressions": [excluded, IGNORED, expression]}


def test_pod_opt_out_can_be_closed(render: Any) -> None:
    """With podOptOut off a pod's label keeps it in, and the webhook is told so (D20)."""
    assert hook(render())["objectSelector"] == {"matchExpressions": [IGNORED]}
    closed = render("webhook.podOptOut=false")
    assert "objectSelector" not in hook(closed)
    (container,) = closed.pod("Deployment", WEBHOOK)["containers"]
    assert env_of(container)["ISOLATOR_WEBHOOK_POD_OPT_OUT"] == "false"


def test_settings_reach_the_webhook(render: Any) -> None:
    """Every setting is in the environment, none twice, and the one path is among them."""
    pod = render('paths.containerVgpuMount="/var/lib/vgpu"', 'webhook.onNoLimit="deny"').pod(
        "Deployment", WEBHOOK
    )
    (container,) = pod["containers"]
    prefix = "ISOLATOR_WEBHOOK_"
    settings = {name.removeprefix(prefix): value for name, value in env_of(container).items()}
    assert len(settings) == len(container["env"])
    assert settings == {
        "LISTEN": f"0.0.0.0:{names.WEBHOOK_PORT}",
        "MOUNT": "/var/lib/vgpu",
        "ON_NO_LIMIT": "deny",
        "POD_OPT_OUT": "true",
        "SCHEDULERS": '["kai-scheduler"]',
        "SANDBOX_CLASSES": '["gvisor","kata*"]',
        "TLS_MODE": "builtin",
        "TLS_DIRECTORY": "/etc/tls",
        "SET_CA_BUNDLE": "true",
        "CERTIFICATE_LIFE": "8760h",
        "CA_LIFE": "87648h",
        "SECRET": f"{WEBHOOK}-tls",
        "SERVICE": WEBHOOK,
        "NAMESPACE": RELEASE,
        "CONFIGURATION": names.WEBHOOK_CONFIGURATION,
        "DRAIN_SECONDS": "5",
        "LOG_LEVEL": "info",
        "LOG_JSON": "false",
    }
    assert set(settings) == {name.upper() for name in Settings.model_fields}
    assert container["command"] == ["isolator", "webhook"]


def test_replicas_survive_roll_outs_and_drains(render: Any) -> None:
    """Two replicas, spread softly, replaced one by one, stopped after the API server turned away (B073)."""
    spec = render().one("Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    pod = spec["template"]["spec"]
    (spread,) = pod["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    assert spread["labelSelector"]["matchLabels"] == spec["selector"]["matchLabels"]
    (container,) = pod["containers"]
    drain = float(env_of(container)["ISOLATOR_WEBHOOK_DRAIN_SECONDS"])
    assert 0 < drain < pod["terminationGracePeriodSeconds"] - GRACE_SECONDS
    for probe, path in (("livenessProbe", names.HEALTH_PATH), ("readinessProbe", names.READY_PATH)):
        assert container[probe]["httpGet"] == {"path": path, "port": "https", "scheme": "HTTPS"}


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        ("1", "null", {"minAvailable": 1}),
        ("2", "null", {"minAvailable": 2}),
        ('"50%"', "null", {"minAvailable": "50%"}),
        ("1", "1", {"maxUnavailable": 1}),
        ("1", '"34%"', {"maxUnavailable": "34%"}),
        ("null", "null", {"minAvailable": 1}),
        ("-1", "null", {"minAvailable": 1}),
        ("1", "-1", {"minAvailable": 1}),
        ("null", "0", {"maxUnavailable": 0}),
        ('"many"', '"few"', {"minAvailable": 1}),
        ('""', '""', {"minAvailable": 1}),
    ],
)
def test_disruption_budget(render: Any, least: str, most: str, expected: Object) -> None:
    """Null, negative and unreadable values fall back to one replica left."""
    budget = (
        f"webhook.podDisruptionBudget.minAvailable={least}",
        (f"webhook.podDisruptionBudget.maxUnavailable={most}"),
    )
    spec = render(*budget).one("PodDisruptionBudget")["spec"]
    selector = spec.pop("selector")
    assert spec == expected
    assert selector["matchLabels"][names.COMPONENT_LABEL] == names.COMPONENT_WEBHOOK


def test_one_replica_has_no_budget(render: Any) -> None:
    """A budget of one replica of one would stop every drain."""
    assert render("webhook.replicaCount=1").all("PodDisruptionBudget") == []


def rules(rendered: Rendered, kind: str, name: str) -> list[Object]:
    found = [item for item in rendered.all(kind) if item["metadata"]["name"] == name]
    return [rule for item in found for rule in item["rules"]]


def test_builtin_certificates_need_one_secret_and_one_configuration(render: Any) -> None:
    """The webhook may create Secrets, and touch the one Secret and the one configuration."""
    rendered = render()
    assert rules(rendered, "Role", WEBHOOK) == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {
            "apiGroups": [""],
            "resources": ["secrets"],
            "resourceNames": [f"{WEBHOOK}-tls"],
            "verbs": ["get", "patch"],
        },
    ]
    assert rules(rendered, "ClusterRole", WEBHOOK) == [
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["mutatingwebhookconfigurations"],
            "resourceNames": [names.WEBHOOK_CONFIGURATION],
            "verbs": ["get", "patch"],
        }
    ]
    assert rendered.all("Secret") == []
    assert rendered.pod("Deployment", WEBHOOK)["automountServiceAccountToken"] is True


def test_cert_manager_makes_the_certificate(render: Any) -> None:
    """The certificate is for the Service, and the webhook itself sets its CA (B075)."""
    rendered = render("tls.certManager.enabled=true")
    certificate = rendered.one("Certificate", f"{RELEASE}-serving-cert")["spec"]
    assert f"{WEBHOOK}.{RELEASE}.svc" in certificate["dnsNames"]
    assert certificate["issuerRef"]["name"] in rendered.names("Issuer")
    assert "annotations" not in rendered.one("MutatingWebhookConfiguration")["metadata"]
    pod = rendered.pod("Deployment", WEBHOOK)
    volume = next(item for item in pod["volumes"] if item["name"] == "tls")
    assert volume["secret"]["secretName"] == certificate["secretName"] == f"{WEBHOOK}-tls"
    assert pod["automountServiceAccountToken"] is True
    assert (rendered.all("Role"), rendered.names("ClusterRole")) == ([], {WEBHOOK})
    env = env_of(pod["containers"][0])
    assert (env["ISOLATOR_WEBHOOK_TLS_MODE"], env["ISOLATOR_WEBHOOK_SET_CA_BUNDLE"]) == ("files", "true")
    given = render("tls.certManager.enabled=true", 'tls.certManager.issuerRef={"name":"ours"}')
    assert given.all("Issuer") == []
    assert given.one("Certificate")["spec"]["issuerRef"] == {"name": "ours"}


def test_existing_secret(render: Any) -> None:
    """A user's Secret is mounted; its CA is rendered where given, else set by the webhook."""
    rendered = render('tls.existingSecret="mine"')
    env = env_of(rendered.pod("Deployment", WEBHOOK)["containers"][0])
    assert (env["ISOLATOR_WEBHOOK_TLS_MODE"], env["ISOLATOR_WEBHOOK_SET_CA_BUNDLE"]) == ("files", "true")
    assert env["ISOLATOR_WEBHOOK_SECRET"] == "mine"
    assert rendered.all("Role") == []
    assert rendered.names("ClusterRole") == {WEBHOOK}
    pem = "-----BEGIN CERTIFICATE-----\\nAA==\\n-----END CERTIFICATE-----\\n"
    given = render('tls.existingSecret="mine"', f'tls.caBundle="{pem}"')
    bundle = hook(given)["clientConfig"]["caBundle"]
    assert base64.b64decode(bundle).startswith(b"-----BEGIN CERTIFICATE-----\nAA==")
    assert given.all("ClusterRole") == []
    assert given.pod("Deployment", WEBHOOK)["automountServiceAccountToken"] is False


def test_rbac_can_be_left_to_the_user(render: Any) -> None:
    """Without rbac.create no role or binding of any workload is rendered."""
    rendered = render("rbac.create=false", "monitor.enabled=true", "librarySync.removeOnUninstall=true")
    assert not [item["kind"] for item in rendered if "Role" in item["kind"]]
    assert len(rendered.all("ServiceAccount")) == 4
