"""What the measured costs make of a large cluster: closed forms, and three small simulations with seeds.

Every unit cost is a row of docs/scale.json (a bench curve, or the real API server); what cannot be measured
here is a field of Fleet, named as an assumption. No cluster, no clock, no file is touched.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.scaling.curves import Curve, figure
from isolator.monitor import background, events, podwatch
from isolator.serving import Connection
from isolator.webhook import keeper


@dataclass(frozen=True)
class Fleet:
    """The cluster. Seconds; what is marked is assumed, not measured."""

    nodes: int = 5000
    pods: int = 100_000
    churn: float = 20.0
    """Pods made a second: the bound of Kubernetes' own scalability goals."""
    burst: int = 1000
    """Pods that clients try to make at one moment."""
    seats: int = 245
    """Assumed: workloads' requests that one API server runs at once (defaults: 100 of 245 shares of 600)."""
    api_servers: int = 3
    replicas: int = 2
    resync: float = 300.0
    scrape: float = 15.0
    changes: int = 8
    """Assumed: changes of a pod that its node's watch tells, from binding to deletion."""
    unavailable: float = 0.25
    """maxUnavailable of the DaemonSets."""
    roll: float = 30.0
    """Assumed: seconds from the first to the last start of one wave of an upgrade."""
    controller_rate: float = 20.0
    """Assumed: writes a second of kube-controller-manager (its default)."""

    @property
    def a_node(self) -> float:
        """Pods of a node."""
        return self.pods / self.nodes


@dataclass(frozen=True)
class Costs:
    """Unit costs. `api`: name -> bytes, ms of kube-apiserver and etcd."""

    containers: Curve
    caches: Curve
    admissions: Curve
    api: Mapping[str, Mapping[str, float]]

    @staticmethod
    def of(curves: Mapping[str, Curve], api: Mapping[str, Any]) -> Costs:
        """Of the file's parts. Raises KeyError where one is missing."""
        return Costs(
            curves["monitor, containers"],
            curves["libsync, caches"],
            curves["webhook, admissions"],
            {name: row for name, row in api.items() if isinstance(row, Mapping)},
        )

    def ms(self, name: str) -> float:
        """Processor ms of both servers for one operation."""
        return self.api[name]["kube-apiserver ms"] + self.api[name]["etcd ms"]

    def bytes(self, name: str) -> float:
        """Bytes of its answer."""
        return self.api[name]["bytes"]

    def largest_list(self) -> str:
        """The row of a node's list in the largest cluster that was measured."""
        return max((n for n in self.api if n.startswith("list of ")), key=lambda n: int(n.split()[-1]))

    def review_ms(self) -> float:
        """Processor ms of one review at the highest steady rate."""
        return [p for p in self.admissions.points if p["asked a second"]][-1]["processor ms a review"]


def between(curve: Curve, name: str, at: float) -> float:
    """A figure of the curve on the line between its points; outside of them, the outermost point's."""
    points = sorted((point[curve.axis], point[name]) for point in curve.points)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return points[0][1] if at < points[0][0] else points[-1][1]


def watches(costs: Costs, fleet: Fleet) -> list[dict[str, Any]]:
    """What the monitors ask all the time: requests and MB a second, processors of the control plane."""
    a_list, lists = costs.largest_list(), fleet.nodes / fleet.resync
    told = fleet.churn * fleet.changes
    rows = [
        ("a node's pods listed, each resync", lists, a_list),
        ("the node's label read, each resync", lists, "node, cached, metadata"),
        ("a watch opened anew, each resync", lists, "watch opened"),
        ("changes told by the watches", told, "event of a watch"),
    ]
    found = []
    for what, rate, name in rows:
        size = costs.api[name].get("bytes", 0.0) * (fleet.a_node / 20 if name == a_list else 1)
        found.append(
            {
                "what": what,
                "a second": rate,
                "MB/s": size * rate / 1e6,
                "processors": costs.ms(name) * rate / 1e3,
            }
        )
    keeps = fleet.replicas / keeper.INTERVAL
    both = costs.ms("secret") + costs.ms("webhook configuration")
    size = costs.bytes("secret") + costs.bytes("webhook configuration")
    row = {"what": "the webhook's Secret and caBundle", "a second": 2 * keeps, "MB/s": keeps * size / 1e6}
    return [*found, {**row, "processors": keeps * both / 1e3}]


