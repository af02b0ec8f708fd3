"""Pods for the admission policy: what the webhook makes of its rule's rows, and what a tenant may forge."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

from images_base import ROOT

from isolator import names
from isolator.webhook.rule import Rule

sys.path.append(str(ROOT / "tests/unit"))
from kaimodel import fraction_pod, kai, us
from test_webhook_rule import INIT, TABLE, named

Pod = dict[str, Any]
SCHEDULER = "policy-scheduler"
"""In place of KAI's, so that neither the shared webhook nor KAI's double touches these pods."""
MOUNT = names.DEFAULT_VGPU_MOUNT
KEY = names.ENV_MEMORY_LIMIT
RULES = {
    "usual": Rule(),
    "open": Rule(pod_opt_out=False),
    "release": Rule(on_no_limit="release"),
    "deny": Rule(on_no_limit="deny"),
    "any": Rule(schedulers=()),
}
"""The rules of the table, by the name of the namespace in which a policy of that rule holds."""

SANDBOXES = ("gvisor", "kata-qemu")
"""Runtime classes of pods in the table, which the cluster must have."""


def values(rule: str) -> dict[str, Any]:
    """The chart's values of a rule, its policy held to the namespaces with a label of that name."""
    given = RULES[rule]
    return {
        "webhook": {
            "onNoLimit": given.on_no_limit,
            "podOptOut": given.pod_opt_out,
            "schedulerNames": [SCHEDULER] if given.schedulers else [],
            "sandboxRuntimeClasses": list(given.sandbox_classes),
            "namespaceSelector": {"matchLabels": {"policy": rule}},
            "admissionPolicy": {"enabled": True},
        }
    }


def ready(pod: Pod) -> Pod:
    """The pod as the API server takes it: with images, and for the scheduler of these tests."""
    made = copy.deepcopy(pod)
    spec = made["spec"]
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        container.setdefault("image", "none")
    if spec.get("schedulerName") == names.KAI_SCHEDULER:
        spec["schedulerName"] = SCHEDULER
    if spec.get("runtimeClassName") == "nvidia":  # KAI's; the cluster has none, nor does the rule ask
        del spec["runtimeClassName"]
    return made


def decided() -> Iterator[tuple[str, str, Pod]]:
    """(what it is, rule, pod) of all that the webhook lets in: each row of its table alone, before KAI and
    after it, in the modes of KAI."""
    modes: list[dict[str, Any]] = [{}, {"hamicore": False}, {"nri": True}, {"marks": False}]
    for row, make, namespace, rule, _, reason in TABLE:
        where = next(name for name, each in RULES.items() if each == rule)
        if namespace != "team" or reason in ("malformed-name", "unresolved-target"):
            continue
        pod, first = us(make(), rule)
        if first.action == "deny":
            continue
        yield f"{row} {reason}", where, pod
        for mode in modes if first.action == "inject" else []:
            after, second = us(kai(pod, **mode), rule)
            if second.action != "deny":
                yield f"{row} {reason} {mode} {second.reason}", where, after
        if first.action == "inject" and not any(map(_marked, make()["spec"]["containers"])):
            after, second = us(kai(make()), rule)
            yield f"{row} {reason} KAI first {second.reason}", where, after


def _marked(container: Pod) -> bool:
    return any(entry["name"] in names.KAI_ENV for entry in container.get("env") or [])


def injected(**spec: Any) -> Pod:
    """A pod as the webhook leaves it, with KAI's limit."""
    return us(kai(us(fraction_pod(**spec))[0]))[0]


def others() -> Iterator[tuple[str, str, Pod]]:
    """(what it is, rule, pod) of further pods that must come in."""
    yield "init target", "usual", us(kai(us(named("warm", **INIT))[0]))[0]
    yield "second of two", "usual", us(kai(us(named("b", **INIT))[0]))[0]
    moved = kai(us(named("warm", **INIT))[0])
    moved["spec"]["initContainers"].insert(0, {"name": "vault"})
    yield "moved", "usual", us(moved)[0]
    places = ("/data/", "/etcetera", "/etc/ld.so.conf.d", "/usr/local", "/usr/local/vgpus", "/a/.b", "/a..b")
    mounts = [
        {"name": "mine", "mountPath": path}
        for path in (*places, "/usr/local/xvgpu", names.VGPULOCK_DIRECTORY)
    ]
    main = {"name": "main", "volumeMounts": mounts}
    yield "mounts nearby", "usual", injected(containers=[main], volumes=[{"name": "mine", "emptyDir": {}}])
    plain = fraction_pod()
    del plain["metadata"]["annotations"]
    yield "plain", "usual", plain
    many = [
        {"name": f"c{n}", "env": [{"name": f"V{v}", "value": "x"} for v in range(100)]} for n in range(100)
    ]
    yield "a hundred containers", "usual", injected(containers=many)
    env = [{"name": f"V{v}", "value": "x" * 20} for v in range(8000)]
    yield "8000 variables", "usual", injected(containers=[{"name": "main", "env": env}])


