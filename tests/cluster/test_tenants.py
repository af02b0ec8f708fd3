"""Tenants that try to lift their limit from their entry point, their pod's spec or KAI's ConfigMap."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import Cluster, ClusterError, wait_for
from kai import Kai
from product import STATE, Product, cache_folder, metrics, tenant, value, wait_running

from isolator import names

MOUNT = names.DEFAULT_VGPU_MOUNT
ROOM = f"hostile-{uuid.uuid4().hex[:8]}"
LIMIT_MIB, GIB = 4147, 1 << 30
PROVE = f"memory-limit; nvidia-smi --query-gpu=memory.total --format=csv,noheader; ls -A {MOUNT}/containers"
VICTIM = "victim"
HELD = {"name": "held", "emptyDir": {}}


@dataclass(frozen=True)
class Attack:
    """What a tenant does: `before` in its shell (`run` is how it starts programs), the rest in its spec."""

    before: str = ":"
    run: str = "sh -c"
    container: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)


def exports(**variables: str) -> str:
    return "export " + " ".join(f"{name}={text}" for name, text in variables.items())


ATTACKS = (
    "raises",
    "drops",
    "empties",
    "points-elsewhere",
    "is-another-pod",
    "names-volumes",
    "shares-volumes",
)
"""Written here, because making the attacks needs the image, and tests are collected without one."""


def attacks(uid: str) -> dict[str, Attack]:
    """By name of the pod; `uid` is the victim's."""
    raised = {names.ENV_MEMORY_LIMIT: "1t", names.ENV_MEMORY_LIMIT_INDEXED.format(index=0): "1t"}
    elsewhere = {
        names.ENV_SHARED_CACHE: "/tmp/own.cache",
        names.ENV_CONTAINER_VGPU_MOUNT: "/tmp",
        names.ENV_POD_UID: uid,
        names.ENV_ISOLATOR_POD_UID: uid,
        names.ENV_CONTAINER_NAME: "other",
        names.ENV_DISABLE_CONTROL: "true",
        names.ENV_ENFORCE: "none",
        "LD_PRELOAD": "''",
    }
    dropped = [names.ENV_MEMORY_LIMIT, names.ENV_SHARED_CACHE, names.ENV_ISOLATOR_POD_UID, *elsewhere]
    kept = {name: text.strip("'") for name, text in elsewhere.items() if name != names.ENV_DISABLE_CONTROL}
    own = [{"name": name, "value": text} for name, text in kept.items()]
    volumes = [{"name": name, "emptyDir": {}} for name in names.VOLUMES]
    whole = {"name": names.VOLUME_CONTAINERS, "mountPath": "/all"}
    library = {"name": names.VOLUME_VGPU, "mountPath": "/vgpu"}
    sidecar = {
        **{key: tenant("x")["spec"]["containers"][0][key] for key in ("image", "imagePullPolicy")},
        "name": "sidecar",
        "command": ["sh", "-c", "ls -d /all /vgpu 2>&1; ls -A /all | wc -l"],
        "volumeMounts": [whole, library],
    }
    return {
        "raises": Attack(exports(**raised)),
        "drops": Attack("unset " + " ".join(dropped)),
        "empties": Attack(run=f"env -i PATH=$PATH SIMGPU_STATE={STATE}/state SIMGPU_MODEL=T4 sh -c"),
        "points-elsewhere": Attack(exports(**elsewhere)),
        "is-another-pod": Attack(container={"env": own}),
        "names-volumes": Attack(
            container={"volumeMounts": [whole, library]}, spec={"volumes": volumes, "containers": [sidecar]}
        ),
        "shares-volumes": Attack(spec={"containers": [sidecar]}),
    }


def pod(name: str, attack: Attack) -> dict[str, Any]:
    """Runs to its end, so that the card is free for the next one."""
    script = f"{attack.before}; {attack.run} '{PROVE}'"
    spec = {"restartPolicy": "Never", **attack.spec}
    return tenant(name, {"gpu-memory": "4096"}, ["sh", "-c", script], container=attack.container, **spec)