def configmaps(costs: Costs, fleet: Fleet) -> dict[str, float]:
    """Watches of ConfigMaps by all kubelets: those for KAI's own words, and what our limit file adds."""
    alone = costs.api["ConfigMap watches of a pod, KAI alone"]["watches"]
    ours = costs.api["ConfigMap watches of a pod, with ours"]["watches"]
    return {"for KAI": alone * fleet.pods, "added by the limit file": (ours - alone) * fleet.pods}


def prometheus(costs: Costs, fleet: Fleet) -> dict[str, float]:
    """Series, samples and MB a second of all monitors."""
    series = between(costs.containers, "series", fleet.a_node) * fleet.nodes
    size = between(costs.containers, "answer, KiB", fleet.a_node) * fleet.nodes / fleet.scrape * 1024 / 1e6
    return {"series": series, "samples a second": series / fleet.scrape, "MB/s": size}


def nodes(costs: Costs, fleet: Fleet) -> dict[str, float]:
    """Thousandths of a processor on each node, and resident MiB."""
    scrape = between(costs.containers, "processor ms", fleet.a_node)
    return {
        "monitor": scrape / fleet.scrape,
        "monitor, MiB": between(costs.containers, "resident at most, MiB", fleet.a_node),
        "libsync": between(costs.caches, "thousandths at 30 s", fleet.a_node),
        "libsync, MiB": between(costs.caches, "resident at most, MiB", fleet.a_node),
    }


