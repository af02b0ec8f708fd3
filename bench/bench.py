#!/usr/bin/env python3
"""What a driver call costs: bare, with an empty library preloaded, and with libvgpu.so preloaded.

On the simulated GPU, whose calls take next to nothing: what is left is the library's own. A real one is for
`make bench-gpu`.

The three arms run in rounds, each round forth and back (ABC CBA), because a machine's speed drifts; a pass
takes the quickest of a few short batches. A row gives the medians over the rounds, their ratio to the bare
arm, and that ratio's range over the rounds. Needs Python and a C compiler, nothing installed. Prints a table,
writes bench/results.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("bare", "empty", "shim")
FOREIGN = ("CUDA_", "ISOLATOR_", "SIMGPU_", "LIBCUDA_", "LD_PRELOAD", "POD_UID", "CONTAINER_")
LIMIT = 8 << 10  # MiB
OVER = 10 << 10  # fits the card, not the quota

TRUE, CONTEXT = "process start, /bin/true", "process start to context"
# What the shim may add to the bare arm: this many ns or this share, whichever is more. Names by prefix.
TARGETS = (
    ("cuCtxGet", 2, 0.0),
    ("cuLaunchKernel", 2, 0.0),
    ("cuMemAllocAsync", 120, 0.01),
    ("cuMemAlloc + Free", 250, 0.01),
    ("cuMemCreate", 250, 0.01),
    ("cuMemFree", 250, 0.01),
    ("first cuInit", 200_000, 0.0),
)
# What a refusal by the shim may take.
ABSOLUTE = {"refused cuMemAlloc mean": 100, "refused cuMemAlloc p50": 60, "refused cuMemAlloc p99": 2000}


class BenchError(Exception):
    """The measurement cannot be made or does not count; says why."""


def compile_parts(folder: Path) -> tuple[Path, Path]:
    """The client and the empty library."""
    named = os.environ.get("CC")
    compiler = next((c for c in (named, "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if not compiler:
        raise BenchError("no C compiler found (CC names one)")
    client, empty = folder / "bench_client", folder / "empty.so"
    (folder / "empty.c").write_text("typedef int nothing;\n")
    commands: list[list[str | Path]] = [
        [compiler, "-O2", "-o", client, ROOT / "bench" / "bench_client.c", "-ldl", "-lpthread"],
        [compiler, "-shared", "-fPIC", "-o", empty, folder / "empty.c"],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"{compiler}: {done.stderr.strip()[-400:]}")
    return client, empty


class Bench:
    """The arms on one GPU, and every value they have given so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        # In memory where possible: the card must not wait for a disk.
        memory = Path("/dev/shm")
        self.card = (memory if os.access(memory, os.W_OK) else folder) / f"{folder.name}.card"
        self.client, empty = compile_parts(folder)
        self.preload = {"bare": "", "empty": str(empty), "shim": str(options.lib)}
        self.values: dict[str, dict[str, list[float]]] = {}
        self.failed: set[str] = set()
        self.controls: dict[str, set[str]] = {arm: set() for arm in ARMS}

    def environment(self, arm: str) -> dict[str, str]:
        """The arms differ in LD_PRELOAD alone; each sees the same quota variables."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        env["CUDA_DEVICE_MEMORY_LIMIT"] = f"{LIMIT}m"
        env["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = str(self.folder / "usage.cache")
        env["LD_LIBRARY_PATH"] = str(self.options.sim)
        env["SIMGPU_STATE"] = str(self.card)
        if self.preload[arm]:
            env["LD_PRELOAD"] = self.preload[arm]
        return env

    def run(self, arm: str, *arguments: str) -> str:
        """What the client prints in an arm."""
        done = subprocess.run(
            [self.client, *arguments], env=self.environment(arm), capture_output=True, text=True, timeout=300
        )
        if done.returncode or done.stderr:
            raise BenchError(f"{arm}: the client ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def start_time(self, arm: str, command: list[str], times: int) -> float:
        """Nanoseconds from the start of a program to its end, the quickest of several."""
        env, spent = self.environment(arm), []
        for _ in range(times):
            began = time.perf_counter_ns()
            pid = os.posix_spawn(command[0], command, env)
            status = os.waitpid(pid, 0)[1]
            spent.append(time.perf_counter_ns() - began)
            if status:
                raise BenchError(f"{arm}: {command[0]} ended with status {status}")
        return min(spent)

    def once(self, arm: str) -> dict[str, float]:
        """One pass over everything in one arm."""
        found = {TRUE: self.start_time(arm, ["/bin/true"], 20)}
        found[CONTEXT] = self.start_time(arm, [str(self.client), "start"], self.options.starts)
        firsts: dict[str, list[float]] = {}
        for _ in range(self.options.starts):
            for line in self.run(arm, "first").splitlines():
                name, _, value = line.rpartition(" ")
                firsts.setdefault(name, []).append(float(value))
        found |= {name: min(values) for name, values in firsts.items()}
        for line in self.run(arm, "calls", str(self.options.seconds), str(OVER)).splitlines():
            name, _, value = line.rpartition(" ")
            if name == "control":
                self.controls[arm].add(value)
            elif line.startswith("failed "):
                self.failed.add(f"{line.removeprefix('failed ')} ({arm})")
            else:
                found[name] = float(value)
        return found

    def round(self) -> None:
        """Every arm twice, forth and back."""
        passes: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for arm in (*ARMS, *reversed(ARMS)):
            passes[arm].append(self.once(arm))
        for arm, (first, second) in passes.items():
            for name in first:
                kept = self.values.setdefault(name, {}).setdefault(arm, [])
                kept.append((first[name] + second[name]) / 2)

    def check(self) -> None:
        """An arm counts only if the quota is in force in the shim's and nowhere else."""
        if self.controls != {"bare": {"0"}, "empty": {"0"}, "shim": {"2"}}:
            raise BenchError(
                f"interception control failed, {OVER} MiB gave {self.controls}: no result counts"
            )


