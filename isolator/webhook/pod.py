"""A pod as a webhook meets it: before the API server validated it, with lists that may be absent or null."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from isolator.errors import ContractError

Json = dict[str, Any]

_UNPRINTABLE = re.compile(r"[^ -~]")


def quote(text: str, limit: int = 40) -> str:
    """`text` for a one-line message: printable ASCII in double quotes, at most `limit` characters of it."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return '"' + _UNPRINTABLE.sub("?", shown) + '"'


def as_object(value: object, where: str) -> Json:
    """`value`, or {} where it is absent or null; ContractError where it is anything but an object."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ContractError(f"{where} must be an object: correct the pod")
    return value


def as_text(value: object, where: str) -> str:
    """`value`, or "" where it is absent or null; ContractError where it is anything but a string."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ContractError(f"{where} must be a string: correct the pod")
    return value


def as_objects(value: object, where: str, *names: str) -> list[Json]:
    """A list of objects whose members `names` are strings; [] where it is absent or null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ContractError(f"{where} must be a list: correct the pod")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise ContractError(f"{where}[{index}] must be an object: correct the pod")
        for name in names:
            if not isinstance(item.get(name), str):
                raise ContractError(f"{where}[{index}].{name} must be a string: correct the pod")
    return value


def _texts(value: object, where: str) -> dict[str, str]:
    texts = as_object(value, where)
    for key, text in texts.items():
        if not isinstance(text, str):
            raise ContractError(f"{where}[{quote(key)}] must be a string: quote it in the manifest")
    return texts


@dataclass(frozen=True, slots=True)
class Container:
    """One container; `index` is its place in its own list, which KAI's ConfigMap names carry."""

    init: bool
    index: int
    name: str
    env: list[Json]
    env_from: list[Json]
    mounts: list[Json]
    raw: Json

    @property
    def path(self) -> str:
        """JSON pointer of the container."""
        return f"/spec/{'initContainers' if self.init else 'containers'}/{self.index}"

    @property
    def where(self) -> str:
        """The container as a manifest names it, for messages."""
        return _where(self.init, self.index)

    def literal(self, name: str) -> str | None:
        """Literal value of variable `name`; None without one. The last entry counts, as for the kubelet."""
        for entry in reversed(self.env):
            if entry["name"] == name:
                value = entry.get("value")
                if entry.get("valueFrom") is not None:
                    return None
                return as_text(value, f"{self.where}.env {name}")
        return None

    def references(self, name: str | None = None) -> Iterator[tuple[str, str, str]]:
        """(variable, ConfigMap, key) of each configMapKeyRef, of variable `name` alone where it is given."""
        for entry in self.env:
            source = entry.get("valueFrom")
            if source is None or (name is not None and entry["name"] != name):
                continue
            where = f"{self.where}.env {quote(entry['name'])} valueFrom"
            reference = as_object(as_object(source, where).get("configMapKeyRef"), where)
            if reference:
                yield (
                    entry["name"],
                    as_text(reference.get("name"), f"{where}.name"),
                    as_text(reference.get("key"), f"{where}.key"),
                )

    def bulk_references(self) -> Iterator[str]:
        """Name of each ConfigMap that envFrom takes whole."""
        for index, source in enumerate(self.env_from):
            where = f"{self.where}.envFrom[{index}].configMapRef"
            name = as_text(as_object(source.get("configMapRef"), where).get("name"), f"{where}.name")
            if name:
                yield name


@dataclass(frozen=True, slots=True)
class Pod:
    """What the rule reads of a pod; `containers` has the init containers first, as KAI searches them."""

    annotations: dict[str, str]
    labels: dict[str, str]
    scheduler: str
    runtime_class: str
    containers: tuple[Container, ...]
    volumes: list[Json]
    spec: Json

    def named(self, name: str) -> Container | None:
        """The first container of that name, init containers first."""
        return next((c for c in self.containers if c.name == name), None)

    @property
    def first(self) -> Container:
        """spec.containers[0]."""
        return next(c for c in self.containers if not c.init)


def _where(init: bool, index: int) -> str:
    return f"spec.{'initContainers' if init else 'containers'}[{index}]"


def _container(raw: Json, init: bool, index: int) -> Container:
    where = _where(init, index)
    return Container(
        init=init,
        index=index,
        name=raw["name"],
        env=as_objects(raw.get("env"), f"{where}.env", "name"),
        env_from=as_objects(raw.get("envFrom"), f"{where}.envFrom"),
        mounts=as_objects(raw.get("volumeMounts"), f"{where}.volumeMounts", "name", "mountPath"),
        raw=raw,
    )


def ephemeral_containers(spec: Json) -> list[Container]:
    """The debug containers of a pod; ContractError where they are none."""
    found = as_objects(spec.get("ephemeralContainers"), "spec.ephemeralContainers", "name")
    return [_container(raw, False, index) for index, raw in enumerate(found)]


def read_pod(pod: object) -> Pod:
    """The parsed JSON of a pod, checked as far as the rule reads it; ContractError otherwise."""
    if not isinstance(pod, dict):
        raise ContractError("the pod must be an object: send a Pod of API version v1")
    metadata = as_object(pod.get("metadata"), "metadata")
    spec = as_object(pod.get("spec"), "spec")
    plain = as_objects(spec.get("containers"), "spec.containers", "name")
    if not plain:
        raise ContractError("spec.containers must have a container: correct the pod")
    inits = as_objects(spec.get("initContainers"), "spec.initContainers", "name")
    return Pod(
        annotations=_texts(metadata.get("annotations"), "metadata.annotations"),
        labels=_texts(metadata.get("labels"), "metadata.labels"),
        scheduler=as_text(spec.get("schedulerName"), "spec.schedulerName"),
        runtime_class=as_text(spec.get("runtimeClassName"), "spec.runtimeClassName"),
        containers=tuple(_container(c, True, i) for i, c in enumerate(inits))
        + tuple(_container(c, False, i) for i, c in enumerate(plain)),
        volumes=as_objects(spec.get("volumes"), "spec.volumes", "name"),
        spec=spec,
    )
