"""From pod objects to the little that the monitor keeps of them."""

from __future__ import annotations

from typing import Any

import monitor_pods as made
import pytest

from isolator import names
from isolator.monitor import pods
from isolator.monitor.model import PodView

KAI_ENV = {
    "name": names.ENV_MEMORY_LIMIT,
    "valueFrom": {"configMapKeyRef": {"name": "p-abc-shared-gpu-0", "key": names.ENV_MEMORY_LIMIT}},
}


def _view(pod: dict[str, Any]) -> PodView:
    return pods.view(pod, made.MOUNT)


def _target(pod: dict[str, Any]) -> list[str]:
    return [container.name for container in _view(pod).containers if container.fraction]


def test_view_of_an_injected_pod() -> None:
    """A pod as the webhook leaves it: injected, running, its limit's ConfigMap and container id known."""
    view = _view(made.pod(7))
    (container,) = view.containers

    assert (view.namespace, view.name, view.uid, view.live) == ("team", "pod-7", made.uid(7), True)
    assert view.scheduler == "kai-scheduler"
    assert container.injected
    assert container.fraction
    assert container.running
    assert not container.init
    assert container.limit_configmap == "p-abc-shared-gpu-0"
    assert view.annotations[names.ANNOTATION_STATUS] == "injected"
    assert container.container_id == f"{7:064x}"
    assert container.started == 1785578400.0


def test_limit_file_without_kais_limit_is_known_by_its_volume() -> None:
    """The webhook's first pass: the pod's UID stands in the limit's place, whatever the annotations say."""
    pod = made.pod(7)
    (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == names.VOLUME_LIMIT]
    del volume["configMap"]
    source = {"path": names.ENV_MEMORY_LIMIT, "fieldRef": {"fieldPath": "metadata.uid"}}
    volume["downwardAPI"] = {"items": [source]}
    pod["metadata"]["annotations"].pop(names.ANNOTATION_STATUS)
    (container,) = _view(pod).containers

    assert container.injected
    assert container.limit_withheld
    assert container.limit_configmap is None
    assert not _view(made.pod(7)).containers[0].limit_withheld


def test_nothing_of_env_and_foreign_annotations_is_kept() -> None:
    """Values of variables and annotations of others never reach the table."""
    pod = made.pod(1, annotations={"gpu-memory": "4096", "secret": "hunter2"})
    pod["spec"]["containers"][0]["env"] = [{"name": "PASSWORD", "value": "hunter2"}]
    pod["metadata"]["labels"] = {"secret": "hunter2", names.LABEL_WEBHOOK: "ignore"}

    assert "hunter2" not in repr(_view(pod))
    assert _view(pod).labels == {names.LABEL_WEBHOOK: "ignore"}


@pytest.mark.parametrize(
    ("annotations", "target"),
    [
        ({"gpu-memory": "1"}, ["a"]),
        ({"gpu-fraction": ""}, ["a"]),
        ({"gpu-memory": "1", names.ANNOTATION_CONTAINER: "b"}, ["b"]),
        ({"gpu-memory": "1", names.ANNOTATION_CONTAINER: "setup"}, ["setup"]),
        ({"gpu-memory": "1", names.ANNOTATION_CONTAINER: "nobody"}, []),
        ({"nvidia.com/container.b.gpu-memory.request": "1Gi"}, ["b"]),
        ({"nvidia.com/container.b.gpu-memory.request": "1Gi", names.ANNOTATION_CONTAINER: "a"}, []),
        ({"nvidia.com/container.b.gpus.devices": "0"}, []),
        ({names.ANNOTATION_CONTAINER: "b"}, []),
        ({}, []),
    ],
)
def test_target_is_the_container_that_kai_picks(annotations: dict[str, str], target: list[str]) -> None:
    """Init containers by name first, then containers; the first one without a name; none without KAI."""
    containers = [made.container("a"), made.container("b")]
    pod = made.pod(1, annotations=annotations, containers=containers, init=[made.container("setup")])

    assert target == _target(pod)


