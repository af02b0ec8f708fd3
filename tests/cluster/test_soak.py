"""The long proof: admissions at a fixed rate while everything around the webhook changes.

A minute and a half in the usual run; `SOAK_SECONDS=300` goes on, disturbance after disturbance. `SOAK_RATE`
(100) is the creations asked for a second.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from cryptography import x509
from harness import Cluster, wait_for
from images_base import ROOT
from openloop import OpenLoop, kept, percentile
from product import Product
from releases import Release, release
from steady import process_of

from isolator import names

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
RATE = float(os.environ.get("SOAK_RATE", "100"))
KILLS = max(1, int(SECONDS // 60))
NOTICED = 10.0
"""Seconds in which a busy kubelet has noticed a dead container and its endpoint is gone."""
CALM = 15.0
"""Seconds of the measurement without any disturbance."""
LIVES = {"duration": "2m", "caDuration": "2m"}
"""Renewed after 80 s."""
FIGURES = ROOT / "build/soak.txt"


@pytest.fixture(scope="module")
def made(cluster: Cluster, product: Product) -> Iterator[Release]:
    """Two replicas with certificates that live for two minutes; what they drain is the chart's default."""
    with release(cluster, "soak", replicaCount=2, drainSeconds=5) as installed:
        installed.values["tls"] = {"builtin": LIVES}
        installed.upgrade()
        installed.wait_admits()
        yield installed


class Disturbances:
    """What happens to a release while admissions go on; each waits until all replicas serve again."""

    def __init__(self, made: Release) -> None:
        self.made, self.cluster = made, made.cluster
        self.rounds = itertools.count()

    def settled(self) -> None:
        """Both replicas ready, none going away."""
        self.cluster.wait_rollout(f"deployment/{self.made.webhook}", namespace=self.made.name)

        def whole() -> bool:
            selector = f"--selector={names.COMPONENT_LABEL}={names.COMPONENT_WEBHOOK}"
            found = self.cluster.get("pods", selector, namespace=self.made.name)["items"]
            states = [each for pod in found for each in pod["status"].get("containerStatuses", [])]
            return len(found) == 2 and len(states) == 2 and all(each["ready"] for each in states)

        wait_for(whole, 120, "both replicas", every=0.5)

    def delete(self) -> None:
        """Deletes a replica."""
        gone = self.made.pods()[0]["metadata"]["name"]
        self.cluster.kubectl("delete", "pod", gone, f"--namespace={self.made.name}", "--wait=false")

    def upgrade(self) -> None:
        """Upgrades the chart with a value that replaces all replicas."""
        before = {pod["metadata"]["uid"] for pod in self.made.pods()}
        self.made.upgrade({"webhook": {"podAnnotations": {"round": f"{next(self.rounds)}"}}})
        assert not before & {pod["metadata"]["uid"] for pod in self.made.pods()}

    def rollback(self) -> None:
        """Rolls the release back by one revision."""
        words = [f"--namespace={self.made.name}", "--wait", "--timeout=3m"]
        self.cluster.helm("rollback", self.made.name, *words)

    def drain(self) -> None:
        """Drains the node of a replica, as for its maintenance, and gives it back."""
        node = self.made.pods()[0]["spec"]["nodeName"]
        mine = f"app.kubernetes.io/instance={self.made.name}"
        words = ["--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s", f"--pod-selector={mine}"]
        try:
            self.cluster.kubectl("drain", node, *words, timeout=150)
            assert node not in {pod["spec"]["nodeName"] for pod in self.made.pods()}
            self.settled()
        finally:
            self.cluster.kubectl("uncordon", node)


def serials(made: Release) -> tuple[int, int]:
    """Serial numbers of the certificate and of the newest CA in the Secret."""
    secret = made.secret()
    leaf, ca = (x509.load_pem_x509_certificate(secret[key]) for key in ("tls.crt", "ca.crt"))
    return leaf.serial_number, ca.serial_number


def restarts(pods: Sequence[Mapping[str, Any]]) -> int:
    """How often the containers of these pods were started again."""
    states = [each for pod in pods for each in pod["status"].get("containerStatuses", [])]
    return sum(each["restartCount"] for each in states)


