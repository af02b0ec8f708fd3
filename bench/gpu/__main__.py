#!/usr/bin/env python3
"""What the library costs and holds on a real GPU: every O and Q figure, beside a bare program.

    python3 -m bench.gpu                         everything, into docs/
    python3 -m bench.gpu --only O4,Q1 --quick    some of it, for a look

The arms (bare, an empty preload, libvgpu.so) are live processes told in turn to run one small batch,
forth and back, because a machine's speed drifts; a row gives the medians, their ratio and its 95 %
bootstrap interval. A goal counts as reached or missed where the whole interval is, else as not resolved.
Needs the built library, Python and a C compiler; torch for whole programs, matplotlib for the plot. Exit
status 1 where a goal is missed or not resolved, 2 where the figures do not count.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import calls, programs, quota
from .arms import prepare
from .report import BenchError, Context, Row, driver_folder, plot, table, write

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS: dict[str, tuple[Callable[[Context, Path], Iterator[Row]], ...]] = {
    "O2": (calls.launches_with_share,),
    "O5": (calls.starts, calls.first_of_container),
    "O6": (calls.threads,),
    "O8": (calls.footprint,),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine(), platform.machine())
    parser = argparse.ArgumentParser(prog="bench.gpu", description="O and Q figures on a real GPU")
    lib = os.environ.get("LIBVGPU") or ROOT / "isolator" / "lib" / machine / "libvgpu.so"
    parser.add_argument("--lib", type=Path, default=Path(lib))
    parser.add_argument("--driver", type=Path, help="folder of libcuda.so.1")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs", help="where gpu.json, gpu.md and the plot go"
    )
    parser.add_argument("--only", default="", help="ids, separated by commas")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="for each call (150); what else is repeated follows in proportion",
    )
    options = parser.parse_args(arguments)
    found = options.driver or driver_folder()
    if not options.lib.is_file():
        raise BenchError(f"{options.lib} is missing: run 'make build'")
    if found is None or not (found / "libcuda.so.1").exists():
        raise BenchError("no libcuda.so.1 found: --driver names its folder")
    options.driver = found.resolve()
    options.lib = options.lib.resolve()
    options.only = {word.strip() for word in options.only.split(",") if word.strip()}
    return options


def about(options: argparse.Namespace) -> dict[str, str]:
    """What was measured, where and when."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]

    def said(command: list[str]) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except OSError:
            return "unknown"
        return (
            done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"
        )

    return {
        "date": time.strftime("%Y-%m-%d"),
        "GPU and driver": said(query),
        "commit": said(commit),
        "library": "sha256 " + hashlib.sha256(options.lib.read_bytes()).hexdigest()[:16],
        "kernel": platform.release(),
        "rows": ",".join(sorted(options.only)) or "all",
        "rounds": str(options.rounds or ("few" if options.quick else "all")),
        "state": "not complete, does not count",
    }


def measure(context: Context, only: set[str]) -> Iterator[Row]:
    """The rows that were asked for, in order of their ids."""
    client = prepare(context)
    yield from calls.calls(context, client, only)
    for row_id, parts in PARTS.items():
        for part in parts if not only or row_id in only else ():
            yield from (row for row in part(context, client) if not only or row.id in only)
    if not only or "O7" in only:
        yield from programs.rows(context)
    yield from quota.rows(context, only)


def main(arguments: list[str]) -> int:
    """Measures, prints, writes."""
    found: list[Row] = []
    try:
        options = parse(arguments)
        said = about(options)
        with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
            context = Context(options.lib, options.driver, Path(folder), options.quick, rounds=options.rounds)
            for row in measure(context, options.only):
                found.append(row)
                write(found, said, options.out)
                print(" | ".join(cell for cell in row.cells() if cell), flush=True)
            if not options.only or "O4" in options.only:
                samples = calls.latencies(context, context.folder / "bench_client")
                missing = plot(samples, options.out / "gpu-latency.svg")
                print(missing or f"plot: {options.out / 'gpu-latency.svg'}")
    except (BenchError, OSError, subprocess.TimeoutExpired) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    found.sort(key=lambda row: row.id or "Z")
    write(found, said | {"state": "complete"}, options.out)
    print(table(found))
    missed = [row.name for row in found if row.met is False]
    unresolved = [row.name for row in found if row.unresolved]
    for what, names in (("missed", missed), ("not resolved", unresolved)):
        if names:
            print(f"bench: {what}: {'; '.join(names)}", file=sys.stderr)
    return 1 if missed or unresolved else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
