"""The quota with many processes: races, kills, crowds (Q4 to Q7)."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

from .arms import Arm, batch_size, build
from .report import BenchError, Context, Row

LIMIT_GIB = 16
LARGE = "40g"


def client(context: Context) -> Path:
    """The built client."""
    target = context.folder / "quota_client"
    if not target.exists():
        build(Path(__file__).with_name("quota_client.c"), target, "-ldl", "-lpthread")
    return target


def race(context: Context, processes: int = 8, rounds: int | None = None) -> Iterator[Row]:
    """Q4: of processes that ask at once for 0.6 of what is left, exactly one wins."""
    rounds = rounds or (50 if context.quick else 500)
    command = [str(client(context)), "race", str(processes), str(rounds)]
    env = context.environment("shim", f"{LIMIT_GIB}g", "race.cache")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    words = done.stdout.split()
    if done.returncode or len(words) != 6:
        raise BenchError(f"race: {done.stdout}{done.stderr}")
    row = Row("Q4", f"race of {processes}: rounds with one winner", f"of {rounds}", "all")
    row.shim, row.met = float(words[1]), int(words[1]) == rounds
    row.note = f"none: {words[3]}, several: {words[5]}"
    yield row


class Peer(Arm):
    """A client that says when it is ready."""

    def __init__(self, context: Context, env: dict[str, str], *arguments: str) -> None:
        super().__init__([str(client(context)), *arguments], env, os.sched_getaffinity(0))

    def ready(self) -> None:
        """Waits until it is."""
        assert self.process.stdout
        if self.process.stdout.readline() != "ready\n":
            raise BenchError("a client did not start")


def kills(context: Context, times: int | None = None, at_once: int = 8) -> Iterator[Row]:
    """Q5: after SIGKILL at a random moment another process gets the dead one's quota back."""
    times = times or (16 if context.quick else 200)
    env, chance = context.environment("shim", f"{LIMIT_GIB}g", "kills.cache"), Random(1)
    back, lost = [], 0
    bystander = Peer(context, env, "bystander")
    bystander.ready()
    # All but the bystander's own context, which no table makes larger than 1 GiB.
    everything = (LIMIT_GIB - 1) << 10
    for turn in range(0, times, at_once):
        victims = [Peer(context, env, "churn", str(turn + i)) for i in range(at_once)]
        for victim in victims:
            victim.ready()
        for victim in victims:
            time.sleep(chance.uniform(0, 0.01))
            victim.process.kill()
        for victim in victims:
            victim.process.wait()
            victim.process.communicate()
        answer = bystander.ask(str(everything))[0]
        lost += answer < 0
        back.append(answer / 1e6)
    longest = float(bystander.process.communicate("", timeout=60)[0]) / 1e6
    row = Row("Q5", f"{times} SIGKILLs: longest until all quota is back", "ms", "<= 100 ms")
    row.shim, row.met = max(back), not lost and max(back) <= 100
    row.note = f"median {statistics.median(back):.2f}, never back: {lost}"
    yield row
    row = Row("Q5", "longest refusal in another process meanwhile", "ms", "<= 100 ms", shim=longest)
    row.met = longest <= 100
    yield row


def crowd(context: Context, sizes: tuple[int, ...] = (1, 8, 32, 64, 256)) -> Iterator[Row]:
    """Q6: an allocation beside others that hold slots of the same region, all groups alive at once."""
    rounds, bench = 10 if context.quick else 40, context.folder / "bench_client"
    values: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        measured = {}
        for size in sizes:
            env = context.environment("shim", LARGE, f"crowd-{size}.cache")
            others = [Peer(context, env, "slot") for _ in range(size - 1)]
            for other in others:
                stack.callback(other.end)
            for other in others:
                other.ready()
            measured[size] = Arm([str(bench), "serve"], env, {max(os.sched_getaffinity(0))})
            stack.callback(measured[size].end)
        counts = {key: batch_size(measured[1], key, 0.002) for key in ("pair_1k", "pair_2m")}
        for key, count in counts.items():
            for _ in range(rounds):
                for size in (*sizes, *reversed(sizes)):
                    values.setdefault((key, size), []).extend(measured[size].ask(f"batch {key} {count}"))
        tails = {size: sorted(measured[size].ask("sample pair_1k 2000")) for size in sizes}
    for key, name in (("pair_1k", "1 KiB in a block with others"), ("pair_2m", "2 MiB")):
        medians = {size: statistics.median(values[key, size]) for size in sizes}
        row = Row("Q6", f"cuMemAlloc + cuMemFree, {name}, 64 processes to 1", "ratio", "<= 1.10")
        row.shim = medians[64] / medians[1] if 64 in medians else None
        row.met = row.shim is None or row.shim <= 1.10
        row.note = ", ".join(f"{size}: {value:,.0f} ns" for size, value in medians.items())
        yield row
    row = Row("Q6", "99th percentile of the 1 KiB pair", "ns", "", shim=tails[sizes[-1]][-20])
    row.note = ", ".join(f"{size}: {values_[-20]:,.0f} ns" for size, values_ in tails.items())
    yield row


def together(context: Context, sizes: tuple[int, ...] = (64, 256)) -> Iterator[Row]:
    """Q7: the library's own start in processes that are let go at one moment."""
    goals = {64: (0.5, 5.0), 256: (None, 20.0)}
    for size in sizes:
        walls, cpus = [], []
        for arm in ("bare", "shim"):
            env = context.environment(arm, LARGE, f"together-{size}.cache")
            gate, release = os.pipe()
            command = [str(client(context)), "together"]
            pipe = subprocess.PIPE
            waiting = [
                subprocess.Popen(command, env=env, stdin=gate, stdout=pipe, text=True) for _ in range(size)
            ]
            os.close(gate)
            time.sleep(1)
            os.close(release)
            answers = [one.communicate(timeout=120)[0].split() for one in waiting]
            walls.append(sorted(float(answer[0]) / 1e6 for answer in answers))
            cpus.append(statistics.median(float(answer[1]) / 1e6 for answer in answers))
        bare, shim = walls
        median, longest = statistics.median(shim), shim[-1]
        allowed, most = goals.get(size, (None, 20.0))
        goal = f"<= {allowed} ms" if allowed else ""
        row = Row("Q7", f"{size} processes at once: the library's own start, median", "ms", goal)
        row.bare, row.shim = statistics.median(bare), median
        row.met = median <= allowed if allowed else None
        row.note = f"processor time: {cpus[1]:.3f} ms, bare {cpus[0]:.3f}; {os.cpu_count()} cores"
        yield row
        row = Row(
            "Q7", f"{size} processes at once, longest", "ms", f"<= {most:g} ms", bare[-1], None, longest
        )
        row.met = longest <= most
        yield row
