"""Two tenants on one GPU, each held to its quota: the public lab's proof, without a cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isolator import names, region
from isolator._core import ffi, lib
from isolator.errors import UnavailableError, UsageError
from isolator.libpath import library, simulator

MIB = 1 << 20
PATIENCE_S = 60.0
STATE_SIM = "simgpu.state"
GIB = 1 << 30
OUT_OF_MEMORY = 2
SIM_LIMITS = 512 * MIB, 9 * GIB
"""Quotas of which three quarters, beside a context, fit the quota, and twice the simulated T4."""


@dataclass
class Tenant:
    """One tenant: its process, and what it told."""

    name: str
    process: subprocess.Popen[str]
    cache: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        """Collects events until the process closes its output."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.events.append(json.loads(line))
            except ValueError:
                self.events.append({"event": "error", "text": line.strip()})
            if self.events[-1]["event"] in ("holding", "error"):
                self.holding.set()
        self.holding.set()

    def find(self, event: str, **values: object) -> dict[str, Any]:
        """The last event with these values, or an empty one."""
        for entry in reversed(self.events):
            if entry["event"] == event and all(entry.get(key) == value for key, value in values.items()):
                return dict(entry)
        return {}

    def error(self) -> str:
        """Why it did not come to hold its memory, or an empty text."""
        told = self.find("error").get("text", "")
        return str(told) or ("" if self.find("holding") else "it ended without a word")


def parse_limit(text: str) -> int:
    """Bytes of a limit, by the library's own parser."""
    raw = text.encode()
    found = ffi.new("uint64_t *")
    if lib.vgpu_limit_parse(raw, len(raw), found):
        raise UsageError(f"limit {text!r} is malformed, or under 64 MiB (like 4147m or 4Gi)")
    return int(found[0])


def _unshare() -> list[str] | None:
    """The command that starts a container here, or None where namespaces are not allowed."""
    tool = shutil.which("unshare")
    if tool is None or shutil.which("mount") is None:
        return None
    spaces = ["--mount", "--pid", "--fork", "--mount-proc", "--propagation", "private", "--kill-child"]
    for user in ([], ["--user", "--map-root-user"]):
        probe = [tool, *user, *spaces, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return [tool, *user, *spaces]
    return None


def _environment(gpu: str, work: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "LD_PRELOAD"))}
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent.parent), env.get("PYTHONPATH")])
    )
    if gpu == "sim":
        folder = str(simulator())
        env["LD_LIBRARY_PATH"] = folder
        env["PATH"] = f"{folder}{os.pathsep}{env.get('PATH', os.defpath)}"
        env["SIMGPU_STATE"] = str(work / STATE_SIM)
        env["SIMGPU_MODEL"] = "T4"
    return env


def _steps(limit: int) -> tuple[int, int]:
    """What a tenant asks for: the lab's 3 GiB and 2 GiB, or as much of a quota of another size."""
    if 3.6 * GIB <= limit < 5 * GIB:
        return 3 * GIB, 2 * GIB
    return limit * 3 // 4 // MIB * MIB, limit // 2 // MIB * MIB


def _start(name: str, work: Path, gpu: str, limit: str, container: list[str] | None) -> Tenant:
    room, cache = work / name / "room", work / name / "cache"
    for folder in (room, cache):
        folder.mkdir(parents=True)
    cache.chmod(0o1777)
    env = _environment(gpu, work) | {names.ENV_MEMORY_LIMIT: limit}
    command = [sys.executable, "-m", "isolator.tenant", *map(str, _steps(parse_limit(limit)))]
    if container is None:
        env |= {"LD_PRELOAD": str(library()), names.ENV_SHARED_CACHE: str(cache / names.CACHE_FILE)}
    else:
        command = [*container, *command, str(room), str(library()), str(cache)]
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    tenant = Tenant(name, process, cache / names.CACHE_FILE)
    threading.Thread(target=tenant.listen, daemon=True).start()
    return tenant


def _stop(tenants: list[Tenant]) -> None:
    for tenant in tenants:
        if tenant.process.stdin is not None:
            tenant.process.stdin.close()
    for tenant in tenants:
        try:
            tenant.process.wait(10)
        except subprocess.TimeoutExpired:
            tenant.process.kill()
            tenant.process.wait()


def _size(size: int) -> str:
    return f"{size // GIB} GiB" if size % GIB == 0 else f"{size // MIB} MiB"


