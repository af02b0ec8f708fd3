"""The webhook by reviews a second, one replica; and the most that one replica takes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import child
import webhook

from bench.scaling.curves import Curve

RATES = (10, 50, 100, 200, 500)
CONNECTIONS = 16
"""At least as many as an API server's client keeps to one address while it waits for answers."""
NAME = "kai-resource-isolator-webhook.bench.svc"
LOAD = Path(__file__).resolve().parent / "load.py"


def _load(folder: Path, port: int, rate: float, seconds: float, connections: int) -> dict[str, Any]:
    words = [folder / "ca.crt", NAME, folder / "review.json", rate, seconds, connections]
    command = [sys.executable, str(LOAD), str(port), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    if done.returncode:
        raise SystemExit(f"bench: the load generator failed: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_rate(seconds: float, rates: tuple[int, ...] = RATES) -> Curve:
    """Reviews at each rate, then as many as it takes (the last point: what came of no limit)."""
    curve = Curve("webhook, admissions", "one replica, TLS", "asked a second", "processor ms a review")
    with tempfile.TemporaryDirectory() as place, webhook.cluster() as api:
        folder = Path(place)
        hook = webhook.Webhook(folder, api)
        try:
            assert webhook.Cluster.secret is not None
            pem = base64.b64decode(webhook.Cluster.secret["data"]["ca.crt"])
            (folder / "ca.crt").write_bytes(pem)
            (folder / "review.json").write_text(json.dumps(webhook.REVIEW, separators=(",", ":")))
            pid = hook.process.pid
            for rate in (*rates, 0):
                before, spent = hook.histogram(), child.processor(pid)
                said = _load(folder, hook.port, rate, seconds, CONNECTIONS)
                spent, after = child.processor(pid) - spent, hook.histogram()
                answered = after[float("inf")] - before[float("inf")]
                curve.add(
                    asked_a_second=rate,
                    answered_a_second=said["rate"],
                    processor_ms_a_review=spent / max(answered, 1) * 1e3,
                    thousandths=spent / seconds * 1e3,
                    handler_p50__ms=webhook.quantile(before, after, 0.5),
                    handler_p99__ms=webhook.quantile(before, after, 0.99),
                    client_p50__ms=said["p50"],
                    client_p99__ms=said["p99"],
                    errors=said["errors"],
                    resident__MiB=child.mib(pid, "VmRSS"),
                )
        finally:
            hook.end()
    return curve
