"""THE table of causes. Where several hold, the first of them in the table decides the exit status."""

from __future__ import annotations

from typing import Final

from isolator.doctor.cause import FIRST_CODE, LAST_CODE, Cause
from isolator.doctor.causes_cluster import CLUSTER
from isolator.doctor.causes_node import NODE
from isolator.doctor.causes_pod import POD

NOTHING: Final = (
    Cause(
        "not_installed",
        10,
        "nothing of this product is here",
        "install the chart, and run this in a sharing container, in a pod of ours, or with --kubeconfig",
        "any",
    ),
)

TABLE: Final[tuple[Cause, ...]] = NOTHING + POD + NODE + CLUSTER
"""Codes are unique, 10 to 99: of nothing 10, of a pod 11 to 39, of a node 40 to 59, of a cluster 60 to 99."""

RANK: Final = {cause.id: rank for rank, cause in enumerate(TABLE)}


def get(identity: str) -> Cause:
    """The row of this id. Raises KeyError where there is none."""
    return TABLE[RANK[identity]]


__all__ = ["FIRST_CODE", "LAST_CODE", "RANK", "TABLE", "Cause", "get"]
