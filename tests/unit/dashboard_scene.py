"""A monitor and a webhook as processes, tenants in every state, and a real Prometheus that scrapes both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import monitor_pods as made
import webhookkit
from charting import BINARIES, Helm, Rendered
from conftest import NATIVE_TESTS
from harness import wait_for
from isolator._core import lib
from monitor_apiserver import NODE, ApiServer
from monitor_process import Monitor
from prometheus_server import Prometheus, end, start
from region_files import EXT, MIB, RegionFile, Slot, Spec

from isolator import names
from isolator.address import listen
from isolator.webhook.settings import PREFIX

LIMIT = 4147 * MIB
HELD = 1126 * MIB
CARD = 15360 * MIB
Value = TypeVar("Value")
_HOLD = "from simclient import *; init(0); ok(alloc(12 << 30)); print('held', flush=True); input()"


class Scene:
    """`uuid` is the device's."""

    def __init__(self, server: Prometheus, regions: dict[str, RegionFile], uuid: str) -> None:
        self.server, self.uuid, self._regions = server, uuid, regions
        self._refused = 0

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The series of an instant query."""
        return self.server.query(expression)

    def until(self, condition: Callable[[], Value], what: str) -> Value:
        """The first answer that is true or not empty."""
        found: list[Value] = []

        def there() -> bool:
            found.append(condition())
            return bool(found[-1])

        wait_for(there, 60, what, every=0.3)
        return found[-1]

    def refuse(self, pod: str, times: int = 20) -> None:
        """Writes refusals into a region, as the library would."""
        self._refused += times
        self._regions[pod].put(EXT + 128, "Q", self._refused)


@contextmanager
def scene(folder: Path, sim: Path) -> Iterator[Scene]:
    """All of it; ends its processes with the block."""
    with ExitStack() as stack:
        device = {"LD_LIBRARY_PATH": str(sim), "SIMGPU_STATE": str(folder / "simgpu.state")}
        stack.enter_context(_holder(device))
        api = stack.enter_context(ApiServer())
        more = {"ISOLATOR_MONITOR_LEGACY_METRICS": "true", "ISOLATOR_MONITOR_HOST_PID": "true"}
        monitor = Monitor(api, folder, device | more)
        stack.callback(end, monitor.process)
        text = monitor.until("hami_gpu_memory_limit_bytes{")
        uuid = text.split("hami_gpu_memory_limit_bytes{")[1].split('device_uuid="')[1].split('"')[0]
        regions = _tenants(api, monitor.mount, uuid, stack)
        hook = stack.enter_context(_webhook(folder))
        jobs = [
            _job("kai-resource-isolator", monitor.url.removeprefix("http://"), "http"),
            _job("kai-resource-isolator-webhook", hook, "https"),
        ]
        server = stack.enter_context(start(jobs, folder, dict(os.environ), [_rules(folder)]))
        made_scene = Scene(server, regions, uuid)
        made_scene.until(lambda: made_scene.ask("count(kai_isolator_container_state) == 6"), "six tenants")
        yield made_scene


def _job(name: str, target: str, scheme: str) -> dict[str, Any]:
    return {
        "job_name": name,
        "honor_labels": True,
        "scheme": scheme,
        "tls_config": {"insecure_skip_verify": True},
        "static_configs": [{"targets": [target], "labels": {"node": NODE}}],
    }


@contextmanager
def _holder(device: dict[str, str]) -> Iterator[None]:
    """A program of the node that holds 12 GiB and is nobody's tenant."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        env=os.environ | device | {"PYTHONPATH": str(NATIVE_TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdin
    try:
        assert process.stdout.readline() == "held\n"
        yield
    finally:
        process.stdin.close()
        end(process)
        process.stdout.close()