@dataclass
class Room:
    """The attacks, run to their end beside a victim that holds 3 GiB."""

    cluster: Cluster
    victim: dict[str, Any]
    names: list[str]

    def log(self, name: str, *words: str) -> str:
        return self.cluster.logs(name, *words, namespace=ROOM)


@pytest.fixture(scope="module")
def room(cluster: Cluster, product: Product, kai: Kai) -> Iterator[Room]:
    with cluster.space(ROOM):
        hold = {"env": [{"name": "HOLD_SECONDS", "value": "100000"}]}
        held = tenant(VICTIM, command=["memory-limit", "3072"], container=hold)
        cluster.apply(held, ROOM)
        victim = wait_running(cluster, VICTIM, namespace=ROOM, kai=kai)[0]
        wait_for(lambda: "no error" in cluster.logs(VICTIM, namespace=ROOM), 60, "the victim's memory")
        made = attacks(victim["metadata"]["uid"])
        assert tuple(made) == ATTACKS
        cluster.apply([pod(name, attack) for name, attack in made.items()], ROOM)
        for name in made:
            cluster.wait_pod(name, "Succeeded", namespace=ROOM, timeout=240)
        yield Room(cluster, victim, list(made))


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_tenant_stays_at_its_limit_and_in_its_own_folder(room: Room, name: str) -> None:
    """3 GiB granted, 2 GiB more refused, total 4147 MiB, and its region in its own folder alone (B149)."""
    said = room.log(name, "--container=main")
    assert "allocate 3 GiB: no error" in said
    assert "allocate another 2 GiB: out of memory" in said
    assert said.splitlines()[-2:] == [f"{LIMIT_MIB} MiB", names.CACHE_FILE], said
    found = room.cluster.get("pod", name, namespace=ROOM)
    own = cache_folder(room.cluster, found)
    assert [path.name for path in own.iterdir()] == [names.CACHE_FILE]
    assert cache_folder(room.cluster, room.victim).exists()


@pytest.mark.parametrize("name", ["names-volumes", "shares-volumes"])
def test_a_sidecar_sees_no_volume_of_ours(room: Room, name: str) -> None:
    """A container that names our volumes has neither all tenants' folders nor a way to the library."""
    said = room.log(name, "--container=sidecar")
    assert "cannot access '/all'" in said and "cannot access '/vgpu'" in said
    node = room.cluster.get("pod", name, namespace=ROOM)["spec"]["nodeName"]
    listed = room.cluster.nodes[node].path(f"{MOUNT}/containers").iterdir()
    assert not [path.name for path in listed if path.name.endswith("_sidecar")]


def test_the_victim_of_all_of_it_holds_what_it_held(room: Room) -> None:
    """A pod whose UID others took for theirs still has its 3 GiB charged, its limit and its one file."""
    own = cache_folder(room.cluster, room.victim)
    assert [path.name for path in own.iterdir()] == [names.CACHE_FILE]
    samples = metrics(room.cluster, room.victim["spec"]["nodeName"])
    labels = {"namespace": ROOM, "pod": VICTIM, "container": "main"}
    assert value(samples, "hami_vgpu_memory_used_bytes", **labels) == 3 * GIB + 106_954_752
    assert value(samples, "hami_vgpu_memory_limit_bytes", **labels) == LIMIT_MIB << 20
    assert value(samples, "kai_isolator_region_tampered", **labels) == 0


COVERS = {
    "file": names.PRELOAD_FILE,
    "file-relative": names.PRELOAD_FILE[1:],
    "folder": "/etc",
    "root-file": f"{names.PRELOAD_FILE}/x",
    "mount": MOUNT,
    "library": f"{MOUNT}/{names.LIBRARY_FILE}",
    "limit": f"{MOUNT}/{names.LIMIT_FILE}",
    "cache": f"{MOUNT}/{names.CONTAINERS_DIRECTORY}",
    "odd": f"{MOUNT}/./x/../{names.LIMIT_DIRECTORY}",
}


