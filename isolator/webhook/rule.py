"""Whether a pod is injected, where, and why: a pure function with a reason for every answer.

| # | the pod                                                            | action  | reason              |
|---|--------------------------------------------------------------------|---------|---------------------|
| 1 | is in kube-system, KAI's or the reservation namespace              | skip    | reserved-namespace  |
| 2 | has neither gpu-fraction, gpu-memory nor an NvFractions key        | skip    | not-fraction        |
| 3 | belongs to another scheduler                                       | skip    | other-scheduler     |
| 4 | opts out by annotation (any case of letters) *                     | skip    | opt-out-annotation  |
| 5 | opts out by label *                                                | skip    | opt-out-label       |
| 6 | has two or more containers that take KAI's ConfigMaps              | deny    | ambiguous-target    |
| 7 | has NvFractions keys alone, and KAI set no limit                   | skip    | nvfractions         |
| 8 | names a container that is not there, or two different ones         | skip    | unresolved-target   |
| 9 | opts out by a true CUDA_DISABLE_CONTROL in the target's env *      | skip    | opt-out-env         |
|10 | runs in a sandbox runtime class                                    | skip    | sandbox             |
|11 | has a target whose name cannot be a folder's                       | deny    | malformed-name      |
|12 | mounts over the library or the preload file                        | deny    | protected-mount     |
|13 | has KAI's limit reference                                          | inject  | limited             |
|14 | has KAI's marks without it, or our injection and no mark: refuse   | inject  | no-limit            |
|15 | the same with on_no_limit release                                  | release | no-limit            |
|16 | the same with on_no_limit deny                                     | deny    | no-limit            |
|17 | is anything else: KAI has yet to see it                            | inject  | first-pass          |

The first row that fits holds. * ignored, with a warning, where pod_opt_out is false.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, Literal

from isolator import fraction, names
from isolator.webhook import advice, guard, items, kai
from isolator.webhook.pod import Container, Pod, ephemeral_containers, quote, read_pod

Action = Literal["inject", "release", "skip", "deny"]
OnNoLimit = Literal["refuse", "release", "deny"]

SANDBOX_CLASSES: Final = ("gvisor", "kata*")
"""Runtime classes, as globs, in which nothing would enforce a limit."""
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Reason(StrEnum):
    """Why a pod was answered so; the value is the counter's label."""

    RESERVED_NAMESPACE = "reserved-namespace"
    NOT_FRACTION = "not-fraction"
    OTHER_SCHEDULER = "other-scheduler"
    OPT_OUT_ANNOTATION = "opt-out-annotation"
    OPT_OUT_LABEL = "opt-out-label"
    AMBIGUOUS_TARGET = "ambiguous-target"
    NVFRACTIONS = "nvfractions"
    UNRESOLVED_TARGET = "unresolved-target"
    OPT_OUT_ENV = "opt-out-env"
    SANDBOX = "sandbox"
    MALFORMED_NAME = "malformed-name"
    PROTECTED_MOUNT = "protected-mount"
    EPHEMERAL_MOUNT = "ephemeral-mount"
    LIMITED = "limited"
    NO_LIMIT = "no-limit"
    FIRST_PASS = "first-pass"


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operator can choose; `mount` is absolute and clean, `schedulers` empty means any."""

    mount: str = names.DEFAULT_VGPU_MOUNT
    on_no_limit: OnNoLimit = "refuse"
    pod_opt_out: bool = True
    schedulers: tuple[str, ...] = (names.KAI_SCHEDULER,)
    sandbox_classes: tuple[str, ...] = SANDBOX_CLASSES


@dataclass(frozen=True, slots=True)
class Target:
    """The one container that gets the GPU: its list, its place in it, its name."""

    init: bool
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer. `limit_configmap` is KAI's, with the limit; `message` one line for log and user."""

    action: Action
    reason: Reason
    target: Target | None = None
    limit_configmap: str | None = None
    warnings: tuple[str, ...] = ()
    message: str = ""


def decide(pod: object, namespace: str, rule: Rule) -> Verdict:
    """The verdict on a pod that is being created in `namespace` (the request's: the object's may be empty).

    Raises ContractError with one line where the object is no pod.
    """
    view = read_pod(pod)
    early = _not_ours(view, namespace, rule)
    if early:
        return Verdict("skip", early)
    notes: list[str] = []
    out = _opt_out(view, rule, notes)
    if out:
        return _skip(out, "this pod opted out of its GPU memory limit: nothing holds it to its share")
    marks = kai.find_marks(view)
    if len(marks.containers) > 1:
        shown = ", ".join(quote(c.name) for c in marks.containers[:4])
        message = f"containers {shown} all take their GPU from KAI: only one can be limited"
        return Verdict("deny", Reason.AMBIGUOUS_TARGET, message=message)
    if not fraction.is_legacy(view.annotations) and not marks.claimed:
        return Verdict("skip", Reason.NVFRACTIONS)
    target, problem = (marks.containers[0], "") if marks.containers else kai.resolve(view)
    if target is None:
        return _skip(Reason.UNRESOLVED_TARGET, f"{problem}: KAI will not accept this pod")
    if _opted_out_by_env(target, rule, notes):
        return _skip(
            Reason.OPT_OUT_ENV, f"{names.ENV_DISABLE_CONTROL} is set: nothing holds this pod to its share"
        )
    if any(fnmatchcase(view.runtime_class, glob) for glob in rule.sandbox_classes if view.runtime_class):
        why = f"runtime class {quote(view.runtime_class)} is a sandbox: no GPU memory limit is enforced in it"
        return _skip(Reason.SANDBOX, why)
    return _on_target(view, target, marks, rule, notes)