@dataclass
class Row:
    """One line of the table: medians over the rounds, ns a call."""

    name: str
    ns: dict[str, float]
    rounds: dict[str, list[float]]
    added: float | None = None  # by the shim, to the bare arm
    ratio: float | None = None  # of the medians
    ratio_range: tuple[float, float] | None = None  # of the rounds
    allowed: float | None = None
    met: bool | None = None

    def judge(self) -> None:
        """Compares with the bare arm where it has the row, and with the target where there is one."""
        if "bare" in self.ns:
            bare = self.ns["bare"]
            ratios = [shim / one for shim, one in zip(self.rounds["shim"], self.rounds["bare"], strict=True)]
            self.added, self.ratio = self.ns["shim"] - bare, self.ns["shim"] / bare
            self.ratio_range = min(ratios), max(ratios)
            fit = next((t for t in TARGETS if self.name.startswith(t[0])), None)
            if fit:
                self.allowed = max(fit[1], fit[2] * bare)
        else:
            self.allowed = ABSOLUTE.get(self.name)
        if self.allowed is not None:
            self.met = (self.ns["shim"] if self.added is None else self.added) <= self.allowed

    def cells(self) -> list[str]:
        """The row as text."""
        cells = [self.name, *(_ns(self.ns.get(arm)) for arm in ARMS), "-", "-", "-", ""]
        if self.ratio_range:
            low, high = self.ratio_range
            cells[4:7] = [f"{self.added:+,.1f}", f"{self.ratio:.3f}", f"{low:.3f} to {high:.3f}"]
        if self.allowed is not None:
            cells[7] = f"{'ok' if self.met else 'MISSED'} ({_ns(self.allowed)})"
        return cells


def rows(values: dict[str, dict[str, list[float]]]) -> list[Row]:
    """Every call's row, judged."""
    found = []
    for name, rounds in values.items():
        row = Row(name, {arm: statistics.median(each) for arm, each in rounds.items()}, rounds)
        row.judge()
        found.append(row)
    return found


def _ns(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def table(found: list[Row]) -> str:
    """The rows as text."""
    lines = [["ns a call", "bare", "empty", "shim", "added", "ratio", "range over rounds", "allowed"]]
    lines += [row.cells() for row in found]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        padded[0], padded[-1] = line[0].ljust(widths[0]), line[-1]
        text.append("  ".join(padded).rstrip())
    return "\n".join(text)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, with the paths of this checkout as defaults."""
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine(), platform.machine())
    parser = argparse.ArgumentParser(description="ns per driver call: bare, empty preload, libvgpu.so")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=None, help="for each call in each pass")
    lib = os.environ.get("LIBVGPU") or ROOT / "isolator" / "lib" / machine / "libvgpu.so"
    parser.add_argument("--lib", type=Path, default=Path(lib))
    parser.add_argument("--sim", type=Path, default=ROOT / "isolator" / "sim")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results.json")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or 0.02
    options.starts = 10
    for path in (options.lib, options.sim / "libcuda.so.1"):
        if not path.is_file():
            raise BenchError(f"{path} is missing: run 'make build'")
    return options


def main(arguments: list[str]) -> int:
    """Measures, prints, writes; 0 when the control held, whatever the figures."""
    try:
        options = parse(arguments)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            bench = Bench(options, Path(folder))
            try:
                for number in range(options.rounds):
                    if sys.stderr.isatty():
                        print(
                            f"\rround {number + 1} of {options.rounds}\r", end="", file=sys.stderr, flush=True
                        )
                    bench.round()
            finally:
                bench.card.unlink(missing_ok=True)
            bench.check()
    except (BenchError, OSError, subprocess.TimeoutExpired) as error:
        print(f"\nbench: {error}", file=sys.stderr)
        return 1
    found = rows(bench.values)
    print(table(found))
    if bench.failed:
        print("did not work, so not measured:", ", ".join(sorted(bench.failed)))
    report = {
        "gpu": "sim",
        "rounds": options.rounds,
        "cpu": platform.processor() or platform.machine(),
        "kernel": platform.release(),
        "quota_mib": LIMIT,
        "failed": sorted(bench.failed),
        "rows": [asdict(row) for row in found],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
