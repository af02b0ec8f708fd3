#!/usr/bin/env python3
"""How the parts grow, and what that makes of a large cluster.

    bench/scale.py                      every curve (ten minutes), then the model; writes docs/scale.json
    bench/scale.py --only webhook       one part: monitor, webhook, libsync, library, api, model
    bench/scale.py --quick --json FILE  few and small points, no API server; says nothing about the product

`api` starts the API server of tests/cluster (root, `make cluster-tools`) and measures what our requests cost
it. The model (scaling/fleet.py) is made of figures of the file alone. A part that is not measured again keeps
its figures. Load of other programs shifts wall times; processor time is what to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / each) for each in ("unit", "cluster"))]

import monitor  # noqa: E402

from bench.scaling import admissions, fleet, node, tenants  # noqa: E402
from bench.scaling.curves import Curve, drawn, of_json, table  # noqa: E402

PARTS = ("monitor", "webhook", "libsync", "library", "api", "model")


def _monitor(quick: bool) -> list[Curve]:
    if quick:
        return [
            node.by_containers(8, (1, 40)),
            node.by_devices(5, 10, (1, 2)),
            node.memory(40, 10),
            node.crowd(1, 10, 20, 1),
        ]
    return [node.by_containers(100), node.by_devices(100), node.memory(10_000), node.crowd(20)]


def _webhook(quick: bool) -> list[Curve]:
    return [admissions.by_rate(2, (20, 60)) if quick else admissions.by_rate(20)]


def _libsync(quick: bool) -> list[Curve]:
    return [node.installer(5, (1, 20)) if quick else node.installer(50)]


def _library(quick: bool) -> list[Curve]:
    return tenants.by_tenants(3, 200, (1, 4)) if quick else tenants.by_tenants(21)


MEASURE: dict[str, Callable[[bool], list[Curve]]] = {
    "monitor": _monitor,
    "webhook": _webhook,
    "libsync": _libsync,
    "library": _library,
}


def made_at() -> dict[str, Any]:
    """Where and when, for the file."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit or "unknown",
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def measure(part: str, quick: bool) -> dict[str, Any]:
    """The part's entry of the file; prints what it has."""
    entry: dict[str, Any] = made_at()
    if part == "api":
        from bench.scaling import apiserver  # the tests' cluster is not needed for the others

        entry["costs"] = apiserver.costs()
        print(json.dumps(entry["costs"], indent=1))
        return entry
    curves = MEASURE[part](quick)
    for curve in curves:
        print(f"\n{curve.name}: {curve.what}\n{table(curve)}\n\n{drawn(curve)}", flush=True)
    entry["curves"] = [curve.as_json() for curve in curves]
    return entry


def modelled(known: dict[str, Any]) -> dict[str, Any]:
    """The model of what the file has; prints its tables."""
    curves = {c["name"]: of_json(c) for part in known.values() for c in part.get("curves", ())}
    costs = fleet.Costs.of(curves, known["api"]["costs"])
    found = fleet.report(costs, fleet.Fleet())
    print(fleet.text(found))
    return {**made_at(), "found": found}


def main() -> int:
    """Measures, prints, writes."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--only", action="append", choices=PARTS, help="may be given more than once")
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--json", type=Path, default=ROOT / "docs" / "scale.json")
    options = asked.parse_args()
    if options.quick and options.json == ROOT / "docs" / "scale.json":
        print("bench: --quick says nothing about the product: give --json another file", file=sys.stderr)
        return 2
    monitor.open_many()
    known: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    chosen = options.only or [p for p in PARTS if not (options.quick and p in ("api", "model"))]
    for part in PARTS:
        if part not in chosen:
            continue
        if part != "model":
            known[part] = measure(part, options.quick)
        elif "api" in known:
            known[part] = modelled(known)
        else:
            print("bench: the model needs the API server's costs: --only api first", file=sys.stderr)
            return 1
        options.json.write_text(json.dumps(known, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
