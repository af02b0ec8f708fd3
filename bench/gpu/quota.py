"""How exactly the quota holds: fit, paths, refusals, and that it is never silently absent (Q1 to Q3, Q9)."""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import quota_many
from .arms import Arm, build, compiler, environments, live
from .report import BenchError, Context, Row

HERE = Path(__file__).resolve().parent
PATHS = HERE.parent.parent / "tests" / "gpu" / "clients" / "paths.c"
MIB, GIB = 1 << 20, 1 << 30


# Groups of ways that tests/gpu/clients/paths.c knows: what they are, and what the library answers.
GROUPS = {
    "calls": ("calls that take 8 GiB: refused", "2"),
    "names": ("other names and look-ups of such calls: refused", "2"),
    "kinds": ("rarer kinds, and shared memory whose maker is gone: refused", "2"),
    "shared": ("shared memory whose maker lives: charged once", "0"),
}


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    ]


class Truth:
    """NVML of this process, which runs without the library."""

    def __init__(self, driver: Path) -> None:
        self.nvml = ctypes.CDLL(str(driver / "libnvidia-ml.so.1"))
        self.card = ctypes.c_void_p()
        if self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.card)):
            raise BenchError("NVML does not start")

    def held(self) -> dict[int, int]:
        """Bytes on the card by process id."""
        rows, count = (_Process * 1024)(), ctypes.c_uint(1024)
        if self.nvml.nvmlDeviceGetComputeRunningProcesses_v3(self.card, ctypes.byref(count), rows):
            raise BenchError("NVML lists no processes")
        return {rows[i].pid: rows[i].used for i in range(count.value)}

    def total(self) -> int:
        """Bytes of the card."""
        memory = _Memory()
        self.nvml.nvmlDeviceGetMemoryInfo(self.card, ctypes.byref(memory))
        return int(memory.total)


WAYS = {
    "plain": ("cuMemAlloc in 2 MiB steps", 2),
    "pieces": ("cuMemAlloc in 1 MiB steps", 2),
    "create": ("cuMemCreate in 2 MiB steps", 2),
    "pool": ("cuMemAllocAsync in 2 MiB steps", 32),
}


