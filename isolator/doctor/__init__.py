"""What is wrong here? One report of a container, a node or a cluster, within about a second."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from isolator import names

NODE_VARIABLES: Final = (names.ENV_NODE_NAME, names.ENV_MONITOR_NODE_NAME)
"""Of our own workloads on a node: its name."""


class Scope(StrEnum):
    """What `isolator doctor` looks at."""

    AUTO = "auto"
    POD = "pod"
    NODE = "node"
    CLUSTER = "cluster"
