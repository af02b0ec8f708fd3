"""Reads what is judged, in three rounds: what is there, what that leads to, what stuck pods are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from isolator import names
from isolator.doctor import cluster_probe
from isolator.doctor import cluster_read as read
from isolator.doctor.cluster_calls import Call, Client, together, why
from isolator.doctor.cluster_facts import (
    COMPONENTS,
    LIBSYNC,
    MONITOR,
    WEBHOOK,
    Facts,
    at,
    listed,
    name,
    ready,
    statuses,
    variable,
)
from isolator.monitor.events import Reason

_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
_APPS: Final = "/apis/apps/v1"
_PLAIN: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_MOST_NODES, _MOST_PODS, _MOST_EVENTS = 500, 500, 300
_MOST_MONITORS: Final = 32
_MOST_ASKED: Final = 12
"""Pods of ours, or stuck ones, that are asked about singly."""
_LOG_BYTES: Final = 64 << 10


class Gather:
    """One look. `asked`: the one pod that is meant; `namespace`: where a pod is tried."""

    def __init__(self, client: Client, namespace: str, asked: tuple[str, str] | None) -> None:
        self._client, self._namespace = client, namespace
        self.facts = Facts(asked=asked)

    def look(self) -> Facts:
        """Raises UnavailableError where no server answers."""
        self._round(self._first(), first=True)
        self._round(self._second())
        self._round(self._third())
        return self.facts

    def _round(self, calls: Mapping[str, Call], first: bool = False) -> None:
        answers, failures = together(calls, self._client.until)
        if first:
            remote = {what: error for what, error in failures.items() if what != "kubectl"}
            self._client.reached(remote, len(calls) - 1)
        for what, answer in answers.items():
            kind, _, key = what.partition(" ")
            if key and kind in ("told", "monitors", "pod_events", "reservation_logs"):
                getattr(self.facts, kind)[key] = answer
            else:
                setattr(self.facts, kind, answer)
        for what, error in failures.items():
            if not (getattr(error, "status", None) == 404 and self._absent(what)):
                self.facts.unchecked.append((read.TITLES.get(what, what), why(error)))

    def _absent(self, what: str) -> bool:
        """Whether a missing object is an answer."""
        if what in ("limits", "secret"):
            setattr(self.facts, what, {})
        elif what in ("kai", "reservations"):
            setattr(self.facts, what, [])
        elif what == "pods" and self.facts.asked:
            self.facts.pods = []
        elif what != "preload":
            return False
        return True

    def _list(self, what: str, path: str, **query: str) -> Call:
        def call() -> Any:
            found, more = self._client.items(path, **query)
            if more:
                self.facts.unchecked.append(
                    (read.TITLES.get(what, what), f"only {len(found)} were read: there are more")
                )
            return found

        return call

    # ---- what is there ------------------------------------------------------------------------------

    def _first(self) -> dict[str, Call]:
        label = names.COMPONENT_LABEL
        ours = f"{label} in ({','.join(COMPONENTS.values())})"
        agents = f"{label} in ({COMPONENTS[LIBSYNC]},{COMPONENTS[MONITOR]})"
        webhook = f"{label}={COMPONENTS[WEBHOOK]}"
        gpu = names.NODE_LABEL_GPU
        plain = partial(self._client.api.ask, "/api/v1/namespaces", accept=_PLAIN, read=5.0)
        many = {"limit": str(_MOST_NODES)}
        return {
            "version": partial(self._client.ask, "/version"),
            "mutating": self._list("mutating", f"{_ADMISSION}/mutatingwebhookconfigurations"),
            "validating": self._list("validating", f"{_ADMISSION}/validatingwebhookconfigurations"),
            "policies": self._list(
                "policies", f"{_ADMISSION}/validatingadmissionpolicybindings", labelSelector=webhook
            ),
            "deployments": self._list("deployments", f"{_APPS}/deployments", labelSelector=webhook),
            "daemonsets": self._list("daemonsets", f"{_APPS}/daemonsets", labelSelector=agents),
            "own_pods": self._list("own_pods", "/api/v1/pods", labelSelector=ours, limit="1500"),
            "nodes": self._list("nodes", "/api/v1/nodes", labelSelector=gpu, **many),
            "plain_nodes": lambda: self._client.items("/api/v1/nodes", labelSelector=f"!{gpu}", limit="50")[
                0
            ],
            "namespaces": lambda: plain().get("items") or [],
            "kai": self._list("kai", f"{_APPS}/namespaces/{names.KAI_NAMESPACE}/deployments"),
            "kai_slices": self._list(
                "kai_slices", f"/apis/discovery.k8s.io/v1/namespaces/{names.KAI_NAMESPACE}/endpointslices"
            ),
            "reservations": self._list(
                "reservations", f"/api/v1/namespaces/{names.RESERVATION_NAMESPACE}/pods", **many
            ),
            "refusals": self._events(reason="FailedCreate"),
            "kubectl": read.kubectl,
        }

    def _events(self, namespace: str = "", **fields: str) -> Call:
        path = f"/api/v1/namespaces/{namespace}/events" if namespace else "/api/v1/events"
        chosen = ",".join(f"{field}={value}" for field, value in fields.items())
        return lambda: self._client.items(path, fieldSelector=chosen, limit=str(_MOST_EVENTS))[0]

    # ---- what that leads to -------------------------------------------------------------------------

    def _second(self) -> dict[str, Call]:
        facts = self.facts
        calls = {"pods": self._pods(), "quota_events": self._quota_events()}
        place, service = facts.namespace, facts.service
        if place:
            calls["events"] = self._events(place, type="Warning")
            calls["budgets"] = self._list(
                "budgets", f"/apis/policy/v1/namespaces/{place}/poddisruptionbudgets"
            )
            calls.update(self._files(place))
            calls.update(self._agents(place))
        if service:
            path = f"/apis/discovery.k8s.io/v1/namespaces/{service[0]}/endpointslices"
            calls["slices"] = self._list(
                "slices", path, labelSelector=f"kubernetes.io/service-name={service[1]}"
            )
        if facts.configuration is not None or facts.kai:
            calls["admission"] = partial(
                cluster_probe.ask, self._client, self._namespace, self._schedulers()[0]
            )
        failing = [pod for pod in facts.reservations or () if not ready(pod)]
        for pod in failing[:2]:
            calls[f"reservation_logs {name(pod)}"] = self._log(names.RESERVATION_NAMESPACE, name(pod), "")
        return calls

    def _schedulers(self) -> list[str]:
        told = variable(self.facts.container(WEBHOOK), "ISOLATOR_WEBHOOK_SCHEDULERS")
        try:
            found = [str(each) for each in json.loads(told or "")]
        except (ValueError, TypeError):
            found = []
        return found[:4] or [names.KAI_SCHEDULER]

    def _pods(self) -> Call:
        if self.facts.asked:
            place, pod = self.facts.asked
            return lambda: [self._client.ask(f"/api/v1/namespaces/{place}/pods/{pod}")]
        ended = "status.phase!=Succeeded,status.phase!=Failed"
        each = [
            self._list(
                "pods",
                "/api/v1/pods",
                fieldSelector=f"spec.schedulerName={scheduler},{ended}",
                limit=str(_MOST_PODS),
            )
            for scheduler in self._schedulers()
        ]
        return lambda: [pod for call in each for pod in call()]

    def _quota_events(self) -> Call:
        fields: dict[str, str] = {}
        if self.facts.asked:
            fields = {"involvedObject.name": self.facts.asked[1]}
        place = self.facts.asked[0] if self.facts.asked else ""
        each = [self._events(place, reason=reason, **fields) for reason in Reason]
        return lambda: [event for call in each for event in call()]

    def _files(self, place: str) -> dict[str, Call]:
        """The webhook's Secret and the preload file's ConfigMap."""
        calls: dict[str, Call] = {}
        secret = variable(self.facts.container(WEBHOOK), "ISOLATOR_WEBHOOK_SECRET")
        if secret:
            calls["secret"] = lambda: read.certificates(
                self._client.ask(f"/api/v1/namespaces/{place}/secrets/{secret}")
            )
        volumes = listed(self.facts.workload(LIBSYNC), "spec", "template", "spec", "volumes")
        maps = [at(each, "configMap", "name") for each in volumes if each.get("name") == "preload"]
        if maps and maps[0]:
            path = f"/api/v1/namespaces/{place}/configmaps/{maps[0]}"
            calls["preload"] = lambda: at(self._client.ask(path), "data", names.PRELOAD_KEY)
        return calls

    def _agents(self, place: str) -> dict[str, Call]:
        """What pods of ours that are not ready say, and what the monitors know."""
        calls: dict[str, Call] = {}
        for component in (WEBHOOK, LIBSYNC):
            waiting = [pod for pod in self.facts.pods_of(component) if not ready(pod) and read.running(pod)]
            scheme = "https:" if component == WEBHOOK else ""
            for pod in waiting[:_MOST_ASKED]:
                there = self._proxied(place, f"{scheme}{name(pod)}:{self._port(component)}", names.READY_PATH)
                calls[f"told {name(pod)}"] = partial(read.told, there)
        monitors = [pod for pod in self.facts.pods_of(MONITOR) if ready(pod)]
        for pod in monitors[:_MOST_MONITORS]:
            node = str(at(pod, "spec", "nodeName"))
            there = self._proxied(
                place, f"{name(pod)}:{self._port(MONITOR)}", names.STATUS_PATH, most=16 << 20
            )
            calls[f"monitors {node}"] = partial(read.document, there)
        if len(monitors) > _MOST_MONITORS:
            why_not = f"{_MOST_MONITORS} were asked: `isolator doctor node` in the others' pods"
            self.facts.unchecked.append((f"{len(monitors) - _MOST_MONITORS} monitors", why_not))
        return calls

    def _port(self, component: str) -> int:
        known = {
            WEBHOOK: names.WEBHOOK_PORT,
            LIBSYNC: names.LIBSYNC_PORT,
            MONITOR: names.MONITOR_PORT,
        }
        found = at(self.facts.container(component), "ports", 0, "containerPort")
        return int(found) if isinstance(found, int) else known[component]

    def _proxied(self, place: str, pod: str, path: str, most: int = 1 << 14) -> Callable[[], str]:
        return partial(self._client.text, f"/api/v1/namespaces/{place}/pods/{pod}/proxy{path}", most)

    def _log(self, place: str, pod: str, container: str) -> Call:
        query = {"tailLines": "200", "limitBytes": str(_LOG_BYTES)}
        if container:
            query["container"] = container
        return lambda: self._client.text(f"/api/v1/namespaces/{place}/pods/{pod}/log", _LOG_BYTES, **query)

    # ---- what stuck pods are told -------------------------------------------------------------------

    def _third(self) -> dict[str, Call]:
        facts = self.facts
        stuck = [
            pod
            for pod in facts.pods or ()
            if facts.asked or at(pod, "status", "phase") == "Pending" or read.waits(pod)
        ]
        calls: dict[str, Call] = {}
        for pod in stuck[:_MOST_ASKED]:
            place, uid = str(at(pod, "metadata", "namespace")), str(at(pod, "metadata", "uid"))
            fields = {"involvedObject.uid": uid, "type": "Warning"}
            calls[f"pod_events {uid}"] = self._events(place, **fields)
        if facts.asked and facts.pods:
            calls.update(self._deep(facts.pods[0], facts.asked[0]))
        return calls

    def _deep(self, pod: Mapping[str, Any], place: str) -> dict[str, Call]:
        calls: dict[str, Call] = {}
        volumes = [each for each in listed(pod, "spec", "volumes") if each.get("name") == names.VOLUME_LIMIT]
        configmap = at(volumes, 0, "configMap", "name")
        if configmap:
            path = f"/api/v1/namespaces/{place}/configmaps/{configmap}"
            calls["limits"] = lambda: at(self._client.ask(path), "data") or {}
        begun = [each for each in statuses(pod) if at(each, "containerID")]
        if begun:
            target = next((each for each in begun if at(each, "name") == read.target(pod)), begun[-1])
            calls["log"] = self._log(place, name(pod), str(at(target, "name")))
        return calls