def _not_ours(view: Pod, namespace: str, rule: Rule) -> Reason | None:
    if namespace in names.UNTOUCHED_NAMESPACES:
        return Reason.RESERVED_NAMESPACE
    if not fraction.is_fraction(view.annotations):
        return Reason.NOT_FRACTION
    if rule.schedulers and view.scheduler not in rule.schedulers:
        return Reason.OTHER_SCHEDULER
    return None


def _skip(reason: Reason, why: str) -> Verdict:
    return Verdict("skip", reason, warnings=(why,), message=why)


def _opt_out(view: Pod, rule: Rule, notes: list[str]) -> Reason | None:
    if fraction.declines(view.annotations):
        if rule.pod_opt_out:
            return Reason.OPT_OUT_ANNOTATION
        notes.append(f"annotation {names.ANNOTATION_INJECT} is ignored: this cluster has no opt-out of pods")
    if fraction.ignores(view.labels):
        if rule.pod_opt_out:
            return Reason.OPT_OUT_LABEL
        notes.append(f"label {names.LABEL_WEBHOOK} is ignored: this cluster has no opt-out of pods")
    return None


def _opted_out_by_env(target: Container, rule: Rule, notes: list[str]) -> bool:
    if not advice.is_true(target.literal(names.ENV_DISABLE_CONTROL) or ""):
        return False
    if not rule.pod_opt_out:
        notes.append(f"{names.ENV_DISABLE_CONTROL} is ignored: this cluster has no opt-out of pods")
    return rule.pod_opt_out


def _on_target(view: Pod, target: Container, marks: kai.Marks, rule: Rule, notes: list[str]) -> Verdict:
    where = Target(target.init, target.index, target.name)
    if not _DNS_LABEL.fullmatch(target.name):
        message = f"container name {quote(target.name, 63)} is not a DNS label: rename the container"
        return Verdict("deny", Reason.MALFORMED_NAME, where, message=message)
    covered = guard.denied_mount(target, rule.mount)
    if covered:
        return Verdict("deny", Reason.PROTECTED_MOUNT, where, message=covered)
    second = bool(marks.containers) or items.is_injected(target, rule.mount)
    if second and marks.configmap is None:
        return _without_limit(view, target, where, rule, notes)
    if marks.moved:
        notes.append(
            f"container {quote(target.name)} moved after KAI looked: its limit is read from the new place"
        )
    notes += _advice(view, target, rule)
    if second:
        message = (
            f"limit of container {quote(target.name)} from ConfigMap {quote(marks.configmap or '', 253)}"
        )
        return Verdict("inject", Reason.LIMITED, where, marks.configmap, _unique(notes), message)
    message = f"container {quote(target.name)} injected, KAI has yet to add the limit"
    return Verdict("inject", Reason.FIRST_PASS, where, None, _unique(notes), message)


def _advice(view: Pod, target: Container, rule: Rule) -> list[str]:
    return [
        *advice.on_annotations(view.annotations),
        *advice.on_target(target, view.annotations),
        *advice.on_replaced(target, items.required_env(rule.mount)),
        *advice.on_pod(view),
        *advice.on_others(view, target),
        *guard.parent_mounts(target, rule.mount),
        *(
            f"container {quote(name)} mounts a volume of the GPU memory limit: the mount is taken out"
            for name in guard.foreign_users(view, target)
        ),
    ]


_FATE: dict[OnNoLimit, tuple[Action, str]] = {
    "refuse": ("inject", "CUDA will not start in it"),
    "release": ("release", "it runs without a limit"),
    "deny": ("deny", "this cluster denies such pods"),
}


def _without_limit(view: Pod, target: Container, where: Target, rule: Rule, notes: list[str]) -> Verdict:
    action, fate = _FATE[rule.on_no_limit]
    message = (
        f"KAI set no GPU memory limit for container {quote(target.name)} (is its HAMi-core mode on?): {fate}"
    )
    notes = [message, *notes, *_advice(view, target, rule)]
    return Verdict(action, Reason.NO_LIMIT, where, None, _unique(notes), message)


def _unique(notes: list[str]) -> tuple[str, ...]:
    """Each warning once, and not more than a terminal shows."""
    return tuple(dict.fromkeys(notes))[:16]


def decide_ephemeral(pod: object) -> Verdict:
    """The verdict on an update of pods/ephemeralcontainers, which may not change anything else of a pod.

    Such a container cannot have a subPath, so it cannot be injected: a mount of ours would show it every
    tenant's folder, and a GPU from KAI's ConfigMap would be one without a limit.
    """
    view = read_pod(pod)
    debug = ephemeral_containers(view.spec)
    name = guard.ephemeral_user(debug)
    if name is not None:
        message = (
            f"ephemeral container {quote(name)} mounts a volume of the GPU memory limit: leave that mount out"
        )
        return Verdict("deny", Reason.EPHEMERAL_MOUNT, message=message)
    taking = kai.takers(view, debug)
    if taking:
        message = (
            f"ephemeral container {quote(taking[0].name)} takes its GPU from KAI and cannot be limited:"
            " leave the reference to KAI's ConfigMap out"
        )
        return Verdict("deny", Reason.AMBIGUOUS_TARGET, message=message)
    return Verdict("skip", Reason.NOT_FRACTION, warnings=_unique(advice.on_devices(debug)))
