"""A real Prometheus in the test process's network, and what its operator makes of the chart's objects.

Debian's Prometheus has no kubernetes_sd: the targets and their `__meta_kubernetes_*` labels come from
prometheus_targets.py by file, and the jobs' own rules work on them.
"""

from __future__ import annotations

import copy
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prometheus_targets
from harness import Cluster, ClusterError, wait_for

Job = dict[str, Any]
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
INTERVAL = "1s"


def why_not() -> str:
    """Empty where Prometheus and promtool can be run, else what is missing."""
    missing = [name for name in ("prometheus", "promtool") if not shutil.which(name)]
    return f"no {', '.join(missing)}: run `make cluster-tools`" if missing else ""


def check_metrics(text: str) -> str:
    """What `promtool check metrics` has to say; empty where it is content."""
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip()
    return said or (f"status {done.returncode}" if done.returncode else "")


def operator_job(document: Mapping[str, Any]) -> Job:
    """The scrape job that the operator makes of a ServiceMonitor or PodMonitor with one endpoint."""
    spec = document["spec"]
    by_pod = document["kind"] == "PodMonitor"
    (endpoint,) = spec["podMetricsEndpoints" if by_pod else "endpoints"]
    meta = "__meta_kubernetes_pod" if by_pod else "__meta_kubernetes_service"
    port = "pod_container_port_name" if by_pod else "endpoint_port_name"
    rules = [
        _keep(f"{meta}_label_{key.translate(str.maketrans('./-', '___'))}", text)
        for key, text in spec["selector"]["matchLabels"].items()
    ]
    rules.append(_keep(f"__meta_kubernetes_{port}", endpoint["port"]))
    for target in ("namespace", "pod", "container"):
        source = {"container": "pod_container_name", "pod": "pod_name"}.get(target, target)
        rules.append({"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target})
    for own in endpoint.get("relabelings", []):
        rules.append({"source_labels": own["sourceLabels"], "target_label": own["targetLabel"]})
    return {
        "job_name": f"{document['kind']}/{document['metadata']['name']}",
        "honor_labels": endpoint.get("honorLabels", False),
        "metrics_path": endpoint["path"],
        "scheme": endpoint.get("scheme", "http"),
        **({"tls_config": {"insecure_skip_verify": True}} if "tlsConfig" in endpoint else {}),
        "kubernetes_sd_configs": [
            {
                "role": "pod" if by_pod else "endpoints",
                "namespaces": {"names": spec["namespaceSelector"]["matchNames"]},
            }
        ],
        "relabel_configs": rules,
    }


def _keep(label: str, text: str) -> dict[str, Any]:
    return {"source_labels": [label], "regex": text, "action": "keep"}


class Prometheus:
    """A running server; `query` asks it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **words: str) -> Any:
        """The `data` of an API answer."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with _DIRECT.open(address, timeout=20) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant query, `__name__` left out."""
        found = self.get("query", query=expression)["result"]
        return [
            ({k: v for k, v in each["metric"].items() if k != "__name__"}, float(each["value"][1]))
            for each in found
        ]


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process of a test's, by force where asking is not enough."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


@contextmanager
def serve(cluster: Cluster, jobs: Sequence[Job], folder: Path) -> Iterator[Prometheus]:
    """A Prometheus with these jobs, each with the targets that the cluster has now."""
    ready = []
    for number, job in enumerate(copy.deepcopy(list(jobs))):
        (found,) = job.pop("kubernetes_sd_configs")
        targets = folder / f"targets-{number}.json"
        targets.write_text(json.dumps(prometheus_targets.discover(cluster, found)))
        ready.append({**job, "file_sd_configs": [{"files": [str(targets)]}]})
    with start(ready, folder, cluster.environment()) as server:
        yield server


@contextmanager
def start(
    jobs: Sequence[Job], folder: Path, environment: Mapping[str, str], rules: Sequence[Path] = ()
) -> Iterator[Prometheus]:
    """A Prometheus with these jobs, whose targets are given, and rules files; it ends with the block."""
    times = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL}
    written = {
        "global": {"evaluation_interval": INTERVAL},
        "rule_files": [str(file) for file in rules],
        "scrape_configs": [{**job, **times} for job in jobs],
    }
    config = folder / "prometheus.yml"
    config.write_text(json.dumps(written))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "prometheus.log"
    words = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with log.open("wb") as out:
        process = subprocess.Popen(words, env=environment, stdout=out, stderr=out)
    server = Prometheus(port)

    def up() -> bool:
        if process.poll() is not None:
            raise ClusterError(f"prometheus ended: {log.read_text()[-2000:]}")
        try:
            return bool(server.get("status/buildinfo"))
        except OSError:
            return False

    try:
        wait_for(up, 60, "Prometheus to answer", every=0.3)
        yield server
    finally:
        end(process)