def told(costs: Costs, fleet: Fleet, at_once: int = events.MOST_AT_ONCE) -> dict[str, float]:
    """Events when every pod of the cluster is found wanting at one moment (a label in bytes everywhere)."""
    passes = -(-fleet.a_node // at_once)
    rate = min(fleet.a_node, at_once) * fleet.nodes / background.EVERY
    return {
        "a second": rate,
        "processors": rate * costs.ms("event made") / 1e3,
        "seconds until all are told": passes * background.EVERY,
        "renewed a second": fleet.pods / events.RENEW,
        "processors for renewals": fleet.pods / events.RENEW * costs.ms("event renewed") / 1e3,
        "MB in etcd": fleet.pods * costs.bytes("event made") / 1e6,
    }


def starts(fleet: Fleet, seed: int, soonest: float = podwatch._SOONEST) -> dict[str, float]:
    """Lists a second after an upgrade's waves; `soonest` 1: each interval full, as if nobody parted.

    A wave begins when the one before is up; every monitor lists as it starts, then at its resync for an hour.
    """
    chance, seconds = random.Random(seed), Counter[int]()
    size = max(1, round(fleet.nodes * fleet.unavailable))
    for number in range(fleet.nodes):
        at = number // size * 2 * fleet.roll + chance.uniform(0, fleet.roll)
        seconds[int(at)] += 1
        at += fleet.resync * chance.uniform(soonest, 1.0)
        while at < 3600:
            seconds[int(at)] += 1
            at += fleet.resync
    upgraded = -(-fleet.nodes // size) * 2 * fleet.roll
    later = [count for second, count in seconds.items() if second > upgraded + fleet.resync]
    return {"most a second, at the start": max(seconds.values()), "most a second, later": max(later)}


def reconnects(fleet: Fleet, seed: int, outage: float) -> dict[str, float]:
    """Watches opened a second when an API server is back after `outage` seconds, by the waits of podwatch."""
    chance, seconds = random.Random(seed), Counter[int]()
    for _ in range(fleet.nodes):
        at, failures = chance.uniform(0, 0.05), 0
        while not failures or at < outage:  # the first attempt is what notices
            failures += 1
            at += podwatch.pause(failures, chance=chance)
        seconds[int(at)] += 1
    return {"most a second": max(seconds.values()), "seconds until all are back": max(seconds) - outage + 1}


def burst(costs: Costs, fleet: Fleet, seed: int, replicas: int | None = None) -> dict[str, float]:
    """Admissions when clients make `burst` pods at one moment: each two reviews, one after the other.

    API servers run as many at once as they have seats. A replica answers one review at a time, the oldest
    first, each in the measured processor time give or take a half. The rest of an admission takes no time,
    which makes the crowd at the webhook larger than it is.
    """
    chance, replicas = random.Random(seed), replicas or fleet.replicas
    waiting, now = fleet.burst, 0.0
    free, crowd, most = [0.0] * replicas, [0] * replicas, 0
    took: list[float] = []
    queue: list[tuple[float, int, int]] = []  # end of a review, its pass, its replica

    def review(now: float, turn: int) -> None:
        nonlocal most
        at = chance.randrange(replicas)
        free[at] = max(now, free[at]) + costs.review_ms() / 1e3 * chance.uniform(0.5, 1.5)
        crowd[at] += 1
        most = max(most, crowd[at])
        took.append(free[at] - now)
        heapq.heappush(queue, (free[at], turn, at))

    for _ in range(min(waiting, fleet.seats * fleet.api_servers)):
        waiting -= 1
        review(now, 1)
    while queue:
        now, turn, at = heapq.heappop(queue)
        crowd[at] -= 1
        if turn == 1:
            review(now, 2)
        elif waiting:
            waiting -= 1
            review(now, 1)
    took.sort()
    return {
        "seconds until all are made": now,
        "review, p50 ms": took[len(took) // 2] * 1e3,
        "review, longest ms": took[-1] * 1e3,
        "most at once at a replica": most,
        "places of a replica": Connection.most,
    }


def admitted(costs: Costs, fleet: Fleet) -> dict[str, float]:
    """Reviews at the cluster's churn, and how much of one replica they take."""
    rate = 2 * fleet.churn
    most = costs.admissions.points[-1]["answered a second"]
    return {"reviews a second": rate, "thousandths": rate * costs.review_ms(), "most of one replica": most}


def upgraded(fleet: Fleet) -> dict[str, float]:
    """An upgrade of both DaemonSets: writes of their controller, and the least time these take together."""
    writes = 2 * fleet.nodes * 2  # of each pod: deleted, made
    return {
        "pods made": 2 * fleet.nodes,
        "writes": writes,
        "minutes at least": writes / fleet.controller_rate / 60,
    }


def report(costs: Costs, fleet: Fleet, seed: int = 7) -> dict[str, Any]:
    """Everything of the model, for the file; the same for the same costs."""
    one = burst(costs, fleet, seed, replicas=1)
    return {
        "nodes": fleet.nodes,
        "pods": fleet.pods,
        "watches": watches(costs, fleet),
        "ConfigMap watches": configmaps(costs, fleet),
        "lists after an upgrade": starts(fleet, seed),
        "lists after an upgrade, had nobody parted": starts(fleet, seed, soonest=1.0),
        "watches after 0.1 s without API server": reconnects(fleet, seed, 0.1),
        "watches after 20 s without API server": reconnects(fleet, seed, 20.0),
        "Events of a fault everywhere": told(costs, fleet),
        "Events, ten a pass": told(costs, fleet, at_once=10),
        "admissions at the churn": admitted(costs, fleet),
        f"burst of {fleet.burst:,} pods": burst(costs, fleet, seed),
        f"burst of {fleet.burst:,} pods, one replica": one,
        f"burst of {fleet.burst:,} pods, one replica, one API server": burst(
            costs, Fleet(api_servers=1), seed, replicas=1
        ),
        "Prometheus": prometheus(costs, fleet),
        "a node, thousandths of a processor": nodes(costs, fleet),
        "upgrade of the DaemonSets": upgraded(fleet),
    }


def text(found: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["| all the time | a second | MB/s | processors |", "|---|---|---|---|"]
    for row in found["watches"]:
        cells = (figure(row["a second"]), figure(row["MB/s"]), f"{row['processors']:.4f}")
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    lines += ["", "| what | figures |", "|---|---|"]
    for name, row in found.items():
        if isinstance(row, Mapping):
            lines.append(f"| {name} | {'; '.join(f'{key}: {figure(v)}' for key, v in row.items())} |")
    return "\n".join(lines)
