"""What the library leaves as it was in a process that uses the GPU: descriptors, signals, names, output."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from loaderbuild import GLIBC, client, with_globals

SimEnv = Callable[..., dict[str, str]]

STATE = ["fds", "threads", "umask", "signals"]


def _run(env: dict[str, str], *verbs: str, program: Path | None = None) -> tuple[list[str], str, int]:
    """Lines, standard error and status of the client."""
    command = [str(program or client("loader_client")), *verbs]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    return done.stdout.splitlines(), done.stderr, done.returncode


class Waiting:
    """A client that has done its verbs and waits; leaving the block lets it do those of `after` and end."""

    def __init__(
        self,
        env: dict[str, str],
        *verbs: str,
        program: Path | None = None,
        after: Sequence[str] = (),
        **options: object,
    ) -> None:
        self.process = subprocess.Popen(
            [str(program or client("loader_client")), *verbs, "wait", *after],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        self.lines: list[str] = []
        self.rest: list[str] = []
        for line in self.process.stdout or ():
            if line == "waiting\n":
                break
            self.lines.append(line.strip())

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *error: object) -> None:
        self.rest = self.process.communicate("\n", timeout=30)[0].splitlines()


def test_nothing_of_the_process_changes(sim_env: SimEnv) -> None:
    """Descriptors, threads, umask and signal handlers are those of a bare process, before and after the first
    CUDA calls; the region's file is closed again (W-B19, W-B20, W-B24)."""
    verbs = [*STATE, "init", "context", "alloc:64", *STATE, "free", *STATE]
    bare, loaded = _run(sim_env(), *verbs), _run(sim_env(preload=True, limit="4147m"), *verbs)
    assert bare[0][4:7] == ["init 0", "context 0", "alloc 64 0"]
    assert loaded == bare
    assert loaded[1] == ""


def test_the_programs_handlers_stay(sim_env: SimEnv) -> None:
    """SIGUSR1 and SIGUSR2 handlers of the program are kept and run (W-B20)."""
    done = _run(sim_env(preload=True, limit="4147m"), "handle", "init", "context", "alloc:10", "raise")
    assert done == (["init 0", "context 0", "alloc 10 0", "caught 2"], "", 0)


def test_closing_every_descriptor_changes_nothing(sim_env: SimEnv) -> None:
    """A daemon that closes all descriptors stays limited and keeps its place in the ledger (D22)."""
    env = sim_env(preload=True, limit="4147m")
    with Waiting(env, "init", "context", "alloc:3072", "closeall", "alloc:2048", "free", "alloc:3000") as one:
        assert one.lines == ["init 0", "context 0", "alloc 3072 0", "alloc 2048 2", "free 0", "alloc 3000 0"]
        assert _run(env, "init", "context", "alloc:2048")[0] == ["init 0", "context 0", "alloc 2048 2"]
    assert _run(env, "init", "context", "alloc:2048")[0] == ["init 0", "context 0", "alloc 2048 0"]


def test_forks_inherit_neither_descriptor_nor_region(sim_env: SimEnv) -> None:
    """Three generations of forks carry no descriptor and no mapping of the region (W-B24)."""
    verbs = ["init", "context", *["fds", "fork"] * 3, "fds"]
    bare, loaded = _run(sim_env(), *verbs), _run(sim_env(preload=True, limit="4147m"), *verbs)
    assert loaded == bare
    mapped = _run(
        sim_env(preload=True, limit="4147m"), "init", "context", "regions", *["fork", "regions"] * 3
    )
    assert mapped[0][0:2] == ["init 0", "context 0"]
    assert int(mapped[0][2].split()[1]) >= 1
    assert mapped[0][3:] == ["regions 0"] * 3


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
@pytest.mark.parametrize("where", ["program", "library"])
def test_names_of_the_program_are_its_own(where: str, sim_env: SimEnv, libvgpu: Path) -> None:
    """A program or library of it whose globals are named like our internals keeps their values, and we keep
    ours (W-B21)."""
    objects = sorted((Path(__file__).resolve().parents[2] / "build/native/lib_x86_64_libvgpu.so").glob("*.o"))
    listed = subprocess.run(["nm", *objects], capture_output=True, text=True).stdout
    internal = set(re.findall(r"^\w+ [TDBRC] (\w+)$", listed, re.MULTILINE))
    names = {name for name in internal if not re.match(r"cu[A-Z]|nvml[A-Z]|dlsym$", name)}
    names |= {"context_size", "region_info", "real", "limit"}
    if len(names) < 10:
        pytest.skip("no objects of the build to take the names from")
    program = with_globals("loader_client", GLIBC["x86_64"], sorted(names), where)
    verbs = ["globals", "init", "context", "alloc:3072", "alloc:2048", "free", "globals"]
    assert _run(sim_env(preload=True, limit="4147m"), *verbs, program=program) == (
        ["globals 0", "init 0", "context 0", "alloc 3072 0", "alloc 2048 2", "free 0", "globals 0"],
        "",
        0,
    )


def test_output_is_silent_by_default(sim_env: SimEnv) -> None:
    """Allocations, refusals and reports print nothing of ours (B188)."""
    verbs = ["init", "context", "total", *["alloc:64"] * 30, *["alloc:5000"] * 30, *["free"] * 30]
    out, err, status = _run(sim_env(preload=True, limit="4147m"), *verbs)
    assert (len(out), err, status) == (len(verbs), "", 0)
    assert {line for line in out if line.startswith("alloc 5000")} == {"alloc 5000 2"}


def test_a_refused_start_says_why_in_one_line(sim_env: SimEnv) -> None:
    """A start that must be refused names its cause once on stderr, and nothing at level 0 (B188)."""
    env = sim_env(preload=True, limit="abc", ISOLATOR_ENFORCE="required")
    out, err, status = _run(env, "init", "init", "context")
    assert (out[:2], status) == (["init 800", "init 800"], 0)
    assert len(err.splitlines()) == 1
    assert re.search(r"CUDA_DEVICE_MEMORY_LIMIT=abc", err)
    silent = _run(env | {"LIBCUDA_LOG_LEVEL": "0"}, "init", "init", "context")
    assert silent == (out, "", status)


def _slowest_of_64(env: dict[str, str]) -> float:
    """Seconds to a context in the slowest of 64 processes that are released at once."""
    gate, release = os.pipe()
    command = [str(client("loader_client")), "wait", "lap", "init", "context", "lap", "sleep:300"]
    started = [
        subprocess.Popen(command, env=env, stdin=gate, stdout=subprocess.PIPE, text=True) for _ in range(64)
    ]
    for process in started:
        assert process.stdout and process.stdout.readline() == "waiting\n"
    os.close(release)
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in started]
    os.close(gate)
    assert {tuple(lines[1:3]) for lines in outputs} == {("init 0", "context 0")}
    return max(int(lines[3].split()[1]) for lines in outputs) / 1e6


def test_64_processes_start_together(sim_env: SimEnv) -> None:
    """None of 64 processes released at once waits a second for its first context (B176)."""
    bare = _slowest_of_64(sim_env(SIMGPU_MODEL="H200"))
    assert _slowest_of_64(sim_env(preload=True, limit="60g", SIMGPU_MODEL="H200")) < 1 + 2 * bare
