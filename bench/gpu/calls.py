"""What driver calls, starts and threads cost beside a bare program (O1 to O6, O8)."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from .arms import Arm, batch_size, environments, interleave, live
from .report import ARMS, BenchError, Context, Row, Values, compared

LIMIT, OVER = "8192m", 10_240
CALLS_AT_ONCE = 0.001  # seconds a batch takes

# id, name, key of the client, target, allowed ratio, allowed ns
CALLS = (
    ("O1", "cuCtxGetCurrent, dlsym", "get_current", "+2 ns", None, 2),
    ("O1", "cuCtxGetDevice, dlsym", "get_device", "+2 ns", None, 2),
    ("O1", "cuCtxGetCurrent, cuGetProcAddress", "get_current_proc", "+2 ns", None, 2),
    ("O1", "cuCtxGetDevice, cuGetProcAddress", "get_device_proc", "+2 ns", None, 2),
    ("O1", "cudaGetDeviceCount", "runtime_count", "+2 ns", None, 2),
    ("O2", "launch of an empty kernel", "launch", "+2 ns or 1.002", 1.002, 2),
    ("O2", "launch of no kernel, refused by the driver", "launch_nothing", "+2 ns", None, 2),
    ("O3", "replay of a graph of 100 kernels", "graph", "1.002", 1.002, None),
    ("O4", "cuMemAlloc + cuMemFree, 1 KiB, in a block with others", "pair_1k", "1.01 or +250 ns", 1.01, 250),
    ("O4", "cuMemAlloc + cuMemFree, 2 MiB", "pair_2m", "1.01 or +250 ns", 1.01, 250),
    ("O4", "cuMemAllocAsync + cuMemFreeAsync, 2 MiB", "pair_async", "+120 ns", None, 120),
    ("O4", "cuMemCreate, map, unmap, release, 2 MiB", "map", "1.01 or +250 ns", 1.01, 250),
    ("O4", "cuMemFree, 20,000 live blocks", "free_many", "1.05", 1.05, None),
    ("", "cuMemGetInfo", "info", "", None, None),
    ("O4", "cuMemAlloc + cuMemFree, 256 MiB", "pair_256m", "1.01 or +250 ns", 1.01, 250),
)
# Seconds of a batch, where its first call differs from the others (a pool grows), or where each is
# followed by work off the clock.
SLOW = {"free_many": 0.004, "pair_256m": 0.004, "pair_async": 0.02}


def control(arms: dict[str, Arm]) -> None:
    """An arm counts only if the quota is in force in the library's and nowhere else."""
    found = {name: arm.ask(f"control {OVER}") for name, arm in arms.items()}
    expected = {name: [2.0] if name.startswith("shim") else [0.0] for name in arms}
    if found != expected:
        raise BenchError(f"interception control failed: {OVER} MiB gave {found}: no figure counts")


def calls(context: Context, client: Path, only: set[str]) -> Iterator[Row]:
    """A row for each call of the ids that were asked for (none: of all)."""
    wanted = [call for call in CALLS if not only or (call[0] or "O4") in only]
    if not wanted:
        return
    rounds = context.times(150, quick=15)
    with live([str(client), "serve"], environments(context, LIMIT)) as arms:
        control(arms)
        for row_id, name, key, target, ratio, added in wanted:
            row = Row(row_id, name, "ns", target)
            count = batch_size(arms["bare"], key, SLOW.get(key, CALLS_AT_ONCE))
            figures = interleave(arms, f"batch {key} {count}", rounds) if count else []
            if figures:
                yield compared(row, figures[0], ratio, added, processor=figures[1])
            else:
                row.note = "not measured: the call cannot be made here"
                yield row
        control(arms)


