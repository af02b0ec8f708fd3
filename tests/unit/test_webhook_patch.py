"""The patch: golden files, strict JSON Patch on lists that may be absent, and exact removal."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
from kaimodel import Json, fraction_pod, kai, mutated, us

from isolator import names
from isolator.webhook.patch import build_patch, pointer
from isolator.webhook.rule import Reason, Rule, Verdict, decide

GOLDEN = Path(__file__).parent.parent / "data" / "webhook"
RELEASE = Rule(on_no_limit="release")
STATUS = "kai-resource-isolator.io/status"


def read(path: Path) -> tuple[Json, Rule, Json]:
    """The pod, the rule and the whole of one golden file."""
    golden = json.loads(path.read_text())
    rule = {k: tuple(v) if isinstance(v, list) else v for k, v in golden["rule"].items()}
    return golden["pod"], Rule(**rule), golden


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda p: p.stem)
def test_golden_patch(path: Path) -> None:
    """Each recorded pod gets the recorded verdict and the recorded operations."""
    pod, rule, golden = read(path)
    verdict = decide(pod, "team", rule)
    assert golden["verdict"] == json.loads(json.dumps(asdict(verdict)))
    assert golden["patch"] == build_patch(pod, verdict, rule)


@pytest.mark.parametrize("version", ["1.30", "1.35"])
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda p: p.stem)
def test_golden_result_is_a_valid_pod(path: Path, version: str) -> None:
    """What comes out is a pod of the API's own schema, strictly."""
    pod, rule, _ = read(path)
    kubernetes_validate.validate(mutated(pod, rule), version, strict=True)


def test_golden_files_cover_the_ways_in() -> None:
    """The recorded cases are there: a lost file would be a lost test."""
    expected = """e2e init-container-target kai-first lab-first-pass lab-second-pass named-container
    no-limit-refused no-volumes release sandbox-after-injection"""
    assert set(expected.split()) <= {path.stem for path in GOLDEN.glob("*.json")}


LISTS: list[Json] = [{}, {"env": None, "volumeMounts": None}, {"env": [], "volumeMounts": []}]


@pytest.mark.parametrize("volumes", [{}, {"volumes": None}, {"volumes": []}, {"volumes": [{"name": "x"}]}])
@pytest.mark.parametrize("lists", LISTS)
def test_lists_may_be_absent_null_or_empty(volumes: Json, lists: Json) -> None:
    """No operation points into a list that is not there (B136), in the middle one of three either (B137)."""
    side = {"env": [{"name": "A", "value": "1"}], "volumeMounts": [{"name": "x", "mountPath": "/x"}]}
    containers = [{"name": "a", **side}, {"name": "b", **copy.deepcopy(lists)}, {"name": "c", **side}]
    pod = fraction_pod(containers=containers, **volumes)
    pod["metadata"]["annotations"]["gpu-fraction-container-name"] = "b"
    after = mutated(pod)
    target = after["spec"]["containers"][1]
    assert (len(target["volumeMounts"]), len(target["env"])) == (5, 5)
    assert after["spec"]["containers"][::2] == containers[::2]
    assert len(volumes.get("volumes") or []) + 5 == len(after["spec"]["volumes"])


@pytest.mark.parametrize("metadata", [None, {}, {"annotations": None}, {"annotations": {}}])
def test_annotations_may_be_absent(metadata: Json | None) -> None:
    """The status is written also where the object has no annotations or no metadata."""
    pod: Json = {"metadata": metadata, "spec": {"containers": [{"name": "a"}]}}
    if metadata is None:
        del pod["metadata"]
    patch = build_patch(pod, Verdict("skip", Reason.SANDBOX), Rule())
    after = jsonpatch.apply_patch(pod, patch)
    assert after["metadata"]["annotations"] == {STATUS: "skipped: sandbox"}


def test_status_is_overwritten() -> None:
    """A tenant's own status text decides nothing and does not stay."""
    pod = fraction_pod()
    pod["metadata"]["annotations"][STATUS] = "skipped: because I say so"
    after, verdict = us(pod)
    assert (verdict.action, after["metadata"]["annotations"][STATUS]) == ("inject", "injected")


def test_pointer_escapes() -> None:
    """A key with a slash or a tilde is one reference token."""
    assert pointer("a/b~c~1") == "a~1b~0c~01"


@pytest.mark.parametrize("namespace", ["team", "kube-system"])
def test_untouched_pods_get_no_patch(namespace: str) -> None:
    """A denied pod, a reserved namespace and a pod of KAI's to refuse are answered without operations."""
    rule = Rule(on_no_limit="deny")
    unknown = fraction_pod()
    unknown["metadata"]["annotations"]["gpu-fraction-container-name"] = "nobody"
    for pod in (kai(mutated(fraction_pod()), hamicore=False), unknown):
        verdict = decide(pod, namespace, rule)
        assert verdict.action != "inject" and build_patch(pod, verdict, rule) == []


OWN: list[Json] = [
    {"name": "POD_UID", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}},
    {"name": "CONTAINER_NAME", "value": "main"},
]


@pytest.mark.parametrize("env", [None, [], OWN[:1], OWN, [{"name": "A", "value": "1"}, *OWN]])
@pytest.mark.parametrize("marks", [True, False])
def test_release_takes_out_exactly_ours(env: list[Json] | None, marks: bool) -> None:
    """Removal restores what the tenant and KAI wrote, also variables that look like ours (D23)."""
    container: dict[str, Any] = {"name": "main"} if env is None else {"name": "main", "env": env}
    pod = fraction_pod(containers=[container, {"name": "side"}])
    after, verdict = us(kai(mutated(pod, RELEASE), hamicore=False, marks=marks), RELEASE)
    expected = kai(pod, hamicore=False, marks=marks)
    assert verdict.action == "release"
    assert after["metadata"]["annotations"].pop(STATUS) == "skipped: no-limit"
    if env == [] and not marks:
        del expected["spec"]["containers"][0]["env"]  # an empty list and none are the same to the API
    assert expected == after


def test_opt_out_of_a_restored_pod_takes_the_injection_out() -> None:
    """A pod that comes back with our injection and an opt-out is left without any of it."""
    pod = mutated(fraction_pod())
    pod["metadata"]["annotations"]["kai-resource-isolator.io/inject"] = "false"
    after = mutated(pod)
    assert not any(name in json.dumps(after) for name in (*names.VOLUMES, "ISOLATOR_POD_UID"))
    assert after["metadata"]["annotations"][STATUS] == "skipped: opt-out-annotation"
    assert mutated(after) == after


def test_injection_follows_the_target() -> None:
    """Where KAI chose another container than the first pass did, the first one is as it was."""
    pod = mutated(fraction_pod(containers=[{"name": "app"}]))
    pod["spec"]["containers"].insert(0, {"name": "proxy"})
    after, verdict = us(kai(pod))
    assert verdict.target is not None and verdict.target.name == "proxy"
    assert after["spec"]["containers"][1] == {"name": "app"}
    assert len(after["spec"]["containers"][0]["volumeMounts"]) == 5


def test_second_pass_touches_only_the_limit() -> None:
    """The second call replaces the limit's volume and nothing else."""
    pod = kai(mutated(fraction_pod()))
    patch = build_patch(pod, decide(pod, "team", Rule()), Rule())
    assert [operation["op"] for operation in patch] == ["remove", "add"]
    assert patch[1]["value"]["name"] == names.VOLUME_LIMIT
