"""KAI Scheduler's double on a real cluster: its two admission webhooks, its choice of node, its binder.

    with Kai(cluster, runtime_class="", version=(0, 17, 0)) as kai:
        ...                     # pods with schedulerName: kai-scheduler are admitted and bound
        kai.failures["ns/pod"]  # why a pod is still pending

Everything runs in threads of the test process. What is computed is in kai_rules.py, kai_grant.py and
kai_place.py; this file talks to the API server. Cards are given as {node: [UUID, ...]}, else each node that
is labelled nvidia.com/gpu.present has the simulator's first card.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import doubles
import jsonpatch
import kai_grant as grant
import kai_objects as objects
import kai_rules as rules
import kubernetes
from kai_place import Card, choose, memory_label, node_fits

from isolator import names
from isolator.libpath import simulator

POLL_S = 0.25
ENDED = ("Succeeded", "Failed")


def simulated_uuids(model: str = "T4", count: int = 1) -> list[str]:
    """UUIDs of the simulator's first cards: the same in every state file."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"SIMGPU_STATE": f"{folder}/state", "SIMGPU_MODEL": model, "SIMGPU_COUNT": str(count)}
        command = [str(simulator() / "nvidia-smi"), "--query-gpu=uuid", "--format=csv,noheader"]
        told = subprocess.run(
            command,
            env={**env, "LD_LIBRARY_PATH": str(simulator())},
            capture_output=True,
            text=True,
            check=True,
        )
    return told.stdout.split()


