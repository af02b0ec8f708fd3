"""The monitor as a process: settings, start, a scrape of a node with tenants, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import monitor_pods as made
import pytest
from monitor_apiserver import NODE, ApiServer
from monitor_process import PREFIX, Monitor
from region_files import MIB, RegionFile, Slot, Spec, uuid

from isolator import kube
from isolator.errors import UnavailableError, UsageError
from isolator.monitor import settings
from isolator.settings import duration

GO_DURATIONS = {"5s": 5, "5m": 300, "1m30s": 90, "500ms": 0.5, "1.5h": 5400, "0s": 0, "2s500ms": 2.5}


@pytest.mark.parametrize("text", GO_DURATIONS)
def test_durations_are_gos(text: str) -> None:
    """Durations as the chart writes them."""
    assert duration(text) == pytest.approx(GO_DURATIONS[text])


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("UPDATE_INTERVAL", "5", "'5' is not a duration, for example 5s"),
        ("UPDATE_INTERVAL", "5s later", "is not a duration"),
        ("UPDATE_INTERVAL", "-5s", "is not a duration"),
        ("RESYNC_INTERVAL", "0s", "at least 1s"),
        ("LISTEN", "9394", "is not host:port"),
        ("LISTEN", "::1:9394", "brackets"),
        ("MOUNT", "usr/local/vgpu", "absolute"),
        ("MOUNT", "/usr/local/../vgpu", "clean"),
        ("SCHEDULERS", "kai-scheduler", "not a JSON list"),
        ("EVENTS", "perhaps", "'perhaps' is not true or false"),
        ("LOG_LEVEL", "LOUD", "is not a level"),
        ("NODE_NAME", "", "is not set"),
    ],
)
def test_bad_settings_are_one_line_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    """Whoever wrote the value learns which variable and what to write."""
    monkeypatch.setenv(f"{PREFIX}NODE_NAME", NODE)
    monkeypatch.setenv(PREFIX + variable, value)

    with pytest.raises(UsageError) as raised:
        settings.load()
    line = str(raised.value)
    assert PREFIX + variable in line
    assert says in line
    assert "\n" not in line


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable of the chart is read."""
    given = {"NODE_NAME": "n", "SCHEDULERS": '["a","b"]', "HOST_PID": "true", "EVENTS": "false"}
    for name, value in given.items():
        monkeypatch.setenv(PREFIX + name, value)

    found = settings.load()
    assert (found.node_name, found.schedulers, found.host_pid, found.events) == ("n", ("a", "b"), True, False)


def test_missing_cluster_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside a pod and without KUBECONFIG the error says what to do."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))

    with pytest.raises(UnavailableError, match="set KUBECONFIG") as raised:
        kube.Api()
    assert "\n" not in str(raised.value)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as made_api:
        yield made_api


@pytest.fixture
def monitor(api: ApiServer, tmp_path: Path) -> Iterator[Monitor]:
    running = Monitor(api, tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


def test_a_node_is_scraped_from_start_to_end(
    api: ApiServer, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capped pod of the lab shows limit and use; it is gone one scrape after the API says so (B162)."""
    for path in ("/healthz", "/readyz"):
        assert monitor.get(path).status_code == 200
    monkeypatch.setattr(made, "MOUNT", str(monitor.mount))
    folder = monitor.mount / "containers" / f"{made.uid(1)}_main"
    with RegionFile(folder / "usage.cache", Spec(slots=[Slot(context=106954752, data=3072 * MIB)])):
        api.put(made.pod(1))
        text = monitor.until("hami_vgpu_memory_used_bytes{")
        whose = 'container="main",{}namespace="team",pod="pod-1"'
        device = whose.format(f'device_uuid="{uuid()}",') + ',vdevice_index="0",zone="vGPU"'
        one = whose.format("")
        assert f"hami_vgpu_memory_limit_bytes{{{device}}} 4.348444672e+09" in text
        assert f"hami_vgpu_memory_used_bytes{{{device}}} 3.328180224e+09" in text
        assert f'kai_isolator_container_state{{{one},state="enforced"}} 1.0' in text
        assert f"kai_isolator_limit_mismatch{{{one}}} 0.0" in text
        assert "kai_isolator_pod_watch_up 1.0" in text
        assert "kai_isolator_nvml_up 0.0" in text

        api.delete(made.uid(1))
        end = time.monotonic() + 10
        while "hami_vgpu_memory_used_bytes{" in monitor.get("/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_monitor_ends_at_once(monitor: Monitor) -> None:
    """SIGTERM ends the process within seconds, with exit status 0, also with a watch open."""
    monitor.until("kai_isolator_pod_watch_up 1.0")
    began = time.monotonic()

    assert monitor.end() == 0, monitor.log()
    assert time.monotonic() - began < 8
    assert "Traceback" not in monitor.log()


def test_start_says_what_is_on(monitor: Monitor) -> None:
    """The first lines tell node, mount and which parts are on."""
    log = monitor.log()

    assert f"of node {NODE}" in log
    assert "events on" in log
    assert "host PIDs off" in log


def test_formats_are_negotiated(monitor: Monitor) -> None:
    """Prometheus gets OpenMetrics where it asks for it, everybody else the plain text format."""
    plain = monitor.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")

    asked = monitor.get("/metrics", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")


def test_simulated_card_gives_host_series(
    api: ApiServer, tmp_path: Path, sim_env: Callable[..., dict[str, str]]
) -> None:
    """With NVML there, the card's figures come with the node's name, beside the sum of the ledgers."""
    running = Monitor(api, tmp_path, sim_env(preload=False))
    try:
        text = running.until("kai_isolator_nvml_up 1.0")
        (line,) = [x for x in text.splitlines() if x.startswith("hami_gpu_memory_limit_bytes{")]
        assert f'node="{NODE}"' in line
        assert 'device_type="NVIDIA-Tesla T4"' in line
        assert float(line.rpartition(" ")[2]) == 15360 * MIB
        assert "kai_isolator_device_used_bytes{" in text
        assert running.end() == 0
    finally:
        running.process.kill()
        running.process.wait()
