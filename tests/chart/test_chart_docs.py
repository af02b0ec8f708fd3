"""The pages about the chart: their policies are valid, and what they name is there."""

from __future__ import annotations

import re
import shlex
from typing import Any

import kubernetes_validate
import pytest
import values_doc
import yaml
from charting import NAMESPACE, RELEASE, ROOT, Helm, Rendered

from isolator import names

SECURITY = (ROOT / "docs" / "security.md").read_text()
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text()
PATHS = {value.path for value in values_doc.values(values_doc.VALUES.read_text())}
POLICIES: list[dict[str, Any]] = [
    item
    for block in re.findall(r"```yaml\n(.*?)```", SECURITY, re.DOTALL)
    for item in yaml.safe_load_all(block)
]


def policy(name: str) -> dict[str, Any]:
    (found,) = (
        item
        for item in POLICIES
        if (item["kind"], item["metadata"]["name"]) == ("ValidatingAdmissionPolicy", name)
    )
    spec: dict[str, Any] = found["spec"]
    return spec


@pytest.mark.parametrize("version", ["1.30", "1.35", "1.37"])
def test_policies_are_valid(version: str) -> None:
    """The policy and its binding hold strictly to the schemas."""
    assert len(POLICIES) == 2
    for item in POLICIES:
        kubernetes_validate.validate(item, version, strict=True)


def test_tenant_policy_allows_our_volumes_alone() -> None:
    """Its host folders are the three that the webhook injects, by name and path."""
    (rule,) = (
        item["expression"]
        for item in policy(f"{RELEASE}-tenant-baseline")["validations"]
        if "hostPath" in item["expression"]
    )
    allowed = set(re.findall(r"v\.name == '([^']+)' && v\.hostPath\.path == '([^']+)'", rule))
    mount = names.DEFAULT_VGPU_MOUNT
    assert allowed == {
        (names.VOLUME_VGPU, f"{mount}/{names.LIBRARY_FILE}"),
        (names.VOLUME_PRELOAD, f"{mount}/{names.PRELOAD_KEY}"),
        (names.VOLUME_CONTAINERS, f"{mount}/{names.CONTAINERS_DIRECTORY}"),
    }


def test_rights_by_hand_are_those_of_the_chart(each_helm: Helm, render: Any) -> None:
    """The command of security.md prints the roles and bindings that rbac.create makes, and nothing else."""
    (command,) = re.findall(r"^ *helm template (.*?)\n *```", SECURITY, re.M | re.S)
    release, _, *flags = shlex.split(command.replace("\\\n", " "))
    assert (release, flags[:2]) == (RELEASE, ["-n", NAMESPACE])
    printed = Rendered(each_helm.template("--set", "rbac.create=false", *flags[2:]).stdout)
    whole = render("monitor.enabled=true")
    kinds = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    assert {item["kind"] for item in printed} == set(kinds)
    for kind in kinds:
        assert printed.names(kind) == whole.names(kind)
        assert all(item == whole.one(kind, item["metadata"]["name"]) for item in printed.all(kind))


def test_angle_brackets_of_the_values_page_are_readable() -> None:
    """Outside of a code span `<` is escaped, or it would begin HTML; inside it stands for itself."""
    text = "# -- One is <a>|b, two is `<a>|b`.\nx: 1\n"
    assert "One is &lt;a>\\|b, two is `<a>\\|b`." in values_doc.page(text)


@pytest.mark.parametrize("page", [SECURITY, TROUBLE], ids=["security", "troubleshooting"])
def test_values_that_a_page_names_exist(page: str) -> None:
    """Each `section.value` of the chart in a code span is a value, or a part of one."""
    tops = {path.split(".")[0] for path in PATHS if "." in path}
    named = set(re.findall(rf"`((?:{'|'.join(sorted(tops))})(?:\.\w+)+)", page))
    kais = {"global.gpuSharing", "global.gpuSharingMode", "global.blockNvidiaVisibleDevices"}
    assert len(named) > 10
    known = {
        path
        for path in named
        if any(path == v or v.startswith(f"{path}.") or path.startswith(f"{v}.") for v in PATHS)
    }
    assert sorted(named - known - kais) == []


def test_lab_s_table_is_covered() -> None:
    """The symptoms of the public lab's own table are on the page."""
    for symptom in (
        "didn't have enough resources: GPU memory",
        'RuntimeClass "nvidia" not found',
        "ERROR_LIBRARY_NOT_FOUND",
        "/dev/nvidia*",
        "Read-only file system",
        "cannot be preloaded",
        "system-*",
        "CUDA driver version is insufficient",
        "WebSocket EOF",
        "a Queue is refused",
        "no series for a pod",
    ):
        assert symptom in TROUBLE