def test_container_with_kais_key_is_the_target() -> None:
    """A container that was put in front later does not take the target's place."""
    annotations = {"gpu-memory": "1", names.ANNOTATION_CONFIGMAP: "p-abc-shared-gpu"}
    containers = [made.container("late"), made.container("real") | {"env": [KAI_ENV]}]
    late = made.pod(1, annotations=annotations, containers=containers)

    assert _target(late) == ["real"]


def test_forged_keys_do_not_move_the_target() -> None:
    """A key of another ConfigMap does not count, and with several of KAI's the annotations decide."""
    foreign = {**KAI_ENV, "valueFrom": {"configMapKeyRef": {"name": "mine", "key": "x"}}}
    annotations = {"gpu-memory": "1", names.ANNOTATION_CONFIGMAP: "p-abc-shared-gpu"}
    one = made.pod(1, annotations=annotations, containers=[made.container("a"), made.container("b")])
    one["spec"]["containers"][1]["env"] = [foreign]
    assert _target(one) == ["a"]

    one["spec"]["containers"][1]["env"] = [KAI_ENV]
    one["spec"]["containers"][0]["env"] = [KAI_ENV]
    assert _target(one) == ["a"]


def test_names_alone_do_not_make_a_container_injected() -> None:
    """A tenant's own volumes under our names, from other paths, are no injection."""
    pod = made.pod(1)
    pod["spec"]["volumes"][0] = {"name": names.VOLUME_VGPU, "emptyDir": {}}
    assert not _view(pod).containers[0].injected

    pod = made.pod(1)
    pod["spec"]["volumes"][1]["hostPath"]["path"] = "/tmp/empty"
    assert not _view(pod).containers[0].injected


@pytest.mark.parametrize(
    "hiding",
    [
        {"name": "mine", "mountPath": "/etc/./ld.so.preload"},
        {"name": "mine", "mountPath": "/etc"},
        {"name": "mine", "mountPath": "/usr/local//vgpu"},
        {"name": names.VOLUME_VGPU, "mountPath": "/etc//ld.so.preload"},
        {"name": "mine", "mountPath": f"{made.MOUNT}/limit"},
    ],
)
def test_a_handmade_injection_that_is_hidden_is_none(hiding: dict[str, str]) -> None:
    """A pod that no webhook judged may mount over the very files that it shows off."""
    pod = made.pod(1)
    pod["spec"]["containers"][0]["volumeMounts"].append(hiding)
    assert not _view(pod).containers[0].injected


def test_a_handmade_injection_that_asks_for_no_limit_is_none() -> None:
    """Library and preload file alone let everything pass."""
    pod = made.pod(1, containers=[made.container(injected=True, limit=False)])
    assert not _view(pod).containers[0].injected
    folder = {"name": names.VOLUME_CONTAINERS, "mountPath": f"{made.MOUNT}/containers"}
    pod["spec"]["containers"][0]["volumeMounts"].append(folder)
    assert _view(pod).containers[0].injected


