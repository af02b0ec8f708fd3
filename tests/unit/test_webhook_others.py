"""Ways to a GPU beside the one limited container: others, debug containers, a forged device list."""

from __future__ import annotations

from typing import Any

import pytest
from kaimodel import PREFIX_KEY, Json, fraction_pod, kai, mutated, us

from isolator import names
from isolator.webhook.rule import Reason, Rule, decide, decide_ephemeral

DEVICES = "NVIDIA_VISIBLE_DEVICES"


def from_configmap(name: str, key: str = DEVICES) -> Json:
    return {"name": DEVICES, "valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}


def with_side(**side: Any) -> Json:
    return fraction_pod(containers=[{"name": "main"}, {"name": "side", **side}])


@pytest.mark.parametrize("annotation", ["gpu-memory", "nvidia.com/container.main.gpu-memory.request"])
def test_a_forged_device_list_does_not_hide_kais_limit(annotation: str) -> None:
    """Where KAI leaves the device list alone (NRI) a tenant's own, of another index, changes nothing."""
    pod = fraction_pod(containers=[{"name": "main", "env": [from_configmap("p-1")]}])
    pod["metadata"]["annotations"] = {annotation: "4096", PREFIX_KEY: "p"}
    verdict = us(kai(mutated(pod), nri=True))[1]
    assert (verdict.action, verdict.reason, verdict.limit_configmap) == ("inject", Reason.LIMITED, "p-0")


def test_a_limit_from_kai_is_never_taken_for_nvidias_own() -> None:
    """A pod of KAI 0.18's keys alone whose traces contradict each other is refused CUDA, not skipped."""
    pod = kai(fraction_pod())
    pod["metadata"]["annotations"].pop("gpu-memory")
    pod["metadata"]["annotations"]["nvidia.com/container.main.gpu-memory.request"] = "4096Mi"
    prefix = pod["metadata"]["annotations"][PREFIX_KEY]
    reference = {"configMapKeyRef": {"name": f"{prefix}-1", "key": "GPU_PORTION"}}
    pod["spec"]["containers"][0]["env"].append({"name": "GPU_PORTION", "valueFrom": reference})
    assert decide(pod, "team", Rule()).reason == Reason.NO_LIMIT


@pytest.mark.parametrize(
    "entry",
    [
        {"name": DEVICES, "value": "all"},
        from_configmap("mine"),
        {"name": DEVICES, "valueFrom": {"secretKeyRef": {"name": "mine", "key": "x"}}},
        {"name": DEVICES, "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "e", "key": "x"}}},
    ],
)
def test_a_device_list_from_anywhere_is_warned_of(entry: Json) -> None:
    """Another container that names GPUs is told of, wherever it takes the names from."""
    verdict = decide(with_side(env=[entry]), "team", Rule())
    assert ['"side"' in w and "nothing limits it" in w for w in verdict.warnings] == [True]
    assert decide(with_side(env=[{"name": DEVICES, "value": "void"}]), "team", Rule()).warnings == ()


@pytest.mark.parametrize(
    ("key", "warned"),
    [
        ("nvidia.cdi.k8s.io/container.side", 1),
        ("nvidia.cdi.k8s.io/container.main", 0),
        ("nvidia.cdi.k8s.io/pod", 1),
        ("cdi.k8s.io/x", 1),
    ],
)
def test_devices_by_annotation_are_warned_of(key: str, warned: int) -> None:
    """Where a plugin of the runtime gives devices by annotation, only the target's are limited."""
    pod = with_side()
    pod["metadata"]["annotations"][key] = "nvidia.com/gpu=all"
    assert [key in w for w in decide(pod, "team", Rule()).warnings] == [True] * warned


@pytest.mark.parametrize("capability", ["SYS_ADMIN", "CAP_SYS_ADMIN", "ALL", "all"])
def test_the_right_to_unmount_is_warned_of(capability: str) -> None:
    """A target that may unmount can take the preload file away."""
    container = {"name": "main", "securityContext": {"capabilities": {"add": ["CHOWN", capability]}}}
    warnings = decide(fraction_pod(containers=[container]), "team", Rule()).warnings
    assert ["unmount" in w for w in warnings] == [True]


def test_a_pod_that_names_its_node_is_warned_of() -> None:
    """KAI never sees such a pod, so nobody reserves what it takes."""
    warnings = decide(fraction_pod(nodeName="n1"), "team", Rule()).warnings
    assert ["nodeName" in w for w in warnings] == [True]


@pytest.mark.parametrize("suffix", ["", "-evar"])
@pytest.mark.parametrize("annotated", [True, False])
def test_a_debug_container_cannot_take_kais_gpu(suffix: str, annotated: bool) -> None:
    """It cannot be injected; the ConfigMap is known by our volume where the annotation was changed (B131)."""
    pod = mutated(kai(mutated(fraction_pod())))
    configmap = pod["metadata"]["annotations"][PREFIX_KEY] + "-0"
    if not annotated:
        pod["metadata"]["annotations"][PREFIX_KEY] = "another"
    taking: tuple[Json, ...] = (
        {"env": [from_configmap(configmap + suffix)]},
        {"envFrom": [{"configMapRef": {"name": configmap + suffix}}]},
    )
    for members in taking:
        pod["spec"]["ephemeralContainers"] = [{"name": "first"}, {"name": "debug", **members}]
        verdict = decide_ephemeral(pod)
        assert (verdict.action, verdict.reason) == ("deny", Reason.AMBIGUOUS_TARGET)
        assert '"debug"' in verdict.message


def test_a_debug_container_that_names_gpus_is_warned_of() -> None:
    """Others may come, with a warning where they ask for devices by themselves."""
    pod = mutated(kai(mutated(fraction_pod())))
    pod["spec"]["ephemeralContainers"] = [{"name": "debug", "env": [{"name": DEVICES, "value": "all"}]}]
    verdict = decide_ephemeral(pod)
    assert verdict.action == "skip" and "nothing limits it" in verdict.warnings[0]
    pod["spec"]["ephemeralContainers"] = [{"name": "debug", "envFrom": [{"configMapRef": {"name": "own"}}]}]
    assert decide_ephemeral(pod).warnings == ()
    assert names.VOLUME_LIMIT in [v["name"] for v in pod["spec"]["volumes"]]
