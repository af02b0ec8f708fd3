"""What the library adds to an allocation by live processes in one container and by containers on one card.

The simulated card, whose calls take next to nothing. Processor time, because more processes than processors
are alive; those that are not measured are asleep in a read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import bench
from bench.scaling.curves import Curve

NUMBERS = (1, 8, 32, 64)
CALL = "pair_2m"


class Client:
    """One live client of the card, told over a pipe what to measure."""

    def __init__(self, made: bench.Bench, arm: str, region: Path) -> None:
        environment = made.environment(arm) | {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region)}
        environment["CUDA_DEVICE_MEMORY_LIMIT"] = "12g"
        self.process = subprocess.Popen(
            [made.client, "serve"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> list[float]:
        """The figures that it answers."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if not answer:
            raise bench.BenchError(f"a client cannot do {line!r}")
        return [float(word) for word in answer]

    def end(self) -> None:
        """Lets it end."""
        self.process.communicate("", timeout=60)


@contextmanager
def _clients(made: bench.Bench, arm: str, regions: list[Path]) -> Iterator[list[Client]]:
    clients: list[Client] = []
    try:
        for region in regions:
            clients.append(Client(made, arm, region))
            clients[-1].ask("batch nothing 1")  # it has its context
        yield clients
    finally:
        for client in clients:
            client.end()
        made.card.unlink(missing_ok=True)


def _ns(made: bench.Bench, arm: str, regions: list[Path], batch: int, rounds: int) -> float:
    """Processor ns of one allocation and its free in the first client while all live: the quickest batch."""
    with _clients(made, arm, regions) as clients:
        first = clients[0]
        first.ask(f"batch {CALL} {batch}")
        return min(first.ask(f"batch {CALL} {batch}")[1] for _ in range(rounds))


def by_tenants(rounds: int, batch: int = 2000, numbers: tuple[int, ...] = NUMBERS) -> list[Curve]:
    """Two curves: processes of one container, containers of one card."""
    curves = [
        Curve(
            "library, processes",
            "2 MiB allocated and freed, live processes in one container",
            "processes",
            "added ns",
        ),
        Curve("library, containers", "the same, one live process each", "containers", "added ns"),
    ]
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        options = bench.parse([])
        assert isinstance(options, argparse.Namespace) and os.access(options.lib, os.R_OK)
        made = bench.Bench(options, Path(place))
        for curve, shared in zip(curves, (True, False), strict=True):
            for number in numbers:
                found: dict[str, list[float]] = {"bare": [], "shim": []}
                for turn in range(4):
                    for arm in ("bare", "shim") if turn % 2 else ("shim", "bare"):
                        regions = [
                            Path(place) / f"{curve.axis}-{number}-{turn}-{0 if shared else i}.cache"
                            for i in range(number)
                        ]
                        found[arm].append(_ns(made, arm, regions, batch, rounds))
                bare, shim = (min(found[arm]) for arm in ("bare", "shim"))
                curve.add(
                    **{curve.axis: number, "bare_ns": bare, "library_ns": shim, "added_ns": shim - bare}
                )
    return curves