def launches_with_share(context: Context, client: Path) -> Iterator[Row]:
    """The launch with a compute share set: it is recorded and not enforced, and must cost nothing."""
    made = environments(context, LIMIT)
    made["shim"] = context.environment("shim", LIMIT, "share.cache") | {
        "CUDA_DEVICE_SM_LIMIT": "100",
        "LIBCUDA_LOG_LEVEL": "0",
    }
    with live([str(client), "serve"], made) as arms:
        control(arms)
        count = batch_size(arms["bare"], "launch", CALLS_AT_ONCE)
        figures = interleave(arms, f"batch launch {count}", context.times(150, quick=15)) if count else []
        row = Row("O2", "launch with CUDA_DEVICE_SM_LIMIT=100", "ns", "1.02 or +60 ns")
        if figures:
            yield compared(row, figures[0], 1.02, 60, processor=figures[1])
        else:
            row.note = "not measured: the call cannot be made here"
            yield row
        control(arms)


def latencies(context: Context, client: Path) -> dict[str, Values]:
    """Nanoseconds of single calls by arm, for the plot."""
    names = {"cuMemAlloc + cuMemFree, 2 MiB": "pair_2m", "launch of an empty kernel": "launch"}
    found: dict[str, Values] = {name: {arm: [] for arm in ARMS} for name in names}
    with live([str(client), "serve"], environments(context, LIMIT)) as arms:
        control(arms)
        for name, key in names.items():
            for _ in range(context.times(40, quick=5)):
                for arm in (*ARMS, *reversed(ARMS)):
                    found[name][arm] += arms[arm].ask(f"sample {key} 100")
    return found


def threads(context: Context, client: Path) -> Iterator[Row]:
    """The 99th percentile of single calls in 32 threads at once."""
    cores = os.sched_getaffinity(0)
    with live([str(client), "serve"], environments(context, LIMIT), cores) as arms:
        control(arms)
        for key, name in (
            ("get_device", "cuCtxGetDevice"),
            ("launch", "launch"),
            ("pair_2m", "cuMemAlloc + cuMemFree, 2 MiB"),
            ("pair_async", "cuMemAllocAsync + cuMemFreeAsync"),
        ):
            count = 50 if key.startswith("pair") else 200
            figures = interleave(arms, f"threads {key} 32 {count}", context.times(8, quick=3))
            row = Row("O6", f"{name}, 32 threads, 99th percentile", "ns", "1.05")
            if figures:
                yield compared(row, figures[1], 1.05)
            else:
                row.note = "not measured: the call cannot be made here"
                yield row


# ---- starts ---------------------------------------------------------------------------------------

MILESTONES = ("context", "allocation", "kernel")


def start(client: Path, env: dict[str, str]) -> dict[str, float]:
    """Milliseconds from before the process is made to each milestone, and of processor time."""
    began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    done = subprocess.run([str(client), "milestones"], env=env, capture_output=True, text=True, timeout=120)
    if done.returncode or done.stderr:
        raise BenchError(f"the client ended with {done.returncode}: {done.stderr.strip()}")
    found = {}
    for line in done.stdout.splitlines():
        name, wall, cpu = line.split()
        found[name] = (float(wall) - began) / 1e6
        found[f"{name} cpu"] = float(cpu) / 1e6
    return found


def first_calls(client: Path, env: dict[str, str]) -> dict[str, float]:
    """Milliseconds of the first calls of a process."""
    done = subprocess.run([str(client), "first"], env=env, capture_output=True, text=True, timeout=120)
    rows = (line.rpartition(" ") for line in done.stdout.splitlines())
    return {name: float(value) / 1e6 for name, _, value in rows}