# ---- what the webhook never lets in -----------------------------------------------------------------

Edit = Callable[[Pod], object]


def _volume(pod: Pod, name: str) -> Pod:
    found: Pod = next(v for v in pod["spec"]["volumes"] if v["name"] == name)
    return found


def _mount(pod: Pod, name: str) -> Pod:
    found: Pod = next(m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == name)
    return found


def _replaced(name: str, **source: Any) -> Edit:
    def edit(pod: Pod) -> None:
        volume = _volume(pod, name)
        volume.clear()
        volume.update(name=name, **source)

    return edit


def _limit(**changes: Any) -> Edit:
    return lambda pod: _volume(pod, names.VOLUME_LIMIT)["configMap"].update(changes)


def _mounted(name: str, **changes: Any) -> Edit:
    def edit(pod: Pod) -> None:
        mount = _mount(pod, name)
        mount.update(changes)
        for key in [key for key, value in mount.items() if value is None]:
            del mount[key]

    return edit


def _without(name: str) -> Edit:
    return lambda pod: pod["spec"]["containers"][0]["volumeMounts"].remove(_mount(pod, name))


def _also(path: str, volume: str = "mine") -> Edit:
    def edit(pod: Pod) -> None:
        pod["spec"]["volumes"].append({"name": "mine", "emptyDir": {}})
        pod["spec"]["containers"][0]["volumeMounts"].append({"name": volume, "mountPath": path})

    return edit


def _env(*entries: Pod) -> Edit:
    return lambda pod: pod["spec"]["containers"][0]["env"].extend(entries)


def _main(**changes: Any) -> Edit:
    return lambda pod: pod["spec"]["containers"][0].update(changes)


def _to_sidecar(pod: Pod) -> None:
    """The injection in another container than the one that has the GPU."""
    first, second = pod["spec"]["containers"]
    ours = [m for m in first["volumeMounts"] if m["name"] in names.VOLUMES]
    first["volumeMounts"] = []
    second["volumeMounts"] = [
        {**m, "subPathExpr": f"$({names.ENV_ISOLATOR_POD_UID})_side"} if "subPathExpr" in m else m
        for m in ours
    ]
    second["env"] = [e for e in first["env"] if e["name"] == names.ENV_ISOLATOR_POD_UID]


def _side(**keys: Any) -> Edit:
    return lambda pod: pod["spec"]["containers"][1].update(keys)


