"""How exactly the quota holds: fit, paths, refusals, and that it is never silently absent (Q1 to Q3, Q9)."""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from . import quota_many
from .arms import Arm, build, compiler, environments, live
from .report import BenchError, Context, Row

HERE = Path(__file__).resolve().parent
PATHS = HERE.parent.parent / "tests" / "gpu" / "clients" / "paths.c"
MIB, GIB = 1 << 20, 1 << 30


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

    def __init__(self, context: Context) -> None:
        self.nvml = ctypes.CDLL(str(context.driver / "libnvidia-ml.so.1"))
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
    client, truth = quota_many.client(context), Truth(context)
    for way, (name, allowed) in WAYS.items():
        fitting = [gib for gib in sizes if gib * GIB < truth.total()]
        short = {gib: fit_once(context, client, truth, way, gib) for gib in fitting}
        row = Row("Q1", f"{name}: short of the limit", "MiB", f"0 over, <= {allowed} short")
        row.shim = max(short.values())
        row.met = all(0 <= value <= allowed for value in short.values())
        row.note = ", ".join(f"{gib} GiB: {value}" for gib, value in short.items())
        yield row


def _toolkit() -> Path | None:
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    root = Path(found).resolve().parent.parent
    return next((path.parent for path in root.rglob("cuda.h")), None) if Path(found).exists() else None


def paths(context: Context) -> Iterator[Row]:
    """Q2: 8 GiB through every way to take memory, under 4,147 MiB and bare."""
    row, include = Row("Q2", "ways to take 8 GiB that are refused", "of all", "N of N"), _toolkit()
    if include is None:
        row.note = "not measured: no cuda.h here"
        yield row
        return
    drivers = [str(context.driver / name) for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    client = build(PATHS, context.folder / "paths", f"-I{include}", *drivers, "-lpthread")
    refused: dict[str, int] = {}
    for arm in ("bare", "shim"):
        env = context.environment(arm, "4147m", "paths.cache")
        done = subprocess.run([str(client)], env=env, capture_output=True, text=True, timeout=300)
        answers = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
        refused[arm] = sum(answer == "2" for answer in answers.values())
    row.bare, row.shim = float(refused["bare"]), float(refused["shim"])
    row.met = refused == {"bare": 0, "shim": len(answers)}
    row.note = f"of {len(answers)}"
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


def _cases(folder: Path) -> dict[str, dict[str, str]]:
    """Broken set-ups, as changes of a good environment."""
    (folder / "corrupt.cache").write_bytes(os.urandom(4096))
    (folder / "old.cache").write_bytes(b"\x4e\xf7\x2f\x01" + b"\x63\0\0\0" * 2 + bytes(2_183_168 - 12))
    (folder / "short.cache").write_bytes(b"\x4e\xf7\x2f\x01")
    limit, cache = "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_SHARED_CACHE"
    return {
        "no limit where one is required": {limit: "", "ISOLATOR_ENFORCE": "required"},
        "limit 0": {limit: "0"},
        "limit 0m": {limit: "0m"},
        "limit abc": {limit: "abc"},
        "limit -1": {limit: "-1"},
        "limit 1e9": {limit: "1e9"},
        "limit without a unit, 4147": {limit: "4147"},
        "limit over 2^63": {limit: "9999999999999999999"},
        "no folder for the region": {cache: str(folder / "missing" / "usage.cache")},
        "the region is a folder": {cache: str(folder)},
        "the region is noise": {cache: str(folder / "corrupt.cache")},
        "the region has another version": {cache: str(folder / "old.cache")},
        "the region is cut off": {cache: str(folder / "short.cache")},
    }


def never_silent(context: Context) -> Iterator[Row]:
    """Q9: each broken set-up is a refused start with one line, or is held; none passes unheard."""
    client, silent, refused = context.folder / "bench_client", [], 0
    cases = _cases(context.folder)
    for name, change in cases.items():
        env = context.environment("shim", "8192m", "broken.cache") | change
        command = [str(client), "serve"]
        done = subprocess.run(
            command, env=env, input="control 10240\n", capture_output=True, text=True, timeout=120
        )
        held = done.returncode == 0 and done.stdout.strip() == "2"
        loud = done.returncode != 0 and len([x for x in done.stderr.splitlines() if "isolator" in x]) == 1
        refused += loud
        if not held and not loud:
            silent.append(name)
    row = Row("Q9", "broken set-ups that pass silently uncapped", f"of {len(cases)}", "0")
    row.shim, row.met = float(len(silent)), not silent
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
