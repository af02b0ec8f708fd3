"""The dashboard: what Grafana needs of it, and that it asks for series that exist."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from charting import CHART, NAMESPACE, RELEASE
from metric_names import KNOWN, names_in

FILE = CHART / "files" / "dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = DASHBOARD["panels"]
ASKING = [panel for panel in PANELS if panel["type"] != "row"]
COLUMNS = 24
BUILT_IN = {"stat", "timeseries", "table", "bargauge", "row"}
"""Panel types that Grafana 10 and 11 bring themselves."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_dashboard_is_found_by_the_sidecar(render: Any) -> None:
    """Label, folder and namespace are as asked, and the content is the file's, byte for byte."""
    plain = render("monitor.enabled=true", "monitor.grafana.enabled=true").one(
        "ConfigMap", f"{RELEASE}-dashboard"
    )
    assert plain["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert plain["metadata"]["namespace"] == NAMESPACE
    assert "annotations" not in plain["metadata"]
    assert plain["data"] == {"kai-resource-isolator.json": FILE.read_text().strip()}
    asked = {"label": "dash", "labelValue": "yes", "namespace": "grafana", "folder": "GPUs", "enabled": True}
    moved = render("monitor.enabled=true", f"monitor.grafana={json.dumps(asked)}")
    found = moved.one("ConfigMap", f"{RELEASE}-dashboard")["metadata"]
    assert (found["labels"]["dash"], found["namespace"]) == ("yes", "grafana")
    assert found["annotations"] == {"grafana_folder": "GPUs"}
    assert "grafana_dashboard" not in found["labels"]


def test_it_is_a_dashboard_of_grafana_10() -> None:
    """A schema of its time, an address that stays, no id of some database, no plugin."""
    assert DASHBOARD["uid"] == RELEASE
    assert len(DASHBOARD["uid"]) <= 40
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["id"] is None
    assert not {"__inputs", "__requires"} & DASHBOARD.keys()
    assert {panel["type"] for panel in PANELS} == BUILT_IN
    assert DASHBOARD["title"] and DASHBOARD["time"] == {"from": "now-3h", "to": "now"}


def test_ids_and_targets_are_unique() -> None:
    """No two panels share an id, no two targets of a panel a letter; each panel says what it shows."""
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids)) and all(isinstance(each, int) and each > 0 for each in ids)
    for panel in ASKING:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(letters) == len(set(letters)), panel["title"]
        assert panel["title"] and panel["description"].endswith("."), panel["title"]


def test_panels_lie_side_by_side() -> None:
    """None leaves the 24 columns, none overlaps another, and no line of the grid is empty."""
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
        columns = range(place["x"], place["x"] + place["w"])
        for cell in itertools.product(columns, range(place["y"], place["y"] + place["h"])):
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]
    lines = {y for _, y in taken}
    assert lines == set(range(max(lines) + 1))


def test_every_source_is_the_variable() -> None:
    """No panel, target or variable names a data source of somebody's Grafana."""
    for node in [*ASKING, *(target for panel in ASKING for target in panel["targets"])]:
        assert node["datasource"] == SOURCE
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "node"]
    assert variables["datasource"]["query"] == "prometheus"
    for name in ("namespace", "node"):
        assert variables[name]["datasource"] == SOURCE
        assert (variables[name]["includeAll"], variables[name]["allValue"]) == (True, ".*")


@pytest.mark.parametrize("panel", ASKING, ids=lambda panel: panel["title"])
def test_panel_asks_for_what_there_is(panel: dict[str, Any]) -> None:
    """Its metrics are of the monitor or the webhook, and its variables are the dashboard's."""
    for target in panel["targets"]:
        asked = names_in(target["expr"])
        assert asked and asked <= KNOWN, asked - KNOWN
        variables = set(re.findall(r"\$([a-z_]+)", target["expr"]))
        assert variables <= {"namespace", "node", "__rate_interval"}
        monitors = [name for name in asked if not re.search("admission|certificate", name)]
        assert bool(monitors) == ("$node" in target["expr"]), target["expr"]


def test_variables_ask_for_what_there_is() -> None:
    """Their values come from series that exist."""
    for each in DASHBOARD["templating"]["list"][1:]:
        (name,) = re.findall(r"^label_values\((\w+), \w+\)$", each["query"]["query"])
        assert name in KNOWN
        assert each["definition"] == each["query"]["query"]


def test_columns_that_are_formatted_exist() -> None:
    """An override or an order that names no column would be lost without a word."""
    for panel in (panel for panel in ASKING if panel["type"] == "table"):
        (shown,) = (t["options"] for t in panel["transformations"] if t["id"] == "organize")
        names = {shown["renameByName"].get(name, name) for name in shown["indexByName"]}
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["options"] in names, panel["title"]
        values = {f"Value #{target['refId']}" for target in panel["targets"]}
        if len(values) > 1:
            assert values <= shown["indexByName"].keys(), panel["title"]
        labels = set(
            re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", panel["targets"][0]["expr"])))
        )
        assert labels <= shown["indexByName"].keys(), panel["title"]