def _tenants(api: ApiServer, mount: Path, uuid: str, stack: ExitStack) -> dict[str, RegionFile]:
    """pod-1 is held, 2 near its limit, 3 mismatched and tampered, 4 not injected, 5 out, 6 unreadable."""
    made_mount, made.MOUNT = made.MOUNT, str(mount)
    stack.callback(setattr, made, "MOUNT", made_mount)
    mount.mkdir(exist_ok=True)
    status = {"library_version": "1.2.0", "library_sha256": "ab" * 32, "ready": True, "oversized_caches": 0}
    (mount / names.LIBSYNC_STATUS).write_text(json.dumps({**status, "verified_at": time.time()}))
    near = Slot(context=102 * MIB, module=8 * MIB, data=LIMIT - 120 * MIB)
    specs = {
        1: Spec(uuids=[uuid]),
        2: Spec(uuids=[uuid], slots=[near]),
        3: Spec(uuids=[uuid], limit=2 * LIMIT, flags=lib.VGPU_FLAG_TAMPERED),
    }
    regions = {}
    for number, spec in specs.items():
        file = mount / names.CONTAINERS_DIRECTORY / f"{made.uid(number)}_main" / "usage.cache"
        regions[made.uid(number)] = stack.enter_context(RegionFile(file, spec))
    damaged = mount / names.CONTAINERS_DIRECTORY / f"{made.uid(6)}_main"
    damaged.mkdir()
    (damaged / "usage.cache").write_bytes(b"\1" * 4096)
    out = {"gpu-memory": "4096", names.ANNOTATION_INJECT: "false"}
    pods = [
        made.pod(1),
        made.pod(2),
        made.pod(3),
        made.pod(4, injected=False, annotations={"gpu-memory": "4096"}),
    ]
    pods += [made.pod(5, injected=False, annotations=out), made.pod(6)]
    pods[1]["metadata"]["namespace"] = "other"
    for each in pods:
        api.put(each)
    return regions


@contextmanager
def _webhook(folder: Path) -> Iterator[str]:
    """A webhook whose address is given, and somebody who sends it pods of each kind, and nonsense."""
    certificates = folder / "tls"
    webhookkit.write_generation(certificates, 1, webhookkit.material())
    with listen("127.0.0.1:0", "X") as free:
        port = free.getsockname()[1]
    own = {"LISTEN": f"127.0.0.1:{port}", "TLS_MODE": "files", "TLS_DIRECTORY": str(certificates)}
    own |= {"SET_CA_BUNDLE": "false", "DRAIN_SECONDS": "0"}
    environment = os.environ | {PREFIX + name: value for name, value in own.items()}
    with (folder / "webhook.log").open("w") as log:
        command = [sys.executable, "-m", "isolator.cli", "webhook"]
        process = subprocess.Popen(command, env=environment, stderr=log)
    stop = threading.Event()
    address = f"127.0.0.1:{port}"
    sender = threading.Thread(target=_send, args=(f"https://{address}", stop))
    sender.start()
    try:
        yield address
    finally:
        stop.set()
        sender.join(30)
        end(process)


def _send(url: str, stop: threading.Event) -> None:
    other = webhookkit.pod()
    other["spec"]["schedulerName"] = "default-scheduler"
    with httpx.Client(base_url=url, verify=False, trust_env=False, timeout=10) as client:
        while not stop.wait(0.2):
            try:
                client.post("/mutate", json=webhookkit.review())
                client.post("/mutate", json=webhookkit.review(other))
                client.post("/mutate", content=b"nonsense", headers={"content-type": "application/json"})
            except httpx.TransportError:
                continue


def _rules(folder: Path) -> Path:
    """The chart's rules, as the real Helm renders them."""
    helm = Helm(BINARIES[max(BINARIES)], folder)
    sets = "monitor.enabled=true,monitor.prometheusRule.configMap=true,monitor.prometheusRule.refusals=3"
    found = Rendered(helm.template("--set", sets).stdout)
    file = folder / "kai-resource-isolator.rules.yaml"
    file.write_text(found.one("ConfigMap", "kai-resource-isolator-rules")["data"][file.name])
    return file