LITERAL = {"name": names.ENV_ISOLATOR_POD_UID, "value": "../../x"}
UID = {"items": [{"path": KEY, "fieldRef": {"fieldPath": "metadata.uid"}}]}
HOST = {"path": f"{MOUNT}/{names.LIBRARY_FILE}", "type": "File"}
TAKING = [{"configMapRef": {"name": "train-abc1234-shared-gpu-0-evar"}}]
CACHES = [{"name": names.VOLUME_CONTAINERS, "mountPath": "/caches"}]
FORGED: dict[str, tuple[Edit, str]] = {
    "library from elsewhere": (_replaced(names.VOLUME_VGPU, hostPath={**HOST, "path": "/tmp/x"}), "library"),
    "library of any type": (_replaced(names.VOLUME_VGPU, hostPath={**HOST, "type": ""}), "library"),
    "library of the tenant": (_replaced(names.VOLUME_VGPU, emptyDir={}), "library"),
    "library mounted elsewhere": (_mounted(names.VOLUME_VGPU, mountPath="/opt/libvgpu.so"), "library"),
    "library writable": (_mounted(names.VOLUME_VGPU, readOnly=None), "library"),
    "library of a sub-path": (_mounted(names.VOLUME_VGPU, subPath="x"), "library"),
    "no library mount": (_without(names.VOLUME_VGPU), "library"),
    "no preload mount": (_without(names.VOLUME_PRELOAD), "preload file"),
    "preload writable": (_mounted(names.VOLUME_PRELOAD, readOnly=False), "preload file"),
    "preload mounted elsewhere": (_mounted(names.VOLUME_PRELOAD, mountPath="/etc/ld.so"), "preload file"),
    "preload of the tenant": (_replaced(names.VOLUME_PRELOAD, configMap={"name": "mine"}), "preload file"),
    "no cache mount": (_without(names.VOLUME_CONTAINERS), "cache folder"),
    "every cache": (_mounted(names.VOLUME_CONTAINERS, subPathExpr=None), "cache folder"),
    "cache of another": (_mounted(names.VOLUME_CONTAINERS, subPathExpr="$(POD_UID)_main"), "cache folder"),
    "cache by a literal": (_env(LITERAL), "cache folder"),
    "no limit mount": (_without(names.VOLUME_LIMIT), "limit"),
    "limit writable": (_mounted(names.VOLUME_LIMIT, readOnly=None), "limit"),
    "limit as a folder": (_mounted(names.VOLUME_LIMIT, subPath=None), "limit"),
    "limit of the tenant": (_limit(name="mine"), "limit"),
    "limit of another index": (_limit(name="train-abc1234-shared-gpu-7"), "limit"),
    "limit optional": (_limit(optional=True), "limit"),
    "limit of another key": (_limit(items=[{"key": "MINE", "path": KEY}]), "limit"),
    "limit beside others": (_limit(items=[{"key": KEY, "path": "a"}, {"key": "b", "path": KEY}]), "limit"),
    "limit an empty folder": (_replaced(names.VOLUME_LIMIT, emptyDir={}), "limit"),
    "limit not KAI's": (_replaced(names.VOLUME_LIMIT, downwardAPI=UID), "limit"),
    "in the wrong container": (_to_sidecar, "library, preload file, cache folder, limit"),
    "two takers": (_side(envFrom=TAKING), "all take"),
    "a volume in the sidecar": (_side(volumeMounts=CACHES), "container side"),
    "covered: /": (_also("/"), "over the quota"),
    "covered: /etc": (_also("//etc/./"), "over the quota"),
    "covered: preload": (_also("/etc/ld.so.preload/"), "over the quota"),
    "covered: below the path": (_also(f"{MOUNT}/limit"), "over the quota"),
    "covered: relative": (_also("usr/./local//vgpu"), "over the quota"),
    "covered: dots": (_also("/data/../etc"), "over the quota"),
    "covered: by our name": (_also("/etc", names.VOLUME_VGPULOCK), "over the quota"),
    "covered: line break": (_also(f"{MOUNT}/limit/a\nb"), "over the quota"),
    "covered: messages": (_main(terminationMessagePath=f"{MOUNT}/limit/{KEY}"), "over the quota"),
}  # fmt: skip
"""How a good pod with a sidecar is changed, and a word of the refusal."""


OFF = {"name": names.ENV_DISABLE_CONTROL, "value": "true"}


def bare(**env: list[Pod]) -> Pod:
    """A pod as KAI leaves it where the webhook is away; its author claims that it is injected."""
    containers = [{"name": name, "env": env.get(name, [])} for name in ("main", "side")]
    pod = kai(fraction_pod(containers=containers))
    pod["metadata"]["annotations"][names.ANNOTATION_STATUS] = names.STATUS_INJECTED
    return pod


def opting_out() -> Iterator[tuple[str, Pod]]:
    """(what it is, pod) of pods without injection that are let in where pods may opt out."""
    yield "by its variable", bare(main=[{**OFF, "value": "no"}, {**OFF, "value": " Yes "}])
    pod = bare()
    pod["metadata"]["annotations"][names.ANNOTATION_INJECT] = "False"
    yield "by its annotation", pod
    pod = bare()
    pod["metadata"]["labels"] = {names.LABEL_WEBHOOK: names.LABEL_WEBHOOK_IGNORE}
    yield "by its label", pod


def forged() -> Iterator[tuple[str, Pod, str]]:
    """(what it is, pod, word of the refusal) of pods that the policy must keep out of the usual rule."""
    yield "nothing but the status", bare(), "library, preload file, cache folder, limit"
    yield "switched off in the sidecar", bare(side=[OFF]), "library"
    yield "switched on again", bare(main=[OFF, {**OFF, "value": "no"}]), "library"
    yield "names nobody", named("nobody"), "name no container"
    for what, (edit, word) in FORGED.items():
        pod = injected(containers=[{"name": "main"}, {"name": "side"}])
        edit(pod)
        yield what, pod, word
