"""What the doctor asks an API server, and servers that are slow, odd, empty or closed to this user."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from doctor_cluster import ids, server, sound

from isolator.doctor import cluster
from isolator.doctor.report import Report
from isolator.errors import UnavailableError, UsageError

_ADMISSION = "/apis/admissionregistration.k8s.io/v1"


def kubeconfig(path: Path, url: str) -> Path:
    """A kubeconfig for a server without TLS."""
    found = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(found))
    return path


def answers() -> dict[str, Any]:
    """The first round of a cluster with the product, from the recorded one."""
    facts = sound()
    paths = {
        f"{_ADMISSION}/mutatingwebhookconfigurations": facts.mutating,
        f"{_ADMISSION}/validatingwebhookconfigurations": facts.validating,
        f"{_ADMISSION}/validatingadmissionpolicybindings": facts.policies,
        "/apis/apps/v1/deployments": facts.deployments,
        "/apis/apps/v1/daemonsets": facts.daemonsets,
        "/api/v1/nodes": facts.nodes,
        "/api/v1/namespaces": facts.namespaces,
        "/api/v1/events": [],
        "/apis/apps/v1/namespaces/kai-scheduler/deployments": facts.kai,
    }
    return {"/version": facts.version} | {path: {"items": items} for path, items in paths.items()}


def look(tmp_path: Path, url: str, patience: float = 5.0, **words: Any) -> Report:
    return cluster.examine(kubeconfig(tmp_path / "config", url), patience=patience, **words)


def test_a_cluster_with_nothing_of_ours_is_not_healthy(tmp_path: Path) -> None:
    """Every list answers and is empty: not installed, and the server is named."""
    empty = {path: {"items": []} for path in answers()} | {"/version": sound().version}
    with server(empty) as (url, _):
        report = look(tmp_path, url)
    assert (ids(report), report.exit_status, report.subject) == (["not_installed"], 10, url)


def test_what_does_not_answer_in_time_is_said_and_not_waited_for(tmp_path: Path) -> None:
    """One slow list does not hold up the rest, nor the report."""
    known = answers()
    del known["/apis/apps/v1/daemonsets"]
    began = time.monotonic()
    with server(known, slow=3.0) as (url, _):
        report = look(tmp_path, url, patience=0.8)
        assert time.monotonic() - began < 2.5
    late = {what: why for what, why in report.unchecked}
    assert "no answer in time" in late["the DaemonSets"]
    assert "webhook configuration" in report.checks and "not_installed" not in ids(report)


def test_what_is_forbidden_and_what_is_no_json_is_unchecked(tmp_path: Path) -> None:
    """403 repeats the API server's words; neither is taken for an empty list."""
    says = 'nodes is forbidden: User "reader" cannot list resource "nodes"'
    known = answers() | {
        "/api/v1/nodes": (403, {"kind": "Status", "message": says}),
        "/api/v1/namespaces": b"<html>",
        "/apis/apps/v1/daemonsets": [1, 2],
    }
    with server(known) as (url, _):
        report = look(tmp_path, url)
    why = dict(report.unchecked)
    assert why["GPU nodes"] == f"forbidden to this user: {says}"
    assert "namespaces" in why and "the DaemonSets" in why
    assert not {"libsync_gap", "workload_refused", "not_installed"} & set(ids(report))


def test_a_server_that_does_not_know_this_user(tmp_path: Path) -> None:
    """HTTP 401 to everything but the version is one line, as is a server of no HTTP."""
    closed = server({"/version": sound().version}, status=401)
    with closed as (url, _), pytest.raises(UnavailableError, match="refuses these credentials"):
        look(tmp_path, url)
    with pytest.raises(UnavailableError, match="does not answer"):
        look(tmp_path, "http://127.0.0.1:9")


def test_lists_are_bounded_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    """A list with a rest says so; each list that grows with the cluster has a limit."""
    known = answers()
    known["/api/v1/nodes"] = {"items": sound().nodes, "metadata": {"continue": "more"}}
    with server(known) as (url, asked):
        report = look(tmp_path, url)
    assert ("GPU nodes", "only 2 were read: there are more") in report.unchecked
    for start in ("/api/v1/nodes?", "/api/v1/pods?", "/api/v1/events?"):
        mine = [path for path in asked if path.startswith(start)]
        assert mine and all("limit=" in path for path in mine), start


@pytest.mark.parametrize(
    ("namespace", "pod"), [(None, ""), (None, "/x"), (None, "a/b/c"), (None, "a/"), ("b", "a/x")]
)
def test_a_pods_name_that_is_none_is_wrong_usage(namespace: str | None, pod: str) -> None:
    """Before anything is asked."""
    with pytest.raises(UsageError, match="--pod"):
        cluster.examine(None, None, namespace, pod)
