"""`isolator monitor` as a process, in front of the small API server of monitor_apiserver.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
from monitor_apiserver import NODE, ApiServer

from isolator.monitor import settings

PREFIX = settings.PREFIX


class Monitor:
    """A running monitor; `mount` is its library folder."""

    def __init__(self, api: ApiServer, folder: Path, extra: dict[str, str] | None = None) -> None:
        self.mount = folder / "vgpu"
        cluster = {"server": api.configuration().host}
        context = {"cluster": "c", "user": "u"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": context}],
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        asked = {
            "LISTEN": "127.0.0.1:0",
            "NODE_NAME": NODE,
            "MOUNT": str(self.mount),
            "UPDATE_INTERVAL": "0s",
        }
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "isolator.cli", "monitor"],
                env=kept
                | {"KUBECONFIG": str(folder / "kubeconfig")}
                | {PREFIX + name: value for name, value in asked.items()}
                | (extra or {}),
                stderr=log,
            )
        self.url = f"http://127.0.0.1:{self._port()}"

    def log(self) -> str:
        """Standard error so far."""
        return self._log.read_text()

    def _port(self) -> int:
        end = time.monotonic() + 60
        while not (found := re.search(r"\(port (\d+)\)", self.log())):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.05)
        return int(found[1])

    def get(self, path: str, accept: str = "") -> httpx.Response:
        """One answer."""
        return httpx.get(self.url + path, headers={"Accept": accept}, timeout=30, trust_env=False)

    def until(self, line: str) -> str:
        """The first scrape that has a line with this in it."""
        end = time.monotonic() + 30
        while line not in (text := self.get("/metrics").text):
            assert time.monotonic() < end, f"no {line} in:\n{text}\n{self.log()}"
            time.sleep(0.05)
        return text

    def end(self) -> int:
        """Exit status after SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)