def _checks(tenant: Tenant, limit: int) -> list[tuple[str, str, bool]]:
    """What one tenant must show: (what, seen, right)."""
    if tenant.error():
        return [("tenant", tenant.error(), False)]
    first, more = (tenant.find("allocate", step=step) for step in ("first", "more"))
    fits, over = first.get("result") == 0, more.get("result") == OUT_OF_MEMORY
    holding = tenant.find("holding")
    smi = str(tenant.find("smi", kind="query").get("text", "")).strip()
    cells = [cell.strip() for cell in smi.splitlines()[0].split(",")] if smi else []
    total = cells[3] if len(cells) > 3 else smi
    rows = [
        (f"allocate {_size(first['bytes'])}", "no error" if fits else f"error {first['result']}", fits),
        (
            f"allocate another {_size(more['bytes'])}",
            "out of memory" if over else f"result {more['result']}",
            over,
        ),
        ("total told to the program", f"{holding['total'] / MIB:.0f} MiB", holding["total"] == limit),
        ("total in nvidia-smi", total, total == f"{limit // MIB} MiB"),
    ]
    try:
        seen = region.read(tenant.cache)
    except Exception as error:  # any way to fail to read a cache is this one row of the table
        return [*rows, ("cache", str(error), False)]
    device = next((d for d in seen.devices if d.used), None)
    if device is None:
        return [*rows, ("cache", "no device is used", False)]
    rows.append(("limit in the cache", f"{device.limit:.9e}", device.limit == limit))
    right = first["bytes"] <= device.used <= limit
    rows.append(("used in the cache", f"{device.used:.9e}", right))
    return rows


def _report(console: Console, tenants: list[Tenant], limit: int, contained: bool) -> bool:
    table = Table(title=f"two tenants, one GPU, {limit / MIB:.0f} MiB each")
    for heading in ("tenant", "check", "seen", ""):
        table.add_column(heading)
    passed = True
    for tenant in tenants:
        for what, seen, right in _checks(tenant, limit):
            passed &= right
            table.add_row(tenant.name, what, seen, "[green]ok[/]" if right else "[red]WRONG[/]")

    console.print(table)
    view = tenants[0].find("smi", kind="table").get("text", "")
    if view:
        console.print(
            f"nvidia-smi in {tenants[0].name}:\n{view}", highlight=False, markup=False, soft_wrap=True
        )
    cards = {str(t.find("smi", kind="query").get("text", "")).partition("GPU-")[2][:36] for t in tenants}
    if len(cards) != 1:
        console.print("the tenants did not run on the same GPU")
        passed = False
    where = "containers of their own" if contained else "plain processes (no namespaces here)"
    if passed:
        verdict = f"PASS: two tenants in {where}: in-quota memory was granted, over-quota refused"
    else:
        verdict = f"FAIL: two tenants in {where}: see the rows marked WRONG"
    console.print(verdict, highlight=False, soft_wrap=True)
    return passed


def run(gpu: str, limit: str) -> int:
    """Runs the demo; 0 when both tenants were granted 3 GiB and refused 2 GiB more at the same time."""
    console = Console()
    size = parse_limit(limit)
    if gpu == "sim" and not SIM_LIMITS[0] <= size <= SIM_LIMITS[1]:
        raise UsageError(f"limit {limit!r} does not suit two tenants on the simulated T4: 512m to 9g do")
    if gpu == "real" and shutil.which("nvidia-smi") is None:
        raise UnavailableError("no nvidia-smi on PATH: is there an NVIDIA driver? (--gpu sim needs none)")
    container = _unshare()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tenants end with us
    with tempfile.TemporaryDirectory(prefix="isolator-demo-") as folder:
        work = Path(folder)
        work.chmod(0o755)
        tenants: list[Tenant] = []
        try:
            with console.status("starting two tenants") as status:
                for name in ("tenant-a", "tenant-b"):
                    tenants.append(_start(name, work, gpu, limit, container))
                for tenant in tenants:
                    status.update(f"waiting until {tenant.name} holds its memory")
                    if not tenant.holding.wait(PATIENCE_S):
                        tenant.events.append({"event": "error", "text": f"no answer in {PATIENCE_S:.0f} s"})
            passed = _report(console, tenants, size, container is not None)
        finally:
            _stop(tenants)
    return 0 if passed else 1
