"""bench/scale.py: the growth curves are measured, and the model is made of what was measured alone."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.scaling import fleet  # noqa: E402
from bench.scaling.curves import Curve, of_json, plot, table  # noqa: E402

ROW = {"bytes": 1000.0, "kube-apiserver ms": 2.0, "etcd ms": 0.5}


def _costs(**api: dict[str, float]) -> fleet.Costs:
    """Unit costs with round figures."""
    rows: dict[str, dict[str, float]] = dict.fromkeys(
        (
            *("list of 20 pods of 200", "list of 20 pods of 2000", "node, cached, metadata", "event made"),
            *("event renewed", "secret", "webhook configuration", "event of a watch"),
        ),
        ROW,
    )
    rows["watch opened"] = {"kube-apiserver ms": 1.0, "etcd ms": 0.0}
    rows["ConfigMap watches of a pod, KAI alone"] = {"watches": 2.0}
    rows["ConfigMap watches of a pod, with ours"] = {"watches": 2.5}
    monitor = Curve("monitor, containers", "", "containers", "processor ms")
    for number in (10, 30):
        figures = {"processor ms": number, "series": 10 * number, "answer, KiB": number}
        monitor.points.append({"containers": number, **figures, "resident at most, MiB": 60})
    caches = Curve("libsync, caches", "", "caches", "thousandths at 30 s")
    caches.points.append({"caches": 20, "thousandths at 30 s": 0.25, "resident at most, MiB": 24})
    reviews = Curve("webhook, admissions", "", "asked a second", "processor ms a review")
    for asked, ms in ((10, 5.0), (500, 1.0), (0, 0.8)):
        reviews.points.append(
            {"asked a second": asked, "answered a second": asked or 900, "processor ms a review": ms}
        )
    curves = {curve.name: curve for curve in (monitor, caches, reviews)}
    return fleet.Costs.of(curves, {"version": "v1", **rows, **api})


def test_steady_load_is_rates_times_unit_costs() -> None:
    """Lists, watches and changes of 5,000 nodes cost what one costs, as often as they come."""
    found = {row["what"]: row for row in fleet.watches(_costs(), fleet.Fleet())}
    listed = found["a node's pods listed, each resync"]
    assert listed["a second"] == pytest.approx(5000 / 300)
    assert listed["MB/s"] == pytest.approx(5000 / 300 * 1000 / 1e6)
    assert listed["processors"] == pytest.approx(5000 / 300 * 2.5 / 1e3)
    assert found["changes told by the watches"]["a second"] == 160
    assert found["the webhook's Secret and caBundle"]["a second"] == pytest.approx(0.4)


def test_figures_follow_their_costs_and_the_cluster() -> None:
    """A dearer unit or a larger cluster shows: no figure of the model is written down in it."""
    costs, size = _costs(), fleet.Fleet()
    larger = dataclasses.replace(size, nodes=10_000, pods=200_000)
    dear = _costs(**{"event made": {**ROW, "kube-apiserver ms": 20.0}})
    assert fleet.told(dear, size)["processors"] > 5 * fleet.told(costs, size)["processors"]
    assert fleet.prometheus(costs, size)["series"] == 5000 * 200
    assert fleet.prometheus(costs, larger)["series"] == 10_000 * 200
    assert fleet.nodes(costs, size)["monitor"] == pytest.approx(20 / 15)
    assert fleet.configmaps(costs, size) == {"for KAI": 200_000, "added by the limit file": 50_000}
    assert fleet.upgraded(larger)["minutes at least"] == 2 * fleet.upgraded(size)["minutes at least"]


def test_monitors_part_after_an_upgrade() -> None:
    """With the monitor's own spread the later peaks are well below those of monitors that keep step."""
    apart = fleet.starts(fleet.Fleet(), seed=1)["most a second, later"]
    in_step = fleet.starts(fleet.Fleet(), seed=1, soonest=1.0)["most a second, later"]
    assert 5000 / 300 < apart < 0.7 * in_step


def test_watches_come_back_apart() -> None:
    """After a moment without API server no second sees more than a third of 5,000 watches."""
    found = fleet.reconnects(fleet.Fleet(), 1, 0.1)
    assert found["most a second"] < 5000 / 3 and found["seconds until all are back"] < 20


def test_a_burst_waits_for_the_replicas() -> None:
    """The last of 1,000 pods is made when the replicas have done its work, and the seats bound the crowd."""
    one = fleet.burst(_costs(), fleet.Fleet(api_servers=1), 1, replicas=1)
    two = fleet.burst(_costs(), fleet.Fleet(), 1)
    assert one["seconds until all are made"] == pytest.approx(2000 * 1.0 / 1e3, rel=0.05)
    assert two["seconds until all are made"] == pytest.approx(1000 * 1.0 / 1e3, rel=0.2)
    assert one["most at once at a replica"] == 245 < two["most at once at a replica"] < 735


def test_a_curve_is_read_between_its_points() -> None:
    """On the line between two points; outside, the outermost one."""
    curve = Curve("c", "", "n", "y", [{"n": 10, "y": 1}, {"n": 20, "y": 3}])
    assert [fleet.between(curve, "y", n) for n in (1, 10, 15, 20, 99)] == [1, 1, 2, 3, 3]
    assert of_json(json.loads(json.dumps(curve.as_json()))) == curve
    assert table(curve).splitlines()[2] == "| 10 | 1 |"
    assert plot([1, 2], [5, 10], width=10).splitlines()[0].count("#") == 5


def test_the_document_says_what_the_file_says() -> None:
    """docs/scale.md holds the report that the measured costs of docs/scale.json make today."""
    known: dict[str, Any] = json.loads((ROOT / "docs" / "scale.json").read_text())
    curves = {c["name"]: of_json(c) for part in known.values() for c in part.get("curves", ())}
    made = fleet.report(fleet.Costs.of(curves, known["api"]["costs"]), fleet.Fleet())
    assert fleet.text(made) in (ROOT / "docs" / "scale.md").read_text(), "run bench/scale.py --only model"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_curves_are_measured(tmp_path: Path) -> None:
    """The quick mode measures each part: more containers cost more, no review fails, no point is empty."""
    target = tmp_path / "scale.json"
    command = [sys.executable, str(ROOT / "bench" / "scale.py"), "--quick", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    known = json.loads(target.read_text())
    curves = {c["name"]: of_json(c) for part in known.values() for c in part["curves"]}
    assert set(known) == {"monitor", "webhook", "libsync", "library"} and len(curves) == 8
    few, many = curves["monitor, containers"].points
    assert many["series"] > few["series"] and many["processor ms"] > few["processor ms"] > 0
    assert curves["webhook, admissions"].column("errors") == [0, 0, 0]
    assert all(curve.points and min(curve.column(curve.plotted)) > -1e3 for curve in curves.values())


def test_quick_figures_do_not_reach_the_document() -> None:
    """Without another file the quick mode refuses to run."""
    command = [sys.executable, str(ROOT / "bench" / "scale.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--json" in done.stderr
