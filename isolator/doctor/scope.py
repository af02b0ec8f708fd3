"""Which of container, node and cluster is meant, and its examination."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isolator import names
from isolator.doctor import NODE_VARIABLES, Scope, bounded, container
from isolator.doctor.inside import Inside
from isolator.doctor.report import Report
from isolator.errors import UsageError

DEFAULT_KUBECONFIG: Final = Path("~/.kube/config")


@dataclass(frozen=True)
class Options:
    """The command line. `pid` None: the container this runs in; `mount` None: found out.

    `patience` in seconds, None: the scope's own.
    """

    pid: int | None = None
    mount: Path | None = None
    monitor: str | None = None
    label: str | None = None
    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    pod: str | None = None
    patience: float | None = None


def choose(options: Options) -> Scope | None:
    """What there is to look at here; None where nothing of ours is."""
    cluster = (options.kubeconfig, options.context, options.namespace, options.pod)
    if any(value is not None for value in cluster):
        return Scope.CLUSTER
    if options.pid is not None:
        return Scope.POD
    own = _carried(None, options.mount)
    if own is not None and own.mounted:
        return Scope.POD
    if options.monitor or options.label or any(name in os.environ for name in NODE_VARIABLES):
        return Scope.NODE
    mount = options.mount or Path(names.DEFAULT_VGPU_MOUNT)
    if any((mount / name).exists() for name in (names.LIBSYNC_STATUS, names.VERSIONS_DIRECTORY)):
        return Scope.NODE
    if own is not None and own.carries:
        return Scope.POD
    other = container.target()
    if other is not None:
        beside = _carried(other, options.mount)
        if beside is None or beside.carries or beside.shares:  # not allowed to look: the report says so
            return Scope.POD
    if os.environ.get("KUBECONFIG"):
        return Scope.CLUSTER
    if mount.is_dir():
        return Scope.NODE
    return Scope.CLUSTER if DEFAULT_KUBECONFIG.expanduser().is_file() else None


def _carried(pid: int | None, mount: Path | None) -> container.Carried | None:
    try:
        return container.look(Inside(pid), str(mount) if mount else None)
    except OSError:
        return None


def examine(scope: Scope, options: Options) -> Report:
    """Looks. Raises UsageError for options of another scope, UnavailableError where nothing answers."""
    patience = options.patience or bounded.PATIENCE
    chosen: Scope | None = scope
    if scope is Scope.AUTO:
        unknown = Report("machine", os.uname().nodename)
        found = bounded.ask(unknown, "what there is to look at", lambda: choose(options), patience)
        if not found:
            return unknown.done()
        chosen = found[0]
    if chosen is Scope.CLUSTER:
        from isolator.doctor import cluster  # the API client is dear to import

        seconds = options.patience or cluster.PATIENCE
        return cluster.examine(options.kubeconfig, options.context, options.namespace, options.pod, seconds)
    if options.kubeconfig or options.context or options.namespace or options.pod:
        raise UsageError("--kubeconfig, --context, --namespace and --pod go with `doctor cluster`")
    if chosen is Scope.POD:
        from isolator.doctor import pod

        return pod.examine(options.pid, options.mount, patience)
    if chosen is Scope.NODE:
        from isolator.doctor import node

        return node.examine(options.mount, options.monitor, options.label, patience)
    if any(name.startswith(names.ENV_PREFIX_WEBHOOK) for name in os.environ):
        raise UsageError(
            "a pod of the webhook sees no node and no tenant: run `isolator doctor cluster` elsewhere"
        )
    report = Report("machine", os.uname().nodename)
    report.check("tenant, node or cluster configuration here")
    mount = options.mount or names.DEFAULT_VGPU_MOUNT
    report.find(
        "not_installed", report.subject, f"no {mount}, no {names.LIBRARY_FILE} preloaded, no kubeconfig"
    )
    return report.done()