def starts(context: Context, client: Path) -> Iterator[Row]:
    """From nothing to a context, an allocation and a kernel, where an earlier process recorded sizes."""
    made = environments(context, LIMIT)
    values: dict[str, Values] = {}
    for _ in range(context.times(10, quick=2)):
        seen: dict[str, Values] = {}
        for arm in (*ARMS, *reversed(ARMS)):
            for name, value in (start(client, made[arm]) | first_calls(client, made[arm])).items():
                seen.setdefault(name, {}).setdefault(arm, []).append(value)
        for name, by_arm in seen.items():
            for arm, pair in by_arm.items():
                values.setdefault(name, {}).setdefault(arm, []).append(statistics.mean(pair))
    row = Row("O5", "process start to current context", "ms", "1.01 or +2 ms")
    yield compared(row, values["context"], 1.01, 2)
    yield compared(Row("O5", "process start to first allocation", "ms", ""), values["allocation"])
    yield compared(Row("O5", "process start to first kernel done", "ms", ""), values["kernel"])
    yield compared(Row("O5", "the same, processor time to the context", "ms", ""), values["context cpu"])
    yield compared(Row("O5", "the same, processor time to the kernel", "ms", ""), values["kernel cpu"])
    row = Row(
        "O5", "the library's own start: a first cuInit that the driver refuses at once", "ms", "+0.2 ms"
    )
    yield compared(row, values["first call"], added=0.2)
    yield compared(Row("O5", "first cuInit", "ms", ""), values["first cuInit"])
    row = Row("O5", "first primary context", "ms", "1.005")
    yield compared(row, values["first primary context"], 1.005)


def first_of_container(context: Context, client: Path) -> Iterator[Row]:
    """The start of the process that makes the region file, which asks NVML at once."""
    values: Values = {arm: [] for arm in ARMS}
    for _ in range(context.times(6, quick=2)):
        seen: Values = {arm: [] for arm in ARMS}
        for arm in (*ARMS, *reversed(ARMS)):
            (context.folder / "fresh.cache").unlink(missing_ok=True)
            seen[arm].append(start(client, context.environment(arm, LIMIT, "fresh.cache"))["context"])
        for arm, pair in seen.items():
            values[arm].append(statistics.mean(pair))
    yield compared(Row("O5", "start to context, first process of a container", "ms", ""), values)


# ---- footprint --------------------------------------------------------------------------------------


def private_kib(pid: int, names: str) -> float:
    """KiB that the mappings of files named so hold of their own (Pss)."""
    total, mine = 0.0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mine = re.search(names, line) is not None
        elif mine and line.startswith("Pss:"):
            total += float(line.split()[1])
    return total


def _status(pid: int, field: str) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+)", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def footprint(context: Context, client: Path) -> Iterator[Row]:
    """Memory, threads and idle processor time of a process with a context, and once it was charged more."""
    grown: dict[str, list[float]] = {"with a context": [], "after its first charge": []}
    held, generations = 0.0, context.times(4, quick=2)
    pause = 0.5 if context.quick else 10 / generations
    count: dict[str, float] = {}
    idle = dict.fromkeys(ARMS, 0.0)
    for _ in range(generations):
        with live([str(client), "serve"], environments(context, LIMIT)) as arms:
            for values in grown.values():
                anonymous = {}
                for name, arm in arms.items():
                    arm.ask("batch get_device 1")
                    anonymous[name] = _status(arm.process.pid, "RssAnon")
                    count[name] = _status(arm.process.pid, "Threads")
                values.append(anonymous["shim"] - anonymous["bare"])
                control(arms)
            held = private_kib(arms["shim"].process.pid, r"libvgpu\.so|bench-.*\.cache")
            began = {name: _ticks(arm.process.pid) for name, arm in arms.items()}
            time.sleep(pause)
            for name, arm in arms.items():
                idle[name] += _ticks(arm.process.pid) - began[name]
    for when, values in grown.items():
        more = statistics.median(values)
        row = Row("O8", f"resident memory of a process {when}: added", "KiB", "1,024")
        row.shim = held + max(0.0, more)
        row.met = row.shim <= 1024
        row.note = f"library and region {held:.0f}, anonymous {more:+.0f}"
        yield row
    name = f"idle processor time in {pause * generations:.0f} s"
    for row, figures in ((Row("O8", "threads", "", "+0"), count), (Row("O8", name, "ticks", "+0"), idle)):
        row.bare, row.empty, row.shim = (figures[arm] for arm in ARMS)
        row.met = row.shim <= row.bare
        yield row


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
