"""The rule's truth table: the rows of the docstring of isolator.webhook.rule, one by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from kaimodel import PREFIX_KEY, Json, fraction_pod, kai, mutated, us

from isolator.webhook import rule as rule_module
from isolator.webhook.rule import Reason, Rule, decide

OPEN = Rule(pod_opt_out=False)
OPT_OUT = "kai-resource-isolator.io/inject"


def with_annotations(pod: Json, **values: str) -> Json:
    pod["metadata"]["annotations"].update({key.replace("__", "/"): value for key, value in values.items()})
    return pod


def opted_out(value: str) -> Json:
    pod = fraction_pod()
    pod["metadata"]["annotations"][OPT_OUT] = value
    return pod


def labelled() -> Json:
    pod = fraction_pod()
    pod["metadata"]["labels"] = {"kai-resource-isolator.io/webhook": "ignore"}
    return pod


def env_pod(*env: Json, **spec: Any) -> Json:
    return fraction_pod(containers=[{"name": "main", "env": list(env)}], **spec)


def disabled(value: str) -> Json:
    return env_pod({"name": "CUDA_DISABLE_CONTROL", "value": value})


def plain() -> Json:
    pod = fraction_pod()
    pod["metadata"]["annotations"] = None
    return pod


def nvfractions(*containers: str) -> Json:
    pod = fraction_pod()
    keys = [f"nvidia.com/container.{name}.gpu-memory.request" for name in containers or ("main",)]
    pod["metadata"]["annotations"] = dict.fromkeys(keys, "4Gi")
    return pod


def two_marked() -> Json:
    pod = kai(fraction_pod(containers=[{"name": "main"}, {"name": "side"}]))
    pod["spec"]["containers"][1]["env"] = [pod["spec"]["containers"][0]["env"][0]]
    return pod


def named(name: str, **spec: Any) -> Json:
    pod = fraction_pod(**spec)
    pod["metadata"]["annotations"]["gpu-fraction-container-name"] = name
    return pod


def mounting(path: str) -> Json:
    return fraction_pod(
        volumes=[{"name": "mine", "emptyDir": {}}],
        containers=[{"name": "main", "volumeMounts": [{"name": "mine", "mountPath": path}]}],
    )


def unmarked_second() -> Json:
    return kai(mutated(fraction_pod()), marks=False)


Make = Callable[[], Json]
# (row of the table, pod, namespace, rule, action, reason)
TABLE: list[tuple[int, Make, str, Rule, str, str]] = [
    (1, fraction_pod, "kube-system", Rule(), "skip", "reserved-namespace"),
    (1, fraction_pod, "kai-scheduler", Rule(), "skip", "reserved-namespace"),
    (1, fraction_pod, "kai-resource-reservation", Rule(), "skip", "reserved-namespace"),
    (2, plain, "team", Rule(), "skip", "not-fraction"),
    (3, lambda: fraction_pod(schedulerName="volcano"), "team", Rule(), "skip", "other-scheduler"),
    (3, lambda: fraction_pod(schedulerName=None), "team", Rule(), "skip", "other-scheduler"),
    (4, lambda: opted_out("FaLsE"), "team", Rule(), "skip", "opt-out-annotation"),
    (5, labelled, "team", Rule(), "skip", "opt-out-label"),
    (6, two_marked, "team", Rule(), "deny", "ambiguous-target"),
    (7, nvfractions, "team", Rule(), "skip", "nvfractions"),
    (7, lambda: kai(nvfractions(), hamicore=False), "team", Rule(), "skip", "nvfractions"),
    (8, lambda: named("nobody"), "team", Rule(), "skip", "unresolved-target"),
    (9, lambda: disabled("TRUE"), "team", Rule(), "skip", "opt-out-env"),
    (10, lambda: fraction_pod(runtimeClassName="kata-qemu"), "team", Rule(), "skip", "sandbox"),
    (10, lambda: fraction_pod(runtimeClassName="gvisor"), "team", Rule(), "skip", "sandbox"),
    (11, lambda: fraction_pod(containers=[{"name": "a/../b"}]), "team", Rule(), "deny", "malformed-name"),
    (12, lambda: mounting("/etc/ld.so.preload"), "team", Rule(), "deny", "protected-mount"),
    (13, lambda: kai(fraction_pod()), "team", Rule(), "inject", "limited"),
    (13, lambda: kai(nvfractions()), "team", Rule(), "inject", "limited"),
    (14, lambda: kai(fraction_pod(), hamicore=False), "team", Rule(), "inject", "no-limit"),
    (14, unmarked_second, "team", Rule(), "inject", "no-limit"),
    (15, unmarked_second, "team", Rule(on_no_limit="release"), "release", "no-limit"),
    (16, unmarked_second, "team", Rule(on_no_limit="deny"), "deny", "no-limit"),
    (17, fraction_pod, "team", Rule(), "inject", "first-pass"),
    (17, lambda: fraction_pod(schedulerName="x"), "team", Rule(schedulers=()), "inject", "first-pass"),
    (17, lambda: fraction_pod(runtimeClassName="nvidia"), "team", Rule(), "inject", "first-pass"),
    (17, lambda: opted_out("true"), "team", Rule(), "inject", "first-pass"),
    (17, lambda: opted_out("false"), "team", OPEN, "inject", "first-pass"),
    (17, labelled, "team", OPEN, "inject", "first-pass"),
    (17, lambda: disabled("true"), "team", OPEN, "inject", "first-pass"),
]


@pytest.mark.parametrize(("row", "make", "namespace", "rule", "action", "reason"), TABLE)
def test_truth_table(row: int, make: Make, namespace: str, rule: Rule, action: str, reason: str) -> None:
    """Each row of the table holds, and a skip never comes with a target."""
    verdict = decide(make(), namespace, rule)
    assert (action, reason) == (verdict.action, verdict.reason)
    assert (verdict.target is None) == (action == "skip" or row == 6)


def test_docstring_has_the_same_table() -> None:
    """The rows of the docstring are the rows tested here."""
    cells = re.findall(r"^\| ?(\d+) \|.*\| (\w+) +\| ([\w-]+) +\|$", rule_module.__doc__ or "", re.M)
    assert {(int(row), action, reason) for row, action, reason in cells} == {
        (row, action, reason) for row, _, _, _, action, reason in TABLE
    }
    assert {reason for _, _, reason in cells} | {"ephemeral-mount"} == {str(reason) for reason in Reason}


@pytest.mark.parametrize(("make", "word"), [(lambda: opted_out("false"), OPT_OUT), (labelled, "webhook")])
def test_ignored_opt_out_is_said(make: Make, word: str) -> None:
    """Where pods cannot opt out, the one that tries is told so."""
    assert any("ignored" in w and word in w for w in decide(make(), "team", OPEN).warnings)


@pytest.mark.parametrize("value", ["false", "FALSE", "0", "no", "", "off", "maybe"])
def test_disable_control_needs_a_yes(value: str) -> None:
    """Only a true CUDA_DISABLE_CONTROL is an opt-out (B083)."""
    assert decide(disabled(value), "team", Rule()).reason == Reason.FIRST_PASS


def test_disable_control_counts_in_the_target_only() -> None:
    """A sidecar's variable, or one from a reference, does not switch the target's limit off."""
    yes = {"name": "CUDA_DISABLE_CONTROL", "value": "true"}
    side = fraction_pod(containers=[{"name": "main"}, {"name": "side", "env": [yes]}])
    referred = env_pod({"name": yes["name"], "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}})
    overridden = env_pod(yes, {"name": yes["name"], "value": "false"})
    for pod in (side, referred, overridden):
        assert decide(pod, "team", Rule()).action == "inject"


INIT = {"initContainers": [{"name": "load"}, {"name": "warm"}], "containers": [{"name": "a"}, {"name": "b"}]}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (fraction_pod(**INIT), (False, 0, "a")),
        (named("b", **INIT), (False, 1, "b")),
        (named("warm", **INIT), (True, 1, "warm")),
        (named("", **INIT), (False, 0, "a")),
        (named("x", initContainers=[{"name": "x"}], containers=[{"name": "x"}]), (True, 0, "x")),
    ],
)
def test_target_as_kai_resolves_it(pod: Json, expected: tuple[bool, int, str]) -> None:
    """Init containers are searched first, spec.containers[0] serves without a name (B131); KAI agrees."""
    first = us(pod)[1].target
    assert first is not None and expected == (first.init, first.index, first.name)
    marked = us(kai(pod))[1]
    assert marked.target == first and marked.reason == Reason.LIMITED


def test_names_of_both_annotations_must_agree() -> None:
    """A legacy name and an NvFractions key for different containers are KAI's error to report."""
    spec = {"containers": [{"name": "a"}, {"name": "b"}]}
    pod = with_annotations(named("b", **spec), **{"nvidia.com__container.b.gpu-memory.limit": "1"})
    assert decide(pod, "team", Rule()).target == rule_module.Target(False, 1, "b")
    pod = with_annotations(named("b", **spec), **{"nvidia.com__container.a.gpu-memory.limit": "1"})
    verdict = decide(pod, "team", Rule())
    assert (verdict.action, verdict.reason) == ("skip", "unresolved-target")
    assert "disagree" in verdict.warnings[0]
    several = with_annotations(
        fraction_pod(**spec), **{f"nvidia.com__container.{c}.gpu-memory.request": "1" for c in "ab"}
    )
    assert decide(several, "team", Rule()).reason == Reason.UNRESOLVED_TARGET


