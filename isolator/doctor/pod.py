"""`isolator doctor pod`: one container, from inside it, from a debug container, or from its node."""

from __future__ import annotations

import os
from pathlib import Path

from isolator import names
from isolator.doctor import (
    bounded,
    container,
    pod_driver,
    pod_ledger,
    pod_limit,
    pod_loading,
    pod_region,
)
from isolator.doctor.container import Carried
from isolator.doctor.inside import Inside
from isolator.doctor.report import Report
from isolator.webhook import advice

_KAIS = (names.ENV_MEMORY_LIMIT, names.ENV_GPU_PORTION, names.ENV_NUM_OF_GPUS)


def examine(pid: int | None = None, mount: Path | None = None, patience: float = bounded.PATIENCE) -> Report:
    """Looks at the container of process `pid` for `patience` seconds; None: found out."""
    report = Report("pod", "")
    found = bounded.ask(report, "container", lambda: pid or _own_or_beside(mount), patience)
    if not found:
        return report.done()
    inside = Inside(found[0])
    report.subject = inside.name
    if not _has_ended(inside):
        bounded.run(report, {"container": lambda part: _all(part, inside, mount, patience)}, patience)
    if not report.findings and _has_ended(inside):
        report.check("process")
        report.find("no_such_process", inside.name, f"no {inside.place}, or it has ended")
    return report.done()


def _has_ended(inside: Inside) -> bool:
    """Whether it is gone, or only waits to be reaped: then it has no root any more."""
    try:
        os.readlink(inside.place / "root")
    except OSError as error:
        return isinstance(error, FileNotFoundError | ProcessLookupError)
    return False


def _own_or_beside(mount: Path | None) -> int | None:
    """None, our own container, where that carries anything, else PID 1 of the one we are beside."""
    other = container.target()
    if other is None:
        return None
    try:
        own = container.look(Inside(), str(mount) if mount else None)
    except OSError:
        return other
    return None if own.carries else other


def _all(report: Report, inside: Inside, mount: Path | None, patience: float) -> None:
    carried = container.look(inside, str(mount) if mount else None)
    if not _is_there(report, carried):
        return
    probes = {
        "library and limit": lambda part: _quota(part, carried, patience),
        "NVIDIA devices": lambda part: pod_driver.devices(part, carried),
        "driver library": lambda part: _driver(part, carried),
    }
    bounded.run(report, probes, 0.95 * patience)


def _is_there(report: Report, carried: Carried) -> bool:
    """Whether anything of ours is meant to act in the container; says so where not."""
    report.check("injection")
    if carried.carries:
        return True
    variables = carried.environment or {}
    name = carried.inside.name
    if advice.is_true(variables.get(names.ENV_DISABLE_CONTROL, "")):
        seen = (
            f"{names.ENV_DISABLE_CONTROL}={variables[names.ENV_DISABLE_CONTROL]}: the webhook left it alone"
        )
        report.find("control_disabled", name, seen)
    elif any(key in variables for key in _KAIS):
        seen = f"KAI gave it a share of a GPU, and nothing holds it to that: no {names.PRELOAD_FILE}"
        report.find("not_injected", name, seen)
    else:
        seen = f"no {names.PRELOAD_FILE} with our library, no {carried.mount}, no variable of KAI's"
        report.find("not_installed", name, seen)
    return False


def _quota(report: Report, carried: Carried, patience: float) -> None:
    told = pod_loading.preload(report, carried)
    parsed = pod_loading.library(report, carried, told or carried.library)
    pod_loading.programs(report, carried, told, parsed)
    limit = pod_limit.judge(report, carried)
    pod_driver.pinned(report, carried, limit)
    path = pod_region.path_of(carried)
    found = pod_region.read(report, carried, path)
    if found is not None:
        pod_region.judge(report, path, found, limit)
    pod_ledger.judge(report, carried, found, limit, bounded.PART * patience)


def _driver(report: Report, carried: Carried) -> None:
    library = pod_driver.driver(report, carried)
    pod_driver.version(report, carried, library)
