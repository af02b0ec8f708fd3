"""What is wrong here? One report of a container, a node or a cluster, within about a second."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """What `isolator doctor` looks at."""

    AUTO = "auto"
    POD = "pod"
    NODE = "node"
    CLUSTER = "cluster"
