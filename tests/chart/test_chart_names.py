"""Names and nulls: what YAML or Helm would turn into something else is kept as written or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from .charting import Helm

NAMES = ("name", "namespace", "serviceAccountName", "app.kubernetes.io/instance", "app.kubernetes.io/name")


def named(node: Any) -> Iterator[Any]:
    """Every name in an object, at any depth."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in NAMES:
                yield value
            yield from named(value)
    elif isinstance(node, list):
        for value in node:
            yield from named(value)


@pytest.mark.parametrize("name", ["on", "true", "null", "no"])
def test_names_stay_words(helm: Helm, name: str) -> None:
    """A release, a namespace or a name that YAML takes for something else stays a string everywhere."""
    flags = (
        "--set=monitor.enabled=true",
        f"--set-string=nameOverride={name}",
        "--set-string=namespaceOverride=123",
    )
    rendered = helm.template(*flags, release=name).stdout
    documents = [document for document in yaml.safe_load_all(rendered) if document]
    found = [value for document in documents for value in named(document)]
    assert name in found and "123" in found
    assert [value for value in found if not isinstance(value, str)] == []


def test_a_line_break_in_a_name_adds_no_key(helm: Helm) -> None:
    """A string of the values stays one string."""
    rendered = helm.template("--set-string=nameOverride=x\nevil: y").stdout
    assert all("evil" not in document for document in yaml.safe_load_all(rendered) if document)
    assert "\nevil:" not in rendered


@pytest.mark.parametrize("release", ["1.5", "a.b", "0x1f"])
def test_a_release_that_cannot_name_a_service_is_refused(helm: Helm, release: str) -> None:
    """Helm allows dots and a digit first, Services do not: told at once, with what to set."""
    refused = helm.template(release=release, check=False)
    assert refused.returncode and "set fullnameOverride" in refused.stderr
    assert helm.template("--set=fullnameOverride=good", release=release).returncode == 0


@pytest.mark.parametrize(
    "path",
    [
        "paths.containerVgpuMount",
        "webhook.configurationName",
        "webhook.podOptOut",
        "webhook.onNoLimit",
        "webhook.excludedNamespaces",
        "webhook.schedulerNames",
        "webhook.port",
        "librarySync.kubeletPodsDirectory",
        "monitor.updateInterval",
        "logging.json",
        "tls.certManager",
    ],
)
def test_a_value_that_is_needed_cannot_be_null(helm: Helm, path: str) -> None:
    """null takes a default away: where nothing works without it the value is named, not left out."""
    refused = helm.template("--set=monitor.enabled=true", f"--set={path}=null", check=False)
    assert refused.returncode and path.rpartition(".")[2] in refused.stderr
    assert "schema" in refused.stderr


@pytest.mark.parametrize("path", ["webhook.resources", "monitor.nodeSelector", "image.registry"])
def test_a_value_that_is_not_needed_can_be_null(helm: Helm, path: str) -> None:
    """Helm's own way to take a default away still works where there is a meaning to it."""
    rendered = helm.template("--set=monitor.enabled=true", f"--set={path}=null").stdout
    assert "nil" not in rendered and [d for d in yaml.safe_load_all(rendered) if d]
