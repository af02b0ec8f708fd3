"""What a tenant writes into its pod to get round the limit: overwritten, denied, or warned of."""

from __future__ import annotations

import errno
import random
from typing import Any
from uuid import UUID

import pytest
from isolator._core import ffi, lib
from kaimodel import PREFIX_KEY, Json, fraction_pod, kai, mutated, target_of, us

from isolator import names
from isolator.webhook.rule import Reason, Rule, decide, decide_ephemeral

MOUNT = names.DEFAULT_VGPU_MOUNT
LIMIT = "CUDA_DEVICE_MEMORY_LIMIT"


def main_with(**members: Any) -> Json:
    return fraction_pod(
        volumes=[{"name": "mine", "emptyDir": {}}], containers=[{"name": "main", **members}, {"name": "side"}]
    )


def mounting(path: str, volume: str = "mine", **more: Any) -> Json:
    return main_with(volumeMounts=[{"name": volume, "mountPath": path, **more}])


def reference(name: str, key: str) -> Json:
    return {"valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}


def limit_volume(pod: Json) -> Json:
    found: list[Json] = [v for v in pod["spec"]["volumes"] if v["name"] == names.VOLUME_LIMIT]
    assert len(found) == 1
    return found[0]


def sorted_items(pod: Json) -> list[Json]:
    """Volumes, and the target's mounts and variables, each sorted by name and path."""
    main = pod["spec"]["containers"][0]
    lists = (pod["spec"]["volumes"], main["volumeMounts"], main["env"])
    return [
        item for each in lists for item in sorted(each, key=lambda i: (i["name"], i.get("mountPath", "")))
    ]


DENIED = [
    *(
        "/etc/ld.so.preload",
        "/etc/ld.so.preload/",
        "etc/ld.so.preload",
        "//etc//x/../ld.so.preload",
        "/etc",
        "/",
    ),
    *(
        MOUNT,
        f"{MOUNT}/",
        f"{MOUNT}/libvgpu.so",
        f"{MOUNT}/containers",
        f"{MOUNT}/limit/{LIMIT}",
        f"{MOUNT}/a/b",
    ),
]


@pytest.mark.parametrize("path", DENIED)
def test_mount_over_the_library_is_denied(path: str) -> None:
    """A mount at the preload file, at the mount path or below it is denied by a line that names it."""
    for pod in (
        mounting(path),
        main_with(volumeDevices=[{"name": "mine", "devicePath": path}]),
        main_with(terminationMessagePath=path),
    ):
        verdict = decide(kai(pod), "team", Rule())
        assert (verdict.action, verdict.reason) == ("deny", Reason.PROTECTED_MOUNT)
        assert path in verdict.message and "main" in verdict.message and "\n" not in verdict.message


@pytest.mark.parametrize(
    "path", ["/usr/local/vgpu2", "/usr/local/nvidia/lib64", "/etc/ssl", "/tmp", "/dev/shm"]
)
def test_other_mounts_are_let_in(path: str) -> None:
    """Mounts elsewhere are neither denied nor warned of."""
    verdict = decide(mounting(path), "team", Rule())
    assert (verdict.action, verdict.warnings) == ("inject", ())


@pytest.mark.parametrize("path", ["/usr/local", "/usr/", "usr"])
def test_mount_at_a_parent_is_warned_of(path: str) -> None:
    """Ours are mounted on top of a parent's, but who may write to that parent can take them away."""
    verdict = decide(mounting(path), "team", Rule())
    assert verdict.action == "inject" and MOUNT in verdict.warnings[0]


def test_protected_paths_follow_the_mount_path() -> None:
    """With another mount path its own places are protected, and the default's are free."""
    rule = Rule(mount="/var/lib/vgpu")
    assert decide(mounting("/var/lib/vgpu/x"), "team", rule).action == "deny"
    assert decide(mounting(MOUNT), "team", rule).action == "inject"


def test_sidecar_may_mount_there() -> None:
    """Only the target is protected: in another container these paths are nobody's."""
    pod = main_with()
    pod["spec"]["containers"][1]["volumeMounts"] = [{"name": "mine", "mountPath": "/etc/ld.so.preload"}]
    after, verdict = us(pod)
    assert verdict.action == "inject" and after["spec"]["containers"][1] == pod["spec"]["containers"][1]


def test_own_lock_folder_is_kept() -> None:
    """A tenant's mount at /tmp/vgpulock stays alone there: two at one path would make the pod invalid."""
    after, verdict = us(mounting("/tmp/vgpulock"))
    paths = [m["mountPath"] for m in target_of(after, verdict)["volumeMounts"]]
    assert paths.count("/tmp/vgpulock") == 1
    assert names.VOLUME_VGPULOCK not in [v["name"] for v in after["spec"]["volumes"]]
    assert mutated(after) == after


@pytest.mark.parametrize("volume", names.VOLUMES)
def test_volumes_with_our_names_are_replaced(volume: str) -> None:
    """A volume of the tenant with a name of ours does not survive, nor do mounts of it at any path (B135)."""
    pod = mounting("/mnt/all", volume)
    pod["spec"]["volumes"] = [{"name": volume, "hostPath": {"path": "/"}}]
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": volume, "mountPath": "/etc/ld.so.preload"})
    after, verdict = us(kai(pod))
    clean, same = us(kai(fraction_pod(containers=[{"name": "main"}, {"name": "side"}])))
    assert verdict.action == "inject"
    assert sorted_items(clean) == sorted_items(after)
    assert target_of(clean, same)["volumeMounts"] == target_of(after, verdict)["volumeMounts"]


@pytest.mark.parametrize("more", [{}, {"subPath": "other-uid_main"}, {"subPathExpr": "$(X)"}])
def test_sidecar_cannot_mount_our_folders(more: Json) -> None:
    """Another container that refers to our volume would see every tenant's folder: the mount goes."""
    pod = main_with()
    pod["spec"]["initContainers"] = [{"name": "early", "volumeMounts": []}]
    spy = {"name": names.VOLUME_CONTAINERS, "mountPath": "/all", **more}
    pod["spec"]["containers"][1]["volumeMounts"] = [spy, {"name": "mine", "mountPath": "/x"}]
    pod["spec"]["initContainers"][0]["volumeMounts"] = [spy]
    after, verdict = us(kai(pod))
    assert after["spec"]["containers"][1]["volumeMounts"] == [{"name": "mine", "mountPath": "/x"}]
    assert after["spec"]["initContainers"][0] == {"name": "early"}
    assert all(any(name in w for w in verdict.warnings) for name in ('"side"', '"early"'))


def test_ephemeral_container_cannot_mount_our_folders() -> None:
    """A later debug container must not mount our volumes; others may come."""
    pod = kai(mutated(fraction_pod()))
    pod["spec"]["ephemeralContainers"] = [{"name": "debug"}]
    assert decide_ephemeral(pod).action == "skip"
    spy = {"name": names.VOLUME_CONTAINERS, "mountPath": "/all"}
    pod["spec"]["ephemeralContainers"] = [{"name": "debug", "volumeMounts": [spy]}]
    verdict = decide_ephemeral(pod)
    assert (verdict.action, verdict.reason) == ("deny", Reason.EPHEMERAL_MOUNT) and "debug" in verdict.message


def test_our_variables_are_overwritten() -> None:
    """The folder and the region's path never come from the tenant; POD_UID and its like stay the tenant's."""
    forged = [
        {"name": "ISOLATOR_POD_UID", "value": "another-pod"},
        {"name": "POD_UID", "value": "another-pod"},
        {"name": "CUDA_DEVICE_MEMORY_SHARED_CACHE", "value": "/tmp/mine"},
        {"name": "ISOLATOR_POD_UID", "value": "third"},
    ]
    after, verdict = us(kai(main_with(env=forged)))
    env = target_of(after, verdict)["env"]
    own = [e for e in env if e["name"] in ("ISOLATOR_POD_UID", "CUDA_DEVICE_MEMORY_SHARED_CACHE")]
    source = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}
    assert [
        {"name": "ISOLATOR_POD_UID", "valueFrom": source},
        {"name": "CUDA_DEVICE_MEMORY_SHARED_CACHE", "value": f"{MOUNT}/containers/usage.cache"},
    ] == own
    assert [forged[1]] == [e for e in env if e["name"] == "POD_UID"]
    assert {"ISOLATOR_POD_UID", "CUDA_DEVICE_MEMORY_SHARED_CACHE"} == {w.split()[0] for w in verdict.warnings}


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"name": LIMIT, "value": "80g"}, "is not used"),
        ({"name": LIMIT, **reference("mine", LIMIT)}, "is not used"),
        ({"name": f"{LIMIT}_0", "value": "80g"}, "not raise"),
        ({"name": "ISOLATOR_ENFORCE", "value": "no"}, "cannot switch"),
        ({"name": "LD_PRELOAD", "value": "/opt/libvgpu.so"}, "not needed"),
    ],
)
def test_futile_variables_are_warned_of(entry: Json, word: str) -> None:
    """A variable that aims at the limit stays where it is and gives one warning."""
    pod = main_with(env=[entry])
    after, verdict = us(pod)
    assert entry in target_of(after, verdict)["env"]
    assert [word in w and entry["name"] in w for w in verdict.warnings] == [True]


