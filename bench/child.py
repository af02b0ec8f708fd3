"""A process of the product under measurement: what it is started with, what it takes, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def environment(folder: Path, api: str) -> dict[str, str]:
    """Ours without proxies, and a kubeconfig in `folder` for the API server at the URL `api`."""
    kubeconfig = folder / "kubeconfig"
    named = {"clusters": [{"name": "c", "cluster": {"server": api}}], "users": [{"name": "u", "user": {}}]}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    kubeconfig.write_text(json.dumps({**named, "contexts": [context], "current-context": "x"}))
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return kept | {"KUBECONFIG": str(kubeconfig)}


def mib(pid: int, key: str) -> float:
    """A row of /proc/PID/status in MiB, for example VmRSS or VmHWM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def processor(pid: int) -> float:
    """Seconds of processor time so far, of all threads that live."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops it, by force where it does not go."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
