"""The doctor's judgements of a cluster, on API objects that a real API server sent."""

from __future__ import annotations

import datetime as dt
import json
import random
from typing import Any

import pytest
from doctor_cluster import (
    Change,
    bundle,
    dead,
    hook_failed,
    ids,
    judged,
    kai_gone,
    monitor,
    own_pod,
    put,
    refused,
    secret,
    short,
    sound,
    tenant,
    waiting,
)

from isolator.doctor import cluster
from isolator.doctor.cluster_facts import Facts
from isolator.doctor.report import Report

CASES: list[tuple[str, list[Change], list[str], int]] = [
    ("sound", [], [], 0),
    ("empty caBundle", [bundle("")], ["webhook_bundle"], 69),
    ("caBundle is text", [bundle("bm8=")], ["webhook_bundle"], 69),
    ("certificate for others", [secret("example.com")], ["webhook_certificate"], 70),
    ("certificate ended", [secret(ago=400)], ["webhook_certificate"], 70),
    ("certificate ends soon", [secret(life=dt.timedelta(days=9))], ["certificate_due"], 0),
    ("no Secret", [put("secret", {})], ["webhook_certificate"], 70),
    ("Service without endpoints", [put("slices", [])], ["webhook_down"], 68),
    ("no Deployment", [put("deployments", [])], ["webhook_down"], 68),
    ("x509", [hook_failed("x509: certificate signed by unknown authority")], ["webhook_bundle"], 69),
    ("x509 expired", [hook_failed("x509: certificate has expired")], ["webhook_certificate"], 70),
    ("time-out", [hook_failed("context deadline exceeded")], ["webhook_unreachable"], 71),
    ("no route", [hook_failed("dial tcp 10.0.0.1:8443: i/o timeout")], ["webhook_unreachable"], 71),
    ("refused", [hook_failed("connect: connection refused")], ["webhook_down"], 68),
    ("KAI silent", [hook_failed("no endpoints", "admission.kai-scheduler.svc")], ["kai_not_ready"], 73),
    ("denied", [refused("kai-resource-isolator: KAI set no GPU memory limit for")], ["kai_hamicore_off"], 74),
    ("others refuse", [refused("exceeded quota: pods")], [], 0),
    ("image", [own_pod("webhook", **waiting("ErrImagePull", "no such image"))], ["image_pull"], 61),
    ("crash", [own_pod("monitor", **waiting("CrashLoopBackOff"))], ["workload_failing"], 66),
    ("noexec", [own_pod("libsync", told="/x is mounted noexec, so")], ["mount_noexec"], 42),
    ("read-only", [own_pod("libsync", told="/x: Read-only file system")], ["mount_readonly"], 41),
    ("disk", [own_pod("libsync", told="no space left at /x")], ["libsync_not_ready"], 43),
    ("starting", [own_pod("libsync")], [], 0),
    ("quota", short(0, "exceeded quota: q, requested: pods=1"), ["workload_refused"], 64),
    ("class", short(0, "no PriorityClass with name gone was found"), ["priority_class"], 62),
    (
        "GKE's quota",
        short(0, "insufficient quota to match these scopes: [{PriorityClass In [x]}]"),
        ["priority_class"],
        62,
    ),
    ("PSA", short(1, 'violates PodSecurity "baseline:latest": hostPath'), ["own_pod_security"], 63),
    (
        "old image",
        [put("deployments.0.spec.template.spec.containers.0.image", "a:1")],
        ["versions_differ"],
        0,
    ),
    ("KAI's scheduler", [dead], ["kai_not_ready"], 73),
    ("no KAI", [kai_gone], ["kai_absent"], 0),
    ("NVML", [monitor("node.nvml_up", False)], ["nvml_down"], 56),
    ("no watch", [monitor("node.pod_watch_up", False)], ["monitor_down"], 57),
    ("bypass", [tenant("uncapped", uncapped="bypass", reason="no region")], ["tenant_uncapped"], 54),
    ("refused CUDA", [tenant("refused", reason="KAI gave no limit")], ["cuda_refused"], 89),
    ("tampered", [tenant("enforced", flags={"tampered": True})], ["tenant_wrong"], 55),
    ("mismatch", [tenant("enforced", flags={"mismatch": True})], ["tenant_wrong"], 55),
    ("idle", [tenant("idle")], [], 0),
    ("no budget left", [put("budgets.0.status.disruptionsAllowed", 0)], ["drain_blocked"], 0),
    ("other path", [put("preload", "/opt/x/libvgpu.so\n")], ["mount_differs"], 65),
]