@pytest.mark.parametrize("path", COVERS.values(), ids=COVERS.keys())
def test_a_mount_over_the_library_is_denied_with_a_reason(
    cluster: Cluster, product: Product, kai: Kai, namespace: str, path: str
) -> None:
    """The API server refuses the pod and repeats our one line: which mount, where, what to do."""
    mounts = {"volumeMounts": [{"name": "held", "mountPath": path}]}
    with pytest.raises(
        ClusterError, match="would hide the GPU memory limit: mount it neither at /, /etc"
    ) as no:
        cluster.apply(tenant("covers", container=mounts, volumes=[HELD]), namespace)
    assert f'mount of "held" at "{path}"' in str(no.value)
    assert names.WEBHOOK_NAME in str(no.value)


def limit_map(found: dict[str, Any]) -> str:
    """Name of KAI's ConfigMap with the limit of a pod."""
    volumes = {each["name"]: each for each in found["spec"]["volumes"]}
    return str(volumes[names.VOLUME_LIMIT]["configMap"]["name"])


def test_an_edit_of_kais_configmap_does_not_reach_a_running_container(
    cluster: Cluster, product: Product, kai: Kai, namespace: str
) -> None:
    """The volume has the new text, the container the old: every later program stays at the first limit.

    Whoever may edit that ConfigMap gets the new limit with the container's next start, never unseen: metric
    and event say that it is above KAI's grant.
    """
    command = ["sh", "-c", "until [ -e /tmp/again ]; do sleep 0.2; done"]
    cluster.apply(tenant("edits", command=command), namespace)
    found = wait_running(cluster, "edits", namespace=namespace, kai=kai)[0]
    data = {"data": {names.ENV_MEMORY_LIMIT: "15000m"}}
    words = ["patch", "configmap", limit_map(found), f"--namespace={namespace}", "--patch"]
    cluster.kubectl(*words, json.dumps(data))
    volume = f"volumes/kubernetes.io~configmap/{names.VOLUME_LIMIT}/{names.ENV_MEMORY_LIMIT}"
    node = cluster.nodes[found["spec"]["nodeName"]]
    there = node.path(f"{names.PODS_DIRECTORY}/{found['metadata']['uid']}/{volume}")
    see = ["cat", str(there).partition("/root")[2]]
    wait_for(lambda: node.run(see).stdout.strip() == "15000m", 180, "the kubelet to write the new text", 0.5)
    shown = cluster.exec_("edits", ["cat", f"{MOUNT}/{names.LIMIT_FILE}"], namespace=namespace)
    assert shown.strip() == f"{LIMIT_MIB}m"
    said = cluster.exec_("edits", ["sh", "-c", PROVE], namespace=namespace)
    assert "another 2 GiB: out of memory" in said and f"\n{LIMIT_MIB} MiB\n" in said
    _restart(cluster, "edits", namespace)
    said = cluster.exec_("edits", ["sh", "-c", PROVE], namespace=namespace)
    assert "\n15000 MiB\n" in said
    labels = {"namespace": namespace, "pod": "edits", "container": "main"}

    def reported() -> bool:
        events = {each["reason"] for each in cluster.events("edits", namespace=namespace)}
        found = value(metrics(cluster, node.name), "kai_isolator_limit_mismatch", **labels)
        return found == 1 and "GPUMemoryLimitMismatch" in events

    wait_for(reported, 90, "the metric and the event of a limit above KAI's grant", every=0.5)


def _restart(cluster: Cluster, name: str, namespace: str) -> None:
    cluster.exec_(name, ["touch", "/tmp/again"], namespace=namespace)

    def again() -> bool:
        status = cluster.get("pod", name, namespace=namespace)["status"]["containerStatuses"][0]
        return bool(status["restartCount"] and status["ready"])

    wait_for(again, 90, f"{name} to restart", every=0.3)
