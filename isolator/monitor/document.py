"""The status document: what the monitor says of its node at /status.json (docs/status.md), as plain data.

Bytes, seconds and seconds since the epoch; what is not known is None (null), never zero.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from isolator.errors import ContractError

SCHEMA: Final = 1
_MOST: Final = 1 << 64
_LAST_TIME: Final = 253_402_300_799.0
"""The end of the year 9999: no calendar goes further."""
_LONGEST: Final = 200


@dataclass(frozen=True)
class Library:
    """What libsync reported of the node's library; all None where it reported nothing."""

    version: str | None = None
    sha256: str | None = None
    ready: bool | None = None
    problem: str | None = None
    verified_at: float | None = None


@dataclass(frozen=True)
class MemoryLabel:
    """The node's label nvidia.com/gpu.memory: `text` as it stands there, MiB that it means."""

    text: str | None = None
    mib: int | None = None
    in_bytes: bool | None = None


@dataclass(frozen=True)
class Node:
    """The node and the monitor's own sight of it. `name` is empty where it was not told.

    `named`: the pods are known, so that `tenants` is complete and has names; otherwise what lies in the cache
    folders is shown by pod UID. `skipped` counts what has no place in the document, by reason. `problems`
    has one line each, the gravest first; none is a healthy node.
    """

    name: str
    time: float
    version: str
    library: Library = Library()
    memory_label: MemoryLabel = MemoryLabel()
    nvml_up: bool = False
    pod_watch_up: bool = False
    named: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Device:
    """A device of the node. `charged`: sum of the tenants' ledgers, `allocated`: sum of their limits.

    A device that only tenants name, NVML being away, has no index, name and figures of its own. Percent,
    degrees Celsius, watts.
    """

    index: int | None
    uuid: str
    name: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    charged: int | None = None
    allocated: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None


@dataclass(frozen=True)
class TenantDevice:
    """What a tenant has of a device; `index` counts in its container. `limit` 0: none is recorded.

    `refused` counts refusals since the container started, `refused_last` is the time of the last one and
    `refused_bytes` what that asked for. `sm_limit` in percent, None without one.
    """

    index: int
    uuid: str
    used: int | None = None
    limit: int | None = None
    peak: int | None = None
    refused: int | None = None
    refused_last: float | None = None
    refused_bytes: int | None = None
    sm_limit: int | None = None


@dataclass(frozen=True)
class Flags:
    """What is wrong with a tenant besides its state."""

    mismatch: bool | None = None
    tampered: bool | None = None
    bypass: bool | None = None
    sm_unenforced: bool | None = None


@dataclass(frozen=True)
class Tenant:
    """A container that should be capped, or that has a region. Without names only `uid` tells the pod.

    `processes`: of its region that live. `created`: when the region was made, `started`: the container.
    `expected_limit`: what KAI grants on each device.
    """

    namespace: str | None
    pod: str | None
    uid: str | None
    container: str
    state: str
    uncapped: str | None = None
    reason: str = ""
    flags: Flags = Flags()
    expected_limit: int | None = None
    devices: tuple[TenantDevice, ...] = ()
    processes: int | None = None
    created: float | None = None
    started: float | None = None
    layout: str | None = None

    @property
    def title(self) -> str:
        """namespace/pod/container, or the pod's UID where its name is not known."""
        pod = f"{self.namespace}/{self.pod}" if self.pod is not None else f"{self.uid}"
        return f"{pod}/{self.container}"


@dataclass(frozen=True)
class Document:
    """Everything that /status.json holds."""

    node: Node
    devices: tuple[Device, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    schema: int = SCHEMA


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # not where only the classes are needed

    return TypeAdapter(Document)


def dump(document: Document, indent: int | None = None) -> bytes:
    """JSON, ended by a line feed."""
    return bytes(_adapter().dump_json(document, indent=indent)) + b"\n"


def load(text: bytes) -> Document:
    """The document of such JSON; keys that this version does not know are left out.

    Raises ContractError with one line for anything else, numbers that cannot be among it.
    """
    try:
        found: Document = _adapter().validate_json(text)
    except ValueError as error:
        raise ContractError(_of_other_schema(text) or f"not a status document: {_first(error)}") from error
    if found.schema != SCHEMA:
        raise ContractError(_other(found.schema))
    if not 0 <= found.node.time <= _LAST_TIME:
        raise ContractError("not a status document: node.time is no time")
    if not all(-_MOST < number < _MOST for number in _numbers(found)):
        raise ContractError("not a status document: it holds a number that cannot be")
    return found


def _other(schema: int) -> str:
    return f"not a status document that this version reads: of schema {schema}, and not {SCHEMA}"


def _of_other_schema(text: bytes) -> str | None:
    """What to say of a document whose parts are others because its schema is."""
    try:
        schema = json.loads(text)["schema"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return _other(schema) if type(schema) is int and schema != SCHEMA and abs(schema) < _MOST else None


def _first(error: ValueError) -> str:
    """Where the first mistake is and what it is; no text of the answer itself."""
    for each in getattr(error, "errors", list)():
        place = ".".join(str(part) for part in each["loc"] if str(part).isprintable())
        return f"{place}: {each['msg']}".removeprefix(": ")[:_LONGEST]
    return type(error).__name__


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif dataclasses.is_dataclass(value):
        for each in vars(value).values():
            yield from _numbers(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, Mapping):
        yield from _numbers(tuple(value.values()))