@pytest.mark.parametrize(
    "entry",
    [
        {"name": LIMIT, "value": "80g"},
        {"name": LIMIT, **reference("mine", LIMIT)},
        {"name": LIMIT, **reference("p-7", LIMIT)},
        {"name": LIMIT, **reference("p-0", "GPU_PORTION")},
        {"name": LIMIT, **reference("p-0-evar", LIMIT)},
    ],
)
def test_forged_limit_is_no_limit(entry: Json) -> None:
    """Where KAI sets no limit a tenant's own does not count: CUDA will not start with the limit file."""
    pod = main_with(env=[entry])
    pod["metadata"]["annotations"][PREFIX_KEY] = "p"
    after, verdict = us(kai(mutated(pod), hamicore=False))
    assert (verdict.action, verdict.reason, verdict.limit_configmap) == ("inject", Reason.NO_LIMIT, None)
    assert limit_volume(after)["downwardAPI"]["items"][0]["fieldRef"]["fieldPath"] == "metadata.uid"
    assert "CUDA will not start" in verdict.warnings[0]


def test_pod_uid_is_never_a_limit() -> None:
    """The library's parser refuses what stands in the limit file until KAI gave its word."""
    for uid in (str(UUID(int=0)), *(str(UUID(bytes=random.Random(i).randbytes(16))) for i in range(500))):
        text = uid.encode()
        assert lib.vgpu_limit_parse(text, len(text), ffi.new("uint64_t *")) not in (0, -errno.ENODATA)


