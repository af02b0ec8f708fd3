"""Alerts: rendered by the real Helm, judged by promtool, each tried on series that fire and that do not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_cases import CASES, Case
from charting import CHART, RELEASE, Helm, Rendered
from metric_names import KNOWN, names_in

ON = ("monitor.enabled=true", "monitor.prometheusRule.enabled=true", "monitor.prometheusRule.configMap=true")
NO_PROMTOOL = "no promtool: run `make cluster-tools`"


def rules_of(found: Rendered) -> dict[str, dict[str, Any]]:
    """Each rule of the PrometheusRule, by its alert."""
    return {
        rule["alert"]: rule
        for group in found.one("PrometheusRule")["spec"]["groups"]
        for rule in group["rules"]
    }


def promtool(*words: str) -> str:
    """What promtool says to a check or test that passes."""
    if not shutil.which("promtool"):
        pytest.skip(NO_PROMTOOL)
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def rules_file(render: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules of the ConfigMap, as a file."""
    made: Path = tmp_path_factory.mktemp("rules") / "kai-resource-isolator.rules.yaml"
    made.write_text(render(*ON).one("ConfigMap", f"{RELEASE}-rules")["data"][made.name])
    return made


def test_nothing_is_rendered_unasked(render: Any) -> None:
    """By default neither; and without the monitor none, whatever else is asked for."""
    for sets in ((), ("monitor.enabled=true",), ("monitor.grafana.enabled=true", *ON[1:])):
        found = render(*sets)
        assert found.names("PrometheusRule") == set()
        assert found.names("ConfigMap") & {f"{RELEASE}-rules", f"{RELEASE}-dashboard"} == set()


def test_rules_pass_promtool(each_helm: Helm, tmp_path: Path) -> None:
    """Each Helm renders rules that promtool takes, the same ones for the operator and as a file."""
    found = Rendered(each_helm.template(*(part for item in ON for part in ("--set", item))).stdout)
    text = found.one("ConfigMap", f"{RELEASE}-rules")["data"]["kai-resource-isolator.rules.yaml"]
    assert yaml.safe_load(text) == found.one("PrometheusRule")["spec"]
    assert "@" not in text
    (tmp_path / "rules.yaml").write_text(text)
    assert f"{len(rules_of(found))} rules found" in promtool("check", "rules", str(tmp_path / "rules.yaml"))


def test_rules_say_what_and_whom_and_what_to_do(render: Any) -> None:
    """Each names a tenant or target, has a severity, a hint to the doctor, and asks for series that exist."""
    groups = render(*ON).one("PrometheusRule")["spec"]["groups"]
    of_tenants = {rule["alert"] for rule in groups[0]["rules"]}
    for name, rule in rules_of(render(*ON)).items():
        assert names_in(rule["expr"]) <= KNOWN | {"up"}, name
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, name
        said = rule["annotations"]["description"]
        assert "isolator doctor" in said, name
        named = set(re.findall(r"\$labels\.(\w+)", said))
        if not name.endswith(("Absent", "Errors")):
            whose = {"namespace", "pod"} if name in of_tenants else {"instance"}
            assert named >= whose, name


def test_every_alert_is_tried_both_ways() -> None:
    """Each alert of the file has a case that names somebody, and one or some series that it leaves alone."""
    text = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    alerts = {rule["alert"] for group in text["groups"] for rule in group["rules"]}
    assert {case.alert for case in CASES} == alerts
    assert {case.alert for case in CASES if case.firing} == alerts
    for alert in alerts:
        assert any(len(case.series) > len(case.firing) for case in CASES if case.alert == alert), alert


def promtest(rules: Path, cases: list[Case]) -> dict[str, Any]:
    """promtool's test file."""
    tests = []
    for case in cases:
        samples = [
            {"labels": f'{{{case.by}="{who}"}}' if case.by else "{}", "value": 1} for who in case.firing
        ]
        fires = f'ALERTS{{alertname="{case.alert}", alertstate="firing"}}'
        asked = f"group by ({case.by}) ({fires})"
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": text} for key, text in case.series.items()],
                "promql_expr_test": [{"expr": asked, "eval_time": f"{case.minute}m", "exp_samples": samples}],
            }
        )
    return {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}


@pytest.mark.parametrize("alert", sorted({case.alert for case in CASES}))
def test_alert_names_those_and_no_other(rules_file: Path, alert: str, tmp_path: Path) -> None:
    """`promtool test rules`: at that minute exactly those fire; gone, restarted and unknown ones do not."""
    test = tmp_path / "test.yaml"
    test.write_text(yaml.safe_dump(promtest(rules_file, [case for case in CASES if case.alert == alert])))
    promtool("test", "rules", str(test))


