"""The JSON Patch (RFC 6902) that carries a verdict out: pure, strict, empty on a pod that is right."""

from __future__ import annotations

from collections.abc import Sequence

from isolator import names
from isolator.webhook import guard, items
from isolator.webhook.pod import Container, Json, Pod, as_object, read_pod
from isolator.webhook.rule import Reason, Rule, Verdict

_UNDONE = frozenset(
    {Reason.OPT_OUT_ANNOTATION, Reason.OPT_OUT_LABEL, Reason.OPT_OUT_ENV, Reason.SANDBOX, Reason.NVFRACTIONS}
)
"""Skips of a fraction pod that may come back with an injection of ours: a restored pod, a changed class."""


def build_patch(pod: object, verdict: Verdict, rule: Rule) -> list[Json]:
    """Operations that give the pod what the verdict says and take every other item of ours away.

    `pod` is the object that the verdict was made from. Items of others keep their value and their order.
    Raises ContractError with one line where the object is no pod.
    """
    if verdict.action == "deny" or (verdict.action == "skip" and verdict.reason not in _UNDONE):
        return []
    view = read_pod(pod)
    target = _target(view, verdict) if verdict.action == "inject" else None
    lock = target is not None and not guard.brings_lock(target)
    wanted = items.volumes(rule.mount, verdict.limit_configmap, lock) if target else []
    ours = [i for i, volume in enumerate(view.volumes) if volume["name"] in names.VOLUMES]
    operations = _edit("/spec/volumes", view.spec.get("volumes"), ours, wanted)
    for container in view.containers:
        operations += _container(container, container is target, lock, rule.mount)
    if operations or verdict.reason is not Reason.NVFRACTIONS:
        operations = _status(pod, view, verdict) + operations
    return operations


def _target(view: Pod, verdict: Verdict) -> Container:
    wanted = verdict.target
    return next(c for c in view.containers if wanted and (c.init, c.index) == (wanted.init, wanted.index))


def _container(container: Container, is_target: bool, lock: bool, mount: str) -> list[Json]:
    mounts, env = [], []
    ours_env = items.own_env(container, mount)
    if is_target:
        mounts = items.mounts(mount, container.name, lock)
        env = items.required_env(mount)
        replaced = {entry["name"] for entry in env}
        ours_env = [i for i, entry in enumerate(container.env) if entry["name"] in replaced]
        present = {entry["name"] for entry in container.env}
        env += [e for e in items.default_env(mount, container.name) if e["name"] not in present]
    ours_mounts = [i for i, entry in enumerate(container.mounts) if items.is_ours(entry)]
    return [
        *_edit(f"{container.path}/volumeMounts", container.raw.get("volumeMounts"), ours_mounts, mounts),
        *_edit(f"{container.path}/env", container.raw.get("env"), ours_env, env),
    ]


def _edit(path: str, current: list[Json] | None, ours: Sequence[int], wanted: list[Json]) -> list[Json]:
    """Operations on one list: unwanted items at `ours` go, missing ones are appended.

    An absent or null list is added whole, a list that we would leave empty is removed.
    """
    if current is None:
        return [{"op": "add", "path": path, "value": wanted}] if wanted else []
    missing = list(wanted)
    gone = []
    for index in ours:
        if current[index] in missing:
            missing.remove(current[index])
        else:
            gone.append(index)
    if gone and len(gone) == len(current) and not missing:
        return [{"op": "remove", "path": path}]
    operations: list[Json] = [{"op": "remove", "path": f"{path}/{index}"} for index in reversed(gone)]
    return operations + [{"op": "add", "path": f"{path}/-", "value": item} for item in missing]


def _status(pod: object, view: Pod, verdict: Verdict) -> list[Json]:
    injected = verdict.action == "inject"
    status = names.STATUS_INJECTED if injected else f"{names.STATUS_SKIPPED}{verdict.reason}"
    if view.annotations.get(names.ANNOTATION_STATUS) == status:
        return []
    annotation = {names.ANNOTATION_STATUS: status}
    metadata = as_object(pod, "pod").get("metadata")
    if metadata is None:
        return [{"op": "add", "path": "/metadata", "value": {"annotations": annotation}}]
    if metadata.get("annotations") is None:
        return [{"op": "add", "path": "/metadata/annotations", "value": annotation}]
    return [
        {"op": "add", "path": f"/metadata/annotations/{pointer(names.ANNOTATION_STATUS)}", "value": status}
    ]


def pointer(key: str) -> str:
    """`key` as one reference token of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
