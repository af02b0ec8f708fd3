"""The quota's figures on a real card, by the benchmark's own code: fit, race, kills, refused starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import quota, quota_many
from bench.gpu.arms import prepare
from bench.gpu.report import Context


@pytest.fixture(scope="module")
def context(tmp_path_factory, driver, libvgpu) -> Context:
    """Where the benchmark works, its clients built."""
    made = Context(libvgpu, Path(driver), tmp_path_factory.mktemp("quota"))
    prepare(made)
    return made


def check(rows) -> None:
    """Every goal is met."""
    found = list(rows)
    assert found
    assert [row.cells() for row in found if row.met is False] == []


def test_a_quota_is_had_to_the_last_block(context):
    """A process gets its quota to within 2 MiB, through pools to within a step, and nothing over it."""
    check(quota.fit(context, (1, 20)))


def test_one_of_eight_wins(context):
    """Of eight processes that ask at once for 0.6 of what their contexts leave, one wins in each round."""
    check(quota_many.race(context, rounds=300))


def test_killed_processes_give_their_quota_back(context):
    """After each of 200 SIGKILLs all quota is back within 100 ms, and nobody waits longer for a refusal."""
    check(quota_many.kills(context, times=200))


def test_other_ways_to_take_memory_are_held(context):
    """Other names, look-ups and rarer kinds are refused past the quota; shared memory is charged once."""
    rows = list(quota.paths(context, ("names", "kinds", "shared")))
    if len(rows) == 1:
        pytest.skip(rows[0].note)
    check(rows)


def test_broken_set_ups_are_never_silent(context):
    """A limit or region that cannot be used is a refused start with one line."""
    check(quota.never_silent(context))