@pytest.mark.parametrize(("fault", "changes", "expected", "status"), CASES, ids=[case[0] for case in CASES])
def test_each_fault_is_named(fault: str, changes: list[Change], expected: list[str], status: int) -> None:
    """The causes that hold and no others; the first fault's code is the exit status."""
    report = judged(*changes)
    assert (ids(report), report.exit_status) == (expected, status)
    assert all("{" not in finding.fix for finding in report.findings)


def test_other_refusals_are_said_and_not_taken_for_ours() -> None:
    """A quota of the namespace that was tried says nothing about the webhook, but that it was not tried."""
    report = judged(refused('pods "isolator-doctor-x" is forbidden: exceeded quota: pods'))
    assert "admission of a sharing pod" not in report.checks
    (entry,) = [why for what, why in report.unchecked if what == "admission of a sharing pod"]
    assert "exceeded quota" in entry and "--namespace" in entry


def test_where_nothing_of_ours_is_the_cluster_is_not_healthy() -> None:
    """No configuration, Deployment or DaemonSet: not installed, and nothing else is said."""

    def gone(facts: Facts) -> None:
        facts.mutating, facts.deployments, facts.daemonsets, facts.own_pods = [], [], [], []

    assert (ids(judged(gone)), judged(gone).exit_status) == (["not_installed"], 10)
    # What may not be read is not taken for missing.
    assert "not_installed" not in ids(judged(gone, put("deployments", None)))


def test_a_fault_of_many_pods_is_one_finding() -> None:
    """Three are named, the others counted, and each cause is said once."""

    def many(facts: Facts) -> None:
        (pod,) = facts.pods or ()
        text = json.dumps(pod)
        facts.pods = [json.loads(text) for _ in range(300)]
        for number, each in enumerate(facts.pods):
            each["metadata"]["name"] = f"p{number:03}"
            each["spec"]["volumes"] = []

    report = judged(many)
    (finding,) = report.findings
    assert finding.cause.id == "pods_unlimited"
    assert finding.subject == "300 pods: team-a/p000, team-a/p001, team-a/p002 and 297 more"


def test_old_warnings_do_not_count() -> None:
    """A refusal of an hour ago may be mended; one of a minute ago is told."""
    for minutes, expected in ((60, []), (1, ["runtime_class_missing"])):

        def past(facts: Facts, minutes: int = minutes) -> None:
            when = (facts.now - dt.timedelta(minutes=minutes)).isoformat()
            about = {"namespace": "team", "name": "rs"}
            said = 'pods "x" is forbidden: pod rejected: RuntimeClass "nvidia" not found'
            facts.refusals = [{"message": said, "involvedObject": about, "lastTimestamp": when}]

        assert ids(judged(past)) == expected


def test_no_secret_and_no_variable_is_shown() -> None:
    """Neither keys nor values of pods' variables reach the report."""

    def told(facts: Facts) -> None:
        for pod in facts.pods or ():
            for container in pod["spec"]["containers"]:
                container.setdefault("env", []).append({"name": "PASSWORD", "value": "hunter2"})
            pod["spec"]["volumes"] = []

    report = judged(told, bundle(""))
    text = report.json() + "\n".join(report.lines())
    assert "hunter2" not in text and "PRIVATE" not in text and "pods_unlimited" in ids(report)


def test_whatever_is_missing_or_odd_in_an_answer_is_no_crash() -> None:
    """Any part of any object may be absent, null or of another kind: what cannot be judged is unchecked, and
    the rest is judged."""
    chance, odd = random.Random(5), 0
    for _ in range(300):
        facts, report = sound(), Report("cluster", "x")
        _spoil(facts, chance)
        cluster.judge(report, facts)
        assert len(report.checks) >= 5
        odd += any("of another form" in why for _, why in report.unchecked)
    assert odd < 60
    report = Report("cluster", "x")
    facts = sound()
    facts.own_pods = [{"metadata": {"labels": "none"}}]
    cluster.judge(report, facts)
    assert ("workloads", "an object of another form (AttributeError)") in report.unchecked
    assert {"KAI", "sharing pods"} <= set(report.checks)


def _spoil(facts: Facts, chance: random.Random) -> None:
    field = chance.choice(
        "mutating validating deployments daemonsets own_pods nodes plain_nodes namespaces kai kai_slices "
        "reservations pods events slices budgets monitors version kubectl".split()
    )
    holder: Any = getattr(facts, field)
    for _ in range(chance.randrange(1, 9)):
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.85:
            holder = holder[key]
            continue
        holder[key] = chance.choice([None, {}, [], "x", 7])
        return
