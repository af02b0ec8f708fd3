"""Where KAI Scheduler's double puts a fraction pod: nodes that fit, cards with room, the fullest first."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import kai_grant as grant
import kai_rules as rules

from isolator import names

FULL = 1 + 1e-9
"""A card's shares, with room for the error of their sum."""


@dataclass
class Card:
    """One GPU of a node, its group, and the shares taken from it: pod UID -> share."""

    node: str
    uuid: str
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The same for the same card, so that a restarted double finds the pods bound before."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.node}/{self.uuid}"))

    @property
    def used(self) -> float:
        """The sum of the shares."""
        return sum(self.shares.values())


def _tolerates(pod: rules.Pod, taint: dict[str, Any]) -> bool:
    for given in pod["spec"].get("tolerations") or []:
        same_key = not given.get("key") or given["key"] == taint["key"]
        same_value = given.get("operator") == "Exists" or given.get("value", "") == taint.get("value", "")
        if same_key and same_value and given.get("effect") in (None, "", taint["effect"]):
            return True
    return False


def node_fits(pod: rules.Pod, node: dict[str, Any]) -> bool:
    """Ready, not cordoned, selected, its taints tolerated."""
    labels = node["metadata"].get("labels") or {}
    conditions = {c["type"]: c["status"] for c in node["status"].get("conditions") or []}
    hard = [t for t in node["spec"].get("taints") or [] if t["effect"] != "PreferNoSchedule"]
    return (
        conditions.get("Ready") == "True"
        and not node["spec"].get("unschedulable")
        and (pod["spec"].get("nodeSelector") or {}).items() <= labels.items()
        and all(_tolerates(pod, taint) for taint in hard)
    )


def choose(
    pod: rules.Pod, nodes: list[dict[str, Any]], cards: list[Card], mode: rules.Mode
) -> tuple[dict[str, Any], list[Card], float]:
    """Node, cards and share for a fraction pod: the fullest cards that still have room. Raises BindError."""
    best: tuple[float, dict[str, Any], list[Card], float] | None = None
    for node in nodes:
        if not node_fits(pod, node):
            continue
        share = grant.portion(pod, memory_label(node), mode)
        own = [card for card in cards if card.node == node["metadata"]["name"]]
        free = sorted((c for c in own if c.used + share <= FULL), key=lambda c: c.used, reverse=True)
        taken = free[: grant.devices(pod)]
        if len(taken) < grant.devices(pod):
            continue
        fullness = sum(card.used for card in taken)
        if best is None or fullness > best[0]:
            best = fullness, node, taken, share
    if best is None:
        raise grant.BindError("no node has a card with enough room")
    return best[1:]


def memory_label(node: dict[str, Any]) -> str | None:
    """The node's nvidia.com/gpu.memory, as it stands."""
    found: str | None = (node["metadata"].get("labels") or {}).get(names.NODE_LABEL_GPU_MEMORY)
    return found