def test_alert_reads_well(rules_file: Path, tmp_path: Path) -> None:
    """The whole alert, its figures for people included."""
    (case,) = (c for c in CASES if c.alert == "GPUMemoryNearLimit" and c.minute == 20)
    labels = {"severity": "warning", "namespace": "team", "pod": "full", "container": "main", "node": "n1"}
    labels |= {
        "device_uuid": "GPU-1",
        "job": "kai-resource-isolator/kai-resource-isolator-monitor",
        "instance": "n1:9394",
    }
    said = "team/full (main) uses 96 % of its limit on GPU-1. "
    said += "Run: isolator doctor --pod team/full"
    summary = "A tenant is near its GPU memory limit"
    written = {"summary": summary, "description": said}
    expected = {"exp_labels": labels, "exp_annotations": written}
    whole = promtest(rules_file, [case])
    del whole["tests"][0]["promql_expr_test"]
    asked = {"eval_time": "20m", "alertname": case.alert, "exp_alerts": [expected]}
    whole["tests"][0]["alert_rule_test"] = [asked]
    test = tmp_path / "test.yaml"
    test.write_text(yaml.safe_dump(whole))
    promtool("test", "rules", str(test))


def test_values_reach_the_rules(render: Any) -> None:
    """Thresholds, labels, what is left out, and where the runbook is."""
    asked = {
        "enabled": True,
        "nearLimitPercent": 90.5,
        "nearLimitFor": "7m",
        "refusals": 3,
        "admissionErrors": 4,
        "ledgerSlackMiB": 10,
        "staleAfter": "1h30m",
        "disabled": ["GPUMemoryOptedOut"],
        "absent": False,
        "ruleLabels": {"team": "gpu", "severity": "page"},
        "labels": {"release": "prometheus"},
        "runbookUrl": "https://a.example/monitoring",
        "monitorJobs": "mine",
        "webhookJobs": "hooks",
    }
    found = render("monitor.enabled=true", f"monitor.prometheusRule={json.dumps(asked)}")
    assert found.one("PrometheusRule")["metadata"]["labels"]["release"] == "prometheus"
    rules = rules_of(found)
    gone = set(rules_of(render(*ON))) - set(rules)
    assert gone == {"GPUMemoryOptedOut", "GPUMemoryMonitorAbsent", "GPUMemoryWebhookAbsent"}
    for alert, end in {
        "GPUMemoryNearLimit": "> 90.5",
        "GPUMemoryRefusals": "[10m]) > 3",
        "GPUMemoryAdmissionErrors": "> 4",
        "GPUMemoryLedgerBelowDriver": "> 10485760 and kai_isolator_device_ledger_bytes > 0",
        "GPUMemoryScanStale": "> 5400",
        "GPUMemoryLibraryStale": "> 5400",
        "GPUMemoryMonitorDown": 'up{job=~"mine"} == 0',
        "GPUMemoryWebhookDown": 'up{job=~"hooks"} == 0',
    }.items():
        assert rules[alert]["expr"].endswith(end), alert
    near = rules["GPUMemoryNearLimit"]
    assert near["for"] == "7m"
    assert near["labels"] == {"team": "gpu", "severity": "page"}
    assert near["annotations"]["runbook_url"] == "https://a.example/monitoring#gpumemorynearlimit"


def test_slow_libsync_is_not_stale(render: Any) -> None:
    """Where libsync looks after a node rarely by choice, it has five of its intervals."""
    rules = rules_of(render(*ON, "librarySync.interval=3600"))
    assert rules["GPUMemoryLibraryStale"]["expr"].endswith("> 18000")
    assert rules["GPUMemoryScanStale"]["expr"].endswith("> 900")


DAY, HOUR = 86400, 3600
CERT_MANAGER = "tls.certManager.enabled=true"


@pytest.mark.parametrize(
    ("sets", "warning", "critical"),
    [
        ((), 21 * DAY, 3 * DAY),
        (('tls.builtin.duration="720h"',), 720 * HOUR // 3 * 3 // 4, 720 * HOUR // 12),
        (('tls.builtin.duration="6h30m"',), 5850, 1950),
        ((CERT_MANAGER,), 21 * DAY, 3 * DAY),
        ((CERT_MANAGER, 'tls.certManager.renewBefore="24h"'), 18 * HOUR, 6 * HOUR),
        (('tls.existingSecret="mine"', 'tls.builtin.duration="1h"'), 21 * DAY, 3 * DAY),
        (("monitor.prometheusRule.certificateWarningDays=7",), 7 * DAY, 3 * DAY),
    ],
)
def test_certificate_alarms_only_after_its_renewal(
    render: Any, sets: tuple[str, ...], warning: int, critical: int
) -> None:
    """However short its life, the alert's bound lies behind the moment at which it is renewed."""
    rules = rules_of(render(*ON, *sets))
    assert rules["GPUMemoryCertificateExpires"]["expr"].endswith(f"< {warning}")
    assert rules["GPUMemoryCertificateExpiresSoon"]["expr"].endswith(f"< {critical}")


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("nearLimitPercent=0", "nearLimitPercent"),
        ("nearLimitPercent=100", "nearLimitPercent"),
        ("nearLimitFor=10", "nearLimitFor"),
        ("disabled={Uncapped}", "disabled"),
        ("runbookUrl=monitoring.md", "runbookUrl"),
        ('webhookJobs=a\\"b', "webhookJobs"),
    ],
)
def test_bad_thresholds_are_refused(helm: Helm, flag: str, line: str) -> None:
    """Helm stops with a line that names the value."""
    done = helm.template("--set", f"monitor.prometheusRule.{flag}", check=False)
    assert done.returncode != 0
    assert line in done.stderr