class Kai:
    """KAI on `cluster`, in the mode that the keyword arguments give (see rules.Mode)."""

    def __init__(self, cluster: Any, gpus: dict[str, list[str]] | None = None, **mode: Any) -> None:
        self.cluster = cluster
        self.mode = rules.Mode(**mode)
        self.gpus = gpus
        self.failures: dict[str, str] = {}
        """Why a pod is not bound, by namespace/name; the last reason."""
        self.reviews: list[dict[str, Any]] = []
        """Requests of the mutating webhook, in order."""
        self._chance = random.Random()
        self.cards: list[Card] = []
        """Who holds how much of which card, as of the last round."""
        self._shares: dict[str, float] = {}
        self._stopping = threading.Event()
        self._open = ExitStack()

    def __enter__(self) -> Kai:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Registers the webhooks and starts to bind pods."""
        try:
            self._register()
        except BaseException:
            self._open.close()
            raise
        self._stopping.clear()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _register(self) -> None:
        self._client = self._open.enter_context(self.cluster.client())
        self._core = kubernetes.client.CoreV1Api(self._client)
        mutating = self._open.enter_context(doubles.admission(self.cluster, self._mutate))
        validating = self._open.enter_context(doubles.admission(self.cluster, self._validate))
        self.cluster.apply(objects.installation(self.mode), namespace=names.KAI_NAMESPACE)
        for document in objects.configurations(mutating, validating):
            self.cluster.apply(document)
            self._open.callback(self._remove, document)

    def stop(self) -> None:
        """Removes the webhooks; bound pods stay as they are."""
        self._stopping.set()
        self._thread.join(30)
        self._open.close()

    @contextmanager
    def as_mode(self, **changes: Any) -> Iterator[None]:
        """Another mode, for pods that are made meanwhile; afterwards it is as before."""
        before = self.mode
        self.mode = dataclasses.replace(before, **changes)
        try:
            yield
        finally:
            self.mode = before

    # ---- admission ----------------------------------------------------------------------------------

    def _mutate(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        self.reviews.append(request)
        pod = request["object"]
        after = rules.mutate(pod, self.mode, self._chance)
        patch: list[dict[str, Any]] = jsonpatch.make_patch(pod, after).patch
        return patch

    def _validate(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        rules.validate(request["object"], self.mode)
        return []

    def _remove(self, document: dict[str, Any]) -> None:
        self.cluster.kubectl("delete", document["kind"], document["metadata"]["name"], "--ignore-not-found")

    # ---- scheduler and binder -----------------------------------------------------------------------

    def _list(self, what: Any, **words: Any) -> list[dict[str, Any]]:
        found = json.loads(what(_preload_content=False, **words).data)["items"]
        return list(found)

    def _loop(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                self._round()
            except Exception as error:  # the API server may be restarting: the next round tries again
                self.failures["*"] = repr(error)

    def _round(self) -> None:
        """Looks at all pods of the scheduler once and binds those that fit."""
        core = self._core
        pods = self._list(
            core.list_pod_for_all_namespaces, field_selector=f"spec.schedulerName={objects.SCHEDULER}"
        )
        waiting = [
            p for p in pods if not p["spec"].get("nodeName") and "deletionTimestamp" not in p["metadata"]
        ]
        pending = {f"{p['metadata']['namespace']}/{p['metadata']['name']}": p for p in waiting}
        self.failures = {key: why for key, why in self.failures.items() if key in pending}
        if not waiting:
            return
        nodes = self._list(core.list_node)
        self._account(nodes, pods)
        for key, pod in sorted(
            pending.items(), key=lambda item: str(item[1]["metadata"]["creationTimestamp"])
        ):
            try:
                self._place(pod, nodes)
                self.failures.pop(key, None)
            except (grant.BindError, rules.Denied, kubernetes.client.ApiException) as error:
                self.failures[key] = str(error)

    def _account(self, nodes: list[dict[str, Any]], pods: list[dict[str, Any]]) -> None:
        """The cards, and who has how much of them: from the labels of bound pods that still run."""
        by_name = {node["metadata"]["name"]: node for node in nodes}
        given = self.gpus
        if given is None:
            labelled = (n for n in nodes if names.NODE_LABEL_GPU in (n["metadata"].get("labels") or {}))
            given = {node["metadata"]["name"]: simulated_uuids() for node in labelled}
            self.gpus = given or None
        self.cards = [Card(node, each) for node, uuids in given.items() for each in uuids]
        groups = {card.group: card for card in self.cards}
        for pod in pods:
            node = by_name.get(pod["spec"].get("nodeName", ""))
            if node is None or pod["status"].get("phase") in ENDED:
                continue
            for key, value in (pod["metadata"].get("labels") or {}).items():
                if key.partition("/")[0] == grant.GROUP_LABEL and value in groups:
                    uid = pod["metadata"]["uid"]
                    if rules.is_fraction(pod, self.mode):
                        self._shares[uid] = grant.portion(pod, memory_label(node), self.mode)
                    # Without its words: what it was bound with.
                    groups[value].shares[uid] = self._shares.get(uid, 0.0)

    def _place(self, pod: rules.Pod, nodes: list[dict[str, Any]]) -> None:
        if not rules.is_fraction(pod, self.mode):
            fitting = [node for node in nodes if node_fits(pod, node)]
            if not fitting:
                raise grant.BindError("no node fits")
            self._bind(pod, fitting[0])
            return
        node, cards, share = choose(pod, nodes, self.cards, self.mode)
        uuids, groups = [card.uuid for card in cards], [card.group for card in cards]
        label = memory_label(node)
        # In the binder's order; where a step fails the maps go again.
        documents = grant.binding_data(pod, uuids, share, label, self.mode)
        metadata = grant.binding_metadata(pod, groups, uuids, label, self.mode)
        meta = pod["metadata"]
        try:
            for name, data in documents:
                self._write_map(pod, name, data)
            self._core.patch_namespaced_pod(meta["name"], meta["namespace"], {"metadata": metadata})
            self._bind(pod, node)
        except kubernetes.client.ApiException:
            for name, _ in documents:
                self._drop_map(meta["namespace"], name)
            raise
        for card in cards:
            card.shares[meta["uid"]] = self._shares[meta["uid"]] = share

    def _write_map(self, pod: rules.Pod, name: str, data: dict[str, str]) -> None:
        meta = pod["metadata"]
        owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        body = {"metadata": {"name": name, "ownerReferences": [owner]}, "data": data}
        try:
            self._core.create_namespaced_config_map(meta["namespace"], body)
        except kubernetes.client.ApiException as error:
            if error.status != 409:
                raise
            self._core.replace_namespaced_config_map(name, meta["namespace"], body)

    def _drop_map(self, namespace: str, name: str) -> None:
        try:
            self._core.delete_namespaced_config_map(name, namespace)
        except kubernetes.client.ApiException as error:
            if error.status != 404:
                raise

    def _bind(self, pod: rules.Pod, node: dict[str, Any]) -> None:
        meta = pod["metadata"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node["metadata"]["name"]}
        body = {"metadata": {"name": meta["name"], "uid": meta["uid"]}, "target": target}
        # The answer is a Status, which the client cannot read as the Binding that it expects.
        self._core.create_namespaced_pod_binding(
            meta["name"], meta["namespace"], body, _preload_content=False
        )