@pytest.mark.parametrize(
    "given",
    [
        {"annotations": {"gpu-memory": "1", names.ANNOTATION_INJECT: "False"}},
        {"labels": {names.LABEL_WEBHOOK: "ignore"}},
    ],
)
def test_a_pod_that_opts_out_was_not_injected_by_upstream(given: dict[str, dict[str, str]]) -> None:
    """Upstream leaves such a pod alone, so what looks like its injection is the tenant's."""
    pod = made.pod(1, injected=False, **given)
    pod["spec"]["volumes"] = [{"name": names.VOLUME_VGPU, "hostPath": {"path": made.MOUNT}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": names.VOLUME_VGPU, "mountPath": made.MOUNT},
        {"name": "mine", "mountPath": names.PRELOAD_FILE},
    ]
    assert not _view(pod).containers[0].injected


def test_upstreams_injection_counts() -> None:
    """Pods that release 1.1 of the upstream project injected live on across a migration."""
    pod = made.pod(1, injected=False)
    pod["spec"]["volumes"] = [{"name": names.VOLUME_VGPU, "hostPath": {"path": made.MOUNT}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": names.VOLUME_VGPU, "mountPath": made.MOUNT},
        {"name": names.VOLUME_VGPU, "mountPath": names.PRELOAD_FILE, "subPath": names.PRELOAD_KEY},
    ]

    assert _view(pod).containers[0].injected


@pytest.mark.parametrize(
    ("phase", "live"), [("Pending", True), ("Running", True), ("Succeeded", False), ("Failed", False)]
)
def test_finished_pods_are_not_live(phase: str, live: bool) -> None:
    """Only Succeeded and Failed end a pod (B162)."""
    assert live is _view(made.pod(1, phase=phase)).live


def test_lists_that_are_absent_or_null_are_empty() -> None:
    """The API leaves out empty lists, and old clients send null."""
    bare = {"metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": None}, "spec": {}}
    assert _view(bare).containers == ()

    bare["spec"] = {"initContainers": None, "containers": [{"name": "a", "env": None}], "volumes": None}
    bare["status"] = {"containerStatuses": [{"name": "a", "state": {"running": None}, "containerID": None}]}
    (container,) = _view(bare).containers
    assert (container.running, container.container_id, container.started) == (False, "", None)


def test_table_is_bounded_and_says_what_it_left_out() -> None:
    """Pods past the bound are counted, known ones still change."""
    table = pods.PodTable()
    table.replace(_view(made.pod(number)) for number in range(pods.MAX_PODS + 3))
    assert (len(table.snapshot()), table.dropped) == (pods.MAX_PODS, 3)

    table.put(_view(made.pod(1, phase="Failed")))
    assert not table.snapshot()[made.uid(1)].live


def test_finished_pods_make_room_for_running_ones() -> None:
    """A node full of finished jobs hides no running pod."""
    table = pods.PodTable()
    table.replace(_view(made.pod(number, phase="Succeeded")) for number in range(pods.MAX_PODS + 3))
    table.put(_view(made.pod(5000)))

    assert made.uid(5000) in table.snapshot()
    assert (len(table.snapshot()), table.dropped) == (pods.MAX_PODS, 0)


def test_snapshot_does_not_change_afterwards() -> None:
    """What a reader got stays as it was."""
    table = pods.PodTable()
    table.put(_view(made.pod(1)))
    before = table.snapshot()
    table.remove(made.uid(1))

    assert set(before) == {made.uid(1)}
    assert table.snapshot() == {}


@pytest.mark.parametrize("listed", [True, False])
def test_words_that_change_after_the_binding_do_not_count(listed: bool) -> None:
    """KAI read them before: taken away or turned to another container they hide nobody who has a GPU."""
    words = {"gpu-memory": "4096", "gpu-fraction-container-name": "b"}
    containers = [made.container("a"), made.container("b")]
    table = pods.PodTable()
    table.put(_view(made.pod(1, injected=False, annotations=words, containers=containers)))
    opt_out = {names.ANNOTATION_INJECT: "false"}
    for later in ({}, {"gpu-memory": "9", "gpu-fraction-container-name": "a"}, opt_out):
        changed = _view(made.pod(1, injected=False, annotations=later, containers=containers))
        if listed:
            table.replace([changed])
        else:
            table.put(changed)
        seen = table.snapshot()[made.uid(1)]
        assert [c.name for c in seen.containers if c.fraction] == ["b"]
        assert words.items() <= seen.annotations.items()


def test_a_pod_that_kai_bound_is_a_fraction_pod() -> None:
    """The binder's note tells it also where the pod's own words are gone before the monitor sees it."""
    assert _target(made.pod(1, annotations={names.ANNOTATION_RESOURCE_TYPE: "Fraction"})) == ["main"]
    assert _target(made.pod(1, annotations={names.ANNOTATION_RESOURCE_TYPE: "Regular"})) == []
