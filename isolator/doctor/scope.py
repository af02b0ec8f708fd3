"""Which of container, node and cluster is meant, and its examination."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from isolator import names
from isolator.doctor import Scope
from isolator.doctor.report import Report
from isolator.errors import UsageError


@dataclass(frozen=True)
class Options:
    """The command line. `pid` None: the container this runs in; `mount` None: found out."""

    pid: int | None = None
    mount: Path | None = None
    monitor: str | None = None
    label: str | None = None
    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    pod: str | None = None


def choose(options: Options, root: Path = Path("/")) -> Scope | None:
    """What there is to look at here; None where nothing of ours is. `root` is where the files are."""
    given = (options.kubeconfig, options.context, options.namespace, options.pod)
    if any(value is not None for value in given):
        return Scope.CLUSTER
    if options.pid is not None:
        return Scope.POD
    if options.monitor or options.label or names.ENV_NODE_NAME in os.environ:
        return Scope.NODE
    mount = root / (options.mount or Path(names.DEFAULT_VGPU_MOUNT)).relative_to("/")
    if names.ENV_ISOLATOR_POD_UID in os.environ or (mount / names.LIMIT_FILE).exists():
        return Scope.POD
    if any((mount / name).exists() for name in (names.LIBSYNC_STATUS, names.VERSIONS_DIRECTORY)):
        return Scope.NODE
    if _preloads(root / names.PRELOAD_FILE.lstrip("/")) or (mount / names.LIBRARY_FILE).exists():
        return Scope.POD
    if os.environ.get("KUBECONFIG"):
        return Scope.CLUSTER
    return Scope.NODE if mount.is_dir() else None


def _preloads(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return names.LIBRARY_FILE.encode() in file.read(4096)
    except OSError:
        return False


def examine(scope: Scope, options: Options) -> Report:
    """Looks. Raises UsageError for options of another scope, UnavailableError where nothing answers."""
    chosen = choose(options) if scope is Scope.AUTO else scope
    if chosen is Scope.CLUSTER:
        from isolator.doctor import cluster  # the API client is dear to import

        return cluster.examine(options.kubeconfig, options.context, options.namespace, options.pod)
    if options.kubeconfig or options.context or options.namespace or options.pod:
        raise UsageError("--kubeconfig, --context, --namespace and --pod go with `doctor cluster`")
    if chosen is Scope.POD:
        from isolator.doctor import pod

        return pod.examine(options.pid, options.mount)
    if chosen is Scope.NODE:
        from isolator.doctor import node

        return node.examine(options.mount, options.monitor, options.label)
    report = Report("machine", os.uname().nodename)
    report.check("tenant, node or cluster configuration here")
    mount = options.mount or names.DEFAULT_VGPU_MOUNT
    report.find(
        "not_installed", report.subject, f"no {mount}, no {names.LIBRARY_FILE} preloaded, no KUBECONFIG"
    )
    return report.done()
