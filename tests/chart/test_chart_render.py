"""Every supported way to install renders, with Helm 3 and 4, into objects that Kubernetes accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from charting import CHART, CI_VALUES, KUBE_VERSION, ROOT, Helm, Rendered

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
CUSTOM = yaml.safe_load((ROOT / "tests" / "data" / "chart" / "custom-resources.yaml").read_text())
ci_file = pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem)


@ci_file
def test_lint_is_clean(each_helm: Helm, values: Path) -> None:
    """`helm lint --strict` finds nothing."""
    done = each_helm.run("lint", "--strict", str(CHART), "-f", str(values), "--kube-version", KUBE_VERSION)
    assert "0 chart(s) failed" in done.stdout
    assert "[WARNING]" not in done.stdout


@ci_file
def test_helm_3_and_4_agree(each_helm: Helm, values: Path, render: Any) -> None:
    """Each Helm renders the same objects, in any order."""
    ours = Rendered(each_helm.template("-f", str(values)).stdout)
    key = lambda item: json.dumps(item, sort_keys=True)  # noqa: E731
    assert sorted(map(key, ours)) == sorted(map(key, render(files=(values,))))


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(render: Any, version: str) -> None:
    """Every built-in object of every CI file holds strictly to the schemas of 1.30 to 1.37 (B180)."""
    seen: set[str] = set()
    for values in CI_VALUES:
        for item in render(files=(values,)):
            text = json.dumps(item, sort_keys=True)
            if item["apiVersion"] in CUSTOM or text in seen:
                continue
            seen.add(text)
            kubernetes_validate.validate(item, version, strict=True)
    assert len(seen) > 50


def test_custom_resources_are_valid(render: Any) -> None:
    """Objects of cert-manager and of the Prometheus operator use known fields alone."""
    kinds = set()
    for values in CI_VALUES:
        for item in render(files=(values,)):
            if item["apiVersion"] in CUSTOM:
                kinds.add(item["kind"])
                jsonschema.validate(item["spec"], CUSTOM[item["apiVersion"]][item["kind"]])
    assert kinds == {"Certificate", "Issuer", "PodMonitor", "PrometheusRule", "ServiceMonitor"}


def test_old_kubernetes_is_refused(helm: Helm) -> None:
    """A cluster without matchConditions by default gets a line that says which version is needed."""
    done = helm.run("template", "x", str(CHART), "--kube-version", "1.29.9", check=False)
    assert done.returncode != 0
    assert ">=1.30.0-0" in done.stderr


@ci_file
def test_names_are_unique_and_placed(render: Any, values: Path) -> None:
    """No two objects share kind and name, and each that is namespaced names its namespace."""
    cluster = {"ClusterRole", "ClusterRoleBinding", "MutatingWebhookConfiguration", "Namespace"}
    cluster |= {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    keys = []
    for item in render(files=(values,)):
        keys.append((item["kind"], item["metadata"]["name"]))
        if item["kind"] not in cluster:
            assert item["metadata"]["namespace"] == "kai-resource-isolator"
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "kai-resource-isolator"
    assert len(keys) == len(set(keys))


def test_every_render_is_the_same(helm: Helm) -> None:
    """GitOps: nothing random and nothing looked up, so two renders are one text."""
    first, second = (helm.template("--set", "monitor.enabled=true").stdout for _ in range(2))
    assert first == second
    files = [*(CHART / "templates").rglob("*.yaml"), CHART / "templates" / "_helpers.tpl"]
    templates = "".join(path.read_text() for path in files)
    assert not re.search(
        r"\b(lookup|rand[A-Z]\w+|gen[A-Z]\w+|uuidv4|now|date|getHostByName)\b [\".(]", templates
    )


def test_normal_path_has_no_hooks(helm: Helm, render: Any) -> None:
    """`helm template --no-hooks | kubectl apply` installs everything but the test pod (C2)."""
    bare = Rendered(helm.template("--no-hooks").stdout)
    full = render()
    assert {item["kind"] for item in full} - {item["kind"] for item in bare} == {"Pod"}
    assert full.one("Pod")["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_private_registry_covers_every_image(render: Any) -> None:
    """One registry and one list of pull secrets reach every pod, hooks included (B181)."""
    found = 0
    more = ('global.imageRegistry="r.local"', 'global.imagePullSecrets=["a",{"name":"b"}]')
    for item in render("monitor.enabled=true", "librarySync.removeOnUninstall=true", *more):
        spec = item.get("spec", {})
        pod = spec if item["kind"] == "Pod" else spec.get("template", {}).get("spec")
        if pod:
            found += 1
            assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
            assert [c["image"].split("/")[0] for c in pod["containers"]] == ["r.local"]
    assert found == 5


def test_no_system_priority_class_by_default(render: Any) -> None:
    """GKE refuses system classes outside kube-system, so none is rendered and no key is left empty (B178)."""
    for item in render("monitor.enabled=true"):
        assert "priorityClassName" not in json.dumps(item)
    lab = render('librarySync.priorityClassName="x"', 'monitor.priorityClassName="y"', "monitor.enabled=true")
    assert lab.pod("DaemonSet", "kai-resource-isolator-libsync")["priorityClassName"] == "x"
    assert lab.pod("DaemonSet", "kai-resource-isolator-monitor")["priorityClassName"] == "y"


def test_lab_flags_empty_priority_class(helm: Helm) -> None:
    """The lab's own flags, `--set-string librarySync.priorityClassName=` among them, are accepted."""
    flags = "--set-string librarySync.priorityClassName= --set-string monitor.priorityClassName="
    path = "--set paths.containerVgpuMount=/home/kubernetes/bin/nvidia/vgpu --set monitor.enabled=true"
    lab = Rendered(helm.template(*flags.split(), *path.split()).stdout)
    assert lab.one("ConfigMap")["data"] == {"ld.so.preload": "/home/kubernetes/bin/nvidia/vgpu/libvgpu.so\n"}
    assert lab.names("DaemonSet") == {"kai-resource-isolator-libsync", "kai-resource-isolator-monitor"}
