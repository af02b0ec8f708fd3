"""The values: each documented and used, the schema closed, bad ones refused in a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import values_doc
import yaml
from charting import CHART, Helm

TEXT = values_doc.VALUES.read_text()
DEFAULTS: dict[str, Any] = yaml.safe_load(TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DOCUMENTED = {value.path: value.default for value in values_doc.values(TEXT)}

# Without effect on objects: values of 1.0 and 1.1, which NOTES names where used, and what steers NOTES.
NO_OP = {
    "paths.hostInstallBase",
    "webhook.gpuShareResources",
    "webhook.image",
    "librarySync.image",
    "tls.patch",
    "notes.lookAround",
}

# A value other than the default where "one more" or "not" of it would not do, and what it needs beside it.
OTHER: dict[str, Any] = {
    "namespaceOverride": "elsewhere",
    "fullnameOverride": "other",
    "namespace.podSecurity": "baseline",
    "global.imagePullSecrets": ["pull"],
    "image.digest": "sha256:" + "0" * 64,
    "librarySync.libraryDigest": "sha256:" + "0" * 64,
    "image.pullPolicy": "Always",
    "logging.level": "debug",
    "listenAddress": "[::]",
    "paths.containerVgpuMount": "/var/lib/vgpu",
    "webhook.failurePolicy": "Ignore",
    "webhook.configurationName": "other",
    "webhook.onNoLimit": "deny",
    "webhook.namespaceSelector": {"matchLabels": {"a": "b"}},
    "webhook.objectSelector": {"matchLabels": {"a": "b"}},
    "webhook.matchConditions": [{"name": "a", "expression": "true"}],
    "webhook.admissionPolicy.validationActions": ["Audit", "Warn"],
    "webhook.admissionPolicy.failurePolicy": "Ignore",
    "webhook.podDisruptionBudget.minAvailable": 2,
    "webhook.podDisruptionBudget.maxUnavailable": 1,
    "webhook.topologySpread.topologyKey": "zone",
    "webhook.topologySpread.whenUnsatisfiable": "DoNotSchedule",
    "service.type": "NodePort",
    "tls.existingSecret": "mine",
    "tls.certManager.issuerRef": {"name": "mine"},
    "librarySync.maxUnavailable": 1,
    "librarySync.kubeletPodsDirectory": "/var/lib/k0s/kubelet/pods",
    "monitor.maxUnavailable": 1,
    "monitor.driverPath": "/opt/driver",
    "monitor.service.type": "NodePort",
    "monitor.grafana.namespace": "grafana",
    "monitor.prometheusRule.disabled": ["GPUMemoryBypass"],
    "monitor.prometheusRule.runbookUrl": "https://a.example/monitoring",
    "networkPolicy.apiServerPorts": [8443],
    "networkPolicy.monitorFrom": [{"podSelector": {}}],
    "tests.hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
}
KIND_OF_KEY: dict[str, Any] = {
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "resources": {"limits": {"cpu": "1"}},
    "nodeSelector": {"a": "b"},
    "podSecurityContext": {"runAsUser": 1},
    "securityContext": {"runAsUser": 1},
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "a", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "a", "mountPath": "/a"}],
    "interval": "7s",
    "nearLimitFor": "7m",
    "staleAfter": "7h",
    "ruleLabels": {"a": "b"},
    "scrapeTimeout": "7s",
    "updateInterval": "7s",
    "resyncInterval": "7s",
    "duration": "8000h",
    "caDuration": "9000h",
    "renewBefore": "7h",
    "labels": {"a": "b"},
    "annotations": {"a": "b"},
    "podLabels": {"a": "b"},
    "podAnnotations": {"a": "b"},
}
NEEDS: dict[str, dict[str, Any]] = {
    "tls.caBundle": {"tls.existingSecret": "mine"},
    "namespace.podSecurity": {"namespace.create": True},
    "librarySync.removeTimeoutSeconds": {"librarySync.removeOnUninstall": True},
    "networkPolicy.monitorFrom": {"networkPolicy.enabled": True, "monitor.enabled": True},
    "networkPolicy.apiServerPorts": {"networkPolicy.enabled": True},
}
NEEDS_BY_PREFIX = {
    "monitor.": {"monitor.enabled": True},
    "monitor.serviceMonitor.": {"monitor.serviceMonitor.enabled": True},
    "monitor.grafana.": {"monitor.grafana.enabled": True},
    "monitor.grafana.folderAnnotation": {"monitor.grafana.folder": "GPUs"},
    "monitor.prometheusRule.": {"monitor.prometheusRule.enabled": True},
    "monitor.podMonitor.": {"monitor.podMonitor.enabled": True},
    "webhook.serviceMonitor.": {"webhook.serviceMonitor.enabled": True},
    "webhook.admissionPolicy.": {"webhook.admissionPolicy.enabled": True},
    "tls.certManager.": {"tls.certManager.enabled": True},
}


def put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values.setdefault(name, {})
    values[last] = value


def other(path: str, default: Any) -> Any:
    """A valid value that differs from the default."""
    key = path.rsplit(".", 1)[-1]
    if path in OTHER:
        return OTHER[path]
    if path == "tls.caBundle":
        return "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if key in KIND_OF_KEY:
        return KIND_OF_KEY[key]
    return ["other"] if isinstance(default, list) else "other"


def needed(path: str) -> dict[str, Any]:
    """The values without which `path` has no effect."""
    values: dict[str, Any] = {}
    found = [
        NEEDS.get(path, {}),
        *(more for prefix, more in NEEDS_BY_PREFIX.items() if path.startswith(prefix)),
    ]
    for name, value in (item for more in found for item in more.items()):
        if name != path:
            put(values, name, value)
    return values


@pytest.mark.parametrize("top", [*(key for key in DEFAULTS if isinstance(DEFAULTS[key], dict)), ""])
def test_every_value_is_used(helm: Helm, top: str, tmp_path: Any) -> None:
    """Another value gives another render, for each value that is not a declared no-op."""
    renders: dict[str, str] = {}

    def rendered(values: dict[str, Any]) -> str:
        key = json.dumps(values)
        if key not in renders:
            file = tmp_path / "values.yaml"
            file.write_text(yaml.safe_dump(values))
            renders[key] = helm.template("-f", str(file)).stdout
        return renders[key]

    unused = []
    for path, default in DOCUMENTED.items():
        if (path.split(".")[0] if "." in path else "") != top or path in NO_OP:
            continue
        changed = needed(path)
        put(changed, path, other(path, default))
        if rendered(needed(path)) == rendered(changed):
            unused.append(path)
    assert unused == []


def test_every_used_value_is_declared() -> None:
    """A template names no value that values.yaml lacks; NOTES and helpers included."""

    def known(path: str) -> bool:
        node: Any = DEFAULTS
        for part in path.split("."):
            if isinstance(node, dict) and part in node:
                node = node[part]
            else:
                # Below a value that is empty by default (a label selector, say) anything may be asked.
                return node == {}
        return True

    used = set()
    for file in (CHART / "templates").rglob("*.*"):
        text = file.read_text()
        used |= set(re.findall(r"\.Values\.([\w.]+\w)", text))
        alias = set(re.findall(r"\$values :?= \.Values\.(\w+)", text))
        if alias:
            assert len(alias) == 1, f"{file.name}: $values stands for one component"
            used |= {f"{min(alias)}.{path}" for path in re.findall(r"\$values\.([\w.]+\w)", text)}
        for path in re.findall(r"(?<![$\w])\.values\.([\w.]+\w)", text):
            used |= {f"{component}.{path}" for component in ("webhook", "librarySync", "monitor")}
    assert len(used) > 100
    assert sorted(path for path in used if not known(path)) == []


def sections(node: Any, schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every map of the values whose schema lists its keys."""
    schema = SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else schema
    if isinstance(node, dict) and "properties" in schema:
        yield path, schema
        for key, value in node.items():
            yield from sections(value, schema["properties"].get(key, {}), f"{path}.{key}" if path else key)