def test_nvfractions_key_selects_its_container() -> None:
    """A pod with an NvFractions key alone is injected where KAI put its limit, on the second pass."""
    pod = nvfractions("side")
    pod["spec"]["containers"] = [{"name": "main"}, {"name": "side"}]
    assert us(pod)[0] == pod
    verdict = us(kai(pod))[1]
    assert verdict.target == rule_module.Target(False, 1, "side")
    assert verdict.limit_configmap == "train-abc1234-shared-gpu-1"


@pytest.mark.parametrize("nri", [False, True])
def test_limit_comes_from_the_marked_container(nri: bool) -> None:
    """The marked container wins over the annotation's name; NRI mode has no device variable."""
    pod = kai(named("b", **INIT), nri=nri)
    pod["metadata"]["annotations"]["gpu-fraction-container-name"] = "a"
    verdict = decide(pod, "team", Rule())
    assert verdict.target == rule_module.Target(False, 1, "b")
    assert verdict.limit_configmap == "train-abc1234-shared-gpu-1"


def test_init_container_has_its_own_configmap() -> None:
    """The ConfigMap of an init container carries its kind and index."""
    assert us(kai(named("warm", **INIT)))[1].limit_configmap == "train-abc1234-shared-gpu-i1"


def test_moved_container_reads_the_limit_of_its_new_place() -> None:
    """A container put in front after KAI looked shifts the index that KAI's binder will count."""
    pod = kai(named("warm", **INIT))
    pod["spec"]["initContainers"].insert(0, {"name": "vault"})
    after, verdict = us(pod)
    assert verdict.limit_configmap == "train-abc1234-shared-gpu-i2"
    assert any("moved" in w for w in verdict.warnings)
    assert us(kai(after))[1].limit_configmap == "train-abc1234-shared-gpu-i2"


def test_marks_need_kais_annotation() -> None:
    """References without KAI's own prefix annotation are not KAI's."""
    pod = kai(fraction_pod())
    del pod["metadata"]["annotations"][PREFIX_KEY]
    assert decide(pod, "team", Rule()).reason == Reason.FIRST_PASS
