"""Live arms: one client bare, with an empty preload and with libvgpu.so, told what to run in turn."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .report import ARMS, BenchError, Context, Values

BENCH = Path(__file__).resolve().parent.parent


def compiler() -> str:
    """A C compiler of this machine."""
    found = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if not found:
        raise BenchError("no C compiler found (CC names one)")
    return found


def build(source: Path, target: Path, *flags: str) -> Path:
    """Compiles one C file."""
    command = [compiler(), "-O2", "-o", str(target), str(source), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{source.name}: {done.stderr.strip()[-400:]}")
    return target


def prepare(context: Context) -> Path:
    """Builds the client and the empty library; the client's path."""
    nothing = context.folder / "empty.c"
    nothing.write_text("typedef int nothing;\n")
    context.empty = build(nothing, context.folder / "empty.so", "-shared", "-fPIC")
    return build(BENCH / "bench_client.c", context.folder / "bench_client", "-ldl", "-lpthread")


class Arm:
    """One live client, told over a pipe what to do next."""

    def __init__(self, command: Sequence[str], env: dict[str, str], cores: set[int]) -> None:
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    def ask(self, line: str) -> list[float]:
        """The figures the client answers; empty where it cannot do what was asked."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise BenchError(f"the client ended at {line!r}")
        return [float(word) for word in answer.split()]

    def end(self) -> None:
        """Lets it end."""
        try:
            self.process.communicate("", timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def live(
    command: Sequence[str], environments: dict[str, dict[str, str]], cores: set[int] | None = None
) -> Iterator[dict[str, Arm]]:
    """An arm for each environment, on the same cores."""
    cores = cores or {max(os.sched_getaffinity(0))}
    arms: dict[str, Arm] = {}
    try:
        for name, env in environments.items():
            arms[name] = Arm(command, env, cores)
        yield arms
    finally:
        for arm in arms.values():
            arm.end()


def interleave(arms: dict[str, Arm], line: str, rounds: int) -> list[Values]:
    """Each figure of the arms' answers, forth and back in each round: the mean of the two.

    Empty where an arm cannot do what it is told.
    """
    found: list[Values] = []
    for _ in range(rounds):
        seen: dict[str, list[list[float]]] = {name: [] for name in arms}
        for name in (*arms, *reversed(arms)):
            answer = arms[name].ask(line)
            if not answer:
                return []
            seen[name].append(answer)
        for name, (forth, back) in seen.items():
            for i, pair in enumerate(zip(forth, back, strict=True)):
                if i == len(found):
                    found.append({arm: [] for arm in arms})
                found[i][name].append(sum(pair) / 2)
    return found


def batch_size(arm: Arm, name: str, seconds: float) -> int:
    """Calls that take about so long in one batch; 0 where the arm cannot make them."""
    count, answer = 1, arm.ask(f"batch {name} 1")
    while answer and answer[0] * count < seconds * 5e8 and count < 1_000_000:
        count *= 2
        answer = arm.ask(f"batch {name} {count}")
    return count if answer else 0


def environments(context: Context, limit: str) -> dict[str, dict[str, str]]:
    """Those of the three arms, with one region file."""
    return {arm: context.environment(arm, limit, f"bench-{limit}.cache") for arm in ARMS}
