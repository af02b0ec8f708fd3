"""README, CHANGELOG and docs/: their links lead somewhere, and what they give to copy is right."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT

from isolator.webhook.rule import Rule, decide

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _anchors(page: Path) -> set[str]:
    """The names that a page's headings are reached by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Each link to a file of this repository finds it, and its heading where it names one."""
    broken = []
    for place, anchor in LINK.findall(page.read_text()):
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(f"{place}#{anchor}")
    assert broken == []


def test_paths_of_the_readme_exist() -> None:
    """What "Where things live" names is there."""
    table = (ROOT / "README.md").read_text().split("## Where things live")[1]
    named = re.findall(r"`((?:native|isolator|tests|bench|charts)/[\w./*-]*)`", table)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_pod_of_the_readme_is_valid_and_injected() -> None:
    """The pod to try is a pod to Kubernetes, its program is Python, and the webhook injects it."""
    (block,) = re.findall(r"^ *```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.M | re.S)
    pod = yaml.safe_load(textwrap.dedent(block))
    kubernetes_validate.validate(pod, "1.35", strict=True)
    verdict = decide(pod, "default", Rule())
    assert (verdict.action, verdict.warnings) == ("inject", ())
    script = pod["spec"]["containers"][0]["args"][0]
    compile(script.split("<<'EOF'\n")[1].split("\nEOF")[0], "README", "exec")


def test_make_table_of_the_readme_is_complete() -> None:
    """It names each target that `make help` lists, and no other."""
    table = (ROOT / "README.md").read_text().split("| make | |")[1].split("\n\n")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`([\w-]+)`", row)
    }
    assert named == set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))


def test_alerts_are_explained() -> None:
    """docs/monitoring.md has a heading for each alert of the chart, in the rules' order."""
    rules = yaml.safe_load((ROOT / "charts/kai-resource-isolator/files/alerts.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert re.findall(r"^#+ (GPUMemory\w+)$", page, re.M) == alerts