def fit_once(context: Context, client: Path, truth: Truth, way: str, gib: int) -> int:
    """MiB that a process could not get of its quota; below 0 would be over it."""
    env = context.environment("shim", f"{gib}g", f"fit-{way}-{gib}.cache")
    process = subprocess.Popen(
        [str(client), "fit", way], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        if not process.stdout.readline().startswith("got "):
            raise BenchError(f"fit {way} at {gib} GiB: the client ended")
        return (gib * GIB - truth.held()[process.pid]) // MIB
    finally:
        process.communicate("", timeout=60)


def fit(context: Context, sizes: tuple[int, ...] = (1, 4, 20, 70, 120)) -> Iterator[Row]:
    """Q1: what the card says a process holds that takes all it can get."""
    client, truth = quota_many.client(context), Truth(context.driver)
    for way, (name, allowed) in WAYS.items():
        fitting = [gib for gib in sizes if gib * GIB < truth.total()]
        short = {gib: fit_once(context, client, truth, way, gib) for gib in fitting}
        row = Row("Q1", f"{name}: short of the limit", "MiB", f"0 over, <= {allowed} short")
        row.shim = max(short.values())
        row.met = all(0 <= value <= allowed for value in short.values())
        row.note = ", ".join(f"{gib} GiB: {value}" for gib, value in short.items())
        yield row


def _headers() -> Path | None:
    """The folder of cuda.h: of CUDA_HOME, else of nvcc's toolkit."""
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    root = Path(os.environ.get("CUDA_HOME") or Path(found).resolve().parent.parent)
    return next((path.parent for path in root.rglob("cuda.h")), None)


def _answers(context: Context, client: Path, arm: str, group: str) -> dict[str, str]:
    """What each way of a group was answered, by its name."""
    command = [str(client), str(8 * GIB), group]
    env = context.environment(arm, "4147m", f"paths-{group}.cache")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def paths(context: Context, groups: tuple[str, ...] = tuple(GROUPS)) -> Iterator[Row]:
    """Q2: 8 GiB through every way to take memory, under 4,147 MiB and bare; memory of two processes.

    A way counts where the driver grants it bare; the others are named.
    """
    include = _headers()
    if include is None:
        yield Row("Q2", "ways to take 8 GiB", "of all", "N of N", note="not measured: no cuda.h (CUDA_HOME)")
        return
    drivers = [str(context.driver / name) for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    client = build(PATHS, context.folder / "paths", f"-I{include}", *drivers, "-lpthread", "-ldl")
    for group in groups:
        name, due = GROUPS[group]
        bare = _answers(context, client, "bare", group)
        ways = [way for way, answer in bare.items() if answer == "0"]
        shim = _answers(context, client, "shim", group)
        missed = [f"{way}: {shim.get(way)}" for way in ways if shim.get(way) != due]
        row = Row("Q2", name, f"of {len(ways)}", f"{len(ways)} of {len(ways)}")
        row.bare, row.shim = 0.0, float(len(ways) - len(missed))
        if due == "0":
            row.bare = float(len(ways))
        row.met = bool(ways) and not missed
        closed = [f"{way} ({answer})" for way, answer in bare.items() if answer != "0"]
        row.note = "; ".join(
            part
            for part in (
                "missed " + ", ".join(missed) if missed else "",
                "the driver itself refuses " + ", ".join(closed) if closed else "",
            )
            if part
        )
        yield row


def refusals(context: Context) -> Iterator[Row]:
    """Q3: what a refusal takes; the driver's own for comparison."""
    client = context.folder / "bench_client"
    count = 2_000 if context.quick else 20_000

    def cost(arm: Arm, calls: int) -> tuple[float, float, float]:
        """Mean in one batch; median and 99th percentile of single calls less the clock's."""
        mean = statistics.median(arm.ask(f"batch refused {calls}")[0] for _ in range(20))
        clock = statistics.median(arm.ask("sample nothing 1000"))
        single = sorted(value - clock for value in arm.ask(f"sample refused {calls}"))
        return mean, single[len(single) // 2], single[len(single) * 99 // 100]

    with live([str(client), "serve"], environments(context, "8192m")) as arms:
        figures = {name: cost(arm, count if name == "shim" else 500) for name, arm in arms.items()}
    goals = (("mean", 100), ("median", 60), ("99th percentile", 2000))
    for i, (name, allowed) in enumerate(goals):
        row = Row("Q3", f"refused cuMemAlloc, {name}", "ns", f"<= {allowed} ns")
        row.bare, row.empty, row.shim = (figures[arm][i] for arm in figures)
        row.met = row.shim <= allowed
        yield row


# ---- never silent ---------------------------------------------------------------------------------


LIMIT, CACHE = "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_SHARED_CACHE"
UNUSABLE = ("0", "0m", "abc", "-1", "1e9", "4147", "63m", "4 g", "9999999999999999999", "99999999999g")
# Runs what follows where the folder is read-only.
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def _cases(folder: Path) -> dict[str, dict[str, str]]:
    """Broken set-ups, as changes of a good environment."""
    (folder / "corrupt.cache").write_bytes(os.urandom(4096))
    (folder / "old.cache").write_bytes(b"\x4e\xf7\x2f\x01" + b"\x63\0\0\0" * 2 + bytes(2_183_168 - 12))
    (folder / "short.cache").write_bytes(b"\x4e\xf7\x2f\x01")
    regions = {
        "no folder for the region": folder / "missing" / "usage.cache",
        "the region is a folder": folder,
        "the region is noise": folder / "corrupt.cache",
        "the region has another version": folder / "old.cache",
        "the region is cut off": folder / "short.cache",
    }
    cases = {f"limit {text}": {LIMIT: text} for text in UNUSABLE}
    cases |= {name: {CACHE: str(path)} for name, path in regions.items()}
    required = {"ISOLATOR_ENFORCE": "required"}
    cases |= {f"{name}, required": change | required for name, change in cases.items()}
    cases["no limit, required"] = required | {LIMIT: "", CACHE: str(folder / "fresh.cache")}
    cases["no limit, one recorded in the region"] = {LIMIT: ""}
    return cases


def _outcome(command: list[str], env: dict[str, str]) -> str:
    """How a start ends that is due 8 GiB: "held", "refused" with one line, or "" for silently uncapped."""
    done = subprocess.run(
        command, env=env, input="control 10240\n", capture_output=True, text=True, timeout=120
    )
    if done.returncode == 0:
        return "held" if done.stdout.strip() == "2" else ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("isolator[")]
    return "refused" if len(lines) == 1 else ""


def _read_only(context: Context, command: list[str], env: dict[str, str]) -> str | None:
    """The outcome on a read-only mount; None where this machine lets nobody mount."""
    folder = context.folder / "read-only"
    folder.mkdir()
    there = ["unshare", "--mount", "sh", "-c", READ_ONLY, str(folder)]
    if not shutil.which("unshare") or subprocess.run([*there, "true"], capture_output=True).returncode:
        return None
    return _outcome([*there, *command], env | {CACHE: str(folder / "usage.cache")})


def never_silent(context: Context) -> Iterator[Row]:
    """Q9: each broken set-up is a refused start with one line, or is held; none passes unheard."""
    command = [str(context.folder / "bench_client"), "serve"]
    good = context.environment("shim", "8192m", "good.cache")
    heard: dict[str, str] = {"nothing broken": _outcome(command, good)}
    if heard["nothing broken"] != "held":
        raise BenchError("the control is not held: no case counts")
    with ThreadPoolExecutor(4) as pool:
        cases = _cases(context.folder)
        outcomes = pool.map(lambda change: _outcome(command, good | change), cases.values())
        heard |= dict(zip(cases, outcomes, strict=True))
    read_only = _read_only(context, command, good)
    if read_only is not None:
        heard["the region is on a read-only mount"] = read_only
    above = good | {LIMIT: "999g", CACHE: str(context.folder / "above.cache")}
    shown = subprocess.run(
        [str(quota_many.client(context)), "total"], env=above, capture_output=True, text=True, timeout=120
    ).stdout
    heard["limit above the card"] = "held" if 0 < int(shown or 0) <= Truth(context.driver).total() else ""
    silent = [name for name, outcome in heard.items() if not outcome]
    row = Row("Q9", "broken set-ups that pass silently uncapped", f"of {len(heard)}", "0")
    row.shim, row.met = float(len(silent)), not silent
    refused = sum(outcome == "refused" for outcome in heard.values())
    row.note = ", ".join(silent) or f"{refused} refuse to start with one line, the others are held"
    yield row


PARTS: dict[str, Callable[[Context], Iterator[Row]]] = {
    "Q1": fit,
    "Q2": paths,
    "Q3": refusals,
    "Q4": quota_many.race,
    "Q5": quota_many.kills,
    "Q6": quota_many.crowd,
    "Q7": quota_many.together,
    "Q9": never_silent,
}


def rows(context: Context, only: set[str]) -> Iterator[Row]:
    """The rows that were asked for."""
    compiler()
    for row_id, part in PARTS.items():
        if not only or row_id in only:
            yield from part(context)