def test_schema_knows_every_value() -> None:
    """The schema lists the keys of values.yaml, no other but `enabled`, which umbrella charts set."""
    for path, schema in sections(DEFAULTS, SCHEMA):
        node: Any = DEFAULTS
        for part in path.split(".") if path else ():
            node = node[part]
        if path not in DOCUMENTED:
            assert set(schema["properties"]) - ({"enabled"} if not path else set()) == set(node), path


def test_schema_is_closed_everywhere() -> None:
    """A key too many is refused wherever keys are listed, `global` of umbrella charts excepted."""

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            open_ones = path == "/properties/global" or path.startswith("/definitions/complete")
            if "properties" in node and not open_ones:
                assert node.get("additionalProperties") is False, path
            for key, value in node.items():
                walk(value, f"{path}/{key}")

    walk({key: value for key, value in SCHEMA.items()}, "")
    for path, _ in sections(DEFAULTS, SCHEMA):
        if path == "global":
            continue
        values: dict[str, Any] = {}
        put(values, f"{path}.tpyo" if path else "tpyo", 1)
        with pytest.raises(jsonschema.ValidationError, match="tpyo"):
            jsonschema.validate(values, SCHEMA)


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("monitor.enabld=true", "enabld"),
        ("paths.containerVgpuMont=/a/b", "containerVgpuMont"),
        ("webhook.podDisruptionBudget.minAvailble=1", "minAvailble"),
        ("tls.certManager.enabled=yes", "tls/certManager/enabled|tls.certManager.enabled"),
        ("webhook.onNoLimit=allow", "refuse"),
        ("webhook.timeoutSeconds=60", "timeoutSeconds"),
        ("webhook.replicaCount=0", "replicaCount"),
        ("paths.containerVgpuMount=usr/local/vgpu", "containerVgpuMount"),
        ("paths.containerVgpuMount=/usr", "containerVgpuMount"),
        ("paths.containerVgpuMount=/usr/local/vgpu/", "containerVgpuMount"),
        ("paths.containerVgpuMount=/usr/local/../vgpu", "containerVgpuMount"),
        ("image.digest=sha256:1", "digest"),
        ("tls.caBundle=x", "tls.existingSecret"),
        ("tls.certManager.enabled=true,tls.existingSecret=x", "choose one"),
        (
            "monitor.enabled=true,monitor.prometheusRule.enabled=true,monitor.prometheusRule.disabled={GPUMemoryNearLimt}",
            "GPUMemoryNearLimt is no alert",
        ),
        ("tls.builtin.duration=1m", "must be 2m or more"),
        ("tls.builtin.caDuration=1h", "is shorter than tls.builtin.duration"),
        ("tls.certManager.renewBefore=9000h", "must be shorter than tls.certManager.duration"),
        ("tls.existingSecret=x,tls.caBundle=QUJD", "PEM"),
        ("monitor.updateInterval=5 s", "updateInterval"),
    ],
)
def test_bad_values_are_refused(each_helm: Helm, flag: str, line: str) -> None:
    """Helm stops with a line that names the value or says what to do."""
    done = each_helm.template("--set", flag, check=False)
    assert done.returncode != 0
    assert re.search(line, done.stderr), done.stderr


def test_page_is_generated() -> None:
    """docs/values.md is what the script makes of values.yaml, and each value has a sentence."""
    assert [value.path for value in values_doc.values(TEXT) if not value.sentence.endswith(".")] == []
    assert values_doc.PAGE.read_text() == values_doc.page(TEXT)