@pytest.mark.parametrize(
    "decoy",
    [
        {"env": [{"name": LIMIT, **reference("p-1", LIMIT)}]},
        {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", **reference("p-0", "NVIDIA_VISIBLE_DEVICES")}]},
        {"envFrom": [{"configMapRef": {"name": "p-0"}}]},
    ],
)
@pytest.mark.parametrize("hamicore", [True, False])
def test_decoy_container_is_denied(decoy: Json, hamicore: bool) -> None:
    """A second container that takes the GPU from KAI's ConfigMap would run without a limit."""
    pod = main_with()
    pod["metadata"]["annotations"][PREFIX_KEY] = "p"
    pod["spec"]["containers"][1].update(decoy)
    assert us(kai(mutated(pod), hamicore))[1].reason == Reason.AMBIGUOUS_TARGET


def test_copied_pod_of_an_older_path_gets_todays() -> None:
    """A pod restored with the injection of another path or release comes out like a new one (B135)."""
    pod = kai(fraction_pod())
    old, new = Rule(mount="/old/vgpu"), Rule()
    restored, expected = mutated(mutated(pod, old), new), mutated(pod, new)
    env = restored["spec"]["containers"][0]["env"]
    next(e for e in env if e["name"] == "CONTAINER_VGPU_MOUNT")["value"] = MOUNT  # theirs to keep
    assert sorted_items(expected) == sorted_items(restored)


def test_privileged_and_self_serving_containers_are_warned_of() -> None:
    """Ways round the limit that a pod spec shows are named (B085)."""
    pod = main_with(securityContext={"privileged": True})
    pod["spec"]["containers"][1]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    warnings = decide(pod, "team", Rule()).warnings
    assert ["privileged" in warnings[0], '"side"' in warnings[1]] == [True, True]
