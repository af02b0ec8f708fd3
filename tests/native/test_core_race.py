"""Many processes on one region: nobody passes the limit, nobody waits long, nothing of the dead stays."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from corelib import rounds

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / "native" / "core"

# Ten thousand barriers of eight processes take minutes on a busy machine.
pytestmark = pytest.mark.timeout(320)

Race = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled driver, race.c with the core's sources."""
    program = tmp_path_factory.mktemp("race") / "race"
    sources = [HERE / "race.c", *sorted(CORE.glob("*.c"))]
    command = ["gcc", "-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command += ["-D_GNU_SOURCE=", f"-I{CORE}", f"-I{HERE}", "-include", "race_stall.h"]
    subprocess.run([*command, *sources, "-o", program], check=True)
    return program


@pytest.fixture(params=["plain", "shaken", "stalled"])
def race(driver: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Race:
    """Runs a scenario and returns its figures.

    shaken: every process is interrupted and held up all the time (B039); stalled: between announcing and
    looking as well, so that processes really meet there.
    """

    def run(scenario: str, count: int, *more: int) -> dict[str, int]:
        command = [driver, scenario, tmp_path / "region", str(count), *map(str, more)]
        env = {"shaken": {"RACE_SHAKE": "1"}, "stalled": {"RACE_STALL": "1"}}.get(request.param, {})
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        figures = {name: int(value) for name, value in (word.split("=") for word in done.stdout.split())}
        assert figures["failed"] == 0
        # A shaken process stands still for a third of the time.
        figures["bound_ms"] = 200 if request.param == "shaken" else 100
        assert figures["longest_ms"] < figures["bound_ms"]
        return figures

    return run


def test_one_of_eight_passes(race):
    """Each of eight asks for 0.6 of the limit at once: exactly one gets it, in every round (B032)."""
    count = rounds(10_000)
    figures = race("rounds", count, 8, 60, 1)
    assert (figures["good"], figures["bad"]) == (count, 0)


@pytest.mark.parametrize(("processes", "share", "winners"), [(2, 50, 2), (3, 60, 1), (4, 25, 4), (8, 30, 3)])
def test_who_fits_passes(race, processes, share, winners):
    """As many pass at once as fit, never one more and never one less."""
    count = rounds(3000)
    figures = race("rounds", count, processes, share, winners)
    assert (figures["good"], figures["bad"]) == (count, 0)


@pytest.mark.parametrize(("processes", "threads"), [(2, 4), (8, 1), (3, 2)])
def test_random_charges_never_pass_the_limit(race, processes, threads):
    """Threads of several processes charge at random: what they hold together is never over the limit."""
    figures = race("threads", rounds(2000), processes, threads)
    assert figures["good"] > 100
    assert figures["bad"] == 0


def test_quota_of_the_killed_comes_back(race):
    """1,000 SIGKILLs anywhere: all is there again at once, nobody waits (B033, B036, B037, B044)."""
    figures = race("kills", rounds(1000), 2)
    assert figures["left"] == 0
    assert figures["latest_ms"] < figures["bound_ms"]


def test_stopped_lock_holder_holds_nobody_up(race):
    """With the lock in a stopped process settling goes on without it, and exactly one passes."""
    count = rounds(1000)
    figures = race("stopped", count, 0, 4, 60, 1)
    assert (figures["good"], figures["bad"], figures["left"]) == (count, 0, 0)


def test_killed_lock_holder_leaves_no_lock(race):
    """The lock of a killed process is taken over, and it is free in the end (B036)."""
    count = rounds(1000)
    figures = race("stopped", count, 2, 4, 60, 1)
    assert (figures["good"], figures["bad"], figures["left"], figures["lock"]) == (count, 0, 0, 0)


@pytest.mark.parametrize(("share", "winners"), [(60, 0), (30, 1)])
def test_stopped_announcer_counts_as_granted(race, share, winners):
    """Half the limit announced by a stopped process: the other half is given out, after a short wait."""
    count = rounds(300)
    figures = race("stopped", count, 1, 4, share, winners)
    assert (figures["good"], figures["bad"], figures["left"]) == (count, 0, 0)


def test_one_of_many_creators_makes_the_file(race):
    """Processes that start together share one file, made once, each in a slot of its own (B176)."""
    count = rounds(100)
    figures = race("creators", count, 8)
    assert (figures["good"], figures["bad"], figures["creators"]) == (count, 0, count)


def test_killed_creator_leaves_a_usable_file(race):
    """Wherever the creator of a region is killed, the next process gets a region (B037)."""
    count = rounds(300)
    figures = race("creator-killed", count)
    assert (figures["good"], figures["bad"]) == (count, 0)


def test_tampering_lifts_no_own_limit(race):
    """Random words written all over the region: no crash, no own limit passed, and sums heal (B149)."""
    figures = race("tamper", rounds(1500), 4)
    assert figures["bad"] == 0