def said(load: OpenLoop) -> list[str]:
    """What became of the failed ones, with the second in which each was due."""
    return [f"{each.due - load.start:.2f} s: {each.outcome}" for each in load.failed()]


def test_admission_adds_little_to_a_creation(made: Release) -> None:
    """A1: sharing pods and pods that no webhook is asked about, in turn: what the webhook adds to one."""
    other = json.loads(json.dumps(made.pod("plain")))
    other["spec"]["schedulerName"] = "somebody"
    with OpenLoop(made.cluster, [made.pod("soak"), other], RATE) as load:
        time.sleep(CALM)
    assert not load.failed(["injected", "created"]), load.failed(["injected", "created"])[:5]
    since = load.start + 3  # connections are made in the first seconds
    ours, others = (load.milliseconds(kind, since) for kind in (0, 1))
    figures = [(percentile(ours, p), percentile(others, p)) for p in (0.5, 0.99)]
    shown = "; ".join(
        f"{name} {with_:.1f} ms with, {without:.1f} ms without, added {with_ - without:.1f} ms"
        for name, (with_, without) in zip(("p50", "p99"), figures, strict=True)
    )
    kept(FIGURES, f"calm: {load.summary()}; {shown}")
    assert figures[0][0] - figures[0][1] < 100, shown


def test_a_killed_replica_refuses_for_a_moment_and_lets_nothing_through(made: Release) -> None:
    """A4: SIGKILL of a replica's process, which nothing announces: until its endpoint is gone the API server
    may dial it in vain. Only then are creations refused, a second's at most and with an error that can be
    tried again; none is let through without its quota, and the replica is back by itself."""
    changes, kills = Disturbances(made), list[float]()
    with OpenLoop(made.cluster, [made.pod("soak")], RATE) as load:
        time.sleep(3)
        for _ in range(KILLS):
            pod = min(made.pods(), key=lambda each: restarts([each]))
            node = made.cluster.nodes[pod["spec"]["nodeName"]]
            number, before = process_of(node, pod), restarts(made.pods())
            kills.append(time.monotonic())
            node.run(["kill", "-9", str(number)])
            wait_for(lambda n=before: restarts(made.pods()) > n, 60, "another start", every=0.3)
            changes.settled()
    failed = load.failed()
    kept(FIGURES, f"killed {KILLS} times: {load.summary()}, {len(failed)} failed")
    print(*said(load)[:3], sep="\n")
    assert all(each.outcome.startswith("500 ") for each in failed), said(load)
    near = [each for each in failed if any(at < each.ended and each.began < at + NOTICED for at in kills)]
    assert near == failed, said(load)
    assert len(failed) <= KILLS * RATE, "more than a second's"


@pytest.mark.timeout(600 + SECONDS)
def test_no_admission_fails_while_all_around_changes(made: Release) -> None:
    """A4: at a fixed rate of sharing pods, replicas are deleted and drained, the chart is upgraded and rolled
    back, the certificate and its CA are renewed: every pod is admitted and injected."""
    changes = Disturbances(made)
    assert len({pod["spec"]["nodeName"] for pod in made.pods()}) == 2, "the replicas are spread"
    first, told = serials(made), list[str]()
    seen = {first}
    steps: list[Callable[[], None]] = [changes.upgrade, changes.rollback, changes.delete, changes.drain]

    def renewed() -> bool:
        return all(new != old for new, old in zip(serials(made), first, strict=True))

    with OpenLoop(made.cluster, [made.pod("soak")], RATE) as load:
        for number, step in enumerate(itertools.cycle(steps)):
            if number >= len(steps) and time.monotonic() > load.start + SECONDS:
                break
            at = time.monotonic() - load.start
            step()
            changes.settled()
            seen.add(serials(made))
            told.append(f"{step.__name__} {at:.0f}-{time.monotonic() - load.start:.0f} s")
        wait_for(renewed, 180, "certificate and CA to be renewed", every=1)
        seen.add(serials(made))
        time.sleep(2)  # the load goes on with what was renewed
    leaves, authorities = (len({pair[i] for pair in seen}) - 1 for i in (0, 1))
    told.append(f"{leaves} certificates and {authorities} CAs renewed")
    kept(FIGURES, f"disturbed: {load.summary()}, {len(load.failed())} failed; {', '.join(told)}")
    assert not load.failed(), said(load)[:20]
